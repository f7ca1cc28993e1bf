# SPDX-License-Identifier: Apache-2.0
"""Times of use: what stands in an entry's mtime, and in which order eviction takes entries.

Two scales. A used entry has a real time. One that was published for later (hydration) and never
pinned has the time of its publishing in microseconds where nanoseconds are meant: below every
real time, so such entries go first, oldest first. Its first pin gives it a real one.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import xxhash

from s3ec.tier.files import Folders, try_lock, unlock

# Real times below this (April 1970) do not occur; microseconds since the epoch reach it in 2255.
UNUSED_BELOW_NS = 1 << 53
# Times of use past this (the year 2116) are somebody's mistake; they are not continued.
LATEST_NS = 1 << 62


def is_unused(mtime_ns: int) -> bool:
    """Whether an entry with this mtime was published for later and never pinned."""
    return mtime_ns < UNUSED_BELOW_NS


class UseClock:
    """Thread-safe; its lock is never held across a system call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start.

        Args:
            clock: Seconds since the epoch; may jump, either way.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._last_ns = UNUSED_BELOW_NS
        self._last_unused_ns = 0

    def now_s(self) -> float:
        """The clock, as it is."""
        return self._clock()

    def use_ns(self, after_ns: int = 0) -> int:
        """Now, as a time of use: later than every one given before and than ``after_ns``.

        So the order of use survives a clock that jumps back: it then counts on by
        nanoseconds until the clock has caught up.
        """
        now_ns = int(self._clock() * 1e9)
        with self._lock:
            floor = max(self._last_ns, after_ns if after_ns < LATEST_NS else 0)
            self._last_ns = max(now_ns, floor + 1)
            return self._last_ns

    def unused_ns(self) -> int:
        """The mtime of an entry that nobody has asked for yet; in the order of publishing."""
        now_us = int(self._clock() * 1e6)
        with self._lock:
            later = max(now_us, self._last_unused_ns + 1)
            self._last_unused_ns = min(later, UNUSED_BELOW_NS - 1)
            return self._last_unused_ns

    def newest(self) -> tuple[int, int]:
        """The last time given on each scale: used, unused."""
        with self._lock:
            return self._last_ns, self._last_unused_ns

    def learn(self, used_ns: int, unused_ns: int) -> None:
        """Give only later times than these from now on; other processes have given them."""
        with self._lock:
            if used_ns < LATEST_NS:
                self._last_ns = max(self._last_ns, used_ns)
            if unused_ns < UNUSED_BELOW_NS:
                self._last_unused_ns = max(self._last_unused_ns, unused_ns)


_MAGIC = b"s3ecuse\x01"
_BODY = struct.Struct("<8s16sQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_NBYTES = _BODY.size + _CHECKSUM.size
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# The lock is held for two system calls. Whoever holds it longer was stopped in between.
_LOCK_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Figures:
    """What the file says.

    Attributes:
        epoch: Random; another one means that the file was begun anew. 0: there is none.
        counted: Whether a walk stands behind the total. Else it is only what was added since
            the epoch began, and more may be there.
        total_bytes: What the byte budget is about. Never below the truth but for crashes.
        added_bytes: All that was ever added in this epoch.
        newest_ns: Latest time of use, as far as told.
        newest_unused_ns: The same on the scale of unused entries.
        boot_id: Of the kernel that the epoch began under.
    """

    epoch: int = 0
    counted: bool = False
    total_bytes: int = 0
    added_bytes: int = 0
    newest_ns: int = 0
    newest_unused_ns: int = 0
    boot_id: bytes = bytes(16)

    @property
    def newest(self) -> tuple[int, int]:
        """Both of the latest times, as ``UseClock.learn`` takes them."""
        return self.newest_ns, self.newest_unused_ns

    def pack(self) -> bytes:
        """The file's content."""
        body = _BODY.pack(
            _MAGIC,
            self.boot_id,
            self.epoch,
            self.counted,
            self.total_bytes,
            self.added_bytes,
            self.newest_ns,
            self.newest_unused_ns,
        )
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, blob: bytes) -> Figures | None:
        """The inverse; None where it is torn or of another version."""
        body = blob[: _BODY.size]
        if len(blob) != _NBYTES or blob[_BODY.size :] != _CHECKSUM.pack(
            xxhash.xxh3_64_intdigest(body)
        ):
            return None
        magic, boot_id, epoch, counted, total, added, used_ns, unused_ns = _BODY.unpack(body)
        if magic != _MAGIC or not epoch:
            return None
        return cls(epoch, bool(counted), total, added, used_ns, unused_ns, boot_id)


_NOTHING = Figures()


@cache
def _boot_id() -> bytes:
    """16 bytes that change when the machine starts; zeros where the kernel does not tell."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", "")).ljust(16, b"\0")[:16]
    except (OSError, ValueError):
        return bytes(16)


class RunningTotal:
    """Reads and changes the file under its lock: about six system calls each, no sync.

    The file is opened each time, so nothing of it survives in a forked child, and one that was
    deleted is not written to for long. All methods raise OSError where the file system refuses
    or where another process was stopped while it held the lock.
    """

    def __init__(self, folders: Folders) -> None:
        self._path = str(folders.usage)
        self._folders = folders

    def open(self, *, fresh: bool) -> Figures:
        """What is said now, unless that is in doubt.

        Args:
            fresh: The folder was just made and holds nothing.
        """
        found = self.read()
        if not found.epoch and fresh:
            return self._update(lambda figures: figures if figures.epoch else _anew(counted=True))
        if found.epoch and found.boot_id != _boot_id():
            return self._update(_doubted)
        return found

    def read(self) -> Figures:
        """What is said now; without an epoch where the file is absent or bad."""
        try:
            fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return _NOTHING
        with _locked(fd):
            return Figures.parse(os.pread(fd, _NBYTES + 1, 0)) or _NOTHING

    def add(self, nbytes: int, *, newest: tuple[int, int] = (0, 0)) -> Figures:
        """Note what was published.

        Args:
            newest: ``UseClock.newest`` of whoever published.

        Returns:
            What is said from now on.
        """

        def change(figures: Figures) -> Figures:
            base = figures if figures.epoch else _anew(counted=False)
            return Figures(
                base.epoch,
                base.counted,
                base.total_bytes + nbytes,
                base.added_bytes + nbytes,
                max(base.newest_ns, newest[0]),
                max(base.newest_unused_ns, newest[1]),
                base.boot_id,
            )

        return self._update(change)

    def recount(
        self, mark: Figures, total_bytes: int, *, newest: tuple[int, int] = (0, 0)
    ) -> Figures:
        """Take over what a walk found.

        What any process published during the walk may be counted twice until the next one, but
        never not at all.

        Args:
            mark: What ``read`` said before the walk.
            total_bytes: What the walk found, less what was removed after it.
            newest: The latest times of use that it found, used and unused.
        """

        def change(figures: Figures) -> Figures:
            since = figures.added_bytes
            if figures.epoch == mark.epoch:
                since -= mark.added_bytes
            base = figures if figures.epoch else _anew(counted=True)
            return replace(
                base,
                counted=True,
                total_bytes=total_bytes + since,
                newest_ns=max(base.newest_ns, newest[0]),
                newest_unused_ns=max(base.newest_unused_ns, newest[1]),
            )

        return self._update(change)

    def _update(self, change: Callable[[Figures], Figures]) -> Figures:
        fd = self._folders.open_own(self._folders.usage)
        with _locked(fd):
            before = Figures.parse(os.pread(fd, _NBYTES + 1, 0)) or _NOTHING
            after = change(before)
            if after != before:
                if os.pwrite(fd, after.pack(), 0) != _NBYTES:
                    raise OSError(errno.EIO, "the file system wrote a part", self._path)
                if not before.epoch:  # of whatever length
                    os.ftruncate(fd, _NBYTES)
            return after


def _anew(*, counted: bool) -> Figures:
    return Figures(epoch=secrets.randbits(63) | 1, counted=counted, boot_id=_boot_id())


def _doubted(figures: Figures) -> Figures:
    """Begun anew where another boot wrote it, unless somebody was faster."""
    if figures.boot_id == _boot_id():
        return figures
    return replace(
        _anew(counted=False),
        newest_ns=figures.newest_ns,
        newest_unused_ns=figures.newest_unused_ns,
    )


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Hold the file's lock while the block runs, and close ``fd`` after it.

    Polled, since flock has no timeout: a process that is stopped (a debugger, a paused
    container) while it holds the lock must not stop all others with it.
    """
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while not try_lock(fd):
            if time.monotonic() > deadline_s:
                raise OSError(errno.EAGAIN, "the running total is locked by a stopped process")
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            unlock(fd)  # a child forked meanwhile would keep it locked
    finally:
        os.close(fd)

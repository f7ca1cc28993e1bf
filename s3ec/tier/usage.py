# SPDX-License-Identifier: Apache-2.0
"""The running total of a node's folder: one small file that every process adds to.

Layout, little-endian, 32 bytes: magic and version (8), counted (8), total bytes (8), xxh3-64 of
all that (8). It is no truth: a process killed between publishing and adding makes it too low, a
deleted entry makes it too high, and each walk over the folder puts it right. It is not synced to
the device either: after a power cut it may be an old one until the next walk.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from s3ec.tier.files import Folders, try_lock, unlock

_MAGIC = b"s3ecuse\x02"
_BODY = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<Q")
_NBYTES = _BODY.size + _CHECKSUM.size
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# The lock is held for two system calls. Whoever holds it longer was stopped in between.
_LOCK_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Figures:
    """What the file says; as made by default, what an absent or bad one says.

    Attributes:
        counted: Whether a walk stands behind the total. Else it is only what was added since
            the file was begun, and more may be there.
        total_bytes: What the byte budget is about. Never below the truth but for crashes.
    """

    counted: bool = False
    total_bytes: int = 0

    def pack(self) -> bytes:
        """The file's content."""
        body = _BODY.pack(_MAGIC, self.counted, self.total_bytes)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, blob: bytes) -> Figures | None:
        """The inverse; None where it is torn or of another version."""
        body = blob[: _BODY.size]
        if len(blob) != _NBYTES or blob[_BODY.size :] != _CHECKSUM.pack(
            xxhash.xxh3_64_intdigest(body)
        ):
            return None
        magic, counted, total_bytes = _BODY.unpack(body)
        return cls(bool(counted), total_bytes) if magic == _MAGIC else None


class RunningTotal:
    """Reads and changes the file under its lock: about six system calls each, no sync.

    The file is opened each time, so nothing of it survives in a forked child, and one that was
    deleted is not written to for long. All methods raise OSError where the file system refuses
    or where another process was stopped while it held the lock.
    """

    def __init__(self, folders: Folders) -> None:
        self._path = str(folders.usage)
        self._folders = folders

    def begin(self) -> None:
        """The folder was just made and holds nothing: a total of 0 that is known to be right.

        Unless somebody was faster to publish.
        """
        self._update(lambda now: now if now.total_bytes else Figures(counted=True))

    def read(self) -> Figures:
        """What is said now."""
        try:
            fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return Figures()
        with _locked(fd):
            return Figures.parse(os.pread(fd, _NBYTES + 1, 0)) or Figures()

    def add(self, nbytes: int) -> Figures:
        """Note what was published; answers what is said from now on."""
        return self._update(lambda now: Figures(now.counted, now.total_bytes + nbytes))

    def recount(self, before: Figures, counted_bytes: int) -> Figures:
        """Take over what a walk found, and add what the total grew by meanwhile.

        What any process published during the walk may be counted twice until the next one, but
        never not at all.

        Args:
            before: What ``read`` said before the walk.
            counted_bytes: What the walk found, less what was removed after it.
        """

        def change(now: Figures) -> Figures:
            grown_bytes = now.total_bytes - before.total_bytes
            if grown_bytes < 0 or before.counted > now.counted:  # lost, and begun anew since
                grown_bytes = now.total_bytes
            return Figures(True, counted_bytes + grown_bytes)

        return self._update(change)

    def _update(self, change: Callable[[Figures], Figures]) -> Figures:
        fd = self._folders.open_own(self._folders.usage)
        with _locked(fd):
            before = Figures.parse(os.pread(fd, _NBYTES + 1, 0))
            after = change(before or Figures())
            if after != before:
                if os.pwrite(fd, after.pack(), 0) != _NBYTES:
                    raise OSError(errno.EIO, "the file system wrote a part", self._path)
                if before is None:  # of whatever length
                    os.ftruncate(fd, _NBYTES)
            return after


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

# SPDX-License-Identifier: Apache-2.0
"""Keeping the folder below its budget: when to evict, who does it, and how the total is kept.

The running total is one small file that every process of the node adds to. It is no truth: a
process killed between publishing and adding makes it too low, a deleted entry makes it too high,
and each walk over the folder puts it right. It is not synced to the device either: after a power
cut it may be an old one until the next walk.

A little ahead of the limits (the budget, the free-space floor) a thread evicts in the background,
one per node at a time. A publish that would break a limit does a round itself, or waits a second
for the one that is under way. Entries go in the order of their use. Who has one open can go on
reading it.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.runtime import Background
from s3ec.tier.files import (
    DiskErrors,
    Folders,
    free_bytes,
    sweep_temps,
)
from s3ec.tier.scan import ScannedEntry, Sum, TierScan, no_pause, scan_tier

# Sorted apart and merged as far as needed: one sort of all would keep the interpreter.
_CHUNK = 1024
_REMOVALS_PER_PAUSE = 64
# So far may clocks differ.
_SKEW_NS = 300 * 10**9
_BEFORE_ALL_NS = 1 << 65

# Eviction goes on down to this share of the budget, so that it is not needed at every publish.
LOW_WATER = 0.9
# The background evicts when less than this share of the budget is left.
AHEAD = 0.05
# Of the budget: evicted beyond what a short disk asks for, and published at most while nobody
# has counted what lies here.
_SLACK = 1 / 64
# A publish waits so long for whoever is evicting. A disk thread that waits for longer would be
# taken for a disk that hangs, and a walk over a million entries takes half a minute.
TURN_WAIT_S = 1.0
# After a wait in vain (a stopped process, a long walk), or an eviction that gave the disk no room
# (others have open what went, or fill the disk), for so long no publish waits, and nothing is
# evicted for the disk's sake.
TURN_REST_S = 5.0
# A background round that could free nothing is not repeated at once, but after this time at the
# earliest, and after this many times as long as it took.
REST_S = 1.0
_REST_SHARE = 10
_LOCK_POLL_S = 0.01

# And the same with all bits inverted, which no torn or lost write leaves.
_TOTAL = struct.Struct("<QQ")
_ALL_BITS = 2**64 - 1
_TOTAL_POLL_S = 0.0005
# Its lock is held for two system calls. Whoever holds it for longer was stopped in between.
TOTAL_LOCK_TIMEOUT_S = 2.0


class NoRoomError(TierError):
    """Raised for a publish that would break a limit, where nothing may be evicted for it."""


def oldest_first(
    entries: Sequence[ScannedEntry], *, now_s: float, pause: Callable[[], None] = no_pause
) -> Iterator[ScannedEntry]:
    """Entries by time of use; first those whose time is ahead, which would never be the oldest.

    A clock that has been set back since noted them. That may be wrong once: they come back, or are
    read before, with a time that is right.
    """
    latest_ns = int(now_s * 1e9) + _SKEW_NS

    def order(entry: ScannedEntry) -> int:
        used_ns = entry.mtime_ns
        return used_ns if used_ns <= latest_ns else used_ns - _BEFORE_ALL_NS

    chunks = []
    for at in range(0, len(entries), _CHUNK):
        chunks.append(sorted(entries[at : at + _CHUNK], key=order))
        pause()
    return heapq.merge(*chunks, key=order)


def evict(
    entries: Iterable[ScannedEntry],
    goal_bytes: int,
    *,
    objects: Path,
    goal_entries: int = 0,
    remove: bool = True,
    pause: Callable[[], None] = no_pause,
) -> Sum:
    """Remove entries in the order given until ``goal_bytes`` are gone; what went.

    Args:
        entries: Without what is spooled, since removing that frees nothing now.
        goal_entries: And until so many are.
        objects: ``Folders.objects``; folders below it that lost their last entry go too.
        remove: False only counts.
    """
    gone = Sum()
    for entry in entries:
        if gone.nbytes >= goal_bytes and gone.entries >= goal_entries:
            break
        with suppress(OSError):
            found = os.lstat(entry.path)
            if (found.st_mtime_ns, found.st_ino) != (entry.mtime_ns, entry.inode):
                continue  # used, or written anew, since the walk
            if remove:
                os.unlink(entry.path)
                _remove_empty(entry.path, str(objects))
            gone.add(entry.nbytes)
        if gone.entries % _REMOVALS_PER_PAUSE == 0:
            pause()
    return gone


def _remove_empty(path: str, above: str) -> None:
    """Remove folders that lost their last file; publishing makes them again.

    Otherwise those of adapters and models long gone would pile up.
    """
    folder = os.path.dirname(path)
    with suppress(OSError):
        while folder != above:
            os.rmdir(folder)
            folder = os.path.dirname(folder)


class RunningTotal:
    """Reads and changes the file under its lock: about six system calls each, no sync.

    The file is opened each time, so nothing of it survives in a forked child, and one that was
    deleted is not written to for long. All methods raise OSError where the file system refuses
    or where another process was stopped while it held the lock.
    """

    def __init__(self, folders: Folders) -> None:
        """Nothing is touched."""
        self._folders = folders

    def begin(self) -> None:
        """The folder was just made and holds nothing, unless somebody was faster to publish."""
        self._update(lambda now: now or 0)

    def read(self) -> int | None:
        """Bytes that the budget is about; None where nobody has counted, or the file is damaged."""
        with self._locked() as fd:
            return self._read(fd)

    def add(self, nbytes: int, *, unknown_bytes: int) -> int:
        """Note what was published; answers the new total.

        Args:
            unknown_bytes: What to begin with where there is no total.
        """
        return self._update(lambda now: (unknown_bytes if now is None else now) + nbytes)

    def recount(self, before_bytes: int, counted_bytes: int) -> None:
        """Take over what a walk found, and add what the total grew by meanwhile.

        What any process published during the walk may be counted twice until the next one, but
        never not at all.

        Args:
            before_bytes: The total before the walk.
            counted_bytes: What the walk found, less what was removed after it.
        """
        self._update(lambda now: counted_bytes + max(0, (now or before_bytes) - before_bytes))

    def _update(self, change: Callable[[int | None], int]) -> int:
        with self._locked() as fd:
            before = self._read(fd)
            after = change(before)
            if after != before:
                blob = _TOTAL.pack(after, after ^ _ALL_BITS)
                if os.pwrite(fd, blob, 0) != _TOTAL.size:
                    raise OSError(errno.EIO, "the file system wrote a part", self._folders.usage)
                if before is None:  # of whatever length
                    os.ftruncate(fd, _TOTAL.size)
            return after

    @staticmethod
    def _read(fd: int) -> int | None:
        blob = os.pread(fd, _TOTAL.size + 1, 0)
        if len(blob) != _TOTAL.size:
            return None
        total_bytes, inverted = _TOTAL.unpack(blob)
        return int(total_bytes) if total_bytes ^ inverted == _ALL_BITS else None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        with self._folders.locked(
            self._folders.usage, wait_s=TOTAL_LOCK_TIMEOUT_S, poll_s=_TOTAL_POLL_S
        ) as (fd, alone):
            if not alone:
                raise OSError(errno.EAGAIN, "the running total is locked by a stopped process")
            yield fd


@contextmanager
def evict_lock(folders: Folders, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Be the one process of the node that evicts, while the block runs.

    Args:
        wait_s: How long to wait for whoever it is now; a round takes seconds at most.

    Yields:
        False where somebody else still is.

    Raises:
        OSError, TierError: The file system refused.
    """
    path = folders.evict_lock
    with folders.locked(path, wait_s=wait_s, poll_s=_LOCK_POLL_S) as (_, alone):
        yield alone


class Evictor:
    """Decides when there is too much, and removes it. Thread-safe.

    States: new, open (by ``open``), and closed for good (by ``close``). While it is
    not open every publish is refused. Then a publish finds the folder in one of these states:

    * There is room. The publish goes on.
    * A limit is near, or nobody has counted yet. The publish goes on, and a round in the background
      evicts down to LOW_WATER of the budget.
    * A limit would be broken. The publish does a round itself, or waits for the one that is under
      way. If the wait was in vain, or there is still no room on the disk, the publish fails; then
      nothing more is evicted for the disk's sake for a while.

    A round sweeps, walks the folder, evicts, and puts the running total right. The node has one at
    a time, by a lock. After a round in the background that freed nothing, the next one waits.

    Attributes:
        close_evicted: Called after each round that evicted, by whoever did: closes what is evicted
            and open here, since a file is on the disk until it is closed. Blocking.
    """

    def __init__(
        self,
        folders: Folders,
        disk_errors: DiskErrors,
        counters: Counters,
        *,
        clock: Callable[[], float],
        budget_bytes: int,
        min_free_bytes: int,
        evicts: bool = True,
    ) -> None:
        """Nothing is touched, no thread started.

        Args:
            clock: Seconds since the epoch; may jump, either way.
            evicts: False for who must remove nothing. Its publishes fail where the others of the
                node would begin to evict: a little below the limits. It still counts and sweeps.
        """
        self._evicts = evicts
        self._folders = folders
        self._clock = clock
        self._counters = counters
        self._budget_bytes = budget_bytes
        self._min_free_bytes = min_free_bytes
        self._low_bytes = int(budget_bytes * LOW_WATER)
        self._ahead_bytes = int(budget_bytes * AHEAD)
        self._slack_bytes = int(budget_bytes * _SLACK)
        # Believed of a folder that nobody has counted: nearly full, so the background counts soon.
        self._unknown_bytes = budget_bytes - self._slack_bytes
        # Nobody's floor of 0 asks for space to be kept free.
        self._ahead_of_floor_bytes = min(self._ahead_bytes, min_free_bytes) // 4
        self._limit_bytes = budget_bytes - (0 if evicts else self._ahead_bytes)
        self._floor_bytes = min_free_bytes + (0 if evicts else self._ahead_of_floor_bytes)
        self._failed = disk_errors.record
        self._total = RunningTotal(folders)
        self._background = Background("s3ec-evictor", self._work_ahead)
        self._is_open = False
        self.close_evicted: Callable[[], None] = lambda: None
        self._rests_until_s = -math.inf  # monotonic, see TURN_REST_S

    def open(self, *, fresh: bool) -> None:
        """Sweep what dead processes left; no walk over the entries.

        Args:
            fresh: The folder was made just now, so there is nothing to count.

        Raises:
            OSError: The file system refused.
        """
        # Made now, because a full disk, which needs it most, has no room for it.
        os.close(self._folders.open_own(self._folders.evict_lock))
        if fresh:
            self._total.begin()
        sweep_temps(self._folders.incoming)
        self._is_open = True

    def room_bytes(self) -> int:
        """How much may be published before a limit is reached; 0 or less: nothing.

        Walks the folder where nobody has counted yet.

        Raises:
            TierError: Another process counts or evicts, and does not come to an end.
            OSError: The file system refused.
        """
        if self._total.read() is None:
            self.make_room(0, wait=True)
            if self._total.read() is None:
                raise TierError("nobody has counted the folder, and another process evicts in it")
        left_bytes = self._limit_bytes - self.used_bytes()
        return min(left_bytes, self._free_bytes() - self._floor_bytes)

    def close(self) -> None:
        """End the thread; there is no room from now on."""
        self._is_open = False
        self._background.stop()

    def need_room(self, nbytes: int) -> None:
        """Make sure of room before a publish; a few system calls where there is.

        Raises:
            TierError: Not open, or there will be no room. A budget full of spooled entries is
                no reason: they stay on the disk whether they are entries or not. NoRoomError
                where room is only to be had by an eviction, and this one does not evict.
            OSError: The file system refused.
        """
        if not self._is_open:
            raise TierError("the tier is not open")
        if nbytes > self._budget_bytes:
            raise TierError(f"{nbytes} bytes are more than the budget of {self._budget_bytes}")
        if self._has_room(nbytes):
            return
        if not self._evicts:
            raise NoRoomError(
                f"{nbytes} bytes more would make the node's processes evict from "
                f"{self._folders.root}"
            )
        if not (self._rests() and self._short_bytes(nbytes) > 0):
            with self._turn() as alone:
                if not alone:
                    raise TierError("there is no room, and another eviction is still under way")
                # Whoever evicted meanwhile may have made room enough.
                if not self._has_room(nbytes):
                    self._round(nbytes)
        if self._short_bytes(nbytes) > 0:
            raise TierError(
                f"{nbytes} bytes more would leave less than `min_free_bytes` "
                f"({self._min_free_bytes}) free on the disk of {self._folders.root}"
            )

    def note_in_vain(self) -> None:
        """The disk is still full after ``make_room``, or the turn did not come."""
        self._rests_until_s = time.monotonic() + TURN_REST_S

    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def account(self, nbytes: int) -> None:
        """Count what was published; a few system calls. Never raises: the bytes are there."""
        try:
            total_bytes = self._total.add(nbytes, unknown_bytes=self._unknown_bytes)
        except (OSError, TierError) as exc:
            self._failed("count", exc)
            self._background.wake()
            return
        if total_bytes > self._budget_bytes - self._ahead_bytes:
            self._background.wake()

    def make_room(self, incoming_bytes: int, *, full: bool = False, wait: bool = False) -> int:
        """One round: sweep temp files of the dead, count, and evict where it is needed.

        Args:
            incoming_bytes: What is about to be written.
            full: The disk says it is full, whatever the figures say: they show neither quotas nor
                a lack of inodes. Then so much goes as where the budget is used up, unless somebody
                has evicted while this one waited for its turn.
            wait: Whether to wait for a round that is under way, as a publish does.

        Returns:
            Bytes removed; 0 where another round is under way, or the last one was in vain.

        Raises:
            OSError: The file system refused.
        """
        if full and self._rests():
            return 0
        before_bytes = self.used_bytes()
        with self._turn() if wait else evict_lock(self._folders) as alone:
            if not alone:
                return 0
            freed = before_bytes - self.used_bytes()
            return freed if full and freed > 0 else self._round(incoming_bytes, full=full)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """As evict_lock, for a publish: it waits, but not twice for who lets it wait in vain."""
        with evict_lock(self._folders, wait_s=0.0 if self._rests() else TURN_WAIT_S) as alone:
            if not alone and not self._rests():
                self.note_in_vain()
            yield alone

    def _has_room(self, nbytes: int) -> bool:
        """Whether a publish breaks no limit; wakes the background near the floor."""
        total_bytes, free = self.used_bytes(), self._free_bytes()
        if free - nbytes < self._min_free_bytes + self._ahead_of_floor_bytes:
            self._background.wake()
        return total_bytes + nbytes <= self._limit_bytes and free - nbytes >= self._floor_bytes

    def _work_ahead(self, pause: Callable[[], None]) -> float:
        """One round in the background; answers how long to rest after it."""
        started_s = time.monotonic()
        try:
            with evict_lock(self._folders) as alone:
                if not alone:
                    return REST_S
                freed = self._round(0, ahead=True, pause=pause)
        except (OSError, TierError) as exc:
            self._failed("evict", exc)
            freed = 0
        took_s = time.monotonic() - started_s
        return 0.0 if freed else max(REST_S, took_s * _REST_SHARE)

    def _round(
        self,
        incoming_bytes: int,
        *,
        full: bool = False,
        ahead: bool = False,
        pause: Callable[[], None] = no_pause,
    ) -> int:
        """With the lock held; answers the bytes freed."""
        before_bytes = self.used_bytes()
        sweep_temps(self._folders.incoming)
        scan = scan_tier(self._folders, pause)
        goal_bytes = goal_entries = short_bytes = 0
        if self._evicts:
            goal_bytes = self._excess_bytes(scan, incoming_bytes, ahead=ahead)
            short_bytes = 0 if self._rests() else self._short_bytes(incoming_bytes, ahead=ahead)
        if short_bytes > 0:
            # Somebody else fills the disk. A little more than needed, or every publish would walk
            # the folder again.
            goal_bytes = max(goal_bytes, short_bytes + self._slack_bytes)
        if self._evicts and full:
            share = 1 - LOW_WATER  # likewise
            goal_bytes = max(goal_bytes, incoming_bytes, int(scan.entry_bytes * share), 1)
            goal_entries = int(len(scan.entries) * share)
        gone = Sum()
        if goal_bytes > 0:
            # Spooled entries are passed over: it would free nothing now.
            free = [entry for entry in scan.entries if entry.inode not in scan.kept]
            gone = evict(
                oldest_first(free, now_s=self._clock(), pause=pause),
                goal_bytes,
                objects=self._folders.objects,
                goal_entries=goal_entries,
                pause=pause,
            )
        self._total.recount(before_bytes, scan.total_bytes - gone.nbytes)
        if gone.entries:
            self._counters.add("tier.evicted", gone.entries)
            self._counters.add("tier.evicted_bytes", gone.nbytes)
            self.close_evicted()
            if short_bytes > 0 and self._short_bytes(incoming_bytes, ahead=ahead) > 0:
                self.note_in_vain()
        return gone.nbytes

    def used_bytes(self) -> int:
        """What the byte budget is about, as far as all processes of the node have counted.

        Raises:
            OSError: The file system refused.
        """
        total_bytes = self._total.read()
        return self._unknown_bytes if total_bytes is None else total_bytes

    def _free_bytes(self) -> int:
        try:
            return free_bytes(self._folders.version)
        except FileNotFoundError:  # somebody emptied the cache under us
            self._folders.make()
            return free_bytes(self._folders.version)

    def _excess_bytes(self, scan: TierScan, incoming_bytes: int, *, ahead: bool) -> int:
        """How many bytes have to go for the budget; 0 or less: none."""
        limit = self._budget_bytes - (self._ahead_bytes if ahead else 0)
        wanted = scan.total_bytes + incoming_bytes
        return wanted - self._low_bytes if wanted > limit else 0

    def _short_bytes(self, incoming_bytes: int, *, ahead: bool = False) -> int:
        """How many bytes the disk lacks; 0 or less: none."""
        floor = self._min_free_bytes + (self._ahead_of_floor_bytes if ahead else 0)
        return floor + incoming_bytes - self._free_bytes()

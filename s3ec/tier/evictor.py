# SPDX-License-Identifier: Apache-2.0
"""Keeps the folder below its budget: when to evict, which process does it, and the running total.

The running total is one small file that every process of the node adds to. It may be wrong: a
process killed between publishing and adding makes it too low, a deleted entry makes it too high,
and each walk over the folder corrects it. It is not synced to the device either: after a power
cut it may be outdated until the next walk.

A little ahead of the limits (the budget, the free-space floor) a thread evicts in the background,
one per node at a time. A publish that would break a limit runs a pass itself, or waits a second
for the running one. The least recently used entries go first. A process that has one open can
still read it.
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

# Entries are sorted in chunks and merged as needed: one sort of all would hold the GIL for long.
_CHUNK = 1024
_REMOVALS_PER_PAUSE = 64
# Clocks may differ by this much.
_SKEW_NS = 300 * 10**9
_BEFORE_ALL_NS = 1 << 65

# Eviction continues down to this share of the budget, so that it is not needed at every publish.
LOW_WATER = 0.9
# The background evicts when less than this share of the budget is left.
AHEAD = 0.05
# Share of the budget: evicted beyond what a full disk needs, and published at most while the
# folder is not counted.
_SLACK = 1 / 64
# A publish waits at most this long for the process that evicts. A longer wait of a disk thread
# would look like a disk that hangs, and a walk over a million entries takes half a minute.
TURN_WAIT_S = 1.0
# After a wait that timed out (a stopped process, a long walk), or an eviction that gave the disk no
# room (evicted files are still open, or others fill the disk), no publish waits for this long, and
# nothing is evicted for the disk's sake.
TURN_REST_S = 5.0
# A background pass that freed nothing is not repeated before this time, nor before this many times
# its own duration.
REST_S = 1.0
_REST_SHARE = 10
_LOCK_POLL_S = 0.01

# The total, and the same with all bits inverted: no torn or lost write leaves such a pair.
_TOTAL = struct.Struct("<QQ")
_ALL_BITS = 2**64 - 1
_TOTAL_POLL_S = 0.0005
# Its lock is held for two system calls. A process that holds it for longer was stopped meanwhile.
TOTAL_LOCK_TIMEOUT_S = 2.0


class NoRoomError(TierError):
    """A publish would break a limit, and nothing may be evicted for it."""


def oldest_first(
    entries: Sequence[ScannedEntry], *, now_s: float, pause: Callable[[], None] = no_pause
) -> Iterator[ScannedEntry]:
    """Yield entries by time of use; first those with a future time, which would never be oldest.

    Such a time comes from a clock that was set back later. Evicting them may be wrong once: they
    return, or are read before, with a correct time.
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
    """Remove entries in the given order until the goals are reached; return the sum of the removed.

    Args:
        entries: Entries that are not spooled, since removing those frees nothing now.
        goal_bytes: Bytes to remove at least.
        objects: ``Folders.objects``; folders below it that lost their last entry are removed too.
        goal_entries: Entries to remove at least.
        remove: False only counts.
    """
    gone = Sum()
    for entry in entries:
        if gone.nbytes >= goal_bytes and gone.entries >= goal_entries:
            break
        with suppress(OSError):
            found = os.lstat(entry.path)
            if (found.st_mtime_ns, found.st_ino) != (entry.mtime_ns, entry.inode):
                continue  # used, or written again, since the walk
            if remove:
                os.unlink(entry.path)
                _remove_empty(entry.path, str(objects))
            gone.add(entry.nbytes)
        if gone.entries % _REMOVALS_PER_PAUSE == 0:
            pause()
    return gone


def _remove_empty(path: str, above: str) -> None:
    """Remove folders that lost their last file; publishing creates them again.

    Otherwise the folders of old adapters and models would pile up.
    """
    folder = os.path.dirname(path)
    with suppress(OSError):
        while folder != above:
            os.rmdir(folder)
            folder = os.path.dirname(folder)


class RunningTotal:
    """Reads and changes the file under its lock: about six system calls each, no sync.

    The file is opened each time, so a forked child inherits nothing of it, and a deleted file is
    not written to for long. All methods raise OSError if the file system refuses, or if another
    process was stopped while it held the lock.
    """

    def __init__(self, folders: Folders) -> None:
        """Touch nothing yet."""
        self._folders = folders

    def begin(self) -> None:
        """Start at 0 in a new folder, unless another process has published there already."""
        self._update(lambda now: now or 0)

    def read(self) -> int | None:
        """Return the bytes that the budget bounds; None if not counted yet, or damaged."""
        with self._locked() as fd:
            return self._read(fd)

    def add(self, nbytes: int, *, unknown_bytes: int) -> int:
        """Add published bytes; return the new total.

        Args:
            unknown_bytes: Start value if there is no total.
        """
        return self._update(lambda now: (unknown_bytes if now is None else now) + nbytes)

    def recount(self, before_bytes: int, counted_bytes: int) -> None:
        """Take over the count of a walk, and add the growth of the total since it began.

        Bytes that a process published during the walk may be counted twice until the next walk,
        but are never missing.

        Args:
            before_bytes: The total before the walk.
            counted_bytes: Bytes that the walk found, minus those removed after it.
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
                if before is None:  # the file may have any length
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
    """Hold the node's eviction lock while the block runs: one process at a time evicts.

    Args:
        wait_s: How long to wait for the lock's holder; a pass takes seconds at most.

    Yields:
        True with the lock; False if another holder still has it.

    Raises:
        OSError, TierError: The file system refused.
    """
    path = folders.evict_lock
    with folders.locked(path, wait_s=wait_s, poll_s=_LOCK_POLL_S) as (_, alone):
        yield alone


class Evictor:
    """Decides when the folder is too large, and evicts. Thread-safe.

    States: new, open (by ``open``), and closed for good (by ``close``). Every publish is refused
    unless it is open. Then a publish finds the folder in one of these states:

    * There is room. The publish continues.
    * A limit is near, or the folder is not counted yet. The publish continues, and a background
      pass evicts down to LOW_WATER of the budget.
    * A limit would be broken. The publish runs a pass itself, or waits for the running one. If the
      wait times out, or the disk still has no room, the publish fails; then nothing more is
      evicted for the disk's sake for a while.

    A pass sweeps temp files, walks the folder, evicts, and corrects the running total. A lock
    allows one at a time per node. After a background pass that freed nothing, the next one waits.

    Attributes:
        close_evicted: Called after each pass of this process that evicted: closes evicted files
            that are open here, since a file takes disk space until it is closed. Blocking.
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
        """Touch nothing and start no thread yet.

        Args:
            clock: Seconds since the epoch; may jump, either way.
            evicts: False for a process that must not evict. Its publishes fail where the node's
                other processes begin to evict: a little below the limits. It still counts and
                sweeps.
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
        # Assumed for a folder that is not counted: nearly full, so the background counts soon.
        self._unknown_bytes = budget_bytes - self._slack_bytes
        # A floor of 0 keeps no space free.
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
        """Sweep the temp files of dead processes; does not walk the entries.

        Args:
            fresh: True if the folder was just created, so there is nothing to count.

        Raises:
            OSError: The file system refused.
        """
        # Created now, because a full disk, which needs it most, has no room for it.
        os.close(self._folders.open_own(self._folders.evict_lock))
        if fresh:
            self._total.begin()
        sweep_temps(self._folders.incoming)
        self._is_open = True

    def room_bytes(self) -> int:
        """Return the bytes that may be published before a limit is reached; 0 or less: none.

        Walks the folder if it is not counted yet.

        Raises:
            TierError: Another process counts or evicts, and does not end in time.
            OSError: The file system refused.
        """
        if self._total.read() is None:
            self.make_room(0, wait=True)
            if self._total.read() is None:
                raise TierError("nobody has counted the folder, and another process evicts in it")
        left_bytes = self._limit_bytes - self.used_bytes()
        return min(left_bytes, self._free_bytes() - self._floor_bytes)

    def close(self) -> None:
        """End the thread, and refuse every publish from now on."""
        self._is_open = False
        self._background.stop()

    def need_room(self, nbytes: int) -> None:
        """Ensure room before a publish; a few system calls if there is room.

        Raises:
            TierError: Not open, or there is no room. A budget full of spooled entries is no
                reason: they stay on the disk whether they are entries or not. NoRoomError if
                only an eviction can make room, and this process does not evict.
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
                # Another process may have evicted enough meanwhile.
                if not self._has_room(nbytes):
                    self._round(nbytes)
        if self._short_bytes(nbytes) > 0:
            raise TierError(
                f"{nbytes} bytes more would leave less than `min_free_bytes` "
                f"({self._min_free_bytes}) free on the disk of {self._folders.root}"
            )

    def note_in_vain(self) -> None:
        """Rest for TURN_REST_S: the disk is still full after an eviction, or a wait timed out."""
        self._rests_until_s = time.monotonic() + TURN_REST_S

    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def account(self, nbytes: int) -> None:
        """Count published bytes; a few system calls. Never raises: the bytes are on the disk."""
        try:
            total_bytes = self._total.add(nbytes, unknown_bytes=self._unknown_bytes)
        except (OSError, TierError) as exc:
            self._failed("count", exc)
            self._background.wake()
            return
        if total_bytes > self._budget_bytes - self._ahead_bytes:
            self._background.wake()

    def make_room(self, incoming_bytes: int, *, full: bool = False, wait: bool = False) -> int:
        """Run one pass: sweep temp files of dead processes, count, and evict if needed.

        Args:
            incoming_bytes: Bytes that are about to be written.
            full: True if a write failed for lack of space, whatever the numbers say: they show
                neither quotas nor a lack of inodes. Then as much is evicted as for a used-up
                budget, unless another process has evicted while this one waited for the lock.
            wait: True to wait for a running pass, as a publish does.

        Returns:
            Bytes removed; 0 if another pass is running, or if ``full`` and the last one failed.

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
        """Take evict_lock for a publish: wait for it, but not again soon after a timeout."""
        with evict_lock(self._folders, wait_s=0.0 if self._rests() else TURN_WAIT_S) as alone:
            if not alone and not self._rests():
                self.note_in_vain()
            yield alone

    def _has_room(self, nbytes: int) -> bool:
        """Return True if a publish breaks no limit; wake the background near the floor."""
        total_bytes, free = self.used_bytes(), self._free_bytes()
        if free - nbytes < self._min_free_bytes + self._ahead_of_floor_bytes:
            self._background.wake()
        return total_bytes + nbytes <= self._limit_bytes and free - nbytes >= self._floor_bytes

    def _work_ahead(self, pause: Callable[[], None]) -> float:
        """Run one background pass; return the seconds to rest after it."""
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
        """Run one pass with the lock held; return the bytes freed."""
        before_bytes = self.used_bytes()
        sweep_temps(self._folders.incoming)
        scan = scan_tier(self._folders, pause)
        goal_bytes = goal_entries = short_bytes = 0
        if self._evicts:
            goal_bytes = self._excess_bytes(scan, incoming_bytes, ahead=ahead)
            short_bytes = 0 if self._rests() else self._short_bytes(incoming_bytes, ahead=ahead)
        if short_bytes > 0:
            # Others fill the disk. Evict a little more than needed, or every publish would walk
            # the folder again.
            goal_bytes = max(goal_bytes, short_bytes + self._slack_bytes)
        if self._evicts and full:
            share = 1 - LOW_WATER  # likewise
            goal_bytes = max(goal_bytes, incoming_bytes, int(scan.entry_bytes * share), 1)
            goal_entries = int(len(scan.entries) * share)
        gone = Sum()
        if goal_bytes > 0:
            # Spooled entries are skipped: evicting them would free nothing now.
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
        """Return the bytes that the budget bounds, as counted by all processes of the node.

        Raises:
            OSError: The file system refused.
        """
        total_bytes = self._total.read()
        return self._unknown_bytes if total_bytes is None else total_bytes

    def _free_bytes(self) -> int:
        try:
            return free_bytes(self._folders.version)
        except FileNotFoundError:  # the cache folder was emptied meanwhile
            self._folders.make()
            return free_bytes(self._folders.version)

    def _excess_bytes(self, scan: TierScan, incoming_bytes: int, *, ahead: bool) -> int:
        """Return how many bytes must be evicted for the budget; 0 or less: none."""
        limit = self._budget_bytes - (self._ahead_bytes if ahead else 0)
        wanted = scan.total_bytes + incoming_bytes
        return wanted - self._low_bytes if wanted > limit else 0

    def _short_bytes(self, incoming_bytes: int, *, ahead: bool = False) -> int:
        """Return how many bytes the disk is short of; 0 or less: none."""
        floor = self._min_free_bytes + (self._ahead_of_floor_bytes if ahead else 0)
        return floor + incoming_bytes - self._free_bytes()

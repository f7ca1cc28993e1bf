# SPDX-License-Identifier: Apache-2.0
"""Keeping the folder below its budget: least recently used entries go first, pinned ones stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier.census import Census, take_census
from s3ec.tier.files import FILE_MODE, Folders, free_bytes, is_stale_temp
from s3ec.tier.ledger import Ledger
from s3ec.tier.pin_folders import sweep_dead
from s3ec.tier.processes import try_lock, unlock

# Eviction goes on down to this share of the budget, so that it is not needed at every publish.
LOW_WATER = 0.9
# Other processes publish too, and only a walk shows it: after this share of the budget, look.
_UNSEEN_SHARE = 16


class Evictor:
    """Decides when there is too much, and removes it; one round at a time per node.

    The decision needs no walk: a ledger knows about how much is there.
    """

    def __init__(
        self,
        folders: Folders,
        ledger: Ledger,
        counters: Counters,
        *,
        budget_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self._folders = folders
        self._ledger = ledger
        self._counters = counters
        self._budget_bytes = budget_bytes
        self._low_bytes = int(budget_bytes * LOW_WATER)
        self._min_free_bytes = min_free_bytes

    def need_room(self, nbytes: int) -> None:
        """Evict before a publish, where that is needed.

        Raises:
            TierError: There will be no room. A budget full of pinned entries is no reason:
                they stay on the disk whether they are entries or not.
            OSError: The file system refused.
        """
        if nbytes > self._budget_bytes:
            raise TierError(f"{nbytes} bytes are more than the budget of {self._budget_bytes}")
        full = self._ledger.estimated_bytes() + nbytes > self._budget_bytes
        unseen = self._ledger.unseen_bytes() > self._budget_bytes // _UNSEEN_SHARE
        if not full and not unseen and self._disk_has(nbytes):
            return
        self.make_room(nbytes)
        if not self._disk_has(nbytes):
            raise TierError(
                f"{nbytes} bytes more would leave less than `min_free_bytes` "
                f"({self._min_free_bytes}) free on the disk of {self._folders.root}"
            )

    def make_room(self, incoming_bytes: int, *, at_least_bytes: int = 0) -> int:
        """One round: sweep what dead processes left, count, and evict where it is needed.

        Args:
            incoming_bytes: What is about to be written.
            at_least_bytes: Free this much even if the figures say there is room (a quota that
                the figures do not show).

        Returns:
            Bytes of the entries removed; 0 where another round is under way, which this one
            does not wait for.

        Raises:
            OSError: The lock could not be opened.
        """
        with self._only_one() as alone:
            if not alone:
                return 0
            mark = self._ledger.mark()
            census = self._survey()
            goal = max(self._excess(census, incoming_bytes), at_least_bytes)
            freed = self._evict(census, goal)
            self._ledger.recount(
                mark, total_bytes=census.total_bytes - freed, newest_ns=census.newest_ns
            )
            return freed

    def open(self) -> None:
        """Sweep and count, without evicting.

        Raises:
            OSError: The lock could not be made. That is found out now, because a full disk,
                which needs the evictor most, has no room for it.
        """
        os.close(self._open_lock())
        mark = self._ledger.mark()
        census = self._survey()
        self._ledger.recount(mark, total_bytes=census.total_bytes, newest_ns=census.newest_ns)

    def _survey(self) -> Census:
        swept = sweep_dead(self._folders.pins)
        census = take_census(self._folders)
        for temp in census.temps:
            if is_stale_temp(temp, now_s=self._ledger.now_s()):
                with suppress(OSError):
                    os.unlink(temp)
                    swept += 1
        if swept:
            self._counters.add("tier.swept", swept)
        return census

    def _disk_has(self, nbytes: int) -> bool:
        try:
            free = free_bytes(self._folders.version)
        except FileNotFoundError:  # somebody emptied the cache under us
            self._folders.make()
            free = free_bytes(self._folders.version)
        return free - nbytes >= self._min_free_bytes

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._folders.evict_lock, flags, FILE_MODE)
        except FileNotFoundError:
            self._folders.make()
            fd = os.open(self._folders.evict_lock, flags, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def _only_one(self) -> Iterator[bool]:
        fd = self._open_lock()
        try:
            alone = try_lock(fd)
            try:
                yield alone
            finally:
                if alone:
                    unlock(fd)  # a child forked meanwhile would keep it locked
        finally:
            os.close(fd)

    def _excess(self, census: Census, incoming_bytes: int) -> int:
        """How many bytes have to go; 0 or less: none."""
        wanted = census.total_bytes + incoming_bytes
        excess = wanted - self._low_bytes if wanted > self._budget_bytes else 0
        short = self._min_free_bytes + incoming_bytes - free_bytes(self._folders.version)
        if short > 0:
            # Somebody else fills the disk. A little more than needed, or every publish
            # would walk the folder again.
            excess = max(excess, short + self._budget_bytes // 64)
        return excess

    def _evict(self, census: Census, goal_bytes: int) -> int:
        """Remove entries, least recently used first, until ``goal_bytes`` are gone.

        Pinned and spooled ones are passed over: it would free nothing now.
        """
        freed = removed = 0
        if goal_bytes <= 0:
            return 0
        for entry in sorted(census.entries, key=lambda entry: (entry.mtime_ns, entry.path)):
            if freed >= goal_bytes:
                break
            if entry.inode in census.kept:
                continue
            with suppress(OSError):
                found = os.lstat(entry.path)
                if (found.st_mtime_ns, found.st_ino) != (entry.mtime_ns, entry.inode):
                    continue  # used, or written anew, since the walk
                os.unlink(entry.path)
                freed += entry.nbytes
                removed += 1
                self._remove_empty(entry.path)
        if removed:
            self._counters.add("tier.evicted", removed)
            self._counters.add("tier.evicted_bytes", freed)
        return freed

    def _remove_empty(self, path: str) -> None:
        """Remove folders that lost their last entry; publishing makes them again.

        Otherwise those of adapters and models long gone would pile up.
        """
        folder = os.path.dirname(path)
        with suppress(OSError):
            while folder != str(self._folders.objects):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

# SPDX-License-Identifier: Apache-2.0
"""A node's folder from outside: for people and commands, while engines use it or not."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from s3ec.errors import TierError
from s3ec.tier.census import Census, Entry, Usage, breathe, take_census
from s3ec.tier.evict_lock import EvictLock
from s3ec.tier.eviction import Evicted, evict, oldest_first
from s3ec.tier.files import Folders, check_folder, free_bytes
from s3ec.tier.pin_folders import LOCK_NAME, is_pin_folder_name
from s3ec.tier.total import RunningTotal
from s3ec.tier.use_clock import is_unused

# Longer than any round takes.
_LOCK_TIMEOUT_S = 60.0

NEVER_USED = "never used"
_OLDEST = "older"
_AGES_S = {"< 1 min": 60.0, "< 1 h": 3600.0, "< 1 day": 86400.0, "< 1 week": 604800.0}


class NoTierError(TierError):
    """There is no such folder, or no engine has stored anything in it."""


@dataclass(slots=True)
class Sum:
    """Some entries, counted."""

    entries: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one more."""
        self.entries += 1
        self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class Report:
    """What ``s3ec tier`` shows.

    Attributes:
        usage: Sums over everything.
        running_total_bytes: What the processes that publish believe ``usage.total_nbytes`` to
            be; None where nobody has counted since the node started.
        free_bytes: Of the disk, for this user.
        ages: Entries by the time since their last use, and those never used.
        namespaces: Entries by namespace, in order of their bytes, largest first.
        pinning_processes: How many processes hold pins.
        spooled_files: Entries that the bucket has not confirmed.
        quarantined_files: Bad entries that were set aside.
        index_files: Files of the index, of all namespaces.
    """

    usage: Usage
    running_total_bytes: int | None
    free_bytes: int
    ages: dict[str, Sum]
    namespaces: dict[str, Sum]
    pinning_processes: int
    spooled_files: int
    quarantined_files: int
    index_files: int


@dataclass(frozen=True, slots=True)
class Freed:
    """What ``evict_to`` did, or would do.

    Attributes:
        gone: Entries removed.
        before_bytes: Size before: of the folder, or of one namespace's entries.
        kept_bytes: Of these, what is pinned or waits for the bucket.
    """

    gone: Evicted
    before_bytes: int
    kept_bytes: int

    @property
    def after_bytes(self) -> int:
        """Size after."""
        return self.before_bytes - self.gone.nbytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """One existing folder. Blocking; nothing is made, and only ``evict_to`` changes anything."""

    folders: Folders

    @classmethod
    def open(cls, root: Path) -> Inspection:
        """Check that the folder is there and ours.

        Raises:
            NoTierError: It is not there.
            TierError: It is not ours; names the fix.
        """
        try:
            folders = Folders(Path(os.path.realpath(root)))
            for folder in (folders.root, folders.version):
                owner = os.lstat(folder).st_uid
                if owner != os.geteuid():
                    raise TierError(
                        f"{folder} belongs to uid {owner}; run this as that user, such as "
                        f"`sudo -u '#{owner}' s3ec tier`, or name another `cache_dir`"
                    )
                check_folder(folder)
        except FileNotFoundError as exc:
            raise NoTierError(
                f"no cache in {root}: nothing has been stored there yet, or engines use another "
                "`cache_dir`"
            ) from exc
        except OSError as exc:
            raise TierError(f"cannot read `cache_dir` {root}: {exc.strerror}") from exc
        return cls(folders)

    def report(self, *, now_s: float) -> Report:
        """Count everything; walks the folder, about 10 us per file.

        Raises:
            TierError: It cannot be read.
        """
        census = self._census()
        ages = {label: Sum() for label in (*_AGES_S, _OLDEST, NEVER_USED)}
        namespaces: defaultdict[str, Sum] = defaultdict(Sum)
        for entry in census.entries:
            ages[_age(entry, now_s)].add(entry.nbytes)
            namespaces[entry.namespace].add(entry.nbytes)
        try:
            figures = RunningTotal(self.folders).read()
            free = free_bytes(self.folders.version)
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.usage}: {exc.strerror}") from exc
        ranked = sorted(namespaces.items(), key=lambda item: (-item[1].nbytes, item[0]))
        return Report(
            usage=census.usage(),
            running_total_bytes=figures.total_bytes if figures.counted else None,
            free_bytes=free,
            ages=ages,
            namespaces=dict(ranked),
            pinning_processes=self._pinning_processes(),
            spooled_files=len(census.spooled),
            quarantined_files=len(census.quarantined),
            index_files=len(census.index),
        )

    def namespaces(self) -> list[str]:
        """Namespaces that have a folder here."""
        try:
            return sorted(os.listdir(self.folders.objects))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.objects}: {exc.strerror}") from exc

    def evict_to(
        self, target_bytes: int, *, namespace: str | None = None, dry_run: bool = False
    ) -> Freed:
        """Remove the least recently used entries, never used ones first, down to a size.

        What is pinned or spooled stays, whatever the size. Waits for an eviction that is
        under way.

        Args:
            target_bytes: Of the whole folder, as the budget counts it, or of one namespace's
                entries.
            namespace: Only its entries; None takes from all.
            dry_run: Only count.

        Raises:
            TierError: The folder cannot be written, or an eviction does not come to its end.
        """
        try:
            if dry_run:
                return self._evict_to(target_bytes, namespace, remove=False)
            with EvictLock(self.folders).hold(wait_s=_LOCK_TIMEOUT_S) as alone:
                if not alone:
                    raise TierError(
                        f"another process has been evicting for {_LOCK_TIMEOUT_S:.0f} s; try later"
                    )
                return self._evict_to(target_bytes, namespace, remove=True)
        except OSError as exc:
            raise TierError(f"cannot evict in {self.folders.root}: {exc}") from exc

    def _evict_to(self, target_bytes: int, namespace: str | None, *, remove: bool) -> Freed:
        total = RunningTotal(self.folders)
        mark = total.read()
        census = self._census()
        mine = [e for e in census.entries if namespace in (None, e.namespace)]
        free = [e for e in mine if e.inode not in census.kept]
        in_entries = _bytes_of(mine)
        before = census.total_bytes if namespace is None else in_entries
        gone = evict(
            oldest_first(free),
            before - target_bytes,
            objects=self.folders.objects,
            remove=remove,
            pause=breathe,
        )
        if remove:
            total.recount(mark, census.total_bytes - gone.nbytes, newest=census.newest)
        return Freed(gone, before, in_entries - _bytes_of(free))

    def _census(self) -> Census:
        census = take_census(self.folders, breathe)
        if census.troubles:
            raise TierError("; ".join(census.troubles[:3]))
        return census

    def _pinning_processes(self) -> int:
        processes = set()
        for name in _names_in(str(self.folders.pins)):
            if is_pin_folder_name(name) and _names_in(f"{self.folders.pins}/{name}") - {LOCK_NAME}:
                processes.add(name.rpartition("-")[0])  # without the random part
        return len(processes)


def _age(entry: Entry, now_s: float) -> str:
    if is_unused(entry.mtime_ns):
        return NEVER_USED
    age_s = now_s - entry.mtime_ns / 1e9
    return next((label for label, limit_s in _AGES_S.items() if age_s < limit_s), _OLDEST)


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _names_in(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:  # its process has just ended
        return set()

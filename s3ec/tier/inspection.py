# SPDX-License-Identifier: Apache-2.0
"""A node's folder from outside, and its audit: lists the files and checks them.

For people and commands, whether engines use the folder or not.
"""

from __future__ import annotations

import glob
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec import codec
from s3ec.counters import Report, unreported
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import digest_of_name
from s3ec.runtime import yield_gil
from s3ec.tier.entries import check_place, read_header
from s3ec.tier.evictor import RunningTotal, evict, evict_lock, oldest_first
from s3ec.tier.files import (
    FILE_MODE,
    FOLDER_MODE,
    OTHERS_MAY_WRITE,
    Folders,
    free_bytes,
    is_abandoned,
    mode_for_others,
    open_entry,
    require_own_folder,
)
from s3ec.tier.scan import (
    FILES_PER_PAUSE,
    ScannedEntry,
    SpoolFileName,
    Sum,
    TierScan,
    scan_tier,
)

# Longer than any eviction pass takes.
LOCK_TIMEOUT_S = 60.0

_OLDEST = "older"
_AGES_S = {"< 1 min": 60.0, "< 1 h": 3600.0, "< 1 day": 86400.0, "< 1 week": 604800.0}


class NoTierError(TierError):
    """There is no such folder, or no engine has stored anything in it."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """The report of ``s3ec tier``.

    Attributes:
        scan: The files found, and sums over everything.
        free_bytes: Free bytes of the disk, for this user.
        ages: Entries by the time since their last use.
        namespaces: Entries by namespace, in order of their bytes, largest first.
        open_nbytes: Bytes of evicted entries that a process of this user still has open; they leave
            the disk when it closes them.
    """

    scan: TierScan
    free_bytes: int
    ages: dict[str, Sum]
    namespaces: dict[str, Sum]
    open_nbytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """The result of ``evict_to``, or of its dry run.

    Attributes:
        gone: Entries removed.
        before_bytes: Size before: of the folder, or of one namespace's entries.
        kept_bytes: Bytes of entries that stay since they wait for the bucket.
    """

    gone: Sum
    before_bytes: int
    kept_bytes: int

    @property
    def after_bytes(self) -> int:
        """Size after."""
        return self.before_bytes - self.gone.nbytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """One existing folder. Blocking; creates nothing, and only ``evict_to`` changes anything."""

    folders: Folders

    @classmethod
    def open(cls, root: Path) -> Inspection:
        """Check that the folder exists and is ours.

        Raises:
            NoTierError: It does not exist.
            TierError: It is not ours; names the fix.
        """
        try:
            folders = Folders(Path(os.path.realpath(root)))
            for folder in (folders.root, folders.version):
                try:
                    require_own_folder(folder, given=folder == folders.root)
                except TierError as exc:
                    owner = os.lstat(folder).st_uid
                    if owner == os.geteuid():
                        raise
                    raise TierError(
                        f"{folder} belongs to uid {owner}; run this as that user, such as "
                        f"`sudo -u '#{owner}' s3ec tier`, or name another `cache_dir`"
                    ) from exc
        except FileNotFoundError as exc:
            raise NoTierError(
                f"no cache in {root}: nothing has been stored there yet, or engines use another "
                "`cache_dir`"
            ) from exc
        except OSError as exc:
            raise TierError(f"cannot read `cache_dir` {root}: {exc.strerror}") from exc
        return cls(folders)

    def report(self, *, now_s: float, report: Report = unreported) -> TierReport:
        """Count everything; walks the folder, about 10 us per file.

        Args:
            now_s: Seconds since the epoch.
            report: Called with the number of entries found so far.

        Raises:
            TierError: It cannot be read.
        """
        scan = self._scan(report)
        ages = {label: Sum() for label in (*_AGES_S, _OLDEST)}
        namespaces: defaultdict[str, Sum] = defaultdict(Sum)
        for entry in scan.entries:
            ages[_age(entry, now_s)].add(entry.nbytes)
            namespaces[entry.namespace].add(entry.nbytes)
        try:
            free = free_bytes(self.folders.version)
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.version}: {exc.strerror}") from exc
        ranked = sorted(namespaces.items(), key=lambda item: (-item[1].nbytes, item[0]))
        return TierReport(
            scan=scan,
            free_bytes=free,
            ages=ages,
            namespaces=dict(ranked),
            open_nbytes=sum(evicted_and_open(self.folders).values()),
        )

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a folder here."""
        try:
            return sorted(os.listdir(self.folders.objects))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.objects}: {exc.strerror}") from exc

    def entries(
        self, namespace: str, *, now_s: float, report: Report = unreported
    ) -> list[ScannedEntry]:
        """Return entries of a namespace, the most recently used first: the last is evicted first.

        Walks the folder, about 10 us per file.

        Args:
            now_s: Seconds since the epoch.
            report: Called with the number of entries of all namespaces found so far.

        Raises:
            TierError: It cannot be read.
        """
        mine = [entry for entry in self._scan(report).entries if entry.namespace == namespace]
        return list(oldest_first(mine, now_s=now_s))[::-1]

    def evict_to(
        self,
        target_bytes: int,
        *,
        now_s: float,
        namespace: str | None = None,
        dry_run: bool = False,
        report: Report = unreported,
    ) -> Freed:
        """Remove the least recently used entries, down to a size.

        Spooled entries stay, whatever the size. Waits for a running eviction.

        Args:
            target_bytes: Size of the whole folder, as the budget counts it, or of one namespace's
                entries.
            now_s: Seconds since the epoch.
            namespace: Removes only its entries; None removes from all.
            dry_run: True to only count.
            report: Called with the number of entries found, then with the number processed.

        Raises:
            TierError: The folder cannot be written, or another eviction does not end in time.
        """
        turn = evict_lock(self.folders, wait_s=LOCK_TIMEOUT_S)
        try:
            with nullcontext(True) if dry_run else turn as alone:
                if not alone:
                    raise TierError(
                        f"another process has been evicting for {LOCK_TIMEOUT_S:.0f} s; try later"
                    )
                total = RunningTotal(self.folders)
                total_bytes = total.read() or 0
                scan = self._scan(report)
                mine = [one for one in scan.entries if namespace in (None, one.namespace)]
                free = [one for one in mine if one.inode not in scan.kept]
                in_entries = _bytes_of(mine)
                before_bytes = scan.total_bytes if namespace is None else in_entries

                def reported() -> Iterator[ScannedEntry]:
                    for number, entry in enumerate(oldest_first(free, now_s=now_s)):
                        if not dry_run and number % FILES_PER_PAUSE == 0:
                            report("evicting entries", number, None)
                        yield entry

                gone = evict(
                    reported(),
                    before_bytes - target_bytes,
                    objects=self.folders.objects,
                    remove=not dry_run,
                    pause=yield_gil,
                )
                if not dry_run:
                    total.recount(total_bytes, scan.total_bytes - gone.nbytes)
                return Freed(gone, before_bytes, in_entries - _bytes_of(free))
        except OSError as exc:
            raise TierError(f"cannot evict in {self.folders.root}: {exc}") from exc

    def _scan(self, report: Report) -> TierScan:
        found = 0

        def pause() -> None:
            nonlocal found
            found += FILES_PER_PAUSE
            report("counting entries", found, None)
            yield_gil()

        scan = scan_tier(self.folders, pause)
        report("counting entries", len(scan.entries), None)
        if scan.troubles:
            raise TierError("; ".join(scan.troubles[:3]))
        return scan


def evicted_and_open(folders: Folders) -> dict[int, int]:
    """Map inode to bytes, for entries without a name that processes of this user have open."""
    found: dict[int, int] = {}
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # closed by now
            if os.readlink(link).startswith(f"{folders.objects}/"):
                status = os.stat(link)
                if not status.st_nlink:
                    found[status.st_ino] = status.st_size
    return found


def _age(entry: ScannedEntry, now_s: float) -> str:
    age_s = now_s - entry.mtime_ns / 1e9
    return next((label for label, limit_s in _AGES_S.items() if age_s < limit_s), _OLDEST)


def _bytes_of(entries: Iterable[ScannedEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def complaints_about(folders: Folders, *, report: Report = unreported) -> list[str]:
    """Return every complaint about the folder; reads every byte of every entry.

    May run while others use the folder: their changes meanwhile cause no complaints.

    Args:
        report: Called with the number of bytes read so far.
    """
    scan = scan_tier(folders)
    complaints = [*scan.troubles, *_folder_complaints(folders)]
    complaints += [
        f"{path} is not ours; it is neither counted nor deleted" for path in scan.foreign
    ]
    done = 0
    for entry in scan.entries:
        complaints += _file_complaints(entry.path, entry.namespace, digest_of_name(entry.name))
        done += entry.nbytes
        report("reading entries", done, scan.entry_bytes)
    for path in scan.spooled:
        name = SpoolFileName.parse(path.rpartition("/")[2])
        if name is not None:
            complaints += _file_complaints(path, name.namespace, name.digest)
    complaints += [
        f"{path} was left by a writer that died" for path in scan.temps if is_abandoned(path)
    ]
    return complaints


def _folder_complaints(folders: Folders) -> Iterator[str]:
    """Yield complaints: inner folders must be private, the root must not be writable by others."""
    owner = os.geteuid()
    for path in [str(folders.root), *(found[0] for found in os.walk(folders.version))]:
        try:
            found = os.lstat(path)
        except OSError:
            continue
        mode, is_root = mode_for_others(found), path == str(folders.root)
        if mode & OTHERS_MAY_WRITE if is_root else mode != FOLDER_MODE:
            yield f"folder {path} has mode {stat.S_IMODE(found.st_mode):o}, not {FOLDER_MODE:o}"
        if found.st_uid != owner and not is_root:
            yield f"folder {path} belongs to uid {found.st_uid}, expected {owner}"


def _file_complaints(path: str, namespace: str, digest: bytes) -> Iterator[str]:
    """Yield what is wrong with a file that should be this entry."""
    try:
        fd = open_entry(path)
    except FileNotFoundError:
        return
    except (OSError, CorruptEntryError) as exc:
        yield f"{path} cannot be read: {exc}"
        return
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if mode_for_others(found) != FILE_MODE:
            yield f"{path} has mode {stat.S_IMODE(found.st_mode):o}, expected {FILE_MODE:o}"
        if found.st_uid != os.geteuid():
            yield f"{path} belongs to uid {found.st_uid}, expected {os.geteuid()}"
        try:
            header = read_header(fd, found.st_size)
            file.seek(header.data_start)
            codec.check_data(header, file.read())
            check_place(header, namespace, digest)
        except (OSError, CorruptEntryError) as exc:
            yield f"{path} is bad: {exc}"

# SPDX-License-Identifier: Apache-2.0
"""A node's folder from outside, and its audit: what is there, and whether it should be.

For people and commands, while engines use the folder or not.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Report, unreported
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import digest_of_name, key_of_header
from s3ec.runtime import yield_gil
from s3ec.tier.entries import read_header, remove_bad
from s3ec.tier.evictor import Evicted, RunningTotal, evict, evict_lock, oldest_first
from s3ec.tier.files import (
    FILE_MODE,
    FOLDER_MODE,
    OTHERS_MAY_WRITE,
    Folders,
    free_bytes,
    is_stale_temp,
    mode_for_others,
    open_entry,
    require_own_folder,
)
from s3ec.tier.scan import EntryFileName, ScannedEntry, TierScan, Usage, scan_tier

# Longer than any round takes.
LOCK_TIMEOUT_S = 60.0

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
class TierReport:
    """What ``s3ec tier`` shows.

    Attributes:
        usage: Sums over everything.
        running_total_bytes: What the processes that publish believe ``usage.total_nbytes`` to
            be; None where nobody has counted yet.
        free_bytes: Of the disk, for this user.
        ages: Entries by the time since their last use.
        namespaces: Entries by namespace, in order of their bytes, largest first.
        open_nbytes: Bytes of evicted entries that a process of this user still has open; they leave
            the disk when it closes them.
        spooled_files: Entries that the bucket has not confirmed.
        index_files: Files of the index, of all namespaces.
    """

    usage: Usage
    running_total_bytes: int | None
    free_bytes: int
    ages: dict[str, Sum]
    namespaces: dict[str, Sum]
    open_nbytes: int
    spooled_files: int
    index_files: int


@dataclass(frozen=True, slots=True)
class Freed:
    """What ``evict_to`` did, or would do.

    Attributes:
        gone: Entries removed.
        before_bytes: Size before: of the folder, or of one namespace's entries.
        kept_bytes: Of these, what waits for the bucket.
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

    def report(self, *, now_s: float) -> TierReport:
        """Count everything; walks the folder, about 10 us per file.

        Raises:
            TierError: It cannot be read.
        """
        scan = self._scan()
        ages = {label: Sum() for label in (*_AGES_S, _OLDEST)}
        namespaces: defaultdict[str, Sum] = defaultdict(Sum)
        for entry in scan.entries:
            ages[_age(entry, now_s)].add(entry.nbytes)
            namespaces[entry.namespace].add(entry.nbytes)
        try:
            figures = RunningTotal(self.folders).read()
            free = free_bytes(self.folders.version)
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.usage}: {exc.strerror}") from exc
        ranked = sorted(namespaces.items(), key=lambda item: (-item[1].nbytes, item[0]))
        return TierReport(
            usage=scan.usage(),
            running_total_bytes=figures.total_bytes if figures.counted else None,
            free_bytes=free,
            ages=ages,
            namespaces=dict(ranked),
            open_nbytes=sum(evicted_and_open(self.folders).values()),
            spooled_files=len(scan.spooled),
            index_files=len(scan.index),
        )

    def namespaces(self) -> list[str]:
        """Namespaces that have a folder here."""
        try:
            return sorted(os.listdir(self.folders.objects))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise TierError(f"cannot read {self.folders.objects}: {exc.strerror}") from exc

    def entries(self, namespace: str, *, now_s: float) -> list[ScannedEntry]:
        """Entries of a namespace, the most recently used first: the last one is evicted first.

        Walks the folder, about 10 us per file.

        Raises:
            TierError: It cannot be read.
        """
        mine = [entry for entry in self._scan().entries if entry.namespace == namespace]
        return list(oldest_first(mine, now_s=now_s))[::-1]

    def evict_to(
        self,
        target_bytes: int,
        *,
        now_s: float,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> Freed:
        """Remove the least recently used entries, down to a size.

        What is spooled stays, whatever the size. Waits for an eviction that is
        under way.

        Args:
            target_bytes: Of the whole folder, as the budget counts it, or of one namespace's
                entries.
            now_s: Seconds since the epoch.
            namespace: Only its entries; None takes from all.
            dry_run: Only count.

        Raises:
            TierError: The folder cannot be written, or an eviction does not come to its end.
        """
        try:
            if dry_run:
                return self._evict_to(target_bytes, now_s, namespace, remove=False)
            with evict_lock(self.folders, wait_s=LOCK_TIMEOUT_S) as alone:
                if not alone:
                    raise TierError(
                        f"another process has been evicting for {LOCK_TIMEOUT_S:.0f} s; try later"
                    )
                return self._evict_to(target_bytes, now_s, namespace, remove=True)
        except OSError as exc:
            raise TierError(f"cannot evict in {self.folders.root}: {exc}") from exc

    def _evict_to(
        self, target_bytes: int, now_s: float, namespace: str | None, *, remove: bool
    ) -> Freed:
        total = RunningTotal(self.folders)
        figures = total.read()
        scan = self._scan()
        mine = [e for e in scan.entries if namespace in (None, e.namespace)]
        free = [e for e in mine if e.inode not in scan.kept]
        in_entries = _bytes_of(mine)
        before = scan.total_bytes if namespace is None else in_entries
        gone = evict(
            oldest_first(free, now_s=now_s),
            before - target_bytes,
            objects=self.folders.objects,
            remove=remove,
            pause=yield_gil,
        )
        if remove:
            total.recount(figures, scan.total_bytes - gone.nbytes)
        return Freed(gone, before, in_entries - _bytes_of(free))

    def _scan(self) -> TierScan:
        scan = scan_tier(self.folders, yield_gil)
        if scan.troubles:
            raise TierError("; ".join(scan.troubles[:3]))
        return scan


def evicted_and_open(folders: Folders) -> dict[int, int]:
    """Inode to bytes of entries without a name that processes of this user have open."""
    found: dict[int, int] = {}
    above = f"{folders.objects}/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for number in _names_in(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{number}"
            with suppress(OSError):  # closed by now
                if os.readlink(link).startswith(above):
                    status = os.stat(link)
                    if not status.st_nlink:
                        found[status.st_ino] = status.st_size
    return found


def _age(entry: ScannedEntry, now_s: float) -> str:
    age_s = now_s - entry.mtime_ns / 1e9
    return next((label for label, limit_s in _AGES_S.items() if age_s < limit_s), _OLDEST)


def _bytes_of(entries: Iterable[ScannedEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _names_in(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:  # its process has just ended
        return set()


_ACCOUNTING_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something that is not as it should be.

    Attributes:
        text: For people.
        remedy: What ``repair`` does about it, for people; empty where that is nothing.
        mend: Does it, and says whether there was still something to do. May raise OSError.
    """

    text: str
    remedy: str = ""
    mend: Callable[[], bool] = lambda: False


def complaints_about(
    folders: Folders, *, now_s: float, report: Report = unreported
) -> list[Complaint]:
    """Every complaint about the folder, with what can be done; reads every byte of every entry.

    May run while others use the folder: what they change meanwhile is not complained about.

    Args:
        report: Told how many bytes were read.
    """
    scan = scan_tier(folders)
    complaints = [Complaint(text) for text in scan.troubles]
    complaints += _folder_complaints(folders)
    complaints += [
        Complaint(f"{path} is not ours; it is neither counted nor deleted") for path in scan.foreign
    ]
    done = 0
    for entry in scan.entries:
        complaints += _entry_complaints(entry)
        done += entry.nbytes
        report("reading entries", done, scan.entry_bytes)
    for path in scan.spooled:
        complaints += _spool_complaints(path)
    complaints += [
        Complaint(
            f"{path} was left by a writer that died", "remove it", partial(_remove_temp, path)
        )
        for path in scan.temps
        if is_stale_temp(path, now_s=now_s)
    ]
    complaints += [Complaint(text) for text in _accounting_complaints(folders, scan)]
    return complaints


def _folder_complaints(folders: Folders) -> Iterator[Complaint]:
    """Inner folders must be private; the root may be given, and only its writers matter."""
    owner = os.geteuid()
    for path in [str(folders.root), *_folders_below(str(folders.version))]:
        try:
            found = os.lstat(path)
        except OSError:
            continue
        mode, is_root = mode_for_others(found), path == str(folders.root)
        if mode & OTHERS_MAY_WRITE if is_root else mode != FOLDER_MODE:
            text = f"folder {path} has mode {stat.S_IMODE(found.st_mode):o}, not {FOLDER_MODE:o}"
            yield _mode_complaint(text, path, found, FOLDER_MODE)
        if found.st_uid != owner and not is_root:
            yield Complaint(f"folder {path} belongs to uid {found.st_uid}, expected {owner}")


def _mode_complaint(text: str, path: str, found: os.stat_result, mode: int) -> Complaint:
    if found.st_uid != os.geteuid():
        return Complaint(text)
    return Complaint(
        text, f"set its mode to {mode:o}", partial(_set_mode, path, found.st_ino, mode)
    )


def _set_mode(path: str, inode: int, mode: int) -> bool:
    """Unless it has become something else since it was looked at."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(fd).st_ino != inode:
            return False
        os.fchmod(fd, mode)
        return True
    finally:
        os.close(fd)


def _remove_temp(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _remove_bad(entry: ScannedEntry) -> bool:
    """Delete a bad entry, unless somebody has published a better one since."""
    try:
        if os.lstat(entry.path).st_ino != entry.inode:
            return False
        remove_bad(entry.path)
    except FileNotFoundError:
        return False
    return True


def _folders_below(top: str) -> Iterator[str]:
    for folder, _, _ in os.walk(top, followlinks=False):
        yield folder


def _entry_complaints(entry: ScannedEntry) -> Iterator[Complaint]:
    def bad(reason: str) -> Complaint:
        return Complaint(f"{entry.path} is bad: {reason}", "delete it", partial(_remove_bad, entry))

    return _content_complaints(entry.path, entry.namespace, digest_of_name(entry.name), bad)


def _spool_complaints(path: str) -> Iterator[Complaint]:
    """Who holds such an entry deletes it when its turn comes to be uploaded."""

    def bad(reason: str) -> Complaint:
        return Complaint(f"{path} is bad: {reason}")

    name = EntryFileName.parse(path.rpartition("/")[2])
    return iter(()) if name is None else _content_complaints(path, name.namespace, name.digest, bad)


def _content_complaints(
    path: str, namespace: str, digest: bytes, bad: Callable[[str], Complaint]
) -> Iterator[Complaint]:
    """What is wrong with a file that should be this entry."""
    header = yield from _file_complaints(path, bad)
    if header is None:
        return
    if key_of_header(header.identifier, digest) is None:
        yield bad("written for another identifier")
    elif header.namespace != namespace:
        yield bad(f"written for namespace {header.namespace!r:.100}")


def _file_complaints(
    path: str, bad: Callable[[str], Complaint]
) -> Generator[Complaint, None, Header | None]:
    """What is wrong with one file; gives its header where its bytes are good."""
    try:
        fd = open_entry(path)
    except FileNotFoundError:
        return None
    except (OSError, CorruptEntryError) as exc:
        yield Complaint(f"{path} cannot be read: {exc}")
        return None
    with open(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if mode_for_others(found) != FILE_MODE:
            text = f"{path} has mode {stat.S_IMODE(found.st_mode):o}, expected {FILE_MODE:o}"
            yield _mode_complaint(text, path, found, FILE_MODE)
        if found.st_uid != os.geteuid():
            yield Complaint(f"{path} belongs to uid {found.st_uid}, expected {os.geteuid()}")
        try:
            header = read_header(fd, found.st_size)
            file.seek(header.data_start)
            codec.check_data(header, file.read())
        except (OSError, CorruptEntryError) as exc:
            if isinstance(exc, CorruptEntryError) and exc.reason == "version":
                yield Complaint(f"{path} is of another format than this s3ec reads; it is left")
            else:
                yield bad(str(exc))
            return None
    return header


def _accounting_complaints(folders: Folders, before: TierScan) -> Iterator[str]:
    """What eviction counts, compared with a plain walk that knows no names or levels.

    Where others work here, one entry may come and another of its size go between the walks, or
    a writer may begin: only what every round finds is complained about.
    """
    complaint = ""
    for _ in range(_ACCOUNTING_ROUNDS):
        plain = plain_bytes(folders, skip={*before.foreign, *before.temps})
        after = scan_tier(folders)
        if not before.total_bytes == after.total_bytes != plain:
            return
        complaint = f"eviction counts {after.total_bytes} bytes, but there are {plain}"
        before = after
    yield complaint


def plain_bytes(folders: Folders, *, skip: set[str]) -> int:
    """Bytes of all files that count against the budget, each once however many names it has.

    Args:
        skip: Paths of files and folders that do not count.
    """
    sizes: dict[tuple[int, int], int] = {}
    for top in (folders.objects, folders.spool, folders.index):
        for folder, below, names in os.walk(top, followlinks=False):
            below[:] = [name for name in below if f"{folder}/{name}" not in skip]
            for name in names:
                path = f"{folder}/{name}"  # a Path each would take as long as all the rest
                if path in skip:
                    continue
                try:
                    found = os.lstat(path)
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())

# SPDX-License-Identifier: Apache-2.0
"""One walk over the folder: its files, their sizes and last uses, and the spooled ones."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from s3ec.identity import OBJECT_SUFFIX, is_namespace_name, is_object_name
from s3ec.tier.files import Folders, is_temp_name

# As ``index.local`` names them.
_INDEX_NAME = re.compile(r"[0-9A-Z]{26}-[0-9A-Z]{26}\.(?:rows|filter)|overlay|missing|lock-[a-z]+")
_SPOOL_FILE = re.compile(
    r"(.+)--([0-9a-f]{16})--([0-9a-f]{16})-[0-9]{1,10}--([0-9a-f]{32})" + re.escape(OBJECT_SUFFIX)
)
_SPOOL_LOCK = re.compile(r"([0-9a-f]{16})\.lock")


@dataclass(frozen=True, slots=True)
class SpoolFileName:
    """``NAMESPACE--DESTINATION--OWNER-NUMBER--DIGEST.safetensors``, the name of a spooled file.

    Attributes:
        namespace: ``Namespace.name``.
        destination: 16 hex digits that stand for a bucket and a folder in it. Namespaces do
            not tell those apart, and a save for one bucket must not end in another.
        owner: 16 hex digits. The process that holds the lock ``OWNER.lock`` uploads the file.
        digest: ``Key.digest``.
    """

    namespace: str
    destination: str
    owner: str
    digest: bytes

    @classmethod
    def parse(cls, name: str) -> SpoolFileName | None:
        """Return the parts of a file name; None if it is no such name."""
        match = _SPOOL_FILE.fullmatch(name)
        if match is None or not is_namespace_name(match[1]):
            return None
        return cls(match[1], match[2], match[3], bytes.fromhex(match[4]))


def is_index_file(name: str) -> bool:
    """Return True if the index could have made a file of this name in its folder."""
    return _INDEX_NAME.fullmatch(name) is not None or is_temp_name(name)


def owner_of_lock(name: str) -> str | None:
    """Return the owner whose lock in the spool has this name; None if it is no lock."""
    match = _SPOOL_LOCK.fullmatch(name)
    return match[1] if match is not None else None


# objects/NAMESPACE/[LORA/]aa/NAME: folders below a namespace.
_LEVELS = 2
# Between two pauses a walk holds the GIL for a millisecond or two.
FILES_PER_PAUSE = 128


def no_pause() -> None:
    """Do nothing: for a walk that need not yield to other threads."""


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """One entry as the walk found it.

    Attributes:
        path: The file.
        namespace: Folder below ``objects/``.
        name: Object name below the namespace.
        nbytes: Size.
        mtime_ns: Last use, nanoseconds since the epoch.
        inode: Tells spooled entries (further names of the same file) from other files.
    """

    path: str
    namespace: str
    name: str
    nbytes: int
    mtime_ns: int
    inode: int


@dataclass(slots=True)
class Sum:
    """Number and bytes of some entries."""

    entries: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one more."""
        self.entries += 1
        self.nbytes += nbytes


@dataclass
class TierScan:
    """The files below the root. The folder may change meanwhile: each number held at some moment.

    Sums are made during the walk, where it pauses, and not after it.

    Attributes:
        entries: Entries of all namespaces, in no order.
        entry_bytes: Bytes of all entries.
        kept: Inode to bytes of spooled files: evicting their entries would free nothing.
        spooled: Paths of all files that wait for the bucket.
        index_files: Number of index files, of all namespaces.
        index_bytes: Bytes of these.
        named: Inodes of ``kept`` that have a name outside of the spool.
        temps: Paths of files that are being written, or were when their writer died; all in
            ``incoming``.
        foreign: Paths of files that are not ours; never counted, never deleted.
        troubles: Folders that could not be read, with the reason.
    """

    entries: list[ScannedEntry] = field(default_factory=list)
    entry_bytes: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    spooled: list[str] = field(default_factory=list)
    index_files: int = 0
    index_bytes: int = 0
    named: set[int] = field(default_factory=set)
    temps: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def add(self, entry: ScannedEntry) -> None:
        """Count one entry; the spool must be scanned before."""
        self.entries.append(entry)
        self.entry_bytes += entry.nbytes
        if entry.inode in self.kept:
            self.named.add(entry.inode)

    @property
    def spooled_bytes(self) -> int:
        """Bytes that the bucket has not confirmed, entries or not."""
        return sum(self.kept.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that are spooled and no entry any more: evicted, or copied."""
        return sum(nbytes for inode, nbytes in self.kept.items() if inode not in self.named)

    @property
    def total_bytes(self) -> int:
        """All bytes that the budget bounds."""
        return self.entry_bytes + self.held_bytes + self.index_bytes


def scan_tier(folders: Folders, pause: Callable[[], None] = no_pause) -> TierScan:
    """Walk the whole folder; about 10 us per file. Never raises OSError: see ``troubles``.

    Args:
        pause: Called after every hundred entries or so: ``yield_gil`` if no caller waits for the
            walk. An exception of it ends the walk.
    """
    scan = TierScan()
    ours = {path.name for path in (*folders.inner, *folders.shared_files)}
    for item in _items(str(folders.version), scan):
        if item.name not in ours:
            scan.foreign.append(item.path)
    for item in _items(str(folders.incoming), scan):
        (scan.temps if is_temp_name(item.name) else scan.foreign).append(item.path)
    # The spool first: an entry that is evicted during the walk then still counts as held.
    for item in _items(str(folders.spool), scan):
        if owner_of_lock(item.name) is None:
            found = _look(item, SpoolFileName.parse(item.name) is not None, scan)
            if found is not None:
                scan.spooled.append(item.path)
                scan.kept[found.st_ino] = found.st_size
    seen = 0
    for namespace in _namespaces(str(folders.objects), scan):
        for item in _below(namespace.path, _LEVELS, scan):
            name = item.path[len(namespace.path) + 1 :]
            found = _look(item, is_object_name(name), scan)
            if found is not None:
                nbytes, mtime_ns, inode = found.st_size, found.st_mtime_ns, found.st_ino
                scan.add(ScannedEntry(item.path, namespace.name, name, nbytes, mtime_ns, inode))
            seen += 1
            if seen % FILES_PER_PAUSE == 0:
                pause()
    for namespace in _namespaces(str(folders.index), scan):
        for item in _items(namespace.path, scan):
            found = _look(item, is_index_file(item.name), scan)
            if found is not None:
                scan.index_files += 1
                scan.index_bytes += found.st_size
    return scan


def entry_names(objects: str, pause: Callable[[], None]) -> Iterator[str]:
    """Yield object names below one namespace's folder, as they are found; reads no file.

    Args:
        pause: Called after every hundred names or so.
    """
    unread = TierScan()  # troubles are the audit's
    for seen, item in enumerate(_below(objects, _LEVELS, unread), 1):
        name = item.path[len(objects) + 1 :]
        if is_object_name(name) and item.is_file(follow_symlinks=False):
            yield name
        if seen % FILES_PER_PAUSE == 0:
            pause()


def _namespaces(above: str, scan: TierScan) -> Iterator[os.DirEntry[str]]:
    for item in _items(above, scan):
        if is_namespace_name(item.name) and item.is_dir(follow_symlinks=False):
            yield item
        else:
            scan.foreign.append(item.path)


def _items(folder: str, scan: TierScan) -> list[os.DirEntry[str]]:
    try:
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            scan.troubles.append(f"{folder} is a symbolic link, which is not followed")
            return []
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        scan.troubles.append(f"cannot read {folder}: {exc.strerror}")
        return []


def _below(folder: str, levels: int, scan: TierScan) -> Iterator[os.DirEntry[str]]:
    for item in _items(folder, scan):
        if levels and item.is_dir(follow_symlinks=False):
            yield from _below(item.path, levels - 1, scan)
        else:
            yield item


def _look(item: os.DirEntry[str], named_well: bool, scan: TierScan) -> os.stat_result | None:
    """Return the status of a regular file with a valid name; note any other as foreign."""
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:  # evicted, confirmed or adopted since it was listed
        return None
    if not named_well or not stat.S_ISREG(found.st_mode):
        scan.foreign.append(item.path)
        return None
    return found

# SPDX-License-Identifier: Apache-2.0
"""One walk over the folder: what is there, how large, how recently used, and held by whom."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from s3ec.identity import is_namespace_name, is_object_name
from s3ec.tier.files import Folders, is_temp_name
from s3ec.tier.pin_folders import LOCK_NAME, is_pin_folder_name, is_pin_name
from s3ec.tier.spool_names import SpoolName

# objects/NAMESPACE/[LORA/]aa/NAME: folders below a namespace.
_LEVELS = 2
_TOP_LEVEL = {"objects", "pins", "spool", "quarantine", "evict.lock", "fetch.lock"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as the walk found it.

    Attributes:
        path: The file.
        namespace: Folder below ``objects/``.
        name: Object name below the namespace.
        nbytes: Size.
        mtime_ns: Last use, nanoseconds since the epoch.
        inode: Tells pins (further names of the same file) from other files.
    """

    path: str
    namespace: str
    name: str
    nbytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What the folder holds, all namespaces together, as counted just now.

    Attributes:
        entries: Number of entries.
        nbytes: Bytes of entries.
        pinned_nbytes: Bytes that some process has pinned, entries or not.
        spooled_nbytes: Bytes that the bucket has not confirmed, entries or not.
        held_nbytes: Pinned or spooled bytes that are no entry any more (evicted, or copied for
            their holder) and leave the disk when they are let go of.
        quarantined_nbytes: Bytes set aside.
    """

    entries: int
    nbytes: int
    pinned_nbytes: int
    spooled_nbytes: int
    held_nbytes: int
    quarantined_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """What the byte budget is about."""
        return self.nbytes + self.held_nbytes + self.quarantined_nbytes


@dataclass
class Census:
    """What lies below the root. Built while others work: each figure was true at some moment.

    Attributes:
        entries: Of all namespaces, in no order.
        pinned: Inode to bytes of every file that a process holds, entries among them.
        spooled: Path to inode and bytes of every file that waits for the bucket, likewise.
        quarantined: Inode to bytes of what was set aside.
        temps: Paths of files that are being written, or were when their writer died.
        foreign: Paths of what is not ours; never counted, never deleted.
        troubles: Folders that could not be read, with the reason.
    """

    entries: list[Entry] = field(default_factory=list)
    pinned: dict[int, int] = field(default_factory=dict)
    spooled: dict[str, tuple[int, int]] = field(default_factory=dict)
    quarantined: dict[int, int] = field(default_factory=dict)
    temps: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def kept(self) -> dict[int, int]:
        """Inode to bytes of what is pinned or spooled: evicting it would free nothing."""
        return {**self.pinned, **dict(self.spooled.values())}

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that only a pin or the spool keeps on the disk: evicted, or copied for it."""
        named = {entry.inode for entry in self.entries} | self.quarantined.keys()
        return sum(nbytes for inode, nbytes in self.kept.items() if inode not in named)

    @property
    def total_bytes(self) -> int:
        """All that the byte budget is about."""
        return self.usage().total_nbytes

    def usage(self) -> Usage:
        """The sums."""
        return Usage(
            entries=len(self.entries),
            nbytes=self.entry_bytes,
            pinned_nbytes=sum(self.pinned.values()),
            spooled_nbytes=sum(dict(self.spooled.values()).values()),
            held_nbytes=self.held_bytes,
            quarantined_nbytes=sum(self.quarantined.values()),
        )

    @property
    def newest_ns(self) -> int:
        """The latest use of any entry, 0 where there are none."""
        return max((entry.mtime_ns for entry in self.entries), default=0)


def take_census(folders: Folders) -> Census:
    """Walk the whole folder; about 10 us per file. Never raises OSError: see ``troubles``."""
    census = Census()
    for item in _items(str(folders.version), census):
        if item.name not in _TOP_LEVEL:
            census.foreign.append(item.path)
    # Pins and spool first: an entry that is evicted during the walk then still counts as held.
    for item in _owned(str(folders.pins), census):
        if is_pin_name(item.name):
            _count(item, census.pinned)
        else:
            census.foreign.append(item.path)
    for item in _owned(str(folders.spool), census):
        _sort_spooled(item, census)
    for namespace in _items(str(folders.objects), census):
        if is_namespace_name(namespace.name) and namespace.is_dir(follow_symlinks=False):
            for item in _below(namespace.path, _LEVELS, census):
                _sort(item, namespace, census)
        else:
            census.foreign.append(namespace.path)
    for item in _items(str(folders.quarantine), census):
        _count(item, census.quarantined)
    return census


def _items(folder: str, census: Census) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        census.troubles.append(f"cannot read {folder}: {exc.strerror}")
        return []


def _owned(above: str, census: Census) -> Iterator[os.DirEntry[str]]:
    """What processes keep in their folders, without the locks."""
    for folder in _items(above, census):
        if is_pin_folder_name(folder.name) and folder.is_dir(follow_symlinks=False):
            for item in _items(folder.path, census):
                if item.name != LOCK_NAME:
                    yield item
        else:
            census.foreign.append(folder.path)


def _below(folder: str, levels: int, census: Census) -> Iterator[os.DirEntry[str]]:
    for item in _items(folder, census):
        if levels and item.is_dir(follow_symlinks=False):
            yield from _below(item.path, levels - 1, census)
        else:
            yield item


def _sort(item: os.DirEntry[str], namespace: os.DirEntry[str], census: Census) -> None:
    if is_temp_name(item.name):
        census.temps.append(item.path)
        return
    name = item.path[len(namespace.path) + 1 :]
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:  # evicted since it was listed
        return
    if not is_object_name(name) or not stat.S_ISREG(found.st_mode):
        census.foreign.append(item.path)
        return
    census.entries.append(
        Entry(item.path, namespace.name, name, found.st_size, found.st_mtime_ns, found.st_ino)
    )


def _sort_spooled(item: os.DirEntry[str], census: Census) -> None:
    if is_temp_name(item.name):
        census.temps.append(item.path)
        return
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:  # confirmed, or adopted, since it was listed
        return
    if SpoolName.parse(item.name) is None or not stat.S_ISREG(found.st_mode):
        census.foreign.append(item.path)
        return
    census.spooled[item.path] = (found.st_ino, found.st_size)


def _count(item: os.DirEntry[str], sizes: dict[int, int]) -> None:
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:
        return
    if stat.S_ISREG(found.st_mode):
        sizes[found.st_ino] = found.st_size

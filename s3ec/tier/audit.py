# SPDX-License-Identifier: Apache-2.0
"""The tier's audit: everything on the disk compared with everything it should be."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

from s3ec import codec
from s3ec.codec import Header
from s3ec.errors import CorruptEntryError
from s3ec.identity import digest_of_name, key_of_header
from s3ec.tier.census import Census, Entry, take_census
from s3ec.tier.files import FILE_MODE, FOLDER_MODE, Folders, is_stale_temp, open_entry
from s3ec.tier.headers import read_header
from s3ec.tier.pin_folders import is_dead, is_pin_folder_name
from s3ec.tier.quarantine import KEPT_FILES
from s3ec.tier.spool_names import SpoolName

_ACCOUNTING_ROUNDS = 3


def audit(folders: Folders, *, now_s: float) -> list[str]:
    """Every complaint about the folder, one line each; reads every byte of every entry.

    May run while others use the folder: what they change meanwhile is not complained about.
    """
    census = take_census(folders)
    complaints = list(census.troubles)
    complaints += _folder_complaints(folders)
    complaints += [
        f"{path} is not ours; it is neither counted nor deleted" for path in census.foreign
    ]
    for entry in census.entries:
        complaints += _entry_complaints(entry)
    for path in census.spooled:
        complaints += _spool_complaints(path)
    complaints += [
        f"{path} was left by a writer that died"
        for path in census.temps
        if is_stale_temp(path, now_s=now_s)
    ]
    complaints += _pin_complaints(folders)
    if len(census.quarantined) > KEPT_FILES:
        complaints.append(f"quarantine holds {len(census.quarantined)} files, over {KEPT_FILES}")
    complaints += _accounting_complaints(folders, census)
    return complaints


def _folder_complaints(folders: Folders) -> Iterator[str]:
    """Inner folders must be private; the root is the user's, and only its writers matter."""
    owner = os.geteuid()
    for path in [str(folders.root), *_folders_below(str(folders.version))]:
        try:
            found = os.lstat(path)
        except OSError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        wrong = mode & 0o022 if path == str(folders.root) else mode != FOLDER_MODE
        if wrong:
            yield f"folder {path} has mode {mode:o}, expected {FOLDER_MODE:o}"
        if found.st_uid != owner:
            yield f"folder {path} belongs to uid {found.st_uid}, expected {owner}"


def _folders_below(top: str) -> Iterator[str]:
    for folder, _, _ in os.walk(top, followlinks=False):
        yield folder


def _entry_complaints(entry: Entry) -> Iterator[str]:
    header = yield from _file_complaints(entry.path)
    if header is None:
        return
    if key_of_header(header.identifier, digest_of_name(entry.name)) is None:
        yield f"{entry.path} is bad: written for another identifier"
    elif header.namespace != entry.namespace:
        yield f"{entry.path} is bad: written for namespace {header.namespace!r:.100}"


def _spool_complaints(path: str) -> Iterator[str]:
    name = SpoolName.parse(path.rpartition("/")[2])
    header = yield from _file_complaints(path)
    if header is None or name is None:
        return
    if key_of_header(header.identifier, name.digest) is None:
        yield f"{path} is bad: written for another identifier"
    elif header.namespace != name.namespace:
        yield f"{path} is bad: written for namespace {header.namespace!r:.100}"


def _file_complaints(path: str) -> Generator[str, None, Header | None]:
    """What is wrong with one file; gives its header where its bytes are good."""
    try:
        fd = open_entry(path)
    except FileNotFoundError:
        return None
    except (OSError, CorruptEntryError) as exc:
        yield f"{path} cannot be read: {exc}"
        return None
    with open(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_IMODE(found.st_mode) != FILE_MODE:
            yield f"{path} has mode {stat.S_IMODE(found.st_mode):o}, expected {FILE_MODE:o}"
        if found.st_uid != os.geteuid():
            yield f"{path} belongs to uid {found.st_uid}, expected {os.geteuid()}"
        try:
            header = read_header(fd, found.st_size)
            file.seek(header.data_start)
            codec.check_data(header, file.read())
        except (OSError, CorruptEntryError) as exc:
            yield f"{path} is bad: {exc}"
            return None
    return header


def _pin_complaints(folders: Folders) -> Iterator[str]:
    try:
        names = os.listdir(folders.pins)
    except OSError:
        return
    for name in names:
        if is_pin_folder_name(name) and is_dead(f"{folders.pins}/{name}"):
            yield f"{folders.pins}/{name} holds the pins of a process that died"


def _accounting_complaints(folders: Folders, before: Census) -> Iterator[str]:
    """What eviction counts, compared with a plain walk that knows no names or levels.

    Where others work here, one entry may come and another of its size go between the walks, or
    a writer may begin: only what every round finds is complained about.
    """
    complaint = ""
    for _ in range(_ACCOUNTING_ROUNDS):
        plain = _plain_bytes(folders, skip={*before.foreign, *before.temps})
        after = take_census(folders)
        if not before.total_bytes == after.total_bytes != plain:
            return
        complaint = f"eviction counts {after.total_bytes} bytes, but there are {plain}"
        before = after
    yield complaint


def _plain_bytes(folders: Folders, *, skip: set[str]) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for top in (
        *(folders.objects, folders.pins, folders.spool, folders.quarantine, folders.index),
    ):
        for folder, below, names in os.walk(top, followlinks=False):
            below[:] = [name for name in below if f"{folder}/{name}" not in skip]
            for name in names:
                path = Path(folder, name)
                if str(path) in skip:
                    continue
                try:
                    found = os.lstat(path)
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())

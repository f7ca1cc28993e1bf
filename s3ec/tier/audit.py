# SPDX-License-Identifier: Apache-2.0
"""The tier's audit: everything on the disk compared with everything it should be."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Report, unreported
from s3ec.errors import CorruptEntryError
from s3ec.identity import digest_of_name, key_of_header
from s3ec.tier.census import Census, Entry, take_census
from s3ec.tier.files import FILE_MODE, FOLDER_MODE, Folders, is_stale_temp, open_entry
from s3ec.tier.headers import read_header
from s3ec.tier.pin_folders import is_dead, is_pin_folder_name, sweep_dead
from s3ec.tier.quarantine import KEPT_FILES, Quarantine
from s3ec.tier.spool_names import SpoolName

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


def audit(folders: Folders, *, now_s: float) -> list[str]:
    """Every complaint about the folder, one line each; reads every byte of every entry.

    May run while others use the folder: what they change meanwhile is not complained about.
    """
    return [complaint.text for complaint in complaints_about(folders, now_s=now_s)]


def complaints_about(
    folders: Folders, *, now_s: float, report: Report = unreported
) -> list[Complaint]:
    """The same with what can be done about it.

    Args:
        report: Told how many bytes were read.
    """
    census = take_census(folders)
    complaints = [Complaint(text) for text in census.troubles]
    complaints += _folder_complaints(folders)
    complaints += [
        Complaint(f"{path} is not ours; it is neither counted nor deleted")
        for path in census.foreign
    ]
    done = 0
    for entry in census.entries:
        complaints += _entry_complaints(folders, entry)
        done += entry.nbytes
        report("reading entries", done, census.entry_bytes)
    for path in census.spooled:
        complaints += _spool_complaints(path)
    complaints += [
        Complaint(
            f"{path} was left by a writer that died", "remove it", partial(_remove_temp, path)
        )
        for path in census.temps
        if is_stale_temp(path, now_s=now_s)
    ]
    complaints += _pin_complaints(folders)
    if len(census.quarantined) > KEPT_FILES:
        complaints.append(
            Complaint(f"{len(census.quarantined)} files are set aside, over {KEPT_FILES}")
        )
    complaints += [Complaint(text) for text in _accounting_complaints(folders, census)]
    return complaints


def _folder_complaints(folders: Folders) -> Iterator[Complaint]:
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
            text = f"folder {path} has mode {mode:o}, expected {FOLDER_MODE:o}"
            yield _mode_complaint(text, path, found, FOLDER_MODE)
        if found.st_uid != owner:
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


def _set_aside(folders: Folders, entry: Entry, reason: str) -> bool:
    """Move a bad entry away, unless somebody has published a better one since."""
    label = f"{entry.namespace}--{digest_of_name(entry.name).hex()}"
    try:
        if os.lstat(entry.path).st_ino != entry.inode:
            return False
        return Quarantine(folders).take(entry.path, label, reason, mtime_ns=entry.mtime_ns)
    except FileNotFoundError:
        return False


def _folders_below(top: str) -> Iterator[str]:
    for folder, _, _ in os.walk(top, followlinks=False):
        yield folder


def _entry_complaints(folders: Folders, entry: Entry) -> Iterator[Complaint]:
    def bad(reason: str) -> Complaint:
        mend = partial(_set_aside, folders, entry, reason)
        return Complaint(f"{entry.path} is bad: {reason}", "set it aside", mend)

    header = yield from _file_complaints(entry.path, bad)
    if header is None:
        return
    if key_of_header(header.identifier, digest_of_name(entry.name)) is None:
        yield bad("written for another identifier")
    elif header.namespace != entry.namespace:
        yield bad(f"written for namespace {header.namespace!r:.100}")


def _spool_complaints(path: str) -> Iterator[Complaint]:
    """Who holds such an entry sets it aside when its turn comes to be uploaded."""

    def bad(reason: str) -> Complaint:
        return Complaint(f"{path} is bad: {reason}")

    name = SpoolName.parse(path.rpartition("/")[2])
    header = yield from _file_complaints(path, bad)
    if header is None or name is None:
        return
    if key_of_header(header.identifier, name.digest) is None:
        yield bad("written for another identifier")
    elif header.namespace != name.namespace:
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
        if stat.S_IMODE(found.st_mode) != FILE_MODE:
            text = f"{path} has mode {stat.S_IMODE(found.st_mode):o}, expected {FILE_MODE:o}"
            yield _mode_complaint(text, path, found, FILE_MODE)
        if found.st_uid != os.geteuid():
            yield Complaint(f"{path} belongs to uid {found.st_uid}, expected {os.geteuid()}")
        try:
            header = read_header(fd, found.st_size)
            file.seek(header.data_start)
            codec.check_data(header, file.read())
        except (OSError, CorruptEntryError) as exc:
            yield bad(str(exc))
            return None
    return header


def _pin_complaints(folders: Folders) -> Iterator[Complaint]:
    try:
        names = os.listdir(folders.pins)
    except OSError:
        return
    for name in names:
        if is_pin_folder_name(name) and is_dead(f"{folders.pins}/{name}"):
            path = f"{folders.pins}/{name}"
            text = f"{path} holds the pins of a process that died"
            yield Complaint(text, "let go of them", partial(_sweep_pins, folders, path))


def _sweep_pins(folders: Folders, path: str) -> bool:
    sweep_dead(folders.pins)
    return not os.path.lexists(path)


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

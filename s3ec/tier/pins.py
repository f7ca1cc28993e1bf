# SPDX-License-Identifier: Apache-2.0
"""Pins: hard links in a folder of the pinning process, which eviction cannot take away.

Each process has a folder of its own below ``pins/``, and one below ``spool/`` for the spool. Its
name says whose it is, and its owner holds a lock in it. So others can tell the folders of the
living from those of the dead, whose pins they sweep and whose spool they take over.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import OBJECT_SUFFIX
from s3ec.tier.files import (
    FILE_MODE,
    NO_LINK,
    Folders,
    copy_entry,
    make_folder,
    open_entry,
    own_start_time,
    require_own_folder,
    require_own_folders,
    seems_alive,
    take_lock,
    try_lock,
)

LOCK_NAME = ".lock"
_FOLDER = re.compile(r"([1-9][0-9]{0,9})-([0-9]{1,20})-[0-9a-f]{8}")
_PIN = re.compile(r"[0-9]{1,19}-[0-9a-f]{32}" + re.escape(OBJECT_SUFFIX))
# Each attempt to pin fails only if another process replaces the entry within microseconds.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry that stays readable until unpin, whatever eviction does.

    Attributes:
        path: The file to read; may be read by other processes of the node too.
        nbytes: Size of the whole file.
        header: Parsed and compared with the key when pinned. The checksum was not: the fetch
            that pinned it does that, and who loads it once more.
    """

    path: Path
    nbytes: int
    header: Header


@dataclass(frozen=True, slots=True)
class Held:
    """A pin in the making.

    Attributes:
        path: The pin.
        fd: Reads the entry itself (where links are impossible, ``path`` is a copy of it); -1 where
            it was not opened.
    """

    path: str
    fd: int


class Pins:
    """This process's pins. Thread-safe without a lock of its own."""

    def __init__(self, folders: Folders, counters: Counters, *, min_free_bytes: int) -> None:
        self._counters = counters
        self._min_free_bytes = min_free_bytes
        self._numbers = itertools.count()
        self._undropped: deque[str] = deque()
        self._above = (*folders.above, str(folders.pins))
        self._own = OwnFolder(folders, folders.pins, end=ProcessFolder.remove)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called; from then on nothing is pinned."""
        return self._own.closed

    def folder(self) -> Path:
        """Where this process's pins lie now; its name is random, and no other process's.

        Raises:
            TierError: It could not be made, or the tier is closed.
        """
        try:
            return Path(self._own.path())
        except OSError as exc:
            raise TierError(f"cannot make a folder for pins: {exc}") from exc

    def make_folder(self) -> None:
        """Make the folder now, so that a file system that cannot do it is found at the start.

        Raises:
            OSError: It could not be made.
        """
        self._own.path()

    def hold(self, source: str, digest: bytes) -> Held | None:
        """Link an entry into our folder.

        Returns:
            None where the entry is absent. The caller closes ``fd``, and drops ``path`` when
            it does not like what it reads.

        Raises:
            CorruptEntryError: Not a regular file; nothing is left behind.
            OSError, TierError: The file system refused, or the tier is closed.
        """
        return self._hold(source, digest, self._opened)

    def link(self, file: str, digest: bytes) -> str | None:
        """As ``hold``, for a file that this process has just made: nobody looks what it is.

        Returns:
            The pin; None where the file is gone.
        """
        held = self._hold(file, digest, lambda target: Held(target, -1))
        if held is None:
            return None
        if held.fd >= 0:
            os.close(held.fd)
        return held.path

    def _hold(self, source: str, digest: bytes, made: Callable[[str], Held]) -> Held | None:
        for _ in range(_ATTEMPTS):
            folder = self._own.path()
            target = f"{folder}/{next(self._numbers)}-{digest.hex()}{OBJECT_SUFFIX}"
            try:
                require_own_folders((*self._above, folder))
                os.link(source, target, follow_symlinks=False)
                return made(target)
            except FileNotFoundError:
                if not self._own.has_vanished(folder) and not os.path.lexists(source):
                    return None
                # Else the entry was replaced while we linked it: Linux found the file by its
                # name, lost it, and does not link a file that has no name left.
            except OSError as exc:
                if exc.errno not in NO_LINK:
                    raise
                return self._copy(source, target)
        return None

    def drop(self, path: str) -> None:
        """Remove one pin; absent is fine. One that is not ours (a forked parent's) is left alone.

        Raises:
            OSError, TierError: The file system refused. It is tried again after the next one
                that works: until then eviction passes its bytes over.
        """
        if not self._own.owns(path):
            return
        self._unlink(path)
        with suppress(IndexError, OSError, TierError):
            while True:
                self._unlink(self._undropped.popleft())

    def close(self) -> None:
        """Drop all pins of this process and its folders."""
        self._own.close()

    def _unlink(self, path: str) -> None:
        try:
            require_own_folders((*self._above, path.rpartition("/")[0]))
            os.unlink(path)
        except FileNotFoundError:
            pass
        except (OSError, TierError):
            self._undropped.append(path)
            raise

    def _opened(self, target: str) -> Held:
        try:
            return Held(target, open_entry(target))
        except BaseException:
            self.drop(target)
            raise

    def _copy(self, source: str, target: str) -> Held | None:
        """Pin by copying, where links are impossible: slow, and counted."""
        try:
            fd, _ = copy_entry(source, target, min_free_bytes=self._min_free_bytes, purpose="pin")
        except FileNotFoundError:
            return None
        self._counters.add("tier.pin_copies")
        return Held(target, fd)


class OwnFolder:
    """This process's folder below ``pins/`` or ``spool/``.

    Made with the first use, made anew when it vanished, and ended by ``close``. Thread-safe without
    a lock of its own.
    """

    def __init__(
        self, folders: Folders, parent: Path, *, end: Callable[[ProcessFolder], None]
    ) -> None:
        """Nothing is made yet.

        Args:
            parent: ``folders.pins`` or ``folders.spool``.
            end: What becomes of the folder at close; must not raise.
        """
        self._folders = folders
        self._parent = parent
        self._end = end
        # By generation, so that threads which find the folder gone agree on its successor:
        # dict.setdefault is atomic.
        self._made: dict[int, ProcessFolder] = {}
        self._generation = 0
        self.closed = False

    def path(self) -> str:
        """Where to put files now.

        Raises:
            OSError: It could not be made.
            TierError: Closed.
        """
        generation = self._generation
        folder = self._made.get(generation)
        if folder is not None:
            return folder.path
        made = ProcessFolder.make(self._parent)
        folder = self._made.setdefault(generation, made)
        if folder is not made:
            made.remove()
        elif self.closed:  # meanwhile, or before
            self.close()
            raise TierError("the tier is closed")
        return folder.path

    def has_vanished(self, path: str) -> bool:
        """Whether that folder is gone; then all above it is made again, and ``path`` is new.

        Raises:
            OSError, TierError: What is above it could not be made.
        """
        if os.path.lexists(path):
            return False
        for generation, made in list(self._made.items()):
            if made.path == path:  # another thread may have noticed first
                self._generation = max(self._generation, generation + 1)
        self._folders.make()
        return True

    def owns(self, path: str) -> bool:
        """Whether a file lies in such a folder."""
        folder = path.rpartition("/")[0]
        return any(made.path == folder for made in list(self._made.values()))

    def close(self) -> None:
        """End all folders of this process."""
        self.closed = True
        for generation in list(self._made):
            folder = self._made.pop(generation, None)
            if folder is not None:
                self._end(folder)


@dataclass(frozen=True, slots=True)
class ProcessFolder:
    """The folder of one process; exists, locked, until remove, release or the process's end."""

    path: str
    lock_fd: int

    @classmethod
    def make(cls, parent: Path) -> ProcessFolder:
        """Create a folder for this process below ``pins/`` or ``spool/``.

        Raises:
            OSError: The file system refused, or has no locks.
        """
        for _ in range(3):
            path = parent / f"{os.getpid()}-{own_start_time()}-{secrets.token_hex(4)}"
            make_folder(path)
            lock = path / LOCK_NAME
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            except FileNotFoundError:
                continue  # swept by another container before it was locked
            except OSError:
                _empty(str(path))
                raise
            made = cls(str(path), fd)
            try:
                os.fchmod(fd, FILE_MODE)
                if try_lock(fd) and os.path.samestat(os.fstat(fd), os.lstat(lock)):
                    return made
                os.close(fd)  # swept too; what stands under its name now is not ours
            except FileNotFoundError:
                os.close(fd)
            except BaseException:
                made.remove()
                raise
        raise OSError(errno.EAGAIN, "folders vanish as soon as they are made", str(parent))

    def remove(self) -> None:
        """Drop all pins in it; never raises."""
        _empty(self.path)
        with suppress(OSError):
            os.close(self.lock_fd)

    def release(self) -> None:
        """Leave what is in it to the next process, even while this one lives; never raises."""
        above, _, name = self.path.rpartition("/")
        pid, _, rest = name.split("-")
        with suppress(OSError, TierError):
            require_own_folders((above, self.path))
            if os.listdir(self.path) == [LOCK_NAME]:
                self.remove()
                return
            os.rename(self.path, f"{above}/{pid}-0-{rest}")
        with suppress(OSError):
            os.close(self.lock_fd)


def is_pin_name(name: str) -> bool:
    """Whether a file in a pin folder is a pin."""
    return _PIN.fullmatch(name) is not None


def is_process_folder_name(name: str) -> bool:
    """Whether an entry of ``pins/`` or ``spool/`` could be a process's folder."""
    return _FOLDER.fullmatch(name) is not None


def looks_dead(folder: str) -> bool:
    """Whether ``/proc`` knows no such owner; only the lock makes it sure."""
    match = _FOLDER.fullmatch(folder.rpartition("/")[2])
    return match is not None and not seems_alive(int(match[1]), match[2])


def is_dead(folder: str) -> bool:
    """Whether the process that made this folder is gone, by both witnesses."""
    if not looks_dead(folder):
        return False
    try:
        fd = take_lock(f"{folder}/{LOCK_NAME}")
    except OSError:
        return False
    if fd is not None:
        os.close(fd)
    return True


def sweep_dead(pins: Path) -> None:
    """Remove the pin folders of dead processes; never raises."""
    try:
        require_own_folder(pins)
        folders = [f"{pins}/{name}" for name in os.listdir(pins)]
    except (OSError, TierError):
        return
    for folder in folders:
        if looks_dead(folder):
            with suppress(OSError, TierError):
                require_own_folder(folder)
                _sweep(folder)


def _sweep(folder: str) -> None:
    lock = f"{folder}/{LOCK_NAME}"
    fd = take_lock(lock)
    if fd is None:
        # Just made by another container and not locked yet? Then it is empty, and its maker
        # starts again when it is gone. With pins in it, its lock was lost long ago.
        try:
            os.rmdir(folder)
            return
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        fd = take_lock(lock)
    _empty(folder)
    if fd is not None:
        os.close(fd)


def _empty(path: str) -> None:
    """Remove a pin folder and what pins put there; anything else in it stays, and so does it."""
    with suppress(OSError, TierError):
        require_own_folders((path.rpartition("/")[0], path))
        for name in os.listdir(path):
            if _PIN.fullmatch(name):
                with suppress(OSError):
                    os.unlink(f"{path}/{name}")
        # Last, because it is what tells others that somebody is at work here.
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{LOCK_NAME}")
        os.rmdir(path)

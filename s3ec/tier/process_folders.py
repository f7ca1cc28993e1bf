# SPDX-License-Identifier: Apache-2.0
"""Folders of processes, live and dead: each has its own below the tier."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec.errors import TierError
from s3ec.identity import OBJECT_SUFFIX, is_namespace_name
from s3ec.tier.files import (
    FILE_MODE,
    Folders,
    check_folder,
    make_folder,
    own_start_time,
    require_own_folders,
    seems_alive,
    try_lock,
)

_NAME = re.compile(r"(.+)--([0-9a-f]{16})--([0-9a-f]{32})" + re.escape(OBJECT_SUFFIX))


@dataclass(frozen=True, slots=True)
class SpoolName:
    """The parts of ``NAMESPACE--DESTINATION--DIGEST.safetensors``.

    Attributes:
        namespace: ``Namespace.name``.
        destination: 16 hex digits that stand for a bucket and a folder in it. Namespaces do
            not tell those apart, and what was saved for one bucket must not end in another.
        digest: ``Key.digest``.
    """

    namespace: str
    destination: str
    digest: bytes

    def __str__(self) -> str:
        return f"{self.namespace}--{self.destination}--{self.digest.hex()}{OBJECT_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> SpoolName | None:
        """The parts of a file name, None where it is no such name."""
        match = _NAME.fullmatch(name)
        if match is None or not is_namespace_name(match[1]):
            return None
        return cls(match[1], match[2], bytes.fromhex(match[3]))


class OwnFolder:
    """Thread-safe without a lock of its own; made anew when it vanished."""

    def __init__(self, folders: Folders, parent: Path, *, end: Callable[[PinFolder], None]) -> None:
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
        self._made: dict[int, PinFolder] = {}
        self._generation = 0
        self._closed = False

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
        made = PinFolder.make(self._parent)
        folder = self._made.setdefault(generation, made)
        if folder is not made:
            made.remove()
        elif self._closed:  # meanwhile, or before
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

    def reopen(self) -> None:
        """Make the folder now, so that a file system that cannot do it is found at the start."""
        self._closed = False
        self.path()

    def close(self) -> None:
        """End all folders of this process."""
        self._closed = True
        for generation in list(self._made):
            folder = self._made.pop(generation, None)
            if folder is not None:
                self._end(folder)


LOCK_NAME = ".lock"

_FOLDER = re.compile(r"([1-9][0-9]{0,9})-([0-9]{1,20})(?:-[0-9a-f]{8})?")
_PIN = re.compile(r"[0-9]{1,19}-[0-9a-f]{32}" + re.escape(OBJECT_SUFFIX))


@dataclass(frozen=True, slots=True)
class PinFolder:
    """The folder of one process; exists, locked, until remove, release or the process's end."""

    path: str
    lock_fd: int

    @classmethod
    def make(cls, parent: Path) -> PinFolder:
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
                os.close(fd)  # likewise; what stands under its name now is not ours
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


def is_pin_name(name: str) -> bool:
    """Whether a file in a pin folder is a pin."""
    return _PIN.fullmatch(name) is not None


def is_pin_folder_name(name: str) -> bool:
    """Whether an entry of ``pins/`` or ``spool/`` could be a process's folder."""
    return _FOLDER.fullmatch(name) is not None


def is_dead(folder: str) -> bool:
    """Whether the process that made this pin folder is gone, by both witnesses."""
    if not looks_dead(folder):
        return False
    try:
        fd = take_lock(folder)
    except OSError:
        return False
    if fd is not None:
        os.close(fd)
    return True


def sweep_dead(pins: Path) -> int:
    """Remove the pin folders of dead processes; never raises.

    Returns:
        How many were removed.
    """
    try:
        check_folder(pins)
        folders = [f"{pins}/{name}" for name in os.listdir(pins)]
    except (OSError, TierError):
        return 0
    swept = 0
    for folder in folders:
        if looks_dead(folder):
            with suppress(OSError, TierError):
                check_folder(folder)
                _sweep(folder)
                swept += not os.path.lexists(folder)
    return swept


def _sweep(folder: str) -> None:
    fd = take_lock(folder)
    if fd is None:
        # Just made by another container and not locked yet? Then it is empty, and its maker
        # starts again when it is gone. With pins in it, its lock was lost long ago.
        try:
            os.rmdir(folder)
            return
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        fd = take_lock(folder)
    _empty(folder)
    if fd is not None:
        os.close(fd)


def looks_dead(folder: str) -> bool:
    """Whether ``/proc`` knows no such owner; only the lock makes it sure."""
    match = _FOLDER.fullmatch(folder.rpartition("/")[2])
    return match is not None and not seems_alive(int(match[1]), match[2])


def take_lock(folder: str) -> int | None:
    """Lock a folder that is not ours.

    Returns:
        The lock's descriptor, None where the folder has no lock.

    Raises:
        OSError: Somebody holds it (BlockingIOError), or it cannot be opened.
    """
    try:
        fd = os.open(f"{folder}/{LOCK_NAME}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(fd):
            raise BlockingIOError(errno.EWOULDBLOCK, "in use", folder)
    except BaseException:
        os.close(fd)
        raise
    return fd

# SPDX-License-Identifier: Apache-2.0
"""The folder of one process below ``spool/``, which the next process takes over.

Its name says whose it is, and its owner holds a lock in it. So others can tell the folders of the
living from those of the dead.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec.errors import TierError
from s3ec.tier.files import (
    FILE_MODE,
    Folders,
    make_folder,
    own_start_time,
    require_own_folders,
    seems_alive,
    try_lock,
)

LOCK_NAME = ".lock"
_FOLDER = re.compile(r"([1-9][0-9]{0,9})-([0-9]{1,20})-[0-9a-f]{8}")


class OwnFolder:
    """This process's folder below ``spool/``.

    Made with the first use, made anew when it vanished, and ended by ``close``. Thread-safe without
    a lock of its own.
    """

    def __init__(self, folders: Folders) -> None:
        """Nothing is made yet."""
        self._folders = folders
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
        made = ProcessFolder.make(self._folders.spool)
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

    def close(self) -> None:
        """End all folders of this process."""
        self.closed = True
        for generation in list(self._made):
            folder = self._made.pop(generation, None)
            if folder is not None:
                folder.release()


@dataclass(frozen=True, slots=True)
class ProcessFolder:
    """The folder of one process; exists, locked, until remove, release or the process's end."""

    path: str
    lock_fd: int

    @classmethod
    def make(cls, parent: Path) -> ProcessFolder:
        """Create a folder for this process below ``spool/``.

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
                with suppress(OSError):
                    os.rmdir(path)
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
        """Remove it, empty but for the lock; never raises."""
        with suppress(OSError, TierError):
            require_own_folders((self.path.rpartition("/")[0], self.path))
            # Last, because it is what tells others that somebody is at work here.
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{LOCK_NAME}")
            os.rmdir(self.path)
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


def is_process_folder_name(name: str) -> bool:
    """Whether an entry of ``spool/`` could be a process's folder."""
    return _FOLDER.fullmatch(name) is not None


def looks_dead(folder: str) -> bool:
    """Whether ``/proc`` knows no such owner; only the lock makes it sure."""
    match = _FOLDER.fullmatch(folder.rpartition("/")[2])
    return match is not None and not seems_alive(int(match[1]), match[2])

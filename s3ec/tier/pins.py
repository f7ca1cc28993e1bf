# SPDX-License-Identifier: Apache-2.0
"""Pins: hard links in a folder of the pinning process, which eviction cannot take away."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import OBJECT_SUFFIX
from s3ec.tier.files import FILE_MODE, Folders, free_bytes, open_entry
from s3ec.tier.pin_folders import PinFolder

# What a file system says that has no hard links (FAT, some network and FUSE ones), where a
# file has too many of them, or where objects and pins are different mounts.
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_COPY_BYTES = 1 << 24
# Each fails only if another process replaces the entry within microseconds.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry that stays readable until unpin, whatever eviction does.

    Attributes:
        path: The file to read; may be read by other processes of the node too.
        nbytes: Size of the whole file.
        header: Parsed and compared with the key when pinned. The checksum was not: whoever
            reads the file checks it.
    """

    path: Path
    nbytes: int
    header: Header


@dataclass(frozen=True, slots=True)
class Held:
    """A pin in the making.

    Attributes:
        path: The pin.
        fd: Reads the entry itself (where links are impossible, ``path`` is a copy of it).
    """

    path: str
    fd: int


class Pins:
    """This process's pins. Thread-safe without a lock of its own; survives a fork."""

    def __init__(self, folders: Folders, counters: Counters, *, min_free_bytes: int) -> None:
        self._folders = folders
        self._counters = counters
        self._min_free_bytes = min_free_bytes
        self._numbers = itertools.count()
        # By generation, so that threads which find the folder gone agree on its successor:
        # dict.setdefault is atomic.
        self._made: dict[int, PinFolder] = {}
        self._generation = 0
        self._closed = False

    def open(self) -> None:
        """Make the folder now, so that a file system that cannot do it is found at the start."""
        self._closed = False
        self._folder(self._generation)

    def hold(self, source: str, digest: bytes) -> Held | None:
        """Link an entry into our folder.

        Returns:
            None where the entry is absent. The caller closes ``fd``, and drops ``path`` when
            it does not like what it reads.

        Raises:
            CorruptEntryError: Not a regular file; nothing is left behind.
            OSError, TierError: The file system refused.
        """
        for _ in range(_ATTEMPTS):
            generation = self._generation
            folder = self._folder(generation).path
            target = f"{folder}/{next(self._numbers)}-{digest.hex()}{OBJECT_SUFFIX}"
            try:
                os.link(source, target, follow_symlinks=False)
                return self._opened(target)
            except FileNotFoundError:
                if not os.path.lexists(folder):
                    # Vanished under us; another thread may have noticed first.
                    self._generation = max(self._generation, generation + 1)
                    self._folders.make()
                elif not os.path.lexists(source):
                    return None
                # Else the entry was replaced while we linked it: Linux found the file by its
                # name, lost it, and does not link a file that has no name left.
            except OSError as exc:
                if exc.errno not in _NO_LINK:
                    raise
                return self._copy(source, target)
        return None

    def owns(self, path: str) -> bool:
        """Whether this process made that pin; a forked child does not own its parent's."""
        folder = path.rpartition("/")[0]
        return any(made.path == folder for made in list(self._made.values()))

    def drop(self, path: str) -> None:
        """Remove one pin; absent is fine.

        Raises:
            OSError: The file system refused.
        """
        with suppress(FileNotFoundError):
            os.unlink(path)

    def close(self) -> None:
        """Drop all pins of this process and its folders."""
        self._closed = True
        for generation in list(self._made):
            folder = self._made.pop(generation, None)
            if folder is not None:
                folder.remove()

    def after_fork(self) -> None:
        """In the child: the folders are the parent's. Its locks must not live on in us."""
        for folder in self._made.values():
            with suppress(OSError):
                os.close(folder.lock_fd)
        self._made.clear()

    def _folder(self, generation: int) -> PinFolder:
        folder = self._made.get(generation)
        if folder is not None:
            return folder
        made = PinFolder.make(self._folders.pins)
        folder = self._made.setdefault(generation, made)
        if folder is not made:
            made.remove()
        elif self._closed:  # meanwhile, or before
            self.close()
            raise TierError("the tier is closed")
        return folder

    def _opened(self, target: str) -> Held:
        try:
            return Held(target, open_entry(target))
        except BaseException:
            self.drop(target)
            raise

    def _copy(self, source: str, target: str) -> Held | None:
        """Pin by copying, where links are impossible: slow, and counted."""
        try:
            fd = open_entry(source)
        except FileNotFoundError:
            return None
        try:
            nbytes = os.fstat(fd).st_size
            if free_bytes(self._folders.pins) - nbytes < self._min_free_bytes:
                raise TierError(f"no room to pin {nbytes} bytes by copying them")
            _copy_file(fd, target, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._counters.add("tier.pin_copies")
        return Held(target, fd)


def _copy_file(source_fd: int, target: str, nbytes: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target_fd = os.open(target, flags, FILE_MODE)
    try:
        try:
            os.fchmod(target_fd, FILE_MODE)
            offset = 0
            while sent := os.sendfile(target_fd, source_fd, offset, _COPY_BYTES):
                offset += sent
            if offset != nbytes:
                raise OSError(errno.EIO, "the entry changed while it was copied", target)
        finally:
            os.close(target_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(target)
        raise

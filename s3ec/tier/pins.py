# SPDX-License-Identifier: Apache-2.0
"""Pins: hard links in a folder of the pinning process, which eviction cannot take away."""

from __future__ import annotations

import itertools
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import OBJECT_SUFFIX
from s3ec.tier.files import (
    NO_LINK,
    Folders,
    copy_file,
    free_bytes,
    open_entry,
    require_own_folders,
)
from s3ec.tier.process_folders import OwnFolder, PinFolder

# Each fails only if another process replaces the entry within microseconds.
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
        fd: Reads the entry itself (where links are impossible, ``path`` is a copy of it).
    """

    path: str
    fd: int


class Pins:
    """This process's pins. Thread-safe without a lock of its own."""

    def __init__(self, folders: Folders, counters: Counters, *, min_free_bytes: int) -> None:
        self._folders = folders
        self._counters = counters
        self._min_free_bytes = min_free_bytes
        self._numbers = itertools.count()
        self._undropped: deque[str] = deque()
        self._above = (*folders.above, str(folders.pins))
        self._own = OwnFolder(folders, folders.pins, end=PinFolder.remove)

    def open(self) -> None:
        """Make the folder now, so that a file system that cannot do it is found at the start."""
        self._own.reopen()

    def folder(self) -> str:
        """Where this process's pins lie now.

        Raises:
            OSError, TierError: It could not be made, or the tier is closed.
        """
        return self._own.path()

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
            folder = self._own.path()
            target = f"{folder}/{next(self._numbers)}-{digest.hex()}{OBJECT_SUFFIX}"
            try:
                require_own_folders((*self._above, folder))
                os.link(source, target, follow_symlinks=False)
                return self._opened(target)
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

    def owns(self, path: str) -> bool:
        """Whether the pin is one of these; a forked parent's are not."""
        return self._own.owns(path)

    def drop(self, path: str) -> None:
        """Remove one pin; absent is fine.

        Raises:
            OSError, TierError: The file system refused. It is tried again after the next one
                that works: until then eviction passes its bytes over.
        """
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
            fd = open_entry(source)
        except FileNotFoundError:
            return None
        try:
            nbytes = os.fstat(fd).st_size
            if free_bytes(self._folders.pins) - nbytes < self._min_free_bytes:
                raise TierError(f"no room to pin {nbytes} bytes by copying them")
            copy_file(fd, target, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._counters.add("tier.pin_copies")
        return Held(target, fd)

# SPDX-License-Identifier: Apache-2.0
"""The index's files of one namespace on this node: whole or absent, counted.

They are not evicted while the namespace is used here. What no process has touched for a week goes
when room is needed, see ``evictor.py``.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from s3ec import codec
from s3ec.errors import CorruptEntryError
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.entry_writer import EntryWriter, Incoming
from s3ec.tier.files import Folders, TempFile, read_small
from s3ec.tier.scan import is_index_name


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One file as a walk found it.

    Attributes:
        name: As in the bucket, below ``manifest/``.
        nbytes: Size.
        modified_s: When it came here, seconds since the epoch.
    """

    name: str
    nbytes: int
    modified_s: float


class IndexFiles:
    """Blocking and thread-safe; shared by all processes of the node. Made by ``Tier.open_index``.

    Files are never changed once they have their name, so a mapping of one stays good, also after
    ``remove``. They are not synced to the device, so one from before this boot may have its size
    and hold zeros: see ``is_doubtful``.

    Attributes:
        claims: Give a claim of ``try_claim`` back here.
    """

    def __init__(
        self, folders: Folders, namespace: str, writer: EntryWriter, claims: Claims
    ) -> None:
        self._top = str(folders.index / namespace)
        self._writer = writer
        self.claims = claims

    def path(self, name: str) -> str:
        """Where a file lies, or would.

        Raises:
            ValueError: No file of the index has such a name.
        """
        if not is_index_name(name):
            raise ValueError(f"not a name of the index: {name!r:.100}")
        return f"{self._top}/{name}"

    def find(self, name: str) -> IndexFile | None:
        """Some stats; None where there is no regular file."""
        try:
            found = os.lstat(self.path(name))
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return IndexFile(name, found.st_size, found.st_mtime)

    def read(self, name: str, *, max_bytes: int) -> bytes | None:
        """All bytes of a file; None where it is absent.

        For small files, of which there may be more than a process may have open or mapped.

        Raises:
            CorruptEntryError: Not a regular file, not ours, or larger than ``max_bytes``.
            OSError: The disk refused.
        """
        try:
            return read_small(self.path(name), max_bytes=max_bytes)
        except FileNotFoundError:
            return None

    def is_doubtful(self, file: IndexFile) -> bool:
        """Whether a file came before this machine was started: read it all before using it."""
        return file.modified_s < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def trust(self, name: str) -> None:
        """Note that a doubtful file was good. Never raises."""
        with suppress(OSError):
            os.utime(self.path(name), follow_symlinks=False)

    def touch(self) -> None:
        """Say that a process of this node uses these files; some short calls. Never raises."""
        with suppress(OSError):
            os.utime(self._top, follow_symlinks=False)

    def walk(self) -> Iterator[IndexFile]:
        """All files that are here."""
        for folder, _, names in os.walk(self._top, followlinks=False):
            below = folder[len(self._top) + 1 :]
            for each in names:
                name = f"{below}/{each}"
                file = self.find(name) if is_index_name(name) else None
                if file is not None:
                    yield file

    def begin(
        self, name: str, called: str, nbytes: int, checksum: str, check: Callable[[str], object]
    ) -> Incoming[None]:
        """Receive a file part by part; it appears when the last one was good.

        Entries are evicted where there is no room for it.

        Args:
            called: Its name in messages.
            nbytes: What it will have in the end.
            checksum: Of all its bytes, as ``codec.checksum`` has it.
            check: Gets the path of the whole file before it has its name; raises
                CorruptEntryError where its content is refused.

        Raises:
            TierError: There will be no room, or the disk refused.
        """
        path, running = self.path(name), codec.running_checksum()

        def commit(file: TempFile) -> None:
            if running.hexdigest() != checksum:
                raise CorruptEntryError(f"{called}: wrong checksum", reason="checksum")
            check(file.path)
            self._writer.place(file, path)

        return self._writer.open(called, nbytes, check=running.update, commit=commit)

    def write(self, name: str, body: bytes | memoryview) -> None:
        """Keep a whole file, verified by the caller.

        Raises:
            TierError: There is no room, or the disk refused.
        """
        place = partial(self._writer.place, path=self.path(name))
        incoming = self._writer.open(name, len(body), check=bool, commit=place)
        incoming.write_checked(body)
        incoming.commit()

    def remove(self, name: str) -> None:
        """Drop one file, and its folder with the last; absent is fine. Never raises.

        The running total learns it from the next walk.
        """
        path = self.path(name)
        with suppress(OSError):
            os.unlink(path)
        if name.count("/") > 1:
            with suppress(OSError):
                os.rmdir(path.rpartition("/")[0])

    def try_claim(self, task: str) -> Claim | None:
        """Claim a task, of any name, for this process; never waits.

        Returns:
            None where another process (or Tier) of the node has it. The kernel gives back what a
            process that ended had.
        """
        return self.claims.take(_place(task))


def _place(task: str) -> bytes:
    """Like the digest of an entry, and of none: object names end in ``.safetensors`` only."""
    return hashlib.sha256(f"index:{task}".encode()).digest()[:16]

# SPDX-License-Identifier: Apache-2.0
"""How an entry gets onto the disk: written apart, renamed, counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from errno import EDQUOT, ENOSPC

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.tier.entry_paths import EntryPaths
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import Folders, TempFile, require_own_folders
from s3ec.tier.use_clock import UseClock

Hold = Callable[[str], None]
"""Takes hold of a finished file, by its path, before it gets its name."""

# To write one entry: the folder may be missing, the disk full, the folder evicted meanwhile.
_ATTEMPTS = 4


class Publisher:
    """Of one namespace; blocking and thread-safe."""

    def __init__(
        self,
        folders: Folders,
        paths: EntryPaths,
        evictor: Evictor,
        clock: UseClock,
        counters: Counters,
    ) -> None:
        self._folders = folders
        self._paths = paths
        self._evictor = evictor
        self._clock = clock
        self._counters = counters

    def publish(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        *,
        hold: Hold | None = None,
        counted: bool = False,
        used: bool = True,
    ) -> None:
        """Write one entry, whole or not at all; see ``Tier.publish``.

        Args:
            hold: May be called again where an attempt failed after it.
            counted: ``hold`` tells the running total.
            used: As in ``Tier.publish``.

        Raises:
            TierError: No room, or the disk refused.
        """
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            self._evictor.need_room(nbytes)
            self._write(key, pieces, nbytes, hold, used)
        except OSError as exc:
            raise TierError(f"cannot write {self._paths.path(key)}: {exc}") from exc
        self._count(nbytes, counted=counted)

    def begin(self, nbytes: int) -> TempFile:
        """A file for an entry that comes in parts.

        Args:
            nbytes: What it will have in the end.

        Raises:
            TierError: There will be no room.
            OSError: The disk refused.
        """
        self._evictor.need_room(nbytes)
        try:
            return self._open_temp()
        except FileNotFoundError:
            self._folders.make()
            return self._open_temp()

    def make_room(self, nbytes: int) -> int:
        """Free at least so many bytes, whatever the figures say; answers how many.

        statvfs shows neither quotas nor a lack of inodes: without this a full one would stay full.

        Raises:
            OSError: The disk refused.
        """
        return self._evictor.make_room(nbytes, at_least_bytes=nbytes, wait=True)

    def finish(self, key: Key, file: TempFile, *, hold: Hold | None = None) -> None:
        """Make a file of ``begin``, whole and verified by now, the entry.

        Raises:
            OSError, TierError: It is no entry, and gone.
        """
        self._finish(key, file, hold, used=True)
        self._count(file.nbytes, counted=False)

    def _write(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        nbytes: int,
        hold: Hold | None,
        used: bool,
    ) -> None:
        """Write; again after a vanished folder and after a full disk, a few times at most."""
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                file = self._open_temp()
                try:
                    file.append(pieces)
                except BaseException:
                    file.discard()
                    raise
                self._finish(key, file, hold, used=used)
                return
            except FileNotFoundError:
                if last:
                    raise
                self._folders.make()
            except OSError as exc:
                if last or exc.errno not in (ENOSPC, EDQUOT) or not self.make_room(nbytes):
                    raise

    def _open_temp(self) -> TempFile:
        incoming = str(self._folders.incoming)
        require_own_folders((*self._folders.above, incoming))
        return TempFile(incoming)

    def _finish(self, key: Key, file: TempFile, hold: Hold | None, *, used: bool) -> None:
        """Give a finished file its name; a present one is replaced.

        Raises:
            OSError: The file is gone now. FileNotFoundError: it was gone before (another
                container took it for a dead process's); it can be written again.
            TierError: A folder on the way is not one, or ``hold`` refused; likewise.
        """
        try:
            file.close()
            mtime_ns = self._clock.use_ns() if used else self._clock.unused_ns()
            os.utime(file.path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
            if hold is not None:
                hold(file.path)
            self._rename(file.path, self._paths.path(key), self._paths.parents(key))
        except BaseException:
            file.discard()
            raise

    def name_file(self, file: TempFile, path: str, parents: Sequence[str]) -> None:
        """Give a file of ``begin`` that is no entry its name; a present one is replaced.

        Args:
            parents: Its folders from the root down; made if missing.

        Raises:
            OSError, TierError: It is gone.
        """
        try:
            file.close()
            self._rename(file.path, path, parents)
        except BaseException:
            file.discard()
            raise
        self._evictor.account(file.nbytes)

    def _count(self, nbytes: int, *, counted: bool) -> None:
        if not counted:
            self._evictor.account(nbytes)
        self._counters.add("tier.published")
        self._counters.add("tier.published_bytes", nbytes)

    def _rename(self, temp: str, path: str, parents: Sequence[str]) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                require_own_folders(parents)
                os.replace(temp, path)
                return
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1 or not os.path.lexists(temp):
                    raise
                self._folders.make_below(parents)

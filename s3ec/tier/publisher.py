# SPDX-License-Identifier: Apache-2.0
"""How an entry gets onto the disk: written apart, renamed, counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.tier.entry_paths import EntryPaths
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import Folders, require_real_folders, write_temp
from s3ec.tier.spool import Spool
from s3ec.tier.use_clock import UseClock

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
        self, key: Key, pieces: Sequence[bytes | memoryview], *, spool: Spool | None, used: bool
    ) -> None:
        """See ``Tier.publish``."""
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            self._evictor.need_room(nbytes)
            self._write(key, pieces, nbytes, spool, used)
        except OSError as exc:
            raise TierError(f"cannot write {self._paths.path(key)}: {exc}") from exc

    def finish(
        self, key: Key, temp: str, nbytes: int, *, spool: Spool | None = None, used: bool = True
    ) -> None:
        """Make a finished file the entry, and count it; a present one is replaced.

        Args:
            temp: Below ``Folders.incoming``, mode 0600, whole and verified.
            nbytes: Its size, which ``Evictor.need_room`` was asked for.
            spool: As in ``Tier.publish``.
            used: As in ``Tier.publish``.

        Raises:
            OSError: ``temp`` is gone now. FileNotFoundError: it was gone before (another
                container took it for a dead process's); it can be written again.
            TierError: A folder on the way is not one, or the spool refused; likewise.
        """
        try:
            mtime_ns = self._clock.use_ns() if used else self._clock.unused_ns()
            os.utime(temp, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
            if spool is not None:
                spool.add(key, temp)  # counts it too
            self._rename(temp, key)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        if spool is None:
            self._evictor.account(nbytes)
        self._counters.add("tier.published")
        self._counters.add("tier.published_bytes", nbytes)

    def _write(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        nbytes: int,
        spool: Spool | None,
        used: bool,
    ) -> None:
        """Write; again after a vanished folder and after a full disk, a few times at most."""
        incoming = str(self._folders.incoming)
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                require_real_folders((incoming,))
                temp = write_temp(incoming, pieces)
                self.finish(key, temp, nbytes, spool=spool, used=used)
                return
            except FileNotFoundError:
                if last:
                    raise
                self._folders.make()
            except OSError as exc:
                # statvfs shows neither quotas nor a lack of inodes: without this a full one
                # would stay full.
                if last or exc.errno not in (ENOSPC, EDQUOT):
                    raise
                if not self._evictor.make_room(nbytes, at_least_bytes=nbytes, wait=True):
                    raise

    def _rename(self, temp: str, key: Key) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                require_real_folders(self._paths.parents(key))
                os.replace(temp, self._paths.path(key))
                return
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1 or not os.path.lexists(temp):
                    raise
                self._folders.make_below(self._paths.parent(key))

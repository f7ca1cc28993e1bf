# SPDX-License-Identifier: Apache-2.0
"""New bytes on this node's disk: taken in, verified, pinned, and named last."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path

from s3ec.codec import Header, Verifier
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.entries import Entries, EntryPaths
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import Folders, TempFile, require_own_folders
from s3ec.tier.pins import Pin, Pins


class Intake:
    """One Tier's; blocking and thread-safe. It takes nothing once that tier is closed.

    The pin is made before the entry gets its name: it costs no second look at the file, and
    nobody can evict the entry in between.
    """

    def __init__(self, publisher: Publisher, pins: Pins, entries: Entries, claims: Claims) -> None:
        self._publisher = publisher
        self._pins = pins
        self._entries = entries
        self._claims = claims

    def try_claim(self, key: Key) -> Claim | None:
        """Claim an entry that is not here. No disk has to answer, unless a folder is cold.

        Returns:
            None where it is here, or somebody else fetches it: ask ``Tier.pin_or_claim``.
        """
        claim = self._claims.take(key.digest)
        # In this order: who had the claim before us has published by now.
        if claim is not None and self._entries.contains(key):
            self._claims.release(claim)
            return None
        return claim

    def receive(self, key: Key, pieces: Sequence[bytes | memoryview], header: Header) -> Pin:
        """Publish an entry that came from the bucket, and pin it.

        Args:
            pieces: As in ``Tier.publish``.
            header: Theirs, verified and compared with the key.

        Raises:
            TierError: As in ``Tier.publish``.
        """
        return self._pinned(
            key, header, lambda hold: self._publisher.publish(key, pieces, hold=hold)
        )

    def begin(self, key: Key, first: bytes | memoryview, verifier: Verifier) -> Incoming:
        """Receive one large entry part by part; it appears when the last one was good.

        Args:
            first: Its first bytes, which the verifier has been made from.

        Raises:
            TierError: As in ``Tier.publish``.
        """
        try:
            file = self._publisher.begin(verifier.header.total_bytes)
        except OSError as exc:
            raise TierError(f"cannot receive {key.name}: {exc}") from exc

        def commit() -> Pin:
            return self._pinned(
                key, verifier.header, lambda hold: self._publisher.finish(key, file, hold=hold)
            )

        return Incoming(file, first, verifier, make_room=self._publisher.make_room, commit=commit)

    def _pinned(
        self, key: Key, header: Header, publish: Callable[[Callable[[str], None]], None]
    ) -> Pin:
        made: list[str] = []

        def hold(temp: str) -> None:
            held = self._pins.hold(temp, key.digest)
            if held is None:
                raise FileNotFoundError(temp)
            os.close(held.fd)
            made.append(held.path)

        try:
            publish(hold)
        except BaseException:
            self._drop(made)
            raise
        self._drop(made[:-1])  # of attempts that failed
        return Pin(Path(made[-1]), header.total_bytes, header)

    def _drop(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(OSError):
                self._pins.drop(path)


class Incoming:
    """One large entry being received; made by ``Intake.begin``.

    Blocking, and for one thread at a time. Nobody sees the entry before ``commit``, which only
    a good one reaches. Whoever makes one ends it by ``commit`` or ``discard``.
    """

    def __init__(
        self,
        file: TempFile,
        first: memoryview | bytes,
        verifier: Verifier,
        *,
        make_room: Callable[[int], int],
        commit: Callable[[], Pin],
    ) -> None:
        """Take the first part; see Intake.begin.

        Args:
            make_room: Frees at least so many bytes if it can, and returns how many.
            commit: Gives the file its name and pins it.

        Raises:
            TierError: The disk is full or failing; nothing is left behind.
        """
        self._file = file
        self._verifier = verifier
        self._make_room = make_room
        self._commit = commit
        try:
            self._write(first)
        except BaseException:
            file.discard()
            raise

    @property
    def header(self) -> Header:
        """What the entry says of itself."""
        return self._verifier.header

    def append(self, part: memoryview | bytes) -> None:
        """Verify and write what comes next.

        Raises:
            CorruptEntryError: Longer than announced.
            TierError: The disk is full or failing.
        """
        self._verifier.feed(part)
        self._write(part)

    def commit(self) -> Pin:
        """Publish and pin the entry if it is whole and good.

        Raises:
            CorruptEntryError: It is not.
            TierError: The disk refused.
        """
        try:
            self._verifier.finish()
            return self._commit()
        except OSError as exc:
            raise TierError(f"cannot publish a received entry: {exc}") from exc
        finally:
            self._file.discard()

    def discard(self) -> None:
        """Leave nothing behind; fine after commit and more than once."""
        self._file.discard()

    def _write(self, part: memoryview | bytes) -> None:
        try:
            try:
                self._file.append([part])
            except OSError as exc:
                # statvfs shows neither quotas nor a lack of inodes.
                if exc.errno not in (ENOSPC, EDQUOT) or not self._make_room(len(part)):
                    raise
                self._file.append([part])
        except OSError as exc:
            raise TierError(f"cannot write a received entry: {exc}") from exc


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
        clock: Callable[[], float],
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
    ) -> None:
        """Write one entry, whole or not at all; see ``Tier.publish``.

        Args:
            hold: May be called again where an attempt failed after it.
            counted: ``hold`` tells the running total.

        Raises:
            TierError: No room, or the disk refused.
        """
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            self._evictor.need_room(nbytes)
            self._write(key, pieces, nbytes, hold)
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
        self._finish(key, file, hold)
        self._count(file.nbytes, counted=False)

    def _write(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        nbytes: int,
        hold: Hold | None,
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
                self._finish(key, file, hold)
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

    def _finish(self, key: Key, file: TempFile, hold: Hold | None) -> None:
        """Give a finished file its name; a present one is replaced.

        Raises:
            OSError: The file is gone now. FileNotFoundError: it was gone before (another
                container took it for a dead process's); it can be written again.
            TierError: A folder on the way is not one, or ``hold`` refused; likewise.
        """
        try:
            file.close()
            mtime_ns = int(self._clock() * 1e9)  # the time of use, which eviction goes by
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

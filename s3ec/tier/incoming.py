# SPDX-License-Identifier: Apache-2.0
"""An entry on its way in: written and verified part by part, and never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from typing import Protocol

from s3ec.codec import Header, Verifier
from s3ec.errors import TierError
from s3ec.tier.files import AtomicFile


class Room(Protocol):
    """What an Incoming needs of its Tier."""

    def make_room(self, incoming_bytes: int = 0) -> int:
        """Evict; returns the bytes freed."""
        ...


class Incoming:
    """One large entry being received; made by ``Tier.begin``.

    Blocking, and for one thread at a time. Nobody sees the entry before ``commit``, which only
    a good one reaches. Whoever makes one ends it by ``commit`` or ``discard``.
    """

    def __init__(
        self,
        file: AtomicFile,
        first: memoryview | bytes,
        verifier: Verifier,
        *,
        room: Room,
        commit: Callable[[AtomicFile], None],
    ) -> None:
        """Take the first part; see Tier.begin."""
        self._file = file
        self._verifier = verifier
        self._room = room
        self._commit = commit
        self._write(first)

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

    def commit(self) -> None:
        """Publish the entry if it is whole and good.

        Raises:
            CorruptEntryError: It is not.
            TierError: The disk refused.
        """
        try:
            self._verifier.finish()
            self._commit(self._file)
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
                if exc.errno not in (ENOSPC, EDQUOT) or not self._room.make_room(len(part)):
                    raise
                self._file.append([part])
        except OSError as exc:
            raise TierError(f"cannot write a received entry: {exc}") from exc

# SPDX-License-Identifier: Apache-2.0
"""An entry on its way in: written and verified part by part, and never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from errno import EDQUOT, ENOSPC

from s3ec.codec import Header, Verifier
from s3ec.errors import TierError
from s3ec.tier.files import TempFile
from s3ec.tier.pins import Pin


class Incoming:
    """One large entry being received; made by ``Tier.begin``.

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
        """Take the first part; see Tier.begin.

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

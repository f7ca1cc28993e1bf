# SPDX-License-Identifier: Apache-2.0
"""The answers to GETs: a body is refused by its announced length, or read whole, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from s3ec.errors import CorruptEntryError
from s3ec.store.base import Blob
from s3ec.store.concurrency import Extend, answer_begun

PIECE_BYTES = 256 * 1024
"""What is read at a time of a body whose length nobody told."""


class Reply(Protocol):
    """A GET's answer whose body has not been read.

    Attributes:
        nbytes: Announced length of the body, None where nobody told.
        is_part: Whether it holds the range that was asked for, or the whole object.
    """

    nbytes: int | None
    is_part: bool

    async def read(self, max_bytes: int, what: str, extend: Extend) -> Blob:
        """The body; its announced length is within ``max_bytes``.

        Raises:
            CorruptEntryError: It ended before its announced length (reason ``length``), or it
                went beyond what it may be (reason ``size``).
        """
        ...

    def close(self) -> None:
        """Give the connection back, or close it where the body was not read whole."""
        ...


class Pieces:
    """A body of a length that nobody told, as it comes.

    Args:
        max_bytes: The body may have.
        what: Begins every message.
        extend: Called with what has come, at times.
    """

    def __init__(self, max_bytes: int, what: str, extend: Callable[[int], object]) -> None:
        self._max_bytes = max_bytes
        self._what = what
        self._extend = extend
        self._pieces: list[bytes] = []
        self._nbytes = self._granted = 0

    def add(self, piece: bytes) -> None:
        """Take what came next.

        Raises:
            CorruptEntryError: Now it is too long (reason ``size``).
        """
        self._nbytes += len(piece)
        if self._nbytes > self._max_bytes:
            raise CorruptEntryError(
                f"{self._what}: more than {self._max_bytes} bytes", reason="size"
            )
        self._pieces.append(piece)
        # Not for each: every grant is worth a silence, and a read may bring one byte.
        while self._nbytes - self._granted >= PIECE_BYTES:
            self._granted += PIECE_BYTES
            self._extend(PIECE_BYTES)

    def whole(self) -> bytes:
        """All that came."""
        return b"".join(self._pieces)


async def read_body(reply: Reply, max_bytes: int, what: str, extend: Extend) -> Blob:
    """The body of a GET; the reply is closed in any case.

    Args:
        reply: What the transport got.
        max_bytes: A body that is announced as larger is refused unread.
        what: Begins every message.
        extend: Called with the length of the body once it is known.

    Raises:
        CorruptEntryError: See Reply.read, and reason ``size`` for one that is too large.
    """
    answer_begun()
    try:
        if reply.nbytes is not None:
            if reply.nbytes > max_bytes:
                raise CorruptEntryError(
                    f"{what}: {reply.nbytes} bytes, at most {max_bytes} expected", reason="size"
                )
            extend(reply.nbytes)
        return await reply.read(max_bytes, what, extend)
    finally:
        reply.close()

# SPDX-License-Identifier: Apache-2.0
"""The answers to GETs: a body is refused by its announced length, or read whole, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
from botocore.exceptions import IncompleteReadError

from s3ec.errors import CorruptEntryError
from s3ec.store.base import Blob
from s3ec.store.deadline import answer_begun

Extend = Callable[[int], None]
"""Grants the time that so many bytes may take."""

_CHUNK_BYTES = 256 * 1024


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


class SdkReply:
    """What get_object of the SDK returned."""

    def __init__(self, response: Any) -> None:
        self.nbytes: int | None = response.get("ContentLength")
        # `rclone serve s3` sends a range with status 200.
        is_206 = response["ResponseMetadata"]["HTTPStatusCode"] == 206
        self.is_part: bool = is_206 or "ContentRange" in response
        self._body = response["Body"]

    async def read(self, max_bytes: int, what: str, extend: Extend) -> bytes:
        if self.nbytes is None:
            return await self._read_unannounced(max_bytes, what, extend)
        try:
            return bytes(await self._body.read())
        except (aiohttp.ClientPayloadError, IncompleteReadError) as exc:
            raise CorruptEntryError(
                f"{what}: the body ended before its {self.nbytes} bytes", reason="length"
            ) from exc

    async def _read_unannounced(self, max_bytes: int, what: str, extend: Extend) -> bytes:
        """A body sent in chunks, of a length nobody told."""
        chunks: list[bytes] = []
        nbytes = granted = 0
        while chunk := await self._body.read(_CHUNK_BYTES):
            nbytes += len(chunk)
            if nbytes > max_bytes:
                raise CorruptEntryError(f"{what}: more than {max_bytes} bytes", reason="size")
            chunks.append(chunk)
            # Not for each: every grant is worth a silence, and a read may bring one byte.
            while nbytes - granted >= _CHUNK_BYTES:
                granted += _CHUNK_BYTES
                extend(_CHUNK_BYTES)
        return b"".join(chunks)

    def close(self) -> None:
        self._body.close()

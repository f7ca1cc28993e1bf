# SPDX-License-Identifier: Apache-2.0
"""A body that comes through obstore, collected outside the interpreter's lock; objects uncopied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from s3ec.errors import CorruptEntryError
from s3ec.store.base import Blob
from s3ec.store.obstore_errors import BrokenConnectionError
from s3ec.store.obstore_runtime import held
from s3ec.store.deadline import Extend

# Up to here a body is collected in one buffer of the announced length; a server that announces
# much and sends nothing then costs this much address space, and no process is ended for lack of it.
_COLLECT_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20


class ObstoreReply:
    """What obstore's get returned.

    Args:
        result: obstore's GetResult.
        errors: What the transport's errors are mapped by while the body comes.
        is_part: See Reply.
    """

    def __init__(
        self, result: Any, errors: Callable[[], AbstractContextManager[None]], *, is_part: bool
    ) -> None:
        start, stop = result.range
        self.nbytes: int | None = stop - start
        self.is_part = is_part
        self._result = result
        self._errors = errors

    async def read(self, max_bytes: int, what: str, extend: Extend) -> Blob:
        expected = self.nbytes or 0
        try:
            with self._errors():
                if expected <= _COLLECT_BYTES and not self.is_part:
                    # Collected in Rust; the view holds that memory, and nothing is copied here.
                    # Only of a whole object is `expected` what the connection goes by: a part
                    # can say one length for itself and another for the body.
                    body: Blob = memoryview(await held(self._result.bytes_async()))
                else:
                    body = await self._read_piecewise(expected)
        except BrokenConnectionError as exc:
            raise CorruptEntryError(
                f"{what}: the body ended before its {expected} bytes", reason="length"
            ) from exc
        if len(body) != expected:
            raise CorruptEntryError(
                f"{what}: {len(body)} bytes where {expected} were announced", reason="length"
            )
        return body

    async def _read_piecewise(self, expected: int) -> bytes:
        """A body whose announced length may be a lie: little more is kept than it says."""
        chunks: list[bytes] = []
        nbytes = 0
        stream = self._result.stream(min_chunk_size=_PIECE_BYTES)
        with contextlib.suppress(StopAsyncIteration):
            while nbytes <= expected:
                chunk = await held(anext(stream))
                chunks.append(chunk)
                nbytes += len(chunk)
        if len(chunks) == 1:
            return bytes(chunks[0])
        # In a thread, where joining lets go of the interpreter's lock.
        return await asyncio.to_thread(b"".join, chunks)

    def close(self) -> None:
        # Dropping it gives the connection back, or closes it where the body was not read whole.
        self._result = None

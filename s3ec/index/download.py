# SPDX-License-Identifier: Apache-2.0
"""One object onto this node's disk: in parts, some of them asked for ahead, verified at the end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

from s3ec import codec
from s3ec.errors import CorruptEntryError, TierError
from s3ec.index.head import Blob
from s3ec.store.base import Store
from s3ec.tier import IndexFiles

T = TypeVar("T")

PART_BYTES = 8 * 2**20
# Of one object, asked for or waiting to be written.
_PARTS = 2


class VanishedError(Exception):
    """A file of a base is gone from the bucket: a newer base has replaced it."""


class Disk(Protocol):
    """Awaits a blocking call in another thread; ``LoopThread.disk`` is one."""

    def __call__(self, function: Callable[..., T], *args: object) -> Awaitable[T]: ...


class _File:
    """A file in the making. Blocking; calls exclude each other.

    A cancelled coroutine leaves a call running in its thread: it must find the file closed, and
    not another one under its descriptor.
    """

    def __init__(self, files: IndexFiles, local: str, name: str, blob: Blob) -> None:
        self._lock = threading.Lock()
        self._files = files
        self._local = local
        self._name = name
        self._blob = blob
        self._running = codec.running_checksum()
        self._temp = files.begin(blob.nbytes)
        self._over = False

    def append(self, part: bytes | memoryview) -> None:
        """Write what comes next."""
        with self._lock:
            if self._over:
                return
            try:
                self._temp.append([part])
            except OSError as exc:
                raise TierError(f"cannot write {self._name}: {exc}") from exc
            self._running.update(part)

    def finish(self, check: Callable[[str], object]) -> None:
        """Give the file its name if it is good."""
        with self._lock:
            if self._over:
                return
            if self._running.hexdigest() != self._blob.xxh3:
                raise CorruptEntryError(f"{self._name}: wrong checksum", reason="checksum")
            check(self._temp.path)
            self._over = True
            self._files.finish(self._local, self._temp)

    def discard(self) -> None:
        """Leave nothing behind; fine after finish."""
        with self._lock:
            self._over = True
            self._temp.discard()


async def download(
    store: Store,
    name: str,
    blob: Blob,
    *,
    files: IndexFiles,
    local: str,
    disk: Disk,
    check: Callable[[str], object],
) -> None:
    """Bring one object to this node.

    Args:
        name: In the store.
        blob: Its size and checksum.
        local: Its name in ``files``.
        check: Gets the path of the whole file before it has its name; raises
            CorruptEntryError where its content is refused. Runs in ``disk``.

    Raises:
        VanishedError: It is not in the store.
        CorruptEntryError: Its size, checksum or content is wrong.
        TierError: The disk refused.
        UnavailableError, AccessError: The store did not answer.
    """
    file = await disk(_File, files, local, name, blob)
    try:
        async with aclosing(_parts(store, name, blob.nbytes)) as parts:
            async for part in parts:
                await disk(file.append, part)
        await disk(file.finish, check)
    finally:
        file.discard()  # an unlink where something went wrong; nothing that waits for a disk else


async def _parts(store: Store, name: str, nbytes: int) -> AsyncGenerator[bytes | memoryview, None]:
    """The bytes of an object in order."""

    async def part(start: int) -> bytes | memoryview:
        length = min(PART_BYTES, nbytes - start)
        body = await store.get_range(name, start, length)
        if body is None:
            raise VanishedError(name)
        if len(body) != length:
            raise CorruptEntryError(
                f"{name}: ends at {start + len(body)} of {nbytes} bytes", reason="length"
            )
        return body

    requests = (asyncio.ensure_future(part(start)) for start in range(0, nbytes, PART_BYTES))
    coming = deque(itertools.islice(requests, _PARTS))
    try:
        while coming:
            yield await coming[0]
            coming.popleft()
            coming.extend(itertools.islice(requests, 1))
    finally:
        for request in coming:
            request.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

# SPDX-License-Identifier: Apache-2.0
"""One object onto this node's disk: in parts, some of them asked for ahead, verified at the end."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

from s3ec import codec
from s3ec.errors import CorruptEntryError, TierError
from s3ec.index.head import Blob
from s3ec.store.base import Store
from s3ec.store.parts import parts_in_order
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
        done, starts = 0, range(0, blob.nbytes, PART_BYTES)
        async with aclosing(parts_in_order(store, name, starts, at_a_time=_PARTS)) as parts:
            async for part in parts:
                if part is None:
                    raise VanishedError(name)
                if len(part) != min(PART_BYTES, blob.nbytes - done):
                    raise CorruptEntryError(
                        f"{name}: ends at {done + len(part)} of {blob.nbytes} bytes",
                        reason="length",
                    )
                await disk(file.append, part)
                done += len(part)
                del part  # not one more in memory while the next is waited for
        await disk(file.finish, check)
    finally:
        file.discard()  # an unlink where something went wrong; nothing that waits for a disk else

# SPDX-License-Identifier: Apache-2.0
"""A bucket in memory: the whole Store protocol, deterministic, for tests above the store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from s3ec.errors import ConflictError, CorruptEntryError, S3ECError
from s3ec.store.base import (
    Blob,
    ObjectInfo,
    check_batch,
    check_folder_name,
    check_name,
    check_range,
)

_MAX_KEY_BYTES = 1024  # S3's limit
# Outside of the class, where `list` is a method.
Complaints = list[str]


@dataclass(slots=True)
class MemoryBucket:
    """A bucket that several stores can share, as processes share a bucket.

    Tests may tamper with ``objects`` directly.

    Attributes:
        objects: Full key to content.
        modified_s: Full key to time of the last put.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    modified_s: dict[str, float] = field(default_factory=dict)
    # Stores of several threads may share a bucket, and exactly one of many writers must win.
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore:
    """A Store over a MemoryBucket.

    Every operation yields to the loop once before it acts, so that coroutines interleave as they
    would around real requests. Listings come in reverse order, so that no code relies on an order.

    Args:
        bucket: Share this one; a fresh one if None.
        prefix: As in the settings: a folder without surrounding slashes.
        clock: Seconds since the epoch, for ``modified_s``.
    """

    def __init__(
        self,
        bucket: MemoryBucket | None = None,
        *,
        prefix: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self._root = f"{prefix}/" if prefix else ""
        self._clock = clock
        self._closed = False

    def __repr__(self) -> str:
        return f"MemoryStore({self._root})"

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        body = await self._body(name)
        if body is not None and len(body) > max_bytes:
            raise CorruptEntryError(
                f"GET {name}: {len(body)} bytes, at most {max_bytes} expected", reason="size"
            )
        return body

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        check_range(start, length)
        body = await self._body(name)
        return None if body is None else body[start : start + length]

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        key = self._key(name)
        whole = b"".join(body)
        await self._turn()
        with self.bucket.lock:
            if key in self.bucket.objects:
                raise ConflictError(f"PUT {name}: it is there already")
            self.bucket.objects[key] = whole
            self.bucket.modified_s[key] = self._clock()

    async def head(self, name: str) -> ObjectInfo | None:
        body = await self._body(name)
        return None if body is None else self._info(self._key(name), body)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._turn()
        for key, body in self._below(prefix):
            if not start_after or key > self._root + start_after:
                yield self._info(key, body)

    async def list_folders(self, prefix: str) -> Sequence[str]:
        check_folder_name(prefix)
        await self._turn()
        above = len(self._root + prefix)
        folders: dict[str, None] = {}
        for key, _ in self._below(prefix):
            folder, slash, _ = key[above:].partition("/")
            if slash:
                folders[folder + slash] = None
        return tuple(folders)

    async def delete(self, name: str) -> None:
        key = self._key(name)
        await self._turn()
        with self.bucket.lock:
            self.bucket.objects.pop(key, None)
            self.bucket.modified_s.pop(key, None)

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        check_batch(names)
        for name in names:
            await self.delete(name)
        return {}

    async def close(self) -> None:
        self._closed = True

    def check(self) -> Complaints:
        """Return what is wrong with the bucket, one string per complaint; empty if nothing is."""
        with self.bucket.lock:
            keys = set(self.bucket.objects)
            dated = set(self.bucket.modified_s)
        bad = [k for k in keys if not k or k.startswith("/") or len(k.encode()) > _MAX_KEY_BYTES]
        return [
            *(f"{key!r}: no server takes such a key" for key in sorted(bad)),
            *(f"{key!r}: a date without an object" for key in sorted(dated - keys)),
        ]

    async def _turn(self) -> None:
        if self._closed:
            raise RuntimeError("the store is closed")
        await asyncio.sleep(0)

    async def _body(self, name: str) -> bytes | None:
        key = self._key(name)
        await self._turn()
        return self.bucket.objects.get(key)

    def _key(self, name: str) -> str:
        check_name(name)
        return self._root + name

    def _info(self, key: str, body: bytes) -> ObjectInfo:
        return ObjectInfo(key[len(self._root) :], len(body), self.bucket.modified_s.get(key, 0.0))

    def _below(self, prefix: str) -> Sequence[tuple[str, bytes]]:
        with self.bucket.lock:
            objects = dict(self.bucket.objects)
        wanted = self._root + prefix
        keys = [key for key in objects if key.startswith(wanted) and key != self._root]
        return [(key, objects[key]) for key in sorted(keys, reverse=True)]

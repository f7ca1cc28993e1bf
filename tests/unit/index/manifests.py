# SPDX-License-Identifier: Apache-2.0
"""Manifests for tests: deltas in a bucket, the plainest of readers, a store that is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from s3ec.identity import Key, Layout
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.index.segment import encode_segment, parse_segment
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.unit.index.basics import LAYOUT

T = TypeVar("T")

View = dict[bytes, EntryInfo]


def ulid_of(number: int) -> str:
    """Names of deltas, rising with their numbers."""
    return f"{number:026}"


def facts_of(number: int, time_s: int = 0) -> EntryInfo:
    return EntryInfo(1000 + number, number, 8, "bfloat16", number, time_s)


def delta_bytes(
    items: Iterable[tuple[bytes, EntryInfo | Tombstone]], layout: Layout = LAYOUT
) -> bytes:
    rows = Rows.from_facts(list(items)).sorted_unique()
    return b"".join(encode_segment(rows, layout.namespace))


async def put_delta(
    store: Store,
    number: int,
    items: Mapping[Key, EntryInfo | Tombstone],
    layout: Layout = LAYOUT,
) -> str:
    """Announce some keys; the delta's ULID."""
    ulid = ulid_of(number)
    body = delta_bytes(((key.digest, what) for key, what in items.items()), layout)
    await store.put_if_absent(layout.delta(ulid), [body])
    return ulid


async def put_object(store: Store, key: Key, nbytes: int, layout: Layout = LAYOUT) -> None:
    await store.put_if_absent(layout.object(key), [bytes(nbytes)])


async def view(store: Store, layout: Layout = LAYOUT) -> View:
    """What a reader that starts now holds: head, shards, then deltas one after the other."""
    names = [info.name async for info in store.list(layout.manifest)]
    heads = sorted(name for name in names if layout.version_of(name))
    state: dict[bytes, tuple[EntryInfo, bool]] = {}
    merged: set[str] = set()
    if heads:
        head = json.loads(await read(store, heads[-1]))
        merged = set(head["merged"])
        folder = layout.run(head["version"], head["run"])
        for shard in head["shards"]:
            name = f"{folder}{shard['first']:02x}-{shard['last']:02x}.safetensors"
            await read(store, name.replace(".safe", ".bloom.safe"))
            apply(state, parse_segment(await read(store, name), layout.namespace))
    for name in sorted(names):
        ulid = layout.delta_of(name)
        if ulid is not None and ulid not in merged:
            apply(state, parse_segment(await read(store, name), layout.namespace))
    return {digest: facts for digest, (facts, deleted) in state.items() if not deleted}


def apply(state: dict[bytes, tuple[EntryInfo, bool]], rows: Rows) -> None:
    for row in range(len(rows)):
        digest, facts, deleted = rows.digest(row), rows.facts(row), bool(rows.deleted[row])
        known = state.get(digest)
        if known is None or (facts.time_s, deleted) >= (known[0].time_s, known[1]):
            state[digest] = (facts, deleted)


async def read(store: Store, name: str) -> bytes:
    blob = await store.get(name, max_bytes=2**40)
    assert blob is not None, name
    return bytes(blob)


def names(bucket: MemoryBucket, layout: Layout = LAYOUT) -> list[str]:
    """Everything in the manifest."""
    return sorted(
        name.removeprefix(layout.manifest)
        for name in bucket.objects
        if name.startswith(layout.manifest)
    )


class Killed(BaseException):
    """The end of a process; nothing of ours catches it."""


class MortalStore(Wrapper):
    """A store whose process is killed in its n-th request: before it got through, or after.

    Args:
        inner: The bucket, which lives on.
        dies_at: Number of the request, from 0; None for a long life.
        after: The request was still carried out.

    Attributes:
        requests: Counted so far.
        died: Set at the end, for those who wait for a task of the dead process.
    """

    def __init__(self, inner: MemoryStore, dies_at: int | None = None, *, after: bool) -> None:
        super().__init__(inner)
        self.requests = 0
        self.died = asyncio.Event()
        self._dies_at = dies_at
        self._after = after

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        number = self.requests
        self.requests += 1
        if self._dies_at is None or number < self._dies_at:
            return await call()
        if number == self._dies_at and self._after:
            await call()
        self.died.set()
        raise Killed

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async def whole() -> tuple[ObjectInfo, ...]:
            pages = self._inner.list(prefix, start_after=start_after)
            return tuple([info async for info in pages])

        for info in await self._around("list", prefix, whole):
            yield info

# SPDX-License-Identifier: Apache-2.0
"""A bucket with an index in it, written by hand, and readers of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.bloom import build_bloom
from s3ec.index.cache import IndexCache
from s3ec.index.follower import FollowOptions
from s3ec.index.manifest import BaseFile, BaseManifest, Shard, Ulids
from s3ec.index.reader import ManifestIndex
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.index.segment import encode_segment
from s3ec.testing.fault_store import FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier import Tier
from tests.support.clock import START_S, Clock
from tests.unit.index.basics import LAYOUT, NAMESPACE, key_of

T = TypeVar("T")

HOUR_S = 3600.0


def rows_of(*items: object, time_s: float = START_S) -> Rows:
    """Rows of texts, keys, (key, EntryInfo) or (key, Tombstone)."""
    told: list[tuple[bytes, EntryInfo | Tombstone]] = []
    for item in items:
        if isinstance(item, tuple):
            told.append((_as_key(item[0]).digest, item[1]))
        else:
            told.append((_as_key(item).digest, EntryInfo(time_s=int(time_s))))
    return Rows.from_facts(told).sorted_unique()


def _as_key(item: object) -> Key:
    return item if isinstance(item, Key) else key_of(item)


async def in_thread(
    function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None
) -> T:
    made = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        if undo is not None:
            made.add_done_callback(lambda done: undo(done.result()))
        raise


@dataclass
class Corpus:
    """The bucket's side: what writers and compactions have left there."""

    clock: Clock = field(default_factory=Clock)
    memory: MemoryStore = field(default_factory=MemoryStore)

    @property
    def objects(self) -> dict[str, bytes]:
        return self.memory.bucket.objects

    def put(self, name: str, body: bytes) -> None:
        self.objects[name] = body
        self.memory.bucket.modified_s[name] = self.clock.now_s

    def delete(self, *names: str) -> None:
        for name in names:
            del self.objects[name]
            del self.memory.bucket.modified_s[name]

    def store(self, *items: object) -> None:
        """Objects themselves."""
        for item in items:
            self.put(LAYOUT.object(_as_key(item)), b"entry")

    def delta(self, *items: object, ahead_s: float = 0.0, time_s: float | None = None) -> str:
        """Announce keys; answers the ULID.

        Args:
            ahead_s: How far the writer's clock is ahead of the bucket's.
        """
        writer_s = self.clock.now_s + ahead_s
        rows = rows_of(*items, time_s=writer_s if time_s is None else time_s)
        ulid = Ulids().next(writer_s)
        self.put(LAYOUT.delta(ulid), b"".join(encode_segment(rows, NAMESPACE)))
        return ulid

    def base(
        self, version: int, rows: Rows, *, merged: Iterable[str] = (), shards: int = 2
    ) -> BaseManifest:
        """Commit a base of so many shards; answers its head."""
        run = secrets.token_hex(8)
        made = []
        for number in range(shards):
            first, last = 256 // shards * number, 256 // shards * (number + 1) - 1
            part = rows.between(first, last)
            segment = encode_segment(part, NAMESPACE)
            bloom = build_bloom(part.digest_hi, part.digest_lo, NAMESPACE)
            made.append(Shard(first, last, len(part), BaseFile.of(segment), BaseFile.of(bloom)))
            self.put(LAYOUT.shard(version, run, first, last), b"".join(segment))
            self.put(LAYOUT.bloom(version, run, first, last), b"".join(bloom))
        head = BaseManifest(
            version, run, int(self.clock.now_s), len(rows), tuple(made), frozenset(merged)
        )
        self.put(LAYOUT.head(version), head.to_json())
        return head

    def drop_base(self, head: BaseManifest) -> None:
        """What a later compaction does after the grace period."""
        names = [name for name in self.objects if LAYOUT.run_of(name) == (head.version, head.run)]
        self.delete(LAYOUT.head(head.version), *names)


class Reader:
    """One reader: an index over a tier of its own or a shared one."""

    def __init__(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        script: Script | None = None,
        budget_bytes: int = 1 << 30,
        file_clock: Callable[[], float] = time.time,
        **options: Any,
    ) -> None:
        self.clock = Clock(0.0)
        self.counters = Counters()
        self.script = script or Script()
        self.store = FaultStore(corpus.memory, self.script)
        self.tier = Tier(
            folder, NAMESPACE, budget_bytes=budget_bytes, min_free_bytes=0, counters=self.counters
        )
        self.files = self.tier.open_index()
        self.cache = IndexCache(
            self.store, LAYOUT, self.files, in_thread, self.counters, clock=file_clock
        )
        self.index = ManifestIndex(
            self.cache,
            options=FollowOptions(**{"patience_s": 30.0, "cache_bytes": budget_bytes} | options),
            clock=self.clock,
            wall_clock=corpus.clock,
        )

    async def refresh(self) -> None:
        await self.index.refresh()

    async def calls(self) -> dict[str, int]:
        """What one refresh asks the bucket for."""
        self.store.calls.clear()
        self.store.log.clear()
        await self.index.refresh()
        return dict(self.store.calls)

    def finds(self, *items: object) -> list[bool]:
        return [self.index.maybe_contains(_as_key(item)) for item in items]

    def here(self) -> set[str]:
        """Names of the index's files on this node."""
        return {file.name for file in self.files.walk()}

    async def close(self) -> None:
        await self.index.close()
        self.tier.close()

# SPDX-License-Identifier: Apache-2.0
"""When the index says that entries were stored: what a tombstone has to be later than."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key, Layout
from s3ec.index.content import Content, Deltas, read_shard
from s3ec.index.head import Head, Shard
from s3ec.index.rows import Rows
from s3ec.index.segment import Segment, encode_segment
from s3ec.index.snapshot import newest_head, take_snapshot
from s3ec.store.base import Store

log = logging.getLogger(__name__)

DELTAS = "deltas"


class KnownTimes:
    """One look at the index, with the shards that are needed in a folder.

    Where a part of the index is unusable it knows no times, which a warning says: a tombstone
    of now is later than what any writer with a good clock wrote.

    Args:
        folder: Of its own, with a folder DELTAS in it; whoever made it deletes it.
    """

    def __init__(self, store: Store, layout: Layout, folder: Path) -> None:
        self._store = store
        self._layout = layout
        self._folder = folder
        self._head: Head | None = None
        self._deltas = Segment.of(Rows.empty())
        self._shards: dict[Shard, Segment | None] = {}
        self._of_byte: list[Shard | None] = [None] * 256

    async def open(self) -> None:
        """Read the head and the deltas.

        Raises:
            UnavailableError: The store does not answer now.
            AccessError: It refuses.
            TierError: The folder is full.
        """
        snapshot = await take_snapshot(self._store, self._layout)
        try:
            self._head = await newest_head(self._store, self._layout, snapshot)
        except CorruptEntryError as exc:
            log.warning("the base of the index is unusable: %s", exc)
        merged = self._head.merged if self._head else frozenset()
        content = Content(self._store, self._layout, None, self._folder / DELTAS)
        await content.add_deltas(sorted(snapshot.deltas.keys() - merged), Deltas())
        self._deltas = Segment.of(await content.between(0, 255, keep_tombstones=True))
        for shard in self._head.shards if self._head else ():
            self._of_byte[shard.first : shard.last + 1] = [shard] * (shard.last + 1 - shard.first)

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Bring the shards of these keys here.

        Raises:
            UnavailableError, AccessError, TierError: As open.
        """
        wanted = {self._of_byte[key.digest[0]] for key in keys}
        for shard in sorted(filter(None, wanted - self._shards.keys()), key=lambda s: s.first):
            self._shards[shard] = await self._load(shard)

    async def _load(self, shard: Shard) -> Segment | None:
        if self._head is None:
            return None
        try:
            rows = await read_shard(self._store, self._layout, self._head, shard)
        except CorruptEntryError as exc:
            log.warning("part of the index is unusable: %s", exc)
            return None
        path = self._folder / f"{shard.first:02x}"
        namespace = self._layout.namespace

        def write() -> Segment:
            with path.open("xb") as file:
                file.writelines(encode_segment(rows, namespace))
            return Segment.open(path, namespace)

        try:
            return await asyncio.to_thread(write)
        except OSError as exc:
            raise TierError(f"cannot write {path}: {exc}") from exc

    def __call__(self, key: Key) -> int:
        """Time of the latest row of a prepared key, a tombstone's too; 0 where there is none."""
        hi, lo = key.digest_hi, key.digest_lo
        shard = self._of_byte[key.digest[0]]
        base = self._shards[shard] if shard else None
        times = []
        for segment in (base, self._deltas):
            row = segment.find(hi, lo) if segment is not None else -1
            if segment is not None and row >= 0:
                times.append(segment.facts(row).time_s)
        return max(times, default=0)

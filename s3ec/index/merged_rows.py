# SPDX-License-Identifier: Apache-2.0
"""What a base and the deltas after it say together, one range of digests in memory at a time.

It also tells when entries were stored by what the index says: a tombstone has to be later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from s3ec.errors import AccessError, CorruptEntryError, S3ECError, TierError, UnavailableError
from s3ec.identity import DESCRIPTOR_BYTES, Key, Layout
from s3ec.index.manifest import BaseFile, BaseManifest, Shard, newest_head, take_snapshot
from s3ec.index.rows import EntryInfo, Rows, merge
from s3ec.index.segment import MAX_DELTA_BYTES, Segment, SortedRuns, encode_segment, parse_segment
from s3ec.store.base import Blob, Store, VanishedError, get_in_parts
from s3ec.store.concurrency import in_parallel

log = logging.getLogger(__name__)

# A hundred times a shard as they are written; nothing larger is taken into memory.
MAX_SHARD_BYTES = 4 * 2**30
# Fewer than requests in a row that open the breaker: some may be lost for good.
_DELTAS_AT_A_TIME = 4
_PARTS_AT_A_TIME = 4


@dataclass(slots=True)
class Deltas:
    """What became of the deltas that were to be read.

    Attributes:
        read: ULIDs of those whose rows were merged.
        deleting: Of these, those that hold deletions.
        corrupt: ULID to what is wrong with it; left out, and left where it is.
        unread: ULID to why the bucket did not give it; left out, and left where it is.
    """

    read: set[str] = field(default_factory=set)
    deleting: set[str] = field(default_factory=set)
    corrupt: dict[str, str] = field(default_factory=dict)
    unread: dict[str, S3ECError] = field(default_factory=dict)

    @property
    def problems(self) -> dict[str, str]:
        """ULID to why it was left out."""
        return self.corrupt | {ulid: str(exc) for ulid, exc in self.unread.items()}

    def warn_of_unread(self, *, has_base: bool) -> None:
        """For those who go on without them: name what the bucket did not give.

        Args:
            has_base: The head of one was just read, so the bucket answers. It may be that nothing
                but lost objects waits to be merged.

        Raises:
            UnavailableError, AccessError: As require_any, where there is no base.
        """
        if not has_base:
            self.require_any()
        for exc in self.unread.values():
            log.warning("part of the index cannot be read, going on without it: %s", exc)

    def require_any(self) -> None:
        """Raise where the bucket gave none of them: that is an outage, and no lost object.

        Raises:
            UnavailableError, AccessError: Of the first one.
        """
        if not (self.read or self.corrupt):
            for exc in self.unread.values():
                raise exc


class MergedRows:
    """Base and deltas of one namespace, merged as readers merge them.

    Memory: the base's shards that overlap the asked range (one, where ranges are asked for in
    their order), the rows that SortedRuns keeps, and a few deltas while they are read.

    Args:
        store: The bucket.
        layout: The namespace.
        head: The base; None for an empty one.
        folder: For files, see SortedRuns.
    """

    def __init__(
        self, store: Store, layout: Layout, head: BaseManifest | None, folder: Path
    ) -> None:
        self._store = store
        self._layout = layout
        self._head = head
        self._left: deque[Shard] = deque()
        self._loaded: deque[tuple[Shard, Rows]] = deque()
        self._runs = SortedRuns(folder, layout.namespace)

    @property
    def max_entries(self) -> int:
        """At least as many as there are entries."""
        return (self._head.entries if self._head else 0) + self._runs.added

    async def add_deltas(self, ulids: Sequence[str], done: Deltas) -> None:
        """Read deltas and put them on top. One that vanished was deleted after its merge.

        Args:
            ulids: In rising order.
            done: Gets what became of each.

        Raises:
            TierError: The folder is full.
            UnavailableError, AccessError: The bucket gives nothing else either.
        """

        async def read(ulid: str) -> Rows | None:
            try:
                found = await read_delta(self._store, self._layout, ulid)
            except CorruptEntryError as exc:
                done.corrupt[ulid] = f"{exc} ({exc.reason})"
                return None
            except (UnavailableError, AccessError) as exc:
                done.unread[ulid] = exc  # perhaps of this object alone, and for good
                return None
            return None if found is None else found[1]

        for start in range(0, len(ulids), _DELTAS_AT_A_TIME):
            some = ulids[start : start + _DELTAS_AT_A_TIME]
            unread = len(done.unread)
            for ulid, rows in zip(some, await in_parallel(some, read), strict=True):
                if rows is not None:
                    await asyncio.to_thread(self._runs.add, rows)
                    done.read.add(ulid)
                    if rows.deleted.any():
                        done.deleting.add(ulid)
            if len(done.unread) > unread:
                await self._require_an_answer()

    async def _require_an_answer(self) -> None:
        """Tell lost objects from an outage, and keep them from opening the breaker."""
        with suppress(CorruptEntryError):  # too large, and an answer
            await self._store.get(self._layout.descriptor, max_bytes=DESCRIPTOR_BYTES)

    async def between(self, first: int, last: int, *, keep_tombstones: bool = False) -> Rows:
        """Entries whose leading byte is in ``first..last``; ask for ranges in rising order from 0.

        Raises:
            CorruptEntryError: A shard of the base is unusable or gone; the message names it.
            UnavailableError: The store does not answer now.
            AccessError: It refuses.
        """
        if first == 0:  # again from the start
            self._left = deque(self._head.shards if self._head else ())
            self._loaded.clear()
        while self._left and self._left[0].first <= last:
            shard = self._left.popleft()
            if shard.last >= first and self._head is not None:
                rows = await read_shard(self._store, self._layout, self._head, shard)
                self._loaded.append((shard, rows))
        parts = [rows.between(first, last) for _, rows in self._loaded]
        while self._loaded and self._loaded[0][0].last <= last:
            self._loaded.popleft()  # what is made of it is as large
        parts += await asyncio.to_thread(self._runs.between, first, last)
        return await asyncio.to_thread(merge, parts, keep_tombstones=keep_tombstones)


async def read_delta(store: Store, layout: Layout, ulid: str) -> tuple[Blob, Rows] | None:
    """Download one delta and check every byte; once more where it was damaged on its way.

    Returns:
        The file, and its rows, which are views of it. None where the bucket has it no more.

    Raises:
        CorruptEntryError: It is unusable, or of a newer format (reason ``version``).
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    name = layout.delta(ulid)

    async def read() -> tuple[Blob, Rows] | None:
        body = await store.get(name, max_bytes=MAX_DELTA_BYTES)
        if body is None:
            return None
        return body, await asyncio.to_thread(parse_segment, body, layout.namespace, name=name)

    try:
        return await read()
    except CorruptEntryError as exc:
        if exc.reason == "version":
            raise
    return await read()


async def read_shard(store: Store, layout: Layout, head: BaseManifest, shard: Shard) -> Rows:
    """Download one shard of a base into memory, and check every byte.

    Raises:
        CorruptEntryError: It is unusable or gone; the message names it.
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    name = head.segment_name(layout, shard)

    def checked(blob: bytearray) -> Rows:
        if BaseFile.of([memoryview(blob)]) != shard.segment:
            raise CorruptEntryError("its bytes are not those of the head", reason="checksum")
        rows = parse_segment(memoryview(blob), layout.namespace)
        if len(rows) != shard.entries or len(rows.between(shard.first, shard.last)) != len(rows):
            raise CorruptEntryError("it has other rows than the head says", reason="header")
        return rows

    try:
        if shard.segment.nbytes > MAX_SHARD_BYTES:
            raise CorruptEntryError("too large to be a shard", reason="size")
        try:
            blob = await get_in_parts(store, name, shard.segment.nbytes, at_a_time=_PARTS_AT_A_TIME)
        except VanishedError as exc:
            raise CorruptEntryError("not there", reason="length") from exc
        return await asyncio.to_thread(checked, blob)
    except CorruptEntryError as exc:
        raise CorruptEntryError(
            f"{name} ({exc.reason}): {exc}; `s3ec manifest rebuild` makes a new base",
            reason=exc.reason,
        ) from exc


DELTAS = "deltas"


class LastModifiedIndex:
    """Tells when entries were stored last, by one look at the index; shards are in a folder.

    Where a part of the index is unusable it knows no times, which a warning says: a tombstone
    of now is later than what any writer with a good clock wrote.

    Args:
        folder: Of its own, with a folder DELTAS in it; whoever made it deletes it.
    """

    def __init__(self, store: Store, layout: Layout, folder: Path) -> None:
        self._store = store
        self._layout = layout
        self._folder = folder
        self._head: BaseManifest | None = None
        self._deltas = Segment.of(Rows.empty())
        self._shards: dict[Shard, Segment | None] = {}
        self._of_byte: list[Shard | None] = [None] * 256
        self._downloading = asyncio.Lock()

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
        rows = MergedRows(self._store, self._layout, None, self._folder / DELTAS)
        deltas = Deltas()
        await rows.add_deltas(snapshot.unmerged(self._head), deltas)
        deltas.warn_of_unread(has_base=self._head is not None)
        self._deltas = Segment.of(await rows.between(0, 255, keep_tombstones=True))
        for shard in self._head.shards if self._head else ():
            self._of_byte[shard.first : shard.last + 1] = [shard] * (shard.last + 1 - shard.first)

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Download the shards that hold these keys.

        Raises:
            UnavailableError, AccessError, TierError: As open.
        """
        wanted = {self._of_byte[key.digest[0]] for key in keys}
        async with self._downloading:
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
        return max((segment.facts(row).time_s for segment, row in self._rows_of(key)), default=0)

    def facts(self, key: Key) -> EntryInfo | None:
        """What the index says of a prepared key; None where it holds none, or a tombstone."""
        latest = max(
            (
                (segment.facts(row).time_s, segment.deleted(row), segment.facts(row))
                for segment, row in self._rows_of(key)
            ),
            key=lambda one: one[:2],  # of two rows of one second the tombstone counts, see rows.py
            default=None,
        )
        return None if latest is None or latest[1] else latest[2]

    def _rows_of(self, key: Key) -> Iterator[tuple[Segment, int]]:
        shard = self._of_byte[key.digest[0]]
        for segment in (self._shards[shard] if shard else None, self._deltas):
            row = segment.find(key.digest_hi, key.digest_lo) if segment is not None else -1
            if segment is not None and row >= 0:
                yield segment, row

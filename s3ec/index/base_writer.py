# SPDX-License-Identifier: Apache-2.0
"""Writes a base: shards and filters under names of its own, then the head that commits them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import Layout
from s3ec.index.bloom import build_bloom
from s3ec.index.head import MAX_VERSION, Blob, Head, Shard, shard_ranges
from s3ec.index.making import Making
from s3ec.index.parallel import in_parallel
from s3ec.index.rows import Rows
from s3ec.index.segment import encode_segment
from s3ec.index.snapshot import read_head
from s3ec.store.base import Store

# A run without a head may be one that is being written. So long after its last file it is taken
# for a dead compaction's, and a live one has given up long before.
ABANDONED_S = 86400.0
_LONGEST_S = ABANDONED_S / 2


async def write_base(
    writer: BaseWriter, between: Callable[[int, int], Awaitable[Rows]], max_entries: int
) -> None:
    """Write all shards of a base, one in memory at a time.

    Args:
        writer: A fresh one.
        between: Gives the rows of a range of leading bytes; asked in rising order.
        max_entries: At least as many as there are.

    Raises:
        S3ECError: That of the writer or of ``between``; what was written is deleted then.
    """
    try:
        ranges = shard_ranges(max_entries)
        for number, (first, last) in enumerate(ranges):
            writer.report("writing shards", number, len(ranges))
            await writer.add(first, last, await between(first, last))
    except S3ECError:  # or each of an elected writer's attempts would stay for a day
        await writer.discard()
        raise


class BaseWriter:
    """One attempt to become version N of the base.

    Nothing that it writes is seen by readers before ``commit``; of several writers of one version
    the one whose head is first wins.

    Args:
        store: The bucket.
        layout: The namespace.
        version: To become.
        making: How.

    Attributes:
        nbytes: Bytes of all files written so far.
        report: Told how far it is.

    Raises:
        CorruptEntryError: There is no such version (``reason`` is ``version``).
    """

    def __init__(self, store: Store, layout: Layout, version: int, making: Making) -> None:
        if version > MAX_VERSION:  # its name would sort before, and no reader know it
            raise CorruptEntryError(
                f"{layout.head(MAX_VERSION)} leaves no version for another base, so somebody made "
                "it up; delete it, and run `s3ec manifest rebuild`",
                reason="version",
            )
        self.nbytes = 0
        self.report = making.report
        self._store = store
        self._layout = layout
        self._version = version
        self._bloom_fpr = making.bloom_fpr
        self._clock = making.clock
        self._started_s = making.clock()
        self._run = secrets.token_hex(8)
        self._shards: list[Shard] = []
        self._names: list[str] = []

    async def add(self, first: int, last: int, rows: Rows) -> None:
        """Write one shard and its filter; ranges in rising order, from 0 to 255.

        Raises:
            UnavailableError: The store does not answer now.
            AccessError: It refuses.
        """
        layout, namespace = self._layout, self._layout.namespace
        segment = await asyncio.to_thread(lambda: list(encode_segment(rows, namespace)))
        segment_blob = await self._put(layout.shard(self._version, self._run, first, last), segment)
        del segment
        bloom = await asyncio.to_thread(
            lambda: list(build_bloom(rows.digest_hi, rows.digest_lo, self._bloom_fpr, namespace))
        )
        bloom_blob = await self._put(layout.bloom(self._version, self._run, first, last), bloom)
        self._shards.append(Shard(first, last, len(rows), segment_blob, bloom_blob))

    async def _put(self, name: str, pieces: list[bytes | memoryview]) -> Blob:
        blob = await asyncio.to_thread(Blob.of, pieces)
        self._names.append(name)
        # Nobody else makes this name: where it is taken, the reply to our own put was lost.
        with suppress(ConflictError):
            await self._store.put_if_absent(name, pieces)
        self.nbytes += blob.nbytes
        return blob

    async def commit(self, merged: Collection[str]) -> Head | None:
        """Make this the base that readers use, unless another became this version first.

        Args:
            merged: ULIDs of the deltas that are in it and may still be in the bucket.

        Returns:
            None where another one was first; what this one wrote is deleted then, or by the next
            clean-up.

        Raises:
            UnavailableError: The store does not answer, or this took so long that the shards may
                have been deleted meanwhile. Whether it is committed is unknown then.
            AccessError: The store refuses.
        """
        head = Head(
            version=self._version,
            run=self._run,
            created_s=int(self._clock()),
            entries=sum(shard.entries for shard in self._shards),
            bloom_fpr=self._bloom_fpr,
            shards=tuple(self._shards),
            merged=frozenset(merged),
        )
        if self._clock() - self._started_s > _LONGEST_S:
            await self.discard()
            raise UnavailableError("writing the base took half a day; start again")
        try:
            await self._store.put_if_absent(
                self._layout.head(self._version), [await asyncio.to_thread(head.to_json)]
            )
        except ConflictError:
            if not await self._is_committed():
                await self.discard()
                return None
        # Heads that were superseded for long are deleted, and the name of one is free again.
        return None if await self._is_behind() else head

    async def _is_committed(self) -> bool:
        """Whether the head that is in the way is ours: the reply to it may have been lost."""
        found = await read_head(self._store, self._layout, self._version)
        if found is None:
            raise UnavailableError(f"{self._layout.head(self._version)} is there and is not")
        return found.run == self._run

    async def _is_behind(self) -> bool:
        """Whether there is a newer head; a clean-up deletes ours then."""
        async for info in self._store.list(self._layout.heads):
            if (self._layout.version_of(info.name) or 0) > self._version:
                return True
        return False

    async def discard(self) -> None:
        """Delete what was written; what cannot be deleted now is left to a later clean-up."""
        try:
            await in_parallel(self._names, self._store.delete)
        except (AccessError, UnavailableError):
            return

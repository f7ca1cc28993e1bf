# SPDX-License-Identifier: Apache-2.0
"""Compaction: base and deltas become the next base, as a stream of shards."""

from __future__ import annotations

from dataclasses import dataclass

from s3ec.errors import CorruptEntryError
from s3ec.identity import Layout
from s3ec.index.base_writer import BaseWriter, write_base
from s3ec.index.cleaning import clean
from s3ec.index.content import Content, Deltas
from s3ec.index.head import MAX_MERGED, Head
from s3ec.index.making import Made, Making, temporary_folder
from s3ec.index.rebuild import rebuild
from s3ec.index.snapshot import Snapshot, newest_head, take_snapshot
from s3ec.store.base import Store


async def compact(store: Store, layout: Layout, making: Making | None = None) -> Made | None:
    """Merge all deltas into a new base, then delete what is older than the grace period.

    The first base is made by ``rebuild``, since entries may be older than the index. Safe to
    kill at any time and to run in many places at once: readers see the old base or the new one.

    Memory: about four shards of 2**20 rows (200 MiB), however many entries there are.

    Args:
        store: The bucket; one that honours conditional writes.
        layout: The namespace.
        making: None for the defaults.

    Returns:
        None where another one was faster; what this one wrote is deleted then.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
        CorruptEntryError: The base is unusable; the message names the file. A delta that is
            unusable is left out, and named in the result.
        TierError: The folder for temporary files is full.
    """
    making = making or Making()
    snapshot = await take_snapshot(store, layout)
    head = await newest_head(store, layout, snapshot)
    if head is None:
        return await rebuild(store, layout, making)
    deltas = Deltas()
    if snapshot.deltas.keys() - head.merged:
        work = _Work(store, layout, making, snapshot)
        try:
            merged = await work.merge(head, deltas)
        except CorruptEntryError:
            if (await take_snapshot(store, layout)).version != head.version:
                return None  # the old base was deleted while it was read
            raise
        if merged is None:
            return None
        head = merged
    removed = await clean(store, layout, grace_s=making.grace_s)
    return Made(head, len(deltas.read), removed, deltas.corrupt)


@dataclass(frozen=True, slots=True)
class _Work:
    """One attempt."""

    store: Store
    layout: Layout
    making: Making
    snapshot: Snapshot

    async def merge(self, head: Head, deltas: Deltas) -> Head | None:
        """Make the base after ``head``; the same one where no delta was of use, None if beaten."""
        listed = self.snapshot.deltas.keys()
        room = max(0, MAX_MERGED - len(head.merged & listed))
        pending = sorted(listed - head.merged)[:room]
        with temporary_folder(self.making.folder) as folder:
            content = Content(self.store, self.layout, head, folder)
            await content.add_deltas(pending, deltas)
            if not deltas.read:
                return head
            writer = BaseWriter(self.store, self.layout, head.version + 1, self.making)
            await write_base(writer, content.between, content.max_entries)
            return await writer.commit((head.merged & listed) | deltas.read)

# SPDX-License-Identifier: Apache-2.0
"""Rebuilding: the next base from an authoritative listing, with what the old one knew."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np

from s3ec.counters import Report
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import Layout
from s3ec.index.base_writer import BaseWriter, write_base
from s3ec.index.cleaning import clean
from s3ec.index.content import Content, Deltas
from s3ec.index.head import MAX_MERGED, Head
from s3ec.index.making import Made, Making, temporary_folder
from s3ec.index.matching import find_in
from s3ec.index.object_listing import read_listing
from s3ec.index.rows import Rows
from s3ec.index.snapshot import Snapshot, newest_head, take_snapshot
from s3ec.index.sorted_runs import SortedRuns
from s3ec.store.base import Store

log = logging.getLogger(__name__)

_ATTEMPTS = 3
# An object that is so much newer than what the index knows was written again since. Clocks of
# writers are within this of the server's, see announce.py.
_SKEW_S = 600
_FOLDERS = ("known", "listed")


async def rebuild(store: Store, layout: Layout, making: Making | None = None) -> Made:
    """Make a base of what ``objects/`` holds now, whatever became of the index.

    What the old base and the deltas know of an entry besides its size is kept where it is still
    the same object. What writers announce meanwhile stays announced.

    Costs a listing of everything, 16 requests at a time. Memory: as compact, some 200 MiB.

    Args:
        store: The bucket; one that honours conditional writes.
        layout: The namespace.
        making: None for the defaults.

    Raises:
        UnavailableError: The store does not answer now, or others went on making bases.
        AccessError: It refuses.
        CorruptEntryError: A newer s3ec wrote the index (reason ``version``).
        TierError: The folder for temporary files is full.
    """
    making = making or Making()
    for _ in range(_ATTEMPTS):
        made = await _attempt(store, layout, making)
        if made is not None:
            removed = await clean(store, layout, grace_s=making.grace_s)
            return Made(made, len(made.merged), removed)
    raise UnavailableError("other compactions were faster each time; try again later")


async def _attempt(store: Store, layout: Layout, making: Making) -> Head | None:
    """None where so much time was lost to others that the listing is of no use any more."""
    started_s = making.clock()
    # First the deltas, then the objects: what is announced after this stays unmerged.
    snapshot = await take_snapshot(store, layout)
    with temporary_folder(making.folder, *_FOLDERS) as folder:
        source = await _Source.read(store, layout, snapshot, folder, making.report)
        version = snapshot.version + 1
        while True:
            writer = BaseWriter(store, layout, version, making)
            await write_base(writer, source.between, source.entries)
            # Not only those that could be read: the listing says what they say, and more.
            head = await writer.commit(sorted(snapshot.deltas)[:MAX_MERGED])
            if head is not None:
                return head
            # Another base came first. All that it merged is still there as deltas, and those
            # that are news to us stay unmerged, unless the grace period is nearly over.
            if making.clock() - started_s > making.grace_s / 2:
                return None
            version = (await take_snapshot(store, layout)).version + 1


class _Source:
    """The rows of the new base."""

    def __init__(self, listed: SortedRuns, known: Content) -> None:
        self._listed = listed
        self._known: Content | None = known

    @classmethod
    async def read(
        cls, store: Store, layout: Layout, snapshot: Snapshot, folder: Path, report: Report
    ) -> _Source:
        """Read the deltas, then list the objects."""
        head = await _usable_head(store, layout, snapshot)
        known = Content(store, layout, head, folder / _FOLDERS[0])
        pending = snapshot.deltas.keys() - (head.merged if head else frozenset())
        await known.add_deltas(sorted(pending), Deltas())
        listed = await read_listing(
            store,
            layout,
            folder / _FOLDERS[1],
            report=report,
            expected=known.max_entries or None,
        )
        return cls(listed, known)

    @property
    def entries(self) -> int:
        return self._listed.added

    async def between(self, first: int, last: int) -> Rows:
        listed = await asyncio.to_thread(self._listed.sorted_between, first, last)
        if self._known is not None:
            try:
                known = await self._known.between(first, last)
                return await asyncio.to_thread(with_facts, listed, known)
            except CorruptEntryError as exc:
                log.warning("the old base is unusable, shapes of its entries are lost: %s", exc)
                self._known = None
        return listed


async def _usable_head(store: Store, layout: Layout, snapshot: Snapshot) -> Head | None:
    try:
        return await newest_head(store, layout, snapshot)
    except CorruptEntryError as exc:
        if exc.reason == "version":
            raise
        log.warning("the old base is unusable, shapes of its entries are lost: %s", exc)
        return None


def with_facts(listed: Rows, known: Rows) -> Rows:
    """Listed rows with what is known of those that are still the same objects.

    Args:
        listed: Sorted, from a listing: sizes and times.
        known: Sorted, from an index.
    """
    if not len(known):
        return listed
    at, found = find_in(listed, known)
    same = found & (known.nbytes[at] == listed.nbytes)
    same &= listed.time_s.astype(np.int64) <= known.time_s[at].astype(np.int64) + _SKEW_S
    columns = {
        name: np.where(same, getattr(known, name)[at], getattr(listed, name))
        for name in ("rows", "width", "checksum", "time_s", "dtype")
    }
    return Rows.of_digests(listed.digest_hi, listed.digest_lo, nbytes=listed.nbytes, **columns)

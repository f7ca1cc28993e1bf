# SPDX-License-Identifier: Apache-2.0
"""Makes the next base from a listing of all objects, or compares an index with a listing.

A rebuild keeps what the old base knew. A comparison says what the index lacks, and what it only
believes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from s3ec.counters import Report
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import Layout
from s3ec.index.base_writer import (
    BaseWriter,
    BuildOptions,
    BuildResult,
    clean,
    in_temporary_folder,
    write_base,
)
from s3ec.index.listing import key_of_object, list_objects, read_listing
from s3ec.index.manifest import (
    MAX_MERGED,
    BaseManifest,
    ManifestListing,
    newest_head,
    shard_ranges,
    take_snapshot,
)
from s3ec.index.merged_rows import Deltas, MergedRows
from s3ec.index.rows import Rows, find_in
from s3ec.index.segment import SortedRuns
from s3ec.store.base import Store

log = logging.getLogger(__name__)

_ATTEMPTS = 3
# An object that is so much newer than what the index knows was written again since. Clocks of
# writers are within this of the server's, see announce.py.
_SKEW_S = 600
_FOLDERS = ("known", "listed")


async def rebuild(store: Store, layout: Layout, options: BuildOptions | None = None) -> BuildResult:
    """Make a base of what ``objects/`` holds now, whatever became of the index.

    What the old base and the deltas know of an entry besides its size is kept where it is still
    the same object. What writers announce meanwhile stays announced.

    Costs a listing of everything, 16 requests at a time. Memory: as compact, some 200 MiB.

    Args:
        store: The bucket; one that honours conditional writes.
        layout: The namespace.
        options: None for the defaults.

    Raises:
        UnavailableError: The store does not answer now, or others went on making bases.
        AccessError: It refuses.
        CorruptEntryError: A newer s3ec wrote the index (reason ``version``).
        TierError: The folder for temporary files is full.
    """
    options = options or BuildOptions()
    for _ in range(_ATTEMPTS):
        made = await _attempt(store, layout, options)
        if made is not None:
            removed = await clean(store, layout, grace_s=options.grace_s)
            return BuildResult(made, len(made.merged), removed)
    raise UnavailableError("other compactions were faster each time; try again later")


async def _attempt(store: Store, layout: Layout, options: BuildOptions) -> BaseManifest | None:
    """One attempt; None if other compactions took so long that the listing is too old."""
    started_s = options.clock()

    def is_late() -> bool:
        """After another base came first. All that it merged is still there as deltas, and those
        that are news to us stay unmerged, unless the grace period is nearly over.
        """
        return options.clock() - started_s > options.grace_s / 2

    # First the deltas, then the objects: what is announced after this stays unmerged.
    snapshot = await take_snapshot(store, layout)
    async with in_temporary_folder(options.folder, *_FOLDERS) as folder:
        source = await _Source.read(store, layout, snapshot, folder, options.report)
        version = snapshot.version + 1
        while True:
            writer = BaseWriter(store, layout, version, options)
            await write_base(writer, source.between, source.entries)
            if version > snapshot.version + 1 and is_late():
                await writer.discard()
                return None
            # Not only those that could be read: the listing says what they say, and more.
            head = await writer.commit(sorted(snapshot.deltas)[:MAX_MERGED])
            if head is not None:
                return head
            if is_late():
                return None
            version = (await take_snapshot(store, layout)).version + 1


class _Source:
    """The rows of the new base."""

    def __init__(self, listed: SortedRuns, known: MergedRows) -> None:
        self._listed = listed
        self._known: MergedRows | None = known

    @classmethod
    async def read(
        cls, store: Store, layout: Layout, snapshot: ManifestListing, folder: Path, report: Report
    ) -> _Source:
        """Read the deltas, then list the objects."""
        head = await _usable_head(store, layout, snapshot)
        known = MergedRows(store, layout, head, folder / _FOLDERS[0])
        deltas = Deltas()
        await known.add_deltas(snapshot.unmerged(head), deltas)
        listed = await read_listing(
            store,
            layout,
            folder / _FOLDERS[1],
            report=report,
            expected=known.max_entries or None,
        )
        # Once more: after this nobody reads them, and a listing has no rows, width or data type.
        again = Deltas()
        await known.add_deltas(sorted(deltas.unread), again)
        again.warn_of_unread(has_base=True)
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


async def _usable_head(
    store: Store, layout: Layout, snapshot: ManifestListing
) -> BaseManifest | None:
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


# Writers announce a few seconds after an upload, longer where the bucket does not answer.
_UNANNOUNCED_S = 60.0
_SHOWN = 20
_WITH_OBJECT = ("missing", "differing")


@dataclass(slots=True)
class Verified:
    """What a comparison of the index with the bucket found.

    Attributes:
        version: Of the base, 0 where there is none.
        entries: That the index holds, deltas included.
        objects: That the bucket holds.
        missing: Objects that the index does not hold; encoded again until a rebuild.
        extra: Entries without an object; each costs a request that ends in 404.
        differing: Entries whose object has another size.
        unannounced: Objects of the last minute that are not in the index yet: not missing.
        examples: Digests, as hex, of some that are missing, extra or differing.
        objects_of: The objects' names of those examples that have one, by digest.
        corrupt: Deltas that are unusable or cannot be read: ULID to what is wrong.
    """

    version: int = 0
    entries: int = 0
    objects: int = 0
    missing: int = 0
    extra: int = 0
    differing: int = 0
    unannounced: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    objects_of: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)

    @property
    def index_agrees(self) -> bool:
        """Whether nothing is missing, extra, differing or corrupt."""
        return not (self.missing or self.extra or self.differing or self.corrupt)

    @property
    def agrees(self) -> bool:
        """Whether there is nothing to complain about."""
        return self.index_agrees


async def verify(
    store: Store,
    layout: Layout,
    options: BuildOptions | None = None,
    *,
    look: Callable[[Rows], None] | None = None,
) -> Verified:
    """Read the whole index and list the whole bucket; memory as for compact.

    Entries that are announced or deleted meanwhile are not complained about.

    Args:
        options: None for the defaults.
        look: Given the listed entries, range by range.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
        CorruptEntryError: The base is unusable; the message names the file.
        TierError: The folder for temporary files is full.
    """
    options = options or BuildOptions()
    names = ("known", "listed", "news")
    async with in_temporary_folder(options.folder, *names) as folder:
        places = [folder / name for name in names]
        before = await take_snapshot(store, layout)
        head = await newest_head(store, layout, before)
        found = Verified(version=before.version)
        known = MergedRows(store, layout, head, places[0])
        deltas = Deltas()
        await known.add_deltas(before.unmerged(head), deltas)
        if head is None:  # else the bucket answers, and these objects are lost
            deltas.require_any()
        found.corrupt = deltas.problems
        young_s = options.clock() - _UNANNOUNCED_S
        expected = known.max_entries or None
        listed = await read_listing(
            store, layout, places[1], report=options.report, expected=expected
        )
        news = MergedRows(store, layout, None, places[2])
        after = await take_snapshot(store, layout)
        later = Deltas()
        await news.add_deltas(sorted(after.deltas.keys() - before.deltas.keys()), later)
        found.corrupt |= later.problems
        ranges = shard_ranges(max(known.max_entries, listed.added))
        for number, (first, last) in enumerate(ranges):
            options.report("comparing", number, len(ranges))
            index = await known.between(first, last)
            latest = await news.between(first, last, keep_tombstones=True)
            there = await asyncio.to_thread(listed.sorted_between, first, last)
            _compare(found, index, latest, there, young_s)
            if look is not None:
                await asyncio.to_thread(look, there)
    wanted = {digest for kind in _WITH_OBJECT for digest in found.examples.get(kind, ())}
    if wanted:
        found.objects_of = await _find_names(store, layout, wanted, options.report)
    return found


async def _find_names(
    store: Store, layout: Layout, wanted: set[str], report: Report
) -> dict[str, str]:
    """Names of the objects with these digests; lists the bucket until all are found.

    A digest does not tell its name, and to keep all names would take the memory of the bucket.
    """
    names: dict[str, str] = {}
    async with aclosing(list_objects(store, layout, report=report)) as batches:
        async for infos in batches:
            for info in infos:
                digest = key_of_object(layout, info.name).digest.hex()
                if digest in wanted:
                    names[digest] = info.name
            if len(names) == len(wanted):
                break
    return names


def _compare(found: Verified, index: Rows, latest: Rows, there: Rows, young_s: float) -> None:
    """Count the differences in one range, but for what was announced or deleted meanwhile."""
    found.entries += len(index)
    found.objects += len(there)
    at, known = find_in(there, index)
    absent = ~known & ~find_in(there, latest)[1]
    young = absent & (there.time_s >= young_s)
    found.unannounced += int(young.sum())
    _note(found, "missing", there, absent & ~young)
    _note(found, "extra", index, ~find_in(index, there)[1] & ~find_in(index, latest)[1])
    if len(index):
        sizes = index.nbytes[at]
        _note(found, "differing", there, known & (sizes != 0) & (sizes != there.nbytes))


def _note(found: Verified, kind: str, rows: Rows, which: npt.NDArray[np.bool_]) -> None:
    setattr(found, kind, getattr(found, kind) + int(which.sum()))
    examples = found.examples.setdefault(kind, [])
    for row in np.flatnonzero(which)[: _SHOWN - len(examples)]:
        examples.append(rows.digest(int(row)).hex())

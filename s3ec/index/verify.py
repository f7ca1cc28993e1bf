# SPDX-License-Identifier: Apache-2.0
"""Compares the index with an authoritative listing: what it lacks, and what it only believes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from s3ec.counters import Report
from s3ec.identity import Layout, digest_of_name, entry_name
from s3ec.index.content import Content, Deltas
from s3ec.index.head import shard_ranges
from s3ec.index.making import Making, temporary_folder
from s3ec.index.matching import find_in
from s3ec.index.object_listing import list_objects, read_listing
from s3ec.index.rows import Rows
from s3ec.index.snapshot import newest_head, take_snapshot
from s3ec.store.base import ObjectInfo, Store

# Writers announce a few seconds after an upload, longer where the bucket does not answer.
_UNANNOUNCED_S = 60.0
_SHOWN = 20
_WITH_OBJECT = ("missing", "differing")


@dataclass(slots=True)
class Verified:
    """The index beside the bucket.

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
        corrupt: Deltas that are unusable: ULID to what is wrong.
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
    def agrees(self) -> bool:
        """Whether nothing is missing, extra, differing or corrupt."""
        return not (self.missing or self.extra or self.differing or self.corrupt)


async def verify(store: Store, layout: Layout, making: Making | None = None) -> Verified:
    """Read the whole index and list the whole bucket; memory as for compact.

    Entries that are announced or deleted meanwhile are not complained about.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
        CorruptEntryError: The base is unusable; the message names the file.
        TierError: The folder for temporary files is full.
    """
    making = making or Making()
    names = ("known", "listed", "news")
    with temporary_folder(making.folder, *names) as folder:
        places = [folder / name for name in names]
        before = await take_snapshot(store, layout)
        head = await newest_head(store, layout, before)
        found = Verified(version=before.version)
        known = Content(store, layout, head, places[0])
        pending = before.deltas.keys() - (head.merged if head else frozenset())
        await known.add_deltas(sorted(pending), Deltas(corrupt=found.corrupt))
        young_s = making.clock() - _UNANNOUNCED_S
        expected = known.max_entries or None
        listed = await read_listing(
            store, layout, places[1], report=making.report, expected=expected
        )
        news = Content(store, layout, None, places[2])
        after = await take_snapshot(store, layout)
        await news.add_deltas(sorted(after.deltas.keys() - before.deltas.keys()), Deltas())
        ranges = shard_ranges(max(known.max_entries, listed.added))
        for number, (first, last) in enumerate(ranges):
            making.report("comparing", number, len(ranges))
            index = await known.between(first, last)
            latest = await news.between(first, last, keep_tombstones=True)
            there = await asyncio.to_thread(listed.sorted_between, first, last)
            _compare(found, index, latest, there, young_s)
    wanted = {digest for kind in _WITH_OBJECT for digest in found.examples.get(kind, ())}
    if wanted:
        found.objects_of = await _find_names(store, layout, wanted, making.report)
    return found


class _AllFoundError(Exception):
    """Ends a listing."""


async def _find_names(
    store: Store, layout: Layout, wanted: set[str], report: Report
) -> dict[str, str]:
    """Names of the objects with these digests; lists the bucket until all are found.

    A digest does not tell its name, and to keep all names would take the memory of the bucket.
    """
    names: dict[str, str] = {}

    async def take(infos: Sequence[ObjectInfo]) -> None:
        for info in infos:
            below = info.name.removeprefix(layout.objects)
            plain, _ = entry_name(below) or (below, 0)
            digest = digest_of_name(plain).hex()
            if digest in wanted:
                names[digest] = info.name
        if len(names) == len(wanted):
            raise _AllFoundError

    with suppress(_AllFoundError):
        await list_objects(store, layout, take, report=report)
    return names


def _compare(found: Verified, index: Rows, latest: Rows, there: Rows, young_s: float) -> None:
    """Count the differences of one range; what was announced or deleted meanwhile is none."""
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

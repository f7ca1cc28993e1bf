# SPDX-License-Identifier: Apache-2.0
"""Makes snapshots: unions of what is known, and listings of what is there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from s3ec.counters import Counters, Report, unreported
from s3ec.identity import Key, Layout
from s3ec.index2.child import Jobs
from s3ec.index2.local import NodeFolder
from s3ec.index2.names import SnapshotName
from s3ec.index2.reader import ManifestIndex
from s3ec.index2.snapshot import Rows, Segment
from s3ec.store.base import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Made:
    """A snapshot that was written.

    Attributes:
        name: Its name.
        rows: Its rows.
        removed: Old objects of the index that were deleted.
    """

    name: SnapshotName
    rows: int
    removed: int


@dataclass(frozen=True, slots=True)
class Verified:
    """An index compared with a listing.

    Attributes:
        entries: Objects that the listing found.
        rows: Rows of snapshot and deltas.
        gone: Rows without an object: each costs a node a 404.
        unannounced: Objects without a row: no reader finds them.
        snapshot: The newest one that can be read; the default for none.
        refused: Objects of the index that cannot be used: name to what is wrong.
    """

    entries: int
    rows: int
    gone: int
    unannounced: int
    snapshot: SnapshotName
    refused: dict[str, str]


class ListingSnapshot:
    """Collects a listing for a snapshot; made by ``listing_snapshot``. For one event loop."""

    async def add(self, infos: Sequence[ObjectInfo]) -> None:
        """These entries were listed; about 3 us each, in another thread."""
        raise NotImplementedError

    def deleted(self, keys: Iterable[Key]) -> None:
        """These entries were deleted since they were listed: they are left out."""
        raise NotImplementedError

    async def commit(self) -> Made:
        """Write the snapshot, and delete what it has replaced. Call it after a whole listing only.

        Raises:
            UnavailableError, AccessError: The bucket did not take it.
            TierError: The folder for temporary files is full.
        """
        raise NotImplementedError


@asynccontextmanager
async def listing_snapshot(
    store: Store, layout: Layout, *, folder: Path | None = None
) -> AsyncIterator[ListingSnapshot]:
    """Begin a snapshot by listing: enter before the first request of the listing goes out.

    Leaving without ``commit`` writes nothing.

    Args:
        folder: Where a temporary folder may be made, 42 bytes for each object; None for the
            system's place.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: This identity may not write.
    """
    yield ListingSnapshot()


async def rebuild(
    store: Store, layout: Layout, *, folder: Path | None = None, report: Report = unreported
) -> Made:
    """List all objects and write that as a snapshot; takes no claim.

    Raises:
        UnavailableError: The store does not answer now, or part of the listing is missing.
        AccessError: It refuses.
        TierError: The folder for temporary files is full.
    """
    raise NotImplementedError


async def verify(
    store: Store, layout: Layout, *, folder: Path | None = None, report: Report = unreported
) -> Verified:
    """Compare snapshot and deltas with a listing; writes nothing. Raises as rebuild."""
    raise NotImplementedError


async def newest_rows(store: Store, layout: Layout) -> int | None:
    """How many rows the newest snapshot has, by its size; None where there is none. One LIST."""
    raise NotImplementedError


async def list_snapshots(store: Store, layout: Layout) -> list[tuple[SnapshotName, ObjectInfo]]:
    """All snapshots, the newest first. Names that no server's clock made are left out."""
    raise NotImplementedError


@asynccontextmanager
async def open_merged(
    store: Store, layout: Layout, *, folder: Path | None = None, report: Report = unreported
) -> AsyncIterator[Segment]:
    """Snapshot and deltas as one sorted segment in a temporary file. Raises as rebuild."""
    yield Segment.of(Rows.of([], []))


async def make_union(store: Store, layout: Layout, folder: NodeFolder) -> Made | None:
    """Write the newest snapshot and the deltas since as one snapshot, where that is due.

    Returns:
        None where it is not due, or where another writer is at it.

    Raises:
        UnavailableError, AccessError, TierError: As rebuild.
    """
    raise NotImplementedError


async def make_listing(
    store: Store, layout: Layout, folder: NodeFolder, *, older_s: float
) -> Made | None:
    """List all objects and write that as a snapshot, where the last listing is so old.

    Returns and raises as make_union.
    """
    raise NotImplementedError


class Maintainer:
    """Has snapshots made by a child when they are due; for a process that may write.

    Counters: ``index.unions``, ``index.listings`` and ``index.make_failed``.
    """

    def __init__(
        self,
        index: ManifestIndex,
        layout: Layout,
        folder: NodeFolder,
        jobs: Jobs,
        counters: Counters,
    ) -> None:
        """Nothing runs before ``run_forever``."""
        raise NotImplementedError

    async def run_forever(self) -> None:
        """Look every ten seconds whether a snapshot is due, until cancelled."""
        raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""Makes snapshots: unions of snapshot and deltas, and listings of the objects.

A union is the newest snapshot with the deltas since. A listing is what ``objects/`` holds. Each is
named before its work begins, so that readers also read the deltas that are announced meanwhile. Two
at once are both right: claims only save work.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from s3ec import safetensors_file
from s3ec.counters import Counters, Report, unreported
from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Layout, is_ulid
from s3ec.index.bloom import write_bloom
from s3ec.index.child import LISTING_EVERY_S, Job, Jobs
from s3ec.index.deltas import list_deltas, read_deltas
from s3ec.index.listing import list_objects, rows_of
from s3ec.index.local import FILTER, ROWS, NodeFolder
from s3ec.index.names import (
    MARGIN_S,
    NEVER,
    Names,
    ServerClock,
    SnapshotName,
    claims_prefix,
    deltas_prefix,
    first_ulid,
    list_snapshots,
    snapshots_prefix,
    time_s,
)
from s3ec.index.reader import ManifestIndex
from s3ec.index.snapshot import (
    COLUMNS,
    KIND,
    MAX_BYTES,
    PARTS,
    Rows,
    Segment,
    Spill,
    anonymous_file,
    merge,
    rows_in_header,
    without,
    write_rows,
)
from s3ec.runtime import contained, jitter
from s3ec.store.base import (
    DELETE_AT_A_TIME,
    PART_BYTES,
    ObjectInfo,
    Store,
    VanishedError,
    whole_parts,
)

log = logging.getLogger(__name__)

UNION_ROWS, UNION_SHARE = 65_536, 1 / 8
"""A union is due if deltas hold more rows than both, the second as a share of the snapshot's."""
UNION_DELTAS = 4096
"""A union is also due if there are more deltas than this."""
UNION_EVERY_S = 600.0
LISTING_SOON_EVERY_S = 3600.0
"""The least time between two listings while many fetches find nothing."""
UNION_STALE_S, LISTING_STALE_S = 600.0, 7200.0
"""A claim expires after this time, by the server's dates."""
YOUNG_S = 600.0
"""An object of at most this age may not be announced yet."""
LOOK_EVERY_S = 10.0
_DELTAS_AT_A_TIME = 256
_DOWNLOAD_PARTS = 2


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


@dataclass(slots=True)
class Verified:
    """An index compared with a listing.

    Attributes:
        snapshot: The newest readable one; the default value for none.
        entries: Rows of snapshot and deltas.
        objects: Objects that the listing found.
        missing: Objects without a row; encoded again until the next listing.
        extra: Rows without an object; each costs a node a 404.
        unannounced: Objects of the last ten minutes without a row yet: not missing.
        refused: Unusable objects of the index: name to what is wrong.
    """

    snapshot: SnapshotName = field(default_factory=SnapshotName)
    entries: int = 0
    objects: int = 0
    missing: int = 0
    extra: int = 0
    unannounced: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def index_agrees(self) -> bool:
        """True if nothing is missing, extra or refused."""
        return not (self.missing or self.extra or self.refused)


# -- reading a snapshot ----------------------------------------------------------------------------


async def fetch_snapshot(
    store: Store, layout: Layout, node: NodeFolder, name: SnapshotName
) -> None:
    """Download a snapshot to this node, check all of it, and make its filter.

    Raises:
        UnavailableError: The store does not answer now, or the snapshot was replaced.
        AccessError: It refuses.
        CorruptEntryError: The snapshot is damaged.
        TierError: The disk refused.
    """
    info = await store.head(snapshots_prefix(layout) + str(name))
    if info is None:
        raise UnavailableError(f"snapshot {name} is gone")
    with node.new_file(f"{name}{ROWS}", info.nbytes) as file:
        segment = await _download(store, layout, info, file)
        with node.new_file(f"{name}{FILTER}", 0) as filter_file:
            await asyncio.to_thread(write_bloom, filter_file, segment.rows)


async def _download(store: Store, layout: Layout, info: ObjectInfo, file: BinaryIO) -> Segment:
    """Download a snapshot into a file, and check every byte. Raises as fetch_snapshot."""
    if not 0 < info.nbytes <= MAX_BYTES:
        raise CorruptEntryError(f"{info.name}: {info.nbytes} bytes", reason="size")
    parts = whole_parts(store, info.name, info.nbytes, at_a_time=_DOWNLOAD_PARTS)
    try:
        async with aclosing(parts) as coming:
            async for at, part in coming:
                file.seek(at)
                await asyncio.to_thread(file.write, part)
        file.flush()
    except VanishedError as exc:
        raise UnavailableError(f"{info.name} is gone") from exc
    except CorruptEntryError as exc:  # its listed size says it is whole: it was cut on its way
        raise UnavailableError(str(exc)) from exc
    except OSError as exc:
        raise TierError(f"cannot write a file of the index: {exc}") from exc
    segment = _mapped(file, layout, info.name)
    await asyncio.to_thread(segment.check)
    return segment


def _mapped(file: BinaryIO, layout: Layout, name: str) -> Segment:
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Segment.parse(memoryview(whole), layout.namespace, name=name)


async def rows_in(store: Store, layout: Layout, info: ObjectInfo) -> int:
    """Read how many rows a snapshot has, from its header: one small GET.

    Raises:
        CorruptEntryError: It cannot be read, by its header and size.
        UnavailableError, AccessError: The store did not answer.
    """
    front = await store.get_range(info.name, 0, 8 + safetensors_file.HEADER_LIMIT)
    if front is None:
        raise CorruptEntryError(f"{info.name} is gone", reason="length")
    header = safetensors_file.parse_columns(
        front, info.nbytes, kind=KIND, namespace=layout.namespace, name=info.name
    )
    return rows_in_header(header, COLUMNS, info.name)


async def newest_rows(store: Store, layout: Layout) -> int | None:
    """Read how many rows the newest readable snapshot has; None if there is none. A LIST and a GET.

    Raises:
        UnavailableError, AccessError: The store did not answer.
    """
    for _, info in await list_snapshots(store, layout):
        with suppress(CorruptEntryError):
            return await rows_in(store, layout, info)
    return None


# -- writing one -----------------------------------------------------------------------------------


def _parts(spill: Spill, base: Segment | None = None) -> Iterator[Rows]:
    """All rows of both, sorted, part by part; of two for one key the spilled row counts."""
    for number in range(PARTS):
        rows = spill.part(number)
        yield merge(rows if base is None else [base.rows.part(number), *rows])


async def _write(
    store: Store,
    layout: Layout,
    clock: ServerClock,
    name: SnapshotName,
    parts: Iterable[Rows],
    *,
    folder: Path | None,
    node: NodeFolder | None,
) -> Made:
    """Write a snapshot to a local file, then to the bucket, then delete what it replaces.

    Args:
        folder: For temporary files; None for the system's.
        node: Keeps the snapshot and its filter on this node; None to keep neither.
    """
    with ExitStack() as files:
        rows_file = files.enter_context(
            anonymous_file(folder) if node is None else node.new_file(f"{name}{ROWS}", 0)
        )
        await asyncio.to_thread(write_rows, rows_file, layout.namespace, parts, folder)
        segment = _mapped(rows_file, layout, str(name))
        count, body = len(segment), segment.blob
        if node is not None:  # named before the rows are, since it leaves this block first
            filter_file = files.enter_context(node.new_file(f"{name}{FILTER}", 0))
            await asyncio.to_thread(write_bloom, filter_file, segment.rows)
        pieces = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
        with suppress(ConflictError):  # it is ours, and its reply was lost
            await store.put_if_absent(snapshots_prefix(layout) + str(name), pieces)
        del pieces, body, segment
    removed = 0
    try:
        removed = await clear(store, layout, clock)
    except (UnavailableError, AccessError) as exc:
        log.debug("old files of the index stay for now: %s", exc)
    return Made(name, count, removed)


async def clear(store: Store, layout: Layout, clock: ServerClock) -> int:
    """Delete what no reader needs: the two newest readable snapshots stay, and deltas since.

    Returns:
        How many objects were deleted.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    removed = 0
    async with aclosing(_unneeded(store, layout, clock)) as names:
        waiting: list[str] = []
        async for name in names:
            waiting.append(name)
            if len(waiting) == DELETE_AT_A_TIME:  # early: a refusal ends the listing of deltas
                removed += await _delete(store, waiting)
                waiting = []
        return removed + await _delete(store, waiting)


async def _delete(store: Store, names: Sequence[str]) -> int:
    if names:
        for error in (await store.delete_many(names)).values():
            raise error
    return len(names)


async def _unneeded(store: Store, layout: Layout, clock: ServerClock) -> AsyncGenerator[str, None]:
    readable: list[SnapshotName] = []
    for name, info in await list_snapshots(store, layout):
        if len(readable) == 2:
            yield info.name
            continue
        with suppress(CorruptEntryError):
            await rows_in(store, layout, info)
            readable.append(name)
    if len(readable) == 2:
        # Twice, since a reader of the older snapshot also reads deltas from before its name.
        prefix, last_s = deltas_prefix(layout), time_s(readable[-1].listed) - 2 * MARGIN_S
        last = first_ulid(last_s)
        async for info in store.list(prefix):
            ulid = info.name.removeprefix(prefix)
            if is_ulid(ulid) and ulid < last:
                yield info.name
    stale_s = clock.now_s() - 2 * LISTING_STALE_S
    async for info in store.list(claims_prefix(layout)):
        if 0 < info.modified_s < stale_s:
            yield info.name


# -- listings --------------------------------------------------------------------------------------


async def rebuild(
    store: Store,
    layout: Layout,
    *,
    folder: Path | None = None,
    node: NodeFolder | None = None,
    listing: AsyncGenerator[list[ObjectInfo], None] | None = None,
    gone: Sequence[bytes] = (),
    report: Report = unreported,
) -> Made:
    """List all objects and write them as a snapshot; takes no claim.

    Args:
        folder: For temporary files, 60 bytes for each object; None for the system's.
        node: Keeps the snapshot on this node; None for the bucket only.
        listing: Lists the entries, and has not begun; None for ``list_objects``.
        gone: Digests to leave out; read when the listing has ended.
        report: Called with the number of listed objects.

    Raises:
        UnavailableError: The store does not answer now, or part of the listing is missing.
        AccessError: It refuses.
        TierError: The folder for temporary files is full.
    """
    clock = ServerClock()
    await clock.ask(store, layout)
    # Dates have whole seconds, so a listing that ended just before may have a later name.
    listed = max((name.listed for name, _ in await list_snapshots(store, layout)), default=NEVER)
    ulid = Names().next(clock.now_s(), at_least=listed)
    entries = 0
    with closing(Spill(folder)) as spill:
        async with aclosing(listing or list_objects(store, layout, report=report)) as batches:
            async for infos in batches:
                entries += len(infos)
                await asyncio.to_thread(_spill_listed, layout, infos, spill)
        if not entries:
            await _require_listing(store, layout)
        deleted = merge([Rows.of(gone, [0] * len(gone))])
        parts = (without(rows, deleted) if gone else rows for rows in _parts(spill))
        name = SnapshotName(ulid, ulid)
        return await _write(store, layout, clock, name, parts, folder=folder, node=node)


def _spill_listed(layout: Layout, infos: Sequence[ObjectInfo], spill: Spill) -> None:
    spill.add(rows_of(layout, infos))


async def _require_listing(store: Store, layout: Layout) -> None:
    """Refuse an empty listing by a server that lists nothing at all.

    Raises:
        UnavailableError: It does not list an existing object; a proxy's page may have come instead.
    """
    if await store.head(layout.descriptor) is None:
        return
    async for info in store.list(layout.descriptor):
        if info.name == layout.descriptor:
            return
    raise UnavailableError(f"the server lists nothing, though {layout.descriptor} is there")


async def make_listing(
    store: Store, layout: Layout, node: NodeFolder, *, older_s: float = LISTING_EVERY_S
) -> Made | None:
    """List all objects and write them as a snapshot, if the last listing is ``older_s`` old.

    Returns:
        None if it is not, or if another writer does it.

    Raises:
        UnavailableError, AccessError, TierError: As rebuild.
    """
    await asyncio.to_thread(node.make)
    clock = ServerClock()
    await clock.ask(store, layout)
    listed = max((name.listed for name, _ in await list_snapshots(store, layout)), default=NEVER)
    if clock.now_s() - time_s(listed) < older_s:
        return None
    if not await _claim(store, layout, clock, f"listing-{listed}", LISTING_STALE_S):
        return None
    return await rebuild(store, layout, folder=node.path, node=node)


# -- unions ----------------------------------------------------------------------------------------


async def _read_all(
    store: Store, layout: Layout, ulids: Sequence[str], spill: Spill, refused: dict[str, str]
) -> None:
    """Spill the rows of some deltas; ``refused`` gets the names of unusable ones.

    Raises:
        UnavailableError, AccessError: A delta cannot be read now, and a union needs all of them.
    """
    left = iter(ulids)
    while some := list(islice(left, _DELTAS_AT_A_TIME)):
        for ulid, answer in (await read_deltas(store, layout, some)).items():
            if isinstance(answer, Rows):
                await asyncio.to_thread(spill.add, answer)
            elif isinstance(answer, CorruptEntryError):
                refused[deltas_prefix(layout) + ulid] = str(answer)
            elif answer is not None:
                raise answer


async def make_union(store: Store, layout: Layout, node: NodeFolder) -> Made | None:
    """Write the newest snapshot and the deltas since as one snapshot, if that is due.

    Returns:
        None if it is not due, or if another writer does it.

    Raises:
        UnavailableError, AccessError, TierError: As rebuild.
    """
    await asyncio.to_thread(node.make)
    clock = ServerClock()
    await clock.ask(store, layout)
    begun_s = clock.now_s()
    snapshots = await list_snapshots(store, layout)
    newest = snapshots[0][0] if snapshots else SnapshotName()
    if begun_s - time_s(newest.ulid) < UNION_EVERY_S:
        return None
    deltas = await list_deltas(store, layout, newest)
    fresh = [info.nbytes for ulid, info in deltas.items() if ulid >= newest.ulid]
    rows = snapshots[0][1].nbytes // 22 if snapshots else 0
    if not is_union_due(len(fresh), sum(fresh) // 20, rows):
        return None
    if not await _claim(store, layout, clock, f"union-{newest}", UNION_STALE_S):
        return None
    refused: dict[str, str] = {}
    with ExitStack() as files:
        base, segment = await _newest(store, layout, files, node.path, refused, node)
        spill = files.enter_context(closing(Spill(node.path)))
        deltas = await list_deltas(store, layout, base)
        await _read_all(store, layout, sorted(deltas), spill, refused)
        for problem in refused.values():
            log.warning("left out of the index: %s", problem)
        # Dates have whole seconds, so a snapshot made just before may have a later name.
        made = SnapshotName(base.listed, Names().next(begun_s, at_least=base.ulid))
        parts = _parts(spill, segment)
        return await _write(store, layout, clock, made, parts, folder=node.path, node=node)


def is_union_due(deltas: int, rows: int, snapshot_rows: int) -> bool:
    """True if so many deltas with so many rows should be merged into the snapshot."""
    return deltas > UNION_DELTAS or rows > max(UNION_ROWS, UNION_SHARE * snapshot_rows)


async def _newest(
    store: Store,
    layout: Layout,
    files: ExitStack,
    folder: Path | None,
    refused: dict[str, str],
    node: NodeFolder | None = None,
) -> tuple[SnapshotName, Segment | None]:
    """Open the newest readable snapshot; the default name and None if there is none.

    Args:
        files: Frees the snapshot.
        folder: For temporary files.
        refused: Gets the names of unusable snapshots, and why.
        node: May have the snapshot already.
    """
    for name, info in await list_snapshots(store, layout):
        if node is not None:
            with suppress(OSError, CorruptEntryError):
                # All of it: damage by this disk must not get into the next snapshot.
                return name, await asyncio.to_thread(_checked, node.rows_path(name), layout)
        try:
            file = files.enter_context(anonymous_file(folder))
            return name, await _download(store, layout, info, file)
        except CorruptEntryError as exc:
            refused[info.name] = str(exc)
    return SnapshotName(), None


def _checked(path: Path, layout: Layout) -> Segment:
    segment = Segment.open(path, layout.namespace)
    segment.check()
    return segment


async def _claim(
    store: Store, layout: Layout, clock: ServerClock, task: str, stale_s: float
) -> bool:
    """Claim a task for this process; False if another process has it and may still work on it.

    On a server without conditional writes two may have it: then one does needless work.
    """
    prefix = f"{claims_prefix(layout)}{task}-"
    number, taken_s = 0, 0.0
    async for info in store.list(prefix):
        text = info.name.removeprefix(prefix)
        if text.isascii() and text.isdigit() and len(text) < 9:
            number = max(number, int(text) + 1)
            taken_s = max(taken_s, info.modified_s)
    if number and clock.now_s() - taken_s < stale_s:
        return False
    try:
        await store.put_if_absent(f"{prefix}{number}", [b"s3ec is at it\n"])
    except ConflictError:
        return False
    return True


# -- what commands ask -----------------------------------------------------------------------------


async def verify(
    store: Store,
    layout: Layout,
    *,
    folder: Path | None = None,
    report: Report = unreported,
    look: Callable[[Rows], None] | None = None,
) -> Verified:
    """Compare snapshot and deltas with a listing; writes nothing. Raises as rebuild.

    Args:
        look: Called with the listed rows, part by part, sorted; in another thread.
    """
    found = Verified()
    with ExitStack() as files:
        known, listed, young = (files.enter_context(closing(Spill(folder))) for _ in range(3))
        # The index first: entries announced during the listing then cannot count as extra rows.
        found.snapshot, base = await _newest(store, layout, files, folder, found.refused)
        deltas = await list_deltas(store, layout, found.snapshot)
        await _read_all(store, layout, sorted(deltas), known, found.refused)
        young_s = time.time() - YOUNG_S
        async with aclosing(list_objects(store, layout, report=report)) as batches:
            async for infos in batches:
                await asyncio.to_thread(_spill_listed, layout, infos, listed)
                new = [info for info in infos if info.modified_s > young_s]
                await asyncio.to_thread(_spill_listed, layout, new, young)
        for number, rows in enumerate(_parts(known, base)):
            there = merge(listed.part(number))
            unknown = without(there, rows)
            missing = without(unknown, merge(young.part(number)))
            found.entries += len(rows)
            found.objects += len(there)
            found.extra += len(without(rows, there))
            found.missing += len(missing)
            found.unannounced += len(unknown) - len(missing)
            if look is not None:
                await asyncio.to_thread(look, there)
    return found


# -- who makes them --------------------------------------------------------------------------------


class Maintainer:
    """Lets a child make snapshots when they are due; for a process that may write.

    A union is due by ``is_union_due``, a listing once a day, or once an hour while many fetches
    find nothing. By claims one process of a node does it, and one node of a fleet. After each try,
    successful or not, this process rests for ten minutes.

    Counters: ``index.unions``, ``index.listings`` and ``index.make_failed``.
    """

    def __init__(
        self,
        index: ManifestIndex,
        layout: Layout,
        folder: NodeFolder,
        jobs: Jobs,
        counters: Counters,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up; nothing runs before ``run_forever``.

        Args:
            pause: Waits for so many seconds.
            clock: Seconds since the epoch.
        """
        self._index = index
        self._layout = layout
        self._folder = folder
        self._jobs = jobs
        self._counters = counters
        self._pause = pause
        self._clock = clock

    async def run_forever(self) -> None:
        """Check every ten seconds whether a snapshot is due, until cancelled."""
        while True:
            await self._pause(LOOK_EVERY_S * jitter.uniform(0.9, 1.1))
            if (job := self.due()) is None:
                continue
            with contained(self._counters, "a snapshot of the index of %s", self._layout.namespace):
                try:
                    await self.make(job)
                except (UnavailableError, AccessError, CorruptEntryError, TierError) as exc:
                    if not self._counters.get("index.make_failed"):
                        log.warning(
                            "a snapshot of the index cannot be made now and will be later: %s", exc
                        )
                    self._counters.add("index.make_failed")
            await self._pause(UNION_EVERY_S * jitter.uniform(0.9, 1.1))

    def due(self) -> Job | None:
        """The job that is due, as far as this process knows; no I/O."""
        if not self._index.loaded:
            return None
        # Names of other writers correct a clock that is slow; the child corrects one that is fast.
        now_s, counts = max(self._clock(), time_s(self._index.newest)), self._index.counts()
        listed_age_s = now_s - time_s(counts.snapshot.listed)
        older_s = LISTING_SOON_EVERY_S if self._index.wants_listing else LISTING_EVERY_S
        place = (self._layout.namespace, str(self._folder.path))
        if listed_age_s >= older_s:
            return Job("listing", *place, older_s=older_s)
        if is_union_due(counts.fresh_deltas, counts.fresh_rows, counts.snapshot_rows):
            return Job("union", *place)
        return None

    async def make(self, job: Job) -> None:
        """Run a job, unless another process of this node runs one."""
        claim = await asyncio.to_thread(self._folder.try_claim, "make")
        if claim is None:
            return
        try:
            counts = self._index.counts()
            nbytes = 24 * (counts.snapshot_rows + counts.overlay_rows)
            await asyncio.to_thread(self._folder.need_room, nbytes)
            made = await self._jobs(job)
        finally:
            self._folder.release(claim)
        if made:
            kind = "index.unions" if job.kind == "union" else "index.listings"
            self._counters.add(kind)
            log.info("index of %s: snapshot %s was made", self._layout.namespace, made)

# SPDX-License-Identifier: Apache-2.0
"""Unions, listings, who makes them, and what is cleared away afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, CutBodyError, TierError, UnavailableError
from s3ec.index import listing, maker
from s3ec.index.child import Job, in_process
from s3ec.index.local import NodeFolder
from s3ec.index.maker import (
    Maintainer,
    make_listing,
    make_union,
    rebuild,
    verify,
)
from s3ec.index.names import (
    MARGIN_S,
    SnapshotName,
    claims_prefix,
    deltas_prefix,
    snapshots_prefix,
)
from s3ec.index.snapshot import Rows, Segment
from s3ec.store.base import ObjectInfo, UnorderedListingError
from s3ec.testing.fault_store import Fault, FaultStore, Script, flip
from s3ec.testing.memory_store import MemoryStore
from tests.support.indexes import sizes_in
from tests.unit.index.corpus import LAYOUT, NAMESPACE, Corpus, Reader, key_of

MakeReader = Callable[..., Reader]
DAY_S = 86400.0


@pytest.fixture
def node(corpus: Corpus, tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path / "maker", clock=corpus.clock)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A union is due for a few rows; listings do not pause."""
    monkeypatch.setattr(maker, "UNION_ROWS", 0)
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)


def snapshot_of(corpus: Corpus, name: SnapshotName) -> Segment:
    body = corpus.objects[snapshots_prefix(LAYOUT) + str(name)]
    segment = Segment.parse(body, NAMESPACE)
    segment.check()
    return segment


def holds(segment: Segment, *texts: object) -> list[object]:
    keys = {text: key_of(text) for text in texts}
    return [text for text, k in keys.items() if segment.find(k.digest_hi, k.digest_lo) >= 0]


# -- unions ----------------------------------------------------------------------------------------


async def test_a_union_holds_the_snapshot_and_the_deltas_since(
    corpus: Corpus, node: NodeFolder
) -> None:
    base = corpus.snapshot(*range(20), ulid=corpus.ulid(ago_s=2000))
    corpus.delta("before", ago_s=2000 + MARGIN_S + 10)
    corpus.delta("within", ago_s=2000 + MARGIN_S - 10)
    corpus.delta("a", 5, nbytes=9)
    made = await make_union(corpus.store, LAYOUT, node)
    assert made is not None
    assert made.name > base
    assert made.name.listed == base.listed
    segment = snapshot_of(corpus, made.name)
    assert len(segment) == made.rows == 22
    assert holds(segment, *range(20), "a", "within", "before") == [*range(20), "a", "within"]
    row = segment.find(key_of(5).digest_hi, key_of(5).digest_lo)
    assert segment.nbytes(row) == 9


async def test_the_node_that_made_a_snapshot_does_not_download_it(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader()
    corpus.delta("a")
    made = await make_union(reader.store, LAYOUT, reader.folder)
    assert made is not None
    await reader.refresh()
    assert reader.index.counts().snapshot == made.name
    assert reader.holds("a", "b") == ["a"]
    assert reader.counters.get("index.downloads") == 1  # the delta, which counts beside it


async def test_what_this_disk_damaged_does_not_become_a_part_of_a_union(
    corpus: Corpus, node: NodeFolder
) -> None:
    base = corpus.snapshot("a", ulid=corpus.ulid(ago_s=2000))
    corpus.delta("b")
    await maker.fetch_snapshot(corpus.store, LAYOUT, node, base)
    body = bytearray(node.rows_path(base).read_bytes())
    body[-20] ^= 1
    node.rows_path(base).write_bytes(body)
    made = await make_union(corpus.store, LAYOUT, node)
    assert made is not None
    assert holds(snapshot_of(corpus, made.name), "a", "b") == ["a", "b"]


async def test_a_union_is_made_at_most_every_ten_minutes(corpus: Corpus, node: NodeFolder) -> None:
    corpus.delta("a")
    assert await make_union(corpus.store, LAYOUT, node) is not None
    corpus.clock.now_s += 599
    corpus.delta("b", "c")
    assert await make_union(corpus.store, LAYOUT, node) is None
    corpus.clock.now_s += 2
    assert await make_union(corpus.store, LAYOUT, node) is not None


async def test_a_union_whose_claim_another_writer_has_is_not_made(
    corpus: Corpus, node: NodeFolder
) -> None:
    base = corpus.snapshot("a", ulid=corpus.ulid(ago_s=1000))
    corpus.delta("b")
    claim = f"{claims_prefix(LAYOUT)}union-{base}-0"
    corpus.put(claim, b"")
    assert await make_union(corpus.store, LAYOUT, node) is None
    # Whoever had it is dead: the claim is stale after ten minutes.
    corpus.clock.now_s += 601
    assert await make_union(corpus.store, LAYOUT, node) is not None
    assert f"union-{base}-1" in corpus.index_names("claim")


@pytest.mark.parametrize(
    ("fault", "rows"),
    [
        ({"error": UnavailableError}, None),  # or it were half
        ({"error": CutBodyError}, None),
        ({"change": flip(-9)}, 1),
        ({"change": flip(-9), "times": 1}, 2),  # damaged on its way
    ],
)
async def test_a_union_leaves_out_damaged_deltas_and_waits_for_those_that_cannot_be_had(
    corpus: Corpus, node: NodeFolder, fault: dict[str, Any], rows: int | None
) -> None:
    corpus.delta("a")
    script = Script([Fault(op="get", name=corpus.delta("b"), **fault)])
    store = FaultStore(corpus.store, script)
    if rows is None:
        with pytest.raises(UnavailableError):
            await make_union(store, LAYOUT, node)
        assert corpus.index_names("snapshot") == []
        return
    made = await make_union(store, LAYOUT, node)
    assert made is not None
    assert made.rows == rows


async def test_a_damaged_snapshot_leaves_its_predecessor_for_a_union(
    corpus: Corpus, node: NodeFolder
) -> None:
    old = corpus.snapshot("old", ulid=corpus.ulid(ago_s=2000))
    corpus.put(snapshots_prefix(LAYOUT) + str(SnapshotName(*[corpus.ulid(ago_s=900)] * 2)), b"x")
    corpus.delta("a")
    made = await make_union(corpus.store, LAYOUT, node)
    assert made is not None
    assert made.name.listed == old.listed
    assert holds(snapshot_of(corpus, made.name), "old", "a") == ["old", "a"]


@pytest.mark.parametrize("op", ["put_if_absent", "list", "head", "get", "get_range"])
async def test_a_union_that_fails_at_any_request_leaves_no_snapshot_and_no_files(
    corpus: Corpus, node: NodeFolder, op: str
) -> None:
    corpus.snapshot("old", ulid=corpus.ulid(ago_s=2000))
    corpus.delta("a")
    for skip in range(20):
        fault = Fault(op=op, error=UnavailableError, skip=skip, times=1)
        try:
            made = await make_union(FaultStore(corpus.store, Script([fault])), LAYOUT, node)
        except UnavailableError:
            names = corpus.index_names("snapshot")
            assert len(names) == 1
            left = {path.name for path in node.path.iterdir()}
            assert left <= {f"{names[0]}.rows", f"{names[0]}.filter"}
            corpus.clock.now_s += 601
        else:
            assert made is not None
            break
    assert len(corpus.index_names("snapshot")) == 2


# -- listings --------------------------------------------------------------------------------------


async def test_what_is_announced_while_objects_are_listed_is_found(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    async def listing() -> AsyncGenerator[list[ObjectInfo], None]:
        corpus.clock.now_s += 1200
        corpus.delta("meanwhile")
        yield []

    made = await rebuild(corpus.store, LAYOUT, listing=listing())
    reader = make_reader()
    await reader.refresh()
    assert reader.index.counts().snapshot == made.name
    assert reader.holds("meanwhile") == ["meanwhile"]


class Lying(MemoryStore):
    """A server whose listings of objects are not what they should be."""

    def __init__(self, corpus: Corpus, *, after: int = 0, error: Exception | None = None) -> None:
        super().__init__(corpus.store.bucket, clock=corpus.clock)
        self._after = after
        self._error = error

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        count = 0
        async for info in super().list(prefix, start_after=start_after):
            if LAYOUT.objects in info.name or LAYOUT.descriptor in info.name:
                if count >= self._after:
                    if self._error is not None:
                        raise self._error
                    return
                count += 1
            yield info


@pytest.mark.parametrize("after", [0, 2, 7])
@pytest.mark.parametrize(
    "error", [UnavailableError("cut"), AccessError("no"), UnorderedListingError("cut")]
)
async def test_half_a_listing_never_becomes_a_snapshot(
    corpus: Corpus, error: Exception, after: int
) -> None:
    corpus.save(*range(10))
    with pytest.raises(type(error)):
        await rebuild(Lying(corpus, after=after, error=error), LAYOUT)
    assert corpus.index_names("snapshot") == []


async def test_a_listing_in_no_order_is_good_where_it_is_whole(corpus: Corpus) -> None:
    """A set needs no order, and directory buckets give none; only what broke off cannot go on."""

    class Shuffled(MemoryStore):
        async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            infos = [info async for info in super().list(prefix, start_after=start_after)]
            for info in reversed(infos):
                yield info

    corpus.save(*range(50))
    made = await rebuild(Shuffled(corpus.store.bucket, clock=corpus.clock), LAYOUT)
    assert holds(snapshot_of(corpus, made.name), *range(50)) == list(range(50))


async def test_a_page_that_lists_nothing_is_no_listing_of_an_empty_bucket(
    corpus: Corpus, node: NodeFolder
) -> None:
    corpus.put(LAYOUT.descriptor, b"{}")
    corpus.save(*range(10))
    for make in (
        rebuild(Lying(corpus), LAYOUT),
        make_listing(Lying(corpus), LAYOUT, node),
    ):
        with pytest.raises(UnavailableError, match="lists nothing"):
            await make
    assert corpus.index_names("snapshot") == []


async def test_one_writer_of_the_fleet_lists_in_a_day(corpus: Corpus, node: NodeFolder) -> None:
    corpus.save("a")
    first = await make_listing(corpus.store, LAYOUT, node)
    assert first is not None
    corpus.clock.now_s += DAY_S - 10
    assert await make_listing(corpus.store, LAYOUT, node) is None
    corpus.clock.now_s += 11
    # Another one is at it.
    corpus.put(f"{claims_prefix(LAYOUT)}listing-{first.name.listed}-0", b"")
    assert await make_listing(corpus.store, LAYOUT, node) is None
    corpus.clock.now_s += 7201
    second = await make_listing(corpus.store, LAYOUT, node)
    assert second is not None
    assert second.name > first.name
    # A union does not put off the next listing.
    corpus.clock.now_s += DAY_S
    corpus.snapshot("a", listed=second.name.listed)
    assert await make_listing(corpus.store, LAYOUT, node) is not None


async def test_of_two_makers_at_once_one_works(corpus: Corpus, tmp_path: Path) -> None:
    corpus.delta("a")
    nodes = [NodeFolder(tmp_path / str(n), clock=corpus.clock) for n in range(5)]
    made = await asyncio.gather(*(make_union(corpus.store, LAYOUT, each) for each in nodes))
    assert sum(each is not None for each in made) == 1
    listed = await asyncio.gather(*(make_listing(corpus.store, LAYOUT, each) for each in nodes))
    assert sum(each is not None for each in listed) == 1


# -- what is cleared away --------------------------------------------------------------------------


async def test_two_readable_snapshots_stay_and_the_deltas_of_two_listings(corpus: Corpus) -> None:
    corpus.save("a")
    kept = []
    for number in range(4):
        corpus.delta(f"late{number}", ago_s=2 * MARGIN_S - 5)
        corpus.delta(f"old{number}", ago_s=2 * MARGIN_S + 5)
        kept.append((await rebuild(corpus.store, LAYOUT)).name)
        corpus.clock.now_s += DAY_S
    assert corpus.index_names("snapshot") == sorted(map(str, kept[-2:]))
    bodies = [corpus.objects[deltas_prefix(LAYOUT) + ulid] for ulid in corpus.index_names("delta")]
    deltas = [sizes_in(Segment.parse(body, NAMESPACE)) for body in bodies]
    left = [
        text
        for text in (f"{age}{number}" for number in range(4) for age in ("late", "old"))
        if any(key_of(text).digest in sizes for sizes in deltas)
    ]
    assert left == ["late2", "late3", "old3"]


async def test_a_snapshot_that_cannot_be_read_is_none_of_the_two(corpus: Corpus) -> None:
    old = corpus.snapshot("old", ulid=corpus.ulid(ago_s=5000))
    corpus.snapshot("older", ulid=corpus.ulid(ago_s=6000))
    bad = SnapshotName(*[corpus.ulid(ago_s=4000)] * 2)
    corpus.put(snapshots_prefix(LAYOUT) + str(bad), b"x")
    made = await rebuild(corpus.store, LAYOUT)
    assert corpus.index_names("snapshot") == sorted(map(str, (old, bad, made.name)))


async def test_stale_claims_go_and_others_stay(corpus: Corpus) -> None:
    corpus.put(f"{claims_prefix(LAYOUT)}union-x-0", b"")
    corpus.clock.now_s += 3 * 7200
    corpus.put(f"{claims_prefix(LAYOUT)}union-y-0", b"")
    await rebuild(corpus.store, LAYOUT)
    left = [name for name in corpus.index_names("claim") if not name.startswith("clock-")]
    assert left == ["union-y-0"]


async def test_whoever_may_not_delete_does_not_list_all_that_is_left(corpus: Corpus) -> None:
    """Writers may not, and what they announce in a month is two million deltas."""
    listed: list[str] = []

    class Noted(FaultStore):
        async def list(
            self, prefix: str, *, start_after: str = ""
        ) -> AsyncGenerator[ObjectInfo, None]:
            async with aclosing(super().list(prefix, start_after=start_after)) as infos:
                async for info in infos:
                    listed.append(info.name)
                    yield info

    corpus.save("a")
    for _ in range(2):
        await rebuild(corpus.store, LAYOUT)
        corpus.clock.now_s += DAY_S
    for number in range(5000):
        corpus.put(deltas_prefix(LAYOUT) + corpus.ulid(ago_s=3 * DAY_S + number), b"")
    script = Script([Fault(op="delete_many", error=AccessError)])
    assert (await rebuild(Noted(corpus.store, script), LAYOUT)).removed == 0
    assert len(corpus.index_names("snapshot")) == 3
    assert len(listed) < 1100
    assert (await rebuild(corpus.store, LAYOUT)).removed > 5000


async def test_foreign_files_are_not_deleted(corpus: Corpus) -> None:
    corpus.save("a")
    foreign = [f"{LAYOUT.manifest}v2/{n}" for n in ("x", "snapshot/x", "delta/0", "delta/x")]
    foreign.append(snapshots_prefix(LAYOUT) + str(SnapshotName(*[corpus.ulid(ago_s=-9999)] * 2)))
    for name in foreign:
        corpus.put(name, b"x")
    for _ in range(3):
        corpus.clock.now_s += DAY_S
        await rebuild(corpus.store, LAYOUT)
    assert [name for name in foreign if name not in corpus.objects] == []


# -- what commands ask -----------------------------------------------------------------------------


async def test_verify_counts_rows_without_objects_and_objects_without_rows(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker.time, "time", corpus.clock)
    corpus.save("a", "b", "old")
    corpus.snapshot("a", "gone", ulid=corpus.ulid(ago_s=10))
    corpus.delta("b", "gone2")
    corpus.clock.now_s += 1000
    ulid = corpus.ulid()
    corpus.put(deltas_prefix(LAYOUT) + ulid, b"x")
    before = dict(corpus.objects)
    found = await verify(corpus.store, LAYOUT)
    assert (found.objects, found.entries, found.extra, found.missing) == (3, 4, 2, 1)
    assert not found.index_agrees
    assert list(found.refused) == [deltas_prefix(LAYOUT) + ulid]
    assert corpus.objects == before


async def test_verify_lets_young_objects_pass(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.save("a")
    monkeypatch.setattr(maker.time, "time", corpus.clock)
    looked: list[Rows] = []
    found = await verify(corpus.store, LAYOUT, look=looked.append)
    assert (found.missing, found.unannounced, found.index_agrees) == (0, 1, True)
    assert sum(map(len, looked)) == 1
    corpus.clock.now_s += 601
    found = await verify(corpus.store, LAYOUT)
    assert (found.missing, found.unannounced, found.index_agrees) == (1, 0, False)


async def test_verify_names_snapshots_that_cannot_be_used(corpus: Corpus) -> None:
    corpus.save("a")
    good = corpus.snapshot("a", ulid=corpus.ulid(ago_s=10))
    bad = corpus.snapshot("a")
    body = bytearray(corpus.objects[snapshots_prefix(LAYOUT) + str(bad)])
    body[-40] ^= 4
    corpus.put(snapshots_prefix(LAYOUT) + str(bad), bytes(body))
    found = await verify(corpus.store, LAYOUT)
    assert found.snapshot == good
    assert list(found.refused) == [snapshots_prefix(LAYOUT) + str(bad)]


# -- who makes them --------------------------------------------------------------------------------


class Jobs:
    """Notes what it is asked to do, and does it or fails."""

    def __init__(self, reader: Reader) -> None:
        self.asked: list[Job] = []
        self.error: Exception | None = None
        self._run = in_process(reader.store)

    async def __call__(self, job: Job) -> str:
        self.asked.append(job)
        if self.error is not None:
            raise self.error
        return await self._run(job)


async def test_a_maintainer_makes_what_is_due(corpus: Corpus, make_reader: MakeReader) -> None:
    reader = make_reader()
    jobs, counters = Jobs(reader), Counters()
    maintainer = Maintainer(reader.index, LAYOUT, reader.folder, jobs, counters, clock=corpus.clock)
    corpus.put(LAYOUT.descriptor, b"{}")
    assert maintainer.due() is None  # nothing is known yet
    await reader.refresh()
    job = maintainer.due()
    assert job is not None
    assert job.kind == "listing"
    await maintainer.make(job)
    await reader.refresh()
    assert maintainer.due() is None
    corpus.clock.now_s += 601
    corpus.delta("a")
    await reader.refresh()
    job = maintainer.due()
    assert job is not None
    assert job.kind == "union"
    await maintainer.make(job)
    await reader.refresh()
    assert reader.index.counts().snapshot_rows == 1
    assert (counters.get("index.listings"), counters.get("index.unions")) == (1, 1)


async def test_vanished_objects_ask_for_a_listing_once_an_hour(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader()
    corpus.snapshot(*range(50))
    await reader.refresh()
    maintainer = Maintainer(
        reader.index, LAYOUT, reader.folder, Jobs(reader), Counters(), clock=corpus.clock
    )
    for number in range(40):
        reader.index.mark_missing(key_of(number), absent=True)
    assert maintainer.due() is None
    corpus.clock.now_s += 3601
    job = maintainer.due()
    assert job == Job("listing", NAMESPACE, str(reader.folder.path), older_s=3600.0)


async def test_while_another_process_of_the_node_is_at_it_nothing_is_made(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader, other = make_reader(), make_reader()
    await reader.refresh()
    jobs = Jobs(reader)
    maintainer = Maintainer(
        reader.index, LAYOUT, reader.folder, jobs, Counters(), clock=corpus.clock
    )
    claim = other.folder.try_claim("make")
    assert claim is not None
    job = maintainer.due()
    assert job is not None
    await maintainer.make(job)
    assert jobs.asked == []
    other.folder.release(claim)
    await maintainer.make(job)
    assert len(jobs.asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("x"),
        AccessError("x"),
        TierError("x"),
        CorruptEntryError("x", reason="size"),
        RuntimeError("ours"),
    ],
)
async def test_a_maintainer_goes_on_after_every_kind_of_failure(
    corpus: Corpus, make_reader: MakeReader, error: Exception
) -> None:
    reader = make_reader()
    await reader.refresh()
    jobs, counters = Jobs(reader), Counters()
    jobs.error = error
    waited = 0

    async def pause(seconds: float) -> None:
        nonlocal waited
        waited += 1
        corpus.clock.now_s += 3700
        if len(jobs.asked) == 2:
            jobs.error = None
        if waited > 50:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    maintainer = Maintainer(
        reader.index, LAYOUT, reader.folder, jobs, counters, clock=corpus.clock, pause=pause
    )
    with pytest.raises(asyncio.CancelledError):
        await maintainer.run_forever()
    assert counters.get("index.listings") >= 1
    claim = reader.folder.try_claim("make")
    assert claim is not None
    reader.folder.release(claim)

# SPDX-License-Identifier: Apache-2.0
"""Compaction: the same content in fewer files, whoever races and wherever it is killed."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3ec.errors import AccessError, CorruptEntryError, TierError, UnavailableError
from s3ec.index import base_writer, manifest, segment
from s3ec.index.base_writer import GRACE_S, BuildOptions, BuildResult, server_time
from s3ec.index.compaction import compact
from s3ec.index.rows import EntryInfo, Tombstone
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script, flip
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import START_S, Clock
from tests.support.waiting import reached
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.columns import rank
from tests.unit.index.manifests import (
    Killed,
    MortalStore,
    View,
    facts_of,
    names,
    put_delta,
    put_object,
    ulid_of,
    view,
)

KEYS = [key_of(number) for number in range(12)]


async def compacted(
    store: MemoryStore | FaultStore, options: BuildOptions | None = None
) -> BuildResult:
    made = await compact(store, LAYOUT, options)
    assert made is not None
    return made


# -- content -----------------------------------------------------------------------------------

items = st.dictionaries(
    st.sampled_from(KEYS),
    st.builds(facts_of, st.integers(1, 99), st.integers(0, 4))
    | st.builds(Tombstone, st.integers(0, 4)),
    max_size=6,
)
steps = st.lists(items.filter(bool) | st.just("compact"), max_size=12)


@pytest.mark.slow
@given(steps, st.sampled_from([1, 3, 100]), st.sampled_from([2, 4096]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_compaction_equals_a_merge_of_dictionaries(
    steps: list[object], shard_rows: int, rows_per_run: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "MAX_SHARD_ROWS", shard_rows)
        patch.setattr(segment, "ROWS_PER_RUN", rows_per_run)
        asyncio.run(_merges_as_dictionaries_do(steps))


async def _merges_as_dictionaries_do(steps: list[object]) -> None:
    store = MemoryStore()
    await compacted(store)
    model: dict[bytes, EntryInfo | Tombstone] = {}
    for number, step in enumerate(steps):
        if isinstance(step, dict):
            await put_delta(store, number, step)
            for key, what in step.items():
                old = model.get(key.digest)
                if old is None or rank(what) >= rank(old):
                    model[key.digest] = what
        else:
            await compacted(store)
            model = {digest: what for digest, what in model.items() if isinstance(what, EntryInfo)}
        alive = {digest: what for digest, what in model.items() if isinstance(what, EntryInfo)}
        assert await view(store) == alive
    made = await compacted(store)
    assert await view(store) == alive if steps else True
    assert made.head.entries == len(await view(store))
    assert store.check() == []


async def test_the_first_base_holds_what_is_older_than_the_index(memory: MemoryStore) -> None:
    await put_object(memory, KEYS[0], 100)
    await put_object(memory, KEYS[1], 1001)
    known = facts_of(1, int(START_S))
    await put_delta(memory, 1, {KEYS[1]: known})
    made = await compacted(memory)
    assert (made.head.version, made.head.entries) == (1, 2)
    found = await view(memory)
    assert found[KEYS[0].digest].nbytes == 100
    assert found[KEYS[1].digest] == known


async def test_compacting_a_compacted_index_writes_nothing(memory: MemoryStore) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    made = await compacted(memory)
    before = dict(memory.bucket.objects)
    again = await compacted(memory)
    assert (made.merged, again.merged, again.head) == (1, 0, made.head)
    assert memory.bucket.objects == before


async def test_large_bases_have_several_shards(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_SHARD_ROWS", 16)
    await compacted(memory)
    model: View = {}
    for number in range(10):
        some = {key_of((number, i)): facts_of(i + 1, number) for i in range(60)}
        model |= {key.digest: facts for key, facts in some.items()}
        await put_delta(memory, number, some)
        made = await compacted(memory)
    assert len(made.head.shards) == 64
    assert {(shard.first, shard.last) for shard in made.head.shards} == {
        (first, first + 3) for first in range(0, 256, 4)
    }
    assert await view(memory) == model


async def test_a_name_that_is_no_delta_is_neither_merged_nor_deleted(
    memory: MemoryStore, clock: Clock
) -> None:
    await compacted(memory)
    strange = ["notes.txt", "delta/x.safetensors", "base/x/y", "head/7.json", "delta/"]
    for name in strange:
        await memory.put_if_absent(LAYOUT.manifest + name, [b"mine"])
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    for _ in range(3):
        await compacted(memory)
        clock.now_s += 10 * GRACE_S
    assert set(strange) <= set(names(memory.bucket))


async def test_more_deltas_than_a_head_names_wait_until_others_are_deleted(
    memory: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compacted(memory)
    monkeypatch.setattr("s3ec.index.compaction.MAX_MERGED", 2)
    for number in range(3):
        await put_delta(memory, number, {KEYS[number]: facts_of(number + 1)})
    assert (await compacted(memory)).head.merged == {ulid_of(0), ulid_of(1)}
    clock.now_s += 2 * GRACE_S
    assert (await compacted(memory)).merged == 0
    assert len(await view(memory)) == 3
    assert (await compacted(memory)).head.merged == {ulid_of(2)}
    assert len(await view(memory)) == 3


async def test_where_no_temporary_folder_can_be_made_that_is_said(
    memory: MemoryStore, tmp_path: Path
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    with pytest.raises(TierError, match="temporary"):
        await compact(memory, LAYOUT, BuildOptions(folder=tmp_path / "gone"))


# -- racing ------------------------------------------------------------------------------------


async def test_of_two_racing_compactors_one_wins_and_the_other_leaves_nothing(
    memory: MemoryStore,
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    gates = [Gate(), Gate()]
    plans = [Script([Fault("put_if_absent", "/head/", gate=gate)]) for gate in gates]
    racers = [asyncio.create_task(compact(FaultStore(memory, plan), LAYOUT)) for plan in plans]
    for gate in gates:  # both have written all their shards
        await reached(gate)
    assert len(names(memory.bucket)) == 3 + 1 + 2 * 2
    for gate in gates:
        gate.release()
    made = await asyncio.gather(*racers)
    (won,) = [one for one in made if one is not None]
    assert won.head.version == 2
    runs = {name.split("/")[1] for name in names(memory.bucket) if name.startswith("base/")}
    assert {run for run in runs if run.startswith("000000000002")} == {f"{2:012}-{won.head.run}"}
    assert await view(memory) == {KEYS[1].digest: facts_of(1)}


async def test_a_compactor_whose_base_was_deleted_meanwhile_gives_way(
    memory: MemoryStore, clock: Clock
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    gate = Gate()
    slow_store = FaultStore(memory, Script([Fault("get_range", "/base/", gate=gate)]))
    slow = asyncio.create_task(compact(slow_store, LAYOUT))
    await reached(gate)
    await compacted(memory)
    clock.now_s += 2 * GRACE_S
    assert (await compacted(memory)).removed > 0
    gate.release()
    assert await slow is None
    assert await view(memory) == {KEYS[1].digest: facts_of(1)}


async def test_a_head_whose_reply_was_lost_is_still_ours(memory: MemoryStore) -> None:
    """The retry of a put that got through is refused like somebody else's."""
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    made = await compacted(Twice(memory))
    assert made.head.version == 2
    assert await view(memory) == {KEYS[1].digest: facts_of(1)}


class Twice(FaultStore):
    """Loses the reply to every put, and asks again."""

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        await super().put_if_absent(name, body)
        await super().put_if_absent(name, body)


async def test_a_compactor_that_finds_a_deleted_heads_name_free_is_beaten(
    memory: MemoryStore, clock: Clock
) -> None:
    """Its base would be older than the newest, and no reader would ever open it."""
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    gate = Gate()
    plan = Script([Fault("put_if_absent", "/head/", gate=gate)])
    slow = asyncio.create_task(compact(FaultStore(memory, plan), LAYOUT))
    await reached(gate)
    for number in (2, 3):
        await put_delta(memory, number, {KEYS[number]: facts_of(number)})
        await compacted(memory)
        clock.now_s += 2 * GRACE_S
    await compacted(memory)
    assert "head/000000000002.json" not in names(memory.bucket)
    gate.release()
    assert await slow is None
    await compacted(memory)
    assert [name for name in names(memory.bucket) if not name.startswith("base/")] == [
        "head/000000000003.json"
    ]
    assert set(await view(memory)) == {KEYS[number].digest for number in (1, 2, 3)}


# -- killed ------------------------------------------------------------------------------------


async def lived_in(store: MemoryStore, clock: Clock) -> View:
    """A bucket with all that a compaction can meet: an old base, a settled one, fresh deltas.

    Returns:
        What readers hold.
    """
    model: View = {}
    for number in range(4):
        some = {KEYS[number + i]: facts_of(number + 1, number) for i in range(3)}
        await put_delta(store, number, some)
        model |= {key.digest: facts for key, facts in some.items()}
        if number < 3:
            await compacted(store)
        clock.now_s += 2 * GRACE_S
    await put_delta(store, 9, {KEYS[0]: Tombstone(9)})
    del model[KEYS[0].digest]
    return model


async def requests_of_a_whole_one() -> int:
    clock = Clock()
    memory = MemoryStore(clock=clock)
    await lived_in(memory, clock)
    store = MortalStore(memory, after=False)
    made = await compact(store, LAYOUT)
    assert made is not None
    assert made.removed > 0
    return store.requests


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_compactor_killed_at_any_request_harms_nobody(after: bool) -> None:
    total = await requests_of_a_whole_one()
    assert total >= 20
    for dies_at in range(total):
        clock = Clock()
        memory = MemoryStore(clock=clock)
        model = await lived_in(memory, clock)
        with pytest.raises(Killed):
            await compact(MortalStore(memory, dies_at, after=after), LAYOUT)
        assert await view(memory) == model, dies_at
        await _the_next_ones_tidy_up(memory, clock)
        assert await view(memory) == model, dies_at


async def _the_next_ones_tidy_up(memory: MemoryStore, clock: Clock) -> None:
    for number in (100, 101):
        clock.now_s += 2 * GRACE_S
        await put_delta(memory, number, {KEYS[1]: (await view(memory))[KEYS[1].digest]})
        await compacted(memory)
    clock.now_s += 2 * GRACE_S
    made = await compacted(memory)
    run = f"base/{made.head.version:012}-{made.head.run}/00-ff"
    assert names(memory.bucket) == [
        f"{run}.bloom.safetensors",
        f"{run}.safetensors",
        f"head/{made.head.version:012}.json",
    ]


async def test_a_run_that_never_got_its_head_goes_after_a_day(
    memory: MemoryStore, clock: Clock
) -> None:
    await compacted(memory)
    clean = names(memory.bucket)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    script = Script([Fault("put_if_absent", "/head/", error=AccessError)])
    with pytest.raises(AccessError):
        await compact(FaultStore(memory, script), LAYOUT)
    await memory.delete(LAYOUT.delta(ulid_of(1)))
    clock.now_s += base_writer.ABANDONED_S / 2
    await compacted(memory)
    assert len(names(memory.bucket)) == len(clean) + 2  # it may be alive still
    clock.now_s += base_writer.ABANDONED_S
    await compacted(memory)
    assert names(memory.bucket) == clean


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_compactor_that_fails_before_its_head_leaves_nothing(
    memory: MemoryStore, error: type[Exception]
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    before = names(memory.bucket)
    fault = Fault("put_if_absent", "bloom", error=error)
    with pytest.raises(error):
        await compact(FaultStore(memory, Script([fault])), LAYOUT)
    assert names(memory.bucket) == before


async def test_a_compactor_that_took_half_a_day_does_not_commit(
    memory: MemoryStore, clock: Clock
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})

    def late() -> float:
        clock.now_s += base_writer.ABANDONED_S
        return clock.now_s

    with pytest.raises(UnavailableError, match="start again"):
        await compact(memory, LAYOUT, BuildOptions(clock=late))
    assert [name for name in names(memory.bucket) if name.startswith("head/")] == [
        "head/000000000001.json"
    ]


# -- grace -------------------------------------------------------------------------------------


async def test_what_slow_readers_need_stays_for_the_grace_period(
    memory: MemoryStore, clock: Clock
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    clock.now_s += 2 * GRACE_S
    await compacted(memory)
    before = names(memory.bucket)
    clock.now_s += GRACE_S - 1
    assert (await compacted(memory)).removed == 0
    assert names(memory.bucket) == before
    clock.now_s += 2
    assert (await compacted(memory)).removed == 4  # a shard, its filter, a head and a delta
    assert [name[:17] for name in names(memory.bucket)] == ["base/000000000002"] * 2 + [
        "head/000000000002"
    ]


async def test_ages_are_by_the_clock_of_the_server(memory: MemoryStore, clock: Clock) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    await compacted(memory)
    ahead = BuildOptions(clock=lambda: clock.now_s + 1000 * GRACE_S)
    assert (await compacted(memory, ahead)).removed == 0


async def test_a_question_for_the_time_that_fails_leaves_nothing(memory: MemoryStore) -> None:
    script = Script([Fault("head", error=UnavailableError, times=1)])
    with pytest.raises(UnavailableError):
        await server_time(FaultStore(memory, script))
    assert not memory.bucket.objects


async def test_where_the_server_says_no_times_nothing_is_deleted(memory: MemoryStore) -> None:
    timeless = MemoryStore(memory.bucket, clock=lambda: 0.0)
    for number in range(3):
        await put_delta(timeless, number, {KEYS[1]: facts_of(1)})
        assert (await compacted(timeless, BuildOptions(grace_s=0))).removed == 0


async def test_without_the_right_to_delete_compaction_goes_on(
    memory: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultStore(memory, Script([Fault("delete", error=AccessError)]))
    model = await lived_in(memory, clock)
    made = await compacted(store)
    assert (made.removed, made.merged) == (0, 2)
    assert "stay in the bucket" in caplog.text
    assert await view(memory) == model
    assert not [name for name in memory.bucket.objects if not name.startswith(LAYOUT.manifest)]


# -- damage ------------------------------------------------------------------------------------


async def test_a_corrupt_delta_is_left_out_and_named(memory: MemoryStore) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    await memory.put_if_absent(LAYOUT.delta(ulid_of(2)), [b"no segment"])
    made = await compacted(memory)
    assert made.merged == 1
    assert made.head.merged == {ulid_of(1)}
    assert list(made.corrupt) == [ulid_of(2)]
    assert LAYOUT.delta(ulid_of(2)) in made.corrupt[ulid_of(2)]
    assert LAYOUT.delta(ulid_of(2)) in memory.bucket.objects


async def test_a_delta_that_was_damaged_on_its_way_is_read_again(memory: MemoryStore) -> None:
    """Or what it holds, and a later one deletes, would come back with the next compaction."""
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1, 1)})
    await put_delta(memory, 2, {KEYS[1]: Tombstone(2)})
    damaged = Script([Fault("get", LAYOUT.delta(ulid_of(1)), change=flip(-1), times=1)])
    made = await compacted(FaultStore(memory, damaged))
    assert (made.merged, made.corrupt) == (2, {})
    assert not await view(memory)


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_delta_that_cannot_be_read_is_named_and_merged_when_it_can_be(
    memory: MemoryStore, error: type[Exception]
) -> None:
    await compacted(memory)
    for number in (1, 2):
        await put_delta(memory, number, {KEYS[number]: facts_of(number)})
    lost = Script([Fault("get", LAYOUT.delta(ulid_of(1)), error=error)])
    made = await compacted(FaultStore(memory, lost))
    assert made.head.merged == {ulid_of(2)}
    assert LAYOUT.delta(ulid_of(1)) in made.corrupt[ulid_of(1)]
    assert (await compacted(memory)).merged == 1
    assert set(await view(memory)) == {KEYS[1].digest, KEYS[2].digest}


async def test_what_a_delta_says_that_cannot_be_read_stays_deleted(memory: MemoryStore) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1, 1)})
    await put_delta(memory, 2, {KEYS[1]: Tombstone(2)})
    await put_delta(memory, 3, {KEYS[3]: facts_of(3, 3)})
    lost = Script([Fault("get", LAYOUT.delta(ulid_of(1)), error=UnavailableError)])
    made = await compacted(FaultStore(memory, lost))
    assert (made.head.merged, made.waiting) == ({ulid_of(3)}, {ulid_of(2)})
    assert set(await view(memory)) == {KEYS[3].digest}
    assert (await compacted(memory)).merged == 2
    assert set(await view(memory)) == {KEYS[3].digest}


async def test_where_no_delta_can_be_read_they_are_named_and_nothing_is_written(
    memory: MemoryStore,
) -> None:
    """All others may be merged, so that those that are lost are the only ones left."""
    await compacted(memory)
    for number in (1, 2):
        await put_delta(memory, number, {KEYS[number]: facts_of(number)})
    before = names(memory.bucket)
    lost = Script([Fault("get", "/delta/", error=UnavailableError)])
    made = await compact(FaultStore(memory, lost), LAYOUT)
    assert made is not None
    assert (made.merged, set(made.corrupt)) == (0, {ulid_of(1), ulid_of(2)})
    assert names(memory.bucket) == before


async def test_what_could_not_be_read_at_first_is_not_merged_by_the_second_look(
    memory: MemoryStore,
) -> None:
    """A deletion that is read a moment later than the row that it deletes would be lost."""
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    await put_delta(memory, 2, {KEYS[1]: Tombstone(2)})
    await put_delta(memory, 3, {KEYS[3]: Tombstone(3)})
    name = LAYOUT.delta
    faults = [
        Fault("get", name(ulid_of(1)), error=UnavailableError),
        Fault("get", name(ulid_of(2)), error=UnavailableError, times=1),
    ]
    made = await compacted(FaultStore(memory, Script(faults)))
    assert made.head.merged == set()
    assert await view(memory) == {}
    await compacted(memory)
    assert await view(memory) == {}


@pytest.mark.parametrize("change", ["flip", "cut", "gone", "swap"])
async def test_a_damaged_base_is_never_the_ground_of_another(
    memory: MemoryStore, change: str
) -> None:
    await compacted(memory)
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    made = await compacted(memory)
    (shard,) = made.head.shards
    name = made.head.segment_name(LAYOUT, shard)
    bucket = memory.bucket
    match change:
        case "flip":
            bucket.objects[name] = flip(-1)(bucket.objects[name])
        case "cut":
            bucket.objects[name] = bucket.objects[name][:-1]
        case "gone":
            await memory.delete(name)
        case "swap":
            other = [n for n in bucket.objects if "/base/000000000001" in n and "bloom" not in n]
            bucket.objects[name] = bucket.objects[other[0]]
    await put_delta(memory, 2, {KEYS[2]: facts_of(2)})
    with pytest.raises(CorruptEntryError, match=r"manifest rebuild") as raised:
        await compact(memory, LAYOUT)
    assert name in str(raised.value)
    assert len([n for n in names(bucket) if n.startswith("base/")]) >= 3


async def test_a_newer_format_is_left_alone(memory: MemoryStore) -> None:
    await memory.put_if_absent(LAYOUT.head(3), [b'{"format":2}'])
    await put_delta(memory, 1, {KEYS[1]: facts_of(1)})
    before = dict(memory.bucket.objects)
    with pytest.raises(CorruptEntryError) as raised:
        await compact(memory, LAYOUT)
    assert raised.value.reason == "version"
    assert memory.bucket.objects == before


# -- memory ------------------------------------------------------------------------------------


class Forgetful(MortalStore):
    """Keeps no shard that is written, so that what is measured is the compaction's own memory."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, after=False)
        self.largest = self.written = 0

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        nbytes = sum(memoryview(piece).nbytes for piece in body)
        self.written += nbytes
        self.largest = max(self.largest, nbytes)
        if "/base/" not in name:
            await super().put_if_absent(name, body)


@pytest.mark.slow
async def test_memory_is_bounded_by_a_shard_and_not_by_the_base(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of many megabytes: what other threads allocate meanwhile counts, too."""
    monkeypatch.setattr(manifest, "MAX_SHARD_ROWS", 2**14)
    monkeypatch.setattr(segment, "ROWS_PER_RUN", 2**14)
    await compacted(memory)
    for number in range(64):
        rows = {key_of((number, i)): facts_of(i) for i in range(1, 4_001)}
        await put_delta(memory, number, rows)
    first = await compacted(memory)
    assert first.head.entries == 64 * 4_000
    await put_delta(memory, 100, {KEYS[1]: facts_of(1)})
    store = Forgetful(memory)
    gc.collect()
    tracemalloc.start()
    try:
        await compact(store, LAYOUT, BuildOptions(folder=tmp_path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert store.written > 64 * 4_000 * 40
    assert peak_bytes < 8 * store.largest
    assert peak_bytes < store.written / 2
    assert os.listdir(tmp_path) == []

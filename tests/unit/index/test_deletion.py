# SPDX-License-Identifier: Apache-2.0
"""Deleting entries: a tombstone, the objects, and a tombstone that wins over what came between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from s3ec.errors import AccessError, ConflictError, S3ECError, UnavailableError
from s3ec.identity import Key
from s3ec.index import delete as deletion
from s3ec.index import listing, manifest
from s3ec.index.compaction import compact
from s3ec.index.delete import (
    delete_chosen,
    delete_entries,
    find_objects,
    remove_namespace,
    survey,
)
from s3ec.index.rebuild import verify
from s3ec.index.rows import EntryInfo
from s3ec.index.segment import parse_segment
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.support.clock import Clock
from tests.support.waiting import DEADLINE_S, reached, until
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.manifests import (
    MortalStore,
    names,
    put_delta,
    put_object,
    read,
    ulid_of,
    view,
)

KEYS = [key_of(number) for number in range(8)]


async def put_entry(store: MemoryStore, number: int, *, time_s: int = 1) -> None:
    await put_object(store, KEYS[number], 100 + number)
    await put_delta(
        store, time_s * 10 + number, {KEYS[number]: EntryInfo(100 + number, time_s=time_s)}
    )


async def delete_keys(
    store: Store, keys: Sequence[Key], clock: Callable[[], float] = time.time
) -> None:
    await delete_entries(store, LAYOUT, keys, clock=clock)


async def delete(store: Store, *numbers: int) -> None:
    await delete_keys(store, [KEYS[number] for number in numbers])


async def delete_older(store: Store, before_s: float) -> None:
    def older(infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        return [info for info in infos if info.modified_s < before_s]

    await delete_chosen(store, LAYOUT, older)


@pytest.mark.parametrize("in_base", [False, True])
async def test_what_is_deleted_is_gone_for_readers_and_from_the_next_base(
    memory: MemoryStore, in_base: bool
) -> None:
    for number in range(4):
        await put_entry(memory, number)
    if in_base:
        await compact(memory, LAYOUT)
    await delete(memory, 1, 2)
    left = {KEYS[0].digest, KEYS[3].digest}
    assert set(await view(memory)) == left
    assert LAYOUT.object(KEYS[1]) not in memory.bucket.objects
    made = await compact(memory, LAYOUT)
    assert made is not None
    assert made.head.entries == 2
    assert set(await view(memory)) == left
    assert (await verify(memory, LAYOUT)).agrees


async def test_a_tombstone_is_later_than_what_a_fast_clock_announced(
    memory: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_SHARD_ROWS", 2)
    future_s = int(clock.now_s) + 10**6
    for number in range(6):
        await put_entry(memory, number, time_s=future_s)
    made = await compact(memory, LAYOUT)
    assert made is not None
    assert len(made.head.shards) > 1
    await put_delta(memory, 90, {KEYS[5]: EntryInfo(105, time_s=future_s + 5)})
    await delete(memory, 0, 3, 5)
    assert set(await view(memory)) == {KEYS[number].digest for number in (1, 2, 4)}


async def test_with_an_unusable_base_entries_can_still_be_deleted(
    memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await put_entry(memory, 1)
    made = await compact(memory, LAYOUT)
    assert made is not None
    await memory.delete(made.head.segment_name(LAYOUT, made.head.shards[0]))
    await delete(memory, 1)
    assert LAYOUT.object(KEYS[1]) not in memory.bucket.objects
    assert "unusable" in caplog.text


@pytest.mark.parametrize("others", [1, 0])
async def test_with_a_delta_that_cannot_be_read_entries_can_still_be_deleted(
    memory: MemoryStore, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    await compact(memory, LAYOUT)
    for number in range(others + 1):
        await put_entry(memory, number)
    unread = LAYOUT.delta(ulid_of(10))
    lost = Script([Fault("get", unread, error=UnavailableError)])
    await delete(FaultStore(memory, lost), 0)
    assert LAYOUT.object(KEYS[0]) not in memory.bucket.objects
    assert unread in caplog.text
    assert KEYS[0].digest not in await view(memory)


async def test_what_was_deleted_before_a_failure_is_announced(memory: MemoryStore) -> None:
    for number in range(3):
        await put_entry(memory, number)
    fault = Fault("delete_many", LAYOUT.object(KEYS[1]), error=AccessError, partial=True)
    with pytest.raises(AccessError):
        await delete(FaultStore(memory, Script([fault])), 0, 1)
    there = {name for name in memory.bucket.objects if "/objects/" in name}
    assert there == {LAYOUT.object(KEYS[1]), LAYOUT.object(KEYS[2])}
    assert set(await view(memory)) == {KEYS[1].digest, KEYS[2].digest}


async def test_of_a_batch_that_was_deleted_in_part_just_what_is_gone_is_announced(
    memory: MemoryStore,
) -> None:
    """One was deleted though its answer was lost, one was not, one was refused."""
    for number in range(5):
        await put_entry(memory, number)
    faults = [
        Fault("delete_many", LAYOUT.object(KEYS[1]), error=UnavailableError, partial=True),
        Fault("delete_many", LAYOUT.object(KEYS[3]), error=AccessError, partial=True),
        Fault("delete_many", LAYOUT.object(KEYS[2]), error=UnavailableError, partial=True),
    ]

    class Each(FaultStore):
        async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
            left: dict[str, S3ECError] = {}
            for name in names:
                left.update(await super().delete_many([name]))
            await memory.delete(LAYOUT.object(KEYS[1]))
            return left

    with pytest.raises((AccessError, UnavailableError)):
        await delete(Each(memory, Script(faults)), 0, 1, 2, 3)
    there = {name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)}
    assert there == {LAYOUT.object(KEYS[number]) for number in (2, 3, 4)}
    assert set(await view(memory)) == {KEYS[number].digest for number in (2, 3, 4)}


async def test_a_batch_that_is_refused_as_a_whole_is_shown_again_as_it_was(
    memory: MemoryStore,
) -> None:
    for number in range(2):
        await put_entry(memory, number)
    before = await view(memory)
    store = FaultStore(memory, Script([Fault("delete_many", "", error=AccessError)]))
    with pytest.raises(AccessError):
        await delete(store, 0, 1)
    after = await view(memory)
    assert {digest: facts._replace(time_s=1) for digest, facts in after.items()} == before
    assert not [name for op, name in store.log if op == "head" and "/objects/" in name]


async def test_readers_that_could_not_be_told_are_an_error(
    memory: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "FLUSH_S", 0.01)
    await put_entry(memory, 1)
    fault = Fault("put_if_absent", "/delta/", error=UnavailableError)
    with pytest.raises(UnavailableError, match="nothing was deleted, since readers could not be"):
        await delete(FaultStore(memory, Script([fault])), 1)
    assert LAYOUT.object(KEYS[1]) in memory.bucket.objects
    second = Fault("put_if_absent", "/delta/", skip=1, error=UnavailableError)
    same = FaultStore(MemoryStore(memory.bucket, clock=clock), Script([second]))
    with pytest.raises(UnavailableError, match="what is deleted and what is not"):
        await delete_keys(same, KEYS[1:2], clock)
    assert LAYOUT.object(KEYS[1]) not in memory.bucket.objects
    assert set(await view(memory)) == set()


async def test_many_are_deleted_by_a_thousand_side_by_side_and_announced_in_two_deltas(
    memory: MemoryStore, clock: Clock
) -> None:
    keys = [key_of(("many", number)) for number in range(1500)]
    for key in keys:
        await put_object(memory, key, 9)
    gates = [Gate(), Gate()]
    ends = zip((keys[0], keys[-1]), gates, strict=True)
    faults = [Fault("delete_many", LAYOUT.object(key), gate=gate) for key, gate in ends]
    store = FaultStore(MemoryStore(memory.bucket, clock=clock), Script(faults))
    task = asyncio.create_task(delete_keys(store, keys, clock))
    for gate in gates:
        await reached(gate)
    for gate in gates:
        gate.release()
    await task
    assert (store.calls["delete_many"], store.calls["delete"]) == (2, 0)
    assert len(names(memory.bucket)) == 2
    assert not [name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)]


async def test_what_one_request_deleted_is_announced_though_another_one_fails(
    memory: MemoryStore,
) -> None:
    keys = [key_of(("many", number)) for number in range(1500)]
    for key in keys:
        await put_object(memory, key, 9)
    await put_delta(memory, 1, dict.fromkeys(keys, EntryInfo(9, time_s=1)))
    left = keys[1200]
    fault = Fault("delete_many", LAYOUT.object(left), error=UnavailableError)
    store = FaultStore(memory, Script([fault]))
    with pytest.raises(UnavailableError):
        await delete_keys(store, keys)
    there = {key.digest for key in keys if LAYOUT.object(key) in memory.bucket.objects}
    assert left.digest in there
    assert 0 < len(there) < 1500
    assert set(await view(memory)) == there


async def test_a_round_is_announced_before_the_next_one_is_deleted(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "ROUND_OBJECTS", 2)
    for number in range(5):
        await put_entry(memory, number)
    store = FaultStore(memory, Script([Fault("delete_many", LAYOUT.object(KEYS[2]), gate=Gate())]))
    task = asyncio.create_task(delete(store, 0, 1, 2, 3))
    await gone(memory, 0)
    await until(lambda: store.calls["delete_many"] == 2)
    assert set(await view(memory)) == {KEYS[4].digest}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(await view(memory)) == {KEYS[number].digest for number in (2, 3, 4)}


async def test_readers_are_told_of_a_round_while_another_one_is_deleted(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FEW", 0)  # so each folder comes by itself
    monkeypatch.setattr(deletion, "ROUND_OBJECTS", 1)
    for number in range(5):
        await put_entry(memory, number)
    held = Gate()
    hung = Fault("delete_many", "", gate=held)
    store = FaultStore(memory, Script([hung]))
    task = asyncio.create_task(delete_older(store, 2.0**40))
    await until(lambda: store.calls["delete_many"] == 4)
    # No more than four rounds, so that one stays in sight.
    assert len(await view(memory)) == 1
    held.release()
    await task
    assert set(await view(memory)) == set()
    assert (await verify(memory, LAYOUT)).agrees


async def test_after_a_round_that_failed_no_other_one_begins(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FEW", 0)  # so each folder comes by itself
    monkeypatch.setattr(deletion, "ROUND_OBJECTS", 1)
    monkeypatch.setattr(deletion, "_ROUNDS_AT_A_TIME", 2)
    for number in range(5):
        await put_entry(memory, number)
    held = Gate()
    hung = Fault("delete_many", "", times=1, gate=held)
    refused = Fault("delete_many", "", error=AccessError)
    store = FaultStore(memory, Script([hung, refused]))
    task = asyncio.create_task(delete_older(store, 2.0**40))
    with pytest.raises(AccessError):
        await asyncio.wait_for(task, DEADLINE_S)
    assert store.calls["delete_many"] == 2
    assert (await verify(memory, LAYOUT)).agrees


@pytest.mark.parametrize("few", [0, 4096])
async def test_old_entries_of_all_folders_share_requests_and_deltas(
    memory: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(listing, "FEW", few)
    for number in range(1500):
        await put_object(memory, key_of(("many", number)), 9)
    store = FaultStore(MemoryStore(memory.bucket, clock=clock), Script())
    await delete_older(store, 2.0**40)
    assert not [name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)]
    assert store.calls["delete_many"] == 2
    assert len(names(memory.bucket)) in (2, 3)  # one again where it taught what time it is


async def gone(memory: MemoryStore, number: int) -> None:
    await until(lambda: LAYOUT.object(KEYS[number]) not in memory.bucket.objects)


async def test_what_was_deleted_before_it_was_broken_off_is_announced(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        await put_entry(memory, number)
    hung = Fault("delete_many", LAYOUT.object(KEYS[1]), gate=Gate())
    monkeypatch.setattr(deletion, "DELETE_AT_A_TIME", 1)
    task = asyncio.create_task(delete(FaultStore(memory, Script([hung])), 0, 1))
    await gone(memory, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_deletion_whose_reply_was_lost_is_announced(memory: MemoryStore) -> None:
    for number in range(3):
        await put_entry(memory, number)
    lost = Fault("delete_many", LAYOUT.object(KEYS[1]), lost_reply=True)
    with pytest.raises(UnavailableError):
        await delete(FaultStore(memory, Script([lost])), 0, 1)
    there = {key.digest for key in KEYS[:3] if LAYOUT.object(key) in memory.bucket.objects}
    assert KEYS[1].digest not in there
    assert set(await view(memory)) == there
    assert (await verify(memory, LAYOUT)).agrees


async def test_a_deletion_of_which_the_bucket_says_nothing_is_not_announced(
    memory: MemoryStore,
) -> None:
    """To hide an entry that may still be there would be worse than a request in vain."""
    await put_entry(memory, 1)
    name = LAYOUT.object(KEYS[1])
    faults = [Fault("delete_many|head", name, error=UnavailableError)]
    with pytest.raises(UnavailableError):
        await delete(FaultStore(memory, Script(faults)), 1)
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_deletion_broken_off_after_it_reached_the_bucket_is_announced(
    memory: MemoryStore,
) -> None:
    class Slow(FaultStore):
        """The bucket has done it, and the reply never comes."""

        async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
            await super().delete_many(names)
            await asyncio.Event().wait()
            return {}

    await put_entry(memory, 1)
    task = asyncio.create_task(delete(Slow(memory), 1))
    await gone(memory, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(await view(memory)) == set()


async def test_a_listing_that_fails_half_way_leaves_no_deletion_untold(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prefix cannot be listed while the entry of another one is being announced."""
    monkeypatch.setattr(listing, "FEW", 0)
    monkeypatch.setattr(listing, "ATTEMPTS", 1)
    monkeypatch.setattr(deletion, "ROUND_OBJECTS", 1)
    for number in range(2):
        await put_entry(memory, number)
    listed, told = Gate(), Gate()
    prefix = f"{LAYOUT.objects}{KEYS[1].name[:2]}/"
    faults = [
        Fault("list", prefix, gate=listed, error=UnavailableError),
        # The first tombstone comes twice, since it teaches what time it is.
        Fault("put_if_absent", "/delta/", skip=2, gate=told),
    ]
    task = asyncio.create_task(delete_older(FaultStore(memory, Script(faults)), 2.0**40))
    await gone(memory, 0)
    await reached(told)
    listed.release()
    for _ in range(100):  # turns of the loop, in which everything else has ended
        await asyncio.sleep(0)
    told.release()
    with pytest.raises(UnavailableError):
        await task
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_an_entry_that_is_stored_again_outlives_its_deletion(
    memory: MemoryStore, clock: Clock
) -> None:
    """Others of the batch may take long to go, and so may the answer."""
    replying = Gate()

    class Slow(FaultStore):
        async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
            left = await super().delete_many(names)
            await replying.wait()
            return left

    for number in range(2):
        await put_entry(memory, number)
    task = asyncio.create_task(delete_keys(Slow(memory, Script()), KEYS[:2], clock))
    await gone(memory, 0)
    clock.now_s += 1
    await put_entry(memory, 0, time_s=int(clock.now_s))
    clock.now_s += 10
    replying.release()
    await task
    assert set(await view(memory)) == {KEYS[0].digest}


async def test_deleting_an_entry_deletes_nobody_elses_object(memory: MemoryStore) -> None:
    await put_entry(memory, 1)
    await put_entry(memory, 2)
    beside = LAYOUT.object(KEYS[1]).replace(".safetensors", ".r1.safetensors")
    await memory.put_if_absent(beside, [bytes(100)])
    await delete(memory, 1)
    left = {name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)}
    assert left == {LAYOUT.object(KEYS[2]), beside}
    assert set(await view(memory)) == {KEYS[2].digest}


async def test_old_objects_go_and_the_young_one_stays(memory: MemoryStore) -> None:
    for number in (1, 2):
        await put_entry(memory, number)
    for name in memory.bucket.modified_s:
        memory.bucket.modified_s[name] = 100.0
    memory.bucket.modified_s[LAYOUT.object(KEYS[1])] = 900.0
    await delete_older(memory, 500.0)
    left = {name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)}
    assert left == {LAYOUT.object(KEYS[1])}
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_survey_of_many_objects_asks_for_the_descriptor_by_its_name(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some stores list a whole folder where one object of it is meant."""
    monkeypatch.setattr(listing, "FEW", 2)
    for number in range(6):
        await put_entry(memory, number)
    await memory.put_if_absent(LAYOUT.descriptor, [b"{}"])
    await memory.put_if_absent(f"{LAYOUT.descriptor}/other", [b"x"])
    store = FaultStore(memory, Script())
    contents = await survey(store, LAYOUT)
    assert (contents.entries, contents.index_files) == (6, 6)
    assert contents.records == 1
    assert store.calls["head"] == 1


@pytest.mark.parametrize("few", [1, 4096])
async def test_of_many_entries_those_that_are_there_are_found(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(deletion, "FEW", few)
    keys = [key_of(("many", number)) for number in range(40)]
    for key in keys[:3]:
        await put_object(memory, key, 9)
    await put_entry(memory, 7)
    store = FaultStore(memory, Script())
    found = await find_objects(store, LAYOUT, keys)
    assert (store.calls["list"], store.calls["head"]) == ((1, 0) if few > 1 else (1, 40))
    assert list(found) == keys
    there = [info.name if info else None for info in found.values()]
    assert there == [*map(LAYOUT.object, keys[:3]), *[None] * 37]


async def test_many_entries_are_looked_for_at_a_time(memory: MemoryStore) -> None:
    gates = [Gate(), Gate()]
    faults = [
        Fault(op="head", name=key.name[:20], gate=gate)
        for key, gate in zip(KEYS, gates, strict=False)
    ]
    store = FaultStore(memory, Script(faults))
    task = asyncio.create_task(find_objects(store, LAYOUT, KEYS[:2]))
    try:
        for gate in gates:
            await reached(gate)
    finally:
        for gate in gates:
            gate.release()
        await task


@pytest.mark.parametrize(("few", "listings"), [(0, 16), (4096, 6)])
async def test_a_namespace_goes_with_all_that_is_in_it(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, few: int, listings: int
) -> None:
    monkeypatch.setattr(listing, "FEW", few)
    monkeypatch.setattr(deletion, "FEW", few)
    for number in range(3):
        await put_entry(memory, number)
    await compact(memory, LAYOUT)
    await memory.put_if_absent(LAYOUT.modality("image"), [b"{}"])
    await memory.put_if_absent(LAYOUT.descriptor, [b"{}"])
    await memory.put_if_absent(LAYOUT.everything + "foreign/object", [b"x"])
    nbytes = sum(map(len, memory.bucket.objects.values()))
    store = FaultStore(memory, Script())
    found = await remove_namespace(store, LAYOUT, 0.0)
    assert (found.entries, found.entry_nbytes, found.records, found.others) == (3, 303, 2, 1)
    assert found.nbytes == nbytes
    assert found.index_files > 3
    assert store.calls["list"] == listings
    assert not memory.bucket.objects


@pytest.mark.parametrize("server_s", [0.0, 1e6, 4e9], ids=["behind", "too", "ahead"])
@pytest.mark.parametrize("listing_s", [0.0, 3600.0])
async def test_a_namespace_in_use_stays_whatever_our_clock_says_and_however_long_it_is_listed(
    server_s: float, listing_s: float
) -> None:
    """An engine that stores while it is listed is seen only up to where the listing is."""
    clock = Clock(server_s)
    memory = MemoryStore(clock=clock)
    clock.now_s += 1000.0
    await put_object(memory, KEYS[0], 9)

    class Slow(Wrapper):
        async def list(
            self, prefix: str, *, start_after: str = ""
        ) -> AsyncGenerator[ObjectInfo, None]:
            async for info in super().list(prefix, start_after=start_after):
                yield info
            clock.now_s += listing_s

    clock.now_s += 500.0
    with pytest.raises(ConflictError, match="500 s ago"):
        await remove_namespace(Slow(memory), LAYOUT, 600.0)
    assert list(memory.bucket.objects) == [LAYOUT.object(KEYS[0])]
    clock.now_s += 101.0
    assert (await remove_namespace(Slow(memory), LAYOUT, 600.0)).entries == 1
    assert not memory.bucket.objects


# -- a producer in between ---------------------------------------------------------------------


class Producer:
    """What a producer does with an entry: write it if absent, and announce what is there then.

    As ``Uploader``: the row of what it wrote is of the time before it asked, and that of what was
    there is later than what it knew of the index.
    """

    def __init__(self, memory: MemoryStore, clock: Clock, *, knows: bool) -> None:
        self._memory = memory
        self._clock = clock
        self._knows = knows
        self._row: EntryInfo | None = None

    async def store(self, number: int) -> None:
        """Have it in the bucket."""
        known_s = max(self._known(number, await self._times(number)), 0)
        asked_s = self._clock()
        try:
            await put_object(self._memory, KEYS[number], 100 + number)
            time_s = max(int(asked_s), known_s + 1)
        except ConflictError:
            time_s = known_s + 1
        self._row = EntryInfo(100 + number, time_s=time_s)

    async def announce(self, number: int) -> None:
        """Tell of it."""
        assert self._row is not None
        await put_delta(self._memory, 10**9 + number, {KEYS[number]: self._row})

    def _known(self, number: int, times: Sequence[int]) -> int:
        return max(times, default=0) if self._knows else 1

    async def _times(self, number: int) -> list[int]:
        found = []
        for info in [info async for info in self._memory.list(LAYOUT.deltas)]:
            rows = parse_segment(await read(self._memory, info.name), LAYOUT.namespace)
            found += [
                rows.facts(row).time_s
                for row in range(len(rows))
                if rows.digest(row) == KEYS[number].digest
            ]
        return found


@pytest.mark.parametrize("knows", [True, False], ids=["has heard it", "has not heard it"])
@pytest.mark.parametrize("announced", ["before", "after"])
@pytest.mark.parametrize("delay_s", [0, 1, 5])
async def test_entry_that_was_stored_between_tombstone_and_deletion_is_not_believed(
    memory: MemoryStore, clock: Clock, knows: bool, announced: str, delay_s: int
) -> None:
    """It found the object, which went a moment later: a reader would ask for it in vain."""
    store = MemoryStore(memory.bucket, clock=clock)
    await put_entry(store, 1)
    gate = Gate()
    held = FaultStore(store, Script([Fault("delete_many", gate=gate)]))
    task = asyncio.create_task(delete_keys(held, KEYS[1:2], clock))
    await reached(gate)
    clock.now_s += delay_s
    producer = Producer(store, clock, knows=knows)
    await producer.store(1)
    if announced == "before":
        await producer.announce(1)
    gate.release()
    await task
    if announced == "after":
        await producer.announce(1)
    assert LAYOUT.object(KEYS[1]) not in memory.bucket.objects
    assert set(await view(memory)) == set()


@pytest.mark.parametrize("knows", [True, False], ids=["has heard it", "has not heard it"])
@pytest.mark.parametrize("announced", ["before", "after"])
async def test_entry_that_was_stored_after_the_deletion_is_believed_whenever_it_is_told(
    memory: MemoryStore, clock: Clock, knows: bool, announced: str
) -> None:
    store = MemoryStore(memory.bucket, clock=clock)
    await put_entry(store, 1)
    gate = Gate()
    held = FaultStore(store, Script([Fault("put_if_absent", "/delta/", skip=1, gate=gate)]))
    task = asyncio.create_task(delete_keys(held, KEYS[1:2], clock))
    await reached(gate)
    clock.now_s += 1
    producer = Producer(store, clock, knows=knows)
    await producer.store(1)
    if announced == "before":
        await producer.announce(1)
    gate.release()
    await task
    if announced == "after":
        await producer.announce(1)
    assert LAYOUT.object(KEYS[1]) in memory.bucket.objects
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_process_killed_before_the_objects_went_leaves_no_row_without_an_object(
    memory: MemoryStore,
) -> None:
    """And what it leaves goes with the next attempt."""
    for number in range(3):
        await put_entry(memory, number)
    whole = MortalStore(memory, after=True)
    for dies_at in range(100):
        bucket = MemoryBucket(dict(memory.bucket.objects), dict(memory.bucket.modified_s))
        store = MemoryStore(bucket)
        mortal = MortalStore(store, dies_at, after=dies_at % 2 == 1)
        task = asyncio.create_task(delete(mortal, 0, 1))
        done, _ = await asyncio.wait(
            {task, asyncio.create_task(mortal.died.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        whole = mortal
        if task in done and task.exception() is None:
            break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        there = {key.digest for key in KEYS[:3] if LAYOUT.object(key) in bucket.objects}
        assert set(await view(store)) <= there, dies_at
        await delete(store, 0, 1)
        assert set(await view(store)) == {KEYS[2].digest}
        assert LAYOUT.object(KEYS[0]) not in bucket.objects
    assert whole.requests > 5

# SPDX-License-Identifier: Apache-2.0
"""Deleting entries: objects first, then tombstones that win over what the index knew."""

from __future__ import annotations

import asyncio

import pytest

from s3ec.errors import AccessError, UnavailableError
from s3ec.index import deletion, head, object_listing
from s3ec.index.compact import compact
from s3ec.index.deletion import count_older, delete_older, deleting
from s3ec.index.rows import Facts
from s3ec.index.verify import verify
from s3ec.store.base import Store
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.unit.index.basics import LAYOUT, Clock, key_of
from tests.unit.index.manifests import names, put_delta, put_object, view

KEYS = [key_of(number) for number in range(8)]


async def put_entry(store: MemoryStore, number: int, *, time_s: int = 1) -> None:
    await put_object(store, KEYS[number], 100 + number)
    await put_delta(store, time_s * 10 + number, {KEYS[number]: Facts(100 + number, time_s=time_s)})


async def delete(store: Store, *numbers: int) -> None:
    async with deleting(store, LAYOUT) as deleter:
        await deleter.delete([KEYS[number] for number in numbers])


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
    monkeypatch.setattr(head, "MAX_SHARD_ROWS", 2)
    future_s = int(clock.now_s) + 10**6
    for number in range(6):
        await put_entry(memory, number, time_s=future_s)
    made = await compact(memory, LAYOUT)
    assert made is not None
    assert len(made.head.shards) > 1
    await put_delta(memory, 90, {KEYS[5]: Facts(105, time_s=future_s + 5)})
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


async def test_what_was_deleted_before_a_failure_is_announced(memory: MemoryStore) -> None:
    for number in range(3):
        await put_entry(memory, number)
    fault = Fault("delete", LAYOUT.object(KEYS[1]), error=AccessError)
    with pytest.raises(AccessError):
        await delete(FaultStore(memory, Script([fault])), 0, 1)
    there = {name for name in memory.bucket.objects if "/objects/" in name}
    assert LAYOUT.object(KEYS[1]) in there
    held = await view(memory)
    assert {key.digest for key in KEYS[:3]} & set(held) == {
        key.digest for key in KEYS[:3] if LAYOUT.object(key) in there
    }


async def test_readers_that_could_not_be_told_are_an_error(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "_TELL_S", 0.01)
    await put_entry(memory, 1)
    fault = Fault("put_if_absent", "/delta/", error=UnavailableError)
    with pytest.raises(UnavailableError, match="could not be told"):
        await delete(FaultStore(memory, Script([fault])), 1)


async def test_many_are_deleted_in_deltas_of_a_thousand(memory: MemoryStore) -> None:
    keys = [key_of(("many", number)) for number in range(2500)]
    async with deleting(memory, LAYOUT) as deleter:
        await deleter.delete(keys)
    # The first one twice: once more with what it taught about the clock.
    assert len(names(memory.bucket)) in (3, 4)


async def test_only_what_is_older_is_deleted(memory: MemoryStore, clock: Clock) -> None:
    for number in range(4):
        await put_entry(memory, number)
        clock.now_s += 1000
    timeless = MemoryStore(memory.bucket, clock=lambda: 0.0)
    await put_object(timeless, KEYS[6], 9)
    before_s = clock.now_s - 2500
    older = await count_older(memory, LAYOUT, before_s)
    assert (older.entries, older.nbytes) == (2, 201)
    assert len(await view(memory)) == 4
    assert await delete_older(memory, LAYOUT, before_s) == older
    assert set(await view(memory)) == {KEYS[2].digest, KEYS[3].digest}
    assert LAYOUT.object(KEYS[6]) in memory.bucket.objects


async def gone(memory: MemoryStore, number: int) -> None:
    async with asyncio.timeout(10):
        while LAYOUT.object(KEYS[number]) in memory.bucket.objects:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_what_was_deleted_before_it_was_broken_off_is_announced(memory: MemoryStore) -> None:
    for number in range(2):
        await put_entry(memory, number)
    hung = Fault("delete", LAYOUT.object(KEYS[1]), gate=Gate())
    task = asyncio.create_task(delete(FaultStore(memory, Script([hung])), 0, 1))
    await gone(memory, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_deletion_whose_reply_was_lost_is_announced(memory: MemoryStore) -> None:
    for number in range(3):
        await put_entry(memory, number)
    lost = Fault("delete", LAYOUT.object(KEYS[1]), lost_reply=True)
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
    faults = [Fault("delete|head", name, error=UnavailableError)]
    with pytest.raises(UnavailableError):
        await delete(FaultStore(memory, Script(faults)), 1)
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_a_deletion_broken_off_after_it_reached_the_bucket_is_announced(
    memory: MemoryStore,
) -> None:
    class Slow(FaultStore):
        """The bucket has done it, and the reply never comes."""

        async def delete(self, name: str) -> None:
            await super().delete(name)
            await asyncio.Event().wait()

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
    monkeypatch.setattr(object_listing, "_ATTEMPTS", 1)
    for number in range(2):
        await put_entry(memory, number)
    listing, told = Gate(), Gate()
    prefix = f"{LAYOUT.objects}{KEYS[1].name[:2]}/"
    faults = [
        Fault("list", prefix, gate=listing, error=UnavailableError),
        Fault("put_if_absent", "/delta/", gate=told),
    ]
    task = asyncio.create_task(delete_older(FaultStore(memory, Script(faults)), LAYOUT, 2.0**40))
    await gone(memory, 0)
    assert await asyncio.to_thread(told.reached.wait, 10)
    listing.release()
    for _ in range(100):  # turns of the loop, in which everything else has ended
        await asyncio.sleep(0)
    told.release()
    with pytest.raises(UnavailableError):
        await task
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_an_entry_that_is_stored_again_outlives_its_deletion(
    memory: MemoryStore, clock: Clock
) -> None:
    """Others of the batch may take long to go."""
    for number in range(2):
        await put_entry(memory, number)
    gate = Gate()
    store = FaultStore(memory, Script([Fault("delete", LAYOUT.object(KEYS[1]), gate=gate)]))
    async with deleting(store, LAYOUT, clock=clock) as deleter:
        task = asyncio.create_task(deleter.delete(KEYS[:2]))
        await gone(memory, 0)
        clock.now_s += 10
        await put_entry(memory, 0, time_s=int(clock.now_s))
        gate.release()
        await task
    assert set(await view(memory)) == {KEYS[0].digest}


async def put_revisions(memory: MemoryStore, number: int, *revisions: int) -> list[str]:
    objects = [LAYOUT.object(KEYS[number], revision) for revision in revisions]
    for name in objects:
        await memory.put_if_absent(name, [bytes(100)])
    return objects


async def test_deleting_an_entry_deletes_all_its_revisions_and_nobody_elses(
    memory: MemoryStore,
) -> None:
    await put_entry(memory, 1)
    await put_entry(memory, 2)
    await put_revisions(memory, 1, 1, 2)
    (kept,) = await put_revisions(memory, 2, 1)
    await delete(memory, 1)
    left = {name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)}
    assert left == {LAYOUT.object(KEYS[2]), kept}
    assert set(await view(memory)) == {KEYS[2].digest}


@pytest.mark.parametrize("young", [0, 1])
async def test_old_objects_of_an_entry_go_and_readers_keep_it_for_the_young_one(
    memory: MemoryStore, young: int
) -> None:
    for number in (1, 2):
        await put_entry(memory, number)
        await put_revisions(memory, number, 1)
    for name in memory.bucket.modified_s:
        memory.bucket.modified_s[name] = 100.0
    memory.bucket.modified_s[LAYOUT.object(KEYS[1], young)] = 900.0
    older = await delete_older(memory, LAYOUT, 500.0)
    assert older.entries == 3
    left = {name for name in memory.bucket.objects if name.startswith(LAYOUT.objects)}
    assert left == {LAYOUT.object(KEYS[1], young)}
    assert set(await view(memory)) == {KEYS[1].digest}


async def test_many_entries_are_looked_for_at_a_time(memory: MemoryStore) -> None:
    gates = [Gate(), Gate()]
    faults = [
        Fault(op="list", name=key.name[:20], gate=gate)
        for key, gate in zip(KEYS, gates, strict=False)
    ]
    task = asyncio.create_task(delete(FaultStore(memory, Script(faults)), 0, 1))
    try:
        for gate in gates:
            assert await asyncio.to_thread(gate.reached.wait, 20)
    finally:
        for gate in gates:
            gate.release()
        await task

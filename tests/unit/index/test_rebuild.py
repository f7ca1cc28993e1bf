# SPDX-License-Identifier: Apache-2.0
"""Rebuild and verify: what the bucket holds is right, whatever the index believed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import Key, make_key
from s3ec.index import listing, segment
from s3ec.index.base_writer import GRACE_S, BuildOptions
from s3ec.index.compaction import compact
from s3ec.index.manifest import MAX_VERSION
from s3ec.index.rebuild import rebuild, verify
from s3ec.index.rows import EntryInfo, Tombstone
from s3ec.store.base import ObjectInfo
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import START_S, Clock
from tests.support.waiting import reached
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.manifests import (
    Killed,
    MortalStore,
    facts_of,
    names,
    put_delta,
    put_object,
    ulid_of,
    view,
)

KEYS = [key_of(number) for number in range(8)]
NOW_S = int(START_S)


def known_of(number: int) -> EntryInfo:
    return facts_of(number, NOW_S)


async def put_entry(store: MemoryStore, number: int, delta: int | None = None) -> None:
    """An object, announced with what is known of it."""
    await put_object(store, KEYS[number], known_of(number).nbytes)
    if delta is not None:
        await put_delta(store, delta, {KEYS[number]: known_of(number)})


# -- rebuild -----------------------------------------------------------------------------------


async def test_rebuild_adds_what_is_missing_and_drops_what_is_gone(memory: MemoryStore) -> None:
    for number in range(4):
        await put_entry(memory, number, number)
    await compact(memory, LAYOUT)
    await put_entry(memory, 4, 4)
    await put_entry(memory, 5)
    await memory.delete(LAYOUT.object(KEYS[0]))
    await memory.delete(LAYOUT.object(KEYS[4]))
    made = await rebuild(memory, LAYOUT)
    assert (made.head.version, made.head.entries) == (2, 4)
    found = await view(memory)
    assert found == {
        **{KEYS[number].digest: known_of(number) for number in (1, 2, 3)},
        KEYS[5].digest: EntryInfo(known_of(5).nbytes, time_s=NOW_S),
    }
    assert (await verify(memory, LAYOUT)).agrees


@pytest.mark.parametrize("others", [1, 0])
async def test_rebuild_goes_on_without_a_delta_that_cannot_be_read(
    memory: MemoryStore, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    await compact(memory, LAYOUT)
    for number in range(others + 1):
        await put_entry(memory, number, number)
    lost = Script([Fault("get", LAYOUT.delta(ulid_of(0)), error=UnavailableError)])
    store = FaultStore(memory, lost)
    if others:
        assert ulid_of(0) in (await verify(store, LAYOUT)).corrupt
    await rebuild(store, LAYOUT)
    assert LAYOUT.delta(ulid_of(0)) in caplog.text
    assert set(await view(memory)) == {KEYS[number].digest for number in range(others + 1)}
    assert (await verify(store, LAYOUT)).agrees


async def test_a_made_up_last_version_is_named_and_nothing_is_written(memory: MemoryStore) -> None:
    await put_entry(memory, 0, 0)
    last = LAYOUT.head(MAX_VERSION)
    await memory.put_if_absent(last, [b"{}"])
    before = names(memory.bucket)
    for work in (rebuild, compact):
        with pytest.raises(CorruptEntryError, match=last):
            await work(memory, LAYOUT)
        assert names(memory.bucket) == before
    await memory.delete(last)
    assert (await rebuild(memory, LAYOUT)).head.version == 1


@pytest.fixture
def by_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few objects are listed as many are: folder by folder, several at a time."""
    monkeypatch.setattr(listing, "FEW", 0)


@pytest.mark.parametrize("few", [0, 4096])
async def test_rebuild_finds_every_kind_of_name(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(listing, "FEW", few)
    monkeypatch.setattr(listing, "BATCH", 2)
    monkeypatch.setattr(segment, "ROWS_PER_RUN", 4)
    hashes = [hashlib.sha256(bytes([n])).hexdigest() for n in range(20)]
    identifiers = [
        *hashes,
        *(f"ab:{digest}" for digest in hashes),  # as short as a fan-out folder: becomes x-
        *(f"adapter:{digest}" for digest in hashes[:3]),
        "page 1",
        "Übersicht:größe",
    ]
    keys = [key for key in map(make_key, identifiers) if isinstance(key, Key)]
    for key in keys:
        await put_object(memory, key, 10)
    for junk in ("readme.txt", "ab/short.safetensors", "adapter/ab/x", "ab/", "adapter/"):
        await memory.put_if_absent(LAYOUT.objects + junk, [b"x"])
    await put_object(memory, KEYS[0], 0)  # a marker, not an entry
    await rebuild(memory, LAYOUT)
    assert set(await view(memory)) == {key.digest for key in keys}


class Breaking(FaultStore):
    """Lists in the order of names, as servers do, and breaks off after so many."""

    in_order = True
    breaks_left = 3

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        infos = [info async for info in super().list(prefix, start_after=start_after)]
        for number, info in enumerate(
            sorted(infos, key=lambda i: i.name, reverse=not self.in_order)
        ):
            if number == 2 and "/objects/" in prefix and self.breaks_left:
                self.breaks_left -= 1
                raise UnavailableError("cut off")
            yield info


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_listing_goes_on_where_it_broke_off(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, in_order: bool, by_folder: None
) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    hashes = [f"ab{number:062x}" for number in range(10)]
    for digest in hashes:
        key = make_key(digest)
        assert key is not None
        await put_object(memory, key, 10)
    store = Breaking(memory)
    store.in_order = in_order
    if in_order:
        assert (await rebuild(store, LAYOUT)).head.entries == 10
        assert store.breaks_left == 0
    else:  # where to go on is not known
        with pytest.raises(UnavailableError, match="cut off"):
            await rebuild(store, LAYOUT)


async def test_rebuild_forgets_the_shape_of_an_object_that_was_written_again(
    memory: MemoryStore, clock: Clock
) -> None:
    for number in (1, 2):
        await put_entry(memory, number, number)
        await memory.delete(LAYOUT.object(KEYS[number]))
    await put_object(memory, KEYS[1], 7)
    clock.now_s += 3600
    await put_object(memory, KEYS[2], known_of(2).nbytes)
    await rebuild(memory, LAYOUT)
    assert await view(memory) == {
        KEYS[1].digest: EntryInfo(7, time_s=NOW_S),
        KEYS[2].digest: EntryInfo(known_of(2).nbytes, time_s=NOW_S + 3600),
    }


async def test_rebuild_keeps_what_is_announced_and_deleted_meanwhile(memory: MemoryStore) -> None:
    for number in (1, 2):
        await put_entry(memory, number, number)
    gate = Gate()
    held = FaultStore(memory, Script([Fault("put_if_absent", "/base/", gate=gate)]))
    running = asyncio.create_task(rebuild(held, LAYOUT))
    await reached(gate)  # the listing is over
    await put_entry(memory, 3, 3)
    await memory.delete(LAYOUT.object(KEYS[1]))
    await put_delta(memory, 4, {KEYS[1]: Tombstone(NOW_S + 1)})
    gate.release()
    assert (await running).head.merged == {ulid_of(1), ulid_of(2)}
    assert await view(memory) == {KEYS[n].digest: known_of(n) for n in (2, 3)}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.usefixtures("by_folder")
async def test_rebuild_comes_after_a_compaction_that_was_faster(
    memory: MemoryStore, clock: Clock, late: bool
) -> None:
    """What that one merged stays announced, or the objects are listed again."""
    await put_entry(memory, 1, 1)
    await compact(memory, LAYOUT)
    gate = Gate()
    held = FaultStore(memory, Script([Fault("put_if_absent", "/head/", gate=gate)]))
    running = asyncio.create_task(rebuild(held, LAYOUT, BuildOptions(clock=clock)))
    await reached(gate)
    await put_entry(memory, 3, 3)
    await compact(memory, LAYOUT)
    if late:
        clock.now_s += 2 * GRACE_S
        await compact(memory, LAYOUT)  # the delta is gone now
        assert not [name for name in names(memory.bucket) if name.startswith("delta/")]
    gate.release()
    assert (await running).head.version == 3
    assert await view(memory) == {KEYS[n].digest: known_of(n) for n in (1, 3)}
    assert held.calls["list_folders"] == (2 if late else 1)


async def test_rebuild_whose_second_base_took_long_to_write_lists_again(
    memory: MemoryStore, clock: Clock
) -> None:
    """What the first one's winner has merged may be gone by then, and is not in the listing."""
    await put_entry(memory, 1, 1)
    await compact(memory, LAYOUT)
    gates = [Gate(), Gate()]
    faults = [
        Fault("put_if_absent", "/head/", gate=gates[0], times=1),
        Fault("put_if_absent", "/base/000000000003", gate=gates[1], times=1),
    ]
    held = FaultStore(memory, Script(faults))
    running = asyncio.create_task(rebuild(held, LAYOUT, BuildOptions(clock=clock)))
    await reached(gates[0])
    await put_entry(memory, 3, 3)
    await compact(memory, LAYOUT)
    gates[0].release()
    await reached(gates[1])
    clock.now_s += 2 * GRACE_S
    await compact(memory, LAYOUT)
    assert not [name for name in names(memory.bucket) if name.startswith("delta/")]
    gates[1].release()
    await running
    assert await view(memory) == {KEYS[n].digest: known_of(n) for n in (1, 3)}


async def test_few_objects_are_listed_at_once_and_more_than_few_by_folder(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FEW", 3)
    for number in range(4):
        store = FaultStore(memory, Script())
        assert (await rebuild(store, LAYOUT)).head.entries == number
        assert store.calls["list_folders"] == 0
        await put_entry(memory, number, number)
    store = FaultStore(memory, Script())
    assert (await rebuild(store, LAYOUT)).head.entries == 4
    assert store.calls["list_folders"] == 1


async def test_rebuild_gives_up_where_others_are_always_faster(
    memory: MemoryStore, clock: Clock
) -> None:
    class Beaten(FaultStore):
        async def put_if_absent(self, name: str, body: object) -> None:
            if "/head/" in name:
                clock.now_s += GRACE_S
                await compact(memory, LAYOUT)
                await put_delta(memory, int(clock.now_s), {KEYS[1]: known_of(1)})
                await compact(memory, LAYOUT)
            await super().put_if_absent(name, body)  # type: ignore[arg-type]

    with pytest.raises(UnavailableError, match="faster"):
        await rebuild(Beaten(memory), LAYOUT, BuildOptions(clock=clock))


@pytest.mark.parametrize("damage", ["head", "shard", "no shard", "delta"])
async def test_rebuild_needs_nothing_of_the_old_index(
    memory: MemoryStore, clock: Clock, damage: str
) -> None:
    await put_entry(memory, 1, 1)
    await compact(memory, LAYOUT)
    await put_entry(memory, 2, 2)
    made = await compact(memory, LAYOUT)
    assert made is not None
    await put_entry(memory, 3, 3)
    name = made.head.segment_name(LAYOUT, made.head.shards[0])
    objects = memory.bucket.objects
    match damage:
        case "head":
            objects[LAYOUT.head(2)] = b"{}"
        case "shard":
            objects[name] = bytes(len(objects[name]))
        case "no shard":
            await memory.delete(name)
        case "delta":
            objects[LAYOUT.delta(ulid_of(3))] = b"nothing"
    rebuilt = await rebuild(memory, LAYOUT)
    assert rebuilt.head.version == 3
    assert set(await view(memory)) == {KEYS[number].digest for number in (1, 2, 3)}
    assert (await verify(memory, LAYOUT)).agrees
    for _ in range(2):
        clock.now_s += 2 * GRACE_S
        await compact(memory, LAYOUT)
    assert len(names(memory.bucket)) == 3


async def test_rebuild_leaves_a_newer_format_alone(memory: MemoryStore) -> None:
    await memory.put_if_absent(LAYOUT.head(3), [b'{"format":2}'])
    with pytest.raises(CorruptEntryError) as raised:
        await rebuild(memory, LAYOUT)
    assert raised.value.reason == "version"
    assert names(memory.bucket) == ["head/000000000003.json"]


@pytest.mark.slow
async def test_a_rebuild_killed_at_any_request_harms_nobody() -> None:
    async def lived_in() -> MemoryStore:
        memory = MemoryStore()
        for number in range(3):
            await put_entry(memory, number, number)
            await compact(memory, LAYOUT)
        await put_entry(memory, 3, 3)
        return memory

    whole = MortalStore(await lived_in(), after=True)
    await rebuild(whole, LAYOUT)
    for dies_at in range(whole.requests):
        memory = await lived_in()
        with pytest.raises(Killed):
            await rebuild(MortalStore(memory, dies_at, after=True), LAYOUT)
        assert await view(memory) == {KEYS[n].digest: known_of(n) for n in range(4)}, dies_at


# -- verify ------------------------------------------------------------------------------------


async def test_verify_counts_what_is_missing_extra_and_of_another_size(
    memory: MemoryStore, clock: Clock
) -> None:
    for number in range(4):
        await put_entry(memory, number, number)
    await compact(memory, LAYOUT)
    assert (await verify(memory, LAYOUT)).agrees
    await put_entry(memory, 5)
    await memory.delete(LAYOUT.object(KEYS[1]))
    await put_delta(memory, 9, {KEYS[2]: EntryInfo(5, time_s=NOW_S)})
    clock.now_s += 3600
    found = await verify(memory, LAYOUT, BuildOptions(clock=clock))
    assert not found.agrees
    assert (found.version, found.entries, found.objects) == (1, 4, 4)
    assert (found.missing, found.extra, found.differing, found.unannounced) == (1, 1, 1, 0)
    assert found.examples == {
        "missing": [KEYS[5].digest.hex()],
        "extra": [KEYS[1].digest.hex()],
        "differing": [KEYS[2].digest.hex()],
    }


async def test_verify_lets_uploads_of_the_last_minute_pass(
    memory: MemoryStore, clock: Clock
) -> None:
    await put_entry(memory, 1)
    found = await verify(memory, LAYOUT, BuildOptions(clock=clock))
    assert (found.agrees, found.missing, found.unannounced) == (True, 0, 1)


@pytest.mark.usefixtures("by_folder")
async def test_verify_does_not_complain_about_what_happens_meanwhile(
    memory: MemoryStore, clock: Clock
) -> None:
    for number in (1, 2):
        await put_entry(memory, number, number)
    await compact(memory, LAYOUT)
    gate = Gate()
    held = FaultStore(memory, Script([Fault("list_folders", gate=gate)]))
    running = asyncio.create_task(verify(held, LAYOUT, BuildOptions(clock=lambda: START_S + 3600)))
    await reached(gate)
    await put_entry(memory, 3, 3)
    await memory.delete(LAYOUT.object(KEYS[1]))
    await put_delta(memory, 4, {KEYS[1]: Tombstone(NOW_S + 1)})
    gate.release()
    assert (await running).agrees


async def test_verify_names_unusable_deltas(memory: MemoryStore) -> None:
    await memory.put_if_absent(LAYOUT.delta(ulid_of(1)), [b"nothing"])
    found = await verify(memory, LAYOUT)
    assert list(found.corrupt) == [ulid_of(1)]
    assert not found.agrees

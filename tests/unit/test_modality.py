# SPDX-License-Identifier: Apache-2.0
"""Records: written once, read by everybody, and never a crash."""

from __future__ import annotations

import asyncio

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, UnavailableError
from s3ec.identity import Layout
from s3ec.modality import NEAR_TTL_S, SETTLED_S, ModalityRecords, Record
from s3ec.store.endpoint import Endpoint
from s3ec.store.places import Place, PlacesStore
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock

LAYOUT = Layout("gemma-0123456789abcdef")
NAME = LAYOUT.modality("image")
WIDE = Record(5376, "bfloat16")
NARROW = Record(64, "float32")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(memory: MemoryStore) -> FaultStore:
    return FaultStore(memory)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def records(store: FaultStore, clock: Clock) -> ModalityRecords:
    return ModalityRecords(store, LAYOUT, clock=clock)


def break_with(store: FaultStore, fault: Fault) -> None:
    store.plan = Script([fault])


async def test_what_one_settles_another_reads(store: FaultStore, records: ModalityRecords) -> None:
    assert await records.settle("image", WIDE) == WIDE
    other = ModalityRecords(store, LAYOUT)
    assert await other.get("image") == WIDE
    asked = store.calls["get"]
    assert await other.get("image") == WIDE
    assert store.calls["get"] == asked  # once


async def test_the_second_producer_takes_the_first_ones_record(store: FaultStore) -> None:
    first, second = ModalityRecords(store, LAYOUT), ModalityRecords(store, LAYOUT)
    assert await first.settle("image", WIDE) == WIDE
    assert await second.settle("image", NARROW) == WIDE
    assert await second.settle("video", NARROW) == NARROW


async def test_of_racing_producers_one_wins(store: FaultStore) -> None:
    producers = [ModalityRecords(store, LAYOUT) for _ in range(8)]
    settled = await asyncio.gather(
        *(each.settle("image", Record(64 + i, "float16")) for i, each in enumerate(producers))
    )
    assert len(set(settled)) == 1
    assert await ModalityRecords(store, LAYOUT).get("image") == settled[0]


async def test_a_record_that_was_deleted_under_a_producer_is_written_again(
    store: FaultStore, memory: MemoryStore, records: ModalityRecords, clock: Clock
) -> None:
    await records.settle("image", WIDE)
    await memory.delete(NAME)
    clock.now_s += SETTLED_S
    break_with(store, Fault("put_if_absent", error=UnavailableError, times=1))
    with pytest.raises(UnavailableError):
        await records.settle("image", WIDE)
    store.calls.clear()
    settled = await asyncio.gather(*(records.settle("image", WIDE) for _ in range(8)))
    assert set(settled) == {WIDE}
    assert store.calls == {"put_if_absent": 1}  # one for all
    assert await ModalityRecords(memory, LAYOUT).get("image") == WIDE


async def test_a_record_that_another_one_replaced_is_taken(
    memory: MemoryStore, records: ModalityRecords, clock: Clock
) -> None:
    await records.settle("image", WIDE)
    await memory.delete(NAME)
    await ModalityRecords(memory, LAYOUT).settle("image", NARROW)
    clock.now_s += SETTLED_S
    assert await records.settle("image", WIDE) == NARROW


async def test_an_absence_is_forgotten_also_where_the_winner_cannot_be_read(
    store: FaultStore, records: ModalityRecords
) -> None:
    assert await records.get("image") is None
    await ModalityRecords(store, LAYOUT).settle("image", WIDE)
    break_with(store, Fault("get", NAME, error=UnavailableError, times=1))
    with pytest.raises(UnavailableError):
        await records.settle("image", NARROW)
    assert await records.get("image") == WIDE


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_known_record_stays_where_it_cannot_be_read_again(
    store: FaultStore, records: ModalityRecords, clock: Clock, error: type[Exception]
) -> None:
    """A server that throttles reads, say: uploads go on."""
    await records.settle("image", WIDE)
    break_with(store, Fault("get", NAME, error=error))
    for _ in range(2):
        clock.now_s += SETTLED_S + 1
        assert await records.settle("image", NARROW) == WIDE
        assert records.known("image") == WIDE
    assert store.calls["get"] == 2


async def test_a_known_record_is_not_asked_for_again(
    store: FaultStore, records: ModalityRecords
) -> None:
    await records.settle("image", WIDE)
    store.calls.clear()
    assert await records.get("image") == WIDE
    assert await records.settle("image", NARROW) == WIDE
    assert not store.calls


async def test_absence_is_believed_for_a_while(
    store: FaultStore, memory: MemoryStore, records: ModalityRecords, clock: Clock
) -> None:
    assert await records.get("image") is None
    await ModalityRecords(memory, LAYOUT).settle("image", WIDE)
    assert await records.get("image") is None
    assert store.calls["get"] == 1
    clock.now_s += 5.0
    assert await records.get("image") == WIDE


async def test_a_producer_that_loses_the_race_forgets_the_absence(
    memory: MemoryStore, records: ModalityRecords
) -> None:
    assert await records.get("image") is None
    await ModalityRecords(memory, LAYOUT).settle("image", WIDE)
    assert await records.settle("image", NARROW) == WIDE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b"\xff\xff",
        b"<html></html>",
        b"[" * 4000,
        b'{"width": 64}',
        b'{"dtype": "float16"}',
        b'{"width": "64", "dtype": "float16"}',
        b'{"width": 64.0, "dtype": "float16"}',
        b'{"width": true, "dtype": "float16"}',
        b'{"width": 0, "dtype": "float16"}',
        b'{"width": -64, "dtype": "float16"}',
        b'{"width": 1000001, "dtype": "float16"}',
        b'{"width": 64, "dtype": "float64"}',
        b'{"width": 64, "dtype": null}',
        b'{"width": 64, "dtype": ["float16"]}',
        b'{"width": 64, "dtype": {"a": 1}}',
        b'{"width": ' + b"9" * 4000 + b', "dtype": "float16"}',
        b'{"width": NaN, "dtype": "float16"}',
        b'{"width": 64, "dtype": "float16"}' + b" " * 5000,  # larger than any record
    ],
)
async def test_what_is_no_record_counts_as_none(
    memory: MemoryStore, records: ModalityRecords, body: bytes
) -> None:
    await memory.put_if_absent(NAME, [body])
    assert await records.get("image") is None
    assert await records.settle("image", WIDE) == WIDE


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_store_that_does_not_answer_is_not_an_absence(
    store: FaultStore, records: ModalityRecords, error: type[Exception]
) -> None:
    await ModalityRecords(store, LAYOUT).settle("image", WIDE)
    break_with(store, Fault(op="get", error=error, times=1))
    with pytest.raises(error):
        await records.get("image")
    assert await records.get("image") == WIDE
    break_with(store, Fault(op="put_if_absent", error=error, times=1))
    with pytest.raises(error):
        await records.settle("video", NARROW)
    assert await records.get("video") is None


async def test_half_a_reply_is_asked_for_again_and_never_settles_a_race(
    memory: MemoryStore,
) -> None:
    """Its own record would be wrong for a namespace that holds another one."""
    await ModalityRecords(memory, LAYOUT).settle("image", WIDE)

    class Short(FaultStore):
        async def get(self, name: str, *, max_bytes: int) -> bytes | None:
            raise CorruptEntryError("cut", reason="length")

    records = ModalityRecords(Short(memory), LAYOUT)
    with pytest.raises(UnavailableError):
        await records.get("image")
    with pytest.raises(UnavailableError):
        await records.settle("image", NARROW)


async def test_a_lost_reply_to_the_write_is_settled_at_the_next_try(
    store: FaultStore, records: ModalityRecords
) -> None:
    break_with(store, Fault(op="put_if_absent", lost_reply=True, times=1))
    with pytest.raises(UnavailableError):
        await records.settle("image", WIDE)
    assert await records.settle("image", WIDE) == WIDE


async def test_what_a_replica_says_counts_for_moments_and_only_while_home_does_not_answer(
    store: FaultStore, memory: MemoryStore, clock: Clock
) -> None:
    """A forged record there would make every entry a misfit until the next restart."""
    near = FaultStore(MemoryStore())
    await ModalityRecords(near, LAYOUT).settle("image", NARROW)
    await ModalityRecords(memory, LAYOUT).settle("image", WIDE)
    place = Place("near", near, Endpoint(16), Counters())
    places = PlacesStore(store, [place], is_entry=LAYOUT.is_entry)
    records = ModalityRecords(places, LAYOUT, clock=clock)
    break_with(store, Fault(error=UnavailableError))
    assert records.expected("image") is None
    for _ in range(5):  # not once for each download
        assert await records.get("image") == await records.get_soon("image", 60.0) == NARROW
    assert near.calls["get"] == 1
    assert records.expected("image") == NARROW
    assert records.known("image") is None  # so nothing is granted at once by it
    clock.now_s += NEAR_TTL_S
    assert records.expected("image") is None
    assert await records.get("image") == NARROW
    assert near.calls["get"] == 2
    clock.now_s += NEAR_TTL_S
    store.plan = Script()
    assert await records.get("image") == WIDE
    break_with(store, Fault(error=UnavailableError))
    assert await records.get("image") == WIDE

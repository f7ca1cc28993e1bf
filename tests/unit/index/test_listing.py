# SPDX-License-Identifier: Apache-2.0
"""The index: as exact as the last listing, and healed by the next."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from s3ec.counters import Counters
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index import listing
from s3ec.index.listing import ListingIndex
from s3ec.store.base import ObjectInfo
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.unit.index.basics import LAYOUT, key_of

OTHER = Layout("gemma-fedcba9876543210")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def index(memory: MemoryStore, script: Script, clock: Clock, counters: Counters) -> ListingIndex:
    return ListingIndex(FaultStore(memory, script), LAYOUT, counters, clock=clock)


async def store(memory: MemoryStore, *keys: Key, layout: Layout = LAYOUT) -> None:
    for key in keys:
        await memory.put_if_absent(layout.object(key), [b"entry"])


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, 10)


# -- refreshing --------------------------------------------------------------------------------


async def test_a_fresh_index_holds_nothing(index: ListingIndex) -> None:
    assert not index.maybe_contains(key_of(1))
    assert len(index) == 0
    assert index.loaded is False


async def test_a_refresh_finds_every_kind_of_entry(
    index: ListingIndex, memory: MemoryStore, counters: Counters
) -> None:
    content = hashlib.sha256(b"x").hexdigest()
    keys = [make_key(name) for name in (content, f"lora:{content}", f"L:{content}", "picture.png")]
    assert None not in keys
    await store(memory, *(key for key in keys if key))
    await index.refresh()
    assert index.loaded is True
    assert len(index) == 4
    assert all(index.maybe_contains(key) for key in keys if key)
    assert not index.maybe_contains(key_of("other"))
    assert counters.get("index.junk") == 0


async def test_other_namespaces_and_records_are_not_seen(
    index: ListingIndex, memory: MemoryStore, counters: Counters
) -> None:
    await store(memory, key_of(1), layout=OTHER)
    await memory.put_if_absent(LAYOUT.descriptor, [b"{}"])
    await memory.put_if_absent(LAYOUT.modality("image"), [b"{}"])
    await index.refresh()
    assert len(index) == 0
    assert counters.get("index.junk") == 0


async def test_junk_is_counted_and_not_taken_for_entries(
    index: ListingIndex, memory: MemoryStore, counters: Counters
) -> None:
    name = hashlib.sha256(b"x").hexdigest()
    junk = {
        "": b"x",  # a directory marker
        "ab/": b"",
        "readme.txt": b"x",
        f"{name}.safetensors": b"x",
        f"zz/{name}.safetensors": b"x",
        f"{name[:2]}/{name}.safetensors.part": b"x",
        f"{name[:2]}/{name}.safetensors": b"",  # an upload that wrote nothing
        f"{name[:2]}/{name[:-1]}\u0661.safetensors": b"x",
        f"{name[:2]}/\u00e9.safetensors": b"x",
    }
    for each, body in junk.items():
        await memory.put_if_absent(LAYOUT.objects + each, [body])
    await store(memory, key_of(1))
    await index.refresh()
    assert len(index) == 1
    assert counters.get("index.junk") == len(junk)


async def test_what_was_deleted_vanishes_with_the_next_refresh(
    index: ListingIndex, memory: MemoryStore
) -> None:
    await store(memory, key_of(1), key_of(2))
    await index.refresh()
    await memory.delete(LAYOUT.object(key_of(1)))
    assert index.maybe_contains(key_of(1))
    await index.refresh()
    assert not index.maybe_contains(key_of(1))
    assert index.maybe_contains(key_of(2))


# -- news while a refresh runs -----------------------------------------------------------------


async def test_a_key_added_while_a_refresh_runs_stays(
    index: ListingIndex, memory: MemoryStore, script: Script
) -> None:
    """The listing may have passed its place already."""
    gate = Gate()
    script.faults = [Fault(op="list", gate=gate)]
    refresh = asyncio.create_task(index.refresh())
    await reached(gate)
    index.add(key_of(1))
    gate.release()
    await refresh
    assert index.maybe_contains(key_of(1))
    await index.refresh()  # but a later one that does not see it drops it
    assert not index.maybe_contains(key_of(1))


async def test_a_key_forgotten_while_a_refresh_runs_stays_forgotten(
    index: ListingIndex, memory: MemoryStore, script: Script, clock: Clock
) -> None:
    """The listing may have seen it before it was deleted."""
    await store(memory, key_of(1), key_of(2))
    gate = Gate()
    script.faults = [Fault(op="list", gate=gate)]
    refresh = asyncio.create_task(index.refresh())
    await reached(gate)
    index.add(key_of(2))
    index.mark_missing(key_of(1))
    index.mark_missing(key_of(2))
    index.add(key_of(2))
    gate.release()
    await refresh
    assert not index.maybe_contains(key_of(1))
    assert index.maybe_contains(key_of(2))
    clock.now_s += 60
    assert index.maybe_contains(key_of(1))


async def test_a_key_added_and_then_forgotten_while_a_refresh_runs_is_gone(
    index: ListingIndex, script: Script, clock: Clock
) -> None:
    gate = Gate()
    script.faults = [Fault(op="list", gate=gate)]
    refresh = asyncio.create_task(index.refresh())
    await reached(gate)
    index.add(key_of(1))
    index.mark_missing(key_of(1))
    gate.release()
    await refresh
    clock.now_s += 60
    assert not index.maybe_contains(key_of(1))


class HalfAListing(MemoryStore):
    """Lists one page, then fails."""

    error: Exception = UnavailableError("the second page failed")
    page: tuple[str, ...] = ()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for name in self.page:
            yield ObjectInfo(name, 1)
        raise self.error


@pytest.mark.parametrize("error", [UnavailableError("x"), AccessError("x"), KeyError("x")])
async def test_a_failed_refresh_keeps_the_old_and_adds_what_it_saw(
    counters: Counters, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_PAUSE_S", 0.0)
    half = HalfAListing()
    half.error = error
    half.page = (LAYOUT.object(key_of(2)),)
    index = ListingIndex(half, LAYOUT, counters)
    index.add(key_of(1))
    with pytest.raises(type(error)):
        await index.refresh()
    assert index.maybe_contains(key_of(1))
    assert index.maybe_contains(key_of(2))
    assert index.loaded is False


class Frail:
    """Breaks off after each few names, and fails altogether where it is asked in vain too often.

    Attributes:
        asked: Where each listing was to start.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.asked: list[str] = []

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        self.asked.append(start_after)
        left = [name for name in self.names if name > start_after]
        for name in left[:3]:
            yield ObjectInfo(name, 1)
        if len(left) > 3:
            raise UnavailableError("cut off")


async def test_a_listing_that_breaks_off_over_and_over_goes_on_where_it_was(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_PAUSE_S", 0.0)
    keys = sorted((key_of(number) for number in range(20)), key=lambda key: key.name)
    names = [LAYOUT.object(key) for key in keys]
    frail = Frail(names)
    index = ListingIndex(frail, LAYOUT, counters)  # type: ignore[arg-type]
    await index.refresh()
    assert all(map(index.maybe_contains, keys))
    assert frail.asked == ["", *names[2:18:3]]


async def test_a_cancelled_refresh_keeps_the_old(
    index: ListingIndex, memory: MemoryStore, script: Script
) -> None:
    await store(memory, key_of(1))
    await index.refresh()
    gate = Gate()
    script.faults = [Fault(op="list", gate=gate)]
    refresh = asyncio.create_task(index.refresh())
    await reached(gate)
    index.add(key_of(2))
    refresh.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refresh
    assert index.maybe_contains(key_of(1))
    assert index.maybe_contains(key_of(2))
    script.faults = []
    await store(memory, key_of(3))
    await index.refresh()
    assert index.maybe_contains(key_of(3))
    assert not index.maybe_contains(key_of(2))


# -- forgetting --------------------------------------------------------------------------------


async def test_a_forgotten_key_is_denied_for_a_while_though_listed(
    index: ListingIndex, memory: MemoryStore, clock: Clock, counters: Counters
) -> None:
    await store(memory, key_of(1))
    await index.refresh()
    index.mark_missing(key_of(1))
    assert counters.get("index.forgotten") == 1
    assert not index.maybe_contains(key_of(1))
    await index.refresh()
    clock.now_s += 59.9
    assert not index.maybe_contains(key_of(1))
    clock.now_s += 0.1
    assert index.maybe_contains(key_of(1))


async def test_a_forgotten_key_that_nobody_lists_again_stays_unknown(
    index: ListingIndex, clock: Clock
) -> None:
    index.add(key_of(1))
    index.mark_missing(key_of(1))
    clock.now_s += 1000
    assert not index.maybe_contains(key_of(1))


async def test_deleted_and_written_again_is_found_again(
    index: ListingIndex, memory: MemoryStore, clock: Clock
) -> None:
    await store(memory, key_of(1))
    await index.refresh()
    await memory.delete(LAYOUT.object(key_of(1)))
    index.mark_missing(key_of(1))  # what the first 404 does
    await index.refresh()
    clock.now_s += 61
    assert not index.maybe_contains(key_of(1))
    await store(memory, key_of(1))
    await index.refresh()
    assert index.maybe_contains(key_of(1))


async def test_what_this_node_stores_is_found_at_once(index: ListingIndex) -> None:
    index.mark_missing(key_of(1))
    index.add(key_of(1))
    assert index.maybe_contains(key_of(1))


@pytest.mark.slow
def test_forgetting_is_bounded(memory: MemoryStore, counters: Counters, clock: Clock) -> None:
    index = ListingIndex(memory, LAYOUT, counters, clock=clock)
    for number in range(101_000):
        digest = number.to_bytes(16, "big")
        index.mark_missing(Key("x", "x", digest))
    assert len(index._gone) == 100_000
    clock.now_s += 61
    index.mark_missing(key_of(1))
    assert len(index._gone) == 1


def test_a_key_costs_about_a_hundred_bytes(memory: MemoryStore, counters: Counters) -> None:
    index = ListingIndex(memory, LAYOUT, counters)
    tracemalloc.start()
    try:
        for number in range(50_000):
            index.add(Key("x", "x", number.to_bytes(16, "big")))
        assert tracemalloc.get_traced_memory()[0] < 50_000 * 200
    finally:
        tracemalloc.stop()


# -- against a model ---------------------------------------------------------------------------

numbers = st.integers(0, 4)


class IndexMachine(RuleBasedStateMachine):
    """Any order of writes, deletions, news and refreshes ends in what the bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryStore()
        self.clock = Clock()
        self.index = ListingIndex(self.memory, LAYOUT, Counters(), clock=self.clock)
        self.forgotten: dict[int, float] = {}
        self.believed: set[int] = set()

    def name(self, number: int) -> str:
        return LAYOUT.object(key_of(number))

    @rule(number=numbers)
    def somebody_writes(self, number: int) -> None:
        self.memory.bucket.objects[self.name(number)] = b"entry"

    @rule(number=numbers)
    def somebody_deletes(self, number: int) -> None:
        self.memory.bucket.objects.pop(self.name(number), None)

    @rule(number=numbers)
    def we_write(self, number: int) -> None:
        self.somebody_writes(number)
        self.index.add(key_of(number))
        self.forgotten.pop(number, None)
        self.believed.add(number)

    @rule(number=numbers)
    def we_are_told_404(self, number: int) -> None:
        self.index.mark_missing(key_of(number))
        self.forgotten[number] = self.clock.now_s
        self.believed.discard(number)

    @rule()
    def refresh(self) -> None:
        asyncio.run(self.index.refresh())
        self.believed = {n for n in range(5) if self.name(n) in self.memory.bucket.objects}

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def answers_follow_the_model(self) -> None:
        for number in range(5):
            denied = self.clock.now_s - self.forgotten.get(number, -1000.0) < 60.0
            expected = number in self.believed and not denied
            assert self.index.maybe_contains(key_of(number)) is expected


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestIndexMachine = IndexMachine.TestCase

# SPDX-License-Identifier: Apache-2.0
"""A corpus in several places: near first, home last, and only home's word counts for an absence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, CutBodyError, S3ECError, UnavailableError
from s3ec.identity import Layout
from s3ec.store.endpoint import Breaker, BreakerOptions, BreakerStore, Endpoint
from s3ec.store.places import (
    BAD_S,
    LAG_S,
    LATE_AT_FIRST_S,
    AllPlaces,
    Place,
    PlacesStore,
    served_by,
    tell_of_home,
)
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script, replace
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.support.waiting import reached

LAYOUT = Layout("gemma-0123456789abcdef")
NAME = f"{LAYOUT.objects}ab/{'ab' * 32}.safetensors"
DELTA = f"{LAYOUT.manifest}v2/delta/1"


@dataclass
class World:
    """Two replicas and home, each with faults of its own."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.counters = Counters()
        self.scripts = [Script() for _ in range(3)]
        self.faulty = [FaultStore(MemoryStore(), script) for script in self.scripts]
        self.endpoints = [Endpoint(16, clock=self.clock) for _ in range(3)]
        stores = [
            BreakerStore(store, endpoint, self.counters)
            for store, endpoint in zip(self.faulty, self.endpoints, strict=True)
        ]
        self.places = [
            Place(name, store, endpoint, self.counters, clock=self.clock)
            for name, store, endpoint in zip(("near", "far"), stores, self.endpoints, strict=False)
        ]
        self.store = PlacesStore(stores[2], self.places, is_entry=LAYOUT.is_entry)

    def put(self, name: str, *where: int, body: bytes = b"body") -> None:
        for number in where:
            inner = self.faulty[number]._inner
            assert isinstance(inner, MemoryStore)
            inner.bucket.objects[name] = body
            inner.bucket.modified_s[name] = 0.0

    def fault(self, where: int, fault: Fault) -> Fault:
        self.scripts[where].faults.insert(0, fault)
        return fault

    def silenced_breaker(self) -> Breaker:
        """The breaker of the first place, which silence has opened."""
        breaker = self.endpoints[0].breaker
        breaker.admit()
        self.clock.now_s += BreakerOptions().silence_s
        assert breaker.missed(UnavailableError("silent"))
        return breaker

    def asked(self, *, op: str = "get") -> list[int]:
        """How often each place was asked since the last time."""
        counts = [store.calls[op] for store in self.faulty]
        for store in self.faulty:
            store.calls.clear()
        return counts

    async def get(self, name: str = NAME) -> bytes | None:
        body = await self.store.get(name, max_bytes=100)
        return None if body is None else bytes(body)


@pytest.fixture
def world() -> World:
    return World()


async def test_lag_costs_one_request_a_minute(world: World) -> None:
    world.put(NAME, 2)
    assert await world.get() == b"body"
    assert await world.get() == b"body"
    assert world.asked() == [1, 1, 2]
    assert world.counters.get("place.near.lag") == world.counters.get("place.far.lag") == 1
    world.clock.now_s += LAG_S + 1
    world.put(NAME, 0)
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]


async def test_who_reads_an_entry_is_told_when_home_is_asked(world: World) -> None:
    told: list[str] = []
    tell_of_home.set(lambda: told.append("home"))
    world.put(NAME, 1, 2)
    world.put(DELTA, 2)
    assert await world.get(DELTA) == b"body"
    assert await world.get() == b"body"
    assert told == []
    for number in (0, 1):
        world.fault(number, Fault(error=UnavailableError))
    assert await world.get() == b"body"
    assert told == ["home"]


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_place_that_fails_is_passed_over(world: World, error: type[S3ECError]) -> None:
    world.put(NAME, 0, 1, 2)
    world.fault(0, Fault(error=error))
    assert await world.get() == b"body"
    assert world.asked() == [1, 1, 0]
    assert world.counters.get("place.near.failed") == 1


async def test_an_open_breaker_is_not_asked_and_its_probe_brings_it_back(world: World) -> None:
    world.put(NAME, 0, 2)
    fault = world.fault(0, Fault(error=UnavailableError))
    while not world.endpoints[0].breaker.is_open:
        assert await world.get() == b"body"
    world.asked()
    assert await world.get() == b"body"
    assert world.asked()[0] == 0
    fault.times = fault.struck
    world.clock.now_s += 60
    assert await world.get() == b"body"
    assert not world.endpoints[0].breaker.is_open
    assert await world.get() == b"body"
    assert world.asked()[0] == 2


async def test_reads_are_useless_only_where_every_place_is_down(world: World) -> None:
    health = AllPlaces(world.endpoints)
    for endpoint in world.endpoints:
        assert not health.is_open
        while not endpoint.breaker.is_open:
            ticket = endpoint.breaker.admit()
            assert ticket is not None
            endpoint.breaker.failed(ticket, UnavailableError("down"))
    assert health.is_open
    assert 0 < health.pause_s <= 1


async def test_a_bad_copy_is_a_miss_of_its_place_alone(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    world.fault(0, Fault(change=replace(b"bad")))
    with served_by() as places:
        assert await world.get() == b"bad"
    assert [place.name for place in places] == ["near"]
    for place in places:
        place.refuse(NAME)
    with served_by() as places:
        assert await world.get() == b"body"
    assert [place.name for place in places] == ["far"]
    assert world.asked() == [1, 1, 0]
    world.put("other", 0)
    world.clock.now_s += BAD_S + 1
    world.scripts[0].faults.clear()
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]


async def test_a_body_that_was_cut_on_its_way_is_lag_and_no_bad_copy(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    cut = Fault(error=lambda text: CutBodyError(text), times=1)
    world.fault(0, cut)
    assert await world.get() == b"body"
    assert world.asked() == [1, 1, 0]
    world.clock.now_s += LAG_S + 1
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]


async def test_what_home_served_names_no_replica(world: World) -> None:
    world.put(NAME, 2)
    with served_by() as places:
        assert await world.get() == b"body"
    assert not places


async def test_a_copy_larger_than_asked_is_passed_over_for_a_minute(world: World) -> None:
    """Perhaps the request is wrong, whose rows a client may have made up: not for an hour."""
    world.put(NAME, 0, body=b"x" * 101)
    world.put(NAME, 2)
    assert await world.get() == b"body"
    assert world.asked() == [1, 1, 1]
    assert await world.get() == b"body"
    assert world.asked() == [0, 0, 1]
    assert world.counters.get("place.near.bad") == 0
    world.clock.now_s += LAG_S + 1
    world.put(NAME, 0)
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]
    world.put(NAME, 0, body=b"x" * 101)
    world.put(NAME, 2, body=b"x" * 101)
    with pytest.raises(CorruptEntryError):
        await world.get()


@pytest.mark.parametrize("fills", [True, False])
async def test_a_late_place_is_raced_by_the_next_one(world: World, fills: bool) -> None:
    world.places[0].fill = fills
    world.put(NAME, 0, 1, 2)
    gate = Gate()
    world.fault(0, Fault("get", gate=gate, times=1))
    assert await world.get() == b"body"  # late, before any time is known
    assert world.counters.get("place.near.late") == 1
    assert world.endpoints[0].places.used == 0  # what lost gave back its place
    # A copy is offered, and finds out. Without one it is asked again: it may have it.
    assert world.places[0].lacks(NAME) is fills
    assert not world.places[1].lacks(NAME)


async def test_all_late_requests_together_stay_within_the_budget(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    gate = Gate()
    world.fault(0, Fault("get", gate=gate))

    async def answer_others() -> None:
        while True:
            world.places[0].answers += 1
            await asyncio.sleep(0)

    answering = asyncio.ensure_future(answer_others())
    gets = [asyncio.ensure_future(world.get()) for _ in range(10)]
    await reached(gate)
    done, waiting = await asyncio.wait(gets, timeout=2 * LATE_AT_FIRST_S)
    answering.cancel()
    assert len(done) <= 2
    gate.release()
    assert await asyncio.gather(*waiting) == [b"body"] * len(waiting)


async def test_a_place_that_answers_nobody_is_passed_over_and_left_alone(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    world.fault(0, Fault("get", gate=Gate()))
    assert await asyncio.gather(*(world.get() for _ in range(10))) == [b"body"] * 10
    assert not world.endpoints[0].breaker.is_open
    world.clock.now_s += LAG_S
    assert await world.get() == b"body"
    assert world.endpoints[0].breaker.is_open
    assert world.counters.get("breaker.opened") == 1
    assert world.endpoints[0].places.used == 0
    world.asked()
    assert await world.get() == b"body"
    assert world.asked() == [0, 1, 0]


async def test_no_request_waits_for_the_probe_of_a_place(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    fault = world.fault(0, Fault("get", gate=Gate()))
    breaker = world.silenced_breaker()
    pauses_s = []
    for number in range(3):
        name = f"{LAYOUT.objects}ab/{number:064x}.safetensors"
        world.put(name, 1)
        world.clock.now_s += breaker.pause_s
        assert await world.get(name) == b"body"  # of the far place, though the near one is asked
        pauses_s.append(breaker.pause_s)
    assert pauses_s == [2.0, 4.0, 8.0]
    world.clock.now_s += breaker.pause_s
    fault.times = fault.struck
    world.fault(1, Fault("get", gate=Gate()))
    assert await world.get() == b"body"
    assert not breaker.is_open


async def test_a_place_that_is_slower_than_the_next_one_comes_back(world: World) -> None:
    world.put(NAME, 0, 1, 2)
    gate = Gate()
    world.fault(0, Fault("get", gate=gate))
    breaker = world.silenced_breaker()
    world.clock.now_s += breaker.pause_s
    assert await world.get() == b"body"
    assert breaker.is_open
    gate.release()
    await asyncio.gather(*world.store._probes)
    assert not breaker.is_open
    assert world.endpoints[0].places.used == 0
    assert not world.store._probes
    world.asked()
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]


async def test_a_store_that_closes_ends_the_probe_that_nobody_waits_for(world: World) -> None:
    world.put(NAME, 0, 2)
    world.fault(0, Fault("get", gate=Gate()))
    breaker = world.silenced_breaker()
    world.clock.now_s += breaker.pause_s
    assert await world.get() == b"body"
    await world.store.close()
    assert world.endpoints[0].places.used == 0


async def test_cancelling_a_read_cancels_all_of_its_requests(world: World) -> None:
    world.put(NAME, 0, 2)
    gate = Gate()
    world.fault(0, Fault("get", gate=gate))
    read = asyncio.ensure_future(world.get())
    await reached(gate)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert world.endpoints[0].places.used == 0


# -- the index, records, writes and deletions --------------------------------------------------


async def test_the_index_is_homes_and_a_replicas_while_home_does_not_answer(world: World) -> None:
    world.put(DELTA, 0, body=b"old")
    world.put(DELTA, 2, body=b"new")
    assert await world.get(DELTA) == b"new"
    assert [info.name async for info in world.store.list(LAYOUT.manifest)] == [DELTA]
    assert world.asked() == [0, 0, 1]
    world.fault(2, Fault(error=UnavailableError))
    assert await world.get(DELTA) == b"old"
    assert [info.name async for info in world.store.list(LAYOUT.manifest)] == [DELTA]
    head = await world.store.head(DELTA)
    assert head is not None


async def test_whether_an_entry_is_stored_is_homes_word_alone(world: World) -> None:
    world.put(NAME, 0)
    assert await world.store.head(NAME) is None
    world.fault(2, Fault("head", error=UnavailableError))
    with pytest.raises(UnavailableError):  # else a save would count as stored already
        await world.store.head(NAME)


async def test_a_refusal_of_home_is_no_reason_to_read_an_old_index(world: World) -> None:
    world.put(DELTA, 0)
    world.fault(2, Fault(error=AccessError))
    with pytest.raises(AccessError):
        await world.get(DELTA)
    with pytest.raises(AccessError):
        _ = [info async for info in world.store.list(LAYOUT.manifest)]


async def test_entries_are_listed_at_home_or_not_at_all(world: World) -> None:
    world.put(NAME, 0)
    world.fault(2, Fault("list", error=UnavailableError))
    with pytest.raises(UnavailableError):
        _ = [info async for info in world.store.list(LAYOUT.objects)]


async def test_half_a_listing_of_home_is_none(world: World) -> None:
    world.put(DELTA, 0, 2)
    world.fault(2, Fault("list", lost_reply=True))
    with pytest.raises(UnavailableError):
        _ = [info async for info in world.store.list(LAYOUT.manifest)]


async def test_deletions_go_everywhere_and_a_replica_that_refuses_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    names = [NAME, NAME.replace("ab", "cd")]
    for name in names:
        world.put(name, 0, 1, 2)
    world.fault(1, Fault("delete_many", error=AccessError))
    assert await world.store.delete_many(names) == {}
    world.put("x", 0, 1, 2)
    await world.store.delete("x")
    held = [set(store._inner.bucket.objects) for store in world.faulty]  # type: ignore[attr-defined]
    assert held == [set(), set(names), set()]
    assert caplog.text.count("what is deleted stays in far") == 1
    assert world.counters.get("place.far.undeleted") == 1


async def test_what_home_does_not_delete_is_deleted_nowhere(world: World) -> None:
    world.put(NAME, 0, 2)
    world.fault(2, Fault("delete_many", error=UnavailableError, partial=True))
    assert set(await world.store.delete_many([NAME])) == {NAME}
    assert await world.get() == b"body"
    assert world.asked() == [1, 0, 0]


# -- against a dictionary ------------------------------------------------------------------------

_KINDS = ("whole", "lacks", "forged", "down", "refuses")


@given(
    st.lists(
        st.tuples(*[st.sampled_from(_KINDS)] * 2, st.sampled_from(("has", "lacks", "down"))),
        max_size=6,
    )
)
def test_whatever_replicas_do_a_reader_that_checks_gets_homes_bytes_or_a_miss(
    rounds: list[tuple[str, str, str]],
) -> None:
    async def play() -> None:
        world = World()
        for near, far, home in rounds:
            for number, kind in enumerate((near, far, home)):
                inner = world.faulty[number]._inner
                assert isinstance(inner, MemoryStore)
                inner.bucket.objects.clear()
                world.scripts[number].faults.clear()
                if kind in ("down", "refuses"):
                    error = UnavailableError if kind == "down" else AccessError
                    world.fault(number, Fault(error=error))
                elif kind != "lacks":
                    world.put(NAME, number, body=b"forged" if kind == "forged" else b"sound")
            found: bytes | type[S3ECError] | None = b"forged"
            for _ in range(3):
                try:
                    with served_by() as places:
                        found = await world.get()
                except S3ECError as exc:
                    found = type(exc)
                    break
                if found != b"forged":
                    break
                assert places
                for place in places:
                    place.refuse(NAME)
            else:
                pytest.fail("a place was asked again for what it had bad")
            if home == "has":
                assert found == b"sound"
            elif home == "lacks":
                assert found in (None, b"sound")
            else:
                assert found == b"sound" or isinstance(found, type)
            world.clock.now_s += LAG_S / 2

    asyncio.run(play())

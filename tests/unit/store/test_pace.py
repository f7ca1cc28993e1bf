# SPDX-License-Identifier: Apache-2.0
"""Places are never more than the endpoint bears, are handed out in order, and never leak."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3ec.counters import Counters
from s3ec.errors import UnavailableError
from s3ec.store.endpoint import AdaptiveConcurrency, BreakerOpenError, BreakerStore, Endpoint
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.unit.store.test_endpoint import reached


def throttled(message: str) -> UnavailableError:
    return UnavailableError(message, status=503, is_throttle=True)


async def test_throttling_halves_the_places_and_answers_give_them_back() -> None:
    script = Script([Fault(error=throttled, times=2)])
    counters, endpoint = Counters(), Endpoint(8)
    store = BreakerStore(FaultStore(MemoryStore(), script), endpoint, counters)
    for withheld in (4, 6):
        with pytest.raises(UnavailableError):
            await store.head("a")
        assert counters.get("pace.withheld") == endpoint.pace.withheld == withheld
    assert counters.get("pace.slowed") == 2
    for _ in range(40):
        await store.head("a")
    assert counters.get("pace.withheld") == endpoint.pace.withheld == 0
    assert endpoint.pace.used == 0


async def test_requests_that_were_out_together_count_once() -> None:
    pace = AdaptiveConcurrency(16)
    since = [await pace.take() for _ in range(3)]
    assert [pace.slow_down(one) for one in since] == [8, 0, 0]
    assert pace.withheld == 8


async def test_reads_go_before_uploads_that_came_earlier_and_not_before_all_of_them() -> None:
    pace = AdaptiveConcurrency(1)
    await pace.take()
    order: list[str] = []

    async def ask(name: str, *, is_read: bool) -> None:
        await pace.take(is_read=is_read)
        order.append(name)
        pace.give_back()

    asked = [asyncio.create_task(ask(f"upload {n}", is_read=False)) for n in range(3)]
    asked += [asyncio.create_task(ask(f"read {n}", is_read=True)) for n in range(5)]
    await asyncio.sleep(0)
    pace.give_back()
    async with asyncio.timeout(30):
        await asyncio.gather(*asked)
    assert order == [
        *("read 0", "read 1", "read 2", "upload 0"),
        *("read 3", "read 4", "upload 1", "upload 2"),
    ]
    assert pace.used == 0


async def test_a_read_through_the_guard_passes_uploads_that_wait() -> None:
    gate = Gate()
    inner = FaultStore(MemoryStore(), Script([Fault(op="put_if_absent", gate=gate, times=1)]))
    endpoint = Endpoint(1)
    store = BreakerStore(inner, endpoint, Counters())
    first = asyncio.create_task(store.put_if_absent("a", [b"x"]))
    await reached(gate)
    waiting = asyncio.create_task(store.put_if_absent("b", [b"x"]))
    reading = asyncio.create_task(store.get("b", max_bytes=10))
    await asyncio.sleep(0)
    gate.release()
    assert await reading is None  # it was asked for before the upload that came before it
    await asyncio.gather(first, waiting)


async def test_who_waits_for_a_place_when_the_breaker_opens_is_told_at_once() -> None:
    gate = Gate()
    script = Script([Fault(op="put_if_absent", gate=gate), Fault(error=UnavailableError)])
    inner = FaultStore(MemoryStore(), script)
    endpoint = Endpoint(1)
    store = BreakerStore(inner, endpoint, Counters())
    stuck = asyncio.create_task(store.put_if_absent("a", [b"x"]))
    await reached(gate)
    waiting = [asyncio.create_task(store.head("a")) for _ in range(5)]
    await asyncio.sleep(0)
    for _ in range(3):  # as requests of another thread's loop would
        ticket = endpoint.breaker.admit(is_read=False)
        assert ticket is not None
        if endpoint.breaker.failed(ticket, UnavailableError("x")):
            endpoint.pace.wake_all()
    async with asyncio.timeout(30):
        for task in waiting:
            with pytest.raises(BreakerOpenError):
                await task
        gate.release()
        await stuck
    assert inner.calls["head"] == 0
    assert endpoint.pace.used == 0


class PaceMachine(RuleBasedStateMachine):
    """Requests that come, wait, are cancelled, are throttled and end, in any order."""

    @initialize(places=st.integers(1, 5))
    def begin(self, places: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.places = places
        self.pace = AdaptiveConcurrency(places)
        self.holders: list[int] = []
        self.waiters: list[asyncio.Task[int]] = []

    def turn(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.waiters if task.done()]:
            self.waiters.remove(task)
            if not task.cancelled():
                self.holders.append(task.result())

    @rule(is_read=st.booleans())
    def come(self, is_read: bool) -> None:
        self.waiters.append(self.loop.create_task(self.pace.take(is_read=is_read)))
        self.turn()

    @precondition(lambda self: self.holders)
    @rule(how=st.sampled_from(["answered", "throttled", "cancelled"]))
    def end(self, how: str) -> None:
        since = self.holders.pop(0)
        if how == "answered":
            self.pace.speed_up()
        elif how == "throttled":
            self.pace.slow_down(since)
        self.pace.give_back()
        self.turn()

    @precondition(lambda self: self.waiters)
    @rule(granted_meanwhile=st.booleans())
    def cancel(self, granted_meanwhile: bool) -> None:
        if granted_meanwhile and self.holders:
            self.holders.pop(0)
            self.pace.give_back()
        self.waiters[0].cancel()
        self.turn()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "pace"):
            assert self.pace.used == len(self.holders)
            allowed = self.places - self.pace.withheld
            assert 1 <= allowed <= self.places
            # After a cut those that were out already may be more.
            assert not self.waiters or len(self.holders) >= allowed

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.waiters:
                task.cancel()
            self.turn()
            self.loop.close()


PaceMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPaceMachine = PaceMachine.TestCase

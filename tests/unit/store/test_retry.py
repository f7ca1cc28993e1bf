# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent more than once: few, paid for, and never past the caller's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConflictError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.store.base import Store
from s3ec.store.concurrency import seconds_left, within
from s3ec.store.endpoint import BreakerStore, Budget, Endpoint
from s3ec.store.open import resilient
from s3ec.store.retry import HEDGED_BYTES, HedgeStore, RetryStore
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.support.waiting import reached
from tests.unit.store.conftest import OPERATIONS, corrupt, every_operation


class Sleeps:
    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


def retrying(inner: Store, counters: Counters, sleeps: Sleeps, attempts: int = 2) -> RetryStore:
    return RetryStore(
        inner, counters, attempts=attempts, sleep=sleeps, uniform=lambda low, high: high
    )


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "list"])
async def test_an_unavailable_operation_is_tried_once_more(
    inner: FaultStore, script: Script, counters: Counters, operation: str
) -> None:
    sleeps = Sleeps()
    script.faults = [Fault(error=UnavailableError, times=1)]
    await OPERATIONS[operation](retrying(inner, counters, sleeps))
    assert inner.calls == {operation: 2}
    assert counters.get("store.retries") == 1
    assert len(sleeps.slept) == 1


@every_operation
@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_attempts_are_bounded(
    inner: FaultStore, script: Script, counters: Counters, operation: str, attempts: int
) -> None:
    sleeps = Sleeps()
    script.faults = [Fault(error=UnavailableError)]
    with pytest.raises(UnavailableError):
        await OPERATIONS[operation](retrying(inner, counters, sleeps, attempts))
    expected = 1 if operation == "list" else attempts
    assert inner.calls[operation] == expected
    assert len(sleeps.slept) == expected - 1
    assert sleeps.slept == sorted(sleeps.slept)
    assert all(seconds <= 0.05 * 2**attempts for seconds in sleeps.slept)


@every_operation
@pytest.mark.parametrize("error", [AccessError, ConflictError, corrupt, TierError, KeyError])
async def test_an_answer_is_never_asked_for_again(
    inner: FaultStore,
    script: Script,
    counters: Counters,
    operation: str,
    error: Callable[[str], Exception],
) -> None:
    sleeps = Sleeps()
    script.faults = [Fault(error=error)]
    with pytest.raises((S3ECError, KeyError)) as caught:
        await OPERATIONS[operation](retrying(inner, counters, sleeps, 5))
    assert type(caught.value) is type(error("x"))
    assert inner.calls == {operation: 1}
    assert sleeps.slept == []


async def test_a_write_whose_reply_was_lost_ends_in_a_conflict(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    """Which callers take for success: entries are content-addressed."""
    script.faults = [Fault(op="put_if_absent", lost_reply=True, times=1)]
    store = retrying(inner, counters, Sleeps())
    with pytest.raises(ConflictError):
        await store.put_if_absent("a", [b"x"])
    assert await store.get("a", max_bytes=10) == b"x"


async def test_an_open_breaker_is_not_asked_twice(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    """A miss while the store is down must not cost a pause."""
    sleeps = Sleeps()
    guarded = BreakerStore(inner, Endpoint(16, clock=Clock()), counters)
    store = retrying(guarded, counters, sleeps, 5)
    script.faults = [Fault(error=UnavailableError)]
    with pytest.raises(UnavailableError, match="breaker is open"):
        await store.head("a")  # the third attempt opened it
    assert (inner.calls.total(), len(sleeps.slept)) == (3, 3)
    with pytest.raises(UnavailableError, match="breaker is open"):
        await store.head("a")
    assert (inner.calls.total(), len(sleeps.slept)) == (3, 3)


async def test_the_delay_is_drawn_from_zero_up(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    script.faults = [Fault(error=UnavailableError)]
    store = RetryStore(inner, counters, attempts=4, sleep=Sleeps(), uniform=uniform)
    with pytest.raises(UnavailableError):
        await store.head("a")
    assert [low for low, _ in drawn] == [0, 0, 0]
    assert [high for _, high in drawn] == [0.1, 0.2, 0.4]


async def test_a_cancelled_operation_is_not_tried_again(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    gate = Gate()
    script.faults = [Fault(gate=gate)]
    task = asyncio.create_task(retrying(inner, counters, Sleeps(), 5).head("a"))
    await reached(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner.calls == {"head": 1}


# -- what bounds them ------------------------------------------------------------------------------


async def test_a_server_that_asks_for_patience_gets_it_and_no_more_than_is_sensible(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    def asking(seconds: float) -> Callable[[str], Exception]:
        return lambda message: UnavailableError(message, status=503, retry_after_s=seconds)

    sleeps = Sleeps()
    store = retrying(inner, counters, sleeps)
    script.faults = [Fault(error=asking(3.0), times=1)]
    await store.head("a")
    assert sleeps.slept == [3.0]
    script.faults = [Fault(error=asking(60.0), times=1)]
    with pytest.raises(UnavailableError):
        await store.head("a")
    assert sleeps.slept == [3.0]


async def test_nothing_is_repeated_past_the_callers_deadline(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    def patient(message: str) -> UnavailableError:
        return UnavailableError(message, retry_after_s=4.9)

    sleeps = Sleeps()
    store = retrying(inner, counters, sleeps)
    script.faults = [Fault(error=patient)]
    async with within(4.8):
        with pytest.raises(UnavailableError):
            # As parts of a large object are asked for: in tasks of their own.
            await asyncio.create_task(store.head("a"))
    assert (inner.calls.total(), sleeps.slept) == (1, [])
    async with within(600) as deadline:
        with pytest.raises(UnavailableError):
            await store.head("a")
        assert len(sleeps.slept) == 1
        deadline.reschedule(asyncio.get_running_loop().time() + 4.8)
        assert seconds_left() < 5
        with pytest.raises(UnavailableError):
            await store.head("a")
        assert len(sleeps.slept) == 1
    assert seconds_left() == float("inf")


async def test_a_spent_budget_ends_repetitions_and_requests_fill_it_again(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    store = RetryStore(inner, counters, endpoint=Endpoint(16), sleep=Sleeps())
    script.faults = [Fault(op="head", error=UnavailableError)]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await store.head("a")
    assert inner.calls["head"] == 3
    for _ in range(8):
        await store.get("a", max_bytes=1)
    with pytest.raises(UnavailableError):
        await store.head("a")
    assert inner.calls["head"] == 5


@given(
    steps=st.lists(st.booleans(), max_size=300),
    share=st.sampled_from([0.0, 0.05, 0.2]),
    at_first=st.integers(0, 3),
)
def test_extra_requests_never_exceed_their_share(
    steps: list[bool], share: float, at_first: int
) -> None:
    budget = Budget(share, at_most=10, at_first=at_first)
    paid = extra = 0
    for is_request in steps:
        if is_request:
            budget.pay_in()
            paid += 1
        else:
            extra += budget.take()
        assert extra <= at_first + share * paid + 1e-9


@pytest.mark.parametrize(("concurrent", "most"), [(1, 6), (4, 7), (32, 33)])
async def test_a_server_that_only_fails_is_sent_hardly_more_than_was_asked_for(
    inner: FaultStore, script: Script, counters: Counters, concurrent: int, most: int
) -> None:
    endpoint = Endpoint(32)
    store = resilient(inner, endpoint, counters, hedge=True)
    for _ in range(200):  # a budget that is full
        await store.get("a", max_bytes=1)
    inner.calls.clear()
    script.faults = [Fault(error=lambda message: UnavailableError(message, status=503))]

    async def ask() -> None:
        while not endpoint.breaker.is_open:
            with pytest.raises(UnavailableError):
                await store.get("a", max_bytes=1)

    async with asyncio.timeout(30):
        await asyncio.gather(*(ask() for _ in range(concurrent)))
    assert inner.calls["get"] <= most
    assert counters.get("store.retries") <= 1


async def test_a_conflict_of_writers_is_repeated_and_not_held_against_the_endpoint(
    inner: FaultStore, script: Script, counters: Counters
) -> None:
    endpoint = Endpoint(4)
    store = resilient(inner, endpoint, counters, hedge=True)
    busy = Fault(error=lambda message: UnavailableError(message, status=409))
    script.faults = [busy]
    for _ in range(8):
        with pytest.raises(UnavailableError):
            await store.put_if_absent("a", [b"x"])
    assert not endpoint.breaker.is_open
    assert busy.struck > 8


# -- second requests beside late ones -------------------------------------------------------------


class Hedged:
    def __init__(self, *, share: float = 1.0) -> None:
        self.script = Script()
        self.inner = FaultStore(MemoryStore(), self.script)
        self.counters = Counters()
        endpoint = Endpoint(4)
        endpoint.budget = self.budget = Budget(share, at_most=5, at_first=0)
        self.places = endpoint.places
        self.store = HedgeStore(self.inner, endpoint, self.counters)

    async def learn(self, requests: int = 64) -> None:
        """See enough to know what late is: milliseconds, here."""
        await self.inner.put_if_absent("a", [b"x"])
        for _ in range(requests):
            await self.get()
        self.inner.calls.clear()

    async def get(self) -> object:
        self.budget.pay_in()  # as RetryStore does
        return await self.store.get("a", max_bytes=100)

    async def both(
        self,
        first_error: Callable[[str], Exception] | None = None,
        second_error: Callable[[str], Exception] | None = None,
    ) -> tuple[asyncio.Task[object], Gate, Gate]:
        """A get whose two requests are out, and what lets each of them end."""
        await self.learn()
        first, second = Gate(), Gate()
        self.script.faults = [
            Fault(gate=first, times=1, error=first_error),
            Fault(gate=second, times=1, error=second_error),
        ]
        asking = asyncio.create_task(self.get())
        await reached(second)
        return asking, first, second


@pytest.fixture
def rig() -> Hedged:
    return Hedged()


async def test_a_late_get_is_won_by_the_second_and_the_first_is_cancelled(rig: Hedged) -> None:
    await rig.learn()
    rig.script.faults = [Fault(op="get", gate=Gate(), times=1)]
    assert await rig.get() == b"x"
    assert rig.inner.calls["get"] == 2
    assert rig.counters.get("hedge.sent") == 1
    await asyncio.sleep(0)
    assert rig.places.used == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_the_first_may_still_win_and_the_second_is_cancelled(rig: Hedged) -> None:
    asking, first, _ = await rig.both()
    assert rig.places.used == 1
    first.release()
    assert await asking == b"x"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.places.used == 0
    assert rig.counters.get("hedge.sent") == 1


@pytest.mark.parametrize("first_fails", [True, False])
async def test_one_failure_of_two_is_no_failure(rig: Hedged, first_fails: bool) -> None:
    error = UnavailableError
    asking, first, second = await rig.both(*((error, None) if first_fails else (None, error)))
    (first if first_fails else second).release()
    for _ in range(5):
        await asyncio.sleep(0)
    (second if first_fails else first).release()
    assert await asking == b"x"


async def test_a_cancelled_caller_cancels_both(rig: Hedged) -> None:
    asking, _, _ = await rig.both()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for _ in range(3):
        await asyncio.sleep(0)
    assert rig.places.used == 0


@pytest.mark.parametrize(
    "why", ["nothing known", "only absent ones known", "large", "no place", "no budget"]
)
async def test_nothing_is_sent_twice_without_reason_and_room(rig: Hedged, why: str) -> None:
    size = 2 * HEDGED_BYTES if why == "large" else 100
    await rig.learn(64 if why in ("large", "no place", "no budget") else 0)
    for _ in range(64 if why == "only absent ones known" else 0):
        await rig.store.get("absent", max_bytes=size)
    for _ in range(64 if why == "large" else 0):
        await rig.store.get("a", max_bytes=size)
    if why == "no place":
        for _ in range(4):
            await rig.places.take()
    while why == "no budget" and rig.budget.take():
        pass
    rig.inner.calls.clear()
    gate = Gate()
    rig.script.faults = [Fault(gate=gate, times=1)]
    asking = asyncio.create_task(rig.store.get("a", max_bytes=size))
    await reached(gate)
    await asyncio.sleep(0.1)  # far beyond late
    gate.release()
    assert await asking == b"x"
    assert rig.inner.calls["get"] == 1

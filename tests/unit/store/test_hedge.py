# SPDX-License-Identifier: Apache-2.0
"""A late GET is sent once more, rarely, and whichever answers first is taken."""

from __future__ import annotations

import asyncio

import pytest

from s3ec.counters import Counters
from s3ec.errors import UnavailableError
from s3ec.store.endpoint import Budget, Endpoint
from s3ec.store.retry import HEDGED_BYTES, HedgeStore
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.unit.store.test_endpoint import reached


class Rig:
    def __init__(self, *, share: float = 1.0) -> None:
        self.script = Script()
        self.inner = FaultStore(MemoryStore(), self.script)
        self.counters = Counters()
        endpoint = Endpoint(4)
        endpoint.hedges = Budget(share, at_most=5, at_first=0)
        self.pace = endpoint.pace
        self.store = HedgeStore(self.inner, endpoint, self.counters)

    async def learn(self, requests: int = 64) -> None:
        """See enough to know what late is: milliseconds, here."""
        await self.inner.put_if_absent("a", [b"x"])
        for _ in range(requests):
            await self.store.get("a", max_bytes=100)
        self.inner.calls.clear()

    async def get(self) -> object:
        return await self.store.get("a", max_bytes=100)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def until(rig: Rig, calls: int) -> None:
    async with asyncio.timeout(30):
        while rig.inner.calls["get"] < calls:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.001)


async def test_a_late_get_is_won_by_the_second_and_the_first_is_cancelled(rig: Rig) -> None:
    await rig.learn()
    rig.script.faults = [Fault(op="get", gate=Gate(), times=1)]
    assert await rig.get() == b"x"
    assert rig.inner.calls["get"] == 2
    assert (rig.counters.get("hedge.sent"), rig.counters.get("hedge.won")) == (1, 1)
    await asyncio.sleep(0)
    assert rig.pace.used == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_the_first_may_still_win_and_the_second_is_cancelled(rig: Rig) -> None:
    await rig.learn()
    first, second = Gate(), Gate()
    rig.script.faults = [Fault(gate=first, times=1), Fault(gate=second, times=1)]
    asking = asyncio.create_task(rig.get())
    await reached(second)
    assert rig.pace.used == 1
    first.release()
    assert await asking == b"x"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.pace.used == 0
    assert (rig.counters.get("hedge.sent"), rig.counters.get("hedge.won")) == (1, 0)


@pytest.mark.parametrize("first_fails", [True, False])
async def test_one_failure_of_two_is_no_failure(rig: Rig, first_fails: bool) -> None:
    await rig.learn()
    first, second = Gate(), Gate()
    error = UnavailableError
    rig.script.faults = [
        Fault(gate=first, times=1, error=error if first_fails else None),
        Fault(gate=second, times=1, error=None if first_fails else error),
    ]
    asking = asyncio.create_task(rig.get())
    await reached(second)
    (first if first_fails else second).release()
    for _ in range(5):
        await asyncio.sleep(0)
    (second if first_fails else first).release()
    assert await asking == b"x"
    assert rig.counters.get("hedge.won") == first_fails


async def test_two_failures_are_the_firsts(rig: Rig) -> None:
    await rig.learn()
    first, second = Gate(), Gate()
    rig.script.faults = [
        Fault(gate=first, times=1, error=lambda _: UnavailableError("one")),
        Fault(gate=second, times=1, error=lambda _: UnavailableError("two")),
    ]
    asking = asyncio.create_task(rig.get())
    await reached(second)
    first.release()
    second.release()
    with pytest.raises(UnavailableError, match="one"):
        await asking


async def test_a_cancelled_caller_cancels_both(rig: Rig) -> None:
    await rig.learn()
    second = Gate()
    rig.script.faults = [Fault(gate=Gate(), times=1), Fault(gate=second, times=1)]
    asking = asyncio.create_task(rig.get())
    await reached(second)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for _ in range(3):
        await asyncio.sleep(0)
    assert rig.pace.used == 0


async def test_seconds_are_at_most_their_share() -> None:
    rig = Rig(share=0.05)
    await rig.learn()  # pays for three
    for number in range(1, 6):
        gate = Gate()
        rig.script.faults = [Fault(gate=gate, times=1)]
        asking = asyncio.create_task(rig.get())
        await reached(gate)
        if number <= 3:
            await asking
        else:
            await asyncio.sleep(0.1)  # far beyond late; nothing more may happen
            assert not asking.done()
            gate.release()
            await asking
    assert rig.counters.get("hedge.sent") == 3


@pytest.mark.parametrize("why", ["nothing known", "large", "no place"])
async def test_nothing_is_sent_twice_without_reason_and_room(rig: Rig, why: str) -> None:
    size = 2 * HEDGED_BYTES if why == "large" else 100
    await rig.learn(0 if why == "nothing known" else 64)
    for _ in range(64 if why == "large" else 0):
        await rig.store.get("a", max_bytes=size)
    if why == "no place":
        for _ in range(4):
            await rig.pace.take()
    rig.inner.calls.clear()
    gate = Gate()
    rig.script.faults = [Fault(gate=gate, times=1)]
    asking = asyncio.create_task(rig.store.get("a", max_bytes=size))
    await reached(gate)
    await asyncio.sleep(0.1)  # far beyond late
    gate.release()
    assert await asking == b"x"
    assert rig.inner.calls["get"] == 1

# SPDX-License-Identifier: Apache-2.0
"""A sick endpoint is left alone until one probe says that it is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConflictError,
    UnavailableError,
)
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.endpoint import (
    Breaker,
    BreakerOpenError,
    BreakerOptions,
    BreakerStore,
    Endpoint,
    Places,
)
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.support.waiting import reached
from tests.unit.store.conftest import (
    OPERATIONS,
    PATIENCE_S,
    corrupt,
    every_operation,
    names,
)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def endpoint(clock: Clock) -> Endpoint:
    """One that waits, since silence is not counted by ``clock``."""
    return Endpoint(100, BreakerOptions(silence_s=3600.0), clock=clock)


@pytest.fixture
def breaker(endpoint: Endpoint) -> Breaker:
    return endpoint.breaker


def guarded(inner: object, endpoint: Endpoint, counters: Counters | None = None) -> BreakerStore:
    return BreakerStore(inner, endpoint, counters or Counters())  # type: ignore[arg-type]


@pytest.fixture
def store(inner: FaultStore, endpoint: Endpoint, counters: Counters) -> BreakerStore:
    return guarded(inner, endpoint, counters)


# How many of them in a row open it.
FAILURES = {
    "no answer": (UnavailableError, 3),
    "503": (lambda message: UnavailableError(message, status=503), 6),
    "expired": (AccessError, 6),
}


async def fail_once(store: Store, script: Script, error: type[Exception]) -> None:
    script.faults = [Fault(error=error)]
    with pytest.raises(error):
        await store.get("a", max_bytes=10)
    script.faults = []


async def open_up(store: Store, script: Script, times: int = 3) -> None:
    for _ in range(times):
        await fail_once(store, script, UnavailableError)


def open_by_hand(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.failed(breaker.admit(), UnavailableError(""))


# -- the breaker -------------------------------------------------------------------------------


@every_operation
@pytest.mark.parametrize("kind", FAILURES)
async def test_failures_in_a_row_open_it_and_then_nothing_is_asked(
    store: BreakerStore,
    inner: FaultStore,
    breaker: Breaker,
    counters: Counters,
    script: Script,
    operation: str,
    kind: str,
) -> None:
    error, times = FAILURES[kind]
    script.faults = [Fault(error=error)]
    for number in range(times):
        assert breaker.is_open is False, number
        with pytest.raises((UnavailableError, AccessError)):
            await OPERATIONS[operation](store)
    assert breaker.is_open
    assert counters.get("breaker.opened") == 1
    asked = inner.calls.total()
    for other in OPERATIONS.values():
        with pytest.raises(UnavailableError, match="breaker is open"):
            await other(store)
    assert inner.calls.total() == asked


async def test_the_pause_doubles_with_each_failed_probe_up_to_a_limit_and_starts_over(
    store: BreakerStore, breaker: Breaker, script: Script, clock: Clock, inner: FaultStore
) -> None:
    await open_up(store, script)
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        assert breaker.pause_s == pause_s
        asked = inner.calls.total()
        clock.now_s += pause_s - 0.001
        with pytest.raises(UnavailableError, match="breaker is open"):
            await store.head("a")
        assert inner.calls.total() == asked
        clock.now_s += 0.001
        await fail_once(store, script, AccessError)
        assert inner.calls.total() == asked + 1
    clock.now_s += 30
    await store.head("a")
    assert not breaker.is_open
    assert breaker.pause_s == 0
    await open_up(store, script)
    assert breaker.pause_s == 1


async def test_a_write_that_probes_a_silent_store_keeps_others_out_for_moments_only(
    script: Script, inner: FaultStore, clock: Clock
) -> None:
    """A body may take minutes, and the store may be back long before."""
    endpoint = Endpoint(100, clock=clock)
    store = guarded(inner, endpoint)
    open_by_hand(endpoint.breaker)
    clock.now_s += 1
    gate = Gate()
    script.faults = [Fault(op="put_if_absent", gate=gate)]
    probe = asyncio.create_task(store.put_if_absent("a", [b"a"]))
    await reached(gate)
    clock.now_s += 1
    with pytest.raises(BreakerOpenError):
        await store.head("a")
    clock.now_s += 2
    await store.head("a")
    assert not endpoint.breaker.is_open
    gate.release()
    await probe


# -- places for requests -------------------------------------------------------------------------


async def test_places_go_to_those_who_wait_in_the_order_in_which_they_came() -> None:
    places = Places(1)
    await places.take()
    order: list[int] = []

    async def ask(number: int) -> None:
        await places.take()
        order.append(number)
        places.give_back()

    asked = [asyncio.create_task(ask(number)) for number in range(3)]
    await asyncio.sleep(0)
    places.give_back()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*asked)
    assert order == [0, 1, 2]
    assert places.used == 0


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
    for _ in range(3):
        if endpoint.breaker.failed(endpoint.breaker.admit(), UnavailableError("x")):
            endpoint.places.dismiss()
    async with asyncio.timeout(PATIENCE_S):
        for task in waiting:
            with pytest.raises(BreakerOpenError):
                await task
        gate.release()
        await stuck
    assert inner.calls["head"] == 0
    assert endpoint.places.used == 0


# -- silence, and refusals that are about one request ----------------------------------------------


def test_one_request_without_an_answer_opens_it_where_nobody_else_got_one(clock: Clock) -> None:
    breaker = Breaker(BreakerOptions(silence_s=2.0), clock=clock)
    quick = breaker.admit()
    clock.now_s += 1.9
    assert not breaker.failed(quick, UnavailableError("refused"))
    breaker.succeeded()
    clock.now_s += 10  # an answer of long ago says nothing
    slow = breaker.admit()
    clock.now_s += 2
    assert breaker.failed(slow, UnavailableError("timed out"))
    assert breaker.pause_s == 1


def test_silence_while_others_are_answered_is_one_failure_among_others(clock: Clock) -> None:
    breaker = Breaker(BreakerOptions(silence_s=1.0), clock=clock)
    out = [breaker.admit() for _ in range(3)]
    clock.now_s += 0.5
    breaker.succeeded()
    clock.now_s += 5
    opened = [breaker.failed(slow, UnavailableError("timed out")) for slow in out]
    assert opened == [False, False, True]


FAULTS_OF_OTHERS: dict[str, Exception] = {
    "a key that is denied": AccessError("x", code="AccessDenied", is_general=False),
    "a feature that the server lacks": AccessError("x", code="NotImplemented", is_general=False),
    "a writer that was faster": UnavailableError("x", status=409),
    "a name that is taken": ConflictError("x"),
    "a damaged body": corrupt("x"),
    "a fault of ours": KeyError("x"),
}


@pytest.mark.parametrize("what", FAULTS_OF_OTHERS)
async def test_faults_that_are_not_the_endpoints_never_open_it(
    store: BreakerStore,
    breaker: Breaker,
    script: Script,
    counters: Counters,
    clock: Clock,
    what: str,
) -> None:
    script.faults = [Fault(error=lambda _: FAULTS_OF_OTHERS[what])]
    for operation in OPERATIONS.values():
        for _ in range(20):
            clock.now_s += 10
            with pytest.raises(type(FAULTS_OF_OTHERS[what])):
                await operation(store)
    assert not breaker.is_open
    assert counters.get("breaker.opened") == 0


def forbidden(message: str) -> AccessError:
    return AccessError(message, code="AccessDenied", is_general=False)


async def test_refusals_of_single_keys_do_not_open_it_while_other_reads_succeed(
    store: BreakerStore, breaker: Breaker, script: Script
) -> None:
    """So answers S3 for absent keys to who may not list; the listing itself is refused too."""
    script.faults = [Fault(name="absent", error=forbidden), Fault(op="list", error=forbidden)]
    for _ in range(10):
        for _ in range(5):
            with pytest.raises(AccessError):
                await store.get("absent", max_bytes=10)
            with pytest.raises(AccessError):
                await names(store)
        await store.get("there", max_bytes=10)
    assert not breaker.is_open


async def test_a_server_that_asks_for_less_is_counted(
    store: BreakerStore, script: Script, counters: Counters
) -> None:
    script.faults = [
        Fault(error=lambda m: UnavailableError(m, status=503, is_throttle=True), times=2)
    ]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await store.head("a")
    assert counters.get("pace.slowed") == 2


async def test_it_stays_open_for_as_long_as_the_server_asks(
    store: BreakerStore, breaker: Breaker, script: Script
) -> None:
    script.faults = [
        Fault(error=lambda message: UnavailableError(message, status=503, retry_after_s=12.0))
    ]
    for _ in range(6):
        with pytest.raises(UnavailableError):
            await store.head("a")
    assert breaker.pause_s == 12


# -- the breaker and listings ------------------------------------------------------------------


class Pages:
    """A store whose listing yields what it is given and raises what it is given."""

    def __init__(self, items: Sequence[str | Exception]) -> None:
        self.items = items
        self.closed = 0

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield ObjectInfo(item, 1)
        finally:
            self.closed += 1


async def test_a_listing_that_is_left_early_is_an_answer_and_closes_its_request(
    endpoint: Endpoint, breaker: Breaker, clock: Clock
) -> None:
    pages = Pages(["a", "b", "c"])
    store = guarded(pages, endpoint)
    open_by_hand(breaker)
    clock.now_s += 1
    listing = store.list("")
    assert (await anext(listing)).name == "a"
    assert not breaker.is_open
    await listing.aclose()  # type: ignore[attr-defined]
    assert pages.closed == 1
    assert breaker.admit()


@pytest.mark.parametrize("error", [UnavailableError("x"), AccessError("x"), KeyError("x")])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_probe_that_fails_while_listing_makes_room_for_the_next(
    endpoint: Endpoint, breaker: Breaker, clock: Clock, error: Exception, before: int
) -> None:
    open_by_hand(breaker)
    clock.now_s += 1
    pages = Pages([*"abcd"[:before], error])
    store = guarded(pages, endpoint)
    with pytest.raises(type(error)):
        await names(store)
    assert pages.closed == 1
    clock.now_s += 100
    assert breaker.admit()


async def test_a_listing_ends_when_the_breaker_opens_meanwhile(endpoint: Endpoint) -> None:
    listing = guarded(Pages(["a", "b"]), endpoint).list("")
    await anext(listing)
    open_by_hand(endpoint.breaker)
    with pytest.raises(UnavailableError, match="breaker is open"):
        await anext(listing)


# -- the breaker against a model ---------------------------------------------------------------


class Held:
    """A store whose every get waits for the test to say how it ends."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]
        return None


# How a request can end, and the points that this is.
ENDS: dict[str, tuple[BaseException | None, int]] = {
    "fine": (None, 0),
    "a corrupt body": (corrupt("x"), 0),
    "a conflict": (ConflictError("x"), 0),
    "no answer": (UnavailableError("x"), 2),
    "denied": (AccessError("x"), 1),
    "a fault of ours": (KeyError("x"), 0),
    "cancelled": (asyncio.CancelledError(), 0),
}
NOTHING_LEARNT = ("a fault of ours", "cancelled")


class BreakerMachine(RuleBasedStateMachine):
    """Requests that start, end and are cancelled in any order."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = Clock(100.0)
        endpoint = Endpoint(
            100, BreakerOptions(threshold=4, silence_s=3600.0, probe_s=1e9), clock=self.clock
        )
        self.breaker = endpoint.breaker
        self.held = Held()
        self.store = guarded(self.held, endpoint)
        self.out: list[tuple[asyncio.Task[bytes | None], asyncio.Future[None], bool]] = []
        self.points = 0

    def turn(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def start(self) -> None:
        was_open = self.breaker.is_open
        due = self.breaker.pause_s == 0
        probing = any(probe for _, _, probe in self.out)
        asked = len(self.held.waiting)
        task = self.loop.create_task(self.store.get("a", max_bytes=1))
        self.turn()
        admitted = len(self.held.waiting) > asked
        assert admitted == (not was_open or (due and not probing))
        if admitted:
            self.out.append((task, self.held.waiting[-1], was_open))
        else:
            assert isinstance(task.exception(), UnavailableError)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), how=st.sampled_from(list(ENDS)))
    def end(self, data: st.DataObject, how: str) -> None:
        at = data.draw(st.integers(0, len(self.out) - 1))
        task, future, probe = self.out.pop(at)
        was_open, pause_s = self.breaker.is_open, self.breaker.pause_s
        error, points = ENDS[how]
        if how == "cancelled":
            task.cancel()
        elif error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        self.turn()
        assert task.cancelled() if how == "cancelled" else task.exception() is error
        if how in NOTHING_LEARNT:
            assert (self.breaker.is_open, self.breaker.pause_s) == (was_open, pause_s)
        elif points == 0:
            self.points = 0
            assert not self.breaker.is_open
            # Whoever was probing is an ordinary request now.
            self.out = [(task, future, False) for task, future, _ in self.out]
        else:
            self.points += points
            if was_open and not probe:
                assert (self.breaker.is_open, self.breaker.pause_s) == (was_open, pause_s)
            else:
                assert self.breaker.is_open == (was_open or self.points >= 4)
                assert (self.breaker.pause_s > 0) == self.breaker.is_open

    @rule()
    def a_probe_is_due(self) -> None:
        while not self.breaker.is_open:
            self.breaker.failed(self.breaker.admit(), UnavailableError("x"))
            self.points += 2
        self.clock.now_s += 40

    @rule(seconds=st.sampled_from([0.125, 1.0, 40.0]))  # exact in binary, as pauses are
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def one_probe(self) -> None:
        if hasattr(self, "out"):
            assert sum(probe for _, _, probe in self.out) <= 1
            assert self.breaker.pause_s <= 30

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task, _, _ in self.out:
                task.cancel()
            self.turn()
            self.loop.close()


BreakerMachine.TestCase.settings = hypothesis_settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestBreakerMachine = BreakerMachine.TestCase


class PlacesMachine(RuleBasedStateMachine):
    """Requests that come, wait, are cancelled and end, in any order."""

    @initialize(places=st.integers(1, 5))
    def begin(self, places: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.most = places
        self.places = Places(places)
        self.held = 0
        self.waiters: list[asyncio.Task[None]] = []

    def turn(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.waiters if task.done()]:
            self.waiters.remove(task)
            self.held += not task.cancelled()

    @rule()
    def come(self) -> None:
        self.waiters.append(self.loop.create_task(self.places.take()))
        self.turn()

    @precondition(lambda self: self.held)
    @rule()
    def end(self) -> None:
        self.held -= 1
        self.places.give_back()
        self.turn()

    @precondition(lambda self: self.waiters)
    @rule(granted_meanwhile=st.booleans())
    def cancel(self, granted_meanwhile: bool) -> None:
        if granted_meanwhile and self.held:
            self.held -= 1
            self.places.give_back()
        self.waiters[0].cancel()
        self.turn()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "places"):
            assert self.places.used == self.held <= self.most
            assert not self.waiters or self.held == self.most

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.waiters:
                task.cancel()
            self.turn()
            self.loop.close()


PlacesMachine.TestCase.settings = hypothesis_settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
TestPlacesMachine = PlacesMachine.TestCase

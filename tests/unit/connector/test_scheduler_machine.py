# SPDX-License-Identifier: Apache-2.0
"""The scheduler half in any order of events that vLLM's scheduler can bring about.

The machine plays vLLM 0.32: it asks and allocates as ``Scheduler.schedule`` does, keeps the
device's encoder cache, and has steps in flight. What must hold whatever happens:

* a request without pixels is scheduled only when every embedding it needs is granted;
* a load is ordered for what was granted and allocated, and for nothing else, from an open
  file and with the rows of the request;
* no file is let go of while a step that reads it can be running, or twice;
* nobody waits longer than allowed;
* in the end nothing is held open and nothing is remembered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3ec.connector.item_tracker import FETCHING, LEASE_S
from s3ec.connector.messages import StepPlan
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.prefetch import FetchOutcome, Priority
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    World,
    feature,
    has_no_pixels,
    identifier_of,
    key_of,
    request,
)

TEXTS = "abc"
SPACING = 60
features = st.tuples(
    st.sampled_from(TEXTS), st.sampled_from([ROWS, ROWS, ROWS, ROWS + 1]), st.booleans()
)
often = st.sampled_from([True, True, True, True, False])
seldom = st.sampled_from([False, False, False, False, True])


@dataclass(eq=False)
class Running:
    """A request as vLLM knows it."""

    it: Any
    computed: int = 0
    spent_s: float = 0.0
    since_s: float | None = None

    @property
    def is_bare(self) -> bool:
        return any(has_no_pixels(each) for each in self.it.mm_features)

    @property
    def end(self) -> int:
        last = self.it.mm_features[-1].mm_position
        return int(last.offset + last.length)


class HalfMachine(RuleBasedStateMachine):
    @initialize(
        producer=st.booleans(),
        ranks=st.integers(1, 2),
        steps_in_flight=st.integers(1, 3),
    )
    def begin(self, producer: bool, ranks: int, steps_in_flight: int) -> None:
        """Make an engine."""
        self.world = World(producer=producer, ranks=ranks, steps_in_flight=steps_in_flight)
        self.half = self.world.half
        self.live = self.world.prefetcher.live
        self.requests: list[Running] = []
        self.device: dict[str, int] = {}
        self.in_flight: deque[tuple[StepPlan, set[int]]] = deque()  # and the ranks that reported
        self.failed: set[str] = set()  # vLLM is told at the end of the pass
        self.carried: dict[str, int] = {}  # granted and allocated, not yet in a plan
        self.number = 0
        self.limit_s = 2.0
        self.world.stock(*TEXTS)

    # -- the world around ---------------------------------------------------------------------

    @rule()
    def somebody_stores(self) -> None:
        self.world.stock(*TEXTS)

    @rule(text=st.sampled_from(TEXTS))
    def the_index_forgets(self, text: str) -> None:
        self.world.index.mark_missing(key_of(identifier_of(text)))

    @rule(text=st.sampled_from(TEXTS))
    def the_tier_holds(self, text: str) -> None:
        # Each request may wait as long again for this node's disk.
        self.limit_s = 4.0
        self.world.local.add(key_of(identifier_of(text)))

    @rule(text=st.sampled_from(TEXTS))
    def it_becomes_a_resident(self, text: str) -> None:
        self.world.make_resident(text)

    @rule(text=st.sampled_from(TEXTS))
    def a_sweep_finds_it_evicted(self, text: str) -> None:
        self.world.prefetcher.resident.pop(key_of(identifier_of(text)).digest, None)

    @rule(down=st.booleans())
    def the_breaker(self, down: bool) -> None:
        self.world.store.is_open = down

    @rule(seconds=st.sampled_from([0.1, 0.7, 1.1, 6.0, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now_s += seconds

    @precondition(lambda self: self.world.prefetcher.open)
    @rule(data=st.data(), fine=often, failure=st.sampled_from(list(FetchOutcome)))
    def a_fetch_ends(self, data: st.DataObject, fine: bool, failure: FetchOutcome) -> None:
        identifier = data.draw(st.sampled_from(sorted(self.world.prefetcher.open)))
        outcome = FetchOutcome.READY if fine else failure
        self.world.prefetcher.finish(identifier, outcome, holds=ROWS)

    @precondition(lambda self: self.world.prefetcher.open)
    @rule(data=st.data())
    def a_fetch_goes_on_to_home(self, data: st.DataObject) -> None:
        prefetcher = self.world.prefetcher
        prefetcher.far.append(prefetcher.open[data.draw(st.sampled_from(sorted(prefetcher.open)))])

    @rule()
    def all_fetches_end_well(self) -> None:
        for identifier in sorted(self.world.prefetcher.open):
            self.world.prefetcher.finish(identifier, holds=ROWS)

    # -- the ranks -----------------------------------------------------------------------------

    def retire(self) -> None:
        """The oldest step ends."""
        self.in_flight.popleft()

    # -- requests ------------------------------------------------------------------------------

    @rule(wanted=st.lists(features, min_size=1, max_size=4))
    def a_request_arrives(self, wanted: list[tuple[str, int, bool]]) -> None:
        self.number += 1
        items = (
            feature(text, SPACING * place, rows=rows, pixels=pixels)
            for place, (text, rows, pixels) in enumerate(wanted)
        )
        self.requests.append(Running(request(str(self.number), *items)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.requests)))

    def end(self, running: Running) -> None:
        self.requests.remove(running)
        self.half.request_finished(running.it)

    # -- one pass of the scheduler -------------------------------------------------------------

    @rule()
    def schedule_nothing(self) -> None:
        """A pass of a full engine, in which vLLM asks about nobody: no wait goes on."""
        self.make_room()
        for running in self.requests:
            self.does_not_wait(running)
        self.in_flight.append((self.half.build_connector_meta([], scheduled_tokens=0), set()))

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        self.make_room()
        self.allocated: set[str] = set()
        tokens = 0
        for running in data.draw(st.permutations(self.requests)):
            tokens += self.schedule_one(running, data)
        self.close_pass(data, tokens)

    @rule(
        data=st.data(),
        arrivals=st.lists(st.lists(features, min_size=1, max_size=4), max_size=3),
        fetched=often,
        seconds=st.sampled_from([0.0, 0.0, 0.7, 2.1]),
    )
    def a_busy_pass(
        self,
        data: st.DataObject,
        arrivals: list[list[tuple[str, int, bool]]],
        fetched: bool,
        seconds: float,
    ) -> None:
        """What happens most of the time, in one rule, so that runs go deep."""
        self.world.clock.now_s += seconds
        for wanted in arrivals:
            self.a_request_arrives(wanted)
        self.schedule(data)
        if fetched:
            self.all_fetches_end_well()
            self.schedule(data)
        if data.draw(st.booleans()):
            self.a_rank_reports(0)

    def make_room(self) -> None:
        """vLLM schedules the next step only when its queue of steps has room."""
        while len(self.in_flight) >= self.world.role.steps_in_flight:
            self.retire()

    def ask(self, running: Running) -> bool:
        now = self.world.clock.now_s
        if running.since_s is not None:
            # A request may wait for one source after the other, 2 s each. Of a clock that jumps it
            # notices the end of the first one only.
            running.spent_s += min(now - running.since_s, 2.0)
        if self.half.ensure_cache_available(running.it, running.computed):
            self.does_not_wait(running)
            return True
        limit_s = NO_PIXELS_WAIT_S if running.is_bare else self.limit_s
        self.failed |= self.half.take_unavailable_requests()
        assert running.spent_s < limit_s or running.it.request_id in self.failed
        running.since_s = now
        return False

    def does_not_wait(self, running: Running) -> None:
        running.spent_s = min(running.spent_s, 2.0)
        running.since_s = None

    def schedule_one(self, running: Running, data: st.DataObject) -> int:
        if not self.ask(running):
            return 0
        start = running.computed
        stop = min(start + data.draw(st.integers(1, WINDOW)), max(running.end, start + 1))
        taken: dict[int, bool] = {}
        rows_of: dict[str, int] = {}
        for index, each in enumerate(running.it.mm_features):
            position = each.mm_position
            if position.offset + position.length <= start or position.offset >= stop:
                continue
            rows = position.get_num_embeds()
            held = rows_of.get(each.identifier, self.device.get(each.identifier, rows))
            if held != rows:  # vLLM refuses such a request
                self.end(running)
                return 0
            if each.identifier in rows_of or each.identifier in self.device:
                continue
            if data.draw(seldom):  # no room in the device's cache
                stop = max(start, position.offset)
                break
            granted = self.half.has_cache_item(each.identifier)
            assert granted or not has_no_pixels(each), "the encoder would run on nothing"
            taken[index] = granted
            rows_of[each.identifier] = rows
        if stop == start or data.draw(seldom):  # no room in the KV cache
            return 0
        self.allocate(running, taken, rows_of)
        running.computed = stop
        if data.draw(seldom):  # preempted in the same pass, by a more urgent one
            running.computed = 0
            return 0
        if stop >= running.end:
            self.end(running)
        return stop - start

    def allocate(self, running: Running, taken: dict[int, bool], rows_of: dict[str, int]) -> None:
        for index, granted in taken.items():
            identifier = running.it.mm_features[index].identifier
            self.device[identifier] = rows_of[identifier]
            self.allocated.add(identifier)
            self.half.update_state_after_alloc(running.it, index)
            if granted:
                self.carried[identifier] = rows_of[identifier]

    def close_pass(self, data: st.DataObject, tokens: int) -> None:
        evictable = sorted(set(self.device) - self.allocated)
        freed = data.draw(st.lists(st.sampled_from(evictable), unique=True)) if evictable else []
        for identifier in freed:
            del self.device[identifier]
            self.carried.pop(identifier, None)
        if data.draw(seldom):  # reset without a word, as for new weights
            self.device = {name: self.device[name] for name in self.device if name in self.carried}
        plan = self.half.build_connector_meta(freed, scheduled_tokens=tokens)
        self.in_flight.append((plan, set()))
        if tokens:
            assert {load.identifier: load.shape.rows for load in plan.loads} == self.carried
            self.carried = {}
        else:
            assert plan.loads == []
        taken = self.failed | self.half.take_unavailable_requests()
        self.failed = set()
        for running in [each for each in self.requests if each.it.request_id in taken]:
            assert running.is_bare
            self.end(running)

    @rule(rank=st.integers(0, 1))
    def a_rank_reports(self, rank: int) -> None:
        """Others still read; the step ends with the last of them."""
        # A step that has ended is not in flight any more.
        plan, reported = next(iter(self.in_flight), (StepPlan(), {rank}))
        if rank >= self.world.role.ranks or rank in reported:
            return
        reported.add(rank)
        if len(reported) == self.world.role.ranks:
            self.retire()
        if plan.loads:
            self.world.report(plan.step, rank)

    @precondition(lambda self: self.in_flight)
    @rule()
    def a_step_ends_unreported(self) -> None:
        self.retire()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def every_step_in_flight_can_read_its_files(self) -> None:
        for plan, _ in getattr(self, "in_flight", ()):
            for load in plan.loads:
                assert load.path in self.live, load

    @invariant()
    def only_living_requests_wait_and_only_for_what_can_come(self) -> None:
        if not hasattr(self, "world"):
            return
        names = {running.it.request_id for running in self.requests}
        for name, identifiers in self.half.tracker.waiting.items():
            assert name in names
            assert identifiers <= self.half.tracker.items.keys()

    @invariant()
    def what_nobody_waits_for_has_no_place_in_the_queue(self) -> None:
        if not hasattr(self, "world"):
            return
        tracker = self.half.tracker
        wanted = set().union(*tracker.waiting.values())
        for identifier, item in tracker.items.items():
            if item.state is FETCHING and identifier not in wanted:
                assert item.priority is Priority.FORGOTTEN

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for running in list(self.requests):
            self.end(running)
        self.half.take_unavailable_requests()
        for identifier in list(self.world.prefetcher.open):
            self.world.prefetcher.finish(identifier)
        for _ in range(6):
            self.world.clock.now_s += LEASE_S + 1
            plan = self.half.build_connector_meta(list(self.half.on_device), scheduled_tokens=1)
            self.in_flight.append((plan, set()))
        while self.in_flight:
            self.retire()
        assert not self.live
        assert self.world.leftovers() == []


HalfMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
TestHalfMachine = pytest.mark.slow(HalfMachine.TestCase)

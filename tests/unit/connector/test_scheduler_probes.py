# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: what no index knows is asked for once, and awaited for a moment."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.item_tracker import LEASE_S, RETRY_AFTER_S
from s3ec.connector.request_waits import MOST_IN_VAIN, NO_PIXELS_WAIT_S, VAIN_REST_S
from s3ec.connector.waiting import EngineLoad, FetchQueue, WaitPolicy
from s3ec.encode_costs import EncodeCosts
from s3ec.index.missing import NEGATIVE_TTL_S
from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    World,
    bare,
    feature,
    identifier_of,
    request,
)

PROBE_S = 0.125  # its sums are exact
PLACES = 8


def probing(**more: Any) -> World:
    return World(**({"probe_s": PROBE_S, "probes": PLACES} | more))


def weighing(encode_s: float | None) -> World:
    """Waits are weighed; ``encode_s`` is what one picture takes, where that is known."""
    learned = None if encode_s is None else {f"image:{ROWS.bit_length()}": encode_s / ROWS}
    return probing(policy=WaitPolicy(EncodeCosts(learned), EngineLoad(2), FetchQueue(16)))


def probe_in_vain(world: World, text: str) -> None:
    """A request waits its time, and the bucket does not answer."""
    asker = world.deferred(request(f"for {text}", feature(text)))
    world.clock.now_s += PROBE_S
    assert world.run(asker) == [False]
    world.end(asker)


@pytest.fixture
def world() -> World:
    return probing()


def policy_of(world: World) -> WaitPolicy:
    assert world.policy is not None
    return world.policy


# -- one question, and its answer ------------------------------------------------------------------


def test_what_another_node_has_just_stored_is_found(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    assert world.wanted == [identifier_of("a")]
    world.clock.now_s += PROBE_S / 2
    world.finish("a")
    assert world.run(asker) == [True]
    assert world.counters.get("probe.made") == world.counters.get("probe.found") == 1
    assert world.counters.get("deferred_seconds") == pytest.approx(PROBE_S / 2)


def test_what_is_not_there_lets_the_request_go_and_is_not_asked_for_again(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", FetchOutcome.ABSENT)
    assert world.run(asker) == [False]
    world.step(freed=["a"])
    world.clock.now_s += NEGATIVE_TTL_S - 1
    assert world.run(request("s", feature("a"))) == [False]
    world.step(freed=["a"])
    assert world.wanted == [identifier_of("a")]
    assert world.counters.get("index.forgotten") == 0
    assert world.counters.get("probe.found") == 0
    world.clock.now_s += 1
    assert not world.ask(request("t", feature("a")))


def test_what_the_index_learns_after_that_is_fetched_at_once(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", FetchOutcome.ABSENT)
    world.run(asker)
    world.step(freed=["a"])
    world.stock("a")
    later = world.deferred(request("s", feature("a")))
    world.finish("a")
    assert world.run(later) == [True]
    assert world.counters.get("probe.made") == 1


@pytest.mark.parametrize("outcome", [FetchOutcome.MISMATCH, FetchOutcome.CORRUPT])
def test_what_is_of_no_use_is_not_asked_for_again_either(
    world: World, outcome: FetchOutcome
) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", outcome)
    assert world.run(asker) == [False]
    world.step(freed=["a"])
    world.clock.now_s += NEGATIVE_TTL_S - 1
    world.step()
    assert world.run(request("s", feature("a"))) == [False]


def test_no_answer_is_no_answer(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", FetchOutcome.UNAVAILABLE)
    assert world.run(asker) == [False]
    world.step(freed=["a"])
    assert world.run(request("s", feature("a"))) == [False]
    world.clock.now_s += RETRY_AFTER_S + 1
    world.step(freed=["a"])
    assert not world.ask(request("t", feature("a")))


def test_the_wait_is_bounded_and_a_late_answer_is_for_others(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.clock.now_s += PROBE_S - 0.01
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += 0.01
    assert world.run(asker) == [False]
    assert world.counters.get("defer_timeouts") == 1
    world.step(freed=["a"])
    world.finish("a", seconds=3)
    assert world.run(request("s", feature("a"))) == [True]


def test_it_is_no_longer_than_other_waits() -> None:
    world = probing(defer_timeout_s=0.05)
    asker = world.deferred(request("r", feature("a")))
    world.clock.now_s += 0.06
    assert world.run(asker) == [False]


# -- where nothing is asked ------------------------------------------------------------------------


def test_only_what_is_needed_now_is_asked_for(world: World) -> None:
    asker = request("r", feature("a"), feature("later", WINDOW))
    world.deferred(asker)
    assert world.wanted == [identifier_of("a")]


@pytest.mark.parametrize("state", ["the store is down", "the disk hangs"])
def test_nothing_is_asked_of_what_does_not_answer(world: World, state: str) -> None:
    world.store.is_open = state == "the store is down"
    world.disk.hangs = state == "the disk hangs"
    assert world.run(request("r", feature("a"))) == [False]
    world.step()
    assert world.wanted == []


def test_a_store_that_goes_down_ends_the_wait(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    world.store.is_open = True
    assert world.run(asker) == [False]


@pytest.mark.parametrize("role", [{"defer_timeout_s": 0.0}, {"can_load": False}, {"probe_s": 0.0}])
def test_nothing_is_asked_where_nobody_would_wait(role: dict[str, Any]) -> None:
    world = probing(**role)
    assert world.run(request("r", feature("a"))) == [False]
    world.step()
    assert world.wanted == []


def test_only_so_many_are_under_way_and_the_others_are_misses(world: World) -> None:
    texts = [str(number) for number in range(PLACES + 1)]
    asker = world.deferred(request("r", *(feature(text, 5 * n) for n, text in enumerate(texts))))
    assert world.wanted == list(map(identifier_of, texts[:PLACES]))
    assert world.run(request("s", feature("other"))) == [False]
    assert not world.ask(asker)
    world.step(freed=["other"])
    for text in texts[:PLACES]:
        world.finish(text)
    assert not world.ask(request("t", feature("other")))  # they are not remembered
    world.clock.now_s += PROBE_S
    assert world.run(asker) == [True] * PLACES + [False]


def test_a_request_that_has_waited_its_time_asks_for_nothing_more(world: World) -> None:
    asker = request("r", feature("a"), feature("b", WINDOW))
    world.deferred(asker)
    world.clock.now_s += PROBE_S
    assert world.run(asker, 0) == [False]
    world.step()
    assert world.ask(asker, WINDOW - 1)
    assert world.wanted == [identifier_of("a")]


# -- a slow store ----------------------------------------------------------------------------------


def test_after_some_waits_in_vain_nothing_is_asked_for_a_while(world: World) -> None:
    for number in range(MOST_IN_VAIN):
        probe_in_vain(world, f"slow {number}")
    assert world.run(request("r", feature("a"))) == [False]
    world.step(freed=["a"])
    assert len(world.wanted) == MOST_IN_VAIN
    world.stock("known")
    assert not world.ask(request("s", feature("known")))  # that is another matter
    world.clock.now_s += VAIN_REST_S
    probe_in_vain(world, "one more")
    assert world.run(request("t", feature("b"))) == [False]


@pytest.mark.parametrize("outcome", [FetchOutcome.READY, FetchOutcome.ABSENT])
def test_any_answer_in_time_says_that_the_store_is_quick(
    world: World, outcome: FetchOutcome
) -> None:
    for number in range(MOST_IN_VAIN - 1):
        probe_in_vain(world, f"slow {number}")
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", outcome, seconds=PROBE_S / 2)
    world.run(asker)
    probe_in_vain(world, "slow again")
    assert not world.ask(request("s", feature("b")))


def test_a_late_answer_does_not(world: World) -> None:
    for number in range(MOST_IN_VAIN):
        probe_in_vain(world, f"slow {number}")
    world.finish("slow 0", FetchOutcome.ABSENT, seconds=2 * PROBE_S)
    assert world.run(request("r", feature("a"))) == [False]


# -- beside what is known --------------------------------------------------------------------------


def test_what_is_known_is_awaited_by_its_own_rules(world: World) -> None:
    world.stock("known")
    asker = world.deferred(request("r", feature("known"), feature("a", 10)))
    world.clock.now_s += PROBE_S
    assert not world.ask(asker)
    world.step()
    assert world.prefetcher.demoted == [identifier_of("a")]
    world.finish("known")
    assert world.run(asker) == [True, False]
    assert world.counters.get("deferred_seconds") == pytest.approx(PROBE_S)  # it waited for two


def test_where_the_known_came_first_the_wait_ends_in_its_own_time(world: World) -> None:
    world.stock("known")
    asker = world.deferred(request("r", feature("known"), feature("a", 10)))
    world.clock.now_s += PROBE_S / 2
    world.finish("known")
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += PROBE_S / 2
    assert world.run(asker) == [True, False]


def test_where_the_known_is_encoded_nothing_else_is_awaited() -> None:
    world = weighing(1.0)
    policy = policy_of(world)
    for _ in range(20):
        policy.times.of("bucket", ROWS).add(2.0)
    world.stock("known")
    assert world.run(request("r", feature("known"), feature("a", 10))) == [False, False]


def test_who_names_it_meanwhile_waits_as_for_what_is_named(world: World) -> None:
    world.deferred(request("r", feature("a")))
    naming = request("s", feature("a"))
    naming.ec_transfer_params = {identifier_of("a"): {}}
    world.deferred(naming)
    world.clock.now_s += 1.0
    assert not world.ask(naming)
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(naming)


def test_who_waited_for_the_probe_is_looked_at_again_when_another_one_names_it(
    world: World,
) -> None:
    first = world.deferred(request("first", feature("a")))
    assert "first" in world.half.answers.requests
    namer = request("namer", feature("a"))
    namer.ec_transfer_params = {identifier_of("a"): {}}
    assert not world.ask(namer)
    # Its answer was for a probe, and what it waits for is none any more.
    assert "first" not in world.half.answers.requests
    assert not world.ask(first)


def test_who_has_no_pixels_waits_as_long_as_ever(world: World) -> None:
    asker = world.deferred(request("r", feature("a")))
    lone = request("s", bare("a"))
    assert not world.ask(asker)
    world.deferred(lone)
    world.clock.now_s += PROBE_S
    assert world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    world.deferred(lone)
    assert world.wanted == 2 * [identifier_of("a")]
    world.clock.now_s += NO_PIXELS_WAIT_S - 2 * PROBE_S
    assert not world.ask(lone)


# -- waits that are weighed against encoding -------------------------------------------------------


@pytest.mark.parametrize(
    ("encode_s", "asked"), [(None, False), (PROBE_S, False), (1.1 * PROBE_S, True)]
)
def test_one_in_vain_must_not_more_than_double_what_encoding_takes(
    encode_s: float | None, asked: bool
) -> None:
    world = weighing(encode_s)
    assert world.ask(request("r", feature("a"))) is not asked
    world.step()
    assert world.wanted == ([identifier_of("a")] if asked else [])


def test_what_is_not_there_teaches_nothing_about_fetches_and_gives_its_place_back() -> None:
    world = weighing(10.0)
    policy = policy_of(world)
    for number in range(3):
        asker = world.deferred(request(f"r{number}", feature(number)))
        assert not policy.waiting
        world.clock.now_s += PROBE_S / 2
        world.finish(number, FetchOutcome.ABSENT, seconds=PROBE_S / 2)
        assert world.run(asker) == [False]
        world.end(asker)
    assert policy.times.of("bucket", ROWS).late_s == 0.0
    assert policy.queue.silent_s(world.clock.now_s + 100) == 0.0
    assert world.counters.get("waits_declined") == 0


# -- the end ---------------------------------------------------------------------------------------


def test_nothing_is_left_behind(world: World) -> None:
    askers = [request(text, feature(text)) for text in "abc"]
    for asker in askers:
        world.deferred(asker)
    world.finish("a")
    world.finish("b", FetchOutcome.ABSENT)
    world.clock.now_s += PROBE_S
    for asker in askers:
        world.run(asker)
        world.end(asker)
    world.step()
    world.finish("c", FetchOutcome.UNAVAILABLE)
    for _ in range(4):
        world.clock.now_s += LEASE_S
        world.step(freed="abc")
    assert world.leftovers() == []

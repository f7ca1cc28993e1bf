# SPDX-License-Identifier: Apache-2.0
"""Whether waiting pays: the arithmetic, and the states of a request."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from s3ec.connector.messages import Encode, EncodeTime, WorkerReport
from s3ec.connector.waiting import (
    IDLE_PAUSE_S,
    MOST_DECISIONS,
    EngineLoad,
    Fetching,
    FetchQueue,
    FetchTimes,
    Lacking,
    Missing,
    WaitPolicy,
    is_waiting_cheaper,
)
from s3ec.encode_costs import EncodeCosts
from tests.unit.connector.scheduling import World, feature, identifier_of, request

ROWS = 256
SMALL = 4  # rows of the features that ``scheduling`` makes
PAUSE_S = 0.0012


def times(median_s: float, *, sigma: float = 0.7, count: int = 128, seed: int = 1) -> FetchTimes:
    source = random.Random(seed)
    made = FetchTimes()
    for _ in range(count):
        made.add(median_s * math.exp(sigma * source.gauss(0, 1)))
    return made


# -- how long fetches take -------------------------------------------------------------------


def test_share_that_takes_longer_never_rises_and_ends_near_nothing() -> None:
    for count in (0, 1, 2, 3, 7, 128, 300):
        one = times(0.03, count=count)
        shares = [one.later_than(0.001 * step) for step in range(-5, 2000)]
        assert shares[0] == 1.0
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert all(later <= sooner for sooner, later in itertools.pairwise(shares))
        assert shares[-1] < 0.05


def test_old_fetches_are_forgotten() -> None:
    one = times(0.03)
    for _ in range(128):
        one.add(1.0)
    assert one.later_than(0.5) == 1.0
    assert one.mean_s == pytest.approx(1.0)


# -- one decision ----------------------------------------------------------------------------


def test_waits_where_a_fetch_is_short_beside_the_encoder() -> None:
    assert is_waiting_cheaper([Missing(1, 0.0, times(0.03))], 1.0, PAUSE_S)


def test_encodes_where_a_fetch_is_long_beside_the_encoder() -> None:
    assert not is_waiting_cheaper([Missing(1, 0.0, times(0.08))], 0.003, PAUSE_S)


def test_what_costs_nothing_is_not_waited_for() -> None:
    assert not is_waiting_cheaper([Missing(1, 0.0, times(0.001))], 0.0, PAUSE_S)
    assert not is_waiting_cheaper([], 1.0, PAUSE_S)


def test_a_dearer_encoder_never_ends_a_wait() -> None:
    for median_s in (0.0005, 0.005, 0.03, 0.08):
        for count in (1, 4, 20):
            missing = [Missing(count, 0.01, times(median_s))]
            answers = [is_waiting_cheaper(missing, 1e-4 * 1.3**step, PAUSE_S) for step in range(50)]
            assert answers == sorted(answers)
            assert answers[-1]


def test_a_place_far_back_in_the_queue_is_not_worth_the_wait() -> None:
    fetches = times(0.005)
    assert is_waiting_cheaper([Missing(1, 0.0, fetches)], 0.1, PAUSE_S)
    assert not is_waiting_cheaper([Missing(1, -3.0, fetches)], 0.1, PAUSE_S)


def test_stragglers_are_given_up_once_they_have_taken_unusually_long() -> None:
    fetches = times(0.03)
    assert is_waiting_cheaper([Missing(1, 0.0, fetches)], 0.06, PAUSE_S)
    assert not is_waiting_cheaper([Missing(1, 0.5, fetches)], 0.06, PAUSE_S)


# -- whom an encode delays -------------------------------------------------------------------


def run_passes(load: EngineLoad, *, asked: int, deferred: int, prefill: bool, now: float) -> float:
    for _ in range(400):
        for _ in range(asked):
            load.asked()
        for _ in range(deferred):
            load.deferred()
        now += 0.01
        load.end_pass(now, has_prefill=prefill, tokens=1)
    return now


def test_encoding_costs_its_own_time_where_a_request_is_alone() -> None:
    load = EngineLoad(2)
    run_passes(load, asked=1, deferred=1, prefill=False, now=0.0)
    assert load.price == 1.0


def test_encoding_is_dearer_the_more_requests_it_delays() -> None:
    idle, busy = EngineLoad(2), EngineLoad(2)
    run_passes(idle, asked=3, deferred=2, prefill=False, now=0.0)
    now = run_passes(busy, asked=30, deferred=0, prefill=False, now=0.0)
    run_passes(busy, asked=30, deferred=0, prefill=True, now=now)
    assert 1.0 < idle.price < busy.price
    assert busy.price < (1 + 500) / (1 - 0.97) + 1


def test_those_that_wait_for_fetches_are_not_delayed_by_an_encode() -> None:
    working, waiting = EngineLoad(1), EngineLoad(1)
    run_passes(working, asked=20, deferred=0, prefill=False, now=0.0)
    run_passes(waiting, asked=20, deferred=20, prefill=False, now=0.0)
    assert waiting.price < working.price


def test_what_the_front_end_takes_and_its_clock_do_not_count_as_delay() -> None:
    near, far = EngineLoad(1), EngineLoad(1)
    now = 0.0
    for number in range(300):
        near.asked(delay_s=0.01 * (number % 2))
        far.asked(delay_s=3600.0 + 0.01 * (number % 2))
        for load in (near, far):
            load.asked()
            load.end_pass(now, has_prefill=True, tokens=300)
        now += 0.02
    assert far.price == pytest.approx(near.price, rel=0.02)


def test_time_without_requests_is_no_time_of_a_step() -> None:
    load = EngineLoad(1)
    now = 0.0
    for _ in range(100):
        for prefill in (True, False, False):
            now += 0.01
            load.asked()
            load.end_pass(now, has_prefill=prefill, tokens=1)
        load.end_request(now + 0.01)
        now += 1.0
    assert load.pause_s == pytest.approx(0.01, rel=0.05)


def test_pause_is_that_of_the_steps_and_short_where_none_runs() -> None:
    load = EngineLoad(1)
    assert load.pause_s == IDLE_PAUSE_S
    now = run_passes(load, asked=1, deferred=0, prefill=True, now=0.0)
    assert load.pause_s == pytest.approx(0.01, rel=0.05)
    load.end_pass(now + 0.01, has_prefill=False, tokens=0)
    assert load.pause_s == IDLE_PAUSE_S


# -- a request -------------------------------------------------------------------------------


PLACES = 16


def make(costs: EncodeCosts, *, fetch_s: float, sigma: float = 0.7) -> WaitPolicy:
    made = WaitPolicy(costs, EngineLoad(2), FetchQueue(PLACES))
    source = random.Random(5)
    for _ in range(128):
        made.times.of("bucket", ROWS).add(fetch_s * math.exp(sigma * source.gauss(0, 1)))
    return made


def policy(*, encode_s: float, fetch_s: float) -> WaitPolicy:
    return make(EncodeCosts({"image:9": encode_s / ROWS}), fetch_s=fetch_s)


def want(one: WaitPolicy, *, began_s: float = 0.0) -> Lacking:
    return Lacking("image", ROWS, "bucket", Fetching(one.queue.order(began_s), began_s))


def decide(one: WaitPolicy, request_id: str, wants: list[Lacking], now: float) -> bool:
    """In a pass of its own."""
    one.end_pass(now, has_prefill=False, tokens=0)
    return one.waits(request_id, lambda: wants, now)


def test_request_waits_while_it_pays_then_doubts_then_encodes() -> None:
    one = policy(encode_s=0.06, fetch_s=0.03)
    wants = [want(one)]
    assert decide(one, "a", wants, 0.0)
    assert list(one.waiting) == ["a"]
    times_s = [0.001 * step for step in range(1, 2000)]
    waited = next(now for now in times_s if not decide(one, "a", wants, now))
    # As long as most fetches end, and no longer than twice what the encoder takes.
    assert 0.03 < waited < 0.12 + 0.002
    assert not one.waiting
    assert not decide(one, "a", wants, waited + 0.01)


def test_time_in_which_vllm_does_not_ask_ends_no_wait() -> None:
    one = policy(encode_s=0.06, fetch_s=0.03)
    assert decide(one, "a", [want(one)], 0.0)
    assert one.due(99.0, {"a": 0.001}) == []
    # Fetched once more, since its lease has ended.
    wants = [want(one, began_s=100.0)]
    one.resume("a", pause_s=99.999)
    assert decide(one, "a", wants, 100.0)
    times_s = [100.0 + 0.001 * step for step in range(1, 2000)]
    waited = next(now for now in times_s if not decide(one, "a", wants, now)) - 100.0
    assert 0.03 < waited < 0.12 + 0.002


def test_who_was_not_asked_about_in_the_last_pass_is_due_last() -> None:
    one = policy(encode_s=1.0, fetch_s=0.03)
    for number in range(3):
        assert decide(one, str(number), [want(one)], 0.001 * number)
    assert one.due(2.0, {"0": 1.0}) == ["1", "2", "0"]
    # The second was asked about later than the first, so it stands before it in the queue.
    assert one.due(2.0, {"0": 1.0, "1": 1.5}) == ["2", "1", "0"]
    assert one.due(2.0, {}) == ["0", "1", "2"]


def test_each_turn_of_a_session_is_weighed_anew() -> None:
    one = policy(encode_s=0.06, fetch_s=0.03)

    def waits(now: float, wants: list[Lacking], features: int) -> bool:
        one.end_pass(now, has_prefill=False, tokens=0)
        return one.waits("a", lambda: wants, now, features=features)

    slow = [want(one)]
    assert waits(0.0, slow, 1)
    assert not waits(1.0, slow, 1)
    fresh = [want(one, began_s=2.0)]
    assert not waits(2.0, fresh, 1)
    assert waits(2.0, fresh, 2)


def test_cost_that_is_not_known_is_learned_by_encoding() -> None:
    one = make(EncodeCosts(), fetch_s=0.001)
    assert not decide(one, "a", [want(one)], 0.0)
    for _ in range(2):
        one.costs.add("image", ROWS, 0.1)
    assert decide(one, "b", [want(one)], 0.0)


@pytest.mark.parametrize(("encode_s", "anew"), [(0.1, 1), (1.0, 0)])
def test_an_old_cost_is_learned_anew_only_where_that_could_change_an_answer(
    encode_s: float, anew: int
) -> None:
    one = policy(encode_s=encode_s, fetch_s=0.03)
    # Ten minutes and 300 requests without an encode.
    declined = 0
    for number in range(400):
        declined += not decide(one, str(number), [want(one, began_s=2.0 * number)], 2.0 * number)
        one.queue.end(2.0 * number)
        one.end_request(str(number), 2.0 * number)
    assert declined == anew


def test_request_that_has_ended_is_forgotten() -> None:
    one = policy(encode_s=1.0, fetch_s=0.03)
    assert decide(one, "a", [want(one)], 0.0)
    one.end("a")
    one.end("never seen")
    assert not one.waiting


def test_what_stands_far_back_in_the_queue_is_encoded() -> None:
    one = policy(encode_s=0.5, fetch_s=0.1)
    first = want(one)
    for _ in range(400):
        one.queue.order(0.0)
    last = Lacking("image", ROWS, "bucket", Fetching(one.queue.order(0.0)))
    assert decide(one, "front", [first], 0.0)
    assert not decide(one, "behind", [last], 0.0)


def test_fetch_has_begun_once_enough_others_have_ended() -> None:
    queue = FetchQueue(2)
    numbers = [queue.order(0.0) for _ in range(4)]
    assert [queue.ahead(number) for number in numbers] == [0, 0, 1, 2]
    queue.end(1.0)
    assert [queue.ahead(number) for number in numbers] == [0, 0, 0, 1]


def test_nobody_waits_for_a_store_that_has_gone_silent() -> None:
    one = policy(encode_s=5.0, fetch_s=0.03)
    wants = [want(one) for _ in range(3)]
    assert decide(one, "a", wants[:1], 0.0)
    assert not decide(one, "b", [wants[2]], 5.0)
    one.queue.end(5.0)
    assert decide(one, "c", [want(one, began_s=5.0)], 5.0)


def test_two_fetches_without_an_answer_are_no_silence() -> None:
    queue = FetchQueue(PLACES)
    queue.order(0.0)
    queue.order(0.0)
    assert queue.silent_s(100.0) == 0.0
    queue.order(100.0)
    assert queue.silent_s(100.5) == 100.5


def test_only_so_many_are_decided_in_one_pass_and_the_others_go_on_waiting() -> None:
    one = policy(encode_s=0.001, fetch_s=0.1)
    asked = []

    def wants() -> list[Lacking]:
        asked.append(1)
        return [want(one)]

    answers = [one.waits(str(number), wants, 0.0) for number in range(MOST_DECISIONS + 10)]
    assert answers == [False] * MOST_DECISIONS + [True] * 10
    assert len(asked) == MOST_DECISIONS
    one.end_pass(0.1, has_prefill=False, tokens=0)
    assert not one.waits("x", wants, 0.1)


def test_no_wait_is_much_longer_than_the_encoder_would_have_taken() -> None:
    slow = make(EncodeCosts({"image:9": 0.1 / ROWS}), fetch_s=0.03, sigma=1.5)
    wants = [want(slow)]
    assert decide(slow, "a", wants, 0.0)
    times_s = [0.001 * step for step in range(1, 2000)]
    waited = next(now for now in times_s if not decide(slow, "a", wants, now))
    assert 0.19 < waited < 0.202


def test_a_wait_begins_only_where_it_clearly_pays_and_one_that_has_begun_goes_on() -> None:
    fetches = times(0.03)
    missing = [Missing(1, 0.0, fetches)]
    costs = [0.001 * step for step in range(1, 200)]
    begins = next(cost for cost in costs if is_waiting_cheaper(missing, cost, PAUSE_S, most=0.9))
    pays = next(cost for cost in costs if is_waiting_cheaper(missing, cost, PAUSE_S))
    assert begins > pays


def test_a_decision_to_wait_holds_for_a_share_of_what_it_costs_to_stop() -> None:
    one = policy(encode_s=1.0, fetch_s=0.03)
    assert decide(one, "a", [want(one)], 0.0)
    assert one.due(0.01, {}) == []
    assert one.due(0.06, {}) == ["a"]


def test_of_many_that_are_due_those_come_first_that_were_decided_first() -> None:
    one = policy(encode_s=1.0, fetch_s=0.03)
    for number in range(3 * MOST_DECISIONS):
        assert decide(one, str(number), [want(one)], 0.0001 * number)
    assert one.due(100.0, {}) == [str(number) for number in range(MOST_DECISIONS)]


# -- the scheduler half that asks it -----------------------------------------------------------


def world(*, encode_s: float = 0.06, fetch_s: float = 0.03, known: bool = True) -> World:
    return World(policy=learned(encode_s=encode_s, fetch_s=fetch_s, known=known))


def learned(*, encode_s: float = 0.06, fetch_s: float = 0.03, known: bool = True) -> WaitPolicy:
    costs = EncodeCosts({f"image:{SMALL.bit_length()}": encode_s / SMALL} if known else None)
    one = WaitPolicy(costs, EngineLoad(2), FetchQueue(PLACES))
    source = random.Random(5)
    for _ in range(128):
        one.times.of("bucket", SMALL).add(fetch_s * math.exp(0.7 * source.gauss(0, 1)))
    return one


def test_wait_that_goes_on_after_a_pause_is_decided_anew() -> None:
    """By a repeated answer too, which does not ask the policy."""
    one = learned()
    here = World(policy=one)
    here.stock("a")
    asker = here.deferred(request("r", feature("a")))
    here.step()  # nobody is asked about
    assert one.due(here.clock.now_s + 9.0, here.half.waits.paused) == []
    assert not here.ask(asker)
    here.step()
    assert one.due(here.clock.now_s + 9.0, here.half.waits.paused) == ["r"]


def test_request_is_encoded_at_once_where_the_encoder_is_cheap_and_the_fetch_goes_on() -> None:
    here = world(encode_s=0.001)
    here.stock("a")
    asker = request("r", feature("a"))
    assert here.ask(asker)
    assert here.schedule(asker) == [False]
    plan = here.step()
    assert here.wanted == [identifier_of("a")]
    assert plan.encodes == {identifier_of("a"): Encode("image", SMALL)}
    assert here.counters.get("waits_declined") == 1
    assert here.counters.get("deferred_requests") == 0
    here.finish("a")
    later = request("s", feature("b"))
    here.ask(later)
    here.half.request_finished(asker)
    here.half.request_finished(later)
    here.clock.now_s += 100
    here.step(freed=["a"])
    assert here.leftovers() == []


def test_request_waits_where_the_encoder_is_dear_and_gives_up_on_a_straggler_before_the_cap() -> (
    None
):
    here = world()
    here.stock("a", "b")
    asker = request("r", feature("a"), feature("b", 10))
    assert not here.ask(asker)
    here.step(tokens=0)
    here.finish("a", seconds=0.03)
    asked = 0
    while not here.ask(asker):
        here.clock.now_s += 0.001
        here.step(tokens=0)
        asked += 1
        assert asked < 1900, "waited until the cap"
    assert asked > 20
    assert here.schedule(asker) == [True, False]
    assert list(here.step().encodes) == [identifier_of("b")]


def test_request_without_pixels_waits_whatever_it_costs() -> None:
    here = world(encode_s=0.001)
    here.stock("a")
    asker = request("r", feature("a", pixels=False))
    assert not here.ask(asker)
    here.step(tokens=0)
    here.clock.now_s += 5
    assert not here.ask(asker)


def test_costs_are_learned_from_the_reports_of_workers() -> None:
    here = world(known=False)
    here.stock("a", "b")
    asker = request("r", feature("a"))
    assert here.ask(asker)  # once, so that the cost becomes known
    here.schedule(asker)
    here.step()
    for _ in range(12):
        here.half.update_connector_output(
            WorkerReport(encoded=[EncodeTime("image", 2, 2 * SMALL, 0.002)])
        )
    assert here.ask(request("s", feature("b")))
    assert here.counters.get("waits_declined") == 2


def test_many_that_wait_are_not_all_decided_anew_in_one_pass() -> None:
    here = world(encode_s=10.0)
    texts = [str(number) for number in range(200)]
    here.stock(*texts)
    askers = [request(text, feature(text)) for text in texts]
    assert not any(here.ask(asker) for asker in askers)
    here.step(tokens=0)
    assert not any(here.ask(asker) for asker in askers)
    here.step(tokens=0)
    for text in texts:
        here.finish(text, seconds=0.03)
    assert all(here.ask(asker) for asker in askers)


def test_hits_count_what_the_encoder_would_have_taken_once_that_is_known() -> None:
    here = World()
    here.bring("a", "b")
    assert here.run(request("r", feature("a"))) == [True]
    here.step()
    assert here.counters.get("encode.saved_seconds") == 0  # nobody knows
    report = WorkerReport(encoded=2 * [EncodeTime("image", 2, 2 * SMALL, 0.2)])
    here.half.update_connector_output(report)
    assert here.run(request("s", feature("b"))) == [True]
    assert here.counters.get("encode.saved_seconds") == pytest.approx(0.1)


def test_scheduler_tells_the_policy_how_busy_the_engine_is() -> None:
    policy = learned()
    here = World(policy=policy)
    here.clock.now_s += 2
    here.half.build_connector_meta((), scheduled_tokens=0)
    assert policy.load.price == 1
    for number in range(500):
        for other in range(20):
            here.ask(request(f"{number} {other}", feature(f"{other}")))
        here.clock.now_s += 0.01
        here.half.build_connector_meta((), scheduled_tokens=100)
    assert policy.load.price > 5
    here.clock.now_s += 60
    for _ in range(3):
        here.clock.now_s += 2
        here.half.build_connector_meta((), scheduled_tokens=0)
    assert policy.load.price == pytest.approx(1)

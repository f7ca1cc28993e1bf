# SPDX-License-Identifier: Apache-2.0
"""Whether waiting pays: the arithmetic, and the scheduler half that asks it."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from s3ec.connector.messages import Encode, EncodeTime, WorkerReport
from s3ec.connector.request_waits import MOST_IN_VAIN
from s3ec.connector.waiting import (
    PRIOR_FETCH_S,
    EngineLoad,
    FetchTimes,
    Missing,
    Source,
    WaitPolicy,
)
from s3ec.counters import observed
from s3ec.encode_costs import EncodeCosts
from tests.unit.connector.scheduling import World, feature, identifier_of, request

ROWS = 256
SMALL = 4  # rows of the features that ``scheduling`` makes
KIND = ("image", ROWS.bit_length())


def draw(median_s: float, count: int = 512, *, sigma: float = 0.7, seed: int = 1) -> list[float]:
    """Times of fetches, spread as those of a bucket are."""
    source = random.Random(seed)
    return [median_s * math.exp(sigma * source.gauss(0, 1)) for _ in range(count)]


def times(seconds: list[float]) -> FetchTimes:
    made = FetchTimes(1.0)
    for one in seconds:
        made.add(one)
    return made


# -- how long fetches take -------------------------------------------------------------------


def test_what_is_likely_is_what_half_of_the_fetches_take() -> None:
    assert times(draw(0.03)).likely_s == pytest.approx(0.03, rel=0.2)
    assert times([0.03]).likely_s == pytest.approx(0.03)
    assert times([]).likely_s == 1.0


def test_a_few_fetches_that_take_for_ever_move_it_little() -> None:
    slow = [one * (20 if number % 20 == 0 else 1) for number, one in enumerate(draw(0.03))]
    assert times(slow).likely_s < 1.5 * times(draw(0.03)).likely_s


# -- one decision ----------------------------------------------------------------------------


def policy(*, encode_s: float | None, fetch_s: float | None = 0.03) -> WaitPolicy:
    made = WaitPolicy(
        EncodeCosts(None if encode_s is None else {KIND: encode_s / ROWS}), EngineLoad(2)
    )
    for seconds in [] if fetch_s is None else [fetch_s] * 100:
        made.times.of("bucket", ROWS).add(seconds)
    return made


def limit_s(one: WaitPolicy, count: int = 1, source: Source = "bucket", now: float = 0.0) -> float:
    return one.limit_s([Missing("image", ROWS, source)] * count, now)


def test_waits_where_a_fetch_is_short_beside_the_encoder() -> None:
    assert limit_s(policy(encode_s=1.0)) > 0


def test_encodes_where_a_fetch_is_long_beside_the_encoder() -> None:
    assert limit_s(policy(encode_s=0.003, fetch_s=0.08)) == 0


def test_a_wait_lasts_twice_the_encoder_or_three_fetches_and_no_longer() -> None:
    assert limit_s(policy(encode_s=1.0)) == pytest.approx(2.0)
    assert limit_s(policy(encode_s=0.044)) == pytest.approx(0.09)
    # However dear the encoder is made by others: it would have taken no longer.
    busy = policy(encode_s=0.2)
    run_passes(busy.load, requests=20)
    assert busy.load.price > 5
    assert limit_s(busy) == pytest.approx(0.4)


def test_a_dearer_encoder_never_ends_a_wait() -> None:
    for fetch_s, count in itertools.product((0.0005, 0.005, 0.03, 0.08), (1, 4, 20)):
        limits = [
            limit_s(policy(encode_s=1e-5 * 1.4**step, fetch_s=fetch_s), count) for step in range(50)
        ]
        assert limits == sorted(limits)
        assert limits[0] == 0 < limits[-1]


def test_all_that_is_missing_is_weighed_together() -> None:
    one = policy(encode_s=0.04)
    assert limit_s(one) == 0
    assert limit_s(one, 4) == pytest.approx(0.32)
    # The last of many comes later than one alone would.
    slow = policy(encode_s=0.01)
    assert limit_s(slow, 5) == 0
    assert limit_s(slow, 20) > 0


def test_a_new_engine_waits_for_its_own_disk_and_not_for_a_bucket_that_it_does_not_know() -> None:
    one = policy(encode_s=0.014, fetch_s=None)
    assert limit_s(one, source="tier") > 0
    assert limit_s(one, source="bucket") == 0
    assert one.times.of("tier", ROWS).likely_s == PRIOR_FETCH_S["tier"]


def test_a_wait_for_a_replica_begins_by_its_time_and_by_what_it_lacked_lately() -> None:
    def near(encode_s: float, lacks: float) -> WaitPolicy:
        one = policy(encode_s=encode_s, fetch_s=0.004)
        one.times.of("home", ROWS).add(0.08)
        for number in range(100):
            one.times.note_far(is_far=number % 10 < 10 * lacks)
        return one

    assert limit_s(near(0.015, 0.0)) > 0
    assert limit_s(near(0.015, 0.5)) > 0
    assert limit_s(near(0.015, 1.0)) == 0
    assert limit_s(near(0.015, 0.0), source="home") == 0
    assert limit_s(near(0.15, 1.0)) > 0  # home pays as well


# -- whom an encode delays -------------------------------------------------------------------


def run_passes(load: EngineLoad, *, requests: int, prefill: bool = True, now: float = 0.0) -> float:
    for _ in range(400):
        now += 0.01
        load.end_pass(now, has_prefill=prefill, requests=requests)
    return now


def test_encoding_costs_its_own_time_where_requests_come_one_at_a_time() -> None:
    load = EngineLoad(2)
    run_passes(load, requests=1)
    assert load.price == 1.0


def test_encoding_is_dearer_the_busier_the_engine_is_with_prompts() -> None:
    prices = []
    for every in (1000, 4, 1):  # so many passes have one prompt, which takes five times as long
        load = EngineLoad(2)
        now = run_passes(load, requests=20, prefill=False)
        for number in range(1, 401):
            load.end_pass(now, has_prefill=number % every == 0, requests=20)
            now += 0.05 if (number - 1) % every == 0 and number > 1 else 0.01
        prices.append(load.price)
    assert 1.0 == prices[0] < prices[1] < prices[2] <= 1 / 0.03**2 + 1


def test_time_without_requests_is_no_time_of_a_step() -> None:
    load = EngineLoad(1)
    now = 0.0
    for _ in range(100):
        now += 0.01
        load.end_pass(now, has_prefill=True, requests=2)
        load.end_request(now + 0.01)
        now += 1.0
    assert load.price < 1.1


# -- what is not known, or no longer true ------------------------------------------------------


def test_cost_that_is_not_known_is_learned_by_encoding() -> None:
    one = policy(encode_s=None, fetch_s=0.001)
    assert limit_s(one) == 0
    for _ in range(2):
        one.costs.add("image", ROWS, 0.1)
    assert limit_s(one) > 0


def test_nothing_on_this_nodes_disk_is_encoded_to_learn_the_cost() -> None:
    one = policy(encode_s=None, fetch_s=None)
    assert all(limit_s(one, source="tier") > 0 for _ in range(1000))


def test_nothing_that_others_encode_is_encoded_to_learn_the_cost() -> None:
    assert limit_s(policy(encode_s=None), source="promise") == math.inf


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_cost_believed_far_too_high_is_corrected_however_busy_the_engine_is(
    is_busy: bool,
) -> None:
    """Another process had the GPU when it was learned. Who only waits learns nothing."""
    one = policy(encode_s=0.6, fetch_s=0.4)
    now, waited_s = 0.0, []
    while now < 3600.0:
        waited = min(limit_s(one, now=now), 0.4)
        waited_s.append(waited)
        if not waited:
            one.costs.add("image", ROWS, 0.02)
        now += 0.45 if is_busy else 1.0
        one.load.end_pass(now, has_prefill=is_busy, requests=3 if is_busy else 0)
        one.times.of("bucket", ROWS).add(0.4)
    assert one.costs.cost_s("image", ROWS) == pytest.approx(0.02)
    # After ten minutes; but for the price, that is right in an engine that is full of prompts.
    one.load = EngineLoad(2)
    assert limit_s(one, now=now) == 0
    assert waited_s[0] == 0.4


@pytest.mark.parametrize(("encode_s", "anew"), [(0.1, 1), (1.0, 0)])
def test_an_old_cost_is_learned_anew_only_where_that_could_change_an_answer(
    encode_s: float, anew: int
) -> None:
    one = policy(encode_s=encode_s)
    # Ten minutes and 300 requests without an encode.
    limits = [limit_s(one, now=2.0 * number) for number in range(400)]
    assert limits.count(0.0) == anew


# -- the scheduler half that asks it -----------------------------------------------------------


def world(*, encode_s: float = 0.06, fetch_s: float = 0.03, known: bool = True) -> World:
    return World(policy=learned(encode_s=encode_s, fetch_s=fetch_s, known=known))


def learned(*, encode_s: float = 0.06, fetch_s: float = 0.03, known: bool = True) -> WaitPolicy:
    costs = EncodeCosts({("image", SMALL.bit_length()): encode_s / SMALL} if known else None)
    one = WaitPolicy(costs, EngineLoad(2))
    for seconds in draw(fetch_s, seed=5):
        one.times.of("bucket", SMALL).add(seconds)
    return one


def until_it_goes_on(
    here: World, asker: object, *, requests: int = 0, pass_s: float = 0.001
) -> float:
    """Passes until the request goes on; how long that took."""
    began_s = here.clock.now_s
    while not here.ask(asker):
        here.step(tokens=10 * requests, requests=requests)
        here.clock.now_s += pass_s
    return here.clock.now_s - began_s


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


def test_request_waits_where_the_encoder_is_dear_and_gives_up_on_a_straggler() -> None:
    here = world()
    here.stock("a", "b")
    asker = here.deferred(request("r", feature("a"), feature("b", 10)))
    here.finish("a", seconds=0.03)
    # What has come does not shorten the wait for the rest.
    assert until_it_goes_on(here, asker) == pytest.approx(2 * 2 * 0.06, abs=0.002)
    assert here.schedule(asker) == [True, False]
    assert list(here.step().encodes) == [identifier_of("b")]
    assert here.counters.get("defer_timeouts") == 1


@pytest.mark.parametrize("requests", [1, 20])
def test_no_wait_is_longer_than_its_own_limit_however_busy_the_engine_is(requests: int) -> None:
    """A busy engine makes encoding dearer. It makes no store answer sooner."""
    here = world(encode_s=0.2)
    for _ in range(500):
        here.step(tokens=1000, requests=requests)
        here.clock.now_s += 0.01
    for number in range(MOST_IN_VAIN):
        here.stock(f"slow {number}")
        asker = request(f"r{number}", feature(f"slow {number}"))
        waited_s = until_it_goes_on(here, asker, requests=requests, pass_s=0.01)
        assert waited_s == pytest.approx(0.4, abs=0.011)
        here.end(asker)


def beside_home(encode_s: float) -> World:
    """A replica that takes 5 ms, and home behind it that takes 80."""
    here = world(encode_s=encode_s, fetch_s=0.005)
    assert here.policy is not None
    here.policy.times.of("home", SMALL).add(0.08)
    return here


def test_what_no_replica_has_is_encoded_at_once_where_home_takes_too_long() -> None:
    here = beside_home(encode_s=0.02)
    asker = here.defer("a")
    assert not here.ask(asker)
    here.step()
    here.go_far("a")
    here.go_far("a")  # of a large one each range goes there
    assert here.ask(asker)
    assert here.schedule(asker) == [False]
    here.step()
    assert here.prefetcher.demoted == [identifier_of("a")]
    here.finish("a", seconds=0.8)
    here.ask(request("other", feature("other")))
    assert here.policy is not None
    assert here.policy.times.of("home", SMALL).likely_s > 0.2
    assert here.policy.times.of("bucket", SMALL).likely_s < 0.01
    assert here.counters.get("defer_timeouts") == 0


def test_what_no_replica_has_is_waited_for_where_home_pays() -> None:
    here = beside_home(encode_s=0.4)
    asker = here.defer("a")
    here.clock.now_s += 0.7
    here.go_far("a")
    # The wait is weighed anew, and is one wait. All waits of a request together have an end.
    assert until_it_goes_on(here, asker) == pytest.approx(0.8, abs=0.002)
    assert here.counters.get("deferred_requests") == 1
    (wait,) = observed(here.counters.snapshot())
    assert (wait.histogram, wait.many) == ("wait_time", 1)
    assert wait.seconds == pytest.approx(1.5, abs=0.002)
    assert here.counters.get("deferred_seconds") == wait.seconds


def test_a_home_that_is_awaited_in_vain_is_no_reason_not_to_wait_for_a_replica() -> None:
    here = beside_home(encode_s=0.2)
    for number in range(MOST_IN_VAIN):
        asker = here.deferred_far(f"slow {number}")
        assert until_it_goes_on(here, asker) == pytest.approx(0.4, abs=0.002)
        here.end(asker)
        here.step()
    assert here.ask(here.deferred_far("a"))


@pytest.mark.parametrize("step_s", [-3600.0, -60.0, 60.0, 3600.0])
def test_a_step_of_the_wall_clock_changes_no_answer(step_s: float) -> None:
    """vLLM stamps a request with the time of day, which an NTP daemon or a resumed VM may set."""
    here = world(encode_s=0.02, fetch_s=1.0)
    other = request("other", feature("other"))
    waited = 0
    for number in range(800):
        text = str(number)
        here.stock(text)
        asker = request(text, feature(text))
        asker.arrival_time = here.clock.now_s - (step_s if number == 200 else 0.0)
        here.ask(other)
        waited += not here.ask(asker)
        here.step(tokens=0)
        here.clock.now_s += 0.02
        here.finish(text, seconds=1.0)
        here.end(asker)
    assert waited == 0


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
    for _ in range(500):
        here.clock.now_s += 0.01
        here.step(tokens=100, requests=20)
    assert policy.load.price > 5
    for _ in range(8):
        here.clock.now_s += 5
        here.step(tokens=0)
    assert policy.load.price == 1.0

# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: who waits, what is granted, and when a pin is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from s3ec.connector.item_tracker import (
    FIRST_PAUSE_S,
    LEASE_S,
    LONGEST_PAUSE_S,
    MOST_IN_VAIN,
    NO_PIXELS_WAIT_S,
    RETRY_AFTER_S,
    UNWANTED_LEASE_S,
    VAIN_REST_S,
)
from s3ec.connector.messages import RankStatus, Save, TierId, WorkerReport
from s3ec.connector.remote_ranks import Ranks
from s3ec.prefetch import FetchOutcome, Priority
from tests.support.clock import Clock
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    World,
    feature,
    identifier_of,
    key_of,
    request,
)
from tests.unit.index.corpus import Corpus, Reader, rows_of


@pytest.fixture
def world() -> World:
    return World()


def both() -> World:
    return World(producer=True)


# -- deferral ----------------------------------------------------------------------------------


def test_a_request_waits_until_its_embedding_is_here(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    assert not world.ask(asker)
    assert world.wanted == []  # nothing leaves the half before the end of the pass
    world.step(tokens=0)
    assert world.wanted == [identifier_of("a")]
    for _ in range(5):
        assert not world.ask(asker)
        world.step(tokens=0)
    assert len(world.wanted) == 1
    world.clock.now_s += 0.3
    pin = world.finish("a")
    assert pin is not None
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    plan = world.step()
    assert [(load.identifier, load.path) for load in plan.loads] == [
        (identifier_of("a"), str(pin.path))
    ]
    assert plan.loads[0].shape.rows == ROWS
    assert world.counters.get("hits") == 1
    assert world.counters.get("deferred_requests") == 1
    assert world.counters.get("deferred_seconds") == pytest.approx(0.3)


def test_a_miss_is_not_waited_for(world: World) -> None:
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    assert world.step().loads == []
    assert world.wanted == []
    assert world.counters.get("misses") == 1


def test_a_request_waits_for_all_of_its_images_and_no_longer(world: World) -> None:
    world.stock("a", "b")
    asker = request("r", feature("a"), feature("x", 10), feature("b", 20))
    assert not world.ask(asker)
    world.step()
    world.finish("b")
    assert not world.ask(asker)
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker) == [True, False, True]
    assert {load.identifier for load in world.step().loads} == {
        identifier_of("a"),
        identifier_of("b"),
    }


def test_others_are_scheduled_while_one_waits(world: World) -> None:
    world.stock("a")
    assert not world.ask(request("slow", feature("a")))
    assert world.ask(request("fast", feature("b")))


def test_two_requests_for_one_image_share_the_fetch(world: World) -> None:
    world.stock("a")
    first, second = request("1", feature("a")), request("2", feature("a", 50))
    assert not world.ask(first)
    assert not world.ask(second)
    world.step()
    assert not world.ask(second)
    world.step()
    assert len(world.wanted) == 1
    world.finish("a")
    assert world.ask(first)
    assert world.schedule(first) == [True]
    assert world.ask(second)


@pytest.mark.parametrize(
    "outcome",
    [FetchOutcome.ABSENT, FetchOutcome.MISMATCH, FetchOutcome.CORRUPT, FetchOutcome.UNAVAILABLE],
)
def test_a_failed_fetch_ends_the_wait_and_is_not_tried_again_for_a_while(
    world: World, outcome: FetchOutcome
) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.step()
    world.finish("a", outcome)
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    world.clock.now_s += RETRY_AFTER_S - 0.01
    assert world.ask(request("other", feature("a")))
    world.step(freed="a")
    assert len(world.wanted) == 1
    world.clock.now_s += 0.01
    assert not world.ask(request("later", feature("a")))
    world.step()
    assert len(world.wanted) == 2


def test_the_wait_is_bounded_and_the_download_goes_on(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += 1.99
    assert not world.ask(asker)
    world.clock.now_s += 0.01
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    assert world.step().loads == []
    assert world.counters.get("defer_timeouts") == 1
    assert world.counters.get("deferred_seconds") == pytest.approx(2.0)
    world.finish("a")
    later = request("later", feature("a"))
    world.step(freed="a")
    assert world.ask(later)
    assert world.schedule(later) == [True]


def test_the_wait_is_bounded_in_all_across_the_chunks_of_a_prompt(world: World) -> None:
    """A prompt of many images must not wait the whole time for each of them."""
    texts = "abcde"
    world.stock(*texts)
    asker = request("r", *(feature(text, 200 * n) for n, text in enumerate(texts)))
    waited_s = 0.0
    for number, text in enumerate(texts):
        while not world.ask(asker, 200 * number):
            world.step()
            world.clock.now_s += 0.1
            waited_s += 0.1
            if waited_s > 0.75 * (number + 1):
                world.finish(text)
        world.schedule(asker, number)
        world.step()
    assert waited_s == pytest.approx(2.0, abs=0.11)
    assert world.counters.get("deferred_seconds") == pytest.approx(2.0, abs=0.11)
    assert world.counters.get("deferred_requests") == 1


def test_time_between_waits_does_not_count(world: World) -> None:
    world.stock("a", "b")
    asker = request("r", feature("a"), feature("b", 200))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += 1.0
    world.finish("a")
    assert world.ask(asker)
    world.schedule(asker, 0)
    world.step()
    world.clock.now_s += 100.0
    assert not world.ask(asker, 150)
    world.clock.now_s += 0.9
    assert not world.ask(asker, 150)
    world.clock.now_s += 0.1
    assert world.ask(asker, 150)


def test_a_timeout_of_zero_never_waits_and_still_fetches() -> None:
    world = World(defer_timeout_s=0.0)
    world.stock("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    world.step()
    assert world.wanted == [identifier_of("a")]
    assert world.counters.get("deferred_requests") == 0
    assert world.sizes()["waits"] == 0


def test_more_waiting_requests_than_can_be_remembered_still_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("s3ec.connector.item_tracker.MAX_WAITS", 10)
    world = World()
    world.stock("a")
    askers = [request(str(number), feature("a")) for number in range(15)]
    for _ in range(20):
        answers = [world.ask(asker) for asker in askers]
        world.step()
        world.clock.now_s += 0.1
    world.clock.now_s += 0.1
    assert sum(answers) == 5
    assert all(world.ask(asker) for asker in askers)
    assert world.sizes()["waits"] <= 10


def test_requests_that_end_unseen_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24 and 0.25 have no request_finished."""
    monkeypatch.setattr("s3ec.connector.item_tracker.MAX_WAITS", 10)
    world = World()
    world.stock("a")
    for burst in range(5):
        deferred = 0
        for number in range(20):
            deferred += not world.ask(request(f"gone {burst} {number}", feature("a")))
            world.step()
        assert deferred == 10
        assert world.sizes()["waits"] == 10
        world.clock.now_s += LEASE_S + 0.1
        world.step()


def test_a_finished_request_is_forgotten(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    assert world.sizes()["waits"] == 1
    world.half.request_finished(asker)
    assert world.sizes()["waits"] == 0
    world.half.request_finished(asker)


def test_a_pure_producer_never_waits() -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    assert world.ask(request("r", feature("a")))
    assert world.step().loads == []
    assert world.wanted == []


# -- the bucket's troubles and this node's disk -------------------------------------------------


def wait_for_nothing(world: World, times: int = MOST_IN_VAIN, *, local: bool = False) -> None:
    """Have requests wait as long as they may for what comes 4 s after it was asked for."""
    slow = [f"slow {world.clock.now_s} {number}" for number in range(times)]
    world.stock(*slow)
    askers = [request(text, feature(text)) for text in slow]
    for text in slow if local else ():
        world.local.add(key_of(identifier_of(text)))
    for asker in askers:
        assert not world.ask(asker)
    world.step()
    world.clock.now_s += 2.1
    for asker in askers:
        assert world.ask(asker)
        world.half.request_finished(asker)
    for text in slow:
        world.finish(text, source="tier" if local else "bucket", seconds=4.0)
    world.step()


def test_after_waits_in_vain_nobody_waits_for_the_bucket_for_a_while(world: World) -> None:
    wait_for_nothing(world)
    world.stock("a", "b", "c")
    assert world.ask(request("a", feature("a")))
    world.clock.now_s += VAIN_REST_S - 1.0
    assert world.ask(request("b", feature("b")))
    world.clock.now_s += 1.1
    assert not world.ask(request("c", feature("c")))  # such a state ends by itself
    wait_for_nothing(world, 1)  # and one more in vain brings it back
    assert world.ask(request("a2", feature("a")))


def test_what_lies_on_this_node_is_waited_for_however_slow_the_bucket_was(world: World) -> None:
    wait_for_nothing(world)
    world.stock("here", "away")
    world.local.add(key_of(identifier_of("here")))
    asker = request("r", feature("here"), feature("away", 10))
    assert not world.ask(asker)
    world.step()
    world.finish("here", source="tier")
    assert world.ask(asker)
    assert world.schedule(asker) == [True, False]


def test_who_has_waited_for_the_bucket_still_waits_for_what_lies_here(world: World) -> None:
    world.stock("here", "away")
    asker = request("r", feature("away"), feature("here", 10))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += 2.1
    world.local.add(key_of(identifier_of("here")))  # another process has brought it meanwhile
    assert not world.ask(asker)
    world.step()
    world.finish("here", source="tier")
    assert world.ask(asker)
    assert world.schedule(asker) == [False, True]


def test_a_disk_too_slow_for_anybody_is_not_waited_for_either_and_hides_no_bucket(
    world: World,
) -> None:
    wait_for_nothing(world, local=True)
    world.stock("here", "away")
    world.local.add(key_of(identifier_of("here")))
    assert world.ask(request("here", feature("here")))
    assert not world.ask(request("away", feature("away")))
    world.clock.now_s += VAIN_REST_S + 0.1
    assert not world.ask(request("again", feature("here")))


def test_a_failure_of_the_bucket_is_forgotten_when_the_entry_comes_to_this_disk(
    world: World,
) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.UNAVAILABLE)
    assert world.ask(asker)
    world.local.add(key_of(identifier_of("a")))
    other = request("other", feature("a"))
    assert not world.ask(other)
    world.step()
    world.finish("a", FetchOutcome.UNAVAILABLE)  # the disk refuses: not again at once
    assert world.ask(other)


def test_each_turn_of_a_session_waits_anew(world: World) -> None:
    world.stock("a", "b")
    session = request("r", feature("a"))
    assert not world.ask(session)
    world.step()
    world.clock.now_s += 2.1
    assert world.ask(session)
    world.schedule(session)
    world.step()
    session.mm_features.append(feature("b", 10))
    session.num_prompt_tokens = 20
    assert not world.ask(session, 8)


# -- which features ----------------------------------------------------------------------------


def test_a_feature_within_another_does_not_hide_the_end_of_the_other(world: World) -> None:
    """The audio of a video lies within the video's tokens."""
    world.stock("video", "audio")
    asker = request("r", feature("video", length=20), feature("audio", 4, modality="audio"))
    assert not world.ask(asker, 8)
    world.step()
    assert world.wanted == [identifier_of("video")]


def test_what_the_kv_cache_covers_is_not_fetched(world: World) -> None:
    world.stock("a", "b")
    asker = request("r", feature("a", 0, length=10), feature("b", 10, length=10))
    assert not world.ask(asker, 10)
    world.step()
    assert world.wanted == [identifier_of("b")]
    assert world.ask(asker, 20)


def test_a_feature_covered_in_part_is_fetched(world: World) -> None:
    world.stock("a")
    assert not world.ask(request("r", feature("a", 0, length=10)), 9)


def test_what_lies_beyond_the_window_is_fetched_ahead_and_not_waited_for(world: World) -> None:
    world.stock("a", "b")
    asker = request("r", feature("a"), feature("b", WINDOW))
    world.ask(asker)
    world.step()
    assert [want.priority for want in world.prefetcher.submitted] == [
        Priority.DEMAND,
        Priority.LOOKAHEAD,
    ]
    world.finish("a")
    assert world.ask(asker)
    world.schedule(asker, 0)
    world.step()
    assert not world.ask(asker, 1)  # now it is within the window
    world.step()
    assert [want.priority for want in world.prefetcher.submitted[2:]] == [Priority.DEMAND]
    assert not world.ask(asker, 1)
    world.step()
    assert len(world.wanted) == 3
    world.finish("b")
    assert world.ask(asker, 1)
    assert world.schedule(asker, 1) == [True]


def test_where_vllm_asks_once_everything_is_waited_for() -> None:
    world = World(asked_every_pass=False)
    world.stock("a", "b")
    asker = request("r", feature("a"), feature("b", 10 * WINDOW))
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert not world.ask(asker)
    world.finish("b")
    assert world.ask(asker)
    assert world.schedule(asker, 0) == [True]
    world.report(world.step().step)
    world.step()
    assert world.schedule(asker, 1) == [True]
    assert [load.identifier for load in world.step().loads] == [identifier_of("b")]


def test_the_same_picture_twice_in_one_prompt_is_fetched_and_loaded_once(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"), feature("a", 20))
    assert not world.ask(asker)
    world.step()
    assert len(world.wanted) == 1
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker, 0) == [True]  # vLLM does not ask for the second
    assert len(world.step().loads) == 1


@pytest.mark.parametrize(
    ("name", "counted"),
    [("renderer0-mm-1-image-0", 1), ("\ud800", 1), ("x" * 5000, 1), ("lora:renderer0-mm-1-a-0", 1)],
)
def test_a_refused_identifier_is_a_counted_miss(name: str, counted: int) -> None:
    world = both()
    asker = request("r", feature(name, raw=True))
    assert world.ask(asker)
    assert world.counters.get("refused_identifiers") == counted
    assert not world.half.has_cache_item(name)
    world.half.update_state_after_alloc(asker, 0)
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])


def test_embeddings_that_the_request_brought_are_ignored() -> None:
    world = both()
    world.stock("a")
    asker = request("r", feature("a", modality="prompt_embeds"))
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])
    assert world.counters.get("refused_identifiers") == 0
    assert world.counters.get("misses") == 0


# -- grants ------------------------------------------------------------------------------------


def test_nothing_is_granted_that_was_not_asked_for_in_this_pass(world: World) -> None:
    """Rows are compared with the request at hand; another one's do not count."""
    world.bring("a")
    assert world.ask(request("other", feature("z")))
    assert not world.has("a")


def test_a_grant_without_an_allocation_is_dropped(world: World) -> None:
    world.bring("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.has("a")
    assert world.step().loads == []
    world.half.update_state_after_alloc(asker, 0)  # without a new grant it is a miss
    assert world.step().loads == []
    assert world.counters.get("hits") == 0


def test_the_grant_of_this_pass_decides_and_not_what_is_known_later(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.step()
    world.clock.now_s += 3.0
    assert world.ask(asker)
    assert not world.has("a")
    world.finish("a")
    world.ask(request("other", feature("b")))  # takes the news
    world.half.update_state_after_alloc(asker, 0)
    assert world.step().loads == []


def test_a_step_without_tokens_carries_its_loads_over(world: World) -> None:
    """The V1 runner does not call the worker half in such a step."""
    (path,) = world.bring("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    for _ in range(10):
        assert world.step(tokens=0).loads == []
    assert path in world.prefetcher.live
    plan = world.step(tokens=5)
    assert [load.path for load in plan.loads] == [str(path)]
    world.report(plan.step)
    assert path not in world.prefetcher.live
    assert world.step().loads == []


def test_what_the_device_gave_up_before_it_was_loaded_is_not_loaded(world: World) -> None:
    """The worker frees first and then loads: nobody would free it again."""
    (path, _) = world.bring("a", "b")
    asker = request("r", feature("a"), feature("b", 10))
    world.ask(asker)
    world.schedule(asker)
    world.step(tokens=0)
    plan = world.step(freed="a")
    assert [load.identifier for load in plan.loads] == [identifier_of("b")]
    again = request("again", feature("a"))
    assert world.ask(again)
    assert world.schedule(again) == [True]
    plan = world.step()
    assert [load.path for load in plan.loads] == [str(path)]
    world.report(plan.step)
    assert path not in world.prefetcher.live


def on_device(world: World) -> Any:
    """A request whose embedding was loaded in the step before."""
    world.bring("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    assert len(world.step().loads) == 1
    assert world.half.is_on_device(identifier_of("a"))
    return asker


def test_given_up_and_allocated_in_one_pass_is_loaded(world: World) -> None:
    """Old releases name it among the freed ones all the same."""
    again = on_device(world)
    world.ask(again)
    assert world.schedule(again) == [True]
    assert len(world.step(freed="a").loads) == 1
    assert world.half.is_on_device(identifier_of("a"))


def test_allocated_and_given_up_in_one_pass_is_not_loaded(world: World) -> None:
    """The request was preempted in the pass that scheduled it, and another needed the room."""
    world.bring("a")
    preempted = request("r", feature("a"))
    world.ask(preempted)
    assert world.schedule(preempted) == [True]
    assert world.step(freed="a").loads == []
    assert not world.half.is_on_device(identifier_of("a"))
    world.ask(preempted)
    assert world.schedule(preempted) == [True]
    assert len(world.step().loads) == 1


def test_given_up_allocated_and_given_up_in_one_pass_is_not_loaded(world: World) -> None:
    again = on_device(world)
    world.ask(again)
    assert world.schedule(again) == [True]
    assert world.step(freed="aa").loads == []
    assert not world.half.is_on_device(identifier_of("a"))


def test_two_requests_with_other_rows_for_one_identifier_get_only_their_own(world: World) -> None:
    world.bring("a")
    liar = request("liar", feature("a", rows=ROWS + 1))
    honest = request("honest", feature("a"))
    assert world.ask(liar)
    assert not world.has("a")
    assert world.ask(honest)
    assert world.has("a")
    assert world.counters.get("mismatch.rows") == 1
    assert world.ask(liar)
    assert not world.has("a")


def test_where_vllm_asks_once_disagreeing_requests_get_nothing() -> None:
    world = World(asked_every_pass=False)
    world.bring("a")
    assert world.ask(request("honest", feature("a")))
    assert world.has("a")
    assert world.ask(request("liar", feature("a", rows=ROWS + 1)))
    assert not world.has("a")


def test_a_fetch_that_failed_for_made_up_rows_does_not_spoil_the_real_ones(world: World) -> None:
    """Identifiers can be chosen by clients, and so can their rows."""
    world.stock("a")
    liar = request("liar", feature("a", rows=ROWS + 1))
    honest = request("honest", feature("a"))
    assert not world.ask(liar)
    world.step()
    world.finish("a", holds=ROWS)
    assert world.ask(liar)
    assert not world.ask(honest)
    world.step()
    world.finish("a", holds=ROWS)
    assert world.ask(honest)
    assert world.has("a")


# -- pins --------------------------------------------------------------------------------------


def load_one(world: World, text: str = "a") -> tuple[int, Any]:
    (path,) = world.bring(text)
    asker = request(f"load {text}", feature(text))
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    return world.step().step, path


def test_a_pin_is_released_by_the_workers_report(world: World) -> None:
    step, path = load_one(world)
    assert path in world.prefetcher.live
    world.report(step)
    assert world.prefetcher.released == [path]
    assert world.sizes()["items"] == 0


def test_a_pin_is_held_until_every_rank_has_reported() -> None:
    world = World(ranks=4)
    step, path = load_one(world)
    world.report(step, 0, 1)
    world.report(step, 1)
    world.report(step, 3)
    assert path in world.prefetcher.live
    world.report(step, 2)
    assert path not in world.prefetcher.live


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_without_a_report_a_pin_outlives_the_steps_in_flight(steps: int) -> None:
    """Old releases do not report; a step that reads the file can still be running."""
    world = World(steps_in_flight=steps)
    _, path = load_one(world)
    for _ in range(steps):
        world.step()
        assert path in world.prefetcher.live
    world.step()
    assert path not in world.prefetcher.live


def test_steps_without_tokens_are_steps_too(world: World) -> None:
    _, path = load_one(world)
    for _ in range(3):
        world.step(tokens=0)
    assert path not in world.prefetcher.live


def test_late_double_and_unknown_reports_are_harmless(world: World) -> None:
    step, path = load_one(world)
    world.report(step)
    world.report(step)
    world.report(step + 100)
    assert world.prefetcher.released == [path]


def test_an_image_loaded_by_two_steps_is_pinned_until_both_are_done(world: World) -> None:
    """Evicted on the device in between, as async scheduling allows."""
    first, path = load_one(world)
    again = request("again", feature("a"))
    assert world.ask(again)  # while the device still holds it
    assert world.has("a")  # and then no more
    world.half.update_state_after_alloc(again, 0)
    second = world.step(freed="a").step
    world.report(first)
    assert path in world.prefetcher.live
    world.report(second)
    assert world.prefetcher.released == [path]


def test_evicted_on_the_device_and_wanted_again_is_fetched_again(world: World) -> None:
    step, first = load_one(world)
    world.report(step)
    asker = request("r", feature("a"))
    assert world.ask(asker)  # on the device: nothing to wait for
    assert len(world.wanted) == 1
    world.step(freed="a")
    assert not world.ask(asker)
    world.step()
    second = world.finish("a")
    assert second is not None
    assert second.path != first
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    assert [load.path for load in world.step().loads] == [str(second.path)]


def test_evicted_before_the_report_is_kept_pinned_for_the_next_request(world: World) -> None:
    step, path = load_one(world)
    world.step(freed="a")
    world.report(step)
    assert path in world.prefetcher.live
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.schedule(asker) == [True]


def test_a_reset_gives_back_the_pin_of_a_load_that_no_step_has_carried_yet(world: World) -> None:
    world.bring("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    world.step(tokens=0)
    world.half.stop(was_reset=True)
    world.half.request_finished(asker)
    world.clock.now_s += LEASE_S + 1
    assert world.step().loads == []
    assert not world.prefetcher.live


def test_a_device_cache_that_was_reset_without_a_word_costs_one_encode(world: World) -> None:
    step, _ = load_one(world)
    world.report(step)
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert not world.has("a")  # vLLM asks, so the device does not hold it
    world.step()
    assert not world.ask(asker)


def test_what_nobody_asks_for_is_released_when_its_lease_ends(world: World) -> None:
    (path,) = world.bring("a")
    world.clock.now_s += LEASE_S
    world.step()
    assert path in world.prefetcher.live
    world.clock.now_s += 1.1
    world.step()
    assert path not in world.prefetcher.live
    assert world.sizes()["items"] == 0


def test_asking_renews_the_lease(world: World) -> None:
    (path,) = world.bring("a")
    for _ in range(10):
        world.clock.now_s += LEASE_S - 1
        assert world.ask(request("r", feature("a")))
        world.step()
    assert path in world.prefetcher.live


def test_a_lease_does_not_end_while_a_step_loads_the_file() -> None:
    world = World(steps_in_flight=1000)
    step, path = load_one(world)
    world.step(freed="a")
    for _ in range(5):
        world.clock.now_s += LEASE_S
        world.step()
    assert path in world.prefetcher.live
    world.report(step)
    world.clock.now_s += LEASE_S
    world.step()
    assert path not in world.prefetcher.live


def test_what_arrives_after_everybody_left_is_released(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.step()
    world.half.request_finished(asker)
    world.finish("a")
    world.clock.now_s += 2
    world.step()
    world.clock.now_s += LEASE_S + 2
    world.step()
    assert not world.prefetcher.live
    assert world.sizes()["items"] == 0


def test_a_second_answer_for_one_item_is_released(world: World) -> None:
    (path,) = world.bring("a")
    world.prefetcher.open[identifier_of("a")] = world.prefetcher.submitted[0]
    extra = world.finish("a")
    world.ask(request("r", feature("b")))
    assert extra is not None
    assert world.prefetcher.live == {path}


# -- who waits for what ------------------------------------------------------------------------


def test_what_is_first_in_the_queue_is_submitted_first(world: World) -> None:
    texts = [f"picture {number}" for number in range(6)]
    world.stock(*texts)
    for place in range(0, 6, 2):
        asker = request(str(place), feature(texts[place]), feature(texts[place + 1], 10))
        assert not world.ask(asker)
    world.step(tokens=0)
    assert world.wanted == [identifier_of(text) for text in texts]


def test_a_wait_that_is_over_costs_the_item_its_place_and_a_new_one_gives_it_back(
    world: World,
) -> None:
    world.stock("a")
    first = request("first", feature("a"))
    assert not world.ask(first)
    world.step()
    world.clock.now_s += 2.0
    assert world.ask(first)
    assert world.prefetcher.demoted == []  # told at the end of the pass
    world.step()
    assert world.prefetcher.demoted == [identifier_of("a")]
    for _ in range(3):  # waits for room on the device
        assert world.ask(first)
        world.step()
    assert len(world.prefetcher.demoted) == len(world.wanted) == 1
    assert not world.ask(request("second", feature("a")))
    world.step()
    assert [want.priority for want in world.prefetcher.submitted] == [Priority.DEMAND] * 2


def test_a_client_that_leaves_takes_only_its_own_interest_along(world: World) -> None:
    world.stock("a", "b")
    first = request("first", feature("a"), feature("b", 10))
    second = request("second", feature("b"))
    world.ask(first)
    world.ask(second)
    world.step()
    world.half.request_finished(first)
    world.step(tokens=0)
    assert world.prefetcher.demoted == [identifier_of("a")]
    world.half.request_finished(second)
    world.step(tokens=0)
    assert world.prefetcher.demoted == [identifier_of("a"), identifier_of("b")]
    assert world.sizes()["interest"] == 0


def test_left_and_wanted_again_within_a_pass_keeps_its_place(world: World) -> None:
    world.stock("a")
    first = request("first", feature("a"))
    world.ask(first)
    world.step()
    world.half.request_finished(first)
    assert not world.ask(request("second", feature("a")))
    world.step()
    assert world.prefetcher.demoted == []


def test_fetched_ahead_is_waited_for_and_a_forgotten_one_is_ordered_ahead_again(
    world: World,
) -> None:
    world.stock("a", "b")
    first = request("first", feature("a"), feature("b", WINDOW))
    world.ask(first)
    world.step()
    assert world.prefetcher.demoted == []
    world.half.request_finished(first)
    world.step()
    assert set(world.prefetcher.demoted) == {identifier_of("a"), identifier_of("b")}
    world.ask(request("second", feature("c"), feature("b", WINDOW)))
    world.step()
    assert world.prefetcher.submitted[-1].priority is Priority.LOOKAHEAD


def test_an_image_that_another_request_had_encoded_is_not_waited_for(world: World) -> None:
    world.stock("a")
    first, second = request("first", feature("a")), request("second", feature("a"))
    assert not world.ask(first)
    world.step()
    world.clock.now_s += 1.0
    assert not world.ask(second)
    world.clock.now_s += 1.0
    assert world.ask(first)
    assert world.schedule(first) == [False]
    world.step()
    assert world.ask(second)  # the device holds it


def test_a_prefix_that_others_computed_ends_the_interest_in_its_images(world: World) -> None:
    world.stock("a", "b")
    asker = request("r", feature("a", 0, length=10), feature("b", 10, length=10))
    world.ask(asker)
    world.step()
    world.finish("b")
    assert world.ask(asker, 10)
    world.step()
    assert world.prefetcher.demoted == [identifier_of("a")]
    assert world.ask(asker, 20)
    assert world.sizes()["interest"] == 0


def test_what_arrives_for_nobody_is_released_soon(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.step()
    world.half.request_finished(asker)
    world.clock.now_s += 20
    world.step()
    pin = world.finish("a")
    assert pin is not None
    world.clock.now_s += 1
    world.step()
    assert pin.path in world.prefetcher.live
    world.clock.now_s += UNWANTED_LEASE_S + 0.1
    world.step()
    assert pin.path not in world.prefetcher.live
    assert world.sizes()["items"] == 0


def test_where_nobody_ever_waits_what_arrives_is_kept_for_the_next() -> None:
    world = World(defer_timeout_s=0.0)
    world.stock("a")
    assert world.ask(request("first", feature("a")))
    world.step()
    assert world.prefetcher.demoted == []
    world.finish("a")
    world.step()
    world.clock.now_s += LEASE_S - 1
    world.step()
    second = request("second", feature("a"))
    assert world.ask(second)
    assert world.schedule(second) == [True]


def test_interest_ends_with_the_item_where_vllm_does_not_tell_of_ended_requests(
    world: World,
) -> None:
    """vLLM 0.24 and 0.25 have no request_finished."""
    for number in range(100):
        world.stock(number)
        world.ask(request(str(number), feature(number)))
        world.step()
        world.finish(number)
        world.step()
    world.clock.now_s += LEASE_S + 1
    world.step()
    world.clock.now_s += LEASE_S + 1
    world.step()
    sizes = world.sizes()
    assert (sizes["items"], sizes["interest"]) == (0, 0)
    assert not world.prefetcher.live


# -- a store that is down ----------------------------------------------------------------------


def test_while_the_store_is_down_nobody_waits_for_it(world: World) -> None:
    world.stock("a")
    world.down = True
    assert world.ask(request("r", feature("a")))
    world.step()
    assert world.wanted == []
    world.down = False
    assert not world.ask(request("r", feature("a")))


def test_who_waits_when_the_store_goes_down_waits_no_longer(world: World) -> None:
    world.stock("a")
    first, second = (request(name, feature("a")) for name in ("first", "second"))
    assert not world.ask(first)
    world.step()
    world.down = True
    assert world.ask(first)
    assert world.schedule(first) == [False]
    # What was on its way arrives all the same, and serves the next one.
    world.finish("a")
    assert world.ask(second)
    assert world.schedule(second) == [True]


def test_who_has_no_pixels_waits_though_the_store_is_down(world: World) -> None:
    world.stock("a")
    asker = request("r", feature("a", pixels=False))
    assert not world.ask(asker)
    world.step()
    world.down = True
    assert not world.ask(asker)


def test_while_the_store_is_down_this_nodes_disk_still_serves(world: World) -> None:
    world.local.add(key_of(identifier_of("a")))
    world.down = True
    asker = request("r", feature("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker) == [True]


def wait_in_vain(world: World, text: str) -> None:
    world.stock(text)
    asker = request(text, feature(text))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += 2.0
    assert world.ask(asker)


def test_a_store_that_is_too_slow_for_three_requests_holds_no_other_up(world: World) -> None:
    for text in ("a", "b", "c"):
        wait_in_vain(world, text)
    world.stock("d")
    asker = request("d", feature("d"))
    assert world.ask(asker)
    world.step()
    assert world.wanted[-1] == identifier_of("d")  # fetched all the same, for later ones
    assert world.counters.get("deferred_requests") == 3
    world.finish("a", seconds=20.0)  # one that took too long changes nothing
    world.stock("e")
    assert world.ask(request("e", feature("e")))
    world.step()
    world.finish("d", seconds=0.5)
    world.stock("f")
    assert not world.ask(request("f", feature("f")))


def test_who_has_no_pixels_waits_for_a_store_that_is_too_slow(world: World) -> None:
    for text in ("a", "b", "c"):
        wait_in_vain(world, text)
    world.stock("d")
    assert not world.ask(request("d", feature("d", pixels=False)))


# -- a disk that hangs -------------------------------------------------------------------------


def test_while_the_disk_hangs_nothing_is_waited_for_or_granted(world: World) -> None:
    world.bring("ready")
    world.stock("new", "coming")
    coming = request("coming", feature("coming"))
    assert not world.ask(coming)
    world.hung = True
    assert world.ask(coming)
    assert world.schedule(coming) == [False]
    for text in ("ready", "new"):
        asker = request(text, feature(text))
        assert world.ask(asker)
        assert world.schedule(asker) == [False]
    assert world.step().loads == []
    world.hung = False
    again = request("again", feature("ready"))
    assert world.ask(again)
    assert world.schedule(again) == [True]


def test_while_the_disk_hangs_the_index_is_not_asked_since_it_may_hang_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(_: object) -> bool:
        raise AssertionError("a page of a mapped file")

    monkeypatch.setattr(world.index, "maybe_contains", touch)
    world.hung = True
    assert world.ask(request("r", feature("a")))


def test_while_the_disk_hangs_no_hook_of_a_pure_producer_or_a_report_asks_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    assert world.has("a")

    def touch(*_: object) -> bool:
        raise AssertionError("a page of a mapped file")

    monkeypatch.setattr(world.index, "holds", touch)
    monkeypatch.setattr(world.index, "add", touch)
    world.hung = True
    assert world.ask(request("r", feature("a")))
    assert not world.has("a")
    world.report(1, stored=[identifier_of("b")])


def test_what_came_without_pixels_is_granted_though_the_disk_hangs(world: World) -> None:
    """It has no other chance: the worker waits a little, and asks the bucket."""
    world.stock("a")
    asker = request("r", bare("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    world.hung = True
    assert world.ask(asker)
    assert world.schedule(asker) == [True]


@pytest.mark.parametrize("bare_first", [True, False])
def test_the_same_with_pixels_in_the_prompt_takes_no_grant_away_while_the_disk_hangs(
    world: World, bare_first: bool
) -> None:
    one, two = (bare("a"), feature("a", 10)) if bare_first else (feature("a"), bare("a", 10))
    asker = request("r", one, two)
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    world.hung = True
    assert world.ask(asker)
    assert world.schedule(asker, 0) == [True]


def test_while_the_disk_hangs_a_grant_is_for_the_rows_that_are_asked_for_first(
    world: World,
) -> None:
    """A prompt that gives one identifier two sizes: vLLM asks for the first, without saying so."""
    world.bring("a")
    bare = feature("a", 60, pixels=False)
    asker = request("r", feature("a", rows=ROWS + 1), feature("a", 30), bare)
    world.hung = True
    assert world.ask(asker)
    assert not world.has("a")


def test_where_vllm_asks_once_a_grant_outlives_that_the_disk_hangs() -> None:
    world = World(asked_every_pass=False)
    world.bring("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    world.hung = True
    assert world.ask(request("other", feature("a")))
    assert world.schedule(asker) == [True]


# -- features without pixels -------------------------------------------------------------------


def bare(text: object, offset: int = 0, **more: Any) -> Any:
    return feature(text, offset, pixels=False, **more)


def test_a_feature_without_pixels_is_asked_for_even_when_the_index_says_no(world: World) -> None:
    asker = request("r", bare("a"))
    world.down = True
    assert not world.ask(asker)
    world.step()
    assert world.wanted == [identifier_of("a")]
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    assert world.half.take_unavailable_requests() == set()


def test_it_is_waited_for_beside_one_of_another_size_that_nobody_would_fetch(
    world: World,
) -> None:
    """Both have one uuid. The second look must not take away what the first one waits for."""
    asker = request("r", bare("a"), feature("a", 10, rows=ROWS + 1))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.clock.now_s += 0.1
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker, 0) == [True]


def test_it_is_given_up_at_once_where_what_is_stored_does_not_fit(world: World) -> None:
    asker = request("r", feature("x"), bare("a", 10))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.MISMATCH)
    assert not world.ask(asker)
    assert not world.ask(asker)
    assert world.half.take_unavailable_requests() == {"r"}
    assert world.half.take_unavailable_requests() == set()
    assert world.counters.get("unavailable_requests") == 1


NOT_YET = [FetchOutcome.ABSENT, FetchOutcome.CORRUPT, FetchOutcome.UNAVAILABLE]


@pytest.mark.parametrize("outcome", NOT_YET)
def test_it_is_asked_for_again_until_its_upload_has_ended(
    world: World, outcome: FetchOutcome
) -> None:
    asker = request("r", bare("a"))
    began_s = world.clock.now_s
    assert not world.ask(asker)
    pauses = []
    while world.clock.now_s < began_s + NO_PIXELS_WAIT_S - LONGEST_PAUSE_S:
        world.step()
        world.finish("a", outcome)
        failed_s = world.clock.now_s
        assert not world.ask(asker)
        while identifier_of("a") not in world.prefetcher.open:
            world.clock.now_s += FIRST_PAUSE_S / 4
            assert not world.ask(asker)
            world.step()
        pauses.append(world.clock.now_s - failed_s)
    world.finish("a")
    assert world.ask(asker)
    assert world.schedule(asker) == [True]
    assert world.half.take_unavailable_requests() == set()
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)


@pytest.mark.parametrize("outcome", NOT_YET)
def test_it_fails_alone_when_its_embedding_does_not_come_in_time(
    world: World, outcome: FetchOutcome
) -> None:
    asker = request("r", bare("a"))
    other = request("other", feature("b"))
    began_s = world.clock.now_s
    while not (failed := world.half.take_unavailable_requests()):
        assert not world.ask(asker)
        assert world.ask(other)
        world.step()
        if identifier_of("a") in world.prefetcher.open:
            world.finish("a", outcome)
        world.clock.now_s += 0.04
    assert failed == {"r"}
    assert NO_PIXELS_WAIT_S <= world.clock.now_s - began_s < NO_PIXELS_WAIT_S + 0.1
    world.half.request_finished(asker)
    # The bucket was not slow: others still wait for it.
    world.stock("c")
    assert not world.ask(request("r2", feature("c")))


def test_the_next_request_for_it_asks_again_too(world: World) -> None:
    """Where its embedding came between the two."""
    first = request("first", bare("a"))
    assert not world.ask(first)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(first)
    world.half.request_finished(first)
    world.clock.now_s += 0.1
    second = request("second", bare("a"))
    assert not world.ask(second)
    world.step()
    world.finish("a")
    assert world.ask(second)
    assert world.half.take_unavailable_requests() == set()


def test_one_prompt_may_name_it_with_and_without_pixels(world: World) -> None:
    asker = request("r", bare("a"), feature("a", 10), feature("a", 20, rows=ROWS + 1))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.clock.now_s += RETRY_AFTER_S + 0.1
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.has("a")


def test_who_has_pixels_does_not_wait_for_what_it_asks_for_again(world: World) -> None:
    asker, other = request("r", bare("a")), request("other", feature("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.clock.now_s += 2 * FIRST_PAUSE_S
    assert not world.ask(asker)
    assert world.ask(other)
    world.step()
    assert identifier_of("a") in world.prefetcher.open
    assert world.schedule(other) == [False]


def test_who_has_pixels_waits_for_what_came_to_this_node_while_it_is_asked_for_again(
    world: World,
) -> None:
    asker, other = request("r", bare("a")), request("other", feature("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.local.add(key_of(identifier_of("a")))  # another engine of this node fetched it
    world.clock.now_s += 2 * FIRST_PAUSE_S
    assert not world.ask(asker)
    assert not world.ask(other)
    world.step()
    world.finish("a", source="tier")
    assert world.ask(other)
    assert world.schedule(other) == [True]


@pytest.mark.parametrize("defer_timeout_s", [0.0, 2.0, 2 * NO_PIXELS_WAIT_S])
def test_it_waits_longer_than_others_and_is_given_up_in_the_end(defer_timeout_s: float) -> None:
    world = World(defer_timeout_s=defer_timeout_s)
    asker = request("r", bare("a"))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += max(defer_timeout_s, NO_PIXELS_WAIT_S) - 0.1
    for _ in range(3):
        assert not world.ask(asker)
        world.step()
    assert world.half.take_unavailable_requests() == set()
    world.clock.now_s += 0.2
    assert not world.ask(asker)
    assert world.half.take_unavailable_requests() == {"r"}
    assert world.counters.get("deferred_requests") == world.counters.get("defer_timeouts") == 1


def test_without_deferral_it_is_served_when_its_embedding_comes() -> None:
    world = World(defer_timeout_s=0.0)
    world.stock("b")
    asker = request("r", bare("a"), feature("b", 10))
    assert not world.ask(asker)
    world.step()
    world.clock.now_s += NO_PIXELS_WAIT_S / 2
    world.finish("a")
    assert world.ask(asker)  # pixels are not waited for
    assert world.schedule(asker) == [True, False]
    assert world.half.take_unavailable_requests() == set()


def test_it_is_never_scheduled_however_the_clock_moves_within_a_call() -> None:
    """The time can run out between two looks at the clock."""
    world = World(Clock(tick_s=0.07))
    world.stock("b")
    asker = request("r", bare("a"), feature("b", 20))
    world.ask(asker)
    for _ in range(400):
        world.step()
        assert not world.ask(asker)
    assert world.half.take_unavailable_requests() == {"r"}


@pytest.mark.parametrize(
    "impossible",
    [
        bare("renderer0-mm-1-image-0", raw=True),
        bare("\ud800", raw=True),
        bare("a", modality="prompt_embeds"),
    ],
)
def test_it_is_given_up_at_once_where_it_can_never_be_had(world: World, impossible: Any) -> None:
    assert not world.ask(request("r", impossible))
    assert world.half.take_unavailable_requests() == {"r"}


def test_it_is_given_up_when_the_entry_has_other_rows(world: World) -> None:
    world.bring("a")
    assert not world.ask(request("r", bare("a", rows=ROWS + 1)))
    assert world.half.take_unavailable_requests() == {"r"}


def test_it_is_pinned_though_the_device_holds_it(world: World) -> None:
    """The device may evict it before vLLM asks."""
    step, _ = load_one(world)
    world.report(step)
    asker = request("r", bare("a"))
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.has("a")


def test_beyond_the_window_it_is_not_waited_for_yet(world: World) -> None:
    asker = request("r", bare("a"), bare("b", WINDOW))
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    world.finish("b", FetchOutcome.MISMATCH)
    assert world.ask(asker)
    world.schedule(asker, 0)
    world.step()
    assert not world.ask(asker, 1)
    assert world.half.take_unavailable_requests() == {"r"}


def test_a_later_feature_of_the_same_name_and_other_rows_does_not_spoil_its_grant(
    world: World,
) -> None:
    """Else a hostile client could have vLLM encode nothing, which ends the engine."""
    world.stock("a")
    asker = request("r", bare("a"), bare("a", 10 * WINDOW, rows=ROWS + 1))
    world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.has("a")


def test_a_liars_failure_does_not_fail_the_honest_one(world: World) -> None:
    world.stock("a")
    liar, honest = request("liar", bare("a", rows=ROWS + 1)), request("honest", bare("a"))
    assert not world.ask(liar)
    world.step()
    world.finish("a", holds=ROWS)
    assert not world.ask(liar)
    assert not world.ask(honest)
    assert world.half.take_unavailable_requests() == {"liar"}
    world.step()
    world.finish("a", holds=ROWS)
    assert world.ask(honest)
    assert world.has("a")


def test_a_request_that_ends_first_is_not_failed(world: World) -> None:
    asker = request("r", bare("renderer0-mm-1-image-0", raw=True))
    world.ask(asker)
    world.half.request_finished(asker)
    assert world.half.take_unavailable_requests() == set()


# -- saves -------------------------------------------------------------------------------------


def test_what_is_encoded_and_not_stored_is_saved_with_its_placeholder() -> None:
    world = both()
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    assert world.step().saves == {
        identifier_of("a"): Save("image", {"image_grid_thw": [[1, 2, 2]]})
    }
    assert world.step().saves == {}


def test_what_the_index_holds_is_not_saved_though_it_was_encoded() -> None:
    world = both()
    world.stock("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    world.step()
    world.finish("a", FetchOutcome.UNAVAILABLE)
    assert world.ask(asker)
    assert world.schedule(asker) == [False]
    assert world.step().saves == {}


def test_what_was_loaded_is_not_saved() -> None:
    world = both()
    world.bring("a")
    asker = request("r", feature("a"))
    world.ask(asker)
    assert world.schedule(asker) == [True]
    plan = world.step()
    assert (len(plan.loads), plan.saves) == (1, {})


def test_a_pure_consumer_saves_nothing(world: World) -> None:
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    assert world.step().saves == {}


def test_a_save_under_way_is_not_ordered_twice_and_again_after_a_while() -> None:
    world = both()
    asker = request("r", feature("a"))
    world.schedule(asker)
    assert len(world.step().saves) == 1
    world.schedule(asker)
    assert world.step(freed="a").saves == {}
    world.clock.now_s += LEASE_S + 2
    world.step(freed="a")
    world.schedule(asker)  # the first was dropped, or failed
    assert len(world.step().saves) == 1


def test_a_reported_save_is_known_to_the_index_and_to_the_tier_at_once() -> None:
    world = both()
    asker = request("r", feature("a"))
    world.schedule(asker)
    world.step()
    world.half.update_connector_output(
        WorkerReport(
            published=[identifier_of("a"), "\ud800"],
            stored=[identifier_of("a"), "\ud800"],
            counts={"save.items": 1},
        )
    )
    assert world.index.maybe_contains(key_of(identifier_of("a")))
    assert world.local(key_of(identifier_of("a")))
    assert world.counters.get("save.items") == 1
    assert world.sizes()["saving"] == 0
    world.step(freed="a")
    assert not world.ask(asker)  # it is worth fetching now


def test_a_pure_producer_skips_what_the_index_holds_and_saves_the_rest() -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    asker = request("r", feature("a"), feature("b", 10))
    assert world.ask(asker)
    assert world.schedule(asker) == [True, False]
    plan = world.step()
    assert plan.loads == []
    assert list(plan.saves) == [identifier_of("b")]
    assert (world.counters.get("hits"), world.counters.get("misses")) == (1, 1)


@pytest.mark.parametrize(("mode", "skips"), [("exact", True), ("bloom", False)])
def test_a_pure_producer_skips_nothing_that_only_a_filter_says(
    tmp_path: Path, mode: str, skips: bool
) -> None:
    """What a filter says by chance would never be stored."""
    corpus = Corpus()
    corpus.base(1, rows_of(key_of(identifier_of("a"))))
    reader = Reader(corpus, tmp_path, mode=mode)
    asyncio.run(reader.refresh())
    world = World(producer=True, consumer=False, index=reader.index)
    assert world.index.maybe_contains(key_of(identifier_of("a")))
    assert world.schedule(request("r", feature("a"))) == [skips]
    assert list(world.step().saves) == ([] if skips else [identifier_of("a")])
    reader.tier.close()


def test_what_the_device_holds_and_the_corpus_lost_is_stored_again() -> None:
    world = World(producer=True, consumer=False)
    asker = request("r", feature("a"))
    world.ask(asker)
    assert world.schedule(asker) == [False]
    assert world.step().saves[identifier_of("a")].on_device is False
    again = request("again", feature("a"))  # vLLM's manager holds it, and asks for nothing
    world.ask(again)
    order = world.step().saves[identifier_of("a")]
    assert order == Save("image", world.placeholders, on_device=True)
    world.ask(again)
    assert world.step().saves == {}  # the worker needs some time
    world.half.update_connector_output(WorkerReport(stored=[identifier_of("a")]))
    world.ask(again)
    assert world.step().saves == {}
    world.index.mark_missing(key_of(identifier_of("a")), absent=True)
    world.ask(again)
    assert list(world.step().saves) == [identifier_of("a")]


def test_what_the_device_gives_up_is_not_stored_again() -> None:
    world = World(producer=True, consumer=False)
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    world.step()
    world.ask(asker)
    assert world.step(freed=["a"]).saves == {}
    world.ask(asker)
    world.schedule(asker)
    assert world.step().saves[identifier_of("a")].on_device is False


def test_a_decoding_request_has_nothing_stored_again() -> None:
    """It is asked about in every step, and each picture would be looked up."""
    world = both()
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    world.step()
    assert world.ask(asker, asker.num_prompt_tokens)
    assert world.step().saves == {}
    assert world.ask(request("other", feature("a")))
    assert list(world.step().saves) == [identifier_of("a")]


def test_where_vllm_cannot_store_again_nothing_is_ordered() -> None:
    world = World(producer=True, consumer=False, stores_again=False)
    asker = request("r", feature("a"))
    world.ask(asker)
    world.schedule(asker)
    world.step()
    world.ask(asker)
    assert world.step().saves == {}


def test_a_pure_producer_encodes_nothing_that_came_without_pixels() -> None:
    """Else the encoder runs on nothing, and the engine ends."""
    world = World(producer=True, consumer=False)
    world.stock("a")
    stored, unknown = request("stored", bare("a")), request("unknown", bare("b"))
    assert world.ask(stored)
    world.index.mark_missing(
        key_of(identifier_of("a")), absent=True
    )  # between two hooks of one pass
    assert world.schedule(stored) == [True]
    assert not world.ask(unknown)
    assert world.half.take_unavailable_requests() == {"unknown"}
    world.step()
    assert not world.ask(stored)


def test_a_pure_producer_never_skips_a_refused_identifier() -> None:
    world = World(producer=True, consumer=False)
    name = "renderer0-mm-1-image-0"
    asker = request("r", feature(name, raw=True))
    assert not world.half.has_cache_item(name)
    world.half.update_state_after_alloc(asker, 0)
    assert world.step().saves == {}
    assert world.counters.get("refused_identifiers") == 1


# -- ranks that cannot be told to load ---------------------------------------------------------


def test_where_ranks_cannot_be_told_nothing_is_fetched_waited_for_or_granted() -> None:
    world = World(producer=True, can_load=False)
    world.stock("a")
    asker = request("r", feature("a"), feature("b", 10))
    assert world.ask(asker)
    assert world.schedule(asker) == [False, False]
    plan = world.step()
    assert (plan.loads, world.wanted) == ([], [])
    assert list(plan.saves) == [identifier_of("b")]
    assert not world.ask(request("bare", bare("a")))
    assert world.half.take_unavailable_requests() == {"bare"}


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("every_pass", [True, False])
def test_a_hundred_thousand_absent_pictures_leave_nothing_behind(every_pass: bool) -> None:
    world = World(producer=True, asked_every_pass=every_pass)
    for number in range(100_000):
        asker = request(str(number), feature(f"picture {number}", raw=True))
        assert world.ask(asker)
        assert not world.half.has_cache_item(f"picture {number}")
        if number % 100 == 0:
            world.step()
    world.step()
    assert set(world.sizes().values()) == {0}


def test_what_requests_leave_behind_is_given_back_in_time(world: World) -> None:
    for number in range(300):
        world.stock(number)
        asker = request(str(number), feature(number))
        world.ask(asker)
        world.step()
        world.finish(number, FetchOutcome.READY if number % 3 else FetchOutcome.ABSENT)
        world.ask(asker)
        world.schedule(asker)
        plan = world.step(freed=[number - 1])
        world.report(plan.step)
        world.half.request_finished(asker)
        world.clock.now_s += 0.5
    world.clock.now_s += LEASE_S + 2
    world.step(freed=[299])
    assert set(world.sizes().values()) == {0}
    assert not world.prefetcher.live


def test_a_new_process_prepares_what_is_urgent_first_and_what_nobody_wants_last() -> None:
    mark = TierId("host", "folder")
    ranks = Ranks(1, mark, steps_in_flight=2, heard_without_tokens=True)
    world = World(ranks_apart=ranks, ranks=1)
    world.stock("a", "b")
    world.report(0, present={0: RankStatus("one", shares=False)})
    world.step()  # orders go out with steps
    leaving = request("leaving", feature("b"))
    assert not world.ask(request("waiting", feature("a")))
    assert not world.ask(leaving)
    world.step()
    world.finish("b")  # pinned here; the rank elsewhere has not answered
    world.ask(leaving)
    world.report(1, ready={2: {0: "0" * 32}})
    assert world.ask(leaving)
    world.half.request_finished(leaving)
    world.step()
    world.report(2, present={0: RankStatus("two", shares=False)})
    orders = world.step().ranks
    assert orders is not None
    by_ticket = {order.ticket: (order.identifier, order.priority) for order in orders.prepare}
    assert (identifier_of("a"), Priority.DEMAND) in by_ticket.values()
    assert [by_ticket[ticket][0] for ticket in orders.demoted] == [identifier_of("b")]

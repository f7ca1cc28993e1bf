# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: which requests wait, for what, and for how long."""

from __future__ import annotations

import pytest

from s3ec.connector.item_tracker import LEASE_S, RETRY_AFTER_S
from s3ec.connector.request_waits import MOST_IN_VAIN, VAIN_REST_S
from s3ec.prefetch import FetchOutcome, Priority
from tests.unit.connector.scheduling import (
    ROWS,
    World,
    bare,
    feature,
    identifier_of,
    request,
)

# -- deferral -------------------------------------------------------------------------------------


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
    entry = world.finish("a")
    assert entry is not None
    assert world.run(asker) == [True]
    plan = world.step()
    assert [(load.identifier, load.path) for load in plan.loads] == [
        (identifier_of("a"), entry.path)
    ]
    assert plan.loads[0].shape.rows == ROWS
    assert world.counters.get("hits") == 1
    assert world.counters.get("deferred_requests") == 1
    assert world.counters.get("deferred_seconds") == pytest.approx(0.3)


def test_a_miss_is_not_waited_for(world: World) -> None:
    assert world.run(request("r", feature("a"))) == [False]
    assert world.step().loads == []
    assert world.wanted == []
    assert world.counters.get("misses") == 1


def test_a_request_waits_for_all_of_its_images_and_no_longer(world: World) -> None:
    world.stock("a", "b")
    asker = world.deferred(request("r", feature("a"), feature("x", 10), feature("b", 20)))
    world.finish("b")
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.run(asker) == [True, False, True]
    assert {load.identifier for load in world.step().loads} == {
        identifier_of("a"),
        identifier_of("b"),
    }


@pytest.mark.parametrize(
    "outcome",
    [FetchOutcome.ABSENT, FetchOutcome.MISMATCH, FetchOutcome.CORRUPT, FetchOutcome.UNAVAILABLE],
)
def test_a_failed_fetch_ends_the_wait_and_is_not_tried_again_for_a_while(
    world: World, outcome: FetchOutcome
) -> None:
    asker = world.defer("a")
    world.finish("a", outcome)
    assert world.run(asker) == [False]
    world.clock.now_s += RETRY_AFTER_S - 0.01
    assert world.ask(request("other", feature("a")))
    world.step(freed="a")
    assert len(world.wanted) == 1
    world.clock.now_s += 0.01
    assert not world.ask(request("later", feature("a")))
    world.step()
    assert len(world.wanted) == 2


def test_the_wait_is_bounded_and_the_download_goes_on(world: World) -> None:
    asker = world.defer("a")
    world.clock.now_s += 1.99
    assert not world.ask(asker)
    world.clock.now_s += 0.01
    assert world.run(asker) == [False]
    assert world.step().loads == []
    assert world.counters.get("defer_timeouts") == 1
    assert world.counters.get("deferred_seconds") == pytest.approx(2.0)
    world.finish("a")
    later = request("later", feature("a"))
    world.step(freed="a")
    assert world.run(later) == [True]


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


def test_time_in_which_vllm_does_not_ask_is_no_wait(world: World) -> None:
    """A full engine leaves its queue early: who stands at its end is asked about much later."""
    world.put_here("a")
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", source="tier")
    for _ in range(40):
        world.clock.now_s += 1.0
        world.run(request("other", feature("nothing")))
        world.step(freed=["nothing"])
    # Its lease has ended meanwhile.
    assert not world.ask(asker)
    world.step()
    world.finish("a", source="tier")
    assert world.run(asker) == [True]
    assert world.counters.get("defer_timeouts") == 0


def test_a_wait_is_longer_by_its_pauses_and_no_more(world: World) -> None:
    """Also where the answer is repeated after a pause, and nothing looked at."""
    world.stock("slow")
    asker = world.deferred(request("r", feature("slow")))
    began_s, pauses = world.clock.now_s, 0
    for number in range(1, 100):
        world.clock.now_s += 0.1
        if world.ask(asker):
            break
        world.step()
        if number % 4 == 0:
            for _ in range(4):  # passes in which nobody is asked about
                world.clock.now_s += 0.1
                world.step()
            pauses += 1
    assert pauses > 3
    assert world.counters.get("deferred_seconds") == pytest.approx(2.0, abs=0.11)
    assert world.clock.now_s - began_s == pytest.approx(2.0 + pauses * 0.4, abs=0.11)


@pytest.mark.parametrize("how", ["computed", "stopped"])
def test_a_wait_ends_where_its_request_goes_on_without_the_embedding(
    world: World, how: str
) -> None:
    """A twin has computed the prompt, or the weights have changed. vLLM asks on in each pass."""
    asker = world.defer("a")
    world.clock.now_s += 0.3
    if how == "stopped":
        world.half.stop()
    computed = asker.num_prompt_tokens if how == "computed" else 0
    for _ in range(10):
        assert world.ask(asker, computed)
        world.step()
        world.clock.now_s += 1.0
    world.end(asker)
    assert world.counters.get("deferred_seconds") == pytest.approx(0.3)


# -- the bucket's troubles and this node's disk ---------------------------------------------------


def wait_for_nothing(world: World, times: int = MOST_IN_VAIN, *, local: bool = False) -> None:
    """Have requests wait as long as they may for what comes 4 s after it was asked for."""
    slow = [f"slow {world.clock.now_s} {number}" for number in range(times)]
    world.stock(*slow)
    askers = [request(text, feature(text)) for text in slow]
    for text in slow if local else ():
        world.put_here(text)
    for asker in askers:
        assert not world.ask(asker)
    world.step()
    world.clock.now_s += 2.1
    for asker in askers:
        assert world.ask(asker)
        world.end(asker)
    for text in slow:
        world.finish(text, source="tier" if local else "bucket", seconds=4.0)
    world.step()


def test_after_waits_in_vain_nobody_waits_for_the_bucket_until_something_comes_in_time(
    world: World,
) -> None:
    """However long that takes: a store that hangs costs three waits, and no more later."""
    wait_for_nothing(world)
    world.stock("a", "b", "c", "d")
    for text in "ab":
        assert world.ask(request(text, feature(text)))
        world.step()
        world.clock.now_s += VAIN_REST_S
    assert world.ask(request("c", feature("c")))
    world.step()
    world.finish("c", seconds=0.1)
    assert not world.ask(request("d", feature("d")))


def test_what_came_soon_after_a_long_time_in_the_queue_did_not_come_in_time(world: World) -> None:
    wait_for_nothing(world)
    world.stock("queued", "a")
    assert world.ask(request("queued", feature("queued")))
    world.step()
    world.clock.now_s += 3.0
    world.step()
    world.finish("queued", seconds=0.1)
    assert world.ask(request("a", feature("a")))


def test_what_came_during_a_long_step_came_in_time(world: World) -> None:
    """Nobody looks in the middle of a step. This one takes longer than anybody would wait."""
    wait_for_nothing(world)
    world.stock("a", "b")
    assert world.ask(request("a", feature("a")))
    world.step()
    world.finish("a", seconds=0.1)
    world.clock.now_s += 3.0
    assert not world.ask(request("b", feature("b")))


def test_a_request_without_pixels_waits_for_a_bucket_that_rests(world: World) -> None:
    """It has no other chance: it would fail, though its embedding comes a little later."""
    wait_for_nothing(world)
    world.stock("a", "bare")
    assert world.ask(request("pixels", feature("a")))
    asker = request("no pixels", bare("bare"))
    assert not world.ask(asker)
    assert world.failed() == set()
    world.step()
    world.clock.now_s += 3.0
    world.finish("bare")
    assert world.run(asker) == [True]
    assert world.failed() == set()


def test_what_lies_on_this_node_is_waited_for_however_slow_the_bucket_was(world: World) -> None:
    wait_for_nothing(world)
    world.stock("here", "away")
    world.put_here("here")
    asker = world.deferred(request("r", feature("here"), feature("away", 10)))
    world.finish("here", source="tier")
    assert world.run(asker) == [True, False]


def test_a_disk_too_slow_for_anybody_is_not_waited_for_either_and_hides_no_bucket(
    world: World,
) -> None:
    wait_for_nothing(world, local=True)
    world.stock("here", "away")
    world.put_here("here")
    assert world.ask(request("here", feature("here")))
    assert not world.ask(request("away", feature("away")))
    world.step()
    world.finish("here", source="tier", seconds=0.1)
    world.put_here("again")
    assert not world.ask(request("again", feature("again")))


def test_a_failure_of_the_bucket_is_forgotten_when_the_entry_comes_to_this_disk(
    world: World,
) -> None:
    asker = world.defer("a")
    world.finish("a", FetchOutcome.UNAVAILABLE)
    assert world.ask(asker)
    world.put_here("a")
    other = world.deferred(request("other", feature("a")))
    world.finish("a", FetchOutcome.UNAVAILABLE)  # the disk refuses: not again at once
    assert world.ask(other)


def test_each_turn_of_a_session_waits_anew(world: World) -> None:
    world.stock("a", "b")
    session = world.deferred(request("r", feature("a")))
    world.clock.now_s += 2.1
    world.run(session)
    world.step()
    session.mm_features.append(feature("b", 10))
    session.num_prompt_tokens = 20
    assert not world.ask(session, 8)


# -- who waits for what ---------------------------------------------------------------------------


def test_what_is_first_in_the_queue_is_submitted_first(world: World) -> None:
    texts = [f"picture {number}" for number in range(6)]
    world.stock(*texts)
    for place in range(0, 6, 2):
        asker = request(str(place), feature(texts[place]), feature(texts[place + 1], 10))
        assert not world.ask(asker)
    world.step(tokens=0)
    assert world.wanted == [identifier_of(text) for text in texts]


def test_a_client_that_leaves_takes_only_its_own_interest_along(world: World) -> None:
    world.stock("a", "b")
    first = request("first", feature("a"), feature("b", 10))
    second = request("second", feature("b"))
    world.ask(first)
    world.ask(second)
    world.step()
    world.end(first)
    world.step(tokens=0)
    assert world.prefetcher.demoted == [identifier_of("a")]
    world.end(second)
    world.step(tokens=0)
    assert world.prefetcher.demoted == [identifier_of("a"), identifier_of("b")]
    assert not world.half.tracker.waiting


def test_an_image_that_another_request_had_encoded_is_not_waited_for(world: World) -> None:
    world.stock("a")
    first, second = request("first", feature("a")), request("second", feature("a"))
    assert not world.ask(first)
    world.step()
    world.clock.now_s += 1.0
    assert not world.ask(first)
    assert not world.ask(second)
    world.step()
    world.clock.now_s += 1.0
    assert world.run(first) == [False]
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
    assert not world.half.tracker.waiting


def test_where_nobody_ever_waits_what_arrives_is_kept_for_the_next() -> None:
    world = World(defer_timeout_s=0.0)
    world.stock("a")
    assert world.ask(request("first", feature("a")))
    world.step()
    assert [want.priority for want in world.prefetcher.submitted] == [Priority.DEMAND]
    assert world.counters.get("deferred_requests") == 0
    world.finish("a")
    world.step()
    world.clock.now_s += LEASE_S - 1
    world.step()
    assert world.run(request("second", feature("a"))) == [True]


# -- a store that is down -------------------------------------------------------------------------


def test_while_the_store_is_down_nobody_waits_for_it(world: World) -> None:
    world.stock("a")
    world.store.is_open = True
    assert world.ask(request("r", feature("a")))
    world.step()
    assert world.wanted == []
    world.store.is_open = False
    assert not world.ask(request("r", feature("a")))


def test_who_waits_when_the_store_goes_down_waits_no_longer(world: World) -> None:
    world.stock("a")
    first, second = (request(name, feature("a")) for name in ("first", "second"))
    assert not world.ask(first)
    world.step()
    world.store.is_open = True
    assert world.run(first) == [False]
    world.step(freed="a")
    # What was on its way arrives all the same, and serves the next one.
    world.finish("a")
    assert world.run(second) == [True]


def test_who_has_no_pixels_waits_though_the_store_is_down(world: World) -> None:
    world.stock("a")
    asker = world.deferred(request("r", feature("a", pixels=False)))
    world.store.is_open = True
    assert not world.ask(asker)

# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: what is fetched and granted, and how long it is held open."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.item_tracker import LEASE_S
from s3ec.prefetch import FetchOutcome, Priority
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    World,
    bare,
    feature,
    identifier_of,
    request,
)

# -- which features -------------------------------------------------------------------------------


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
    assert not world.ask(asker, 19)  # covered in part


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
    world.run(asker, 0)
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
    asker = world.deferred(request("r", feature("a"), feature("b", 10 * WINDOW)))
    world.finish("a")
    assert not world.ask(asker)
    world.step()
    world.finish("b")
    assert world.run(asker, 0) == [True]
    world.report(world.step().step)
    world.step()
    assert world.schedule(asker, 1) == [True]
    assert [load.identifier for load in world.step().loads] == [identifier_of("b")]


@pytest.mark.parametrize(
    ("name", "counted"),
    [("renderer0-mm-1-image-0", 1), ("\ud800", 1), ("x" * 5000, 1), ("lora:renderer0-mm-1-a-0", 1)],
)
def test_a_refused_identifier_is_a_counted_miss(name: str, counted: int) -> None:
    world = World(producer=True)
    asker = request("r", feature(name, raw=True))
    assert world.ask(asker)
    assert world.counters.get("refused_identifiers") == counted
    assert not world.half.has_cache_item(name)
    world.half.update_state_after_alloc(asker, 0)
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])


def test_embeddings_that_the_request_brought_are_ignored() -> None:
    world = World(producer=True)
    world.stock("a")
    asker = request("r", feature("a", modality="prompt_embeds"))
    assert world.run(asker) == [False]
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])
    assert world.counters.get("refused_identifiers") == 0
    assert world.counters.get("misses") == 0


# -- grants ---------------------------------------------------------------------------------------


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
    asker = world.defer("a")
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
    world.run(asker)
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
    world.run(asker)
    world.step(tokens=0)
    plan = world.step(freed="a")
    assert [load.identifier for load in plan.loads] == [identifier_of("b")]
    assert world.run(request("again", feature("a"))) == [True]
    plan = world.step()
    assert [load.path for load in plan.loads] == [str(path)]
    world.report(plan.step)
    assert path not in world.prefetcher.live


@pytest.mark.parametrize(
    ("held", "freed", "loads"),
    [
        (True, "a", 1),  # given up, and allocated: old releases name it all the same
        (True, "aa", 0),  # and given up once more
        (False, "a", 0),  # allocated, and preempted in the same pass: another needed the room
    ],
)
def test_only_what_the_device_holds_at_the_end_of_the_pass_is_loaded(
    world: World, held: bool, freed: str, loads: int
) -> None:
    asker = request("r", feature("a"))
    world.make_resident("a")
    if held:
        assert world.run(request("load", feature("a"))) == [True]
        world.report(world.step().step)
        world.half.device = ()  # it was given up for an earlier request of this pass
    assert world.run(asker) == [True]
    assert len(world.step(freed=freed).loads) == loads
    assert world.is_on_device("a") is bool(loads)
    assert world.run(asker) == [True]
    assert len(world.step().loads) == 1


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


@pytest.mark.parametrize("other", [{"rows": ROWS + 1}, {"modality": "video"}])
def test_where_vllm_asks_once_disagreeing_requests_get_nothing(other: dict[str, Any]) -> None:
    world = World(asked_every_pass=False)
    world.bring("a")
    assert world.ask(request("honest", feature("a")))
    assert world.has("a")
    assert world.ask(request("liar", feature("a", **other)))
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


def test_a_name_of_an_image_and_of_a_video_gives_neither_the_others_embedding(
    world: World,
) -> None:
    """A client's name for two things, with as many rows."""
    world.bring("a")
    image, video = (request(kind, feature("a", modality=kind)) for kind in ("image", "video"))
    assert world.ask(video)
    assert not world.has("a")
    assert world.counters.get("mismatch.modality") == 1
    assert world.ask(image)
    assert world.has("a")


def test_what_failed_as_a_video_is_fetched_as_the_image_that_it_is(world: World) -> None:
    world.stock("a")
    image, video = bare("a"), request("video", feature("a", modality="video"))
    assert not world.ask(video)
    world.step()
    world.finish("a", FetchOutcome.MISMATCH)
    assert world.ask(video)
    asker = request("image", image)
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.ask(asker)
    assert world.has("a")
    assert [want.modality for want in world.prefetcher.submitted] == ["video", "image"]


# -- how long an entry is held open ---------------------------------------------------------------


def test_an_entry_is_let_go_of_by_the_workers_report(world: World) -> None:
    step, path = world.load_one()
    assert path in world.prefetcher.live
    world.report(step)
    assert world.prefetcher.released == [path]
    assert not world.half.tracker.items


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_without_a_report_an_entry_stays_open_for_the_steps_in_flight(steps: int) -> None:
    """Old releases do not report; a step that reads the file can still be running."""
    world = World(steps_in_flight=steps)
    _, path = world.load_one()
    for _ in range(steps):
        world.step()
        assert path in world.prefetcher.live
    world.step()
    assert path not in world.prefetcher.live


def test_what_comes_though_the_item_is_here_already_is_let_go_of(world: World) -> None:
    world.defer("a")
    wanted = dict(world.prefetcher.open)
    world.finish("a")
    assert world.ask(request("takes the news", feature("x")))
    world.prefetcher.open |= wanted
    second = world.finish("a")
    assert second is not None
    world.step()
    assert world.ask(request("takes the news again", feature("y")))
    assert world.prefetcher.released == [second.path]


def test_late_double_and_unknown_reports_are_harmless(world: World) -> None:
    step, path = world.load_one()
    world.report(step)
    world.report(step)
    world.report(step + 100)
    assert world.prefetcher.released == [path]


def test_each_of_two_steps_that_load_an_image_holds_what_it_loads() -> None:
    """Evicted on the device in between, as async scheduling allows."""
    world = World(steps_in_flight=5)
    first, path = world.load_one()
    world.step(freed="a")
    again = world.deferred(request("again", feature("a")))
    entry = world.finish("a")
    assert entry is not None
    assert world.run(again) == [True]
    second = world.step().step
    assert set(world.prefetcher.live) == {path, entry.path}
    world.report(second)
    assert world.prefetcher.released == [entry.path]
    world.report(first)
    assert world.prefetcher.released == [entry.path, path]


def test_a_reset_lets_go_of_a_load_that_no_step_has_carried_yet(world: World) -> None:
    world.bring("a")
    asker = request("r", feature("a"))
    assert world.run(asker) == [True]
    world.step(tokens=0)
    world.half.device_was_reset()
    world.half.stop()
    world.end(asker)
    world.clock.now_s += LEASE_S + 1
    assert world.step().loads == []
    assert not world.prefetcher.live


def test_a_device_cache_that_was_reset_without_a_word_costs_one_encode(world: World) -> None:
    step, _ = world.load_one()
    world.report(step)
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert not world.has("a")  # vLLM asks, so the device does not hold it
    world.step()
    assert not world.ask(asker)


# -- ranks that cannot be told to load ------------------------------------------------------------


def test_where_ranks_cannot_be_told_nothing_is_fetched_waited_for_or_granted() -> None:
    world = World(producer=True, can_load=False)
    world.stock("a")
    world.make_resident("a")
    asker = request("r", feature("a"), feature("b", 10))
    assert world.run(asker) == [False, False]
    plan = world.step()
    assert (plan.loads, world.wanted) == ([], [])
    assert list(plan.saves) == [identifier_of("b")]
    assert not world.ask(request("bare", bare("a")))
    assert world.failed() == {"bare"}


# -- memory ---------------------------------------------------------------------------------------


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
    assert world.leftovers() == []


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
        world.end(asker)
        world.clock.now_s += 0.5
    world.clock.now_s += LEASE_S + 2
    world.step(freed=[299])
    assert world.leftovers() == []
    assert not world.prefetcher.live


def test_what_an_earlier_request_of_the_pass_has_pushed_out_is_fetched(world: World) -> None:
    """vLLM tells at the end of the pass. A manager of ours shows what is there at the moment."""
    step, _ = world.load_one("a")
    world.report(step)
    world.clock.now_s += 100
    world.step()
    assert world.is_on_device("a")
    device = {identifier_of("a")}
    world.half.device = device
    asker = request("r", feature("a"))
    assert world.ask(asker)  # it is there
    device.clear()
    assert not world.ask(request("next", feature("a")))

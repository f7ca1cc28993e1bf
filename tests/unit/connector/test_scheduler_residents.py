# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: what this process has open is granted in the pass that asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.item_tracker import LEASE_S
from s3ec.identity import ModalityScopes
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    World,
    bare,
    feature,
    identifier_of,
    request,
)
from tests.unit.tier.cases import key_of


def not_at_once(world: World, asker: Any) -> bool:
    """Whether a request of one picture is let through without it."""
    return world.run(asker) == [False] and world.step().loads == []


# -- at once --------------------------------------------------------------------------------------


def test_a_resident_is_granted_in_the_pass_that_asks_for_it(world: World) -> None:
    """Whatever index and node remember: it is open."""
    entry = world.make_resident("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    assert world.has("a")
    world.half.update_state_after_alloc(asker, 0)
    (load,) = world.step().loads
    assert (load.identifier, load.path) == (identifier_of("a"), entry.path)
    assert load.shape.rows == ROWS
    assert world.wanted == []
    counted = {name: world.counters.get(name) for name in ("hits", "misses", "deferred_requests")}
    assert counted == {"hits": 1, "misses": 0, "deferred_requests": 0}
    assert world.counters.get("lookups.node.hit") == 1
    assert world.counters.get("lookups.bucket.hit") == 0


def test_a_request_waits_for_what_is_not_resident_alone(world: World) -> None:
    world.make_resident("a")
    world.stock("b")
    asker = world.deferred(request("r", feature("a"), feature("b", 10)))
    assert world.wanted == [identifier_of("b")]
    world.finish("b")
    assert world.run(asker) == [True, True]


def test_a_resident_beyond_the_window_is_not_fetched(world: World) -> None:
    world.make_resident("b")
    asker = request("r", feature("a"), feature("b", WINDOW))
    world.run(asker, 0)
    world.step()
    assert world.wanted == []
    assert world.ask(asker, 1)
    assert world.schedule(asker, 1) == [True]


def test_what_the_device_has_evicted_is_granted_at_once(world: World) -> None:
    step, _ = world.load_one("a")
    world.report(step)
    entry = world.make_resident("a")
    world.step(freed=["a"])
    fetched = list(world.wanted)
    assert world.run(request("again", feature("a"))) == [True]
    assert [load.path for load in world.step().loads] == [entry.path]
    assert world.wanted == fetched


def test_what_the_device_holds_is_not_opened_for_who_has_pixels(world: World) -> None:
    step, _ = world.load_one("a")
    world.report(step)
    world.make_resident("a")
    assert world.ask(request("again", feature("a")))
    assert not world.half.tracker.items


def test_a_resident_that_was_not_scheduled_after_all_is_let_go_of_in_time(world: World) -> None:
    entry = world.make_resident("a")
    asker = request("r", feature("a"))
    assert world.ask(asker)
    world.end(asker)
    world.clock.now_s += LEASE_S
    world.step()
    assert entry.path in world.prefetcher.live
    world.clock.now_s += 1.1
    world.step()
    assert world.prefetcher.released == [entry.path]
    assert world.leftovers() == []


# -- once -----------------------------------------------------------------------------------------


def test_a_resident_is_let_go_of_once_after_its_step_was_reported() -> None:
    world = World(ranks=2)
    entry = world.make_resident("a")
    world.run(request("r", feature("a")))
    step = world.step().step
    world.report(step, 0)
    assert world.prefetcher.released == []
    assert entry.verified_s < world.clock()
    world.report(step, 1)
    world.report(step, 0, 1)
    assert world.prefetcher.released == [entry.path]
    assert entry.verified_s == world.clock()
    world.step(freed=["a"])
    assert world.leftovers() == []


def test_two_requests_of_a_pass_share_one_item(world: World) -> None:
    entry = world.make_resident("a")
    assert world.run(request("first", feature("a"))) == [True]
    second = request("second", feature("a"))
    assert world.ask(second)  # the first has it allocated
    plan = world.step()
    assert len(plan.loads) == 1
    world.report(plan.step)
    assert world.prefetcher.released == [entry.path]


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "counter"),
    [({"rows": ROWS + 1}, "rows"), ({"modality": "video"}, "modality")],
)
@pytest.mark.parametrize("asked_every_pass", [True, False])
def test_a_resident_of_another_kind_is_a_mismatch_and_not_granted(
    asked: dict[str, Any], counter: str, asked_every_pass: bool
) -> None:
    world = World(asked_every_pass=asked_every_pass)
    world.make_resident("a")
    assert not_at_once(world, request("r", feature("a", **asked)))
    assert world.counters.get(f"mismatch.{counter}") == 1
    assert world.wanted == []
    assert world.counters.get("misses") == 1


def test_features_of_one_request_that_disagree_are_granted_by_the_first() -> None:
    """vLLM asks by the name alone."""
    world = World()
    world.make_resident("a")
    asker = request("r", feature("a", rows=ROWS + 1), feature("a", 10))
    assert world.ask(asker)
    assert not world.has("a")


def test_without_pixels_a_resident_of_other_rows_is_given_up(world: World) -> None:
    world.make_resident("a")
    assert not world.ask(request("r", bare("a", rows=ROWS + 1)))
    assert world.failed() == {"r"}


# -- without pixels -------------------------------------------------------------------------------


def test_without_pixels_a_resident_of_the_same_placeholder_is_granted_at_once(
    world: World,
) -> None:
    world.prefetcher.placeholder = {"image_grid_thw": [[1, 2, 2]]}
    world.make_resident("a")
    assert world.run(request("r", bare("a"))) == [True]
    assert world.wanted == []


def test_without_pixels_a_resident_of_another_placeholder_is_refused(world: World) -> None:
    """vLLM would place its rows otherwise, and answer others from its prefix cache."""
    world.prefetcher.placeholder = {"image_grid_thw": [[1, 4, 1]]}
    world.make_resident("a")
    assert not world.ask(request("r", bare("a")))
    assert world.failed() == {"r"}
    assert world.counters.get("mismatch.placeholder") == 1
    assert world.step().loads == []
    assert world.run(request("pixels", feature("a"))) == [True]  # which say it themselves


# -- not at once ----------------------------------------------------------------------------------


def test_with_an_open_breaker_a_resident_is_looked_at_first(world: World) -> None:
    """Nobody could stand in for a file that has rotted; what was hashed a moment ago has not."""
    world.make_resident("a")
    world.put_here("a")
    world.store.is_open = True
    asker = world.deferred(request("r", feature("a")))
    assert world.wanted == [identifier_of("a")]
    world.half.waits.look_at_all()
    assert not world.ask(asker)  # the disk can give it, so the wait goes on
    world.step()
    world.finish("a", source="tier")
    assert world.run(asker) == [True]


def test_while_the_disk_hangs_no_resident_is_granted(world: World) -> None:
    world.make_resident("a")
    world.put_here("a")
    world.disk.hangs = True
    assert not_at_once(world, request("r", feature("a")))
    world.step(freed=["a"])
    world.disk.hangs = False
    assert world.run(request("later", feature("a"))) == [True]


def test_after_the_weights_were_replaced_no_resident_is_granted(world: World) -> None:
    world.make_resident("a", ROWS)
    world.make_resident("b")
    assert world.ask(request("before", feature("b")))
    world.half.device_was_reset()
    world.half.stop()
    for text in "ab":
        assert not_at_once(world, request(text, feature(text)))


def test_a_resident_is_found_by_the_name_that_its_modality_is_stored_under() -> None:
    """Whoever asks under vLLM's name alone must not be given what another form has."""
    scopes = ModalityScopes({"video": "two-frames"})
    world = World(scopes=scopes)
    entry = world.make_resident("a", modality="video")  # stored without the scope
    asker = request("r", feature("a", modality="video"))
    assert not_at_once(world, asker)
    name = scopes.name(identifier_of("a"), "video")
    world.prefetcher.resident[key_of(name).digest] = entry
    world.step(freed=["a"])
    assert world.run(request("later", feature("a", modality="video"))) == [True]
    (load,) = world.step().loads
    assert (load.identifier, load.renamed) == (identifier_of("a"), name)

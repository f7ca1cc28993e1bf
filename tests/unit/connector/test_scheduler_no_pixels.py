# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: features without pixels, which have no other chance; a disk that hangs."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.item_tracker import FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH, RETRY_AFTER_S
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import (
    ROWS,
    WINDOW,
    Clock,
    World,
    bare,
    feature,
    identifier_of,
    request,
)

# -- features without pixels ----------------------------------------------------------------------


def test_a_feature_without_pixels_is_asked_for_even_when_the_index_says_no(world: World) -> None:
    asker = request("r", bare("a"))
    world.store.is_open = True
    assert not world.ask(asker)
    world.step()
    assert world.wanted == [identifier_of("a")]
    world.finish("a")
    assert world.run(asker) == [True]
    assert world.failed() == set()


def test_it_is_waited_for_beside_one_of_another_size_that_nobody_would_fetch(
    world: World,
) -> None:
    """Both have one uuid. The second look must not take away what the first one waits for."""
    asker = world.deferred(request("r", bare("a"), feature("a", 10, rows=ROWS + 1)))
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.clock.now_s += 0.1
    assert not world.ask(asker)
    world.step()
    world.finish("a")
    assert world.run(asker, 0) == [True]


def test_it_is_given_up_at_once_where_what_is_stored_does_not_fit(world: World) -> None:
    asker = world.deferred(request("r", feature("x"), bare("a", 10)))
    world.finish("a", FetchOutcome.MISMATCH)
    assert not world.ask(asker)
    assert not world.ask(asker)
    assert world.failed() == {"r"}
    assert world.failed() == set()
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
    assert world.run(asker) == [True]
    assert world.failed() == set()
    expected = [FIRST_PAUSE_S, PAUSE_GROWTH * FIRST_PAUSE_S, PAUSE_GROWTH**2 * FIRST_PAUSE_S]
    assert pauses[:3] == pytest.approx(expected)
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)


@pytest.mark.parametrize("outcome", NOT_YET)
def test_it_fails_alone_when_its_embedding_does_not_come_in_time(
    world: World, outcome: FetchOutcome
) -> None:
    asker = request("r", bare("a"))
    other = request("other", feature("b"))
    began_s = world.clock.now_s
    while not (failed := world.failed()):
        assert not world.ask(asker)
        assert world.ask(other)
        world.step()
        if identifier_of("a") in world.prefetcher.open:
            world.finish("a", outcome)
        world.clock.now_s += 0.04
    assert failed == {"r"}
    assert NO_PIXELS_WAIT_S <= world.clock.now_s - began_s < NO_PIXELS_WAIT_S + 0.1
    world.end(asker)
    # The bucket was not slow: others still wait for it.
    world.stock("c")
    assert not world.ask(request("r2", feature("c")))


def test_one_prompt_may_name_it_with_and_without_pixels(world: World) -> None:
    asker = world.deferred(
        request("r", bare("a"), feature("a", 10), feature("a", 20, rows=ROWS + 1))
    )
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
    world.put_here("a")  # another engine of this node fetched it
    world.clock.now_s += 2 * FIRST_PAUSE_S
    assert not world.ask(asker)
    assert not world.ask(other)
    world.step()
    world.finish("a", source="tier")
    assert world.run(other) == [True]


@pytest.mark.parametrize("defer_timeout_s", [0.0, 2.0, 2 * NO_PIXELS_WAIT_S])
def test_it_waits_longer_than_others_and_is_given_up_in_the_end(defer_timeout_s: float) -> None:
    world = World(defer_timeout_s=defer_timeout_s)
    asker = world.defer("a", stocked=False, pixels=False)
    world.clock.now_s += max(defer_timeout_s, NO_PIXELS_WAIT_S) - 0.1
    for _ in range(3):
        assert not world.ask(asker)
        world.step()
    assert world.failed() == set()
    world.clock.now_s += 0.2
    assert not world.ask(asker)
    assert world.failed() == {"r"}
    assert world.counters.get("deferred_requests") == world.counters.get("defer_timeouts") == 1


def test_without_deferral_it_is_served_when_its_embedding_comes() -> None:
    world = World(defer_timeout_s=0.0)
    world.stock("b")
    asker = world.deferred(request("r", bare("a"), feature("b", 10)))
    world.clock.now_s += NO_PIXELS_WAIT_S / 2
    world.finish("a")
    assert world.ask(asker)  # pixels are not waited for
    assert world.schedule(asker) == [True, False]
    assert world.failed() == set()


def test_it_is_never_scheduled_however_the_clock_moves_within_a_call() -> None:
    """The time can run out between two looks at the clock."""
    world = World(Clock(tick_s=0.07))
    world.stock("b")
    asker = request("r", bare("a"), feature("b", 20))
    world.ask(asker)
    for _ in range(400):
        world.step()
        assert not world.ask(asker)
    assert world.failed() == {"r"}


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
    assert world.failed() == {"r"}


def test_it_is_held_open_though_the_device_holds_it(world: World) -> None:
    """The device may evict it before vLLM asks."""
    step, _ = world.load_one()
    world.report(step)
    asker = world.defer("a", stocked=False, pixels=False)
    world.finish("a")
    assert world.ask(asker)
    assert world.has("a")


def test_beyond_the_window_it_is_not_waited_for_yet(world: World) -> None:
    asker = world.deferred(request("r", bare("a"), bare("b", WINDOW)))
    world.finish("a")
    world.finish("b", FetchOutcome.MISMATCH)
    world.run(asker, 0)
    world.step()
    assert not world.ask(asker, 1)
    assert world.failed() == {"r"}


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
    assert world.failed() == {"liar"}
    world.step()
    world.finish("a", holds=ROWS)
    assert world.ask(honest)
    assert world.has("a")


def test_a_request_that_ends_first_is_not_failed(world: World) -> None:
    asker = request("r", bare("renderer0-mm-1-image-0", raw=True))
    world.ask(asker)
    world.end(asker)
    assert world.failed() == set()


# -- a disk that hangs ----------------------------------------------------------------------------


def test_while_the_disk_hangs_nothing_is_waited_for_or_granted(world: World) -> None:
    world.bring("ready")
    world.stock("new", "coming")
    coming = request("coming", feature("coming"))
    assert not world.ask(coming)
    world.step()
    world.disk.hangs = True
    assert world.run(coming) == [False]
    for text in ("ready", "new"):
        asker = request(text, feature(text))
        assert world.ask(asker)
        assert world.schedule(asker) == [False]
    assert world.step().loads == []
    world.disk.hangs = False
    assert world.run(request("again", feature("ready"))) == [True]


def test_while_the_disk_hangs_the_index_is_not_asked_since_it_may_hang_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(_: object) -> bool:
        raise AssertionError("a page of a mapped file")

    monkeypatch.setattr(world.index, "maybe_contains", touch)
    world.disk.hangs = True
    assert world.ask(request("r", feature("a")))


def test_while_the_disk_hangs_no_hook_of_a_pure_producer_or_a_report_asks_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    assert world.has("a")

    def touch(*_: object) -> bool:
        raise AssertionError("a page of a mapped file")

    monkeypatch.setattr(world.index, "maybe_contains", touch)
    monkeypatch.setattr(world.index, "add", touch)
    world.disk.hangs = True
    assert world.ask(request("r", feature("a")))
    assert not world.has("a")
    world.report(1, stored=[identifier_of("b")])


def test_what_came_without_pixels_is_granted_though_the_disk_hangs(world: World) -> None:
    """It has no other chance: the worker waits a little, and asks the bucket."""
    world.stock("a")
    asker = world.defer("a", stocked=False, pixels=False)
    world.finish("a")
    world.disk.hangs = True
    assert world.run(asker) == [True]


@pytest.mark.parametrize("bare_first", [True, False])
def test_the_same_with_pixels_in_the_prompt_takes_no_grant_away_while_the_disk_hangs(
    world: World, bare_first: bool
) -> None:
    one, two = (bare("a"), feature("a", 10)) if bare_first else (feature("a"), bare("a", 10))
    asker = world.deferred(request("r", one, two))
    world.finish("a")
    world.disk.hangs = True
    assert world.run(asker, 0) == [True]

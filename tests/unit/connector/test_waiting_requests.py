# SPDX-License-Identifier: Apache-2.0
"""A request that waits is looked at again when something has changed, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import World, bare, feature, identifier_of, request

ITEMS = 20
SPACING = 4


class Waits:
    """A world in which one request waits for many pictures, and looks at them are counted."""

    def __init__(self, world: World, *, without_pixels: bool = False) -> None:
        self.world = world
        self.texts = [f"picture {number}" for number in range(ITEMS)]
        world.stock(*self.texts)
        make = bare if without_pixels else feature
        self.request = request(
            "r", *(make(text, SPACING * place) for place, text in enumerate(self.texts))
        )
        self.looks = 0
        for each in self.request.mm_features:
            each.mm_position.get_num_embeds = self._rows
        assert not self.ask()

    def _rows(self) -> int:
        self.looks += 1
        return 4

    def ask(self, computed: int = 0) -> bool:
        """In a pass of its own."""
        answer = self.world.ask(self.request, computed)
        self.world.step()
        return answer

    def is_looked_at(self, computed: int = 0) -> bool:
        """Whether the next pass looks at the pictures again."""
        before = self.looks
        self.ask(computed)
        return self.looks > before


@pytest.fixture
def waits(world: World) -> Waits:
    return Waits(world)


def test_while_nothing_changes_no_picture_is_looked_at(world: World, waits: Waits) -> None:
    before = waits.looks
    for _ in range(100):
        world.clock.now_s += 0.001
        assert not waits.ask()
    assert waits.looks == before


def test_after_passes_of_a_full_engine_no_picture_is_looked_at(world: World, waits: Waits) -> None:
    """vLLM leaves its queue early then, and asks about nobody in it."""
    before = waits.looks
    for _ in range(20):
        for _ in range(2):
            world.clock.now_s += 0.001
            world.step()
        assert not waits.ask()
    assert waits.looks == before


@pytest.mark.parametrize("outcome", [FetchOutcome.READY, FetchOutcome.ABSENT])
def test_who_waits_for_what_has_ended_is_looked_at_once(
    world: World, waits: Waits, outcome: FetchOutcome
) -> None:
    world.finish(waits.texts[7], outcome)
    assert waits.is_looked_at()
    assert not waits.is_looked_at()


def test_who_waits_for_something_else_is_not_looked_at(world: World, waits: Waits) -> None:
    world.stock("other")
    other = world.deferred(request("other", feature("other")))
    world.finish("other")
    assert not waits.is_looked_at()
    assert world.ask(other)


def take_down_the_store(world: World) -> None:
    world.store.is_open = True


def hang_the_disk(world: World) -> None:
    world.disk.hangs = True


@pytest.mark.parametrize("change", [take_down_the_store, hang_the_disk])
def test_who_waits_for_a_store_or_disk_that_fails_is_let_go_in_the_next_pass(
    world: World, waits: Waits, change: Any
) -> None:
    assert not waits.ask()
    change(world)
    assert waits.ask()


def test_what_others_had_encoded_is_seen_and_so_is_what_the_device_gave_up(
    world: World, waits: Waits
) -> None:
    world.clock.now_s += 0.5
    hasty = request("hasty", feature(waits.texts[0]))
    world.store.is_open = True
    world.run(hasty)
    world.store.is_open = False
    world.step()
    assert waits.is_looked_at()
    assert not waits.is_looked_at()
    world.step(freed=[waits.texts[0]])
    assert waits.is_looked_at()


def test_a_wait_that_ends_between_question_and_answer_is_not_kept(world: World) -> None:
    world.clock.now_s = 1022.08
    waits = Waits(world)
    world.clock.now_s = 1024.08  # 2 s later, and as a difference a little less
    waits.ask()
    world.clock.now_s += 0.01
    assert waits.ask()


def test_what_came_and_was_let_go_in_a_long_wait_is_looked_for_again() -> None:
    world = World(defer_timeout_s=60.0)
    waits = Waits(world)
    world.finish(waits.texts[0])
    for _ in range(55):
        world.clock.now_s += 1.0
        assert not waits.ask()
    world.finish(waits.texts[0])
    for text in waits.texts[1:]:
        world.finish(text)
    assert world.ask(waits.request)
    assert world.schedule(waits.request) == [True] * ITEMS


def test_what_failed_and_was_encoded_since_is_not_fetched_again(world: World) -> None:
    world.stock("a")
    asker = world.deferred(request("r", feature("a")))
    world.finish("a", FetchOutcome.UNAVAILABLE)
    world.run(asker)
    world.step()
    world.clock.now_s += 5.0  # so that a failure is not the reason
    assert world.ask(request("later", feature("a")))
    world.step()
    assert world.wanted == [identifier_of("a")]

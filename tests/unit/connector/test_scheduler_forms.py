# SPDX-License-Identifier: Apache-2.0
"""The scheduler half, where a picture has another form when others are in its prompt."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.fetch import FetchOutcome
from tests.unit.connector.scheduling import (
    ROWS,
    World,
    bare,
    feature,
    identifier_of,
    request,
)


def world_of(most: int = 1, **role: Any) -> World:
    return World(most_alone={"image": most}, producer=True, **role)


def alone(text: str = "page", name: str = "alone", **more: Any) -> Any:
    return request(name, feature(text, **more))


def crowd(*texts: str, name: str = "crowd") -> Any:
    return request(name, *(feature(text, 10 * n) for n, text in enumerate(texts)))


def test_a_picture_alone_is_stored_and_loaded() -> None:
    world = world_of()
    assert world.run(alone()) == [False]
    assert list(world.step().saves) == [identifier_of("page")]
    (path,) = world.bring("other")
    assert world.run(alone("other")) == [True]
    assert [load.path for load in world.step().loads] == [str(path)]


@pytest.mark.parametrize("asked_every_pass", [True, False])
def test_among_others_nothing_is_fetched_granted_or_stored(asked_every_pass: bool) -> None:
    world = world_of(asked_every_pass=asked_every_pass)
    world.bring("page")  # which another request waits for: it is pinned
    world.stock("there")
    before = len(world.wanted)
    assert world.run(crowd("page", "there", "new")) == [False, False, False]
    plan = world.step()
    assert not plan.loads
    assert not plan.saves
    assert len(plan.encodes) == 3
    assert len(world.wanted) == before


def test_what_a_crowd_does_not_wait_for_is_granted_to_the_one_alone() -> None:
    world = world_of()
    one = world.defer("page")
    assert world.run(crowd("page", "other")) == [False, False]
    world.step()
    world.step(["page", "other"])
    world.finish("page")
    assert world.run(one) == [True]


def test_the_bound_is_the_processors_and_other_modalities_have_none() -> None:
    world = world_of(most=2)
    assert world.run(crowd("a", "b")) == [False, False]
    assert len(world.step().saves) == 2
    world = world_of()
    videos = request("r", *(feature(n, 10 * n, modality="video") for n in range(3)))
    world.run(request("r", feature("page"), *videos.mm_features))
    assert len(world.step().saves) == 4


def test_where_the_form_is_never_known_no_picture_is_stored_or_loaded() -> None:
    world = world_of(most=0)
    world.stock("page")
    assert world.run(alone()) == [False]
    assert not world.step().saves
    assert not world.wanted


def test_what_the_device_holds_in_another_form_is_not_stored_again() -> None:
    world = world_of()
    world.run(crowd("page", "other"))
    world.step()
    asker = alone()
    world.ask(asker)
    assert not world.step().saves


def test_what_vllm_keeps_in_another_form_is_not_stored() -> None:
    """Its cache of processed pictures gives the last form to a prompt of one picture."""
    world = world_of()
    world.run(crowd("page", "other"))
    world.step()
    world.step(["page", "other"])
    assert world.run(alone("page")) == [False]
    assert world.run(alone("new", name="new")) == [False]
    assert list(world.step().saves) == [identifier_of("new")]


def test_without_pixels_a_picture_among_others_fails_alone() -> None:
    world = world_of()
    world.stock("page")
    world.prefetcher.placeholder = world.placeholders
    asker = request("r", bare("page"), feature("other", 10))
    assert not world.ask(asker)
    assert world.failed() == {"r"}


def test_an_encoder_names_no_picture_that_it_does_not_store() -> None:
    world = World(most_alone={"image": 1}, producer=True, consumer=False)
    world.run(crowd("page", "other"))
    assert world.half.request_finished(crowd("page", "other")) == [0, 1]
    assert world.half.request_finished(alone()) == []
    world.stock("page")
    assert not world.ask(request("r", bare("page"), feature("other", 10)))
    assert world.failed() == {"r"}


def test_rows_of_the_other_form_are_neither_stored_nor_in_the_way() -> None:
    """A crowd that comes first does not take the place of what most prompts need."""
    world = world_of()
    pages = [feature("page", rows=ROWS + 3), feature("other", 20, rows=ROWS + 3)]
    world.run(request("crowd", *pages))
    assert not world.step().saves
    other = world_of()  # of another engine
    other.run(alone())
    assert list(other.step().saves) == [identifier_of("page")]
    world.stock("page")
    world.step(["page", "other"])
    one = world.deferred(alone())
    world.finish("page", FetchOutcome.READY, holds=ROWS)
    assert world.run(one) == [True]


def test_nothing_is_remembered_at_rest() -> None:
    world = world_of(asked_every_pass=False)
    asker = crowd("page", "other")
    world.run(asker)
    world.step()
    world.end(asker)
    world.step(["page", "other"])
    world.clock.now_s += 100
    world.step()
    assert world.leftovers() == []

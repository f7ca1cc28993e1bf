# SPDX-License-Identifier: Apache-2.0
"""The scheduler half, where a picture has another form when others are in its prompt."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.forms import Form
from tests.unit.connector.scheduling import (
    World,
    bare,
    feature,
    identifier_of,
    request,
)

TWO = Form(1, "squashes several")
NEVER = Form(0, "shrinks them")


def world_of(form: Form = TWO, **role: Any) -> World:
    return World(forms={"image": form}, **{"producer": True, **role})


def alone(text: str = "page", name: str = "alone", **more: Any) -> Any:
    return request(name, feature(text, **more))


def crowd(*texts: str, name: str = "crowd", **more: Any) -> Any:
    return request(name, *(feature(text, 10 * n, **more) for n, text in enumerate(texts)))


def saved(world: World) -> set[str]:
    """What the step has saved, by vLLM's name."""
    return set(world.step().saves)


def evict(world: World, *texts: str) -> None:
    world.step(texts)


def test_the_form_that_an_item_has_alone_is_stored_and_no_other() -> None:
    world = world_of()
    assert world.run(alone()) == [False]
    assert saved(world) == {identifier_of("page")}
    assert world.run(crowd("one", "two")) == [False, False]
    assert not saved(world)


def test_what_is_stored_of_the_one_form_is_not_loaded_for_the_other() -> None:
    world = world_of()
    world.stock("page", "other")
    assert world.run(crowd("page", "other")) == [False, False]
    world.step()
    assert not world.wanted


def test_what_another_request_waits_for_is_not_granted_in_the_other_form() -> None:
    world = world_of()
    world.bring("page")  # here for a prompt of one
    assert world.run(crowd("page", "other")) == [False, False]
    assert not world.step().loads


def test_a_wait_for_one_form_goes_on_though_the_other_was_asked_for() -> None:
    world = world_of()
    one = world.defer("page")
    assert world.run(crowd("page", "other")) == [False, False]
    world.step()
    evict(world, "page", "other")
    world.finish("page")
    assert world.run(one) == [True]
    assert [load.renamed for load in world.step().loads] == [""]


def test_the_bound_is_the_processors_and_other_modalities_have_none() -> None:
    world = world_of(Form(2, "cuts two"))
    world.run(crowd("a", "b"))
    assert len(saved(world)) == 2
    world.run(crowd("c", "d", "e"))
    assert not saved(world)
    videos = [feature(n, 10 * n, modality="video") for n in range(1, 4)]
    world.run(request("r", feature("page"), *videos))
    assert len(saved(world)) == 4


@pytest.mark.parametrize("form", [NEVER, TWO])
def test_where_the_form_is_not_known_nothing_is_stored_or_loaded(form: Form) -> None:
    world = world_of(form)
    world.stock("page", "other")
    assert world.run(crowd("page", "other")) == [False, False]
    assert not saved(world)
    assert not world.wanted
    assert world.run(alone("new")) == [False]
    assert len(saved(world)) == form.most


@pytest.mark.parametrize("first", [crowd("page", "other"), alone("page", "first")])
def test_what_vllm_may_have_kept_in_the_other_form_is_not_stored(first: Any) -> None:
    """Its cache of processed pictures has one form of each, and may give it to either prompt."""
    world = world_of()
    world.run(first)
    world.step()
    evict(world, "page", "other")
    world.clock.now_s += 100  # the first save came to nothing
    world.step()
    second = alone("page", "second") if first.request_id == "crowd" else crowd("page", "new")
    assert not any(world.run(second))
    assert identifier_of("page") not in saved(world)
    evict(world, "page", "new")
    world.clock.now_s += 100
    world.step()
    assert world.run(first)[0] is False  # nor later in the first one
    assert identifier_of("page") not in saved(world)


def test_without_pixels_a_picture_is_not_had_in_another_form() -> None:
    world = world_of()
    world.stock("page")
    assert not world.ask(request("r", bare("page"), feature("other", 10)))
    assert world.failed() == {"r"}


def test_an_encoder_that_was_asked_for_one_is_not_waited_for_by_a_prompt_of_several() -> None:
    world = world_of()
    asker = crowd("page", "other")
    asker.ec_transfer_params = {identifier_of("page"): {}, identifier_of("other"): {}}
    assert world.ask(asker)
    one = alone()
    one.ec_transfer_params = {identifier_of("page"): {}}
    assert not world.ask(one)


def test_an_encoder_stores_and_skips_by_form() -> None:
    world = world_of(consumer=False)
    world.stock("one")
    assert world.run(crowd("one", "two")) == [False, False]
    assert not saved(world)
    assert world.half.request_finished(crowd("one", "two")) == [0, 1]
    assert world.run(alone("one")) == [True]
    formless = world_of(NEVER, consumer=False)
    assert formless.run(alone()) == [False]
    assert formless.half.request_finished(alone()) == [0]
    assert world.half.request_finished(alone("one")) == []

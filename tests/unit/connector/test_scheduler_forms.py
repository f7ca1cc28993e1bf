# SPDX-License-Identifier: Apache-2.0
"""The scheduler half, where a picture has another form when others are in its prompt."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.forms import Form
from s3ec.fetch import FetchOutcome
from s3ec.identity import make_key
from tests.unit.connector.scheduling import (
    ROWS,
    World,
    bare,
    feature,
    identifier_of,
    request,
)

TWO = Form(1, "squashes several")
NEVER = Form(0, "shrinks them", is_known=False)


def world_of(form: Form = TWO, **role: Any) -> World:
    return World(forms={"image": form}, **{"producer": True, **role})


def alone(text: str = "page", name: str = "alone", **more: Any) -> Any:
    return request(name, feature(text, **more))


def crowd(*texts: str, name: str = "crowd", **more: Any) -> Any:
    return request(name, *(feature(text, 10 * n, **more) for n, text in enumerate(texts)))


def among(text: str) -> str:
    return f"among-others:{identifier_of(text)}"


def stock_among(world: World, *texts: str) -> None:
    for text in texts:
        key = make_key(among(text))
        assert key is not None
        world.index.add(key)


def saved(world: World) -> dict[str, str]:
    """What the step has saved, by vLLM's name, and under which other name."""
    return {name: save.renamed for name, save in world.step().saves.items()}


def evict(world: World, *texts: str) -> None:
    world.step(texts)


def test_each_form_has_an_entry_of_its_own() -> None:
    world = world_of()
    assert world.run(alone()) == [False]
    assert saved(world) == {identifier_of("page"): ""}
    assert world.run(crowd("one", "two")) == [False, False]
    assert saved(world) == {identifier_of(one): among(one) for one in ("one", "two")}


def test_what_is_stored_of_the_one_form_is_not_loaded_for_the_other() -> None:
    world = world_of()
    world.stock("page", "other")
    stock_among(world, "two")
    assert world.run(crowd("page", "other")) == [False, False]
    assert world.run(alone("two")) == [False]
    world.step()
    assert not world.wanted


@pytest.mark.parametrize("asked_every_pass", [True, False])
def test_the_form_that_is_asked_for_is_fetched_and_loaded(asked_every_pass: bool) -> None:
    world = world_of(asked_every_pass=asked_every_pass)
    stock_among(world, "one", "two")
    asker = world.deferred(crowd("one", "two"))
    assert [want.key.renamed for want in world.prefetcher.submitted] == [among("one"), among("two")]
    world.finish("one")
    world.finish("two")
    assert world.run(asker) == [True, True]
    assert [load.renamed for load in world.step().loads] == [among("one"), among("two")]


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
    assert set(saved(world).values()) == {""}
    world.run(crowd("c", "d", "e"))
    assert set(saved(world).values()) == {among(one) for one in "cde"}
    videos = [feature(n, 10 * n, modality="video") for n in range(1, 4)]
    world.run(request("r", feature("page"), *videos))
    assert set(saved(world).values()) == {""}


@pytest.mark.parametrize("form", [NEVER, Form(1, "", is_known=False)])
def test_where_the_form_is_not_known_nothing_is_stored_or_loaded(form: Form) -> None:
    world = world_of(form)
    world.stock("page", "other")
    stock_among(world, "page", "other")
    assert world.run(crowd("page", "other")) == [False, False]
    assert not saved(world)
    assert not world.wanted
    assert world.run(alone("new")) == [False]
    assert len(saved(world)) == form.most


def test_what_the_device_holds_in_another_form_is_not_stored_again() -> None:
    world = world_of()
    world.run(crowd("page", "other"))
    world.step()
    world.clock.now_s += 60  # whatever was ordered before
    world.ask(alone())
    assert not saved(world)


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


def test_without_pixels_a_picture_is_had_in_the_form_that_is_asked_for() -> None:
    world = world_of()
    world.stock("page")
    asker = world.deferred(request("r", bare("page"), feature("other", 10)))
    assert world.prefetcher.submitted[0].key.renamed == among("page")
    world.finish("page", FetchOutcome.ABSENT)
    world.clock.now_s += 11
    assert not world.ask(asker)
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
    stock_among(world, "one")
    assert world.run(crowd("one", "two")) == [True, False]
    assert saved(world) == {identifier_of("two"): among("two")}
    assert world.run(alone("one")) == [False]
    formless = world_of(NEVER, consumer=False)
    assert formless.run(alone()) == [False]
    assert formless.half.request_finished(alone()) == [0]
    assert world.half.request_finished(alone("one")) == []


def test_rows_of_the_other_form_take_no_ones_place() -> None:
    """A prompt of several that comes first neither keeps out nor replaces what is alone."""
    world = world_of()
    world.run(crowd("page", "other", rows=ROWS + 3))
    assert set(saved(world).values()) == {among("page"), among("other")}
    stock_among(world, "page", "other")
    evict(world, "page", "other")
    engine = world_of()  # another one, which shares the corpus
    stock_among(engine, "page", "other")
    engine.run(alone())
    assert saved(engine) == {identifier_of("page"): ""}
    engine = world_of()
    engine.stock("page")
    stock_among(engine, "page", "other")
    asker = engine.deferred(crowd("page", "other", rows=ROWS + 3))
    engine.finish("page")
    engine.finish("other")
    assert engine.run(asker) == [True, True]


def test_nothing_is_remembered_at_rest() -> None:
    world = world_of(asked_every_pass=False)
    asker = crowd("page", "other")
    world.run(asker)
    world.step()
    world.end(asker)
    evict(world, "page", "other")
    world.clock.now_s += 100
    world.step()
    assert world.leftovers() == []

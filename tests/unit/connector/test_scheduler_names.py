# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half calls an item: names of a modality, and what is never shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from s3ec import identity
from s3ec.identity import ModalityScopes
from tests.unit.connector.scheduling import World, bare, feature, identifier_of, request
from tests.unit.tier.cases import key_of

# -- a modality with names of its own -------------------------------------------------------------


MARK = "video-0123456789abcdef"
SCOPES = ModalityScopes({"video": MARK}, "all-1", frozenset(("image", "video", "audio")))


def marked(text: object) -> str:
    return f"{MARK}:{identifier_of(text)}"


def world() -> World:
    return World(producer=True, scopes=SCOPES)


def test_a_video_is_found_and_loaded_under_its_marked_name_and_a_picture_under_its_own() -> None:
    it = world()
    it.index.add(key_of(marked("film")))
    it.index.add(key_of(identifier_of("cat")))
    asked = request("r", feature("cat"), feature("film", 10, modality="video"))
    assert not it.ask(asked)
    it.step()
    stored = {want.key.stored for want in it.prefetcher.open.values()}
    assert stored == {marked("film"), identifier_of("cat")}
    for text in ("cat", "film"):
        it.finish(text)
    assert it.run(asked) == [True, True]
    loads = {load.identifier: load.renamed for load in it.step().loads}
    assert loads == {identifier_of("cat"): "", identifier_of("film"): marked("film")}


def test_no_video_of_a_request_is_stored_under_its_plain_name_where_names_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "_RENAMED_CHARACTERS", 1100)
    it = world()
    for number in range(20):
        films = [feature(f"{number} {n}", 10 * n, modality="video") for n in range(3)]
        it.run(request(str(number), *films))
        saves = it.step().saves
        assert {one.renamed for one in saves.values()} == {f"{MARK}:{name}" for name in saves}


def test_what_is_stored_under_the_plain_name_is_not_this_engine_s_video() -> None:
    it = world()
    it.stock("film")
    assert it.run(request("r", feature("film", modality="video"))) == [False]
    (save,) = it.step().saves.values()
    assert save.renamed == marked("film")


def test_a_client_s_name_of_a_picture_and_of_a_video_are_two_entries() -> None:
    it = world()
    it.index.add(key_of("film"))
    picture, video = (request(kind, feature("film", raw=True, modality=kind)) for kind in
                      ("image", "video"))  # fmt: skip
    assert not it.ask(picture)
    it.step()
    it.prefetcher.finish("film")
    assert it.run(video) == [False]
    (save,) = it.step(freed=()).saves.values()
    assert (save.modality, save.renamed) == ("video", f"{MARK}:film")
    assert it.run(picture) == [True]
    (load,) = it.step().loads
    assert load.renamed == ""


def test_the_name_that_a_client_read_in_the_catalogue_is_taken_as_it_is() -> None:
    it = world()
    it.index.add(key_of(marked("film")))
    asked = request("r", bare(marked("film"), raw=True, modality="video"))
    assert not it.ask(asked)
    it.step()
    (want,) = it.prefetcher.open.values()
    assert (want.key.identifier, want.key.renamed) == (marked("film"), "")


def test_a_pure_producer_skips_what_is_stored_under_the_marked_name_alone() -> None:
    it = World(producer=True, consumer=False, scopes=SCOPES)
    it.stock("plain")
    it.index.add(key_of(marked("marked")))
    for text, is_stored in (("plain", False), ("marked", True)):
        asked = request(text, feature(text, modality="video"))
        assert it.run(asked) == [is_stored]
        assert it.half.request_finished(asked) == []


# -- what is neither loaded nor saved, see Role ---------------------------------------------------


ADAPTED = f"my-lora:{identifier_of('page')}"


def alone(*, pixels: bool = True) -> Any:
    return request("alone", feature("page", pixels=pixels))


def adapted(*, pixels: bool = True) -> Any:
    """vLLM puts the adapter's name before the hash where adapters touch the encoder."""
    asked = request("adapted", feature(ADAPTED, raw=True, pixels=pixels))
    asked.lora_request = SimpleNamespace(lora_name="my-lora")
    return asked


CASES = {
    "modality": (alone, {"unshared": ("image",)}),
    "adapter": (adapted, {"tower_adapters": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("consumer", [True, False])
def test_nothing_is_loaded_fetched_saved_or_skipped(case: str, consumer: bool) -> None:
    ask, role = CASES[case]
    world = World(producer=True, consumer=consumer, **role)
    asked = ask()
    identifier = asked.mm_features[0].identifier
    world.index.add(key_of(identifier))
    world.local.add(key_of(identifier))
    asked.ec_transfer_params = {identifier: {}}
    assert world.run(asked) == [False]
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])
    # Nor is it stored again while the device holds it.
    world.index.mark_missing(key_of(identifier))
    assert world.ask(asked)
    assert world.step().saves == {}
    assert world.half.request_finished(asked) == (None if consumer else [0])


@pytest.mark.parametrize("case", CASES)
def test_a_request_without_pixels_fails_alone(case: str) -> None:
    ask, role = CASES[case]
    world = World(**role)
    world.stock("page")
    assert not world.ask(ask(pixels=False))
    assert world.failed() == {ask().request_id}


def test_other_modalities_and_requests_without_an_adapter_are_served_as_ever() -> None:
    world = World(producer=True, unshared=("image",), tower_adapters=True)
    assert world.run(request("r", feature("film", modality="video"))) == [False]
    assert set(world.step().saves) == {identifier_of("film")}
    world = World(producer=True, tower_adapters=True)
    # Nor is an adapter's that does not touch the encoder: vLLM leaves its name out.
    asked = alone()
    asked.lora_request = SimpleNamespace(lora_name="my-lora")
    assert world.run(asked) == [False]
    assert set(world.step().saves) == {identifier_of("page")}


def test_what_one_request_waits_for_is_not_granted_to_another_with_an_adapter() -> None:
    """A client may choose the name that vLLM makes of an adapter's image."""
    world = World(tower_adapters=True)
    world.index.add(key_of(ADAPTED))
    plain = request("plain", feature(ADAPTED, raw=True))
    assert not world.ask(plain)
    world.step()
    world.prefetcher.finish(ADAPTED)
    assert world.run(adapted()) == [False]
    assert not world.step().loads
    assert world.run(plain) == [True]


@pytest.mark.parametrize("case", CASES)
def test_where_vllm_asks_once_nothing_is_saved_though_names_were_forgotten_since(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, role = CASES[case]
    world = World(producer=True, asked_every_pass=False, **role)
    asked = ask()
    assert world.ask(asked)
    monkeypatch.setattr(identity, "_RENAMED_CHARACTERS", 0)
    world.run(request("other", feature("film", modality="video")))
    assert world.schedule(asked) == [False]
    assert set(world.step().saves) == {identifier_of("film")}

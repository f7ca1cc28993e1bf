# SPDX-License-Identifier: Apache-2.0
"""What is neither loaded nor saved, whatever is stored under its name: see ``Role``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.tier.cases import key_of

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

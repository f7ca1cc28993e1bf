# SPDX-License-Identifier: Apache-2.0
"""Where encoder inputs are found; tests/fuzz compares it with vLLM's encoder-cache manager."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from s3ec.connector.lookups import DeviceLookups
from s3ec.connector.vllm_config import PASSED_THROUGH
from s3ec.counters import Counters
from tests.unit.connector.scheduling import World, feature, request

TIERS = ("device", "node", "bucket")


def found(counters: Counters) -> dict[str, tuple[float, float]]:
    get = counters.get
    return {tier: (get(f"lookups.{tier}.hit"), get(f"lookups.{tier}.miss")) for tier in TIERS}


def output(
    scheduled: Mapping[str, tuple[int, int]],
    *,
    new: Mapping[str, Any] | None = None,
) -> Any:
    """A step: request to the tokens that it has and that it gets; ``new`` with their features."""
    features = new or {}
    going_on = [name for name in scheduled if name not in features]
    return SimpleNamespace(
        num_scheduled_tokens={name: tokens for name, (_, tokens) in scheduled.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, mm_features=of, num_computed_tokens=scheduled[name][0])
            for name, of in features.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=going_on,
            num_computed_tokens=[scheduled[name][0] for name in going_on],
            resumed_req_ids=set(),
        ),
    )


class Device:
    def __init__(self) -> None:
        self.counters = Counters()
        self.lookups = DeviceLookups(self.counters)

    @property
    def hits(self) -> float:
        return self.counters.get("lookups.device.hit")


def three() -> list[Any]:
    """Inputs of four tokens each at 0, 10 and 20."""
    return [feature(name, 10 * number) for number, name in enumerate("abc")]


def test_an_input_that_nobody_was_asked_for_is_a_hit_of_the_device_in_the_step_that_needs_it() -> (
    None
):
    it = Device()
    it.lookups.allocated("r", 1)
    it.lookups.end_pass(output({"r": (0, 15)}, new={"r": three()}))
    assert it.hits == 1
    it.lookups.end_pass(output({"r": (15, 4)}))
    assert it.hits == 1
    it.lookups.end_pass(output({"r": (19, 8)}))
    assert it.hits == 2
    it.lookups.end_pass(output({"r": (27, 1)}))
    assert it.hits == 2


def running(*features: Any, status: str = "RUNNING") -> Any:
    asked = request("r", *features)
    asked.status = SimpleNamespace(name=status)
    return asked


def held(it: Device, asked: Any, computed: int) -> list[int]:
    """Places of what had tokens left at the last look and is not to be looked for."""
    known = it.lookups.inputs.get(asked.request_id)
    first = known.behind if known else 0
    needed = it.lookups.ahead(asked, computed)
    return [
        place for place, one in enumerate(asked.mm_features) if place >= first and one not in needed
    ]


def test_the_device_holds_for_a_request_what_its_steps_have_needed_until_it_is_behind() -> None:
    it, asked = Device(), running(*three())
    assert held(it, asked, 1) == []
    it.lookups.allocated("r", 1)
    it.lookups.end_pass(output({"r": (0, 12)}, new={"r": asked.mm_features}))
    assert held(it, asked, 12) == [0, 1]  # the first one was there
    it.lookups.end_pass(output({"r": (12, 10)}))
    assert held(it, asked, 22) == [1, 2]
    it.lookups.end_pass(output({"r": (22, 10)}))
    assert held(it, asked, 32) == [2]


def test_what_a_client_embedded_itself_is_no_lookup() -> None:
    it = Device()
    it.lookups.end_pass(output({"r": (0, 4)}, new={"r": [feature("a", modality=PASSED_THROUGH)]}))
    assert it.hits == 0


# -- what the device lacked --------------------------------------------------------------------


def test_the_first_load_of_a_download_is_a_hit_of_the_bucket_and_the_next_one_of_the_node() -> None:
    world = World()
    world.bring("a")
    assert world.run(request("r", feature("a"))) == [True]
    assert found(world.counters) == {"device": (0, 1), "node": (0, 1), "bucket": (1, 0)}
    world.step(["a"])  # given up at once, and still open
    assert world.run(request("s", feature("a"))) == [True]
    assert found(world.counters) == {"device": (0, 2), "node": (1, 1), "bucket": (1, 0)}


def test_what_a_producer_need_not_encode_is_a_hit_of_the_bucket() -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    assert world.run(request("r", feature("a"))) == [True]
    assert found(world.counters) == {"device": (0, 1), "node": (0, 1), "bucket": (1, 0)}

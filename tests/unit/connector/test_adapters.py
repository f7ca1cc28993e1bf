# SPDX-License-Identifier: Apache-2.0
"""Adapters that touch the encoder are their content: nothing of one is served for another."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector import live_weights
from s3ec.connector.adapters import (
    AdapterCache,
    AdapterFiles,
    AdapterNames,
    name_in_plan,
)
from s3ec.connector.messages import AdapterUse, StepPlan
from s3ec.identity import is_object_name, make_key, with_adapter
from s3ec.weights import read_adapter
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.test_weights import adapter, tensors_of
from tests.unit.tier.cases import key_of

NAME = "my-lora"


class Engine:
    """A scheduler half behind AdapterNames; looks at files happen when the test says so."""

    def __init__(self, **role: Any) -> None:
        self.world = World(**({"producer": True} | role))
        self.looks: list[Callable[[], None]] = []
        self.names = AdapterNames(
            self.world.half,
            start=self.looks.append,
            needs_embedding=lambda feature: "pixel_values" not in feature.data,
            defer_timeout_s=2.0,
            counters=self.world.counters,
            clock=self.world.clock,
        )

    def ask(self, request: Any, computed: int = 0) -> bool:
        return self.names.ensure_cache_available(request, computed)

    def step(self, freed: tuple[str, ...] = (), *, look: bool = True) -> StepPlan:
        """End a pass; what was to be looked at is looked at before the next one ends."""
        plan = self.names.build_connector_meta(freed, scheduled_tokens=10)
        while look and self.looks:
            self.looks.pop(0)()
        return plan

    def allocate(self, request: Any) -> list[bool]:
        granted = []
        for index, one in enumerate(request.mm_features):
            granted.append(self.names.has_cache_item(one.identifier))
            self.names.update_state_after_alloc(request, index)
        return granted

    def complaints(self, *requests: str, device: tuple[str, ...] = ()) -> list[str]:
        pins = self.world.prefetcher.live
        return self.names.audit(requests=requests, device=device, fetching=(), pins=pins)

    def until_asked(self, request: Any) -> None:
        """Passes until the request may be scheduled: the look, and nothing else, is awaited."""
        for _ in range(5):
            if self.ask(request):
                return
            self.step()
        raise AssertionError("still deferred")


def lora(path: Path, number: int = 1, *, inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=NAME, lora_int_id=number, lora_path=str(path), load_inplace=inplace
    )


def adapted(name: str, text: object, of: Any, *, pixels: bool = True) -> Any:
    made = request(name, feature(f"{NAME}:{identifier_of(text)}", raw=True, pixels=pixels))
    made.lora_request = of
    return made


def write(folder: Path, version: int) -> Path:
    """An adapter; every version has other values, and other times of its files.

    The kernel's clock for files may stand still for milliseconds.
    """
    made = adapter(folder, tensors_of([f"vision_tower.lora_A.{version}"], 4096))
    os.utime(made / "adapter_model.safetensors", (version, version))
    return made


def content_name(folder: Path, text: object) -> str:
    found = read_adapter(str(folder))
    assert found is not None
    return f"{NAME}-{found.digest}:{identifier_of(text)}"


def stock(engine: Engine, name: str) -> None:
    key = key_of(name)
    engine.world.index.add(key)


def hit(engine: Engine, asked: Any, name: str) -> bool:
    """Whether the request gets the entry of this name, once it is fetched."""
    if engine.ask(asked):
        return False
    engine.step()
    if name not in engine.world.prefetcher.open:
        return False
    engine.world.prefetcher.finish(name)
    assert engine.ask(asked)
    return engine.allocate(asked) == [True]


def test_an_entry_is_found_by_the_adapter_s_content(tmp_path: Path) -> None:
    engine = Engine()
    name = content_name(write(tmp_path, 1), "cat")
    stock(engine, name)
    asked = adapted("r", "cat", lora(tmp_path))
    assert not engine.ask(asked)
    engine.step()
    assert not engine.ask(asked)  # what was found is taken as the pass ends
    engine.step()
    assert hit(engine, asked, name)
    plan = engine.step()
    assert [load.identifier for load in plan.loads] == [name]
    raw = asked.mm_features[0].identifier
    assert plan.adapters[name].identifier == raw
    held: dict[str, Any] = {}
    cache = AdapterCache(held, plan)
    cache[name] = "tensor"
    assert held == {raw: "tensor"}
    assert name in cache
    assert name_in_plan(raw, plan) == name
    assert name_in_plan("another", plan) == "another"


def test_an_encoded_image_is_saved_under_the_adapter_s_content(tmp_path: Path) -> None:
    engine = Engine()
    name = content_name(write(tmp_path, 1), "cat")
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    assert engine.allocate(asked) == [False]
    plan = engine.step()
    assert list(plan.saves) == list(plan.adapters) == [name]
    key = key_of(name)
    assert is_object_name(key.name)
    assert key.name.startswith(name.split(":")[0] + "/")


def test_an_adapter_that_is_reloaded_under_its_name_is_another_from_the_first_step_on(
    tmp_path: Path,
) -> None:
    engine = Engine()
    old = content_name(write(tmp_path, 1), "cat")
    stock(engine, old)
    first = adapted("first", "dog", lora(tmp_path))
    engine.until_asked(first)
    write(tmp_path, 2)
    again = lora(tmp_path, inplace=True)
    engine.names.adapter_loaded(again)
    new = content_name(tmp_path, "cat")
    assert new != old
    later = adapted("later", "cat", again)
    engine.until_asked(later)
    assert engine.allocate(later) == [False]
    plan = engine.step()
    assert list(plan.saves) == [new]
    assert old not in engine.world.wanted


def test_what_was_under_way_when_an_adapter_was_reloaded_is_neither_loaded_nor_saved(
    tmp_path: Path,
) -> None:
    engine = Engine()
    write(tmp_path, 1)
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    write(tmp_path, 2)
    engine.names.adapter_loaded(lora(tmp_path, inplace=True))
    assert engine.ask(asked)
    assert engine.allocate(asked) == [False]
    plan = engine.step()
    assert not plan.saves
    assert not plan.loads


def test_a_look_that_began_before_the_reload_says_nothing(tmp_path: Path) -> None:
    engine = Engine()
    write(tmp_path, 1)
    again = lora(tmp_path, inplace=True)
    asked = adapted("r", "cat", again)
    assert not engine.ask(asked)
    engine.step()  # a look at the first version has ended, and is not taken yet
    write(tmp_path, 2)
    engine.names.adapter_loaded(again)
    engine.ask(asked)
    engine.step(look=False)
    assert engine.ask(asked)
    engine.allocate(asked)
    assert not engine.step().saves


def test_an_adapter_whose_files_change_without_a_reload_is_encoded_and_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    old = content_name(write(tmp_path, 1), "cat")
    stock(engine, old)
    engine.until_asked(adapted("before", "dog", lora(tmp_path)))
    write(tmp_path, 2)
    asked = adapted("after", "cat", lora(tmp_path))
    with caplog.at_level(logging.WARNING, logger="s3ec"):
        engine.until_asked(asked)
        assert engine.allocate(asked) == [False]
        assert not engine.step().saves
        engine.until_asked(adapted("third", "cow", lora(tmp_path)))
    assert caplog.text.count("were changed without a reload") == 1
    # It is loaded anew: known again.
    fresh = adapted("fresh", "cat", lora(tmp_path, inplace=True))
    engine.until_asked(fresh)
    engine.allocate(fresh)
    assert list(engine.step().saves) == [content_name(tmp_path, "cat")]


def test_a_new_adapter_of_the_same_number_leaves_the_old_one_unknown(tmp_path: Path) -> None:
    engine = Engine()
    one, two = write(tmp_path / "one", 1), write(tmp_path / "two", 2)
    waiting = adapted("waiting", "cat", lora(one))
    engine.until_asked(waiting)
    engine.names.adapter_loaded(lora(two, inplace=True))
    assert engine.ask(waiting)
    engine.allocate(waiting)
    assert not engine.step().saves
    later = adapted("later", "dog", lora(two, inplace=True))
    engine.until_asked(later)
    engine.allocate(later)
    assert list(engine.step().saves) == [content_name(two, "dog")]


def test_two_adapters_of_one_number_without_a_reload_are_both_unknown(tmp_path: Path) -> None:
    engine = Engine()
    one, two = write(tmp_path / "one", 1), write(tmp_path / "two", 2)
    for name, place in (("first", one), ("second", two), ("third", one)):
        asked = adapted(name, name, lora(place))
        engine.until_asked(asked)
        engine.allocate(asked)
        assert bool(engine.step().saves) is (name == "first")


def test_an_adapter_that_is_not_to_be_had_is_a_miss_that_is_not_saved(tmp_path: Path) -> None:
    engine = Engine()
    asked = adapted("r", "cat", lora(tmp_path / "gone"))
    engine.until_asked(asked)
    assert engine.allocate(asked) == [False]
    assert not engine.step().saves


def test_a_request_waits_for_the_look_no_longer_than_it_would_for_the_bucket(
    tmp_path: Path,
) -> None:
    engine = Engine()
    write(tmp_path, 1)
    with_pixels = adapted("pixels", "cat", lora(tmp_path))
    without = adapted("none", "dog", lora(tmp_path), pixels=False)
    for one in (with_pixels, without):
        assert not engine.ask(one)
    engine.step(look=False)
    engine.world.clock.now_s += 2.5
    assert engine.ask(with_pixels)
    assert not engine.ask(without)
    engine.world.clock.now_s += 8
    assert not engine.ask(without)
    assert engine.names.take_unavailable_requests() == {"none"}
    assert engine.world.counters.get("defer_timeouts") == 2


def test_however_many_requests_wait_each_waits_for_its_adapter_once(tmp_path: Path) -> None:
    engine = Engine()
    write(tmp_path, 1)
    waiting = [adapted(f"r{number}", number, lora(tmp_path)) for number in range(10_100)]
    assert not any(map(engine.ask, waiting))
    engine.step()
    engine.step()
    assert all(map(engine.ask, waiting))


def test_requests_without_an_adapter_are_not_looked_at(tmp_path: Path) -> None:
    engine = Engine()
    plain = request("plain", feature("cat"))
    assert engine.ask(plain)
    assert engine.allocate(plain) == [False]
    plan = engine.step()
    assert list(plan.saves) == [identifier_of("cat")]
    assert not plan.adapters
    # Nor is an adapter's that does not touch the encoder: vLLM leaves its name out.
    write(tmp_path, 1)
    other = request("other", feature("dog"))
    other.lora_request = lora(tmp_path)
    engine.until_asked(other)
    engine.allocate(other)
    assert list(engine.step().saves) == [identifier_of("dog")]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    engine = Engine()
    write(tmp_path, 1)
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    engine.allocate(asked)
    engine.step()
    write(tmp_path, 2)
    engine.names.adapter_loaded(lora(tmp_path, inplace=True))
    raw = asked.mm_features[0].identifier
    engine.names.has_cache_item(raw)
    again = adapted("again", "cat", lora(tmp_path, inplace=True))
    engine.until_asked(again)
    engine.allocate(again)  # the same place in vLLM's cache, another content
    engine.step()
    assert len(engine.world.half.on_device) == 1
    engine.step((raw,))
    assert len(engine.world.half.on_device) == 0
    for one in (asked, again):
        engine.names.request_finished(one)
    assert engine.complaints() == []


def test_what_is_given_up_is_told_by_the_adapter_s_content(tmp_path: Path) -> None:
    """In a later step, in the pass that allocated it, and before that pass allocated it again."""
    engine = Engine()
    write(tmp_path, 1)
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    raw = asked.mm_features[0].identifier
    half = engine.world.half
    ours = content_name(tmp_path, "cat")
    engine.allocate(asked)
    assert not engine.step((raw,)).saves
    assert ours not in half.on_device
    engine.allocate(asked)
    engine.step()
    assert ours in half.on_device
    engine.allocate(asked)
    engine.step((raw,))
    assert ours in half.on_device
    assert engine.complaints("r", device=(raw,)) == []
    engine.allocate(asked)
    engine.step((raw, raw))
    assert ours not in half.on_device
    assert engine.complaints("r") == []


def test_another_content_in_the_same_place_and_both_given_up_in_one_pass(tmp_path: Path) -> None:
    engine = Engine()
    write(tmp_path, 1)
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    engine.allocate(asked)
    engine.step()
    old = content_name(tmp_path, "cat")
    write(tmp_path, 2)
    engine.names.adapter_loaded(lora(tmp_path, inplace=True))
    again = adapted("again", "cat", lora(tmp_path, inplace=True))
    engine.until_asked(again)
    raw = asked.mm_features[0].identifier
    engine.allocate(again)
    plan = engine.step((raw,))  # the first one only: old releases name it
    new = content_name(tmp_path, "cat")
    assert list(plan.saves) == [new] != [old]
    assert new in engine.world.half.on_device
    assert old not in engine.world.half.on_device
    assert not engine.step((raw,)).saves
    assert new not in engine.world.half.on_device


def test_a_worker_vouches_for_an_adapter_while_its_files_are_the_same(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = read_adapter(str(tmp_path))
    assert found is not None
    use = AdapterUse("my-lora:cat", str(tmp_path), found.digest)
    files = AdapterFiles()
    assert files.vouch_for(use)
    assert files.vouch_for(use)
    write(tmp_path, 2)
    assert not files.vouch_for(use)
    assert not files.vouch_for(AdapterUse("my-lora:cat", str(tmp_path / "gone"), found.digest))


def test_an_identifier_without_a_digest_has_no_key() -> None:
    raw = f"{NAME}:{identifier_of('cat')}"
    unknown = with_adapter(raw, NAME, None)
    assert unknown != raw
    assert make_key(unknown) is None
    assert with_adapter(identifier_of("cat"), NAME, "0" * 16) == identifier_of("cat")


# -- in vLLM -----------------------------------------------------------------------------------


class Told:
    """An s3ec connector, as far as vLLM's engine core is concerned."""

    def __init__(self) -> None:
        self.loads: list[Any] = []

    def adapter_loaded(self, lora: Any) -> None:
        self.loads.append(lora)
        raise ValueError("a fault of ours")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vllm_s_engine_core_says_which_adapters_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("vllm.v1.engine.core")
    monkeypatch.setattr(core.EngineCore, "add_lora", core.EngineCore.add_lora)  # undone at the end
    live_weights.watch_adapters()
    live_weights.watch_adapters()
    told = Told()
    engine = core.EngineCore.__new__(core.EngineCore)
    engine.model_executor = SimpleNamespace(add_lora=lambda one: f"loaded {one}")
    for connector in (told, None, SimpleNamespace()):
        engine.scheduler = SimpleNamespace(ec_connector=connector)
        assert engine.add_lora("mine") == "loaded mine"
    assert told.loads == ["mine"]


def test_after_a_stop_nothing_of_an_adapter_is_granted_or_saved(tmp_path: Path) -> None:
    engine = Engine()
    name = content_name(write(tmp_path, 1), "cat")
    stock(engine, name)
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(adapted("first", "dog", lora(tmp_path)))
    assert engine.names.stop(was_reset=True)
    engine.until_asked(asked)
    assert engine.allocate(asked) == [False]
    plan = engine.step()
    assert not plan.saves
    assert not plan.loads

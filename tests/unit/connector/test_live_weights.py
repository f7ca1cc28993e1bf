# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM that may change the weights of a running engine stop what is granted and saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec import runtime
from s3ec.counters import Counters
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.tier.cases import key_of

live_weights = pytest.importorskip("s3ec.connector.live_weights")
shell = pytest.importorskip("s3ec.connector.connector")
Parts = pytest.importorskip("s3ec.connector.parts").Parts
EngineCore = pytest.importorskip("vllm.v1.engine.core").EngineCore
Scheduler = pytest.importorskip("vllm.v1.core.sched.scheduler").Scheduler


class Engine:
    """vLLM's own methods, on objects that have no model."""

    def __init__(self, live: str = "stop", weights: str = "fingerprint") -> None:
        live_weights.watch()
        live_weights.watch()  # as by a second engine of this process
        self.world = World(producer=True)
        self.counters = Counters()
        transfer = SimpleNamespace(is_ec_producer=True, is_ec_consumer=True)
        config = SimpleNamespace(ec_transfer_config=transfer)
        parts = Parts(config)
        parts.scheduler = self.world.half
        parts.node = SimpleNamespace(
            process=runtime.process_number,
            counters=self.counters,
            settings=SimpleNamespace(live_weights=live, weights=weights),
            namespace=SimpleNamespace(name="tiny-0123456789abcdef"),
        )
        self.connector = shell.S3ECConnector(config, shell.ECConnectorRole.SCHEDULER, parts=parts)
        self.calls: list[Any] = []
        self.scheduler = Scheduler.__new__(Scheduler)
        self.scheduler.ec_connector = self.connector
        self.scheduler.encoder_cache_manager = SimpleNamespace(reset=lambda: self.calls.append(0))
        self.scheduler.has_unfinished_requests = lambda: False
        self.scheduler.finish_requests = lambda *_: []
        self.scheduler.reset_prefix_cache = lambda *_, **__: True
        self.core = EngineCore.__new__(EngineCore)
        self.core.scheduler = self.scheduler
        self.core.model_executor = SimpleNamespace(
            collective_rpc=lambda method, *_: self.calls.append(method) or ["answered"],
            reset_encoder_cache=lambda: self.calls.append("workers"),
            reset_mm_cache=lambda: None,
            sleep=lambda _: None,
            wake_up=lambda _: None,
            is_sleeping=False,
        )
        self.core.mm_receiver_cache = None

    @property
    def stopped(self) -> bool:
        return self.counters.get("stopped_by_weights") == 1

    def hits(self, text: str) -> bool:
        """Whether a request about what is here is granted it."""
        asker = request(f"{text} again", feature(text))
        ready = self.world.ask(asker)
        granted = self.world.schedule(asker)
        self.world.half.request_finished(asker)
        return ready and granted == [True]


def callback(model: Any) -> None:
    """What a caller of collective_rpc may bring along."""


def check_health(worker: Any) -> None:
    """The same, with a name that one of vLLM's own has."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "update_weights": lambda core: core.collective_rpc("update_weights", args=({},)),
    "reload_weights": lambda core: core.collective_rpc("reload_weights"),
    "apply_model": lambda core: core.collective_rpc("apply_model", None, (callback,)),
    "a name of their own": lambda core: core.collective_rpc("update_from_trainer"),
    "a getter of their own": lambda core: core.collective_rpc("get_and_merge_delta"),
    "the model handed out": lambda core: core.collective_rpc("get_model"),
    "a function": lambda core: core.collective_rpc(callback),
    "a function with a good name": lambda core: core.collective_rpc(check_health),
    "weight version": lambda core: core.set_weight_version("v2"),
}
RESETS = {
    "nothing": lambda core: None,
    "reset": lambda core: core.reset_encoder_cache(),
    "pause": lambda core: (core.pause_scheduler("abort"), core.resume_scheduler()),
    "nap": lambda core: (core.sleep(1), core.wake_up()),
    "nap of the workers": lambda core: (
        core.collective_rpc("sleep", args=(1,)),
        core.collective_rpc("wake_up"),
        core.reset_encoder_cache(),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_nothing_is_granted_or_saved(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    if change == "weight version" and not hasattr(EngineCore, "set_weight_version"):
        pytest.skip("this vLLM has no weight versions")
    engine = Engine()
    engine.world.bring("a", "b")
    assert engine.hits("a")
    with caplog.at_level(logging.ERROR, "s3ec"):
        CHANGES[change](engine.core)
        CHANGES[change](engine.core)
    assert engine.stopped
    assert caplog.text.count("nothing is loaded or saved from here on") == 1
    assert not engine.hits("b")
    assert not engine.hits("fresh")
    assert engine.world.step().saves == {}
    assert engine.world.wanted == [identifier_of("a"), identifier_of("b")]  # nor fetched


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("live", ["stop", "ignore"])
def test_a_reset_empties_the_device_and_leaves_the_weights(live: str, reset: str) -> None:
    engine = Engine(live=live)
    step, _ = engine.world.load_one("a")
    engine.world.report(step)
    assert engine.world.is_on_device("a")
    RESETS[reset](engine.core)
    assert not engine.stopped
    assert engine.world.is_on_device("a") == (reset == "nothing")
    # What is on the device is not fetched: vLLM will not ask for it.
    asker = request("r", feature("a"))
    assert engine.world.ask(asker) == (reset == "nothing")


@pytest.mark.parametrize("reset", [name for name in RESETS if name != "nothing"])
def test_a_reset_ends_the_cache_where_a_name_stands_for_the_weights(reset: str) -> None:
    engine = Engine(weights="name")
    engine.world.bring("a")
    RESETS[reset](engine.core)
    assert engine.stopped
    assert not engine.hits("a")


@pytest.mark.parametrize(("reset", "saves"), [("nothing", 1), ("reset", 0)])
def test_what_the_device_held_is_not_stored_again_after_a_reset(reset: str, saves: int) -> None:
    engine = Engine()
    engine.world.load_one("a")
    engine.world.index.mark_missing(key_of(identifier_of("a")))
    assert engine.world.ask(request("r", feature("a")))
    assert engine.world.step(tokens=0).saves == {}  # its worker half is not called
    RESETS[reset](engine.core)
    assert len(engine.world.step().saves) == saves


def test_calls_reach_the_workers_and_their_answers_the_caller() -> None:
    engine = Engine()
    assert engine.core.collective_rpc("update_weights") == ["answered"]
    engine.scheduler.reset_encoder_cache()
    assert engine.calls == ["update_weights", 0]


@pytest.mark.parametrize(
    "method",
    [
        *("check_health", "add_lora", "compute_weight_checksums", "profile"),
        *("get_model_inspection", "get_kv_cache_spec", "release_late_interaction_query_cache"),
    ],
)
def test_calls_that_leave_the_weights_alone_stop_nothing(method: str) -> None:
    engine = Engine()
    engine.world.bring("a")
    engine.core.collective_rpc(method)
    assert not engine.stopped
    assert engine.hits("a")


def test_who_knows_better_goes_on() -> None:
    engine = Engine(live="ignore")
    engine.world.bring("a")
    engine.core.collective_rpc("update_weights")
    engine.scheduler.reset_encoder_cache()
    assert engine.hits("a")


def test_engines_without_s3ec_are_not_touched() -> None:
    engine = Engine()
    engine.scheduler.ec_connector = None
    assert engine.core.collective_rpc("update_weights") == ["answered"]
    engine.scheduler.reset_encoder_cache()
    del engine.core.scheduler
    assert engine.core.collective_rpc("update_weights") == ["answered"]  # while it starts


def test_what_was_granted_before_is_loaded_unless_vllm_has_dropped_it() -> None:
    """vLLM counts on it: without it the step would end the engine."""
    changes = CHANGES | RESETS
    for change, loads in (("update_weights", 1), ("reset", 0)):
        engine = Engine()
        engine.world.bring("a")
        asker = request("r", feature("a"))
        assert engine.world.ask(asker)
        engine.world.schedule(asker)
        assert engine.world.step(tokens=0).loads == []  # its worker half is not called
        changes[change](engine.core)
        assert len(engine.world.step().loads) == loads


def test_a_request_without_pixels_is_failed_alone() -> None:
    engine = Engine()
    engine.world.bring("a")
    engine.core.collective_rpc("update_weights")
    assert not engine.world.ask(request("r", feature("a", pixels=False)))
    assert engine.world.half.take_unavailable_requests() == {"r"}


def test_what_is_open_is_let_go_of() -> None:
    engine = Engine()
    engine.world.bring("a", "b")
    engine.scheduler.reset_encoder_cache()
    engine.world.clock.now_s += 60.0
    engine.world.step()
    assert not engine.world.prefetcher.live


@pytest.mark.parametrize("tokens", [0, 128])
def test_how_much_of_a_prefix_is_replayed_is_known_before_the_first_pass(tokens: int) -> None:
    """The scheduler reads it from its KV cache after it has made its connector."""
    if not hasattr(Scheduler, "_mark_prefix_replay"):
        pytest.skip("this vLLM replays nothing")
    engine = Engine()
    engine.scheduler.prefix_replay_tokens = tokens
    engine.scheduler.requests = {"r": SimpleNamespace(status=None, streaming_queue=[])}
    engine.scheduler.add_request(SimpleNamespace(request_id="r", resumable=False))
    assert engine.world.half.replay_tokens == tokens

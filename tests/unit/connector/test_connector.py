# SPDX-License-Identifier: Apache-2.0
"""The shell: hooks that newer runners call, and that no fault of ours leaves any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from s3ec import runtime
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.counters import Counters
from s3ec.errors import ConfigError, TierError
from s3ec.weights import Weights
from tests.unit.connector.processes import HASHES, NOWHERE, Process, tensor
from tests.unit.connector.scheduling import World, feature, request

pytest.importorskip("vllm")
stats = pytest.importorskip("s3ec.connector.stats")
ECConnectorRole = pytest.importorskip(
    "vllm.distributed.ec_transfer.ec_connector.base"
).ECConnectorRole
shell = pytest.importorskip("s3ec.connector.connector")
parts_module = pytest.importorskip("s3ec.connector.parts")
Parts = parts_module.Parts


def connector(worker: Any, plan: StepPlan | None) -> shell.S3ECConnector:
    transfer = SimpleNamespace(is_ec_producer=True, is_ec_consumer=True)
    config = SimpleNamespace(ec_transfer_config=transfer)
    parts = Parts(config)
    parts.worker = worker
    made = shell.S3ECConnector(config, ECConnectorRole.WORKER, parts=parts)
    if plan is not None:
        made.bind_connector_metadata(shell.S3ECMetadata(plan))
    return made


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("pixels", [True, False])
def test_a_wait_whose_answer_is_repeated_goes_on_and_ends_in_time(pixels: bool, full: bool) -> None:
    """The shell repeats it without asking the half. A full engine asks about nobody for a pass."""
    world, transfer = World(), SimpleNamespace(is_ec_producer=False, is_ec_consumer=True)
    config = SimpleNamespace(ec_transfer_config=transfer)
    parts = Parts(config)
    parts.scheduler = world.half
    it = shell.S3ECConnector(config, ECConnectorRole.SCHEDULER, parts=parts)
    world.stock("a", "b")
    # The half sees the first question of each pass.
    first = request("first", feature("b", pixels=False))
    asker = request("r", feature("a", pixels=pixels))
    began_s, limit_s = world.clock.now_s, 2.0 if pixels else 10.0
    while not (
        it.ensure_cache_available(first, 0)
        or it.ensure_cache_available(asker, 0)
        or "r" in it.take_unavailable_requests()
    ):
        world.step()
        world.clock.now_s += 0.1
        if full and world.clock.now_s - began_s == pytest.approx(0.5):
            world.step()
        assert world.clock.now_s < began_s + limit_s + 0.5
    assert world.clock.now_s >= began_s + limit_s - 0.01


def test_externally_loaded_hashes_are_the_step_s_loads() -> None:
    loads = [NOWHERE, replace(NOWHERE, identifier="b")]
    assert connector(None, StepPlan(loads=loads)).externally_loaded_hashes() == ["a", "b"]
    assert connector(None, None).externally_loaded_hashes() == []


class Panic(BaseException):
    """As Rust's, in obstore: none of Exception's."""


def _panics(*_: Any, **__: Any) -> Any:
    raise Panic("told to")


class Broken:
    """A half whose every method panics, whatever it is given."""

    def __getattr__(self, name: str) -> Any:
        return _panics


class Node:
    """Counts, and can be released."""

    def __init__(self) -> None:
        self.process = runtime.process_number
        self.counters = Counters()
        self.released = 0

    def release(self, timeout_s: float) -> None:
        self.released += 1


def broken() -> shell.S3ECConnector:
    made = connector(Broken(), StepPlan())
    parts = made.parts
    parts.scheduler, parts.features, parts.node = Broken(), Broken(), Node()
    return made


class Request:
    mm_features = (1,)
    num_prompt_tokens = 5


class SchedulerOutput:
    free_encoder_mm_hashes = ()
    total_num_scheduled_tokens = 0
    num_scheduled_tokens: ClassVar[dict[str, int]] = {}
    scheduled_spec_decode_tokens: ClassVar[dict[str, list[int]]] = {}


class ConnectorOutput:
    ec_connector_worker_meta = shell.S3ECWorkerMetadata(WorkerReport())


HOOKS: dict[str, Callable[[shell.S3ECConnector], Any]] = {
    "ensure_cache_available": lambda it: it.ensure_cache_available(Request(), 0),
    "has_cache_item": lambda it: it.has_cache_item("a"),
    "update_state_after_alloc": lambda it: it.update_state_after_alloc(Request(), 0),
    "build_connector_meta": lambda it: it.build_connector_meta(SchedulerOutput()).plan,
    "update_connector_output": lambda it: it.update_connector_output(ConnectorOutput()),
    "take_unavailable_requests": lambda it: it.take_unavailable_requests(),
    "request_finished": lambda it: it.request_finished(Request()),
    "finish_load_caches": lambda it: it.finish_load_caches({}),
    "save_caches": lambda it: it.save_caches({}, "a"),
    "build_connector_worker_meta": lambda it: it.build_connector_worker_meta(),
    "shutdown": lambda it: it.shutdown(),
}
# What a miss would answer.
ANSWERS = {
    "ensure_cache_available": True,
    "has_cache_item": False,
    "build_connector_meta": StepPlan(),
    "take_unavailable_requests": set(),
    "request_finished": (False, None),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_panic_inside_a_hook_is_counted_and_answered_like_a_miss(hook: str) -> None:
    it = broken()
    node = it.parts.node
    assert HOOKS[hook](it) == ANSWERS.get(hook)
    assert node.counters.get("internal_errors") >= 1


def test_a_panic_while_granted_embeddings_are_loaded_is_an_error_that_vllm_reports() -> None:
    with pytest.raises(RuntimeError, match="Panic"):
        broken().start_load_caches({})


class Untouched:
    """A part of a node that a forked child must leave alone."""

    process = -1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used in a forked child")


def forked(monkeypatch: pytest.MonkeyPatch) -> shell.S3ECConnector:
    """A connector in a child of the process that made it; what is contained there fails."""
    made = connector(Untouched(), StepPlan())
    parts = made.parts
    parts.scheduler, parts.node = Untouched(), Untouched()
    parts.features = SimpleNamespace(needs_embedding=lambda feature: feature == "no pixels")
    parts.weights = "of the parent"
    monkeypatch.setattr(shell.log, "exception", lambda *_: pytest.fail("a fault in a child"))
    return made


CHILDS_HOOKS = HOOKS | {
    "bind_connector_metadata": lambda it: it.bind_connector_metadata(
        shell.S3ECMetadata(StepPlan(weights="others"))
    ),
    "start_load_caches": lambda it: it.start_load_caches({}),
    "externally_loaded_hashes": lambda it: bool(it.externally_loaded_hashes()),
    "start_save_caches": lambda it: it.start_save_caches({}),
    "get_ec_connector_stats": lambda it: it.get_ec_connector_stats(),
    "weights_may_have_changed": lambda it: it.weights_may_have_changed("", was_reset=True),
}


@pytest.mark.parametrize("hook", CHILDS_HOOKS)
def test_in_a_forked_child_a_hook_uses_nothing_and_answers_like_a_miss(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, Any] = ANSWERS | {
        "build_connector_meta": StepPlan(weights="of the parent"),
        "externally_loaded_hashes": False,
    }
    assert CHILDS_HOOKS[hook](forked(monkeypatch)) == answers.get(hook)


def test_in_a_forked_child_no_engine_ends_for_a_request_without_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = SimpleNamespace(request_id="r", mm_features=("pixels", "no pixels"))
    it = forked(monkeypatch)
    assert it.ensure_cache_available(asked, 0) is False
    it.parts.features = Broken()
    monkeypatch.undo()
    assert it.ensure_cache_available(asked, 0) is True  # and nothing was counted


def test_in_a_forked_child_a_granted_load_is_an_error_and_no_made_up_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = forked(monkeypatch)
    it.bind_connector_metadata(shell.S3ECMetadata(StepPlan(loads=[NOWHERE])))
    with pytest.raises(RuntimeError, match="forked"):
        it.start_load_caches({})


def test_a_worker_whose_half_did_not_start_loads_what_is_granted(tmp_path: Path) -> None:
    rig = Process(tmp_path)
    one, two, three = (rig.granted(HASHES[number], tensor(number)) for number in range(3))
    cache = {one.identifier: tensor(0), two.identifier: tensor(9)[:2]}  # of two: another's rows
    held = cache[one.identifier]
    it = connector(None, StepPlan(loads=[one, two, three]))
    it.start_load_caches(cache)
    it.finish_load_caches(cache)
    assert cache[one.identifier] is held
    for name, number in ((two.identifier, 1), (three.identifier, 2)):
        assert cache[name].tolist() == tensor(number).tolist()
    assert it.build_connector_worker_meta() is None
    rig.close()


def test_a_worker_whose_half_did_not_start_makes_nothing_up(tmp_path: Path) -> None:
    rig = Process(tmp_path)
    load = rig.granted(HASHES[0], tensor())
    it = connector(None, StepPlan(loads=[load]))
    path, cache = Path(load.path), {}
    blob = path.read_bytes()
    flipped = blob[:-1] + bytes([blob[-1] ^ 1])
    for damage in (lambda: path.write_bytes(flipped), lambda: rig.lose(load)):
        damage()
        with pytest.raises(RuntimeError, match=f"did not start.*{load.path}"):
            it.start_load_caches(cache)
    assert cache == {}
    rig.close()


@pytest.mark.parametrize("cancelled", [asyncio.CancelledError, futures.CancelledError])
def test_a_cancellation_of_what_a_hook_waits_for_stays_inside(
    cancelled: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = broken()
    monkeypatch.setattr(it.parts.scheduler, "has_cache_item", _raising(cancelled), raising=False)
    assert it.has_cache_item("a") is False


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_handler_raises_inside_a_hook_ends_the_process_as_always(
    signal: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = broken()
    monkeypatch.setattr(it.parts.scheduler, "has_cache_item", _raising(signal), raising=False)
    with pytest.raises(signal):
        it.has_cache_item("a")
    assert it.parts.node.counters.get("internal_errors") == 0


def _raising(kind: type[BaseException]) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise kind

    return hook


def test_shutdown_releases_the_node_where_the_worker_panics() -> None:
    it = broken()
    node = it.parts.node
    it.shutdown()
    it.shutdown()
    assert node.released == 1


def test_a_second_shutdown_in_the_middle_of_the_first_leaves_it_the_node() -> None:
    it = broken()
    node = it.parts.node
    released = []

    class Draining:
        def finish(self) -> None:
            it.shutdown()  # as a signal handler would, while this waits
            released.append(node.released)

    it.parts.worker = Draining()
    it.shutdown()
    assert released == [0]
    assert node.released == 1


def test_a_fault_in_the_count_of_lookups_takes_no_orders_from_the_workers() -> None:
    it = broken()
    plan = StepPlan(step=7)
    it.parts.scheduler = SimpleNamespace(
        build_connector_meta=lambda *_, **__: plan, lookups=Broken()
    )
    assert it.build_connector_meta(SchedulerOutput()).plan is plan
    assert it.parts.node.counters.get("internal_errors") == 1


def test_broken_data_from_another_process_does_not_leave_the_stats() -> None:
    wrong = stats.S3ECStats(data={"hits": "many"})
    assert wrong.reduce() == {}
    assert stats.S3ECStats(data={"hits": 1}).aggregate(wrong) is None
    metrics = stats.S3ECPromMetrics.__new__(stats.S3ECPromMetrics)
    metrics.observe({"hits": 1})  # it has no metrics: an AttributeError
    report = shell.S3ECWorkerMetadata(WorkerReport())
    assert report.aggregate(None) is None


@pytest.mark.parametrize("role", list(ECConnectorRole))
def test_a_half_that_cannot_be_built_leaves_an_engine_without_the_cache(
    role: ECConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = _started(role, monkeypatch, Panic("told to"))
    assert it.ensure_cache_available(Request(), 0) is True
    assert it.has_cache_item("a") is False
    it.save_caches({}, "a")
    it.start_load_caches({})
    it.shutdown()


@pytest.mark.parametrize("why", ["it cannot be built", "it stays inactive", "vLLM is too old"])
def test_without_a_scheduler_half_a_request_without_pixels_fails_alone(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = "no encoder cache" if why == "it stays inactive" else None
    if why == "vLLM is too old":
        monkeypatch.setattr(parts_module.compat, "vllm_version", lambda: "0.25.1")
    it = _started(ECConnectorRole.SCHEDULER, monkeypatch, Panic("told to"), problem=problem)
    assert ("s3ec could not start" in caplog.text) is (why == "it cannot be built")
    bare, served, left = (
        SimpleNamespace(request_id=name, mm_features=features, num_prompt_tokens=5)
        for name, features in [
            ("bare", ("pixels", "no pixels")),
            ("served", ("pixels", "pixels")),
            ("left", ("no pixels",)),
        ]
    )
    assert it.ensure_cache_available(served, 0) is True
    assert it.ensure_cache_available(bare, 5) is True  # all of it was computed before
    for _ in range(2):
        assert it.ensure_cache_available(bare, 0) is False
        assert it.ensure_cache_available(left, 0) is False
    assert it.request_finished(left) == (False, None)  # its client gave up
    assert it.take_unavailable_requests() == {"bare"}
    assert it.take_unavailable_requests() == set()
    it.shutdown()
    assert it.ensure_cache_available(bare, 0) is False
    assert it.take_unavailable_requests() == {"bare"}


def test_a_scheduler_half_that_went_away_lets_nothing_without_pixels_through() -> None:
    it = connector(None, None)
    it.parts.features = SimpleNamespace(needs_embedding=lambda feature: feature == "no pixels")
    it.parts.scheduler = Broken()
    bare = SimpleNamespace(request_id="bare", mm_features=("no pixels",), num_prompt_tokens=5)
    assert it.ensure_cache_available(bare, 0) is False
    assert it.take_unavailable_requests() == {"bare"}  # and not asked about for ever
    it.parts.end()
    plain = SimpleNamespace(mm_features=("pixels",), num_prompt_tokens=5)
    assert it.ensure_cache_available(plain, 0) is True
    assert it.ensure_cache_available(bare, 0) is False
    assert it.take_unavailable_requests() == {"bare"}


@pytest.mark.parametrize(
    "fault", [ConfigError("no such profile"), TierError("not ours"), KeyboardInterrupt()]
)
def test_a_setting_that_cannot_work_ends_the_start(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ConfigError if isinstance(fault, TierError) else type(fault)
    with pytest.raises(expected):
        _started(ECConnectorRole.SCHEDULER, monkeypatch, fault)


def _started(
    role: ECConnectorRole,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    *,
    problem: str | None = None,
    media: bool = True,
) -> shell.S3ECConnector:
    """A connector whose node cannot be made."""

    def fails(*_: Any) -> Any:
        raise fault

    checks = ("identifier_problem", "trust_problem", "live_weights_problem")
    for name in checks:
        monkeypatch.setattr(parts_module, name, lambda *_: None)
    monkeypatch.setattr(parts_module, "model_problem", lambda _: problem)
    monkeypatch.setattr(
        parts_module,
        "FeatureReader",
        lambda _: SimpleNamespace(needs_embedding=lambda feature: feature == "no pixels"),
    )
    monkeypatch.setattr(parts_module, "describe_once", lambda *_: {"model": "some"})
    monkeypatch.setattr(parts_module, "encoder_weights", lambda *_: Weights("sha256:0"))
    monkeypatch.setattr(parts_module.Node, "shared", fails)
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            ec_connector_extra_config={"bucket": "some"}, is_ec_producer=True, is_ec_consumer=True
        ),
        model_config=SimpleNamespace(multimodal_config=object() if media else None),
    )
    return shell.S3ECConnector(config, role)

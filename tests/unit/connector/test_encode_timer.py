# SPDX-License-Identifier: Apache-2.0
"""How long the encoder ran, as the worker half measures it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from s3ec.connector.messages import Encode, EncodeTime, Save, StepPlan, WorkerReport
from tests.support.waiting import DEADLINE_S
from tests.unit.connector.processes import HASHES, Process, tensor

pytest.importorskip("vllm")
shell = pytest.importorskip("s3ec.connector.connector")
worker = pytest.importorskip("s3ec.connector.worker")
EncodeTimer, WorkerHalf = worker.EncodeTimer, worker.WorkerHalf
Parts = pytest.importorskip("s3ec.connector.parts").Parts

IMAGE = Encode("image", 256)


def timer(*seconds: float) -> EncodeTimer:
    return EncodeTimer(lambda: torch.device("cpu"), clock=iter(seconds).__next__)


def test_what_one_step_encodes_is_measured_in_sum() -> None:
    one = timer(1.0, 1.25)
    one.begin([IMAGE, Encode("image", 128)])
    one.end()
    one.end()  # of each further item that is saved
    assert one.take() == [EncodeTime("image", 2, 384, 0.25)]
    assert one.take() == []


def test_step_that_encodes_nothing_is_not_measured() -> None:
    one = timer()
    one.begin([])
    one.end()
    assert one.take() == []


def test_items_of_two_modalities_say_nothing_of_either() -> None:
    one = timer()
    one.begin([IMAGE, Encode("video", 256)])
    one.end()
    assert one.take() == []


def test_step_that_failed_before_its_end_is_dropped() -> None:
    one = timer(1.0, 5.0, 5.5)
    one.begin([IMAGE])
    one.begin([IMAGE])
    one.end()
    assert one.take() == [EncodeTime("image", 1, 256, 0.5)]


class Event:
    """Stands for torch.cuda.Event: there is no GPU here."""

    times_ms = itertools.count(0, 40)
    passed = True

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.time_ms: int | None = None

    def record(self) -> None:
        self.time_ms = next(self.times_ms)

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, end: Any) -> float:
        assert self.time_ms is not None
        return float(end.time_ms - self.time_ms)


def test_on_a_gpu_nothing_waits_and_times_come_in_a_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    one = EncodeTimer(lambda: torch.device("cuda", 0))
    monkeypatch.setattr(Event, "passed", False)
    one.begin([IMAGE])
    one.end()
    assert one.take() == []
    monkeypatch.setattr(Event, "passed", True)
    assert one.take() == [EncodeTime("image", 1, 256, 0.04)]


def test_device_without_events_is_not_measured_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = EncodeTimer(lambda: torch.device("meta"))
    for _ in range(3):
        one.begin([IMAGE])
        one.end()
    assert one.take() == []
    assert len(caplog.records) == 1  # said once


# -- in the worker half, as vLLM's runners call it ---------------------------------------------

# Read in the sources of vLLM 0.26.0 to 0.32.0.
_CONSUMER = ("bind", "load", "encode", "finished")
_CALLS = {
    "ec_consumer": _CONSUMER,
    "ec_consumer, after 0.33": ("bind", "load", "encode", "finish_load", "finished"),
    "ec_both, before 0.30": ("bind", "load", "encode", "save", "finished"),
    "ec_both": ("bind", "start_save", "load", "encode", "save", "finished"),
    "ec_producer": ("bind", "start_save", "encode", "save", "finished"),
    # What came as an embedding is saved before the encoder runs.
    "ec_both, with a picture that needs no encoder": (
        *("bind", "start_save", "load", "save_other", "encode", "save", "finished"),
    ),
}
_ENCODE_S = 0.25


class Saves:
    """In the place of a save queue."""

    def put(self, identifier: str, save: Save, one: Any, *, step: int) -> bool:
        return True

    def take_stored(self) -> list[str]:
        return []

    def drain(self, timeout_s: float) -> int:
        return 0


class Runner:
    """A model runner's calls."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.process = Process(folder)
        self.now_s = 0.0
        parts = Parts(SimpleNamespace(ec_transfer_config=SimpleNamespace()))
        parts.node = self.process.node
        parts.worker = self.half = WorkerHalf(
            self.process.node,
            saves=Saves(),
            device=lambda: torch.device("cpu"),
            rank=lambda: rank,
            drain_timeout_s=1,
            clock=lambda: self.now_s,
        )
        transfer = SimpleNamespace(is_ec_producer=True, is_ec_consumer=True)
        config = SimpleNamespace(ec_transfer_config=transfer)
        self.hooks = shell.S3ECConnector(config, shell.ECConnectorRole.WORKER, parts=parts)

    def step(self, calls: tuple[str, ...], *, encodes: bool = True) -> None:
        cache = {HASHES[1]: tensor(1)}
        save = Save("image", None)
        plan = StepPlan(saves={HASHES[0]: save, HASHES[1]: save})
        if encodes:
            plan.encodes[HASHES[0]] = Encode("image", 256)
        for call, following in itertools.zip_longest(calls, calls[1:]):
            if call == "bind":
                self.hooks.bind_connector_metadata(shell.S3ECMetadata(plan))
            elif call == "start_save":
                self.hooks.start_save_caches(cache)
            elif call == "load":
                self.hooks.start_load_caches(cache)
            elif call == "encode":
                cache[HASHES[0]] = tensor()
            elif call == "finish_load":
                self.hooks.finish_load_caches(cache)
            elif call.startswith("save"):
                self.hooks.save_caches(cache, HASHES[call == "save_other"])
            elif call == "finished":
                self.hooks.get_finished(set())
            # Nothing lies between the encoder and the hooks beside it.
            beside = following in ("encode", "save_other") or call == "save_other"
            self.now_s += _ENCODE_S if call == "encode" else 0.0 if beside else 1.0
        self.hooks.clear_connector_metadata()

    def report(self) -> WorkerReport | None:
        made = self.hooks.build_connector_worker_meta()
        return None if made is None else made.report

    def close(self) -> None:
        self.process.node.close(DEADLINE_S)


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    made = Runner(tmp_path)
    yield made
    made.close()
    assert made.process.counted("internal_errors") == 0


@pytest.mark.parametrize("name", _CALLS)
def test_worker_measures_the_encoder_and_nothing_else_in_every_role_and_release(
    runner: Runner, name: str
) -> None:
    for _ in range(3):
        runner.step(_CALLS[name])
    costs = runner.process.node.encode_costs
    assert costs.known_s("image", 256) == pytest.approx(_ENCODE_S)
    assert runner.process.counted("encode.seconds") == pytest.approx(3 * _ENCODE_S)
    assert runner.process.counted("encode.rows") == 3 * 256
    report = runner.report()
    assert report is not None
    assert report.encoded == 3 * [EncodeTime("image", 1, 256, _ENCODE_S)]


def test_where_the_scheduler_is_in_this_process_nothing_is_learned_twice(runner: Runner) -> None:
    runner.process.node.users = 2
    for _ in range(3):
        runner.step(_CONSUMER)
    report = runner.report()
    assert report is None or report.encoded == []


def test_only_the_first_rank_measures(tmp_path: Path) -> None:
    runner = Runner(tmp_path, rank=1)
    for _ in range(3):
        runner.step(_CONSUMER)
    assert runner.report() is None or runner.report().encoded == []
    assert runner.process.node.encode_costs.document == {}
    runner.close()

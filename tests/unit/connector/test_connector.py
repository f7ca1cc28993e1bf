# SPDX-License-Identifier: Apache-2.0
"""The shell's hooks that newer runners call on the worker's side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from s3ec.codec import Shape
from s3ec.connector.plan import Load, StepPlan

pytest.importorskip("vllm")
shell = pytest.importorskip("s3ec.connector.connector")


class Worker:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def finish_load_caches(self, encoder_cache: dict[str, Any]) -> None:
        self.calls.append(("finish", encoder_cache))


def connector(worker: Worker | None, plan: StepPlan | None) -> shell.S3ECConnector:
    made = shell.S3ECConnector.__new__(shell.S3ECConnector)
    made._worker = worker
    made._connector_metadata = shell.S3ECMetadata(plan) if plan is not None else None
    return made


def test_finish_load_caches_goes_to_the_worker_half() -> None:
    worker, cache = Worker(), {"a": 1}
    connector(worker, StepPlan()).finish_load_caches(cache)
    assert worker.calls == [("finish", cache)]
    connector(None, None).finish_load_caches(cache)


def test_externally_loaded_hashes_are_the_step_s_loads() -> None:
    one = Load("a", "/x", Shape(1, 1, "float32"), "0" * 32, 64, "0" * 32)
    loads = [one, replace(one, identifier="b")]
    assert connector(Worker(), StepPlan(loads=loads)).externally_loaded_hashes() == ["a", "b"]
    assert connector(Worker(), None).externally_loaded_hashes() == []

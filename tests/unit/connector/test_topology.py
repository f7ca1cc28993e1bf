# SPDX-License-Identifier: Apache-2.0
"""Which configurations put ranks beside the scheduler, and whose reports get through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
compat = pytest.importorskip("s3ec.connector.compat")
topology_of = pytest.importorskip("s3ec.connector.vllm_config").topology_of


def config(backend: Any, *, tp: int = 1, pp: int = 1, nodes: int = 1, v2: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=1,
            nnodes_within_dp=nodes,
            distributed_executor_backend=backend,
        ),
        use_v2_model_runner=v2,
    )


@pytest.fixture(autouse=True)
def _as_in_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(compat, "ray_passes_reports", lambda: True)


@pytest.mark.parametrize(
    "it",
    [
        config("uni"),
        config(None),
        config("mp", tp=8),
        config("mp", tp=4, pp=2),
        config("mp", tp=8, pp=2, nodes=2),  # the first stage fills the scheduler's node
        config("external_launcher"),
    ],
)
def test_ranks_that_are_certainly_beside_the_scheduler(it: Any) -> None:
    found = topology_of(it)
    assert found.beside_scheduler
    assert found.problem is None
    assert found.ranks == it.parallel_config.tensor_parallel_size


@pytest.mark.parametrize(
    "it",
    [config("mp", tp=16, nodes=2), config("ray"), config("ray", tp=4), config(SimpleNamespace)],
)
def test_ranks_that_may_be_elsewhere_and_report(it: Any) -> None:
    found = topology_of(it)
    assert not found.beside_scheduler
    assert found.problem is None


def test_a_pipeline_over_nodes_reports_with_the_v2_runner_only() -> None:
    assert topology_of(config("ray", tp=2, pp=2, v2=True)).problem is None
    assert "V1 model runner" in topology_of(config("ray", tp=2, pp=2)).problem


def test_releases_before_0_30_and_the_old_ray_executor_are_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "ray_passes_reports", lambda: False)
    assert "Ray" in topology_of(config("ray", tp=2)).problem
    assert topology_of(config("ray")).problem is None
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.29.1")
    assert "0.30" in topology_of(config("mp", tp=16, nodes=2)).problem
    assert topology_of(config("mp", tp=8)).problem is None


def test_schedulers_that_must_agree_without_talking_load_nothing() -> None:
    assert "external_launcher" in topology_of(config("external_launcher", tp=2)).problem

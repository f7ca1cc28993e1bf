# SPDX-License-Identifier: Apache-2.0
"""Which configurations put ranks beside the scheduler, and which load nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

config_of = pytest.importorskip("s3ec.connector.vllm_config")


def config(backend: Any, *, tp: int = 1, pp: int = 1, nodes: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=1,
            nnodes_within_dp=nodes,
            distributed_executor_backend=backend,
        ),
    )


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
    assert config_of.ranks_problem(it) is None
    assert config_of.loading_ranks(it) == it.parallel_config.tensor_parallel_size


@pytest.mark.parametrize(
    "it",
    [
        config("mp", tp=16, nodes=2),
        config("ray"),
        config("ray", tp=4),
        config("ray", tp=2, pp=2),
        config(SimpleNamespace),
    ],
)
def test_where_ranks_may_be_elsewhere_nothing_is_loaded(it: Any) -> None:
    assert config_of.ranks_problem(it) is not None


def test_schedulers_that_must_agree_without_talking_load_nothing() -> None:
    assert "external_launcher" in config_of.ranks_problem(config("external_launcher", tp=2))

# SPDX-License-Identifier: Apache-2.0
"""Which workers load embeddings, where they run, and whether the scheduler hears from them.

vLLM 0.32: the ranks of the first pipeline stage call the connector's hooks, each of its tensor
and prefill-context parallel ranks. The multiprocessing executor starts ``local_world_size`` ranks
on each node, the first ones beside the scheduler; where Ray puts them is known only to Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from s3ec.connector import compat


@dataclass(frozen=True, slots=True)
class Topology:
    """Where an engine's loading ranks are.

    Attributes:
        ranks: How many there are.
        beside_scheduler: Whether all of them certainly run on the scheduler's node.
        problem: Why the scheduler cannot learn what the others hold; None if it can.
        heard_without_tokens: Whether they are called in steps that schedule no tokens.
    """

    ranks: int
    beside_scheduler: bool
    problem: str | None
    heard_without_tokens: bool


def topology_of(vllm_config: Any) -> Topology:
    """Read it off the configuration; whatever is unknown is taken for the worse."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    backend = getattr(parallel, "distributed_executor_backend", None)
    # The V2 runner calls the hooks in every step, and passes reports on through a pipeline.
    v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))
    beside = False
    problem = None
    if backend == "external_launcher" and ranks * stages > 1:
        problem = "external_launcher runs a scheduler for each rank, and all must decide the same"
    elif backend in (None, "uni", "mp", "external_launcher"):
        beside = ranks <= ranks * stages // getattr(parallel, "nnodes_within_dp", 1)
    if not beside and problem is None:
        problem = _silence(backend, ranks, stages, v2=v2)
    return Topology(ranks, beside, problem, v2)


def _silence(backend: Any, ranks: int, stages: int, *, v2: bool) -> str | None:
    """Why reports of ranks do not reach the scheduler; None if they do."""
    this = compat.release(compat.vllm_version())
    if not compat.installed_hooks()["build_connector_worker_meta"] or (
        this is not None and this < (0, 30)
    ):
        return "this vLLM drops the workers' reports (0.30 and newer pass them on)"
    if stages > 1 and not v2:
        return "vLLM's V1 model runner drops the workers' reports with pipeline parallelism"
    if backend == "ray" and ranks * stages > 1 and not compat.ray_passes_reports():
        return (
            "this Ray executor drops the workers' reports (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 "
            "selects the one that passes them on)"
        )
    return None

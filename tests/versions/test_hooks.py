# SPDX-License-Identifier: Apache-2.0
"""The vLLM that is installed has what s3ec uses of it, from the release on that the docs name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

import pytest

# What vLLM's own imports warn of differs from release to release.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

# Of every supported release; other names that s3ec reads may be absent, and it asks for them so.
ALWAYS = {
    "multimodal.inputs:MultiModalFeatureSpec": ("data", "modality", "identifier", "mm_position"),
    "multimodal.inputs:PlaceholderRange": ("offset", "length", "get_num_embeds"),
    "multimodal.inputs:MultiModalFieldElem": ("field",),
    "multimodal.inputs:BaseMultiModalField": ("keep_on_cpu",),
    "multimodal.inputs:MultiModalKwargsItem": ("get_data",),
    "multimodal.registry:MultiModalRegistry": ("_get_model_cls",),
    "v1.request:Request": (
        "request_id",
        "num_prompt_tokens",
        "num_computed_tokens",
        "mm_features",
        "arrival_time",
        "status",
    ),
    "v1.engine.core:EngineCore": ("collective_rpc", "reset_encoder_cache", "scheduler"),
    "v1.core.sched.scheduler:Scheduler": ("add_request", "reset_encoder_cache", "ec_connector"),
    "v1.core.sched.output:SchedulerOutput": (
        "free_encoder_mm_hashes",
        "total_num_scheduled_tokens",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
    ),
    "config.ec_transfer:ECTransferConfig": (
        "ec_connector_extra_config",
        "is_ec_producer",
        "is_ec_consumer",
    ),
    "config.vllm:VllmConfig": ("max_concurrent_batches", "weight_transfer_config"),
    "config.scheduler:SchedulerConfig": ("max_num_batched_tokens",),
    "config.parallel:ParallelConfig": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "nnodes_within_dp",
        "distributed_executor_backend",
    ),
    "config.multimodal:MultiModalConfig": (
        "mm_processor_kwargs",
        "media_io_kwargs",
        "mm_processor_cache_gb",
        "video_pruning_rate",
        "mm_encoder_attn_dtype",
    ),
    "config.model:ModelConfig": ("model", "revision", "dtype", "quantization", "hf_config"),
}
# What came later, or is gone: the first release that has it, and the first one without.
SINCE: dict[str, tuple[str, tuple[int, int], tuple[int, int]]] = {
    "set_weight_version": ("v1.engine.core:EngineCore", (0, 27), (1, 0)),
    "mm_hasher_algorithm": ("config.multimodal:MultiModalConfig", (0, 27), (1, 0)),
    "ec_connector_worker_meta": ("v1.outputs:ECConnectorOutput", (0, 28), (1, 0)),
    "VLLM_MM_HASHER_ALGORITHM": ("envs:environment_variables", (0, 24), (0, 30)),
}
HOOKS = {
    "ensure_cache_available": (0, 24),
    "request_finished": (0, 24),  # declared; called from 0.26 on
    "build_connector_worker_meta": (0, 28),  # V2 runner; called by the V1 runner from 0.30 on
    "take_unavailable_requests": (0, 30),
    "start_save_caches": (0, 30),
    "get_ec_connector_stats": (0, 31),
    "finish_load_caches": (0, 34),
}


def _release() -> tuple[int, int]:
    from s3ec.connector import compat

    found = compat.release(compat.vllm_version())
    assert found is not None
    return found


def _text(place: str) -> str:
    """The source of a class; attributes that only instances have are found in it alone."""
    module, name = place.split(":")
    found = getattr(importlib.import_module(f"vllm.{module}"), name)
    return " ".join(found) if isinstance(found, dict) else inspect.getsource(found)


def _has(place: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", _text(place)) is not None


@pytest.mark.parametrize(("place", "name"), [(p, name) for p in ALWAYS for name in ALWAYS[p]])
def test_what_is_used_of_every_release_is_there(place: str, name: str) -> None:
    assert _has(place, name)


@pytest.mark.parametrize("name", SINCE)
def test_what_is_used_of_some_releases_is_in_those(name: str) -> None:
    place, first, gone = SINCE[name]
    assert _has(place, name) == (first <= _release() < gone)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_declared_from_the_release_on_that_is_said(name: str) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    assert hasattr(ECConnectorBase, name) == (_release() >= HOOKS[name])


def test_our_hooks_take_what_vllm_hands_over() -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from s3ec.connector.connector import S3ECConnector

    for name, theirs in inspect.getmembers(ECConnectorBase, inspect.isfunction):
        ours = getattr(S3ECConnector, name)
        if name.startswith("_") or ours is theirs:
            continue
        taken = inspect.signature(ours).parameters
        for parameter in inspect.signature(theirs).parameters.values():
            open_ended = any(one.kind is one.VAR_POSITIONAL for one in taken.values())
            assert open_ended or parameter.name in taken or parameter.kind is parameter.VAR_KEYWORD


def _calls(function: object) -> list[str]:
    """What of these a function names, in the order of its text."""
    names = r"bind_connector_metadata|start_load_caches|yield|save_caches|get_finished"
    return re.findall(rf"\b(?:{names})\b", inspect.getsource(function))  # type: ignore[arg-type]


def test_the_encoder_runs_between_the_hooks_that_it_is_measured_by() -> None:
    runners = ["v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin"]
    if importlib.util.find_spec("vllm.v1.worker.gpu.ec_connector") is not None:
        runners.append("v1.worker.gpu.ec_connector:ActiveECConnector")
    for place in runners:
        module, name = place.split(":")
        runner = getattr(importlib.import_module(f"vllm.{module}"), name)
        of_one_step = getattr(runner, "_get_ec_connector_output", None) or runner.maybe_get_output
        called = [one for one in _calls(of_one_step) if one != "save_caches"]
        called = called[called.index("bind_connector_metadata") :]  # V2 leaves early without one
        assert called == ["bind_connector_metadata", "start_load_caches", "yield", "get_finished"]

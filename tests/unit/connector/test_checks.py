# SPDX-License-Identifier: Apache-2.0
"""What is found wrong with a vLLM configuration before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector.vllm_config import (
    identifier_problem,
    live_weights_problem,
    loading_ranks,
    model_problem,
    ranks_problem,
    trust_problem,
)
from s3ec.settings import Settings

HAS_NONE = SimpleNamespace()


def engine(
    *,
    multimodal: Any = HAS_NONE,
    prefix_caching: bool = False,
    encoder_decoder: bool | None = False,
) -> Any:
    model = SimpleNamespace(multimodal_config=multimodal)
    if encoder_decoder is not None:
        model.is_encoder_decoder = encoder_decoder
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    return SimpleNamespace(model_config=model, cache_config=cache)


def caching(gibibytes: float) -> Any:
    return SimpleNamespace(mm_processor_cache_gb=gibibytes)


@pytest.mark.parametrize("nothing", [0, 0.0])
def test_images_that_are_numbered_are_a_problem_that_names_the_flags(nothing: float) -> None:
    problem = identifier_problem(engine(multimodal=caching(nothing)))
    assert problem is not None
    assert "--mm-processor-cache-gb" in problem
    assert "--enable-prefix-caching" in problem


@pytest.mark.parametrize(
    "config",
    [
        engine(multimodal=caching(4)),
        engine(multimodal=caching(0.001)),
        engine(multimodal=caching(0), prefix_caching=True),
        engine(multimodal=caching(4), prefix_caching=True),
        engine(multimodal=HAS_NONE),  # a release without the setting hashes
        engine(multimodal=None),
    ],
)
def test_images_that_are_hashed_are_no_problem(config: Any) -> None:
    assert identifier_problem(config) is None


def test_models_without_an_encoder_cache_are_left_alone() -> None:
    assert "no images" in (model_problem(engine(multimodal=None)) or "")
    assert "encoder-decoder" in (model_problem(engine(encoder_decoder=True)) or "")


@pytest.mark.parametrize("encoder_decoder", [False, None])
def test_other_models_are_served(encoder_decoder: bool | None) -> None:
    assert model_problem(engine(encoder_decoder=encoder_decoder)) is None


@pytest.mark.parametrize(
    ("algorithm", "trust", "works"),
    [("blake3", False, True), ("sha256", False, True), ("sha512", False, False),
     ("sha512", True, True)],
)  # fmt: skip
def test_hashes_that_look_like_clients_names_are_a_problem_where_those_are_refused(
    algorithm: str, trust: bool, works: bool
) -> None:
    settings = Settings.model_validate({"bucket": "corpus", "trust_client_ids": trust})
    multimodal = SimpleNamespace(mm_hasher_algorithm=algorithm)
    problem = trust_problem(engine(multimodal=multimodal), settings)
    assert (problem is None) is works
    assert problem is None or "--mm-hasher-algorithm" in problem


def test_an_engine_whose_weights_will_change_does_not_begin_unless_told_otherwise() -> None:
    changing, fixed = engine(), engine()
    changing.weight_transfer_config = SimpleNamespace(backend="nccl")
    fixed.weight_transfer_config = None
    stop = Settings(bucket="corpus")
    assert "live_weights" in (live_weights_problem(changing, stop) or "")
    assert live_weights_problem(changing, Settings(bucket="corpus", live_weights="ignore")) is None
    assert live_weights_problem(fixed, stop) is None
    assert live_weights_problem(engine(), stop) is None  # a release without the option


# -- which ranks are beside the scheduler ---------------------------------------------------------


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
    assert ranks_problem(it) is None
    assert loading_ranks(it) == it.parallel_config.tensor_parallel_size


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
    assert ranks_problem(it) is not None


def test_schedulers_that_must_agree_without_talking_load_nothing() -> None:
    assert "external_launcher" in ranks_problem(config("external_launcher", tp=2))

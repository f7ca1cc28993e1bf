# SPDX-License-Identifier: Apache-2.0
"""What in a vLLM configuration keeps s3ec from working, found before the first request."""

from __future__ import annotations

from typing import Any

from s3ec.connector.namespace import hash_algorithm
from s3ec.settings import Settings


def identifier_problem(vllm_config: Any) -> str | None:
    """Why this configuration gives images no content hash; None if it does.

    Without a processor cache and without prefix caching vLLM counts images instead of hashing
    them: the same name means another image after a restart.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 1) != 0:
        return None
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    return (
        "with --mm-processor-cache-gb 0 and prefix caching off vLLM numbers images instead of "
        "hashing them, so nothing could be shared; set --mm-processor-cache-gb above 0 or "
        "--enable-prefix-caching"
    )


def trust_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Why nothing would be left where clients' identifiers are refused; None if much is."""
    multimodal = vllm_config.model_config.multimodal_config
    if settings.trust_client_ids or multimodal is None or hash_algorithm(multimodal) != "sha512":
        return None
    return (
        "`trust_client_ids` = false takes identifiers of 64 hex digits for vLLM's own, and with "
        "--mm-hasher-algorithm sha512 they have 128, so nothing would be looked up or saved; use "
        "blake3 or sha256"
    )


def live_weights_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Why this engine's weights are not those of its checkpoint; None if nothing says so."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is None or settings.live_weights == "ignore":
        return None
    return (
        "--weight-transfer-config says that this engine's weights will change while it runs; s3ec "
        "stays inactive. If its encoder never changes, set `live_weights` = ignore"
    )


def model_problem(vllm_config: Any) -> str | None:
    """Why this model has no encoder cache to connect to; None if it has."""
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models keep their encoder outputs elsewhere; s3ec stays inactive"
    if model.multimodal_config is None:
        return "the model takes no images, audio or video; s3ec stays inactive"
    return None

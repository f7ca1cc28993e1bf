# SPDX-License-Identifier: Apache-2.0
"""The namespace of a vLLM configuration: what its encoder outputs depend on beside the image."""

from __future__ import annotations

from typing import Any

from s3ec.identity import Namespace
from s3ec.settings import Settings
from s3ec.tenant import Tenant

# Settings of the multimodal configuration that change an encoder's output but not vLLM's hash
# of the image. A release that lacks one counts as having it unset.
_MULTIMODAL_SETTINGS = ("video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
_ENCODER_CONFIGS = ("vision_config", "audio_config", "speech_config", "encoder_config")


def namespace_of(vllm_config: Any, settings: Settings) -> Namespace:
    """The namespace that this engine reads and writes.

    Args:
        vllm_config: vLLM's VllmConfig.
        settings: For ``model_identity``, which replaces the ``--model`` string, and
            ``tenant_key``.

    Raises:
        ConfigError: The configuration cannot be described as JSON, or the tenant's secret
            cannot be read.
    """
    return Namespace.from_descriptor(describe(vllm_config, settings))


def describe(vllm_config: Any, settings: Settings) -> dict[str, Any]:
    """The descriptor: plain JSON, the same on every replica that may share embeddings."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    extra = {
        name: str(value)
        for name in _MULTIMODAL_SETTINGS
        if (value := getattr(multimodal, name, None)) is not None
    }
    if "video_pruning_rate" not in extra:
        extra.pop("video_pruning_method", None)  # has a default that does nothing alone
    # An encode-only instance may run its processor on the accelerator; vLLM 0.28 and newer note
    # that here, and a producer would no longer share with its consumers.
    processor = {
        name: value
        for name, value in (getattr(multimodal, "mm_processor_kwargs", None) or {}).items()
        if name != "device"
    }
    tenant = Tenant.read(settings.tenant_key)
    return {
        "model": settings.model_identity or model.model,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "encoder": _encoder_configs(model.hf_config),
        "mm_processor_kwargs": _plain(processor),
        "media_io_kwargs": _plain(getattr(multimodal, "media_io_kwargs", None) or {}),
        "hasher": hash_algorithm(multimodal),
        **({"multimodal": extra} if extra else {}),
        **({"tenant": tenant.id} if tenant else {}),
    }


def _encoder_configs(hf_config: Any) -> dict[str, Any]:
    """The encoders' own settings, without what every Hugging Face configuration has.

    The base class's fields (label maps, generation defaults) come and go with releases of
    transformers and say nothing about an encoder. What stands beside the parts does: which layer
    an image is taken from, how many tokens it becomes, how features are merged.
    """
    from transformers import PretrainedConfig

    common = set(PretrainedConfig().to_dict()) - {"model_type"}

    def own(config: Any) -> dict[str, Any]:
        values = config if isinstance(config, dict) else getattr(config, "to_dict", dict)()
        return {
            key: _plain(value)
            for key, value in values.items()
            if key not in common and not key.startswith("_") and value is not None
        }

    result: dict[str, Any] = {"model_type": getattr(hf_config, "model_type", None)}
    for part in _ENCODER_CONFIGS:
        if kept := own(getattr(hf_config, part, None)):
            result[part] = kept
    beside = {key: value for key, value in own(hf_config).items() if not isinstance(value, dict)}
    return {**beside, **result}


def _plain(value: Any) -> Any:
    """JSON as it is; anything else by its string form."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value) if isinstance(value, float) else str(value)


def hash_algorithm(multimodal: Any) -> str:
    """The algorithm of vLLM's image hash: a setting since 0.27.1, a variable before."""
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None)
    if algorithm is None:
        from vllm import envs

        algorithm = getattr(envs, "VLLM_MM_HASHER_ALGORITHM", "blake3")
    return str(algorithm)

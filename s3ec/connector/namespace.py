# SPDX-License-Identifier: Apache-2.0
"""The namespace of a vLLM configuration: what its encoder outputs depend on beside the image."""

from __future__ import annotations

from typing import Any

from s3ec.errors import ConfigError
from s3ec.identity import Namespace
from s3ec.settings import Settings
from s3ec.tenant import Tenant
from s3ec.weights import Checkpoint, Weights, content_digest, weights_of

# Settings of the multimodal configuration that change an encoder's output but not vLLM's hash
# of the image. A release that lacks one counts as having it unset.
_MULTIMODAL_SETTINGS = ("video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
_ENCODER_CONFIGS = ("vision_config", "audio_config", "speech_config", "encoder_config")


def namespace_of(vllm_config: Any, settings: Settings, weights: str | None = None) -> Namespace:
    """The namespace that this engine reads and writes.

    Args:
        vllm_config: vLLM's VllmConfig.
        settings: For ``model_identity``, which replaces the ``--model`` string, ``weights`` and
            ``tenant_key``.
        weights: What the descriptor says about the encoder's weights; None finds out.

    Raises:
        ConfigError: The configuration cannot be described as JSON, or the tenant's secret or a
            file that belongs to the description cannot be read.
    """
    return Namespace.from_descriptor(describe(vllm_config, settings, weights))


def encoder_weights(vllm_config: Any, settings: Settings) -> Weights:
    """Which weights this engine's encoder has, from its checkpoint; takes some 50 ms."""
    return weights_of(checkpoint_of(vllm_config), fingerprint=settings.weights == "fingerprint")


def checkpoint_of(vllm_config: Any) -> Checkpoint:
    """Where vLLM takes the weights from."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    # Ultravox: the audio tower comes from a model of its own.
    others = getattr(model.hf_config, "audio_model_id", None)
    return Checkpoint(
        model=getattr(model, "model_weights", "") or model.model,
        revision=model.revision,
        load_format=str(load.load_format),
        download_dir=load.download_dir,
        others=(others,) if isinstance(others, str) else (),
    )


def describe(vllm_config: Any, settings: Settings, weights: str | None = None) -> dict[str, Any]:
    """The descriptor: plain JSON, the same on every replica that may share embeddings."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    tenant = Tenant.read(settings.tenant_key)
    extra = _multimodal_settings(multimodal)
    # Mean, size, resampling: what a folder whose files are replaced may change as well.
    images = _plain(getattr(model, "hf_image_processor_config", None) or {})
    return {
        # vLLM mirrors the small files of an object store's model into a folder and runs on that.
        "model": settings.model_identity or getattr(model, "model_weights", "") or model.model,
        "revision": model.revision,
        "weights": weights or encoder_weights(vllm_config, settings).mark,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "encoder": _encoder_configs(model.hf_config),
        "mm_processor_kwargs": _plain(_processor_kwargs(multimodal)),
        "media_io_kwargs": _plain(_media_io_kwargs(multimodal)),
        "hasher": hash_algorithm(multimodal),
        **({"image_processor": images} if images else {}),
        **({"multimodal": extra} if extra else {}),
        **({"tenant": tenant.id} if tenant else {}),
    }


def _multimodal_settings(multimodal: Any) -> dict[str, str]:
    found = {
        name: str(value)
        for name in _MULTIMODAL_SETTINGS
        if (value := getattr(multimodal, name, None)) is not None
    }
    if "video_pruning_rate" not in found:
        found.pop("video_pruning_method", None)  # has a default that does nothing alone
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        try:
            found["mm_encoder_fp8_scales"] = content_digest(scales)
        except OSError as exc:
            raise ConfigError(
                f"--mm-encoder-fp8-scale-path cannot be read: {exc}",
                field="mm_encoder_fp8_scale_path",
            ) from exc
    return found


def _processor_kwargs(multimodal: Any) -> dict[str, Any]:
    """Without where the processor runs: that changes no embedding.

    An encode-only instance on an accelerator runs it there, and vLLM notes it here (0.28 and
    newer, config/vllm.py: _resolve_mm_processor_device).
    """
    given = getattr(multimodal, "mm_processor_kwargs", None) or {}
    return {name: value for name, value in given.items() if name != "device"}


def _media_io_kwargs(multimodal: Any) -> dict[str, Any]:
    """Without what vLLM adds on an encode-only instance on CUDA, and without empty modalities.

    vLLM 0.30 and newer decode video there with torchcodec on the device, or leave an empty entry
    where torchcodec is missing (config/vllm.py: _resolve_mm_video_decode_device). Consumers of the
    same fleet have neither.
    """
    kept: dict[str, Any] = {}
    for modality, given in (getattr(multimodal, "media_io_kwargs", None) or {}).items():
        values = dict(given)
        if values.pop("device", None) is not None and values.get("backend") == "torchcodec":
            del values["backend"]
        if values:
            kept[modality] = values
    return kept


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
    """The algorithm of vLLM's image hash: a setting since 0.27, a variable before."""
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None)
    if algorithm is None:
        from vllm import envs

        algorithm = getattr(envs, "VLLM_MM_HASHER_ALGORITHM", "blake3")
    return str(algorithm)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's names for pictures, and checks whether this server takes requests without pixels.

vLLM's own code makes every name here; only its input is ours. A name is a hash over the file's
bytes, the model's string and, if decoding converted the picture, how (0.32, multimodal/hasher.py
and media/image.py). So the bytes and the mode in the file's header are enough, and the picture need
not be decoded. A trial at the start tests that in the installed release, with one small picture of
each format and mode: a mode whose name differs is not used.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

from s3ec.settings import Settings

log = logging.getLogger(__name__)

_OLDEST = (0, 30)  # the first release that takes a picture's metadata in place of its pixels
_CONNECTOR = "S3ECConnector"
_MODALITY = "image"
# Formats and modes of the trial. Other formats can change their mode during decoding.
_MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
}


class VLLMNames:
    """vLLM's names for pictures. Thread-safe: it neither tokenizes nor keeps any state."""

    def __init__(self, processor: Any) -> None:
        """Test which pictures can be named without decoding them.

        Args:
            processor: vLLM's, for this model.
        """
        from vllm import envs
        from vllm.multimodal.media import MediaWithBytes
        from vllm.multimodal.media.image import ImageMediaIO
        from vllm.multimodal.processing import ProcessorInputs

        self._processor = processor
        self._inputs = ProcessorInputs
        self._with_bytes = MediaWithBytes
        self._media_io = ImageMediaIO(image_mode="RGB")  # as MediaConnector.fetch_image_async
        self._most_pixels = envs.VLLM_MAX_IMAGE_PIXELS
        self._modes: frozenset[tuple[str, str]] = frozenset()
        self._modes = frozenset(
            (form, mode)
            for form, modes in _MODES.items()
            for mode in modes
            if self._try(form, mode)
        )
        log.debug("named without decoding: %s", sorted(self._modes))

    def name(self, data: bytes) -> str | None:
        """The name of a picture by its header.

        Args:
            data: The file.

        Returns:
            The name; None if only decoding would tell it, or vLLM would refuse the size.
        """
        found = self._look(data)
        return None if found is None or found not in self._modes else self._name(data, found[1])

    def _look(self, data: bytes) -> tuple[str, str] | None:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data), formats=tuple(_MODES)) as picture:
                form = "JPEG" if picture.format == "MPO" else str(picture.format)
                width, height = picture.size
                if 0 < self._most_pixels < width * height:
                    return None
                return form, picture.mode
        except Exception:  # noqa: BLE001 (a parser may raise anything for a client's bytes)
            return None

    def _name(self, data: bytes, mode: str) -> str:
        from PIL import Image

        converted = None
        if mode != self._media_io.image_mode:
            converted = {
                "image_mode": self._media_io.image_mode,
                "rgba_background_color": self._media_io.rgba_background_color,
            }
        stub = Image.new("RGB", (1, 1))  # in place of the pixels, which are not hashed
        return self._hash({_MODALITY: [self._with_bytes(stub, data, converted)]})

    def _hash(self, media: Mapping[str, Any]) -> str:
        items = self._processor.info.parse_mm_data(media)
        inputs = self._inputs([], items)
        get = getattr(self._processor, "_get_mm_hashes", None)
        if get is not None:
            hashes = get(inputs)
        else:  # before 0.32
            info = self._processor.info
            algorithm = info.ctx.get_mm_config().mm_hasher_algorithm
            hashes = inputs.get_mm_hashes(info.model_id, algorithm)
        return str(hashes[_MODALITY][0])

    def _try(self, form: str, mode: str) -> bool:
        from PIL import Image

        try:
            buffer = io.BytesIO()
            Image.new(mode, (8, 8)).save(buffer, form)
            data = buffer.getvalue()
            media = self._media_io.load_bytes(data)
            return self._look(data) == (form, mode) and self._hash(
                {_MODALITY: [media]}
            ) == self._name(data, mode)
        except Exception:
            log.debug("%s %s is not named without decoding", form, mode, exc_info=True)
            return False


def names_of(vllm_config: Any, engine_client: Any) -> VLLMNames:
    """The names that one server gives to pictures."""
    renderer = getattr(engine_client, "renderer", None)
    if renderer is not None:
        return VLLMNames(renderer.get_mm_processor())
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return VLLMNames(MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config))


def metadata_fields(vllm_config: Any) -> frozenset[str]:
    """The fields that the model takes in place of a picture's pixels; empty if it takes none."""
    from s3ec.connector.vllm_config import FeatureReader

    return frozenset(FeatureReader(vllm_config.model_config).fields_for(_MODALITY))


def release_problem() -> str | None:
    """Why this vLLM takes no metadata in place of pictures; None if it does."""
    from s3ec.connector import compat

    version = compat.vllm_version()
    this = compat.release(version)
    if this is not None and this < _OLDEST:
        return f"vLLM {version} takes no request without pixels; 0.30 and newer do"
    return None


def connector_problem(vllm_config: Any) -> str | None:
    """Why no connector of ours would serve a request without pixels; None if one does."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is None:
        return "no --ec-transfer-config is given"
    if transfer.ec_connector != _CONNECTOR:
        return f"ec_connector is {transfer.ec_connector}, not {_CONNECTOR}"
    if not transfer.is_ec_consumer:
        return f"ec_role is {transfer.ec_role}, which loads nothing"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "with --kv-transfer-config another instance may run the prompt"
    return None


def picture_problem(vllm_config: Any) -> str | None:
    """Why a response without pixels could differ from the one with them; None if it cannot."""
    from vllm import envs

    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return "the model takes no pictures"
    if not getattr(multimodal, "enable_mm_embeds", False) or not getattr(
        multimodal, "allow_missing_mm_embeddings", False
    ):
        return "vLLM does not take embeddings from a connector here (enable_mm_embeds)"
    if multimodal.get_limit_per_prompt(_MODALITY) == 0:
        return "--limit-mm-per-prompt allows no pictures"
    if getattr(multimodal, "mm_processor_kwargs", None):
        return "--mm-processor-kwargs become part of every picture's name"
    if getattr(multimodal, "media_io_kwargs", None):
        return "--media-io-kwargs become part of every picture's name"
    if getattr(model.hf_config, "use_unified_vision_chunk", False):
        return "the model takes pictures and videos as one kind"
    if getattr(envs, "VLLM_MEDIA_CONNECTOR", "http") != "http":
        return "VLLM_MEDIA_CONNECTOR reads pictures in its own way"
    lora = getattr(vllm_config, "lora_config", None)
    if getattr(lora, "enable_tower_connector_lora", False):
        return "with LoRA adapters on the encoder a picture's embedding depends on the adapter"
    return None


def node_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Why an engine may not see this node's tier, or does not use it; None if all do."""
    from s3ec.connector.vllm_config import (
        identifier_problem,
        live_weights_problem,
        ranks_problem,
        trust_problem,
    )

    parallel = vllm_config.parallel_config
    engines = getattr(parallel, "data_parallel_size", 1)
    here = getattr(parallel, "data_parallel_size_local", engines)
    if here < engines or getattr(parallel, "nnodes", 1) > 1:
        return "engines on other nodes do not see this node's tier"
    if ranks_problem(vllm_config) is not None:
        return "ranks on other nodes do not see this node's tier"
    return (
        identifier_problem(vllm_config)
        or trust_problem(vllm_config, settings)
        or live_weights_problem(vllm_config, settings)
    )


def problem_of(vllm_config: Any, settings: Settings) -> str | None:
    """Why no picture of this server may be replaced; None if pictures may."""
    found = picture_problem(vllm_config) or node_problem(vllm_config, settings)
    if found is None and not metadata_fields(vllm_config):
        found = "the model declares no metadata that stands for a picture"
    return found

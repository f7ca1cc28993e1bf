# SPDX-License-Identifier: Apache-2.0
"""What a request's multimodal feature carries: pixels, or only what sizes its placeholder."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

# Those for which some model of vLLM declares placeholder metadata.
MODALITIES = ("image", "video", "audio")
# vLLM hands a request's own embeddings through as a modality of this name; nothing to cache.
PASSED_THROUGH = "prompt_embeds"
# With `--mm-processor-cache-type shm` an item holds three numbers, which say where the worker
# finds its fields (vLLM 0.32, multimodal/cache/shm.py, `address_as_item`).
_SHM_ADDRESS = "address"


class FeatureReader:
    """Answers two questions about features without imports or I/O at call time.

    The fields that a model declares for a request without pixels are asked for once, at start-up:
    vLLM builds a processor to answer, which takes far too long for a scheduling pass.
    """

    def __init__(self, model_config: Any) -> None:
        self._fields: dict[str, frozenset[str]] = {}
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
        except ImportError:  # older than the feature: every request brings its pixels
            return
        resolver = PlaceholderMetadataResolver(model_config)
        for modality in MODALITIES:
            self._fields[modality] = frozenset(resolver.fields_for(modality))

    @property
    def metadata_modalities(self) -> list[str]:
        """Modalities for which this model declares fields for requests without pixels."""
        return [modality for modality, fields in self._fields.items() if fields]

    def needs_embedding(self, feature: Any) -> bool:
        """Whether this feature came without pixels: only a stored embedding can serve it.

        vLLM sends three kinds of them: declared metadata fields, those together with all fields
        that stay on the CPU (the render endpoint), and no data at all (a bare hash). A field that
        is neither declared nor kept on the CPU is what the encoder works on; so is an address in
        shared memory, which vLLM gives to every item that has its data there.
        """
        data = feature.data
        if data is not None:
            fields = self._fields.get(feature.modality, ())
            for key, element in data.items():  # pixels show at the first name in most models
                if key not in fields and not element.field.keep_on_cpu:
                    return False
        return bool(feature.modality != PASSED_THROUGH)

    def placeholder(self, feature: Any) -> dict[str, Any] | None:
        """Placeholder metadata (grid, timestamps) of a feature as plain JSON.

        Returns:
            Empty where the model needs none. None where this process cannot see it: the fields
            lie in shared memory, which only workers read.
        """
        fields = self._fields.get(feature.modality)
        if not fields or feature.data is None:
            return {}
        if _SHM_ADDRESS in feature.data:
            return None
        found: dict[str, Any] = {}
        for key, value in feature.data.get_data().items():
            if key in fields:
                tolist = getattr(value, "tolist", None)
                found[key] = value if tolist is None else tolist()
        return found

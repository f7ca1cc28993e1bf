# SPDX-License-Identifier: Apache-2.0
"""What a request's multimodal feature carries: pixels, or only what sizes its placeholder."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

_MODALITIES = ("image", "video", "audio")


class FeatureReader:
    """Answers two questions about features without imports or I/O at call time.

    The fields that a model needs for a request without pixels are asked for once, at start-up:
    vLLM builds a processor to answer, which takes far too long for a scheduling pass.
    """

    def __init__(self, model_config: Any) -> None:
        self._fields: dict[str, frozenset[str]] = {}
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
        except ImportError:  # older than the feature: every request brings its pixels
            return
        resolver = PlaceholderMetadataResolver(model_config)
        for modality in _MODALITIES:
            self._fields[modality] = frozenset(resolver.fields_for(modality))

    @property
    def metadata_modalities(self) -> list[str]:
        """Modalities for which this model accepts requests without pixels."""
        return [modality for modality, fields in self._fields.items() if fields]

    def needs_embedding(self, feature: Any) -> bool:
        """Whether this feature came without pixels: only a stored embedding can serve it."""
        fields = self._fields.get(feature.modality)
        if not fields or feature.data is None:
            return False
        empty = True
        for key in feature.data:  # pixels show at the first name; asked at every pass
            if key not in fields:
                return False
            empty = False
        return not empty

    def placeholder(self, feature: Any) -> dict[str, Any]:
        """Placeholder metadata (grid, timestamps) of a feature, plain JSON; may be empty."""
        fields = self._fields.get(feature.modality)
        if not fields or feature.data is None:
            return {}
        found: dict[str, Any] = {}
        for key, value in feature.data.get_data().items():
            if key in fields:
                tolist = getattr(value, "tolist", None)
                found[key] = value if tolist is None else tolist()
        return found

# SPDX-License-Identifier: Apache-2.0
"""ECExampleConnector with one copy for each load: what any cache needs to fill a device's memory.

On a CPU vLLM's own maps the file and copies nothing; on a GPU it copies already. An engine finds
this class by ``ec_connector_module_path``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector


class CopyingExampleConnector(ECExampleConnector):  # type: ignore[misc]  # vLLM is not followed
    """Has a copy of each embedding in the encoder cache in place of a mapped file."""

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Load what the step needs, and copy what is new."""
        held = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        for name in encoder_cache.keys() - held:
            if encoder_cache[name].device.type == "cpu":
                encoder_cache[name] = encoder_cache[name].clone()

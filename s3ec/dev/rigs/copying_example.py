# SPDX-License-Identifier: Apache-2.0
"""ECExampleConnector that copies what it loads; on a CPU vLLM's own maps files, with no copy."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector


class CopyingExampleConnector(ECExampleConnector):  # type: ignore[misc]  # vLLM is not followed
    """One copy for each load, as the memory of a device needs it."""

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Load what the step needs, and copy what is new."""
        held = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        for name in encoder_cache.keys() - held:
            if encoder_cache[name].device.type == "cpu":
                encoder_cache[name] = encoder_cache[name].clone()

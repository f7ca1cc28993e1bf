# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache managers for vLLM: they choose which embedding the device evicts.

They work with and without the connector. ``encoder_cache`` is loaded at its first use, since it
imports vLLM; the rest is plain bookkeeping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3ec.managers.encoder_cache import LRUEncoderCacheManager, TieredEncoderCacheManager

__all__ = ["LRUEncoderCacheManager", "TieredEncoderCacheManager"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from s3ec.managers import encoder_cache

        return getattr(encoder_cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

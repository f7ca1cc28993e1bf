# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware for ``vllm serve --middleware s3ec.middleware.NAME``.

``StripClientIds`` keeps clients from choosing identifiers. ``SkipPictures`` keeps vLLM from reading
pictures whose embeddings this node has. Each class is imported at its first use, because an API
server loads one of them, not all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3ec.middleware.client_ids import StripClientIds
    from s3ec.middleware.skip_pictures import SkipPictures

__all__ = ["SkipPictures", "StripClientIds"]

_FROM = {
    "SkipPictures": "s3ec.middleware.skip_pictures",
    "StripClientIds": "s3ec.middleware.client_ids",
}


def __getattr__(name: str) -> object:
    if name in _FROM:
        import importlib

        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

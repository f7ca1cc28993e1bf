# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector; the only package of s3ec that imports vllm.

``S3ECConnector`` is loaded on first use, so that the plugin entry point, which runs in every
vLLM process, and the scheduler's bookkeeping can be imported without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3ec.connector.connector import S3ECConnector

__all__ = ["S3ECConnector"]


def __getattr__(name: str) -> Any:
    if name == "S3ECConnector":
        from s3ec.connector.connector import S3ECConnector

        return S3ECConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

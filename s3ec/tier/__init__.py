# SPDX-License-Identifier: Apache-2.0
"""This node's disk: entries kept as files that all processes of the node share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3ec.tier.tier import Tier

__all__ = ["Tier"]


def __getattr__(name: str) -> Any:
    """Import ``Tier`` at its first use: its modules import each other through this package."""
    if name != "Tier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from s3ec.tier.tier import Tier

    return Tier

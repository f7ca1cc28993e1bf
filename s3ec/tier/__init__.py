# SPDX-License-Identifier: Apache-2.0
"""This node's disk: entries kept as files that all processes of the node share.

A name is imported when it is asked for: some commands need one module of this package only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3ec.tier.claims import Claim
    from s3ec.tier.entries import LocalKeys
    from s3ec.tier.entry_writer import Incoming
    from s3ec.tier.open_entry import OpenEntry
    from s3ec.tier.residents import Residents
    from s3ec.tier.spool import Loaded, Spool, Spooled
    from s3ec.tier.tier import Tier

__all__ = [
    "Claim",
    "Incoming",
    "Loaded",
    "LocalKeys",
    "OpenEntry",
    "Residents",
    "Spool",
    "Spooled",
    "Tier",
]
_MODULES = {
    "Claim": "claims",
    "Incoming": "entry_writer",
    "Loaded": "spool",
    "LocalKeys": "entries",
    "OpenEntry": "open_entry",
    "Residents": "residents",
    "Spool": "spool",
    "Spooled": "spool",
    "Tier": "tier",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

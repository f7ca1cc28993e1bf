# SPDX-License-Identifier: Apache-2.0
"""This node's disk: entries kept as files that all processes of the node share."""

from __future__ import annotations

from s3ec.tier.claims import Claim
from s3ec.tier.entries import LocalKeys
from s3ec.tier.entry_writer import Incoming
from s3ec.tier.index_files import IndexFile, IndexFiles
from s3ec.tier.pins import Pin
from s3ec.tier.spool import Loaded, Spool, Spooled
from s3ec.tier.tier import Tier

__all__ = [
    "Claim",
    "Incoming",
    "IndexFile",
    "IndexFiles",
    "Loaded",
    "LocalKeys",
    "Pin",
    "Spool",
    "Spooled",
    "Tier",
]

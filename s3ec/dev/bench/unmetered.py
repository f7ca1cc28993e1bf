# SPDX-License-Identifier: Apache-2.0
"""S3ECConnector without what `bench metrics` measures: what it is compared with.

In the process of an engine that is told of this module it takes the metrics out of the whole
process: histograms, lookups, gauges, the line in the log, and what vLLM is told in each step. What
was counted before there were metrics stays: others decide by it.
"""

from __future__ import annotations

from typing import Any

from s3ec.connector.connector import S3ECConnector
from s3ec.connector.exporter import Exporter
from s3ec.connector.lookups import DeviceLookups
from s3ec.counters import Counters
from s3ec.node import Node


class UnmeteredConnector(S3ECConnector):
    """As its base, and vLLM is told nothing."""

    def get_ec_connector_stats(self) -> None:
        """Nothing has happened."""
        return


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what is left out."""


for _owner, _name in (
    (Counters, "observe"),
    (DeviceLookups, "allocated"),
    (DeviceLookups, "end_pass"),
    (Exporter, "start"),
    (Node, "keep_levels"),
):
    setattr(_owner, _name, _nothing)

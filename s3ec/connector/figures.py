# SPDX-License-Identifier: Apache-2.0
"""What one engine tells about itself: counts and gauges of its scheduler and of all ranks.

Everything is in memory. Counts of the ranks are added to the scheduler's by its half. What gauges
say is put together here. Readers are vLLM's hook for stats, the line in the log and `metrics_port`.
"""

from __future__ import annotations

from collections.abc import Mapping

from s3ec.connector.metrics import GAUGES
from s3ec.counters import Increments
from s3ec.node import Node


class Figures:
    """Of one engine, in the process of its scheduler half."""

    def __init__(self, node: Node) -> None:
        """Nothing is told yet.

        Args:
            node: The scheduler half's.
        """
        self._node = node
        self._increments = Increments(node.counters)
        self._ranks: dict[int, Mapping[str, float]] = {}
        self._told = node.levels

    def on_report(self, levels: Mapping[int, Mapping[str, float]]) -> None:
        """Take what gauges of ranks in other processes say."""
        self._ranks.update(levels)

    def counts(self) -> dict[str, float]:
        """All counts since the start."""
        return self._node.counters.snapshot()

    def levels(self) -> dict[str, float]:
        """What the gauges say of the whole engine."""
        found = dict(self._node.levels)
        for of_rank in self._ranks.copy().values():
            for name, level in of_rank.items():
                before = found.get(name)
                if before is None:
                    found[name] = level
                elif GAUGES[name][2] == "sum":
                    found[name] = before + level
                else:
                    found[name] = max(before, level)
        return found

    def news(self) -> dict[str, float]:
        """What was counted since the last call, and about once a second what the gauges say.

        Also where nothing has changed: a reader that has just started knows nothing.
        """
        news = self._increments.take()
        if self._node.levels is not self._told:
            self._told = self._node.levels
            news |= self.levels()
        return news

# SPDX-License-Identifier: Apache-2.0
"""What one engine tells about itself: counts and gauges of its scheduler and of all ranks.

Everything is in memory. Counts of the ranks are added to the scheduler's by its half. What gauges
say is put together here. Readers are vLLM's hook for stats (0.31 and newer) and the line in the
log, which every release has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from s3ec.connector.metrics import GAUGES
from s3ec.counters import Increments
from s3ec.node import Node
from s3ec.runtime import contained

log = logging.getLogger(__name__)

LINE_EVERY_S = 60.0
# What the line is about: nothing is said while all of these stay as they are.
_OF_INTEREST = ("lookups.", "hits", "misses", "fetch_items.", "save.items", "save_problem.")


class Figures:
    """Of one engine, in the process of its scheduler half."""

    def __init__(self, node: Node) -> None:
        """Nothing is told yet.

        Args:
            node: The scheduler half's.
        """
        self._node = node
        self._unsent = Increments(node.counters)
        self._unsaid = Increments(node.counters)
        self._lock = threading.RLock()  # of the latter; a signal handler may close it, see Counters
        self._line: Future[None] | None = None
        self._ranks: dict[int, Mapping[str, float]] = {}
        self._told = node.levels

    def on_report(self, levels: Mapping[int, Mapping[str, float]]) -> None:
        """Take what gauges of ranks in other processes say."""
        self._ranks.update(levels)

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
        news = self._unsent.take()
        if self._node.levels is not self._told:
            self._told = self._node.levels
            news |= self.levels()
        return news

    def start(self) -> None:
        """Write a line to the log each minute, and at the end; returns at once."""
        self._line = self._node.loop.submit(self._tell_forever())

    def close(self) -> None:
        """Say what was not said yet. More than once is fine."""
        if self._line is not None:
            self._line.cancel()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            line = line_of(self._unsaid.take())
        if line is not None:
            log.info("%s", line)

    async def _tell_forever(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            with contained(self._node.counters, "the line in the log"):
                self._tell()


def line_of(counts: Mapping[str, float]) -> str | None:
    """One line about what was counted in a while; None where nothing of interest was.

    Args:
        counts: Increments.
    """
    if not any(name.startswith(_OF_INTEREST) for name in counts):
        return None

    def get(name: str) -> float:
        return counts.get(name, 0)

    device, node, bucket = (get(f"lookups.{tier}.hit") for tier in ("device", "node", "bucket"))
    said = [
        f"{device + node + bucket:.0f} hits ({device:.0f} device, {node:.0f} node, "
        f"{bucket:.0f} bucket)",
        f"{get('misses'):.0f} encoded",
    ]
    if fetched := get("fetch_items.bucket"):
        mean_ms = 1000 * get("fetch_seconds.bucket") / fetched
        said.append(f"{get('fetch_bytes.bucket') / 1e6:.1f} MB fetched in {mean_ms:.1f} ms each")
    if loads := get("load.items"):
        said.append(f"{loads:.0f} loads in {1000 * get('load.seconds') / loads:.2f} ms each")
    if saved := get("save.items"):
        said.append(f"{saved:.0f} saved ({get('save.bytes') / 1e6:.1f} MB)")
    if deferred := get("deferred_requests"):
        said.append(f"{deferred:.0f} requests waited, {get('deferred_seconds'):.2f} s in all")
    problems = sum(amount for name, amount in counts.items() if name.startswith("save_problem."))
    if problems:
        said.append(f"{problems:.0f} problems with saves")
    return "s3ec: " + ", ".join(said)

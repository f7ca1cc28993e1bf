# SPDX-License-Identifier: Apache-2.0
"""Counts of events and histograms of times, cheap enough for a scheduler hook."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

Report: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the progress of long work: its name, how many items are done, and of how many."""


def unreported(what: str, done: int, total: int | None) -> None:
    """A Report that does nothing."""


TIME_BOUNDS_S = (
    *(0.0005, 0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of all histograms of seconds; longer times have a bucket of their own.

vLLM has no bounds for times of its encoder cache (0.32). These are the ones of its time to the
first token, which includes our loads, and one more for small embeddings on this node.
"""
_COUNT, _SUM = "#", "+"


class Observed(NamedTuple):
    """One bucket of a histogram.

    Attributes:
        histogram: Its name.
        number: Number of the bucket in TIME_BOUNDS_S; the last bucket has no bound.
        many: Number of observed times.
        seconds: Their sum.
    """

    histogram: str
    number: int
    many: int
    seconds: float


def observed(sums: Mapping[str, float]) -> Iterator[Observed]:
    """Yield what ``Counters.observe`` added to these sums, or to these increments of them."""
    for name, count in sums.items():
        histogram, mark, number = name.rpartition(_COUNT)
        if mark:
            seconds = sums.get(f"{histogram}{_SUM}{number}", 0.0)
            yield Observed(histogram, int(number), round(count), seconds)


class Counters:
    """Named monotonic sums, safe to use from any thread.

    A name may carry a label after a dot (``mismatch.width``); exporters split there.
    """

    def __init__(self) -> None:
        # Reentrant, as every lock that the end of an engine takes: a signal handler may end the
        # engine while this thread holds the lock.
        self._lock = threading.RLock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a sum. One uncontended lock: about 0.1 us, no system call."""
        with self._lock:
            self._sums[name] += amount

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add to several sums under one lock."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram: a count and a sum for each bucket of TIME_BOUNDS_S.

        They are sums like all others, so they are sent and added up across processes alike.
        """
        number = bisect_left(TIME_BOUNDS_S, seconds)
        with self._lock:
            self._sums[f"{name}{_COUNT}{number}"] += 1
            self._sums[f"{name}{_SUM}{number}"] += seconds

    def get(self, name: str) -> float:
        """Return the sum so far, 0 if nothing was added."""
        with self._lock:
            return self._sums.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all sums."""
        with self._lock:
            return dict(self._sums)


class Increments:
    """Increments of some Counters since they were last taken. For one thread."""

    def __init__(self, counters: Counters) -> None:
        """Start so that the first take returns all sums so far."""
        self._counters = counters
        self._taken: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return the increments since the last call; names without a change are left out."""
        sums, before = self._counters.snapshot(), self._taken
        if sums == before:
            return {}
        self._taken = sums
        return {
            name: total - before.get(name, 0)
            for name, total in sums.items()
            if total != before.get(name, 0)
        }


class RecentTimes:
    """How long the last requests of one kind took, seconds. For one thread."""

    def __init__(self, window: int, *, few: int) -> None:
        """Start without any.

        Args:
            window: Number of requests to remember.
            few: With fewer requests there is no quantile.
        """
        self._last: deque[float] = deque(maxlen=window)
        self._few = few

    def add(self, seconds: float) -> None:
        """Add the time of one request."""
        self._last.append(seconds)

    def quantile(self, share: float) -> float | None:
        """Return the quantile for a share of 0 to below 1; None while there are few.

        Takes some 8 us for 128 of them.
        """
        count = len(self._last)
        return sorted(self._last)[int(share * count)] if count >= self._few else None

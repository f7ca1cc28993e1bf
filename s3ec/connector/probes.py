# SPDX-License-Identifier: Apache-2.0
"""Fetches of what no index knows: another node may have stored it a moment ago."""

from __future__ import annotations

from collections.abc import Callable, Collection

from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import Key
from s3ec.index.missing import NEGATIVE_TTL_S, NegativeCache
from s3ec.prefetch import FetchOutcome, FetchResult


class Probes:
    """Says which fetches of unknown keys are made. One thread: the scheduler's.

    A key is

    =========  =========  ================================================================
    state      goes to    when
    =========  =========  ================================================================
    (none)     under way  a request needs it now, a place is free, and it is worth the wait
    under way  (none)     it was found, or bucket or disk have not answered
    under way  absent     it is not to be had
    absent     (none)     NEGATIVE_TTL_S have passed
    =========  =========  ================================================================

    A key for which no place is free is a miss and stays (none).

    Attributes:
        places: How many may be under way.
        under_way: Identifiers. For reading.
        absent: Digests of keys that are not asked for again. For reading.
    """

    def __init__(
        self,
        longest_s: float,
        places: int,
        *,
        costs: EncodeCosts | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """Start with nothing under way.

        Args:
            longest_s: That a request waits for one; 0 makes none.
            places: How many may be under way.
            costs: What encoding costs; None where that is not weighed.
            counters: Where to count.
            clock: Monotonic seconds.
        """
        self._longest_s = longest_s
        self.places = places
        self._costs = costs
        self._counters = counters
        self._absent = NegativeCache(NEGATIVE_TTL_S, clock)
        self._under_way: set[str] = set()
        self.under_way: Collection[str] = self._under_way
        self.absent: Collection[bytes] = self._absent.until

    def begin(self, key: Key, modality: str, rows: int) -> bool:
        """Whether this key is to be asked for now; if so it is under way."""
        if len(self._under_way) >= self.places or self._absent.holds(key.digest):
            return False
        if self._costs is not None:
            # One in vain makes a request at most twice as late as its encoder alone.
            encode_s = self._costs.known_s(modality, rows)
            if encode_s is None or encode_s <= self._longest_s:
                return False
        self._under_way.add(key.identifier)
        self._counters.add("probe.made")
        return True

    def end(self, fetched: FetchResult) -> bool:
        """A fetch has ended; whether it says that the bucket has answered a probe."""
        key = fetched.want.key
        if key.identifier not in self._under_way:
            return False
        self._under_way.discard(key.identifier)
        if fetched.outcome is FetchOutcome.READY:
            self._counters.add("probe.found")
        elif fetched.outcome is not FetchOutcome.UNAVAILABLE:
            self._absent.add_locked(key.digest)
        return fetched.source == "bucket" or fetched.outcome is FetchOutcome.ABSENT

    def sweep(self) -> None:
        """Drop what may be asked for again."""
        self._absent.sweep_locked()

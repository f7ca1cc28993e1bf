# SPDX-License-Identifier: Apache-2.0
"""How long each request has waited for one source; in memory, for the scheduler's thread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from s3ec.counters import Counters

# vLLM 0.24 and 0.25 do not tell when a request ends; more than these do not wait at all.
MAX_WAITS = 10_000
# A request that came without pixels waits at least this long, whatever `defer_timeout_s` says:
# it cannot be encoded instead, and would fail. Longer than a fetch that is tried again after a
# silence of the store (`read_timeout_s`).
NO_PIXELS_WAIT_S = 10.0
# So many waits in vain, one after the other, and nobody waits for this source...
MOST_IN_VAIN = 3
# ...until something of it comes in time, or this long has passed. Then one more in vain is enough.
VAIN_REST_S = 30.0


@dataclass(slots=True)
class _Wait:
    features: int
    spent_s: float = 0.0
    since_s: float | None = None
    asked_s: float = 0.0


class Waits:
    """Adds up the deferrals of each request and says when they have lasted long enough.

    One object counts the waits for one source: the bucket, or this node's disk. They are counted
    apart, so that no trouble with the bucket keeps a request from an embedding that is here.

    A source that answers, but too slowly for anybody to wait for, opens no breaker: small requests
    succeed. So after MOST_IN_VAIN waits in vain nothing waits for VAIN_REST_S, while fetches go on,
    or until one of them is quick enough.

    Attributes:
        requests: Ids of requests that have waited. For reading: a look is cheaper than a call.
    """

    def __init__(
        self, defer_timeout_s: float, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._limit_s = defer_timeout_s
        self._counters = counters
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._in_vain = 0
        self._vain_s = 0.0  # when the last wait in vain ended
        self.requests: Collection[str] = self._waits

    def __len__(self) -> int:
        return len(self._waits)

    def is_over(self, request_id: str, features: int = 0, *, no_pixels: bool = False) -> bool:
        """Start or continue this request's wait; True once it has waited long enough.

        Args:
            features: How many the request has by now. A streaming session brings more with each
                turn, and each turn may wait as long as a request of its own.
            no_pixels: It has no other chance, so it is given more time, and waits though others
                have waited in vain.
        """
        now = self._clock()
        if not no_pixels and self._rests(now):
            return True
        limit_s = max(self._limit_s, NO_PIXELS_WAIT_S) if no_pixels else self._limit_s
        wait = self._waits.get(request_id)
        if wait is None:
            if limit_s <= 0 or len(self._waits) >= MAX_WAITS:
                return True
            wait = self._waits[request_id] = _Wait(features)
        elif features > wait.features:
            wait.features = features
            wait.spent_s = 0.0
            wait.since_s = None
        wait.asked_s = now
        if wait.spent_s >= limit_s:
            return True
        if wait.since_s is None:
            wait.since_s = now
        return wait.spent_s + now - wait.since_s >= limit_s

    def _rests(self, now: float) -> bool:
        """Whether nobody should wait for this source."""
        if self._in_vain < MOST_IN_VAIN:
            return False
        if now - self._vain_s < VAIN_REST_S:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False

    def end(self, request_id: str, *, in_vain: bool = False) -> None:
        """The request need not wait now; what it has waited stays counted against it.

        Args:
            in_vain: What it waited for has not come in time.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return
        now = self._clock()
        waited_s = now - wait.since_s
        wait.spent_s += waited_s
        wait.since_s = None
        self._counters.add("deferred_seconds", waited_s)
        if in_vain:
            self._counters.add("defer_timeouts")
            self._in_vain += 1
            self._vain_s = now

    def came(self, seconds: float) -> None:
        """Something came from there after so long; who waits for others has a chance."""
        if seconds < self._limit_s:
            self._in_vain = 0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._waits.pop(request_id, None)

    def sweep(self, idle_s: float) -> None:
        """Forget requests that were not asked about for this long, once there are many."""
        if len(self._waits) <= MAX_WAITS // 2:
            return
        now = self._clock()
        for request_id, wait in list(self._waits.items()):
            if now - wait.asked_s > idle_s:
                del self._waits[request_id]

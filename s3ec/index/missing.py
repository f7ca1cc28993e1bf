# SPDX-License-Identifier: Apache-2.0
"""Keys that are not to be had: denied for a while. Vanished ones are counted, to notice many."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable

from s3ec.counters import Counters
from s3ec.identity import Key

log = logging.getLogger(__name__)

NEGATIVE_TTL_S = 60.0
BAD_OBJECT_TTL_S = 3600.0
"""How long a key counts as a miss after its object came bad twice."""
NEGATIVE_ENTRIES = 100_000
# So many keys that vanish within so long are no single deletions: a lifecycle rule, or a hand.
_MANY = 32
_WINDOW_S = 600.0


class NegativeCache:
    """Keys that are not to be had for now. Each is believed again after a while.

    ``until`` may be read by any thread without a lock; everything else is under the owner's.

    Attributes:
        until: Digest to the time on ``clock`` from which it is believed again.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self.until: dict[bytes, float] = {}
        self._ttl_s = ttl_s
        self._clock = clock

    def holds(self, digest: bytes) -> bool:
        """Whether this key is not to be had at the moment."""
        until = self.until.get(digest)
        return until is not None and self._clock() < until

    def add_locked(self, digest: bytes) -> None:
        """Deny this key from now on; the oldest ones make room where there are too many."""
        self.until.pop(digest, None)  # all live equally long, so the order is that of their ends
        self.until[digest] = self._clock() + self._ttl_s
        while len(self.until) > NEGATIVE_ENTRIES:
            del self.until[next(iter(self.until))]

    def discard_locked(self, digest: bytes) -> None:
        """Believe this key again."""
        self.until.pop(digest, None)

    def sweep_locked(self) -> None:
        """Drop the keys whose time is over."""
        now = self._clock()
        while self.until:
            oldest = next(iter(self.until))
            if self.until[oldest] > now:
                return
            del self.until[oldest]


class VanishAlarm:
    """Counts keys that the index holds and the bucket does not, and asks for help once.

    A folder is an adapter's (``lora:`` identifiers), or ``""`` for all others.
    """

    def __init__(self, namespace: str, counters: Counters, clock: Callable[[], float]) -> None:
        self._namespace = namespace
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin to count anew: what vanished before is not in a new base."""
        with self._lock:
            self._counts: defaultdict[str, int] = defaultdict(int)
            self._since_s = self._clock()
            self._warned: set[str] = set()

    def note(self, key: Key) -> None:
        """One more has vanished."""
        folder = key.name.rpartition("/")[0].rpartition("/")[0]
        with self._lock:
            if self._clock() - self._since_s > _WINDOW_S:
                self._counts.clear()
                self._since_s = self._clock()
            self._counts[folder] += 1
            many = self._counts[folder] >= _MANY and folder not in self._warned
            if many:
                self._warned.add(folder)
        if many:
            self._counters.add("index.rebuild_wanted")
            log.warning(
                "the index of %s holds objects that are gone from the bucket (%d in the last "
                "minutes%s); if a lifecycle rule or somebody deleted them, run `s3ec manifest "
                "rebuild`",
                self._namespace,
                _MANY,
                f", below {folder}/" if folder else "",
            )

# SPDX-License-Identifier: Apache-2.0
"""Two figures kept in memory: about how many bytes are there, and when something was last used."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Times of use past this (the year 2116) are somebody's mistake; they are not continued.
_LATEST_NS = 1 << 62


class Ledger:
    """Thread-safe; its lock is never held across a system call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counted_bytes = 0  # by the last walk
        self._published_bytes = 0  # ever, by this Tier
        self._published_then = 0  # of these, when the last walk began
        self._last_use_ns = 0

    def now_s(self) -> float:
        """The clock, as it is."""
        return self._clock()

    def use_ns(self, after_ns: int = 0) -> int:
        """Now, as a time of use: later than every one given before and than ``after_ns``.

        So the order of use survives a clock that jumps back: it then counts on by
        nanoseconds until the clock has caught up.
        """
        now_ns = int(self._clock() * 1e9)
        with self._lock:
            floor = max(self._last_use_ns, after_ns if after_ns < _LATEST_NS else 0)
            self._last_use_ns = max(now_ns, floor + 1)
            return self._last_use_ns

    def add(self, nbytes: int) -> None:
        """Note what was published."""
        with self._lock:
            self._published_bytes += nbytes

    def mark(self) -> int:
        """What has been published so far: taken before a walk, given to recount after it."""
        with self._lock:
            return self._published_bytes

    def recount(self, mark: int, *, total_bytes: int, newest_ns: int) -> None:
        """Take over what a walk found.

        What was published during the walk may be counted twice until the next one, but never
        not at all.
        """
        with self._lock:
            self._counted_bytes = total_bytes
            self._published_then = mark
            if newest_ns < _LATEST_NS:
                self._last_use_ns = max(self._last_use_ns, newest_ns)

    def unseen_bytes(self) -> int:
        """Published by this Tier since the last walk."""
        with self._lock:
            return self._published_bytes - self._published_then

    def estimated_bytes(self) -> int:
        """What is there, as far as this Tier's own doing goes never less than the truth."""
        with self._lock:
            return self._counted_bytes + self._published_bytes - self._published_then

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

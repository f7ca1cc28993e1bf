# SPDX-License-Identifier: Apache-2.0
"""Times of use: what stands in an entry's mtime, and in which order eviction takes entries.

Two scales. A used entry has a real time. One that was published for later (hydration) and never
pinned has the time of its publishing in microseconds where nanoseconds are meant: below every
real time, so such entries go first, oldest first. Its first pin gives it a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# Real times below this (April 1970) do not occur; microseconds since the epoch reach it in 2255.
UNUSED_BELOW_NS = 1 << 53
# Times of use past this (the year 2116) are somebody's mistake; they are not continued.
LATEST_NS = 1 << 62


def is_unused(mtime_ns: int) -> bool:
    """Whether an entry with this mtime was published for later and never pinned."""
    return mtime_ns < UNUSED_BELOW_NS


class UseClock:
    """Thread-safe; its lock is never held across a system call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start.

        Args:
            clock: Seconds since the epoch; may jump, either way.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._last_ns = UNUSED_BELOW_NS
        self._last_unused_ns = 0

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
            floor = max(self._last_ns, after_ns if after_ns < LATEST_NS else 0)
            self._last_ns = max(now_ns, floor + 1)
            return self._last_ns

    def unused_ns(self) -> int:
        """The mtime of an entry that nobody has asked for yet; in the order of publishing."""
        now_us = int(self._clock() * 1e6)
        with self._lock:
            later = max(now_us, self._last_unused_ns + 1)
            self._last_unused_ns = min(later, UNUSED_BELOW_NS - 1)
            return self._last_unused_ns

    def newest(self) -> tuple[int, int]:
        """The last time given on each scale: used, unused."""
        with self._lock:
            return self._last_ns, self._last_unused_ns

    def learn(self, used_ns: int, unused_ns: int) -> None:
        """Give only later times than these from now on; other processes have given them."""
        with self._lock:
            if used_ns < LATEST_NS:
                self._last_ns = max(self._last_ns, used_ns)
            if unused_ns < UNUSED_BELOW_NS:
                self._last_unused_ns = max(self._last_unused_ns, unused_ns)

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

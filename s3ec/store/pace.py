# SPDX-License-Identifier: Apache-2.0
"""How many requests an endpoint is asked at a time: fewer when it says "slow down", then more.

Additive increase, multiplicative decrease: each throttled request halves the places, once for all
that were out together; each round of answers gives one back. What is left goes to reads first,
since requests wait for those and nobody waits for an upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

# Where both wait, so many reads go before one that is none.
_READS_IN_A_ROW = 3

_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Pace:
    """Places for requests; for any number of threads.

    Those of a kind, reads or not, get them in the order they were asked for.

    Args:
        places: With an endpoint that does not complain. At least one is left.
    """

    def __init__(self, places: int) -> None:
        self._most = places
        self._limit = float(places)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._used = 0
        self._cuts = 0
        self._reads: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._reads_in_a_row = 0

    @property
    def withheld(self) -> int:
        """Places that nobody gets now."""
        return self._most - int(self._limit)

    @property
    def used(self) -> int:
        """Places that are taken."""
        return self._used

    async def take(self, *, is_read: bool = False) -> int:
        """Wait for a place without a limit; to be given back.

        Args:
            is_read: It goes before three of four that are none.

        Returns:
            For slow_down.
        """
        if self.try_take():
            return self._cuts
        loop = asyncio.get_running_loop()
        granted = loop.create_future()
        queue = self._reads if is_read else self._others
        with self._lock:
            queue.append((loop, granted))
            self._hand_out()
        try:
            await granted
        except asyncio.CancelledError:
            with self._lock, contextlib.suppress(ValueError):
                queue.remove((loop, granted))
                raise
            # It was granted meanwhile.
            self.give_back()
            raise
        return self._cuts

    def try_take(self) -> bool:
        """Take a place that is free and that nobody waits for; to be given back."""
        with self._lock:
            if self._reads or self._others or self._used >= int(self._limit):
                return False
            self._used += 1
            return True

    def give_back(self) -> None:
        """Let go of a place."""
        with self._lock:
            self._used -= 1
            self._hand_out()

    def slow_down(self, since: int) -> bool:
        """A request was throttled; True where that took places away.

        Args:
            since: What take() returned to it. Those that were out when the places were halved
                say nothing new.
        """
        with self._lock:
            if since != self._cuts:
                return False
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2)
            return True

    def speed_up(self) -> None:
        """A request was answered."""
        if self._limit >= self._most:
            return
        with self._lock:
            self._limit = min(self._limit + 1 / self._limit, float(self._most))
            self._hand_out()

    def wake_all(self) -> None:
        """Give everybody who waits a place at once; for when none of them will use it."""
        with self._lock:
            self._hand_out(everybody=True)

    def _hand_out(self, *, everybody: bool = False) -> None:
        """Under the lock."""
        while everybody or self._used < int(self._limit):
            waiting = self._next()
            if waiting is None:
                return
            loop, granted = waiting
            with contextlib.suppress(RuntimeError):  # its loop has ended, and nobody waits
                loop.call_soon_threadsafe(_grant, granted)
                self._used += 1

    def _next(self) -> _Waiting | None:
        """Take the next one out of its queue; under the lock."""
        if self._reads and (self._reads_in_a_row < _READS_IN_A_ROW or not self._others):
            self._reads_in_a_row += 1
            return self._reads.popleft()
        self._reads_in_a_row = 0
        return self._others.popleft() if self._others else None

    def after_fork(self) -> None:
        """In a forked child: requests under way are the parent's."""
        self._reset()


def _grant(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)

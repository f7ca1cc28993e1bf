# SPDX-License-Identifier: Apache-2.0
"""A store that asks twice where an answer is later than nineteen in twenty, and takes the first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from s3ec.counters import Counters
from s3ec.errors import S3ECError
from s3ec.store.base import Blob, Store, Wrapper
from s3ec.store.concurrency import AdaptiveConcurrency
from s3ec.store.retry import Budget

T = TypeVar("T")
Call = Callable[[], Awaitable[Blob | None]]

# A large body's time is its throughput's, and a second one would halve that.
HEDGED_BYTES = 8 * 2**20
_SAMPLES = 128
_FEWEST = 32
_LATE = 0.95
# Sorting that many takes about 5 us, so not for each request.
_SAMPLES_BETWEEN_LOOKS = 16


class Durations:
    """How long recent GETs of about one size took; one event loop."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_SAMPLES)
        self._unseen = 0
        self.late_s: float | None = None

    def add(self, seconds: float) -> None:
        """Note one that was answered."""
        self._last.append(seconds)
        self._unseen += 1
        if len(self._last) >= _FEWEST and self._unseen >= _SAMPLES_BETWEEN_LOOKS:
            self._unseen = 0
            self.late_s = sorted(self._last)[int(_LATE * len(self._last))]


class HedgeStore(Wrapper):
    """Sends a late GET once more, over another connection, and gives up the one that loses.

    Both transports speak HTTP/1.1, so a connection carries one request at a time. Nothing is sent
    a second time that the budget does not allow, while requests wait for a place, or before enough
    was seen to tell what late is. One event loop.

    Args:
        pace: Whose places the second requests need.
        budget: What they are paid from: each GET pays in.
    """

    def __init__(
        self, inner: Store, counters: Counters, pace: AdaptiveConcurrency, budget: Budget
    ) -> None:
        super().__init__(inner)
        self._counters = counters
        self._pace = pace
        self._budget = budget
        self._durations: dict[int, Durations] = {}

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        # Sizes are told apart by factors of two.
        return await self._hedged(
            max_bytes.bit_length(), max_bytes, lambda: self._inner.get(name, max_bytes=max_bytes)
        )

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._hedged(
            length.bit_length(), length, lambda: self._inner.get_range(name, start, length)
        )

    async def _around(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        return await call()

    async def _hedged(self, size: int, nbytes: int, call: Call) -> Blob | None:
        self._budget.pay_in()
        durations = self._durations.setdefault(size, Durations())
        clock = asyncio.get_running_loop().time
        started = clock()
        if durations.late_s is None or nbytes > HEDGED_BYTES:
            result = await call()
        else:
            result = await _Race(call, self._begin_second, self._counters).run(durations.late_s)
        durations.add(clock() - started)
        return result

    def _begin_second(self, call: Call) -> asyncio.Task[Blob | None] | None:
        """Send it once more, where that is affordable."""
        if not self._pace.try_take():
            return None
        if not self._budget.take():
            self._pace.give_back()
            return None
        self._counters.add("hedge.sent")
        second = asyncio.ensure_future(call())
        second.add_done_callback(lambda _: self._pace.give_back())
        return second


class _Race:
    """One GET and, when it is late, a second one.

    The first runs in the caller's task: most are not late, and a task costs more than a timer.
    """

    def __init__(
        self,
        call: Call,
        begin_second: Callable[[Call], asyncio.Future[Blob | None] | None],
        counters: Counters,
    ) -> None:
        self._call = call
        self._begin_second = begin_second
        self._counters = counters
        self._second: asyncio.Future[Blob | None] | None = None
        self._caller: asyncio.Task[object] | None = None
        self._cancelled_caller = False

    async def run(self, late_s: float) -> Blob | None:
        """The answer that comes first; an error only where both failed, then the first one's."""
        caller = self._caller = asyncio.current_task()
        before = 0 if caller is None else caller.cancelling()
        timer = asyncio.get_running_loop().call_later(late_s, self._is_late)
        try:
            return await self._call()
        except asyncio.CancelledError:
            # As asyncio.timeout does it: ours is taken back, anybody else's goes on.
            if not self._cancelled_caller or caller is None or caller.uncancel() > before:
                raise
            return self._won()
        except S3ECError as exc:
            self._caller = None
            if self._second is None:
                raise
            try:
                await self._second
            except S3ECError:
                raise exc from None
            return self._won()
        finally:
            self._caller = None
            timer.cancel()
            if self._second is not None:
                self._second.cancel()

    def _is_late(self) -> None:
        self._second = self._begin_second(self._call)
        if self._second is not None:
            self._second.add_done_callback(self._second_ended)

    def _second_ended(self, second: asyncio.Future[Blob | None]) -> None:
        # Asking for the exception marks it as seen.
        if not second.cancelled() and second.exception() is None and self._caller is not None:
            self._cancelled_caller = True
            self._caller.cancel()

    def _won(self) -> Blob | None:
        if self._second is None:
            raise RuntimeError("a race without a second")
        self._counters.add("hedge.won")
        return self._second.result()

# SPDX-License-Identifier: Apache-2.0
"""Stores that send a request more than once: after a failure, or if its response is late.

The budget of the endpoint pays for both: each operation pays in, see RetryStore.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from s3ec.counters import Counters, RecentTimes
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.runtime import jitter
from s3ec.spans import note
from s3ec.store.base import Blob, Store, Wrapper
from s3ec.store.concurrency import seconds_left
from s3ec.store.endpoint import BreakerOpenError, Endpoint

T = TypeVar("T")
Call = Callable[[], Awaitable[Blob | None]]

# The longest pause before the first repetition; before each further one twice as much.
_BASE_DELAY_S = 0.1
# A longer pause is not waited for: callers have other work, or a queue of their own.
_LONGEST_DELAY_S = 5.0


class RetryStore(Wrapper):
    """Repeats an unavailable operation after a pause of random length (full jitter).

    The pause is at least as long as the server asks for. An operation is not repeated if the budget
    does not allow it, if others failed too, or if the pause would end after the caller's deadline.
    A listing is not repeated: its caller lists again at the next refresh anyway.

    Args:
        attempts: Requests at most for one operation.
        endpoint: Its budget and breaker decide on a repetition. None for commands, which send few
            requests.
    """

    def __init__(
        self,
        inner: Store,
        counters: Counters,
        *,
        attempts: int = 3,
        endpoint: Endpoint | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = jitter.uniform,
    ) -> None:
        super().__init__(inner)
        self._counters = counters
        self._attempts = attempts
        self._endpoint = endpoint
        self._sleep = sleep
        self._uniform = uniform

    async def ask(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request that Store does not have, with the same repetitions."""
        return await self._around(op, name, call)

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if self._endpoint is not None:
            self._endpoint.budget.pay_in()
        attempt = 1
        while True:
            try:
                return await call()
            except BreakerOpenError:
                raise  # it will be open for longer than we would wait
            except UnavailableError as exc:
                if attempt >= self._attempts:
                    raise
                delay_s = self._delay_s(attempt, exc)
                if not self._may_repeat(delay_s):
                    raise
                attempt += 1
                self._counters.add("store.retries")
                note("retries")
            await self._sleep(delay_s)

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        """As Store's; a repetition has only the names that may still be deleted."""
        left: dict[str, S3ECError] = {}
        wanted = list(names)

        async def ask() -> None:
            nonlocal wanted
            answer = await self._inner.delete_many(wanted)
            for name in wanted:
                left.pop(name, None)
            left.update(answer)
            reasons = [exc for exc in answer.values() if isinstance(exc, UnavailableError)]
            wanted = [name for name, exc in answer.items() if exc in reasons]
            if reasons:
                raise reasons[0]

        try:
            await self._around("delete_many", "\n".join(names), ask)
        except (UnavailableError, AccessError) as exc:
            if not left:  # no response named any of them
                raise
            if exc not in left.values():
                left.update(dict.fromkeys(wanted, exc))
        return left

    def _delay_s(self, attempt: int, exc: UnavailableError) -> float:
        drawn_s = self._uniform(0, _BASE_DELAY_S * 2 ** (attempt - 1))
        return max(drawn_s, exc.retry_after_s or 0.0)

    def _may_repeat(self, delay_s: float) -> bool:
        """True if deadline, breaker and budget allow a repetition after this pause."""
        if delay_s > _LONGEST_DELAY_S or delay_s >= seconds_left():
            return False
        if self._endpoint is None:
            return True
        return self._endpoint.breaker.is_isolated_failure and self._endpoint.budget.take()


HEDGED_BYTES = 8 * 2**20
"""Larger bodies are not requested twice: a second request would halve the throughput of both."""

_SAMPLES = 128
_FEWEST = 32
_LATE = 0.95


class HedgeStore(Wrapper):
    """Sends a late GET a second time, over another connection, and cancels the slower one.

    Late means later than nineteen in twenty of about its size. All transports speak HTTP/1.1, so a
    connection carries one request at a time. No second request is sent if the budget does not allow
    it, while requests wait for a place, or before enough response times are known. One event loop.

    Args:
        endpoint: Second requests take its places and its budget.
    """

    def __init__(self, inner: Store, endpoint: Endpoint, counters: Counters) -> None:
        super().__init__(inner)
        self._counters = counters
        self._places = endpoint.places
        self._budget = endpoint.budget
        self._times = defaultdict[int, RecentTimes](lambda: RecentTimes(_SAMPLES, few=_FEWEST))

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._hedged(max_bytes, lambda: self._inner.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._hedged(length, lambda: self._inner.get_range(name, start, length))

    async def _hedged(self, nbytes: int, call: Call) -> Blob | None:
        # Sizes are grouped by factors of two.
        times = self._times[nbytes.bit_length()]
        late_s = times.quantile(_LATE)
        clock = asyncio.get_running_loop().time
        started = clock()
        if late_s is None or nbytes > HEDGED_BYTES:
            result = await call()
        else:
            result = await self._race(call, late_s)
        if result is not None:  # a 404 comes sooner
            times.add(clock() - started)
        return result

    async def _race(self, call: Call, late_s: float) -> Blob | None:
        """Return the first response; if both requests fail, raise the first one's error."""
        first = asyncio.ensure_future(call())
        asked = [first]
        try:
            await asyncio.wait(asked, timeout=late_s)
            if not first.done() and (second := self._begin_second(call)) is not None:
                asked.append(second)
                done, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                if left and done.pop().exception() is not None:
                    await asyncio.wait(left)
                for each in asked:
                    if each.done() and each.exception() is None:
                        return each.result()
            return await first
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)  # they release what they hold

    def _begin_second(self, call: Call) -> asyncio.Task[Blob | None] | None:
        """Send the second request, if places and budget allow it."""
        if not self._places.try_take():
            return None
        if not self._budget.take():
            self._places.give_back()
            return None
        self._counters.add("hedge.sent")
        note("hedges")
        second = asyncio.ensure_future(call())
        second.add_done_callback(lambda _: self._places.give_back())
        return second

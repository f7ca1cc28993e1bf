# SPDX-License-Identifier: Apache-2.0
"""A store that asks again: few times, later and later, within a budget and the caller's time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from s3ec.counters import Counters
from s3ec.errors import UnavailableError
from s3ec.store.base import Store, Wrapper
from s3ec.store.breaker import BreakerOpenError
from s3ec.store.concurrency import seconds_left

T = TypeVar("T")


class Budget:
    """A token bucket: each request pays in a share, each extra request takes one out.

    Over any number of requests the extra ones are at most that share of them, and ``at_most`` more.
    Safe to use from any thread.

    Args:
        share: Extra requests per request.
        at_most: What can be saved up.
        at_first: What is there before the first request.
    """

    def __init__(self, share: float, *, at_most: float, at_first: float) -> None:
        self._share = share
        self._at_most = at_most
        self._tokens = at_first
        self._lock = threading.Lock()

    def pay_in(self) -> None:
        """A request goes out."""
        with self._lock:
            self._tokens = min(self._tokens + self._share, self._at_most)

    def take(self) -> bool:
        """Whether an extra one may."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """How often and how soon.

    Attributes:
        attempts: Requests at most for one operation.
        base_delay_s: The pause before the first repetition is up to this, then up to twice as much.
        longest_delay_s: Who is asked to wait longer than this does not wait at all: its caller has
            better to do, or a queue of its own.
        may_repeat: Asked before each repetition; for who knows how the endpoint fares.
    """

    attempts: int = 3
    base_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    may_repeat: Callable[[], bool] = field(default=lambda: True)


class RetryStore(Wrapper):
    """Tries an unavailable operation again, after a pause of random length (full jitter).

    The pause is as long as the server asks for at least. Nothing is repeated that the budget does
    not allow, or whose pause would end behind the caller's deadline. A listing is not repeated: its
    caller asks again at the next refresh anyway.

    Args:
        budget: None for people's commands, which ask little.
    """

    def __init__(
        self,
        inner: Store,
        counters: Counters,
        *,
        options: RetryOptions | None = None,
        budget: Budget | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        super().__init__(inner)
        self._counters = counters
        self._options = options or RetryOptions()
        self._budget = budget
        self._sleep = sleep
        self._uniform = uniform

    async def _around(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        if self._budget is not None and op != "list":  # whose entries are no requests
            self._budget.pay_in()
        attempt = 1
        while True:
            try:
                return await call()
            except BreakerOpenError:
                raise  # it will be open for longer than we would wait
            except UnavailableError as exc:
                if op == "list" or attempt >= self._options.attempts:
                    raise
                delay_s = self._delay_s(attempt, exc)
                if not self._may_repeat(delay_s):
                    raise
                attempt += 1
                self._counters.add("store.retries")
            await self._sleep(delay_s)

    def _delay_s(self, attempt: int, exc: UnavailableError) -> float:
        drawn_s = self._uniform(0, self._options.base_delay_s * 2 ** (attempt - 1))
        return max(drawn_s, exc.retry_after_s or 0.0)

    def _may_repeat(self, delay_s: float) -> bool:
        """Whether it makes sense, is right, and can be afforded."""
        if delay_s > self._options.longest_delay_s or delay_s >= seconds_left():
            self._counters.add("store.too_late")
            return False
        if not self._options.may_repeat():
            return False
        if self._budget is None or self._budget.take():
            return True
        self._counters.add("store.retry_budget_spent")
        return False

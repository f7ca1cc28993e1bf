# SPDX-License-Identifier: Apache-2.0
"""Stores around stores: bounded retries, and a breaker that stops asking a sick endpoint."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from s3ec.counters import Counters
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.store.base import Blob, ObjectInfo, Store

T = TypeVar("T")
log = logging.getLogger(__name__)


class BreakerOpenError(UnavailableError):
    """Nothing was asked: the endpoint failed lately, and the next probe is not due."""


class Breaker:
    """Opens after failures in a row, lets one probe through after a pause, closes on success.

    The pause doubles with every failed probe up to ``max_pause_s``. ``is_open`` is one attribute
    read, for scheduler hooks.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        threshold: int = 3,
        first_pause_s: float = 1.0,
        max_pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = False
        self._counters = counters
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._failures = 0
        self._pause_s = first_pause_s
        self._probe_at = 0.0
        self._probing = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is allowed; 0 when closed."""
        return max(0.0, self._probe_at - self._clock()) if self.is_open else 0.0

    def admit(self) -> bool:
        """Whether a request may go out now. While open, one probe at a time may."""
        if not self.is_open:
            return True
        if self._probing or self._clock() < self._probe_at:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The endpoint answered."""
        if self.is_open:
            log.info("the store answers again; the breaker is closed")
        self.is_open = self._probing = False
        self._failures = 0
        self._pause_s = self._first_pause_s

    def abandoned(self, *, probe: bool) -> None:
        """The request ended before it said anything about the endpoint.

        Args:
            probe: It is the one that was let through while open.
        """
        if probe:
            self._probing = False

    def failed(self, error: Exception, *, probe: bool) -> None:
        """The endpoint failed or refused.

        Args:
            error: For the log.
            probe: As for abandoned(): those that were out when the breaker opened say nothing new.
        """
        self._failures += 1
        if self.is_open and probe:
            self._pause_s = min(self._pause_s * 2, self._max_pause_s)
        elif self.is_open or self._failures < self._threshold:
            return
        else:
            self.is_open = True
            self._counters.add("breaker.opened")
            log.warning("the breaker is open, images are encoded meanwhile: %s", error)
        self._probing = False
        self._probe_at = self._clock() + self._pause_s


class BreakerStore:
    """Answers UnavailableError at once while the breaker is open."""

    def __init__(self, inner: Store, breaker: Breaker) -> None:
        self._inner = inner
        self._breaker = breaker

    async def _guard(self, call: Callable[[], Awaitable[T]]) -> T:
        probe = self._breaker.is_open
        if not self._breaker.admit():
            raise BreakerOpenError("the breaker is open")
        try:
            result = await call()
        except (UnavailableError, AccessError) as exc:
            self._breaker.failed(exc, probe=probe)
            raise
        except (S3ECError, StopAsyncIteration):
            # Anything else (a conflict, a corrupt body, the end of a listing) is an answer.
            self._breaker.succeeded()
            raise
        except BaseException:
            # Cancelled, or a fault of ours: nothing was learnt.
            self._breaker.abandoned(probe=probe)
            raise
        self._breaker.succeeded()
        return result

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._guard(lambda: self._inner.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._guard(lambda: self._inner.get_range(name, start, length))

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        await self._guard(lambda: self._inner.put_if_absent(name, body))

    async def head(self, name: str) -> ObjectInfo | None:
        return await self._guard(lambda: self._inner.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        pages = self._inner.list(prefix, start_after=start_after)
        try:
            while True:
                try:
                    info = await self._guard(pages.__anext__)
                except StopAsyncIteration:
                    return
                yield info
        finally:
            # A caller that leaves early must not leave a request behind.
            if isinstance(pages, AsyncGenerator):
                await pages.aclose()

    async def list_folders(self, prefix: str) -> Sequence[str]:
        return await self._guard(lambda: self._inner.list_folders(prefix))

    async def delete(self, name: str) -> None:
        await self._guard(lambda: self._inner.delete(name))

    async def close(self) -> None:
        await self._inner.close()


class RetryStore:
    """Tries an unavailable operation again, a bounded number of times, with full jitter.

    A listing is not retried: its caller asks again at the next refresh anyway.
    """

    def __init__(
        self,
        inner: Store,
        counters: Counters,
        *,
        attempts: int = 2,
        base_delay_s: float = 0.05,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._inner = inner
        self._counters = counters
        self._attempts = attempts
        self._base_delay_s = base_delay_s
        self._sleep = sleep
        self._uniform = uniform

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, self._attempts):
            try:
                return await call()
            except BreakerOpenError:
                raise  # it will be open for longer than we would wait
            except UnavailableError:
                self._counters.add("store.retries")
                await self._sleep(self._uniform(0, self._base_delay_s * 2**attempt))
        return await call()

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._retry(lambda: self._inner.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._retry(lambda: self._inner.get_range(name, start, length))

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        await self._retry(lambda: self._inner.put_if_absent(name, body))

    async def head(self, name: str) -> ObjectInfo | None:
        return await self._retry(lambda: self._inner.head(name))

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._inner.list(prefix, start_after=start_after)

    async def list_folders(self, prefix: str) -> Sequence[str]:
        return await self._retry(lambda: self._inner.list_folders(prefix))

    async def delete(self, name: str) -> None:
        await self._retry(lambda: self._inner.delete(name))

    async def close(self) -> None:
        await self._inner.close()

# SPDX-License-Identifier: Apache-2.0
"""Limits of requests: how many at a time, how long each may take, how large a body may be.

A request knows its caller's deadline, so that no work begins that cannot end before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from contextvars import ContextVar
from types import TracebackType
from typing import Self, TypeVar

from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.settings import Settings

T = TypeVar("T")
R = TypeVar("R")

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("s3ec_deadline", default=None)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Set a deadline for everything inside; it also holds for tasks that begin inside.

    Yields:
        The deadline, which may be moved.

    Raises:
        TimeoutError: It has passed.
    """
    outer = _deadline.get()
    async with asyncio.timeout(seconds) as deadline:
        _deadline.set(deadline)
        try:
            yield deadline
        finally:
            _deadline.set(outer)


def seconds_left() -> float:
    """Seconds until the caller's deadline; infinite if there is none."""
    deadline = _deadline.get()
    when = None if deadline is None else deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()


class RequestSlots:
    """One store's requests: how many are under way, and the deadline of each.

    States: new, then bound to the loop of the first ``check_loop``, then closed for good by
    ``close``, which ends the requests that are under way and those that wait. ``abandon`` ends only
    the former.

    Args:
        settings: ``max_concurrency`` slots, and the timeouts of which a deadline is the sum.

    Attributes:
        least_bytes_per_s: A body that is slower misses its deadline. A read timeout does not end a
            trickle, and does not guard an upload.
        is_closed: True after close().
    """

    least_bytes_per_s = 65536.0

    def __init__(self, settings: Settings) -> None:
        self.is_closed = False
        self._bytes_per_s = self.least_bytes_per_s
        # Connect, then the reply's head, then silence within the body: each may take its limit.
        self._budget_s = settings.connect_timeout_s + 2 * settings.read_timeout_s
        self._free = asyncio.Semaphore(settings.max_concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: set[asyncio.Timeout] = set()

    def check_loop(self) -> None:
        """Bind the store to the loop of its first call.

        Raises:
            RuntimeError: It is called from another loop, or after close().
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("a store serves one event loop; make another one for this loop")
        if self.is_closed:
            raise RuntimeError("the store is closed")
        self._loop = loop

    def close(self) -> None:
        """End the requests under way, and refuse new ones."""
        self.is_closed = True
        self._end()

    def abandon(self) -> None:
        """End the requests under way soon; for another thread, when the process ends."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for deadline in self._under_way:
            if not deadline.expired():
                deadline.reschedule(0.0)

    def _limit_s(self, nbytes: int) -> float:
        return self._budget_s + nbytes / self._bytes_per_s


class RequestSlot(AbstractAsyncContextManager["RequestSlot"]):
    """One request's slot in its store: it waits for one without a limit, then has a deadline.

    Raises:
        UnavailableError: The store was closed meanwhile.
        TimeoutError: The deadline has passed.
    """

    __slots__ = ("_deadline", "_slots", "what")

    def __init__(self, slots: RequestSlots, what: str) -> None:
        self._slots = slots
        self.what = what

    async def __aenter__(self) -> Self:
        slots = self._slots
        await slots._free.acquire()
        try:
            if slots.is_closed:  # closed while this request waited
                raise UnavailableError(f"{self.what}: the store was closed")
            self._deadline = asyncio.timeout(slots._limit_s(0))
            await self._deadline.__aenter__()
        except BaseException:
            slots._free.release()
            raise
        slots._under_way.add(self._deadline)
        return self

    def extend(self, nbytes: int) -> None:
        """Grant the time that a body of so many bytes may take, from now on."""
        slots = self._slots
        if not slots.is_closed:  # close() has set the final deadline
            self._deadline.reschedule(asyncio.get_running_loop().time() + slots._limit_s(nbytes))

    def expect(self, nbytes: int | None, most: int) -> None:
        """Check the length of the body that follows, and grant the time that it may take.

        Args:
            nbytes: Its announced length; None if none was announced.
            most: A longer body is refused.

        Raises:
            CorruptEntryError: The body is too long (reason ``size``).
        """
        if nbytes is not None and nbytes > most:
            raise CorruptEntryError(
                f"{self.what}: {nbytes} bytes, at most {most} expected", reason="size"
            )
        self.extend(most if nbytes is None else nbytes)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, exc, traceback)
        finally:
            self._slots._under_way.discard(self._deadline)
            self._slots._free.release()


class Pace:
    """Delays requests so that they do not exceed a number of bytes per second."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until a request of ``nbytes`` may begin, and count its bytes."""
        if self._bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + nbytes / self._bytes_per_s
        await asyncio.sleep(begin_s - now_s)


REQUESTS_AT_A_TIME = 16


async def in_parallel(
    items: Iterable[T],
    call: Callable[[T], Awaitable[R]],
    *,
    width: int = REQUESTS_AT_A_TIME,
) -> list[R]:
    """Await ``call`` for every item, at most ``width`` at a time.

    Returns:
        The results in the order of the items.

    Raises:
        BaseException: The error of the first call that failed, not in a group; the others were
            cancelled and have ended by then.
    """
    results: dict[int, R] = {}
    turns = iter(enumerate(items))

    async def work() -> None:
        for number, item in turns:
            results[number] = await call(item)

    workers = [asyncio.ensure_future(work()) for _ in range(width)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in sorted(results)]


async def for_each(
    items: AsyncGenerator[T, None], call: Callable[[T], Awaitable[object]], *, width: int
) -> None:
    """Await ``call`` for every item as it comes, at most ``width`` at a time.

    Calls begin in the order of the items. An item is taken only when a call for it can begin.

    Args:
        items: Closed at the end.

    Raises:
        BaseException: As for in_parallel, and errors of ``items``.
    """
    turn = asyncio.Lock()

    async def work(_: int) -> None:
        while True:
            async with turn:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await call(item)

    async with aclosing(items):
        await in_parallel(range(width), work, width=width)

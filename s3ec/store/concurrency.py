# SPDX-License-Identifier: Apache-2.0
"""Bounds on requests: how many at a time, how long each may take, how large a body may be.

A request knows its caller's deadline, so that nothing begins that cannot end before it.
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
    """Give everything inside so much time; tasks begun inside know of it too.

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
    """Seconds until the caller's deadline; infinite where there is none."""
    deadline = _deadline.get()
    when = None if deadline is None else deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()


class RequestSlots:
    """One store's requests: how many are under way, and until when each of them may be.

    States: new, then bound to the loop of the first ``check_loop``, then closed for good by
    ``close``, which ends the requests that are under way and those that wait. ``abandon`` ends only
    the former.

    Args:
        settings: ``max_concurrency`` slots, and the timeouts that a deadline is made of.

    Attributes:
        least_bytes_per_s: A body that comes or goes slower is past its deadline. A read timeout
            is not reached by a trickle, and does not guard an upload.
        is_closed: Whether close() was called.
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
            RuntimeError: Called from another one, or after close().
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("a store serves one event loop; make another one for this loop")
        if self.is_closed:
            raise RuntimeError("the store is closed")
        self._loop = loop

    def close(self) -> None:
        """End what is under way, and let nothing begin."""
        self.is_closed = True
        self._end()

    def abandon(self) -> None:
        """End what is under way soon; for another thread, when the process ends."""
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
    """One request's hold on its store: it waits for a slot without a limit, then has a deadline.

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
            if slots.is_closed:  # while this one waited
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
        if not slots.is_closed:  # close() has set the last deadline there is
            self._deadline.reschedule(asyncio.get_running_loop().time() + slots._limit_s(nbytes))

    def expect(self, nbytes: int | None, most: int) -> None:
        """A body follows. It gets the time that it may take.

        Args:
            nbytes: Its announced length, None where none was announced.
            most: A longer one is refused.

        Raises:
            CorruptEntryError: It is too long (reason ``size``).
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
    """Lets requests begin no faster than a number of bytes per second allows."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait for one's turn, and note how much is asked for."""
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
        BaseException: That of the first call that failed, as it is and in no group; the others
            were cancelled and have ended by then.
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

    Calls begin in the order of the items. None is taken before there is room for it.

    Args:
        items: Closed at the end.

    Raises:
        BaseException: As in_parallel, and what ``items`` raises.
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

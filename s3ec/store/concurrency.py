# SPDX-License-Identifier: Apache-2.0
"""Bounds on requests: how long each may take, and how many are under way at a time.

A request is told its caller's deadline, so that nobody begins what cannot end before it, and tells
back that an answer has begun, which the end of an operation with a large body tells too late.

How many requests an endpoint is asked at a time goes by additive increase and multiplicative
decrease: each throttled request halves the places, once for all that were out together; each round
of answers gives one back. What is left goes to reads first, since requests wait for those and
nobody waits for an upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

from s3ec.errors import UnavailableError
from s3ec.settings import Settings

T = TypeVar("T")
R = TypeVar("R")
Extend = Callable[[int], None]
"""Grants the time that so many bytes may take."""

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("s3ec_deadline", default=None)
_on_answer: ContextVar[Callable[[], None] | None] = ContextVar("s3ec_on_answer", default=None)
_on_page: ContextVar[Callable[[int], None] | None] = ContextVar("s3ec_on_page", default=None)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Give everything inside so much time; tasks begun inside know of it too.

    Yields:
        The deadline, which may be moved.

    Raises:
        TimeoutError: It has passed.
    """
    async with asyncio.timeout(seconds) as deadline:
        with _set(_deadline, deadline):
            yield deadline


def seconds_left() -> float:
    """Until the caller's deadline; infinite where there is none."""
    deadline = _deadline.get()
    when = None if deadline is None else deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()


def hearing(on_answer: Callable[[], None]) -> AbstractContextManager[None]:
    """Have ``on_answer`` called when the answer to a request made inside begins."""
    return _set(_on_answer, on_answer)


def answer_begun() -> None:
    """For transports: the head of an answer is here, its body may follow."""
    on_answer = _on_answer.get()
    if on_answer is not None:
        on_answer()


def counting(on_page: Callable[[int], None]) -> AbstractContextManager[None]:
    """Have ``on_page`` called with how often a listing can be asked on without a request."""
    return _set(_on_page, on_page)


def page_begun(entries: int, *, is_last: bool = False) -> None:
    """For transports: a page of a listing is here, and so many entries of it will be given.

    Args:
        is_last: Nothing will be asked for behind them.
    """
    answer_begun()
    on_page = _on_page.get()
    if on_page is not None:
        on_page(entries + is_last)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    # Not by a token: a generator may be closed in another context than it was begun in.
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


class RequestSlots:
    """Hands out places and deadlines.

    Args:
        settings: ``max_concurrency`` places, and the timeouts that a deadline is made of.
        least_bytes_per_s: A body that comes or goes slower is past its deadline.

    Attributes:
        is_closed: Whether close() was called.
    """

    def __init__(self, settings: Settings, least_bytes_per_s: float) -> None:
        self.is_closed = False
        self._bytes_per_s = least_bytes_per_s
        # Connect, then the reply's head, then silence within the body: each may take its limit.
        self._budget_s = settings.connect_timeout_s + 2 * settings.read_timeout_s
        self._slots = asyncio.Semaphore(settings.max_concurrency)
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

    @contextlib.asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[Extend]:
        """Wait for a place without a limit; what then happens has a deadline.

        Yields:
            Grants the time that a body of so many bytes may take, from the call on.

        Raises:
            UnavailableError: The store was closed meanwhile.
            TimeoutError: The deadline has passed.
        """
        async with self._slots, asyncio.timeout(self._limit_s(0)) as deadline:
            if self.is_closed:  # while this one waited for its turn
                raise UnavailableError(f"{what}: the store was closed")
            loop = asyncio.get_running_loop()

            def extend(nbytes: int) -> None:
                if not self.is_closed:  # close() has set the last deadline there is
                    deadline.reschedule(loop.time() + self._limit_s(nbytes))

            self._under_way.add(deadline)
            try:
                yield extend
            finally:
                self._under_way.discard(deadline)

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


# Where both wait, so many reads go before one that is none.
_READS_IN_A_ROW = 3

_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class AdaptiveConcurrency:
    """Places for requests; for any number of threads.

    Those of a kind, reads or not, get them in the order they were asked for.

    Args:
        places: With an endpoint that does not complain. At least one is left.
    """

    def __init__(self, places: int) -> None:
        self._most = places
        self._limit = float(places)
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


def _grant(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)


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

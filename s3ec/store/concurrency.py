# SPDX-License-Identifier: Apache-2.0
"""Bounds on requests: how many at a time, how long each may take, how large a body may be.

A request knows its caller's deadline, so that nothing begins that cannot end before it. It tells
its caller when an answer has begun: the end of an operation with a large body tells that too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.settings import Settings
from s3ec.store.base import Blob

T = TypeVar("T")
R = TypeVar("R")
Extend = Callable[[int], None]
"""Grants the time that so many bytes may take."""

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("s3ec_deadline", default=None)
_on_answer: ContextVar[Callable[[], None] | None] = ContextVar("s3ec_on_answer", default=None)
_on_page: ContextVar[Callable[[int], None] | None] = ContextVar("s3ec_on_page", default=None)


def within(seconds: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Give everything inside so much time; tasks begun inside know of it too.

    Yields:
        The deadline, which may be moved.

    Raises:
        TimeoutError: It has passed.
    """
    return _Within(seconds)


class _Within(AbstractAsyncContextManager[asyncio.Timeout]):
    """Contexts of a GET are classes: a generator costs some five times as much."""

    __slots__ = ("_outer", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> asyncio.Timeout:
        await self._timeout.__aenter__()
        self._outer = _deadline.get()
        _deadline.set(self._timeout)
        return self._timeout

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _deadline.set(self._outer)
        await self._timeout.__aexit__(kind, exc, traceback)


def seconds_left() -> float:
    """Seconds until the caller's deadline; infinite where there is none."""
    deadline = _deadline.get()
    when = None if deadline is None else deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()


def listening(on_answer: Callable[[], None]) -> AbstractContextManager[None]:
    """Have ``on_answer`` called when the answer to a request made inside begins."""
    return _Set(_on_answer, on_answer)


def answer_begun() -> None:
    """For transports: the head of an answer is here, its body may follow."""
    on_answer = _on_answer.get()
    if on_answer is not None:
        on_answer()


def listening_for_pages(on_page: Callable[[int], None]) -> AbstractContextManager[None]:
    """Have ``on_page`` called for each page of a listing, with its steps that need no request."""
    return _Set(_on_page, on_page)


def page_begun(entries: int, *, is_last: bool = False) -> None:
    """For transports: a page of a listing is here.

    Args:
        entries: How many of its entries the listing will give.
        is_last: Whether no other page is asked for after it.
    """
    answer_begun()
    on_page = _on_page.get()
    if on_page is not None:
        on_page(entries + is_last)


class _Set(AbstractContextManager[None], Generic[T]):
    # Not by a token: a generator may be closed in another context than it was begun in.
    __slots__ = ("_before", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._before = self._variable.get()
        self._variable.set(self._value)

    def __exit__(self, *exc_info: object) -> None:
        self._variable.set(self._before)


class RequestSlots:
    """One store's requests: how many are under way, and until when each of them may be.

    States: new, then bound to the loop of the first ``check_loop``, then closed for good by
    ``close``. A request waits for a slot, is under way within its deadline, and gives the slot
    back, however it ended. ``close`` ends those that are under way and those that wait, and
    ``abandon`` ends only the former.

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

    def take(self, what: str) -> AbstractAsyncContextManager[Extend]:
        """Wait for a slot without a limit; what then happens has a deadline.

        Yields:
            Grants the time that a body of so many bytes may take, from the call on.

        Raises:
            UnavailableError: The store was closed meanwhile.
            TimeoutError: The deadline has passed.
        """
        return _Taken(self, what)

    async def begin(self, what: str) -> asyncio.Timeout:
        """For ``take``: wait for a slot, and set a deadline.

        Raises:
            UnavailableError: As for take.
        """
        await self._slots.acquire()
        try:
            if self.is_closed:  # while this one waited
                raise UnavailableError(f"{what}: the store was closed")
            deadline = asyncio.timeout(self._limit_s(0))
            await deadline.__aenter__()
        except BaseException:
            self._slots.release()
            raise
        self._under_way.add(deadline)
        return deadline

    def extend(self, deadline: asyncio.Timeout, nbytes: int) -> None:
        """For ``take``: grant the time that so many bytes may take."""
        if not self.is_closed:  # close() has set the last deadline there is
            deadline.reschedule(asyncio.get_running_loop().time() + self._limit_s(nbytes))

    def end(self, deadline: asyncio.Timeout) -> None:
        """For ``take``: give the slot back."""
        self._under_way.discard(deadline)
        self._slots.release()

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


class _Taken(AbstractAsyncContextManager[Extend]):
    """See RequestSlots.take."""

    __slots__ = ("_deadline", "_slots", "_what")

    def __init__(self, slots: RequestSlots, what: str) -> None:
        self._slots = slots
        self._what = what

    async def __aenter__(self) -> Extend:
        deadline = self._deadline = await self._slots.begin(self._what)
        return functools.partial(self._slots.extend, deadline)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, exc, traceback)
        finally:
            self._slots.end(self._deadline)


class Reply(Protocol):
    """A GET's answer whose body has not been read.

    Attributes:
        nbytes: Announced length of the body, None where none was announced.
        is_part: Whether it holds the range that was asked for, or the whole object.
    """

    nbytes: int | None
    is_part: bool

    async def read(self, max_bytes: int, what: str) -> Blob:
        """The body; its announced length is within ``max_bytes``.

        Raises:
            CorruptEntryError: It ended before its announced length (reason ``length``), or it
                went beyond what it may be (reason ``size``).
        """
        ...

    def close(self) -> None:
        """Give the connection back, or close it where the body was not read whole."""
        ...


async def read_body(reply: Reply, max_bytes: int, what: str, extend: Extend) -> Blob:
    """The body of a GET; the reply is closed in any case.

    Args:
        reply: What the transport got.
        max_bytes: A body that is announced as larger is refused unread.
        what: Begins every message.
        extend: Called with the length of the body, or the most that it may have.

    Raises:
        CorruptEntryError: See Reply.read, and reason ``size`` for one that is too large.
    """
    answer_begun()
    try:
        if reply.nbytes is not None and reply.nbytes > max_bytes:
            raise CorruptEntryError(
                f"{what}: {reply.nbytes} bytes, at most {max_bytes} expected", reason="size"
            )
        extend(max_bytes if reply.nbytes is None else reply.nbytes)
        return await reply.read(max_bytes, what)
    finally:
        reply.close()


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

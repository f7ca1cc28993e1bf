# SPDX-License-Identifier: Apache-2.0
"""What all stores of a process that talk to one endpoint share, and the store that minds it."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from s3ec import runtime
from s3ec.counters import Counters
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.settings import Settings
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.store.breaker import Breaker, BreakerOpenError, BreakerOptions, Ticket
from s3ec.store.concurrency import AdaptiveConcurrency, counting, hearing
from s3ec.store.hedge import HedgeStore
from s3ec.store.retry import Budget, RetryOptions, RetryStore

T = TypeVar("T")

_READS = frozenset({"get", "get_range", "head"})
# These send little: whatever time passes until the answer begins is the endpoint's.
_WATCHED = _READS | {"list", "list_folders"}
# Repetitions and second requests per request, and how many of them can be saved up.
_RETRIES, _RETRIES_SAVED = 0.1, 10.0
_HEDGES, _HEDGES_SAVED = 0.05, 5.0
# The silence before an answer is looked at so often, see _Watch.
_LOOKS = 4


class Endpoint:
    """Health, pace and budgets of one endpoint; for any number of threads.

    Args:
        places: Requests under way at a time.
        options: Of the breaker.
    """

    def __init__(
        self,
        places: int,
        options: BreakerOptions | None = None,
        *,
        breaker: Breaker | None = None,
    ) -> None:
        self.breaker = breaker or Breaker(options)
        self.pace = AdaptiveConcurrency(places)
        self.retries = Budget(_RETRIES, at_most=_RETRIES_SAVED, at_first=1.0)
        self.hedges = Budget(_HEDGES, at_most=_HEDGES_SAVED, at_first=0.0)

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """A fresh one with the limits of these settings."""
        # Less than a request waits for: the first that meets a silent endpoint is not the last to
        # be held up, unless the breaker opens before that request's time is over.
        slow_s = min(max(settings.defer_timeout_s * 0.75, 0.5), settings.read_timeout_s)
        return cls(settings.max_concurrency, BreakerOptions(slow_s=slow_s, slowest_s=4 * slow_s))

    @classmethod
    def shared(cls, settings: Settings) -> Endpoint:
        """This process's one for where these settings lead; it lives as long as its users.

        A bucket is part of where: its existence, its policy and its request rates are its own.
        """
        where = (
            runtime.process_number,
            settings.url,
            settings.endpoint_url,
            settings.region,
            settings.bucket,
            settings.profile,
            settings.role_arn,
        )
        with _sharing.setdefault(runtime.process_number, threading.Lock()):
            found = _shared.get(where)
            if found is None:
                found = _shared[where] = cls.of(settings)
            return found


def resilient(store: Store, endpoint: Endpoint, counters: Counters, *, hedge: bool) -> Store:
    """The store, with all that makes bad days bearable around it."""
    if hedge:
        store = HedgeStore(store, counters, endpoint.pace, endpoint.hedges)
    guarded = BreakerStore(store, endpoint, counters)
    options = RetryOptions(may_repeat=lambda: endpoint.breaker.stands_alone)
    return RetryStore(guarded, counters, options=options, budget=endpoint.retries)


class BreakerStore(Wrapper):
    """Asks for a place and the breaker's leave before each request, and tells both how it ended.

    Raises BreakerOpenError at once where the breaker is open.
    """

    def __init__(self, inner: Store, endpoint: Endpoint, counters: Counters) -> None:
        super().__init__(inner)
        self._breaker = endpoint.breaker
        self._pace = endpoint.pace
        self._counters = counters

    async def _around(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        is_read = op in _READS
        if self._breaker.refuses(is_read=is_read):
            raise BreakerOpenError("the breaker is open")
        since = await self._pace.take(is_read=is_read)
        try:
            # Once more: it may have opened while this one waited for a place.
            ticket = self._breaker.admit(is_read=is_read)
            if ticket is None:
                raise BreakerOpenError("the breaker is open")
            return await self._ask(call, ticket, since, is_watched=op in _WATCHED)
        finally:
            self._pace.give_back()

    def _next_of(self, pages: AsyncIterator[ObjectInfo]) -> Callable[[], Awaitable[ObjectInfo]]:
        return _Pages(pages, functools.partial(self._around, "list")).next

    async def _ask(
        self, call: Callable[[], Awaitable[T]], ticket: Ticket, since: int, *, is_watched: bool
    ) -> T:
        try:
            result = await (self._watched(call, ticket) if is_watched else call())
        except (UnavailableError, AccessError) as exc:
            self._failed(ticket, exc, since)
            raise
        except (S3ECError, StopAsyncIteration):
            # Anything else (a conflict, a corrupt body, the end of a listing) is an answer.
            self._answered(ticket)
            raise
        except BaseException:
            # Cancelled, or a fault of ours: nothing was learnt.
            self._breaker.abandoned(ticket)
            raise
        self._answered(ticket)
        return result

    def _answered(self, ticket: Ticket) -> None:
        self._breaker.succeeded(ticket)
        if self._pace.withheld:
            self._change_pace(self._pace.speed_up)

    async def _watched(self, call: Callable[[], Awaitable[T]], ticket: Ticket) -> T:
        watch = _Watch(
            self._breaker.slow_s, lambda: self._silent(ticket), lambda: self._breaker.began(ticket)
        )
        try:
            with hearing(watch.heard):
                result = await call()
            watch.heard()  # for transports that tell nothing, and answers without a body
        finally:
            watch.stop()
        return result

    def _silent(self, ticket: Ticket) -> None:
        self._counters.add("store.slow_starts")
        if self._breaker.silent(ticket):
            self._opened()

    def _failed(self, ticket: Ticket, exc: UnavailableError | AccessError, since: int) -> None:
        if isinstance(exc, UnavailableError) and exc.is_throttle:
            self._change_pace(lambda: self._pace.slow_down(since))
        if self._breaker.failed(ticket, exc):
            self._opened()

    def _opened(self) -> None:
        self._counters.add("breaker.opened")
        # Those that wait for a place hear at once that there is nothing to wait for.
        self._pace.wake_all()

    def _change_pace(self, change: Callable[[], object]) -> None:
        before = self._pace.withheld
        change()
        withheld = self._pace.withheld - before
        if withheld > 0:
            self._counters.add("pace.slowed")
        if withheld:
            self._counters.add("pace.withheld", withheld)


class _Pages:
    """A listing: what brings a page is a request, and what the page brought along is none."""

    def __init__(
        self,
        entries: AsyncIterator[ObjectInfo],
        request: Callable[[Callable[[], Awaitable[ObjectInfo]]], Awaitable[ObjectInfo]],
    ) -> None:
        self._entries = entries
        self._request = request
        self._in_hand = 0

    async def next(self) -> ObjectInfo:
        """The next entry."""
        info = await (self._entries.__anext__() if self._in_hand else self._request(self._ask))
        self._in_hand = max(self._in_hand - 1, 0)  # 0 where a transport does not tell
        return info

    async def _ask(self) -> ObjectInfo:
        with counting(self._came):
            return await self._entries.__anext__()

    def _came(self, steps: int) -> None:
        self._in_hand += steps


class _Watch:
    """Says when nothing has been heard for a while, once.

    The time is taken in several looks, and one that comes late does not count: a loop that could
    not run may have the answer unread.
    """

    def __init__(
        self, limit_s: float, on_silence: Callable[[], None], on_answer: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pause_s = limit_s / _LOOKS
        self._left = _LOOKS
        self._on_silence = on_silence
        self._on_answer = on_answer
        self._is_heard = False
        self._wait()

    def _wait(self) -> None:
        self._due = self._loop.time() + self._pause_s
        self._timer = self._loop.call_at(self._due, self._look)

    def heard(self) -> None:
        """The answer has begun; later calls say nothing new."""
        if not self._is_heard:
            self._is_heard = True
            self._timer.cancel()
            self._on_answer()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._left -= self._loop.time() < self._due + self._pause_s / 2
        if self._left:
            self._wait()
        else:
            self._on_silence()


_shared: weakref.WeakValueDictionary[tuple[object, ...], Endpoint] = weakref.WeakValueDictionary()
# By process: one of a parent may be held by a thread that is not here.
_sharing: dict[int, threading.Lock] = {}

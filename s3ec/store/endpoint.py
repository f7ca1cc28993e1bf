# SPDX-License-Identifier: Apache-2.0
"""One endpoint's health, which all its stores of a process share, and the store that minds it.

Three things belong to an endpoint: a breaker, the places for requests, and one budget for extra
requests.

**The breaker** counts trouble in points. A run of points opens it; one answer in between starts
over.

- No answer is 2 points of 6, so three in a row open it: refused, reset, timed out, an unknown name,
  or an answer that begins too late. It opens at once where one request stayed without an answer for
  that long and no other one was answered since it was sent.
- A refusal to serve is 1 point, so six in a row open it: 5xx, 429, expired credentials. An endpoint
  that fails one request in ten at random opens it once in a million requests.
- A refusal of one request (403 for one key) is an answer: all else goes on.

**The places** go to reads first, since requests of users wait for those and nobody waits for an
upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from s3ec import runtime
from s3ec.counters import Counters
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.settings import Settings
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.store.concurrency import listening, listening_for_pages

log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_ANSWER, _REFUSAL = 2, 1
# The server did its part, and another writer was faster: nothing to hold against it.
_CONFLICT = 409


class BreakerOpenError(UnavailableError):
    """Nothing was asked: the endpoint failed lately, and the next probe is not due."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens, and for how long.

    Attributes:
        threshold: Points in a row that open it.
        first_pause_s: From its opening to the first probe. Each probe that fails doubles it.
        max_pause_s: The longest pause.
        probe_s: A probe keeps others out for so long at most.
        slow_s: An answer that begins later than this counts as none.
    """

    threshold: int = 6
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0
    probe_s: float = 3.0
    slow_s: float = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that was let through.

    Attributes:
        asked_s: When.
        is_slow: Whether its silence was counted as a failure already.
    """

    asked_s: float
    is_slow: bool = False


class Breaker:
    """Whether an endpoint is worth asking; for any number of threads.

    States, and what moves between them:

    - closed: requests go out. Points in a row up to the threshold open it.
    - open: nothing goes out until the pause is over. Then one request does, the probe.
    - probing: open, with a probe under way. A failed probe doubles the pause. One that ended
      without a result makes room for the next one, and so does one that takes longer than
      ``probe_s``.

    An answer in time closes it, also one to a request from before it opened.

    Attributes:
        is_open: Whether lookups are useless. One attribute read, for scheduler hooks.
        slow_s: An answer that has not begun after so many seconds is late.
    """

    def __init__(
        self,
        options: BreakerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or BreakerOptions()
        self.is_open = False
        self.slow_s = self._options.slow_s
        self._clock = clock
        self._lock = threading.Lock()
        self._answered_s = clock()
        self._points = self._failures = 0
        self._pause_s = self._options.first_pause_s
        self._probe_at_s = 0.0
        self._probe: Ticket | None = None

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is allowed; 0 when closed."""
        return max(0.0, self._probe_at_s - self._clock()) if self.is_open else 0.0

    @property
    def is_isolated_failure(self) -> bool:
        """Whether at most one request failed since the last answer."""
        return self._failures <= 1

    @property
    def refuses(self) -> bool:
        """Whether a request would not be let through now."""
        if not self.is_open:
            return False
        now_s, probe = self._clock(), self._probe
        # A write may be on its way for minutes, and nobody counts its silence.
        is_probing = probe is not None and now_s - probe.asked_s < self._options.probe_s
        return is_probing or now_s < self._probe_at_s

    def admit(self) -> Ticket | None:
        """Let a request through; None where it must not go out. Its caller reports its end."""
        with self._lock:
            if self.refuses:
                return None
            ticket = Ticket(self._clock())
            if self.is_open:
                self._probe = ticket
            return ticket

    def began(self) -> None:
        """An answer has begun."""
        self._answered_s = self._clock()

    def silent(self, ticket: Ticket) -> bool:
        """Nothing has come for ``slow_s``; True where that opened it."""
        with self._lock:
            ticket.is_slow = True
            nobody = self._answered_s <= ticket.asked_s
            error = UnavailableError(f"no answer within {self.slow_s:.2g} s")
            return self._count(ticket, self._options.threshold if nobody else _NO_ANSWER, error)

    def succeeded(self, ticket: Ticket) -> None:
        """The endpoint answered; too late where the ticket is slow, and then it says nothing."""
        with self._lock:
            if ticket.is_slow:
                self._release(ticket)
                return
            if self.is_open:
                log.info("the store answers again; the breaker is closed")
            self._answered_s = self._clock()
            self.is_open = False
            self._probe = None
            self._points = self._failures = 0
            self._pause_s = self._options.first_pause_s

    def failed(self, ticket: Ticket, error: S3ECError) -> bool:
        """The endpoint failed or refused; True where that opened it."""
        status = getattr(error, "status", 0)
        is_refusal = status != 0 or isinstance(error, AccessError)
        if status == _CONFLICT or (isinstance(error, AccessError) and not error.is_general):
            self.succeeded(ticket)
            return False
        with self._lock:
            try:
                if is_refusal:
                    self._answered_s = self._clock()
                elif ticket.is_slow:  # its silence was counted already
                    return False
                return self._count(ticket, _REFUSAL if is_refusal else _NO_ANSWER, error)
            finally:
                self._release(ticket)

    def abandoned(self, ticket: Ticket) -> None:
        """It was cancelled, or ended in a fault of ours: nothing was learnt."""
        with self._lock:
            self._release(ticket)

    def _count(self, ticket: Ticket, points: int, error: Exception) -> bool:
        """Count a failure; True where that opened it. Under the lock.

        Requests other than the probe that fail while it is open went out before, and say nothing
        new.
        """
        self._points += points
        self._failures += 1
        is_probe = self._probe is ticket
        if is_probe:
            self._pause_s = min(self._pause_s * 2, self._options.max_pause_s)
        elif self.is_open or self._points < self._options.threshold:
            return False
        else:
            self.is_open = True
            log.warning("the breaker is open, images are encoded meanwhile: %s", error)
        asked_s = getattr(error, "retry_after_s", None) or 0.0
        pause_s = min(max(self._pause_s, asked_s), self._options.max_pause_s)
        self._probe = None
        self._probe_at_s = self._clock() + pause_s
        return not is_probe

    def _release(self, ticket: Ticket) -> None:
        """Make room for the next probe where this was it."""
        if self._probe is ticket:
            self._probe = None


# Where both wait, so many reads go before one request that is none.
_READS_IN_A_ROW = 3

_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Places:
    """So many requests at a time; for any number of threads.

    A place is free or taken. A request that finds none free waits in one of two queues, for reads
    and for the others, each first come, first served. ``wake_all`` lets all of them go on beyond
    the number of places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._used = 0
        self._reads: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._reads_in_a_row = 0

    @property
    def used(self) -> int:
        """Places that are taken."""
        return self._used

    async def take(self, *, is_read: bool = False) -> None:
        """Wait for a place without a limit; to be given back.

        Args:
            is_read: It goes before three of four that are none.
        """
        if self.try_take():
            return
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

    def try_take(self) -> bool:
        """Take a place that is free and that nobody waits for; to be given back."""
        with self._lock:
            if self._reads or self._others or self._used >= self._most:
                return False
            self._used += 1
            return True

    def give_back(self) -> None:
        """Let go of a place."""
        with self._lock:
            self._used -= 1
            self._hand_out()

    def wake_all(self) -> None:
        """Give everybody who waits a place at once; for when none of them will use it."""
        with self._lock:
            self._hand_out(everybody=True)

    def _hand_out(self, *, everybody: bool = False) -> None:
        """Under the lock."""
        while everybody or self._used < self._most:
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


# Extra requests per request, repeated and hedged ones, and how many of them can be saved up.
_EXTRA, _EXTRA_SAVED = 0.1, 10.0


class Endpoint:
    """Breaker, places and budget of one endpoint; for any number of threads.

    Args:
        places: Requests under way at a time.
        options: Of the breaker.
        clock: Monotonic seconds, for the breaker.
    """

    def __init__(
        self,
        places: int,
        options: BreakerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = Breaker(options, clock=clock)
        self.places = Places(places)
        self.budget = Budget(_EXTRA, at_most=_EXTRA_SAVED, at_first=1.0)

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """A fresh one with the limits of these settings."""
        # Less than a request waits for: the first that meets a silent endpoint is not the last to
        # be held up, unless the breaker opens before that request's time is over.
        slow_s = min(max(settings.defer_timeout_s * 0.75, 0.5), settings.read_timeout_s)
        return cls(settings.max_concurrency, BreakerOptions(slow_s=slow_s))

    @classmethod
    def shared(cls, settings: Settings) -> Endpoint:
        """This process's one for where these settings lead; it lives as long as its users.

        A bucket is part of where: its existence, its policy and its request rates are its own.
        The first settings that lead there give the limits.
        """
        where = (
            runtime.process_number,
            settings.url,
            settings.endpoint_url,
            settings.region,
            settings.bucket,
            settings.profile,
        )
        with _sharing.setdefault(runtime.process_number, threading.Lock()):
            found = _shared.get(where)
            if found is None:
                found = _shared[where] = cls.of(settings)
            return found


_shared: weakref.WeakValueDictionary[tuple[object, ...], Endpoint] = weakref.WeakValueDictionary()
# One lock per process: a parent's may be held by a thread that a forked child does not have.
_sharing: dict[int, threading.Lock] = {}

_READS = frozenset({"get", "get_range", "head"})
# These send little: whatever time passes until the answer begins is the endpoint's.
_WATCHED = _READS | {"list", "list_folders"}


class BreakerStore(Wrapper):
    """Asks for a place and the breaker's leave before each request, and tells both how it ended.

    Raises BreakerOpenError at once where the breaker is open. Of a listing only what brings a page
    is a request; the other entries of the page are in hand already.
    """

    def __init__(self, inner: Store, endpoint: Endpoint, counters: Counters) -> None:
        super().__init__(inner)
        self._breaker = endpoint.breaker
        self._places = endpoint.places
        self._counters = counters

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if self._breaker.refuses:
            raise BreakerOpenError("the breaker is open")
        await self._places.take(is_read=op in _READS)
        try:
            # Once more: it may have opened while this one waited for a place.
            ticket = self._breaker.admit()
            if ticket is None:
                raise BreakerOpenError("the breaker is open")
            return await self._ask(call, ticket, is_watched=op in _WATCHED)
        finally:
            self._places.give_back()

    def _next_of(
        self, prefix: str, pages: AsyncIterator[ObjectInfo]
    ) -> Callable[[], Awaitable[ObjectInfo]]:
        in_hand = 0

        def came(entries: int) -> None:
            nonlocal in_hand
            in_hand += entries

        async def ask() -> ObjectInfo:
            with listening_for_pages(came):
                return await pages.__anext__()

        async def next_entry() -> ObjectInfo:
            nonlocal in_hand
            info = await (pages.__anext__() if in_hand else self._around("list", prefix, ask))
            in_hand = max(in_hand - 1, 0)  # 0 where a transport does not tell
            return info

        return next_entry

    async def _ask(
        self, call: Callable[[], Awaitable[T]], ticket: Ticket, *, is_watched: bool
    ) -> T:
        try:
            result = await (self._watched(call, ticket) if is_watched else call())
        except (UnavailableError, AccessError) as exc:
            if isinstance(exc, UnavailableError) and exc.is_throttle:
                self._counters.add("pace.slowed")
            if self._breaker.failed(ticket, exc):
                self._opened()
            raise
        except (S3ECError, StopAsyncIteration):
            # Anything else (a conflict, a corrupt body, the end of a listing) is an answer.
            self._breaker.succeeded(ticket)
            raise
        except BaseException:
            # Cancelled, or a fault of ours: nothing was learnt.
            self._breaker.abandoned(ticket)
            raise
        self._breaker.succeeded(ticket)
        return result

    async def _watched(self, call: Callable[[], Awaitable[T]], ticket: Ticket) -> T:
        watch = _Watch(self._breaker, ticket, self._on_silence)
        try:
            with listening(watch.on_answer):
                return await call()
        finally:
            watch.stop()

    def _on_silence(self, ticket: Ticket) -> None:
        self._counters.add("store.slow_starts")
        if self._breaker.silent(ticket):
            self._opened()

    def _opened(self) -> None:
        self._counters.add("breaker.opened")
        # Those that wait for a place fail at once: there is nothing to wait for.
        self._places.wake_all()


class _Watch:
    """Tells the breaker when the answer to a request begins, and when that takes too long."""

    def __init__(
        self, breaker: Breaker, ticket: Ticket, on_silence: Callable[[Ticket], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._breaker = breaker
        self._ticket = ticket
        self._on_silence = on_silence
        self._wait(breaker.slow_s)

    def _wait(self, seconds: float) -> None:
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due_s, self._look)

    def on_answer(self) -> None:
        """The answer has begun."""
        self.stop()
        self._breaker.began()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        grace_s = self._breaker.slow_s / 8
        if self._loop.time() > self._due_s + grace_s:
            self._wait(grace_s)  # the loop could not run, and may have the answer unread
        else:
            self._on_silence(self._ticket)

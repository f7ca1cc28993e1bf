# SPDX-License-Identifier: Apache-2.0
"""One endpoint's health, which all its stores of a process share, and the store that minds it.

Three things belong to an endpoint: a breaker, the places for requests, and the budgets for extra
requests.

**The breaker** counts trouble in points. A run of points opens it; one answer in between starts
over.

- No answer is 2 points of 6, so three in a row open it: refused, reset, timed out, an unknown name,
  or an answer that begins far later than usual. It opens at once where one request stayed without
  an answer for that long and no other one was answered since it was sent.
- A refusal to serve is 1 point, so six in a row open it: 5xx, 429, expired credentials. An endpoint
  that fails one request in ten at random opens it once in a million requests.
- A refusal of one request (403 for one key) is 1 point towards a rest from reads alone. Where
  ListBucket is not allowed, every absent key is answered so; who may only write is refused every
  read. All else goes on.

**The places** go by additive increase and multiplicative decrease. A throttled request halves them,
once for all requests that were out together. Each round of answers gives one back. Reads go first,
since requests of users wait for those and nobody waits for an upload.
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
from s3ec.counters import Counters, RecentTimes
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.settings import Settings
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.store.concurrency import listening, listening_for_pages

log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_ANSWER, _REFUSAL = 2, 1
# The server did its part, and another writer was faster: nothing to hold against it.
_CONFLICT = 409
_SAMPLES = 64


class BreakerOpenError(UnavailableError):
    """Nothing was asked: the endpoint failed lately, and the next probe is not due."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens, and for how long.

    Attributes:
        threshold: Points in a row that open it.
        first_pause_s: From its opening to the first probe. Each probe that fails doubles it.
        max_pause_s: The longest pause.
        slow_s: An answer that begins later than this counts as none...
        times_usual: ...unless half of the last ones took more than this part of it...
        slowest_s: ...but what begins later than this always counts as none.
    """

    threshold: int = 6
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0
    slow_s: float = 1.0
    times_usual: float = 8.0
    slowest_s: float = 4.0


@dataclass(slots=True)
class Ticket:
    """One request that was let through.

    Attributes:
        asked_s: When.
        is_read: Whether it reads an object.
        is_slow: Whether its silence was counted as a failure already.
    """

    asked_s: float
    is_read: bool
    is_slow: bool = False


class Circuit:
    """One part of the breaker. Its caller holds the breaker's lock.

    States, and what moves between them:

    - closed: requests go out. Points in a row up to the threshold open it.
    - open: nothing goes out until ``probe_at``. Then one request does, the probe.
    - probing: open, with a probe under way. A failed probe doubles the pause. One that ended
      without a result makes room for the next one.

    Any answer closes it, also a late one to a request from before it opened.
    """

    def __init__(self, options: BreakerOptions, clock: Callable[[], float], what: str) -> None:
        self.is_open = False
        self.failures = 0
        self.probe_at = 0.0
        self._options = options
        self._clock = clock
        self._what = what
        self._points = 0
        self._pause_s = options.first_pause_s
        self._probe: Ticket | None = None

    def may_ask(self) -> bool:
        """Whether a request may go out now."""
        return not self.is_open or (self._probe is None and self._clock() >= self.probe_at)

    def begin(self, ticket: Ticket) -> None:
        """A request goes out; while it is open that is the probe."""
        self._probe = ticket if self.is_open else None

    def succeeded(self) -> None:
        """The endpoint answered."""
        if self.is_open:
            log.info("the store answers %s again; the breaker is closed", self._what)
        self.is_open = False
        self._probe = None
        self._points = self.failures = 0
        self._pause_s = self._options.first_pause_s

    def abandoned(self, ticket: Ticket) -> None:
        """The request ended before it said anything."""
        if self._probe is ticket:
            self._probe = None

    def failed(self, ticket: Ticket, points: int, error: Exception) -> bool:
        """The request failed; True where that opened it.

        Requests other than the probe that fail while it is open went out before, and say nothing
        new.
        """
        self._points += points
        self.failures += 1
        opened = False
        if self._probe is ticket:
            self._pause_s = min(self._pause_s * 2, self._options.max_pause_s)
        elif self.is_open or self._points < self._options.threshold:
            return False
        else:
            self.is_open = opened = True
            log.warning(
                "the breaker is open for %s, images are encoded meanwhile: %s", self._what, error
            )
        asked_s = getattr(error, "retry_after_s", None) or 0.0
        pause_s = min(max(self._pause_s, asked_s), self._options.max_pause_s)
        self._probe = None
        self.probe_at = self._clock() + pause_s
        return opened


class Breaker:
    """Whether an endpoint is worth asking; for any number of threads.

    Two circuits: one for all requests, and one for reads alone. A read needs both. See Circuit for
    the states.

    Attributes:
        is_open: Whether lookups are in vain. One attribute read, for scheduler hooks.
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
        self._all = Circuit(self._options, clock, "anything")
        self._reads = Circuit(self._options, clock, "reads")
        self._answered_s = clock()
        self._first_bytes = RecentTimes(_SAMPLES, few=1)
        self._lock = threading.Lock()

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is allowed; 0 when closed."""
        due = [one.probe_at for one in (self._all, self._reads) if one.is_open]
        return max(0.0, max(due) - self._clock()) if due else 0.0

    @property
    def stands_alone(self) -> bool:
        """Whether at most one request failed since the last answer."""
        return self._all.failures <= 1

    def refuses(self, *, is_read: bool) -> bool:
        """Whether a request would not be let through now."""
        return self.is_open and not all(one.may_ask() for one in self._concerned(is_read))

    def admit(self, *, is_read: bool) -> Ticket | None:
        """Let a request through; None where it must not go out. Its caller reports its end."""
        with self._lock:
            concerned = self._concerned(is_read)
            if not all(one.may_ask() for one in concerned):
                return None
            ticket = Ticket(self._clock(), is_read)
            for one in concerned:
                one.begin(ticket)
            return ticket

    def _concerned(self, is_read: bool) -> tuple[Circuit, ...]:
        return (self._all, self._reads) if is_read else (self._all,)

    def began(self, ticket: Ticket) -> None:
        """The answer to a read, or to another small request, has begun."""
        with self._lock:
            self._answered_s = self._clock()
            self._first_bytes.add(self._answered_s - ticket.asked_s)
            usual_s = self._first_bytes.quantile(0.5) or 0.0
            late_s = min(self._options.times_usual * usual_s, self._options.slowest_s)
            self.slow_s = max(self._options.slow_s, late_s)

    def silent(self, ticket: Ticket) -> bool:
        """Nothing has come for ``slow_s``; True where that opened it."""
        error = UnavailableError(f"no answer within {self.slow_s:.2g} s")
        with self._lock:
            ticket.is_slow = True
            nobody = self._answered_s <= ticket.asked_s
            points = self._options.threshold if nobody else _NO_ANSWER
            # Not abandoned: it is still under way, and may say something of reads yet.
            opened = self._all.failed(ticket, points, error)
            self._look()
            return opened

    def succeeded(self, ticket: Ticket) -> None:
        """The endpoint answered; too late where the ticket is slow, and then it says nothing."""
        with self._lock:
            if ticket.is_slow:
                self._abandon(ticket)
                return
            self._answered_s = self._clock()
            for one in self._concerned(ticket.is_read):
                one.succeeded()
            self._look()

    def failed(self, ticket: Ticket, error: S3ECError) -> bool:
        """The endpoint failed or refused; True where that opened it."""
        with self._lock:
            opened = self._count(ticket, error)
            # It has ended: also a circuit that it says nothing about waits for it no longer.
            self._abandon(ticket)
            self._look()
            return opened

    def _count(self, ticket: Ticket, error: S3ECError) -> bool:
        """What a failure says of each circuit; True where that opened one."""
        if isinstance(error, AccessError):
            return self._refused(ticket, error)
        status = getattr(error, "status", 0)
        if status == 0:
            # The silence of a slow one was counted already.
            return not ticket.is_slow and self._all.failed(ticket, _NO_ANSWER, error)
        self._answered_s = self._clock()
        if status == _CONFLICT:
            self._all.succeeded()
            return False
        return self._all.failed(ticket, _REFUSAL, error)

    def _refused(self, ticket: Ticket, error: AccessError) -> bool:
        self._answered_s = self._clock()
        if error.is_general:
            return self._all.failed(ticket, _REFUSAL, error)
        self._all.succeeded()  # it is there, and knows us
        return ticket.is_read and self._reads.failed(ticket, _REFUSAL, error)

    def abandoned(self, ticket: Ticket) -> None:
        """It was cancelled, or ended in a fault of ours: nothing was learnt."""
        with self._lock:
            self._abandon(ticket)

    def _abandon(self, ticket: Ticket) -> None:
        for one in self._concerned(ticket.is_read):
            one.abandoned(ticket)

    def _look(self) -> None:
        self.is_open = self._all.is_open or self._reads.is_open


# Where both wait, so many reads go before one request that is none.
_READS_IN_A_ROW = 3

_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class AdaptiveConcurrency:
    """Places for requests, fewer while the endpoint throttles; for any number of threads.

    States of a place, and what moves it between them:

    - free: ``try_take`` takes it, and ``take`` does where nobody waits.
    - taken: ``give_back`` makes it free. Where requests wait, the next of them has it at once.
    - withheld: nobody gets it. ``slow_down`` withholds half of the places; one that is taken
      is withheld when it is given back. ``speed_up`` makes them free, one for each round of
      answers.

    A request waits in one of two queues, for reads and for the others, each first come, first
    served. ``wake_all`` lets all of them go on beyond the number of places.

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

    def slow_down(self, since: int) -> int:
        """A request was throttled; the number of places that this took away.

        Args:
            since: What take() returned to it. Requests that were out when the places were halved
                say nothing new.
        """
        with self._lock:
            if since != self._cuts:
                return 0
            before = self.withheld
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2)
            return self.withheld - before

    def speed_up(self) -> int:
        """A request was answered; the number of places that this brought back."""
        if self._limit >= self._most:
            return 0
        with self._lock:
            before = self.withheld
            self._limit = min(self._limit + 1 / self._limit, float(self._most))
            self._hand_out()
            return before - self.withheld

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


# Repetitions and second requests per request, and how many of them can be saved up.
_RETRIES, _RETRIES_SAVED = 0.1, 10.0
_HEDGES, _HEDGES_SAVED = 0.05, 5.0


class Endpoint:
    """Breaker, places and budgets of one endpoint; for any number of threads.

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
        self.concurrency = AdaptiveConcurrency(places)
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
        self._concurrency = endpoint.concurrency
        self._counters = counters

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        is_read = op in _READS
        if self._breaker.refuses(is_read=is_read):
            raise BreakerOpenError("the breaker is open")
        since = await self._concurrency.take(is_read=is_read)
        try:
            # Once more: it may have opened while this one waited for a place.
            ticket = self._breaker.admit(is_read=is_read)
            if ticket is None:
                raise BreakerOpenError("the breaker is open")
            return await self._ask(call, ticket, since, is_watched=op in _WATCHED)
        finally:
            self._concurrency.give_back()

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

    async def _watched(self, call: Callable[[], Awaitable[T]], ticket: Ticket) -> T:
        watch = _Watch(self._breaker, ticket, self._on_silence)
        try:
            with listening(watch.on_answer):
                result = await call()
            watch.on_answer()  # for transports that tell nothing, and answers without a body
        finally:
            watch.stop()
        return result

    def _answered(self, ticket: Ticket) -> None:
        self._breaker.succeeded(ticket)
        brought_back = self._concurrency.speed_up()
        if brought_back:
            self._counters.add("pace.withheld", -brought_back)

    def _failed(self, ticket: Ticket, exc: UnavailableError | AccessError, since: int) -> None:
        if isinstance(exc, UnavailableError) and exc.is_throttle:
            taken_away = self._concurrency.slow_down(since)
            if taken_away:
                self._counters.add("pace.slowed")
                self._counters.add("pace.withheld", taken_away)
        if self._breaker.failed(ticket, exc):
            self._opened()

    def _on_silence(self, ticket: Ticket) -> None:
        self._counters.add("store.slow_starts")
        if self._breaker.silent(ticket):
            self._opened()

    def _opened(self) -> None:
        self._counters.add("breaker.opened")
        # Those that wait for a place fail at once: there is nothing to wait for.
        self._concurrency.wake_all()


# The silence before an answer is looked at so often, see _Watch.
_LOOKS = 4


class _Watch:
    """Tells the breaker when the answer to a request begins, and when that takes too long.

    States: waiting, then silent after the breaker's ``slow_s``, and answered from either. That
    time is taken in several looks, and one that comes late does not count: a loop that could not
    run may have the answer unread.
    """

    def __init__(
        self, breaker: Breaker, ticket: Ticket, on_silence: Callable[[Ticket], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._breaker = breaker
        self._ticket = ticket
        self._pause_s = breaker.slow_s / _LOOKS
        self._left = _LOOKS
        self._on_silence = on_silence
        self._is_answered = False
        self._wait()

    def _wait(self) -> None:
        self._due = self._loop.time() + self._pause_s
        self._timer = self._loop.call_at(self._due, self._look)

    def on_answer(self) -> None:
        """The answer has begun; later calls say nothing new."""
        if not self._is_answered:
            self._is_answered = True
            self.stop()
            self._breaker.began(self._ticket)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._left -= self._loop.time() < self._due + self._pause_s / 2
        if self._left:
            self._wait()
        else:
            self._on_silence(self._ticket)

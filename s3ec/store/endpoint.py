# SPDX-License-Identifier: Apache-2.0
"""One endpoint's health as one node sees it, and the store that respects it. One event loop.

An endpoint has a breaker, the places for requests, and one budget for extra requests.

**The breaker** counts failures in points. A run of points opens it; an answer resets the count.

- No answer (refused, reset, timed out, an unknown name) is 2 points of 6, so three in a row open
  it. One alone opens it if it took ``silence_s`` and no request was answered since it was sent.
- A refusal to serve (5xx, 429, expired credentials) is 1 point, so six in a row open it. An
  endpoint that fails one request in ten at random opens it once in a million requests.
- A refusal of one request (403 for one key) is an answer: other requests continue.

**The places** are given out first come, first served. Uploads leave a quarter of them to reads, see
``connector.uploads``, since users' requests wait for reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from s3ec.counters import Counters
from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.store.base import ObjectInfo, Store, Wrapper

log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_ANSWER, _REFUSAL = 2, 1
# The server works, and another writer was faster: this counts as an answer.
_CONFLICT = 409


class BreakerOpenError(UnavailableError):
    """No request was sent: the endpoint failed lately, and the next probe is not due."""

    def __init__(self) -> None:
        super().__init__("the breaker is open")


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When the breaker opens, and for how long.

    Attributes:
        threshold: Points in a row that open it.
        first_pause_s: From its opening to the first probe. Each probe that fails doubles it.
        max_pause_s: The longest pause.
        probe_s: How long a probe keeps other requests out, at most.
        silence_s: One request opens it alone if it failed, or was given up, after so long without
            an answer to any request.
    """

    threshold: int = 6
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0
    probe_s: float = 3.0
    silence_s: float = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One request that was let through, and its time."""

    asked_s: float


class Breaker:
    """Decides whether an endpoint is worth asking.

    States, and what moves between them:

    - closed: requests go out. Points in a row up to the threshold open it.
    - open: no request goes out until the pause is over. Then one does, the probe.
    - probing: open, with a probe under way. A failed probe doubles the pause. After a probe that
      ends without a result, or takes longer than ``probe_s``, the next request is a probe.

    An answer closes it, also an answer to a request from before it opened.

    Attributes:
        is_open: True if lookups are useless. One attribute read, for scheduler hooks.
    """

    def __init__(
        self,
        options: BreakerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or BreakerOptions()
        self.is_open = False
        self._clock = clock
        self._answered_s = clock()
        self._silent_since_s: float | None = None  # when the first request after that was sent
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
        """True if no more than one request has failed since the last answer."""
        return self._failures <= 1

    @property
    def refuses(self) -> bool:
        """True if a request would not be let through now."""
        if not self.is_open:
            return False
        now_s, probe = self._clock(), self._probe
        # A write may be on its way for minutes.
        is_probing = probe is not None and now_s - probe.asked_s < self._options.probe_s
        return is_probing or now_s < self._probe_at_s

    def admit(self) -> Ticket:
        """Let a request through. The caller reports how it ends.

        Raises:
            BreakerOpenError: The request must not go out.
        """
        if self.refuses:
            raise BreakerOpenError
        ticket = Ticket(self._clock())
        if self._silent_since_s is None:
            self._silent_since_s = ticket.asked_s
        if self.is_open:
            self._probe = ticket
        return ticket

    def succeeded(self) -> None:
        """Note that the endpoint answered."""
        if self.is_open:
            log.info("the store answers again; the breaker is closed")
        self._answered_s, self._silent_since_s = self._clock(), None
        self.is_open = False
        self._probe = None
        self._points = self._failures = 0
        self._pause_s = self._options.first_pause_s

    def failed(self, ticket: Ticket, error: UnavailableError | AccessError) -> bool:
        """Note that the endpoint failed or refused; True if that opened the breaker.

        While it is open, only the probe's failure counts: other requests went out before.
        """
        is_refusal = isinstance(error, AccessError)
        status = 0 if isinstance(error, AccessError) else error.status
        if status == _CONFLICT or (isinstance(error, AccessError) and not error.is_general):
            self.succeeded()
            return False
        now_s = self._clock()
        is_alone = self._answered_s <= ticket.asked_s <= now_s - self._options.silence_s
        if is_refusal or status:
            self._answered_s, self._silent_since_s = now_s, None
            self._points += _REFUSAL
        else:
            self._points += self._options.threshold if is_alone else _NO_ANSWER
        self._failures += 1
        is_probe = self._probe is ticket
        if is_probe:
            self._pause_s = min(self._pause_s * 2, self._options.max_pause_s)
        elif self.is_open or self._points < self._options.threshold:
            return False
        else:
            self.is_open = True
            log.warning("the breaker is open, and nothing is asked there meanwhile: %s", error)
        asked_s = getattr(error, "retry_after_s", None) or 0.0
        self._probe = None
        self._probe_at_s = now_s + min(max(self._pause_s, asked_s), self._options.max_pause_s)
        return not is_probe

    def missed(self, error: UnavailableError) -> bool:
        """Note a request that was given up; as ``failed`` if all were silent for ``silence_s``."""
        since_s = self._silent_since_s
        if since_s is None or self._clock() - since_s < self._options.silence_s:
            return False
        return self.failed(self._probe or Ticket(since_s), error)

    def abandoned(self, ticket: Ticket) -> None:
        """Note a request that was cancelled, or ended in a fault of ours: it proves nothing."""
        if self._probe is ticket:
            self._probe = None


class Places:
    """A limit for requests at a time; without a free place a request waits, in order of arrival."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a place, without a time limit. The caller gives it back.

        Raises:
            BreakerOpenError: ``dismiss`` was called during the wait.
        """
        if self.try_take():
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(granted)
            elif granted.exception() is None:  # it was granted meanwhile
                self.give_back()
            raise

    def try_take(self) -> bool:
        """Take a free place; none is free while a request waits. The caller gives it back."""
        if self.used >= self._most:
            return False
        self.used += 1
        return True

    def give_back(self) -> None:
        """Release a place, to the first waiting request if there is one."""
        self.used -= 1
        while self.used < self._most and self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():  # else it was cancelled
                granted.set_result(None)
                self.used += 1

    def dismiss(self) -> None:
        """Fail all waiting requests, since the breaker is open."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_exception(BreakerOpenError())


class Budget:
    """A token bucket: each request pays in a share, each extra request takes out one token.

    Over any number of requests the extra ones are at most that share of them, and ``at_most`` more.

    Args:
        share: Extra requests per request.
        at_most: The most tokens that can be saved.
        at_first: Tokens before the first request.
    """

    def __init__(self, share: float, *, at_most: float, at_first: float) -> None:
        self._share = share
        self._at_most = at_most
        self._tokens = at_first

    def pay_in(self) -> None:
        """Pay in for a request that goes out."""
        self._tokens = min(self._tokens + self._share, self._at_most)

    def take(self) -> bool:
        """Take a token for an extra request; False if there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


# Extra requests per request, repeated and hedged ones, and how many of them can be saved up.
_EXTRA, _EXTRA_SAVED = 0.1, 10.0


class Endpoint:
    """Breaker, places and budget of one endpoint.

    Args:
        places: The most requests under way at a time.
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


class BreakerStore(Wrapper):
    """Takes a place and asks the breaker before each request, and reports to both how it ended.

    Raises BreakerOpenError at once if the breaker is open. A listing takes no place: the transport
    limits its pages. Only its first entry counts as an answer; later ones may be read already.
    """

    def __init__(self, inner: Store, endpoint: Endpoint, counters: Counters) -> None:
        super().__init__(inner)
        self._breaker = endpoint.breaker
        self._places = endpoint.places
        self._counters = counters

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if self._breaker.refuses:
            raise BreakerOpenError
        await self._places.take()
        try:
            # The breaker may have opened while this request waited for a place.
            return await self._ask(call, self._breaker.admit())
        finally:
            self._places.give_back()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        ticket = self._breaker.admit()
        is_answered = False
        try:
            async with aclosing(super().list(prefix, start_after=start_after)) as pages:
                async for info in pages:
                    if not is_answered:
                        self._breaker.succeeded()
                        is_answered = True
                    elif self._breaker.is_open:
                        raise BreakerOpenError
                    yield info
            if not is_answered:
                self._breaker.succeeded()
        except BreakerOpenError:
            raise
        except (UnavailableError, AccessError) as exc:
            self._failed(ticket, exc)
            raise
        finally:
            self._breaker.abandoned(ticket)  # if the caller left before any answer

    async def _ask(self, call: Callable[[], Awaitable[T]], ticket: Ticket) -> T:
        try:
            result = await call()
        except (UnavailableError, AccessError) as exc:
            self._failed(ticket, exc)
            raise
        except S3ECError:  # a conflict, a corrupt body: an answer
            self._breaker.succeeded()
            raise
        except BaseException:
            # Cancelled, or a fault of ours: it says nothing of the endpoint.
            self._breaker.abandoned(ticket)
            raise
        self._breaker.succeeded()
        return result

    def _failed(self, ticket: Ticket, exc: UnavailableError | AccessError) -> None:
        if isinstance(exc, UnavailableError) and exc.is_throttle:
            self._counters.add("pace.slowed")
        if self._breaker.failed(ticket, exc):
            self._counters.add("breaker.opened")
            self._places.dismiss()

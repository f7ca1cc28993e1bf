# SPDX-License-Identifier: Apache-2.0
"""Whether an endpoint is worth asking: opens on trouble, lets probes through, closes on an answer.

What counts as trouble, in points; a run of them opens, one answer in between starts over:

- no answer (refused, reset, timed out, an unknown name), or one that begins far later than usual:
  2 points of 6, so three in a row; at once where one request stayed without an answer for that long
  and no other got one since it was sent,
- a refusal to serve (5xx, 429, expired credentials): 1 point, so six in a row. One in ten at random
  opens it once in a million requests,
- a refusal that is about one request (403 for one key): 1 point towards a rest from reads alone.
  Where ListBucket is not allowed every absent key is answered so, and whoever may only write is
  refused every read, while all else goes on.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from s3ec.errors import AccessError, S3ECError, UnavailableError

log = logging.getLogger(__name__)

_NO_ANSWER, _REFUSAL = 2, 1
# The server did its part, and another writer was faster: nothing to hold against it.
_CONFLICT = 409
_SAMPLES = 64
_SAMPLES_BETWEEN_LOOKS = 16


class BreakerOpenError(UnavailableError):
    """Nothing was asked: the endpoint failed lately, and the next probe is not due."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens, and for how long.

    Attributes:
        threshold: Points in a row that open it.
        first_pause_s: From its opening to the first probe; doubled by each probe that fails.
        max_pause_s: Up to this.
        slow_s: An answer that begins later than this is as bad as none...
        times_usual: ...unless half of the last ones took more than this part of it...
        slowest_s: ...and this is of no use to anybody, however usual it may be.
    """

    threshold: int = 6
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0
    slow_s: float = 1.0
    times_usual: float = 8.0
    slowest_s: float = 4.0


class Circuit:
    """Opens after points in a row; then one probe at a time, after pauses that double.

    Not safe for threads by itself; see Breaker.
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
        self._probing = False

    def may_ask(self) -> bool:
        """Whether a request may go out now."""
        return not self.is_open or not (self._probing or self._clock() < self.probe_at)

    def begin(self) -> bool:
        """A request goes out; True where it is the probe."""
        self._probing = self.is_open
        return self._probing

    def succeeded(self) -> None:
        """The endpoint answered."""
        if self.is_open:
            log.info("the store answers %s again; the breaker is closed", self._what)
        self.is_open = self._probing = False
        self._points = self.failures = 0
        self._pause_s = self._options.first_pause_s

    def abandoned(self, *, probe: bool) -> None:
        """The request ended before it said anything."""
        if probe:
            self._probing = False

    def failed(self, points: int, error: Exception, *, probe: bool) -> bool:
        """The request failed; True where that opened it.

        Args:
            probe: What was out already when it opened says nothing new.
        """
        self._points += points
        self.failures += 1
        opened = False
        if self.is_open and probe:
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
        self._probing = False
        self.probe_at = self._clock() + pause_s
        return opened


@dataclass(slots=True)
class Ticket:
    """One request that was let through.

    Attributes:
        asked_s: When.
        probes: Circuits whose probe it is.
        is_read: Whether it reads an object.
        is_slow: Whether it was held against the endpoint already that nothing came.
    """

    asked_s: float
    is_read: bool
    probes: list[Circuit] = field(default_factory=list)
    is_slow: bool = False


class Breaker:
    """What is known of one endpoint's health; for any number of threads.

    Attributes:
        is_open: Whether lookups are in vain. One attribute read, for scheduler hooks.
    """

    def __init__(
        self,
        options: BreakerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = False
        self._options = options or BreakerOptions()
        self._clock = clock
        self._all = Circuit(self._options, clock, "anything")
        self._reads = Circuit(self._options, clock, "reads")
        self._answered_s = clock()
        self._first_bytes: deque[float] = deque(maxlen=_SAMPLES)
        self._unseen = 0
        self._slow_s = self._options.slow_s
        self._lock = threading.Lock()

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is allowed; 0 when closed."""
        due = [one.probe_at for one in (self._all, self._reads) if one.is_open]
        return max(0.0, max(due) - self._clock()) if due else 0.0

    @property
    def slow_s(self) -> float:
        """An answer that has not begun after so many seconds is late."""
        return self._slow_s

    @property
    def stands_alone(self) -> bool:
        """Whether at most one request failed since the last answer."""
        return self._all.failures <= 1

    def refuses(self, *, is_read: bool) -> bool:
        """Whether a request would not be let through now."""
        return self.is_open and not all(one.may_ask() for one in self._concerned(is_read))

    def admit(self, *, is_read: bool) -> Ticket | None:
        """Let a request through; None where it must not go out. Its end is to be told."""
        with self._lock:
            concerned = self._concerned(is_read)
            if not all(one.may_ask() for one in concerned):
                return None
            probes = [one for one in concerned if one.begin()]
            return Ticket(self._clock(), is_read, probes)

    def _concerned(self, is_read: bool) -> tuple[Circuit, ...]:
        return (self._all, self._reads) if is_read else (self._all,)

    def began(self, ticket: Ticket) -> None:
        """The answer to a read, or to another small request, has begun."""
        with self._lock:
            self._answered_s = self._clock()
            self._first_bytes.append(self._answered_s - ticket.asked_s)
            self._unseen += 1
            if self._unseen >= min(_SAMPLES_BETWEEN_LOOKS, len(self._first_bytes)):
                self._unseen = 0
                usual_s = statistics.median(self._first_bytes)
                late_s = min(self._options.times_usual * usual_s, self._options.slowest_s)
                self._slow_s = max(self._options.slow_s, late_s)

    def silent(self, ticket: Ticket) -> bool:
        """Nothing has come for ``slow_s``; True where that opened it."""
        error = UnavailableError(f"no answer within {self._slow_s:.2g} s")
        with self._lock:
            ticket.is_slow = True
            nobody = self._answered_s <= ticket.asked_s
            points = self._options.threshold if nobody else _NO_ANSWER
            return self._fail(self._all, points, error, ticket)

    def succeeded(self, ticket: Ticket) -> None:
        """The endpoint answered, and in time."""
        if ticket.is_slow:
            self.abandoned(ticket)
            return
        with self._lock:
            self._answered_s = self._clock()
            for one in self._concerned(ticket.is_read):
                one.succeeded()
            self._look()

    def failed(self, ticket: Ticket, error: S3ECError) -> bool:
        """The endpoint failed or refused; True where that opened it."""
        with self._lock:
            if isinstance(error, AccessError):
                return self._refused(ticket, error)
            if getattr(error, "status", 0) == 0:
                if ticket.is_slow:  # that was said already
                    self._abandon(ticket)
                    return False
                return self._fail(self._all, _NO_ANSWER, error, ticket)
            self._answered_s = self._clock()
            if getattr(error, "status", 0) == _CONFLICT:
                self._all.succeeded()
                self._look()
                return False
            return self._fail(self._all, _REFUSAL, error, ticket)

    def _refused(self, ticket: Ticket, error: AccessError) -> bool:
        self._answered_s = self._clock()
        if error.is_general:
            return self._fail(self._all, _REFUSAL, error, ticket)
        self._all.succeeded()  # it is there, and knows us
        if ticket.is_read:
            return self._fail(self._reads, _REFUSAL, error, ticket)
        self._look()
        return False

    def abandoned(self, ticket: Ticket) -> None:
        """It was cancelled, or ended in a fault of ours: nothing was learnt."""
        with self._lock:
            self._abandon(ticket)

    def _abandon(self, ticket: Ticket) -> None:
        for one in ticket.probes:
            one.abandoned(probe=True)
        ticket.probes = []

    def _fail(self, circuit: Circuit, points: int, error: Exception, ticket: Ticket) -> bool:
        opened = circuit.failed(points, error, probe=circuit in ticket.probes)
        # Of the other one's health it says nothing, and a probe ends once.
        ticket.probes = [one for one in ticket.probes if one is not circuit]
        if not ticket.is_slow:
            self._abandon(ticket)
        self._look()
        return opened

    def _look(self) -> None:
        self.is_open = self._all.is_open or self._reads.is_open

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of each embedding: where it is, who waits for it, and how long.

All of it is in memory and belongs to the scheduler's thread. The parts, in this order: one item;
which requests wait for which items; which steps may still read pinned files; how long each request
has waited; and the tracker, which has all of these and moves items from state to state.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from s3ec.connector.kept_answers import KeptAnswers
from s3ec.connector.messages import WorkerReport
from s3ec.connector.probes import Probes
from s3ec.connector.remote_ranks import Ranks
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import Fetching, WaitPolicy, Want
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Priority
from s3ec.tier import Pin

# A failed fetch is not tried again for the same image within this time: the request that is
# being deferred must go on, and the next one must not wait for the same failure.
RETRY_AFTER_S = 5.0
# For a request without pixels, or one that names the embedding, "absent" means "not yet": the
# encoder that made it may still be uploading it. It is asked for again after the first pause, then
# after one and a half times that... Pauses that double would come too late by up to half the time
# that the upload takes; what is asked in vain costs a few requests without a body.
FIRST_PAUSE_S = 0.05
PAUSE_GROWTH = 1.5
LONGEST_PAUSE_S = 1.0
# A pin that no request asked about for this long is given back; the bytes stay on the tier.
LEASE_S = 30.0
# The same for what arrives when nobody waits for it: to pin it again takes about a millisecond.
UNWANTED_LEASE_S = 1.0


class State(enum.Enum):
    """What can be said about an item to a request that asks for it."""

    FETCHING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    ABSENT = enum.auto()  # nothing to wait for, and the pixels came with the request


# Looking a member up in its class costs 65 ns in Python 3.11, five times a global.
FETCHING, READY, FAILED, ABSENT = State
_DEMAND = Priority.DEMAND


@dataclass(slots=True)
class Item:
    """One identifier that is being fetched, pinned, or known to have failed.

    Attributes:
        priority: Its place in the prefetcher's queue; None once nobody waited for it any more.
        touched_s: When somebody asked last, or when it arrived or failed.
        modality: Of the pinned entry; before that, what was asked for.
        rows: Likewise.
        pin: On this node. A FETCHING item has one while ranks elsewhere still fetch theirs.
        loads: Steps that were told to load it and have not reported.
        failures: Fetches in a row that brought nothing.
        may_come: Of one that has FAILED: another fetch may bring it.
        was_local: Of one that has FAILED: this node's disk was believed to hold it.
        fetching: Its place among the fetches, while it is being fetched; None where waits are not
            weighed.
        asked_s: When it was asked for the first time, or anew.
        promised: A request has named it and the index does not know it: it is being uploaded.
        was_absent: Of one that has FAILED: neither this node nor the bucket had it.
        probed: Of one that is FETCHING: nobody has said that the bucket holds it, see Probes.
    """

    key: Key
    modality: str
    state: State
    priority: Priority | None
    touched_s: float
    rows: int
    pin: Pin | None = None
    loads: int = 0
    failures: int = 0
    may_come: bool = True
    was_local: bool = False
    fetching: Fetching | None = None
    asked_s: float = 0.0
    promised: bool = False
    was_absent: bool = False
    probed: bool = False

    def fits(self, rows: int, modality: str) -> bool:
        """Whether it is what a request asks for, or was asked for as that."""
        return self.rows == rows and self.modality == modality

    def failed_lately(self, now: float) -> bool:
        """Of one that has FAILED: whether it is too soon to try again."""
        return now - self.touched_s < RETRY_AFTER_S

    def is_due(self, now: float) -> bool:
        """Of one that has FAILED: whether a request without pixels should ask for it again."""
        pause_s = min(FIRST_PAUSE_S * PAUSE_GROWTH ** min(self.failures - 1, 20), LONGEST_PAUSE_S)
        return now - self.touched_s >= pause_s

    def is_over(self, now: float) -> bool:
        """Whether its time is over, so that it becomes unknown."""
        if self.loads:
            return False
        if self.state is FAILED:
            return now - self.touched_s > RETRY_AFTER_S
        # A fetch always ends; what has a pin and waits for other ranks need not.
        return self.pin is not None and now - self.touched_s > LEASE_S


class Interest:
    """A relation between requests and identifiers, kept in both directions.

    It holds only identifiers that are being fetched or pinned, and each for as long as that
    lasts: vLLM 0.24 and 0.25 do not tell when a request ends.

    Attributes:
        requests: Request id to what it waits for. For reading, so that the hooks can tell in one
            look that a request waits for nothing.
    """

    def __init__(self) -> None:
        self.requests: dict[str, set[str]] = {}
        self._identifiers: dict[str, set[str]] = {}

    def note(self, request_id: str, identifier: str) -> None:
        """The request waits for it, or will need it later."""
        wanted = self.requests.get(request_id)
        if wanted is None:
            wanted = self.requests[request_id] = set()
        if identifier not in wanted:
            wanted.add(identifier)
            self._identifiers.setdefault(identifier, set()).add(request_id)

    def is_wanted(self, identifier: str) -> bool:
        """Whether any request waits for it."""
        return identifier in self._identifiers

    def leave(self, request_id: str, identifier: str) -> None:
        """The request does not wait for it any more, if it did."""
        _take_out(self.requests, request_id, identifier)
        _take_out(self._identifiers, identifier, request_id)

    def leave_all(self, request_id: str) -> list[str]:
        """The request waits for nothing any more.

        Returns:
            What it had waited for and nobody else does.
        """
        wanted = self.requests.pop(request_id, ())
        for identifier in wanted:
            _take_out(self._identifiers, identifier, request_id)
        return [identifier for identifier in wanted if identifier not in self._identifiers]

    def drop(self, identifier: str) -> None:
        """There is nothing left to wait for."""
        for request_id in self._identifiers.pop(identifier, ()):
            _take_out(self.requests, request_id, identifier)


def _take_out(sets: dict[str, set[str]], name: str, member: str) -> None:
    members = sets.get(name)
    if members is not None:
        members.discard(member)
        if not members:
            del sets[name]


class Steps:
    """Counts steps, and says when one that loads has ended on every rank.

    Attributes:
        current: Number of the step that is being scheduled.
        loading: Steps that load and have not ended. For reading.
    """

    def __init__(self, *, ranks: int, in_flight: int) -> None:
        """Start before the first step.

        Args:
            ranks: Workers that load what a step grants.
            in_flight: Steps that can be scheduled before the first of them has ended.
        """
        self._ranks = ranks
        self._in_flight = in_flight
        # Identifiers, and the ranks that reported.
        self.loading: dict[int, tuple[list[str], set[int]]] = {}
        self.current = 0

    def begin(self) -> list[str]:
        """Go on to the next step.

        Returns:
            What was loaded by steps that must have ended by now, reported or not: steps end in
            order, and vLLM schedules at most ``in_flight`` ahead; one more is for ranks behind
            the one that answers.
        """
        self.current += 1
        ended: list[str] = []
        for step in list(self.loading):
            if self.current - step <= self._in_flight:
                break
            ended += self.loading.pop(step)[0]
        return ended

    def load(self, identifiers: Iterable[str]) -> None:
        """The current step loads these."""
        self.loading[self.current] = (list(identifiers), set())

    def reported(self, loaded: Mapping[int, set[int]]) -> list[str]:
        """Take the ranks' word for what they have finished.

        Returns:
            What was loaded by steps that every rank has reported.
        """
        ended: list[str] = []
        for step, ranks in loaded.items():
            entry = self.loading.get(step)
            if entry is not None:
                entry[1].update(ranks)
                if len(entry[1]) >= self._ranks:
                    ended += self.loading.pop(step)[0]
        return ended


# vLLM 0.24 and 0.25 do not tell when a request ends; more than these do not wait at all.
MAX_WAITS = 10_000
# A request that came without pixels waits at least this long, whatever `defer_timeout_s` says:
# it cannot be encoded instead, and would fail. Longer than a fetch that is tried again after a
# silence of the store (`read_timeout_s`).
NO_PIXELS_WAIT_S = 10.0
# So many waits in vain, one after the other, and nobody waits for this source...
MOST_IN_VAIN = 3
# ...until something of it comes in time, or this long has passed. Then one more in vain is enough.
VAIN_REST_S = 30.0


@dataclass(slots=True)
class _Wait:
    features: int
    limit_s: float  # as of the last question
    spent_s: float = 0.0
    since_s: float | None = None
    asked_s: float = 0.0


class DeferralBudget:
    """Adds up the deferrals of each request and says when they have lasted long enough.

    One object counts the waits for one source: the bucket, this node's disk, an encoder that has
    not uploaded yet what a request names, or the bucket for what the index does not know. They are
    counted apart, so that no trouble with the bucket keeps a request from an embedding that is
    here.

    A source that answers, but too slowly for anybody to wait for, opens no breaker: small requests
    succeed. So after MOST_IN_VAIN waits in vain nothing waits for VAIN_REST_S, while fetches go on,
    or until one of them is quick enough.

    Attributes:
        requests: Ids of requests that have waited. For reading: a look is cheaper than a call.
    """

    def __init__(
        self, defer_timeout_s: float, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._limit_s = defer_timeout_s
        self._counters = counters
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._in_vain = 0
        self._vain_s = 0.0  # when the last wait in vain ended
        self.requests: Collection[str] = self._waits

    def is_over(self, request_id: str, features: int = 0, *, no_pixels: bool = False) -> bool:
        """Start or continue this request's wait; True once it has waited long enough.

        Args:
            features: How many the request has by now. A streaming session brings more with each
                turn, and each turn may wait as long as a request of its own.
            no_pixels: It has no other chance, so it is given more time, and waits though others
                have waited in vain.
        """
        now = self._clock()
        if not no_pixels and self._rests(now):
            return True
        limit_s = max(self._limit_s, NO_PIXELS_WAIT_S) if no_pixels else self._limit_s
        wait = self._waits.get(request_id)
        if wait is None:
            if limit_s <= 0 or len(self._waits) >= MAX_WAITS:
                return True
            wait = self._waits[request_id] = _Wait(features, limit_s)
        elif features > wait.features:
            wait.features = features
            wait.spent_s = 0.0
            wait.since_s = None
        wait.asked_s = now
        wait.limit_s = limit_s
        if wait.spent_s >= limit_s:
            return True
        if wait.since_s is None:
            wait.since_s = now
        return wait.spent_s + now - wait.since_s >= limit_s

    def has_time(self, request_id: str, features: int) -> bool:
        """Whether a wait of this request could begin or go on; starts nothing. As is_over."""
        now = self._clock()
        if self._limit_s <= 0 or self._rests(now):
            return False
        wait = self._waits.get(request_id)
        if wait is None:
            return len(self._waits) < MAX_WAITS
        waited_s = wait.spent_s + (0.0 if wait.since_s is None else now - wait.since_s)
        return features > wait.features or waited_s < self._limit_s

    def ends_s(self, request_id: str) -> float:
        """When the request will have waited long enough, at the soonest; infinity if it does not
        wait at present.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return math.inf
        return wait.since_s - wait.spent_s + wait.limit_s

    @property
    def has_failed(self) -> bool:
        """Whether so many waits were in vain that nobody should wait for this source."""
        return self._in_vain >= MOST_IN_VAIN

    def _rests(self, now: float) -> bool:
        """Whether nobody should wait for this source."""
        if not self.has_failed:
            return False
        if now - self._vain_s < VAIN_REST_S:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False

    def end(self, request_id: str, *, in_vain: bool = False) -> bool:
        """The request need not wait now; what it has waited stays counted against it.

        Args:
            in_vain: What it waited for has not come in time.

        Returns:
            Whether it has waited until now.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return False
        now = self._clock()
        waited_s = now - wait.since_s
        wait.spent_s += waited_s
        wait.since_s = None
        self._counters.add("deferred_seconds", waited_s)
        if in_vain:
            self._counters.add("defer_timeouts")
            self._in_vain += 1
            self._vain_s = now
        return True

    def resume(self, request_id: str, pause_s: float) -> None:
        """vLLM asks about the request again, after so long: that was no wait."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.since_s is not None:
            wait.since_s += pause_s

    def came(self, seconds: float) -> None:
        """Something came from there after so long; who waits for others has a chance."""
        if seconds < self._limit_s:
            self._in_vain = 0

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self.end(request_id)
        self._waits.pop(request_id, None)

    def sweep(self, idle_s: float) -> None:
        """Drop requests that were not asked about for this long, once there are many."""
        if len(self._waits) <= MAX_WAITS // 2:
            return
        now = self._clock()
        for request_id, wait in list(self._waits.items()):
            if now - wait.asked_s > idle_s:
                del self._waits[request_id]


class PrefetchQueue(Protocol):
    """What the scheduler half needs of a Prefetcher."""

    def submit(self, wants: list[FetchRequest]) -> None: ...
    def demote(self, keys: Iterable[Key]) -> None: ...
    @property
    def has_news(self) -> bool: ...
    def drain(self) -> list[FetchResult]: ...
    def release(self, pins: Iterable[Pin]) -> None: ...


class ItemTracker:
    """Items, the requests that wait for them, and the pins that serve them.

    An identifier that is not in ``items`` is unknown. The states of one that is:

    ========  ===============================  =============================================
    state     goes to                          when
    ========  ===============================  =============================================
    FETCHING  READY                            its pin has come, and ranks elsewhere have theirs
    FETCHING  FAILED                           nothing came, it does not fit, or ranks differ
    FETCHING  unknown                          it was probed, and the bucket does not have it
    READY     FETCHING                         other ranks fetch for themselves now
    READY     unknown                          it was loaded, or nobody asked for LEASE_S
    FAILED    FETCHING                         somebody asks again, see ``again``
    FAILED    unknown                          RETRY_AFTER_S have passed
    ========  ===============================  =============================================

    Only READY is granted, and READY always has a pin. ABSENT is an answer and never stored. What
    becomes unknown gives its pin back; the bytes stay in the tier. An item that steps still have
    to load stays, whatever the time.

    The prefetcher is told once per step, by ``next_step``.

    Attributes:
        items: By identifier. For reading, but for ``touched_s``: who asks about an item sets it.
        waiting: Request id to the identifiers that it waits for, or will need later. For reading.
        waited: Ids of requests that have waited for the bucket, for this node's disk, for what
            they named, and for what was probed. For reading.
        paused: Requests that wait, but vLLM did not ask about them in the last pass in which it
            could; since when. For reading.
    """

    def __init__(
        self,
        prefetcher: PrefetchQueue,
        *,
        role: Role,
        ranks: Ranks | None,
        counters: Counters,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
        needs_embedding: Callable[[Any], bool],
        answers: KeptAnswers,
        policy: WaitPolicy | None = None,
    ) -> None:
        """Start empty.

        Args:
            prefetcher: Brings and pins entries.
            role: How many ranks load, and how long a request may wait.
            ranks: Ranks that may not see this node's pins; None where all do for certain.
            counters: Where to count.
            clock: Monotonic seconds.
            local: Whether this node's disk is believed to hold a key.
            needs_embedding: Whether a feature came without pixels.
            answers: Kept for requests that wait; told of every item that changes.
            policy: Weighs each wait against encoding; None where every wait is worth it.
        """
        self._policy = policy
        self._answers = answers
        self._counters = counters
        self._local = local
        self._needs_embedding = needs_embedding
        self._prefetcher = prefetcher
        self._ranks = ranks
        # Where requests are not deferred, everything is fetched for a later request, so nothing is
        # ever fetched for nobody.
        self._requests_wait = role.defer_timeout_s > 0
        self._clock = clock
        # Ranks elsewhere take some steps to get back what was released.
        brief = self._requests_wait and ranks is None
        self._unwanted_lease_s = UNWANTED_LEASE_S if brief else LEASE_S
        self._steps = Steps(ranks=role.ranks, in_flight=role.steps_in_flight)
        self._waits = DeferralBudget(role.defer_timeout_s, counters, clock)  # for the bucket
        self._tier_waits = DeferralBudget(role.defer_timeout_s, counters, clock)
        self._promise_waits = DeferralBudget(role.defer_timeout_s, counters, clock)
        probe_s = min(role.probe_s, role.defer_timeout_s)
        self._probe_waits = DeferralBudget(probe_s, counters, clock)
        costs = None if policy is None else policy.costs
        self._probes = Probes(probe_s, role.probes, costs=costs, counters=counters, clock=clock)
        self._promise_noted_s = clock()
        self._interest = Interest()
        self.items: dict[str, Item] = {}
        self.waiting: Mapping[str, set[str]] = self._interest.requests
        self._known_budgets = (self._waits, self._tier_waits, self._promise_waits)
        self._budgets = (*self._known_budgets, self._probe_waits)
        self.waited = tuple(budget.requests for budget in self._budgets)
        # Those that wait: vLLM has asked about them in the last pass...
        self._deferred: set[str] = set()
        # ...or has not; since when.
        self._paused_s: dict[str, float] = {}
        self.paused: Mapping[str, float] = self._paused_s
        # Since the prefetcher was last told.
        self._demand: dict[str, FetchRequest] = {}
        self._demoted: dict[str, None] = {}

    # -- what a request needs ----------------------------------------------------------------

    def want(
        self, key: Key, modality: str, rows: int, priority: Priority, *, promised: bool = False
    ) -> None:
        """Begin with an item that is not known.

        Args:
            promised: See Item.
        """
        now = self._clock()
        item = Item(key, modality, FETCHING, priority, now, rows, asked_s=now, promised=promised)
        self.items[key.identifier] = item
        self._order(item, priority)

    def may_probe(self, request: Any) -> bool:
        """Whether anything that the index does not know may be asked for because of a request.

        Not where nobody would wait for it: the bucket was too slow lately, this request has waited
        its time, or ranks elsewhere cannot say what they hold.
        """
        if self._ranks is not None and self._ranks.cannot_answer:
            return False
        return self._probe_waits.has_time(request.request_id, len(request.mm_features))

    def probe(self, key: Key, modality: str, rows: int) -> bool:
        """Begin with an item that the index does not know; False where it is to be a miss."""
        if not self._probes.begin(key, modality, rows):
            return False
        self.want(key, modality, rows, _DEMAND)
        self.items[key.identifier].probed = True
        return True

    def promise(self, item: Item) -> None:
        """A request names what is being probed: it is awaited like anything that is named."""
        item.probed = False
        item.promised = True
        self._answers.changed(item.key.identifier)  # they were for a probe

    def again(
        self,
        item: Item,
        modality: str,
        rows: int,
        priority: Priority,
        *,
        anew: bool = False,
        promised: bool = False,
    ) -> None:
        """Fetch once more what has FAILED, as what is asked for now.

        Args:
            anew: Its failures so far do not count.
            promised: See Item.
        """
        item.promised = item.promised or promised
        if anew:
            item.failures = 0
            item.asked_s = self._clock()
        item.state = FETCHING
        item.modality = modality
        item.rows = rows
        self._answers.changed(item.key.identifier)
        self._order(item, priority)

    def expect(self, request_id: str, identifier: str, priority: Priority) -> None:
        """The request waits for an item, or will need it later.

        One that has FAILED is fetched again when it is due, see Item.
        """
        self._interest.note(request_id, identifier)
        item = self.items[identifier]
        if item.state is FETCHING and (item.priority is None or item.priority > priority):
            self._order(item, priority)

    def _order(self, item: Item, priority: Priority) -> None:
        """Have an item fetched, or fetched sooner."""
        identifier = item.key.identifier
        item.priority = priority
        if item.pin is None:
            self._demand[identifier] = FetchRequest(item.key, item.modality, item.rows, priority)
            if self._policy is not None and item.fetching is None:
                item.fetching = Fetching(self._policy.queue.order(self._clock()))
        if self._ranks is not None:
            self._ranks.prepare(identifier, item.modality, item.rows, priority)

    # -- how long a request waits for it -----------------------------------------------------

    def defer(self, request: Any, pending: list[Any]) -> bool | None:
        """Defer a request, unless it has waited long enough or would wait in vain.

        Args:
            pending: Those of its features that are needed now and have not come.

        Returns:
            False where it is deferred, True where it is to go on without them. None where it
            cannot: one came without pixels, and it has waited its time.
        """
        request_id = request.request_id
        is_new = not self._has_waited(request_id)
        awaited = self._awaited(pending, request)
        if awaited is None:
            return None
        if not awaited:
            self._end_waits(request_id)
        else:
            self._deferred.add(request_id)
            if is_new:
                self._counters.add("deferred_requests")
        if awaited is not pending:
            kept = {feature.identifier for feature in awaited}
            for feature in pending:
                if feature.identifier not in kept:
                    self._leave(request_id, feature.identifier)
        noted = self.waiting.get(request_id, ())
        for feature in awaited:
            identifier = feature.identifier
            if identifier not in noted or self.items[identifier].priority is not _DEMAND:
                self.expect(request_id, identifier, _DEMAND)
        return not awaited

    def _has_waited(self, request_id: str) -> bool:
        return any(request_id in waited for waited in self.waited)

    def _awaited(self, pending: list[Any], request: Any) -> list[Any] | None:
        """As _worth_waiting, and what is probed: that is waited for beside the rest, or alone.

        Not where the rest is to be encoded: the encoder runs then, and the bucket is too slow.
        """
        request_id = request.request_id
        probed = list(filter(self._is_probed, pending))
        if not probed:
            self._probe_waits.end(request_id)
            return self._worth_waiting(pending, request)
        rest = [feature for feature in pending if not self._is_probed(feature)]
        awaited: list[Any] = []
        if rest:
            worth = self._worth_waiting(rest, request)
            if not worth:
                return worth
            awaited = worth
        else:
            self._end_known_waits(request_id)
        can_wait = self._ranks is None or not self._ranks.cannot_answer
        if not can_wait or self._probe_waits.is_over(request_id, len(request.mm_features)):
            self._end_wait(self._probe_waits, request_id, in_vain=can_wait)
            return awaited
        if not rest and self._policy is not None:
            self._policy.load.deferred()  # or what has decided about the rest has told it
        return awaited + probed

    def _is_probed(self, feature: Any) -> bool:
        """Whether a pending feature is waited for as what the index does not know."""
        item = self.items[feature.identifier]
        if not item.probed or (item.pin is None and self._local(item.key)):
            return False
        return not self._needs_embedding(feature)

    def _worth_waiting(self, pending: list[Any], request: Any) -> list[Any] | None:
        """What of the pending features the request should still wait for.

        Returns:
            All, those that lie on this node or may still be uploaded, those on this node, or none.
            None instead of a list where one came without pixels and has waited its time.
        """
        request_id = request.request_id
        turns = len(request.mm_features)
        here: list[Any] = []
        promised: list[Any] = []
        for feature in pending:
            item = self.items[feature.identifier]
            if self._local(item.key):
                here.append(feature)
            elif item.failures:
                promised.append(feature)
        rest = len(pending) - len(here) - len(promised)
        can_wait = self._ranks is None or not self._ranks.cannot_answer
        if can_wait and self._policy is not None and not self._pays(self._policy, request, pending):
            return []
        # First, since most requests wait for the bucket, and to look for pixels takes longer.
        if not rest:
            self._waits.end(request_id)
        elif can_wait and not self._waits.is_over(request_id, turns):
            return pending
        if any(map(self._needs_embedding, pending)):
            if not self._waits.is_over(request_id, turns, no_pixels=True):
                return pending
            # What is not in the bucket says nothing about how fast the bucket is.
            late = any(self.items[one.identifier].state is FETCHING for one in pending)
            self._end_wait(self._waits, request_id, in_vain=late)
            return None
        if not can_wait:
            return []  # not in vain: nothing was late
        if rest:
            self._end_wait(self._waits, request_id, in_vain=True)
        if promised:
            if not self._promise_waits.is_over(request_id, turns):
                return promised + here
            if self._end_wait(self._promise_waits, request_id, in_vain=True):
                for feature in promised:
                    self._note_broken(self.items[feature.identifier])
        if here:
            if not self._tier_waits.is_over(request_id, turns):
                return here
            self._end_wait(self._tier_waits, request_id, in_vain=True)
        return []

    def _end_wait(self, source: DeferralBudget, request_id: str, *, in_vain: bool) -> bool:
        ended = source.end(request_id, in_vain=in_vain)
        if in_vain and source.has_failed:
            self._answers.clear()  # the others do not wait for it any more
        return ended

    def keep_answer(self, request: Any, pending: list[Any], computed_tokens: int) -> None:
        """A request was deferred: it need not be looked at again before something changes.

        Nothing is kept for one without pixels that is to ask again for what has FAILED.
        """
        if any(self.items[feature.identifier].state is not FETCHING for feature in pending):
            return
        request_id = request.request_id
        now = self._clock()
        ends_s = min(budget.ends_s(request_id) for budget in self._budgets)
        needed = [
            feature.identifier
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > computed_tokens
        ]
        # A little sooner, since sums are rounded.
        self._answers.keep(request_id, computed_tokens, needed, now=now, until_s=ends_s - 1e-9)

    def _pays(self, policy: WaitPolicy, request: Any, pending: list[Any]) -> bool:
        """Whether waiting costs less than encoding; what has no pixels is always waited for."""
        now = self._clock()
        if any(map(self._needs_embedding, pending)):
            return True
        items = [self.items[feature.identifier] for feature in pending]
        promised = [item for item in items if item.promised and not self._local(item.key)]
        for item in promised:
            if policy.costs.known_s(item.modality, item.rows) is None:
                return True  # others encode it; it is not encoded here to learn the cost
        if promised and now - self._promise_noted_s > VAIN_REST_S:
            policy.forget("promise")  # who does not wait learns nothing
        waited = request.request_id in policy.waiting
        wants = lambda: [self._want_of(item) for item in items]  # noqa: E731
        turns = len(request.mm_features)
        if policy.waits(request.request_id, wants, now, features=turns):
            return True
        self._counters.add("waits_declined")
        if waited:
            for item in promised:
                self._note_broken(item)
        return False

    def _note_broken(self, item: Item) -> None:
        """Somebody has waited for it in vain. Nobody will learn how long it takes."""
        self._note_promise(item, 2 * (self._clock() - item.asked_s))

    def _note_promise(self, item: Item, seconds: float) -> None:
        """What was named has taken so long from the first question on."""
        if self._policy is not None:
            self._policy.times("promise", item.rows).add(seconds)
            self._promise_noted_s = self._clock()

    def _want_of(self, item: Item) -> Want:
        if self._local(item.key):
            return Want(item.modality, item.rows, "tier", item.fetching or Fetching(0))
        if item.promised:  # fetched again and again, so its age is that of the first time
            return Want(item.modality, item.rows, "promise", Fetching(0, item.asked_s))
        return Want(item.modality, item.rows, "bucket", item.fetching or Fetching(0))

    def pause_waits(self, asked: Set[str]) -> None:
        """A pass has ended. Who was not asked about in it does not wait for an embedding.

        vLLM leaves its queue where an engine is full. What a request waits there is not ours, and
        must not be taken for the time that a fetch takes.
        """
        now = self._clock()
        for request_id in self.paused.keys() & asked:
            self.resume_wait(request_id, now)  # its answer was repeated
        for request_id in self._deferred - asked:
            self._deferred.discard(request_id)
            self._paused_s[request_id] = now

    def resume_wait(self, request_id: str, now: float) -> None:
        """vLLM asks about a paused request again: its wait goes on where it was."""
        pause_s = now - self._paused_s.pop(request_id)
        self._deferred.add(request_id)
        for budget in self._budgets:
            budget.resume(request_id, pause_s)
        if self._policy is not None:
            self._policy.resume(request_id, pause_s)

    def _end_waits(self, request_id: str) -> None:
        self._deferred.discard(request_id)
        self._end_known_waits(request_id)
        self._probe_waits.end(request_id)

    def _end_known_waits(self, request_id: str) -> None:
        if self._policy is not None:
            self._policy.end(request_id)
        for budget in self._known_budgets:
            budget.end(request_id)

    # -- requests go on, and go --------------------------------------------------------------

    def let_through(self, request: Any, num_computed_tokens: int) -> None:
        """All that the request needs now is here, or will be encoded.

        The KV cache may hold what it waited for: a prefix that others computed.
        """
        request_id = request.request_id
        self._end_waits(request_id)
        if request_id in self.waiting:
            for feature in request.mm_features:
                position = feature.mm_position
                if position.offset + position.length <= num_computed_tokens:
                    self._leave(request_id, feature.identifier)

    def scheduled(self, request_id: str, identifier: str) -> None:
        """The request got room for one item: it need not wait, and has done with this one."""
        self._end_waits(request_id)
        if request_id in self.waiting:
            self._leave(request_id, identifier)

    def give_up(self, request_id: str, pending: Iterable[str]) -> None:
        """The request fails: it waits for nothing, not even for what it has just asked for."""
        self._deferred.discard(request_id)
        for identifier in pending:
            self._leave(request_id, identifier)
        self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """The request waits for nothing any more; perhaps nobody does now."""
        if request_id in self.waiting:
            for identifier in self._interest.leave_all(request_id):
                self._abandon(identifier)

    def end_request(self, request_id: str) -> None:
        """The request has ended. What it waited for is for others, or for nobody."""
        now = self._clock()
        self._answers.drop(request_id)
        if request_id in self.paused:
            self.resume_wait(request_id, now)  # so that what is counted ends with the pause
        self._deferred.discard(request_id)
        for budget in self._budgets:
            budget.end_request(request_id)
        if self._policy is not None:
            self._policy.end_request(request_id, now)
        self.leave(request_id)

    def _leave(self, request_id: str, identifier: str) -> None:
        """The request does not wait for this any more; perhaps nobody does now."""
        self._interest.leave(request_id, identifier)
        if not self._interest.is_wanted(identifier):
            self._abandon(identifier)

    def _abandon(self, identifier: str) -> None:
        """Nobody waits for it: it loses its place in the queue. A pin runs out as others do."""
        item = self.items.get(identifier)
        if item is None or item.state is not FETCHING or item.priority is None:
            return
        if self._requests_wait:
            item.priority = None
            self._demoted[identifier] = None

    # -- what arrives ------------------------------------------------------------------------

    def take_news(self) -> None:
        """Learn what the prefetcher has finished."""
        now = self._clock()
        unwanted = []
        for fetched in self._prefetcher.drain():
            if fetched.source is not None:
                source = self._waits if fetched.source == "bucket" else self._tier_waits
                source.came(fetched.seconds)
            if self._probes.end(fetched):
                self._probe_waits.came(fetched.seconds)
            identifier = fetched.want.key.identifier
            item = self.items.get(identifier)
            if self._policy is not None:
                self._policy.queue.end(now)
                if fetched.source is not None:
                    times = self._policy.times(fetched.source, fetched.want.rows)
                    times.add(fetched.seconds)
                if item is not None:
                    item.fetching = None
            if item is None or item.state is not FETCHING or item.pin is not None:
                if fetched.pin is not None:
                    unwanted.append(fetched.pin)
                continue
            self._answers.changed(identifier)
            item.touched_s = now
            if item.probed and fetched.outcome is FetchOutcome.ABSENT:
                # The index may tell of it at any moment. Until then Probes keeps it from being
                # asked for again.
                self._drop(identifier)
                continue
            if fetched.outcome is not FetchOutcome.READY or fetched.pin is None:
                # What does not fit what is asked for never will. The fetch may have begun for
                # something else of that name.
                misfit = fetched.outcome is FetchOutcome.MISMATCH
                misfit = misfit and item.fits(fetched.want.rows, fetched.want.modality)
                self._fail(
                    identifier,
                    may_come=not misfit,
                    was_absent=fetched.outcome is FetchOutcome.ABSENT,
                )
                continue
            if item.failures:
                self._promise_waits.came(0.0)
            if item.promised:
                self._note_promise(item, now - item.asked_s)
            item.failures = 0
            item.pin = fetched.pin
            item.rows = fetched.pin.header.shape.rows
            item.modality = fetched.pin.header.modality
            self._settle(identifier)
            if item.pin is not None and not self._interest.is_wanted(identifier):
                item.touched_s -= LEASE_S - self._unwanted_lease_s
        self._release(unwanted)

    def on_report(self, report: WorkerReport, on_device: Collection[str]) -> None:
        """Learn what workers have loaded, and what ranks elsewhere have finished.

        Args:
            on_device: What vLLM's encoder cache holds.
        """
        self._unpin_loaded(self._steps.reported(report.loaded), on_device)
        ranks = self._ranks
        if ranks is None:
            return
        update = ranks.on_report(report)
        if update.moved:
            self._prepare_again(ranks)
        for identifier in update.failed:
            self._fail(identifier)
        for identifier in list(self.items) if update.moved else update.ready:
            self._settle(identifier)

    def _prepare_again(self, ranks: Ranks) -> None:
        """Other ranks than before fetch for themselves, and hold nothing yet."""
        self._answers.clear()
        for identifier, item in self.items.items():
            if item.state is FAILED:
                continue
            item.state = FETCHING
            # Not `or`: the most urgent one is 0.
            priority = Priority.LOOKAHEAD if item.priority is None else item.priority
            ranks.prepare(identifier, item.modality, item.rows, priority)
            if self._requests_wait and not self._interest.is_wanted(identifier):
                item.priority = None
                self._demoted[identifier] = None

    def _settle(self, identifier: str) -> None:
        """Decide whether what has a pin can be granted, as far as that is known."""
        item = self.items[identifier]
        if item.state is not FETCHING or item.pin is None:
            return
        ready: bool | None = True
        if self._ranks is not None:
            ready = self._ranks.verdict(identifier, item.pin.header.checksum)
        if ready:
            self._answers.changed(identifier)
            item.state = READY
            item.probed = False
            item.touched_s = self._clock()
        elif ready is False:
            self._counters.add("mismatch.ranks")
            self._fail(identifier)

    def _fail(self, identifier: str, *, may_come: bool = True, was_absent: bool = False) -> None:
        self._answers.changed(identifier)
        item = self.items[identifier]
        item.state = FAILED
        item.probed = False
        item.touched_s = self._clock()
        item.failures += 1
        item.may_come = may_come
        item.was_absent = was_absent
        item.was_local = self._local(item.key)
        self._interest.drop(identifier)
        pin, item.pin = item.pin, None
        if pin is not None:
            self._prefetcher.release([pin])
        if self._ranks is not None:
            self._ranks.release(identifier)

    # -- loads, and the end of a step --------------------------------------------------------

    def load(self, identifier: str) -> Pin:
        """The next step loads what was granted; its pin stays until that step has ended."""
        item = self.items[identifier]
        if item.pin is None:  # cannot be: granted items are READY, and READY items have a pin
            raise RuntimeError(f"granted item {item.key.digest.hex()} has no pin")
        item.loads += 1
        return item.pin

    def do_not_load(self, identifier: str) -> None:
        """The load is taken back: no step was told of it."""
        self.items[identifier].loads -= 1

    def next_step(self, on_device: Collection[str], now: float, *, sweep: bool) -> int:
        """Close a scheduling pass: unpin what was loaded, and tell the prefetcher what changed.

        Args:
            on_device: What vLLM's encoder cache holds at the end of the pass.
            now: Monotonic seconds.
            sweep: Also give back what nobody asked for lately.

        Returns:
            The step's number.
        """
        self._unpin_loaded(self._steps.begin(), on_device)
        if sweep:
            self._sweep(now)
        if self._demand:
            wants = list(self._demand.values())
            self._demand.clear()
            self._prefetcher.submit(wants)
        if self._demoted:
            self._hand_over_demoted()
        return self._steps.current

    def step_loads(self, identifiers: Iterable[str]) -> None:
        """The step that was closed last carries these loads to the workers."""
        self._steps.load(identifiers)

    def _hand_over_demoted(self) -> None:
        keys = []
        for identifier in self._demoted:
            item = self.items.get(identifier)
            # Unless somebody wants it again.
            if item is not None and item.state is FETCHING and item.priority is None:
                if item.pin is None:
                    keys.append(item.key)
                if self._ranks is not None:
                    self._ranks.demote(identifier)
        self._demoted.clear()
        self._prefetcher.demote(keys)

    def _unpin_loaded(self, identifiers: list[str], on_device: Collection[str]) -> None:
        """Steps that were told to load these have ended: unpin what the device holds now."""
        pins = []
        for identifier in identifiers:
            item = self.items.get(identifier)
            if item is None:
                continue
            item.loads -= 1
            if item.loads == 0 and identifier in on_device:
                pins += self._drop(identifier)
        self._release(pins)

    def _sweep(self, now: float) -> None:
        if self._prefetcher.has_news:
            self.take_news()
        pins = []
        for identifier, item in list(self.items.items()):
            if item.is_over(now):
                pins += self._drop(identifier)
        self._release(pins)
        self._answers.expire(now)
        for budget in self._budgets:
            budget.sweep(LEASE_S)
        self._probes.sweep()
        # Whom the budgets have dropped by now: before 0.26 vLLM does not tell when a request ends.
        for request_id in list(self._paused_s):
            if not self._has_waited(request_id):
                del self._paused_s[request_id]
        if self._policy is not None:
            for request_id in list(self._policy.waiting):
                if not self._has_waited(request_id):
                    self._policy.end(request_id)
            if not any(item.fetching for item in self.items.values()):
                self._policy.queue.reset()

    def _drop(self, identifier: str) -> list[Pin]:
        """The item becomes unknown. Its pins are to be given back; the bytes stay on the tier."""
        item = self.items.pop(identifier)
        self._answers.changed(identifier)
        self._interest.drop(identifier)
        if self._ranks is not None:
            self._ranks.release(identifier)
        return [] if item.pin is None else [item.pin]

    def _release(self, pins: list[Pin]) -> None:
        if pins:
            self._prefetcher.release(pins)

    def audit(
        self,
        *,
        requests: Collection[str],
        fetching: Collection[str],
        pins: Collection[Path],
        late_s: float,
    ) -> list[str]:
        """As SchedulerHalf.audit; what has failed is forgotten by ``late_s`` at the latest."""
        bucket, tier, promises, probes = self.waited
        kept: dict[str, Collection[str]] = {
            "a wait": bucket,
            "a wait for the tier": tier,
            "a wait for what was named": promises,
            "a wait for what was probed": probes,
            "an interest": self.waiting,
            "a deferral": self._deferred,
            "a paused wait": self.paused,
            "an answer": self._answers.requests,
        }
        complaints = [
            f"{what} of {name}, which has ended"
            for what, names in kept.items()
            for name in names
            if name not in requests
        ]
        held = {item.pin.path: name for name, item in self.items.items() if item.pin is not None}
        complaints += [f"{path} is pinned for nothing" for path in pins if path not in held]
        complaints += [f"{held[path]} has no pin any more" for path in held if path not in pins]
        for identifier, item in self.items.items():
            if item.pin is not None:
                continue
            if item.state is READY:
                complaints.append(f"{identifier} is granted without a pin")
            elif item.state is FAILED:
                if item.is_over(late_s):
                    complaints.append(f"{identifier} has failed, and is still remembered")
            elif identifier not in fetching and identifier not in self._demand:
                complaints.append(f"{identifier} waits for a fetch that nobody makes")
        complaints += [
            f"{identifier} holds the place of a probe that nobody makes"
            for identifier in self._probes.under_way
            if identifier not in fetching and identifier not in self._demand
        ]
        if len(self._probes.under_way) > self._probes.places:
            complaints.append(f"{len(self._probes.under_way)} probes are under way")
        complaints += [
            f"{name} waits for {identifier}, which is not known"
            for name, wanted in self.waiting.items()
            for identifier in wanted
            if identifier not in self.items
        ]
        return complaints

    @property
    def remembered(self) -> dict[str, Collection[Any]]:
        """All that is kept; an audit at rest expects it to be empty."""
        return {
            "waits": self.waited[0],
            "waits for the tier": self.waited[1],
            "waits for what was named": self.waited[2],
            "waits for what was probed": self.waited[3],
            "probes": self._probes.under_way,
            "probes in vain": self._probes.absent,
            "interests": self.waiting,
            "deferrals": self._deferred,
            "paused waits": self.paused,
            "items": self.items,
            "steps that load": self._steps.loading,
            "demand": self._demand,
            "demoted": self._demoted,
            "answers": self._answers.requests,
        }

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of each embedding: where it is, who waits for it, and how long.

All of it is in memory and belongs to the scheduler's thread. The parts, in this order: the states
of one item; which requests wait for which items; which steps may still read pinned files; how long
each request has waited; which saves were ordered; and the tracker that moves items from state to
state and tells the prefetcher once per step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from s3ec.connector.messages import Save, WorkerReport
from s3ec.connector.remote_ranks import Ranks
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.base import Index
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Priority
from s3ec.tier import Pin

# A failed fetch is not tried again for the same image within this time: the request that is
# being deferred must go on, and the next one must not wait for the same failure.
RETRY_AFTER_S = 5.0
# For a request without pixels "absent" means "not yet": the encoder that made the embedding may
# still be uploading it. It is asked for again after the first pause, then after twice that...
FIRST_PAUSE_S = 0.05
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


@dataclass(slots=True)
class Item:
    """One identifier that is being fetched, pinned, or known to have failed.

    Attributes:
        priority: Its place in the prefetcher's queue; None once nobody waited for it any more.
        touched_s: When somebody asked last, or when it arrived or failed.
        rows: Of the pinned entry; before that, what was asked for.
        pin: On this node. A FETCHING item has one while ranks elsewhere still fetch theirs.
        loads: Steps that were told to load it and have not reported.
        failures: Fetches in a row that brought nothing.
        may_come: Of one that has FAILED: another fetch may bring it.
        was_local: Of one that has FAILED: this node's disk was believed to hold it.
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

    def failed_lately(self, now: float) -> bool:
        """Of one that has FAILED: whether it is too soon to try again."""
        return now - self.touched_s < RETRY_AFTER_S

    def is_due(self, now: float) -> bool:
        """Of one that has FAILED: whether a request without pixels should ask for it again."""
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 10), LONGEST_PAUSE_S)
        return now - self.touched_s >= pause_s

    def is_over(self, now: float) -> bool:
        """Whether it is time to forget it."""
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

    def __len__(self) -> int:
        return len(self._identifiers)

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
    """Counts steps, and says when one that loads has ended on every rank."""

    def __init__(self, *, ranks: int, in_flight: int) -> None:
        """Start before the first step.

        Args:
            ranks: Workers that load what a step grants.
            in_flight: Steps that can be scheduled before the first of them has ended.
        """
        self._ranks = ranks
        self._in_flight = in_flight
        # Identifiers, and the ranks that reported.
        self._loading: dict[int, tuple[list[str], set[int]]] = {}
        self.current = 0

    def __len__(self) -> int:
        return len(self._loading)

    def begin(self) -> list[str]:
        """Go on to the next step.

        Returns:
            What was loaded by steps that must have ended by now, reported or not: steps end in
            order, and vLLM schedules at most ``in_flight`` ahead; one more is for ranks behind
            the one that answers.
        """
        self.current += 1
        ended: list[str] = []
        for step in list(self._loading):
            if self.current - step <= self._in_flight:
                break
            ended += self._loading.pop(step)[0]
        return ended

    def load(self, identifiers: Iterable[str]) -> None:
        """The current step loads these."""
        self._loading[self.current] = (list(identifiers), set())

    def reported(self, loaded: Mapping[int, set[int]]) -> list[str]:
        """Take the ranks' word for what they have finished.

        Returns:
            What was loaded by steps that every rank has reported.
        """
        ended: list[str] = []
        for step, ranks in loaded.items():
            entry = self._loading.get(step)
            if entry is not None:
                entry[1].update(ranks)
                if len(entry[1]) >= self._ranks:
                    ended += self._loading.pop(step)[0]
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
    spent_s: float = 0.0
    since_s: float | None = None
    asked_s: float = 0.0


class DeferralBudget:
    """Adds up the deferrals of each request and says when they have lasted long enough.

    One object counts the waits for one source: the bucket, or this node's disk. They are counted
    apart, so that no trouble with the bucket keeps a request from an embedding that is here.

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

    def __len__(self) -> int:
        return len(self._waits)

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
            wait = self._waits[request_id] = _Wait(features)
        elif features > wait.features:
            wait.features = features
            wait.spent_s = 0.0
            wait.since_s = None
        wait.asked_s = now
        if wait.spent_s >= limit_s:
            return True
        if wait.since_s is None:
            wait.since_s = now
        return wait.spent_s + now - wait.since_s >= limit_s

    def _rests(self, now: float) -> bool:
        """Whether nobody should wait for this source."""
        if self._in_vain < MOST_IN_VAIN:
            return False
        if now - self._vain_s < VAIN_REST_S:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False

    def end(self, request_id: str, *, in_vain: bool = False) -> None:
        """The request need not wait now; what it has waited stays counted against it.

        Args:
            in_vain: What it waited for has not come in time.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return
        now = self._clock()
        waited_s = now - wait.since_s
        wait.spent_s += waited_s
        wait.since_s = None
        self._counters.add("deferred_seconds", waited_s)
        if in_vain:
            self._counters.add("defer_timeouts")
            self._in_vain += 1
            self._vain_s = now

    def came(self, seconds: float) -> None:
        """Something came from there after so long; who waits for others has a chance."""
        if seconds < self._limit_s:
            self._in_vain = 0

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self._waits.pop(request_id, None)

    def sweep(self, idle_s: float) -> None:
        """Forget requests that were not asked about for this long, once there are many."""
        if len(self._waits) <= MAX_WAITS // 2:
            return
        now = self._clock()
        for request_id, wait in list(self._waits.items()):
            if now - wait.asked_s > idle_s:
                del self._waits[request_id]


class SaveOrders:
    """Remembers what was ordered, so that an embedding is not saved by each of its requests."""

    def __init__(
        self,
        index: Index,
        placeholder_of: Callable[[Any], dict[str, Any] | None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._placeholder_of = placeholder_of
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._again_s: dict[str, float] = {}  # those that the device held already

    def __len__(self) -> int:
        return len(self._since_s) + len(self._again_s)

    def order(self, key: Key, feature: Any) -> Save | None:
        """What to save of a feature that is about to be encoded; None where that is done."""
        identifier = feature.identifier
        if identifier in self._since_s or self._index.holds(key):
            return None
        self._since_s[identifier] = self._clock()
        return Save(feature.modality, self._placeholder_of(feature))

    def is_recent(self, identifier: str) -> bool:
        """Whether what the device holds was ordered to be stored, too lately to do so again."""
        again_s = self._again_s.get(identifier)
        return again_s is not None and self._clock() - again_s < RETRY_AFTER_S

    def again(self, feature: Any) -> Save:
        """What to save of a feature that the device holds, whatever was ordered before.

        The worker knows whether it is under way.
        """
        self._again_s[feature.identifier] = self._clock()
        return Save(feature.modality, self._placeholder_of(feature), on_device=True)

    def release(self, identifier: str) -> None:
        """The bucket holds it, or it will not be saved: it may be ordered again."""
        self._since_s.pop(identifier, None)
        self._again_s.pop(identifier, None)

    def sweep(self, now: float) -> None:
        """A save that was dropped or failed may be tried again at the next encode."""
        for ordered_s, lease_s in ((self._since_s, LEASE_S), (self._again_s, RETRY_AFTER_S)):
            for identifier, since_s in list(ordered_s.items()):
                if now - since_s > lease_s:
                    del ordered_s[identifier]


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
    READY     FETCHING                         other ranks fetch for themselves now
    READY     unknown                          it was loaded, or nobody asked for LEASE_S
    FAILED    FETCHING                         somebody asks again, see ``again``
    FAILED    unknown                          RETRY_AFTER_S have passed
    ========  ===============================  =============================================

    Only READY is granted, and READY always has a pin. ABSENT is an answer and never stored. What
    becomes unknown gives its pin back; the bytes stay in the tier. An item that steps still have
    to load stays, whatever the time.

    Attributes:
        items: By identifier. For reading.
        interest: Which requests wait. For reading.
    """

    def __init__(
        self,
        prefetcher: PrefetchQueue,
        *,
        ranks: Ranks | None,
        requests_wait: bool,
        counters: Counters,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
        came: Mapping[str, Callable[[float], None]],
    ) -> None:
        """Start empty.

        Args:
            prefetcher: Brings and pins entries.
            ranks: Ranks that may not see this node's pins; None where all do for certain.
            requests_wait: Whether requests are deferred at all. Where they are not, everything
                is fetched for a later request, so nothing is ever fetched for nobody.
            counters: Where to count.
            clock: Monotonic seconds.
            local: Whether this node's disk is believed to hold a key.
            came: By source (``bucket``, ``tier``): told how many seconds each entry took.
        """
        self._counters = counters
        self._local = local
        self._came = came
        self._prefetcher = prefetcher
        self._ranks = ranks
        self._requests_wait = requests_wait
        self._clock = clock
        # Ranks elsewhere take some steps to get back what was released.
        brief = requests_wait and ranks is None
        self._unwanted_lease_s = UNWANTED_LEASE_S if brief else LEASE_S
        self.items: dict[str, Item] = {}
        self.interest = Interest()
        # Since the prefetcher was last told.
        self._demand: dict[str, FetchRequest] = {}
        self._demoted: dict[str, None] = {}

    # -- requests come and go ----------------------------------------------------------------

    def want(self, key: Key, modality: str, rows: int, priority: Priority) -> None:
        """Begin with an item that is not known."""
        item = Item(key, modality, FETCHING, priority, self._clock(), rows)
        self.items[key.identifier] = item
        self._order(item, priority)

    def again(self, identifier: str, rows: int, priority: Priority) -> None:
        """Fetch once more what has FAILED."""
        item = self.items[identifier]
        item.state = FETCHING
        item.rows = rows
        self._order(item, priority)

    def expect(self, request_id: str, identifier: str, priority: Priority) -> None:
        """The request waits for an item, or will need it later.

        One that has FAILED is fetched again when it is due, see Item.
        """
        self.interest.note(request_id, identifier)
        item = self.items[identifier]
        if item.state is FETCHING and (item.priority is None or item.priority > priority):
            self._order(item, priority)

    def leave(self, request_id: str, identifier: str) -> None:
        """The request does not wait for this any more; perhaps nobody does now."""
        self.interest.leave(request_id, identifier)
        if not self.interest.is_wanted(identifier):
            self._abandon(identifier)

    def leave_all(self, request_id: str) -> None:
        """The request waits for nothing any more."""
        if request_id in self.interest.requests:
            for identifier in self.interest.leave_all(request_id):
                self._abandon(identifier)

    def leave_covered(self, request: Any, num_computed_tokens: int) -> None:
        """The KV cache holds what this request waited for: a prefix that others computed."""
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                self.leave(request.request_id, feature.identifier)

    def _order(self, item: Item, priority: Priority) -> None:
        """Have an item fetched, or fetched sooner."""
        identifier = item.key.identifier
        item.priority = priority
        if item.pin is None:
            self._demand[identifier] = FetchRequest(item.key, item.modality, item.rows, priority)
        if self._ranks is not None:
            self._ranks.prepare(identifier, item.modality, item.rows, priority)

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
                self._came[fetched.source](fetched.seconds)
            identifier = fetched.want.key.identifier
            item = self.items.get(identifier)
            if item is None or item.state is not FETCHING or item.pin is not None:
                if fetched.pin is not None:
                    unwanted.append(fetched.pin)
                continue
            item.touched_s = now
            if fetched.outcome is not FetchOutcome.READY or fetched.pin is None:
                # What does not fit this request never will.
                self._fail(identifier, may_come=fetched.outcome is not FetchOutcome.MISMATCH)
                continue
            item.failures = 0
            item.pin = fetched.pin
            item.rows = fetched.pin.header.shape.rows
            self._settle(identifier)
            if item.pin is not None and not self.interest.is_wanted(identifier):
                item.touched_s -= LEASE_S - self._unwanted_lease_s
        self._release(unwanted)

    def on_report(self, report: WorkerReport) -> None:
        """Learn what ranks elsewhere have finished."""
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
        for identifier, item in self.items.items():
            if item.state is FAILED:
                continue
            item.state = FETCHING
            # Not `or`: the most urgent one is 0.
            priority = Priority.LOOKAHEAD if item.priority is None else item.priority
            ranks.prepare(identifier, item.modality, item.rows, priority)
            if self._requests_wait and not self.interest.is_wanted(identifier):
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
            item.state = READY
            item.touched_s = self._clock()
        elif ready is False:
            self._counters.add("mismatch.ranks")
            self._fail(identifier)

    def _fail(self, identifier: str, *, may_come: bool = True) -> None:
        item = self.items[identifier]
        item.state = FAILED
        item.touched_s = self._clock()
        item.failures += 1
        item.may_come = may_come
        item.was_local = self._local(item.key)
        self.interest.drop(identifier)
        pin, item.pin = item.pin, None
        if pin is not None:
            self._prefetcher.release([pin])
        if self._ranks is not None:
            self._ranks.release(identifier)

    # -- once per step -----------------------------------------------------------------------

    def hand_over(self) -> None:
        """Tell the prefetcher what has changed since it was last told."""
        if self._demand:
            wants = list(self._demand.values())
            self._demand.clear()
            self._prefetcher.submit(wants)
        if not self._demoted:
            return
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

    def loaded(self, identifiers: list[str], on_device: Collection[str]) -> None:
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

    def sweep(self, now: float) -> None:
        """Give back what nobody asked for lately."""
        if self._prefetcher.has_news:
            self.take_news()
        pins = []
        for identifier, item in list(self.items.items()):
            if item.is_over(now):
                pins += self._drop(identifier)
        self._release(pins)

    def _drop(self, identifier: str) -> list[Pin]:
        """Forget an item; its pins are to be given back, the bytes stay on the tier."""
        item = self.items.pop(identifier)
        self.interest.drop(identifier)
        if self._ranks is not None:
            self._ranks.release(identifier)
        return [] if item.pin is None else [item.pin]

    def _release(self, pins: list[Pin]) -> None:
        if pins:
            self._prefetcher.release(pins)

    def audit(
        self, *, fetching: Collection[str], pins: Collection[Path], late_s: float
    ) -> list[str]:
        """As SchedulerHalf.audit; what has failed is forgotten by ``late_s`` at the latest."""
        held = {item.pin.path: name for name, item in self.items.items() if item.pin is not None}
        complaints = [f"{path} is pinned for nothing" for path in pins if path not in held]
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
            f"{name} waits for {identifier}, which is not known"
            for name, wanted in self.interest.requests.items()
            for identifier in wanted
            if identifier not in self.items
        ]
        return complaints

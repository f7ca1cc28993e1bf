# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of each embedding: where it is, and who waits for it.

All of it is in memory and belongs to the scheduler's thread. The parts, in this order: one item;
which requests wait for which items; which steps may still read open files; and the tracker, which
has all of these and moves items from state to state. How a request waits is in
``request_waits.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from s3ec.connector.shared_tier import SharedTier
from s3ec.connector.vllm_config import Role
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Priority
from s3ec.tier import OpenEntry

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
# An item that no request asked about for this long becomes unknown; the entry stays a resident.
LEASE_S = 30.0


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
    """One identifier that is being fetched, is here, or is known to have failed.

    Attributes:
        priority: Its place in the prefetcher's queue; None once nobody waited for it any more.
        touched_s: When somebody asked last, or when it arrived or failed.
        modality: Of the entry; before that, what was asked for.
        rows: Likewise.
        entry: On this node. A FETCHING item has one while nobody knows whether all ranks see it.
        loads: Steps that were told to load it and have not reported.
        failures: Fetches in a row that brought nothing.
        may_come: Of one that has FAILED: another fetch may bring it.
        was_local: Of one that has FAILED: this node's disk was believed to hold it.
        asked_s: When it was asked for the first time, or anew.
        promised: A request has named it and the index does not know it: it is being uploaded.
        was_absent: Of one that has FAILED: neither this node nor the bucket had it.
        downloaded: Nobody has loaded it since it came from the bucket.
    """

    key: Key
    modality: str
    state: State
    priority: Priority | None
    touched_s: float
    rows: int
    entry: OpenEntry | None = None
    loads: int = 0
    failures: int = 0
    may_come: bool = True
    was_local: bool = False
    asked_s: float = 0.0
    promised: bool = False
    was_absent: bool = False
    downloaded: bool = False

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
        # A fetch always ends; what has come and waits for a word of the ranks need not.
        return self.entry is not None and now - self.touched_s > LEASE_S


class Interest:
    """A relation between requests and identifiers, kept in both directions.

    It holds only identifiers of items, and each for as long as its item lasts.

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

    def of(self, identifier: str) -> Collection[str]:
        """Requests that wait for it."""
        return self._identifiers.get(identifier, ())

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


class PrefetchQueue(Protocol):
    """What the scheduler half needs of a Prefetcher."""

    def submit(self, wants: list[FetchRequest]) -> None: ...
    def demote(self, keys: Iterable[Key]) -> None: ...
    @property
    def has_news(self) -> bool: ...
    def drain(self) -> list[FetchResult]: ...


class OpenEntries(Protocol):
    """What the scheduler half needs of Residents."""

    def get(self, digest: bytes, now: float) -> OpenEntry | None: ...
    def loaded(self, digest: bytes, now: float) -> None: ...
    def release(self, entries: Iterable[OpenEntry]) -> None: ...


class ItemTracker:
    """Items, the requests that wait for them, and the open entries that serve them.

    An identifier that is not in ``items`` is unknown. The states of one that is:

    ========  ===============================  =============================================
    state     goes to                          when
    ========  ===============================  =============================================
    (none)    READY                            a resident is asked for, see ``grant``
    FETCHING  READY                            its entry has come, and all ranks see this tier
    FETCHING  FAILED                           nothing came, or it does not fit
    READY     unknown                          it was loaded, or nobody asked for LEASE_S
    FAILED    FETCHING                         somebody asks again, see ``again``
    FAILED    unknown                          RETRY_AFTER_S have passed
    ========  ===============================  =============================================

    Only READY is granted, and READY always has an open entry. ABSENT is an answer and never stored.
    What becomes unknown lets go of its entry; the bytes stay in the tier. An item that steps still
    have to load stays, whatever the time.

    The prefetcher is told once per step, by ``next_step``.

    Attributes:
        items: By identifier. For reading, but for ``touched_s``: who asks about an item sets it.
        waiting: Request id to the identifiers that it waits for, or will need later. For reading.
        demand: What the prefetcher will be told to fetch. For reading.
        look_again: Requests that wait for an item which has changed. Who looks takes them out.
    """

    def __init__(
        self,
        prefetcher: PrefetchQueue,
        *,
        role: Role,
        shared_tier: SharedTier | None,
        counters: Counters,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
        residents: OpenEntries,
    ) -> None:
        """Start empty.

        Args:
            prefetcher: Brings entries.
            role: How many ranks load, and how long a request may wait.
            shared_tier: Whether all ranks see this node's tier; None where they do for certain.
            counters: Where to count.
            clock: Monotonic seconds.
            local: Whether this node's disk is believed to hold a key.
            residents: Where entries go that are needed no more.
        """
        self._counters = counters
        self._local = local
        self._prefetcher = prefetcher
        self._residents = residents
        self._shared_tier = shared_tier
        # Where requests are not deferred, everything is fetched for a later request, so nothing is
        # ever fetched for nobody.
        self._requests_wait = role.defer_timeout_s > 0
        self._clock = clock
        self._steps = Steps(ranks=role.ranks, in_flight=role.steps_in_flight)
        self._interest = Interest()
        self.items: dict[str, Item] = {}
        self.waiting: Mapping[str, set[str]] = self._interest.requests
        self.look_again: set[str] = set()
        # Since the prefetcher was last told.
        self._demand: dict[str, FetchRequest] = {}
        self.demand: Mapping[str, FetchRequest] = self._demand
        self._demoted: dict[str, None] = {}

    # -- what a request needs ----------------------------------------------------------------

    def want(
        self,
        key: Key,
        modality: str,
        rows: int,
        priority: Priority,
        *,
        promised: bool = False,
    ) -> None:
        """Begin with an item that is not known.

        Args:
            promised: See Item.
        """
        now = self._clock()
        item = Item(key, modality, FETCHING, priority, now, rows, asked_s=now)
        item.promised = promised
        self.items[key.identifier] = item
        self._order(item, priority)

    def grant(self, key: Key, entry: OpenEntry, now: float) -> Item:
        """What is resident is ready at once."""
        header = entry.header
        rows = header.shape.rows
        item = Item(key, header.modality, READY, None, now, rows, entry=entry, asked_s=now)
        self.items[key.identifier] = item
        self.changed([key.identifier])
        return item

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
        self.changed([item.key.identifier])
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
        if item.entry is None:
            self._demand[identifier] = FetchRequest(item.key, item.modality, item.rows, priority)

    def leave_all(self, request_id: str) -> None:
        """The request waits for nothing any more; perhaps nobody does now."""
        if request_id in self.waiting:
            for identifier in self._interest.leave_all(request_id):
                self._abandon(identifier)

    def leave(self, request_id: str, identifier: str) -> None:
        """The request does not wait for this any more; perhaps nobody does now."""
        self._interest.leave(request_id, identifier)
        if not self._interest.is_wanted(identifier):
            self._abandon(identifier)

    def _abandon(self, identifier: str) -> None:
        """Nobody waits for it: it loses its place in the queue."""
        item = self.items.get(identifier)
        if item is None or item.state is not FETCHING or item.priority is None:
            return
        if self._requests_wait:
            item.priority = None
            self._demoted[identifier] = None

    def changed(self, identifiers: Iterable[str]) -> None:
        """Something about these has changed: the state, or whether the device holds it."""
        for identifier in identifiers:
            self.look_again.update(self._interest.of(identifier))

    # -- what arrives ------------------------------------------------------------------------

    def arrived(self, fetched: FetchResult, now: float) -> bool:
        """The prefetcher has finished one fetch; whether an item has its entry by that."""
        identifier = fetched.want.key.identifier
        item = self.items.get(identifier)
        if item is None or item.state is not FETCHING or item.entry is not None:
            if fetched.entry is not None:
                self._residents.release([fetched.entry])
            return False
        self.changed([identifier])
        item.touched_s = now
        if fetched.outcome is not FetchOutcome.READY or fetched.entry is None:
            # What does not fit what is asked for never will. The fetch may have begun for something
            # else of that name.
            misfit = fetched.outcome is FetchOutcome.MISMATCH
            misfit = misfit and item.fits(fetched.want.rows, fetched.want.modality)
            self._fail(
                identifier,
                may_come=not misfit,
                was_absent=fetched.outcome is FetchOutcome.ABSENT,
            )
            return False
        item.failures = 0
        item.entry = fetched.entry
        item.downloaded = fetched.source == "bucket"
        item.rows = fetched.entry.header.shape.rows
        item.modality = fetched.entry.header.modality
        if self._shared_tier is None or self._shared_tier.asked is None:
            self._grant(item)
        return True

    def loaded(self, steps: Mapping[int, set[int]], on_device: Collection[str]) -> None:
        """Let go of what workers have loaded.

        Args:
            steps: Step to the ranks that finished that step's loads.
            on_device: What vLLM's encoder cache holds.
        """
        now = self._clock()
        ended = self._steps.reported(steps)
        for identifier in ended:
            item = self.items.get(identifier)
            if item is not None:
                self._residents.loaded(item.key.digest, now)
        self._end_loads(ended, on_device)

    def settle(self) -> None:
        """All ranks see this node's tier: what has come can be granted."""
        for item in self.items.values():
            if item.state is FETCHING and item.entry is not None:
                self._grant(item)

    def _grant(self, item: Item) -> None:
        self.changed([item.key.identifier])
        item.state = READY
        item.touched_s = self._clock()

    def _fail(self, identifier: str, *, may_come: bool = True, was_absent: bool = False) -> None:
        self.changed([identifier])
        item = self.items[identifier]
        item.state = FAILED
        item.touched_s = self._clock()
        item.failures += 1
        item.may_come = may_come
        item.was_absent = was_absent
        item.was_local = self._local(item.key)
        self._interest.drop(identifier)

    # -- loads, and the end of a step --------------------------------------------------------

    def load(self, identifier: str) -> OpenEntry:
        """The next step loads what was granted; it stays open until that step has ended."""
        item = self.items[identifier]
        if item.entry is None:  # cannot be: granted items are READY, and READY items have one
            raise RuntimeError(f"granted item {item.key.digest.hex()} has no entry")
        item.loads += 1
        item.downloaded = False
        return item.entry

    def came_from_bucket(self, identifier: str) -> bool:
        """Whether what was granted had to be downloaded for its next load.

        What the tracker does not know was granted by a producer that loads nothing: the bucket
        holds it.
        """
        item = self.items.get(identifier)
        return item is None or item.downloaded

    def do_not_load(self, identifier: str) -> None:
        """The load is taken back: no step was told of it."""
        self.items[identifier].loads -= 1

    def next_step(self, on_device: Collection[str], now: float, *, sweep: bool) -> int:
        """Close a scheduling pass: let go of what was loaded, tell the prefetcher what changed.

        Args:
            on_device: What vLLM's encoder cache holds at the end of the pass.
            now: Monotonic seconds.
            sweep: Also let go of what nobody asked for lately.

        Returns:
            The step's number.
        """
        self._end_loads(self._steps.begin(), on_device)
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
            if item is None or item.state is not FETCHING or item.priority is not None:
                continue
            if item.entry is None:
                keys.append(item.key)
        self._demoted.clear()
        self._prefetcher.demote(keys)

    def _end_loads(self, identifiers: list[str], on_device: Collection[str]) -> None:
        """Steps that were told to load these have ended: let go of what the device holds now."""
        for identifier in identifiers:
            item = self.items.get(identifier)
            if item is None:
                continue
            item.loads -= 1
            if item.loads == 0 and identifier in on_device:
                self._drop(identifier)

    def _sweep(self, now: float) -> None:
        for identifier, item in list(self.items.items()):
            if item.is_over(now):
                self._drop(identifier)

    def _drop(self, identifier: str) -> None:
        """The item becomes unknown. The bytes stay on the tier."""
        item = self.items.pop(identifier)
        self.changed([identifier])
        self._interest.drop(identifier)
        if item.entry is not None:
            self._residents.release([item.entry])

    def audit(self, *, fetching: Collection[str], late_s: float) -> list[str]:
        """As SchedulerHalf.audit; what has failed is forgotten by ``late_s`` at the latest."""
        complaints = []
        for identifier, item in self.items.items():
            if item.entry is not None:
                continue
            if item.state is READY:
                complaints.append(f"{identifier} is granted without an entry")
            elif item.state is FAILED:
                if item.is_over(late_s):
                    complaints.append(f"{identifier} has failed, and is still remembered")
            elif identifier not in fetching and identifier not in self._demand:
                complaints.append(f"{identifier} waits for a fetch that nobody makes")
        complaints += [
            f"{name} waits for {identifier}, which is not known"
            for name, wanted in self.waiting.items()
            for identifier in wanted
            if identifier not in self.items
        ]
        return complaints

    @property
    def remembered(self) -> dict[str, Collection[Any]]:
        """All that is kept of items; an audit at rest expects it to be empty."""
        return {
            "items": self.items,
            "steps that load": self._steps.loading,
            "demand": self._demand,
            "demoted": self._demoted,
        }

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of each embedding: where it is, and who waits for it.

All of it is in memory and belongs to the scheduler's thread. How a request waits is in
``request_waits.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from s3ec.connector.vllm_config import Role
from s3ec.identity import Key
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Prefetcher, Priority
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.residents import Residents

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
_FORGOTTEN = Priority.FORGOTTEN


@dataclass(slots=True)
class Item:
    """One identifier that is being fetched, is here, or is known to have failed.

    Attributes:
        priority: Its place in the prefetcher's queue; FORGOTTEN once nobody waits for it.
        touched_s: When somebody asked last, or when it arrived or failed.
        modality: Of the entry; before that, what was asked for.
        rows: Likewise.
        asked_s: When it was asked for the first time, or anew.
        entry: On this node; only a READY item has one.
        failures: Fetches in a row that brought nothing.
        may_come: Of one that has FAILED: another fetch may bring it.
        was_local: Of one that has FAILED: this node's disk was believed to hold it.
        is_far: Of one that is being fetched: no replica has given it, and home is asked.
        promised: A request has named it and the index does not know it: it is being uploaded.
        was_absent: Of one that has FAILED: neither this node nor the bucket had it.
        downloaded: It came from the bucket, and nobody has been granted it since.
        waiters: Requests that wait for it, or will need it later.
    """

    key: Key
    modality: str
    state: State
    priority: Priority
    touched_s: float
    rows: int
    asked_s: float
    entry: OpenEntry | None = None
    failures: int = 0
    may_come: bool = True
    was_local: bool = False
    is_far: bool = False
    promised: bool = False
    was_absent: bool = False
    downloaded: bool = False
    waiters: set[str] = field(default_factory=set)

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
        """Whether its time is over, so that it becomes unknown. A fetch always ends by itself."""
        if self.state is FAILED:
            return now - self.touched_s > RETRY_AFTER_S
        return self.state is READY and now - self.touched_s > LEASE_S


class ItemTracker:
    """Items, the requests that wait for them, and the open entries that serve them.

    An identifier that is not in ``items`` is unknown. The states of one that is:

    ========  ===============================  =============================================
    state     goes to                          when
    ========  ===============================  =============================================
    (none)    READY                            a resident is asked for, see ``grant``
    FETCHING  READY                            its entry has come
    FETCHING  FAILED                           nothing came, or it does not fit
    READY     unknown                          a step loads it, or nobody asked for LEASE_S
    FAILED    FETCHING                         somebody asks again, see ``fetch``
    FAILED    unknown                          RETRY_AFTER_S have passed
    ========  ===============================  =============================================

    Only READY is granted, and READY always has an open entry. ABSENT is an answer and never stored.
    What becomes unknown lets go of its entry; the bytes stay in the tier. A step holds the entries
    that it loads until every rank has reported it, or until it must have ended: vLLM schedules at
    most ``role.steps_in_flight`` ahead, and one more is for ranks behind the one that answers.

    The prefetcher is told once per step, by ``next_step``.

    Attributes:
        items: By identifier. For reading, but for ``touched_s``: who asks about an item sets it.
        waiting: Request id to the identifiers that it waits for, or will need later. For reading.
        look_again: Requests that wait for an item which has changed. Who looks takes them out.
        loading: Step to what it loads, and the ranks that reported; of steps that have not ended.
            For reading.
        demand: What the prefetcher will be told, by identifier. For reading.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        residents: Residents,
        *,
        role: Role,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
    ) -> None:
        """Start empty.

        Args:
            residents: Where entries go that are needed no more.
            role: How many ranks load, and whether requests wait.
            clock: Monotonic seconds.
            local: Whether this node's disk is believed to hold a key.
        """
        self._local = local
        self._prefetcher = prefetcher
        self._residents = residents
        self._role = role
        self._clock = clock
        self._step = 0  # number of the step that is being scheduled
        self.loading: dict[int, tuple[list[OpenEntry], set[int]]] = {}
        self.items: dict[str, Item] = {}
        self.waiting: dict[str, set[str]] = {}
        self.look_again: set[str] = set()
        self.demand: dict[str, FetchRequest] = {}

    # -- what a request needs ----------------------------------------------------------------

    def fetch(
        self,
        key: Key,
        modality: str,
        rows: int,
        priority: Priority,
        *,
        anew: bool = False,
        promised: bool = False,
    ) -> None:
        """Have it fetched: what is not known, or has FAILED, as what is asked for now.

        Args:
            anew: Its failures so far do not count.
            promised: See Item.
        """
        now = self._clock()
        item = self.items.get(key.identifier)
        if item is None:
            item = Item(key, modality, FETCHING, priority, now, rows, now)
            self.items[key.identifier] = item
        if anew:
            item.failures = 0
            item.asked_s = now
        item.promised = item.promised or promised
        item.is_far = False
        item.state, item.modality, item.rows = FETCHING, modality, rows
        self._order(item, priority)

    def grant(self, key: Key, entry: OpenEntry, now: float) -> Item:
        """What is resident is ready at once."""
        header = entry.header
        item = Item(key, header.modality, READY, _FORGOTTEN, now, header.shape.rows, now, entry)
        self.items[key.identifier] = item
        return item

    def expect(self, request_id: str, identifier: str, priority: Priority) -> None:
        """The request waits for an item, or will need it later."""
        item = self.items[identifier]
        item.waiters.add(request_id)
        waited = self.waiting.get(request_id)
        if waited is None:
            waited = self.waiting[request_id] = set()
        waited.add(identifier)
        if item.state is FETCHING and item.priority > priority:
            self._order(item, priority)

    def _order(self, item: Item, priority: Priority) -> None:
        """Have an item fetched, or fetched sooner or later."""
        item.priority = priority
        request = FetchRequest(item.key, item.modality, item.rows, priority)
        self.demand[item.key.identifier] = request

    def leave(self, request_id: str, identifiers: Iterable[str]) -> None:
        """The request does not wait for these any more. What nobody waits for is fetched last."""
        waited = self.waiting.get(request_id, set())
        for identifier in identifiers:
            waited.discard(identifier)
            item = self.items.get(identifier)
            if item is None:
                continue
            item.waiters.discard(request_id)
            is_waited_for = item.waiters or item.state is not FETCHING
            # Where requests are not deferred, everything is fetched for a later request.
            if not is_waited_for and item.priority is not _FORGOTTEN and self._role.defer_timeout_s:
                self._order(item, _FORGOTTEN)
        if not waited:
            self.waiting.pop(request_id, None)

    def changed(self, identifiers: Iterable[str]) -> None:
        """Something about these has changed: the state, or whether the device holds it."""
        for identifier in identifiers:
            item = self.items.get(identifier)
            if item is not None:
                self.look_again |= item.waiters

    # -- what arrives ------------------------------------------------------------------------

    def arrived(self, fetched: FetchResult, now: float) -> bool:
        """The prefetcher has finished one fetch; whether an item has its entry by that."""
        want, entry = fetched.want, fetched.entry
        item = self.items.get(want.key.identifier)
        if item is None or item.state is not FETCHING:
            if entry is not None:
                self._residents.release([entry])
            return False
        item.touched_s = now
        if entry is not None:
            self.look_again |= item.waiters
            item.state = READY
            item.failures = 0
            item.entry = entry
            item.downloaded = fetched.source == "bucket"
            item.rows = entry.header.shape.rows
            item.modality = entry.header.modality
            return True
        item.state = FAILED
        item.failures += 1
        # What does not fit what is asked for never will. The fetch may have begun for something
        # else of that name.
        is_misfit = fetched.outcome is FetchOutcome.MISMATCH
        item.may_come = not (is_misfit and item.fits(want.rows, want.modality))
        item.was_absent = fetched.outcome is FetchOutcome.ABSENT
        item.was_local = self._local(item.key)
        self._send_away(item)
        return False

    def _send_away(self, item: Item) -> None:
        """There is nothing left to wait for."""
        self.look_again |= item.waiters
        for request_id in item.waiters:
            waited = self.waiting[request_id]
            waited.remove(item.key.identifier)
            if not waited:
                del self.waiting[request_id]
        item.waiters.clear()

    # -- loads, and the end of a step --------------------------------------------------------

    def next_step(self, loads: Iterable[str], now: float, *, sweep: bool) -> int:
        """Close a scheduling pass: let go of what was loaded, tell the prefetcher what changed.

        Args:
            loads: READY items that the step loads.
            now: Monotonic seconds.
            sweep: Also let go of what nobody asked for lately.

        Returns:
            The step's number.
        """
        self._step += 1
        for step in list(self.loading):
            if self._step - step <= self._role.steps_in_flight:
                break
            self._residents.release(self.loading.pop(step)[0])
        if loads:
            # One that was preempted may be there twice.
            items = [self._remove(identifier) for identifier in dict.fromkeys(loads)]
            self.loading[self._step] = [one.entry for one in items if one.entry is not None], set()
        if sweep:
            # Without a call for each that is being fetched, of which there may be thousands.
            over = [
                identifier
                for identifier, item in self.items.items()
                if item.state is not FETCHING and item.is_over(now)
            ]
            for entry in [self._remove(identifier).entry for identifier in over]:
                if entry is not None:
                    self._residents.release([entry])
        if self.demand:
            self._prefetcher.submit(list(self.demand.values()))
            self.demand.clear()
        return self._step

    def _remove(self, identifier: str) -> Item:
        """The item becomes unknown; whoever calls this lets go of its entry."""
        item = self.items.pop(identifier)
        self._send_away(item)
        return item

    def loaded(self, steps: Mapping[int, set[int]]) -> None:
        """Let go of what workers have loaded, and so have compared with its checksum.

        Args:
            steps: Step to the ranks that finished that step's loads.
        """
        for step, ranks in steps.items():
            entries, reported = self.loading.get(step, ([], set()))
            reported |= ranks
            if entries and len(reported) >= self._role.ranks:
                now = self._clock()
                for entry in entries:
                    entry.verified_s = now
                self._residents.release(entries)
                del self.loading[step]

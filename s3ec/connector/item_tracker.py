# SPDX-License-Identifier: Apache-2.0
"""The scheduler half's state of each embedding: where it is, and which requests wait for it.

All state is in memory and belongs to the scheduler's thread. ``request_waits.py`` decides how a
request waits.
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

# A failed fetch is not retried for the same image within this time: the deferred request must
# continue, and the next one must not wait for the same failure.
RETRY_AFTER_S = 5.0
# For a request without pixels, or one that names the embedding, "absent" means "not yet": the
# instance that encoded it may still be uploading it. The fetch is retried after the first pause,
# then after 1.5 times that pause, and so on. Doubled pauses would detect the upload too late, by up
# to half its duration; retries without result cost a few requests without a body.
FIRST_PAUSE_S = 0.05
PAUSE_GROWTH = 1.5
LONGEST_PAUSE_S = 1.0
# An item without a request for this long becomes unknown; its entry stays a resident.
LEASE_S = 30.0


class State(enum.Enum):
    """State of an item, as seen by a request that needs it."""

    FETCHING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    ABSENT = enum.auto()  # nothing to wait for, and the pixels came with the request


# Looking a member up in its class costs 65 ns in Python 3.11, five times a global.
FETCHING, READY, FAILED, ABSENT = State
_FORGOTTEN = Priority.FORGOTTEN


@dataclass(slots=True)
class Item:
    """One identifier that is being fetched, is here, or has failed to arrive.

    Attributes:
        priority: Its priority in the prefetcher's queue; FORGOTTEN once no request waits for it.
        touched_s: When a request last asked for it, or when it arrived or failed.
        modality: The entry's modality; before it arrives, the requested one.
        rows: The entry's rows; before it arrives, the requested ones.
        asked_s: When it was first requested, or requested again with its failures reset.
        entry: The open entry on this node; only a READY item has one.
        failures: Fetches in a row without result.
        may_come: FAILED items only: another fetch may bring it.
        was_local: FAILED items only: this node's disk was believed to hold it.
        is_far: FETCHING items only: no replica has it, and home is asked.
        promised: A request has named it and it is not in the index: it is being uploaded.
        was_absent: FAILED items only: neither this node nor the bucket had it.
        downloaded: It came from the bucket, and has not been granted since.
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
        """Return True if the item's rows and modality are those that a request asks for."""
        return self.rows == rows and self.modality == modality

    def failed_lately(self, now: float) -> bool:
        """Return True if it is too soon to retry this FAILED item."""
        return now - self.touched_s < RETRY_AFTER_S

    def is_due(self, now: float) -> bool:
        """Return True if a request without pixels should retry this FAILED item now."""
        pause_s = min(FIRST_PAUSE_S * PAUSE_GROWTH ** min(self.failures - 1, 20), LONGEST_PAUSE_S)
        return now - self.touched_s >= pause_s

    def is_over(self, now: float) -> bool:
        """Return True if the item has expired and becomes unknown. A fetch ends by itself."""
        if self.state is FAILED:
            return now - self.touched_s > RETRY_AFTER_S
        return self.state is READY and now - self.touched_s > LEASE_S


class ItemTracker:
    """Items, the requests that wait for them, and the open entries that serve them.

    An identifier that is not in ``items`` is unknown. The states of one that is:

    ========  ===============================  =============================================
    state     goes to                          when
    ========  ===============================  =============================================
    (none)    READY                            a request needs a resident, see ``grant``
    FETCHING  READY                            its entry has arrived
    FETCHING  FAILED                           the fetch failed, or its entry does not fit
    READY     unknown                          a step loads it, or LEASE_S pass without request
    FAILED    FETCHING                         a request needs it again, see ``fetch``
    FAILED    unknown                          RETRY_AFTER_S have passed
    ========  ===============================  =============================================

    Only READY is granted, and READY always has an open entry. ABSENT is returned, never stored. An
    item that becomes unknown releases its entry; the bytes stay in the tier. A step holds the
    entries that it loads until every rank has reported it, or until it must have ended: vLLM
    schedules at most ``role.steps_in_flight`` ahead, and one more step allows for lagging ranks.

    ``next_step`` submits all requests to the prefetcher, once per step.

    Attributes:
        items: By identifier. Read-only, except ``touched_s``, which the caller that needs an item
            sets.
        waiting: Request id to the identifiers that it waits for, or will need later. Read-only.
        look_again: Requests that wait for a changed item. The caller that checks them removes them.
        loading: Step to the entries that it loads, and the ranks that reported; for steps that
            have not ended. Read-only.
        demand: Requests for the prefetcher, by identifier. Read-only.
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
            residents: Takes entries that are no longer needed.
            role: Says how many ranks load, and whether requests wait.
            clock: Monotonic seconds.
            local: True if this node's disk is believed to hold a key.
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
        """Order the fetch of an unknown or FAILED item, with the given modality and rows.

        Args:
            anew: True to reset its failures.
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
        """Add a resident entry as a READY item."""
        header = entry.header
        item = Item(key, header.modality, READY, _FORGOTTEN, now, header.shape.rows, now, entry)
        self.items[key.identifier] = item
        return item

    def expect(self, request_id: str, identifier: str, priority: Priority) -> None:
        """Note that the request waits for an item, or will need it later."""
        item = self.items[identifier]
        item.waiters.add(request_id)
        waited = self.waiting.get(request_id)
        if waited is None:
            waited = self.waiting[request_id] = set()
        waited.add(identifier)
        if item.state is FETCHING and item.priority > priority:
            self._order(item, priority)

    def _order(self, item: Item, priority: Priority) -> None:
        """Order an item's fetch, or change its priority."""
        item.priority = priority
        request = FetchRequest(item.key, item.modality, item.rows, priority)
        self.demand[item.key.identifier] = request

    def leave(self, request_id: str, identifiers: Iterable[str]) -> None:
        """End the request's interest in these items. Items without waiters are fetched last."""
        waited = self.waiting.get(request_id, set())
        for identifier in identifiers:
            waited.discard(identifier)
            item = self.items.get(identifier)
            if item is None:
                continue
            item.waiters.discard(request_id)
            is_waited_for = item.waiters or item.state is not FETCHING
            # If requests are not deferred, every fetch is for a later request.
            if not is_waited_for and item.priority is not _FORGOTTEN and self._role.defer_timeout_s:
                self._order(item, _FORGOTTEN)
        if not waited:
            self.waiting.pop(request_id, None)

    def changed(self, identifiers: Iterable[str]) -> None:
        """Check the waiters of these items again: their state, or the device's copy, changed."""
        for identifier in identifiers:
            item = self.items.get(identifier)
            if item is not None:
                self.look_again |= item.waiters

    # -- what arrives ------------------------------------------------------------------------

    def arrived(self, fetched: FetchResult, now: float) -> bool:
        """Process one finished fetch; return True if it gave an item its entry."""
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
        # An entry that does not fit the current request never will. But the fetch may have begun
        # for another request of that name.
        is_misfit = fetched.outcome is FetchOutcome.MISMATCH
        item.may_come = not (is_misfit and item.fits(want.rows, want.modality))
        item.was_absent = fetched.outcome is FetchOutcome.ABSENT
        item.was_local = self._local(item.key)
        self._send_away(item)
        return False

    def _send_away(self, item: Item) -> None:
        """Remove all waiters of the item: there is nothing left to wait for."""
        self.look_again |= item.waiters
        for request_id in item.waiters:
            waited = self.waiting[request_id]
            waited.remove(item.key.identifier)
            if not waited:
                del self.waiting[request_id]
        item.waiters.clear()

    # -- loads, and the end of a step --------------------------------------------------------

    def next_step(self, loads: Iterable[str], now: float, *, sweep: bool) -> int:
        """Close a scheduling pass: release loaded entries, submit changes to the prefetcher.

        Args:
            loads: READY items that the step loads.
            now: Monotonic seconds.
            sweep: Also release the items that have expired.

        Returns:
            The step's number.
        """
        self._step += 1
        for step in list(self.loading):
            if self._step - step <= self._role.steps_in_flight:
                break
            self._residents.release(self.loading.pop(step)[0])
        if loads:
            # An item of a preempted request may be listed twice.
            items = [self._remove(identifier) for identifier in dict.fromkeys(loads)]
            self.loading[self._step] = [one.entry for one in items if one.entry is not None], set()
        if sweep:
            # The state check avoids a call for each of possibly thousands of fetches.
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
        """Make the item unknown; the caller releases its entry."""
        item = self.items.pop(identifier)
        self._send_away(item)
        return item

    def loaded(self, steps: Mapping[int, set[int]]) -> None:
        """Release the entries that workers have loaded, and so have compared with their checksums.

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

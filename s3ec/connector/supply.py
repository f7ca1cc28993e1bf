# SPDX-License-Identifier: Apache-2.0
"""What is on its way to this node or pinned here, for whom, and until when.

In memory, for the scheduler's thread. The prefetcher is told once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from s3ec.connector.interest import Interest
from s3ec.connector.items import (
    FAILED,
    FETCHING,
    LEASE_S,
    READY,
    UNWANTED_LEASE_S,
    Item,
)
from s3ec.connector.plan import WorkerReport
from s3ec.connector.ranks import Ranks
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.prefetch import Fetched, Outcome, Priority, Want
from s3ec.tier import Pin


class PrefetchQueue(Protocol):
    """What the scheduler half needs of a Prefetcher."""

    def submit(self, wants: list[Want]) -> None: ...
    def forget(self, keys: Iterable[Key]) -> None: ...
    @property
    def has_news(self) -> bool: ...
    def drain(self) -> list[Fetched]: ...
    def release(self, pins: Iterable[Pin]) -> None: ...


class Supply:
    """Items, the requests that wait for them, and the pins that serve them.

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
        self._demand: dict[str, Want] = {}
        self._forgotten: dict[str, None] = {}

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
            self._demand[identifier] = Want(item.key, item.modality, item.rows, priority)
        if self._ranks is not None:
            self._ranks.prepare(identifier, item.modality, item.rows, priority)

    def _abandon(self, identifier: str) -> None:
        """Nobody waits for it: it loses its place in the queue. A pin runs out as others do."""
        item = self.items.get(identifier)
        if item is None or item.state is not FETCHING or item.priority is None:
            return
        if self._requests_wait:
            item.priority = None
            self._forgotten[identifier] = None

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
            if fetched.outcome is not Outcome.READY or fetched.pin is None:
                # What does not fit this request never will.
                self._fail(identifier, may_come=fetched.outcome is not Outcome.MISMATCH)
                continue
            item.failures = 0
            item.pin = fetched.pin
            item.rows = fetched.pin.header.shape.rows
            self._settle(identifier)
            if item.pin is not None and not self.interest.is_wanted(identifier):
                item.touched_s -= LEASE_S - self._unwanted_lease_s
        self._release(unwanted)

    def hear(self, report: WorkerReport) -> None:
        """Learn what ranks elsewhere have finished."""
        ranks = self._ranks
        if ranks is None:
            return
        heard = ranks.hear(report)
        if heard.moved:
            self._prepare_again(ranks)
        for identifier in heard.failed:
            self._fail(identifier)
        for identifier in list(self.items) if heard.moved else heard.ready:
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
                self._forgotten[identifier] = None

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
        if not self._forgotten:
            return
        keys = []
        for identifier in self._forgotten:
            item = self.items.get(identifier)
            # Unless somebody wants it again.
            if item is not None and item.state is FETCHING and item.priority is None:
                if item.pin is None:
                    keys.append(item.key)
                if self._ranks is not None:
                    self._ranks.forget(identifier)
        self._forgotten.clear()
        self._prefetcher.forget(keys)

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

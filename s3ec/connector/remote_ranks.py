# SPDX-License-Identifier: Apache-2.0
"""Ranks on other nodes: what the scheduler half orders, and what a worker there does.

A rank that does not see the scheduler's pins keeps pins of its own. The two sides talk by the plans
and reports that vLLM carries between them (``messages.py``):

=========================  ===================================================================
the scheduler (``Ranks``)  a rank (``LocalPins``)
=========================  ===================================================================
``orders.tier``            says by its status whether it sees the scheduler's pins; if it does,
                           nothing else here concerns it
``orders.prepare``         fetches and pins it, and reports it ready, with the checksum of its
                           bytes, or failed
``orders.demoted``         fetches it behind all that requests wait for
``orders.release``         gives the pin back
a load                     loads its own file instead, where that has the granted bytes
=========================  ===================================================================

A ticket names each order. An item is granted once every such rank holds the very bytes that are
pinned on the scheduler's node. A rank whose status changes is a new process and holds nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from s3ec.connector.messages import (
    Load,
    Prepare,
    RankOrders,
    RankStatus,
    StepPlan,
    TierId,
    WorkerReport,
)
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Prefetcher, Priority
from s3ec.tier import Pin, Tier

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class RankUpdate:
    """What a report changes.

    Attributes:
        moved: Other ranks than before hold pins of their own, or other processes do: what was
            ready is not, and everything has to be prepared again.
        ready: Identifiers that one more rank holds now; see Ranks.verdict.
        failed: Identifiers that some rank cannot have.
    """

    moved: bool = False
    ready: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Order:
    identifier: str
    ready: dict[int, str] = field(default_factory=dict)  # rank to checksum


class Ranks:
    """The scheduler's side: bookkeeping in memory, for the scheduler's thread.

    An item on the ranks that have a tier of their own is

    ========  ========  ==================================================================
    state     goes to   when
    ========  ========  ==================================================================
    (none)    ordered   somebody asks for it, and there are such ranks or nobody knows yet
    ordered   ready     each of them has reported the checksum of what it holds
    ready     ordered   other ranks, or other processes, are there now
    any       (none)    it was released: loaded, too old, or it failed somewhere
    ========  ========  ==================================================================
    """

    def __init__(
        self, count: int, tier: TierId, *, steps_in_flight: int, called_without_tokens: bool
    ) -> None:
        """Know nobody yet.

        Args:
            count: Workers that load.
            tier: Tells a rank whether it sees our pins.
            steps_in_flight: Steps that can be scheduled before the first of them has ended.
            called_without_tokens: Whether workers get plans and report in steps without tokens.
        """
        self._count = count
        self._tier = tier
        self._steps_in_flight = steps_in_flight
        self._called_without_tokens = called_without_tokens
        self._present: dict[int, RankStatus] = {}
        self._remote: frozenset[int] | None = None  # None until everybody was heard
        self._numbers = itertools.count(1)
        self._tickets: dict[str, int] = {}
        self._orders: dict[int, _Order] = {}
        self._out = RankOrders(tier)
        # Steps in a row that no worker heard of; none has, before the first.
        self._silent_steps = steps_in_flight

    def __len__(self) -> int:
        return len(self._orders) + len(self._tickets)

    @property
    def cannot_answer(self) -> bool:
        """Whether waiting is in vain for now.

        Either not everybody was heard yet, or orders and answers do not get through: the V1
        runner calls no worker hook in a step without tokens, and an engine whose requests are
        all deferred has no other steps.
        """
        if self._remote is None:
            return True
        return bool(self._remote) and self._silent_steps >= self._steps_in_flight

    def verdict(self, identifier: str, checksum: str) -> bool | None:
        """Whether every rank can load what is pinned on the scheduler's node.

        Encoders do not repeat their bits, and ranks must not compute from different ones.

        Args:
            checksum: Of the pinned bytes.

        Returns:
            None while a rank has not answered, False where one holds other bytes.
        """
        if self._remote is None:
            return None
        if not self._remote:
            return True
        order = self._orders.get(self._tickets.get(identifier, 0))
        if order is None or not order.ready.keys() >= self._remote:
            return None
        return all(order.ready[rank] == checksum for rank in self._remote)

    def prepare(self, identifier: str, modality: str, rows: int, priority: Priority) -> None:
        """Have it fetched, or fetched sooner."""
        if self._remote is not None and not self._remote:
            return
        ticket = self._tickets.get(identifier)
        if ticket is None:
            ticket = self._tickets[identifier] = next(self._numbers)
            self._orders[ticket] = _Order(identifier)
        self._out.prepare.append(Prepare(ticket, identifier, modality, rows, priority))

    def demote(self, identifier: str) -> None:
        """No request waits for it at present."""
        ticket = self._tickets.get(identifier)
        if ticket is not None:
            self._out.demoted.append(ticket)

    def release(self, identifier: str) -> None:
        """The pins are no longer needed."""
        ticket = self._tickets.pop(identifier, None)
        if ticket is not None:
            del self._orders[ticket]
            self._out.release.append(ticket)
            self._out.prepare = [each for each in self._out.prepare if each.ticket != ticket]

    def take_orders(self, *, scheduled_tokens: int) -> RankOrders | None:
        """What this step's plan should carry; None where no worker would see it."""
        if not scheduled_tokens and not self._called_without_tokens:
            self._silent_steps += 1
            return None
        self._silent_steps = 0
        out, self._out = self._out, RankOrders(self._tier)
        return out

    def on_report(self, report: WorkerReport) -> RankUpdate:
        """Take a report's part about ranks."""
        update = RankUpdate(moved=self._meet(report.present))
        remote = self._remote
        if update.moved or not remote:
            return update
        for ticket, ranks in report.failed.items():
            order = self._orders.get(ticket)
            if order is not None and ranks & remote:
                update.failed.append(order.identifier)
        for ticket, checksums in report.ready.items():
            order = self._orders.get(ticket)
            if order is not None:
                order.ready.update(checksums)
                update.ready.append(order.identifier)
        return update

    def _meet(self, present: dict[int, RankStatus]) -> bool:
        known = self._present
        if all(known.get(rank) == presence for rank, presence in present.items()):
            return False
        replaced = any(rank in known and known[rank] != each for rank, each in present.items())
        known.update(present)
        if len(known) < self._count:
            return False
        remote = frozenset(rank for rank, each in known.items() if not each.shares)
        if remote == self._remote and not replaced:
            return False
        if remote:
            log.info("ranks %s have a node tier of their own", sorted(remote))
        elif self._remote is None:
            log.info("all %d ranks read this node's tier", self._count)
        self._remote = remote
        for order in self._orders.values():
            order.ready.clear()
        return True


def tier_id(tier: Tier) -> TierId:
    """How other processes recognise this one's pins.

    Raises:
        TierError: The tier is closed, or its folder for pins cannot be made.
    """
    return TierId(_host(), str(tier.pins.folder()))


def _host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


@dataclass(slots=True)
class _Held:
    ticket: int
    key: Key
    rows: int
    pin: Pin | None = None


class LocalPins:
    """A rank's side: obeys the scheduler's orders. One thread: the model runner's.

    Does nothing at all while plans carry no such orders, or when this rank sees the scheduler's
    pins. Fetching happens on this process's prefetcher, whose results only this object drains.

    An item is

    ========  ========  ==================================================================
    state     goes to   when
    ========  ========  ==================================================================
    (none)    fetching  it was ordered
    fetching  held      its pin has come, with the rows of the order: reported as ready
    fetching  (none)    it has not, or not with these rows: reported as failed
    any       (none)    the order was released; the pin is given back
    ========  ========  ==================================================================
    """

    def __init__(
        self, prefetcher: Prefetcher, tier: Tier, make_key: Callable[[str], Key | None]
    ) -> None:
        """Hold nothing yet.

        Args:
            prefetcher: Of this process.
            tier: Likewise.
            make_key: The key of an identifier; None where it has none.
        """
        self._prefetcher = prefetcher
        self._tier = tier
        self._make_key = make_key
        self._incarnation = secrets.token_hex(8)
        self._scheduler_tier: TierId | None = None
        self._shares = True
        self._held: dict[str, _Held] = {}  # by identifier
        self._identifiers: dict[int, str] = {}  # by ticket
        self._ready: dict[int, str] = {}  # ticket to checksum
        self._failed: list[int] = []

    def __len__(self) -> int:
        return len(self._held) + len(self._identifiers)

    def follow(self, plan: StepPlan) -> StepPlan:
        """Obey one plan.

        Returns:
            The plan as this rank should execute it: its loads name this rank's own files. One
            that is not pinned here keeps the scheduler's path, which is not there either: it is
            rescued from the bucket.
        """
        orders = plan.ranks
        if orders is None:
            return plan
        if orders.tier != self._scheduler_tier:
            self._scheduler_tier = orders.tier
            self._shares = _sees(orders.tier, self._tier)
        if self._shares:
            return plan
        self._obey(orders)
        return replace(plan, loads=[self._own(load) for load in plan.loads])

    def report(self, report: WorkerReport, rank_of: Callable[[], int]) -> None:
        """Add what the scheduler should know, once it has asked."""
        if self._scheduler_tier is None:
            return
        rank = rank_of()
        report.present[rank] = RankStatus(self._incarnation, self._shares)
        if self._shares:
            return
        self._take_news()
        for ticket, checksum in self._ready.items():
            report.ready[ticket] = {rank: checksum}
        for ticket in self._failed:
            report.failed[ticket] = {rank}
        self._ready, self._failed = {}, []

    def _own(self, load: Load) -> Load:
        """The same load from this rank's file, which may have another header."""
        held = self._held.get(load.identifier)
        if held is None or held.pin is None or held.pin.header.checksum != load.checksum:
            return load
        return Load.of(load.identifier, held.pin)

    def _obey(self, orders: RankOrders) -> None:
        self._take_news()
        prefetcher = self._prefetcher
        pins = []
        for ticket in orders.release:
            held = self._held.pop(self._identifiers.pop(ticket, ""), None)
            if held is not None and held.pin is not None:
                pins.append(held.pin)
        prefetcher.release(pins)
        wants = []
        for order in orders.prepare:
            want = self._prepare(order)
            if want is not None:
                wants.append(want)
        prefetcher.submit(wants)
        unwanted = [self._held.get(self._identifiers.get(ticket, "")) for ticket in orders.demoted]
        prefetcher.demote([held.key for held in unwanted if held is not None and held.pin is None])

    def _prepare(self, order: Prepare) -> FetchRequest | None:
        """Note one order; what it takes to fulfil it, None where that is nothing."""
        key = self._make_key(order.identifier)
        if key is None:  # cannot be: the scheduler made a key of it too
            self._failed.append(order.ticket)
            return None
        held = self._held.get(order.identifier)
        if held is None:
            held = self._held[order.identifier] = _Held(order.ticket, key, order.rows)
        elif held.ticket != order.ticket:  # the release was lost with its plan
            del self._identifiers[held.ticket]
            held.ticket, held.rows = order.ticket, order.rows
        self._identifiers[order.ticket] = order.identifier
        if held.pin is not None and held.pin.header.shape.rows == held.rows:
            self._ready[order.ticket] = held.pin.header.checksum
            return None
        return FetchRequest(key, order.modality, order.rows, order.priority)

    def _take_news(self) -> None:
        prefetcher = self._prefetcher
        if not prefetcher.has_news:
            return
        unwanted = []
        for fetched in prefetcher.drain():
            unwanted += self._arrived(fetched)
        prefetcher.release(unwanted)

    def _arrived(self, fetched: FetchResult) -> list[Pin]:
        """Keep one result, or tell that it failed; what of it is to be given back."""
        pin = fetched.pin
        held = self._held.get(fetched.want.key.identifier)
        if held is None or held.pin is not None:
            return [] if pin is None else [pin]
        if (
            fetched.outcome is FetchOutcome.READY
            and pin is not None
            and fetched.want.rows == held.rows
        ):
            held.pin = pin
            self._ready[held.ticket] = pin.header.checksum
            return []
        # Also where an older order for other rows has just ended: the prefetcher did not start
        # another fetch of the same key meanwhile.
        self._failed.append(held.ticket)
        del self._held[fetched.want.key.identifier]
        del self._identifiers[held.ticket]
        return [] if pin is None else [pin]


def _sees(scheduler_tier: TierId, tier: Tier) -> bool:
    """Whether the scheduler's pins lie in our own tier, under the paths that it names."""
    try:
        return (
            scheduler_tier.host == _host()
            and os.access(scheduler_tier.folder, os.R_OK | os.X_OK)
            and os.path.samefile(Path(scheduler_tier.folder).parent, tier.pins.folder().parent)
        )
    except (OSError, TierError):
        return False

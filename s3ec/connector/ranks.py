# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of ranks that cannot read the scheduler's pins.

Such a rank fetches for itself into the tier of its own node. Orders go out with the plan of a
step, answers come back with the report of a later one. Nothing is granted before every rank has
said which kind it is, and every one of that kind has said that it holds the embedding.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field

from s3ec.connector.plan import Prepare, Presence, RankOrders, TierMark, WorkerReport
from s3ec.prefetch import Priority

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Heard:
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
    """Bookkeeping in memory, for the scheduler's thread."""

    def __init__(
        self, count: int, tier: TierMark, *, steps_in_flight: int, heard_without_tokens: bool
    ) -> None:
        """Know nobody yet.

        Args:
            count: Workers that load.
            tier: Tells a rank whether it sees our pins.
            steps_in_flight: Steps that can be scheduled before the first of them has ended.
            heard_without_tokens: Whether workers get plans and report in steps without tokens.
        """
        self._count = count
        self._tier = tier
        self._steps_in_flight = steps_in_flight
        self._heard_without_tokens = heard_without_tokens
        self._present: dict[int, Presence] = {}
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

    def forget(self, identifier: str) -> None:
        """No request waits for it at present."""
        ticket = self._tickets.get(identifier)
        if ticket is not None:
            self._out.forget.append(ticket)

    def release(self, identifier: str) -> None:
        """The pins are no longer needed."""
        ticket = self._tickets.pop(identifier, None)
        if ticket is not None:
            del self._orders[ticket]
            self._out.release.append(ticket)
            self._out.prepare = [each for each in self._out.prepare if each.ticket != ticket]

    def take_orders(self, *, scheduled_tokens: int) -> RankOrders | None:
        """What this step's plan should carry; None where no worker would see it."""
        if not scheduled_tokens and not self._heard_without_tokens:
            self._silent_steps += 1
            return None
        self._silent_steps = 0
        out, self._out = self._out, RankOrders(self._tier)
        return out

    def hear(self, report: WorkerReport) -> Heard:
        """Take a report's part about ranks."""
        heard = Heard(moved=self._meet(report.present))
        remote = self._remote
        if heard.moved or not remote:
            return heard
        for ticket, ranks in report.failed.items():
            order = self._orders.get(ticket)
            if order is not None and ranks & remote:
                heard.failed.append(order.identifier)
        for ticket, checksums in report.ready.items():
            order = self._orders.get(ticket)
            if order is not None:
                order.ready.update(checksums)
                heard.ready.append(order.identifier)
        return heard

    def _meet(self, present: dict[int, Presence]) -> bool:
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

# SPDX-License-Identifier: Apache-2.0
"""A rank's own pins, where it cannot read the scheduler's.

The pins live in this process's tier until the scheduler says that they are not needed any more,
or until the process ends.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from s3ec.connector.plan import (
    Load,
    Prepare,
    Presence,
    RankOrders,
    StepPlan,
    TierMark,
    WorkerReport,
)
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.node import Node
from s3ec.prefetch import Fetched, Outcome, Want
from s3ec.tier import Pin

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def tier_mark(node: Node) -> TierMark:
    """How other processes recognise this one's pins.

    Raises:
        TierError: The tier is closed, or its folder for pins cannot be made.
    """
    return TierMark(_host(), str(node.tier.pin_folder()))


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


class OwnPins:
    """Obeys the scheduler's orders to ranks. One thread: the model runner's.

    Does nothing at all while plans carry no such orders, or when this rank sees the scheduler's
    pins. Fetching happens on this process's prefetcher, whose results only this object drains.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._incarnation = secrets.token_hex(8)
        self._mark: TierMark | None = None
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
        if orders.tier != self._mark:
            self._mark = orders.tier
            self._shares = _sees(orders.tier, self._node)
        if self._shares:
            return plan
        self._obey(orders)
        return replace(plan, loads=[self._own(load) for load in plan.loads])

    def report(self, report: WorkerReport, rank_of: Callable[[], int]) -> None:
        """Add what the scheduler should know, once it has asked."""
        if self._mark is None:
            return
        rank = rank_of()
        report.present[rank] = Presence(self._incarnation, self._shares)
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
        prefetcher = self._node.prefetcher
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
        unwanted = [self._held.get(self._identifiers.get(ticket, "")) for ticket in orders.forget]
        prefetcher.forget([held.key for held in unwanted if held is not None and held.pin is None])

    def _prepare(self, order: Prepare) -> Want | None:
        """Note one order; what it takes to fulfil it, None where that is nothing."""
        key = self._node.naming.make_key(order.identifier)
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
        return Want(key, order.modality, order.rows, order.priority)

    def _take_news(self) -> None:
        prefetcher = self._node.prefetcher
        if not prefetcher.has_news:
            return
        unwanted = []
        for fetched in prefetcher.drain():
            unwanted += self._arrived(fetched)
        prefetcher.release(unwanted)

    def _arrived(self, fetched: Fetched) -> list[Pin]:
        """Keep one result, or tell that it failed; what of it is to be given back."""
        pin = fetched.pin
        held = self._held.get(fetched.want.key.identifier)
        if held is None or held.pin is not None:
            return [] if pin is None else [pin]
        if fetched.outcome is Outcome.READY and pin is not None and fetched.want.rows == held.rows:
            held.pin = pin
            self._ready[held.ticket] = pin.header.checksum
            return []
        # Also where an older order for other rows has just ended: the prefetcher did not start
        # another fetch of the same key meanwhile.
        self._failed.append(held.ticket)
        del self._held[fetched.want.key.identifier]
        del self._identifiers[held.ticket]
        return [] if pin is None else [pin]


def _sees(mark: TierMark, node: Node) -> bool:
    """Whether the scheduler's pins lie in our own tier, under the paths that it names."""
    try:
        return (
            mark.host == _host()
            and os.access(mark.folder, os.R_OK | os.X_OK)
            and os.path.samefile(Path(mark.folder).parent, node.tier.pin_folder().parent)
        )
    except (OSError, TierError):
        return False

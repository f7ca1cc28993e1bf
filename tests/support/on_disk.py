# SPDX-License-Identifier: Apache-2.0
"""What lies in a tier's folder: looked at from outside, as ``s3ec tier`` and other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.runtime import Background
from s3ec.tier.evictor import Evictor, RunningTotal
from s3ec.tier.files import DiskErrors, Folders
from s3ec.tier.inspection import Inspection, complaints_about
from s3ec.tier.scan import TierScan, scan_tier
from s3ec.tier.tier import Tier


class Asleep(Background):
    """In place of an evictor's thread: it never works."""

    def wake(self) -> None:
        """Nothing is woken."""


class ByHand(Background):
    """In place of a thread: its work is done when the test says so.

    Attributes:
        made: All of them, in order.
        is_due: It was woken since its last turn.
    """

    made: ClassVar[list[ByHand]] = []

    def __init__(self, name: str, work: Callable[[Callable[[], None]], float]) -> None:
        super().__init__(name, work)
        self.turn = lambda: self._do(work)
        self.is_due = False
        self.made.append(self)

    def wake(self) -> None:
        self.is_due = True

    def _do(self, work: Callable[[Callable[[], None]], float]) -> float:
        """One turn, in the calling thread; answers how long it would rest."""
        self.is_due = False
        return work(lambda: None)


def found_in(cache_dir: Path) -> Inspection:
    """The folder as engines left it: no tier is opened, which would sweep."""
    return Inspection(Folders(cache_dir))


def usage_of(tier: Tier | Inspection) -> TierScan:
    """Count what the folder holds; walks it."""
    return scan_tier(tier.folders)


def audit_of(tier: Tier | Inspection) -> list[str]:
    """Audit everything, checksums included; empty when all is well."""
    return complaints_about(tier.folders)


def running_total(tier: Tier) -> int:
    """What all processes believe to be there; no walk."""
    return RunningTotal(tier.folders).read() or 0


def evict(tier: Tier, key: Key) -> None:
    """Drop the local copy, as the eviction of another process may at any time."""
    for path in tier.folders.objects.glob(f"*/{key.name}"):
        path.unlink(missing_ok=True)


def make_room(
    tier: Tier,
    incoming_bytes: int = 0,
    *,
    budget_bytes: int = 1 << 30,
    min_free_bytes: int = 0,
    clock: Callable[[], float] = time.time,
    counters: Counters | None = None,
) -> int:
    """One round of eviction by another process with these limits; answers the bytes freed.

    0 where the disk refused.
    """
    counters = counters or Counters()
    evictor = Evictor(
        tier.folders,
        DiskErrors(tier.folders.root, Counters()),
        counters,
        clock=clock,
        budget_bytes=budget_bytes,
        min_free_bytes=min_free_bytes,
    )
    try:
        return evictor.make_room(incoming_bytes)
    except (OSError, TierError):
        return 0

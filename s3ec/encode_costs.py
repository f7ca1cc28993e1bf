# SPDX-License-Identifier: Apache-2.0
"""What encoding costs on this machine, learned in the running engine.

The worker measures, see ``connector/worker.py``. Where scheduler and worker are one process they
share one ``EncodeCosts``. Else the scheduler learns from the workers' reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Before anything was encoded: for one item, whatever its size.
PRIOR_ENCODE_S = 0.05
# Weight of a new sample among the earlier ones of its kind.
_NEW_WEIGHT = 0.2
# Encodes that only teach what encoding costs, for each kind.
_MOST_EXPLORED = 3
# An engine that has encoded nothing of a kind for so long, and for so many requests, does so again.
# Fewer requests would see it in what one in a hundred takes.
_STALE_S = 600.0
_STALE_REQUESTS = 300
# A sample counts for at most so many times what was learned: a hiccup says nothing.
_MOST_TIMES = 5.0
# Modalities are few, and sizes are powers of two.
_MOST_KINDS = 256

_Kind = tuple[str, int]


@dataclass(slots=True)
class _Unseen:
    """Since a kind was last encoded: when that was, the last question, and how many requests."""

    began_s: float
    asked_s: float = -math.inf
    requests: int = 0


class EncodeCosts:
    """What encoding costs, by modality and size: seconds per row, learned from the worker.

    Sizes fall into classes by powers of two. A class that was never seen takes the nearest one of
    its modality; a modality that was never seen takes PRIOR_ENCODE_S per item.

    Safe to use from any thread without a lock: what threads share is replaced and not changed,
    but for single values. A sample may be lost where two come at once.
    """

    def __init__(self, known: Mapping[tuple[str, int], float] | None = None) -> None:
        """Start with some costs: seconds per row, by modality and bits of the number of rows."""
        self._row_s: dict[_Kind, float] = dict(known or {})
        # The first sample of a process holds compilation and lazy loading.
        self._seen: set[_Kind] = set()
        self._explored: dict[_Kind, int] = {}
        self._unseen: dict[_Kind, _Unseen] = {}
        # To be learned anew: the next sample counts for all before it.
        self._stale: set[_Kind] = set()

    def add(self, modality: str, rows: int, seconds: float, *, items: int = 1) -> None:
        """The encoder took so long for so many rows, of one item or of several alike."""
        if rows < items or items <= 0 or not 0.0 < seconds < math.inf:
            return
        kind = (modality, (rows // items).bit_length())
        self._unseen.pop(kind, None)
        row_s = seconds / rows
        known = self._row_s.get(kind)
        if kind not in self._seen:
            self._seen.add(kind)
            self._explored.pop(kind, None)  # all of those may have been in this one sample
            return
        if known is None:
            if len(self._row_s) < _MOST_KINDS:
                self._row_s = {**self._row_s, kind: row_s}
        else:
            weight = 1.0 if kind in self._stale else _NEW_WEIGHT
            row_s = min(row_s, _MOST_TIMES * known)
            self._row_s[kind] = known + weight * (row_s - known)
        self._stale.discard(kind)

    def known_s(self, modality: str, rows: int) -> float | None:
        """What one item of this size is expected to take; None where nothing like it was seen."""
        size = rows.bit_length()
        learned = self._row_s
        row_s = learned.get((modality, size))
        if row_s is None:
            near = [
                (abs(other - size), value)
                for (name, other), value in learned.items()
                if name == modality
            ]
            if not near:
                return None
            row_s = min(near)[1]
        return row_s * rows

    def cost_s(self, modality: str, rows: int) -> float:
        """The same, with a first guess where nothing is known."""
        known_s = self.known_s(modality, rows)
        return PRIOR_ENCODE_S if known_s is None else known_s

    def explore(self, modality: str, rows: int, now: float = 0.0, *, in_doubt: bool = True) -> bool:
        """Whether an item should be encoded so that its cost becomes known.

        A few times for each kind: the first sample does not count, and what has been encoded for
        this is reported some steps later, if at all. And once where a known kind was not encoded
        for ten minutes: what was learned wrong would stay so for ever.

        Args:
            now: Monotonic seconds.
            in_doubt: Another cost could change an answer.
        """
        kind = (modality, rows.bit_length())
        if kind in self._row_s:
            since = self._unseen.setdefault(kind, _Unseen(now))
            if now != since.asked_s:  # not one more item of the same request
                since.asked_s = now
                since.requests += 1
            if not in_doubt or now - since.began_s < _STALE_S or since.requests < _STALE_REQUESTS:
                return False
            del self._unseen[kind]
            self._stale.add(kind)
            return True
        explored = self._explored.get(kind, 0)
        if explored >= _MOST_EXPLORED:
            return False
        self._explored[kind] = explored + 1
        return True

    @property
    def document(self) -> dict[str, float]:
        """What was learned: seconds per row by ``modality:size class``."""
        return {f"{modality}:{size}": row_s for (modality, size), row_s in self._row_s.items()}

# SPDX-License-Identifier: Apache-2.0
"""The cost of encoding on this machine, learned in the running engine.

The worker measures, see ``connector/worker.py``. If scheduler and worker are one process, they
share one ``EncodeCosts``. Else the scheduler learns from the workers' reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# The estimate before the first encode: for one item, whatever its size.
PRIOR_ENCODE_S = 0.05
# Weight of a new sample among the earlier ones of its kind.
_NEW_WEIGHT = 0.2
# Encodes of each kind that only serve to measure the cost.
_MOST_EXPLORED = 3
# A kind that was not encoded for this long, and for this many requests, is measured again. With
# fewer requests the extra encode would show in their 99th percentile.
_STALE_S = 600.0
_STALE_REQUESTS = 300
# A sample counts as at most this many times the learned value: an outlier says nothing.
_MOST_TIMES = 5.0
# Modalities are few, and sizes are powers of two.
_MOST_KINDS = 256

_Kind = tuple[str, int]


@dataclass(slots=True)
class _Unseen:
    """A kind that is not encoded: since when, the last request for it, and their number."""

    began_s: float
    asked_s: float = -math.inf
    requests: int = 0


class EncodeCosts:
    """The cost of encoding, by modality and size: seconds per row, learned from the worker.

    Sizes fall into classes by powers of two. A class that was never seen takes the nearest one of
    its modality; a modality that was never seen takes PRIOR_ENCODE_S per item.

    Safe to use from any thread without a lock: shared data is replaced, not changed, except single
    values. Of two concurrent samples one may be lost.
    """

    def __init__(self, known: Mapping[tuple[str, int], float] | None = None) -> None:
        """Start with some costs: seconds per row, by modality and bits of the number of rows."""
        self._row_s: dict[_Kind, float] = dict(known or {})
        # The first sample of a process holds compilation and lazy loading.
        self._seen: set[_Kind] = set()
        self._explored: dict[_Kind, int] = {}
        self._unseen: dict[_Kind, _Unseen] = {}
        # Kinds to learn again: the next sample replaces all before it.
        self._stale: set[_Kind] = set()

    def add(self, modality: str, rows: int, seconds: float, *, items: int = 1) -> None:
        """Add a sample: seconds of the encoder for rows of one item, or of several alike."""
        if rows < items or items <= 0 or not 0.0 < seconds < math.inf:
            return
        kind = (modality, (rows // items).bit_length())
        self._unseen.pop(kind, None)
        row_s = seconds / rows
        known = self._row_s.get(kind)
        if kind not in self._seen:
            self._seen.add(kind)
            self._explored.pop(kind, None)  # this one sample may have used up all of them
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
        """Return the expected seconds for one item of this size; None without any sample."""
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
        """As known_s, but with a first guess in place of None."""
        known_s = self.known_s(modality, rows)
        return PRIOR_ENCODE_S if known_s is None else known_s

    def explore(self, modality: str, rows: int, now: float = 0.0, *, in_doubt: bool = True) -> bool:
        """Return True if an item should be encoded to measure its cost.

        A few times for each kind: the first sample does not count, and such an encode is reported
        some steps later, if at all. Also once after a known kind was not encoded for ten minutes:
        else a wrong estimate would stay for ever.

        Args:
            now: Monotonic seconds.
            in_doubt: True if another cost could change a decision.
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
        """The learned costs: seconds per row by ``modality:size class``."""
        return {f"{modality}:{size}": row_s for (modality, size), row_s in self._row_s.items()}

# SPDX-License-Identifier: Apache-2.0
"""The rows of all deltas that are in no base, merged, in whatever order they came."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from s3ec.index.rows import Rows, concat
from s3ec.index.segment import Segment


class Overlay:
    """One row per key, and of which delta it is: 46 bytes a row. Immutable.

    Of two rows for a key the later ``time_s`` counts, and where they are equal that of the later
    ULID. So what a delta adds depends on no order in which deltas come, and no delta has to be
    read again when one with an older name appears.

    Attributes:
        ulids: Of all deltas in it, those too whose rows all lost.
        segment: For lookups; None where there are no rows.
    """

    __slots__ = ("_names", "_rows", "_sources", "segment", "ulids")

    def __init__(
        self,
        names: list[str] | None = None,
        rows: Rows | None = None,
        sources: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Empty; the arguments are for ``plus``.

        Args:
            names: ULIDs in rising order.
            rows: Sorted by digest.
            sources: For each row the place of its delta in ``names``.
        """
        self._names = names or []
        self._rows = Rows.empty() if rows is None else rows
        self._sources = np.empty(0, np.uint32) if sources is None else sources
        self.ulids = frozenset(self._names)
        self.segment = Segment.of(self._rows) if len(self._rows) else None

    def plus(self, deltas: Mapping[str, Rows]) -> Overlay:
        """These too, whatever their age; reads the rows here and theirs, nothing else.

        Args:
            deltas: ULID to rows; none that is here already.
        """
        names = sorted([*self._names, *deltas])
        places = {name: place for place, name in enumerate(names)}
        moved = np.array([places[name] for name in self._names], np.uint32)
        added = sorted(deltas)
        sources = np.concatenate(
            [
                moved[self._sources],
                *(np.full(len(deltas[name]), places[name], np.uint32) for name in added),
            ]
        )
        rows = concat([self._rows, *(deltas[name] for name in added)])
        if self._names and added and added[0] < self._names[-1]:
            # Of rows that are equally late the last one counts: so they have to be in order.
            order = np.argsort(sources, kind="stable")
            rows, sources = rows.select(order), sources[order]
        stay = rows.winners()
        return Overlay(names, rows.select(stay), sources[stay])

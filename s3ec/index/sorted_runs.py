# SPDX-License-Identifier: Apache-2.0
"""More rows than fit into memory: sorted files in a folder, read back range by range."""

from __future__ import annotations

import mmap
from pathlib import Path

from s3ec.errors import TierError
from s3ec.index.rows import Rows, merge
from s3ec.index.segment import Segment, encode_segment

# Rows in memory before a file is written: 42 bytes each, three times while they are sorted.
ROWS_PER_RUN = 2**19


class SortedRuns:
    """Collects rows of any order and number; later ones win over earlier ones of equal time.

    Args:
        folder: Of its own; whoever made it deletes it.
        namespace: Of the rows.

    Attributes:
        added: Rows that were added so far.
    """

    def __init__(self, folder: Path, namespace: str) -> None:
        self.added = 0
        self._folder = folder
        self._namespace = namespace
        self._waiting: list[Rows] = []
        self._waiting_rows = 0
        self._runs: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Take some rows; blocking, since it may sort and write a file.

        Raises:
            TierError: The disk did not take it.
        """
        self.added += len(rows)
        self._waiting.append(rows)
        self._waiting_rows += len(rows)
        if self._waiting_rows >= ROWS_PER_RUN:
            self._spill()

    def between(self, first: int, last: int) -> list[Rows]:
        """What was added of one range of leading bytes, in parts for ``merge``, in order."""
        self._sort_waiting()
        return [rows.between(first, last) for rows in [*self._runs, *self._waiting]]

    def sorted_between(self, first: int, last: int) -> Rows:
        """The same, merged."""
        return merge(self.between(first, last), keep_tombstones=True)

    def _sort_waiting(self) -> None:
        if len(self._waiting) == 1 and self._waiting[0].is_sorted():
            return
        self._waiting = [merge(self._waiting, keep_tombstones=True)] if self._waiting else []

    def _spill(self) -> None:
        self._sort_waiting()
        path = self._folder / f"run-{len(self._runs)}"
        try:
            with path.open("xb") as file:
                file.writelines(encode_segment(self._waiting[0], self._namespace))
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as exc:
            raise TierError(f"cannot write {path}: {exc}") from exc
        # The rows are views: the mapping lives as long as they do.
        self._runs.append(Segment.parse(memoryview(mapped), self._namespace).rows())
        self._waiting, self._waiting_rows = [], 0

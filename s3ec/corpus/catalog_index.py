# SPDX-License-Identifier: Apache-2.0
"""A catalogue in memory: looked up by file, document and identifier, without a lock or a request.

A row is kept as its columns, and each way to look it up as a sorted hash with the row's number: in
all some 500 bytes for each row. New rows become a further level, and a level that is not much
smaller than the one before is merged with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from s3ec.corpus.catalog_file import PART, CatalogRow, newest, row_at

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

_KEYS = ("sha256", "document", "identifier")
_BATCH = 2**16
# A level with at least this share of the rows of the one before is merged with it.
_SHARE = 0.25


class CatalogIndex:
    """Rows by sha256, document and identifier. Immutable, so any thread may look up."""

    __slots__ = ("_levels", "nbytes")

    def __init__(self, levels: Sequence[_Level] = ()) -> None:
        """Use from_table; without levels it is empty."""
        self._levels = tuple(levels)
        self.nbytes = sum(level.nbytes for level in levels)

    @classmethod
    def from_table(cls, table: pa.Table) -> CatalogIndex:
        """Of a table as read_table returns it, about 2 s for a million rows."""
        return cls([_Level(table)]) if len(table) else cls()

    def with_rows(self, table: pa.Table) -> CatalogIndex:
        """This one and further rows, which have their ``part``."""
        if not len(table):
            return self
        levels = [*(level.table for level in self._levels), newest([table])]
        while len(levels) > 1 and len(levels[-1]) >= _SHARE * len(levels[-2]):
            levels[-2:] = [newest(levels[-2:])]
        kept = {id(level.table): level for level in self._levels}
        return CatalogIndex([kept.get(id(each)) or _Level(each) for each in levels])

    def __len__(self) -> int:
        """How many rows are in memory; of one that was replaced both may be."""
        return sum(len(level.table) for level in self._levels)

    def by_sha256(self, sha256: str) -> CatalogRow | None:
        """The row of a file's content; of several the one that was stored last."""
        found = self._newest("sha256", sha256)
        return max(found, key=lambda row: row.stored_s, default=None)

    def by_identifier(self, identifier: str) -> CatalogRow | None:
        """The row of an embedding; of several the one that was stored last."""
        found = self._newest("identifier", identifier)
        return max(found, key=lambda row: row.stored_s, default=None)

    def by_document(self, document: str, page: int | None = None) -> list[CatalogRow]:
        """The rows of a document by page; with ``page`` only those of that page."""
        last: dict[tuple[int | None, str], tuple[str, CatalogRow]] = {}
        for part, row in self._rows("document", document):
            key = row.page, row.modality
            is_wanted = page is None or row.page == page
            if is_wanted and (key not in last or part > last[key][0]):
                last[key] = part, row
        rows = [row for _, row in last.values()]
        return sorted(rows, key=lambda row: (row.page or 0, row.modality))

    def _newest(self, column: str, text: str) -> list[CatalogRow]:
        rows = [row for _, row in self._rows(column, text)]
        if len(self._levels) < 2:
            return rows
        # A later level may hold what replaced a row of an earlier one.
        return [row for row in rows if row in self.by_document(row.document, row.page)]

    def _rows(self, column: str, text: str) -> Iterator[tuple[str, CatalogRow]]:
        for level in self._levels:
            yield from level.find(column, text)


class _Level:
    """Rows that no one changes, each key once."""

    __slots__ = ("_hashes", "_parts", "nbytes", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()
        self._parts = PART in table.schema.names
        # Python's own, which is keyed: nobody can choose texts that all have one hash.
        self._hashes = {name: _sorted_hashes(self.table.column(name)) for name in _KEYS}
        arrays = [array for pair in self._hashes.values() for array in pair]
        self.nbytes = self.table.nbytes + sum(array.nbytes for array in arrays)

    def find(self, column: str, text: str) -> Iterator[tuple[str, CatalogRow]]:
        hashes, numbers = self._hashes[column]
        wanted = hash(text)
        first = int(np.searchsorted(hashes, wanted))
        texts = self.table.column(column)
        while first < len(hashes) and hashes[first] == wanted:
            number = int(numbers[first])
            first += 1
            if texts[number].as_py() == text:
                part = self.table.column(PART)[number].as_py() if self._parts else ""
                yield part, row_at(self.table, number)


def _sorted_hashes(
    column: pa.ChunkedArray,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Hashes in rising order, and the number of each one's row."""
    hashes = np.empty(len(column), np.int64)
    for start in range(0, len(column), _BATCH):
        some = column.slice(start, _BATCH).to_pylist()
        hashes[start : start + len(some)] = np.fromiter(map(hash, some), np.int64, len(some))
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order.astype(np.uint32)

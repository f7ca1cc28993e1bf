# SPDX-License-Identifier: Apache-2.0
"""A catalogue in memory: looked up by file, document and identifier, without a lock or a request.

A row is kept as its columns, and each way to look it up as a sorted hash with the row's number: in
all some 400 bytes for each row. New rows become a further level, and a level that is not much
smaller than the one before is merged with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from s3ec.corpus.catalog_file import KEY, PART, VALUES, CatalogRow, newest, to_row

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
        """Of a table as read_table returns it; about 1 s for a million rows."""
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
        return max(self._rows("sha256", sha256), key=lambda row: row.stored_s, default=None)

    def by_identifier(self, identifier: str) -> CatalogRow | None:
        """The row of an embedding; of several the one that was stored last."""
        return max(self._rows("identifier", identifier), key=lambda row: row.stored_s, default=None)

    def by_document(self, document: str, page: int | None = None) -> list[CatalogRow]:
        """The rows of a document by page; with ``page`` only those of that page."""
        rows = [row for row in self._rows("document", document) if page in (None, row.page)]
        return sorted(rows, key=lambda row: (row.page or 0, row.modality))

    def _rows(self, column: str, text: str) -> Iterator[CatalogRow]:
        for level in self._levels:
            for number in level.find(column, text):
                # Another level may hold what replaced it.
                others = (other for other in self._levels if other is not level)
                key, part = level.key(number), level.part(number)
                if not any(other.has_newer(key, part) for other in others):
                    yield level.row(number)


class _Level:
    """Rows that no one changes, each key once."""

    __slots__ = ("_columns", "_hashes", "_part", "nbytes", "table")

    def __init__(self, table: pa.Table) -> None:
        import pyarrow as pa

        self.table = table.combine_chunks()
        columns = {name: self.table.column(name).chunk(0) for name in table.schema.names}
        columns["time"] = columns["time"].view(pa.int64())
        self._columns = columns
        self._part = columns.get(PART)
        # Python's own, which is keyed: nobody can choose texts that all have one hash.
        self._hashes = {name: _sorted_hashes(len(table), columns[name]) for name in _KEYS}
        self._hashes["key"] = _sorted_hashes(len(table), *(columns[name] for name in KEY))
        arrays = [array for pair in self._hashes.values() for array in pair]
        self.nbytes = self.table.nbytes + sum(array.nbytes for array in arrays)

    def find(self, column: str, text: str) -> Iterator[int]:
        """Numbers of the rows that have this text there."""
        texts = self._columns[column]
        return (n for n in self._candidates(column, hash(text)) if texts[n].as_py() == text)

    def has_newer(self, key: tuple[Any, ...], part: str) -> bool:
        """Whether a row of this key is here that is of a later part."""
        numbers = self._candidates("key", hash(key))
        return any(self.key(n) == key and self.part(n) > part for n in numbers)

    def key(self, number: int) -> tuple[Any, ...]:
        """Document, page and modality of a row."""
        return tuple(self._columns[name][number].as_py() for name in KEY)

    def part(self, number: int) -> str:
        """The part of a row; empty in a table without."""
        return "" if self._part is None else self._part[number].as_py()

    def row(self, number: int) -> CatalogRow:
        """A row."""
        return to_row([self._columns[name][number].as_py() for name in VALUES])

    def _candidates(self, name: str, wanted: int) -> Iterator[int]:
        hashes, numbers = self._hashes[name]
        at = int(np.searchsorted(hashes, wanted))
        while at < len(hashes) and hashes[at] == wanted:
            yield int(numbers[at])
            at += 1


def _sorted_hashes(
    count: int, *columns: pa.Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Hashes of one or more columns in rising order, and the number of each one's row."""
    hashes = np.empty(count, np.int64)
    for start in range(0, count, _BATCH):
        some: Iterable[Any] = columns[0].slice(start, _BATCH).to_pylist()
        if len(columns) > 1:
            some = zip(*(each.slice(start, _BATCH).to_pylist() for each in columns), strict=True)
        end = min(start + _BATCH, count)
        hashes[start:end] = np.fromiter(map(hash, some), np.int64, end - start)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order.astype(np.uint32)

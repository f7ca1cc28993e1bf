# SPDX-License-Identifier: Apache-2.0
"""A catalogue in memory: looked up by file, document and identifier, without a lock or a request.

A row is kept as its columns, and each lookup key as a sorted hash with the row's number: in all
some 400 bytes per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from s3ec.corpus.catalog_file import VALUES, CatalogRow, to_row

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

_KEYS = ("sha256", "document", "identifier")
_BATCH = 2**16


class CatalogIndex:
    """Rows by sha256, document and identifier. Immutable, so any thread may look up."""

    __slots__ = ("_columns", "_count", "_hashes")

    @classmethod
    def from_table(cls, table: pa.Table) -> CatalogIndex:
        """Index a table that read_table has returned; about 1 s for a million rows."""
        return cls(table)

    def __init__(self, table: pa.Table | None = None) -> None:
        """Use from_table; without a table it is empty."""
        self._count = 0 if table is None else len(table)
        self._columns: dict[str, pa.Array] = {}
        if table is not None and len(table):
            import pyarrow as pa

            whole = table.combine_chunks()
            self._columns = {name: whole.column(name).chunk(0) for name in VALUES}
            self._columns["time"] = self._columns["time"].view(pa.int64())
        # Python's own hash, which is keyed: no client can choose texts that all have one hash.
        self._hashes = {name: _sorted_hashes(self._columns.get(name)) for name in _KEYS}

    def __len__(self) -> int:
        return self._count

    def by_sha256(self, sha256: str) -> CatalogRow | None:
        """The row of a file's content; of several rows the one that was stored last."""
        return max(self._rows("sha256", sha256), key=lambda row: row.stored_s, default=None)

    def by_identifier(self, identifier: str) -> CatalogRow | None:
        """The row of an embedding; of several rows the one that was stored last."""
        return max(self._rows("identifier", identifier), key=lambda row: row.stored_s, default=None)

    def by_document(self, document: str, page: int | None = None) -> list[CatalogRow]:
        """The rows of a document by page; with ``page`` only those of that page."""
        rows = [row for row in self._rows("document", document) if page in (None, row.page)]
        return sorted(rows, key=lambda row: (row.page or 0, row.modality))

    def _rows(self, column: str, text: str) -> Iterator[CatalogRow]:
        hashes, numbers = self._hashes[column]
        wanted = hash(text)
        at = int(np.searchsorted(hashes, wanted))
        while at < len(hashes) and hashes[at] == wanted:
            number = int(numbers[at])
            if self._columns[column][number].as_py() == text:
                yield to_row([self._columns[name][number].as_py() for name in VALUES])
            at += 1


def _sorted_hashes(
    column: pa.Array | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Hashes of a column in rising order, and the number of each one's row."""
    if column is None:
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    hashes = np.empty(len(column), np.int64)
    for start in range(0, len(column), _BATCH):
        texts = column.slice(start, _BATCH).to_pylist()
        hashes[start : start + len(texts)] = np.fromiter(map(hash, texts), np.int64, len(texts))
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order.astype(np.uint32)

# SPDX-License-Identifier: Apache-2.0
"""Facts of many entries as columns, and the rule by which newer ones win.

No Python object per key: ten million rows are nine arrays of 42 bytes a row together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from s3ec.codec import Shape

Array: TypeAlias = npt.NDArray[Any]
Selection: TypeAlias = slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]

# Column -> numpy type, by falling item size: so each starts aligned without a gap in a file.
COLUMNS = {
    "digest_hi": "<u8",
    "digest_lo": "<u8",
    "nbytes": "<u8",
    "rows": "<u4",
    "width": "<u4",
    "checksum": "<u4",
    "time_s": "<u4",
    "dtype": "u1",
    "deleted": "u1",
}
ROW_BYTES = sum(np.dtype(one).itemsize for one in COLUMNS.values())
# Stored number of a dtype -> torch name; numbers that no version wrote count as unknown.
DTYPES = ("", "bfloat16", "float16", "float32")
_DTYPE_NAMES = DTYPES + ("",) * (256 - len(DTYPES))
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}


class EntryInfo(NamedTuple):
    """What the index says of one entry; 0 and "" mean unknown.

    Attributes:
        nbytes: Size of the whole object.
        rows: Embeddings.
        width: Values per embedding.
        dtype: torch name, as in codec.Shape.
        checksum: The first 4 bytes of the tensor's xxh3-128, as a big-endian number.
        time_s: When it was stored, Unix seconds.
    """

    nbytes: int = 0
    rows: int = 0
    width: int = 0
    dtype: str = ""
    checksum: int = 0
    time_s: int = 0

    def confirms(self, shape: Shape) -> bool:
        """Whether exactly this shape is known here."""
        return (self.rows, self.width, self.dtype) == (shape.rows, shape.width, shape.dtype)

    def contradicts(self, shape: Shape) -> bool:
        """Whether what is known here rules this shape out."""
        return (
            self.rows not in (0, shape.rows)
            or self.width not in (0, shape.width)
            or self.dtype not in ("", shape.dtype)
        )


class Tombstone(NamedTuple):
    """The entry was deleted at this time, Unix seconds."""

    time_s: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of equal length, little-endian; see COLUMNS for their types.

    The digest is two numbers, its halves read big-endian. ``deleted`` is 1 for a tombstone.
    Arrays may be views of a file or a blob: nobody writes to them.
    """

    digest_hi: Array
    digest_lo: Array
    nbytes: Array
    rows: Array
    width: Array
    checksum: Array
    time_s: Array
    dtype: Array
    deleted: Array

    @classmethod
    def empty(cls) -> Rows:
        """No rows."""
        return cls(**{name: np.empty(0, kind) for name, kind in COLUMNS.items()})

    @classmethod
    def of_digests(cls, hi: Array, lo: Array, **columns: Array) -> Rows:
        """Rows of which only some columns are known; the others become 0.

        Args:
            hi: First halves of the digests, shape (n,).
            lo: Second halves, shape (n,).
            columns: Others of COLUMNS, shape (n,).
        """
        given = {"digest_hi": hi, "digest_lo": lo, **columns}
        return cls(
            **{
                name: np.asarray(given[name], kind) if name in given else np.zeros(len(hi), kind)
                for name, kind in COLUMNS.items()
            }
        )

    @classmethod
    def from_facts(cls, items: Sequence[tuple[bytes, EntryInfo | Tombstone]]) -> Rows:
        """Rows of (digest, what is known) in the given order; about 1 us an item.

        A number that its column cannot hold counts as unknown. Digests have 16 bytes.
        """
        halves = np.frombuffer(b"".join(digest for digest, _ in items), ">u8").reshape(-1, 2)
        facts = [EntryInfo(time_s=f.time_s) if isinstance(f, Tombstone) else f for _, f in items]
        return cls(
            halves[:, 0].astype("<u8"),
            halves[:, 1].astype("<u8"),
            _column("nbytes", [f.nbytes for f in facts]),
            _column("rows", [f.rows for f in facts]),
            _column("width", [f.width for f in facts]),
            _column("checksum", [f.checksum for f in facts]),
            _column("time_s", [f.time_s for f in facts]),
            _column("dtype", [_DTYPE_NUMBERS.get(f.dtype, 0) for f in facts]),
            _column("deleted", [isinstance(f, Tombstone) for _, f in items]),
        )

    def __len__(self) -> int:
        return len(self.digest_hi)

    def columns(self) -> dict[str, Array]:
        """All columns by name, in the order of COLUMNS."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def facts(self, row: int) -> EntryInfo:
        """What one row says; some microseconds."""
        return EntryInfo(
            int(self.nbytes[row]),
            int(self.rows[row]),
            int(self.width[row]),
            _DTYPE_NAMES[self.dtype[row]],
            int(self.checksum[row]),
            int(self.time_s[row]),
        )

    def digest(self, row: int) -> bytes:
        """The 16 bytes of one row's digest."""
        return struct.pack(">QQ", int(self.digest_hi[row]), int(self.digest_lo[row]))

    def select(self, which: Selection) -> Rows:
        """The rows of a slice (views), or of a mask or of positions (copies)."""
        return Rows(**{name: column[which] for name, column in self.columns().items()})

    def between(self, first: int, last: int) -> Rows:
        """Of sorted rows, views of those whose digest begins with a byte in ``first..last``."""
        start = np.searchsorted(self.digest_hi, np.uint64(first << 56))
        stop = len(self)
        if last < 255:
            stop = int(np.searchsorted(self.digest_hi, np.uint64((last + 1) << 56)))
        return self.select(slice(int(start), stop))

    def is_sorted(self) -> bool:
        """Whether digests rise strictly; some temporary bytes per row."""
        hi, lo = self.digest_hi, self.digest_lo
        rises = hi[1:] > hi[:-1]
        if rises.all():
            return True
        rises |= (hi[1:] == hi[:-1]) & (lo[1:] > lo[:-1])
        return bool(rises.all())

    def sorted_unique(self) -> Rows:
        """One row per digest, sorted: the one with the latest time, of equals a tombstone or the
        last.
        """
        if self.is_sorted():
            return self
        return self.select(self.winners())

    def winners(self) -> npt.NDArray[np.intp]:
        """Positions of the rows that sorted_unique keeps, by rising digest."""
        # Stable, and quick on runs that are sorted already, which is what gets merged.
        order = np.argsort(self.digest_hi, kind="stable")
        hi = self.digest_hi[order]
        same = hi[1:] == hi[:-1]
        if not same.any():
            return order
        tied = np.zeros(len(order), np.bool_)
        tied[1:] |= same
        tied[:-1] |= same
        some = order[tied]
        # lexsort's last key counts most; it is stable, so of equals the last stays last. Of equal
        # times a tombstone's counts: a writer tells some seconds later what it has stored, and
        # that may be gone by then.
        keys = (self.deleted[some], self.time_s[some], self.digest_lo[some], self.digest_hi[some])
        ranks = np.lexsort(keys)
        order[tied] = some[ranks]
        last = np.ones(len(order), np.bool_)
        lo = self.digest_lo[order]
        last[:-1] = ~(same & (lo[1:] == lo[:-1]))
        return order[last]


def merge(parts: Sequence[Rows], *, keep_tombstones: bool) -> Rows:
    """One row per digest of all parts: the latest ``time_s``, at equal times a tombstone's or the
    later part's.

    So the base comes first, then deltas by rising ULID. Memory: about three times the result.

    Args:
        parts: Each in any order; sorted ones merge faster.
        keep_tombstones: False where the result is everything there is, such as a base.

    Returns:
        Sorted, strictly increasing rows.
    """
    whole = concat(parts).sorted_unique()
    if keep_tombstones or not whole.deleted.any():
        return whole
    return whole.select(whole.deleted == 0)


def concat(parts: Sequence[Rows]) -> Rows:
    """All parts one after the other; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Rows.empty()
    return Rows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    )


def _column(name: str, values: Sequence[int]) -> Array:
    limit = int(np.iinfo(COLUMNS[name]).max)
    return np.array([v if 0 <= v <= limit else 0 for v in values], COLUMNS[name])


def find_in(rows: Rows, other: Rows) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Look up each digest of ``rows`` in ``other``; both sorted, without duplicates.

    Returns:
        Positions in ``other``, and whether the digest is really there; shape (len(rows),) each.
        Where it is not, the position is any that is valid, 0 in an empty table.
    """
    if not len(other):
        return np.zeros(len(rows), np.intp), np.zeros(len(rows), np.bool_)
    positions = np.searchsorted(other.digest_hi, rows.digest_hi)
    np.minimum(positions, len(other) - 1, out=positions)
    found = other.digest_hi[positions] == rows.digest_hi
    unsettled = found & (other.digest_lo[positions] != rows.digest_lo)
    if unsettled.any():  # first halves are shared by chance never, and on purpose by any number
        some = np.flatnonzero(unsettled)
        positions[some] = _among_equals(rows, some, other)
    found &= other.digest_lo[positions] == rows.digest_lo
    return positions, found


def _among_equals(rows: Rows, some: npt.NDArray[np.intp], other: Rows) -> npt.NDArray[np.intp]:
    """Where the second halves of some rows stand, or would, among rows of equal first half.

    All are bisected at once: as many steps as the longest run of equals has binary digits.
    """
    hi, lo = rows.digest_hi[some], rows.digest_lo[some]
    first = np.searchsorted(other.digest_hi, hi)
    last = np.searchsorted(other.digest_hi, hi, side="right") - 1
    while (first < last).any():
        middle = (first + last) // 2
        below = other.digest_lo[middle] < lo
        first = np.where(below, np.minimum(middle + 1, last), first)
        last = np.where(below, last, middle)
    return first

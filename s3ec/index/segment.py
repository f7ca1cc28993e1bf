# SPDX-License-Identifier: Apache-2.0
"""A segment: rows sorted by digest in one immutable file, found without reading the others.

A file holds the columns of rows.COLUMNS (``deleted`` only where something is), and ``fences``:
the digests' first half, taken relative to what all of them have in common, selects one of 2**b
slots, and slot i is the rows ``fences[i] .. fences[i + 1]``. Slots have 2 to 4 rows on average,
so a lookup is a shift, two numbers of ``fences`` and one or two steps of bisection: half of
the time that interpolating and searching its window takes in Python, whatever the segment's
size. Skewed digests cost more steps, never a wrong answer. More rows than fit into memory are
kept as sorted runs in a folder, and read back range by range.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TypeAlias

import numpy as np

from s3ec import safetensors_file
from s3ec.errors import CorruptEntryError, TierError
from s3ec.index.rows import COLUMNS, DTYPES, Array, EntryInfo, Rows, merge
from s3ec.safetensors_file import FileHeader

KIND = "index-1"
MAX_ROWS = 2**28
# A writer announces a thousand entries at a time, some ten KiB; a million tombstones are 50 MB.
MAX_DELTA_BYTES = 64 * 2**20
_ROWS_PER_SLOT = 2  # at least, on average; up to twice as many
_FENCES = "fences"
_REQUIRED = {*COLUMNS, _FENCES} - {"deleted"}
CHECK_ROWS = 2**18
"""Rows looked at together when all are checked: a few MiB of temporaries."""

# Shift and mask that give a slot, then fences, first and second halves of the digests.
LookupParts: TypeAlias = "tuple[int, int, memoryview[int], memoryview[int], memoryview[int]]"


def encode_segment(rows: Rows, namespace: str) -> list[bytes | memoryview]:
    """The pieces of a segment file; columns are not copied.

    Args:
        rows: Sorted, strictly increasing (sorted_unique, merge).

    Raises:
        CorruptEntryError: They are not (``reason`` is ``order``), or there are too many.
    """
    if len(rows) > MAX_ROWS:
        raise CorruptEntryError(f"{len(rows)} rows are over the limit", reason="size")
    if not rows.is_sorted():
        raise CorruptEntryError("rows of a segment must be sorted", reason="order")
    columns = rows.columns()
    deleted = columns.pop("deleted")
    hi = rows.digest_hi
    narrow = {"dtype": columns.pop("dtype")}
    if deleted.any():
        narrow["deleted"] = deleted
    metadata = {"s3ec": KIND, "namespace": namespace, "entries": str(len(rows))}
    return safetensors_file.encode_columns(
        metadata, {**columns, _FENCES: _fences(hi, _slots(hi)), **narrow}
    )


def parse_segment(blob: bytes | memoryview, namespace: str, *, name: str = "segment") -> Rows:
    """Check a whole segment file; every byte is read.

    Returns:
        Rows that are views of ``blob``.

    Raises:
        CorruptEntryError: Not a segment of this namespace, or one that lies about itself.
    """
    segment = Segment.parse(blob, namespace, name=name)
    segment.check()
    return segment.rows()


class Segment:
    """Lookups in the rows of one file, a blob, or memory. Immutable; any thread may look up.

    A mapped file must never be shortened (the node's index files are only ever unlinked, which
    a mapping survives). Dropping the last reference unmaps it.
    """

    __slots__ = ("_blob", "_fence", "_front", "_hi", "_lo", "_mask", "_rows", "_shift", "name")

    def __init__(
        self,
        rows: Rows,
        fences: Array,
        *,
        name: str,
        front: FileHeader | None = None,
        blob: memoryview | None = None,
    ) -> None:
        """Use open, parse or of."""
        self.name = name
        self._front = front
        self._blob = blob
        self._rows = rows
        # Items of memoryviews cost half of what numpy's do. A blob from the network may lie at any
        # address, and where numbers are not aligned memoryviews give none: those are copied.
        self._hi, self._lo, self._fence = (
            np.require(column, requirements="A").data
            for column in (rows.digest_hi, rows.digest_lo, fences)
        )
        self._shift, self._mask = _slotting(rows.digest_hi, len(fences) - 1)

    @classmethod
    def open(cls, path: str | os.PathLike[str], namespace: str) -> Segment:
        """Map a file that was checked when it was downloaded; reads its header and two rows.

        The structure is checked against the file's size, so that nothing is ever read outside
        of it, whatever its columns say. What is looked up most is asked to be read ahead.

        Raises:
            CorruptEntryError: Not a segment of this namespace and size.
            OSError: It cannot be opened.
        """
        name = Path(path).name
        whole = safetensors_file.map_file(path)
        segment = cls.parse(memoryview(whole), namespace, name=name)
        if segment._front is not None:
            # A lookup reads these; in the others it reads nothing.
            lookup = ("digest_hi", "digest_lo", _FENCES)
            safetensors_file.advise(whole, [segment._front.places[column] for column in lookup])
        return segment

    @classmethod
    def parse(cls, blob: bytes | memoryview, namespace: str, *, name: str = "segment") -> Segment:
        """A segment file's bytes; checks the structure, not the columns (see check).

        Raises:
            CorruptEntryError: As for open.
        """
        whole = memoryview(blob)
        front = safetensors_file.parse_columns(whole, kind=KIND, namespace=namespace, name=name)
        entries = _checked_entries(front, name)
        columns = {column: place.of(whole) for column, place in front.places.items()}
        fences = columns.pop(_FENCES)
        columns.setdefault("deleted", np.broadcast_to(np.zeros(1, "u1"), entries))
        return cls(Rows(**columns), fences, name=name, front=front, blob=whole)

    @classmethod
    def of(cls, rows: Rows, *, name: str = "memory") -> Segment:
        """Rows in memory.

        Raises:
            CorruptEntryError: They are not sorted, strictly increasing.
        """
        if not rows.is_sorted():
            raise CorruptEntryError(f"{name}: rows are not sorted", reason="order")
        hi = rows.digest_hi
        return cls(rows, _fences(hi, _slots(hi)), name=name)

    def __len__(self) -> int:
        return len(self._hi)

    @property
    def may_hold_tombstones(self) -> bool:
        """False for a file without marks, such as a base's; reads nothing."""
        return self._front is None or "deleted" in self._front.places

    def find(self, hi: int, lo: int) -> int:
        """Row of a digest, or -1; no I/O of its own beyond page faults, no memory.

        Args:
            hi: First half of the digest, 0..2**64-1.
            lo: Second half.
        """
        slot = hi >> self._shift & self._mask
        fence, his = self._fence, self._hi
        try:
            row = bisect_left(his, hi, fence[slot], fence[slot + 1])
            if his[row] != hi:
                return -1
            if self._lo[row] == lo:
                return row
        except IndexError:  # behind the last row; fences of a broken file may point anywhere
            return -1
        return self._find_lo(hi, lo, row)

    def lookup_parts(self) -> LookupParts:
        """What ``find`` uses, for a caller that does its work inline."""
        return self._shift, self._mask, self._fence, self._hi, self._lo

    def _find_lo(self, hi: int, lo: int, row: int) -> int:
        """Find a row among several whose digests share their first half; that is rare."""
        end = bisect_right(self._hi, hi, row)
        row = bisect_left(self._lo, lo, row, end)
        return row if row < end and self._lo[row] == lo else -1

    def facts(self, row: int) -> EntryInfo:
        """What a row that find gave says."""
        return self._rows.facts(row)

    def deleted(self, row: int) -> bool:
        """Whether a row that find gave is a tombstone."""
        return bool(self._rows.deleted[row])

    def rows(self) -> Rows:
        """All rows, as views that keep the file mapped."""
        return self._rows

    def check(self) -> None:
        """Read everything: checksum, order, fences, and values that no writer writes.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum``, ``order`` or ``dtype``.
        """
        if self._front is not None and self._blob is not None:
            self._front.check_data(self._blob, self.name)
        rows = self._rows
        for start in range(0, len(rows), CHECK_ROWS):
            part = rows.select(slice(start, start + CHECK_ROWS + 1))  # one row of overlap
            if not part.is_sorted():
                raise CorruptEntryError(f"{self.name}: rows are not sorted", reason="order")
            if part.dtype.max() >= len(DTYPES) or part.deleted.max() > 1:
                raise CorruptEntryError(f"{self.name}: unknown dtype or mark", reason="dtype")
        # Any number of slots that tells rows apart: a later writer may choose another.
        slots = len(self._fence) - 1
        fits = slots <= 2 ** _differing_bits(rows.digest_hi)
        if not fits or not np.array_equal(self._fence, _fences(rows.digest_hi, slots)):
            raise CorruptEntryError(f"{self.name}: fences do not fit the rows", reason="order")


def _differing_bits(hi: Array) -> int:
    """How many low bits of sorted numbers are not the same in all of them."""
    return (int(hi[0]) ^ int(hi[-1])).bit_length() if len(hi) else 0


def _slotting(hi: Array, slots: int) -> tuple[int, int]:
    """How a digest's first half becomes a slot: shift and mask.

    The bits that all rows have in common say nothing, so the slot is what follows them. A digest
    without these bits lands in some slot too, and is not found there.
    """
    return max(0, _differing_bits(hi) - (slots.bit_length() - 1)), slots - 1


def _slots(hi: Array) -> int:
    """How many slots rows get: a power of two, at least 1."""
    bits = max(0, (len(hi) // _ROWS_PER_SLOT).bit_length() - 1)
    return 1 << min(bits, _differing_bits(hi))


def _fences(hi: Array, slots: int) -> Array:
    """First row of each slot and, at the end, the number of rows; shape (slots + 1,)."""
    shift, mask = _slotting(hi, slots)
    fences = np.zeros(slots + 1, "<u4")
    if len(hi) and slots > 1:
        common = int(hi[0]) & ~((mask << shift) | ((1 << shift) - 1))
        firsts = (np.arange(1, slots, dtype="<u8") << np.uint64(shift)) | np.uint64(common)
        fences[1:-1] = np.searchsorted(hi, firsts)
    fences[-1] = len(hi)
    return fences


def _checked_entries(front: FileHeader, name: str) -> int:
    """The number of rows, on which all columns must agree."""
    places = front.places
    text = front.metadata.get("entries", "")
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) > MAX_ROWS:
        raise CorruptEntryError(f"{name}: {text!r:.40} rows", reason="size")
    entries = int(text)
    if places.keys() - {"deleted"} != _REQUIRED:
        raise CorruptEntryError(f"{name}: has other columns than a segment", reason="shape")
    for column, place in places.items():
        fits = place.shape == (entries,) and place.kind == COLUMNS.get(column)
        if column != _FENCES and not fits:
            raise CorruptEntryError(f"{name}: column {column} does not fit", reason="shape")
    fences = places[_FENCES]
    slots = fences.count - 1
    # A power of two, and no more than a few slots a row.
    if fences.kind != "<u4" or len(fences.shape) != 1 or slots < 1 or slots & (slots - 1):
        raise CorruptEntryError(f"{name}: {slots} slots", reason="shape")
    return entries


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

# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by digest in one immutable file: snapshots, deltas and overlays.

A file has the columns ``digest_hi``, ``digest_lo`` (the digest's halves, read big-endian),
``nbytes`` (of the object; 0: not known) and ``fences``: the leading bits of a digest select one of
2**b slots, and slot i is the rows ``fences[i] .. fences[i + 1]``. Slots have 2 to 4 rows on
average, so a lookup is a shift, two numbers of ``fences`` and one or two steps of bisection. Skewed
digests cost more steps, never a wrong answer.

More rows than fit into memory are spilled to files without names, and merged part by part.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from s3ec import safetensors_file
from s3ec.errors import CorruptEntryError, TierError
from s3ec.safetensors_file import FileHeader

Array: TypeAlias = npt.NDArray[Any]

KIND = "rows-2"
MAX_ROWS = 2**27
"""So a snapshot is less than 5 GiB, the limit of one PUT."""
MAX_BYTES = 2**32
PARTS = 64
"""Spilled rows are merged in so many parts, by the leading six bits of their digests."""
_FENCES_AT_A_TIME = 2**18
_ROWS_PER_SLOT = 2  # at least, on average; up to twice as many
_ROW_COLUMNS = {"digest_hi": "<u8", "digest_lo": "<u8", "nbytes": "<u4"}
COLUMNS = {**_ROW_COLUMNS, "fences": "<u4"}
_MAX_NBYTES = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of equal length; they are never written to.

    Attributes:
        hi: First halves of the digests, shape (n,), uint64.
        lo: Second halves, shape (n,), uint64.
        nbytes: Sizes of the objects, 0 if not known, shape (n,), uint32.
    """

    hi: Array
    lo: Array
    nbytes: Array

    @classmethod
    def of(cls, digests: Sequence[bytes], nbytes: Sequence[int]) -> Rows:
        """Make rows in the given order. A size that does not fit counts as not known."""
        halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
        sizes = [size if 0 <= size <= _MAX_NBYTES else 0 for size in nbytes]
        return cls(halves[:, 0].astype("<u8"), halves[:, 1].astype("<u8"), np.array(sizes, "<u4"))

    def __len__(self) -> int:
        return len(self.hi)

    def select(self, which: Any) -> Rows:
        """The rows of a slice (views), or at some positions (copies)."""
        if isinstance(which, slice):
            return Rows(self.hi[which], self.lo[which], self.nbytes[which])
        # Unlike an index, `take` does not block other threads.
        return Rows(self.hi.take(which), self.lo.take(which), self.nbytes.take(which))

    def part(self, number: int) -> Rows:
        """Views of the rows whose digest begins with ``number``, 0..PARTS-1; needs sorted rows."""
        shift = 64 - (PARTS.bit_length() - 1)
        start = int(np.searchsorted(self.hi, np.uint64(number << shift)))
        stop = len(self)
        if number < PARTS - 1:
            stop = int(np.searchsorted(self.hi, np.uint64((number + 1) << shift)))
        return self.select(slice(start, stop))


def is_sorted(hi: Array, lo: Array) -> bool:
    """True if digests rise strictly; takes some temporary bytes per row."""
    rises = hi[1:] > hi[:-1]
    if rises.all():
        return True
    return bool((rises | ((hi[1:] == hi[:-1]) & (lo[1:] > lo[:-1]))).all())


def sorted_order(hi: Array, lo: Array) -> Array:
    """Positions of the rows by rising digest; of equal ones the last stays last."""
    # Stable, and quick on sorted runs, which merges consist of.
    order = np.argsort(hi, kind="stable")
    found = hi[order]
    same = found[1:] == found[:-1]
    if not same.any():
        return order
    tied = np.zeros(len(order), np.bool_)
    tied[1:] |= same
    tied[:-1] |= same
    some = order[tied]
    order[tied] = some[np.lexsort((lo[some], hi[some]))]
    return order


def merge(parts: Sequence[Rows]) -> Rows:
    """Merge parts, sorted, with one row per digest; of several that of the last part."""
    rows = concat(parts)
    if is_sorted(rows.hi, rows.lo):
        return rows
    rows = rows.select(sorted_order(rows.hi, rows.lo))
    is_last = np.ones(len(rows), np.bool_)
    is_last[:-1] = (rows.hi[1:] != rows.hi[:-1]) | (rows.lo[1:] != rows.lo[:-1])
    return rows if is_last.all() else rows.select(np.flatnonzero(is_last))


def concat(parts: Sequence[Rows]) -> Rows:
    """Concatenate parts; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Rows.of([], [])
    return Rows(
        np.concatenate([part.hi for part in parts]),
        np.concatenate([part.lo for part in parts]),
        np.concatenate([part.nbytes for part in parts]),
    )


def without(rows: Rows, others: Rows) -> Rows:
    """The rows whose digest is not in ``others``; both sorted, without duplicates."""
    return rows.select(np.flatnonzero(~is_in(rows, others)))


def is_in(rows: Rows, others: Rows) -> Array:
    """A mask of digests that are in ``others``; both sorted and unique; shape (len(rows),)."""
    both = concat([rows, others])
    order = sorted_order(both.hi, both.lo)
    hi, lo = both.hi[order], both.lo[order]
    twice = np.zeros(len(order), np.bool_)
    twice[:-1] = (hi[1:] == hi[:-1]) & (lo[1:] == lo[:-1])
    found = np.zeros(len(order), np.bool_)
    found[order] = twice  # the first of two is the one of `rows`, since the order is stable
    return found[: len(rows)]


def slot_bits(rows: int) -> int:
    """How many leading bits of a digest select its slot."""
    return max(0, (rows // _ROWS_PER_SLOT).bit_length() - 1)


def fences_of(hi: Array) -> Array:
    """First row of each slot and, at the end, the number of rows; shape (2**bits + 1,)."""
    bits = slot_bits(len(hi))
    found = np.zeros((1 << bits) + 1, "<u4")
    for start in range(1, 1 << bits, _FENCES_AT_A_TIME):
        slots = np.arange(start, min(start + _FENCES_AT_A_TIME, 1 << bits), dtype="<u8")
        found[start : start + len(slots)] = np.searchsorted(hi, slots << np.uint64(64 - bits))
    found[-1] = len(hi)
    return found


def columns_of(rows: Rows) -> dict[str, Array]:
    """The columns of a file of rows, which are sorted and without duplicates (see merge).

    Raises:
        CorruptEntryError: There are too many rows.
    """
    if len(rows) > MAX_ROWS:
        raise CorruptEntryError(f"{len(rows)} rows are over the limit", reason="size")
    fences = fences_of(rows.hi)
    return dict(zip(COLUMNS, (rows.hi, rows.lo, rows.nbytes, fences), strict=True))


def encode(rows: Rows, namespace: str) -> list[bytes | memoryview]:
    """Encode rows as the pieces of a file. Rows and errors are as for columns_of."""
    metadata = {"s3ec": KIND, "namespace": namespace}
    return safetensors_file.encode_columns(metadata, columns_of(rows))


def rows_in_header(front: FileHeader, kinds: dict[str, str], name: str) -> int:
    """How many rows a file has by its header, whose columns must be those of ``kinds``.

    Columns other than those of rows may have any length.

    Raises:
        CorruptEntryError: The columns are others, or differ in the number of rows.
    """
    places = front.places
    if {column: place.kind for column, place in places.items()} != kinds or any(
        len(place.shape) != 1 for place in places.values()
    ):
        raise CorruptEntryError(f"{name}: has other columns", reason="shape")
    count = places["digest_hi"].count
    fences = places["fences"].count
    if {places[column].count for column in _ROW_COLUMNS} != {count} or (
        fences != (1 << slot_bits(count)) + 1
    ):
        raise CorruptEntryError(f"{name}: columns do not fit", reason="shape")
    if count > MAX_ROWS:
        raise CorruptEntryError(f"{name}: {count} rows", reason="size")
    return count


class Segment:
    """Lookups in the rows of one file, or of memory. Immutable; any thread may look up.

    A mapped file must never be shortened. Dropping the last reference unmaps it.

    Attributes:
        name: Its name in errors.
        rows: All rows, as views that keep the file mapped.
        fences: First row of each slot.
        blob: The bytes of its file; empty for rows of memory.
        shift: How far the first half of a digest is shifted for its slot.
    """

    __slots__ = ("_fence", "_front", "_hi", "_lo", "blob", "fences", "name", "rows", "shift")

    def __init__(
        self,
        rows: Rows,
        fences: Array,
        *,
        name: str = "memory",
        front: FileHeader | None = None,
        blob: memoryview | None = None,
    ) -> None:
        """Use open, parse or of."""
        self.name = name
        self.rows = rows
        self.fences = fences
        self.blob = memoryview(b"") if blob is None else blob
        self.shift = 64 - ((len(fences) - 1).bit_length() - 1)
        self._front = front
        # Items of memoryviews cost half as much as numpy's. A blob from the network may be at any
        # address, and memoryviews cannot read unaligned numbers: those are copied.
        self._hi, self._lo, self._fence = (
            np.require(column, requirements="A").data for column in (rows.hi, rows.lo, fences)
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], namespace: str) -> Segment:
        """Map a file that was checked before; only its header is read.

        Raises:
            CorruptEntryError: It is not a file of this namespace and size.
            OSError: It cannot be opened.
        """
        whole = safetensors_file.map_file(path)
        return cls.parse(memoryview(whole), namespace, name=Path(path).name)

    @classmethod
    def parse(
        cls,
        blob: bytes | memoryview,
        namespace: str,
        *,
        name: str = "rows",
        kind: str = KIND,
        more: dict[str, str] | None = None,
    ) -> Segment:
        """Parse a file's bytes; checks the structure, not the columns (see check).

        Args:
            kind: The kind that the file must have.
            more: Its columns other than those of rows, name to type; see ``column``.

        Raises:
            CorruptEntryError: As for open. ``reason`` is ``version`` if it has another format.
        """
        whole = memoryview(blob)
        front = safetensors_file.parse_columns(
            whole, whole.nbytes, kind=kind, namespace=namespace, name=name
        )
        rows_in_header(front, {**COLUMNS, **(more or {})}, name)
        hi, lo, nbytes, fences = (front.places[column].of(whole) for column in COLUMNS)
        return cls(Rows(hi, lo, nbytes), fences, name=name, front=front, blob=whole)

    @classmethod
    def of(cls, rows: Rows) -> Segment:
        """Make a segment of sorted rows in memory."""
        return cls(rows, fences_of(rows.hi))

    def __len__(self) -> int:
        return len(self._hi)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata in its file's header; empty for rows of memory."""
        return dict(self._front.metadata) if self._front else {}

    def column(self, name: str) -> Array:
        """Another column of its file, as a view."""
        if self._front is None:
            raise KeyError(name)
        return self._front.places[name].of(self.blob)

    def find(self, hi: int, lo: int) -> int:
        """Row of a digest, or -1; no I/O of its own beyond page faults.

        Args:
            hi: First half of the digest, 0..2**64-1.
            lo: Second half.
        """
        slot = hi >> self.shift
        fence, his = self._fence, self._hi
        try:
            row = bisect_left(his, hi, fence[slot], fence[slot + 1])
            if his[row] != hi:
                return -1
            if self._lo[row] == lo:
                return row
        except IndexError:  # past the last row; fences of a broken file may point anywhere
            return -1
        # Several digests share their first half; that is rare.
        end = bisect_right(his, hi, row)
        row = bisect_left(self._lo, lo, row, end)
        return row if row < end and self._lo[row] == lo else -1

    def lookup_parts(self) -> tuple[int, memoryview[int], memoryview[int], memoryview[int]]:
        """Shift, fences, first and second halves, for a caller that inlines ``find``."""
        return self.shift, self._fence, self._hi, self._lo

    def nbytes(self, row: int) -> int:
        """Size of the object of a row that ``find`` returned; 0 if not known."""
        return int(self.rows.nbytes[row])

    def check_bytes(self) -> None:
        """Read everything, for its checksum. Raises CorruptEntryError."""
        if self._front is not None:
            self._front.check_data(self.blob, self.name)

    def check(self) -> None:
        """Read everything: checksum, order and fences.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum`` or ``order``.
        """
        self.check_bytes()
        if not is_sorted(self.rows.hi, self.rows.lo):
            raise CorruptEntryError(f"{self.name}: rows are not sorted", reason="order")
        if not np.array_equal(self.fences, fences_of(self.rows.hi)):
            raise CorruptEntryError(f"{self.name}: fences do not fit the rows", reason="order")


# -- more rows than fit into memory ----------------------------------------------------------------

_RUN_ROWS = 2**20  # in memory before they are written: 20 bytes each, three times while sorted


class Spill:
    """Collects rows of any order and number, and returns them part by part.

    The rows are in files without names, which end with the process. Blocking.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make no file yet.

        Args:
            folder: For the files; None for the system's.
        """
        self._folder = folder
        self._waiting: list[Rows] = []
        self._runs: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Add rows; of equal digests the later row counts.

        Raises:
            TierError: The disk refused.
        """
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= _RUN_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            run = merge(self._waiting)
            self._waiting = []
            self._runs.append(on_disk([run], self._folder))

    def part(self, number: int) -> list[Rows]:
        """The added rows of one part, in the order of ``add``; for ``merge``.

        Raises:
            TierError: The disk refused.
        """
        self._flush()
        return [run.part(number) for run in self._runs]

    def close(self) -> None:
        """Free memory and disk."""
        self._waiting, self._runs = [], []


def on_disk(parts: Iterable[Rows], folder: Path | None) -> Rows:
    """Write parts one after the other into mapped files without names. Blocking.

    Raises:
        TierError: The disk refused.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(anonymous_file(folder)) for _ in _ROW_COLUMNS]
        try:
            for rows in parts:
                for file, column in zip(files, (rows.hi, rows.lo, rows.nbytes), strict=True):
                    file.write(np.ascontiguousarray(column).data)
            hi, lo, nbytes = map(_mapped_column, files, _ROW_COLUMNS.values())
        except OSError as exc:
            raise TierError(f"cannot write a temporary file: {exc}") from exc
        return Rows(hi, lo, nbytes)


def _mapped_column(file: BinaryIO, kind: str) -> Array:
    file.flush()
    if not file.tell():  # an empty file cannot be mapped
        return np.empty(0, kind)
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind)


def anonymous_file(folder: Path | None) -> BinaryIO:
    """Make a file without a name. Raises TierError if the disk refuses."""
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as exc:
        raise TierError(f"cannot make a temporary file: {exc}") from exc


def write_rows(file: BinaryIO, namespace: str, parts: Iterable[Rows], folder: Path | None) -> None:
    """Write a whole file of rows from sorted parts, in their order.

    Meanwhile the disk holds everything twice; memory holds a part and the fences.

    Args:
        file: Empty.
        parts: By rising digests.
        folder: For temporary files.

    Raises:
        CorruptEntryError: There are too many rows.
        TierError: The disk refused.
    """
    pieces = encode(on_disk(parts, folder), namespace)
    try:
        file.writelines(pieces)
        file.flush()
    except OSError as exc:
        raise TierError(f"cannot write a file of the index: {exc}") from exc

# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by digest in one immutable file: snapshots, deltas and overlays.

A file has the columns ``digest_hi``, ``digest_lo`` (the digest's halves, read big-endian),
``nbytes`` (of the object; 0: not known) and ``fences``: the leading bits of a digest select one of
2**b slots, and slot i is the rows ``fences[i] .. fences[i + 1]``. Slots have 2 to 4 rows on
average, so a lookup is a shift, two numbers of ``fences`` and one or two steps of bisection. Skewed
digests cost more steps, never a wrong answer.

More rows than fit into memory are spilled to files by leading bits, and merged part by part.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
CHUNK_ROWS = 2**18
"""Rows looked at together where all are: a few MiB of temporaries."""
PARTS = 64
"""Spilled rows are merged in so many parts, by the leading six bits of their digests."""
_CHECK_BYTES = 2**25
_ROWS_PER_SLOT = 2  # at least, on average; up to twice as many
_COLUMNS = {"digest_hi": "<u8", "digest_lo": "<u8", "nbytes": "<u4", "fences": "<u4"}
_MAX_NBYTES = 2**32 - 1
_ROW = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("nbytes", "<u4")])


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of equal length; nobody writes to them.

    Attributes:
        hi: First halves of the digests, shape (n,), uint64.
        lo: Second halves, shape (n,), uint64.
        nbytes: Sizes of the objects, 0 where not known, shape (n,), uint32.
    """

    hi: Array
    lo: Array
    nbytes: Array

    @classmethod
    def of(cls, digests: Sequence[bytes], nbytes: Sequence[int]) -> Rows:
        """Rows in the given order. A size that does not fit counts as not known."""
        halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
        sizes = [size if 0 <= size <= _MAX_NBYTES else 0 for size in nbytes]
        return cls(halves[:, 0].astype("<u8"), halves[:, 1].astype("<u8"), np.array(sizes, "<u4"))

    def __len__(self) -> int:
        return len(self.hi)

    def select(self, which: Any) -> Rows:
        """The rows of a slice (views), or of a mask or of positions (copies)."""
        if isinstance(which, np.ndarray) and which.dtype.kind == "i":  # keeps no other thread out
            return Rows(self.hi.take(which), self.lo.take(which), self.nbytes.take(which))
        return Rows(self.hi[which], self.lo[which], self.nbytes[which])


def is_sorted(hi: Array, lo: Array) -> bool:
    """True if digests rise strictly; some temporary bytes a row."""
    rises = hi[1:] > hi[:-1]
    if rises.all():
        return True
    return bool((rises | ((hi[1:] == hi[:-1]) & (lo[1:] > lo[:-1]))).all())


def sorted_order(hi: Array, lo: Array) -> Array:
    """Positions of the rows by rising digest; of equal ones the last stays last."""
    # Stable, and quick on runs that are sorted already, which is what gets merged.
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


def unique_order(hi: Array, lo: Array) -> Array:
    """As sorted_order, with the last row of each digest only."""
    if is_sorted(hi, lo):
        return np.arange(len(hi))
    order = sorted_order(hi, lo)
    hi, lo = hi[order], lo[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    return order[last]


def merge(parts: Sequence[Rows]) -> Rows:
    """One row for each digest of all parts, sorted; that of the last part where several have it."""
    whole = concat(parts)
    return whole.select(unique_order(whole.hi, whole.lo))


def concat(parts: Sequence[Rows]) -> Rows:
    """All parts one after the other; a single part is returned as it is."""
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
    """The rows whose digest is not among others; both sorted, without duplicates."""
    return rows.select(~is_in(rows, others))


def is_in(rows: Rows, others: Rows) -> Array:
    """Whether each digest is among others; both sorted, without duplicates; shape (len(rows),)."""
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


def fences_of(hi: Array, bits: int) -> Array:
    """First row of each slot and, at the end, the number of rows; shape (2**bits + 1,)."""
    firsts = np.arange(1, 1 << bits, dtype="<u8") << np.uint64(64 - bits) if bits else hi[:0]
    inner = np.searchsorted(hi, firsts)
    return np.concatenate([[0], inner, [len(hi)]]).astype("<u4")


def encode(rows: Rows, namespace: str) -> list[bytes | memoryview]:
    """The pieces of a file of some rows, which are sorted and without duplicates (see merge).

    Raises:
        CorruptEntryError: There are too many.
    """
    if len(rows) > MAX_ROWS:
        raise CorruptEntryError(f"{len(rows)} rows are over the limit", reason="size")
    metadata = {"s3ec": KIND, "namespace": namespace, "entries": str(len(rows))}
    columns = {
        "digest_hi": rows.hi,
        "digest_lo": rows.lo,
        "nbytes": rows.nbytes,
        "fences": fences_of(rows.hi, slot_bits(len(rows))),
    }
    return safetensors_file.encode_columns(metadata, columns)


class Segment:
    """Lookups in the rows of one file, or of memory. Immutable; any thread may look up.

    A mapped file must never be shortened. Dropping the last reference unmaps it.

    Attributes:
        name: What errors call it.
        rows: All rows, as views that keep the file mapped.
        fences: First row of each slot.
        shift: How far the first half of a digest is shifted for its slot.
    """

    __slots__ = ("_blob", "_fence", "_front", "_hi", "_lo", "fences", "name", "rows", "shift")

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
        self.rows = rows
        self.fences = fences
        self.shift = 64 - ((len(fences) - 1).bit_length() - 1)
        self._front = front
        self._blob = blob
        # Items of memoryviews cost half of what numpy's do. A blob from the network may lie at any
        # address, and where numbers are not aligned memoryviews give none: those are copied.
        self._hi, self._lo, self._fence = (
            np.require(column, requirements="A").data for column in (rows.hi, rows.lo, fences)
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], namespace: str) -> Segment:
        """Map a file that was checked before; reads its header, and asks for what lookups read.

        Raises:
            CorruptEntryError: Not a file of this namespace and size.
            OSError: It cannot be opened.
        """
        whole = safetensors_file.map_file(path)
        segment = cls.parse(memoryview(whole), namespace, name=Path(path).name)
        if segment._front is not None:
            # A lookup reads these, and must not wait for the disk.
            lookup = ("digest_hi", "digest_lo", "fences")
            safetensors_file.advise(whole, [segment._front.places[column] for column in lookup])
        return segment

    @classmethod
    def parse(cls, blob: bytes | memoryview, namespace: str, *, name: str = "rows") -> Segment:
        """A file's bytes; checks the structure, not the columns (see check).

        Raises:
            CorruptEntryError: As for open. ``reason`` is ``version`` where it is of another
                format.
        """
        whole = memoryview(blob)
        front = safetensors_file.parse_columns(whole, kind=KIND, namespace=namespace, name=name)
        columns = checked_columns(front, whole, _COLUMNS, name)
        return cls(
            Rows(columns["digest_hi"], columns["digest_lo"], columns["nbytes"]),
            columns["fences"],
            name=name,
            front=front,
            blob=whole,
        )

    @classmethod
    def of(cls, rows: Rows, *, name: str = "memory") -> Segment:
        """Sorted rows in memory."""
        return cls(rows, fences_of(rows.hi, slot_bits(len(rows))), name=name)

    def __len__(self) -> int:
        return len(self._hi)

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
        except IndexError:  # behind the last row; fences of a broken file may point anywhere
            return -1
        return self._find_lo(hi, lo, row)

    def lookup_parts(self) -> tuple[int, memoryview[int], memoryview[int], memoryview[int]]:
        """Shift, fences, first and second halves, for a caller that does ``find`` inline."""
        return self.shift, self._fence, self._hi, self._lo

    def _find_lo(self, hi: int, lo: int, row: int) -> int:
        """Find a row among several whose digests share their first half; that is rare."""
        end = bisect_right(self._hi, hi, row)
        row = bisect_left(self._lo, lo, row, end)
        return row if row < end and self._lo[row] == lo else -1

    def nbytes(self, row: int) -> int:
        """Size of the object of a row that find gave; 0 where it is not known."""
        return int(self.rows.nbytes[row])

    def part(self, number: int) -> Rows:
        """Views of the rows whose digest begins with ``number``, 0..PARTS-1."""
        width = 64 - (PARTS.bit_length() - 1)
        start = int(np.searchsorted(self.rows.hi, np.uint64(number << width)))
        stop = len(self)
        if number < PARTS - 1:
            stop = int(np.searchsorted(self.rows.hi, np.uint64((number + 1) << width)))
        return self.rows.select(slice(start, stop))

    def _true_fences(self, start: int, count: int) -> Array:
        """Fences from ``start`` on, as the rows have them."""
        slots = np.arange(start, start + count, dtype="<u8")
        if start + count < len(self.fences):
            return np.searchsorted(self.rows.hi, slots << np.uint64(self.shift))
        # The last one is the end, which no shift of 64 bits says.
        inner = np.searchsorted(self.rows.hi, slots[:-1] << np.uint64(min(self.shift, 63)))
        return np.append(inner, len(self))

    def blob(self) -> memoryview:
        """The bytes of its file; empty for rows of memory."""
        return memoryview(b"") if self._blob is None else self._blob

    def forget_pages(self) -> None:
        """Give the mapped pages back to the system: what is read once does not stay in memory."""
        whole = self._blob.obj if self._blob is not None else None
        if isinstance(whole, mmap.mmap):
            whole.madvise(mmap.MADV_DONTNEED)

    def check(self) -> None:
        """Read everything: checksum, order and fences.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum`` or ``order``.
        """
        if self._front is not None and self._blob is not None:
            running = safetensors_file.running_checksum()
            for start in range(self._front.data_start, len(self._blob), _CHECK_BYTES):
                running.update(self._blob[start : start + _CHECK_BYTES])
                self.forget_pages()
            if running.hexdigest() != self._front.metadata["xxh3"]:
                raise CorruptEntryError(f"{self.name}: checksum differs", reason="checksum")
        hi, lo = self.rows.hi, self.rows.lo
        for start in range(0, len(hi), CHUNK_ROWS):
            some = slice(start, start + CHUNK_ROWS + 1)  # one row of overlap
            if not is_sorted(hi[some], lo[some]):
                raise CorruptEntryError(f"{self.name}: rows are not sorted", reason="order")
            self.forget_pages()
        for start in range(0, len(self.fences), CHUNK_ROWS):
            fences = self.fences[start : start + CHUNK_ROWS]
            if not np.array_equal(fences, self._true_fences(start, len(fences))):
                raise CorruptEntryError(f"{self.name}: fences do not fit the rows", reason="order")
            self.forget_pages()


def checked_columns(
    front: FileHeader, whole: memoryview, kinds: dict[str, str], name: str
) -> dict[str, Array]:
    """Views of the columns of a file, which must be those of ``kinds`` and agree on the rows.

    Columns beside those of rows may have any length.

    Raises:
        CorruptEntryError: They are others.
    """
    places = front.places
    text = front.metadata.get("entries", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) <= MAX_ROWS):
        raise CorruptEntryError(f"{name}: {text!r:.40} rows", reason="size")
    if {column: place.kind for column, place in places.items()} != kinds or any(
        len(place.shape) != 1 for place in places.values()
    ):
        raise CorruptEntryError(f"{name}: has other columns", reason="shape")
    entries = int(text)
    for column in ("digest_hi", "digest_lo", "nbytes"):
        if places[column].count != entries:
            raise CorruptEntryError(f"{name}: column {column} does not fit", reason="shape")
    if places["fences"].count != (1 << slot_bits(entries)) + 1:
        raise CorruptEntryError(f"{name}: fences do not fit", reason="shape")
    return {column: place.of(whole) for column, place in places.items()}


# -- more rows than fit into memory ----------------------------------------------------------------

_RUN_ROWS = 2**19  # in memory before they are written: 20 bytes each, three times while sorted
_PART_SHIFT = 64 - (PARTS.bit_length() - 1)


class Spill:
    """Collects rows of any order and number, and gives them back part by part.

    They lie in a file without a name, which ends with the process. Blocking.
    """

    def __init__(self, folder: Path | None) -> None:
        """Opens the file.

        Args:
            folder: Where; None for the system's place.

        Raises:
            TierError: The disk refused.
        """
        self._file = anonymous_file(folder)
        self._waiting: list[Rows] = []
        self._waiting_rows = 0
        self._runs: list[tuple[int, Array]] = []  # first row in the file, first row of each part
        self._rows = 0

    def add(self, rows: Rows) -> None:
        """Take some rows; later ones win.

        Raises:
            TierError: The disk did not take them.
        """
        self._waiting.append(rows)
        self._waiting_rows += len(rows)
        if self._waiting_rows >= _RUN_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises as add."""
        if not self._waiting_rows:
            return
        rows = merge(self._waiting)
        self._waiting, self._waiting_rows = [], 0
        table = np.empty(len(rows), _ROW)
        table["hi"], table["lo"], table["nbytes"] = rows.hi, rows.lo, rows.nbytes
        starts = np.arange(PARTS, dtype="<u8") << np.uint64(_PART_SHIFT)
        bounds = np.append(np.searchsorted(rows.hi, starts), len(rows))
        try:
            self._file.seek(self._rows * _ROW.itemsize)
            self._file.write(table.data.cast("B"))
            self._file.flush()
        except OSError as exc:
            raise TierError(f"cannot write a temporary file: {exc}") from exc
        self._runs.append((self._rows, bounds))
        self._rows += len(rows)

    def part(self, number: int) -> list[Rows]:
        """What was added of one part, in the order in which it came; for ``merge``.

        Raises:
            TierError: The disk refused.
        """
        self.flush()
        found = []
        for first, bounds in self._runs:
            count = int(bounds[number + 1] - bounds[number])
            if count:
                offset = (first + int(bounds[number])) * _ROW.itemsize
                table = read_array(self._file, _ROW, count, offset)
                found.append(
                    Rows(*(np.ascontiguousarray(table[name]) for name in ("hi", "lo", "nbytes")))
                )
        return found

    def close(self) -> None:
        """Free the disk."""
        self._file.close()


def anonymous_file(folder: Path | None) -> BinaryIO:
    """A file without a name. Raises TierError where the disk refuses."""
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as exc:
        raise TierError(f"cannot make a temporary file: {exc}") from exc


def read_array(file: BinaryIO, kind: Any, count: int, offset: int) -> Array:
    """Some items of a file, from an offset in bytes; TierError where it ends early."""
    kind = np.dtype(kind)
    body = os.pread(file.fileno(), count * kind.itemsize, offset)
    if len(body) != count * kind.itemsize:
        raise TierError("a temporary file is shorter than what was written to it")
    return np.frombuffer(body, kind)


def write_rows(
    file: BinaryIO,
    namespace: str,
    parts: Iterable[Rows],
    folder: Path | None,
    write_filter: Callable[[int, Iterable[tuple[Array, Array]]], None],
) -> int:
    """Write a whole file of rows that come part by part, each sorted, and one behind the other.

    The disk holds everything twice meanwhile; memory a part.

    Args:
        file: Empty.
        parts: By rising digests.
        folder: For temporary files.
        write_filter: Gets the number of rows, and first and second halves of them in chunks.

    Returns:
        The number of rows.

    Raises:
        CorruptEntryError: There are too many.
        TierError: The disk refused.
    """
    kinds = dict(list(_COLUMNS.items())[:3])
    columns = {name: anonymous_file(folder) for name in kinds}
    try:
        count = 0
        for rows in parts:
            for name, values in zip(columns, (rows.hi, rows.lo, rows.nbytes), strict=True):
                columns[name].write(np.ascontiguousarray(values, kinds[name]).data)
            count += len(rows)
        if count > MAX_ROWS:
            raise CorruptEntryError(f"{count} rows are over the limit", reason="size")
        for column in columns.values():
            column.flush()

        def chunks(name: str) -> Iterator[Array]:
            kind = np.dtype(kinds[name])
            for start in range(0, count, CHUNK_ROWS):
                some = min(CHUNK_ROWS, count - start)
                yield read_array(columns[name], kind, some, start * kind.itemsize)

        bits = slot_bits(count)
        counted = np.zeros((1 << bits) + 1, "<u4")
        for hi in chunks("digest_hi"):
            slots = (hi >> np.uint64(64 - bits)).astype(np.intp) if bits else np.zeros(len(hi), int)
            first = int(slots[0])
            found = np.bincount(slots - first)
            counted[first + 1 : first + 1 + len(found)] += found.astype("<u4")
        fences = np.cumsum(counted, dtype="<u4")
        running, tensors, at = safetensors_file.running_checksum(), {}, 0
        for name, kind in _COLUMNS.items():
            items = len(fences) if name == "fences" else count
            nbytes = items * np.dtype(kind).itemsize
            spelling = "U64" if kind == "<u8" else "U32"
            tensors[name] = {"dtype": spelling, "shape": [items], "data_offsets": [at, at + nbytes]}
            at += nbytes
            for piece in chunks(name) if name in columns else [fences]:
                running.update(piece.data)
        metadata = {"s3ec": KIND, "namespace": namespace, "entries": str(count)}
        metadata["xxh3"] = running.hexdigest()
        file.write(safetensors_file.encode_header(metadata, tensors))
        for name in columns:
            for piece in chunks(name):
                file.write(piece.data)
        file.write(fences.data)
        file.flush()
        write_filter(count, zip(chunks("digest_hi"), chunks("digest_lo"), strict=True))
        return count
    except OSError as exc:
        raise TierError(f"cannot write a temporary file: {exc}") from exc
    finally:
        for column in columns.values():
            column.close()

# SPDX-License-Identifier: Apache-2.0
"""A safetensors file of several columns without gaps, whose header cannot be changed unnoticed.

Segments and filters are such files; any safetensors reader opens them. Layout, all integers
little-endian::

    0    u64   header length N; 8 + N a multiple of 64
    8    N     canonical JSON, padded with spaces: metadata, name, type and place of each column
    8+N  ...   the columns, in the order of their places

The metadata holds ``s3ec`` (the kind of file and its format), ``namespace``, ``xxh3`` (of all
columns), and ``header_xxh3`` (of all else that the header says).
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from s3ec import codec, plain_json
from s3ec.errors import CorruptEntryError
from s3ec.identity import canonical_json
from s3ec.index.rows import Array

HEADER_LIMIT = 16 * 1024
_ALIGNMENT = 64
# No file of an index comes near; keeps forged numbers away from arithmetic and allocation.
MAX_FILE_BYTES = 2**40
_SEAL = "header_xxh3"
_XXH3 = re.compile(r"[0-9a-f]{32}")
# safetensors spelling -> numpy type
_KINDS = {"U8": "u1", "U32": "<u4", "U64": "<u8"}
_SPELLINGS = {np.dtype(kind): spelling for spelling, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Where one column lies.

    Attributes:
        kind: numpy type.
        shape: Its lengths.
        start: Offset in the file, bytes; a multiple of the item size.
    """

    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Items."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * np.dtype(self.kind).itemsize

    def of(self, blob: bytes | memoryview) -> Array:
        """The column as a read-only view of the whole file; copies nothing."""
        return np.frombuffer(blob, self.kind, self.count, self.start).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The checked header of a file.

    Attributes:
        metadata: What it says of itself, seal included.
        places: Its columns, by name, in their order.
        data_start: Where the first one begins.
        total_bytes: What the size of the whole file must be.
    """

    metadata: Mapping[str, str]
    places: Mapping[str, ColumnSpec]
    data_start: int
    total_bytes: int

    def check_data(self, blob: bytes | memoryview, name: str) -> None:
        """Compare all columns with their checksum; reads every byte.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum``.
        """
        if codec.checksum(memoryview(blob)[self.data_start :]) != self.metadata["xxh3"]:
            raise CorruptEntryError(f"{name}: checksum differs", reason="checksum")


def encode(metadata: Mapping[str, str], columns: Mapping[str, Array]) -> list[bytes | memoryview]:
    """A whole file in pieces: its header, then each column without a copy.

    Args:
        metadata: Must hold ``s3ec`` and ``namespace``.
        columns: Contiguous; by falling item size, so that each is aligned.
    """
    pieces: list[bytes | memoryview] = []
    tensors: dict[str, Any] = {}
    running, at = codec.running_checksum(), 0
    for name, column in columns.items():
        piece = np.ascontiguousarray(column)
        tensors[name] = {
            "dtype": _SPELLINGS[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
        if piece.nbytes:  # a memoryview of nothing cannot be cast
            pieces.append(piece.data.cast("B"))
            running.update(pieces[-1])
    sealed = {**metadata, "xxh3": running.hexdigest()}
    sealed[_SEAL] = _seal(sealed, tensors)
    body = canonical_json({"__metadata__": sealed, **tensors}).encode()
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    return [struct.pack("<Q", len(body)) + body, *pieces]


def parse_front(whole: memoryview, *, kind: str, namespace: str, name: str) -> FileHeader:
    """Read and check a header against the size of its file; allocates at most HEADER_LIMIT.

    Args:
        whole: The file; of a mapped one only the header is read.
        kind: What ``s3ec`` must say.
        namespace: Which one it must have been written for.
        name: What errors call the file.

    Raises:
        CorruptEntryError: ``reason`` is ``version`` where the file is of another format.
    """
    content, length = _read_json(whole, name)
    metadata = content.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptEntryError(f"{name}: metadata must be strings", reason="header")
    if metadata.get("s3ec") != kind:
        raise CorruptEntryError(
            f"{name}: format {metadata.get('s3ec')!r:.40}, expected {kind}", reason="version"
        )
    try:
        seal = _seal(metadata, content)
    except RecursionError as exc:
        raise CorruptEntryError(f"{name}: header nested too deeply", reason="header") from exc
    if metadata.get(_SEAL) != seal or not _XXH3.fullmatch(metadata.get("xxh3", "")):
        raise CorruptEntryError(f"{name}: the header's own checksum differs", reason="header")
    if metadata.get("namespace") != namespace:
        raise CorruptEntryError(
            f"{name}: written for namespace {metadata.get('namespace')!r:.100}",
            reason="namespace",
        )
    places, total = _places(content, 8 + length, name)
    if whole.nbytes != total:
        raise CorruptEntryError(f"{name}: {whole.nbytes} bytes, expected {total}", reason="length")
    return FileHeader(metadata, places, 8 + length, total)


def _read_json(blob: memoryview, name: str) -> tuple[dict[str, Any], int]:
    if len(blob) < 8:
        raise CorruptEntryError(f"{name}: {len(blob)} bytes are no file of ours", reason="length")
    (length,) = struct.unpack_from("<Q", blob)
    if not 0 < length <= HEADER_LIMIT or (8 + length) % _ALIGNMENT:
        raise CorruptEntryError(f"{name}: impossible header length {length}", reason="header")
    if len(blob) < 8 + length:
        raise CorruptEntryError(f"{name}: cut off inside the header", reason="length")
    try:
        content = plain_json.loads(bytes(blob[8 : 8 + length]).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise CorruptEntryError(f"{name}: not acceptable JSON: {exc}", reason="header") from exc
    if not isinstance(content, dict):
        raise CorruptEntryError(f"{name}: the header is not an object", reason="header")
    return content, length


def _seal(metadata: Mapping[str, str], tensors: object) -> str:
    rest = {name: value for name, value in metadata.items() if name != _SEAL}
    return codec.checksum(canonical_json([rest, tensors]).encode())


def _places(
    content: dict[str, Any], data_start: int, name: str
) -> tuple[dict[str, ColumnSpec], int]:
    """Columns in the order of their places, which must follow each other without a gap."""
    try:
        ordered = sorted(content.items(), key=lambda item: item[1]["data_offsets"])
        places, end = {}, data_start
        for column, tensor in ordered:
            place = _place(tensor, end)
            if tensor["data_offsets"] != [end - data_start, end - data_start + place.nbytes]:
                raise ValueError(f"column {column!r:.40} overlaps another or leaves a gap")
            places[column] = place
            end += place.nbytes
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise CorruptEntryError(f"{name}: columns make no sense: {exc}", reason="shape") from exc
    return places, end


def _place(tensor: dict[str, Any], start: int) -> ColumnSpec:
    if tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a column has other fields")
    kind = _KINDS[tensor["dtype"]]
    lengths: Sequence[Any] = tensor["shape"]
    # By type as well, since Python takes True and 1.0 for 1 and other readers don't.
    for number in (*lengths, *tensor["data_offsets"]):
        if type(number) is not int or not 0 <= number <= MAX_FILE_BYTES:
            raise ValueError(f"{number!r:.40} is no length or offset")
    if not 1 <= len(lengths) <= 2:
        raise ValueError("a column has one or two lengths")
    place = ColumnSpec(kind, tuple(lengths), start)
    if place.nbytes > MAX_FILE_BYTES or start % np.dtype(kind).itemsize:
        raise ValueError("a column is too large or not aligned")
    return place


def map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a whole file for reading; before Python 3.13 it keeps a descriptor.

    Raises:
        CorruptEntryError: Not a regular file, or empty.
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or not about.st_size:
            raise CorruptEntryError(
                f"{Path(path).name}: not a regular file, or empty", reason="length"
            )
        if sys.version_info >= (3, 13):
            return mmap.mmap(fd, about.st_size, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(fd, about.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def advise(whole: mmap.mmap, soon: Iterable[ColumnSpec]) -> None:
    """Have some columns read ahead, and of the others only the pages that are touched."""
    whole.madvise(mmap.MADV_RANDOM)
    for place in soon:
        start = place.start // mmap.PAGESIZE * mmap.PAGESIZE
        if place.nbytes:
            whole.madvise(mmap.MADV_WILLNEED, start, place.start + place.nbytes - start)

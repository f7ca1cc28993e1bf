# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of s3ec: one checked header, and columns behind it.

Entries, segments and filters are such files. Any safetensors reader opens them. Reading does not
use one: hostile headers must be refused before anything is allocated, and safetensors accepts
several of them (duplicate keys, shapes with zeros, unexpected names).

Layout, all integers little-endian::

    0    u64   header length N, at most HEADER_LIMIT; 8 + N a multiple of 64
    8    N     canonical JSON, padded with spaces: metadata, name, type and place of each tensor
    8+N  ...   the tensors, in the order of their places

The metadata holds ``s3ec`` (the kind of file and its format), ``namespace``, ``xxh3`` (of all
tensors), and the seal ``header_xxh3`` (of the rest of the header).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from s3ec.errors import CorruptEntryError
from s3ec.identity import canonical_json

if TYPE_CHECKING:
    import numpy.typing as npt

HEADER_LIMIT = 16 * 1024
# A tensor that starts on a cache line can be mapped or read in place.
_ALIGNMENT = 64
# Far above any index file; keeps forged numbers away from arithmetic and allocation.
MAX_FILE_BYTES = 2**40
_SEAL = "header_xxh3"
CHECKSUM = re.compile(r"[0-9a-f]{32}")
# safetensors spelling -> numpy type
_KINDS = {"U8": "u1", "U32": "<u4", "U64": "<u8"}


def checksum(data: memoryview | bytes | bytearray) -> str:
    """Return xxh3-128 of some bytes, 32 hex digits; over 10 GB/s, off the GIL for large inputs."""
    return xxhash.xxh3_128_hexdigest(data)


def running_checksum() -> xxhash.xxh3_128:
    """Return a hash object for the same, which takes the bytes part by part with ``update``."""
    return xxhash.xxh3_128()


# -- strict JSON -----------------------------------------------------------------------------------


def plain_json(text: str) -> Any:
    """Parse JSON as we write it, and refuse anything that parsers interpret differently.

    Duplicate keys, integers of more than 15 characters, NaN and infinity are refused.

    Raises:
        ValueError, RecursionError: The text is not such JSON.
    """
    return json.loads(
        text,
        object_pairs_hook=_unique,
        parse_int=_small,
        parse_float=_finite,
        parse_constant=_finite,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: parsers differ in which one they take."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _small(digits: str) -> int:
    if len(digits) > 15:
        raise ValueError("number too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


# -- the header ------------------------------------------------------------------------------------


def seal(metadata: Mapping[str, str], tensors: object) -> str:
    """Return the checksum of a whole header, without the seal itself.

    Most of a header is compared with something, but a flipped bit in a grid or a modality would go
    unnoticed.

    Args:
        tensors: safetensors' header entry of each tensor.
    """
    rest = {name: value for name, value in metadata.items() if name != _SEAL}
    return checksum(canonical_json([rest, tensors]).encode())


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    """Return the bytes in front of the tensors.

    Args:
        metadata: Without the seal.
        tensors: safetensors' header entry of each tensor.

    Raises:
        CorruptEntryError: The header would be larger than HEADER_LIMIT.
    """
    sealed = {**metadata, _SEAL: seal(metadata, tensors)}
    body = canonical_json({"__metadata__": sealed, **tensors}).encode()
    padding = -(8 + len(body)) % _ALIGNMENT
    if len(body) + padding > HEADER_LIMIT:
        raise CorruptEntryError(
            f"header of {len(body)} bytes is over the limit of {HEADER_LIMIT}", reason="header"
        )
    return struct.pack("<Q", len(body) + padding) + body + b" " * padding


def parse_header(
    blob: memoryview | bytes, version: str
) -> tuple[dict[str, str], dict[str, Any], bytes]:
    """Read and check the front of a file; allocates at most HEADER_LIMIT.

    Args:
        blob: The first ``8 + HEADER_LIMIT`` bytes of a file, or all of a shorter one.
        version: Expected value of ``s3ec``.

    Returns:
        Metadata, tensors, and all bytes in front of the tensors.

    Raises:
        CorruptEntryError: Not a file of ours, or one that lies about itself. ``reason`` is
            ``version`` if it is of another format.
    """
    if len(blob) < 8:
        raise CorruptEntryError(f"{len(blob)} bytes are too few for a header", reason="length")
    (length,) = struct.unpack_from("<Q", blob)
    if not 0 < length <= HEADER_LIMIT or (8 + length) % _ALIGNMENT:
        raise CorruptEntryError(
            f"header length {length} is not in 1..{HEADER_LIMIT}, or leaves the tensor unaligned",
            reason="header",
        )
    if len(blob) < 8 + length:
        raise CorruptEntryError("cut off inside the header", reason="length")
    front = bytes(blob[: 8 + length])
    try:
        content = plain_json(front[8:].decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise CorruptEntryError(f"header is not acceptable JSON: {exc}", reason="header") from exc
    if not isinstance(content, dict):
        raise CorruptEntryError("header must hold `__metadata__` and tensors", reason="header")
    tensors = {name: value for name, value in content.items() if name != "__metadata__"}
    metadata = content.get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptEntryError("metadata must be strings", reason="header")
    if "s3ec" not in metadata:
        raise CorruptEntryError("s3ec did not write it", reason="header")
    if metadata["s3ec"] != version:
        raise CorruptEntryError(
            f"format version {metadata['s3ec']!r:.40}, expected {version}", reason="version"
        )
    try:
        sealed = seal(metadata, tensors)
    except RecursionError as exc:
        raise CorruptEntryError("header is nested too deeply", reason="header") from exc
    if metadata.get(_SEAL) != sealed:
        raise CorruptEntryError("the header's own checksum differs", reason="header")
    # A header has one spelling: a file with any other was not written by us.
    if front[8:].rstrip(b" ") != canonical_json(content).encode():
        raise CorruptEntryError("header is not canonical JSON", reason="header")
    return metadata, tensors, front


# -- files of columns ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Type, shape and offset of one column.

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
        """Number of items."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * int(self.kind[-1])

    def of(self, blob: bytes | memoryview) -> npt.NDArray[Any]:
        """Return the column as a read-only view into the whole file; copies nothing."""
        import numpy as np

        return np.frombuffer(blob, self.kind, self.count, self.start).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The checked header of a file.

    Attributes:
        metadata: Its metadata, seal included.
        places: Its columns, by name, in their order.
        data_start: Offset of the first column, bytes.
    """

    metadata: Mapping[str, str]
    places: Mapping[str, ColumnSpec]
    data_start: int

    def check_data(self, blob: bytes | memoryview, name: str) -> None:
        """Compare all columns with their checksum; reads every byte.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum``.
        """
        if checksum(memoryview(blob)[self.data_start :]) != self.metadata["xxh3"]:
            raise CorruptEntryError(f"{name}: checksum differs", reason="checksum")


def encode_columns(
    metadata: Mapping[str, str], columns: Mapping[str, npt.NDArray[Any]]
) -> list[bytes | memoryview]:
    """Return a whole file in pieces: its header, then each column without a copy.

    Args:
        metadata: Must hold ``s3ec`` and ``namespace``.
        columns: Contiguous; by falling item size, so that each is aligned.
    """
    import numpy as np

    pieces: list[bytes | memoryview] = []
    tensors: dict[str, Any] = {}
    running, at = running_checksum(), 0
    spellings = {np.dtype(kind): spelling for spelling, kind in _KINDS.items()}
    for name, column in columns.items():
        piece = np.ascontiguousarray(column)
        tensors[name] = {
            "dtype": spellings[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
        if piece.nbytes:  # a memoryview of nothing cannot be cast
            pieces.append(piece.data.cast("B"))
            running.update(pieces[-1])
    return [encode_header({**metadata, "xxh3": running.hexdigest()}, tensors), *pieces]


def parse_columns(
    front: bytes | memoryview, nbytes: int, *, kind: str, namespace: str, name: str
) -> FileHeader:
    """Read and check a header against the size of its file; allocates at most HEADER_LIMIT.

    Args:
        front: The file, of which only the header is read, or as much as parse_header needs.
        nbytes: Size of the file.
        kind: Expected value of ``s3ec``.
        namespace: Namespace that it must have been written for.
        name: Name of the file, for errors.

    Raises:
        CorruptEntryError: ``reason`` is ``version`` if the file is of another format.
    """
    try:
        metadata, tensors, header = parse_header(front, kind)
    except CorruptEntryError as exc:
        raise CorruptEntryError(f"{name}: {exc}", reason=exc.reason) from exc
    if not CHECKSUM.fullmatch(metadata.get("xxh3", "")):
        raise CorruptEntryError(f"{name}: no checksum", reason="header")
    if metadata.get("namespace") != namespace:
        raise CorruptEntryError(
            f"{name}: written for namespace {metadata.get('namespace')!r:.100}",
            reason="namespace",
        )
    places, total = _places(tensors, len(header), name)
    if nbytes != total:
        raise CorruptEntryError(f"{name}: {nbytes} bytes, expected {total}", reason="length")
    return FileHeader(metadata, places, len(header))


def _places(
    content: dict[str, Any], data_start: int, name: str
) -> tuple[dict[str, ColumnSpec], int]:
    """Return the columns in the order of their offsets, which must leave no gap; and the end."""
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
    if place.nbytes > MAX_FILE_BYTES or start % int(kind[-1]):
        raise ValueError("a column is too large or not aligned")
    return place


def map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a whole file, and request read-ahead; before Python 3.13 it keeps a descriptor.

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
            whole = mmap.mmap(fd, about.st_size, access=mmap.ACCESS_READ, trackfd=False)
        else:
            whole = mmap.mmap(fd, about.st_size, access=mmap.ACCESS_READ)
        whole.madvise(mmap.MADV_WILLNEED)  # a lookup must not wait for the disk
        return whole
    finally:
        os.close(fd)

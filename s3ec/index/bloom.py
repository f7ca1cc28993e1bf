# SPDX-License-Identifier: Apache-2.0
"""A blocked bloom filter: one cache line a lookup, for corpora whose columns don't fit.

A key sets five bits in one block of 512. The block comes from the low half of the digest's
first number (a shard's digests share leading bits), the bits from nine bits each of the second::

    block = ((hi & 0xffffffff) * blocks) >> 32
    bit i = (lo >> 9 * i) & 511, the least significant bit of byte 0 being bit 0

There is a block for every 50 keys. Such a filter says yes to 0.95% of the keys that were not put
in. Blocks fill unevenly, which costs about 7% more memory than a filter without blocks. The file
has one column ``bloom``, U8 (blocks, 64).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from s3ec import safetensors_file
from s3ec.errors import CorruptEntryError
from s3ec.index.rows import Array
from s3ec.safetensors_file import ColumnSpec, FileHeader

KIND = "bloom-1"
BLOCK_BITS = 512
# With five probes for 50 keys the filter is about as small as it can be at its rate. Fewer probes
# take more memory, and more of them take more of a lookup's time.
PROBES = 5
KEYS_PER_BLOCK = 50
MAX_BLOCKS = 2**31
_BLOCK_BYTES = BLOCK_BITS // 8
_COLUMN = "bloom"
_FIRST, _SECOND = range(3), range(PROBES - 3)
BUILD_KEYS = 2**18
"""Keys placed together: some MiB of temporaries."""


def blocks_for(entries: int) -> int:
    """How many blocks a filter of so many keys has.

    Raises:
        CorruptEntryError: It would be larger than a filter may be.
    """
    blocks = max(1, -(-entries // KEYS_PER_BLOCK))
    if blocks > MAX_BLOCKS:
        raise CorruptEntryError(f"a filter of {entries} keys is too large", reason="size")
    return blocks


def build_bloom(hi: Array, lo: Array, namespace: str) -> list[bytes | memoryview]:
    """The pieces of a filter file; about 0.1 us a key, temporarily 10 bytes a key.

    Args:
        hi: First halves of the digests, shape (n,), U64.
        lo: Second halves.
        namespace: Which one the keys belong to.
    """
    blocks = blocks_for(len(hi))
    # A byte per bit, since setting bytes needs no read before the write, and packing is quick.
    bits = np.zeros(blocks * BLOCK_BITS, np.bool_)
    for start in range(0, len(hi), BUILD_KEYS):
        some = slice(start, start + BUILD_KEYS)
        block = (hi[some] & np.uint64(0xFFFFFFFF)) * np.uint64(blocks) >> np.uint64(32)
        base = block * np.uint64(BLOCK_BITS)
        for probe in range(PROBES):
            bits[base + (lo[some] >> np.uint64(9 * probe) & np.uint64(511))] = True
    packed = np.packbits(bits, bitorder="little").reshape(blocks, _BLOCK_BYTES)
    metadata = {
        "s3ec": KIND,
        "namespace": namespace,
        "entries": str(len(hi)),
        "probes": str(PROBES),
    }
    return safetensors_file.encode_columns(metadata, {_COLUMN: packed})


class Bloom:
    """Lookups in one filter. Immutable; any thread may look up.

    Attributes:
        name: What errors call it.
        entries: Keys in it.
        blocks: Of 64 bytes each.
    """

    __slots__ = ("_bits", "_blob", "_front", "blocks", "entries", "name")

    def __init__(self, front: FileHeader, blob: memoryview, *, name: str) -> None:
        """Use open or parse."""
        place = front.places[_COLUMN]
        self.name = name
        self.entries = int(front.metadata["entries"])
        self.blocks = place.shape[0]
        self._front = front
        self._blob = blob
        self._bits = blob[place.start :]

    @classmethod
    def open(cls, path: str | os.PathLike[str], namespace: str) -> Bloom:
        """Map a file that was checked when it was downloaded; asks for it to be read ahead.

        Raises:
            CorruptEntryError: Not a filter of this namespace and size.
            OSError: It cannot be opened.
        """
        whole = safetensors_file.map_file(path)
        bloom = cls.parse(memoryview(whole), namespace, name=Path(path).name)
        safetensors_file.advise(whole, bloom._front.places.values())
        return bloom

    @classmethod
    def parse(cls, blob: bytes | memoryview, namespace: str, *, name: str = "filter") -> Bloom:
        """A filter file's bytes; checks the structure, not the bits (see check).

        Raises:
            CorruptEntryError: As for open.
        """
        whole = memoryview(blob)
        front = safetensors_file.parse_columns(whole, kind=KIND, namespace=namespace, name=name)
        _check_shape(front, name)
        return cls(front, whole, name=name)

    def __len__(self) -> int:
        return self.entries

    def maybe(self, hi: int, lo: int) -> bool:
        """Whether this digest may have been put in; never False for one that was.

        Args:
            hi: First half of the digest, 0..2**64-1.
            lo: Second half.
        """
        at = ((hi & 0xFFFFFFFF) * self.blocks >> 32) << 6
        bits = self._bits
        # In two halves, since Python handles numbers of up to 30 bits in half of the time.
        some = lo & 0x7FFFFFF
        for _ in _FIRST:
            if not bits[at + (some >> 3 & 63)] >> (some & 7) & 1:
                return False
            some >>= 9
        some = lo >> 27 & 0x7FFFFFF
        for _ in _SECOND:
            if not bits[at + (some >> 3 & 63)] >> (some & 7) & 1:
                return False
            some >>= 9
        return True

    def check(self) -> None:
        """Compare every byte with the checksum.

        Raises:
            CorruptEntryError: ``reason`` is ``checksum``.
        """
        self._front.check_data(self._blob, self.name)


def _check_shape(front: FileHeader, name: str) -> None:
    """Compare the column with what the metadata says of it."""
    entries, probes = (front.metadata.get(field, "") for field in ("entries", "probes"))
    if not (entries.isascii() and entries.isdigit() and len(entries) <= 12):
        raise CorruptEntryError(f"{name}: {entries!r:.40} keys", reason="size")
    if probes != str(PROBES):
        raise CorruptEntryError(f"{name}: {probes!r:.40} probes", reason="shape")
    place: ColumnSpec | None = front.places.get(_COLUMN)
    if place is None or len(front.places) != 1:
        raise CorruptEntryError(f"{name}: has other columns than a filter", reason="shape")
    fits = place.kind == "u1" and place.shape[1:] == (_BLOCK_BYTES,)
    if not fits or not 1 <= place.shape[0] <= MAX_BLOCKS:
        raise CorruptEntryError(f"{name}: {place.shape} are no blocks", reason="shape")

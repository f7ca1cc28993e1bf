# SPDX-License-Identifier: Apache-2.0
"""A blocked bloom filter: one cache line a lookup, for corpora whose columns don't fit.

A key sets ``probes`` bits in one block of 512. The block comes from the low half of the digest's
first number (a shard's digests share leading bits), the bits from nine bits each of the second::

    block = ((hi & 0xffffffff) * blocks) >> 32
    bit i = (lo >> 9 * i) & 511, the least significant bit of byte 0 being bit 0

Blocks fill unevenly, which costs about 7% more memory at 1% than a filter without blocks; the size
is solved for that. The file has one column ``bloom``, U8 (blocks, 64).
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from s3ec import safetensors_file
from s3ec.errors import CorruptEntryError
from s3ec.index.rows import Array
from s3ec.safetensors_file import ColumnSpec, FileHeader

KIND = "bloom-1"
BLOCK_BITS = 512
MAX_PROBES = 6
MAX_BLOCKS = 2**31
_BLOCK_BYTES = BLOCK_BITS // 8
_COLUMN = "bloom"
# Aim below what was asked for, so that chance leaves the measured rate there.
_AIM = 0.95
# Memory that is given for fewer probes, which is what a lookup's time goes to.
_ROOM = 1.05
BUILD_KEYS = 2**18
"""Keys placed together: some MiB of temporaries."""


def expected_fpr(entries: int, blocks: float, probes: int) -> float:
    """Rate at which keys that were not put in are said to be there.

    The number of keys in a block is Poisson distributed around ``entries / blocks``.
    """
    mean = entries / blocks
    spread = 12 * math.sqrt(mean) + 12
    counts = np.arange(max(0, int(mean - spread)), int(mean + spread) + 1)
    logs = counts * math.log(mean) - mean if mean else np.where(counts, -np.inf, 0.0)
    weights = np.exp(logs - np.array([math.lgamma(count + 1) for count in counts.tolist()]))
    unset = (1 - 1 / BLOCK_BITS) ** (probes * counts)
    return float((weights * (1 - unset) ** probes).sum())


def size_for(entries: int, fpr: float) -> tuple[int, int]:
    """The smallest filter that keeps the rate: (blocks, probes).

    Raises:
        CorruptEntryError: It would be larger than a filter may be.
    """
    if not entries:
        return 1, 1
    density, probes = _density(fpr)
    blocks = max(1, math.ceil(entries * density))
    if blocks > MAX_BLOCKS:
        raise CorruptEntryError(f"a filter of {entries} keys is too large", reason="size")
    return blocks, probes


@lru_cache(maxsize=16)
def _density(fpr: float) -> tuple[float, int]:
    """Blocks per key, and probes: the fewest at which the filter is about as small as it can be.

    Cost: 50 ms, but once for all shards.
    """
    choices = [(_density_of(fpr * _AIM, probes), probes) for probes in range(1, MAX_PROBES + 1)]
    smallest = min(choices)[0]
    return next(choice for choice in choices if choice[0] <= _ROOM * smallest)


def _density_of(fpr: float, probes: int) -> float:
    """Blocks per key at which so many probes give this rate."""
    low, high = 1e-5, 1e3
    for _ in range(50):
        middle = math.sqrt(low * high)
        if expected_fpr(1, middle, probes) <= fpr:
            high = middle
        else:
            low = middle
    return high


def build_bloom(hi: Array, lo: Array, fpr: float, namespace: str) -> list[bytes | memoryview]:
    """The pieces of a filter file; about 0.1 us a key, temporarily 10 bytes a key.

    Args:
        hi: First halves of the digests, shape (n,), U64.
        lo: Second halves.
        fpr: The rate to keep, between 0 and 1.
        namespace: Which one the keys belong to.
    """
    blocks, probes = size_for(len(hi), fpr)
    # A byte per bit, since setting bytes needs no read before the write, and packing is quick.
    bits = np.zeros(blocks * BLOCK_BITS, np.bool_)
    for start in range(0, len(hi), BUILD_KEYS):
        some = slice(start, start + BUILD_KEYS)
        block = (hi[some] & np.uint64(0xFFFFFFFF)) * np.uint64(blocks) >> np.uint64(32)
        base = block * np.uint64(BLOCK_BITS)
        for probe in range(probes):
            bits[base + (lo[some] >> np.uint64(9 * probe) & np.uint64(511))] = True
    packed = np.packbits(bits, bitorder="little").reshape(blocks, _BLOCK_BYTES)
    metadata = {
        "s3ec": KIND,
        "namespace": namespace,
        "entries": str(len(hi)),
        "probes": str(probes),
        "fpr": repr(float(fpr)),
    }
    return safetensors_file.encode_columns(metadata, {_COLUMN: packed})


class Bloom:
    """Lookups in one filter. Immutable; any thread may look up.

    Attributes:
        name: What errors call it.
        entries: Keys in it.
        blocks: Of 64 bytes each.
        probes: Bits per key.
    """

    __slots__ = (
        *("_bits", "_blob", "_first", "_front", "_second", "blocks", "entries", "name", "probes"),
    )

    def __init__(self, front: FileHeader, blob: memoryview, *, name: str) -> None:
        """Use open or parse."""
        place = front.places[_COLUMN]
        self.name = name
        self.entries = int(front.metadata["entries"])
        self.probes = int(front.metadata["probes"])
        self.blocks = place.shape[0]
        self._front = front
        self._blob = blob
        self._bits = blob[place.start :]
        self._first, self._second = range(min(3, self.probes)), range(max(0, self.probes - 3))

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
        for _ in self._first:
            if not bits[at + (some >> 3 & 63)] >> (some & 7) & 1:
                return False
            some >>= 9
        some = lo >> 27 & 0x7FFFFFF
        for _ in self._second:
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
    if probes not in {str(number) for number in range(1, MAX_PROBES + 1)}:
        raise CorruptEntryError(f"{name}: {probes!r:.40} probes", reason="shape")
    place: ColumnSpec | None = front.places.get(_COLUMN)
    if place is None or len(front.places) != 1:
        raise CorruptEntryError(f"{name}: has other columns than a filter", reason="shape")
    fits = place.kind == "u1" and place.shape[1:] == (_BLOCK_BYTES,)
    if not fits or not 1 <= place.shape[0] <= MAX_BLOCKS:
        raise CorruptEntryError(f"{name}: {place.shape} are no blocks", reason="shape")

# SPDX-License-Identifier: Apache-2.0
"""A bloom filter in front of rows: it decides most misses by one number of 64 bits.

A key sets five bits of one word. The leading bits of the digest select the word, so that sorted
rows fill one word after the other. The last 12 bits select a mask with the five bits::

    word = ((hi >> 32) * words) >> 32
    mask = MASKS[lo & 4095]

Bit j of mask n is the number in bits 58-6j .. 63-6j of n * 0x9E3779B97F4A7C15. There are two words
for each nine keys. Such a filter passes 0.8% of the keys that were not added; the rows decide about
these. A snapshot's filter is a file with only the words; it is made on this node and never stored
in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from s3ec.index.snapshot import PARTS, Array, Rows

WORD_BYTES = 8
_PROBES = 5
_MASK_BITS = 12


def _masks() -> Array:
    numbers = np.arange(1 << _MASK_BITS, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    found = np.zeros(len(numbers), "<u8")
    for probe in range(_PROBES):
        found |= np.uint64(1) << (numbers >> np.uint64(58 - 6 * probe) & np.uint64(63))
    return found


_MASKS = _masks()
MASKS: tuple[int, ...] = tuple(_MASKS.tolist())
"""The masks as Python's numbers, for lookups."""


def words_for(rows: int) -> int:
    """How many words the filter of so many keys has: equally many for each part of the rows."""
    return max(1, -(-2 * rows // (9 * PARTS))) * PARTS


def bloom(rows: Rows) -> Iterator[Array]:
    """Yield the words of sorted rows, part by part, uint64."""
    words = words_for(len(rows))
    for number in range(PARTS):
        part = rows.part(number)
        found = np.zeros(words // PARTS, "<u8")
        if len(part):
            at = ((part.hi >> np.uint64(32)) * np.uint64(words)) >> np.uint64(32)
            starts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
            masks = _MASKS.take(part.lo & np.uint64(len(_MASKS) - 1))
            first = np.uint64(number * len(found))
            found[at[starts] - first] = np.bitwise_or.reduceat(masks, starts)
        yield found


def write_bloom(file: BinaryIO, rows: Rows) -> None:
    """Write the filter of sorted rows; about 0.1 us per row. Blocking."""
    for words in bloom(rows):
        file.write(words.data)


def maybe(words: memoryview[int], hi: int, lo: int) -> bool:
    """True if a digest may have been added; never False for one that was.

    Args:
        words: The file's, as numbers.
        hi: First half of the digest, 0..2**64-1.
        lo: Second half.
    """
    mask = MASKS[lo & len(MASKS) - 1]
    return words[(hi >> 32) * len(words) >> 32] & mask == mask

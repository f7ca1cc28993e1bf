# SPDX-License-Identifier: Apache-2.0
"""A blocked bloom filter in front of a snapshot: it decides most misses in one cache line.

A key sets five bits in one block of 512. The block comes from the leading bits of the digest, so
that sorted rows fill one block after the other; the bits are nine bits each of its second half::

    block = ((hi >> 32) * blocks) >> 32
    bit i = (lo >> 9 * i) & 511, the least significant bit of byte 0 being bit 0

There is a block for every 50 keys. Such a filter says yes to 0.95% of the keys that were not put
in. The file is the blocks and nothing else. It belongs to the snapshot of the same name, is made
on this node and never stored in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

from s3ec.index2.snapshot import Array

BLOCK_BITS = 512
BLOCK_BYTES = BLOCK_BITS // 8
# With five probes for 50 keys the filter is about as small as it can be at its rate. Fewer probes
# take more memory, and more of them take more of a lookup's time.
PROBES = 5
KEYS_PER_BLOCK = 50


def blocks_for(rows: int) -> int:
    """How many blocks the filter of so many keys has."""
    return max(1, -(-rows // KEYS_PER_BLOCK))


def write_bloom(file: BinaryIO, rows: int, chunks: Iterable[tuple[Array, Array]]) -> None:
    """Write the filter of sorted rows; about 0.1 us a row, and a few bytes of a chunk's rows.

    Args:
        rows: How many there are.
        chunks: First and second halves of their digests, in order.
    """
    raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""A blocked bloom filter in front of a snapshot: it decides most misses in one cache line.

A key sets two bits in one block of 512. The block comes from the leading bits of the digest, so
that sorted rows fill one block after the other; the bits are nine bits each of its second half::

    block = ((hi >> 32) * blocks) >> 32
    bit i = (lo >> 9 * i) & 511, the least significant bit of byte 0 being bit 0

There is a block for every 40 keys. Such a filter says yes to 2% of the keys that were not put in;
of these the rows decide. The file is the blocks and nothing else. It belongs to the snapshot of the
same name, is made on this node and never stored in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from s3ec.index.snapshot import Array

BLOCK_BITS = 512
BLOCK_BYTES = BLOCK_BITS // 8
# More probes take more of the time of each lookup that finds its key, and two let few others by.
PROBES = 2
KEYS_PER_BLOCK = 40


def blocks_for(rows: int) -> int:
    """How many blocks the filter of so many keys has."""
    return max(1, -(-rows // KEYS_PER_BLOCK))


def write_bloom(file: BinaryIO, rows: int, chunks: Iterable[tuple[Array, Array]]) -> None:
    """Write the filter of sorted rows; about 0.1 us a row, and a few bytes of a chunk's rows.

    Args:
        rows: How many there are.
        chunks: First and second halves of their digests, in order.
    """
    blocks = blocks_for(rows)
    written = 0  # blocks
    open_from, open_bits = 0, np.zeros(0, np.bool_)  # blocks that the next chunk may add to
    for hi, lo in chunks:
        block = ((hi >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)
        last = int(block[-1])
        # A byte per bit, since setting bytes needs no read before the write.
        bits = np.zeros((last + 1 - open_from) * BLOCK_BITS, np.bool_)
        bits[: len(open_bits)] = open_bits
        base = (block - np.uint64(open_from)) * np.uint64(BLOCK_BITS)
        for probe in range(PROBES):
            bits[base + (lo >> np.uint64(9 * probe) & np.uint64(511))] = True
        done = (last - open_from) * BLOCK_BITS
        file.write(np.packbits(bits[:done], bitorder="little").data)
        written += last - open_from
        open_from, open_bits = last, bits[done:]
    file.write(np.packbits(open_bits, bitorder="little").data)
    written += len(open_bits) // BLOCK_BITS
    file.write(bytes((blocks - written) * BLOCK_BYTES))


def maybe(blocks: memoryview, hi: int, lo: int) -> bool:
    """Whether a digest may have been put in; never False for one that was.

    Args:
        blocks: The file's bytes.
        hi: First half of the digest, 0..2**64-1.
        lo: Second half.
    """
    at = ((hi >> 32) * (len(blocks) // BLOCK_BYTES) >> 32) * BLOCK_BYTES
    for _ in range(PROBES):
        if not blocks[at + (lo >> 3 & 63)] >> (lo & 7) & 1:
            return False
        lo >>= 9
    return True

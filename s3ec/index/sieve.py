# SPDX-License-Identifier: Apache-2.0
"""A look at one byte that says of most digests that they are not in a set."""

from __future__ import annotations

import numpy as np

from s3ec.index.rows import Array


class Sieve:
    """A byte for each value of the low bits of digests' first halves: 1 where the set has it.

    A 1 means "perhaps", a 0 "no". Nothing is ever taken out. One thread at a time may add, any
    may look: ``marks[hi & mask]``.

    Attributes:
        marks: A power of two of bytes, 8 to 16 a digest, so that one in ten that is not in the
            set finds a 1.
        mask: What of a first half selects its byte.
    """

    __slots__ = ("marks", "mask")

    def __init__(self, hi: Array, *, room: int = 0) -> None:
        """Mark what is in the set now; some 10 ns a digest.

        Args:
            hi: First halves of the digests, shape (n,).
            room: How many more may be added before it lets through more than it should.
        """
        digests = len(hi) + room
        found = np.zeros(8 << digests.bit_length() if digests else 1, "u1")
        self.mask = len(found) - 1
        found[(hi & np.uint64(self.mask)).astype(np.intp)] = 1
        self.marks = bytearray(found)

    def add(self, hi: int) -> None:
        """Mark one more."""
        self.marks[hi & self.mask] = 1

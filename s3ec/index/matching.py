# SPDX-License-Identifier: Apache-2.0
"""Which rows of one sorted table another one has too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from s3ec.index.rows import Rows


def find_in(rows: Rows, other: Rows) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Look up each digest of ``rows`` in ``other``; both sorted, without duplicates.

    Returns:
        Positions in ``other``, and whether the digest is really there; shape (len(rows),) each.
        Where it is not, the position is any that is valid, 0 in an empty table.
    """
    if not len(other):
        return np.zeros(len(rows), np.intp), np.zeros(len(rows), np.bool_)
    positions = np.searchsorted(other.digest_hi, rows.digest_hi)
    np.minimum(positions, len(other) - 1, out=positions)
    found = other.digest_hi[positions] == rows.digest_hi
    unsettled = found & (other.digest_lo[positions] != rows.digest_lo)
    if unsettled.any():  # first halves are shared by chance never, and on purpose by any number
        some = np.flatnonzero(unsettled)
        positions[some] = _among_equals(rows, some, other)
    found &= other.digest_lo[positions] == rows.digest_lo
    return positions, found


def _among_equals(rows: Rows, some: npt.NDArray[np.intp], other: Rows) -> npt.NDArray[np.intp]:
    """Where the second halves of some rows stand, or would, among rows of equal first half.

    All are bisected at once: as many steps as the longest run of equals has binary digits.
    """
    hi, lo = rows.digest_hi[some], rows.digest_lo[some]
    first = np.searchsorted(other.digest_hi, hi)
    last = np.searchsorted(other.digest_hi, hi, side="right") - 1
    while (first < last).any():
        middle = (first + last) // 2
        below = other.digest_lo[middle] < lo
        first = np.where(below, np.minimum(middle + 1, last), first)
        last = np.where(below, last, middle)
    return first

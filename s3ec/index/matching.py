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
    # First halves that are equal stand beside each other: few steps, and none in practice.
    while True:
        behind = (other.digest_hi[positions] == rows.digest_hi) & (
            other.digest_lo[positions] < rows.digest_lo
        )
        behind &= positions < len(other) - 1
        if not behind.any():
            break
        positions[behind] += 1
    found = (other.digest_hi[positions] == rows.digest_hi) & (
        other.digest_lo[positions] == rows.digest_lo
    )
    return positions, found

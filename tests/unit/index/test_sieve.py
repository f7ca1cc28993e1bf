# SPDX-License-Identifier: Apache-2.0
"""The sieve lets through what is in the set, and little else."""

from __future__ import annotations

import numpy as np

from s3ec.index.lookup import PresenceFilter


def passes(sieve: PresenceFilter, hi: int) -> bool:
    return bool(sieve.marks[hi & sieve.mask])


def test_what_is_in_the_set_and_what_is_added_passes_and_few_others() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**64, 3000, "u8")
    inside, added, others = (part.tolist() for part in np.split(numbers, 3))
    sieve = PresenceFilter(np.array(inside, "<u8"), room=len(added))
    for hi in added:
        sieve.add(hi)
    assert all(passes(sieve, hi) for hi in inside + added)
    assert sum(passes(sieve, hi) for hi in others) < len(others) / 4


def test_an_empty_set_lets_nothing_through() -> None:
    sieve = PresenceFilter(np.empty(0, "<u8"))
    assert not any(passes(sieve, hi) for hi in (0, 1, 2**64 - 1))

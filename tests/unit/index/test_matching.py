# SPDX-License-Identifier: Apache-2.0
"""Rows of one table in another: found for any digests, and in few steps for hostile ones too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from s3ec.index.rows import Rows, find_in
from tests.unit.index.columns import Items, items


def sorted_rows(some: Items) -> Rows:
    return Rows.from_facts(some).sorted_unique()


@pytest.mark.slow
@given(items, items)
def test_positions_are_those_of_a_dict(one: Items, other: Items) -> None:
    wanted, table = sorted_rows(one), sorted_rows(other)
    places = {table.digest(row): row for row in range(len(table))}
    at, found = find_in(wanted, table)
    for row in range(len(wanted)):
        place = places.get(wanted.digest(row))
        assert found[row] == (place is not None)
        assert place is None or at[row] == place
        assert 0 <= at[row] < max(1, len(table))


class Counted(np.ndarray[Any, Any]):
    """Counts how often somebody takes items out of it."""

    looks = 0

    def __getitem__(self, which: Any) -> Any:
        Counted.looks += 1
        return np.asarray(self)[which]


@pytest.mark.parametrize("apart", [1, 2])
def test_equal_first_halves_cost_few_steps(apart: int) -> None:
    """Whoever writes to the bucket may announce digests that nobody hashed."""
    count = 4096
    lo = np.arange(count, dtype="<u8") * np.uint64(2)
    hostile = Rows.of_digests(np.full(count, 7, "<u8"), lo)
    wanted = Rows.of_digests(np.full(count, 7, "<u8"), lo + np.uint64(2 - apart))
    Counted.looks = 0
    table = replace(hostile, digest_lo=lo.view(Counted))
    at, found = find_in(wanted, table)
    assert 0 < Counted.looks < 40
    if apart == 2:
        assert found.all()
        assert (at == np.arange(count)).all()
    else:
        assert not found.any()

# SPDX-License-Identifier: Apache-2.0
"""Deltas merged as they come: the result does not know in which order that was."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.index.lookup import Overlay
from s3ec.index.rows import Rows, merge
from tests.unit.index.columns import Items, items
from tests.unit.index.manifests import ulid_of


def rows_in(overlay: Overlay) -> Rows:
    return Rows.empty() if overlay.segment is None else overlay.segment.rows()


@pytest.mark.slow
@given(st.lists(items, max_size=6), st.randoms(use_true_random=False), st.integers(1, 6))
def test_any_order_and_any_parts_give_the_merge_by_rising_ulid(
    parts: list[Items], chance: random.Random, at_a_time: int
) -> None:
    deltas = {ulid_of(n): Rows.from_facts(part).sorted_unique() for n, part in enumerate(parts)}
    names = list(deltas)
    chance.shuffle(names)
    overlay = Overlay()
    for start in range(0, len(names), at_a_time):
        overlay = overlay.plus({name: deltas[name] for name in names[start : start + at_a_time]})
    assert overlay.ulids == deltas.keys()
    expected = merge([deltas[name] for name in sorted(deltas)], keep_tombstones=True)
    found = rows_in(overlay)
    assert all(
        (found.columns()[name] == column).all() for name, column in expected.columns().items()
    )
    assert len(found) == len(expected)


def test_an_empty_overlay_has_no_segment() -> None:
    assert Overlay().segment is None
    assert Overlay().plus({}).segment is None

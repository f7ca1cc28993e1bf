# SPDX-License-Identifier: Apache-2.0
"""Columns, which of two rows counts, and rows of one table in another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.codec import Shape
from s3ec.identity import split_digest
from s3ec.index.rows import COLUMNS, EntryInfo, Rows, Tombstone, concat, find_in, merge
from tests.unit.index import columns
from tests.unit.index.columns import Items, as_items, halves_of, items, rows_of, winners


@given(columns.items)
def test_rows_say_what_they_were_made_of(items: Items) -> None:
    rows = Rows.from_facts(items)
    assert len(rows) == len(items)
    assert as_items(rows) == items
    assert {name: column.dtype.str.lstrip("|") for name, column in rows.columns().items()} == (
        COLUMNS
    )


@given(columns.items)
def test_sorted_unique_keeps_the_newest_of_each_digest(items: Items) -> None:
    rows = Rows.from_facts(items).sorted_unique()
    assert dict(as_items(rows)) == winners([items])
    assert halves_of(rows) == sorted({split_digest(digest) for digest, _ in items})
    assert rows.is_sorted()
    assert rows.sorted_unique() is rows


@pytest.mark.slow
@given(st.lists(columns.items, max_size=5), st.booleans())
def test_merge_is_last_writer_wins(parts: list[Items], keep: bool) -> None:
    merged = merge([Rows.from_facts(part) for part in parts], keep_tombstones=keep)
    expected = winners(parts)
    if not keep:
        expected = {d: said for d, said in expected.items() if not isinstance(said, Tombstone)}
    assert as_items(merged) == list(expected.items())


@pytest.mark.slow
@given(st.lists(columns.items, max_size=4))
def test_merging_in_steps_is_merging_at_once(parts: list[Items]) -> None:
    made = [Rows.from_facts(part) for part in parts]
    stepwise = Rows.empty()
    for part in made:
        stepwise = merge([stepwise, part], keep_tombstones=True)
    assert as_items(stepwise) == as_items(merge(made, keep_tombstones=True))


def test_at_equal_times_the_later_part_wins() -> None:
    base, delta = (Rows.from_facts([(b"k" * 16, EntryInfo(rows=n, time_s=7))]) for n in (1, 2))
    assert merge([base, delta], keep_tombstones=True).facts(0).rows == 2
    assert merge([delta, base], keep_tombstones=True).facts(0).rows == 1


def test_at_equal_times_a_tombstone_wins() -> None:
    stored = Rows.from_facts([(b"k" * 16, EntryInfo(rows=3, time_s=9))])
    deleted = Rows.from_facts([(b"k" * 16, Tombstone(9))])
    for parts in ([stored, deleted], [deleted, stored]):
        assert as_items(merge(parts, keep_tombstones=True)) == as_items(deleted)


def test_an_older_tombstone_in_a_later_part_deletes_nothing() -> None:
    stored = Rows.from_facts([(b"k" * 16, EntryInfo(rows=3, time_s=9))])
    deleted = Rows.from_facts([(b"k" * 16, Tombstone(8))])
    assert as_items(merge([stored, deleted], keep_tombstones=False)) == as_items(stored)


def test_deleted_and_stored_again_is_there() -> None:
    story: Items = [(b"k" * 16, EntryInfo(time_s=1)), (b"k" * 16, Tombstone(2))]
    again: Items = [(b"k" * 16, EntryInfo(rows=5, time_s=3))]
    merged = merge([Rows.from_facts(story), Rows.from_facts(again)], keep_tombstones=False)
    assert as_items(merged) == again


def test_merge_of_nothing_is_empty() -> None:
    assert len(merge([], keep_tombstones=True)) == 0
    assert len(merge([Rows.empty(), Rows.empty()], keep_tombstones=False)) == 0
    assert as_items(concat([])) == []


def test_many_equal_first_halves_are_sorted_by_the_second() -> None:
    lo = np.arange(1000, dtype="<u8")[::-1].copy()
    rows = Rows.of_digests(np.full(1000, 5, "<u8"), lo)
    assert halves_of(rows.sorted_unique()) == [(5, number) for number in range(1000)]


@pytest.mark.parametrize(("first", "last"), [(0, 255), (0, 0), (255, 255), (16, 31), (200, 255)])
def test_between_takes_the_leading_bytes_asked_for(first: int, last: int) -> None:
    edges = [(byte << 56 | low, 0) for byte in range(256) for low in (0, 2**56 - 1)]
    hi = np.array([hi for hi, _ in edges], "<u8")
    rows = Rows.of_digests(hi, np.zeros(len(hi), "<u8"))
    expected = [half for half in edges if first <= half[0] >> 56 <= last]
    assert halves_of(rows.between(first, last)) == expected


def test_ranges_put_together_are_the_whole() -> None:
    rows = rows_of(500)
    parts = [rows.between(first, first + 63) for first in range(0, 256, 64)]
    assert as_items(concat(parts)) == as_items(rows)


def test_numbers_that_no_column_can_hold_are_unknown() -> None:
    wild = EntryInfo(2**64, 2**32, -1, "int4", 2**40, 2**33)
    assert Rows.from_facts([(bytes(16), wild)]).facts(0) == EntryInfo()


def test_a_digest_is_two_big_endian_numbers() -> None:
    digest = bytes(range(16))
    assert split_digest(digest) == (0x0001020304050607, 0x08090A0B0C0D0E0F)
    assert Rows.from_facts([(digest, EntryInfo())]).digest(0) == digest


@pytest.mark.parametrize(
    ("known", "contradicts"),
    [
        (EntryInfo(), False),
        (EntryInfo(rows=4, width=8, dtype="bfloat16"), False),
        (EntryInfo(rows=5), True),
        (EntryInfo(width=9), True),
        (EntryInfo(dtype="float16"), True),
        (EntryInfo(rows=4, dtype="float32"), True),
    ],
)
def test_only_what_is_known_contradicts(known: EntryInfo, contradicts: bool) -> None:
    assert known.contradicts(Shape(4, 8, "bfloat16")) is contradicts


# -- rows of one table in another ------------------------------------------------------------------


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

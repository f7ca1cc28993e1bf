# SPDX-License-Identifier: Apache-2.0
"""Files of rows: lookups against a dictionary, and every damage that a check must find."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec.errors import CorruptEntryError
from s3ec.index import snapshot as snapshot_module
from s3ec.index.bloom import WORD_BYTES, maybe, words_for, write_bloom
from s3ec.index.deltas import Overlay, parse_delta
from s3ec.index.names import Names, SnapshotName, time_s
from s3ec.index.snapshot import (
    PARTS,
    Rows,
    Segment,
    Spill,
    encode,
    is_in,
    merge,
    without,
    write_rows,
)
from tests.support.clock import START_S
from tests.unit.index.corpus import LAYOUT, NAMESPACE, rows_for

# First halves that collide, and such at the ends of the range, beside any others.
HALVES = st.one_of(st.integers(0, 3), st.integers(2**64 - 3, 2**64 - 1), st.integers(0, 2**64 - 1))
PAIRS = st.lists(st.tuples(HALVES, HALVES), max_size=60)


def rows_of(pairs: list[tuple[int, int]]) -> Rows:
    digests = [hi.to_bytes(8, "big") + lo.to_bytes(8, "big") for hi, lo in pairs]
    return Rows.of(digests, [number % 1000 for number in range(len(pairs))])


def contents(rows: Rows) -> dict[tuple[int, int], int]:
    pairs = zip(rows.hi.tolist(), rows.lo.tolist(), strict=True)
    return dict(zip(pairs, rows.nbytes.tolist(), strict=True))


@given(PAIRS, PAIRS)
@settings(max_examples=200, deadline=None)
def test_lookups_equal_those_of_a_dictionary(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    rows = merge([rows_of(pairs)])
    expected = {pair: number % 1000 for number, pair in enumerate(pairs)}
    blob = b"".join(encode(rows, NAMESPACE))
    segment = Segment.parse(blob, NAMESPACE)
    segment.check()
    assert len(segment) == len(expected)
    for hi, lo in [*pairs, *others, (0, 0), (2**64 - 1, 2**64 - 1)]:
        row = segment.find(hi, lo)
        assert (row >= 0) == ((hi, lo) in expected)
        if row >= 0:
            assert segment.nbytes(row) == expected[hi, lo]


@given(PAIRS, PAIRS)
@settings(max_examples=200, deadline=None)
def test_sets_of_rows_equal_dictionaries(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    first, second = merge([rows_of(pairs)]), merge([rows_of(others)])
    mine, theirs = contents(first), contents(second)
    assert contents(merge([first, second])) == mine | theirs
    assert contents(without(first, second)) == {k: v for k, v in mine.items() if k not in theirs}
    assert is_in(first, second).tolist() == [pair in theirs for pair in contents(first)]
    parts = [first.part(number) for number in range(PARTS)]
    assert contents(snapshot_module.concat(parts)) == mine


@given(st.lists(PAIRS, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_file_written_part_by_part_equals_one_written_at_once(
    batches: list[list[tuple[int, int]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_module, "_RUN_ROWS", 40)
        patch.setattr(snapshot_module, "_FENCES_AT_A_TIME", 7)
        spill = Spill(None)
        for batch in batches:
            spill.add(rows_of(batch))
        file = io.BytesIO()
        parts = (merge(spill.part(number)) for number in range(PARTS))
        write_rows(file, NAMESPACE, parts, None)
        spill.close()
    expected = merge([rows_of(batch) for batch in batches])
    assert file.getvalue() == b"".join(encode(expected, NAMESPACE))
    words = filter_of(expected)
    assert words.nbytes == words_for(len(expected)) * WORD_BYTES
    assert all(maybe(words, hi, lo) for hi, lo in contents(expected))


def filter_of(rows: Rows) -> memoryview[int]:
    file = io.BytesIO()
    write_bloom(file, rows)
    return memoryview(file.getvalue()).cast("Q")


def test_a_filter_lets_less_than_one_in_a_hundred_by() -> None:
    rng = np.random.default_rng(3)
    rows = merge([_random(rng, 20_000)])
    words = filter_of(rows)
    others = _random(rng, 20_000)
    passed = sum(map(maybe, [words] * 20_000, others.hi.tolist(), others.lo.tolist()))
    assert passed < 0.01 * 20_000
    assert all(map(maybe, [words] * len(rows), rows.hi.tolist(), rows.lo.tolist()))


def _random(rng: np.random.Generator, count: int) -> Rows:
    halves = rng.integers(0, 2**64, (2, count), dtype=np.uint64)
    return Rows(halves[0], halves[1], np.full(count, 5, "<u4"))


def test_every_flipped_byte_of_a_delta_is_found() -> None:
    blob = b"".join(encode(merge([rows_for(range(20))]), NAMESPACE))
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptEntryError, match="a name"):
            parse_delta(bytes(damaged), LAYOUT, "a name")
    for length in range(0, len(blob), 7):
        with pytest.raises(CorruptEntryError):
            parse_delta(blob[:length], LAYOUT, "a name")
    with pytest.raises(CorruptEntryError):
        parse_delta(blob + b"\0", LAYOUT, "a name")
    assert len(parse_delta(blob, LAYOUT, "a name")) == 20


def test_every_flipped_byte_of_an_overlay_is_found() -> None:
    ulid = Names().next(START_S)
    pieces = Overlay.empty(SnapshotName()).encode_with(
        {ulid: merge([rows_for(range(9))])}, NAMESPACE
    )
    blob = b"".join(pieces)
    assert len(Overlay.parse(blob, NAMESPACE).segment) == 9
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptEntryError):
            Overlay.parse(bytes(damaged), NAMESPACE)


def test_rows_that_are_not_sorted_are_refused() -> None:
    rows = merge([rows_for(range(20))])
    blob = b"".join(encode(rows.select(slice(None, None, -1)), NAMESPACE))
    with pytest.raises(CorruptEntryError) as caught:
        parse_delta(blob, LAYOUT, "x")
    assert caught.value.reason == "order"


def test_fences_that_lie_are_refused_and_make_no_lookup_wrong() -> None:
    rows = merge([rows_for(range(200))])
    for lie in (0, 100, 2**32 - 1):
        fences = snapshot_module.fences_of(rows.hi)
        segment = Segment(rows, np.full_like(fences, lie), name="x")
        with pytest.raises(CorruptEntryError):
            segment.check()
        for hi, lo in list(contents(rows))[::7]:
            row = segment.find(hi, lo)
            assert row == -1 or (int(rows.hi[row]), int(rows.lo[row])) == (hi, lo)


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_ROWS", 10)
    rows = merge([rows_for(range(11))])
    with pytest.raises(CorruptEntryError):
        encode(rows, NAMESPACE)
    with pytest.raises(CorruptEntryError):
        write_rows(io.BytesIO(), NAMESPACE, [rows], None)


def test_sizes_that_do_not_fit_count_as_not_known() -> None:
    rows = Rows.of([b"a" * 16, b"b" * 16], [2**40, -1])
    assert rows.nbytes.tolist() == [0, 0]


# -- names -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 2e9), min_size=2, max_size=20))
def test_names_rise_whatever_the_clock_does(times: list[float]) -> None:
    names = Names()
    made = [names.next(each) for each in times]
    assert made == sorted(set(made))
    assert time_s(made[0]) == int(times[0] * 1000) / 1000 or times[0] < 0.002


@pytest.mark.parametrize("text", ["", "x", "0" * 53, "0" * 26 + "-" + "I" * 26, "0" * 26 + "-\n"])
def test_other_names_are_no_snapshots(text: str) -> None:
    assert SnapshotName.parse(text) is None

# SPDX-License-Identifier: Apache-2.0
"""Names of deltas: their order, their time, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.identity import is_ulid
from s3ec.index.manifest import Ulids, first_ulid, time_ms

NOW_S = 1_700_000_000.0
TIMES_MS = st.integers(0, 2**48 - 1)


def test_name_spells_the_published_example() -> None:
    """The time of https://github.com/ulid/spec's example, 01ARZ3NDEK..., and 80 zeros."""
    assert first_ulid(1469922850259) == "01ARZ3NDEK" + 16 * "0"
    assert time_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1469922850259
    assert first_ulid(2**48 - 1) == "7ZZZZZZZZZ" + 16 * "0"


@given(TIMES_MS, TIMES_MS)
def test_names_sort_as_their_times(one: int, other: int) -> None:
    assert time_ms(first_ulid(one)) == one
    assert (first_ulid(one) < first_ulid(other)) == (one < other)


@given(st.lists(st.floats(NOW_S - 7200, NOW_S + 7200), min_size=2, max_size=30))
def test_names_of_one_maker_ascend_whatever_its_clock_does(times_s: list[float]) -> None:
    ulids = Ulids()
    names = [ulids.next(at_s) for at_s in times_s]
    assert names == sorted(set(names))
    assert all(map(is_ulid, names))
    assert time_ms(names[0]) == int(times_s[0] * 1000)
    assert [time_ms(name) for name in names] == [
        int(max(times_s[: n + 1]) * 1000) for n in range(len(names))
    ]


def test_name_that_runs_out_of_random_bits_takes_the_next_millisecond() -> None:
    ulids = Ulids(random_bits=lambda bits: 2**bits - 1)
    first, second = ulids.next(NOW_S), ulids.next(NOW_S)
    assert first == first_ulid(int(NOW_S * 1000))[:10] + 16 * "Z"
    assert time_ms(second) == time_ms(first) + 1


@pytest.mark.parametrize(("at_ms", "held_ms"), [(-5, 0), (2**60, 2**48 - 1)])
def test_time_that_no_name_holds_becomes_the_nearest(at_ms: int, held_ms: int) -> None:
    assert time_ms(first_ulid(at_ms)) == held_ms
    assert time_ms(Ulids().next(at_ms / 1000)) == held_ms


@pytest.mark.parametrize(
    "name",
    [
        "",
        "01ARZ3NDEKTSV4RRFFQ69G5FA",
        "01ARZ3NDEKTSV4RRFFQ69G5FAVV",
        "01arz3ndektsv4rrffq69g5fav",
        "81ARZ3NDEKTSV4RRFFQ69G5FAV",  # over 128 bits
        "01ARZ3NDEKTSV4RRFFQ69G5FAI",
        "01ARZ3NDEKTSV4RRFFQ69G5FAU",
        "01ARZ3NDEKTSV4RRFFQ69G5FA\n",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV\n",
        "\u06601ARZ3NDEKTSV4RRFFQ69G5FAV",
    ],
)
def test_other_strings_are_no_names(name: str) -> None:
    assert not is_ulid(name)

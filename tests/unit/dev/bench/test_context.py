# SPDX-License-Identifier: Apache-2.0
"""What a benchmark may report, what becomes of what it does not, and the JSON of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.dev.bench.context import Context, Reach, Result, Row, Spec, rounded
from tests.unit.dev.bench import fakes

MACHINE = {"cpus": 2, "versions": {"s3ec": "0"}}


@pytest.mark.parametrize(
    ("reach", "below", "equal", "above"),
    [
        ("<= 1.5", True, True, False),
        ("< 1.5", True, False, False),
        (">= 1.5", False, True, True),
        ("> 1.5", False, False, True),
        ("== 1.5", False, True, False),
    ],
)
def test_reach_compares_value_with_limit(reach: str, below: bool, equal: bool, above: bool) -> None:
    assert [Reach.parse(reach).holds(value) for value in (1.4, 1.5, 1.6)] == [below, equal, above]


@pytest.mark.parametrize("text", ["<= -3", "<= 0", "> 12.25"])
def test_reach_takes_plain_numbers(text: str) -> None:
    assert Reach.parse(text).limit == float(text.split()[1])


@pytest.mark.parametrize("text", ["", "1.5", "<=1.5", "=< 1", "<= 1.5 us", "<= x", "!= 1", "<= 1."])
def test_reach_of_another_form_is_refused_where_it_is_declared(text: str) -> None:
    with pytest.raises(ValueError, match="reach"):
        Spec("a.b", "us", text)


def test_ok_is_the_reach_applied_to_the_value() -> None:
    spec = Spec("a.b", "us", "<= 5")
    assert Row(spec, 5.0).ok is True
    assert Row(spec, 5.01).ok is False


def test_row_without_reach_is_ok() -> None:
    assert Row(Spec("a.b", "us"), 1e9).ok is True


def test_row_without_value_is_neither_and_says_why() -> None:
    row = Row(Spec("a.b", "us", "<= 5"), None, detail={"why": "no strace"})
    assert row.ok is None
    document = row.to_json()
    assert document["value"] is None
    assert document["ok"] is None
    assert document["detail"]["why"] == "no strace"


def test_row_without_value_and_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="say why"):
        Row(Spec("a.b", "us"), None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_that_json_lacks_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="no measurement"):
        Row(Spec("a.b", "us"), value)


def test_json_has_the_documented_form() -> None:
    spec = Spec("load.ratio_to_preadv", "ratio", "<= 1.5")
    result = Result("load", MACHINE, [Row(spec, 1.21, 200, {"spread": {"min": 1.0}})])
    assert json.loads(json.dumps(result.to_json())) == {
        "bench": "load",
        "machine": MACHINE,
        "rows": [
            {
                "name": "load.ratio_to_preadv",
                "value": 1.21,
                "unit": "ratio",
                "reach": "<= 1.5",
                "ok": True,
                "samples": 200,
                "detail": {"spread": {"min": 1.0}},
            }
        ],
    }


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(-1e12, 1e12), st.sampled_from([None, "<= 5", "> 0", "== 0"])
        ),
        max_size=5,
    )
)
def test_json_can_be_read_back(rows: list[tuple[float | None, str | None]]) -> None:
    result = Result(
        "a",
        MACHINE,
        [Row(Spec(f"a.{n}", "us", r), v, n, {"why": "w"}) for n, (v, r) in enumerate(rows)],
    )
    document = result.to_json()
    assert Result.from_json(document).to_json() == document


def test_result_failed_only_where_a_row_misses_its_reach() -> None:
    spec = Spec("a.b", "us", "<= 5")
    good, bad, none = Row(spec, 1.0), Row(spec, 6.0), Row(spec, None, detail={"why": "w"})
    assert not Result("a", MACHINE, [good, none]).failed
    assert Result("a", MACHINE, [good, none, bad]).failed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.23456789, 1.23457),
        ({"a": [0.1 + 0.2, 3]}, {"a": [0.3, 3]}),
        (None, None),
        (True, True),
        (123456789, 123456789),
    ],
)
def test_floats_are_cut_to_six_digits_wherever_they_are(value: Any, expected: Any) -> None:
    assert rounded(value) == expected


def context(tmp_path: Path, *, quick: bool = False) -> Context:
    return Context(
        fakes.bench(lambda _: None), quick=quick, scratch=tmp_path, say=lambda _line: None
    )


def test_rows_come_in_declared_order_with_the_reason_for_those_not_reported(
    tmp_path: Path,
) -> None:
    made = context(tmp_path)
    made.report("fake.plain_us", 3.0, samples=1)
    made.cannot("fake.speed_us", "no clock", tried=2)
    rows = made.rows("nothing left to measure")
    assert [row.spec.name for row in rows] == [spec.name for spec in fakes.ROWS]
    assert [row.value for row in rows] == [None, None, 3.0]
    assert rows[0].detail == {"why": "no clock", "tried": 2}
    assert rows[1].detail == {"why": "nothing left to measure"}


def test_row_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"fake\.other"):
        context(tmp_path).report("fake.other", 1.0, samples=1)


def test_second_report_of_a_row_is_refused(tmp_path: Path) -> None:
    made = context(tmp_path)
    made.report("fake.ratio", 1.0, samples=1)
    with pytest.raises(ValueError, match="before"):
        made.cannot("fake.ratio", "no")


def test_reported_rows_are_said_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    made = Context(fakes.bench(lambda _: None), quick=False, scratch=tmp_path, say=said.append)
    made.report("fake.plain_us", 1234.5, samples=1)
    made.cannot("fake.ratio", "no")
    assert said == ["fake.plain_us: 1234"]


def test_missing_names_what_was_not_reported(tmp_path: Path) -> None:
    made = context(tmp_path)
    made.report("fake.ratio", 1.0, samples=1)
    assert made.missing == ["fake.speed_us", "fake.plain_us"]


def test_quick_run_has_few_rounds_and_says_so(tmp_path: Path) -> None:
    made = context(tmp_path, quick=True)
    assert made.rounds(25) == 2
    assert made.rounds(2) == 2
    made.report("fake.ratio", 1.0, samples=1)
    assert all(row.detail["quick"] for row in made.rows("no"))
    assert context(tmp_path).rounds(25) == 25

# SPDX-License-Identifier: Apache-2.0
"""What a benchmark may report, and what becomes of what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.bench.context import Context
from tests.unit.dev.bench import fakes


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

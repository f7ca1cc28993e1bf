# SPDX-License-Identifier: Apache-2.0
"""What a benchmark may report, what becomes of what it does not, and the JSON of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3ec.dev.bench.context import Context, Result, Row, Spec
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
    assert [Spec("a.b", "us", reach).holds(value) for value in (1.4, 1.5, 1.6)] == [
        below,
        equal,
        above,
    ]


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


def test_result_failed_only_where_a_row_misses_its_reach() -> None:
    spec = Spec("a.b", "us", "<= 5")
    good, bad, none = Row(spec, 1.0), Row(spec, 6.0), Row(spec, None, detail={"why": "w"})
    assert not Result("a", MACHINE, [good, none]).failed
    assert Result("a", MACHINE, [good, none, bad]).failed


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

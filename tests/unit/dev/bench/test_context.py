# SPDX-License-Identifier: Apache-2.0
"""What a benchmark may report, what becomes of what it does not, and the JSON of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3ec.dev.bench.context import Context, Result, Row, Spec
from tests.unit.dev.bench import fakes


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
def test_reach_compares_value_with_limit_and_only_a_miss_is_a_failure(
    reach: str, below: bool, equal: bool, above: bool
) -> None:
    spec = Spec("a.b", "us", reach)
    unmeasured = Row(spec, None, detail={"why": "w"})
    for value, holds in ((1.4, below), (1.5, equal), (1.6, above)):
        assert spec.holds(value) == holds
        assert Result("a", {}, [unmeasured, Row(spec, value)]).failed == (not holds)


def test_json_has_the_documented_form() -> None:
    spec = Spec("load.ratio_to_preadv", "ratio", "<= 1.5")
    result = Result("load", fakes.MACHINE, [Row(spec, 1.21, 200, {"spread": {"min": 1.0}})])
    assert json.loads(json.dumps(result.to_json())) == {
        "bench": "load",
        "machine": fakes.MACHINE,
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


def test_rows_come_in_declared_order_with_the_reason_for_those_not_reported() -> None:
    bench = fakes.bench(lambda _: None)
    made = Context(bench, quick=False, scratch=Path(), say=lambda _line: None)
    made.report("fake.plain_us", 3.0, samples=1)
    made.cannot("fake.speed_us", "no clock", tried=2)
    rows = made.rows("nothing left to measure")
    assert [row.spec.name for row in rows] == [spec.name for spec in fakes.ROWS]
    assert [row.value for row in rows] == [None, None, 3.0]
    assert rows[0].detail == {"why": "no clock", "tried": 2}
    assert rows[1].detail == {"why": "nothing left to measure"}

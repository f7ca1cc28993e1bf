# SPDX-License-Identifier: Apache-2.0
"""From the times of rounds to the rows about a dead store."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.bench import dead
from s3ec.dev.bench.context import CannotMeasureError, Context

ASKED = {"vllm:s3ec_misses": 40.0}


def context(tmp_path: Path) -> Context:
    return Context(dead.BENCH, quick=False, scratch=tmp_path, say=str)


def times(ms: float) -> list[dead.RequestTimes]:
    return [dead.RequestTimes([ms] * 4, [ms / 2] * 8) for _ in range(10)]


def test_the_rows_are_quotients_of_the_99th_percentiles(tmp_path: Path) -> None:
    made = context(tmp_path)
    dead.report(made, {dead.PLAIN: times(10.0), dead.DEAD: times(11.0)}, ASKED)
    ttft, step = made.rows("")
    assert ttft.value == pytest.approx(1.1)
    assert ttft.ok is False
    assert (ttft.samples, step.samples) == (40, 80)
    assert ttft.detail["spread"]["rounds"] == 5


@pytest.mark.parametrize("moved", [{}, {"vllm:s3ec_hits": 1.0, "vllm:s3ec_misses": 39.0}])
def test_an_engine_that_had_hits_or_was_not_asked_gives_no_figure(
    moved: dict[str, float], tmp_path: Path
) -> None:
    with pytest.raises(CannotMeasureError):
        dead.report(context(tmp_path), {dead.PLAIN: times(1), dead.DEAD: times(1)}, moved)

# SPDX-License-Identifier: Apache-2.0
"""What ``bench rag`` makes of its legs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.bench import rag
from s3ec.dev.bench.context import Context, Row
from s3ec.dev.bench.rag_rig import Leg

ABOUT = {"object_bytes": 1_000_000}


def leg(number: int, latency_ms: int = 0, *, seconds: float = 1.0, **more: Any) -> Leg:
    return Leg(number, latency_ms, first_s=[seconds], seconds=seconds, references=4, **more)


def reported(legs: list[Leg]) -> dict[str, Row]:
    context = Context(rag.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    rag.report(context, legs, ABOUT)
    return {row.spec.name: row for row in context.rows("")}


def test_a_ratio_is_that_of_the_worst_latency_beside_what_has_none() -> None:
    rows = reported([leg(1, seconds=10), leg(3, 0, seconds=1), leg(3, 80, seconds=4)])

    assert rows["rag.total_ratio"].value == pytest.approx(0.4)
    assert rows["rag.total_ratio"].detail["cases"] == {
        "0 ms to the bucket": pytest.approx(0.1),
        "80 ms to the bucket": pytest.approx(0.4),
    }


def test_a_row_whose_configuration_was_not_asked_for_says_so() -> None:
    why = reported([leg(4)])["rag.total_ratio"].detail["why"]

    assert why == "configuration 3 was not asked for"


def test_shares_are_of_all_pictures_shown_and_each_is_counted_once() -> None:
    # Of four pictures one was on the device, and three came in: two from the bucket, one of them
    # twice, since it had been fetched for a request that came later.
    (found,) = reported([leg(3, encodes=1, allocations=3, from_bucket=3)])["rag.legs"].detail[
        "legs"
    ]

    assert found["hit_ratio"] == {"device": 0.25, "node": 0.0, "bucket": 0.5, "encoded": 0.25}
    assert found["loaded_bytes"] == 2_000_000


def test_the_processor_is_counted_by_what_was_loaded() -> None:
    rows = reported([leg(1, cpu_s=5.0), leg(4, cpu_s=7.0, allocations=4)])

    alone, ours = rows["rag.legs"].detail["legs"]
    assert alone["cpu_s_per_gb"] is None
    assert ours["cpu_s_per_gb"] == pytest.approx(7.0 / 0.004)

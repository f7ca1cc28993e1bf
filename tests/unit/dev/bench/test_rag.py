# SPDX-License-Identifier: Apache-2.0
"""What ``bench rag`` makes of its legs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.bench import rag
from s3ec.dev.bench.context import Context, Row
from s3ec.dev.bench.rag_rig import CONFIGS, ENCODERS, Leg

ABOUT = {"object_bytes": 1_000_000}


def leg(number: int, latency_ms: int = 0, *, seconds: float = 1.0, **more: Any) -> Leg:
    return Leg(number, latency_ms, first_s=[seconds], seconds=seconds, references=4, **more)


def reported(legs: list[Leg], whys: dict[int, str] | None = None) -> dict[str, Row]:
    context = Context(rag.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    rag.report(context, legs, whys or {}, ABOUT)
    return {row.spec.name: row for row in context.rows("")}


def test_a_ratio_is_that_of_the_worst_latency_beside_what_has_none() -> None:
    rows = reported([leg(1, seconds=10), leg(3, 0, seconds=1), leg(3, 80, seconds=4)])

    assert rows["rag.total_ratio"].value == pytest.approx(0.4)
    assert rows["rag.total_ratio"].detail["cases"] == {
        "0 ms to the bucket": pytest.approx(0.1),
        "80 ms to the bucket": pytest.approx(0.4),
    }


def test_two_that_have_a_bucket_are_compared_at_the_same_latency() -> None:
    legs = [leg(number, far, seconds=s) for number, far, s in ((4, 0, 1), (4, 80, 3))]
    others = [leg(6, 0, seconds=2), leg(6, 80, seconds=30)]

    rows = reported(legs + others)

    assert sorted(rows["rag.ratio_to_example_mount"].detail["cases"].values()) == [0.1, 0.5]


def test_a_configuration_that_cannot_run_leaves_its_row_with_the_reason() -> None:
    rows = reported([leg(4)], {6: "nothing can be mounted here"})

    assert rows["rag.ratio_to_example_mount"].value is None
    assert rows["rag.ratio_to_example_mount"].detail["why"] == "nothing can be mounted here"
    assert rows["rag.total_ratio"].detail["why"] == "configuration 3 was not asked for"


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


@pytest.mark.parametrize("size", ENCODERS)
def test_an_embedding_has_the_megabytes_of_its_name(size: str) -> None:
    assert ENCODERS[size].nbytes / 1e6 == pytest.approx(float(size), rel=0.01)


def test_only_what_asks_a_bucket_is_measured_at_each_latency() -> None:
    assert [number for number, config in CONFIGS.items() if config.has_bucket] == [3, 4, 6, 8]

# SPDX-License-Identifier: Apache-2.0
"""What ``bench rag_warm`` makes of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from s3ec.dev.bench import rag_warm
from s3ec.dev.bench.context import Context, Result, Row
from s3ec.dev.bench.rag_rig import Leg
from s3ec.dev.bench.rag_warm import Setting
from tests.unit.dev.bench import fakes

ABOUT = {
    "requests": 3,
    "references": 5,
    "pictures": 4,
    "object_bytes": 2_752_512,
    "loop": "3 rounds",
}


def leg(number: int, *p50_s: float, total: float = 1.0, encodes: int = 0) -> Leg:
    """One that was asked once for each figure."""
    return Leg(
        number,
        0,
        first_s=[*p50_s],
        rounds=[(each, total) for each in p50_s],
        seconds=total,
        references=5,
        allocations=5,
        encodes=encodes,
    )


def compared(ours: Leg, example: Leg, copies: Leg) -> dict[int, Leg]:
    return {8: ours, 5: example, 7: copies}


def result(of: Mapping[Setting, Mapping[int, Leg]]) -> Result:
    context = Context(rag_warm.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    rag_warm.report(context, of, ABOUT)
    return Result("rag_warm", fakes.MACHINE, context.rows(""))


def reported(of: Mapping[Setting, Mapping[int, Leg]]) -> dict[str, Row]:
    return {row.spec.name: row for row in result(of).rows}


EQUAL = compared(leg(8, 1, 1, 1, encodes=3), leg(5, 1, 1, 1), leg(7, 1, 1, 1, total=0.5))


def test_a_ratio_is_the_median_of_those_of_each_round_and_the_worst_settings() -> None:
    # The ratio of the medians would be 1.5; a slow round hits both sides of it.
    slow = compared(leg(8, 3, 8, 2), leg(5, 1, 1, 1), leg(7, 1, 2, 4))
    rows = reported({Setting(14, False, 1): EQUAL, Setting(60, True, 2): slow})

    assert rows["rag.warm_p50_ratio"].value == 3
    assert rows["rag.warm_p50_ratio"].detail["cases"] == {
        "14 ms, no language model, clients: 1": 1,
        "60 ms, a language model, clients: 2": 3,
    }
    assert rows["rag.warm_total_ratio"].value == 2


def test_the_plain_example_counts_where_a_language_model_answers_several_clients() -> None:
    twice = compared(leg(8, 2, 2, 2), leg(5, 1, 1, 1), leg(7, 1, 1, 1))
    others = {Setting(14, False, 2): twice, Setting(14, True, 1): twice}
    row = reported({**others, Setting(14, True, 2): EQUAL})["rag.warm_p50_ratio_plain"]

    assert row.value == 1
    assert list(row.detail["cases"]) == ["14 ms, a language model, clients: 2"]


def test_pictures_that_were_encoded_count_where_they_were_most() -> None:
    more = compared(leg(8, 1, 1, 1, encodes=4), leg(5, 1, 1, 1), leg(7, 1, 1, 1))
    row = reported({Setting(14, True, 2): EQUAL, Setting(60, True, 2): more})["rag.warm_encodes"]

    assert row.value == 4
    assert row.ok is False

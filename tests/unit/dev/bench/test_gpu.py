# SPDX-License-Identifier: Apache-2.0
"""What ``bench gpu`` makes of what it measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec.dev.bench import gpu
from s3ec.dev.bench.context import Context, Row
from s3ec.dev.bench.gpu import Outcome

ABOUT = {"device": "a GPU", "is_gpu": True}


def reported(report: Callable[[Context], None]) -> dict[str, Row]:
    context = Context(gpu.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    report(context)
    return {row.spec.name: row for row in context.rows("nobody measured it")}


def outcome(*, ours_s: float, wrong: int = 0, learned_ms: float = 10.0) -> Outcome:
    times = {"s3ec": [ours_s, ours_s, 9.0], "ECExampleConnector": [1.0, 1.0, 1.0]}
    return Outcome(
        asked=24,
        wrong=wrong,
        encode_ms=[10.0, 10.0, 90.0],
        learned_ms=learned_ms,
        first_s=times,
        seconds=times,
    )


def test_each_row_has_the_value_of_the_worse_runner() -> None:
    done = {"v2": outcome(ours_s=1.05, learned_ms=5.0), "v1": outcome(ours_s=1.5, wrong=2)}

    rows = reported(lambda context: gpu.report(context, done, {}, ABOUT))

    assert rows["gpu.warm_p50_ratio"].value == 1.5
    assert rows["gpu.warm_p50_ratio"].detail["cases"] == {"v2": 1.05, "v1": 1.5}
    assert rows["gpu.wrong_answers"].value == 2
    assert rows["gpu.encode_ms"].value == 10.0
    # Half of what it takes is as far off as twice that.
    assert rows["gpu.encode_learned_ratio"].value == 2.0
    assert rows["gpu.warm_encodes"].ok


def test_a_runner_that_could_not_be_run_is_named_beside_every_figure_of_the_other() -> None:
    whys = {"v2": "the V2 runner of this release calls no connector"}

    rows = reported(lambda context: gpu.report(context, {"v1": outcome(ours_s=1.0)}, whys, ABOUT))
    nothing = reported(lambda context: gpu.report(context, {}, whys, ABOUT))

    assert "calls no connector" in rows["gpu.warm_total_ratio"].detail["note"]
    assert nothing["gpu.wrong_answers"].value is None
    assert "calls no connector" in nothing["gpu.wrong_answers"].detail["why"]


def test_threads_pay_from_the_step_on_from_which_they_make_every_larger_one_faster() -> None:
    kept = {}
    for size in gpu.SIZES:
        for count in gpu.STEPS:
            # That of 0.26 MB is a slow moment of the machine.
            pays = size == "30 MB" or (count, size) in [(8, "8.8 MB"), (2, "0.26 MB")]
            kept[f"{count} of {size}, alone"] = [1.0, 1.0]
            kept[f"{count} of {size}, threads"] = [0.5 if pays else 1.5] * 2

    rows = reported(lambda context: gpu.report_copies(context, kept, ABOUT))

    assert rows["gpu.readers_ratio"].value == pytest.approx(0.5)
    assert "pay from 30 MB a step on" in rows["gpu.readers_ratio"].detail["note"]
    # Nothing was pinned.
    assert rows["gpu.load_pinned_ratio"].detail["why"] == "there is no CUDA device here"


def test_without_a_gpu_wrong_answers_count_and_no_time_is_a_figure() -> None:
    done = {"v2": outcome(ours_s=1.5, wrong=1)}

    rows = reported(lambda context: gpu.report(context, done, {}, {"is_gpu": False}))

    assert rows["gpu.wrong_answers"].value == 1
    others = [row for name, row in rows.items() if name != "gpu.wrong_answers"]
    assert all(row.value is None for row in others)
    assert rows["gpu.warm_p50_ratio"].detail["cases"] == {"v2": 1.5}

# SPDX-License-Identifier: Apache-2.0
"""From the times of single hook calls to the rows of ``bench hooks``."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from s3ec.dev.bench import hooks
from s3ec.dev.bench.context import Context, Row


def reported(**ns: int) -> dict[str, Row]:
    """Rows of two rounds in which a call took 1 us, or what is said of it."""
    context = Context(hooks.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    times = {name.replace("_", " ", 1).replace("_", "/"): [each] * 4 for name, each in ns.items()}
    rounds = [defaultdict(lambda: [1000] * 4, times) for _ in range(2)]
    hooks.report(context, rounds, {"corpus_keys": 7})
    return {row.spec.name: row for row in context.rows("not of single calls")}


def test_every_row_of_single_calls_has_a_value() -> None:
    rows = reported()
    unmeasured = {name for name, row in rows.items() if row.value is None}
    assert unmeasured == {hooks.SCHEDULE, hooks.SYSCALLS}
    assert {row.value for row in rows.values() if row.spec.unit == "us"} == {1.0}
    assert rows["hooks.has_cache_item_p50_us"].detail["corpus_keys"] == 7


def test_the_slowest_case_gives_the_value_and_the_other_connector_stands_beside() -> None:
    row = reported(has_warm_miss_4=3000, example_warm_hit=9000)["hooks.has_cache_item_p50_us"]
    assert row.value == 3.0
    assert row.detail["note"] == "the slowest case: miss"
    assert row.detail["cases"]["ECExampleConnector, hit"] == 9.0
    assert row.samples == 3 * 2 * 4


def test_a_decision_is_both_of_our_hooks_over_the_only_one_of_the_other() -> None:
    rows = reported(ensure_warm_hit_1=5000, has_warm_hit_1=1000, example_warm_hit=12_000)
    assert rows["hooks.decision_per_image_ratio_to_example"].detail["cases"] == {
        "hit": pytest.approx(0.5),
        "miss": pytest.approx(2.0),
    }
    # What is on its way is compared with a hit.
    cases = rows["hooks.ensure_cache_available_ratio_to_example"].detail["cases"]
    assert cases["pending"] == pytest.approx(1 / 12)


@pytest.mark.filterwarnings("ignore")  # of vLLM and torch, as they are imported
def test_both_halves_are_made_without_an_engine_and_answer_as_each_case_is_called(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    from s3ec.dev.bench import hooks_rig, worker_rig

    with worker_rig.worker_rig(tmp_path / "worker", 1) as worker:
        worker.fill()
        worker.check()
    with hooks_rig.rig(tmp_path / "rig", hooks_rig.Size(2, 100)) as rig:
        rig.check()

# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench soak`` for a quarter of a minute: all fails in turn around two engines at work."""

from __future__ import annotations

from s3ec.dev.bench.command import run_here
from s3ec.dev.bench.context import Row
from s3ec.dev.rigs.nursery import EngineForkServer

_MINUTES, _SEED = 0.25, 5


def test_mixed_faults_end_no_engine_change_no_answer_and_lose_nothing(
    nursery: EngineForkServer,
) -> None:
    how = {"minutes": _MINUTES, "seed": _SEED, "nursery": nursery}
    result = run_here("soak", quick=True, say=lambda _: None, **how)
    rows: dict[str, Row] = {row.spec.name: row for row in result.rows}
    assert rows["soak.faults"].value, rows["soak.faults"].detail
    assert rows["soak.requests"].value, rows["soak.requests"].detail
    for name in ("wrong_answers", "dead_engines", "lost_entries"):
        row = rows[f"soak.{name}"]
        assert row.value == 0, row.detail

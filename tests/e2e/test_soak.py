# SPDX-License-Identifier: Apache-2.0
"""A minute of ``s3ec bench soak``: everything fails in turn around two engines at work."""

from __future__ import annotations

from s3ec.dev.bench.command import run_here
from s3ec.dev.bench.context import Row

_SEED = 5


def test_a_minute_of_mixed_faults_ends_no_engine_changes_no_answer_and_loses_nothing() -> None:
    result = run_here("soak", quick=True, say=lambda _: None, seed=_SEED)
    rows: dict[str, Row] = {row.spec.name: row for row in result.rows}
    assert rows["soak.faults"].value, rows["soak.faults"].detail
    assert rows["soak.requests"].value, rows["soak.requests"].detail
    for name in ("wrong_answers", "dead_engines", "lost_entries"):
        row = rows[f"soak.{name}"]
        assert row.value == 0, row.detail

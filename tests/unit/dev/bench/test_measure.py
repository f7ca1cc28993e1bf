# SPDX-License-Identifier: Apache-2.0
"""Interleaving and scratch in memory; no test looks at how long anything took."""

from __future__ import annotations

import gc
import itertools

import pytest

from s3ec.dev.bench import measure


def test_every_round_runs_every_case_once_in_another_order_and_warmups_are_dropped() -> None:
    log: list[str] = []

    def case(name: str) -> int:
        log.append(name)
        return len(log)

    kept = measure.interleave(
        {name: lambda name=name: case(name) for name in "abc"},  # type: ignore[misc]
        rounds=4,
        warmup=2,
    )
    rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert len(rounds) == 6
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds} == {"a", "b", "c"}
    assert {"a", "c"} <= {first for first, second in itertools.pairwise(log) if second == "b"}
    assert {name: len(values) for name, values in kept.items()} == {"a": 4, "b": 4, "c": 4}
    assert min(value for values in kept.values() for value in values) > 6


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_off_inside_and_as_before_afterwards(enabled: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert measure.interleave({"a": gc.isenabled}, rounds=1, warmup=0) == {"a": [False]}
        with pytest.raises(ZeroDivisionError):
            measure.interleave({"a": lambda: 1 / 0}, rounds=1)
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_on else gc.disable)()

# SPDX-License-Identifier: Apache-2.0
"""Interleaving, statistics and scratch in memory; no test looks at how long anything took."""

from __future__ import annotations

import gc
import itertools

import pytest

from s3ec.dev.bench import measure


def test_every_round_runs_every_case_once_and_warmups_are_dropped() -> None:
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
    assert {name: len(values) for name, values in kept.items()} == {"a": 4, "b": 4, "c": 4}
    assert min(value for values in kept.values() for value in values) > 6


def test_order_turns_so_that_no_case_has_a_fixed_place() -> None:
    log: list[str] = []
    measure.interleave(
        {name: lambda name=name: log.append(name) for name in "abc"},  # type: ignore[misc]
        rounds=6,
        warmup=0,
    )
    assert {log[start] for start in range(0, len(log), 3)} == {"a", "b", "c"}
    before = {pair for pair in itertools.pairwise(log) if pair[1] == "b"}
    assert {"a", "c"} <= {first for first, _ in before}


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_off_inside_and_as_before_afterwards(enabled: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        kept = measure.interleave({"a": gc.isenabled}, rounds=1, warmup=0)
        assert kept == {"a": [False]}
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            measure.interleave({"a": lambda: 1 / 0}, rounds=1)
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_on else gc.disable)()

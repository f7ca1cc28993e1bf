# SPDX-License-Identifier: Apache-2.0
"""Interleaving, statistics and scratch in memory; no test looks at how long anything took."""

from __future__ import annotations

import gc
import itertools
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.dev.bench import measure

floats = st.floats(-1e9, 1e9)


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


def test_between_runs_before_every_case() -> None:
    log: list[str] = []
    measure.interleave(
        {"a": lambda: log.append("a"), "b": lambda: log.append("b")},
        rounds=2,
        warmup=0,
        between=lambda: log.append("-"),
    )
    assert log[::2] == ["-"] * 4
    assert sorted(log[1::2]) == ["a", "a", "b", "b"]


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


def test_time_each_passes_arguments_and_gives_one_time_per_call() -> None:
    seen: list[tuple[int, int]] = []
    times = measure.time_each(lambda a, b: seen.append((a, b)), [(1, 2), (3, 4)])
    assert seen == [(1, 2), (3, 4)]
    assert len(times) == 2
    assert all(ns >= 0 for ns in times)


def test_timed_calls_once_per_round() -> None:
    calls: list[int] = []
    kept = measure.interleave({"a": measure.timed(lambda: calls.append(1))}, rounds=3, warmup=1)
    assert len(kept["a"]) == 3
    assert len(calls) == 4
    assert measure.timer_ns(10) >= 0


@given(st.lists(floats, min_size=2, max_size=30))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 25, 50, 99):
        assert measure.percentile(values, percent) == pytest.approx(
            expected[percent - 1], rel=1e-9, abs=1e-6
        )


@given(floats)
def test_percentile_of_one_value_is_that_value(value: float) -> None:
    assert measure.percentile([value], 99) == value


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        measure.percentile([], 50)


def test_spread_tells_how_far_rounds_lie_apart() -> None:
    assert measure.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {
        "median": 3.0,
        "min": 1.0,
        "max": 5.0,
        "p25": 2.0,
        "p75": 4.0,
        "rounds": 5,
    }


def test_too_small_is_as_far_from_one_as_too_large() -> None:
    assert measure.furthest_from_one([0.5, 1.2, 1.9]) == 2.0
    assert measure.furthest_from_one([0.9, 4.0]) == 4.0


@pytest.fixture
def tmpfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is taken for the tmpfs."""
    monkeypatch.setattr(measure, "TMPFS", tmp_path)
    monkeypatch.setattr(measure, "is_tmpfs", lambda _path: True)
    return tmp_path


def test_folder_is_empty_and_gone_afterwards(tmpfs: Path) -> None:
    with measure.memory_folder(tmpfs / "otherwise") as (folder, on_tmpfs):
        assert on_tmpfs
        assert folder.parent == tmpfs
        assert list(folder.iterdir()) == []
        (folder / "file").touch()
    assert not folder.exists()


def test_left_over_of_a_killed_one_is_deleted_and_one_in_use_is_not(tmpfs: Path) -> None:
    left = tmpfs / "s3ec-bench-left"
    left.mkdir()
    (left / "file").touch()
    foreign = tmpfs / "other"
    foreign.mkdir()
    with (
        measure.memory_folder(tmpfs / "otherwise") as (first, _),
        measure.memory_folder(tmpfs / "otherwise") as (second, _),
    ):
        assert first != second
        assert first.is_dir()
        assert not left.exists()
        assert foreign.is_dir()


def test_without_tmpfs_the_other_folder_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "is_tmpfs", lambda _path: False)
    with measure.memory_folder(tmp_path / "otherwise") as made:
        assert made == (tmp_path / "otherwise", False)
        assert made[0].is_dir()

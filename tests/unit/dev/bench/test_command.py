# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: which rows there are, how benchmarks run, what is printed, how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.bench import command
from s3ec.dev.bench.command import Entry
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Result
from s3ec.errors import ConfigError
from s3ec.testing.server import find_weed
from tests.unit.dev.bench import fakes

# People compare rows between releases, so their names stay.
_ENSURE = "ensure_cache_available"
ROWS = {
    "hooks": [
        *("has_cache_item_p50_us", "has_cache_item_ratio_to_example"),
        *(f"{_ENSURE}_p50_us", f"{_ENSURE}_ratio_to_example", f"{_ENSURE}_4_images_p50_us"),
        "decision_per_image_ratio_to_example",
        *("update_state_after_alloc_p50_us", "build_connector_meta_p50_us"),
        *("schedule_1000x20_ratio", "syscalls_per_call"),
    ],
    "fetch": [
        *("ratio_to_files", "cpu_ratio_to_files", "ratio_to_raw", "cpu_ratio_to_raw"),
        *("gb_per_s", "cpu_ms_per_object"),
    ],
    "fetch_8kb": ["cpu_ratio_to_raw", "ratio_to_raw", "cpu_ms"],
    "fetch_30mb": ["ratio_to_raw", "ratio_to_files", "cpu_ratio_to_files", "gb_per_s", "cpu_ms"],
    "load": ["ratio_to_preadv", "ratio_to_preadv_disk", "ratio_to_example", "us_per_item"],
    "save": ["ratio_to_clone", "ratio_to_example", "us_per_item"],
    "index": [
        *("lookup_p50_us", "growth_1e6_to_max"),
        *("private_bytes_per_key", "/bloom.bytes_per_key", "/bloom.fpr", "open_ms"),
        *("cold_ratio_to_raw", "/union.peak_mib", "/union.seconds", "visible_p99_s"),
        *("idle_lists_per_refresh", "hooks_p99_ratio"),
    ],
    "payoff": [
        *("sim_over_110_share", "sim_p50_worst", "sim_p99_worst", "sim_throughput_worst"),
        "sim_encode_learned_ratio",
    ],
    "rag": [
        *("total_ratio", "ttft_p50_ratio", "ttft_p99_ratio", "legs"),
    ],
    "rag_warm": [
        *("/rag.warm_p50_ratio", "/rag.warm_total_ratio", "/rag.warm_p50_ratio_plain"),
        *("/rag.warm_encodes", "/rag.warm_legs"),
    ],
    "weights": ["fingerprint_ms"],
    "regions": [
        *("wrong_answers", "failed_requests", "near_p50_ratio", "lag_p50_ratio"),
        *("late_requests", "home_requests_per_key", "redis_ratio"),
    ],
    "dead": ["ttft_p99_ratio", "step_p99_ratio"],
    "soak": [
        *("wrong_answers", "dead_engines", "lost_entries", "memory_growth", "hits_not_back"),
        *("faults", "requests", "hits"),
    ],
    "precompute": ["resume_encodes", "resume_ms_per_item"],
    "hydrate": ["ratio_to_raw", "ratio_in_memory", "cpu_ratio_to_raw"],
    "verify": ["ratio_to_raw", "gb_per_s"],
    "gc": ["deletes_per_s_ratio", "deletes_per_s"],
}


def test_every_benchmark_has_its_rows_under_names_that_stay() -> None:
    found = {name: [spec.name for spec in command.load(name).rows] for name in command.ENTRIES}
    assert found == {
        name: [row[1:] if row[0] == "/" else f"{name}.{row}" for row in rows]
        for name, rows in ROWS.items()
    }


# -- running them ----------------------------------------------------------------------------------


def quiet(_line: str) -> None:
    pass


@pytest.mark.slow
def test_a_benchmark_runs_from_end_to_end() -> None:
    try:
        find_weed()
    except ConfigError as exc:
        pytest.skip(str(exc))
    (result,) = command.run_all(["verify"], quick=True, say=quiet)
    rows = {row.spec.name: row for row in result.rows}
    assert list(rows) == ["verify.ratio_to_raw", "verify.gb_per_s"], rows
    assert all(row.value is not None and row.value > 0 for row in result.rows)
    cases = rows["verify.gb_per_s"].detail["cases"]
    assert {"s3ec verify --deep", "raw obstore"} <= cases.keys()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], None]:
    """Makes a benchmark the only one."""

    def install(bench: Bench) -> None:
        monkeypatch.setattr(command, "ENTRIES", {"fake": Entry("Nothing.", 30)})
        monkeypatch.setattr(command, "load", lambda _name: bench)

    return install


def report_all(context: Context) -> None:
    for spec in fakes.ROWS:
        context.report(spec.name, 0.5, samples=1)


def test_what_cannot_be_measured_stays_in_the_result(use: Callable[[Bench], None]) -> None:
    def half(context: Context) -> None:
        context.report("fake.ratio", 0.5, samples=1)
        raise CannotMeasureError("no vLLM here")

    use(fakes.bench(half))
    result = command.run_here("fake", quick=False, say=quiet)
    assert [row.ok for row in result.rows] == [None, True, None]
    assert result.rows[0].detail["why"] == "no vLLM here"
    assert not result.failed


def test_row_that_was_forgotten_is_a_fault(use: Callable[[Bench], None]) -> None:
    use(fakes.bench(lambda context: context.report("fake.ratio", 0.5, samples=1)))
    with pytest.raises(RuntimeError, match=r"fake\.speed_us"):
        command.run_here("fake", quick=False, say=quiet)


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    line = [sys.executable, "-c", code]
    monkeypatch.setattr(command, "bench_command", lambda _name, _quick: line)


def test_all_reads_the_result_of_each_child(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fakes.bench(report_all))
    document = fakes.result(speed=9.0).to_json()
    # Exit status 1 says that a row missed its reach, not that there is no result.
    child(monkeypatch, f"print({json.dumps(document)!r}); raise SystemExit(1)")
    said: list[str] = []
    (result,) = command.run_all(["fake"], quick=True, say=said.append)
    assert result.to_json() == document
    assert said == ["fake (1 of 1)"]


def test_child_that_crashes_fails_and_costs_only_its_own_rows(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fakes.bench(report_all))
    child(monkeypatch, "raise SystemExit('the disk is full')")
    first, second = command.run_all(["fake", "fake"], quick=False, say=quiet)
    assert first.failed
    assert [row.spec.name for row in first.rows] == [
        "fake.completed",
        *(spec.name for spec in fakes.ROWS),
    ]
    assert first.rows[0].ok is False
    assert "the disk is full" in first.rows[0].detail["note"]
    assert all("the disk is full" in row.detail["why"] for row in first.rows[1:])
    assert second.failed


# -- the commands ----------------------------------------------------------------------------------


def invoke(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], None]:
    """Sets what every measuring gives."""

    def install(result: Result) -> None:
        monkeypatch.setattr(command, "run_here", lambda _name, quick, say: result)
        monkeypatch.setattr(command, "run_all", lambda _names, quick, say: [result])

    install(fakes.result(name="hooks"))
    return install


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Name and options of each benchmark that a command runs in this process."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run_here(name: str, *, quick: bool, say: Callable[[str], None], **options: Any) -> Result:
        say("the first")
        say("the second")
        found.append((name, options))
        return fakes.rag_result() if name == "rag" else fakes.result(name=name)

    monkeypatch.setattr(command, "run_here", run_here)
    return found


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", ["hooks", "data", "all"])
def test_json_on_stdout_is_one_document_and_nothing_else(name: str) -> None:
    document = json.loads(invoke(name, "--json").stdout)
    assert document["bench"] == name
    assert set(document) == {"bench", "machine", "rows"}
    for row in document["rows"]:
        assert set(row) == {"name", "value", "unit", "reach", "ok", "samples", "detail"}
        assert (row["value"] is None) == (row["ok"] is None)
        assert row["value"] is not None or row["detail"]["why"]


@pytest.mark.parametrize("name", ["hooks", "all"])
def test_row_that_misses_its_reach_ends_with_one(
    measured: Callable[[Result], None], name: str
) -> None:
    measured(fakes.result(speed=9.0))
    assert "NO" in invoke(name, code=1).stdout


@pytest.mark.parametrize(
    ("args", "name", "options"),
    [
        (["hooks"], "hooks", {}),
        (["fetch"], "fetch", {}),
        (["hydrate", "--objects", "7"], "hydrate", {"objects": 7}),
        (["index"], "index", {"keys": None}),
        (["index", "--keys", "1e7"], "index", {"keys": 10_000_000}),
        (["index", "--keys", "2_000_000"], "index", {"keys": 2_000_000}),
        (["soak", "--minutes", "2", "--seed", "3"], "soak", {"minutes": 2.0, "seed": 3}),
        (["rag_warm", "--device=cuda", "--json"], "rag_warm", {"device": "cuda"}),
    ],
)
def test_options_reach_the_benchmark(
    asked: list[tuple[str, dict[str, Any]]], args: list[str], name: str, options: dict[str, Any]
) -> None:
    invoke(*args)
    assert asked == [(name, options)]


def test_options_of_rag_reach_it(asked: list[tuple[str, dict[str, Any]]]) -> None:
    args = "--factor 0.5 --latency-ms 5,20,5 --clients 3 --configs 3,1"

    invoke("rag", *args.split(), "--seed", "7")

    assert asked[0][1] == {
        "factor": 0.5,
        "seed": 7,
        "latency_ms": (5, 20),
        "clients": 3,
        "configs": (3, 1),
        "device": "cpu",
    }

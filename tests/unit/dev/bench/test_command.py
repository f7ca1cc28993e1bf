# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: which rows there are, how benchmarks run, what is printed, how it ends."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
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

DOCS = Path(__file__).parents[4] / "docs"


def test_the_pages_of_results_name_rows_that_exist() -> None:
    rows = {spec.name for name in command.ENTRIES for spec in command.load(name).rows}
    pages = [DOCS / "benchmarks.md", DOCS / "benchmark-details.md"]
    named = set(
        re.findall(r"`(?!os\.|s3ec\.|http\.)(\w+\.\w+)`", "".join(map(Path.read_text, pages)))
    )
    assert len(named) > 30
    assert named <= rows


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

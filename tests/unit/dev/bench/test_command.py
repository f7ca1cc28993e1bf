# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: which rows there are, how benchmarks run, what is printed, how it ends."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.bench import command
from s3ec.dev.bench.command import Entry
from s3ec.dev.bench.context import CannotMeasureError, Context, Result
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


Use = Callable[[Callable[[Context], None]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a benchmark the only one."""

    def install(run: Callable[[Context], None]) -> None:
        monkeypatch.setattr(command, "ENTRIES", {"fake": Entry("Nothing.", 30)})
        monkeypatch.setattr(command, "load", lambda _name: fakes.bench(run))

    return install


def test_what_cannot_be_measured_stays_in_the_result_and_what_was_forgotten_is_a_fault(
    use: Use,
) -> None:
    def half(context: Context) -> None:
        context.report("fake.ratio", 0.5, samples=1)
        raise CannotMeasureError("no vLLM here")

    use(half)
    result = command.run_here("fake", quick=False, say=quiet)
    assert [row.ok for row in result.rows] == [None, True, None]
    assert result.rows[0].detail["why"] == "no vLLM here"
    assert not result.failed

    use(lambda context: context.report("fake.ratio", 0.5, samples=1))
    with pytest.raises(RuntimeError, match=r"fake\.speed_us"):
        command.run_here("fake", quick=False, say=quiet)


def test_all_reads_the_result_of_each_child_and_one_that_crashes_costs_only_its_own_rows(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(lambda _: None)
    document = fakes.result(speed=9.0).to_json()
    # Exit status 1 says that a row missed its reach, not that there is no result.
    good_code = f"print({json.dumps(document)!r}); raise SystemExit(1)"
    lines = [[sys.executable, "-c", code] for code in (good_code, "raise SystemExit('disk full')")]
    monkeypatch.setattr(command, "bench_command", lambda _name, _quick: lines.pop())
    said: list[str] = []
    crashed, good = command.run_all(["fake", "fake"], quick=True, say=said.append)
    assert good.to_json() == document
    assert said == ["fake (1 of 2)", "fake (2 of 2)"]
    assert crashed.failed
    names = ["fake.completed", *(spec.name for spec in fakes.ROWS)]
    assert [row.spec.name for row in crashed.rows] == names
    assert crashed.rows[0].ok is False
    assert "disk full" in crashed.rows[0].detail["note"]
    assert all("disk full" in row.detail["why"] for row in crashed.rows[1:])


# -- the commands ----------------------------------------------------------------------------------


def invoke(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(autouse=True)
def _signals() -> Any:
    """Puts back what ends this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # children do not inherit it
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_benchmark_as_ctrl_c_does(use: Use) -> None:
    """What it has started, mounted and written goes: its context managers are left."""
    scratch: list[Path] = []

    def run(context: Context) -> None:
        scratch.append(context.scratch)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    use(run)
    assert "interrupted" in invoke("verify", code=130).stderr
    assert not scratch[0].exists()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], None]:
    """Sets what every measuring gives."""

    def install(result: Result) -> None:
        monkeypatch.setattr(command, "run_here", lambda _name, quick, say: result)
        monkeypatch.setattr(command, "run_all", lambda _names, quick, say: [result])

    install(fakes.result(name="hooks"))
    return install


@pytest.mark.parametrize("name", ["hooks", "data", "all"])
def test_json_on_stdout_is_one_document_and_a_row_that_misses_its_reach_ends_with_one(
    measured: Callable[[Result], None], name: str
) -> None:
    document = json.loads(invoke(name, "--json").stdout)
    assert document == {**fakes.result(name=name).to_json()}
    measured(fakes.result(speed=9.0))
    assert "NO" in invoke(name, code=1).stdout


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ("hooks", {}),
        ("hydrate --objects 7", {"objects": 7}),
        ("index", {"keys": None}),
        ("index --keys 1e7", {"keys": 10_000_000}),
        ("index --keys 2_000_000", {"keys": 2_000_000}),
        ("soak --minutes 2 --seed 3", {"minutes": 2.0, "seed": 3}),
        ("rag_warm --device=cuda --json", {"device": "cuda"}),
        (
            "rag --factor 0.5 --latency-ms 5,20,5 --clients 3 --configs 3,1 --seed 7",
            {
                "factor": 0.5,
                "seed": 7,
                "latency_ms": (5, 20),
                "clients": 3,
                "configs": (3, 1),
                "device": "cpu",
            },
        ),
    ],
)
def test_options_reach_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, args: str, options: dict[str, Any]
) -> None:
    found: list[tuple[str, dict[str, Any]]] = []

    def run_here(name: str, *, quick: bool, say: Callable[[str], None], **given: Any) -> Result:
        found.append((name, given))
        return fakes.result(name=name)

    monkeypatch.setattr(command, "run_here", run_here)
    words = args.split()
    invoke(*words)
    assert found == [(words[0], options)]

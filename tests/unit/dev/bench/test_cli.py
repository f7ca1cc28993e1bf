# SPDX-License-Identifier: Apache-2.0
"""The bench commands: what goes to stdout, what to files, and the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.bench import registry, run
from s3ec.dev.bench.result import Result
from tests.unit.dev.bench import fakes


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
        monkeypatch.setattr(run, "run_here", lambda _name, quick, say: result)
        monkeypatch.setattr(run, "run_all", lambda quick, say, names: [result])

    install(fakes.result(name="hooks"))
    return install


@pytest.mark.parametrize("command", ["list", "all", "data", "hooks", "fetch", "index"])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    text = invoke(command, "--help").stdout
    assert "Examples" in text
    assert f"s3ec bench {command}" in text
    assert "Exit status" in text


def test_list_names_every_benchmark() -> None:
    assert invoke("list").stdout.startswith("hooks  ")
    assert json.loads(invoke("list", "--json").stdout)["benches"][0]["bench"] == "hooks"


def test_unknown_benchmark_is_bad_usage() -> None:
    invoke("no-such-benchmark", code=2)


@pytest.mark.usefixtures("measured")
def test_table_shows_rows_cases_and_reasons() -> None:
    text = invoke("hooks").stdout
    for expected in ("fake.speed_us", "<= 5", "yes", "hit <b>", "strace is not installed"):
        assert expected in text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("command", ["hooks", "data", "all"])
def test_json_on_stdout_is_one_document_and_nothing_else(command: str) -> None:
    document = json.loads(invoke(command, "--json", "-").stdout)
    assert document["bench"] == command
    assert set(document) == {"bench", "machine", "rows"}
    for row in document["rows"]:
        assert set(row) == {"name", "value", "unit", "reach", "ok", "samples", "detail"}
        assert (row["value"] is None) == (row["ok"] is None)
        assert row["value"] is not None or row["detail"]["why"]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("args", [["--json"], ["--json", "--quick"], ["--quick", "--json", "-"]])
def test_json_without_a_file_goes_to_stdout(args: list[str]) -> None:
    assert json.loads(invoke("data", *args).stdout)["bench"] == "data"


def test_progress_goes_to_stderr_line_by_line_where_that_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_here(which: str, *, quick: bool, say: Callable[[str], None]) -> Result:
        say("the first")
        say("the second")
        return fakes.result(name=which)

    monkeypatch.setattr(run, "run_here", run_here)
    result = invoke("hooks", "--json")
    assert result.stderr.splitlines() == ["bench hooks: the first", "bench hooks: the second"]
    assert json.loads(result.stdout)["bench"] == "hooks"


def test_data_runs_the_benchmarks_of_the_data_path(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_all(*, quick: bool, say: object, names: list[str]) -> list[Result]:
        ran.extend(names)
        return [fakes.result(name=name) for name in names]

    monkeypatch.setattr(run, "run_all", run_all)
    invoke("data", "--json")
    assert ran == list(registry.DATA)
    assert set(ran) < set(registry.ENTRIES)


@pytest.mark.parametrize(("args", "name"), [([], "fetch"), (["--latency-ms", "80"], "fetch80")])
def test_latency_is_part_of_the_name(
    monkeypatch: pytest.MonkeyPatch, args: list[str], name: str
) -> None:
    ran: list[str] = []

    def run_here(which: str, *, quick: bool, say: object) -> Result:
        ran.append(which)
        return fakes.result(name=which)

    monkeypatch.setattr(run, "run_here", run_here)
    invoke("fetch", *args)
    assert ran == [name]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--keys", "1e7"], {"keys": 10_000_000}),
        (["--keys", "2_000_000"], {"keys": 2_000_000}),
        (["--keys", "10000"], {"keys": 10_000}),
    ],
)
def test_number_of_keys_reaches_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, args: list[str], expected: dict[str, int]
) -> None:
    asked: list[dict[str, int]] = []

    def run_here(which: str, *, quick: bool, say: object, **options: int) -> Result:
        asked.append(options)
        return fakes.result(name=which)

    monkeypatch.setattr(run, "run_here", run_here)
    invoke("index", *args)
    assert asked == [expected]


@pytest.mark.parametrize("keys", ["many", "0", "-1e6", "9999", "1e10", "12345.6", "nan", "inf", ""])
def test_keys_that_are_no_number_of_keys_are_refused(
    monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setattr(run, "run_here", lambda *_, **__: pytest.fail("it measured"))
    assert "1e4 to 1e9" in invoke("index", "--keys", keys, code=2).stderr


@pytest.mark.usefixtures("measured")
def test_json_in_a_file_leaves_the_table(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert "fake.speed_us" in invoke("hooks", "--json", str(file)).stdout
    assert json.loads(file.read_text())["bench"] == "hooks"


@pytest.mark.parametrize("command", ["hooks", "all"])
def test_row_that_misses_its_reach_ends_with_one(
    measured: Callable[[Result], None], command: str, tmp_path: Path
) -> None:
    measured(fakes.result(speed=9.0))
    file = tmp_path / "out.json"
    assert "NO" in invoke(command, "--json", str(file), code=1).stdout
    assert file.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_plot_and_report_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, report = tmp_path / "out.png", tmp_path / "out.html"
    for command in ("hooks", "data"):
        invoke(command, "--plot", str(picture))
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    invoke("all", "--html", str(report))
    assert "data:image/png;base64," in report.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hooks", "--json", "/no/such/folder/x.json"], "--json"),
        (["hooks", "--plot", "/no/such/folder/x.png"], "--plot"),
        (["hooks", "--plot", "x.svg"], ".png"),
        (["all", "--html", "/"], "--html"),
    ],
)
def test_file_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setattr(run, "run_here", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setattr(run, "run_all", lambda *_, **__: pytest.fail("it measured"))
    assert message in invoke(*args, code=2).stderr


@pytest.mark.parametrize("args", [["hooks", "--plot", "x.png"], ["all", "--html", "x.html"]])
def test_missing_matplotlib_is_said_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "run_here", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setattr(run, "run_all", lambda *_, **__: pytest.fail("it measured"))
    assert "pip install 's3ec[dev]'" in invoke(*args, code=2).stderr


def rag_options(monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0) -> Any:
    """What `bench rag` is asked for; None is what it takes by itself."""
    asked: list[Any] = []

    def run_here(which: str, *, quick: bool, say: object, options: Any) -> Result:
        asked.append(options)
        return fakes.rag_result()

    monkeypatch.setattr(run, "run_here", run_here)
    invoke("rag", *args, code=code)
    (options,) = asked
    return options


def test_options_of_rag_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args = "--workload zipf --factor 0.5 --latency-ms 5,20,5 --loop open --rate 2 --configs 3,1"

    options = rag_options(monkeypatch, *args.split(), "--object-mb", "30", "--seed", "7")

    assert options.workload == "zipf"
    assert options.factor == 0.5
    assert options.latency_ms == (5, 20)
    assert (options.loop, options.rate_per_s, options.seed) == ("open", 2.0, 7)
    assert options.configs == (3, 1)
    assert options.object_mb == "30"


def test_a_quick_run_of_rag_chooses_for_itself_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rag_options(monkeypatch, "--quick") is None
    assert rag_options(monkeypatch).configs == (1, 2, 3, 4, 5, 6)
    assert rag_options(monkeypatch, "--quick", "--configs", "1").configs == (1,)


def test_rag_shows_its_legs_and_writes_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "run_here", lambda *_, **__: fakes.rag_result())
    page = tmp_path / "rag.html"

    assert "(5) ECExample, local folder" in invoke("rag", "--html", str(page)).stdout
    assert page.read_text().startswith("<!doctype html>")


def test_requests_are_written_without_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "run_here", lambda *_, **__: pytest.fail("it measured"))
    file = tmp_path / "r.jsonl"

    said = invoke("rag", "--workload", "pool", "--factor", "0.02", "--write-requests", str(file))

    assert "1 requests" in said.stdout
    (line,) = map(json.loads, file.read_text().splitlines())
    assert len(line["images"]) == 10
    assert all(Path(image).read_bytes().startswith(b"\x89PNG") for image in line["images"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workload", "letters"], "choose of questions, decks, zipf, scan, pool"),
        (["--latency-ms", "20,far"], "whole numbers with commas"),
        (["--latency-ms", "2000"], "0 to 1000 ms"),
        (["--configs", "1,7"], "configurations are 1 to 6"),
        (["--loop", "round"], "choose of open, closed"),
        (["--object-mb", "5"], "choose of 2.75, 8.8, 30, 67"),
        (["--device", "tpu"], "choose of cpu, cuda"),
        (["--format", "csv"], "choose of dynamo, inference-perf"),
        (["--factor", "0"], "--factor"),
        (["--write-requests", "/no/such/folder/r.jsonl"], "--write-requests"),
        (["--html", "/no/such/folder/r.html"], "--html"),
        (["--requests", "/no/such/file.jsonl"], "--requests"),
    ],
)
def test_what_rag_cannot_take_is_refused_before_measuring(args: list[str], message: str) -> None:
    said = " ".join(invoke("rag", *args, code=2).stderr.replace("\u2502", "").split())
    assert message in said
    assert args[0] in said

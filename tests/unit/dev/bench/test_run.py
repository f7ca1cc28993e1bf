# SPDX-License-Identifier: Apache-2.0
"""One benchmark in this process, and all of them in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec.dev.bench import registry, run
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.registry import Entry
from tests.unit.dev.bench import fakes


def quiet(_line: str) -> None:
    pass


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], None]:
    """Makes a benchmark the only one."""

    def install(bench: Bench) -> None:
        monkeypatch.setattr(registry, "ENTRIES", {"fake": Entry("nowhere", "Nothing.", 30)})
        monkeypatch.setattr(registry, "load", lambda _name: bench)

    return install


def report_all(context: Context) -> None:
    for spec in fakes.ROWS:
        context.report(spec.name, 0.5, samples=1)


def test_result_holds_what_was_reported(use: Callable[[Bench], None]) -> None:
    use(fakes.bench(report_all))
    result = run.run_here("fake", quick=False, say=quiet)
    assert [row.value for row in result.rows] == [0.5, 0.5, 0.5]
    assert not result.failed


def test_options_reach_the_benchmark(use: Callable[[Bench], None]) -> None:
    seen: list[int] = []

    def measure(context: Context, processes: int = 1) -> None:
        seen.append(processes)
        report_all(context)

    use(fakes.bench(measure))
    run.run_here("fake", quick=False, say=quiet)
    run.run_here("fake", quick=False, say=quiet, processes=3)
    assert seen == [1, 3]


def test_what_cannot_be_measured_stays_in_the_result(use: Callable[[Bench], None]) -> None:
    def half(context: Context) -> None:
        context.report("fake.ratio", 0.5, samples=1)
        raise CannotMeasureError("no vLLM here")

    use(fakes.bench(half))
    result = run.run_here("fake", quick=False, say=quiet)
    assert [row.ok for row in result.rows] == [None, True, None]
    assert result.rows[0].detail["why"] == "no vLLM here"
    assert not result.failed


def test_row_that_was_forgotten_is_a_fault(use: Callable[[Bench], None]) -> None:
    use(fakes.bench(lambda context: context.report("fake.ratio", 0.5, samples=1)))
    with pytest.raises(RuntimeError, match=r"fake\.speed_us"):
        run.run_here("fake", quick=False, say=quiet)


def test_scratch_folder_is_there_and_gone_afterwards(use: Callable[[Bench], None]) -> None:
    folders: list[Path] = []

    def measure(context: Context) -> None:
        folders.append(context.scratch)
        (context.scratch / "file").touch()
        report_all(context)

    use(fakes.bench(measure))
    run.run_here("fake", quick=False, say=quiet)
    assert not folders[0].exists()


def test_what_libraries_print_goes_to_stderr(
    use: Callable[[Bench], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(context: Context) -> None:
        sys.stdout.write("from Python\n")
        os.write(1, b"from C\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        report_all(context)

    use(fakes.bench(noisy))
    run.run_here("fake", quick=False, say=quiet)
    out, err = capfd.readouterr()
    assert out == ""
    assert {"from Python", "from C", "from a child"} <= set(err.splitlines())


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(run, "bench_command", lambda _name, _quick: [sys.executable, "-c", code])


def test_all_reads_the_result_of_each_child(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fakes.bench(report_all))
    document = fakes.result(speed=9.0).to_json()
    # Exit status 1 says that a row missed its reach, not that there is no result.
    child(monkeypatch, f"print({json.dumps(document)!r}); raise SystemExit(1)")
    said: list[str] = []
    (result,) = run.run_all(quick=True, say=said.append)
    assert result.to_json() == document
    assert said == ["fake (1 of 1)"]


def test_child_that_crashes_fails_and_costs_only_its_own_rows(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fakes.bench(report_all))
    child(monkeypatch, "raise SystemExit('the disk is full')")
    first, second = run.run_all(quick=False, say=quiet, names=["fake", "fake"])
    assert first.failed
    assert [row.spec.name for row in first.rows] == [
        "fake.completed",
        *(spec.name for spec in fakes.ROWS),
    ]
    assert first.rows[0].ok is False
    assert "the disk is full" in first.rows[0].detail["note"]
    assert all("the disk is full" in row.detail["why"] for row in first.rows[1:])
    assert second.failed


def test_child_that_hangs_is_ended_when_its_time_is_over(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(fakes.bench(report_all))
    # It never gets to the end of this file; its own child must not either.
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    inner = f"import subprocess, sys; subprocess.run(['cat', {str(fifo)!r}])"
    child(monkeypatch, inner)
    (result,) = run.run_all(quick=False, say=quiet, time_s=0.5)
    assert result.failed
    assert "ended after" in result.rows[0].detail["note"]
    with pytest.raises(OSError, match="No such device"):  # nobody reads any more
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


def test_bench_without_any_time_left_is_not_started(
    use: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fakes.bench(report_all))
    child(monkeypatch, f"print({json.dumps(fakes.result().to_json())!r})")
    times = iter([0.0, 0.0, 2000.0])
    first, second = run.run_all(
        quick=False, say=quiet, names=["fake", "fake"], clock=lambda: next(times)
    )
    assert not first.failed
    assert second.failed
    assert "no time left" in second.rows[0].detail["note"]


def test_merged_rows_keep_their_names() -> None:
    merged = run.merged([fakes.result(), fakes.result(speed=9.0)])
    assert merged.bench == "all"
    assert merged.failed
    assert len(merged.rows) == 2 * len(fakes.ROWS)

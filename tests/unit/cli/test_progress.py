# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: lines for logs, a bar for people, and stdout for neither."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from s3ec.cli.output import Progress
from tests.support.clock import Clock
from tests.unit.cli.conftest import Cli, all_shown_on
from tests.unit.cli.corpus import MODEL, Corpus
from tests.unit.cli.test_manifest import announce


def test_a_line_every_ten_seconds_has_count_rate_and_time_left() -> None:
    clock, lines = Clock(0.0), list[str]()
    report = Progress(clock=clock, write=lines.append)
    for second in range(1, 21):
        clock.now_s = second
        report("listing objects", 1000 * second, 100_000)
    assert lines == [
        "listing objects: 10,000 of 100,000, 1,000 a second, 2 min left",
        "listing objects: 20,000 of 100,000, 1,000 a second, 1 min left",
    ]


def test_a_rate_below_ten_is_no_round_number() -> None:
    clock, lines = Clock(0.0), list[str]()
    report = Progress(clock=clock, write=lines.append)
    report("precomputing", 0, 30)
    clock.now_s = 25
    report("precomputing", 20, 30)
    assert lines == ["precomputing: 20 of 30, 0.8 a second, 12 s left"]


def test_the_last_line_of_a_log_says_all_that_was_done() -> None:
    clock, lines = Clock(0.0), list[str]()
    report = Progress(clock=clock, write=lines.append)
    report("precomputing", 20, 20)
    report.finish()
    assert lines == [], "a short job has no lines"
    clock.now_s = 20
    report("precomputing", 0, 20)
    clock.now_s = 25
    report("precomputing", 20, 20)
    report.finish()
    assert [line.partition(",")[0] for line in lines] == [
        "precomputing: 0 of 20",
        "precomputing: 20 of 20",
    ]


def test_without_a_total_there_is_no_time_left_and_another_work_has_a_rate_of_its_own() -> None:
    clock, lines = Clock(0.0), list[str]()
    report = Progress(clock=clock, write=lines.append, in_bytes=True)
    report("reading", 0, None)
    clock.now_s = 10
    report("reading", 20 << 20, None)
    clock.now_s = 15
    report("writing", 0, 4)
    clock.now_s = 20
    report("writing", 1 << 20, 4 << 20)
    assert lines == [
        "reading: 20.0 MiB, 2.0 MiB a second",
        "writing: 1.0 MiB of 4.0 MiB, 204.8 KiB a second, 15 s left",
    ]


@pytest.mark.parametrize("command", ["gc --older-than 1h", "manifest rebuild", "verify"])
def test_progress_goes_to_stderr_and_json_stays_alone(
    cli: Cli, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("s3ec.cli.output.EVERY_S", 0.0)
    announce(corpus, corpus.namespace(MODEL), "page 1", "page 2")
    result = cli(*command.split(), "--json")
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith("{")
    assert "listing objects: 2" in result.stderr


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    code = """
from s3ec.cli.output import counting
with counting("looking") as report:
    for done in (1, 2):
        report("reading entries", done << 20, 4 << 20)
print("done")
"""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs
    ) as shown:
        os.close(theirs)
        screen = all_shown_on(ours)
        told, _ = shown.communicate()
    assert told == b"done\n"
    assert "reading entries" in screen
    assert screen.rstrip().endswith("\x1b[2K")

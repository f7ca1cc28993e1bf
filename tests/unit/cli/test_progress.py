# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: lines for logs, a bar for people, and stdout for neither."""

from __future__ import annotations

import pytest

from s3ec.cli.output import Lines
from tests.support.clock import Clock
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus
from tests.unit.cli.test_manifest import announce


def test_a_line_every_ten_seconds_has_count_rate_and_time_left() -> None:
    clock, lines = Clock(0.0), list[str]()
    report = Lines(clock=clock, write=lines.append)
    for second in range(1, 21):
        clock.now_s = second
        report("listing objects", 1000 * second, 100_000)
    assert lines == [
        "listing objects: 10,000 of 100,000, 1,000 a second, 2 min left",
        "listing objects: 20,000 of 100,000, 1,000 a second, 1 min left",
    ]


@pytest.mark.parametrize("command", ["gc --older-than 1h", "manifest rebuild", "manifest verify"])
def test_progress_goes_to_stderr_and_json_stays_alone(
    cli: Cli, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("s3ec.cli.output.EVERY_S", 0.0)
    announce(corpus, corpus.namespace(MODEL), 1, "page 1", "page 2")
    result = cli(*command.split(), "--json")
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith("{")
    assert "listing objects: 2" in result.stderr

# SPDX-License-Identifier: Apache-2.0
"""What is made of pip's words and pytest's report; the rest of the program needs the internet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.versions.run import Result, exit_status, main, verdict


def result(outcome: str) -> Result:
    return Result("0.31.0", outcome, "of no matter", "2026-01-01")


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["passed", "passed"], 0),
        (["passed", "cannot be installed"], 0),
        (["passed", "failed"], 1),
        (["cannot be installed"], 1),
    ],
    ids=["all", "one is not to be had", "one failed", "none ran"],
)
def test_exit_status(outcomes: list[str], status: int) -> None:
    assert exit_status([result(outcome) for outcome in outcomes]) == status


@pytest.mark.parametrize(
    ("status", "numbers", "expected"),
    [
        (0, "tests='9' failures='0' errors='0' skipped='2'", ("passed", "7 passed, 2 skipped")),
        (1, "tests='9' failures='2' errors='1' skipped='0'", ("failed", "6 passed, 3 failed")),
        (0, "tests='2' failures='0' errors='0' skipped='2'", ("failed", "0 passed, 2 skipped")),
        (-9, "tests='2' failures='0' errors='0' skipped='0'", ("failed", "2 passed")),
    ],
)
def test_the_verdict_counts_what_ran(
    status: int, numbers: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite {numbers}/></testsuites>")
    assert verdict(status, report) == expected


def test_a_pytest_that_left_no_report_has_failed(tmp_path: Path) -> None:
    outcome, detail = verdict(4, tmp_path / "absent.xml")
    assert outcome == "failed"
    assert "4" in detail


@pytest.mark.parametrize("name", ["", "..", "0.31.0/..", "latest", "vllm-0.31.0"])
def test_what_is_no_release_is_refused_before_anything_is_deleted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([name])
    assert refused.value.code == 2
    assert "say it as 0.31.0" in capsys.readouterr().err

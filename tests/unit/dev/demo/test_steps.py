# SPDX-License-Identifier: Apache-2.0
"""Progress where stderr is a terminal, and where it is not."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from s3ec.dev.demo.steps import Steps


class Clock:
    """Goes on by a second and a half whenever it is read."""

    def __init__(self) -> None:
        self._times: Iterator[float] = (1.5 * number for number in range(100))

    def __call__(self) -> float:
        return next(self._times)


def make(*, terminal: bool) -> tuple[Steps, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    return Steps(console, Clock()), out


def test_steps_prints_plain_lines_where_there_is_no_terminal() -> None:
    steps, out = make(terminal=False)
    with steps.step("counting [to three]") as note:
        note("1/3 [one]")
    with steps.step("resting"):
        pass
    assert out.getvalue().splitlines() == [
        "[ 1] counting [to three] ...",
        "     1/3 [one]",
        "[ 1] counting [to three]: done in 1.5 s",
        "[ 2] resting ...",
        "[ 2] resting: done in 1.5 s",
    ]


def test_a_failing_step_is_shown_as_failed_and_raises() -> None:
    steps, out = make(terminal=False)
    with pytest.raises(RuntimeError, match="no more"), steps.step("counting"):
        raise RuntimeError("no more")
    assert out.getvalue().splitlines()[-1] == "[ 1] counting: FAILED after 1.5 s"


def test_an_interrupted_step_is_shown_as_failed() -> None:
    steps, out = make(terminal=False)
    with pytest.raises(KeyboardInterrupt), steps.step("counting"):
        raise KeyboardInterrupt
    assert "FAILED after" in out.getvalue()


def test_steps_leaves_one_line_per_step_on_a_terminal() -> None:
    steps, out = make(terminal=True)
    with steps.step("counting [to three]") as note:
        note("3/3")
    assert out.getvalue().endswith("[ 1] counting [to three]: done in 1.5 s\n")

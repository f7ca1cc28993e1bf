# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: a bar on a terminal, else a line every ten seconds; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from s3ec.cli.output import human_age, human_bytes, print_note
from s3ec.counters import Report

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVERY_S = 10.0
# A rate over less than this is none.
_LEAST_S = 0.1


@contextmanager
def counting(message: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """Show counts, rate and time left while the block runs.

    Args:
        message: What is done, until the first report says so.
        in_bytes: The counts are bytes.
    """
    if not sys.stderr.isatty():
        yield Lines(in_bytes=in_bytes)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Bar(shown, shown.add_task(message, total=None, counts=""), in_bytes)


class _Bar:
    """Moves a bar; another piece of work begins anew."""

    def __init__(self, shown: Progress, task: TaskID, in_bytes: bool) -> None:
        self._shown = shown
        self._task = task
        self._in_bytes = in_bytes
        self._what = ""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what != self._what:
            self._what = what
            self._shown.reset(self._task, description=what, total=total)
        self._shown.update(self._task, completed=done, total=total)
        speed = self._shown.tasks[0].speed
        counts = _counts(done, total, speed, in_bytes=self._in_bytes)
        self._shown.update(self._task, counts=counts)


class Lines:
    """A line every ten seconds, for logs; nothing before the first ten are over.

    Args:
        in_bytes: The counts are bytes.
        clock: Seconds, from any start.
        write: Takes a line.
    """

    def __init__(
        self,
        *,
        in_bytes: bool = False,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = print_note,
    ) -> None:
        self._in_bytes = in_bytes
        self._clock = clock
        self._write = write
        self._told_s = clock()
        self._what = ""
        self._began_s, self._first = self._told_s, 0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now_s = self._clock()
        if what != self._what:
            self._what, self._began_s, self._first = what, now_s, done
        if now_s - self._told_s < _EVERY_S:
            return
        self._told_s = now_s
        took_s = now_s - self._began_s
        speed = (done - self._first) / took_s if took_s >= _LEAST_S else None
        line = f"{what}: {_counts(done, total, speed, in_bytes=self._in_bytes)}"
        if speed and total is not None:
            line += f", {human_age((total - done) / speed)} left"
        self._write(line)


def _counts(done: int, total: int | None, speed: float | None, *, in_bytes: bool) -> str:
    """Such as ``1,200 of 3,000, 400 a second``."""

    def shown(number: float) -> str:
        return human_bytes(number) if in_bytes else f"{number:,.0f}"

    text = shown(done) if total is None else f"{shown(done)} of {shown(total)}"
    return f"{text}, {shown(speed)} a second" if speed else text

# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: one line per step, with a spinner where stderr is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Note = Callable[[str], None]


class Steps:
    """Shows the steps of one run and how long each took."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show on ``console``, stderr if None.

        Args:
            console: A terminal gets a spinner and a clock; anything else plain lines.
            clock: Monotonic seconds.
        """
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._number = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Note]:
        """Announce a step; the yielded function tells how far it is.

        A step that ends with an exception is shown as failed, and the exception goes on.
        """
        self._number += 1
        started = self._clock()
        label = f"[{self._number:2}] {title}"
        failed = True
        try:
            with self._live(label) as note:
                yield note
            failed = False
        finally:
            word = "FAILED after" if failed else "done in"
            self.say(f"{label}: {word} {self._clock() - started:.1f} s")

    def say(self, line: str) -> None:
        """One line, as it is."""
        self._console.print(line, markup=False)

    def _live(self, label: str) -> AbstractContextManager[Note]:
        if self._console.is_terminal:
            return self._spinner(label)
        self.say(f"{label} ...")
        return nullcontext(lambda text: self.say(f"     {text}"))

    @contextmanager
    def _spinner(self, label: str) -> Iterator[Note]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(escape(label), total=None)
            yield lambda text: progress.update(task, description=escape(f"{label}: {text}"))

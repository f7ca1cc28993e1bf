# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is, and what it is given to report through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.result import Row, Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from s3ec.dev.bench.result import Result


class CannotMeasureError(Exception):
    """Raised by a benchmark for what this machine lacks; the message is the row's ``why``."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark.

    Attributes:
        rows: All its rows. Those it does not report are shown without a value, never left out.
        run: Measures and reports; may raise CannotMeasureError for all that is left. Takes the
            Context, and options by name.
        plot: Draws the result; None takes the plot that works for any.
        table: More to show below the rows; may answer None.
        page: The result as an HTML page of its own.
    """

    rows: Sequence[Spec]
    run: Callable[..., None]
    plot: Callable[[Figure, Result], None] | None = None
    table: Callable[[Result], Table | None] | None = None
    page: Callable[[Result], str] | None = None


class Context:
    """Takes one run's rows.

    Attributes:
        quick: A look with few rounds, not figures to quote.
        scratch: An empty folder that is deleted afterwards.
        say: Shows one line of progress.
    """

    def __init__(
        self, bench: Bench, *, quick: bool, scratch: Path, say: Callable[[str], None]
    ) -> None:
        self.quick = quick
        self.scratch = scratch
        self.say = say
        self._specs = {spec.name: spec for spec in bench.rows}
        self._rows: dict[str, Row] = {}

    def rounds(self, full: int) -> int:
        """How many rounds to do: ``full``, or a few in a quick run."""
        return min(full, 2) if self.quick else full

    def report(
        self, name: str, value: float, *, samples: int, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Give a row its value.

        Raises:
            KeyError: The benchmark did not declare this row.
            ValueError: The row has one already.
        """
        self._put(Row(self._specs[name], value, samples, self._marked(detail or {})))

    def report_slowest(
        self,
        name: str,
        cases: Mapping[str, Sequence[float]],
        *,
        samples: int,
        others: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Give a row the median of its slowest case.

        Args:
            name: The row.
            cases: Case to its value in each round.
            samples: Measurements behind the value.
            others: Shown beside the cases, never the value.
            detail: More to tell.
        """
        shown = measure.medians(cases)
        slowest = max(shown, key=lambda case: shown[case])
        about = {
            "spread": measure.spread(cases[slowest]),
            "note": f"the slowest case: {slowest}",
            "cases": shown | dict(others or {}),
        }
        self.report(name, shown[slowest], samples=samples, detail=about | dict(detail or {}))

    def cannot(self, name: str, why: str, **detail: Any) -> None:
        """Say that one row cannot be measured here."""
        self._put(Row(self._specs[name], None, 0, self._marked({"why": why, **detail})))

    def _marked(self, detail: Mapping[str, Any]) -> dict[str, Any]:
        return {**detail, **({"quick": True} if self.quick else {})}

    def _put(self, row: Row) -> None:
        if row.spec.name in self._rows:
            raise ValueError(f"{row.spec.name} was reported before")
        self._rows[row.spec.name] = row
        # The result comes at the end, which one that is cut off does not reach.
        if row.value is not None:
            self.say(f"{row.spec.name}: {row.value:.4g}")

    def rows(self, why: str) -> list[Row]:
        """All rows in their declared order; ``why`` stands where nothing was reported."""
        return [
            self._rows.get(spec.name) or Row(spec, None, 0, self._marked({"why": why}))
            for spec in self._specs.values()
        ]

    @property
    def missing(self) -> list[str]:
        """Declared rows that were not reported yet."""
        return [name for name in self._specs if name not in self._rows]

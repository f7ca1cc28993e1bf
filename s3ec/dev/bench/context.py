# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is, what it reports through, and the one form that every result has."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3ec.dev.bench import measure

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
# A measurement has no more; it also keeps JSON readable.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Spec:
    """A row that a benchmark always has, measured or not.

    Attributes:
        name: ``BENCH.what_unit``, stable: people compare it between releases.
        unit: ``us``, ``ratio``, ``MB/s``, ``1``...
        reach: What the value must fulfil, such as ``<= 1.5``; None where it is only reported.
    """

    name: str
    unit: str
    reach: str | None = None

    def holds(self, value: float) -> bool:
        """Whether this value reaches it."""
        if self.reach is None:
            return True
        comparison, limit = self.reach.split()
        return _COMPARE[comparison](value, float(limit))


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        spec: Name, unit and reach.
        value: The figure; None where it cannot be measured here.
        samples: Measurements that the value was computed from.
        detail: Plain JSON. By convention ``why`` (no value), ``spread`` (median, min, max, p25,
            p75 over rounds), ``cases`` (name to a figure in the same unit; shown in tables and
            plots) and ``note`` (one line for people).
    """

    spec: Spec
    value: float | None
    samples: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.value is None and not self.detail.get("why"):
            raise ValueError(f"{self.spec.name}: a row without a value must say why")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"{self.spec.name}: {self.value} is no measurement")

    @property
    def ok(self) -> bool | None:
        """Whether the reach holds; True without one, None without a value."""
        if self.value is None:
            return None
        return self.spec.holds(self.value)

    def to_json(self) -> dict[str, Any]:
        """The row as in the documentation; figures rounded to six digits."""
        return {
            "name": self.spec.name,
            "value": rounded(self.value),
            "unit": self.spec.unit,
            "reach": self.spec.reach,
            "ok": self.ok,
            "samples": self.samples,
            "detail": rounded(dict(self.detail)),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Row:
        """The row that to_json wrote."""
        spec = Spec(document["name"], document["unit"], document["reach"])
        return cls(spec, document["value"], document["samples"], document["detail"])


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of one benchmark, and the machine they are from."""

    bench: str
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def failed(self) -> bool:
        """Whether any row misses what it must reach."""
        return any(row.ok is False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """``{"bench": NAME, "machine": {...}, "rows": [...]}``."""
        return {
            "bench": self.bench,
            "machine": dict(self.machine),
            "rows": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """The result that to_json wrote."""
        rows = [Row.from_json(row) for row in document["rows"]]
        return cls(document["bench"], document["machine"], rows)


def rounded(value: Any) -> Any:
    """The same JSON with every float cut to six significant digits."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


class CannotMeasureError(Exception):
    """Raised by a benchmark for what this machine lacks; the message is the row's ``why``."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark.

    Attributes:
        rows: All its rows. Those it does not report are shown without a value, never left out.
        run: Measures and reports; may raise CannotMeasureError for all that is left. Takes the
            Context, and options by name.
    """

    rows: Sequence[Spec]
    run: Callable[..., None]


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

    def report_median(
        self,
        name: str,
        cases: Mapping[str, Sequence[float]],
        case: str,
        *,
        samples: int,
        note: str,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Give a row the median of one case, beside those of all others.

        Args:
            name: The row.
            cases: Case to its value in each round.
            case: The one that gives the value.
            samples: Measurements behind the value.
            note: One line for people.
            detail: More to tell.
        """
        medians = measure.medians(cases)
        about = {"spread": measure.spread(cases[case]), "cases": medians, "note": note}
        self.report(name, medians[case], samples=samples, detail=about | dict(detail or {}))

    def report_slowest(
        self,
        name: str,
        cases: Mapping[str, Sequence[float]],
        *,
        samples: int,
        others: Mapping[str, float] | None = None,
        note: str = "",
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Give a row the median of its slowest case, which the note names.

        Args: as of report_median; ``others`` are shown beside the cases and never the value.
        """
        medians = measure.medians(cases)
        slowest = max(medians, key=lambda case: medians[case])
        note = f"{note}; the slowest case: {slowest}" if note else f"the slowest case: {slowest}"
        shown = {"cases": medians | dict(others or {}), **(detail or {})}
        self.report_median(name, cases, slowest, samples=samples, note=note, detail=shown)

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

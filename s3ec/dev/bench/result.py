# SPDX-License-Identifier: Apache-2.0
"""The one form that every benchmark's result has, on paper and as JSON."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_REACH = re.compile(r"(<=|>=|==|<|>) (-?\d+(?:\.\d+)?)")
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
class Reach:
    """What a value must fulfil, such as ``<= 1.5``."""

    comparison: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Reach:
        """Read ``COMPARISON NUMBER``.

        Raises:
            ValueError: Not of that form.
        """
        found = _REACH.fullmatch(text)
        if found is None:
            raise ValueError(f"reach {text!r} is not a comparison and a number, such as '<= 1.5'")
        return cls(found.group(1), float(found.group(2)))

    def holds(self, value: float) -> bool:
        """Whether this value reaches it."""
        return _COMPARE[self.comparison](value, self.limit)


@dataclass(frozen=True, slots=True)
class Spec:
    """A row that a benchmark always has, measured or not.

    Attributes:
        name: ``BENCH.what_unit``, stable: people compare it between releases.
        unit: ``us``, ``ratio``, ``MB/s``, ``1``...
        reach: What the value must fulfil; None where it is only reported.
    """

    name: str
    unit: str
    reach: str | None = None

    def __post_init__(self) -> None:
        if self.reach is not None:
            Reach.parse(self.reach)


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
        return self.spec.reach is None or Reach.parse(self.spec.reach).holds(self.value)

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

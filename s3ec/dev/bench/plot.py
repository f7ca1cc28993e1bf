# SPDX-License-Identifier: Apache-2.0
"""Draws a result; the only module that needs matplotlib, and only when a plot is asked for."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench.result import Reach, Result, Row
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from s3ec.dev.bench.context import Bench

# Colours that people who confuse red and green can tell apart.
GOOD, BAD, PLAIN, OTHER = "#0072b2", "#d55e00", "#7f8c99", "#b8a13a"
_WIDTH_INCHES = 9.0
_DOTS_PER_INCH = 110
# From here on a linear axis hides the small bars.
_LOG_FROM = 30.0


def need_matplotlib() -> None:
    """Refuse before the measuring rather than after it.

    Raises:
        ConfigError: matplotlib is not installed; says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed: pip install 's3ec[dev]'")


def png(bench: Bench | None, result: Result) -> bytes:
    """The plot of a result as a PNG file.

    Args:
        bench: For a plot of its own; None draws what works for any.
        result: What to draw.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", dpi=_DOTS_PER_INCH)
    if bench is not None and bench.plot is not None:
        bench.plot(figure, result)
    else:
        draw(figure, result)
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white")
    return out.getvalue()


def draw(figure: Figure, result: Result) -> None:
    """One panel per unit: a bar per row with its spread and reach, and one per case of it."""
    panels: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.value is not None:
            panels.setdefault(row.spec.unit, []).append(row)
    figure.suptitle(title(result))
    if not panels:
        figure.set_size_inches(_WIDTH_INCHES, 1.5)
        figure.text(0.5, 0.4, "nothing could be measured here", ha="center")
        return
    heights = [sum(1 + len(_cases(row)) for row in rows) + 1 for rows in panels.values()]
    figure.set_size_inches(_WIDTH_INCHES, 0.8 + 0.34 * sum(heights))
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (unit, rows) in zip(axes, panels.items(), strict=True):
        _bars(panel, unit, rows)


def _cases(row: Row) -> dict[str, float]:
    return dict(row.detail.get("cases") or {})


def _bars(axes: Axes, unit: str, rows: Sequence[Row]) -> None:
    names: list[str] = []
    values: list[float] = []
    for row in rows:
        place, value = len(names), float(row.value or 0)
        colour = BAD if row.ok is False else GOOD if row.spec.reach else PLAIN
        axes.barh(place, value, color=colour, height=0.7)
        highest = max(value, whisker(axes, place, row.detail.get("spread")))
        if row.spec.reach is not None:
            limit = Reach.parse(row.spec.reach).limit
            axes.plot([limit, limit], [place - 0.45, place + 0.45], color="black", linewidth=1.5)
        axes.annotate(f" {value:.4g}", (highest, place), va="center", fontsize=8)
        names.append(row.spec.name.partition(".")[2])
        values.append(value)
        for case, beside in _cases(row).items():
            axes.barh(len(names), beside, color=OTHER, height=0.45)
            axes.annotate(f" {beside:.4g}", (beside, len(names)), va="center", fontsize=7)
            names.append(case)
            values.append(beside)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel(f"{unit} (black mark: must reach; yellow: the cases of a row)", fontsize=8)
    settle(axes, values)


def whisker(axes: Axes, place: float, spread: Any) -> float:
    """Draw a thin line from the lowest to the highest round; returns where it ends."""
    if not (isinstance(spread, dict) and "min" in spread and "max" in spread):
        return -math.inf
    axes.plot([spread["min"], spread["max"]], [place, place], color="black", linewidth=1)
    return float(spread["max"])


def settle(axes: Axes, values: Sequence[float]) -> None:
    """First row on top, room for the numbers, and a logarithmic axis where bars differ much."""
    axes.margins(x=0.12, y=0.02)
    axes.invert_yaxis()
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) > _LOG_FROM * min(positive):
        axes.set_xscale("log")
    elif values and min(values) >= 0:
        axes.set_xlim(0, None if max(values) > 0 else 1)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def title(result: Result) -> str:
    """Name of the benchmark and the machine."""
    about = result.machine
    return f"s3ec bench {result.bench}: {about.get('cpus')} x {about.get('cpu_model')}"

# SPDX-License-Identifier: Apache-2.0
"""The dashboard's panels, drawn from what a Prometheus answers: the picture of docs/operations.md.

It has Grafana's places and colours of meaning, so that it is read as the dashboard is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.cli.output import human_bytes
from s3ec.dev.observability.panels import OVER, ROWS, Panel
from s3ec.dev.observability.run import DOWN
from s3ec.dev.plots import need_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

    from s3ec.dev.rigs.prometheus import Prometheus

_DOTS_PER_INCH = 100
_WIDTH_INCHES = 16.0
_ROW_INCHES, _STATS_INCHES, _QUESTION_INCHES = 2.3, 1.1, 0.35
_ACROSS = 4
# Colours that people who confuse red and green can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f8c99")
_GOOD, _POOR, _BAD, _TEXT = "#009e73", "#e69f00", "#d55e00", "#222222"
_POINTS = 300

Series = tuple[str, list[float], list[float]]
"""A name, times in seconds since the start, and values."""


def filled(expression: str, window_s: float) -> str:
    """An expression as Grafana sends it, with all engines chosen."""
    return re.sub(r"\$(model_name|instance|engine)\b", ".*", expression).replace(
        OVER, f"{window_s:.0f}s"
    )


def draw(
    out: Path,
    prometheus: Prometheus,
    *,
    start_s: float,
    end_s: float,
    window_s: float,
    marks: Sequence[tuple[float, str]],
    title: str,
) -> None:
    """Write the picture.

    Args:
        out: A PNG file.
        prometheus: Answers the panels' queries.
        start_s, end_s: What is shown, seconds since the epoch.
        window_s: Over which rates are taken.
        marks: Times at which something began, and what.
        title: Said on top.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    heights = []
    for row in ROWS:
        has_stats = any(panel.kind == "stat" for panel in row.panels)
        lines = math.ceil(sum(panel.kind != "stat" for panel in row.panels) / _ACROSS)
        heights.append(_QUESTION_INCHES + has_stats * _STATS_INCHES + lines * _ROW_INCHES)
    figure = Figure(
        figsize=(_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained", dpi=_DOTS_PER_INCH
    )
    figure.suptitle(title, fontsize=13)
    parts = figure.subfigures(len(ROWS), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, row in zip(parts, ROWS, strict=True):
        part.suptitle(row.question, fontsize=12, fontweight="bold", x=0.01, ha="left")
        stats = [panel for panel in row.panels if panel.kind == "stat"]
        lined = [panel for panel in row.panels if panel.kind != "stat"]
        areas = _areas(part, bool(stats), len(lined))
        if stats:
            for axes, panel in zip(areas.pop(0).subplots(1, len(stats)), stats, strict=True):
                _number(axes, panel, _asked(prometheus, panel, start_s, end_s, window_s))
        grid = areas[0].subplots(math.ceil(len(lined) / _ACROSS), _ACROSS, squeeze=False)
        for axes in grid.flat[len(lined) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, lined, strict=False):
            _lines(axes, panel, _asked(prometheus, panel, start_s, end_s, window_s))
            _mark(axes, [(at_s - start_s, what) for at_s, what in marks], end_s - start_s)
    figure.savefig(out, format="png", facecolor="white", pil_kwargs={"optimize": True})


def _areas(part: SubFigure, stats: bool, lined: int) -> list[SubFigure]:
    if not stats:
        return [part]
    heights = (_STATS_INCHES, math.ceil(lined / _ACROSS) * _ROW_INCHES)
    return list(part.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0])


def _asked(
    prometheus: Prometheus, panel: Panel, start_s: float, end_s: float, window_s: float
) -> list[Series]:
    """All series of a panel, with their names as the legend has them."""
    found = []
    for query in panel.queries:
        for one in prometheus.query_range(
            filled(query.expression, window_s),
            start_s,
            end_s,
            max(1.0, (end_s - start_s) / _POINTS),
        ):
            name = query.legend
            for label, value in one["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            times = [float(at_s) - start_s for at_s, _ in one["values"]]
            found.append((name, times, [float(value) for _, value in one["values"]]))
    return found


def _number(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    """The newest value, large, and how it came to be behind it."""
    axes.set_axis_off()
    axes.text(0.0, 0.92, panel.title, fontsize=10, color="#555555", transform=axes.transAxes)
    values = [value for _, _, values in series for value in values if not math.isnan(value)]
    if not values:
        axes.text(0.5, 0.4, "no data", ha="center", va="center", transform=axes.transAxes)
        return
    newest = values[-1]
    colour = _TEXT
    if panel.worry_from is not None:
        colour = _BAD if newest >= panel.worry_from else _GOOD
    if panel.good_from is not None:
        colour = _GOOD if newest >= panel.good_from else _POOR
    _, times, path = series[0]
    axes.fill_between(times, path, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(0, max(*values, 1e-9) * 2.5)
    axes.margins(x=0)
    text = _shown(newest, panel.unit)
    axes.text(
        0.5, 0.55, text, ha="center", va="center", fontsize=22, color=colour,
        transform=axes.transAxes,
    )  # fmt: skip


def _lines(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(panel.title, fontsize=10, loc="left")
    # What has never happened needs no line, where many kinds could.
    shown = [one for one in series if any(value > 0 for value in one[2])] or list(series)[:1]
    if panel.stacked and shown:
        _stack(axes, shown)
    else:
        for colour, (name, times, values) in zip(_COLOURS, shown, strict=False):
            axes.plot(times, values, color=colour, linewidth=1.3, label=name)
    axes.set_ylim(0, panel.largest and panel.largest * 1.05)
    if not any(value > 0 for _, _, values in series for value in values):
        axes.set_ylim(0, 1)
        axes.text(0.5, 0.5, "0 all the time", ha="center", color=_GOOD, transform=axes.transAxes)
    else:
        axes.legend(
            loc="upper left" if panel.largest is None else "best", ncols=2, fontsize=7,
            framealpha=0.75, borderpad=0.2, handlelength=1.2, labelspacing=0.2, columnspacing=0.8,
        )  # fmt: skip
        if panel.largest is None:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _stack(axes: Axes, series: Sequence[Series]) -> None:
    """Areas on top of each other, at all times that any has."""
    times = sorted({at for _, some, _ in series for at in some})
    layers = []
    for _, some, values in series:
        of_time = dict(zip(some, values, strict=True))
        layers.append([of_time.get(at, 0.0) for at in times])
    names = [name for name, _, _ in series]
    axes.stackplot(times, layers, labels=names, colors=_COLOURS, alpha=0.75, linewidth=0)


def _mark(axes: Axes, marks: Sequence[tuple[float, str]], end: float) -> None:
    """A line where a part of the run began; the outage has a background."""
    axes.set_xlim(0, end)
    for number, (at, what) in enumerate(marks):
        following = marks[number + 1][0] if number + 1 < len(marks) else end
        if what == DOWN:
            axes.axvspan(at, following, color=_BAD, alpha=0.08, linewidth=0)
        if number:
            axes.axvline(at, color="#999999", linewidth=0.6, linestyle=":")
    ends = [*marks[1:], (end, "")]
    axes.set_xticks(
        [(at + following) / 2 for (at, _), (following, _) in zip(marks, ends, strict=True)],
        [what for _, what in marks],
        fontsize=7,
    )
    axes.tick_params(axis="x", length=0)


def _shown(value: float, unit: str) -> str:
    """A number with its unit, as Grafana would."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "Bps"):
        return human_bytes(value) + ("/s" if unit == "Bps" else "")
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    return f"{value:.3g}" + ("/s" if unit == "ops" else "")

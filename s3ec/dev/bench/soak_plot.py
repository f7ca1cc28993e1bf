# SPDX-License-Identifier: Apache-2.0
"""Draws a soak over time: memory, descriptors and hits, with the faults behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench.result import Result
from s3ec.dev.bench.soak_report import FAULTS, HITS, MEMORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#b8a13a", "#7f8c99")
_FAULT = "#f3d9c9"
_INCHES = (9.0, 8.0)


def draw(figure: Figure, result: Result) -> None:
    """Three panels with one time axis; a fault is a stripe."""
    from s3ec.dev.bench.plot import title

    details: Mapping[str, Mapping[str, Any]] = {row.spec.name: row.detail for row in result.rows}
    figure.set_size_inches(*_INCHES)
    figure.suptitle(title(result))
    memory, files, hits = figure.subplots(3, 1, sharex=True)
    lives = details[MEMORY].get("series", {})
    _lines(memory, {name: [(p[0], p[1]) for p in points] for name, points in lives.items()})
    memory.set_ylabel("own memory, MB")
    _lines(files, {name: [(p[0], p[2]) for p in points] for name, points in lives.items()})
    files.set_ylabel("open files")
    _lines(hits, details[HITS].get("series", {}))
    hits.set_ylabel("hits per second")
    hits.set_xlabel("minutes (a stripe: a fault)")
    for axes in (memory, files, hits):
        for began, ended, *_ in details[FAULTS].get("steps", []):
            axes.axvspan(began, ended, color=_FAULT, linewidth=0, zorder=0)
        axes.set_ylim(bottom=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _lines(axes: Axes, series: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """One line per life of an engine, lives of one engine in one colour."""
    colours: dict[str, str] = {}
    for name, points in series.items():
        engine = name.split(" ")[0]
        new = engine not in colours
        colour = colours.setdefault(engine, _COLOURS[len(colours) % len(_COLOURS)])
        label = engine if new else None
        times, values = [p[0] for p in points], [p[1] for p in points]
        axes.plot(times, values, color=colour, linewidth=1, label=label)
    if colours:
        axes.legend(fontsize=8, loc="upper left", frameon=False)

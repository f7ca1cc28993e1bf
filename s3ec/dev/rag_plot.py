# SPDX-License-Identifier: Apache-2.0
"""``python -m s3ec.dev.rag_plot RESULT.json FOLDER``: the plots of `s3ec bench rag` in README.md.

RESULT.json is what ``s3ec bench rag --json RESULT.json`` wrote. The files are ``rag-ttft.png`` and
``rag-total.png``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import rag
from s3ec.dev.bench.rag_page import COLOURS
from s3ec.dev.bench.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Leg = Mapping[str, Any]
_DOTS_PER_INCH = 130


def first_token(figure: Figure, legs: Sequence[_Leg]) -> None:
    """A bar for each leg, as long as the median time to the first token; marks at p90 and p99."""
    figure.set_size_inches(7.4, 0.9 + 0.36 * len(legs))
    axes = figure.subplots()
    for place, leg in enumerate(legs):
        times = leg["ttft_s"]
        axes.barh(place, times["p50"], color=COLOURS[leg["number"]][0], height=0.62)
        axes.plot([times["p50"], times["p99"]], [place, place], color="#444", linewidth=0.8)
        axes.plot([times["p90"], times["p99"]], [place] * 2, "|", color="#444", markersize=7)
        axes.annotate(f"  {times['p50']:.3g} s", (times["p99"], place), va="center", fontsize=8)
    axes.set_yticks(range(len(legs)), [leg["name"] for leg in legs], fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token: bar p50, marks p90 and p99", fontsize=8)
    _quiet(axes, "x")


def total(figure: Figure, legs: Sequence[_Leg]) -> None:
    """Seconds for all requests over the latency; a line for each configuration."""
    figure.set_size_inches(7.4, 3.4)
    axes = figure.subplots()
    furthest = max(leg["latency_ms"] for leg in legs)
    for number in dict.fromkeys(leg["number"] for leg in legs):
        same = [leg for leg in legs if leg["number"] == number]
        points = [(leg["latency_ms"], leg["seconds"]) for leg in same]
        if len(points) == 1:
            points = [(0, points[0][1]), (furthest, points[0][1])]
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[number][0],
            linestyle="--" if number == 2 else "-",
            marker="o" if len(same) > 1 else "",
            markersize=4,
            linewidth=2,
            label=same[0]["name"].partition(", 0 ms")[0],
        )
    axes.set_yscale("log")
    axes.set_xlabel("milliseconds added to each request to the bucket", fontsize=8)
    axes.set_ylabel("seconds for all questions", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _quiet(axes, "y")


def _quiet(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    (axes.xaxis if grid == "x" else axes.yaxis).set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


_PLOTS: Mapping[str, Callable[[Figure, Sequence[_Leg]], None]] = {
    "rag-ttft.png": first_token,
    "rag-total.png": total,
}


def write(result: Result, folder: Path) -> list[Path]:
    """Write both files.

    Raises:
        ValueError: The result has no legs.
    """
    from matplotlib.figure import Figure

    found = rag.legs_of(result)
    if found is None:
        raise ValueError("nothing was measured in this result")
    about, unsorted = found
    legs = sorted(unsorted, key=lambda leg: (leg["number"], leg["latency_ms"]))
    machine = result.machine
    small = (
        f"{about['workload']}, {about['requests']} requests, {about['object_bytes'] / 1e6:.3g} MB "
        f"each embedding; {machine['cpus']} x {machine['cpu_model']}, no GPU"
    )
    paths = []
    for name, draw in _PLOTS.items():
        figure = Figure(layout="constrained", dpi=_DOTS_PER_INCH)
        draw(figure, legs)
        figure.suptitle(small, fontsize=7.5, color="#555555")
        figure.savefig(folder / name, format="png", facecolor="white", metadata={"Software": None})
        paths.append(folder / name)
    return paths


if __name__ == "__main__":
    write(Result.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))

# SPDX-License-Identifier: Apache-2.0
"""The plots of README and docs, drawn by matplotlib.

* ``python -m s3ec.dev.plots rag RESULT.json FOLDER`` writes ``rag-ttft.png`` and ``rag-total.png``
  from what ``s3ec bench rag --json RESULT.json`` wrote.
* ``python -m s3ec.dev.plots payoff FILE.svg`` writes the plot of docs/does-it-pay.md.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.errors import ConfigError
from s3ec.payoff import GPUS, MODELS, STORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that people who confuse red and green can tell apart.
_BLUE, _ORANGE = "#0072b2", "#d55e00"
# Of the configurations of `bench rag`, by their numbers.
RAG_COLOURS = {
    1: "#7b8794",
    2: "#56a0d3",
    3: _BLUE,
    4: "#00875f",
    6: _ORANGE,
}
_Leg = Mapping[str, Any]


def need_matplotlib() -> None:
    """Refuse before the work rather than after it.

    Raises:
        ConfigError: matplotlib is not installed; says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed: pip install matplotlib")


def _figure(width: float, height: float, *, dpi: float = 100) -> Figure:
    """A figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def save_rag(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both plots of ``bench rag``; the same result gives the same bytes.

    Args:
        result: The JSON document of the benchmark.
        folder: Where the files come.

    Raises:
        ValueError: The result has no legs.
    """
    (row,) = (row for row in result["rows"] if row["name"] == "rag.legs")
    if row["value"] is None:
        raise ValueError("nothing was measured in this result")
    about, machine = row["detail"]["about"], result["machine"]
    legs = sorted(row["detail"]["legs"], key=lambda leg: (leg["number"], leg["latency_ms"]))
    small = rag_caption(about, machine)
    paths = []
    for name, figure in (("rag-ttft.png", _first_token(legs)), ("rag-total.png", _total(legs))):
        figure.suptitle(small, fontsize=7.5, color="#555555")
        figure.savefig(folder / name, format="png", facecolor="white", metadata={"Software": None})
        paths.append(folder / name)
    return paths


def rag_caption(about: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """What stands in each plot: of what it is, and that its encoder is simulated, where it is."""
    encoder = about["encoder"].partition(";")[0]
    return (
        f"{about['requests']} requests, {about['object_bytes'] / 1e6:.3g} MB each embedding; "
        f"{'simulated ' if encoder.startswith('sleeps') else ''}encoder: {encoder}; "
        f"{machine['cpus']} x {machine['cpu_model']}, no GPU"
    )


def _first_token(legs: Sequence[_Leg]) -> Figure:
    """A bar for each leg, as long as the median time to the first token; marks at p90 and p99."""
    figure = _figure(7.4, 0.9 + 0.36 * len(legs), dpi=130)
    axes = figure.subplots()
    for place, leg in enumerate(legs):
        times = leg["ttft_s"]
        axes.barh(place, times["p50"], color=RAG_COLOURS[leg["number"]], height=0.62)
        axes.plot([times["p50"], times["p99"]], [place, place], color="#444", linewidth=0.8)
        axes.plot([times["p90"], times["p99"]], [place] * 2, "|", color="#444", markersize=7)
        axes.annotate(f"  {times['p50']:.3g} s", (times["p99"], place), va="center", fontsize=8)
    axes.set_yticks(range(len(legs)), [leg["name"] for leg in legs], fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token: bar p50, marks p90 and p99", fontsize=8)
    _quiet(axes, "x")
    return figure


def _total(legs: Sequence[_Leg]) -> Figure:
    """Seconds for all requests over the latency; a line for each configuration."""
    figure = _figure(7.4, 3.4, dpi=130)
    axes = figure.subplots()
    furthest = max(leg["latency_ms"] for leg in legs)
    for number in dict.fromkeys(leg["number"] for leg in legs):
        same = [leg for leg in legs if leg["number"] == number]
        points = [(leg["latency_ms"], leg["seconds"]) for leg in same]
        if len(points) == 1:
            points = [(0, points[0][1]), (furthest, points[0][1])]
        axes.plot(
            *zip(*points, strict=True),
            color=RAG_COLOURS[number],
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
    return figure


def _quiet(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    (axes.xaxis if grid == "x" else axes.yaxis).set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


_PAYOFF_LINES = {"aws": ("S3, same region", _ORANGE), "minio-nvme": ("local network", _BLUE)}
_PAYOFF_LABELLED = (
    "gemma3-27b", "internvl3-38b", "internvl3-78b", "glm-4.5v", "qwen2.5-vl-7b", "qwen3-vl-8b",
    "pixtral-12b", "kimi-vl-a3b-2506", "ultravox-8b", "internvl3.5-8b",
)  # fmt: skip


def save_payoff(out: Path) -> None:
    """Write size and encode time of each model of ``s3ec advise``, and download times, as SVG.

    A model below a line is encoded faster than downloaded. The same matplotlib writes the same
    bytes.
    """
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "s3ec"
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    sizes = [10 ** (step / 20) * 1e6 for step in range(42)]
    for name, (label, colour) in _PAYOFF_LINES.items():
        times = [STORES[name].fetch_ms(nbytes) for nbytes in sizes]
        axes.plot([size / 1e6 for size in sizes], times, color=colour, label=f"download: {label}")
    gpu = GPUS["h100"]
    for key, model in MODELS.items():
        x, y = model.nbytes / 1e6, model.encode_ms(gpu, model.gpus)
        axes.plot(x, y, "o", color="#333333", markersize=4)
        if key in _PAYOFF_LABELLED:
            axes.annotate(model.name, (x, y), xytext=(5, 3), textcoords="offset points", size=8)
    axes.plot(
        [], [], "o", color="#333333", markersize=4, label="one encode, H100 engine (estimate)"
    )
    axes.set(xscale="log", yscale="log", xlabel="MB of one embedding", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str]) -> None:
    """Draw what the command line names.

    Raises:
        ConfigError: matplotlib is not installed.
        SystemExit: The arguments are others.
    """
    match arguments:
        case ["rag", result, folder]:
            need_matplotlib()
            save_rag(json.loads(Path(result).read_text()), Path(folder))
        case ["payoff", out]:
            need_matplotlib()
            save_payoff(Path(out))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""The plots of README and docs, drawn by matplotlib.

* ``python -m s3ec.dev.plots rag RESULT.json OUT.png`` draws what ``bench rag --json`` printed.
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
}


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


def save_rag(result: Mapping[str, Any], out: Path) -> None:
    """Write the plot of ``bench rag``: a bar for each leg; the same result gives the same bytes.

    Args:
        result: The JSON document of the benchmark.
        out: A PNG file.

    Raises:
        ValueError: The result has no legs.
    """
    (row,) = (row for row in result["rows"] if row["name"] == "rag.legs")
    if row["value"] is None:
        raise ValueError("nothing was measured in this result")
    about, machine = row["detail"]["about"], result["machine"]
    legs = sorted(row["detail"]["legs"], key=lambda leg: (leg["number"], leg["latency_ms"]))
    figure = _figure(9, 1.3 + 0.36 * len(legs), dpi=130)
    total, first = figure.subplots(1, 2, sharey=True)
    for place, leg in enumerate(legs):
        colour, times = RAG_COLOURS[leg["number"]], leg["ttft_s"]
        total.barh(place, leg["seconds"], color=colour, height=0.62)
        _say(total, place, leg["seconds"], leg["seconds"])
        first.barh(place, times["p50"], color=colour, height=0.62)
        first.plot([times["p50"], times["p99"]], [place, place], color="#444", linewidth=0.8)
        first.plot([times["p99"]], [place], "|", color="#444", markersize=7)
        _say(first, place, times["p99"], times["p50"])
    total.set_yticks(range(len(legs)), [leg["name"] for leg in legs], fontsize=8)
    total.invert_yaxis()
    total.set_xlabel("seconds for all questions", fontsize=8)
    first.set_xlabel("seconds to the first token: bar p50, mark p99", fontsize=8)
    for axes in (total, first):
        axes.margins(x=0.15, y=0.02)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(rag_caption(about, machine), fontsize=7.5, color="#555555")
    figure.savefig(out, format="png", facecolor="white", metadata={"Software": None})


def rag_caption(about: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """What stands in the plot: of what it is, and that its encoder is simulated, where it is."""
    encoder = about["encoder"].partition(";")[0]
    return (
        f"{about['requests']} questions, {about['object_bytes'] / 1e6:.3g} MB each embedding; "
        f"{'simulated ' if encoder.startswith('sleeps') else ''}encoder: {encoder} for each page\n"
        f"{machine['cpus']} x {machine['cpu_model']}, load {machine['load_1min']:.0f}, no GPU"
    )


def _say(axes: Axes, place: int, end: float, seconds: float) -> None:
    """Write the seconds behind a bar that ends there."""
    axes.annotate(f"  {seconds:.3g} s", (end, place), va="center", fontsize=8)


_PAYOFF_LINES = {"aws": ("S3, same region", _ORANGE), "minio-nvme": ("local network", _BLUE)}
_PAYOFF_LABELLED = (
    "gemma3-27b", "internvl3-38b", "internvl3-78b", "qwen2.5-vl-7b", "qwen3-vl-8b",
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
    sizes = [step * 1e6 for step in range(1, 96)]
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
    axes.set(xlim=(0, 95), ylim=(0, 190), xlabel="MB of one embedding", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str]) -> None:
    """Draw what the command line names.

    Raises:
        ConfigError: matplotlib is not installed.
        SystemExit: The arguments are others.
    """
    match arguments:
        case ["rag", result, out]:
            need_matplotlib()
            save_rag(json.loads(Path(result).read_text()), Path(out))
        case ["payoff", out]:
            need_matplotlib()
            save_payoff(Path(out))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

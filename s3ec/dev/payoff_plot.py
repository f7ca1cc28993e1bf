# SPDX-License-Identifier: Apache-2.0
"""``python -m s3ec.dev.payoff_plot FILE.svg``: the plot of docs/does-it-pay.md.

Each model of ``s3ec cost`` is a point: the size of an embedding, and the time of one encode on an
H100. Lines say how long a download of that size takes. Models below a line are encoded faster.
"""

from __future__ import annotations

import sys
from pathlib import Path

from s3ec.payoff import GPUS, MODELS, STORES

_LINES = {
    "aws": ("S3, same region", "#d55e00"),
    "minio-nvme": ("local network", "#0072b2"),
}
_LABELLED = (
    "gemma3-27b", "internvl3-38b", "internvl3-78b", "glm-4.5v", "qwen2.5-vl-7b", "qwen3-vl-8b",
    "pixtral-12b", "kimi-vl-a3b-2506", "ultravox-8b", "internvl3.5-8b",
)  # fmt: skip


def draw(out: Path) -> None:
    """Write the plot; the same matplotlib writes the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "s3ec"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [10 ** (step / 20) * 1e6 for step in range(42)]
    for name, (label, colour) in _LINES.items():
        times = [STORES[name].fetch_ms(nbytes) for nbytes in sizes]
        axes.plot([size / 1e6 for size in sizes], times, color=colour, label=f"download: {label}")
    gpu = GPUS["h100"]
    for key, model in MODELS.items():
        x, y = model.nbytes / 1e6, model.encode_ms(gpu, model.gpus)
        axes.plot(x, y, "o", color="#333333", markersize=4)
        if key in _LABELLED:
            axes.annotate(model.name, (x, y), xytext=(5, 3), textcoords="offset points", size=8)
    axes.plot(
        [], [], "o", color="#333333", markersize=4, label="one encode, H100 engine (estimate)"
    )
    axes.set(xscale="log", yscale="log", xlabel="MB of one embedding", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))

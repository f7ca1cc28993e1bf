# SPDX-License-Identifier: Apache-2.0
"""Time per picture with s3ec and without, as bars: in a terminal, and as a PNG file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.table import Table
from rich.text import Text

from s3ec.dev.demo.report import Report

# Colours that people who confuse red and green can tell apart.
_WITH, _WITHOUT = "#0072b2", "#d55e00"
_BAR_CHARACTERS = 48


def bars(report: Report) -> Table:
    """Two bars for each picture: time to the first token from the bucket, and without s3ec."""
    longest_s = max(max(p.first_token_s, p.plain_first_token_s) for p in report.pictures)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, max_width=28, overflow="ellipsis")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for picture in report.pictures:
        for name, label, seconds, colour in (
            (picture.name, "with", picture.first_token_s, _WITH),
            ("", "without", picture.plain_first_token_s, _WITHOUT),
        ):
            length = max(1, round(seconds / longest_s * _BAR_CHARACTERS))
            bar = Text("\u2588" * length, style=colour) + Text(f" {seconds:.2f} s")
            table.add_row(name, label, bar)
    return table


def write_png(report: Report, out: Path) -> bool:
    """Write the same as a PNG file; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    pictures = report.pictures[::-1]  # matplotlib counts from below
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(pictures)), layout="constrained", dpi=110)
    axes = figure.subplots()
    places = range(len(pictures))
    axes.barh(
        [place - 0.2 for place in places],
        [p.plain_first_token_s for p in pictures],
        0.36,
        color=_WITHOUT,
        label="without s3ec: encoded",
    )
    axes.barh(
        [place + 0.2 for place in places],
        [p.first_token_s for p in pictures],
        0.36,
        color=_WITH,
        label="with s3ec: from the bucket",
    )
    axes.set_yticks(list(places), [p.name for p in pictures], fontsize=8)
    axes.set_xlabel("seconds to the first token of the answer")
    axes.set_title(f"s3ec demo, {report.preset}: time per picture", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(out, format="png", facecolor="white")
    return True

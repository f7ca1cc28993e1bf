# SPDX-License-Identifier: Apache-2.0
"""The report as a person reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from s3ec.dev.demo.plot import bars
from s3ec.dev.demo.report import Picture, Report, deploy_command

# Where stdout is no terminal the table must still not be cut.
_PIPE_WIDTH = 120
# Terminals narrower than this do without the upload times, which are in the JSON.
_ALL_COLUMNS_WIDTH = 116
_LEFT_OUT = "store"

_MEANINGS = (
    ("encode", "the producer's request for one picture, from reading the file to the embedding"),
    ("store", "its upload, behind the request"),
    ("fetch", "from the bucket to this node's disk, checked"),
    ("load", "from the disk into the engine's encoder cache, checked again"),
    ("first token", "of an answer about the picture, with its embedding from the bucket"),
    ("without s3ec", "the same in an engine that has no connector and encodes the picture"),
)
_MODELS = {
    "gemma3-27b": "random weights. The embedding is about as large as Gemma3-27B's. A small "
    "encoder makes it and then sleeps, so that an encode takes as long as Gemma3-27B's is "
    "estimated to take on an L4 (docs/does-it-pay.md).",
    "tiny": "random weights; its encoder has two layers and costs next to nothing, so nothing can "
    "be gained. This run shows that answers are right, not that they are faster.",
    "encoder-27b": "random weights; encoder and embedding are as large as Gemma3-27B's, at half "
    "its resolution, before a text model of two layers.",
}
_REAL_COST = "With a real encoder's cost: make demo"
_CONDITIONS = (
    "The pictures were asked about one after another; each engine had answered a question "
    "without and one with another picture before. Producer and consumer had a disk tier each, "
    "empty at first."
)
_SETTINGS = (
    "For a server other than AWS add its endpoint_url to the bucket. ec_both fills and reads the "
    "bucket; ec_producer only fills it ahead of time, ec_consumer only reads it."
)


def report_console() -> Console:
    """A console on stdout; no colours and no cut lines where that is not a terminal."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    console.print()
    console.rule(f"s3ec demo, preset {report.preset}, vLLM {report.vllm_version}", align="left")
    everything = console.width >= _ALL_COLUMNS_WIDTH
    console.print(_table(report, everything=everything))
    console.print("time per picture, to the first token of the answer:", style="bold")
    console.print(bars(report))
    console.print()
    console.print(_facts(report))
    console.print()
    console.print(_meanings(report, everything=everything))
    console.print(_CONDITIONS, style="dim", markup=False)
    console.print()
    console.print("In a real deployment (s3ec installed beside your vLLM):", markup=False)
    # One line that can be copied, however narrow the terminal is.
    console.print(deploy_command(), style="bold", markup=False, soft_wrap=True)
    console.print(_SETTINGS, style="dim", markup=False)
    for problem in report.problems():
        console.print(Text(f"PROBLEM: {problem}", style="bold red"))


def _table(report: Report, *, everything: bool) -> Table:
    totals = report.totals
    table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        padding=(0, 1) if everything else (0, 1, 0, 0),
    )
    table.add_column("picture", f"{len(report.pictures)} pictures")
    columns: list[tuple[str, Callable[[Picture], str], str]] = [
        ("rows", lambda p: str(p.rows), ""),
        ("bytes", lambda p: f"{p.nbytes:,}", f"{totals.nbytes:,}"),
        ("encode", lambda p: seconds(p.encode_s), seconds(totals.encode_s)),
        ("store", lambda p: seconds(p.store_s), seconds(totals.store_s)),
        ("fetch", lambda p: seconds(p.fetch_s), seconds(totals.fetch_s)),
        ("load", lambda p: seconds(p.load_s), seconds(totals.load_s)),
        ("first\ntoken", lambda p: seconds(p.first_token_s), seconds(totals.first_token_s)),
        (
            "without\ns3ec",
            lambda p: seconds(p.plain_first_token_s),
            seconds(totals.plain_first_token_s),
        ),
        ("same", lambda p: _yes(p.identical), _yes(report.identical)),
    ]
    if not everything:
        columns = [column for column in columns if column[0] != _LEFT_OUT]
    for header, _, footer in columns:
        table.add_column(header, footer, justify="right", no_wrap=True)
    for picture in report.pictures:
        # Of all cells, the names give way where the terminal is narrow.
        name = Text(picture.name, overflow="ellipsis", no_wrap=True)
        table.add_row(name, *(cell(picture) for _, cell, _ in columns))
    return table


def _facts(report: Report) -> Table:
    totals = report.totals
    count = len(report.pictures)
    first = report.pictures[0]
    starts = ", ".join(f"{name} {seconds(took)}" for name, took in report.starts_s.items())
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, value in (
        ("model", f"{report.preset}: {_MODELS[report.preset]}"),
        ("embedding", f"{first.rows} x {first.width} {first.dtype}, namespace {report.namespace}"),
        ("hits", f"{report.hits} of {count} pictures"),
        ("misses", str(report.misses)),
        ("answers identical", f"{_yes(report.identical)} ({_agreement(report)})"),
        ("different answers", _variety(report)),
        (
            "time to first token",
            f"{seconds(totals.first_token_s)} with s3ec (warm bucket, empty tier), "
            f"{seconds(totals.plain_first_token_s)} without: {_ratio(report)}",
        ),
        ("break-even", _break_even(report)),
        ("engine starts", starts),
    ):
        grid.add_row(name, Text(value))
    return grid


def _meanings(report: Report, *, everything: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="dim")
    for name, meaning in _MEANINGS:
        if everything or name != _LEFT_OUT:
            grid.add_row(name, meaning)
    return grid


def _agreement(report: Report) -> str:
    count = len(report.pictures)
    tokens = sum(picture.same_tokens for picture in report.pictures)
    gaps = [p.logprob_gap for p in report.pictures if p.logprob_gap is not None]
    text = f"same tokens for {tokens} of {count}"
    if gaps and max(gaps) == 0:
        text += "; log probabilities equal"
    elif gaps:
        text += f"; log probabilities differ by up to {max(gaps):g}"
    if len(gaps) < count:
        text += f"; not comparable for {count - len(gaps)}"
    return text


def _variety(report: Report) -> str:
    text = f"{report.distinct_answers} for {len(report.pictures)} pictures"
    if report.distinct_texts < report.distinct_answers:
        # With random weights the likeliest token can be the same one whatever the picture.
        text += f" by log probabilities, {report.distinct_texts} by tokens alone"
    return text


def _ratio(report: Report) -> str:
    ratio = report.first_token_ratio
    return f"1/{1 / ratio:.1f} of the time" if ratio < 1 else f"{ratio:.2f} times as long"


def _break_even(report: Report) -> str:
    took = f"encoding took {seconds(report.encode_s)} a picture here"
    if report.break_even_s <= 0:
        return f"{took}; a hit cost nothing that could be measured"
    verdict = "so it does" if report.encode_s > report.break_even_s else "so it does not"
    text = (
        f"a hit pays where encoding takes over {seconds(report.break_even_s)} a picture; "
        f"{took}, {verdict}"
    )
    return f"{text}. {_REAL_COST}" if report.preset == "tiny" else text


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def seconds(value: float | None) -> str:
    """A duration such as ``3.91 s``, ``18 ms`` or ``0.29 ms``; ``-`` where it is not known."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 0.01:
        return f"{value * 1000:.0f} ms"
    return f"{value * 1000:.2f} ms"

# SPDX-License-Identifier: Apache-2.0
"""The options of ``s3ec bench rag``, each as a type of its parameter, and their parsers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not whole numbers with commas between") from None


def _latencies(text: str) -> tuple[int, ...]:
    found = _numbers(text)
    if not all(0 <= one <= 1000 for one in found):
        raise typer.BadParameter(f"{text!r}: a latency is 0 to 1000 ms")
    return found


def _configs(text: str) -> tuple[int, ...]:
    from s3ec.dev.bench.rag_rig import CONFIGS

    found = _numbers(text)
    if not set(found) <= set(CONFIGS):
        raise typer.BadParameter(f"{text!r}: configurations are 1 to {len(CONFIGS)}")
    return found


def one_of(what: str, choices: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """A parser that takes one of some names, which are imported when they are needed."""

    def parse(text: str) -> str:
        if text not in choices():
            raise typer.BadParameter(f"{text!r} is no {what}; choose of {', '.join(choices())}")
        return text

    parse.__name__ = what
    return parse


def workload_names() -> Sequence[str]:
    from s3ec.dev.bench.workloads import NAMES

    return NAMES


def _sizes() -> Sequence[str]:
    from s3ec.dev.bench.rag_rig import ENCODERS

    return tuple(ENCODERS)


def _forms() -> Sequence[str]:
    from s3ec.dev.bench.request_files import FORMS

    return FORMS


Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar="NAME",
        parser=one_of("workload", workload_names),
        help="questions, decks, zipf, scan or pool: docs/benchmarks.md says what they are.",
    ),
]
RequestsFile = Annotated[
    Path | None,
    typer.Option(
        "--requests",
        metavar="FILE",
        help="Replay a file of requests in place of a workload: JSONL of NVIDIA Dynamo's "
        "generator, or OpenTelemetry documents as inference-perf reads them.",
    ),
]
WrittenFile = Annotated[
    Path | None,
    typer.Option(
        "--write-requests",
        metavar="FILE",
        help="Write the workload's requests, and pictures into FILE.pictures; nothing is measured.",
    ),
]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME",
        parser=one_of("format", _forms),
        help="Of that file: dynamo or inference-perf.",
    ),
]
Factor = Annotated[
    float | None,
    typer.Option(
        "--factor",
        metavar="X",
        min=1e-6,
        max=100,
        help="Of the workload's published size; 2/135 if left out, which are two documents.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", min=0, help="Of what is drawn at random.")
]
Latencies = Annotated[
    Any,
    typer.Option(
        "--latency-ms",
        metavar="MS,...",
        parser=_latencies,
        help="How much further away the bucket is; each one is measured.",
    ),
]
Loop = Annotated[
    str,
    typer.Option(
        "--loop",
        metavar="open|closed",
        parser=one_of("loop", lambda: ("open", "closed")),
        help="closed: clients with one request at a time. open: at random times.",
    ),
]
Clients = Annotated[
    int, typer.Option("--clients", metavar="N", min=1, max=64, help="Of the closed loop.")
]
Rate = Annotated[
    float,
    typer.Option(
        "--rate", metavar="R", min=0.001, max=1000, help="Requests a second, of the open loop."
    ),
]
Configs = Annotated[
    Any,
    typer.Option(
        "--configs",
        metavar="N,...",
        parser=_configs,
        help="Which of the six configurations; all if left out.",
    ),
]
Size = Annotated[
    str,
    typer.Option(
        "--object-mb",
        metavar="MB",
        parser=one_of("size", _sizes),
        help="Of an embedding: 2.75 (a real encoder), 8.8, 30 or 67 (encoders that sleep).",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        parser=one_of("device", lambda: ("cpu", "cuda")),
        help="Where the engines run.",
    ),
]

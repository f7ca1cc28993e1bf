# SPDX-License-Identifier: Apache-2.0
"""A made-up benchmark, and one result of it with every sort of row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3ec.dev.bench.context import Bench, Context, Result, Row, Spec

ROWS = (
    Spec("fake.speed_us", "us", "<= 5"),
    Spec("fake.ratio", "ratio", "< 1"),
    Spec("fake.plain_us", "us"),
)
MACHINE: dict[str, Any] = {
    "cpus": 2,
    "cpu_model": "Made-up <CPU>",
    "memory_bytes": 2**34,
    "load_1min": 1.2,
    "kernel": "Linux 6",
    "python": "3.11",
    "versions": {"s3ec": "0.1"},
}


def bench(run: Callable[[Context], None]) -> Bench:
    return Bench(rows=ROWS, run=run)


def result(*, speed: float = 2.0, name: str = "fake") -> Result:
    detail = {
        "spread": {"median": speed, "min": 1.5, "max": 2.5, "p25": 1.8, "p75": 2.2, "rounds": 5},
        "cases": {"hit <b>": speed, "the other": 11.0},
        "note": "the slowest case: hit",
    }
    return Result(
        name,
        MACHINE,
        [
            Row(ROWS[0], speed, 100, detail),
            Row(ROWS[1], None, 0, {"why": "strace is not installed"}),
            Row(ROWS[2], 1234.5, 7),
        ],
    )

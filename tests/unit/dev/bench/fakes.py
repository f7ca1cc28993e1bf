# SPDX-License-Identifier: Apache-2.0
"""A made-up benchmark, and one result of it with every sort of row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3ec.dev.bench import rag
from s3ec.dev.bench.context import Bench, Context, Result, Row, Spec
from s3ec.dev.bench.rag_rig import Leg

ROWS = (
    Spec("fake.speed_us", "us", "<= 5"),
    Spec("fake.ratio", "ratio", "< 1"),
    Spec("fake.plain_us", "us"),
)
MACHINE: dict[str, Any] = {
    "cpus": 2,
    "cpu_model": "Made-up <CPU>",
    "memory_bytes": 2**34,
    "load_1min": 0.5,
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


def _leg(number: int, latency_ms: int, first_s: list[float]) -> Leg:
    return Leg(
        number,
        latency_ms,
        first_s=first_s,
        seconds=sum(first_s),
        references=10,
        encodes=8 if number < 3 else 0,
        allocations=8,
        from_bucket=6 if number == 3 else 0,
    )


def rag_result() -> Result:
    """One of `bench rag`, with five legs."""
    legs = [
        _leg(1, 0, [4.0, 5.0, 9.0]),
        _leg(2, 0, [4.0, 4.5, 9.0]),
        *(_leg(3, far, [0.4 + far / 1e3, 0.5, 0.9]) for far in (0, 80)),
        _leg(4, 0, [0.3, 0.4, 0.6]),
    ]
    about = {
        "requests": 3,
        "references": 10,
        "pictures": 9,
        "object_bytes": 2_752_512,
        "encoder": "sleeps 1 ms",
        "device_images": 8,
        "loop": "2 clients",
    }
    detail = {
        "about": about,
        "legs": [one.document(2_752_512) for one in legs],
    }
    values = {"rag.total_ratio": 0.2, "rag.ttft_p50_ratio": 0.1, "rag.legs": 5}
    rows = [
        Row(spec, values.get(spec.name), 3, detail if spec.name == "rag.legs" else {"why": "no"})
        for spec in rag.ROWS
    ]
    return Result("rag", MACHINE, rows)

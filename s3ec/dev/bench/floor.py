# SPDX-License-Identifier: Apache-2.0
"""What any tier has to pay per entry on this machine: pages, a copy, a checksum."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from s3ec import codec

_REPEATS = 25


def floor_ms(folder: Path, nbytes: int) -> dict[str, float]:
    """Processor milliseconds, median, of what bringing ``nbytes`` into a folder is made of.

    A fresh file is the kernel finding and clearing pages, then copying; one that is there
    already is the copy alone.
    """
    data = os.urandom(nbytes)
    path = folder / "floor"

    def write() -> None:
        with open(path, "wb" if not path.exists() else "r+b", buffering=0) as file:
            file.write(data)

    def fresh() -> float:
        path.unlink(missing_ok=True)
        return _cpu_ms(write)

    try:
        return {
            "write a fresh file": statistics.median(fresh() for _ in range(_REPEATS)),
            "write over a file": statistics.median(_cpu_ms(write) for _ in range(_REPEATS)),
            "xxh3-128": statistics.median(
                _cpu_ms(lambda: codec.checksum(data)) for _ in range(_REPEATS)
            ),
        }
    finally:
        path.unlink(missing_ok=True)


def _cpu_ms(work: Callable[[], object]) -> float:
    before = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - before) / 1e6

# SPDX-License-Identifier: Apache-2.0
"""How to measure fairly: cases in turn, warmed up, in rounds, without the garbage collector."""

from __future__ import annotations

import gc
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from s3ec.tier.mounts import file_system

T = TypeVar("T")


def interleave(
    cases: Mapping[str, Callable[[], T]],
    *,
    rounds: int,
    warmup: int = 1,
    between: Callable[[], object] | None = None,
) -> dict[str, list[T]]:
    """Run all cases in turn, round after round, so that a slow moment hits all alike.

    The order turns with every round: no case always runs first, or behind the same other one.

    Args:
        cases: Name to one round of it. What a round returns is up to the caller; ``timed`` and
            ``time_each`` give times.
        rounds: How many are kept.
        warmup: How many run before those and are thrown away: first touches of memory, files
            and code paths are slow.
        between: Called before every single case, untimed.

    Returns:
        Name to what each kept round returned.
    """
    kept: dict[str, list[T]] = {name: [] for name in cases}
    order = list(cases)
    with no_collection():
        for number in range(warmup + rounds):
            gc.collect()
            turn = number % len(order)
            turned = order[turn:] + order[:turn]
            for name in turned if number % 2 == 0 else reversed(turned):
                if between is not None:
                    between()
                outcome = cases[name]()
                if number >= warmup:
                    kept[name].append(outcome)
    return kept


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector out of the way, as vLLM does with its start-up heap."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """A round that calls ``function`` once and returns seconds."""

    def round_() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return round_


def time_each(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[int]:
    """Nanoseconds of each call, the clock's own share included (see clock_ns)."""
    clock = time.perf_counter_ns
    out = [0] * len(arguments)
    for number, args in enumerate(arguments):
        started = clock()
        function(*args)
        out[number] = clock() - started
    return out


def clock_ns() -> float:
    """What is measured where nothing lies between two looks at the clock; median, nanoseconds."""
    clock = time.perf_counter_ns
    out = [0] * 2_000
    for number in range(len(out)):
        started = clock()
        out[number] = clock() - started
    return percentile(out, 50)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between neighbours."""
    return float(np.percentile(values, percent))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Quotients of the same round: what slows one round slows both halves of it."""
    return [a / b for a, b in zip(above, below, strict=True)]


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Case to the median of its rounds."""
    return {case: statistics.median(rounds) for case, rounds in values.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and how far the rounds lie apart, for a row's detail."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "p25": percentile(values, 25),
        "p75": percentile(values, 75),
        "rounds": len(values),
    }


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is no copy of a file, in use or swapped out; 0.1 ms.

    Mapped files are not in it, read or not: they are the page cache's. Of a page that several
    processes share each has an equal part.

    Raises:
        OSError: The process ended, or this kernel does not tell.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    found = re.findall(r"^(?:Pss_Anon|SwapPss):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, found)) * 1024


TMPFS = Path("/dev/shm")  # noqa: S108  only where it is a tmpfs; a folder of our own in it


@contextmanager
def memory_folder(otherwise: Path) -> Iterator[tuple[Path, bool]]:
    """An empty folder on tmpfs, deleted afterwards.

    A benchmark that is killed leaves its own as /dev/shm/s3ec-bench-*: memory until it is deleted.

    Args:
        otherwise: Made and used where there is no tmpfs.

    Yields:
        The folder, and whether it is on tmpfs.
    """
    if file_system(TMPFS) != "tmpfs" or not os.access(TMPFS, os.W_OK):
        otherwise.mkdir(parents=True)
        yield otherwise, False
        return
    with tempfile.TemporaryDirectory(
        prefix="s3ec-bench-", dir=TMPFS, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder), True

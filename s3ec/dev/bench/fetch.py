# SPDX-License-Identifier: Apache-2.0
"""``bench fetch`` and its sizes: bucket to tier, verified, beside raw GET loops.

All clients ask one SeaweedFS on this machine for the same objects, in turn, with 16 in flight.
The server takes its share of the same cores, so ``cores_busy`` stands in the details: near the
number of cores nobody can be faster without using less of the processor. ``raw obstore to file``
says what the kernel takes for putting the bytes into files, which no tier can do without. The rows
``*_to_files`` compare with that loop, which verifies nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.corpus import Corpus
    from s3ec.testing.server import LocalS3

ROUNDS = 9
RAW, TO_FILE, OURS = "raw obstore", "raw obstore to file", "s3ec"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one of these benchmarks fetches.

    Attributes:
        name: Of the benchmark.
        reaches: Row to what it must reach, in their order; without the benchmark's name.
        objects: How many.
        objects_quick: How many in a quick run.
        rows: Of each embedding...
        width: ...and its width, bfloat16.
    """

    name: str
    reaches: Mapping[str, str | None]
    objects: int
    objects_quick: int = 16
    rows: int = 256
    width: int = 5376

    @property
    def bench(self) -> Bench:
        """The benchmark, with its rows."""
        rows = [
            Spec(f"{self.name}.{row}", _UNITS.get(row, "ratio"), reach)
            for row, reach in self.reaches.items()
        ]
        return Bench(rows, functools.partial(run, plan=self))


_UNITS = {"gb_per_s": "GB/s", "cpu_ms": "ms", "cpu_ms_per_object": "ms"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one client: seconds that passed, and of processor that both sides took."""

    seconds: float
    cpu_s: float
    server_cpu_s: float


def run(context: Context, plan: Plan) -> None:
    """Measure; needs the SeaweedFS binary and obstore.

    Args:
        context: Where rows go.
        plan: What is fetched.
    """
    from s3ec.codec import Shape
    from s3ec.dev.bench.corpus import filled

    shape = Shape(plan.rows, plan.width, "bfloat16")
    with contextlib.ExitStack() as stack:
        server, corpus = stack.enter_context(
            filled(context, plan.objects_quick if context.quick else plan.objects, shape)
        )
        folder, on_tmpfs = stack.enter_context(measure.memory_folder(context.scratch / "tier"))
        cases = stack.enter_context(_cases(server, corpus, folder))
        about = {"tier_on_tmpfs": on_tmpfs}
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(ROUNDS))
    report(context, plan, kept, corpus, about)


@contextlib.contextmanager
def _cases(
    server: LocalS3, corpus: Corpus, folder: Path
) -> Iterator[dict[str, Callable[[], Sample]]]:
    from s3ec.dev.bench.fetcher import Fetcher
    from s3ec.dev.bench.raw_loops import RawLoop

    files = folder / "files"
    files.mkdir()

    def empty() -> None:
        for path in files.iterdir():
            path.unlink()

    with contextlib.ExitStack() as stack:
        raw, to_file = RawLoop(corpus), RawLoop(corpus, files)
        ours = Fetcher(corpus, folder / "ours")
        for client in (raw, to_file, ours):
            stack.callback(client.close)
        yield {
            RAW: lambda: _sample(server.pid, raw.fetch),
            TO_FILE: lambda: _sample(server.pid, to_file.fetch, empty),
            OURS: lambda: _sample(server.pid, ours.fetch, ours.empty),
        }


def _sample(
    server_pid: int | None, work: Callable[[], None], after: Callable[[], None] | None = None
) -> Sample:
    server_before, before = _cpu_of(server_pid), time.process_time()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    cpu_s, server_cpu_s = time.process_time() - before, _cpu_of(server_pid) - server_before
    if after is not None:
        after()
    return Sample(seconds, cpu_s, server_cpu_s)


def _cpu_of(pid: int | None) -> float:
    """Seconds of processor that another process took so far; 0 where nobody says."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(
    context: Context,
    plan: Plan,
    kept: Mapping[str, Sequence[Sample]],
    corpus: Corpus,
    about: Mapping[str, Any],
) -> None:
    """Report the plan's rows from the rounds of all clients."""
    count, nbytes = len(corpus.keys), len(corpus.keys) * corpus.entry_bytes
    speed = {case: [nbytes / one.seconds / 1e9 for one in kept[case]] for case in kept}
    cpu_ms = {case: [one.cpu_s / count * 1e3 for one in kept[case]] for case in kept}
    detail = {
        **about,
        "objects": count,
        "object_bytes": corpus.entry_bytes,
        "in_flight": 16,
        "cores_busy": {case: _busy(kept[case]) for case in kept},
    }

    def put(row: str, values: Mapping[str, Sequence[float]], note: str = "") -> None:
        if row in plan.reaches:
            samples = count * len(kept[OURS])
            name = f"{plan.name}.{row}"
            context.report_median(name, values, OURS, samples=samples, note=note, detail=detail)

    def over(values: Mapping[str, Sequence[float]], other: str) -> dict[str, list[float]]:
        return {
            case: measure.ratios(values[case], values[other])
            for case in (TO_FILE, OURS)
            if case != other
        }

    put("ratio_to_raw", over(speed, RAW), f"over {RAW}")
    put("ratio_to_files", over(speed, TO_FILE), f"over {TO_FILE}")
    put("gb_per_s", speed)
    put("cpu_ratio_to_raw", over(cpu_ms, RAW), f"over {RAW}")
    put("cpu_ratio_to_files", over(cpu_ms, TO_FILE), f"over {TO_FILE}")
    for row in ("cpu_ms", "cpu_ms_per_object"):
        put(row, cpu_ms)


def _busy(rounds: Sequence[Sample]) -> float:
    """Cores that client and server kept busy, median."""
    return statistics.median((one.cpu_s + one.server_cpu_s) / one.seconds for one in rounds)


FETCH = Plan(
    "fetch",
    {
        "ratio_to_files": ">= 0.9",
        "cpu_ratio_to_files": "<= 1.25",
        "ratio_to_raw": ">= 0.7",
        "cpu_ratio_to_raw": None,
        "gb_per_s": None,
        "cpu_ms_per_object": None,
    },
    objects=200,
)


BENCH = FETCH.bench
SMALL = Plan(
    "fetch_8kb",
    {"cpu_ratio_to_raw": "<= 2.2", "ratio_to_raw": None, "cpu_ms": None},
    objects=1024,
    objects_quick=64,
    rows=4,
    width=1024,
).bench
LARGE = Plan(
    "fetch_30mb",
    {
        "ratio_to_raw": ">= 0.65",
        "ratio_to_files": None,
        "cpu_ratio_to_files": None,
        "gb_per_s": None,
        "cpu_ms": None,
    },
    objects=32,
    objects_quick=4,
    rows=2816,
).bench

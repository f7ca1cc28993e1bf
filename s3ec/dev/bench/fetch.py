# SPDX-License-Identifier: Apache-2.0
"""``bench fetch`` and its sizes: bucket to tier, verified, beside raw GET loops of S3 clients.

All clients ask one SeaweedFS on this machine for the same objects, in turn, with 16 in flight.
The server takes its share of the same cores, so ``cores_busy`` stands in the details: near the
number of cores nobody can be faster without using less of the processor. ``raw obstore to file``
and ``floor_cpu_ms`` say what the kernel takes for putting the bytes into files, which no tier
can do without. The rows ``*_to_files`` compare with that loop, which verifies nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.corpus import Corpus
    from s3ec.testing.server import LocalS3

ROUNDS = 9
RAW, TO_FILE, OURS = "raw ", "raw obstore to file", "s3ec "


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
        latency_s: Added to each request's way to the server.
        all_clients: Whether s3ec is measured over every transport that is installed.
    """

    name: str
    reaches: Mapping[str, str | None]
    objects: int
    objects_quick: int = 16
    rows: int = 256
    width: int = 5376
    latency_s: float = 0.0
    all_clients: bool = True

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


@dataclass(slots=True)
class Clients:
    """What is compared.

    Attributes:
        cases: Name to one round.
        missing: Client to why it is not there.
        auto: The case that ``transport: auto`` is.
        raw: The raw loop over the same client.
        about: For the details of each row.
    """

    cases: dict[str, Callable[[], Sample]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    auto: str = ""
    raw: str = ""
    about: dict[str, Any] = field(default_factory=dict)


def run(context: Context, plan: Plan) -> None:
    """Measure; needs the SeaweedFS binary.

    Args:
        context: Where rows go.
        plan: What is fetched.
    """
    from s3ec.codec import Shape
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.fetcher import floor_ms
    from s3ec.dev.bench.measure import memory_folder
    from s3ec.dev.rigs.relay import relayed

    shape = Shape(plan.rows, plan.width, "bfloat16")
    with contextlib.ExitStack() as stack:
        server, corpus = stack.enter_context(
            filled(context, plan.objects_quick if context.quick else plan.objects, shape)
        )
        if plan.latency_s:
            url = stack.enter_context(relayed(corpus.endpoint_url, plan.latency_s))
            corpus = replace(corpus, endpoint_url=url)
        folder, on_tmpfs = stack.enter_context(memory_folder(context.scratch / "tier"))
        clients = stack.enter_context(_clients(server, corpus, folder, plan.all_clients))
        clients.about |= {
            "tier_on_tmpfs": on_tmpfs,
            "latency_ms": plan.latency_s * 1000,
            "floor_cpu_ms": floor_ms(folder, corpus.entry_bytes),
        }
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(clients.cases, rounds=context.rounds(ROUNDS))
    report(context, plan, clients, kept, corpus)


@contextlib.contextmanager
def _clients(server: LocalS3, corpus: Corpus, folder: Path, all_clients: bool) -> Iterator[Clients]:
    from s3ec.dev.bench import fetcher, raw_loops

    clients = Clients()
    files = folder / "files"
    files.mkdir()

    def empty() -> None:
        for path in files.iterdir():
            path.unlink()

    with contextlib.ExitStack() as stack:

        def add(name: str, client: Any, after: Callable[[], None] | None = None) -> None:
            stack.callback(client.close)
            clients.cases[name] = lambda: _sample(server.pid, client.fetch, after)

        loops, clients.missing = raw_loops.open_loops(corpus)
        for name, loop in loops.items():
            add(RAW + name, loop)
        there, auto = fetcher.transports(corpus, folder / "none")
        add(TO_FILE, raw_loops.ObstoreLoop(corpus, files), empty)
        for transport in there if all_clients else [auto]:
            ours = fetcher.Fetcher(corpus, folder / transport, transport)
            add(OURS + transport, ours, ours.empty)
        clients.auto, clients.raw = OURS + auto, RAW + auto
        yield clients


def _sample(
    server_pid: int | None, work: Callable[[], None], after: Callable[[], None] | None
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
    clients: Clients,
    kept: Mapping[str, Sequence[Sample]],
    corpus: Corpus,
) -> None:
    """Report the plan's rows from the rounds of all clients."""
    count, nbytes = len(corpus.keys), len(corpus.keys) * corpus.entry_bytes
    speed = {case: [nbytes / one.seconds / 1e9 for one in kept[case]] for case in kept}
    cpu = {case: [one.cpu_s / count * 1e3 for one in kept[case]] for case in kept}
    raw = [case for case in speed if case.startswith(RAW) and case != TO_FILE]
    fastest = max(raw, key=lambda case: statistics.median(speed[case]))
    same = {case: RAW + case.removeprefix(OURS) for case in speed if case.startswith(OURS)}
    samples = count * len(speed[clients.auto])
    about = {
        **clients.about,
        "objects": count,
        "object_bytes": corpus.entry_bytes,
        "in_flight": 16,
        "transport": clients.auto.removeprefix(OURS),
        "cores_busy": {case: _busy(kept[case]) for case in kept},
        "not_installed": clients.missing,
    }

    def put(row: str, values: Mapping[str, Sequence[float]], note: str) -> None:
        if row in plan.reaches:
            name = f"{plan.name}.{row}"
            context.report_median(
                name, values, clients.auto, samples=samples, note=note, detail=about
            )

    def over(values: Mapping[str, Sequence[float]], other: str) -> dict[str, list[float]]:
        cases = (*same, TO_FILE) if other != TO_FILE else tuple(same)
        return {case: measure.ratios(values[case], values[other]) for case in cases}

    put("ratio_to_raw", over(speed, fastest), f"{clients.auto} over the fastest, {fastest}")
    put("ratio_to_files", over(speed, TO_FILE), f"{clients.auto} over {TO_FILE}")
    put("gb_per_s", speed, _note(clients))
    against = {case: measure.ratios(cpu[case], cpu[other]) for case, other in same.items()}
    against[TO_FILE] = measure.ratios(cpu[TO_FILE], cpu[f"{RAW}obstore"])
    put("cpu_ratio_to_raw", against, f"{clients.auto} over {clients.raw}")
    put("cpu_ratio_to_files", over(cpu, TO_FILE), f"{clients.auto} over {TO_FILE}")
    for row in ("cpu_ms", "cpu_ms_per_object"):
        put(row, cpu, _note(clients))


def _note(clients: Clients) -> str:
    missing = [f"no {client}: {why}" for client, why in clients.missing.items()]
    return "; ".join([clients.auto, *missing])


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


def far(latency_ms: int) -> Bench:
    """The same with a bucket that is far away."""
    return Plan(
        f"fetch{latency_ms}",
        {"ratio_to_raw": ">= 0.8", "gb_per_s": None},
        # 8 waves of 16: fewer, since each takes the latency; whole ones, so that all end alike.
        objects=128,
        latency_s=latency_ms / 1000,
    ).bench


BENCH = FETCH.bench
SMALL = Plan(
    "fetch_8kb",
    {"cpu_ratio_to_raw": "<= 2.2", "ratio_to_raw": None, "cpu_ms": None},
    objects=1024,
    objects_quick=64,
    rows=4,
    width=1024,
    all_clients=False,
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
    all_clients=False,
).bench

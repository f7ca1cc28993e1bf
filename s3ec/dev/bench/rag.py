# SPDX-License-Identifier: Apache-2.0
"""``bench rag``: questions over document images, asked of real engines with four kinds of caches.

The questions are in ``workloads.py``, the configurations and what a leg is in ``rag_rig.py``. All
legs run in this order, twice: all first halves, a restart of every engine, all second halves. So a
moment in which the machine is slow hits neighbours alike, and disks stay as they are.
``rag_warm.py`` compares hits on a warm disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from s3ec.dev.bench import rag_rig, workloads
from s3ec.dev.bench.context import Bench, Context, Spec
from s3ec.dev.bench.rag_rig import CONFIGS, DEVICE_IMAGES, ON_CPU, ON_GPU, TINY, Encoder, Leg

_TOTAL, _P50, _P99, _LEGS = (
    "rag.total_ratio",
    "rag.ttft_p50_ratio",
    "rag.ttft_p99_ratio",
    "rag.legs",
)
ROWS = (
    Spec(_TOTAL, "ratio", "<= 0.25"),
    Spec(_P50, "ratio", "<= 0.25"),
    Spec(_P99, "ratio", "<= 1"),
    Spec(_LEGS, "1"),
)
# In an order that has those beside each other that are compared.
_NUMBERS, _QUICK_NUMBERS = (1, 3, 2, 4), (1, 3, 4)
_LATENCIES_MS, _QUICK_LATENCIES_MS = (0, 20, 80), (0,)
# Two documents; one in a quick run.
_FACTOR, _QUICK_FACTOR = 2 / 135, 0.002


def run(
    context: Context,
    *,
    factor: float | None = None,
    seed: int = 0,
    latency_ms: Sequence[int] | None = None,
    clients: int = 2,
    configs: Sequence[int] | None = None,
    device: str = "cpu",
) -> None:
    """Measure all legs.

    Args:
        context: Takes the rows. A quick run leaves out what takes long, unless it is asked for.
        factor: Of the published size; None for one that takes minutes here.
        seed: Of what is drawn at random.
        latency_ms: Added to each request to the bucket, one leg for each.
        clients: How many clients, each with one request at a time.
        configs: Numbers of configurations.
        device: ``cpu`` or ``cuda``.
    """
    factor = factor or (_QUICK_FACTOR if context.quick else _FACTOR)
    far = latency_ms or (_QUICK_LATENCIES_MS if context.quick else _LATENCIES_MS)
    configs = configs or (_QUICK_NUMBERS if context.quick else _NUMBERS)
    encoder = encoder_for(context, device)
    workload = workloads.questions(factor=factor, seed=seed)
    with rag_rig.running(context, encoder, workload, configs, far, device=device) as rig:
        legs = [
            Leg(number, each)
            for number in _NUMBERS
            if number in configs
            for each in (far if CONFIGS[number].has_bucket else (0,))
        ]
        middle = math.ceil(len(workload.requests) / 2)
        halves = workload.requests[:middle], workload.requests[middle:]
        for half, requests in enumerate(filter(None, halves)):
            for number, leg in enumerate(legs, 1):
                context.say(f"half {half + 1}, {number} of {len(legs)}: {leg.name}")
                with rig.started(leg, empty=leg.number == 3 and not half) as engine:
                    rig.ask(leg, engine, requests, clients)
    loop = f"{clients} clients, restarted in the middle"
    report(context, legs, about(workload, encoder, device, loop))


def encoder_for(context: Context, device: str) -> Encoder:
    """A GPU has the real one; a quick look one that takes no time."""
    if context.quick:
        return TINY
    return ON_GPU if device == "cuda" else ON_CPU


def about(workload: workloads.Workload, encoder: Encoder, device: str, loop: str) -> dict[str, Any]:
    """What a run was of, for a report."""
    return {
        **workload.about,
        "requests": len(workload.requests),
        "pictures": workload.pictures,
        "references": workload.references,
        "loop": loop,
        "encoder": f"{encoder.said}; the engines run on {device}",
        "object_bytes": encoder.nbytes,
        "device_images": DEVICE_IMAGES,
        "device": device,
    }


def report(context: Context, legs: Sequence[Leg], about: Mapping[str, Any]) -> None:
    """Report all rows.

    Args:
        context: Takes them.
        legs: What was measured.
        about: What the run was of; ``object_bytes`` is of one embedding.
    """
    _report_ratio(context, _TOTAL, legs, lambda leg: leg.seconds)
    _report_ratio(context, _P50, legs, lambda leg: leg.ttft_s(50))
    _report_ratio(context, _P99, legs, lambda leg: leg.ttft_s(99))
    report_legs(context, _LEGS, {leg.name: leg for leg in legs}, about)


def report_legs(
    context: Context, row: str, legs: Mapping[str, Leg], about: Mapping[str, Any]
) -> None:
    """Report the figures of each leg, under the name that it has in the table."""
    documents = [{**leg.document(about["object_bytes"]), "name": n} for n, leg in legs.items()]
    for name, leg in legs.items():
        p50, p90, p99 = map(leg.ttft_s, (50, 90, 99))
        context.say(
            f"{name}: first token {p50:.3g}, {p90:.3g}, {p99:.3g} s (p50, p90, p99); "
            f"{leg.seconds:.3g} s in all, {leg.encodes} encodes, "
            f"{leg.bucket_bytes / 1e9:.3g} GB from the bucket"
        )
    context.report(
        row,
        len(legs),
        samples=sum(len(leg.first_s) for leg in legs.values()),
        detail={"about": dict(about), "legs": documents},
    )


def _report_ratio(
    context: Context, name: str, legs: Sequence[Leg], value: Callable[[Leg], float]
) -> None:
    """One figure of s3ec with an empty disk over vLLM alone, at each latency; the worst of them."""
    ours, alone = ([leg for leg in legs if leg.number == number] for number in (3, 1))
    if not ours or not alone:
        context.cannot(name, f"configuration {1 if ours else 3} was not asked for")
        return
    cases = {
        f"{leg.latency_ms} ms to the bucket": value(leg) / value(alone[0])  # which asks no bucket
        for leg in ours
    }
    context.report(
        name,
        max(cases.values()),
        samples=sum(len(leg.first_s) for leg in [*ours, *alone]),
        detail={"cases": cases, "note": "(3) over (1), the worst latency"},
    )


BENCH = Bench(ROWS, run)

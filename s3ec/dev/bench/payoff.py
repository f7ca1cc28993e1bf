# SPDX-License-Identifier: Apache-2.0
"""``bench payoff``: what `wait` = auto gains and loses, beside no connector and `wait` = always.

vLLM's own scheduler and s3ec's scheduler half run with a virtual clock: encoder, model and fetches
are played (see ``rigs/virtual_engine.py``), so the figures are the same on every machine. At each
point ``auto`` is compared with the better of the two others, in the same run and with the same
requests and durations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.virtual_engine import Outcome, Point

_SHARE, _P50, _P99, _THROUGHPUT, _LEARNED = (
    "payoff.sim_over_110_share",
    "payoff.sim_p50_worst",
    "payoff.sim_p99_worst",
    "payoff.sim_throughput_worst",
    "payoff.sim_encode_learned_ratio",
)
ROWS = (
    Spec(_SHARE, "ratio", "<= 0.08"),
    Spec(_P50, "ratio", "<= 1.25"),
    Spec(_P99, "ratio", "<= 1.6"),
    Spec(_THROUGHPUT, "ratio", "<= 1.03"),
    Spec(_LEARNED, "ratio", "<= 1.25"),
)
# At a load of 0.9 the median of 600 still depends on the seed (1.01 to 1.28 at one point).
_REQUESTS, _QUICK_REQUESTS = 1200, 100
# Of its own: the policy's constants were chosen on others.
_SEED = 41
# Of the grid; no side of it is a multiple of these.
_EVERY, _QUICK_EVERY = 3, 23


def grid() -> Iterator[Point]:
    """All points: encoder, fetch, load, pictures of a request, share that the bucket holds.

    At a load of 1.3 the queue of the engine without connector only grows.
    """
    from s3ec.dev.rigs.virtual_engine import Point

    for encode_ms, fetch_ms, load, pictures, hits in itertools.product(
        (3, 15, 100, 1000), (0.5, 5, 30, 80), (0.0, 0.5, 0.9, 1.3), (1, 4), (0.5, 1.0)
    ):
        yield Point(encode_ms / 1000, fetch_ms / 1000, load, pictures, hits)


def run(context: Context) -> None:
    """Simulate all points, or some in a quick run."""
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.virtual_engine import capacity, simulate

    points = list(grid())[:: _QUICK_EVERY if context.quick else _EVERY]
    count = _QUICK_REQUESTS if context.quick else _REQUESTS
    model = write_gemma3(context.scratch / "model")
    worst: dict[str, list[tuple[float, dict[str, float]]]] = {_P50: [], _P99: [], _THROUGHPUT: []}
    beside: dict[str, float] = dict.fromkeys(worst, 1.0)
    learned = []
    for number, point in enumerate(points, 1):
        rate = point.load * capacity(model, point)
        none, always, auto = (
            simulate(model, point, wait, count=count, rate=rate, seed=_SEED)
            for wait in ("none", "always", "auto")
        )
        ratios = _ratios(auto, none, always)
        for name, ratio in ratios.items():
            worst[name].append((ratio, asdict(point)))
        for name, ratio in _ratios(always, none, always).items():
            beside[name] = max(beside[name], ratio)
        error = auto.learned_encode_s / point.encode_s
        learned.append(max(error, 1 / error))
        shown = ", ".join(f"{name.rsplit('_', 2)[1]} {one:.2f}" for name, one in ratios.items())
        context.say(f"{number} of {len(points)}: {point}: {shown}")
    for name, ratios_at in worst.items():
        ratio, where = max(ratios_at, key=lambda one: one[0])
        detail = {"point": where, "worst_of_always": beside[name]}
        context.report(name, ratio, samples=len(points), detail=detail)
    over = sum(
        max(ratios) > 1.1
        for ratios in zip(*([ratio for ratio, _ in at] for at in worst.values()), strict=True)
    )
    context.report(
        _SHARE, over / len(points), samples=len(points), detail={"requests": count, "over": over}
    )
    context.report(_LEARNED, max(learned), samples=len(points))


def _ratios(one: Outcome, none: Outcome, always: Outcome) -> dict[str, float]:
    """How much worse one is than the better of the two others; 1 where it is that one."""
    return {
        _P50: one.ttft_p50_s / min(none.ttft_p50_s, always.ttft_p50_s),
        _P99: one.ttft_p99_s / min(none.ttft_p99_s, always.ttft_p99_s),
        _THROUGHPUT: max(none.requests_per_s, always.requests_per_s) / one.requests_per_s,
    }


BENCH = Bench(ROWS, run)

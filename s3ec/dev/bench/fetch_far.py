# SPDX-License-Identifier: Apache-2.0
"""``bench fetch_30mb_far``: how long one large embedding takes from a bucket far away.

The bucket is a round trip of 30 ms away, and each connection carries 95 MiB/s, as one to S3 does.
One object is fetched after the other, since what counts is how long a request waits for one.
Compared with a loop that asks for all ranges of an object at once, into memory, unverified; its
ranges are of 2 or 4 MiB, and the faster of the two counts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.raw_loops import RawLoop

ROUNDS = 9
_OBJECTS = 8
_OBJECTS_QUICK = 1
_ROWS, _WIDTH = 2816, 5376
LATENCY_S = 0.03
STREAM_BYTES_PER_S = 95 * 2**20
_RANGES = (2 * 2**20, 4 * 2**20)
_RATIO, _MS = "fetch_30mb_far.ratio_to_ranges", "fetch_30mb_far.ms_per_object"
ROWS = (Spec(_RATIO, "ratio", ">= 0.85"), Spec(_MS, "ms"))
OURS = "s3ec"


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.codec import Shape
    from s3ec.dev.bench import fetcher, raw_loops
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.folders import memory_folder
    from s3ec.dev.rigs.relay import Relay

    count = _OBJECTS_QUICK if context.quick else _OBJECTS
    with contextlib.ExitStack() as stack:
        shape = Shape(_ROWS, _WIDTH, "bfloat16")
        _, corpus = stack.enter_context(filled(context, count, shape))
        relay = stack.enter_context(
            Relay(corpus.endpoint_url, LATENCY_S, stream_bytes_per_s=STREAM_BYTES_PER_S)
        )
        corpus = replace(corpus, endpoint_url=relay.url)
        folder, on_tmpfs = stack.enter_context(memory_folder(context.scratch / "tier"))
        _, auto = fetcher.transports(corpus, folder / "none")
        ours = fetcher.Fetcher(corpus, folder / "tier", auto)
        stack.callback(ours.close)
        cases: dict[str, Callable[[], float]] = {
            OURS: lambda: _ms_each(ours.fetch_one_by_one, count, ours.empty)
        }
        loops: dict[str, RawLoop] = {
            f"raw ranges of {size // 2**20} MiB": raw_loops.ObstoreRangesLoop(corpus, size)
            for size in _RANGES
        }
        loops["raw obstore, whole"] = raw_loops.OneByOneLoop(corpus)
        for name, loop in loops.items():
            stack.callback(loop.close)
            cases[name] = lambda loop=loop: _ms_each(loop.fetch, count)  # type: ignore[misc]
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(ROUNDS))
    ranged = {case: kept[case] for case in loops if "ranges" in case}
    fastest = min(ranged, key=lambda case: statistics.median(ranged[case]))
    ratios = {case: measure.ratios(kept[fastest], kept[case]) for case in kept}
    for row, values, note in (
        (_RATIO, ratios, f"over {fastest}"),
        (_MS, kept, "from the asking to the pin"),
    ):
        context.report(
            row,
            statistics.median(values[OURS]),
            samples=count * len(kept[OURS]),
            detail={
                "spread": measure.spread(values[OURS]),
                "cases": measure.medians(values),
                "note": note,
                "object_bytes": corpus.entry_bytes,
                "tier_on_tmpfs": on_tmpfs,
                "latency_ms": LATENCY_S * 1000,
                "stream_mib_per_s": STREAM_BYTES_PER_S / 2**20,
            },
        )


def _ms_each(
    work: Callable[[], None], count: int, after: Callable[[], None] | None = None
) -> float:
    started = time.perf_counter()
    work()
    took_ms = (time.perf_counter() - started) * 1000 / count
    if after is not None:
        after()
    return took_ms


BENCH = Bench(ROWS, run)

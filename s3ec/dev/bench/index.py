# SPDX-License-Identifier: Apache-2.0
"""``bench index``: the index of the corpus, at any number of keys.

The digests are made up, which makes no difference: real ones are parts of a SHA-256. Files lie on
this node's disk and in a SeaweedFS on this machine, which takes its share of the same cores.

Each lookup that is timed is of a key that was not asked for before, so its cache lines are cold.
The clock's own share, which is measured beside it, is taken off. A reader is opened in a fresh
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.index_made import Made
    from s3ec.identity import Key
    from s3ec.node import Node

P50, GROWTH = "index.lookup_p50_us", "index.growth_1e6_to_max"
OPEN, PRIVATE, BLOOM_BYTES, BLOOM_FPR = (
    "index.open_ms",
    "index.private_bytes_per_key",
    "bloom.bytes_per_key",
    "bloom.fpr",
)
ROWS = (
    Spec(P50, "us", "<= 1.5"),
    Spec(GROWTH, "ratio", "<= 2"),
    Spec(PRIVATE, "B", "<= 0.2"),
    Spec(BLOOM_BYTES, "B", "<= 1.8"),
    Spec(BLOOM_FPR, "1", "<= 0.01"),
    Spec(OPEN, "ms", "<= 50"),
    Spec("index.cold_ratio_to_raw", "ratio", "<= 1.5"),
    Spec("union.peak_mib", "MiB", "<= 512"),
    Spec("union.seconds", "s", "<= 15"),
    Spec("index.visible_p99_s", "s", "<= 15"),
    Spec("index.hooks_p99_ratio", "ratio", "<= 1.1"),
)
KEYS, _KEYS_QUICK = 10_000_000, 100_000
# Where lookups have their reach; the largest is compared with it.
_SMALL = 1_000_000
# On disk: of a key's row and its share of a filter; and of what moves, the server's copies before
# and after a union, two readers', raw downloads, and temporary files.
_BYTES, _COPIES = 24, 6
_ROUNDS, _OPENINGS = 15, 5
_LOOKUPS = 2500
_OPENED_LOOKUPS = 20_000
_MISSES, _MISSES_QUICK, _MISSES_AT_A_TIME = 500_000, 50_000, 10_000
# How fast the interpreter is at the moment: on a shared machine that changes by a factor of two.
_NOTHING = "a call that does nothing"
_CASES = HIT, MISS = "hit", "miss"

Round = Callable[[], Sequence[float]]
"""Microseconds of each call."""


def run(context: Context, keys: float | None = None) -> None:
    """Measure; what needs the SeaweedFS binary is last.

    Args:
        context: Where rows go.
        keys: In the largest index, a whole number.
    """
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.index_bucket import measure_in_bucket
    from s3ec.dev.bench.index_made import make

    keys = int(keys or (_KEYS_QUICK if context.quick else KEYS))
    need, free = _BYTES * (1 + _COPIES) * keys, shutil.disk_usage(context.scratch).free
    if free < need:
        raise CannotMeasureError(
            f"{keys:.3g} keys need {need / 1e9:.1f} GB of scratch space, and {free / 1e9:.1f} GB "
            "are free; TMPDIR can name another place"
        )
    context.say(f"an index of {keys} keys")
    made = make(context.scratch, keys)
    _measure_opening(context, made)
    _measure_filter(context, made)
    _measure_lookups(context, made)
    with filled(context, 1) as (server, corpus):
        measure_in_bucket(context, server, corpus, made)


# -- lookups ---------------------------------------------------------------------------------------


def _measure_lookups(context: Context, largest: Made) -> None:
    """Report both rows: lookups in indexes of two sizes, in turn."""
    from s3ec.dev.bench.index_made import keys_of, make, reader

    some = keys_of([number.to_bytes(16, "big") for number in range(_LOOKUPS)])
    cases: dict[str, Round] = {_NOTHING: lambda: _times(lambda _key: None, some)}
    with contextlib.ExitStack() as stack:
        readers = {}
        if largest.entries > _SMALL:
            small = make(context.scratch, _SMALL)
            stack.callback(small.delete)
            readers["1e6 keys"] = (small, stack.enter_context(reader(small)))
        label = f"{float(largest.entries):.3g}".replace("e+0", "e") + " keys"
        readers[label] = (largest, stack.enter_context(reader(largest)))
        for name, (made, node) in readers.items():
            for which in _CASES:
                cases[f"{which}, {name}"] = _ours(made, node, which)
        context.say(f"{context.rounds(_ROUNDS)} rounds of lookups")
        kept = measure.interleave(cases, rounds=context.rounds(_ROUNDS), warmup=2)
    _report_lookups(context, list(readers), kept)


def _times(contains: Callable[..., object], keys: Sequence[object]) -> list[float]:
    """Microseconds of each call by itself, the clock's share taken off."""
    own_ns = measure.clock_ns()
    return [(ns - own_ns) / 1000 for ns in measure.time_each(contains, [(key,) for key in keys])]


def _ours(made: Made, node: Node, which: str) -> Round:
    from s3ec.dev.bench.index_made import Keys, check_answers

    keys = Keys(made.segment())
    fresh = keys.hits if which == HIT else keys.misses

    # Bound for every round anew, as the scheduler's hooks find it.
    def round_() -> list[float]:
        some = fresh(_LOOKUPS)
        times = _times(node.index.maybe_contains, some)
        check_answers(node.index.maybe_contains, some, expected=which == HIT)
        return times

    return round_


def _report_lookups(
    context: Context, labels: Sequence[str], kept: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    def percentiles(percent: float) -> dict[str, list[float]]:
        return {
            case: [measure.percentile(times, percent) for times in rounds]
            for case, rounds in kept.items()
        }

    p50 = percentiles(50)
    small, large = (f"{{}}, {labels[place]}" for place in (0, -1))
    samples = sum(map(len, kept[small.format(HIT)]))
    ours = {small.format(which): p50[small.format(which)] for which in _CASES}
    others = measure.medians({case: found for case, found in p50.items() if case not in ours})
    detail: dict[str, Any] = {"p99_us": measure.medians(percentiles(99))}
    context.report_slowest(P50, ours, samples=samples, others=others, detail=detail)
    if small == large:
        context.cannot(GROWTH, "for this --keys must be above 1e6")
        return
    growth = {
        which: measure.ratios(p50[large.format(which)], p50[small.format(which)])
        for which in _CASES
    }
    context.report_slowest(GROWTH, growth, samples=samples, detail={"largest": labels[-1]})


# -- opening, and the filter -----------------------------------------------------------------------


def _measure_opening(context: Context, made: Made) -> None:
    """Report how long opening takes in a fresh process, and the memory of a reader."""
    from s3ec.dev.bench.index_made import Keys

    context.say("opening in fresh processes")
    keys = Keys(made.segment())
    digests = [key.digest for key in (*keys.hits(_OPENED_LOOKUPS), *keys.misses(_OPENED_LOOKUPS))]
    opened = []
    for _ in range(context.rounds(_OPENINGS)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            opened.append(pool.submit(_open, made, digests).result())
    opened_ms, grown = zip(*opened, strict=True)
    per_key = [one / made.entries for one in grown]
    for row, values, note in (
        (
            OPEN,
            opened_ms,
            "refresh to first hit in a fresh process; bucket in memory, page cache warm",
        ),
        (
            PRIVATE,
            per_key,
            f"anonymous memory after opening and {2 * _OPENED_LOOKUPS} lookups, less before",
        ),
    ):
        context.report(
            row,
            statistics.median(values),
            samples=len(opened),
            detail={"spread": measure.spread(values), "entries": made.entries, "note": note},
        )


def _open(made: Made, digests: Sequence[bytes]) -> tuple[float, int]:
    """In a fresh process: milliseconds to open it, and bytes of anonymous memory more."""
    from s3ec.dev.bench.index_made import check_answers, keys_of, load, reader

    keys = keys_of(digests)
    hits = keys[: len(keys) // 2]
    with reader(made, follow=False) as node:
        # The threads are there in an engine, whatever the index.
        node.loop.run(asyncio.sleep(0), timeout_s=30)
        node.loop.run(node.loop.disk(time.sleep, 0), timeout_s=30)
        gc.collect()
        before = measure.anonymous_bytes()
        started = time.perf_counter()
        load(node, made)
        contains = node.index.maybe_contains
        check_answers(contains, hits[:1], expected=True)
        opened_s = time.perf_counter() - started
        check_answers(contains, hits, expected=True)
        for key in keys:
            contains(key)
        gc.collect()
        return opened_s * 1000, measure.anonymous_bytes() - before


def _measure_filter(context: Context, made: Made) -> None:
    """Report the filter's size, and how often it takes a key for one of the corpus."""
    from s3ec.dev.bench.index_made import Keys, check_answers
    from s3ec.index.bloom import maybe

    context.say("filters")
    count = _MISSES_QUICK if context.quick else _MISSES
    keys = Keys(made.segment(), seed=1)
    bits = made.folder.filter_path(made.name).read_bytes()
    words = memoryview(bits).cast("Q")

    def contains(key: Key) -> bool:
        return maybe(words, key.digest_hi, key.digest_lo)

    check_answers(contains, keys.hits(_MISSES_AT_A_TIME), expected=True)
    wrong = 0
    for _ in range(count // _MISSES_AT_A_TIME):
        wrong += sum(map(contains, keys.misses(_MISSES_AT_A_TIME)))
    detail = {"entries": made.entries, "bytes": len(bits), "wrong": wrong}
    context.report(BLOOM_BYTES, len(bits) / made.entries, samples=made.entries, detail=detail)
    context.report(BLOOM_FPR, wrong / count, samples=count, detail=detail)


BENCH = Bench(ROWS, run)

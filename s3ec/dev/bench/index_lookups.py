# SPDX-License-Identifier: Apache-2.0
"""Lookups, and the memory and the time of a reader whose snapshot is on this node's disk.

Lookups of ours at two sizes, of vLLM's ECExampleConnector and by HEAD come in turn. Each one is of
a key that was not asked for before, so its cache lines are cold. Each is timed by itself, and the
clock's own share, which is measured beside it, is taken off. A reader is opened in a fresh process.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child, anonymous_bytes
from s3ec.dev.bench.context import CannotMeasureError, Context
from s3ec.dev.bench.index_made import Keys, Made, check_answers, keys_of, load, reader
from s3ec.dev.bench.measure import memory_folder
from s3ec.index.bloom import maybe

if TYPE_CHECKING:
    from s3ec.identity import Key
    from s3ec.node import Node


ROUNDS = 15
_KEYS = 5000
_IN_A_ROW = 100
_EXAMPLE_KEYS = 256
_HEADS = 16
HIT, MISS = "hit", "miss"
# How fast the interpreter is at the moment: on a shared machine that changes by a factor of two.
NOTHING = "a call that does nothing"
P50, TO_EXAMPLE, TO_HEAD, GROWTH = (
    "index.lookup_p50_us",
    "index.lookup_ratio_to_example",
    "index.lookup_ratio_to_head",
    "index.growth_1e6_to_max",
)


@dataclass(frozen=True, slots=True)
class Times:
    """One round of one case.

    Attributes:
        each: Microseconds of every call by itself, the clock's share taken off.
        in_a_row: Of other calls, a hundred without a clock between them; the loop around them is
            inside. Median of these.
    """

    each: Sequence[float]
    in_a_row: float

    @property
    def p50(self) -> float:
        """Median of this round."""
        return measure.percentile(self.each, 50)

    @property
    def p99(self) -> float:
        """99th percentile of this round."""
        return measure.percentile(self.each, 99)


Round = Callable[[], Times]
Heads = Callable[[bool, int], list[float]]


def measure_lookups(
    context: Context,
    readers: Mapping[str, tuple[Made, Node]],
    heads: Heads | None,
) -> None:
    """Measure and report the four rows.

    Args:
        context: Where they go.
        readers: Label to a snapshot and an open reader of it; the smaller one first.
        heads: Microseconds of so many HEADs, of an object that is there or of none; None where
            there is no server.
    """
    some = keys_of([number.to_bytes(16, "big") for number in range(_KEYS)])
    cases: dict[str, Round] = {NOTHING: lambda: time_lookups(_nothing, some)}
    for label, (made, node) in readers.items():
        keys = Keys(made.segment())
        cases[f"{HIT}, {label}"] = _ours(node, keys.hits, expected=True)
        cases[f"{MISS}, {label}"] = _ours(node, keys.misses, expected=False)
    if heads is not None:
        cases[_head(HIT)] = lambda: Times(heads(True, _HEADS), 0.0)
        cases[_head(MISS)] = lambda: Times(heads(False, _HEADS), 0.0)
    with _example_cases(context) as (others, why):
        cases |= others
        context.say(f"{context.rounds(ROUNDS)} rounds of lookups")
        kept = measure.interleave(cases, rounds=context.rounds(ROUNDS), warmup=2)
    _report(context, list(readers), kept, why)


def time_lookups(contains: Callable[[Key], object], keys: Sequence[Key]) -> Times:
    """Time half of the keys one by one, and half of them in a row."""
    clock = time.perf_counter_ns
    half = len(keys) // 2
    out = [0] * half
    own_ns = measure.clock_ns()
    for number, key in enumerate(keys[:half]):
        started = clock()
        contains(key)
        out[number] = clock() - started
    rows = []
    for start in range(half, len(keys), _IN_A_ROW):
        row = keys[start : start + _IN_A_ROW]
        started = clock()
        for key in row:
            contains(key)
        rows.append((clock() - started) / 1000 / len(row))
    return Times([(ns - own_ns) / 1000 for ns in out], statistics.median(rows))


def _nothing(_key: Key) -> None:
    pass


def _ours(node: Node, fresh: Callable[[int], list[Key]], *, expected: bool) -> Round:
    # Bound for every round anew, as the scheduler's hooks find it.
    def round_() -> Times:
        keys = fresh(_KEYS)
        times = time_lookups(node.index.maybe_contains, keys)
        check_answers(node.index.maybe_contains, keys, expected=expected)
        return times

    return round_


def _example(which: str) -> str:
    return f"ECExampleConnector.has_cache_item, {which}"


def _head(which: str) -> str:
    return f"HEAD, {which}"


@contextmanager
def _example_cases(context: Context) -> Iterator[tuple[dict[str, Round], str]]:
    """vLLM's connector over a folder in memory; without vLLM no cases, and why.

    It makes a folder for every identifier that it is asked for; here they are there already, as
    they would be the second time.
    """
    from s3ec.dev.bench.hooks import need_vllm

    try:
        need_vllm(context)
    except CannotMeasureError as exc:
        yield {}, str(exc)
        return
    from s3ec.dev.bench.hooks_rig import example

    source = random.Random(1)
    names = [f"{source.getrandbits(256):064x}" for _ in range(2 * _EXAMPLE_KEYS)]
    asked = {HIT: names[:_EXAMPLE_KEYS], MISS: names[_EXAMPLE_KEYS:]}
    with memory_folder(context.scratch / "example") as (folder, _):
        connector = example(folder, asked[HIT], asked[MISS])

        def case(which: str) -> Round:
            arguments = [(name,) for name in asked[which]]

            def round_() -> Times:
                own_ns = measure.clock_ns()
                times = measure.time_each(connector.has_cache_item, arguments)
                return Times([(ns - own_ns) / 1000 for ns in times], 0.0)

            return round_

        yield {_example(which): case(which) for which in (HIT, MISS)}, ""


def _report(
    context: Context, labels: Sequence[str], kept: Mapping[str, Sequence[Times]], why: str
) -> None:
    p50 = {case: [times.p50 for times in rounds] for case, rounds in kept.items()}
    samples = sum(len(times.each) for times in kept[f"{HIT}, {labels[0]}"])
    small, large = labels[0], labels[-1]
    ours = {f"{which}, {small}": p50[f"{which}, {small}"] for which in (HIT, MISS)}
    others = {case: rounds for case, rounds in p50.items() if case not in ours}
    context.report_slowest(
        P50, ours, samples=samples, others=measure.medians(others), detail=_about(kept)
    )
    if small == large:
        context.cannot(GROWTH, "for this --keys must be above 1e6")
    else:
        growth = {
            w: measure.ratios(p50[f"{w}, {large}"], p50[f"{w}, {small}"]) for w in (HIT, MISS)
        }
        context.report_slowest(GROWTH, growth, samples=samples, detail={"largest": large})
    for row, name, reason in (
        (TO_EXAMPLE, _example, why),
        (TO_HEAD, _head, "there is no local server"),
    ):
        if name(HIT) not in p50:
            context.cannot(row, reason)
            continue
        ratios = {w: measure.ratios(p50[f"{w}, {large}"], p50[name(w)]) for w in (HIT, MISS)}
        detail = {"denominator": [name(HIT), name(MISS)], "keys": large}
        context.report_slowest(row, ratios, samples=samples, detail=detail)


def _about(kept: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    return {
        "p99_us": measure.medians({case: [t.p99 for t in rounds] for case, rounds in kept.items()}),
        "in_a_row_us": measure.medians(
            {
                case: [t.in_a_row for t in rounds]
                for case, rounds in kept.items()
                if rounds[0].in_a_row
            }
        ),
        "clock_us_taken_off": measure.clock_ns() / 1000,
    }


OPENINGS = 5
_KEYS_OPENED = 20_000
OPEN, PRIVATE, BLOOM_BYTES, BLOOM_FPR = (
    "index.open_ms",
    "index.private_bytes_per_key",
    "bloom.bytes_per_key",
    "bloom.fpr",
)
_MISSES, _MISSES_QUICK = 500_000, 50_000
_MISSES_AT_A_TIME = 10_000


def measure_opening(context: Context, made: Made, largest: Made) -> None:
    """Report how long opening takes, and the memory that a reader has then.

    Args:
        context: Where rows go.
        made: What is opened for the time's row.
        largest: For the memory's, and beside the other in the time's; may be the same.
    """
    context.say("opening in fresh processes")
    several = _several(context, made)
    of_largest = several if largest is made else _several(context, largest)
    opened = [one["open_ms"] for one in several]
    context.report(
        OPEN,
        statistics.median(opened),
        samples=len(opened),
        detail={
            "spread": measure.spread(opened),
            "entries": made.entries,
            "largest": {
                "entries": largest.entries,
                "ms": statistics.median(one["open_ms"] for one in of_largest),
            },
            "note": "refresh to first hit in a fresh process; bucket in memory, page cache warm",
        },
    )
    if of_largest[0]["bytes"] is None:
        context.cannot(PRIVATE, "this kernel has no /proc/self/smaps_rollup")
        return
    grown = [one["bytes"] / largest.entries for one in of_largest]
    context.report(
        PRIVATE,
        statistics.median(grown),
        samples=len(grown),
        detail={
            "spread": measure.spread(grown),
            "entries": largest.entries,
            "bytes": statistics.median(one["bytes"] for one in of_largest),
            "note": f"anonymous memory after opening and {2 * _KEYS_OPENED} lookups, less before",
        },
    )


def _several(context: Context, made: Made) -> list[dict[str, Any]]:
    digests = _digests(made)
    return [_opened(made, digests) for _ in range(context.rounds(OPENINGS))]


def _digests(made: Made) -> list[bytes]:
    """Of hits, and of as many misses."""
    keys = Keys(made.segment())
    return [key.digest for key in (*keys.hits(_KEYS_OPENED), *keys.misses(_KEYS_OPENED))]


def measure_filters(context: Context, made: Made) -> None:
    """Report the filter's size, and how often it takes a key for one of the corpus."""
    context.say("filters")
    count = _MISSES_QUICK if context.quick else _MISSES
    keys = Keys(made.segment(), seed=1)
    words = memoryview(made.folder.filter_path(made.name).read_bytes()).cast("Q")

    def contains(key: Key) -> bool:
        return maybe(words, key.digest_hi, key.digest_lo)

    check_answers(contains, keys.hits(_MISSES_AT_A_TIME), expected=True)
    wrong = 0
    for _ in range(count // _MISSES_AT_A_TIME):
        wrong += sum(map(contains, keys.misses(_MISSES_AT_A_TIME)))
    context.report(
        BLOOM_BYTES,
        made.filter_nbytes / made.entries,
        samples=made.entries,
        detail={"entries": made.entries, "bytes": made.filter_nbytes, "note": "blocked bloom"},
    )
    context.report(
        BLOOM_FPR,
        wrong / count,
        samples=count,
        detail={"entries": made.entries, "wrong": wrong},
    )


def _opened(made: Made, digests: Sequence[bytes]) -> dict[str, Any]:
    with Child(_open, made, digests) as child:
        answer: dict[str, Any] = child.answer()
        return answer


def _open(pipe: Connection, made: Made, digests: Sequence[bytes]) -> None:
    """A child's whole life."""
    keys = keys_of(digests)
    hits = keys[: len(keys) // 2]
    with reader(made, follow=False) as node:
        # The threads are there in an engine, whatever the index.
        node.loop.run(asyncio.sleep(0), timeout_s=30)
        node.loop.run(node.loop.disk(time.sleep, 0), timeout_s=30)
        gc.collect()
        before = _anonymous()
        started = time.perf_counter()
        load(node, made)
        contains = node.index.maybe_contains
        found = contains(hits[0])
        opened_s = time.perf_counter() - started
        if not found:
            raise RuntimeError("a key of the snapshot was not found")
        check_answers(contains, hits, expected=True)
        for key in keys:
            contains(key)
        gc.collect()
        after = _anonymous()
    grown = None if before is None or after is None else after - before
    pipe.send({"open_ms": opened_s * 1000, "bytes": grown})


def _anonymous() -> int | None:
    try:
        return anonymous_bytes()
    except OSError:
        return None

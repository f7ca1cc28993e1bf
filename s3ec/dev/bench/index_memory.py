# SPDX-License-Identifier: Apache-2.0
"""Opening a base that is on this node's disk, each time in a fresh process, and its memory."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child, anonymous_bytes
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.index_made import Keys, Made, Mode, check_answers, keys_of, load, reader

ROUNDS = 5
_KEYS = 20_000
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
    filters = _opened(largest, "bloom", _digests(largest))
    opened = [one["open_ms"] for one in several]
    context.report(
        OPEN,
        statistics.median(opened),
        samples=len(opened),
        detail={
            "spread": measure.spread(opened),
            "entries": made.entries,
            "files": len(made.head.shards),
            "largest": {
                "entries": largest.entries,
                "files": len(largest.head.shards),
                "ms": statistics.median(one["open_ms"] for one in of_largest),
                "by_filters_ms": filters["open_ms"],
            },
            "note": "refresh to first hit in a fresh process; bucket in memory, page cache warm",
        },
    )
    if filters["bytes"] is None:
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
            "by_filters_bytes": filters["bytes"],
            "note": f"anonymous memory after opening and {2 * _KEYS} lookups, less before",
        },
    )


def _several(context: Context, made: Made) -> list[dict[str, Any]]:
    digests = _digests(made)
    return [_opened(made, "exact", digests) for _ in range(context.rounds(ROUNDS))]


def _digests(made: Made) -> list[bytes]:
    """Of hits, and of as many misses."""
    keys = Keys(made.base())
    return [key.digest for key in (*keys.hits(_KEYS), *keys.misses(_KEYS))]


def measure_filters(context: Context, made: Made) -> None:
    """Report the filters' size, and how often they take a key for one of the corpus."""
    context.say("filters")
    count = _MISSES_QUICK if context.quick else _MISSES
    keys = Keys(made.base(), seed=1)
    wrong = 0
    with reader(made, "bloom") as node:
        contains = node.index.maybe_contains
        check_answers(contains, keys.hits(_MISSES_AT_A_TIME), expected=True)
        for _ in range(count // _MISSES_AT_A_TIME):
            wrong += sum(map(contains, keys.misses(_MISSES_AT_A_TIME)))
    context.report(
        BLOOM_BYTES,
        made.head.bloom_nbytes / made.entries,
        samples=made.entries,
        detail={"entries": made.entries, "bytes": made.head.bloom_nbytes, "note": "blocked bloom"},
    )
    context.report(
        BLOOM_FPR,
        wrong / count,
        samples=count,
        detail={"asked_for": made.head.bloom_fpr, "entries": made.entries, "wrong": wrong},
    )


def _opened(made: Made, mode: Mode, digests: Sequence[bytes]) -> dict[str, Any]:
    with Child(_open, made, mode, digests) as child:
        answer: dict[str, Any] = child.answer()
        return answer


def _open(pipe: Connection, made: Made, mode: Mode, digests: Sequence[bytes]) -> None:
    """A child's whole life."""
    keys = keys_of(digests)
    hits = keys[: len(keys) // 2]
    with reader(made, mode, follow=False) as node:
        contains = node.index.maybe_contains
        # The threads are there in an engine, whatever the index.
        node.loop.run(asyncio.sleep(0), timeout_s=30)
        node.loop.run(node.loop.disk(time.sleep, 0), timeout_s=30)
        gc.collect()
        before = _anonymous()
        started = time.perf_counter()
        load(node)
        found = contains(hits[0])
        opened_s = time.perf_counter() - started
        if not found:
            raise RuntimeError("a key of the base was not found")
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

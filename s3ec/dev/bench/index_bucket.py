# SPDX-License-Identifier: Apache-2.0
"""A reader and its bucket, a real server: cold starts beside raw downloads, and idle refreshes."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.index_made import LAYOUT, NAMESPACE, Keys, Made, load
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.index import cache
from s3ec.node import Node
from s3ec.settings import Settings
from s3ec.store.open import choose_transport, open_store
from s3ec.tier.entry_writer import PART_BYTES

if TYPE_CHECKING:
    from s3ec.identity import Key
    from s3ec.testing.server import LocalS3

ROUNDS = 3
_REFRESHES = 32  # one in thirty lists more than the others
_UPLOADS = 4
_TIMEOUT_S = 300.0
COLD, IDLE = "index.cold_ratio_to_raw", "index.idle_lists_per_refresh"


def upload(server: LocalS3, corpus: Corpus, made: Made) -> None:
    """Put a base into the bucket, its head last."""
    client = server.client()

    def put(name: str) -> None:
        with (made.folder / name).open("rb") as file:
            client.put_object(Bucket=corpus.bucket, Key=name, Body=file)

    *files, head = made.names
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(put, files))
    put(head)


def settings_of(corpus: Corpus, cache_dir: Path) -> Settings:
    """Settings of a reader that wants rows, all else by default."""
    return corpus.settings(cache_dir, "auto").model_copy(update={"index": "exact"})


@contextmanager
def node_of(corpus: Corpus, cache_dir: Path) -> Iterator[Node]:
    """A node over this bucket that does not follow it yet."""
    node = Node(settings_of(corpus, cache_dir), NAMESPACE, name="s3ec-bench")
    try:
        yield node
    finally:
        node.close(10)


@contextmanager
def head_times(corpus: Corpus, cache_dir: Path) -> Iterator[Callable[[bool, int], list[float]]]:
    """Yields what times so many HEADs, one after the other, as our store sends them.

    Args:
        corpus: With at least one entry.
        cache_dir: For the node; nothing comes there.
    """
    with node_of(corpus, cache_dir) as node:

        async def heads(name: str, count: int, *, there: bool) -> list[float]:
            out = []
            for _ in range(count):
                started = time.perf_counter_ns()
                info = await node.store.head(name)
                out.append((time.perf_counter_ns() - started) / 1000)
                if (info is not None) is not there:
                    raise RuntimeError(f"HEAD {name}: {info}")
            return out

        def timed(there: bool, count: int) -> list[float]:
            name = corpus.object_names[0] if there else LAYOUT.objects + "not-there"
            return node.loop.run(heads(name, count, there=there), timeout_s=_TIMEOUT_S)

        yield timed


# -- cold starts -----------------------------------------------------------------------------


def measure_cold(context: Context, corpus: Corpus, made: Made) -> None:
    """Report the ratio of a reader's start on an empty node to raw downloads of the same bytes."""
    folder = context.scratch / "cold"
    hit = Keys(made.base()).hits(1)[0]
    raw, to_files, ours = "raw GETs into memory", "raw GETs into files", "a reader's cold start"
    cases = {
        ours: lambda: _cold_s(corpus, folder, hit),
        raw: lambda: _raw_s(corpus, made, folder, None),
        to_files: lambda: _raw_s(corpus, made, folder, folder / "raw"),
    }
    rounds = context.rounds(ROUNDS)
    context.say(f"{rounds} rounds of cold starts")
    kept = measure.interleave(cases, rounds=rounds)
    ratios = measure.ratios(kept[ours], kept[raw])
    context.report(
        COLD,
        statistics.median(ratios),
        samples=rounds,
        detail={
            "spread": measure.spread(ratios),
            "cases": {to_files: statistics.median(measure.ratios(kept[to_files], kept[raw]))},
            "seconds": measure.medians(kept),
            "entries": made.entries,
            "bytes": made.head.nbytes,
            "transport": choose_transport(settings_of(corpus, folder)).name,
            "in_flight": _IN_FLIGHT,
            "denominator": raw,
            "note": "until the first hit; verified and written to disk, page cache included",
        },
    )


def _cold_s(corpus: Corpus, folder: Path, hit: Key) -> float:
    started = time.perf_counter()
    with node_of(corpus, folder / "node") as node:
        load(node)
        found = node.index.maybe_contains(hit)
        seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    if not found:
        raise RuntimeError("a key of the base was not found")
    return seconds


# What a reader has under way at most.
_IN_FLIGHT = cache.FILES * cache.PARTS


def _raw_s(corpus: Corpus, made: Made, scratch: Path, folder: Path | None) -> float:
    """The reader's requests through the same transport, without retries, and no more than that.

    Args:
        scratch: Deleted afterwards.
        folder: Where bytes are written; None drops them.
    """
    started = time.perf_counter()
    (folder or scratch).mkdir(parents=True)
    asyncio.run(_get_all(settings_of(corpus, scratch), made, folder))
    seconds = time.perf_counter() - started
    shutil.rmtree(scratch)
    return seconds


async def _get_all(settings: Settings, made: Made, folder: Path | None) -> None:
    store = open_store(settings)
    part = PART_BYTES
    parts = iter(
        (name, start, min(part, nbytes - start))
        for name, nbytes in made.exact_files()
        for start in range(0, nbytes, part)
    )

    async def some() -> None:
        for name, start, length in parts:
            body = await store.get_range(name, start, length)
            if body is None or len(body) != length:
                raise RuntimeError(f"{name} is not whole")
            if folder is not None:
                path = folder / f"{name.rpartition('/')[2]}-{start}"
                await asyncio.to_thread(path.write_bytes, body)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_FLIGHT):
                group.create_task(some())
    finally:
        await store.close()


# -- idle refreshes --------------------------------------------------------------------------


@dataclass(slots=True)
class _Counting:
    """Passes requests on, and counts them and the bytes of the answers' bodies."""

    requests: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    async def apply(self, exchange: Exchange) -> None:
        request = exchange.request
        listing = request.method == "GET" and "list-type=2" in request.target
        self.requests["LIST" if listing else request.method] += 1
        reply = await exchange.forward()
        self.nbytes += len(reply.body)
        await exchange.send(reply)


def measure_idle(context: Context, corpus: Corpus, made: Made, *, deltas: int) -> None:
    """Report what refreshes ask for where nothing is new, counted in front of the server."""
    context.say(f"{_REFRESHES} refreshes of an idle index")
    counting = _Counting()
    with FaultProxy(corpus.endpoint_url) as proxy:
        proxy.add(Rule(counting))
        with node_of(replace(corpus, endpoint_url=proxy.url), made.cache_dir) as node:
            load(node)
            counting.requests.clear()
            counting.nbytes = 0
            for _ in range(_REFRESHES):
                node.loop.run(node.index.refresh(), timeout_s=_TIMEOUT_S)
            every_s = node.settings.index_refresh_s
    per_hour = 3600 / every_s / _REFRESHES
    context.report(
        IDLE,
        counting.requests["LIST"] / _REFRESHES,
        samples=_REFRESHES,
        detail={
            "requests": dict(counting.requests),
            "requests_per_hour": counting.requests.total() * per_hour,
            "body_bytes_per_hour": counting.nbytes * per_hour,
            "index_refresh_s": every_s,
            "entries": made.entries,
            "deltas": deltas,
            "note": "counted in front of the server; per hour at the default pause",
        },
    )

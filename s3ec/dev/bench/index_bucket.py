# SPDX-License-Identifier: Apache-2.0
"""The index in a bucket of a real server: cold starts, idle refreshes, a union, news."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from s3ec.counters import Counters
from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child, anonymous_bytes_of, most_resident_bytes, wait_for_end
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import Corpus, key_of
from s3ec.dev.bench.index_made import LAYOUT, NAMESPACE, Keys, Made, load, rows_of
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.identity import Key, Namespace
from s3ec.index.local import NodeFolder
from s3ec.index.maker import make_union
from s3ec.index.names import Names, deltas_prefix
from s3ec.index.snapshot import PARTS, Rows, concat, encode
from s3ec.node import Node
from s3ec.settings import Settings
from s3ec.store.base import PART_BYTES
from s3ec.store.open import choose_transport, open_store
from s3ec.store.retry import RetryStore

if TYPE_CHECKING:
    from s3ec.identity import Key
    from s3ec.testing.server import LocalS3


ROUNDS = 3
_REFRESHES, _REFRESHES_QUICK = 32, 4  # one in thirty lists more than the others
_REFRESH_S = 1.0
_ENGINES = 4
_UPLOADS = 4
_TIMEOUT_S = 300.0
COLD, IDLE = "index.cold_ratio_to_raw", "index.idle_lists_per_refresh"


def upload(server: LocalS3, corpus: Corpus, made: Made) -> None:
    """Put a snapshot into the bucket."""
    with made.folder.rows_path(made.name).open("rb") as file:
        server.client().upload_fileobj(file, corpus.bucket, made.object_name)


def settings_of(corpus: Corpus, cache_dir: Path) -> Settings:
    """Settings of a reader, all by default."""
    return corpus.settings(cache_dir, "auto")


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
    hit = Keys(made.segment()).hits(1)[0]
    raw, to_files, ours = "raw GETs into memory", "raw GETs into files", "a reader's cold start"
    cases = {
        ours: lambda: _cold_s(corpus, made, folder, hit),
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
            "bytes": made.nbytes,
            "transport": choose_transport(settings_of(corpus, folder)).name,
            "in_flight": _IN_FLIGHT,
            "denominator": raw,
            "note": "until the first hit; verified and written to disk, page cache included",
        },
    )


def _cold_s(corpus: Corpus, made: Made, folder: Path, hit: Key) -> float:
    started = time.perf_counter()
    with node_of(corpus, folder / "node") as node:
        load(node, made)
        found = node.index.maybe_contains(hit)
        seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    if not found:
        raise RuntimeError("a key of the snapshot was not found")
    return seconds


# Ranges under way.
_IN_FLIGHT = 16


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
    name, nbytes = made.object_name, made.nbytes
    starts = iter(range(0, nbytes, part))

    async def some() -> None:
        for start in starts:
            length = min(part, nbytes - start)
            body = await store.get_range(name, start, length)
            if body is None or len(body) != length:
                raise RuntimeError(f"{name} is not whole")
            if folder is not None:
                await asyncio.to_thread((folder / str(start)).write_bytes, body)

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
    """Report what four engines of a node ask for where nothing is new.

    Counted in front of the server.
    """
    refreshes = _REFRESHES_QUICK if context.quick else _REFRESHES
    context.say(f"{refreshes} refreshes of an idle index")
    counting = _Counting()
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(corpus.endpoint_url))
        proxy.add(Rule(counting))
        settings = settings_of(replace(corpus, endpoint_url=proxy.url), made.cache_dir)
        often = settings.model_copy(update={"index_refresh_s": _REFRESH_S})
        for number in range(_ENGINES):
            node = Node(often, NAMESPACE, name=f"s3ec-bench-{number}")
            stack.callback(node.close, 10)
            load(node, made)
            node.follow_the_bucket()
        counting.requests.clear()
        counting.nbytes = 0
        started = time.monotonic()
        time.sleep(refreshes * _REFRESH_S)
        refreshes_due = (time.monotonic() - started) / _REFRESH_S
    per_hour = 3600 / settings.index_refresh_s / refreshes_due
    context.report(
        IDLE,
        counting.requests["LIST"] / refreshes_due,
        samples=refreshes,
        detail={
            "engines": _ENGINES,
            "requests": dict(counting.requests),
            "requests_per_hour": counting.requests.total() * per_hour,
            "body_bytes_per_hour": counting.nbytes * per_hour,
            "entries": made.entries,
            "deltas": deltas,
            "note": "counted in front of the server; per hour at the default pause",
        },
    )


# So that what is named at one time is one page of a listing, as what a fleet names in 15 minutes.
_DELTA_ROWS = 10_000
# Fewer are not merged.
_LEAST_ROWS = 70_000
_LOOK_MEMORY_S = 0.005
_UNION_TIMEOUT_S = 1800.0
PEAK, SECONDS = "union.peak_mib", "union.seconds"


def deltas_for(made: Made) -> int:
    """How many make a union due: an eighth of the snapshot's rows, and some more."""
    return max(_LEAST_ROWS, made.entries * 13 // 100) // _DELTA_ROWS


def upload_deltas(server: LocalS3, corpus: Corpus, count: int) -> None:
    """Put deltas of ten thousand new keys each into the bucket."""
    client = server.client()
    names = Names()

    def put(name: str, rows: Rows) -> None:
        body = b"".join(encode(rows, NAMESPACE.name))
        client.put_object(Bucket=corpus.bucket, Key=deltas_prefix(LAYOUT) + name, Body=body)

    with ThreadPoolExecutor(_UPLOADS) as pool:
        named = [names.next(time.time()) for _ in range(count)]
        list(pool.map(put, named, _deltas(count)))


def _deltas(count: int) -> Iterator[Rows]:
    """Keys of another corpus, dealt out at random."""
    every = concat([rows_of(count * _DELTA_ROWS, part, seed=1) for part in range(PARTS)])
    order = np.random.default_rng(1).permutation(len(every))
    for some in np.array_split(order, count):
        yield every.select(np.sort(some))


def measure_union(context: Context, corpus: Corpus, made: Made, deltas: int) -> None:
    """Report time and peak memory of one union.

    The peak is of all anonymous memory of the process, the interpreter's included, looked at from
    outside every 5 ms. Files that it maps are the page cache's.
    """
    context.say(f"union of {made.entries} keys and {deltas} deltas")
    with Child(_union, corpus, made) as child:
        child.answer()  # that it is ready
        before = peak = anonymous_bytes_of(child.pid)
        child.tell("go")
        looks = 0
        deadline = time.monotonic() + _UNION_TIMEOUT_S
        while not child.has_answer and time.monotonic() < deadline:
            peak = max(peak, anonymous_bytes_of(child.pid))
            looks += 1
            time.sleep(_LOOK_MEMORY_S)
        done: dict[str, Any] = child.answer(1)
    about = {"entries": made.entries, "deltas": deltas, "entries_after": done["entries"]}
    context.report(
        PEAK,
        peak / 2**20,
        samples=looks,
        detail={
            **about,
            "before_mib": before / 2**20,
            "with_mapped_files_mib": done["most_resident_bytes"] / 2**20,
            "note": "anonymous memory of the process, the interpreter's included",
        },
    )
    context.report(SECONDS, done["seconds"], samples=1, detail=about)


def _union(pipe: Connection, corpus: Corpus, made: Made) -> None:
    """A child's whole life."""
    with corpus.environment():
        asyncio.run(_make_union(pipe, corpus, made))


async def _make_union(pipe: Connection, corpus: Corpus, made: Made) -> None:
    settings = settings_of(corpus, made.cache_dir)
    store = RetryStore(open_store(settings), Counters())
    try:
        gc.collect()
        pipe.send("ready")
        pipe.recv()
        started = time.perf_counter()
        union = await make_union(store, LAYOUT, NodeFolder(made.folder.path))
        seconds = time.perf_counter() - started
        if union is None:
            raise RuntimeError("nobody else makes a union, and none was due")
        pipe.send(
            {
                "seconds": seconds,
                "entries": union.rows,
                "most_resident_bytes": most_resident_bytes(),
            }
        )
    finally:
        await store.close()


VISIBLE = "index.visible_p99_s"
_SAVES, _SAVES_QUICK = 400, 20
_SAVING_S, _SAVING_S_QUICK = 60.0, 3.0
_READERS = 4
_LOOK_S = 0.005
# A save that nobody found for so long is lost, and the benchmark has failed.
_VISIBLE_TIMEOUT_S = 120.0
_READY_S = 60.0
_SAVE_ROWS, _WIDTH = 16, 64
# Nobody's but this row's, so that no snapshot is there yet: as on a corpus's first day.
_VISIBLE_NAMESPACE = Namespace.from_descriptor({"model": "s3ec/bench-visible"})


def measure_visibility(context: Context, corpus: Corpus) -> None:
    """Report the delay; needs torch."""
    try:
        import torch  # noqa: F401  the producer will
    except ImportError as exc:
        context.cannot(VISIBLE, f"no torch, and so no saves: {exc}")
        return
    count, seconds = (_SAVES_QUICK, _SAVING_S_QUICK) if context.quick else (_SAVES, _SAVING_S)
    source = random.Random(2)
    names = [f"{source.getrandbits(256):064x}" for _ in range(count)]
    folder = context.scratch / "visible"
    with ExitStack() as stack:
        reader = stack.enter_context(Child(_read, corpus, folder, names))
        reader.answer()  # that all follow the bucket
        context.say(f"{count} saves in {seconds:.0f} s")
        producer = stack.enter_context(Child(_produce, corpus, folder / "producer", names, seconds))
        stored: dict[str, float] = producer.answer(seconds + _VISIBLE_TIMEOUT_S + _READY_S)
        context.say("waiting for the last to be found")
        found: list[dict[str, float]] = reader.answer(_VISIBLE_TIMEOUT_S)
    _report(context, stored, found)


def _report(context: Context, stored: dict[str, float], found: Sequence[dict[str, float]]) -> None:
    delays = [one[name] - stored[name] for one in found for name in stored]
    context.report(
        VISIBLE,
        measure.percentile(delays, 99),
        samples=len(delays),
        detail={
            "spread": measure.spread(delays),
            "p50_s": statistics.median(delays),
            "saves": len(stored),
            "readers": len(found),
            "note": "from the bucket's confirmation to a hit on another node",
        },
    )


# -- the producer ----------------------------------------------------------------------------


def _produce(
    pipe: Connection, corpus: Corpus, folder: Path, names: Sequence[str], seconds: float
) -> None:
    """A child's whole life: save all at random times, tell when each was confirmed."""
    import torch

    from s3ec.connector.messages import Save
    from s3ec.connector.saves import SaveQueue

    source = random.Random(3)
    due = sorted(source.uniform(0, seconds) for _ in names)
    stored: dict[str, float] = {}
    with corpus.environment():
        settings = settings_of(corpus, folder)
        node = Node(settings, _VISIBLE_NAMESPACE, name="s3ec-bench-producer")
        node.follow_the_bucket()
        saves = SaveQueue(node, budget_bytes=2**28, overflow="block")
        started = time.monotonic()
        deadline = started + seconds + _VISIBLE_TIMEOUT_S
        left = list(zip(names, due, strict=True))
        while len(stored) < len(names) and time.monotonic() < deadline:
            while left and time.monotonic() - started >= left[0][1]:
                saves.put(left.pop(0)[0], Save("image", {}), torch.ones(_SAVE_ROWS, _WIDTH))
            now = time.monotonic()
            stored.update(dict.fromkeys(saves.take_stored(), now))
            time.sleep(_LOOK_S)
        if len(stored) < len(names):
            raise RuntimeError(f"{len(names) - len(stored)} saves were not confirmed")
        pipe.send(stored)
        wait_for_end(pipe)  # what is announced late is announced by a process that goes on
        saves.drain(20)
        node.close(10)


# -- the readers -----------------------------------------------------------------------------


def _read(pipe: Connection, corpus: Corpus, folder: Path, names: Sequence[str]) -> None:
    """A child's whole life: some nodes, and when each found each key first."""
    with corpus.environment():
        nodes = []
        for number in range(_READERS):
            settings = settings_of(corpus, folder / f"reader-{number}")
            nodes.append(Node(settings, _VISIBLE_NAMESPACE, name=f"s3ec-bench-{number}"))
        try:
            # As engines that were started at different times.
            for node in nodes:
                node.follow_the_bucket()
                time.sleep(settings.index_refresh_s / len(nodes))
            _wait_until_loaded(nodes)
            pipe.send("ready")
            pipe.send(_find(pipe, nodes, [key_of(name) for name in names]))
            wait_for_end(pipe)
        finally:
            for node in nodes:
                node.close(10)


def _wait_until_loaded(nodes: Sequence[Node]) -> None:
    deadline = time.monotonic() + _READY_S
    while not all(node.index.loaded for node in nodes):
        if time.monotonic() > deadline:
            raise RuntimeError("the readers do not read the bucket")
        time.sleep(_LOOK_S)


def _find(pipe: Connection, nodes: Sequence[Node], keys: Sequence[Key]) -> list[dict[str, float]]:
    """Look for all keys until all nodes have found all."""
    found: list[dict[str, float]] = [{} for _ in nodes]
    missing = [list(keys) for _ in nodes]
    while any(missing):
        if pipe.poll(0):  # nobody waits for it any more
            raise RuntimeError(f"{sum(map(len, missing))} keys were not found")
        for node, at, left in zip(nodes, found, missing, strict=True):
            contains = node.index.maybe_contains
            hits = [key for key in left if contains(key)]
            at.update(dict.fromkeys([key.identifier for key in hits], time.monotonic()))
            left[:] = [key for key in left if key.identifier not in at]
        time.sleep(_LOOK_S)
    return found

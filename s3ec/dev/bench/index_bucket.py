# SPDX-License-Identifier: Apache-2.0
"""The index in a bucket of a real server: cold starts, a union, hooks, news."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import IN_FLIGHT, NAMESPACE, Corpus, key_of
from s3ec.dev.bench.index_made import LAYOUT, Keys, Made, load, rows_of
from s3ec.identity import Key, Namespace
from s3ec.index.child import Job, in_child
from s3ec.index.local import NodeFolder
from s3ec.index.names import Names, SnapshotName, claims_prefix, deltas_prefix, snapshots_prefix
from s3ec.index.snapshot import PARTS, Rows, concat, encode
from s3ec.node import Node
from s3ec.settings import Settings
from s3ec.store.base import PART_BYTES
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import open_store

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

COLD, HOOKS = "index.cold_ratio_to_raw", "index.hooks_p99_ratio"
PEAK, SECONDS, VISIBLE = "union.peak_mib", "union.seconds", "index.visible_p99_s"
_ROUNDS = 3
_TIMEOUT_S = 600.0


def measure_in_bucket(context: Context, server: LocalS3, corpus: Corpus, made: Made) -> None:
    """Report all rows of this module."""
    context.say(f"uploading {made.entries} keys")
    with made.folder.rows_path(made.name).open("rb") as file:
        server.client().upload_fileobj(file, corpus.bucket, made.object_name)
    _measure_cold(context, corpus, made)
    deltas = max(_LEAST_ROWS, made.entries * 13 // 100) // _DELTA_ROWS
    context.say(f"uploading {deltas} deltas")
    _upload_deltas(server, corpus, deltas)
    work = _Work(server, corpus, made, context.scratch / "union")
    _measure_union(context, work, deltas)
    _measure_hooks(context, work)
    _measure_visibility(context, corpus)


def _settings(corpus: Corpus, cache_dir: Path) -> Settings:
    """All by default."""
    return corpus.settings(cache_dir)


@contextmanager
def _node(corpus: Corpus, cache_dir: Path) -> Iterator[Node]:
    """A node over this bucket that does not follow it yet."""
    node = Node(_settings(corpus, cache_dir), NAMESPACE, name="s3ec-bench")
    try:
        yield node
    finally:
        node.close(10)


# -- cold starts -----------------------------------------------------------------------------------


def _measure_cold(context: Context, corpus: Corpus, made: Made) -> None:
    """Report the ratio of a reader's start on an empty node to raw downloads of the same bytes."""
    folder = context.scratch / "cold"
    hit = Keys(made.segment()).hits(1)[0]
    raw, ours = "raw GETs into memory", "a reader's cold start"
    cases = {
        ours: lambda: _start_cold(corpus, made, folder, hit),
        raw: lambda: asyncio.run(_get_all(_settings(corpus, folder), made)),
    }
    rounds = context.rounds(_ROUNDS)
    context.say(f"{rounds} rounds of cold starts")
    kept = measure.interleave(
        {name: measure.timed(case) for name, case in cases.items()},
        rounds=rounds,
        between=lambda: shutil.rmtree(folder, ignore_errors=True),
    )
    ratios = measure.ratios(kept[ours], kept[raw])
    context.report(
        COLD,
        statistics.median(ratios),
        samples=rounds,
        detail={
            "spread": measure.spread(ratios),
            "seconds": measure.medians(kept),
            "entries": made.entries,
            "bytes": made.nbytes,
            "transport": "obstore",
            "in_flight": IN_FLIGHT,
            "denominator": raw,
            "note": "until the first hit; verified and written to disk, page cache included",
        },
    )


def _start_cold(corpus: Corpus, made: Made, folder: Path, hit: Key) -> None:
    with _node(corpus, folder) as node:
        load(node, made)
        if not node.index.maybe_contains(hit):
            raise RuntimeError("a key of the snapshot was not found")


async def _get_all(settings: Settings, made: Made) -> None:
    """The reader's requests through the same transport, without retries; drops the bytes."""
    store = open_store(settings)

    async def get(start: int) -> None:
        length = min(PART_BYTES, made.nbytes - start)
        body = await store.get_range(made.object_name, start, length)
        if body is None or len(body) != length:
            raise RuntimeError(f"{made.object_name} is not whole")

    try:
        await in_parallel(range(0, made.nbytes, PART_BYTES), get, width=IN_FLIGHT)
    finally:
        await store.close()


# -- a union, and hooks beside work on the index ---------------------------------------------------

# So that what is named at one time is one page of a listing, as what a fleet names in 15 minutes.
_DELTA_ROWS = 10_000
# Fewer are not merged.
_LEAST_ROWS = 70_000
_LOOK_MEMORY_S = 0.005
_LOOKUPS = 16  # a pass: some requests of some pictures
_PAUSE_S = 0.001
_QUIET_S, _QUIET_QUICK_S = 3.0, 0.5


def _upload_deltas(server: LocalS3, corpus: Corpus, count: int) -> None:
    """Put deltas of ten thousand keys of another corpus each into the bucket."""
    client = server.client()
    names = Names()
    every = concat([rows_of(count * _DELTA_ROWS, part, seed=1) for part in range(PARTS)])
    order = np.random.default_rng(1).permutation(len(every))

    def put(name: str, rows: Rows) -> None:
        body = b"".join(encode(rows, NAMESPACE.name))
        client.put_object(Bucket=corpus.bucket, Key=deltas_prefix(LAYOUT) + name, Body=body)

    with ThreadPoolExecutor(4) as pool:
        named = [names.next(time.time()) for _ in range(count)]
        deltas = (every.select(np.sort(some)) for some in np.array_split(order, count))
        list(pool.map(put, named, deltas))


class _Work:
    """What makes the index busy, again and again; each leaves the bucket as it was."""

    def __init__(self, server: LocalS3, corpus: Corpus, made: Made, folder: Path) -> None:
        self.server = server
        self.corpus = corpus
        self.made = made
        self._folder = NodeFolder(folder)
        self._names = Names()
        self._client = server.client()
        # A union of what this node has already, as an engine's is.
        self._folder.make()
        for path in (made.folder.rows_path, made.folder.filter_path):
            os.link(path(made.name), self._folder.path / path(made.name).name)

    def open_snapshot(self, node: Node) -> None:
        """Have the node find a copy of its snapshot under a new name."""
        ulid = self._names.next(time.time())
        name = f"{snapshots_prefix(LAYOUT)}{SnapshotName(self.made.name.listed, ulid)}"
        source = {"Bucket": self.corpus.bucket, "Key": self.made.object_name}
        self._client.copy_object(Bucket=self.corpus.bucket, Key=name, CopySource=source)
        node.loop.run(node.index.refresh(now=True), timeout_s=_TIMEOUT_S)
        self._delete(name)
        if node.index.counts().snapshot.ulid != ulid:
            raise RuntimeError("the new snapshot was not opened")

    def make_union(self) -> None:
        """Have a child make one, as an engine does."""
        job = Job("union", NAMESPACE.name, str(self._folder.path))

        async def make() -> str:
            return await in_child(_settings(self.corpus, self._folder.path))(job)

        name = asyncio.run(make())
        if not name:
            raise RuntimeError("no union was made")
        self._delete(f"{snapshots_prefix(LAYOUT)}{name}")
        claims = self._client.list_objects_v2(
            Bucket=self.corpus.bucket, Prefix=claims_prefix(LAYOUT)
        )
        self._delete(*(each["Key"] for each in claims.get("Contents", [])))

    def _delete(self, *names: str) -> None:
        for name in names:
            self._client.delete_object(Bucket=self.corpus.bucket, Key=name)


def _measure_union(context: Context, work: _Work, deltas: int) -> None:
    """Report time and peak memory of one union.

    The peak is of all anonymous memory of the process that makes it, the interpreter's included,
    looked at from outside every 5 ms. Files that it maps are the page cache's.
    """
    context.say(f"union of {work.made.entries} keys and {deltas} deltas")
    others = _children()
    peak = looks = 0
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work.make_union)
        while not running.done():
            for pid in _children() - others:
                with contextlib.suppress(OSError):  # it has just ended
                    peak = max(peak, measure.anonymous_bytes(pid))
                    looks += 1
            time.sleep(_LOOK_MEMORY_S)
        running.result()
    seconds = time.perf_counter() - started
    about = {"entries": work.made.entries, "deltas": deltas}
    note = "anonymous memory of the process, the interpreter's included"
    context.report(PEAK, peak / 2**20, samples=looks, detail={**about, "note": note})
    note = "in a child of low priority, as an engine makes it; its start included"
    context.report(SECONDS, seconds, samples=1, detail={**about, "note": note})


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, re.findall(r"\d+", (task / "children").read_text())))
    return found


def _measure_hooks(context: Context, work: _Work) -> None:
    """Report the p99 of a pass of lookups while the index is at work over that of a quiet moment.

    The server's threads are of low priority, since a real one does not take an engine's cores.
    """
    rounds = context.rounds(_ROUNDS)
    quiet_s = _QUIET_QUICK_S if context.quick else _QUIET_S
    for task in os.listdir(f"/proc/{work.server.pid}/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task), 19)
    with _node(work.corpus, context.scratch / "busy") as node:
        load(node, work.made)
        context.say(f"{rounds} rounds of hooks beside work on the index")
        cases: dict[str, Callable[[], None]] = {
            "quiet": lambda: time.sleep(quiet_s),
            "a snapshot is downloaded and opened": lambda: work.open_snapshot(node),
            "a union is made": work.make_union,
        }
        kept: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                kept[name].append(_p99_us(work.made, node, case))
    ratios = {name: measure.ratios(kept[name], kept["quiet"]) for name in cases if name != "quiet"}
    context.report_slowest(
        HOOKS,
        ratios,
        samples=rounds,
        note=f"p99 of a pass of {_LOOKUPS} lookups over a quiet one",
        detail={"p99_us": measure.medians(kept), "entries": work.made.entries},
    )


def _p99_us(made: Made, node: Node, case: Callable[[], None]) -> float:
    """99th percentile of a pass while a case runs in another thread of this process."""
    found = Keys(made.segment())
    keys = [*found.hits(_LOOKUPS // 2), *found.misses(_LOOKUPS // 2)]
    passes: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(case)
        while not running.done():
            contains = node.index.maybe_contains
            started = time.perf_counter_ns()
            for key in keys:
                contains(key)
            passes.append((time.perf_counter_ns() - started) / 1000)
            time.sleep(_PAUSE_S)
        running.result()
    return measure.percentile(passes, 99)


# -- how soon a save is found ----------------------------------------------------------------------

_SAVES, _SAVES_QUICK = 400, 20
_SAVING_S, _SAVING_S_QUICK = 60.0, 3.0
_READERS = 4
_LOOK_S = 0.005
# A save that nobody found for so long is lost, and the benchmark has failed.
_VISIBLE_TIMEOUT_S = 180.0
# Nobody's but this row's, so that no snapshot is there yet: as on a corpus's first day.
_VISIBLE_NAMESPACE = Namespace.from_descriptor({"model": "s3ec/bench-visible"})


def _measure_visibility(context: Context, corpus: Corpus) -> None:
    """Report the delay from a save's confirmation to a hit on another node; needs torch."""
    try:
        import torch
    except ImportError as exc:
        context.cannot(VISIBLE, f"no torch, and so no saves: {exc}")
        return
    from s3ec.connector.messages import Save
    from s3ec.connector.saves import SaveQueue

    count, seconds = (_SAVES_QUICK, _SAVING_S_QUICK) if context.quick else (_SAVES, _SAVING_S)
    source = random.Random(2)
    keys = {f"{source.getrandbits(256):064x}": source.uniform(0, seconds) for _ in range(count)}
    due = sorted(keys.items(), key=lambda one: one[1])
    stored: dict[str, float] = {}
    found: list[dict[str, float]] = [{} for _ in range(_READERS)]
    with ExitStack() as stack:
        producer, *readers = (
            stack.enter_context(_follower(corpus, context.scratch / f"visible-{number}"))
            for number in range(1 + _READERS)
        )
        saves = SaveQueue(producer, budget_bytes=2**28, overflow="block")
        stack.callback(saves.drain, 20)
        context.say(f"{count} saves in {seconds:.0f} s")
        started = time.monotonic()
        while any(len(one) < count for one in (stored, *found)):
            now = time.monotonic()
            if now > started + seconds + _VISIBLE_TIMEOUT_S:
                raise RuntimeError(f"stored {len(stored)}, found {[*map(len, found)]} of {count}")
            while due and now - started >= due[0][1]:
                saves.put(due.pop(0)[0], Save("image", {}), torch.ones(16, 64))
            stored.update(dict.fromkeys(saves.take_stored(), now))
            _look(readers, found, stored)
            time.sleep(_LOOK_S)
    delays = [one[name] - stored[name] for one in found for name in stored]
    context.report(
        VISIBLE,
        measure.percentile(delays, 99),
        samples=len(delays),
        detail={
            "spread": measure.spread(delays),
            "p50_s": statistics.median(delays),
            "saves": count,
            "readers": _READERS,
            "note": "from the bucket's confirmation to a hit on another node",
        },
    )


def _look(
    readers: Sequence[Node], found: Sequence[dict[str, float]], stored: dict[str, float]
) -> None:
    for node, at in zip(readers, found, strict=True):
        for name in stored.keys() - at.keys():
            if node.index.maybe_contains(key_of(name)):
                at[name] = time.monotonic()


@contextmanager
def _follower(corpus: Corpus, cache_dir: Path) -> Iterator[Node]:
    """A node that follows the bucket; each is started at another time, as engines are."""
    settings = _settings(corpus, cache_dir)
    node = Node(settings, _VISIBLE_NAMESPACE, name="s3ec-bench-visible")
    try:
        node.follow_the_bucket()
        time.sleep(settings.index_refresh_s / _READERS)
        yield node
    finally:
        node.close(10)

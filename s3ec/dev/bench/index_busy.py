# SPDX-License-Identifier: Apache-2.0
"""The index at work beside a scheduler: does a hook wait, and what does a listing cost?

Lookups are timed in a process that follows the bucket, as a scheduler is one. The server's threads
are of low priority, since a real server does not take the cores of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from s3ec.counters import Counters
from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child, wait_for_end
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.index_bucket import node_of, settings_of
from s3ec.dev.bench.index_made import LAYOUT, NAMESPACE, Keys, Made, load
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Reply, Rule
from s3ec.identity import OBJECT_SUFFIX
from s3ec.index import maker
from s3ec.index.child import Job, in_child
from s3ec.index.local import NodeFolder
from s3ec.index.names import Names, SnapshotName, claims_prefix, snapshots_prefix
from s3ec.node import Node
from s3ec.store.open import open_store
from s3ec.store.retry import RetryStore

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

HOOKS, LISTING = "index.hooks_p99_ratio", "index.listing_ratio_to_raw"
_ROUNDS = 3
_OBJECTS, _OBJECTS_QUICK = 1_000_000, 20_000
_LOOKUPS = 16  # a pass: some requests of some pictures
_PAUSE_S = 0.001
_QUIET_S, _QUIET_QUICK_S = 3.0, 0.5
# What this machine costs a lookup, whoever uses it: no part of the reach.
_CONTROL = "a process of low priority copies memory"
_FOLDERS = 256
_PAGE = 1000
_IN_FLIGHT = 16
_TIMEOUT_S = 600.0


def measure_busy(context: Context, server: LocalS3, corpus: Corpus, made: Made) -> None:
    """Report both rows. The bucket holds the snapshot, and deltas that make a union due."""
    objects = _OBJECTS_QUICK if context.quick else _OBJECTS
    rounds = context.rounds(_ROUNDS)
    with _lister(corpus, objects) as listed, node_of(corpus, context.scratch / "busy") as node:
        _measure_listing(context, listed, objects)
        load(node, made)
        with _of_low_priority(server.pid):
            context.say(f"{rounds} rounds of hooks beside work on the index")
            _measure_hooks(context, _Work(server, corpus, listed, made, node), rounds)


def _measure_hooks(context: Context, work: _Work, rounds: int) -> None:
    quiet_s = _QUIET_QUICK_S if context.quick else _QUIET_S
    cases: dict[str, Callable[[], None]] = {
        "quiet": lambda: time.sleep(quiet_s),
        "a snapshot is downloaded and opened": work.open_snapshot,
        "a union is made": work.make_union,
        "a listing is made": work.make_listing,
        _CONTROL: lambda: _copy_memory(quiet_s),
    }
    kept: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            kept[name].append(_p99_us(work, case))
    ratios = {name: measure.ratios(kept[name], kept["quiet"]) for name in cases if name != "quiet"}
    control = ratios.pop(_CONTROL)
    slowest = max(ratios, key=lambda name: statistics.median(ratios[name]))
    context.report(
        HOOKS,
        statistics.median(ratios[slowest]),
        samples=rounds,
        detail={
            "spread": measure.spread(ratios[slowest]),
            "cases": {name: statistics.median(found) for name, found in ratios.items()},
            _CONTROL: statistics.median(control),
            "p99_us": measure.medians(kept),
            "lookups": _LOOKUPS,
            "entries": work.made.entries,
            "note": f"p99 of a pass of {_LOOKUPS} lookups over a quiet one; the slowest: {slowest}",
        },
    )


def _p99_us(work: _Work, case: Callable[[], None]) -> float:
    """99th percentile of a pass while a case runs in another thread of this process."""
    passes: list[float] = []
    running = work.node.loop.submit(asyncio.to_thread(case))
    while not running.done():
        contains = work.node.index.maybe_contains
        started = time.perf_counter_ns()
        for key in work.keys:
            contains(key)
        passes.append((time.perf_counter_ns() - started) / 1000)
        time.sleep(_PAUSE_S)
    running.result()
    return measure.percentile(passes, 99)


def _copy_memory(seconds: float) -> None:
    with Child(_copy, seconds) as child:
        child.answer()


def _copy(pipe: Connection, seconds: float) -> None:
    """A child's whole life."""
    os.nice(19)
    block = bytearray(2**26)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        bytes(block)
    pipe.send("done")


@dataclass
class _Work:
    """What makes the index busy, again and again, from any thread."""

    server: LocalS3
    corpus: Corpus
    listed: Corpus
    made: Made
    node: Node

    def __post_init__(self) -> None:
        found = Keys(self.made.segment())
        self.keys = [*found.hits(_LOOKUPS // 2), *found.misses(_LOOKUPS // 2)]
        self._names = Names()
        self._client = self.server.client()

    def open_snapshot(self) -> None:
        """Have the node find a copy of its snapshot under a new name."""
        ulid = self._names.next(time.time())
        name = f"{snapshots_prefix(LAYOUT)}{SnapshotName(self.made.name.listed, ulid)}"
        source = {"Bucket": self.corpus.bucket, "Key": self.made.object_name}
        self._client.copy_object(Bucket=self.corpus.bucket, Key=name, CopySource=source)
        refresh = self.node.index.refresh(now=True)
        self.node.loop.run(refresh, timeout_s=_TIMEOUT_S)
        self._delete(name)
        if self.node.index.counts().snapshot.ulid != ulid:
            raise RuntimeError("the new snapshot was not opened")

    def make_union(self) -> None:
        """Have a child make one, as an engine does."""
        self._make(self.corpus, Job("union", NAMESPACE.name, str(self._folder("union").path)))

    def make_listing(self) -> None:
        """Have a child make one of the made-up objects."""
        folder = str(self._folder("listing").path)
        self._make(self.listed, Job("listing", NAMESPACE.name, folder, older_s=0.0))

    def _folder(self, kind: str) -> NodeFolder:
        return NodeFolder(self.made.cache_dir.with_name(f"busy-{kind}"))

    def _make(self, corpus: Corpus, job: Job) -> None:
        # A union of what this node has already, as an engine's is.
        folder = NodeFolder(Path(job.folder))
        folder.make()
        for path in (self.made.folder.rows_path, self.made.folder.filter_path):
            with contextlib.suppress(FileExistsError):
                os.link(path(self.made.name), folder.path / path(self.made.name).name)
        name = asyncio.run(_run(corpus, folder.path, job))
        if not name:
            raise RuntimeError(f"no {job.kind} was made")
        self._delete(f"{snapshots_prefix(LAYOUT)}{name}")
        found = self._client.list_objects_v2(
            Bucket=corpus.bucket, Prefix=claims_prefix(LAYOUT)
        ).get("Contents", [])
        self._delete(*(each["Key"] for each in found))

    def _delete(self, *names: str) -> None:
        for name in names:
            self._client.delete_object(Bucket=self.corpus.bucket, Key=name)


async def _run(corpus: Corpus, cache_dir: Path, job: Job) -> str:
    return await in_child(settings_of(corpus, cache_dir))(job)


@contextlib.contextmanager
def _of_low_priority(pid: int | None) -> Iterator[None]:
    """Let a server's threads run where nobody else wants to; they stay so."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task), 19)
    yield


# -- listings ----------------------------------------------------------------------------------


def _measure_listing(context: Context, listed: Corpus, objects: int) -> None:
    """Report a snapshot by listing over a listing that keeps nothing."""
    rounds = context.rounds(3)
    context.say(f"{rounds} rounds of listing {objects} objects")
    folder = context.scratch / "listing"
    folder.mkdir()
    cases = {
        "a snapshot by listing": lambda: asyncio.run(_rebuild(listed, folder)),
        "a raw listing": lambda: asyncio.run(_list_all(listed, folder, objects)),
    }
    kept = measure.interleave(
        {name: measure.timed(case) for name, case in cases.items()}, rounds=rounds
    )
    found = measure.ratios(*kept.values())
    context.report(
        LISTING,
        statistics.median(found),
        samples=rounds,
        detail={
            "spread": measure.spread(found),
            "seconds": measure.medians(kept),
            "objects": objects,
            "note": "made-up names; the same transport and as many requests at a time",
        },
    )


async def _rebuild(corpus: Corpus, folder: Path) -> None:
    store = RetryStore(open_store(settings_of(corpus, folder)), Counters())
    try:
        made = await maker.rebuild(store, LAYOUT, folder=folder)
        await store.delete(f"{snapshots_prefix(LAYOUT)}{made.name}")
    finally:
        await store.close()


async def _list_all(corpus: Corpus, folder: Path, objects: int) -> None:
    store = open_store(settings_of(corpus, folder))
    folders = iter(range(_FOLDERS))
    found = 0

    async def some() -> None:
        nonlocal found
        for number in folders:
            async for _ in store.list(f"{LAYOUT.objects}{number:02x}/"):
                found += 1

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_FLIGHT):
                group.create_task(some())
    finally:
        await store.close()
    if found != objects // _FOLDERS * _FOLDERS:
        raise RuntimeError(f"{found} of {objects} objects were listed")


@contextlib.contextmanager
def _lister(corpus: Corpus, objects: int) -> Iterator[Corpus]:
    """The bucket as one in which many made-up objects are listed; everything else is real."""
    with Child(_serve_listings, corpus.endpoint_url, objects) as child:
        yield replace(corpus, endpoint_url=child.answer())


def _serve_listings(pipe: Connection, upstream_url: str, objects: int) -> None:
    """A child's whole life."""
    with FaultProxy(upstream_url) as proxy:
        proxy.add(Rule(_Listings(objects), "GET", "list-type=2"))
        pipe.send(proxy.url)
        wait_for_end(pipe)


class _Listings:
    """Answers listings below ``objects/``, whose names are made up from their numbers."""

    def __init__(self, objects: int) -> None:
        self._each = objects // _FOLDERS  # in each folder

    async def apply(self, exchange: Exchange) -> None:
        query = parse_qs(urlsplit(exchange.request.target).query)
        asked = {name: values[0] for name, values in query.items()}
        prefix = asked.get("prefix", "")
        below = prefix.partition(LAYOUT.objects)[2]
        if LAYOUT.objects not in prefix:
            await exchange.send(await exchange.forward())
            return
        after = asked.get("continuation-token") or asked.get("start-after", "")
        first, end = 0, self._each * _FOLDERS
        if below:
            first = int(below.rstrip("/"), 16) * self._each
            end = first + self._each
        if after.endswith(OBJECT_SUFFIX):
            first = self._number(after) + 1
        parts = [f"<Name>b</Name><Prefix>{escape(prefix)}</Prefix>"]
        root = prefix[: len(prefix) - len(below)]
        if "delimiter" in asked:
            parts += [
                f"<CommonPrefixes><Prefix>{root}{number:02x}/</Prefix></CommonPrefixes>"
                for number in range(_FOLDERS)
            ]
            first = end
        names = [root + self._name(number) for number in range(first, min(first + _PAGE, end))]
        parts += [
            f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            '<ETag>"0"</ETag><Size>2752960</Size><StorageClass>STANDARD</StorageClass></Contents>'
            for name in names
        ]
        if first + _PAGE < end:
            parts.append(
                "<IsTruncated>true</IsTruncated>"
                f"<NextContinuationToken>{names[-1]}</NextContinuationToken>"
            )
        else:
            parts.append("<IsTruncated>false</IsTruncated>")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{''.join(parts)}</ListBucketResult>"
        )
        await exchange.send(Reply(200, {"content-type": "application/xml"}, body.encode()))

    def _name(self, number: int) -> str:
        folder, place = divmod(number, self._each)
        return f"{folder:02x}/{folder:02x}{place:062x}{OBJECT_SUFFIX}"

    def _number(self, name: str) -> int:
        digits = name.removesuffix(OBJECT_SUFFIX)[-64:]
        return int(digits[:2], 16) * self._each + int(digits[2:], 16)

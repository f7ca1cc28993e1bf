# SPDX-License-Identifier: Apache-2.0
"""``bench soak``: real engines answer questions about pictures while everything else fails.

Two engines share a cache folder and, behind a proxy that misbehaves, a bucket: one saves and
loads (``ec_both``) and is killed now and then, the other one only loads. Faults come in an order
that a seed gives. Every answer is compared with that of an engine without the connector. At the end
each entry whose storing was confirmed is read.
"""

from __future__ import annotations

import contextlib
import re
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS, STEADY

if TYPE_CHECKING:
    from s3ec.codec import Header
    from s3ec.dev.bench.soak_engine import LiveEngine
    from s3ec.dev.bench.soak_run import Cast, Site, Story
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.identity import Key

WRONG, DEAD, LOST = "soak.wrong_answers", "soak.dead_engines", "soak.lost_entries"
MEMORY, FAULTS, NOT_BACK = "soak.memory_growth", "soak.faults", "soak.hits_not_back"
REQUESTS, HITS = "soak.requests", "soak.hits"
ROWS = (
    Spec(WRONG, "1", "<= 0"),
    Spec(DEAD, "1", "<= 0"),
    Spec(LOST, "1", "<= 0"),
    Spec(MEMORY, "%", "< 1"),
    Spec(NOT_BACK, "1", "<= 0"),
    Spec(FAULTS, "1"),
    Spec(REQUESTS, "1"),
    Spec(HITS, "1"),
)

_BUCKET = "soak"
# Half of them have answers that can be compared.
_PICTURES, _PICTURES_PER_MINUTE = 192, 30
_CACHE = "512KiB"  # about fifty embeddings: fewer than are asked about, so the tier evicts
_DISK_BYTES = 24 * 2**20
# Of the eight embeddings that the device's encoder cache holds there are always more in flight.


def run(context: Context, minutes: float = 60.0, seed: int = 0) -> None:
    """Measure; needs the SeaweedFS binary and vLLM. Ends early, with a report, on Ctrl-C.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or it was ended before it began.
    """
    from s3ec.dev.bench.soak_run import Plot, soak

    scale = 1.0
    if context.quick:
        minutes, scale = min(minutes, 1.0), 0.5
    with stopped_by_signals() as stop, _cast(context, minutes, seed, stop) as cast:
        story = soak(cast, Plot(minutes, seed, scale), stop=stop, say=context.say)
        _report_answers(context, story)
        _report_memory(context, story)
        _report_faults(context, story)
        context.say("reading every confirmed entry")
        _report_entries(context, cast.site, cast.engines[0].log)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Set at the first SIGINT or SIGTERM; a second one acts as always."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def note(_number: int, _frame: object) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _cast(context: Context, minutes: float, seed: int, stop: threading.Event) -> Iterator[Cast]:
    """Everything that a soak needs, running; the engine that saves is the first one."""
    from s3ec.dev.bench.soak_engine import LiveEngine, PictureSet, references
    from s3ec.dev.bench.soak_run import Cast, Site
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import FaultProxy

    scratch = context.scratch
    with contextlib.ExitStack() as stack:
        context.say("starting the server and writing pictures")
        server = stack.enter_context(engines.local_server(_BUCKET))
        model = write_gemma3(scratch / "model")
        proxy = stack.enter_context(FaultProxy(server.endpoint_url))
        disk = stack.enter_context(_small_disk(scratch / "disk"))
        count = _PICTURES + round(_PICTURES_PER_MINUTE * minutes)
        paths = engines.write_patterns(scratch / "pictures", count, seed)
        site = Site(server, proxy, _BUCKET, (disk or scratch) / "tier", disk)
        context.say("starting three engines")
        nursery = stack.enter_context(EngineForkServer(scratch / "nursery.log", STEADY))
        settings = {
            "bucket": _BUCKET,
            "endpoint_url": proxy.url,
            "cache_dir": str(site.tier),
            "cache_bytes": _CACHE,
            "min_free_bytes": 0,
            "index_refresh_s": 2.0,
            "wait": "always",  # the tiny model's encoder is faster than a fetch
        }

        def engine(name: str, role: str | None, env: dict[str, str], **more: str) -> EngineProcess:
            path = {"ec_connector_module_path": "s3ec.connector"}
            made = EngineProcess(
                model,
                ec=None if role is None else ec_config(role, settings | more, **path),
                log_path=scratch / f"{name}.log",
                media=scratch,
                env=server.env() | env,
                options=NEW_PICTURES,
                nursery=nursery,  # one that is killed is back sooner
            )
            stack.callback(made.stop, 5)
            return made

        # Scheduler and worker in one process, as with one GPU; and in processes of their own, which
        # take three times as long to start.
        saver = engine("saver", "ec_both", ONE_PROCESS, log_level="DEBUG")
        reader = engine("reader", "ec_consumer", ONE_PROCESS if context.quick else STEADY)
        plain = engine("reference", None, ONE_PROCESS)
        with ThreadPoolExecutor(2) as pool:
            starting = [pool.submit(one.start) for one in (saver, reader)]
            with plain:
                reference = references(plain, paths, stop=stop.is_set)
            for one in starting:
                one.result()
        if stop.is_set():
            raise CannotMeasureError("it was ended before it began")
        album = PictureSet(list(reference))
        live = [
            LiveEngine(name, one, album=album, reference=reference, seed=seed)
            for name, one in (("saver", saver), ("reader", reader))
        ]
        for one_live in live:
            stack.callback(one_live.stop)
        site.kill_engine = live[0].killed
        yield Cast(site, live, album)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A small file system of its own, so that a disk can be full; None without the right."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


# -- the rows --------------------------------------------------------------------------------------

# Of a series over the whole time.
_POINTS = 240


def _report_answers(context: Context, story: Story) -> None:
    tallies = {engine.name: engine.tally for engine in story.engines}
    asked = sum(tally.requests for tally in tallies.values())
    exact = sum(tally.exact for tally in tallies.values())
    context.report(
        WRONG,
        sum(tally.wrong for tally in tallies.values()),
        samples=asked,
        detail={
            "note": f"{exact} equal to the last bit",
            "examples": [example for tally in tallies.values() for example in tally.examples],
        },
    )
    context.report(
        DEAD,
        sum(tally.dead for tally in tallies.values()),
        samples=sum(engine.life for engine in story.engines),
        detail={
            "note": f"{sum(tally.killed for tally in tallies.values())} killed on purpose",
            "deaths": [death for tally in tallies.values() for death in tally.deaths],
            "errors": {engine.name: engine.errors() for engine in story.engines},
        },
    )
    context.report(
        REQUESTS,
        asked,
        samples=asked,
        detail={
            "note": f"in {story.seconds / 60:.1f} minutes, seed {story.plot.seed}",
            "cases": {name: tally.requests for name, tally in tallies.items()},
            "slowest_batch_s": {name: tally.slowest_s for name, tally in tallies.items()},
            "minutes": story.seconds / 60,
            "seed": story.plot.seed,
        },
    )
    counters = {name: dict(tally.counters) for name, tally in tallies.items()}
    hits = {name: moved.get("vllm:s3ec_hits", 0.0) for name, moved in counters.items()}
    context.report(
        HITS,
        sum(hits.values()),
        samples=asked,
        detail={
            "cases": hits,
            "counters": counters,
            "series": {engine.name: _hits(engine, story) for engine in story.engines},
        },
    )


def _hits(engine: LiveEngine, story: Story) -> list[list[float]]:
    """Minute and hits per second, in even parts of the time."""
    part_s = max(story.seconds / _POINTS, 2.0)
    sums: Counter[int] = Counter()
    for moment in engine.tally.moments:
        sums[int((moment.ended_s - story.began_s) / part_s)] += int(moment.hits)
    last = int(story.seconds / part_s)
    return [[part * part_s / 60, sums[part] / part_s] for part in range(last + 1)]


def _report_memory(context: Context, story: Story) -> None:
    from s3ec.dev.bench.soak_engine import growths

    # Engine and life -> minute, MB, descriptors, threads; thinned out.
    lives: dict[str, list[list[float]]] = {}
    for sample in story.samples:
        lives.setdefault(f"{sample.engine} {sample.life}", []).append(
            [
                (sample.at_s - story.began_s) / 60,
                sample.anon_bytes / 1e6,
                sample.fds,
                sample.threads,
            ]
        )
    series = {name: points[:: len(points) // _POINTS + 1] for name, points in lives.items()}
    by_length = sorted(growths(story.samples), key=lambda growth: growth.minutes)
    longest = {growth.engine: growth for growth in by_length}
    if not longest:
        why = "no engine lived long enough to tell growth from warm-up"
        context.cannot(MEMORY, why, series=series)
        return
    worst = max(longest.values(), key=lambda growth: growth.share)
    context.report(
        MEMORY,
        worst.share * 100,
        samples=sum(growth.samples for growth in longest.values()),
        detail={
            "note": "median of the last fifth of a life over that of the second; the worst engine",
            "cases": {name: growth.share * 100 for name, growth in longest.items()},
            "lives": [asdict(growth) for growth in longest.values()],
            "series": series,
        },
    )


def _report_faults(context: Context, story: Story) -> None:
    blows = story.blows
    kinds = Counter(kind for blow in blows for kind in blow.struck)
    struck: Counter[str] = Counter()
    for blow in blows:
        struck.update(blow.struck)
    context.report(
        FAULTS,
        sum(kinds.values()),
        samples=len(blows),
        detail={
            "note": f"{len(kinds)} kinds; {sum(n > 0 for n in struck.values())} struck something",
            "cases": dict(sorted(kinds.items())),
            "struck": dict(sorted(struck.items())),
            "steps": [
                [blow.began_s / 60, blow.ended_s / 60, " and ".join(blow.step.kinds), blow.back_s]
                for blow in blows
            ],
        },
    )
    back = [blow.back_s for blow in blows if blow.back_s is not None]
    # Nobody waited after the last one where the soak was ended early.
    waited = blows if story.seconds >= story.plot.minutes * 60 else blows[:-1]
    late = [" and ".join(blow.step.kinds) for blow in waited if blow.back_s is None]
    note = "no hit came back"
    if back:
        note = f"hits from the bucket again after {statistics.median(back):.1f} s (median)"
    context.report(
        NOT_BACK,
        len(late),
        samples=len(blows),
        detail={"note": note, "after": late, "seconds": measure.spread(back) if back else {}},
    )


# -- what became of the entries --------------------------------------------------------------------

_STORED = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d).*? stored digest=([0-9a-f]{32})")
_OBJECTS = "/objects/"
# The log's clock has whole seconds, and a line may come a little after the reply.
_DOUBT_S = 5.0
_READ_TIMEOUT_S = 300.0


def _report_entries(context: Context, site: Site, log: str) -> None:
    """List the bucket, and read every confirmed entry of it through an empty tier.

    Left out are those that a fault deleted after (or around) their last confirmation.
    """
    confirmed = confirmations(log)
    gone = {_digest(key): when for key, when in site.deleted.items()}
    wanted = [d for d, when in confirmed.items() if gone.get(d, 0.0) < when - _DOUBT_S]
    client = site.server.client()
    there = {
        _digest(entry["Key"]): entry["Key"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=site.bucket)
        for entry in page.get("Contents", [])
        if _OBJECTS in entry["Key"]
    }
    missing = {digest: "not listed" for digest in wanted if digest not in there}
    found: list[tuple[Key, Header]] = []
    for digest in set(wanted) & set(there):
        entry_or_why = _read(client, site.bucket, there[digest])
        if isinstance(entry_or_why, str):
            missing[digest] = entry_or_why
        else:
            found.append(entry_or_why)
    if found:
        missing |= _through_a_tier(site, found, context.scratch / "empty-tier")
    deleted = len(confirmed) - len(wanted)
    context.report(
        LOST,
        len(missing),
        samples=len(wanted),
        detail={
            "note": f"of {len(confirmed)} confirmed, {deleted} deleted by a fault",
            "missing": dict(list(missing.items())[:20]),
        },
    )


def confirmations(log: str) -> dict[str, float]:
    """Digest of each entry that a saver's log (level DEBUG) calls stored -> when at last."""
    year = time.localtime().tm_year
    found = {}
    for when, digest in _STORED.findall(log):
        moment = time.strptime(f"{year}-{when}", "%Y-%m-%d %H:%M:%S")
        found[digest] = time.mktime(moment)
    return found


def _digest(name: str) -> str:
    """Of the entry that an object belongs to; empty if to none."""
    from s3ec.identity import digest_of_name, is_object_name

    below = name.partition(_OBJECTS)[2]
    return digest_of_name(below).hex() if is_object_name(below) else ""


def _read(client: Any, bucket: str, name: str) -> tuple[Key, Header] | str:
    """An entry's key and header if its object is whole; else what is wrong with it."""
    from s3ec import codec
    from s3ec.errors import CorruptEntryError
    from s3ec.identity import make_key

    blob = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    try:
        front = codec.parse_header(blob)
        header = codec.verify(blob, namespace=front.namespace, identifier=front.identifier)
    except CorruptEntryError as exc:
        return str(exc)
    key = make_key(header.identifier)
    if key is None or key.digest.hex() != _digest(name):
        return "another entry's object"
    return key, header


def _through_a_tier(
    site: Site, entries: list[tuple[Key, Header]], cache_dir: Path
) -> Mapping[str, str]:
    """Digest -> outcome, of those that a fresh node cannot have."""
    from s3ec.config import load_settings
    from s3ec.identity import Namespace
    from s3ec.node import Node
    from s3ec.prefetch import FetchOutcome, FetchRequest

    extra = {
        "bucket": site.bucket,
        "endpoint_url": site.server.endpoint_url,
        "cache_dir": str(cache_dir),
        "min_free_bytes": 0,
        # A busy machine loses no entry.
        "connect_timeout_s": 10,
        "read_timeout_s": 60,
        "defer_timeout_s": 60,
    }
    left = {key.digest.hex(): "did not come" for key, _ in entries}
    node = Node(load_settings(extra).settings, Namespace(entries[0][1].namespace, {}))
    try:
        deadline = time.monotonic() + _READ_TIMEOUT_S
        node.prefetcher.submit(
            [FetchRequest(key, header.modality, header.shape.rows) for key, header in entries]
        )
        while "did not come" in left.values() and time.monotonic() < deadline:
            for fetched in node.prefetcher.drain():
                digest = fetched.want.key.digest.hex()
                if fetched.outcome is FetchOutcome.READY and fetched.entry is not None:
                    del left[digest]
                else:
                    left[digest] = fetched.outcome.name.lower()
            time.sleep(0.01)
    finally:
        node.close(10)
    return left


BENCH = Bench(ROWS, run)

# SPDX-License-Identifier: Apache-2.0
"""``bench soak``: real engines answer questions about pictures while everything else fails.

Two engines share a cache folder and, behind a proxy that misbehaves, a bucket: one saves and
loads (``ec_both``) and is killed now and then, the other one only loads. Faults come in an order
that a seed gives. Every answer is compared with that of an engine without the connector. At the end
each entry whose storing was confirmed is read.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from s3ec import codec
from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, Context, Spec
from s3ec.dev.bench.soak_engine import (
    LiveEngine,
    PictureSet,
    Sample,
    growths,
    references,
    sample,
)
from s3ec.dev.bench.soak_faults import DISK_FULL, FAULTS, OBJECTS, Site, Step, plan
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS, STEADY
from s3ec.errors import CorruptEntryError
from s3ec.identity import digest_of_name, is_object_name, make_key

WRONG, DEAD, LOST = "soak.wrong_answers", "soak.dead_engines", "soak.lost_entries"
MEMORY, FAULTS_ROW, NOT_BACK = "soak.memory_growth", "soak.faults", "soak.hits_not_back"
REQUESTS, HITS = "soak.requests", "soak.hits"
ROWS = (
    Spec(WRONG, "1", "<= 0"),
    Spec(DEAD, "1", "<= 0"),
    Spec(LOST, "1", "<= 0"),
    Spec(MEMORY, "%", "< 1"),
    Spec(NOT_BACK, "1", "<= 0"),
    Spec(FAULTS_ROW, "1"),
    Spec(REQUESTS, "1"),
    Spec(HITS, "1"),
)

_BUCKET = "soak"
# Half of them have answers that can be compared.
_PICTURES, _PICTURES_PER_MINUTE = 192, 30
_CACHE = "512KiB"  # about fifty embeddings: fewer than are asked about, so the tier evicts
_DISK_BYTES = 24 * 2**20


def run(
    context: Context,
    minutes: float = 60.0,
    seed: int = 0,
    nursery: EngineForkServer | None = None,
) -> None:
    """Measure; needs the SeaweedFS binary and vLLM.

    Args:
        context: Where rows go.
        minutes: Of faults.
        seed: Gives their order.
        nursery: Forks the engines; None for one of its own.
    """
    scale = 1.0
    if context.quick:
        minutes, scale = min(minutes, 1.0), 0.5
    with contextlib.ExitStack() as stack:
        if nursery is None:
            log = context.scratch / "nursery.log"
            nursery = stack.enter_context(EngineForkServer(log, STEADY))
        site, live, album = stack.enter_context(_site(context, minutes, seed, nursery))
        soak = Soak(site, live, album, minutes, seed, scale, context.say)
        soak.run()
        _report_answers(context, soak)
        _report_memory(context, soak)
        _report_faults(context, soak)
        context.say("reading every confirmed entry")
        _report_entries(context, site, live[0].log)


@contextlib.contextmanager
def _site(
    context: Context, minutes: float, seed: int, nursery: EngineForkServer
) -> Iterator[tuple[Site, Sequence[LiveEngine], PictureSet]]:
    """Everything that a soak needs, running; the engine that saves is the first one."""
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
                reference = references(plain, paths)
            for one in starting:
                one.result()
        album = PictureSet(list(reference))
        live = [
            LiveEngine(name, one, album=album, reference=reference, seed=seed)
            for name, one in (("saver", saver), ("reader", reader))
        ]
        for one_live in live:
            stack.callback(one_live.stop)
        site.kill_engine = live[0].killed
        yield site, live, album


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


# -- what happens ----------------------------------------------------------------------------------

# How soon after a fault embeddings must come from the bucket again: longer than the longest
# pause of a breaker, and than an engine takes for what it was asked before.
_BACK_S = 75.0
_LOOK_S = 0.25
_SAMPLE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Blow:
    """One step that was carried out.

    Attributes:
        step: What was planned.
        began_s: Seconds since the soak began.
        ended_s: The same.
        struck: Kind of fault -> how often it hit something.
        back_s: How long after its end every engine had embeddings from the bucket again; None
            where one had none in time.
    """

    step: Step
    began_s: float
    ended_s: float
    struck: dict[str, int]
    back_s: float | None


@dataclass
class Soak:
    """What takes part, what is to happen, and what happened.

    Attributes:
        site: What is damaged.
        engines: They run; nobody asks them yet. The first one saves.
        album: What they are asked about.
        minutes: Of faults; engines start and end outside of them.
        seed: Gives the order of faults, their lengths, and the pictures.
        scale: Of the lengths.
        say: Shows progress.
        seconds: How long it was.
    """

    site: Site
    engines: Sequence[LiveEngine]
    album: PictureSet
    minutes: float
    seed: int
    scale: float
    say: Callable[[str], None]
    seconds: float = 0.0
    blows: list[Blow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _began_s: float = 0.0
    _sampled_s: float = 0.0
    _kinds: tuple[str, ...] = ()

    def run(self) -> None:
        """Let it happen; then the engines have ended in order and every fault is over."""
        self._began_s = time.monotonic()
        for engine in self.engines:
            engine.start(lambda: " and ".join(self._kinds) or "no fault")
        self._until_back(self._began_s)  # there must be something to lose
        self._began_s = time.monotonic()  # the minutes are those of faults
        kinds = [kind for kind in FAULTS if self.site.disk is not None or kind != DISK_FULL]
        for step in plan(self.seed, kinds, scale=self.scale):
            if self._is_over():
                break
            kinds_now = " and ".join(step.kinds)
            self.say(f"{self.seconds / 60:.0f} of {self.minutes:g} minutes: {kinds_now}")
            self.blows.append(self._carry_out(step))
            self._pass_time(step.pause_s)
            self.site.proxy.requests.clear()  # they would be most of this process's memory
        self.say("ending the engines")
        for engine in self.engines:
            engine.stop()

    def _is_over(self) -> bool:
        self.seconds = time.monotonic() - self._began_s
        for engine in self.engines:
            if engine.failure is not None:
                raise engine.failure
        is_late = self.seconds >= self.minutes * 60
        return is_late or any(engine.gave_up for engine in self.engines)

    def _carry_out(self, step: Step) -> Blow:
        source = random.Random(step.seed)
        began = time.monotonic()
        # What is damaged in the bucket is mended once the server is up again.
        order = sorted(step.kinds, key=list(FAULTS).index, reverse=True)
        with contextlib.ExitStack() as faults:
            struck = {kind: faults.enter_context(FAULTS[kind](self.site, source)) for kind in order}
            self._kinds = step.kinds
            self._pass_time(step.duration_s)
            hits = {
                kind: found if isinstance(found, int) else found.fired
                for kind, found in struck.items()
            }
        self._kinds = ()
        ended = time.monotonic()
        back_s = self._until_back(ended)
        return Blow(step, began - self._began_s, ended - self._began_s, hits, back_s)

    def _pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            time.sleep(_LOOK_S)
            self.album.share = (now - self._began_s) / (self.minutes * 60)
            for engine in self.engines:
                engine.unstick()
            if now >= self._sampled_s + _SAMPLE_EVERY_S:
                self._sampled_s = now
                self.samples += filter(None, map(sample, self.engines))

    def _until_back(self, since: float) -> float | None:
        """Seconds until every engine was asked anew and got something from the bucket."""
        while time.monotonic() < since + _BACK_S:
            ends = [engine.first_fetch_after(since) for engine in self.engines]
            found = [end for end in ends if end is not None]
            if len(found) == len(ends):
                return max(found) - since
            if any(engine.gave_up or engine.failure for engine in self.engines):
                return None
            self._pass_time(_LOOK_S)
        return None


# -- the rows --------------------------------------------------------------------------------------


def _report_answers(context: Context, soak: Soak) -> None:
    tallies = {engine.name: engine.tally for engine in soak.engines}
    asked = sum(tally.requests for tally in tallies.values())
    context.report(
        WRONG,
        sum(tally.wrong for tally in tallies.values()),
        samples=asked,
        detail={
            "examples": [example for tally in tallies.values() for example in tally.examples],
        },
    )
    context.report(
        DEAD,
        sum(tally.dead for tally in tallies.values()),
        samples=sum(engine.life for engine in soak.engines),
        detail={
            "note": f"{sum(tally.killed for tally in tallies.values())} killed on purpose",
            "deaths": [death for tally in tallies.values() for death in tally.deaths],
            "errors": {engine.name: engine.errors() for engine in soak.engines},
        },
    )
    context.report(
        REQUESTS,
        asked,
        samples=asked,
        detail={
            "note": f"in {soak.seconds / 60:.1f} minutes, seed {soak.seed}",
            "cases": {name: tally.requests for name, tally in tallies.items()},
            "minutes": soak.seconds / 60,
            "seed": soak.seed,
        },
    )
    counters = {name: dict(tally.counters) for name, tally in tallies.items()}
    hits = {name: moved.get("vllm:s3ec_hits", 0.0) for name, moved in counters.items()}
    detail = {"cases": hits, "counters": counters}
    context.report(HITS, sum(hits.values()), samples=asked, detail=detail)


def _report_memory(context: Context, soak: Soak) -> None:
    found = growths(soak.samples)
    if not found:
        context.cannot(MEMORY, "no engine lived long enough to tell growth from warm-up")
        return
    context.report(
        MEMORY,
        max(found.values()) * 100,
        samples=len(soak.samples),
        detail={
            "note": "median of the last fifth of a life over that of the second; the worst engine",
            "cases": {name: share * 100 for name, share in found.items()},
        },
    )


def _report_faults(context: Context, soak: Soak) -> None:
    blows = soak.blows
    kinds = Counter(kind for blow in blows for kind in blow.struck)
    struck: Counter[str] = Counter()
    for blow in blows:
        struck.update(blow.struck)
    context.report(
        FAULTS_ROW,
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
    late = [" and ".join(blow.step.kinds) for blow in blows if blow.back_s is None]
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
# The log's clock has whole seconds, and a line may come a little after the reply.
_DOUBT_S = 5.0


def _report_entries(context: Context, site: Site, log: str) -> None:
    """Read and verify every confirmed entry of the bucket.

    Left out are those that a fault deleted after (or around) their last confirmation.
    """
    confirmed = confirmations(log)
    gone = {_digest(key): when for key, when in site.deleted.items()}
    wanted = [d for d, when in confirmed.items() if gone.get(d, 0.0) < when - _DOUBT_S]
    client = site.server.client()
    there = {_digest(key): key for key in site.objects(client)}
    missing = {}
    for digest in wanted:
        why = "not listed"
        if digest in there:
            blob = client.get_object(Bucket=site.bucket, Key=there[digest])["Body"].read()
            why = _fault_of(digest, blob)
        if why:
            missing[digest] = why
    context.report(
        LOST,
        len(missing),
        samples=len(wanted),
        detail={
            "note": f"of {len(confirmed)} confirmed, {len(confirmed) - len(wanted)} deleted by a "
            "fault",
            "missing": dict(list(missing.items())[:20]),
        },
    )


def confirmations(log: str) -> dict[str, float]:
    """Digest of each entry that a saver's log (level DEBUG) calls stored -> when at last."""
    year = time.localtime().tm_year
    return {
        digest: time.mktime(time.strptime(f"{year}-{when}", "%Y-%m-%d %H:%M:%S"))
        for when, digest in _STORED.findall(log)
    }


def _digest(name: str) -> str:
    """Of the entry that an object belongs to; empty if to none."""
    below = name.partition(OBJECTS)[2]
    return digest_of_name(below).hex() if is_object_name(below) else ""


def _fault_of(digest: str, blob: bytes) -> str:
    """What is wrong with an entry's object; empty if nothing is."""
    try:
        front = codec.parse_header(blob)
        codec.verify(blob, namespace=front.namespace, identifier=front.identifier)
    except CorruptEntryError as exc:
        return str(exc)
    key = make_key(front.identifier)
    return "" if key and key.digest.hex() == digest else "another entry's object"


BENCH = Bench(ROWS, run)

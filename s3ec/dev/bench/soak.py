# SPDX-License-Identifier: Apache-2.0
"""``bench soak``: real engines answer questions about pictures while everything else fails.

Two engines share a cache folder and, behind a proxy that misbehaves, a bucket: one saves and
loads (``ec_both``) and is killed now and then, the other one only loads. Faults come in an order
that a seed gives. Every answer is compared with that of an engine without the connector.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS, STEADY

if TYPE_CHECKING:
    from s3ec.dev.bench.soak_engine import Answer
    from s3ec.dev.bench.soak_run import Cast
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.testing.server import LocalS3


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
    from s3ec.dev.bench.soak_report import report
    from s3ec.dev.bench.soak_run import Plot, soak

    scale = 1.0
    if context.quick:
        minutes, scale = min(minutes, 1.0), 0.5
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        scene = stack.enter_context(_scene(context, minutes, seed, stop))
        plot = Plot(minutes, seed, scale)
        story = soak(scene.cast, plot, stop=stop, say=context.say)
        report(context, story, scene.cast.site, scene.saver_log(), context.scratch / "empty-tier")


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


@dataclass
class _Scene:
    """Everything that a soak needs, running."""

    cast: Cast
    saver_log: Callable[[], str]


@contextlib.contextmanager
def _scene(context: Context, minutes: float, seed: int, stop: threading.Event) -> Iterator[_Scene]:
    from s3ec.dev.bench.soak_engine import LiveEngine, PictureSet
    from s3ec.dev.bench.soak_run import Cast, Site
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
        trio = _Trio(context, model, server, proxy.url, site.tier, nursery)
        reference = _start(trio, paths, stop, stack)
        if stop.is_set():
            raise CannotMeasureError("it was ended before it began")
        album = PictureSet(list(reference))
        live = [
            LiveEngine(name, engine, album=album, reference=reference, seed=seed)
            for name, engine in (("saver", trio.saver), ("reader", trio.reader))
        ]
        site.kill_engine = live[0].killed
        try:
            yield _Scene(Cast(site, live, album), lambda: trio.saver.log)
        finally:
            for engine in live:
                engine.stop()


class _Trio:
    """The three engines."""

    def __init__(
        self,
        context: Context,
        model: Path,
        server: LocalS3,
        endpoint_url: str,
        tier: Path,
        nursery: EngineForkServer,
    ) -> None:
        from s3ec.dev.rigs.engine import EngineProcess, ec_config

        settings = {
            "bucket": _BUCKET,
            "endpoint_url": endpoint_url,
            "cache_dir": str(tier),
            "cache_bytes": _CACHE,
            "min_free_bytes": 0,
            "index_refresh_s": 2.0,
            "wait": "always",  # the tiny model's encoder is faster than a fetch
        }

        def engine(name: str, role: str | None, env: dict[str, str], **more: str) -> EngineProcess:
            path = {"ec_connector_module_path": "s3ec.connector"}
            ec = None if role is None else ec_config(role, settings | more, **path)
            return EngineProcess(
                model,
                ec=ec,
                log_path=context.scratch / f"{name}.log",
                media=context.scratch,
                env=server.env() | env,
                options=NEW_PICTURES,
                nursery=nursery,  # one that is killed is back sooner
            )

        # Scheduler and worker in one process, as with one GPU; and in processes of their own, which
        # take three times as long to start.
        self.saver = engine("saver", "ec_both", ONE_PROCESS, log_level="DEBUG")
        self.reader = engine("reader", "ec_consumer", ONE_PROCESS if context.quick else STEADY)
        self.plain = engine("reference", None, ONE_PROCESS)


def _start(
    trio: _Trio, paths: list[Path], stop: threading.Event, stack: contextlib.ExitStack
) -> dict[Path, Answer]:
    """Start all engines at once; the answers of the plain one, which ends."""
    from s3ec.dev.bench.soak_engine import references

    for engine in (trio.saver, trio.reader):
        stack.callback(engine.stop, 5)

    def plain() -> dict[Path, Answer]:
        with trio.plain:
            return references(trio.plain, paths, stop=stop.is_set)

    with ThreadPoolExecutor(3) as pool:
        starting = [pool.submit(engine.start) for engine in (trio.saver, trio.reader)]
        answers = pool.submit(plain)
        for one in starting:
            one.result()
        return answers.result()


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


BENCH = Bench(ROWS, run)

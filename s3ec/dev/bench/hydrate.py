# SPDX-License-Identifier: Apache-2.0
"""``bench hydrate``: a whole corpus to a node's tier, beside raw loops that write files.

All clients ask one SeaweedFS on this machine for the same objects, 16 at a time, and write them to
the same disk as the server's own. In each round every client begins with nothing dirty in the page
cache, and none syncs what it writes, as the tier does not. ``ratio_to_raw`` is to the moment from
which the bytes are on the device: each round ends with one ``syncfs``, which both sides' times
include. A corpus of more dirty pages than the page cache takes cannot have it otherwise.

What a round has written is emptied and not deleted before the next. Without a journal ext4 passes
by the inodes that were deleted in the last minutes, one by one, whenever a file is made: a fifth of
what hydrating took of the processor here, and no part of filling a new node.

The objects and one copy have to fit on the disk. Where 400 do not, there are fewer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.corpus import Corpus

OBJECTS = 400
_QUICK_OBJECTS = 32
_ROUNDS = 3
# Of the free space for the objects and their copies: the disk is not ours alone.
_SHARE = 0.25
_OURS = "s3ec hydrate"


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one client.

    Attributes:
        seconds: Until the client was done.
        synced_s: Until the bytes were on the device, from the same start.
        cpu_s: Of this process.
    """

    seconds: float
    synced_s: float
    cpu_s: float


def run(context: Context, *, objects: int | None = None) -> None:
    """Measure; needs the SeaweedFS binary.

    Args:
        context: Where rows go.
        objects: How many; None for OBJECTS, or what a quarter of the free space takes twice.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.dev.bench.corpus import SHAPE, filled

    free_bytes = shutil.disk_usage(context.scratch).free
    fitting = int(free_bytes * _SHARE / (2 * SHAPE.nbytes))
    count = objects or (_QUICK_OBJECTS if context.quick else max(1, min(OBJECTS, fitting)))
    with ExitStack() as stack:
        server, corpus = stack.enter_context(filled(context, count))
        server.client().put_object(
            Bucket=corpus.bucket,
            Key=f"{corpus.namespace.name}/namespace.json",
            Body=corpus.namespace.to_json(),
        )
        cases = _cases(corpus, context.scratch / "copies", stack)
        context.say(f"{context.rounds(_ROUNDS)} rounds of {count} objects")
        kept = measure.interleave(cases, rounds=context.rounds(_ROUNDS))
    report(context, corpus, kept)


def _cases(corpus: Corpus, folder: Path, stack: ExitStack) -> dict[str, Callable[[], Sample]]:
    """A round of each client."""
    from s3ec.corpus import Corpus as Opened
    from s3ec.dev.bench.raw_loops import RawLoop

    loop = RawLoop(corpus, folder)
    threads = RawLoop(corpus, folder, in_threads=True)
    for each in (loop, threads):
        stack.callback(each.close)
    opened = stack.enter_context(Opened(corpus.settings(folder)))

    def hydrate() -> None:
        found = opened.hydrate(namespace=corpus.namespace.name)
        if found.fetched != len(corpus.keys):
            raise RuntimeError(f"{found.fetched} entries came: {found.stopped}")

    return {
        "raw obstore": lambda: _sample(folder, loop.fetch),
        "raw obstore in threads": lambda: _sample(folder, threads.fetch),
        _OURS: lambda: _sample(folder, hydrate),
    }


def _sample(folder: Path, work: Callable[[], None]) -> Sample:
    _put_aside(folder)
    folder.mkdir(mode=0o700)
    os.sync()
    cpu_s, started = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_s
    _sync(folder)
    return Sample(seconds, time.perf_counter() - started, cpu_s)


def _put_aside(folder: Path) -> None:
    """Leave the files of the round before where nobody looks, without their bytes."""
    if not folder.exists():
        return
    used = folder.with_name(f"{folder.name}-{time.monotonic_ns()}")
    folder.rename(used)
    for path in used.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def _sync(folder: Path) -> None:
    """Wait until all of a file system is on its device; Python has no call for one alone."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def report(context: Context, corpus: Corpus, kept: dict[str, list[Sample]]) -> None:
    """Report all rows from the rounds of all clients."""
    figures: dict[str, Callable[[Sample], float]] = {
        "ratio_to_raw": lambda one: 1 / one.synced_s,
        "cpu_ratio_to_raw": lambda one: one.cpu_s,
    }
    for row, figure in figures.items():
        values = {case: [figure(one) for one in rounds] for case, rounds in kept.items()}
        raw = {case: statistics.median(found) for case, found in values.items() if case != _OURS}
        best = (
            min(raw, key=raw.__getitem__)
            if row.startswith("cpu")
            else max(raw, key=raw.__getitem__)
        )
        ratios = {case: measure.ratios(found, values[best]) for case, found in values.items()}
        context.report_median(
            f"hydrate.{row}",
            ratios,
            _OURS,
            samples=len(corpus.keys) * len(ratios[_OURS]),
            note=f"over the best, {best}",
            detail={
                "objects": len(corpus.keys),
                "object_bytes": corpus.entry_bytes,
                "in_flight": 16,
                "seconds": _medians(kept, lambda one: one.seconds),
                "synced_s": _medians(kept, lambda one: one.synced_s),
            },
        )


def _medians(kept: dict[str, list[Sample]], figure: Callable[[Sample], float]) -> dict[str, float]:
    return {case: statistics.median(map(figure, rounds)) for case, rounds in kept.items()}


BENCH = Bench(
    (
        Spec("hydrate.ratio_to_raw", "ratio", ">= 0.85"),
        Spec("hydrate.cpu_ratio_to_raw", "ratio", None),
    ),
    run,
)

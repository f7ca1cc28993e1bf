# SPDX-License-Identifier: Apache-2.0
"""``bench interference``: how late a 1 ms loop of the scheduler's thread gets by a prefetch.

The main thread sleeps 1 ms again and again, as a scheduler that has little to do, and notes how
late it wakes: with nothing else in the process, and while this very process fetches at full
speed. Server and threads share the machine's cores, so the same is noted while *another* process
does the same download: what is left of the difference is the interpreter's lock. And while a
thread of this process does no more than write what obstore brings into files, which shows what
any fetch in Python costs here.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.crew import Member
    from s3ec.dev.bench.fetcher import Fetcher
    from s3ec.dev.bench.raw_loops import ObstoreToFileLoop

ROUNDS = 9
_OBJECTS = 200
_OBJECTS_QUICK = 48
_IDLE_TICKS = 500
_TICK_S = 0.001
IDLE, HERE, ELSEWHERE = "idle", "during, ", "while another process fetches, "
TO_FILE = "during a raw loop that writes files, obstore"
_ADDED, _BY_LOCK, _LATE, _RATIO = (
    "interference.p99_added_ms",
    "interference.p99_added_by_interpreter_ms",
    "interference.p99_ms",
    "interference.ratio_to_files",
)
ROWS = (
    Spec(_RATIO, "ratio", "<= 1.0"),
    Spec(_ADDED, "ms", "<= 2"),
    Spec(_BY_LOCK, "ms"),
    Spec(_LATE, "ms"),
)


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.dev.bench import crew, fetcher, raw_loops
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.folders import memory_folder

    cases: dict[str, Callable[[], list[float]]] = {IDLE: _idle}
    with contextlib.ExitStack() as stack:
        count = _OBJECTS_QUICK if context.quick else _OBJECTS
        _, corpus = stack.enter_context(filled(context, count))
        folder, _ = stack.enter_context(memory_folder(context.scratch / "tier"))
        there, auto = fetcher.transports(corpus, folder / "none")
        for transport in there:
            ours = fetcher.Fetcher(corpus, folder / transport, transport)
            stack.callback(ours.close)
            cases[HERE + transport] = lambda ours=ours: _during(ours)  # type: ignore[misc]
        files = folder / "files"
        files.mkdir()
        raw = raw_loops.ObstoreToFileLoop(corpus, files)
        stack.callback(raw.close)
        cases[TO_FILE] = lambda: _during_raw(raw)
        hired = [crew.Hired(corpus, folder / f"other-{one}", one) for one in there]
        for transport, member in zip(there, stack.enter_context(crew.crew(hired)), strict=True):
            cases[ELSEWHERE + transport] = lambda member=member: _beside(member)  # type: ignore[misc]
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(ROUNDS))
    _report(context, auto, kept)


def _late_ms() -> float:
    """Sleep one tick; how much longer it took, in milliseconds."""
    due = time.perf_counter() + _TICK_S
    time.sleep(_TICK_S)
    return (time.perf_counter() - due) * 1000


def _idle() -> list[float]:
    return [_late_ms() for _ in range(_IDLE_TICKS)]


def _during(ours: Fetcher) -> list[float]:
    late = []
    ours.submit()
    while not ours.take():
        late.append(_late_ms())
    ours.empty()
    return late


def _during_raw(raw: ObstoreToFileLoop) -> list[float]:
    late = []
    thread = threading.Thread(target=raw.fetch)
    thread.start()
    while thread.is_alive():
        late.append(_late_ms())
    thread.join()
    raw.empty()
    return late


def _beside(member: Member) -> list[float]:
    late = []
    member.tell("fetch")
    while not member.has_answer:
        late.append(_late_ms())
    member.answer()
    member.tell("empty")
    member.answer()
    return late


def _report(context: Context, auto: str, kept: Mapping[str, Sequence[Sequence[float]]]) -> None:
    p99 = {case: [measure.percentile(one, 99) for one in rounds] for case, rounds in kept.items()}
    added = {case: _minus(rounds, p99[IDLE]) for case, rounds in p99.items() if case != IDLE}
    by_lock = {
        case: _minus(rounds, p99[case.replace(HERE, ELSEWHERE)])
        for case, rounds in p99.items()
        if case.startswith(HERE)
    }
    here = HERE + auto
    ticks = {case: sum(map(len, rounds)) for case, rounds in kept.items()}
    about = {
        "ticks": ticks,
        "p50_ms": {case: _of_all(rounds, 50) for case, rounds in kept.items()},
        "worst_ms": {case: _of_all(rounds, 100) for case, rounds in kept.items()},
        "transport": auto,
    }
    # Of medians: what one round adds may be nothing, by chance.
    typical = measure.medians(added)
    if typical[TO_FILE] > 0:
        over = {case: value / typical[TO_FILE] for case, value in typical.items()}
        note = f"{here} over {TO_FILE}; both above idle, medians of rounds"
        context.report(
            _RATIO, over[here], samples=ticks[here], detail={"cases": over, "note": note, **about}
        )
    else:
        context.cannot(_RATIO, "the raw loop added nothing in this run", **about)
    for row, values, note in (
        (_ADDED, added, f"{here}; above idle"),
        (_BY_LOCK, by_lock, f"{here}; above that beside another process that fetches"),
        (_LATE, p99, f"{here}; how late a tick of 1 ms is"),
    ):
        context.report(
            row,
            statistics.median(values[here]),
            samples=ticks[here],
            detail={
                "spread": measure.spread(values[here]),
                "cases": measure.medians(values),
                "note": note,
                **about,
            },
        )


def _minus(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(above, below, strict=True)]


def _of_all(rounds: Sequence[Sequence[float]], percent: float) -> float:
    return measure.percentile([late for one in rounds for late in one], percent)


BENCH = Bench(ROWS, run)

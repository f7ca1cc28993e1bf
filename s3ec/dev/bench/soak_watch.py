# SPDX-License-Identifier: Apache-2.0
"""Memory, files and threads of engines over time, and whether they grow."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from s3ec.dev.bench.soak_engine import LiveEngine

_EVERY_S = 5.0
# Fewer in a life say nothing about growth.
_FEWEST = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine with all its processes, at one time.

    Attributes:
        engine: Its name.
        life: How often it had been started.
        at_s: On the monotonic clock.
        anon_bytes: Memory that is its own: no files, a shared page in equal parts.
    """

    engine: str
    life: int
    at_s: float
    anon_bytes: int
    fds: int
    threads: int


class Watch:
    """Takes a sample of each engine every few seconds, in a thread of its own."""

    def __init__(self, engines: Sequence[LiveEngine], *, every_s: float = _EVERY_S) -> None:
        self.samples: list[Sample] = []
        self._engines = engines
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            for engine in self._engines:
                life, pid = engine.life, engine.pid
                found = None if pid is None else _look(family(pid))
                if found is not None and engine.is_up and engine.life == life:
                    self.samples.append(Sample(engine.name, life, time.monotonic(), *found))


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def _look(pids: Sequence[int]) -> tuple[int, int, int] | None:
    """Sums over the processes; None where the first of them is gone."""
    anon = fds = threads = 0
    for pid in pids:
        folder = Path("/proc") / str(pid)
        try:
            anon += _anon_bytes(folder)
            fds += len(list((folder / "fd").iterdir()))
            threads += len(list((folder / "task").iterdir()))
        except OSError:
            if pid == pids[0]:
                return None
    return anon, fds, threads


def _anon_bytes(folder: Path) -> int:
    fields = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields.get("Pss_Anon", fields["Anonymous"])


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one life of an engine.

    Attributes:
        share: Median of the last fifth over that of the second fifth, less 1; the first fifth is
            the warm-up.
        per_minute_bytes: Between the middles of the two.
        spread: Quartiles of the second fifth, as a share of its median: what the engine's memory
            goes up and down by itself.
    """

    engine: str
    life: int
    samples: int
    minutes: float
    share: float
    per_minute_bytes: float
    spread: float
    fds: tuple[int, int]
    threads: tuple[int, int]


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """The growth of each life that was long enough."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.engine, sample.life), []).append(sample)
    return [_growth(life) for life in lives.values() if len(life) >= _FEWEST]


def _growth(life: Sequence[Sample]) -> Growth:
    fifth = len(life) // 5
    early, late = life[fifth : 2 * fifth], life[-fifth:]
    before = statistics.median(one.anon_bytes for one in early)
    after = statistics.median(one.anon_bytes for one in late)
    minutes = (late[fifth // 2].at_s - early[fifth // 2].at_s) / 60
    quartiles = statistics.quantiles((one.anon_bytes for one in early), n=4)
    return Growth(
        engine=life[0].engine,
        life=life[0].life,
        samples=len(life),
        minutes=(life[-1].at_s - life[0].at_s) / 60,
        share=after / before - 1,
        per_minute_bytes=(after - before) / minutes,
        spread=(quartiles[2] - quartiles[0]) / before,
        fds=_medians(early, late, "fds"),
        threads=_medians(early, late, "threads"),
    )


def _medians(early: Sequence[Sample], late: Sequence[Sample], name: str) -> tuple[int, int]:
    first, last = (int(statistics.median(getattr(s, name) for s in some)) for some in (early, late))
    return first, last

# SPDX-License-Identifier: Apache-2.0
"""An engine under questions without a pause: it is asked, compared, killed, and started again."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from s3ec.dev.bench.soak_pictures import Answer, PictureSet, Verdict, ask, compare
from s3ec.dev.rigs.engine import EngineError, EngineProcess

HITS, MISSES = "vllm:s3ec_hits", "vllm:s3ec_misses"
FROM_BUCKET = "vllm:s3ec_fetches{source=bucket}"
INTERNAL_ERRORS = "vllm:s3ec_internal_errors"
_KEPT = 20
# No answer for so long: the engine hangs.
HANGS_S = 180.0
_RESTARTS = 3
_ERROR = re.compile(r"^.*ERROR [^\n]*\[s3ec\.[^\n]*\n(?:.*\n){0,40}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Moment:
    """What the requests of one time came to.

    Attributes:
        began_s: When they were asked, on the monotonic clock.
        ended_s: When the last answer was there.
        hits: Of the cache, meanwhile.
        fetched: Embeddings that came from the bucket, meanwhile.
    """

    began_s: float
    ended_s: float
    hits: float
    fetched: float


@dataclass
class Tally:
    """What was seen of one engine."""

    requests: int = 0
    exact: int = 0
    wrong: int = 0
    refused: int = 0
    killed: int = 0
    dead: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


class LiveEngine:
    """One engine and the thread that asks it.

    Attributes:
        name: In reports.
        tally: What was seen so far; complete after stop().
        life: How often it was started.
        failure: What ended its thread, where that is a fault of this benchmark.
    """

    def __init__(
        self,
        name: str,
        engine: EngineProcess,
        *,
        album: PictureSet,
        reference: Mapping[Path, Answer],
        seed: int,
    ) -> None:
        """Take an engine; it may run already.

        Args:
            name: In reports, and part of the random choice of pictures.
            engine: Restarted after it ended.
            album: What is asked about.
            reference: The right answers.
            seed: Of the choice.
        """
        self.name = name
        self.tally = Tally()
        self.life = 0
        self.failure: Exception | None = None
        self._engine = engine
        self._album = album
        self._reference = reference
        self._source = random.Random(f"{seed} {name}")
        self._now: Callable[[], str] = str
        self._ended = threading.Event()
        self._up = threading.Event()
        self._killing = False
        self._busy_since: float | None = None
        self._counted: Mapping[str, float] = {}
        self._thread = threading.Thread(target=self._run, name=f"soak-{name}", daemon=True)

    def start(self, now: Callable[[], str]) -> None:
        """Begin to ask.

        Args:
            now: Names the faults of the moment, for the report.
        """
        self._now = now
        self._thread.start()

    def first_fetch_after(self, since: float) -> float | None:
        """When something asked later than ``since`` first came from the bucket; else None."""
        for moment in reversed(self.tally.moments):
            if moment.began_s < since:
                break
            if moment.fetched:
                return moment.ended_s
        return None

    @property
    def is_up(self) -> bool:
        """Whether it answers questions, and not just starts."""
        return self._up.is_set()

    @property
    def gave_up(self) -> bool:
        """Whether it died so often that nobody asks it any more."""
        return self._ended.is_set() and self.tally.dead >= _RESTARTS

    @property
    def pid(self) -> int | None:
        """Process id of the engine's first process, None while it is down."""
        if not self.is_up:
            return None
        try:
            return self._engine.pid
        except EngineError:
            return None

    def errors(self) -> list[str]:
        """The first errors of s3ec in the engine's log, each with its traceback."""
        return [found[0][:3000] for found in islice(_ERROR.finditer(self._engine.log), 5)]

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill it (SIGKILL); the block's end waits until it answers again."""
        if not self.is_up:
            yield
            return
        self.tally.killed += 1
        self._killing = True
        self._engine.kill()
        self._up.clear()
        yield
        while not self._up.wait(0.5):
            if self._ended.is_set():
                return

    def unstick(self) -> None:
        """Kill it where it has not answered for long; that counts as its death."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > HANGS_S:
            self._busy_since = None
            self._engine.kill()

    def stop(self) -> None:
        """Ask no more, and shut the engine down in order. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._join()
        self._engine.stop()

    def _join(self) -> None:
        self._thread.join(HANGS_S)
        if self._thread.is_alive():
            self.tally.dead += 1
            self.tally.deaths.append("gave no answer at the end")
            self._engine.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._ask_on()
        except Exception as exc:  # noqa: BLE001 - raised by whoever ends this thread
            self.failure = exc
            self._ended.set()

    def _ask_on(self) -> None:
        while not self._ended.is_set():
            try:
                if not self.is_up:
                    self._start()
                self._ask()
            except EngineError as exc:
                self._up.clear()
                if not self._killing:
                    self._died(str(exc))
                if self.tally.dead >= _RESTARTS:
                    self._ended.set()

    def _start(self) -> None:
        self._killing = False
        if self.life or not self._runs():
            self._engine.stop(timeout_s=1)
            self._engine.start()
        self.life += 1
        self._counted = {}
        self._up.set()

    def _runs(self) -> bool:
        try:
            return self._engine.pid > 0
        except EngineError:
            return False

    def _died(self, why: str) -> None:
        self.tally.dead += 1
        self.tally.deaths.append(f"{self._now()}: {why[-1500:]}")

    def _ask(self) -> None:
        paths = self._album.pick(self._source)
        began = self._busy_since = time.monotonic()
        try:
            answers = ask(self._engine, paths)
            counters = self._engine.counters()
        finally:
            self._busy_since = None
        ended = time.monotonic()
        for path, answer in zip(paths, answers, strict=True):
            self._judge(path, answer, compare(answer, self._reference[path]))
        self._count(counters, began, ended)

    def _judge(self, path: Path, answer: Answer, verdict: Verdict) -> None:
        self.tally.requests += 1
        self.tally.exact += verdict.exact
        if verdict.right:
            return
        self.tally.wrong += 1
        if len(self.tally.examples) < _KEPT:
            expected = self._reference[path]["token_ids"]
            self.tally.examples.append(
                {"picture": path.name, "said": answer["token_ids"], "expected": expected}
                | {"engine": self.name, "during": self._now()}
            )

    def _count(self, counters: Mapping[str, float], began: float, ended: float) -> None:
        moved = {
            name: value - self._counted.get(name, 0)
            for name, value in counters.items()
            if name.startswith("vllm:s3ec")
        }
        self._counted = counters
        self.tally.counters.update(moved)
        self.tally.slowest_s = max(self.tally.slowest_s, ended - began)
        self.tally.moments.append(
            Moment(began, ended, moved.get(HITS, 0), moved.get(FROM_BUCKET, 0))
        )

# SPDX-License-Identifier: Apache-2.0
"""An engine under questions without a pause, the pictures of them, and the engine's memory."""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from s3ec.dev.bench import measure
from s3ec.dev.rigs.engine import EngineError, EngineProcess, image, text

Answer = dict[str, Any]

QUESTION = "what is to be seen in it, and where?"
ALTERNATIVES = 3
AT_ONCE = 8
# Beside other requests the sums of a bfloat16 model come out a little differently: 0.001 was seen
# between log probabilities. Another picture's embedding changes the tokens, or moves them further.
_TOLERANCE = 0.003
_TOKENS = 4


def ask(engine: EngineProcess, paths: Sequence[Path]) -> list[Answer]:
    """What an engine says about some pictures, asked at once."""
    return engine.chat(
        [[image(path), text(QUESTION)] for path in paths], logprobs=ALTERNATIVES, max_tokens=_TOKENS
    )


def references(engine: EngineProcess, paths: Sequence[Path]) -> dict[Path, Answer]:
    """The answers to compare with, of the pictures that are fit for it.

    Left out are those where two tokens are so close that the sums' differences could swap them,
    and those whose answer is another's.
    """
    found: dict[Path, Answer] = {}
    said: dict[tuple[int, ...], list[Answer]] = {}
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        for path, answer in zip(some, ask(engine, some), strict=True):
            alike = said.setdefault(tuple(answer["token_ids"]), [])
            if _is_clear(answer) and not any(is_right(answer, other) for other in alike):
                found[path] = answer
            alike.append(answer)
    return found


def _is_clear(answer: Answer) -> bool:
    pairs = (sorted(position.values(), reverse=True)[:2] for position in answer["logprobs"])
    return all(first - second >= _TOLERANCE for first, second in pairs)


def is_right(answer: Answer, reference: Answer) -> bool:
    """Whether tokens and end are the same, and log probabilities within the tolerance."""
    if any(answer[name] != reference[name] for name in ("token_ids", "finish_reason")):
        return False
    ours, theirs = (
        [
            position[str(token)]
            for token, position in zip(one["token_ids"], one["logprobs"], strict=True)
        ]
        for one in (answer, reference)
    )
    apart = max(abs(mine - its) for mine, its in zip(ours, theirs, strict=True))
    return bool(apart <= _TOLERANCE)


@dataclass(slots=True)
class PictureSet:
    """Which pictures are asked about when: most often new ones, sometimes any seen before.

    Attributes:
        paths: All of them, in the order in which they appear.
        share: How far the soak is, 0 to 1.
        window: How many are new at a time.
    """

    paths: Sequence[Path]
    share: float = 0.0
    window: int = 64

    def pick(self, source: random.Random) -> list[Path]:
        """Some pictures for requests at one time; one may come twice."""
        there = self.window + int((len(self.paths) - self.window) * min(self.share, 1.0))
        there = min(there, len(self.paths))
        picked = []
        for _ in range(source.randint(1, AT_ONCE)):
            first = 0 if source.random() < 0.3 else max(0, there - self.window)
            picked.append(self.paths[source.randrange(first, there)])
        return picked


FROM_BUCKET = "vllm:s3ec_fetches{source=bucket}"
_KEPT = 20
# No answer for so long: the engine hangs.
HANGS_S = 180.0
_RESTARTS = 3
_ERROR = re.compile(r"^.*ERROR [^\n]*\[s3ec\.[^\n]*\n(?:.*\n){0,40}", re.MULTILINE)


class Moment(NamedTuple):
    """Requests of one time: when asked, when answered, and what came from the bucket meanwhile."""

    began_s: float
    ended_s: float
    fetched: float


@dataclass
class Tally:
    """What was seen of one engine."""

    requests: int = 0
    wrong: int = 0
    killed: int = 0
    dead: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


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
        """Take an engine; it runs.

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
        self._up_lock = threading.Lock()  # no kill in the middle of a start
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

    @property
    def log(self) -> str:
        """All that the engine has logged, in all of its lives."""
        return self._engine.log

    def errors(self) -> list[str]:
        """The first errors of s3ec in the engine's log, each with its traceback."""
        return [found[0][:3000] for found in islice(_ERROR.finditer(self.log), 5)]

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill it (SIGKILL); the block's end waits until it answers again."""
        if not self.is_up:
            yield
            return
        with self._up_lock:
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
            self._thread.join(HANGS_S)
            if self._thread.is_alive():
                self._died("gave no answer at the end")
                self._engine.kill()
                self._thread.join()
        self._engine.stop()

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
                    with self._up_lock:
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
        if self.life:  # it runs when it comes here
            self._engine.stop(timeout_s=1)
            self._engine.start()
        self.life += 1
        self._counted = {}
        self._up.set()

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
            self._judge(path, answer)
        self._count(counters, began, ended)

    def _judge(self, path: Path, answer: Answer) -> None:
        self.tally.requests += 1
        if is_right(answer, self._reference[path]):
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
        self.tally.moments.append(Moment(began, ended, moved.get(FROM_BUCKET, 0)))


# Fewer in a life say nothing about growth.
_FEWEST_SAMPLES = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of one life of an engine at one time, that of all its processes together."""

    engine: str
    life: int
    at_s: float
    anon_bytes: int


def sample(engine: LiveEngine) -> Sample | None:
    """One of now; None while the engine is down."""
    import psutil  # type: ignore[import-untyped]  # vLLM depends on it

    life, pid = engine.life, engine.pid
    if pid is None:
        return None
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        nbytes = sum(map(measure.anonymous_bytes, pids))
    except (OSError, psutil.Error):  # one of them has just ended
        return None
    return Sample(engine.name, life, time.monotonic(), nbytes) if engine.life == life else None


def growths(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth of each engine's longest life; an engine whose lives were all too short is left out.

    Median of the last fifth over that of the second, less 1: the first one is the warm-up.
    """
    lives: dict[tuple[str, int], list[int]] = {}
    for one in samples:
        lives.setdefault((one.engine, one.life), []).append(one.anon_bytes)
    found = {}
    for (engine, _), life in sorted(lives.items(), key=lambda one: len(one[1])):
        if len(life) >= _FEWEST_SAMPLES:
            fifth = len(life) // 5
            early, late = life[fifth : 2 * fifth], life[-fifth:]
            found[engine] = statistics.median(late) / statistics.median(early) - 1
    return found

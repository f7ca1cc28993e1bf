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
from typing import Any

from s3ec.dev.rigs.engine import EngineError, EngineProcess, image, text

Answer = dict[str, Any]

QUESTION = "what is to be seen in it, and where?"
ALTERNATIVES = 3
AT_ONCE = 8
# Beside other requests the sums of a bfloat16 model come out a little differently: 0.001 was seen
# between log probabilities. Another picture's embedding changes the tokens, or moves them further.
_TOLERANCE = 0.003
_TOKENS = 4


def prompt(path: Path) -> list[dict[str, Any]]:
    """One picture and the question that is always asked."""
    return [image(path), text(QUESTION)]


def ask(engine: EngineProcess, paths: Sequence[Path]) -> list[Answer]:
    """What an engine says about some pictures, asked at once."""
    return engine.chat([prompt(path) for path in paths], logprobs=ALTERNATIVES, max_tokens=_TOKENS)


def references(
    engine: EngineProcess, paths: Sequence[Path], *, stop: Callable[[], bool] = lambda: False
) -> dict[Path, Answer]:
    """The answers to compare with, of the pictures that are fit for it.

    Left out are those where two tokens are so close that the sums' differences could swap them,
    and those whose answer is another's.
    """
    found: dict[Path, Answer] = {}
    said: dict[tuple[int, ...], list[Answer]] = {}
    for start in range(0, len(paths), AT_ONCE):
        if stop():
            break
        some = paths[start : start + AT_ONCE]
        for path, answer in zip(some, ask(engine, some), strict=True):
            alike = said.setdefault(tuple(answer["token_ids"]), [])
            if _is_clear(answer) and not any(compare(answer, other).right for other in alike):
                found[path] = answer
            alike.append(answer)
    return found


def _is_clear(answer: Answer) -> bool:
    for position in answer["logprobs"]:
        first, second, *_ = sorted(position.values(), reverse=True)
        if first - second < _TOLERANCE:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares with the recorded one.

    Attributes:
        right: Same tokens, same end, and log probabilities within the tolerance.
        exact: All log probabilities equal to the last bit.
    """

    right: bool
    exact: bool


def compare(answer: Answer, reference: Answer) -> Verdict:
    """Tokens, finish reason and the log probability of each token."""
    same = all(answer[name] == reference[name] for name in ("token_ids", "finish_reason"))
    if not same:
        return Verdict(right=False, exact=False)
    if answer["logprobs"] == reference["logprobs"]:
        return Verdict(right=True, exact=True)
    apart = max(
        abs(mine[str(token)] - theirs[str(token)])
        for token, mine, theirs in zip(
            answer["token_ids"], answer["logprobs"], reference["logprobs"], strict=True
        )
    )
    return Verdict(right=apart <= _TOLERANCE, exact=False)


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


HITS, MISSES = "vllm:s3ec_hits", "vllm:s3ec_misses"
FROM_BUCKET = "vllm:s3ec_fetches{source=bucket}"
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

    def __init__(self, engines: Sequence[LiveEngine]) -> None:
        self.samples: list[Sample] = []
        self._engines = engines
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
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

# SPDX-License-Identifier: Apache-2.0
"""The part of ``bench payoff`` with three real engines: no connector, ``always`` and ``auto``.

They are asked the same questions in turn, at six points: encoder, store, load. Each sees a picture
once, and the bucket holds them all; how long a GET takes is lognormal and the same for all engines.
At each point ``auto`` is compared with the better of the two others. Before that, each engine is
asked about pictures that nobody has stored, and about some that the bucket holds, so that ``auto``
has learned what both cost.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import CannotMeasureError, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess

_P50, _P99, _THROUGHPUT = (
    "payoff.p50_worst",
    "payoff.p99_pooled",
    "payoff.throughput_worst",
)
ROWS = (
    Spec(_P50, "ratio", "<= 1.15"),
    Spec(_P99, "ratio", "<= 1.2"),
    Spec(_THROUGHPUT, "ratio", "<= 1.03"),
)
_NONE, _ALWAYS, _AUTO, _PRODUCER = "no connector", "always", "auto", "producer"
_COMPARED = (_NONE, _ALWAYS, _AUTO)
_SIGMA = 0.7
_SEED = 31
_TOKENS = 4
_PICTURES = 32
_SENTINELS = 20
_REQUESTS, _QUICK_REQUESTS = 60, 8
# Under load each engine is asked in so many turns.
_TURNS = 3
# Pictures that nobody has stored, one by one; then, some at a time, as many that the bucket holds
# as fetches are remembered.
_UNKNOWN = 24
_KNOWN, _AT_A_TIME = 128, 4
_MOST_SEQS = 32


@dataclass(frozen=True, slots=True)
class _Point:
    """One case.

    Attributes:
        encode_ms: What encoding a picture takes longer.
        fetch_ms: Median of what a GET takes longer.
        load: Requests a second, as a share of what the engine without connector can do; 0 for one
            after the other.
        pictures: Of a request.
    """

    encode_ms: float
    fetch_ms: float
    load: float
    pictures: int = 1

    def __str__(self) -> str:
        load = f"load {self.load:.0%}" if self.load else "one at a time"
        return f"encode {self.encode_ms:g} ms, GET {self.fetch_ms:g} ms, {load}, {self.pictures}"


# The encoder only becomes slower from one to the next: that is learned sooner than the reverse, and
# no real one changes like this.
_POINTS = (
    _Point(15, 30, 0),
    _Point(15, 80, 0.5),
    _Point(100, 30, 0),
    _Point(100, 30, 0.5),
    _Point(200, 60, 0.8),
    _Point(300, 80, 0, 2),
)


@dataclass(slots=True)
class _Times:
    """Of one engine at one point: seconds to the first token, and until all had ended."""

    first_s: list[float] = field(default_factory=list)
    seconds: float = 0.0


def run(context: Context) -> None:
    """Compare three engines at each point.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or what should be a hit was none.
    """
    from s3ec.dev.bench.soak_engine import write_patterns

    count = _QUICK_REQUESTS if context.quick else _REQUESTS
    pictures = write_patterns(context.scratch / "shown", _PICTURES, 1)
    roles = {
        _NONE: None,
        _ALWAYS: ("ec_consumer", {"wait": "always"}),
        _AUTO: ("ec_consumer", {"wait": "auto"}),
        _PRODUCER: ("ec_producer", {}),
    }
    options = {"max_num_seqs": _MOST_SEQS}
    with engines.running(context, roles, options=options) as rig:
        names = [secrets.token_hex(32) for _ in range(_names_of_all(count))]
        sentinels = [secrets.token_hex(32) for _ in range(_SENTINELS)]
        context.say(f"storing {len(names)} embeddings")
        engines.fill(rig.by_name[_PRODUCER], pictures, [*names, *sentinels])
        rig.by_name.pop(_PRODUCER).stop()
        engines.follow(rig.by_name[_ALWAYS], pictures[0], sentinels)
        left = iter(names)
        found = {}
        for point in _POINTS:
            context.say(str(point))
            before = engines.counters(rig.by_name[_ALWAYS]).get(engines.HITS, 0)
            found[point] = _measure(rig, point, count, left, pictures)
            hits = engines.counters(rig.by_name[_ALWAYS]).get(engines.HITS, 0) - before
            if hits != count * point.pictures + _KNOWN:
                raise CannotMeasureError(f"{hits:.0f} hits at {point}")
            context.say(", ".join(f"{name} {_shown(one)}" for name, one in found[point].items()))
    _report(context, found)


def _names_of_all(count: int) -> int:
    return sum(count * point.pictures + _KNOWN for point in _POINTS)


def _shown(times: _Times) -> str:
    p50, p99 = (measure.percentile(times.first_s, share) * 1e3 for share in (50, 99))
    return f"{p50:.0f}/{p99:.0f} ms"


def _measure(
    rig: engines.Engines, point: _Point, count: int, names: Iterator[str], pictures: Sequence[Path]
) -> dict[str, _Times]:
    """Ask all engines the same, in turn."""
    from s3ec.dev.rigs.proxy import Rule
    from s3ec.dev.rigs.proxy_faults import LognormalDelay

    shown = itertools.cycle(pictures)

    def ask(about: Sequence[str]) -> list[dict[str, Any]]:
        return engines.prompt([next(shown) for _ in about], about)

    def take(number: int, each: int) -> list[Any]:
        return [ask(list(itertools.islice(names, each))) for _ in range(number)]

    for engine in rig.by_name.values():
        engine.slow_encoder(point.encode_ms / 1e3)
    delay = LognormalDelay(point.fetch_ms / 1e3, _SIGMA, _SEED)
    rig.proxy.add(Rule(delay, method="GET", target="/objects/"))
    known = take(_KNOWN // _AT_A_TIME, _AT_A_TIME)
    for engine in rig.by_name.values():
        unknown = [ask([secrets.token_hex(32)]) for _ in range(_UNKNOWN)]
        for prompt in [*unknown, *known]:
            engine.replay([prompt], [0.0], max_tokens=_TOKENS)
    asked = take(count, point.pictures)
    if point.load:
        again = [
            ask([secrets.token_hex(32) for _ in range(point.pictures)]) for _ in range(_UNKNOWN)
        ]
        _, seconds = rig.by_name[_NONE].replay(again, [0.0] * len(again), max_tokens=_TOKENS)
        found = _ask_under_load(rig, asked, point.load * len(again) / seconds)
    else:
        found = _ask_one_by_one(rig, asked)
    rig.proxy.clear()
    return found


def _ask_one_by_one(rig: engines.Engines, asked: Sequence[Any]) -> dict[str, _Times]:
    found = {name: _Times() for name in _COMPARED}
    for number, prompt in enumerate(asked):
        turn = number % len(_COMPARED)
        for name in (*_COMPARED[turn:], *_COMPARED[:turn]):
            _add(found[name], rig.by_name[name], [prompt], [0.0])
    return found


def _ask_under_load(rig: engines.Engines, asked: Sequence[Any], rate: float) -> dict[str, _Times]:
    """Requests at random times, so many a second."""
    source = random.Random(_SEED)
    found = {name: _Times() for name in _COMPARED}
    size = math.ceil(len(asked) / _TURNS)
    for turn in range(_TURNS):
        prompts = asked[turn * size : (turn + 1) * size]
        arrivals_s = list(itertools.accumulate(source.expovariate(rate) for _ in prompts))
        for name in (*_COMPARED[turn:], *_COMPARED[:turn]):
            _add(found[name], rig.by_name[name], prompts, arrivals_s)
    return found


def _add(
    times: _Times, engine: EngineProcess, prompts: Sequence[Any], arrivals_s: Sequence[float]
) -> None:
    first_s, seconds = engine.replay(prompts, arrivals_s, max_tokens=_TOKENS)
    times.first_s += first_s
    times.seconds += seconds


def _report(context: Context, found: dict[_Point, dict[str, _Times]]) -> None:
    """What ``auto`` comes to beside the better of the two others at each point."""
    p50_ratios = []
    time_ratios = []
    pooled: dict[str, list[float]] = {"better": [], _AUTO: []}
    detail: dict[str, Any] = {}
    for point, times in found.items():
        p50, p99 = (
            {name: measure.percentile(one.first_s, share) for name, one in times.items()}
            for share in (50, 99)
        )
        better = min((_NONE, _ALWAYS), key=lambda name: p99[name])
        # In units of the point's own median, so that no point outweighs the others.
        unit_s = min(p50[_NONE], p50[_ALWAYS])
        pooled["better"] += [one / unit_s for one in times[better].first_s]
        pooled[_AUTO] += [one / unit_s for one in times[_AUTO].first_s]
        p50_ratios.append(p50[_AUTO] / unit_s)
        if point.load:  # else it is the time to the first token once more
            quicker_s = min(times[_NONE].seconds, times[_ALWAYS].seconds)
            time_ratios.append(times[_AUTO].seconds / quicker_s)
        detail[str(point)] = {
            "p50_ms": {name: 1e3 * one for name, one in p50.items()},
            "p99_ms": {name: 1e3 * one for name, one in p99.items()},
            "seconds": {name: one.seconds for name, one in times.items()},
        }
    samples = len(pooled[_AUTO])
    p99_ratio = measure.percentile(pooled[_AUTO], 99) / measure.percentile(pooled["better"], 99)
    context.report(_P50, max(p50_ratios), samples=samples, detail=detail)
    context.report(_P99, p99_ratio, samples=samples)
    context.report(_THROUGHPUT, max(time_ratios), samples=samples)

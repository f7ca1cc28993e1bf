# SPDX-License-Identifier: Apache-2.0
"""The loop of a soak: one step of faults after another, while engines are asked."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from s3ec.dev.bench.soak_engine import LiveEngine
from s3ec.dev.bench.soak_faults import FAULTS, Site
from s3ec.dev.bench.soak_pictures import PictureSet
from s3ec.dev.bench.soak_plan import Step, plan
from s3ec.dev.bench.soak_watch import Sample, Watch

# How soon after a fault embeddings must come from the bucket again: longer than the longest
# pause of a breaker, and than an engine takes for what it was asked before.
_BACK_S = 75.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Plot:
    """What happens, and for how long.

    Attributes:
        minutes: Of faults; engines start and end outside of them.
        seed: Gives the order of faults, their lengths, and the pictures.
        scale: Of the lengths.
        kinds: Faults to choose from.
    """

    minutes: float
    seed: int
    scale: float = 1.0
    kinds: Sequence[str] = tuple(FAULTS)


@dataclass(frozen=True, slots=True)
class Cast:
    """What takes part: things to damage, engines that run, and pictures to ask about."""

    site: Site
    engines: Sequence[LiveEngine]
    album: PictureSet


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
class Story:
    """What happened.

    Attributes:
        began_s: On the monotonic clock.
        seconds: How long it was.
    """

    plot: Plot
    engines: Sequence[LiveEngine]
    began_s: float
    seconds: float = 0.0
    blows: list[Blow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class _Now:
    """Names the faults of the moment."""

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()

    def __call__(self) -> str:
        return " and ".join(self.kinds) or "no fault"


def soak(cast: Cast, plot: Plot, *, stop: threading.Event, say: Callable[[str], None]) -> Story:
    """Let it happen; when it returns the engines have ended in order and every fault is over.

    Args:
        cast: Engines that nobody asks yet.
        plot: What is to happen.
        stop: Ends it early once set.
        say: Shows progress.
    """
    story = Story(plot, cast.engines, time.monotonic())
    now = _Now()
    for engine in cast.engines:
        engine.start(now)
    with Watch(cast.engines) as watch:
        _until_back(story.began_s, story, cast, stop)  # there must be something to lose
        for step in plan(plot.seed, _possible(cast.site, plot.kinds), scale=plot.scale):
            if _is_over(story, stop):
                break
            say(f"{story.seconds / 60:.0f} of {plot.minutes:g} minutes: {' and '.join(step.kinds)}")
            story.blows.append(_carry_out(step, story, cast, now, stop))
            stop.wait(step.pause_s)
            cast.site.proxy.requests.clear()  # they would be most of this process's memory
    say("ending the engines")
    for engine in cast.engines:
        engine.stop()
    story.samples = watch.samples
    return story


def _possible(site: Site, kinds: Sequence[str]) -> list[str]:
    impossible = {"disk full"} if site.disk is None else set()
    impossible |= {"engine killed"} if site.kill_engine is None else set()
    return [kind for kind in kinds if kind not in impossible]


def _is_over(story: Story, stop: threading.Event) -> bool:
    story.seconds = time.monotonic() - story.began_s
    for engine in story.engines:
        if engine.failure is not None:
            raise engine.failure
    return (
        stop.is_set()
        or story.seconds >= story.plot.minutes * 60
        or any(engine.gave_up for engine in story.engines)
    )


def _carry_out(step: Step, story: Story, cast: Cast, now: _Now, stop: threading.Event) -> Blow:
    source = random.Random(step.seed)
    began = time.monotonic()
    # What is damaged in the bucket is mended once the server is up again.
    order = sorted(step.kinds, key=list(FAULTS).index, reverse=True)
    with contextlib.ExitStack() as faults:
        struck = {kind: faults.enter_context(FAULTS[kind](cast.site, source)) for kind in order}
        now.kinds = step.kinds
        _wait(step.duration_s, story, cast, stop)
        hits = {kind: count() for kind, count in struck.items()}
    now.kinds = ()
    ended = time.monotonic()
    back_s = _until_back(ended, story, cast, stop)
    return Blow(step, began - story.began_s, ended - story.began_s, hits, back_s)


def _wait(seconds: float, story: Story, cast: Cast, stop: threading.Event) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop.wait(_LOOK_S):
        cast.album.share = (time.monotonic() - story.began_s) / (story.plot.minutes * 60)
        for engine in cast.engines:
            engine.unstick()


def _until_back(since: float, story: Story, cast: Cast, stop: threading.Event) -> float | None:
    """Seconds until every engine was asked anew and got something from the bucket."""
    while time.monotonic() < since + _BACK_S and not stop.is_set():
        ends = [engine.first_fetch_after(since) for engine in cast.engines]
        found = [end for end in ends if end is not None]
        if len(found) == len(ends):
            return max(found) - since
        if any(engine.gave_up or engine.failure for engine in cast.engines):
            return None
        _wait(_LOOK_S, story, cast, stop)
    return None

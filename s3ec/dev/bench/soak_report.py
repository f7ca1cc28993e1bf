# SPDX-License-Identifier: Apache-2.0
"""From what happened in a soak to its rows."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.context import Context
    from s3ec.dev.bench.soak_engine import LiveEngine
    from s3ec.dev.bench.soak_faults import Site
    from s3ec.dev.bench.soak_run import Story

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
_POINTS = 240


def report(context: Context, story: Story, site: Site, saver_log: str, scratch: Path) -> None:
    """Report every row.

    Args:
        context: Where rows go.
        story: What happened; the engines have ended.
        site: What was damaged, healthy by now.
        saver_log: Log of the engine that saved.
        scratch: A folder to be made, for a tier.
    """
    from s3ec.dev.bench.soak_check import holdings

    _answers(context, story)
    _memory(context, story)
    _faults(context, story)
    context.say("reading every confirmed entry")
    held = holdings(site.server, site.bucket, saver_log, site.deleted, scratch)
    context.report(
        LOST,
        len(held.missing),
        samples=held.confirmed - held.deleted,
        detail={
            "note": f"of {held.confirmed} confirmed, {held.deleted} deleted by a fault",
            "missing": dict(list(held.missing.items())[:20]),
        },
    )


def _answers(context: Context, story: Story) -> None:
    tallies = {engine.name: engine.tally for engine in story.engines}
    asked = sum(tally.requests for tally in tallies.values())
    exact = sum(tally.exact for tally in tallies.values())
    examples = [example for tally in tallies.values() for example in tally.examples]
    context.report(
        WRONG,
        sum(tally.wrong for tally in tallies.values()),
        samples=asked,
        detail={"note": f"{exact} equal to the last bit", "examples": examples},
    )
    context.report(
        DEAD,
        sum(tally.dead for tally in tallies.values()),
        samples=sum(engine.life for engine in story.engines),
        detail={
            "note": f"{sum(tally.killed for tally in tallies.values())} killed on purpose",
            "deaths": [death for tally in tallies.values() for death in tally.deaths],
            "errors": {engine.name: engine.errors() for engine in story.engines},
        },
    )
    context.report(
        REQUESTS,
        asked,
        samples=asked,
        detail={
            "note": f"in {story.seconds / 60:.1f} minutes, seed {story.plot.seed}",
            "cases": {name: tally.requests for name, tally in tallies.items()},
            "slowest_batch_s": {name: tally.slowest_s for name, tally in tallies.items()},
            "minutes": story.seconds / 60,
            "seed": story.plot.seed,
        },
    )
    counters = {engine.name: dict(engine.tally.counters) for engine in story.engines}
    hits = {name: moved.get("vllm:s3ec_hits", 0.0) for name, moved in counters.items()}
    context.report(
        HITS,
        sum(hits.values()),
        samples=asked,
        detail={"cases": hits, "counters": counters}
        | {"series": {engine.name: _hits(engine, story) for engine in story.engines}},
    )


def _hits(engine: LiveEngine, story: Story) -> list[list[float]]:
    """Minute and hits per second, in even parts of the time."""
    part_s = max(story.seconds / _POINTS, 2.0)
    sums: Counter[int] = Counter()
    for moment in engine.tally.moments:
        sums[int((moment.ended_s - story.began_s) / part_s)] += int(moment.hits)
    last = int(story.seconds / part_s)
    return [[part * part_s / 60, sums[part] / part_s] for part in range(last + 1)]


def _memory(context: Context, story: Story) -> None:
    from s3ec.dev.bench.soak_watch import growths

    series = _series(story)
    longest = {growth.engine: growth for growth in sorted(growths(story.samples), key=_length)}
    if not longest:
        why = "no engine lived long enough to tell growth from warm-up"
        context.cannot(MEMORY, why, series=series)
        return
    worst = max(longest.values(), key=lambda growth: growth.share)
    context.report(
        MEMORY,
        worst.share * 100,
        samples=sum(growth.samples for growth in longest.values()),
        detail={
            "note": "median of the last fifth of a life over that of the second; the worst engine",
            "cases": {name: growth.share * 100 for name, growth in longest.items()},
            "lives": [asdict(growth) for growth in longest.values()],
            "series": series,
        },
    )


def _length(growth: Any) -> float:
    minutes: float = growth.minutes
    return minutes


def _series(story: Story) -> dict[str, list[list[float]]]:
    """Engine and life -> minute, MB, descriptors, threads; thinned out."""
    lives: dict[str, list[list[float]]] = {}
    for sample in story.samples:
        lives.setdefault(f"{sample.engine} {sample.life}", []).append(
            [
                (sample.at_s - story.began_s) / 60,
                sample.anon_bytes / 1e6,
                sample.fds,
                sample.threads,
            ]
        )
    return {name: points[:: len(points) // _POINTS + 1] for name, points in lives.items()}


def _faults(context: Context, story: Story) -> None:
    blows = story.blows
    kinds = Counter(kind for blow in blows for kind in blow.struck)
    struck: Counter[str] = Counter()
    for blow in blows:
        struck.update(blow.struck)
    context.report(
        FAULTS,
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
    # Nobody waited after the last one where the soak was ended early.
    whole = story.seconds >= story.plot.minutes * 60
    waited = blows if whole else blows[:-1]
    late = [" and ".join(blow.step.kinds) for blow in waited if blow.back_s is None]
    context.report(
        NOT_BACK,
        len(late),
        samples=len(blows),
        detail={
            "note": f"hits from the bucket again after {statistics.median(back):.1f} s (median)"
            if back
            else "no hit came back",
            "after": late,
            "seconds": measure.spread(back) if back else {},
        },
    )

# SPDX-License-Identifier: Apache-2.0
"""``bench node``: several processes of one node want the same entries at once.

What the server is asked is counted in front of it, by a relay whose address is all that the
processes know. Speed is that of all processes reading all entries from the tier afterwards: pin,
read, verify, let go. A process does not wait for another's fetch for ever, so on a machine that
is too busy to move an entry within seconds there are more GETs; ``fetch_s`` tells.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from s3ec.dev.bench.crew import Member

ROUNDS = 3
_READ_ROUNDS = 7
_OBJECTS = 200
_OBJECTS_QUICK = 24
_GETS, _SPEED = "node.gets_per_key", "node.tier_gb_per_s"
ROWS = (Spec(_GETS, "1", "== 1.0"), Spec(_SPEED, "GB/s"))


def run(context: Context, processes: int = 4) -> None:
    """Measure; needs the SeaweedFS binary.

    Args:
        context: Where rows go.
        processes: How many share the node.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.crew import Hired, crew
    from s3ec.dev.bench.folders import memory_folder
    from s3ec.dev.rigs.relay import Relay

    with contextlib.ExitStack() as stack:
        count = _OBJECTS_QUICK if context.quick else _OBJECTS
        _, corpus = stack.enter_context(filled(context, count))
        log = context.scratch / "requests"
        relay = stack.enter_context(Relay(corpus.endpoint_url, 0.0, request_log=log))
        # A hedge is a second request on purpose, where a server is slow.
        corpus = replace(corpus, endpoint_url=relay.url, hedge=False)
        folder, on_tmpfs = stack.enter_context(memory_folder(context.scratch / "tier"))
        context.say(f"{processes} processes")
        hired = [Hired(corpus, folder / "cache", "auto")] * processes
        members = stack.enter_context(crew(hired))
        context.say(f"{context.rounds(ROUNDS)} rounds of fetching")
        # For warming up: a process that only now imports and connects its client can take longer
        # than the others wait for it, on a busy machine.
        cold = _fetch(members, log)
        rounds = [_fetch(members, log) for _ in range(context.rounds(ROUNDS))]
        about: dict[str, int] = {
            "processes": processes,
            "objects": count,
            "tier_on_tmpfs": on_tmpfs,
        }
        _report_gets(context, cold, rounds, about)
        _bring_back(members)
        context.say(f"{context.rounds(_READ_ROUNDS)} rounds of reading")
        nbytes = processes * count * corpus.entry_bytes
        _report_speed(context, members, nbytes, about)


@dataclass(frozen=True, slots=True)
class Round:
    """How often each object was asked for, and the seconds until the last process had all."""

    gets: Counter[str]
    seconds: float


def _fetch(members: Sequence[Member], log: Path) -> Round:
    """All processes want all entries of an empty tier."""
    from s3ec.dev.bench.crew import together

    before = len(_lines(log))
    answers = together(members, "fetch")
    asked = [line.split() for line in _lines(log)[before:]]
    together(members, "empty")
    objects = [name for method, name, _ in asked if method == "GET" and "/objects/" in name]
    seconds = max(one["ended"] for one in answers) - min(one["started"] for one in answers)
    return Round(Counter(name.partition("?")[0] for name in objects), seconds)


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="latin-1").splitlines()


def _bring_back(members: Sequence[Member]) -> None:
    members[0].tell("fetch")
    members[0].answer()


def _report_gets(
    context: Context, cold: Round, rounds: Sequence[Round], about: Mapping[str, int]
) -> None:
    """The worst round gives the value: one GET too many in any of them is one too many."""
    count = about["objects"]
    per_key = [one.gets.total() / count for one in rounds]
    # More and fewer must not make up for each other.
    odd = Counter(times for one in rounds for times in one.gets.values() if times != 1)
    missing = sum(count - len(one.gets) for one in rounds)
    value = max(per_key, key=lambda one: abs(one - 1.0))
    context.report(
        _GETS,
        value,
        samples=sum(one.gets.total() for one in rounds),
        detail={
            "spread": measure.spread(per_key),
            "gets": [one.gets.total() for one in rounds],
            "gets_of_the_first_round_which_does_not_count": cold.gets.total(),
            "fetch_s": [one.seconds for one in rounds],
            "keys_asked_for_so_often": {str(times): keys for times, keys in odd.items()},
            "keys_never_asked_for": missing,
            "note": f"{count} entries, {about['processes']} processes; the worst round",
            **about,
        },
    )


def _report_speed(
    context: Context, members: Sequence[Member], nbytes: int, about: Mapping[str, int]
) -> None:
    from s3ec.dev.bench.crew import together

    speeds = []
    for number in range(1 + context.rounds(_READ_ROUNDS)):
        answers = together(members, "read")
        # From the first that began to the last that ended.
        seconds = max(one["ended"] for one in answers) - min(one["started"] for one in answers)
        if number > 0:  # the first is for warming up
            speeds.append(nbytes / seconds / 1e9)
    context.report(
        _SPEED,
        statistics.median(speeds),
        samples=len(speeds),
        detail={"spread": measure.spread(speeds), "note": "pin, read, verify, all", **about},
    )


BENCH = Bench(ROWS, run)

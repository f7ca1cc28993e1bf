# SPDX-License-Identifier: Apache-2.0
"""``bench metrics``: engine steps per second with all metrics, beside an engine without them.

Both are real engines with a tiny model, so a step takes some milliseconds, less than with any
model of use: what metrics take of it shows as large as it can. They do the same steps in turn:
pictures from the device, from this node's disk and encoded ones, and then many tokens. vLLM's own
metrics are on in both. Nobody scrapes them.

A second is one of processor time, of all threads of the engine's process: what else runs on a
machine changes the other kind by far more than metrics do. That one stands in the detail. A row of
its own has the time that the scheduler's thread spends in each step on metrics alone.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess

_RATIO = "metrics.steps_ratio"
_STEP = "metrics.step_p50_us"
ROWS = (Spec(_RATIO, "ratio", ">= 0.98"), Spec(_STEP, "us"))
_ON, _OFF = "with metrics", "without"
_ROUNDS = 60
_TOKENS = 96
_STEPS = 2000
_RUNNING = 32  # requests that decode in such a step
_AT_A_TIME = 4  # requests, which go from step to step together
_PICTURES = 8  # that the node holds; the device has room for some of them
_LOOKUPS = "vllm:s3ec_lookups{tier=node,outcome=hit}"
_LOADS = "vllm:s3ec_load_time_seconds_count"


def run(context: Context) -> None:
    """Compare the two.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or the engines are not what they should
            be.
    """
    from s3ec.dev.bench.hooks import need_vllm
    from s3ec.dev.bench.soak_engine import write_patterns

    need_vllm(context)
    _report_step(context)
    pictures = write_patterns(context.scratch / "shown", _PICTURES, 1)
    roles = {name: ("ec_both", {"wait": "always"}) for name in (_ON, _OFF)}
    unmetered = {
        # Another name: vLLM looks for a registered one before it looks into a module.
        "ec_connector": "UnmeteredConnector",
        "ec_connector_module_path": "s3ec.dev.bench.unmetered",
    }
    with engines.running(context, roles, connectors={_OFF: unmetered}) as rig:
        known = [secrets.token_hex(32) for _ in pictures]
        for engine in rig.by_name.values():
            _round(engine, pictures, known)
        rounds = context.rounds(_ROUNDS)
        context.say(f"{rounds} rounds of {_PICTURES + 1} requests each")
        cases = {
            name: partial(_round, engine, pictures, known) for name, engine in rig.by_name.items()
        }
        found = measure.interleave(cases, rounds=rounds, warmup=3)
        _check(rig)
    speeds = {name: [one.steps / one.cpu_s for one in rounds] for name, rounds in found.items()}
    walls = {name: [one.steps / one.wall_s for one in rounds] for name, rounds in found.items()}
    ratios = measure.ratios(speeds[_ON], speeds[_OFF])
    context.report(
        _RATIO,
        statistics.median(ratios),
        samples=len(ratios),
        detail={
            "spread": measure.spread(ratios),
            "note": "steps per second of processor time, two real engines, round by round",
            "steps_per_cpu_s": {name: measure.spread(values) for name, values in speeds.items()},
            "by_the_clock": measure.spread(measure.ratios(walls[_ON], walls[_OFF])),
        },
    )


def _report_step(context: Context) -> None:
    """What a step of many requests takes longer on the scheduler's thread, and nothing else."""
    from s3ec.counters import TIME_BOUNDS_S
    from s3ec.dev.bench import hooks_rig

    with hooks_rig.rig(context.scratch, hooks_rig.Size(8, 2_000)) as rig:
        shell, counters = rig.shell, rig.node.counters
        for name in ("fetch_time.tier", "fetch_time.bucket", "load_time", "wait_time"):
            for bound in TIME_BOUNDS_S[:12]:
                counters.observe(name, bound)
        output = hooks_rig.step_output(tokens=_RUNNING)
        output.num_scheduled_tokens = {f"r{number}": 1 for number in range(_RUNNING)}
        output.scheduled_cached_reqs.req_ids = list(output.num_scheduled_tokens)
        output.scheduled_cached_reqs.num_computed_tokens = [1000] * _RUNNING

        def step() -> None:
            if shell.parts.scheduler is not None:
                shell.parts.scheduler.lookups.end_pass(output)
            shell.get_ec_connector_stats()

        def busy_step() -> None:
            counters.observe("load_time", 0.002)
            step()

        with measure.no_collection():
            idle = measure.time_each(step, [()] * _STEPS)
            busy = measure.time_each(busy_step, [()] * _STEPS)
        counted = len(counters.snapshot())
    shown = {"idle step": idle, "a step that loads": busy}
    context.report_slowest(
        _STEP,
        {case: [measure.percentile(times, 50) / 1000] for case, times in shown.items()},
        samples=2 * _STEPS,
        detail={"counters": counted},
    )


class _Round(NamedTuple):
    """What one round of one engine took."""

    steps: int
    cpu_s: float
    wall_s: float


def _round(engine: EngineProcess, pictures: Sequence[Path], known: Sequence[str]) -> _Round:
    """Requests for what the node holds, and one for what nobody has."""
    asked = [engines.prompt([one], [name]) for one, name in zip(pictures, known, strict=True)]
    asked.append(engines.prompt([pictures[0]], [secrets.token_hex(32)]))
    steps = 0
    began_s, began_cpu_s = time.perf_counter(), _cpu_s(engine.pid)
    for first in range(0, len(asked), _AT_A_TIME):
        answers = engine.chat(asked[first : first + _AT_A_TIME], max_tokens=_TOKENS)
        # Requests that are asked together share their steps.
        steps += max(len(one["token_ids"]) for one in answers)
    return _Round(steps, _cpu_s(engine.pid) - began_cpu_s, time.perf_counter() - began_s)


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process, as exact as the kernel knows it.

    Raises:
        CannotMeasureError: The kernel does not tell.
    """
    total_ns = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                total_ns += int((thread / "schedstat").read_text().split()[0])
    except OSError as exc:
        raise CannotMeasureError(f"no processor time of a process: {exc}") from exc
    if not total_ns:
        raise CannotMeasureError("this kernel keeps no schedstat")
    return total_ns / 1e9


def _check(rig: engines.Engines) -> None:
    """Whether one engine has all metrics, and the other none.

    Raises:
        CannotMeasureError: Something else was measured.
    """
    on, off = (engines.counters(rig.by_name[name]) for name in (_ON, _OFF))
    if not on.get(_LOOKUPS) or not on.get(_LOADS) or "vllm:s3ec_tier_bytes" not in on:
        raise CannotMeasureError("the engine with metrics has none")
    if any(off.get(name) for name in (_LOOKUPS, _LOADS, engines.HITS)):
        raise CannotMeasureError("the engine without metrics has some")


BENCH = Bench(ROWS, run)

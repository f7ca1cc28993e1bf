# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of the workload, tells vLLM's faults from ours, and sums up."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from s3ec.connector.vllm_config import FeatureReader
from s3ec.dev.rigs.models import write_qwen2_vl
from tests.fuzz.connectors import S3EC, Bench, Repeat, RepeatRank, bench
from tests.fuzz.engine import Engine, Options, Step, vllm_config
from tests.fuzz.outside import BrokenPromiseError
from tests.fuzz.workload import Run

# Declares what a request without pixels brings, for images and videos.
MODEL = Path(__file__).parents[2] / "build" / "fuzz" / "qwen2-vl"
# What can go wrong though every grant is delivered, and whatever the connector answers.
VLLMS = ("encoder cache miss", "rows of another picture", "left in the device's encoder cache")


@dataclass
class Verdict:
    """How one seed ended.

    Attributes:
        seed: Which.
        stat: What happened, counted.
        failure: What broke, in one line; None if nothing did.
        is_vllms: Whether it breaks as well where every grant is delivered perfectly.
        trace: How it ended.
    """

    seed: int
    stat: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    is_vllms: bool = False
    trace: str = ""


class Fuzz:
    """One process's means to run seeds."""

    def __init__(self, model: Path, bench: Bench) -> None:
        self._model = write_qwen2_vl(model)
        self._bench = bench
        config = vllm_config(self._model, "fcfs", False, 128, True)
        self._needs_embedding = FeatureReader(config.model_config).needs_embedding

    def engine(self, options: Options) -> tuple[Engine, S3EC]:
        """An engine with s3ec behind it, and nothing asked yet."""
        s3ec = S3EC(options, self._needs_embedding, self._bench)
        engine = Engine(self._model, options, s3ec, s3ec.ranks)
        s3ec.follow(engine)
        return engine, s3ec

    def run(self, seed: int) -> Verdict:
        """Run one seed."""
        run = Run(seed, self._model, self._bench, self._needs_embedding)
        verdict = Verdict(seed)
        try:
            run.live()
        except Exception as exc:  # noqa: BLE001 - whatever ends an engine is a finding
            verdict.failure = _one_line(exc)
            verdict.trace = _trace(run, exc)
            if not isinstance(exc, BrokenPromiseError) or exc.kind in VLLMS:
                again = self._repeat(run)
                verdict.is_vllms = again is not None and _kind(again) == _kind(exc)
        finally:
            run.close()
        verdict.stat = run.engine.stat
        answers = run.s3ec.answers
        verdict.stat["deferrals"] += answers.count(("ensure", False))
        verdict.stat["grants"] += answers.count(("has", True))
        return verdict

    def _repeat(self, run: Run) -> Exception | None:
        """The same events and answers, with every grant delivered whole and in time."""
        engine: Engine
        side = RepeatRank(lambda: engine.weights)
        sides = [side] * run.options.ranks
        engine = Engine(self._model, run.options, Repeat(run.s3ec.answers), sides)
        try:
            for event, args in list(run.engine.journal):
                repeat(engine, event, args)
            engine.check_rest()
        except Exception as exc:  # noqa: BLE001 - as in run
            return exc
        return None


def repeat(engine: Engine, event: str, args: tuple[Any, ...]) -> None:
    """One event of a journal."""
    if event == "reset_prefix_cache":
        engine.reset_prefix_cache(preempt=args[0])
    elif event == "change_weights":
        engine.change_weights(call_first=args[0])
    elif event == "execute":
        engine.execute(eos=args[0])
    else:
        getattr(engine, event)(*args)


def _kind(exc: Exception) -> str:
    return exc.kind if isinstance(exc, BrokenPromiseError) else type(exc).__name__


def _one_line(exc: Exception) -> str:
    if isinstance(exc, BrokenPromiseError):
        return str(exc)
    place = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{exc!r} in {Path(place.filename).name}:{place.lineno}"


def _trace(run: Run, exc: Exception) -> str:
    """What the engine was, its last events, and where it broke."""
    lines = [f"{run.options}", f"{run.habits}"]
    for event, args in run.engine.journal[-30:]:
        lines.append(f"  {event} {args if event != 'add' else _asked(args[0])}")
    lines += map(_in_flight, run.engine.steps)
    for rank, runner in enumerate(run.engine.runners):
        held = {name[:12]: len(rows) for name, rows in runner.cache.items()}
        lines.append(f"  rank {rank} holds {held}")
    lines += traceback.format_exception(exc)[-6:]
    return "\n".join(lines)


def _in_flight(step: Step) -> str:
    output = step.output
    loads = [(one.identifier[:12], one.shape.rows) for one in getattr(step.plan, "loads", ())]
    freed = [one[:12] for one in output.free_encoder_mm_hashes]
    return (
        f"  in flight: tokens {output.num_scheduled_tokens}, encode "
        f"{output.scheduled_encoder_inputs}, freed {freed}, load {loads}"
        f"{', executed' if step.result is not None else ''}"
    )


def _asked(asked: Any) -> str:
    features = [
        (one.identifier[:12], one.mm_position.offset, one.mm_position.get_num_embeds())
        for one in asked.features
    ]
    return f"{asked.name}: {len(asked.tokens)} tokens, {features}"


@contextmanager
def fuzzing(model: Path = MODEL) -> Iterator[Fuzz]:
    """A process that runs seeds."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        with bench() as shared:
            yield Fuzz(model, shared)
    finally:
        logging.disable(logging.NOTSET)


def summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    """The last line."""
    stat: Counter[str] = Counter()
    for verdict in verdicts:
        stat.update(verdict.stat)
    ours = [verdict.seed for verdict in verdicts if verdict.failure and not verdict.is_vllms]
    vllms = [verdict.seed for verdict in verdicts if verdict.is_vllms]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(stat.items()))
    return (
        f"scheduler: {len(verdicts)} seeds in {seconds:.0f} s: {len(ours)} failed {_some(ours)}, "
        f"{len(vllms)} failed by vLLM alone {_some(vllms)}; {counts}"
    )


def _some(seeds: Sequence[int]) -> str:
    if not seeds:
        return "(none)"
    return f"({', '.join(map(str, seeds[:10]))}{', ...' if len(seeds) > 10 else ''})"


def seed_range(text: str) -> range:
    """``7``, or ``0-300`` with its end left out."""
    first, dash, end = text.partition("-")
    return range(int(first), int(end)) if dash else range(int(first), int(first) + 1)


def main(arguments: Sequence[str]) -> int:
    """Run seeds; the exit status is 1 where one of them failed by s3ec."""
    parser = argparse.ArgumentParser(prog="fuzz scheduler", description=__doc__)
    parser.add_argument("--seeds", type=seed_range, default=range(300), help="such as 0-300, or 7")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no seed after")
    parser.add_argument("--trace", action="store_true", help="print how a failing seed ends")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    verdicts: list[Verdict] = []
    with fuzzing() as fuzz:
        for seed in given.seeds:
            if time.monotonic() > began + given.seconds:
                break
            verdicts.append(verdict := fuzz.run(seed))
            if verdict.failure is None:
                continue
            whose = "vLLM alone" if verdict.is_vllms else "s3ec"
            print(f"seed {verdict.seed} failed by {whose}: {verdict.failure}")
            if not verdict.is_vllms:
                print(f"  again: make fuzz ARGS='scheduler --seeds {verdict.seed} --trace'")
            if given.trace:
                print(verdict.trace)
            sys.stdout.flush()
    print(summary(verdicts, time.monotonic() - began))
    return int(any(verdict.failure and not verdict.is_vllms for verdict in verdicts))

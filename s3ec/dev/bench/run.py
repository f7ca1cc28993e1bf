# SPDX-License-Identifier: Apache-2.0
"""Runs one benchmark in this process, or all of them, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import s3ec
from s3ec.dev.bench import machine, registry
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Result, Row, Spec

Say = Callable[[str], None]
ALL_TIME_S = 20 * 60.0


def run_here(name: str, *, quick: bool, say: Say, **options: Any) -> Result:
    """Run one benchmark in this process.

    Args:
        name: Which.
        quick: A look with few rounds.
        say: Shows progress.
        options: For its ``run``, where that takes any.

    Raises:
        KeyError: There is none of this name.
        RuntimeError: The benchmark forgot a row, which is a fault of its code.
    """
    bench = registry.load(name)
    about = machine.describe()
    with (
        tempfile.TemporaryDirectory(prefix="s3ec-bench-") as scratch,
        _stdout_to_stderr(),
    ):
        context = Context(bench, quick=quick, scratch=Path(scratch), say=say)
        why = ""
        try:
            bench.run(context, **options)
        except CannotMeasureError as exc:
            why = str(exc)
    if context.missing and not why:
        raise RuntimeError(f"benchmark {name} did not report {', '.join(context.missing)}")
    return Result(name, about, context.rows(why))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send whatever libraries print to stderr: stdout is for the result alone.

    vLLM logs to stdout, and its children write to the descriptor, not to sys.stdout.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 1)
        os.close(saved)


def run_all(
    *,
    quick: bool,
    say: Say,
    time_s: float = ALL_TIME_S,
    names: Sequence[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run every benchmark, one after the other, within ``time_s`` seconds.

    Each has a process of its own, so that one that crashes or hangs costs its own rows only,
    and none inherits threads or memory from another.
    """
    started = clock()
    names = registry.together() if names is None else list(names)
    results = []
    for position, name in enumerate(names):
        later_s = sum(registry.ENTRIES[other].typical_s for other in names[position + 1 :])
        left_s = time_s - (clock() - started)
        # One that overruns may use what the later ones leave, but not push them out.
        limit_s = max(left_s - later_s, min(left_s, registry.ENTRIES[name].typical_s))
        say(f"{name} ({position + 1} of {len(names)})")
        results.append(_run_child(name, quick=quick, limit_s=limit_s))
    return results


def child_env() -> dict[str, str]:
    """The environment in which a child finds this very s3ec."""
    root = str(Path(s3ec.__file__).parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *others]))}


def bench_command(name: str, quick: bool) -> list[str]:
    command = [sys.executable, "-m", "s3ec", "bench", name, "--json", "-"]
    return [*command, "--quick"] if quick else command


def _run_child(name: str, *, quick: bool, limit_s: float) -> Result:
    bench = registry.load(name)
    if limit_s <= 0:
        return _fallen(name, bench, "there was no time left for it")
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            bench_command(name, quick),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_env(),
            start_new_session=True,  # so that its own children end with it
        )
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return _fallen(name, bench, f"it was ended after {limit_s:.0f} s")
        finally:
            if child.returncode is None:  # not reaped, so the group's number is still its own
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        try:
            return Result.from_json(json.loads(out))
        except (ValueError, KeyError, TypeError):
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "no message"
            return _fallen(name, bench, f"it ended with exit status {child.returncode}: {why}")


def _fallen(name: str, bench: Bench, why: str) -> Result:
    """The result of a benchmark that did not get to its end: that is a failure, not a gap."""
    completed = Spec(f"{name}.completed", "1", ">= 1")
    rows = [Row(completed, 0.0, 1, {"note": why})]
    rows += [Row(spec, None, 0, {"why": f"the benchmark failed: {why}"}) for spec in bench.rows]
    return Result(name, machine.describe(), rows)


def merged(results: Sequence[Result], name: str = "all") -> Result:
    """All rows under one name; those of rows begin with their benchmark, so they stay unique."""
    about = results[0].machine if results else machine.describe()
    return Result(name, about, [row for result in results for row in result.rows])

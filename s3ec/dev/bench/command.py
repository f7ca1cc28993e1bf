# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: figures from this machine, each beside what it is compared with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import JsonOption
from s3ec.cli.output import EXIT_WRONG, App, Command, console, epilog, print_json
from s3ec.dev.bench import rag_options
from s3ec.dev.bench.registry import CORPUS, DATA, ENTRIES, together
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.dev.bench.result import Result

app = App(
    add_completion=False,
    help="Measure on this machine; every figure beside what it is compared with.",
    no_args_is_help=True,
    epilog=epilog(
        ("s3ec bench list", "what can be measured"),
        ("s3ec bench hooks", "one benchmark, as a table"),
        ("s3ec bench data --json", "all about the data path, for machines"),
        ("s3ec bench all --html bench.html", "all of them, as one file to look at"),
    ),
)

_STDOUT = "-"
_DEVELOPMENT = "For the development of s3ec"
# Faults, servers far away, real engines: what they measure does not help to run a fleet.
_OF_DEVELOPERS = ("fetch80", "dead", "soak")


class BenchCommand(Command):
    """Takes ``--json`` without a value for ``--json -``, which Typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the value where it is left out."""
        filled: list[str] = []
        for argument in args:
            if filled[-1:] == ["--json"] and argument[:1] == "-" and argument != _STDOUT:
                filled.append(_STDOUT)
            filled.append(argument)
        if filled[-1:] == ["--json"]:
            filled.append(_STDOUT)
        return super().parse_args(ctx, filled)


JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE|-]",
        help="Write the result as JSON; without a file, or with `-`, to stdout, and no table.",
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result.")
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a self-contained report with plots."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look with few rounds; no figures to quote.")
]


@app.command("list", epilog=epilog(("s3ec bench list", "what can be measured")))
def list_benches(as_json: JsonOption = False) -> None:
    """Name all benchmarks."""
    if as_json:
        rows = [{"bench": name, "summary": entry.summary} for name, entry in ENTRIES.items()]
        print_json({"benches": rows})
        return
    width = max(map(len, ENTRIES))
    for name, entry in ENTRIES.items():
        typer.echo(f"{name:<{width}}  {entry.summary}")


def _one(
    name: str,
    json_file: str | None,
    plot: Path | None,
    quick: bool,
    html: Path | None = None,
    **options: Any,
) -> None:
    """Run one benchmark and publish it."""
    from s3ec.dev.bench import plot as drawing
    from s3ec.dev.bench import registry, run

    _check_files(json_file, plot, None)
    _check_file(html, "--html")
    bench = registry.load(name)
    with _saying(name) as say:
        result = run.run_here(name, quick=quick, say=say, **options)
    _publish([result], result, json_file)
    if plot is not None:
        plot.write_bytes(drawing.png(bench, result))
    if html is not None and bench.page is not None:
        html.write_text(bench.page(result), encoding="utf-8")
    if result.failed:
        raise typer.Exit(EXIT_WRONG)


def _fetch(
    latency_ms: Annotated[
        int,
        typer.Option(
            "--latency-ms",
            metavar="MS",
            min=0,
            max=1000,
            help="Put the server so far away; the rows are then named `fetchMS`.",
        ),
    ] = 0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    _one(f"fetch{latency_ms or ''}", json_file, plot, quick)


def _hydrate(
    objects: Annotated[
        int | None,
        typer.Option(
            "--objects",
            metavar="N",
            min=1,
            max=100_000,
            help="How many, of 2.75 MB. Unset: 5,000, or fewer where the disk has not eight times "
            "their size free.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    _one("hydrate", json_file, plot, quick, objects=objects)


def _number_of_keys(text: str) -> int:
    """A whole number, also as 1e7 or 10_000_000."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (1e4 <= number <= 1e9 and number.is_integer()):
        raise typer.BadParameter(f"{text!r} is not a whole number from 1e4 to 1e9")
    return int(number)


def _index(
    keys: Annotated[
        int | None,
        typer.Option(
            "--keys",
            metavar="N",
            parser=_number_of_keys,
            help="Keys in the largest index, 1e7 if left out; 1e8 take 7 GB of scratch space.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    options: dict[str, Any] = {} if keys is None else {"keys": keys}
    _one("index", json_file, plot, quick, **options)


def _soak(
    minutes: Annotated[
        float,
        typer.Option("--minutes", metavar="N", min=0.1, max=10_000, help="Of faults."),
    ] = 60,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="S", min=0, help="The same one gives the same faults."),
    ] = 0,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    _one("soak", json_file, plot, quick, minutes=minutes, seed=seed)


def _rag(
    workload: rag_options.Workload = "questions",
    requests: rag_options.RequestsFile = None,
    write_requests: rag_options.WrittenFile = None,
    form: rag_options.Form = "dynamo",
    factor: rag_options.Factor = None,
    seed: rag_options.Seed = 0,
    latency_ms: rag_options.Latencies = "0,20,80",
    loop: rag_options.Loop = "closed",
    clients: rag_options.Clients = 2,
    rate: rag_options.Rate = 0.5,
    configs: rag_options.Configs = "1,2,3,4,5,6",
    object_mb: rag_options.Size = "2.75",
    device: rag_options.Device = "cpu",
    json_file: JsonFile = None,
    html: HtmlFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    from s3ec.dev.bench.rag import Options, write_requests_file

    options = Options(
        workload=workload,
        requests=requests,
        factor=factor,
        seed=seed,
        latency_ms=latency_ms,
        loop=loop,
        clients=clients,
        rate_per_s=rate,
        configs=configs,
        object_mb=object_mb,
        device=device,
    )
    if write_requests is not None:
        _check_file(write_requests, "--write-requests")
        typer.echo(write_requests_file(options, write_requests, form))
        return
    # A quick run leaves out what takes long, unless it was asked for.
    asked = options if options != Options() or not quick else None
    _one("rag", json_file, plot, quick, html, options=asked)


# Those with options of their own.
_COMMANDS: dict[str, Callable[..., None]] = {
    "fetch": _fetch,
    "hydrate": _hydrate,
    "index": _index,
    "soak": _soak,
    "rag": _rag,
}


def _command(name: str) -> Callable[..., None]:
    """The command of one benchmark."""

    def bench(json_file: JsonFile = None, plot: PlotFile = None, quick: Quick = False) -> None:
        _one(name, json_file, plot, quick)

    command = _COMMANDS.get(name, bench)
    command.__doc__ = f"{ENTRIES[name].summary}\n\nExits with 1 where a row misses its reach."
    return command


def _examples(name: str) -> str:
    own = {
        "fetch": [("s3ec bench fetch --latency-ms 80", "from a bucket that is far away")],
        "hydrate": [("s3ec bench hydrate --objects 500", "with fewer of them")],
        "soak": [("s3ec bench soak --minutes 5 --seed 7", "shorter, with other faults")],
        "index": [("s3ec bench index --keys 1e8", "of a larger corpus; 7 GB of scratch space")],
        "rag": [
            ("s3ec bench rag --html rag.html", "and a page with plots"),
            ("s3ec bench rag --configs 1,3 --latency-ms 20 --loop open", "two of them, at a rate"),
            ("s3ec bench rag --device cuda --factor 0.2", "on a GPU"),
            ("s3ec bench rag --write-requests r.jsonl --format dynamo", "for other systems"),
        ],
    }
    return epilog(
        (f"s3ec bench {name}", "a table"),
        *own.get(name, []),
        (f"s3ec bench {name} --json | jq '.rows[] | select(.ok == false)'", "for machines"),
        (f"s3ec bench {name} --plot {name}.png", "and a plot"),
    )


for _name in ENTRIES:
    app.command(
        _name,
        cls=BenchCommand,
        epilog=_examples(_name),
        rich_help_panel=_DEVELOPMENT if _name in _OF_DEVELOPERS else None,
    )(_command(_name))


def _group(label: str, names: Sequence[str], what: str) -> Callable[..., None]:
    """The command that runs several benchmarks."""

    def group(
        json_file: JsonFile = None,
        html: HtmlFile = None,
        plot: PlotFile = None,
        quick: Quick = False,
    ) -> None:
        from s3ec.dev.bench import plot as drawing
        from s3ec.dev.bench import registry, report, run

        _check_files(json_file, plot, html)
        with _saying(label) as say:
            results = run.run_all(quick=quick, say=say, names=names)
        whole = run.merged(results, label)
        _publish(results, whole, json_file)
        if plot is not None:
            plot.write_bytes(drawing.png(None, whole))
        if html is not None:
            plots = {
                result.bench: drawing.png(registry.load(result.bench), result) for result in results
            }
            html.write_text(report.html(results, plots), encoding="utf-8")
        if whole.failed:
            raise typer.Exit(EXIT_WRONG)

    group.__doc__ = (
        f"Run {what} within 20 minutes, each in a process of its own.\n\n"
        "Exits with 1 where a row misses its reach or a benchmark does not get to its end."
    )
    return group


for _name, _names, _what in (
    ("data", DATA, "all benchmarks of the data path"),
    ("corpus", CORPUS, "all benchmarks of jobs over a corpus"),
    ("all", together(), "all benchmarks"),
):
    app.command(
        _name,
        cls=BenchCommand,
        epilog=epilog(
            (f"s3ec bench {_name} --html bench.html", "tables, and a report with plots"),
            (f"s3ec bench {_name} --json --quick", "does everything still run?"),
        ),
    )(_group(_name, _names, _what))


def _check_files(json_file: str | None, plot: Path | None, html: Path | None) -> None:
    """Refuse what could not be written or drawn, before the measuring.

    Raises:
        ConfigError: Names the option.
    """
    from s3ec.dev.bench import plot as drawing

    _check_file(None if json_file == _STDOUT else json_file, "--json")
    _check_file(plot, "--plot")
    _check_file(html, "--html")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError("--plot: the file's name must end with .png")
    if plot is not None or html is not None:
        drawing.need_matplotlib()


def _check_file(path: str | Path | None, option: str) -> None:
    """Refuse a file that could not be written, before the measuring."""
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written")


@contextmanager
def _saying(what: str) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: one line that changes on a terminal, else a line for each.

    No spinner: its thread would run beside what is measured.
    """
    before, behind = ("\r\x1b[2K", "") if sys.stderr.isatty() else ("", "\n")

    def say(line: str) -> None:
        sys.stderr.write(f"{before}bench {what}: {line}{behind}")
        sys.stderr.flush()

    try:
        yield say
    finally:
        sys.stderr.write(before)
        sys.stderr.flush()


def _publish(results: list[Result], whole: Result, json_file: str | None) -> None:
    from rich.text import Text

    from s3ec.dev.bench import registry
    from s3ec.dev.bench.table import machine_line, table

    if json_file == _STDOUT:
        print_json(whole.to_json())
        return
    if json_file is not None:
        text = json.dumps(whole.to_json(), indent=2, ensure_ascii=False)
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    out = console()
    for result in results:
        out.print(table(result))
        out.print()
        more = registry.load(result.bench).table if result.bench in ENTRIES else None
        if more is not None and (shown := more(result)) is not None:
            out.print(shown)
            out.print()
    out.print(Text(machine_line(whole.machine), style="dim"))
    sys.stdout.flush()

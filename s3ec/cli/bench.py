# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: figures from this machine, each beside what it is compared with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.bench.registry import ENTRIES
from s3ec.cli.help import EXIT_WRONG, epilog
from s3ec.cli.options import JsonOption, reporting
from s3ec.cli.output import console, print_json
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.bench.result import Result

app = typer.Typer(
    help="Measure on this machine; every figure beside what it is compared with.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=epilog(
        ("s3ec bench list", "what can be measured"),
        ("s3ec bench hooks", "one benchmark, as a table"),
        ("s3ec bench all --html bench.html", "all of them, as one file to look at"),
    ),
)

JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write the result as JSON; `-` is stdout, and no table."
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look with few rounds; no figures to quote.")
]


@app.command("list", epilog=epilog(("s3ec bench list", "what can be measured")))
def list_benches(as_json: JsonOption = False) -> None:
    """Name all benchmarks."""
    if as_json:
        print_json([{"bench": name, "summary": entry.summary} for name, entry in ENTRIES.items()])
        return
    width = max(map(len, ENTRIES))
    for name, entry in ENTRIES.items():
        typer.echo(f"{name:<{width}}  {entry.summary}")


def _command(name: str) -> Callable[..., None]:
    """The command of one benchmark."""

    def bench(
        json_file: JsonFile = None,
        plot: Annotated[
            Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result.")
        ] = None,
        quick: Quick = False,
    ) -> None:
        from s3ec.bench import plot as drawing
        from s3ec.bench import registry, run

        _check_file(None if json_file == "-" else json_file, "--json")
        if plot is not None:
            _check_file(plot, "--plot")
            if plot.suffix.lower() != ".png":
                raise ConfigError("--plot: the file's name must end with .png")
            drawing.need_matplotlib()
        with _saying(name) as say:
            result = run.run_here(name, quick=quick, say=say)
        _publish([result], result, json_file)
        if plot is not None:
            plot.write_bytes(drawing.png(registry.load(name), result))
        if result.failed:
            raise typer.Exit(EXIT_WRONG)

    bench.__doc__ = f"{ENTRIES[name].summary}\n\nExits with 1 where a row misses its reach."
    return bench


for _name in ENTRIES:
    app.command(
        _name,
        epilog=epilog(
            (f"s3ec bench {_name}", "a table"),
            (f"s3ec bench {_name} --json - | jq '.rows[] | select(.ok == false)'", "for machines"),
            (f"s3ec bench {_name} --plot {_name}.png", "and a plot"),
        ),
    )(reporting(_command(_name)))


@app.command(
    "all",
    epilog=epilog(
        ("s3ec bench all --html bench.html", "tables, and a report with plots"),
        ("s3ec bench all --json bench.json --quick", "does everything still run?"),
    ),
)
@reporting
def bench_all(
    json_file: JsonFile = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a self-contained report with plots."),
    ] = None,
    quick: Quick = False,
) -> None:
    """Run all benchmarks within 20 minutes, each in a process of its own.

    Exits with 1 where a row misses its reach or a benchmark does not get to its end.
    """
    from s3ec.bench import plot as drawing
    from s3ec.bench import registry, report, run

    _check_file(None if json_file == "-" else json_file, "--json")
    if html is not None:
        _check_file(html, "--html")
        drawing.need_matplotlib()
    with _saying("all") as say:
        results = run.run_all(quick=quick, say=say)
    whole = run.merged(results)
    _publish(results, whole, json_file)
    if html is not None:
        plots = {
            result.bench: drawing.png(registry.load(result.bench), result) for result in results
        }
        html.write_text(report.html(results, plots), encoding="utf-8")
    if whole.failed:
        raise typer.Exit(EXIT_WRONG)


def _check_file(path: str | Path | None, option: str) -> None:
    """Refuse a file that could not be written, before the measuring."""
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written")


@contextmanager
def _saying(what: str) -> Iterator[Callable[[str], None]]:
    """One line of progress on stderr, where that is a terminal.

    No spinner: its thread would run beside what is measured.
    """
    if not sys.stderr.isatty():
        yield lambda _line: None
        return

    def say(line: str) -> None:
        sys.stderr.write(f"\r\x1b[2Kbench {what}: {line}")
        sys.stderr.flush()

    try:
        yield say
    finally:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def _publish(results: list[Result], whole: Result, json_file: str | None) -> None:
    from rich.text import Text

    from s3ec.bench.table import machine_line, table

    if json_file == "-":
        print_json(whole.to_json())
        return
    if json_file is not None:
        text = json.dumps(whole.to_json(), indent=2, ensure_ascii=False)
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    out = console()
    for result in results:
        out.print(table(result))
        out.print()
    out.print(Text(machine_line(whole.machine), style="dim"))
    sys.stdout.flush()

# SPDX-License-Identifier: Apache-2.0
"""``s3ec doctor``: what is wrong here, and how to mend it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.help import EXIT_WRONG, epilog
from s3ec.cli.options import JsonOption, Source, with_settings
from s3ec.cli.output import console, print_json, safe
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from s3ec.doctor.report import Check
    from s3ec.doctor.run import Step

_TRANSFER = "--ec-transfer-config"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_NAME_WIDTH = 15


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the tree."""
    app.command(
        "doctor",
        epilog=epilog(
            ("s3ec doctor --bucket embeddings", "bucket and node"),
            (
                "s3ec doctor --config @ec.json -- --model google/gemma-3-27b-it",
                "the model's namespace too",
            ),
            (
                "s3ec doctor -- vllm serve MODEL --ec-transfer-config '{...}'",
                "the whole command line of a deployment",
            ),
            ("s3ec doctor --json | jq '.checks[] | select(.verdict==\"fail\")'", "for machines"),
        ),
    )(with_settings(doctor))


def doctor(
    source: Source,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM ARGS", help="Arguments of `vllm serve`."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name and version of the store, for its line in the table of stores; unset: what "
            "the store calls itself.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong before a fleet starts, and how to mend it.

    Looks at settings, credentials, bucket, clock, conditional writes, cache folder and vLLM;
    writes and deletes a few small objects below `.s3ec-probe/`. Warnings leave the exit status 0.
    Ends with a line for the README's table of stores.
    """
    vllm_args = vllm_args or None
    source = _completed(source, vllm_args or [])
    try:
        checks = _examine(source, vllm_args, as_json)
    except ConfigError as exc:
        if as_json:
            print_json(_unusable(str(exc)))
        raise
    failed = any(check.outcome.verdict == "fail" for check in checks)
    line = _compatibility(checks, server)
    if as_json:
        told = [check.to_json() for check in checks]
        print_json({"ok": not failed, "checks": told, "compatibility": line})
    elif line is not None:
        from s3ec.doctor.compatibility import COLUMNS, row

        typer.echo(f"\n{row(list(COLUMNS.values()))}\n{row(list(line.values()))}")
    if failed:
        raise typer.Exit(EXIT_WRONG)


def _completed(source: Source, vllm_args: Sequence[str]) -> Source:
    """Take the settings out of vLLM's arguments where --config does not give them."""
    if source.config is not None:
        return source
    for position, arg in enumerate(vllm_args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") != _TRANSFER:
            continue
        if equals:
            return Source(value, source.overrides, _TRANSFER)
        if position + 1 < len(vllm_args):
            return Source(vllm_args[position + 1], source.overrides, _TRANSFER)
    return source


def _examine(source: Source, vllm_args: Sequence[str] | None, as_json: bool) -> list[Check]:
    from s3ec.doctor.run import STEPS, examine

    loaded, transfer = source.load(), source.transfer()
    page = None if as_json else _Page(console(), {step.name: step.group for step in STEPS})
    checks = []
    with _Spinner() as spinner:
        for check in examine(loaded, transfer, vllm_args=vllm_args, starting=spinner.show):
            spinner.stop()
            checks.append(check)
            if page is not None:
                page.add(check)
    if page is not None:
        page.finish(checks)
    return checks


def _unusable(message: str) -> dict[str, Any]:
    """The document where the settings could not be read; nothing else was examined."""
    from s3ec.doctor.report import Check, fail

    check = Check("settings", fail(message, "see `s3ec config docs` for every setting"))
    return {"ok": False, "checks": [check.to_json()], "compatibility": None}


def _compatibility(checks: Sequence[Check], server: str | None) -> dict[str, str] | None:
    from s3ec.doctor.compatibility import compatibility

    return compatibility(checks, server=server, day=datetime.now(UTC).date())


class _Spinner:
    """Names the running check on stderr; does nothing where that is not a terminal.

    Both streams usually end at one terminal, so it is stopped while a check is printed.
    """

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> _Spinner:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("examining")
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def show(self, step: Step) -> None:
        """Begin to spin for one check."""
        if self._status is not None:
            self._status.update(f"examining: {step.name}")
            self._status.start()

    def stop(self) -> None:
        """Clear the line."""
        if self._status is not None:
            self._status.stop()


class _Page:
    """Prints checks as they come, under headings."""

    def __init__(self, out: Console, groups: dict[str, str]) -> None:
        self._out = out
        self._groups = groups
        self._group = ""

    def add(self, check: Check) -> None:
        """Print one check, under its heading where that is a new one."""
        from rich.text import Text

        group = self._groups[check.name]
        if group != self._group:
            self._out.print(Text(f"\n{group}" if self._group else group, style="bold"))
            self._group = group
        if self._out.is_terminal:
            self._add_wrapped(check)
        else:
            self._add_plain(check)

    def _add_plain(self, check: Check) -> None:
        """One line for what was found and one for the remedy, however long."""
        found = safe(check.outcome.found, limit=1000)
        typer.echo(f"  {check.outcome.verdict:<4} {check.name:<{_NAME_WIDTH}} {found}")
        if check.outcome.mend:
            typer.echo(f"       {'':<{_NAME_WIDTH}} -> {check.outcome.mend}")

    def _add_wrapped(self, check: Check) -> None:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        outcome = check.outcome
        row = Table.grid(padding=(0, 1))
        row.add_column(width=4)
        row.add_column(width=_NAME_WIDTH)
        row.add_column(overflow="fold")
        dim = "dim" if outcome.verdict == "skip" else ""
        row.add_row(
            Text(outcome.verdict, style=_STYLES[outcome.verdict]),
            Text(check.name, style=dim),
            Text(safe(outcome.found, limit=1000), style=dim),
        )
        if outcome.mend:
            row.add_row("", "", Text(f"-> {outcome.mend}", style=dim or "cyan"))
        self._out.print(Padding(row, (0, 0, 0, 2)))

    def finish(self, checks: Sequence[Check]) -> None:
        from rich.text import Text

        counts = Counter(str(check.outcome.verdict) for check in checks)
        line = Text("\n")
        for position, (verdict, style) in enumerate(_STYLES.items()):
            separator = ", " if position else ""
            line.append(separator)
            line.append(f"{counts[verdict]} {verdict}", style=style if counts[verdict] else "dim")
        self._out.print(line)

# SPDX-License-Identifier: Apache-2.0
"""``s3ec doctor``: what is wrong here, and how to mend it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.options import JsonOption, SettingsSource, option, with_settings
from s3ec.cli.output import EXIT_WRONG, App, console, echo, print_json, safe
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from s3ec.doctor.check import Check
    from s3ec.doctor.run import Step

_TRANSFER = "--ec-transfer-config"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_NAME_WIDTH = 15


def register(app: App) -> None:
    """Add ``doctor`` to the tree."""
    app.command(
        "doctor",
        ("s3ec doctor --bucket embeddings --no-vllm", "bucket and node only, in a few seconds"),
        (
            "s3ec doctor --config @ec.json -- --model google/gemma-3-27b-it",
            "the model's namespace too",
        ),
        (
            "s3ec doctor -- vllm serve MODEL --ec-transfer-config '{...}'",
            "the whole command line of a deployment",
        ),
        ("s3ec doctor --json | jq '.checks[] | select(.verdict==\"fail\")'", "for machines"),
    )(with_settings(doctor))


def doctor(
    source: SettingsSource,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM ARGS", help="Arguments of `vllm serve`."),
    ] = None,
    no_vllm: Annotated[
        bool, typer.Option("--no-vllm", help="Leave vLLM out, whose import takes 5 to 20 s.")
    ] = False,
    timeout_s: Annotated[
        float,
        option("--timeout", "SECONDS", "How long one request to the store may take.", min=0.1),
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong before a fleet starts, and how to mend it.

    Looks at settings, credentials, bucket, clock, conditional writes and cache folder, then at
    vLLM; writes and deletes a few small objects below `.s3ec-probe/`. Warnings leave the exit
    status 0.
    """
    vllm_args = vllm_args or None
    source = completed(source, vllm_args or [])
    if no_vllm and vllm_args:
        raise ConfigError("`--no-vllm` and vLLM's arguments do not go together; leave one out")
    from s3ec.doctor.run import examine

    with _Spinner() as spinner:
        found = examine(
            source.load(),
            source.transfer(),
            vllm_args=vllm_args,
            with_vllm=not no_vllm,
            timeout_s=timeout_s,
            starting=spinner.show,
        )
        checks = _shown(found, spinner, as_json)
    failed = any(check.outcome.verdict == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    if failed:
        raise typer.Exit(EXIT_WRONG)


def completed(source: SettingsSource, vllm_args: Sequence[str]) -> SettingsSource:
    """Take the settings out of vLLM's arguments where --config does not give them."""
    if source.config is not None:
        return source
    for position, arg in enumerate(vllm_args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") != _TRANSFER:
            continue
        if equals:
            return SettingsSource(value, source.overrides, _TRANSFER)
        if position + 1 < len(vllm_args):
            return SettingsSource(vllm_args[position + 1], source.overrides, _TRANSFER)
    return source


def _shown(found: Iterable[Check], spinner: _Spinner, as_json: bool) -> list[Check]:
    """Print each check as it comes, and return all of them."""
    page = None if as_json else _Page(console())
    checks = []
    for check in found:
        spinner.stop()
        checks.append(check)
        if page is not None:
            page.add(check)
    if page is not None:
        page.finish(checks)
    return checks


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

    def __init__(self, out: Console) -> None:
        self._out = out
        self._group = ""

    def add(self, check: Check) -> None:
        """Print one check, under its heading where that is a new one."""
        from rich.text import Text

        if check.group != self._group:
            title = f"\n{check.group}" if self._group else check.group
            self._out.print(Text(title, style="bold"))
            self._group = check.group
        if self._out.is_terminal:
            self._add_wrapped(check)
        else:
            self._add_plain(check)

    def _add_plain(self, check: Check) -> None:
        """Print what was found on one line and the remedy on another, however long they are."""
        found = safe(check.outcome.found, limit=1000)
        echo(f"  {check.outcome.verdict:<4} {check.name:<{_NAME_WIDTH}} {found}")
        if check.outcome.mend:
            echo(f"       {'':<{_NAME_WIDTH}} -> {check.outcome.mend}")

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
            row.add_row("", "", Text(safe(f"-> {outcome.mend}", limit=1000), style=dim or "cyan"))
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

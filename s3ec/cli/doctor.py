# SPDX-License-Identifier: Apache-2.0
"""``s3ec doctor``: what is wrong here, and how to mend it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.options import JsonOption, SettingsSource, option, with_settings
from s3ec.cli.output import EXIT_WRONG, App, console, print_json, safe
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
    from rich.console import Console

    from s3ec.doctor.run import examine

    # Nothing where stderr is no terminal. Both streams usually end at one, so it is stopped while a
    # check is printed.
    spinner = Console(stderr=True).status("examining")

    def starting(step: Step) -> None:
        spinner.update(f"examining: {step.name}")
        spinner.start()

    try:
        found = examine(
            source.load(),
            source.transfer(),
            vllm_args=vllm_args,
            with_vllm=not no_vllm,
            timeout_s=timeout_s,
            starting=starting,
        )
        checks = _shown(found, spinner, as_json)
    finally:
        spinner.stop()
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


def _shown(found: Iterable[Check], spinner: Status, as_json: bool) -> list[Check]:
    """Print each check as it comes, and return all of them."""
    out = None if as_json else console()
    checks: list[Check] = []
    for check in found:
        spinner.stop()
        if out is not None:
            if checks and checks[-1].group != check.group:
                out.print()
            _print(out, check, heading=not checks or checks[-1].group != check.group)
        checks.append(check)
    if out is not None:
        _print_counts(out, checks)
    return checks


def _print(out: Console, check: Check, *, heading: bool) -> None:
    """Print one check: what was found, and the remedy below it; at a terminal in its width."""
    from rich.text import Text

    outcome, indent = check.outcome, " " * (_NAME_WIDTH + 8)
    if heading:
        out.print(Text(check.group, style="bold"))
    head = Text.assemble(
        "  ",
        (f"{outcome.verdict:<4}", _STYLES[outcome.verdict]),
        f" {check.name:<{_NAME_WIDTH}} ",
    )
    for begin, text in (
        (head, outcome.found),
        (Text(indent), outcome.mend and f"-> {outcome.mend}"),
    ):
        told = safe(text, limit=1000)
        if out.is_terminal:
            width = max(out.width, 2 * len(indent))
            told = textwrap.fill(indent + told, width, subsequent_indent=indent)[len(indent) :]
        if told:
            out.print(begin + Text(told), soft_wrap=True)


def _print_counts(out: Console, checks: Sequence[Check]) -> None:
    from rich.text import Text

    counts = Counter(str(check.outcome.verdict) for check in checks)
    line = Text("\n")
    for position, (verdict, style) in enumerate(_STYLES.items()):
        line.append(", " if position else "")
        line.append(f"{counts[verdict]} {verdict}", style=style if counts[verdict] else "dim")
    out.print(line)

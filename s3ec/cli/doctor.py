# SPDX-License-Identifier: Apache-2.0
"""``s3ec doctor``: finds faults of this setup, and says how to fix them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.options import SETTINGS, JsonOption, SettingsSource, option, with_options
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    counting,
    plain,
    print_json,
    safe,
    styled,
    wrapped,
    write,
)
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.doctor.check import Check

_TRANSFER = "--ec-transfer-config"
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "bright_black"}
# Columns before the finding: verdict and name.
_INDENT = 23


commands = App()


@commands.command(
    "doctor",
    ("s3ec doctor --bucket embeddings --no-vllm", "bucket and node only, in a few seconds"),
    ("s3ec doctor --config @ec.json -- --model google/gemma-3-27b-it", "the model's namespace too"),
    (
        "s3ec doctor -- vllm serve MODEL --ec-transfer-config '{...}'",
        "the whole command line of a deployment",
    ),
    ("s3ec doctor --json | jq '.checks[] | select(.verdict==\"fail\")'", "for machines"),
)
@with_options(SETTINGS)
def doctor(
    source: SettingsSource,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM ARGS", help="Arguments of `vllm serve`."),
    ] = None,
    no_vllm: Annotated[
        bool, typer.Option("--no-vllm", help="Do not check vLLM, whose import takes 5 to 20 s.")
    ] = False,
    timeout_s: Annotated[
        float,
        option("--timeout", "SECONDS", "Longest time of one request to the store.", min=0.1),
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Find faults before a fleet starts, and say how to fix them.

    Checks settings, credentials, bucket, clock, conditional writes and cache folder, then vLLM.
    Writes and deletes a few small objects below `.s3ec-probe/`. Warnings leave the exit status 0.
    """
    vllm_args = vllm_args or None
    source = completed(source, vllm_args or [])
    if no_vllm and vllm_args:
        raise ConfigError("`--no-vllm` and vLLM's arguments do not go together; leave one out")
    from s3ec.doctor.run import examine

    with counting("examining") as report:
        found = examine(
            source.load(),
            source.transfer(),
            vllm_args=vllm_args,
            with_vllm=not no_vllm,
            timeout_s=timeout_s,
            report=report,
        )
        checks = list(found) if as_json else _shown(found)
    failed = any(check.outcome.verdict == "fail" for check in checks)
    if as_json:
        told = [{"name": check.name, **plain(check.outcome)} for check in checks]
        print_json({"ok": not failed, "checks": told})
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


def _shown(found: Iterable[Check]) -> list[Check]:
    """Print each check as it comes, under headings, and return all of them."""
    checks: list[Check] = []
    for check in found:
        if not checks or check.group != checks[-1].group:
            write("\n" * bool(checks) + styled(check.group, bold=True))
        checks.append(check)
        verdict = check.outcome.verdict
        label = f"  {styled(f'{verdict:<4}', _COLORS[verdict])} {check.name:<15} "
        write(label + wrapped(safe(check.outcome.found, limit=1000), _INDENT))
        if check.outcome.mend:
            mend = wrapped(safe(f"-> {check.outcome.mend}", limit=1000), _INDENT)
            write(" " * _INDENT + mend)
    counts = Counter(str(check.outcome.verdict) for check in checks)
    told = (styled(f"{counts[one]} {one}", color) for one, color in _COLORS.items())
    write(f"\n{', '.join(told)}")
    return checks

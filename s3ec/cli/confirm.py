# SPDX-License-Identifier: Apache-2.0
"""The one habit of commands that delete: show first, and delete only with ``--yes``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from s3ec.cli.output import print_note
from s3ec.errors import ConfigError

YesOption = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do it. Without this, people at a terminal are asked."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would go, and ask nothing.")
]


def check_habit(*, yes: bool, dry_run: bool) -> None:
    """Refuse both at once, before anything is looked at.

    Raises:
        ConfigError: They contradict each other.
    """
    if yes and dry_run:
        raise ConfigError("`--yes` and `--dry-run` contradict each other; leave one out")


def is_confirmed(question: str, *, yes: bool, dry_run: bool, as_json: bool) -> bool:
    """Whether to go on, once it was shown what would go.

    Programs get no question: where stdin or stderr is no terminal, and with ``--json``, nothing is
    deleted without ``--yes``.

    Args:
        question: Such as ``delete 3 entries?``.
    """
    if yes or dry_run:
        return yes
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_note("nothing was deleted; --yes does it")
        return False
    if typer.confirm(question, err=True):
        return True
    print_note("nothing was deleted")
    return False

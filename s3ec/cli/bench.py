# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: the benchmarks of a checkout; an installed s3ec says where they are."""

from __future__ import annotations

import importlib.util
from typing import Any

import typer

from s3ec.cli.output import App
from s3ec.errors import ConfigError

_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def command() -> Any:
    """The command: imported now, and heavy."""
    if importlib.util.find_spec("s3ec.dev") is None:
        return typer.main.get_command(_elsewhere)
    from s3ec.dev.bench.command import app

    return typer.main.get_command(app)


_elsewhere = App(add_completion=False)


@_elsewhere.command(context_settings=_ANYTHING)
def _say_where(_: typer.Context) -> None:
    """Measure on this machine, in a checkout of s3ec."""
    raise ConfigError(
        "bench: the benchmarks are in the repository and not in the package. In a checkout of s3ec,"
        " `make bench BENCH=hooks` runs one of them, and `make bench BENCH=list` names them."
    )

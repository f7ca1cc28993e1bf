# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: the benchmarks of a checkout; an installed s3ec says where they are."""

from __future__ import annotations

import importlib.util

import typer

from s3ec.errors import ConfigError

_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    """Add the benchmarks, or a command that says where they are. Their import is heavy."""
    if importlib.util.find_spec("s3ec.dev") is None:
        app.command("bench", context_settings=_ANYTHING)(_say_where)
        return
    from s3ec.dev.bench.command import app as benchmarks

    app.add_typer(benchmarks, name="bench")


def _say_where(_: typer.Context) -> None:
    """Measure on this machine, in a checkout of s3ec."""
    raise ConfigError(
        "bench: the benchmarks are in the repository and not in the package. In a checkout of s3ec,"
        " `make bench BENCH=hooks` runs one of them, and `make bench BENCH=list` names them."
    )

# SPDX-License-Identifier: Apache-2.0
"""The tree of commands, and what all of them share in ``--help``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from s3ec.cli import browse, config, doctor, manifest, quarantine, remove, serve, tier
from s3ec.cli.help import EXIT_CODES, epilog

# Commands that are heavy to import, or not in every build; each module has a Typer `app`.
_LAZY = {"bench": "s3ec.cli.bench"}


class LazyGroup(TyperGroup):
    """A group that imports some of its commands only when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, those of lazy modules that exist included."""
        present = [name for name, module in _LAZY.items() if importlib.util.find_spec(module)]
        return [*super().list_commands(ctx), *present]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One command, imported now if it is a lazy one."""
        module = _LAZY.get(cmd_name)
        if module is None or importlib.util.find_spec(module) is None:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="s3ec",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # A traceback with local variables could print credentials.
    pretty_exceptions_enable=False,
    epilog=epilog(
        ("s3ec doctor --config @ec.json", "is this node ready to serve?"),
        ("s3ec ls --bucket embeddings", "what is in the bucket?"),
        ("s3ec tier", "how full is this node's disk tier?"),
        ("s3ec serve-s3", "a local S3 server for trying things out"),
    ),
)


def _print_version(value: bool) -> None:
    if value:
        import s3ec

        typer.echo(f"s3ec {s3ec.__version__}")
        raise typer.Exit


@app.callback(help=f"Encoder embeddings of vLLM on object storage.\n\n{EXIT_CODES}")
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


doctor.register(app)
browse.register(app)
remove.register(app)
config.register(app)
manifest.register(app)
tier.register(app)
quarantine.register(app)
serve.register(app)

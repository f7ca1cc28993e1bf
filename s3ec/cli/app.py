# SPDX-License-Identifier: Apache-2.0
"""The tree of commands, and what all of them share in ``--help``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from s3ec.cli import bench, browse, config, doctor, manifest, quarantine, remove, serve, tier
from s3ec.cli.errors import reporting
from s3ec.cli.output import App, Group, epilog

_WORDS = "s3ec.words"
# In the order in which people need them.
_ORDER = ("doctor", "ns", "ls", "stat", "get", "rm", "gc", "manifest", "tier", "quarantine",
          "config", "serve-s3", "bench")  # fmt: skip


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


class Root(Group):
    """Reports the errors of all commands. ``bench`` is heavy: it is imported when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names; groups stand among commands."""
        return sorted([*super().list_commands(ctx), "bench"], key=_place)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One command."""
        if cmd_name != "bench":
            return super().get_command(ctx, cmd_name)
        command = bench.command()
        command.name = cmd_name
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Read the options before the first command."""
        words = list(args)  # reading takes the list apart
        with reporting(words):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta[_WORDS] = words
        return ctx

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with reporting(ctx.meta[_WORDS]):
            return super().invoke(ctx)


app = App(
    name="s3ec",
    cls=Root,
    no_args_is_help=True,
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


@app.callback(help="Encoder embeddings of vLLM on object storage.")
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

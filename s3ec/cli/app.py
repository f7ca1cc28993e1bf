# SPDX-License-Identifier: Apache-2.0
"""The tree of commands, and what all of them share in ``--help``."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from s3ec.cli.output import App, Group, echo, epilog, reporting

_WORDS = "s3ec.words"
# Panels and commands in the order in which people need them, and the module of s3ec.cli for each.
_PANELS = {
    "Start": {
        "advise": "payoff",
        "doctor": "doctor",
        "config": "config",
        "serve-s3": "serve",
        "bench": "bench",
    },
    "Look": {
        "ns": "namespaces",
        "ls": "entries",
        "stat": "entries",
        "get": "entries",
        "catalog": "catalog",
        "manifest": "verify",
        "verify": "verify",
    },
    "Fill": {
        "precompute": "precompute",
        "export": "transfer",
        "import": "transfer",
    },
    "Clean": {"rm": "remove", "gc": "remove"},
    "Node": {"hydrate": "hydrate", "tier": "tier"},
}
_MODULES = {name: module for panel in _PANELS.values() for name, module in panel.items()}


class Root(Group):
    """Imports the module of a command on demand, and reports the errors of all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands and groups."""
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None. An unknown name imports all, so that one can be suggested."""
        if cmd_name not in self.commands:
            wanted = _MODULES.get(cmd_name)
            for module in [wanted] if wanted else dict.fromkeys(_MODULES.values()):
                part = importlib.import_module(f"s3ec.cli.{module}").commands
                self.commands.update(typer.main.get_group(part).commands)
            for title, names in _PANELS.items():
                for name in names.keys() & self.commands.keys():
                    command: Any = self.commands[name]
                    command.rich_help_panel = title
        return self.commands.get(cmd_name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Read the options before the first command."""
        words = list(args)  # the parser consumes the list
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
        ("s3ec advise --like google/gemma-3-27b-it", "does it pay for this model?"),
        ("s3ec doctor --config @ec.json", "is this node ready to serve?"),
        ("s3ec ls s3://embeddings", "what is in the bucket?"),
        ("s3ec tier", "how full is this node's disk tier?"),
        ("s3ec serve-s3", "a local S3 server for trying things out"),
    ),
)


def _print_version(value: bool) -> None:
    if value:
        import s3ec

        echo(f"s3ec {s3ec.__version__}")
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

# SPDX-License-Identifier: Apache-2.0
"""What every ``--help`` looks like: flags without a type, examples, and the exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2

EXIT_CODES = (
    "Exit status: [bold]0[/bold] all is well, [bold]1[/bold] something is wrong (not found, "
    "unreachable, corrupt, a failed check), [bold]2[/bold] bad usage or bad settings."
)


def _plain_flags(params: list[Any]) -> list[Any]:
    """The same parameters; newer typers write ``<bool>`` behind an option that takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows flags as flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options, ``--help`` included."""
        return _plain_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group that prints its help, and ends well, where no command of it was named."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options, ``--help`` included."""
        return _plain_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help here: by itself it would be an error for newer clicks."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """A Typer for a group of commands, with the help that all of ours have."""

    def __init__(self, *, cls: type[Group] = Group, **options: Any) -> None:
        super().__init__(
            cls=cls,
            rich_markup_mode="rich",
            # A traceback with local variables could print credentials.
            pretty_exceptions_enable=False,
            **options,
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **options: Any
    ) -> Callable[[F], F]:
        """As typer's."""
        return super().command(name, cls=cls, **options)


def epilog(*examples: tuple[str, str]) -> str:
    """Examples and exit codes in the markup that typer prints below the options.

    Args:
        examples: Pairs of a command line and what it is for.
    """
    paragraphs = ["[bold]Examples[/bold]"]
    for command, purpose in examples:
        # One paragraph each: older typers join the lines inside a paragraph.
        paragraphs.append(f"[dim]# {escape(purpose)}[/dim]\n[cyan]{escape(command)}[/cyan]")
    return "\n\n".join([*paragraphs, f"[dim]{EXIT_CODES}[/dim]"])

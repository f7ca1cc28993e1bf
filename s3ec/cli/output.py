# SPDX-License-Identifier: Apache-2.0
"""How commands print: documents and tables on stdout, progress and errors on stderr.

And what every ``--help`` looks like: flags without a type, examples, and the exit codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

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


# Wide enough that nothing is cut where a program reads along; terminals have their own width.
_PIPE_WIDTH = 240
_SHOWN_CHARACTERS = 300


def console() -> Console:
    """A console on today's stdout; without colours where that is not a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def print_json(document: object) -> None:
    """Print one JSON document, indented for people at a terminal."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(document, indent=indent, ensure_ascii=False) + "\n")


def print_json_line(document: object) -> None:
    """Print one JSON document as one line, for readers that take a line at a time."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def print_error(message: str) -> None:
    """Print an error on stderr, without markup and without a traceback.

    One line, and further ones only where the message lists choices.
    """
    lines = [safe(line, limit=2000) for line in message.splitlines()]
    sys.stderr.write("error: " + "\n".join(lines) + "\n")


def print_note(message: str) -> None:
    """Print one line for people on stderr."""
    sys.stderr.write(f"{message}\n")


@contextmanager
def progress(message: str) -> Iterator[None]:
    """A spinner on stderr while the block runs; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def safe(text: str, *, limit: int = _SHOWN_CHARACTERS) -> str:
    """Text from a bucket as one harmless line.

    Identifiers are chosen by clients: control characters could rewrite a terminal.
    """
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def human_bytes(nbytes: float) -> str:
    """A size such as ``2.6 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def many(count: int, one: str, several: str = "") -> str:
    """A count with its noun, such as ``1 entry`` or ``1,200 entries``.

    Args:
        several: The plural; ``one`` with an s where empty.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def human_age(seconds: float | None) -> str:
    """An age such as ``3 min`` or ``12 d``; ``?`` where the store does not say."""
    if seconds is None:
        return "?"
    seconds = max(0.0, seconds)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def facts(pairs: list[tuple[str, Any]]) -> None:
    """Print names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value if isinstance(value, Text) else Text(safe(str(value))))
    console().print(table)

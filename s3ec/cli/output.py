# SPDX-License-Identifier: Apache-2.0
"""What commands print and how they end: help, documents, tables, progress, errors.

Documents and tables go to stdout, progress and errors to stderr. Errors become an exit status.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from s3ec.counters import Report
from s3ec.errors import (
    AccessError,
    AmbiguousError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    NotFoundError,
    S3ECError,
    TierError,
    UnavailableError,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console
    from rich.progress import Progress, TaskID

F = TypeVar("F", bound=Callable[..., Any])

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_PARTIAL = 3

EXIT_CODES = (
    "Exit status: [bold]0[/bold] all is well, [bold]1[/bold] something is wrong (not found, "
    "unreachable, corrupt, a failed check), [bold]2[/bold] bad usage or bad settings, "
    "[bold]3[/bold] a job that is done in part."
)


def _plain_flags(params: list[Any]) -> list[Any]:
    """The same parameters, without the ``<bool>`` that newer typers write behind a flag."""
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
    """A group that prints its help and exits with 0 where no command of it was named."""

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
        self,
        name: str | None = None,
        *examples: tuple[str, str],
        cls: type[TyperCommand] | None = Command,
        **options: Any,
    ) -> Callable[[F], F]:
        """As typer's; below its help stand examples, as ``epilog`` takes them."""
        if examples:
            options["epilog"] = epilog(*examples)
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


class StdoutError(OSError):
    """Stdout does not take what is written: its disk is full, or its device is gone."""


class _Stdout(io.FileIO):
    """Stdout, whose faults can be told from those of other files."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        """As FileIO's, which returns None where a stdout that does not block is full."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # its reader has seen enough; the parser of the command line ends quietly
        except OSError as exc:
            raise StdoutError(exc.errno, exc.strerror) from exc


def open_stdout() -> None:
    """Have stdout take any text, whatever its encoding, and raise StdoutError; for main."""
    given: TextIO | None = getattr(sys, "stdout", None)
    if given is None:  # it is closed, and as print() has it that is no error
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - stays open
    elif isinstance(given, io.TextIOWrapper):
        given.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(given.fileno(), "w", closefd=False)),
            encoding=given.encoding,
            errors="backslashreplace",
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )


def _drop_stdout() -> None:
    """Let nothing be written any more: the interpreter would try again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# Columns of output that goes into a pipe, where nothing may be cut. Terminals have their own width.
_PIPE_WIDTH = 240
_SHOWN_CHARACTERS = 300


def console() -> Console:
    """A console on the current stdout. It has no colours where that is not a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def print_json(document: object) -> None:
    """Print one JSON document, indented for people at a terminal."""
    sys.stdout.write(json_text(document, 2 if sys.stdout.isatty() else None) + "\n")


def print_json_line(document: object) -> None:
    """Print one JSON document as one line, for readers that take a line at a time."""
    sys.stdout.write(json_text(document) + "\n")


_UNPRINTABLE = re.compile(r"[^\x20-\x7e\n]")


def json_text(document: object, indent: int | None = None) -> str:
    """As people read it; with JSON's own escapes for what is not printable.

    They stand also for what stdout cannot hold. No encoding holds the half of a surrogate pair,
    which a ``namespace.json`` can name.
    """

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]

    text = _UNPRINTABLE.sub(escaped, json.dumps(document, indent=indent, ensure_ascii=False))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=indent)
    return text


def echo(text: str) -> None:
    """Print lines on stdout."""
    typer.echo("\n".join(map(printable, text.split("\n"))))


def print_error(message: str) -> None:
    """Print an error on stderr, without markup and without a traceback.

    One line, and further ones only where the message lists choices.
    """
    lines = [safe(line, limit=2000) for line in message.splitlines()]
    sys.stderr.write("error: " + "\n".join(lines) + "\n")


def print_note(message: str) -> None:
    """Print lines for people on stderr."""
    sys.stderr.write("\n".join(map(printable, message.split("\n"))) + "\n")


class _Plain(logging.Formatter):
    """A log's lines; they may name what lies in a bucket."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def plain_logs() -> None:
    """Have warnings that nobody has set up a log for go to stderr as notes do; for main."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


def note_headers(count: int) -> None:
    """Say how many headers will be read to find out what made entries, before it is done."""
    if count:
        print_note(f"reading the headers of {many(count, 'entry', 'entries')}, one request each")


@contextmanager
def progress(message: str) -> Iterator[None]:
    """A spinner on stderr while the block runs; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def printable(text: str) -> str:
    """Text as one harmless line.

    What is in a bucket was named by others, and control characters could rewrite a terminal. All
    that commands print passes here.
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def safe(text: str, *, limit: int = _SHOWN_CHARACTERS) -> str:
    """Text from a bucket as one harmless line that is not too long."""
    text = printable(text)
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

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(safe(name)), Text(safe(str(value))))
    console().print(grid)


# The base class of usage errors. Some releases of typer contain click, others depend on it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


# The first that fits counts. docs/cli.md says what they mean.
_KINDS: tuple[tuple[type[Exception], str, int], ...] = (
    (AmbiguousError, "ambiguous", EXIT_USAGE),
    (ConfigError, "usage", EXIT_USAGE),
    (_UsageError, "usage", EXIT_USAGE),
    (NotFoundError, "not_found", EXIT_WRONG),
    (CorruptEntryError, "corrupt", EXIT_WRONG),
    (UnavailableError, "unavailable", EXIT_WRONG),
    (AccessError, "access", EXIT_WRONG),
    (ConflictError, "conflict", EXIT_WRONG),
    (TierError, "disk", EXIT_WRONG),
    (Exception, "failed", EXIT_WRONG),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command failed.

    Attributes:
        kind: One word of the table.
        exit_code: The exit status that goes with it.
        message: For people; may have lines that list choices.
        field: The setting or option at fault, or None.
        fix: What to do, the part of the message that says so, or None.
    """

    kind: str
    exit_code: int
    message: str
    field: str | None
    fix: str | None

    @classmethod
    def of(cls, exc: Exception) -> Failure:
        """Make one from an error of ours or of the parser of the command line."""
        kind, exit_code = next(row[1:] for row in _KINDS if isinstance(exc, row[0]))
        if isinstance(exc, _UsageError):
            return _of_usage(exc, kind, exit_code)
        message = str(exc)
        # By our convention a message that knows a remedy ends with it; below it stand choices.
        first, line_break, choices = message.partition("\n")
        _, separator, fix = first.rpartition("; ")
        return cls(
            kind,
            exit_code,
            message,
            getattr(exc, "field", None),
            fix + line_break + choices if separator else None,
        )

    @property
    def document(self) -> dict[str, Any]:
        """The object for ``--json``. It stands alone or beside other keys."""
        names = ("kind", "message", "field", "fix")
        return {"error": {name: getattr(self, name) for name in names}}


def _of_usage(exc: Any, kind: str, exit_code: int) -> Failure:
    """Make one from an error of the parser, which knows the parameter, the option, or neither."""
    param = getattr(exc, "param", None)
    field = param.name if param is not None else getattr(exc, "option_name", None)
    command = exc.ctx.command_path if exc.ctx is not None else "s3ec"
    return Failure(kind, exit_code, exc.format_message(), field, f"see `{command} --help`")


@contextmanager
def reporting(words: Sequence[str]) -> Iterator[None]:
    """End with the documented exit status where the block raises, and say why.

    Args:
        words: The command line, which says whether JSON is wanted: it may be so wrong that no
            command has seen it.
    """
    own = list(words)[: words.index("--")] if "--" in words else words
    try:
        try:
            yield
        except (S3ECError, _UsageError) as exc:
            failure = Failure.of(exc)
            if not isinstance(exc, _UsageError):  # typer prints that, with the usage
                print_error(failure.message)
            if "--ndjson" in own:
                print_json_line(failure.document)
            elif "--json" in own:
                print_json(failure.document)
            if isinstance(exc, _UsageError):
                raise
            raise typer.Exit(failure.exit_code) from exc
        finally:
            sys.stdout.flush()  # later nobody could say what is wrong
    except StdoutError as exc:
        _drop_stdout()
        print_error(f"cannot write to stdout: {exc.strerror}")
        raise typer.Exit(EXIT_WRONG) from exc


EVERY_S = 10.0
# A shorter time gives no rate.
_LEAST_S = 0.1


@contextmanager
def counting(
    message: str, *, in_bytes: bool = False, more: Callable[[], str] = str
) -> Iterator[Report]:
    """Show counts, rate and time left while the block runs.

    Args:
        message: What is done, until the first report says so.
        in_bytes: The counts are bytes.
        more: Asked for what stands behind them.
    """
    if not sys.stderr.isatty():
        yield Lines(in_bytes=in_bytes, more=more)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Bar(shown, shown.add_task(message, total=None, counts=""), in_bytes, more)


class _Bar:
    """Moves a bar. It starts again with each piece of work."""

    def __init__(
        self, shown: Progress, task: TaskID, in_bytes: bool, more: Callable[[], str]
    ) -> None:
        self._shown = shown
        self._task = task
        self._in_bytes = in_bytes
        self._more = more
        self._what = ""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what != self._what:
            self._what = what
            self._shown.reset(self._task, description=what, total=total)
        self._shown.update(self._task, completed=done, total=total)
        speed = self._shown.tasks[0].speed
        counts = _counts(done, total, speed, in_bytes=self._in_bytes)
        self._shown.update(self._task, counts=counts + self._more())


class Lines:
    """Writes a line every ten seconds, for logs. Work of less than ten seconds writes none.

    Args:
        in_bytes: The counts are bytes.
        more: Asked for what stands behind them.
        clock: Seconds, from any start.
        write: Takes a line.
    """

    def __init__(
        self,
        *,
        in_bytes: bool = False,
        more: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = print_note,
    ) -> None:
        self._in_bytes = in_bytes
        self._more = more
        self._clock = clock
        self._write = write
        self._told_s = clock()
        self._what = ""
        self._began_s, self._first = self._told_s, 0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now_s = self._clock()
        if what != self._what:
            self._what, self._began_s, self._first = what, now_s, done
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        took_s = now_s - self._began_s
        speed = (done - self._first) / took_s if took_s >= _LEAST_S else None
        line = f"{what}: {_counts(done, total, speed, in_bytes=self._in_bytes)}{self._more()}"
        if speed and total is not None:
            line += f", {human_age((total - done) / speed)} left"
        self._write(line)


def _counts(done: int, total: int | None, speed: float | None, *, in_bytes: bool) -> str:
    """Such as ``1,200 of 3,000, 400 a second``."""

    def shown(number: float) -> str:
        return human_bytes(number) if in_bytes else f"{number:,.0f}"

    text = shown(done) if total is None else f"{shown(done)} of {shown(total)}"
    return f"{text}, {shown(speed)} a second" if speed else text

# SPDX-License-Identifier: Apache-2.0
"""The output and the exit status of commands: help, documents, tables, progress, errors.

Documents and tables go to stdout, progress and errors to stderr. Errors become an exit status.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import io
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from s3ec.cli import was_interrupted
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

    from s3ec.store.base import Blob

    _Base = TyperCommand
else:
    _Base = object

F = TypeVar("F", bound=Callable[..., Any])

# Rows of one table; further rows get a table of their own, so that memory is bounded.
_TABLE_ROWS = 10_000

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_PARTIAL = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = (
    "Exit status: [bold]0[/bold] all is well, [bold]1[/bold] something is wrong (not found, "
    "unreachable, corrupt, a failed check), [bold]2[/bold] bad usage or bad settings, "
    "[bold]3[/bold] a job that is done in part, [bold]130[/bold] ended by Ctrl-C."
)

# -- commands and their help -----------------------------------------------------------------------

PLACE = "s3://BUCKET/PREFIX"
_PLACE = re.compile(r"(?:s3|gs|az|file)://")


def _with_place(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """Turn the argument that is a corpus's URL into the option ``--url``.

    So it may be at any position, and other arguments stay optional.
    """
    options = {name: one for one in command.get_params(ctx) for name in one.opts}
    if "--url" not in options:
        return args
    given: list[str] = []
    found = is_value = False
    for position, word in enumerate(args):
        is_place = not is_value and _PLACE.match(word) is not None
        is_word = not (is_value or is_place or word.startswith("-"))
        if word == "--" or (is_word and isinstance(command, Group)):  # of vLLM, or of a command
            return given + args[position:]
        if is_place and found:
            raise typer.BadParameter(f"two places, {word!r:.200} is the second; leave one out")
        found = found or is_place or word.partition("=")[0] == "--url"
        given.append(f"--url={word}" if is_place else word)
        is_value = not is_value and word in options and not getattr(options[word], "is_flag", True)
    return given


class _Ours(_Base):
    """The base of commands and groups: the place as an argument, and their help."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*args, help=help and unwrapped(help), **more)

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, ``--help`` included; without newer typers' ``<bool>``."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options, and the place at any position."""
        parsed: list[str] = super().parse_args(ctx, _with_place(self, ctx, args))
        return parsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The pieces after the name in the usage."""
        pieces: list[str] = super().collect_usage_pieces(ctx)
        if any("--url" in one.opts for one in self.get_params(ctx)):
            pieces.insert(1, f"[{PLACE}]")
        return pieces


class Command(_Ours, TyperCommand):
    """A command of ours."""


class Group(_Ours, TyperGroup):
    """A group that prints its help and exits with 0 if no command of it is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help here, since newer releases of click treat it as an error."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """A Typer for a group of commands, with our form of help."""

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
        """As typer's; ``examples``, as ``epilog`` takes them, are printed below its help."""
        if examples:
            options["epilog"] = epilog(*examples)
        return super().command(name, cls=cls, **options)


def unwrapped(text: str) -> str:
    """Join the lines of each paragraph of a docstring: the terminal wraps them by its width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one.replace("\n", " ") for one in paragraphs)


def epilog(*examples: tuple[str, str]) -> str:
    """Examples and exit codes in the markup that typer prints below the options.

    Args:
        examples: Pairs of a command line and its purpose.
    """
    paragraphs = ["[bold]Examples[/bold]"]
    for command, purpose in examples:
        # One paragraph each: older typers join the lines inside a paragraph.
        paragraphs.append(f"[dim]# {escape(purpose)}[/dim]\n[cyan]{escape(command)}[/cyan]")
    return "\n\n".join([*paragraphs, f"[dim]{EXIT_CODES}[/dim]"])


# -- stdout ----------------------------------------------------------------------------------------


class StdoutError(OSError):
    """Stdout cannot be written: its disk is full, its device is gone, or its reader has ended."""


class _Stdout(io.FileIO):
    """Stdout, with its own error class, to distinguish its faults from those of other files."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        """As FileIO's, which returns None if a non-blocking stdout is full."""
        try:
            return super().write(data)
        except OSError as exc:
            raise StdoutError(exc.errno, exc.strerror) from exc


def open_stdout() -> None:
    """Make stdout accept any text, whatever its encoding, and raise StdoutError; for main."""
    given: TextIO | None = getattr(sys, "stdout", None)
    if given is None:  # it is closed, which is no error, as for print()
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
    """Discard further output: the interpreter would try to write it again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def diverted_output(file: Path | None = None) -> Iterator[None]:
    """Redirect the output of other code to a file, or to stderr. Our own stderr stays.

    vLLM writes to stdout, and its processes and libraries write to both descriptors.
    """
    stdout, stderr = sys.stdout, sys.stderr
    stdout.flush()
    stderr.flush()
    kept = os.dup(1), os.dup(2)
    # Both this and our stderr stay open: loggers keep them, and write until the interpreter ends.
    target = os.dup(2) if file is None else os.open(file, os.O_WRONLY | os.O_APPEND)
    sys.stdout = _line_writer(target)
    with suppress(OSError):  # in a test it is no file
        if stderr.fileno() == 2:
            sys.stderr = _line_writer(kept[1])
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = stdout, stderr
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        os.close(kept[0])


def _line_writer(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


_SHOWN_CHARACTERS = 300
# Lines of a list that are printed as text.
_SHOWN_LINES = 20


def print_json(document: object) -> None:
    """Print one JSON document, indented for people at a terminal."""
    sys.stdout.write(json_text(document, 2 if sys.stdout.isatty() else None) + "\n")


def print_json_line(document: object) -> None:
    """Print one JSON document as one line, for readers that read line by line."""
    sys.stdout.write(json_text(document) + "\n")


def json_text(document: object, indent: int | None = None) -> str:
    """JSON with escapes for everything but ASCII, so that any stdout can hold it."""
    return json.dumps(plain(document), indent=indent)


def echo(text: str) -> None:
    """Print lines on stdout, ahead of later output on stderr."""
    write("\n".join(map(printable, text.split("\n"))))


def write(text: str) -> None:
    """Print lines, as ``echo``, whose text is printable except for colours."""
    _erase()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def styled(text: str, color: str = "", *, bold: bool = False) -> str:
    """Text in a colour, if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=color or None, bold=bold or None)


def columns() -> int:
    """The width of stdout: a terminal's; without one no line must be wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def wrapped(text: str, indent: int) -> str:
    """Wrap text into lines that all begin at column ``indent``."""
    width = max(20, columns() - indent)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return ("\n" + indent * " ").join(lines)


def print_error(message: str) -> None:
    """Print an error on stderr, without markup and without a traceback.

    It is one line; further lines follow only if the message lists choices.
    """
    print_note("error: " + "\n".join(safe(line, limit=2000) for line in message.splitlines()))


def print_note(message: str) -> None:
    """Print lines for people on stderr."""
    _erase()
    sys.stderr.write("\n".join(map(printable, message.split("\n"))) + "\n")


class _Plain(logging.Formatter):
    """Formats a log's lines as printable text; they may hold names from a bucket."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def plain_logs() -> None:
    """Format warnings of loggers without a handler, on stderr, as notes; for main."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


def printable(text: str) -> str:
    """Text as one harmless line.

    Others chose the names in a bucket, and control characters could rewrite a terminal. All output
    of commands passes through here.
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def safe(text: str, *, limit: int = _SHOWN_CHARACTERS) -> str:
    """Text from a bucket as one harmless line of limited length."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


# -- documents: the same keys for machines and for people ------------------------------------------

# The printed digits of a hash: so many are unique in a bucket, and every command takes them.
DIGITS = 12
_HASH = re.compile(rf"(?:\w+:)?([0-9a-f]{{{DIGITS}}})[0-9a-f]*")
_LABEL = re.compile(rf"([0-9a-f]{{{DIGITS}}})[0-9a-f]+$")
# The titles of keys that would read badly without their unit.
_TITLES = {"bytes": "size", "cache_dir": "folder", "entry_count": "entries"}
_UNITS = re.compile(r"_(bytes|count|s|at)$")
_NOUNS = {
    "delta",
    "document",
    "entry",
    "index_file",
    "item",
    "object",
    "page",
    "part",
    "record",
    "row",
}


def plain(value: Any) -> Any:
    """Convert a document to JSON's types: a dataclass becomes an object with its fields' names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def title(key: str) -> str:
    """The printed title of a document's key."""
    stem = _UNITS.sub("", key)
    if key.endswith("_count") and stem in _NOUNS:
        stem += "s"
    elif key.endswith("_bytes") and stem in (*_NOUNS, "fetched", "left_out"):
        stem += " size"
    return _TITLES.get(key) or stem.replace("_", " ")


def human(key: str, value: Any) -> str:
    """Format a value as text; its key tells the unit, as in docs/commands.md."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if key == "bytes" or key.endswith("_bytes"):
            return human_bytes(value)
        if key.endswith("_s"):
            return human_age(value)
        is_whole = isinstance(value, int) or abs(value) >= 1000
        return f"{value:,.0f}" if is_whole else f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)


def _cell(key: str, value: Any) -> str:
    """Format a value for a table, which shows only the first digits of hashes."""
    text = human(key, value)
    if key in ("label", "identifier"):
        return safe(_LABEL.sub(r"\1", text))
    shorter = _HASH.fullmatch(text) if key in ("weights", "revision") else None
    return safe(shorter[1] if shorter else text)


def show(
    document: object, *, as_json: bool, hide: Collection[str] = (), about: Mapping[str, str] = {}
) -> None:
    """Print a document: as JSON, or as text, with lists in it as tables.

    The text leaves out values that are null or empty.

    Args:
        document: A mapping or a dataclass.
        hide: Keys to leave out of the text.
        about: Words to print after the values of some keys.
    """
    if as_json:
        print_json(document)
        return
    lists, single = [], []
    for key, value in plain(document).items():
        if key in hide or value in (None, "", [], {}):
            continue
        if isinstance(value, Mapping):
            for inner, one in value.items():
                name = f"{title(key)}: {title(inner)}"
                if one not in (None, "", [], {}) and not isinstance(one, list):
                    single.append((name, f"{human(inner, one)} {about.get(name, '')}".rstrip()))
        elif isinstance(value, list) and isinstance(value[0], Mapping):
            lists.append((key, value))
        elif isinstance(value, list):
            single += [(title(key), str(one)) for one in value]
        else:
            words = about.get(key, "")
            single.append((title(key), f"{human(key, value)} {words}".rstrip()))
    if single:
        facts(single)
    for key, rows in lists:
        echo(f"\n{title(key)}")
        table(rows)


def facts(pairs: Sequence[tuple[str, Any]]) -> None:
    """Print names and values in two columns."""
    width = max((len(safe(name)) for name, _ in pairs), default=0)
    echo("\n".join(f"{safe(name):<{width}}  {safe(str(value))}" for name, value in pairs))


def table(rows: Sequence[Any], keys: Sequence[str] = ()) -> None:
    """Print rows as a table; a column without any value is left out.

    At a terminal the last column is wrapped if a line is too long; if that is not enough, the first
    column has a line of its own.

    Args:
        rows: Mappings or dataclasses, of the same keys.
        keys: Of the columns; all if none is named.
    """
    if not rows:
        return
    documents = [plain(row) for row in rows]
    keys = [
        key for key in keys or documents[0] if any(row[key] not in (None, "") for row in documents)
    ]
    cells = [[safe(title(key)) for key in keys]]
    cells += [[_cell(key, row[key]) for key in keys] for row in documents]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [
        ">" if any(isinstance(row[key], int | float) for row in documents) else "<" for key in keys
    ]
    before = sum(width + 2 for width in widths[:-1])
    is_narrow = before + min(widths[-1], 20) > columns()  # the name then has a line of its own
    for line in cells:
        if sides[-1] == "<":
            line[-1] = wrapped(line[-1], before)
        padded = zip(line, sides, widths, strict=True)
        first, *rest = (f"{cell:{side}{width}}" for cell, side, width in padded)
        if is_narrow:
            echo(first.rstrip())
            first = ""
        echo("  ".join([first, *rest]).rstrip())


def show_page(
    rows: Iterable[Any],
    shown: int,
    sums: tuple[str | None, int, int],
    *,
    as_json: bool,
    keys: Sequence[str] = (),
) -> None:
    """Print the first entries of a namespace one by one, and how many there are.

    Args:
        rows: The entries to print, as for ``table``; there may be millions.
        shown: How many rows these are.
        sums: As for ``note_page``.
        keys: Of the columns.
    """
    if as_json:
        name, count, nbytes = sums
        sys.stdout.write(f'{{"namespace": {json_text(name)}, "entries": [')
        for number, row in enumerate(rows):
            sys.stdout.write((", " if number else "") + json_text(row))
        rest = {"entry_count": count, "bytes": nbytes, "more": shown < count}
        sys.stdout.write(f"], {json_text(rest)[1:]}\n")
    else:
        rest_of = iter(rows)
        while some := list(islice(rest_of, _TABLE_ROWS)):
            table(some, keys)
    note_page(shown, sums)


def note_page(shown: int, sums: tuple[str | None, int, int]) -> None:
    """Print how many entries there are.

    Args:
        shown: How many were printed.
        sums: The namespace, None if there is none; how many entries it has; their bytes.
    """
    namespace, count, nbytes = sums
    if namespace is not None:
        page = "" if shown == count else f"; {shown} shown (--limit 0: all)"
        entries = many(count, "entry", "entries")
        print_note(f"{entries}, {human_bytes(nbytes)}, in {namespace}{page}")


def show_some(
    lines: Sequence[str], rest: str = "--json names all", say: Callable[[str], None] = print_note
) -> None:
    """Print the first lines of a list, and how many more there are.

    Args:
        rest: Says where the others are listed.
    """
    for line in lines[:_SHOWN_LINES]:
        say(line)
    if (more := len(lines) - _SHOWN_LINES) > 0:
        say(f"{more:,} more; {rest}")


def end_job(document: Mapping[str, Any], *, as_json: bool, about: Mapping[str, str] = {}) -> None:
    """Print the result of a job and its failures, and end with the exit status for it.

    Args:
        document: Has a ``status``, and ``failures`` with ``label``, ``reason``, perhaps ``kind``.
        about: As for ``show``.
    """
    show(document, as_json=as_json, hide={"failures"}, about=about)
    if not as_json:
        show_some([
            f"{one.get('kind', 'failed')}: {safe(one['label'])}: {safe(one['reason'])}"
            for one in document["failures"]
        ])  # fmt: skip
    end_with_status(document["status"])


def end_with_status(status: str) -> None:
    """End a job with the exit status for its ``status``; return if it is complete."""
    if status != "complete":
        raise typer.Exit(EXIT_PARTIAL if status == "partial" else EXIT_WRONG)


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
        several: The plural; ``one`` with an s if empty.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def human_age(seconds: float | None) -> str:
    """An age such as ``3 min`` or ``12 d``; ``?`` if the store does not say."""
    if seconds is None:
        return "?"
    seconds = max(0.0, seconds)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def timestamp(seconds: float | None) -> str | None:
    """ISO 8601 in UTC of seconds since the epoch; None for 0 or None: the store does not say."""
    if not seconds:
        return None
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def save(path: Path, body: Blob) -> None:
    """Write a file through a temporary one in its folder, so that it is whole or absent.

    Raises:
        TierError: The folder is absent, read-only or full.
    """
    from s3ec.tier.files import write_file

    try:
        write_file(path, [body], synced=True)
    except OSError as exc:
        raise TierError(f"cannot write {path}: {exc.strerror}") from exc


# -- errors ----------------------------------------------------------------------------------------

# The base class of usage errors. Some releases of typer contain click, others depend on it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


# The first matching row counts. docs/commands.md explains the kinds.
_KINDS: tuple[tuple[type[BaseException], str, int], ...] = (
    (AmbiguousError, "ambiguous", EXIT_USAGE),
    (ConfigError, "usage", EXIT_USAGE),
    (_UsageError, "usage", EXIT_USAGE),
    (NotFoundError, "not_found", EXIT_WRONG),
    (CorruptEntryError, "corrupt", EXIT_WRONG),
    (UnavailableError, "unavailable", EXIT_WRONG),
    (AccessError, "access", EXIT_WRONG),
    (ConflictError, "conflict", EXIT_WRONG),
    (TierError, "disk", EXIT_WRONG),
    (OSError, "disk", EXIT_WRONG),
    (KeyboardInterrupt, "interrupted", EXIT_INTERRUPTED),
    (Exception, "failed", EXIT_WRONG),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command failed.

    Attributes:
        kind: One word of the table.
        exit_code: The exit status that belongs to it.
        message: The error as text; may have lines that list choices.
        field: The setting or option at fault, or None.
        fix: The part of the message that says what to do, or None.
        interrupted: For Ctrl-C, the step that it ended, and its progress.
    """

    kind: str
    exit_code: int
    message: str
    field: str | None = None
    fix: str | None = None
    interrupted: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, exc: BaseException) -> Failure:
        """Make one from an error of ours or of the parser of the command line, or from Ctrl-C."""
        kind, exit_code = next(row[1:] for row in _KINDS if isinstance(exc, row[0]))
        message, interrupted = str(exc) or type(exc).__name__, {}
        field = getattr(exc, "field", None)
        if isinstance(exc, KeyboardInterrupt):
            now = Progress.current
            message = f"interrupted{now.so_far}; {now.resume}"
            interrupted = {"step": now.what, "done": now.done, "total": now.total}
        elif isinstance(exc, _UsageError):
            message, field = _of_usage(exc)
        elif isinstance(exc, OSError) and exc.filename is not None:
            message = f"{exc.filename}: {exc.strerror}"
        # By our convention a message with a fix ends with it; lines with choices follow.
        first, line_break, choices = message.partition("\n")
        _, separator, fix = first.rpartition("; ")
        fixes = fix + line_break + choices if separator else None
        return cls(kind, exit_code, message, field, fixes, interrupted)

    @property
    def document(self) -> dict[str, Any]:
        """The object for ``--json``, alone or with further keys."""
        names = ("kind", "message", "field", "fix")
        return {"error": {name: getattr(self, name) for name in names}, **self.interrupted}


def _of_usage(exc: Any) -> tuple[str, str | None]:
    """Message and field of a parser's error, which names a parameter, an option or neither."""
    param = getattr(exc, "param", None)
    field = param.name if param is not None else getattr(exc, "option_name", None)
    # Typer's own checks come from pydantic, which begins some messages with "Value error".
    message = exc.format_message().strip().removesuffix(".").replace("Value error, ", "")
    if "; " not in message:
        command = exc.ctx.command_path if exc.ctx is not None else "s3ec"
        first, line_break, choices = message.partition("\n")
        message = f"{first}; see `{command} --help`{line_break}{choices}"
    return message, field


@contextmanager
def reporting(words: Sequence[str]) -> Iterator[None]:
    """End with the documented exit status if the block raises, and print why.

    Args:
        words: As for ``ended_by``.
    """
    Progress.current = Progress()
    code = EXIT_OK
    try:
        try:
            yield
        except typer.Exit as exc:
            code = exc.exit_code
            raise
        except StdoutError:
            raise
        except (S3ECError, OSError, _UsageError, KeyboardInterrupt) as exc:
            code = ended_by(exc, words)
            raise typer.Exit(code) from exc
        finally:
            sys.stdout.flush()  # a later failure could not be reported
    except StdoutError as exc:
        _drop_stdout()
        if exc.errno == errno.EPIPE:  # the reader, such as `head`, has seen enough
            raise typer.Exit(code) from exc
        print_error(f"cannot write to stdout: {exc.strerror}")
        raise typer.Exit(EXIT_WRONG) from exc


def ended_by(exc: BaseException, words: Sequence[str]) -> int:
    """Print why a command failed, and return its exit status.

    Args:
        words: The command line, to find ``--json``: the parser may have refused it before any
            command ran.
    """
    failure = Failure.of(KeyboardInterrupt() if was_interrupted() else exc)
    print_error(failure.message)
    own = list(words)[: words.index("--")] if "--" in words else words
    if "--ndjson" in own:
        print_json_line(failure.document)
    elif "--json" in own:
        print_json(failure.document)
    return failure.exit_code


# -- progress --------------------------------------------------------------------------------------

EVERY_S = 10.0
_SCREEN_S = 0.1
_CLEAR = "\r\x1b[2K"
# The shortest time from which a rate is computed.
_LEAST_S = 0.1
# A lower rate is printed with two digits.
_FEW_A_SECOND = 10
RESUMES = "the same command goes on where this one ended"
UNCHANGED = "nothing was changed, and the same command begins again"


@dataclass
class Progress:
    """The progress of a command: a line now and then, and the message for Ctrl-C.

    Attributes:
        current: The progress of the running command; a process runs one.
        what: The current step; empty before any long one.
        resume: The message after Ctrl-C: how to get the rest done.
        in_bytes: True if the counts are bytes.
        more: Returns text to print after the counts.
        write: Prints a line.
        every_s: Seconds between lines, so shorter work has none; a terminal has a short time, and
            each line replaces the one before.
        clock: Seconds, from any start.
        done: Entries, objects or bytes.
        total: Of how many; None if not known.
        is_shown: True if a line is on the terminal.
    """

    current: ClassVar[Progress]

    what: str = ""
    resume: str = UNCHANGED
    in_bytes: bool = False
    more: Callable[[], str] = str
    write: Callable[[str], None] = print_note
    every_s: float = EVERY_S
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    total: int | None = None
    is_shown: bool = False

    def __post_init__(self) -> None:
        self._shown_s = self._began_s = self.clock()
        self._first, self._counted = 0, ""
        self._line_count, self._is_told = 0, True

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now_s = self.clock()
        is_new = what != self._counted
        if is_new:
            self._began_s, self._first, self._counted = now_s, done, what
        self.what, self.done, self.total = what, done, total
        # A terminal shows a new step at once.
        self._is_told = now_s - self._shown_s >= self.every_s or (is_new and self.write is _rewrite)
        if self._is_told:
            self._write(now_s)

    def finish(self) -> None:
        """Write the last counts if earlier ones were written: a log must not end with less."""
        if self._line_count and not self._is_told:
            self._write(self.clock())

    def _write(self, now_s: float) -> None:
        self._shown_s = now_s
        self._line_count += 1
        self.write(self._line(now_s - self._began_s))

    def _line(self, took_s: float) -> str:
        speed = (self.done - self._first) / took_s if took_s >= _LEAST_S else None
        line = f"{self.what}: {self._counts}"
        if speed:
            is_slow = speed < _FEW_A_SECOND and not self.in_bytes  # "0 a second" says nothing
            line += f", {f'{speed:.2g}' if is_slow else self._shown(speed)} a second"
        line += self.more()
        if speed and self.total is not None:
            line += f", {human_age((self.total - self.done) / speed)} left"
        return line

    @property
    def _counts(self) -> str:
        of = "" if self.total is None else f" of {self._shown(self.total)}"
        return f"{self._shown(self.done)}{of}"

    def _shown(self, number: float) -> str:
        return human_bytes(number) if self.in_bytes else f"{number:,.0f}"

    @property
    def so_far(self) -> str:
        """The progress, as words after a verb."""
        if not self.what:
            return ""
        counts = f": {self._counts} done" if self.done or self.total else ""
        return f" while {self.what}{counts}"


Progress.current = Progress()


@contextmanager
def counting(
    message: str, *, in_bytes: bool = False, resume: str = UNCHANGED
) -> Iterator[Progress]:
    """Show counts, rate and time left while the block runs; before the first report, a message.

    Args:
        message: The step, until the first report names one.
        in_bytes: True if the counts are bytes.
        resume: The message after Ctrl-C.

    Yields:
        A Report. Its ``more`` may be set.
    """
    now = Progress.current = Progress(message, resume, in_bytes, every_s=EVERY_S)
    if sys.stderr.isatty():
        now.write, now.every_s = _rewrite, _SCREEN_S
        _rewrite(message)
    try:
        yield now
        now.finish()
    finally:
        _erase()


def _rewrite(line: str) -> None:
    """Replace the line that is on the terminal."""
    width = shutil.get_terminal_size().columns
    sys.stderr.write(f"{_CLEAR}{printable(line)[: width - 1]}")
    sys.stderr.flush()
    Progress.current.is_shown = True


def _erase() -> None:
    """Clear the line of progress, before something else is printed."""
    if Progress.current.is_shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
        Progress.current.is_shown = False

# SPDX-License-Identifier: Apache-2.0
"""What becomes of errors: exit status, a line on stderr, with ``--json`` an object on stdout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from s3ec.cli.output import EXIT_USAGE, EXIT_WRONG, print_error, print_json, print_json_line
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

# Some releases of typer have click inside and some beside them; this is the class of either.
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
        """Of an error of ours or of the parser of the command line."""
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
        """The object for ``--json``, to stand alone or beside facts."""
        names = ("kind", "message", "field", "fix")
        return {"error": {name: getattr(self, name) for name in names}}


def _of_usage(exc: Any, kind: str, exit_code: int) -> Failure:
    """Of the parser's error, which knows the parameter, the option's text, or neither."""
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
        yield
    except (S3ECError, _UsageError) as exc:
        failure = Failure.of(exc)
        if "--ndjson" in own:
            print_json_line(failure.document)
        elif "--json" in own:
            print_json(failure.document)
        if isinstance(exc, _UsageError):
            raise  # typer prints it, with the usage
        print_error(failure.message)
        raise typer.Exit(failure.exit_code) from exc

# SPDX-License-Identifier: Apache-2.0
"""Options that many commands share: settings, namespaces, sizes, and the consent to delete."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from s3ec.cli.output import PLACE, RESUMES, UNCHANGED, counting, echo, print_note
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.config import LoadedSettings
    from s3ec.corpus import Corpus
    from s3ec.counters import Report

T = TypeVar("T")

_PANEL = "Settings (then S3EC_* variables)"
_MAX_CONFIG_BYTES = 2**20
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(min|h|d|w)")
_UNITS_S = {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, for machines.")
]


def option(name: str, metavar: str, text: str, **more: Any) -> Any:
    """Make an option with one name and a value; ``more`` is typer's."""
    return typer.Option(name, metavar=metavar, help=text, **more)


def _option(name: str, metavar: str, text: str) -> Any:
    return Annotated[str | None, option(name, metavar, text, rich_help_panel=_PANEL)]


_SETTINGS_OPTIONS = {
    "config": _option(
        "--config",
        "JSON|FILE",
        "The connector's JSON: `ec_connector_extra_config` alone, or the whole "
        "`--ec-transfer-config`; or a file with it (`FILE` or `@FILE`).",
    ),
    "url": _option(
        "--url",
        "URL",
        f"Place of the corpus: {PLACE}, gs://BUCKET, az://CONTAINER or file:///FOLDER. As an "
        "argument it needs no `--url`.",
    ),
    "bucket": _option("--bucket", "NAME", "Bucket of the corpus."),
    "prefix": _option("--prefix", "FOLDER", "Folder inside the bucket."),
    "endpoint_url": _option("--endpoint-url", "URL", "URL of an S3-compatible server."),
    "region": _option("--region", "NAME", "Region to sign for."),
    "profile": _option("--profile", "NAME", "Profile of the SDK's shared configuration."),
    "ca_bundle": _option("--ca-bundle", "FILE", "PEM file of the authorities to trust."),
    "allow_http": Annotated[
        bool | None,
        typer.Option(
            "--allow-http",
            help="Take an http:// endpoint on another machine.",
            rich_help_panel=_PANEL,
        ),
    ],
}


_NAMESPACE_OPTIONS = {
    "namespace": Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Namespace, or the first characters of its name. Unset: the variable "
            "S3EC_NAMESPACE; else the newest, if all are of one model.",
        ),
    ],
    "model": Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="TEXT",
            help="The newest namespace of the model whose name has this in it.",
        ),
    ],
}
_TIER_OPTIONS = {
    "cache_dir": _option("--cache-dir", "FOLDER", "Folder of the node's disk tier."),
    "cache_bytes": _option("--cache-bytes", "SIZE", "Size the tier is kept below."),
}


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """The settings of the command line, not yet read, and the choice of a namespace.

    Attributes:
        config: Text of ``--config``, or None.
        overrides: Settings with an option of their own.
        label: Name of the option that ``config`` came from, for messages.
        namespace: Name of a namespace or the beginning of it; None for any.
        model: Part of the name of its model; None for any.
    """

    config: str | None = None
    overrides: Mapping[str, str | bool] = field(default_factory=dict)
    label: str = "--config"
    namespace: str | None = None
    model: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SettingsSource:
        """Make one from the values of options. None means that an option was not given.

        Raises:
            ConfigError: ``--namespace`` or ``--model`` is empty.
        """
        overrides = {name: value for name, value in given.items() if value is not None}
        choice = {name: overrides.pop(name, None) for name in ("namespace", "model")}
        for name, value in choice.items():
            if value == "":  # a script's unset variable; every namespace would match
                raise ConfigError(f"`--{name}` is empty; leave it out", field=name)
        return cls(overrides.pop("config", None), overrides, **choice)

    def choose(self, corpus: Corpus) -> str:
        """The namespace that the options name. Raises what Corpus.choose raises."""
        return corpus.choose(self.namespace, model=self.model)

    def load(self, *, need_bucket: bool = True) -> LoadedSettings:
        """Read the settings; their origins name the option that counts.

        Args:
            need_bucket: As for load_settings.

        Raises:
            ConfigError: They are not readable, or load_settings refuses them.
        """
        from s3ec.config import load_settings

        return load_settings(
            self.extra(), origin=self.label, options=self.overrides, need_bucket=need_bucket
        )

    def corpus(self, *, attempts: int | None = None) -> Corpus:
        """Open the corpus of these settings; its messages name options.

        Args:
            attempts: How often each request is sent at most; None for a corpus's default.

        Raises:
            ConfigError: As load, and as Corpus.
        """
        from s3ec.cli.output import safe
        from s3ec.corpus import ATTEMPTS, Corpus
        from s3ec.namespaces import as_option

        return Corpus(
            self.load().settings,
            attempts=attempts or ATTEMPTS,
            spell=as_option,
            note=lambda text: print_note(safe(text)),
        )

    def extra(self) -> dict[str, Any]:
        """The settings in ``--config`` alone."""
        document = self.document()
        if "ec_connector_extra_config" not in document and "ec_connector" not in document:
            return document
        extra = document.get("ec_connector_extra_config") or {}
        if not isinstance(extra, dict):
            raise ConfigError("`ec_connector_extra_config` must be a JSON object")
        return extra

    def transfer(self) -> dict[str, Any]:
        """The whole --ec-transfer-config if ``config`` is one, else an empty one."""
        document = self.document()
        return document if "ec_connector" in document else {}

    def document(self) -> dict[str, Any]:
        """The content of ``--config``, unchanged.

        Raises:
            ConfigError: It is neither JSON nor a readable file with a JSON object. Its text is
                never repeated, since people paste credentials.
        """
        if self.config is None:
            return {}
        text = _read(self.config, self.label)
        try:
            document = json.loads(text)
        except json.JSONDecodeError as exc:
            raise ConfigError(
                f"{self.label} is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}"
            ) from exc
        except (ValueError, RecursionError) as exc:
            # Python's own limits, with a message that does not repeat the text.
            problem = "a number is too long" if isinstance(exc, ValueError) else "nested too deep"
            raise ConfigError(f"{self.label} cannot be read: {problem}") from exc
        if not isinstance(document, dict):
            raise ConfigError(
                f'{self.label} must be a JSON object, such as \'{{"bucket": "embeddings"}}\''
            )
        return document


def _read(config: str, label: str) -> str:
    """The text of ``--config``: the JSON itself, or the content of the file that it names."""
    if config.lstrip().startswith(("{", "[", '"')):
        return config
    path = Path(config.removeprefix("@")).expanduser()
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{label} names a file of more than 1 MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{label} is neither a JSON object nor a file that can be read ({reason})"
        ) from exc


@dataclass(frozen=True, slots=True)
class Consent:
    """The consent to delete, by ``--yes`` and ``--dry-run``."""

    yes: bool
    dry_run: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Consent:
        """Make one from the values of its options.

        Raises:
            ConfigError: They contradict each other.
        """
        if given["yes"] and given["dry_run"]:
            raise ConfigError("`--yes` and `--dry-run` contradict each other; leave one out")
        return cls(bool(given["yes"]), bool(given["dry_run"]))

    def carry_out(
        self,
        work: Callable[[bool, Report], T],
        told: Callable[[T], tuple[int, str]],
        *,
        as_json: bool,
        verbs: tuple[str, str] = ("delete", "deleted"),
    ) -> tuple[T, bool]:
        """Print what would be deleted, ask if a person can answer, and do it.

        Args:
            work: Called with True to only count, and with a Report.
            told: Returns how many things a result has, and a description of them.
            verbs: The verb, and its past participle.

        Returns:
            The last result, and True if it was done.
        """
        verb, past = verbs

        def carry(dry_run: bool) -> T:
            message, resume = ("looking", UNCHANGED) if dry_run else ("deleting", RESUMES)
            with counting(message, resume=resume) as report:
                return work(dry_run, report)

        found = carry(not self.yes)
        count, what = told(found)
        if not as_json:
            echo(f"{past} {what}" if self.yes else f"would {verb} {what}")
        if self.yes or not (count and self.ask(f"{verb} {what}?", as_json=as_json)):
            return found, self.yes
        found = carry(False)
        echo(f"{past} {told(found)[1]}")
        return found, True

    def ask(self, question: str, *, as_json: bool) -> bool:
        """Return True to do it. Call this after the things to delete were printed.

        Programs get no question: if stdin or stderr is no terminal, or with ``--json``, nothing is
        deleted without ``--yes``.

        Args:
            question: Such as ``delete 3 entries?``.
        """
        if self.yes or self.dry_run:
            return self.yes
        if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            print_note("nothing was deleted; --yes does it")
            return False
        try:
            if typer.confirm(question, err=True):
                return True
        except typer.Abort as exc:  # Ctrl-C, or the end of stdin
            print_note("")
            raise KeyboardInterrupt from exc
        print_note("nothing was deleted")
        return False


# Options by name, and a function that makes one argument of their values.
OptionGroup = tuple[Mapping[str, Any], Callable[[dict[str, Any]], Any]]

SETTINGS: OptionGroup = (_SETTINGS_OPTIONS, SettingsSource.of)
"""The options for settings; a command gets them as a SettingsSource, as those of the next three."""

CORPUS: OptionGroup = ({**_NAMESPACE_OPTIONS, **_SETTINGS_OPTIONS}, SettingsSource.of)
"""The options for settings, and those that choose a namespace."""

CORPUS_AND_TIER: OptionGroup = ({**CORPUS[0], **_TIER_OPTIONS}, SettingsSource.of)
"""The options of CORPUS, and those of this node's disk tier."""

TIER: OptionGroup = ({"config": _SETTINGS_OPTIONS["config"], **_TIER_OPTIONS}, SettingsSource.of)
"""The options of commands that read only this node, and need no bucket."""

CONSENT: OptionGroup = (
    {
        "yes": Annotated[
            bool | None,
            typer.Option(
                "--yes", "-y", help="Do it. Without this option the command asks at a terminal."
            ),
        ],
        "dry_run": Annotated[
            bool | None,
            typer.Option("--dry-run", help="Only show what would be deleted, and ask nothing."),
        ],
    },
    Consent.of,
)
"""The options of commands that delete something; a command gets them as a Consent."""


def with_options(*groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options; it gets those of each group as one of its first arguments.

    In the command's help its own options come first, then the groups from the last to the first.
    """

    def give(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = list(signature.parameters.values())[len(groups) :]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for options, _ in reversed(groups)
            for name, kind in options.items()
        ]

        @functools.wraps(function)
        def wrapper(**kwargs: Any) -> None:
            first = [make({name: kwargs.pop(name) for name in options}) for options, make in groups]
            function(*first, **kwargs)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
        # typer reads both, and functools.wraps has copied the function's.
        wrapper.__dict__["__signature__"] = signature.replace(parameters=parameters)
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return give


def is_for_subcommand(ctx: typer.Context, *given: object) -> bool:
    """True if one of a group's commands was named, so that the group itself must do nothing.

    Args:
        given: Options of the group itself, which would be ignored.

    Raises:
        ConfigError: One of these was given.
    """
    if ctx.invoked_subcommand is None:
        return False
    if any(given):
        command = f"{ctx.command_path} {ctx.invoked_subcommand}"
        raise ConfigError(f"write options after the command: `{command} ...`")
    return True


def duration_s(text: str) -> float:
    """Seconds of a duration such as ``90d``; a parser of options.

    Raises:
        typer.BadParameter: It is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(
            f"{text!r:.50} is no age; write it as `90d`, `12h`, `2w` or `30min`"
        )
    return float(match[1]) * _UNITS_S[match[2]]


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``10MiB``; a parser of options as duration_s."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as exc:
        raise typer.BadParameter(
            f"{text!r:.50} is no size; write it as `10GiB`, `500MB` or a number of bytes"
        ) from exc


def lines_of(file: str) -> list[str]:
    """Read the lines of ``--ids``, without empty ones; ``-`` is stdin.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"cannot read {file}: {reason}; name a file with an identifier on each line",
            field="ids",
        ) from exc
    return [line for line in text.splitlines() if line.strip()]


ID_HELP = "Identifier, a label that `s3ec ls` prints, or the first 8 or more hex digits of a hash."


_FEW_DIGITS = re.compile(r"[0-9a-f]{1,7}")


def hint_of(text: str) -> str:
    """The message for an absent ID: too few digits of a hash are taken for a client's name."""
    few = _FEW_DIGITS.fullmatch(text.rpartition(":")[2])
    return "; a hash may be cut to 8 or more hex digits" if few else ""

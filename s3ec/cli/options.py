# SPDX-License-Identifier: Apache-2.0
"""The options that every command has for its settings, and what becomes of errors."""

from __future__ import annotations

import functools
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.help import EXIT_USAGE, EXIT_WRONG
from s3ec.cli.output import print_error
from s3ec.errors import ConfigError, S3ECError

if TYPE_CHECKING:
    from s3ec.config import Loaded

_PANEL = "Settings (then S3EC_* variables, then the file that S3EC_CONFIG names)"
_MAX_CONFIG_BYTES = 2**20

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, for machines.")
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NS",
        help="Namespace, or the first characters of its name. Not needed where the bucket has one.",
    ),
]


def _option(name: str, metavar: str, text: str) -> Any:
    return Annotated[
        str | None, typer.Option(name, metavar=metavar, help=text, rich_help_panel=_PANEL)
    ]


_SETTINGS_OPTIONS = {
    "config": _option(
        "--config",
        "JSON|FILE",
        "The connector's JSON: `ec_connector_extra_config` alone, or the whole "
        "`--ec-transfer-config`; or a .json or .toml file (`FILE` or `@FILE`).",
    ),
    "url": _option("--url", "URL", "Corpus outside S3, such as file:///FOLDER or gs://BUCKET."),
    "bucket": _option("--bucket", "NAME", "Bucket of the corpus."),
    "prefix": _option("--prefix", "FOLDER", "Folder inside the bucket."),
    "endpoint_url": _option("--endpoint-url", "URL", "URL of an S3-compatible server."),
    "region": _option("--region", "NAME", "Region to sign for."),
    "profile": _option("--profile", "NAME", "Profile of the SDK's shared configuration."),
}
# For commands that look at this node only.
_CACHE_OPTIONS = {
    "config": _SETTINGS_OPTIONS["config"],
    "cache_dir": _option("--cache-dir", "FOLDER", "Folder of the node's disk tier."),
    "cache_bytes": _option("--cache-bytes", "SIZE", "Size the tier is kept below."),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What the command line says about settings, not yet read.

    Attributes:
        config: Text of ``--config``, or None.
        overrides: Settings with an option of their own.
        label: What to call the option that ``config`` came from.
    """

    config: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    label: str = "--config"

    def load(self, *, need_bucket: bool = True) -> Loaded:
        """Read the settings; origins name the option that won.

        Args:
            need_bucket: As for load_settings.

        Raises:
            ConfigError: Not readable, or what load_settings refuses.
        """
        from s3ec.config import Loaded, load_settings

        given = self.extra()
        # One name for both in messages; the origins below are exact.
        loaded = load_settings(
            {**given, **self.overrides}, origin="the command line", need_bucket=need_bucket
        )
        origins = dict(loaded.origins)
        origins.update(dict.fromkeys(given, self.label))
        origins.update({name: f"--{name.replace('_', '-')}" for name in self.overrides})
        return Loaded(loaded.settings, origins)

    def extra(self) -> dict[str, Any]:
        """The settings in ``--config``, without those of other options."""
        document = self.document()
        if "ec_connector_extra_config" not in document and "ec_connector" not in document:
            return document
        extra = document.get("ec_connector_extra_config") or {}
        if not isinstance(extra, dict):
            raise ConfigError("`ec_connector_extra_config` must be a JSON object")
        return extra

    def transfer(self) -> dict[str, Any]:
        """The whole --ec-transfer-config where ``config`` is one, else nothing."""
        document = self.document()
        return document if "ec_connector" in document else {}

    def document(self) -> dict[str, Any]:
        """The content of ``--config`` as it stands.

        Raises:
            ConfigError: Neither JSON nor a readable file with a table in it. Its text is never
                repeated, since people paste credentials.
        """
        if self.config is None:
            return {}
        text, kind = _read(self.config, self.label)
        try:
            document = tomllib.loads(text) if kind == "toml" else json.loads(text)
        except json.JSONDecodeError as exc:
            raise ConfigError(
                f"{self.label} is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}"
            ) from exc
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(f"{self.label} is not TOML: {exc}") from exc
        if not isinstance(document, dict):
            raise ConfigError(
                f'{self.label} must be a JSON object, such as \'{{"bucket": "embeddings"}}\''
            )
        return document


def _read(config: str, label: str) -> tuple[str, str]:
    """Text and kind of ``--config``: itself, or the file it names."""
    if config.lstrip().startswith(("{", "[", '"')):
        return config, "json"
    path = Path(config.removeprefix("@")).expanduser()
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{label} names a file of more than 1 MiB")
        return path.read_text(encoding="utf-8"), path.suffix.removeprefix(".")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{label} is neither a JSON object nor a file that can be read ({reason})"
        ) from exc


def reporting(function: Callable[..., None]) -> Callable[..., None]:
    """End with one line on stderr and the documented exit code where a command raises."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except ConfigError as exc:
            print_error(str(exc))
            raise typer.Exit(EXIT_USAGE) from exc
        except S3ECError as exc:
            print_error(str(exc))
            raise typer.Exit(EXIT_WRONG) from exc

    return wrapper


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for settings; they arrive as its first argument, a Source."""
    return _with_options(function, _SETTINGS_OPTIONS)


def with_cache_settings(function: Callable[..., None]) -> Callable[..., None]:
    """The same for a command of this node's disk tier, which needs no bucket."""
    return _with_options(function, _CACHE_OPTIONS)


def _with_options(function: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in options.items()
    ]

    @functools.wraps(function)
    def wrapper(**kwargs: Any) -> None:
        config = kwargs.pop("config")
        overrides = {name: kwargs.pop(name) for name in options if name != "config"}
        given = {name: value for name, value in overrides.items() if value is not None}
        function(Source(config, given), **kwargs)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    # typer reads both; functools.wraps copied those of the function.
    wrapper.__dict__["__signature__"] = signature.replace(parameters=parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return reporting(wrapper)

# SPDX-License-Identifier: Apache-2.0
"""All settings, parsed once at start-up into frozen data that knows where each value came from.

Precedence: the JSON of ``ec_connector_extra_config`` (or ``--config`` of the command line), then
``S3EC_NAME`` variables, then the default.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pydantic import ValidationError

from s3ec.errors import ConfigError
from s3ec.settings import ENV_PREFIX, OF_S3, Settings, parse_url

log = logging.getLogger(__name__)

# The value of `bucket` if none was given and none is needed.
_NO_BUCKET = "no-bucket-given"
_CREDENTIAL_WORDS = (
    "access_key",
    "accesskey",
    "secret",
    "session_token",
    "password",
    "credential",
)
# Prefixes of pydantic's error types, and our messages in place of its own.
_REASONS = (
    ("byte_size", "no size; write it as `50GiB`, `500MB` or a number of bytes"),
    ("extra_forbidden", "no such key, and no key holds credentials; see docs/regions.md"),
    ("int_", "no whole number; write it as digits, such as 16"),
    ("float_", "no number; write it as digits, such as 2.5"),
    ("finite_number", "no finite number; write it as digits, such as 2.5"),
    ("bool_", "neither true nor false; write one of the two"),
    ("string_type", "no text; write it in quotes"),
    ("path_type", "no text; write a path in quotes"),
    ("tuple_type", "no list; write it as [{'bucket': 'corpus-eu'}]"),
    ("model_type", "no table; write it as {'bucket': 'corpus-eu'}"),
)
_CHAIN = (
    "use the SDK's chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, a "
    "`profile`, web identity or an instance role"
)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and, for each, where its value came from (such as ``env S3EC_BUCKET``)."""

    settings: Settings
    origins: Mapping[str, str]

    @property
    def has_place(self) -> bool:
        """True if they say where the corpus is; if False, the bucket must not be used."""
        return self.settings.bucket != _NO_BUCKET


def load_settings(
    extra: Mapping[str, Any] | None = None,
    *,
    origin: str = "ec_connector_extra_config",
    options: Mapping[str, Any] | None = None,
    as_arguments: bool = False,
    need_bucket: bool = True,
) -> LoadedSettings:
    """Read the settings of this process.

    Args:
        extra: The JSON that overrides the environment, or None.
        origin: Name of this JSON, for messages.
        options: Settings that override the JSON: the given options of a command line.
        as_arguments: True if the options are arguments of a call in Python, for messages.
        need_bucket: False for commands that only read this node. Then no bucket need be set,
            and the one in the settings must not be used.

    Raises:
        ConfigError: Unknown name, wrong type, impossible value or combination, or
            credentials in a place that gets logged. Names the field, never its value.
    """
    given = dict(extra or {})
    for name in given:
        _refuse_credentials(str(name), origin)
        _refuse_unknown(str(name), origin)
    _refuse_misspelt_variables()
    if os.environ.get("S3EC_CONFIG"):
        _warn_of_no_file()
    options_label = "argument" if as_arguments else "option"
    sources = [
        (options_label, options or {}),
        (origin, given),
        ("env", _read_environment()),
    ]
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for label, values in reversed(sources):
        if label == options_label:
            origins.update(dict.fromkeys(_give_way(merged, values), "default"))
        for name, value in values.items():
            merged[name] = value
            origins[name] = _spelt(name, label)
    _take_apart(merged, origins)
    if not need_bucket and not merged.get("url"):
        merged.setdefault("bucket", _NO_BUCKET)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as exc:
        raise _readable(exc, origins, as_arguments) from exc.__cause__
    return LoadedSettings(settings, origins)


def _spelt(name: str, label: str) -> str:
    """Return where a setting comes from, as people would write it there."""
    if label == "env":
        return f"env {ENV_PREFIX}{name.upper()}"
    if label == "argument":
        return f"the argument `{name}`"
    return f"--{name.replace('_', '-')}" if label == "option" else label


def _give_way(below: dict[str, Any], options: Mapping[str, Any]) -> list[str]:
    """If options name the corpus in another form, remove the other form from the settings below.

    Only options do that: a user who types one means another corpus this time. A variable that
    contradicts the JSON of a fleet is a mistake, and is refused.

    Returns:
        The names that were removed.
    """
    names: tuple[str, ...] = ()
    if options.get("url"):
        names = ("bucket", "prefix") if _is_s3_url(options["url"]) else OF_S3
    elif options.get("bucket"):
        names = ("url",)
    removed = [name for name in names if name in below]
    for name in removed:
        del below[name]
    return removed


def _is_s3_url(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("s3://")


def _take_apart(merged: dict[str, Any], origins: dict[str, str]) -> None:
    """Split an ``s3://`` URL into ``bucket`` and ``prefix``.

    Raises:
        ConfigError: They are set as well.
    """
    url, origin = merged.get("url"), origins["url"]
    if not _is_s3_url(url):
        return
    for name in ("bucket", "prefix"):
        if merged.get(name):
            raise ConfigError(
                f"`{name}` (from {origins[name]}) does not go together with `url` {url!r:.200} "
                f"(from {origin}); remove one of the two",
                field=name,
            )
    try:
        corpus = parse_url(url)
    except ValueError as exc:
        raise ConfigError(f"bad settings: `url` (from {origin}): {exc}", field="url") from exc
    merged.update(url=None, bucket=corpus.bucket, prefix=corpus.prefix)
    origins.update(bucket=origin, prefix=origin)


def _read_environment() -> dict[str, str]:
    """Return the settings among the variables, in any case; an empty one counts as unset."""
    given = {name.lower(): value for name, value in os.environ.items() if value}
    names = {name: f"{ENV_PREFIX}{name}".lower() for name in Settings.model_fields}
    return {name: given[variable] for name, variable in names.items() if variable in given}


def _refuse_credentials(name: str, origin: str) -> None:
    if _is_credential(name):
        raise ConfigError(
            f"`{name}` in {origin}: credentials are not accepted here, because vLLM logs its whole "
            f"configuration; {_CHAIN}",
            field=name,
        )


def _refuse_credential_variable(variable: str) -> None:
    """Refuse a variable that looks like a secret; nothing would read it."""
    name = variable.removeprefix(ENV_PREFIX).lower()
    if _is_credential(name):
        raise ConfigError(
            f"environment variable {variable}: names that begin with {ENV_PREFIX} are settings, "
            f"and no setting holds credentials. For those of the bucket {_CHAIN}. If the "
            f"variable is for something else, give it a name without {ENV_PREFIX} at its beginning",
            field=name,
        )


def _is_credential(name: str) -> bool:
    return any(word in name.lower() for word in _CREDENTIAL_WORDS)


def _nearest(name: str, cutoff: float = 0.6) -> str | None:
    found = difflib.get_close_matches(name.lower(), Settings.model_fields, n=1, cutoff=cutoff)
    return found[0] if found else None


def _refuse_unknown(name: str, origin: str) -> None:
    if name in Settings.model_fields:
        return
    near = _nearest(name)
    hint = f"did you mean `{near}`?" if near else f"known: {', '.join(Settings.model_fields)}"
    raise ConfigError(f"unknown setting `{name}` in {origin}; {hint}", field=name)


def _refuse_misspelt_variables() -> None:
    """Refuse S3EC_ variables that are nearly a setting.

    Others pass: Kubernetes gives every pod S3EC_SERVICE_HOST and similar ones if a service is named
    s3ec, and the tests have variables of their own.
    """
    for variable in os.environ:
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX):
            continue
        _refuse_credential_variable(variable)
        near = _nearest(name, cutoff=0.85)
        if near is not None and name != near:
            raise ConfigError(
                f"unknown variable {variable}; did you mean {ENV_PREFIX}{near.upper()}?",
                field=name,
            )


@functools.cache
def _warn_of_no_file() -> None:
    """Warn once per process: a user may have set nothing but a file in this variable."""
    log.warning(
        "the variable S3EC_CONFIG is set, and nothing reads it: give the settings in the JSON of "
        "ec_connector_extra_config, with --config, or as S3EC_NAME variables"
    )


def _readable(exc: ValidationError, origins: Mapping[str, str], as_arguments: bool) -> ConfigError:
    """Return an error, one line per fault: field, type of the value and reason; never the value.

    A single fault's line ends with the fix, as all our messages do.
    """
    lines = []
    field = None
    for error in exc.errors(include_url=False, include_context=False):
        field = str(error["loc"][0]) if error["loc"] else None
        reason = error["msg"].removeprefix("Value error, ")
        if field is None:  # of several settings together; the message begins with one of them
            field = reason.split("`")[1] if reason.startswith("`") else None
            lines.append(reason)
        elif field == "bucket" and origins[field] == "default":
            places = f"in the JSON, as {ENV_PREFIX}BUCKET, or with --bucket"
            if as_arguments:
                places = f"as the argument `bucket`, or as {ENV_PREFIX}BUCKET"
            lines.append(f"`bucket` is required, or `url` for a corpus outside S3; set it {places}")
        else:
            kind = error["type"]
            reason = next((ours for start, ours in _REASONS if kind.startswith(start)), reason)
            reason = re.sub("^(Input|String) should", "it must", reason)
            label = f"`{field}`"
            for inner in error["loc"][1:]:  # the number of a replica, and its key
                label += f" {inner + 1}" if isinstance(inner, int) else f", `{inner}`"
            given = type(error["input"]).__name__
            lines.append(f"{label} ({given}, from {origins.get(field, '?')}): {reason}")
    separator = " " if len(lines) == 1 else "\n  "
    return ConfigError(f"bad settings:{separator}{separator.join(lines)}", field=field)


def set_up_logging(level: str) -> None:
    """Give the ``s3ec`` loggers a level and, if the application set none up, a handler.

    vLLM configures its own logger only; without a handler our lines would be lost.
    """
    logger = logging.getLogger("s3ec")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)

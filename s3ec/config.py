# SPDX-License-Identifier: Apache-2.0
"""All settings, parsed once at start-up into frozen data that knows where each value came from.

Precedence: the JSON of ``ec_connector_extra_config`` (or ``--config`` of the command line),
then ``S3EC_NAME`` variables, then the file that ``S3EC_CONFIG`` names, then the default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    EnvSettingsSource,
    JsonConfigSettingsSource,
    TomlConfigSettingsSource,
)

from s3ec.corpus_url import parse_url
from s3ec.errors import ConfigError
from s3ec.settings import ENV_PREFIX, Settings

CONFIG_FILE_VARIABLE = "S3EC_CONFIG"
# Stands where a bucket is required and none is needed.
_NO_BUCKET = "no-bucket-given"
_CREDENTIAL_WORDS = (
    "access_key",
    "accesskey",
    "secret",
    "session_token",
    "password",
    "credential",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each, where its value came from (such as ``env S3EC_BUCKET``)."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    extra: Mapping[str, Any] | None = None,
    *,
    origin: str = "ec_connector_extra_config",
    need_bucket: bool = True,
) -> Loaded:
    """Read the settings of this process.

    Args:
        extra: The JSON that has the first word, or None.
        origin: What to call it in messages.
        need_bucket: False for what only looks at this node: then a bucket need not be set, and
            the one in the settings must not be used.

    Raises:
        ConfigError: Unknown name, wrong type, impossible value or combination, or
            credentials in a place that gets logged. Names the field, never its value.
    """
    given = dict(extra or {})
    for name in given:
        _refuse_credentials(str(name), origin)
        _refuse_unknown(str(name), origin)
    file, file_values = _read_file()
    _refuse_misspelt_variables()
    env_values = EnvSettingsSource(Settings, env_prefix=ENV_PREFIX, env_ignore_empty=True)()
    sources = [(origin, given), ("env", env_values), (f"file {file}", file_values)]
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for label, values in reversed(sources):
        for name, value in values.items():
            merged[name] = value
            origins[name] = f"env {ENV_PREFIX}{name.upper()}" if label == "env" else label
    _take_apart(merged, origins)
    if not need_bucket and not merged.get("url"):
        merged.setdefault("bucket", _NO_BUCKET)
    try:
        # Every source is in `merged`: BaseSettings must not look at the environment again.
        settings = Settings.model_validate(merged)
    except ValidationError as exc:
        raise _readable(exc, origins) from exc.__cause__
    return Loaded(settings, origins)


def _take_apart(merged: dict[str, Any], origins: dict[str, str]) -> None:
    """Make ``bucket`` and ``prefix`` of an ``s3://`` URL.

    Raises:
        ConfigError: They are set as well.
    """
    url = merged.get("url")
    if not isinstance(url, str) or not url.startswith("s3://"):
        return
    for name in ("bucket", "prefix"):
        if merged.get(name):
            raise ConfigError(
                f"`{name}` (from {origins[name]}) does not go together with `url` (from "
                f"{origins['url']}); remove one of the two",
                field=name,
            )
    try:
        corpus = parse_url(url)
    except ValueError as exc:
        raise ConfigError(
            f"bad settings: `url` (from {origins['url']}): {exc}", field="url"
        ) from exc
    merged.update(url=None, bucket=corpus.bucket, prefix=corpus.prefix)
    origins.update(bucket=origins["url"], prefix=origins["url"])


def _read_file() -> tuple[str, dict[str, Any]]:
    path = os.environ.get(CONFIG_FILE_VARIABLE, "")
    if not path:
        return "", {}
    kind = TomlConfigSettingsSource if path.endswith(".toml") else JsonConfigSettingsSource
    if not Path(path).is_file():
        raise ConfigError(f"{CONFIG_FILE_VARIABLE} names {path}, which is not a file")
    try:
        values = dict(kind(Settings, Path(path))())
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise ConfigError(
            f"cannot read {path} ({CONFIG_FILE_VARIABLE}) as a table of settings: {exc}"
        ) from exc
    for name in values:
        _refuse_credentials(name, f"file {path}")
        _refuse_unknown(name, f"file {path}")
    return path, values


def _refuse_credentials(name: str, origin: str) -> None:
    if any(word in name.lower() for word in _CREDENTIAL_WORDS):
        raise ConfigError(
            f"`{name}` in {origin}: credentials are not accepted here, because vLLM logs its "
            "whole configuration. Use the SDK's chain: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY in the environment, a `profile`, web identity or an "
            "instance role",
            field=name,
        )


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

    Others are let through: Kubernetes gives every pod S3EC_SERVICE_HOST and its like when a
    service is called s3ec, and the tests have variables of their own.
    """
    for variable in os.environ:
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or name == "config":
            continue
        _refuse_credentials(name, "the environment")
        near = _nearest(name, cutoff=0.85)
        if near is not None and name != near:
            raise ConfigError(
                f"unknown variable {variable}; did you mean {ENV_PREFIX}{near.upper()}?",
                field=name,
            )


def _readable(exc: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    """One line per fault: field, type of the value and reason; never the value itself."""
    lines = []
    field = None
    for error in exc.errors(include_url=False, include_context=False):
        field = str(error["loc"][0]) if error["loc"] else None
        reason = error["msg"].removeprefix("Value error, ")
        if field is None:
            lines.append(reason)
        elif field == "bucket" and origins[field] == "default":
            lines.append(f"`bucket` is required: {Settings.model_fields[field].description}")
        else:
            kind = type(error["input"]).__name__
            lines.append(f"`{field}` ({kind}, from {origins.get(field, '?')}): {reason}")
    return ConfigError("bad settings: " + "; ".join(lines), field=field)

# SPDX-License-Identifier: Apache-2.0
"""All settings, parsed once at start-up into frozen data that knows where each value came from.

Precedence: the JSON of ``ec_connector_extra_config`` (or ``--config`` of the command line),
then ``S3EC_NAME`` variables, then the file that ``S3EC_CONFIG`` names, then the default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    JsonConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from s3ec.corpus_url import CorpusUrl, check_endpoint, check_prefix, parse_url
from s3ec.errors import ConfigError

ENV_PREFIX = "S3EC_"
CONFIG_FILE_VARIABLE = "S3EC_CONFIG"
# Stands where a bucket is required and none is needed.
_NO_BUCKET = "no-bucket-given"

# What says nothing about a corpus that `url` names.
_OF_S3 = ("bucket", "prefix", "endpoint_url", "region", "addressing_style", "profile", "role_arn",
          "sse", "sse_kms_key_id")  # fmt: skip
_CREDENTIAL_WORDS = (
    "access_key",
    "accesskey",
    "secret",
    "session_token",
    "password",
    "credential",
)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has others ignored
        return Path(base) / "s3ec"
    try:
        return Path.home() / ".cache" / "s3ec"
    except RuntimeError as exc:  # a container's user without a name
        raise ValueError("this user has no home folder; set `cache_dir`") from exc


class Settings(BaseSettings):
    """Every setting of s3ec; frozen. Sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    url: str | None = Field(
        None,
        description="Corpus outside S3: `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or "
        "`file:///FOLDER`, instead of `bucket`; needs `pip install 's3ec[fast]'`.",
    )
    bucket: str = Field(
        "",
        validate_default=True,
        description="Bucket that holds the corpus. Required where there is no `url`.",
    )
    prefix: Annotated[str, AfterValidator(check_prefix)] = Field(
        "", description="Folder inside the bucket; surrounding slashes are cut."
    )
    endpoint_url: Annotated[str, AfterValidator(check_endpoint)] | None = Field(
        None, description="URL of an S3-compatible server; unset means AWS."
    )
    region: str | None = Field(None, description="Region to sign for; unset asks the SDK's chain.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="`path` puts the bucket into the path, `virtual` into the host name; `auto` "
        "takes `path` where `endpoint_url` is not Amazon's.",
    )
    profile: str | None = Field(None, description="Profile of the SDK's shared configuration.")
    role_arn: str | None = Field(None, description="Role to assume with the found credentials.")
    ca_bundle: Path | None = Field(None, description="PEM file of the authorities to trust.")
    sse: Literal["none", "AES256", "aws:kms"] = Field(
        "none",
        description="Server-side encryption asked for at each write; `none` leaves it to the "
        "bucket's default.",
    )
    sse_kms_key_id: str | None = Field(None, description="KMS key, with `sse` = `aws:kms`.")
    cache_dir: Path = Field(
        default_factory=_default_cache_dir,
        description="Folder of the node's disk tier. Default: `s3ec` in `XDG_CACHE_HOME` or "
        "`~/.cache`.",
    )
    cache_bytes: ByteSize = Field(
        ByteSize(50 * 2**30), gt=0, description="Size the tier is kept below, such as `50GiB`."
    )
    min_free_bytes: ByteSize = Field(
        ByteSize(2**30), ge=0, description="Free disk space the tier leaves to others."
    )
    transport: Literal["auto", "aioboto3", "obstore"] = Field(
        "auto",
        description="S3 client. `obstore` moves bodies outside the interpreter's lock and needs "
        "`pip install 's3ec[fast]'`; `auto` takes it where it is installed, `aioboto3` elsewhere.",
    )
    max_concurrency: int = Field(
        16, ge=1, le=256, description="Objects in flight at a time, per process."
    )
    defer_timeout_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Longest that a request waits in all for embeddings to arrive before "
        "its images are encoded; 0 never waits. A request without pixels waits 10 s or more.",
    )
    connect_timeout_s: float = Field(
        1.0, gt=0, le=60, description="Longest wait for a connection to the store."
    )
    read_timeout_s: float = Field(
        5.0, gt=0, le=600, description="Longest silence of the store inside a reply."
    )
    index_refresh_s: float = Field(
        10.0, ge=0.1, le=86400, description="Pause between two looks for news in the bucket."
    )
    index: Literal["exact", "bloom", "auto"] = Field(
        "auto",
        description="What a reader keeps of the manifest: `exact` all its columns (42 bytes a key, "
        "mapped from disk), `bloom` its filters, which say yes to a few keys that are not there; "
        "`auto` takes `bloom` where the columns are over 1/8 of `cache_bytes`.",
    )
    bloom_fpr: float = Field(
        0.01,
        ge=0.001,
        le=0.1,
        description="Share of wrong yes of the filters that a compaction by this process makes.",
    )
    model_identity: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Name of the model in the namespace, for fleets that mount one model at "
        "different paths. Unset: vLLM's `--model`.",
    )
    save_overflow: Literal["block", "drop"] | None = Field(
        None,
        description="What a full save queue does. Unset: `block` for `ec_producer`, whose work "
        "must be complete, `drop` for `ec_both`, which must not wait.",
    )
    save_queue_bytes: ByteSize = Field(
        ByteSize(2**30), gt=0, description="Embeddings waiting to be written, at most."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the `s3ec` loggers."
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = parse_url(value)
        if url.scheme == "s3":  # load_settings takes these apart before
            raise ValueError("an s3:// URL is written as `bucket` and `prefix`")
        return str(url)

    @field_validator(*_OF_S3)
    @classmethod
    def _check_place(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("url") and value not in (
            None,
            cls.model_fields[str(info.field_name)].default,
        ):
            raise ValueError("does not go together with `url`; remove one of the two")
        return value

    @field_validator("bucket")
    @classmethod
    def _check_bucket(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("url", "wrong"):
            return value
        if "://" in value or ("/" in value and not value.startswith("arn:")):
            raise ValueError("give the bucket's name alone; a folder inside it goes into `prefix`")
        if not value.startswith("arn:") and not re.fullmatch(r"[A-Za-z0-9._-]{3,255}", value):
            raise ValueError("a bucket name has 3 or more of letters, digits, `.`, `-` and `_`")
        return value

    @field_validator("ca_bundle")
    @classmethod
    def _check_ca_bundle(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError("no such file; give the path of a PEM file on this machine")
        return value

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, value: Path) -> Path:
        try:
            value = value.expanduser()
        except RuntimeError as exc:
            raise ValueError(str(exc)) from exc
        if not value.is_absolute():
            raise ValueError("an absolute path, since vLLM's processes differ in their folder")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError("`sse_kms_key_id` needs `sse` = `aws:kms`")
        if self.addressing_style == "virtual" and self.bucket.startswith("arn:"):
            raise ValueError("`addressing_style` = `virtual` does not go with an ARN in `bucket`")
        if self.url and self.transport == "aioboto3":
            raise ValueError("`transport` = `aioboto3` knows S3 only; `url` needs `obstore`")
        return self

    @property
    def corpus(self) -> CorpusUrl:
        """Where the corpus is; ``str`` of it is for people."""
        return parse_url(self.url) if self.url else CorpusUrl("s3", self.bucket, self.prefix)

    @property
    def path_style(self) -> bool | None:
        """True for path style, False for virtual-host style, None where the SDK decides."""
        if self.addressing_style != "auto":
            return self.addressing_style == "path"
        host = urlsplit(self.endpoint_url).hostname if self.endpoint_url else None
        if host is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            return None
        return True


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

# SPDX-License-Identifier: Apache-2.0
"""All settings: names, types, defaults, and valid combinations; ``config.py`` reads them.

The module begins with the syntax of a corpus's address (URLs, prefixes, servers), and ends with
the table of all settings for the documentation.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from s3ec.tenant import check_reference

Scheme = Literal["s3", "gs", "az", "file"]
_FORMS = "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER or s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class CorpusUrl:
    """Where a corpus is.

    Attributes:
        scheme: ``s3``, ``gs`` (Google Cloud Storage), ``az`` (Azure Blob Storage) or ``file``.
        bucket: Bucket or container; empty for ``file``.
        prefix: Folder inside it, without surrounding slashes; for ``file`` the absolute path.
    """

    scheme: Scheme
    bucket: str
    prefix: str

    def __str__(self) -> str:
        between = "" if self.scheme == "file" else "/"
        return f"{self.scheme}://{self.bucket}{between}{quote(self.prefix)}".rstrip("/")


def parse_url(text: str) -> CorpusUrl:
    """Parse the URL of a corpus; percent-encoded characters are decoded.

    Raises:
        ValueError: Not such a URL; the message does not repeat it.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not text.isprintable():
        raise ValueError(f"write it as {_FORMS}")
    if scheme not in ("s3", "gs", "az", "file"):
        raise ValueError(f"no such kind of corpus; write it as {_FORMS}")
    bucket, _, path = rest.partition("/")
    # Anywhere, since a key with a slash in it would be taken for host and path.
    if "@" in (bucket if scheme == "file" else rest):
        raise ValueError("no credentials in the URL; they come from the environment")
    if "?" in rest or "#" in rest:
        raise ValueError("a URL has `?` as %3F and `#` as %23")
    prefix = check_prefix(unquote(path, errors="strict"))
    if scheme == "file":
        if bucket:
            raise ValueError("a `file` URL has three slashes, file:///FOLDER")
        if not prefix:
            raise ValueError("name a folder, not the whole file system")
        return CorpusUrl("file", "", f"/{prefix}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{3,255}", bucket):
        raise ValueError("a bucket name has 3 or more of letters, digits, `.`, `-` and `_`")
    return CorpusUrl(cast("Scheme", scheme), bucket, prefix)


def check_prefix(value: str) -> str:
    """Return a folder's name without surrounding slashes.

    Raises:
        ValueError: It cannot be the prefix of an object's name.
    """
    value = value.strip("/")
    if any(part in ("", ".", "..") for part in value.split("/") if value):
        raise ValueError("no empty, `.` or `..` parts between the slashes")
    if not value.isprintable():
        raise ValueError("printable characters only")
    if len(value.encode()) > 512:
        raise ValueError("at most 512 bytes, so that object names fit S3's limit of 1024")
    return value


def check_endpoint(value: str) -> str:
    """Return the URL of a server, without a slash at its end.

    Raises:
        ValueError: It has more or fewer parts than a server's; the message does not repeat it.
    """
    # Anywhere, since a key with a slash in it would be taken for host and path.
    if "@" in value:
        raise ValueError("no credentials in the URL; they come from the SDK's chain")
    url = urlsplit(value)
    # urlsplit drops line breaks silently.
    plain = value.isprintable() and " " not in value
    if url.scheme not in ("http", "https") or not url.hostname or not plain:
        raise ValueError("write it as http://host:port or https://host:port")
    if url.query or url.fragment or not _PATH.fullmatch(url.path):
        raise ValueError("host and port, and perhaps a path; the bucket goes into `bucket`")
    try:
        _ = url.port
    except ValueError:
        # Without its text and trace: both repeat the given value.
        raise ValueError("the port is not a number from 0 to 65535") from None
    return value.rstrip("/")


def is_plain_http_elsewhere(url: str, scheme: str = "http") -> bool:
    """Return True for ``http://`` (or another scheme) to a host that may be another machine.

    Only loopback addresses and the name ``localhost`` are certainly this machine: other names are
    resolved by others, and their addresses can change.
    """
    parts = urlsplit(url)
    if parts.scheme != scheme or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


# Path of an endpoint: names between single slashes, of characters that no client changes.
_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[\w.~-]+)*/?", re.ASCII)
# Only S3's own names: a customer's servers have Amazon names too (EC2, load balancers, gateways).
_AMAZONS = re.compile(
    r"(?:.+\.)?s3(?:express)?(?:-[a-z0-9-]+)?(?:\.dualstack)?(?:\.[a-z0-9-]+)?(?:\.vpce)?"
    r"\.amazonaws\.com(?:\.cn)?"
)


def is_amazons(url: str) -> bool:
    """Return True if a URL's host is Amazon's S3."""
    return _AMAZONS.fullmatch(urlsplit(url).hostname or "") is not None


ENV_PREFIX = "S3EC_"

PLAIN_HTTP = (
    "{} is http:// to another machine; take https://, or on a network that you trust set "
    "`allow_http` to true (--allow-http, S3EC_ALLOW_HTTP=true)"
)

# Settings that do not apply to a corpus that `url` names.
OF_S3 = ("bucket", "prefix", "endpoint_url", "region", "addressing_style", "allow_http", "profile",
          "sse", "sse_kms_key_id", "requester_pays")  # fmt: skip


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "s3ec"
    return Path("~/.cache/s3ec")


def _check_epoch(value: Any) -> str:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else "?"
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", text):
        raise ValueError("a number, or up to 64 letters, digits, `.`, `_` and `-`, such as 2")
    return text


def _check_text(value: Any) -> Any:
    """Refuse half a surrogate pair, which JSON can express and no name or file can have."""
    try:
        if isinstance(value, str | Path):
            str(value).encode()
    except UnicodeEncodeError:
        raise ValueError("printable characters only, no half of a surrogate pair") from None
    return value


def _parse_replicas(value: Any) -> Any:
    """Return the list itself; a variable holds it as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError('write it as JSON, such as [{"bucket": "corpus-eu"}]') from None


def _check_redis(value: str | None) -> str | None:
    if value is None:
        return None
    url = urlsplit(value)
    if url.scheme not in ("redis", "rediss") or not url.hostname:
        raise ValueError("write it as rediss://HOST:PORT/DATABASE, or redis:// without TLS")
    if url.password is not None:
        raise ValueError("no password in the URL; `password` says where it is, such as env:NAME")
    if url.query or url.fragment or not re.fullmatch(r"/?[0-9]{0,4}", url.path):
        raise ValueError("host, port and perhaps the number of a database")
    return value


class Replica(BaseModel):
    """A place near this node that holds copies of the corpus; frozen.

    A bucket, or with ``url`` a Redis or Valkey server, which may evict them. If unset, ``prefix``,
    ``addressing_style``, ``allow_http``, ``profile`` and ``ca_bundle`` are those of the corpus
    itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str | None = None
    url: Annotated[str | None, AfterValidator(_check_redis)] = None
    password: Annotated[str | None, AfterValidator(check_reference)] = None
    cluster: bool = False
    ttl_s: int | None = Field(None, gt=0)
    prefix: str | None = None
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] | None = None
    allow_http: bool | None = None
    profile: str | None = None
    ca_bundle: Path | None = None
    fill: bool = False
    fill_bytes_per_minute: ByteSize = Field(ByteSize(2**30), gt=0)

    @property
    def name(self) -> str:
        """Name in messages and metrics: the bucket or server, with `_` for each dot."""
        return (self.bucket or urlsplit(self.url or "").netloc.rpartition("@")[2]).replace(".", "_")

    _text = field_validator("*", mode="before")(_check_text)

    @model_validator(mode="after")
    def _check_kind(self) -> Replica:
        if (self.bucket is None) == (self.url is None):
            raise ValueError("`bucket` or `url`, and one of the two")
        if self.url is None and (self.password or self.cluster or self.ttl_s):
            raise ValueError("`password`, `cluster` and `ttl_s` go together with `url`")
        if self.url and (self.endpoint_url or self.region or self.profile or self.addressing_style):
            raise ValueError("`endpoint_url`, `region` and the like go together with `bucket`")
        return self


class Settings(BaseModel):
    """Every setting of s3ec; frozen. Sizes are bytes, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    url: str | None = Field(
        None,
        description="Address of the corpus, instead of `bucket`: `s3://BUCKET/PREFIX`, or outside "
        "S3 `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `file:///FOLDER`.",
    )
    bucket: str = Field(
        "",
        description="Bucket that holds the corpus. Required unless `url` is set.",
    )
    prefix: Annotated[str, AfterValidator(check_prefix)] = Field(
        "", description="Folder inside the bucket. Leading and trailing slashes are removed."
    )
    endpoint_url: Annotated[str, AfterValidator(check_endpoint)] | None = Field(
        None,
        description="URL of an S3-compatible server, with an optional path before the bucket. "
        "Unset: the variable `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, then the profile's "
        "URL, else AWS.",
    )
    region: str | None = Field(
        None, description="Region for signatures. Unset: the region of the SDK's chain."
    )
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="`path` puts the bucket into the path, `virtual` into the host name. `auto` "
        "uses `path` if `endpoint_url` is not Amazon's.",
    )
    allow_http: bool = Field(
        False,
        description="Allow `http://` in an `endpoint_url` of another machine. Anyone on the "
        "network path can then read and change the data. `127.0.0.1`, `::1` and `localhost` are "
        "always allowed.",
    )
    profile: str | None = Field(None, description="Profile of the SDK's shared configuration.")
    ca_bundle: Path | None = Field(
        None,
        description="PEM file of authorities to trust in addition to the system's. Unset: the "
        "file of `AWS_CA_BUNDLE`, the profile or `REQUESTS_CA_BUNDLE`, or the SDK's own.",
    )
    sse: Literal["none", "AES256", "aws:kms"] = Field(
        "none",
        description="Server-side encryption to request for each write. With `none` the bucket's "
        "default applies.",
    )
    sse_kms_key_id: str | None = Field(None, description="KMS key for `sse` = `aws:kms`.")
    replicas: Annotated[tuple[Replica, ...], BeforeValidator(_parse_replicas)] = Field(
        (),
        description="Places near this node that have copies of the corpus, in the order of "
        "reading; the corpus itself comes last. The value is a list of tables with `bucket` and, "
        "if they differ, `prefix`, `endpoint_url`, `region`, `addressing_style`, `allow_http`, "
        "`profile` and `ca_bundle`. For a Redis or Valkey the table has `url` "
        "(`rediss://USER@HOST:PORT`) and optionally `password` (`env:VARIABLE` or `file:/path`), "
        "`cluster` and `ttl_s`. With `fill`, engines copy missing embeddings there, each at most "
        "`fill_bytes_per_minute` (1GiB).",
    )
    requester_pays: bool = Field(
        False,
        description="Send `x-amz-request-payer: requester` with each request. This account then "
        "pays for its requests to a bucket with that setting.",
    )
    cache_dir: Path = Field(
        default_factory=_default_cache_dir,
        description="Folder of the node's disk tier, on a disk of this machine or in memory. "
        "Default: `s3ec` in `XDG_CACHE_HOME` or `~/.cache`.",
    )
    cache_bytes: ByteSize = Field(
        ByteSize(50 * 2**30), gt=0, description="Upper limit of the tier's size, such as `50GiB`."
    )
    min_free_bytes: ByteSize = Field(
        ByteSize(2**30), ge=0, description="Free disk space that the tier leaves to other programs."
    )
    transport: Literal["obstore", "aioboto3"] = Field(
        "obstore",
        description="S3 client. `obstore` moves bodies outside the interpreter's lock, and "
        "botocore does the rest. `aioboto3` needs `pip install aioboto3`.",
    )
    max_concurrency: int = Field(
        16, ge=1, le=256, description="Maximum number of objects in flight at a time, per process."
    )
    wait: Literal["always", "auto", "never"] = Field(
        "auto",
        description="When a request waits for an embedding that is being fetched. `auto`: if the "
        "wait is likely to cost less than encoding, by the fetch and encode times in this "
        "engine. `always`: up to `defer_timeout_s`. `never`: vLLM encodes the image, and the "
        "fetch serves later requests. A request without pixels always waits.",
    )
    defer_timeout_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Longest total wait of a request before its images are encoded; with 0 no "
        "request waits. A request without pixels waits 10 s or more.",
    )
    connect_timeout_s: float = Field(
        1.0, gt=0, le=60, description="Longest wait for a connection to the store."
    )
    read_timeout_s: float = Field(
        5.0, gt=0, le=600, description="Longest pause of the store inside a reply."
    )
    hedge: bool = Field(
        True,
        description="Send a GET a second time if it takes longer than the 95th percentile. "
        "Together with repeated requests this adds at most 10% requests.",
    )
    index_refresh_s: float = Field(
        10.0,
        ge=0.1,
        le=86400,
        description="Time between two refreshes of a node's index from the bucket.",
    )
    verify: Literal["always", "download"] = Field(
        "always",
        description="When s3ec hashes an entry's values. `always`: also at each load. "
        "`download`: only when they come from the bucket or from the encoder. s3ec then does not "
        "notice later damage by the node's disk or memory, such as zeros after a power cut.",
    )
    model_identity: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Name of the model in the namespace, for fleets that mount one model at "
        "different paths. Unset: vLLM's `--model`.",
    )
    weights: Literal["fingerprint", "name"] = Field(
        "fingerprint",
        description="How the namespace distinguishes two checkpoints of one model. `fingerprint` "
        "reads samples of each tensor of encoder and projector, so a folder with other weights "
        "is another namespace; if the samples cannot be read, s3ec loads and saves nothing. "
        "`name` trusts the model's name and revision.",
    )
    encoder_epoch: Annotated[str, BeforeValidator(_check_epoch)] = Field(
        "",
        description="A number or a word that starts an empty corpus on purpose. Engines with "
        "different values share nothing. Change it, for example, after a release of vLLM that "
        "encoded wrongly.",
    )
    tenant_key: Annotated[str | None, AfterValidator(check_reference)] = Field(
        None,
        description="Place of a secret of 16 bytes or more: `env:VARIABLE` or "
        "`file:/absolute/path`. s3ec derives every name in bucket and tier from the secret. So "
        "only engines with the secret can guess or choose a name, and they share.",
    )
    trust_client_ids: bool = Field(
        True,
        description="Whether s3ec looks up and saves identifiers that are no content hash, so "
        "that a client chose them (`uuid`).",
    )
    save: Literal["always", "worth"] = Field(
        "always",
        description="Which embeddings an `ec_both` engine stores. `always`: every embedding that "
        "it encodes. `worth`: an embedding that it encodes for the second time (of the last "
        "131,072 or more). An `ec_producer` always stores all.",
    )
    save_overflow: Literal["block", "drop"] = Field(
        "drop",
        description="What happens when the save queue is full. `drop`: the embedding is not "
        "stored, and a later request encodes and saves it. `block`, for a job that must store "
        "everything: the save waits for space, at most 60 s in a step and in an outage of the "
        "bucket, and is then dropped. `s3ec precompute` blocks.",
    )
    live_weights: Literal["stop", "ignore"] = Field(
        "stop",
        description="What to do when the weights may have changed: when vLLM gets a weight "
        "version, or a call into its workers, or, with `weights` = name, resets its encoder "
        "cache. `stop` loads and saves nothing more until the engine is started again; with "
        "--weight-transfer-config it loads and saves nothing from the start. `ignore` is for "
        "encoders that never change.",
    )
    save_queue_bytes: ByteSize = Field(
        ByteSize(2**30), gt=0, description="Maximum bytes of embeddings that wait to be written."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the `s3ec` loggers."
    )

    _text = field_validator("*", mode="before")(_check_text)

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = parse_url(value)
        if url.scheme == "s3":  # load_settings splits these before
            raise ValueError("an s3:// URL is written as `bucket` and `prefix`")
        return str(url)

    @field_validator(*OF_S3)
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
        if "://" in value:
            raise ValueError("give the bucket's name alone; a URL goes into `url`")
        if value.startswith("arn:") and value.endswith(".mrap"):
            raise ValueError(
                "a multi-region access point is signed for in a way of its own, which obstore "
                "does not know; give the bucket or the access point of one region"
            )
        if "/" in value and not value.startswith("arn:"):
            raise ValueError("give the bucket's name alone; a folder inside it goes into `prefix`")
        if not value.startswith("arn:") and not re.fullmatch(r"[A-Za-z0-9._-]{3,255}", value):
            raise ValueError("a bucket name has 3 or more of letters, digits, `.`, `-` and `_`")
        return value

    @field_validator("allow_http")
    @classmethod
    def _check_plain_http(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and is_plain_http_elsewhere(info.data.get("endpoint_url") or ""):
            raise ValueError(PLAIN_HTTP.format("`endpoint_url`"))
        return value

    @field_validator("ca_bundle")
    @classmethod
    def _check_ca_bundle(cls, value: Path | None) -> Path | None:
        # Not by Path.is_file, which raises for a name that no file can have.
        if value is not None and not os.path.isfile(value):
            raise ValueError("no such file; give the path of a PEM file on this machine")
        return value

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, value: Path) -> Path:
        try:
            value = value.expanduser()
        except RuntimeError as exc:  # a container's user without a name
            raise ValueError("there is no such home folder; set `cache_dir`") from exc
        if not value.is_absolute():
            raise ValueError("an absolute path, since vLLM's processes differ in their folder")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError("`sse_kms_key_id` needs `sse` = `aws:kms`")
        if self.addressing_style == "virtual" and self.bucket.startswith("arn:"):
            raise ValueError("`addressing_style` = `virtual` does not go with an ARN in `bucket`")
        path = urlsplit(self.endpoint_url or "").path.strip("/")
        if path and (self.path_style is not True or path.rpartition("/")[2] == self.bucket):
            raise ValueError(
                "`endpoint_url` has a path: it needs `addressing_style` = `path` and a server that "
                "is not Amazon's; the bucket goes into `bucket` alone"
            )
        if self.url and self.replicas:
            raise ValueError("`replicas` go together with `bucket`, not with `url`")
        self._check_replicas()
        if self.url and self.transport == "aioboto3":
            raise ValueError("`transport` = `aioboto3` knows S3 only; `url` needs `obstore`")
        return self

    def _check_replicas(self) -> None:
        """Check that each replica can be opened and has a unique name: it labels counters."""
        taken = {self._bucket: "the corpus itself"} if self.bucket else {}
        names: dict[str, str] = {}
        for number, replica in enumerate(self.replicas):
            this = f"`replicas` {number + 1}"
            plain = replica.url is not None and is_plain_http_elsewhere(replica.url, "redis")
            if plain and not (replica.allow_http or self.allow_http):
                raise ValueError(f"{this}, `url`: take rediss://, or `allow_http`")
            try:
                if replica.bucket is not None:
                    other = taken.setdefault(self.at(replica)._bucket, this)
                    if other != this:
                        raise ValueError(f"{this}, `bucket`: the very bucket of {other}; remove it")
            except ValidationError as exc:
                found = exc.errors(include_url=False, include_context=False)[0]
                field = ".".join(map(str, found["loc"])) or "replicas"
                reason = found["msg"].removeprefix("Value error, ")
                raise ValueError(f"{this}, `{field}`: {reason}") from None
            other = names.setdefault(replica.name, this)
            if other != this:
                field = "url" if replica.url else "bucket"
                raise ValueError(
                    f"{this}, `{field}`: named as {other}, and metrics need two names; remove or "
                    "rename one"
                )

    @property
    def _bucket(self) -> tuple[str | None, str, str]:
        """Identity of a place. Amazon's bucket names are unique across regions."""
        endpoint = self.endpoint_url
        server = None if endpoint is None or is_amazons(endpoint) else endpoint.casefold()
        return server, self.bucket, self.prefix

    def at(self, replica: Replica) -> Settings:
        """Return these settings with the replica's place instead of the corpus's."""
        others = {"fill", "fill_bytes_per_minute", "url", "password", "cluster", "ttl_s"}
        place = replica.model_dump(exclude=others, exclude_none=True)
        own = {"replicas", "bucket", "endpoint_url", "region", "sse", "sse_kms_key_id"}
        return Settings.model_validate({**self.model_dump(exclude=own), **place})

    @property
    def corpus(self) -> CorpusUrl:
        """Address of the corpus; ``str`` of it is for people."""
        return parse_url(self.url) if self.url else CorpusUrl("s3", self.bucket, self.prefix)

    @property
    def path_style(self) -> bool | None:
        """True for path style, False for virtual-host style, None if the SDK decides."""
        if self.addressing_style != "auto":
            return self.addressing_style == "path"
        return None if self.endpoint_url is None or is_amazons(self.endpoint_url) else True


def settings_table() -> str:
    """The table of docs/settings.md, Markdown."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if name == "bucket":  # or `url`, as its description says
            default = "required"
        elif field.default_factory is not None:
            default = "see right"
        elif isinstance(field.default, ByteSize):
            default = f"`{field.default.human_readable(separator='')}`"
        else:
            default = "unset" if field.default is None else f"`{field.default}`"
            default = '`""`' if field.default == "" else "none" if field.default == () else default
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"

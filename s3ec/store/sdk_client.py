# SPDX-License-Identifier: Apache-2.0
"""How the SDK's client is made from the settings: session, role, configuration, event hooks."""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    InvalidRegionError,
    NoCredentialsError,
    ProfileNotFound,
)
from botocore.httpsession import get_cert_path
from botocore.session import Session, get_session
from botocore.utils import get_environ_proxies, validate_region_name

import s3ec
from s3ec.corpus_url import is_plain_http_elsewhere
from s3ec.errors import AccessError, ConfigError
from s3ec.settings import PLAIN_HTTP, Settings
from s3ec.store.credentials import ChainCredentials
from s3ec.store.sdk_session import BoundedSession, ThreadCredentials


@dataclass(frozen=True, slots=True)
class Opened:
    """An S3 client of an SDK, and what it works with.

    Attributes:
        client: The client.
        credentials: What signs for it, and changes as they expire or are refused.
        roots: PEM file of the authorities it trusts.
        transport: What it sends with, where that is ours to close.
    """

    client: Any
    credentials: ChainCredentials
    roots: str
    transport: BoundedSession | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where the SDK sends requests about the objects of one bucket.

    Attributes:
        url: Up to the slash before an object's key; the bucket stands in the host or in the path.
        region: What is signed for.
        service: What is signed for; ``s3`` for all but a few kinds of bucket.
    """

    url: str
    region: str
    service: str


def check_settings(settings: Settings) -> None:
    """Find at start-up what the SDK would find at the first request.

    Raises:
        ConfigError: No such profile, not a region's name, not a file of certificates, plain http
            to another machine.
    """
    quiet_sdk_logs()
    try:
        endpoint_url = _endpoint_url(settings, _session(settings).get_scoped_config())
    except ProfileNotFound as exc:
        raise ConfigError(
            f"`profile` (or AWS_PROFILE): {exc}; see ~/.aws/config and ~/.aws/credentials",
            field="profile",
        ) from exc
    except BotoCoreError as exc:
        raise ConfigError(f"the SDK's shared configuration cannot be used: {exc}") from exc
    if not settings.allow_http and is_plain_http_elsewhere(endpoint_url):
        raise ConfigError(f"`allow_http`: {_not_encrypted(settings)}", field="allow_http")
    try:
        validate_region_name(settings.region)
    except InvalidRegionError as exc:
        raise ConfigError("`region` is not a region's name", field="region") from exc
    if settings.ca_bundle is not None:
        try:
            ssl.create_default_context(cafile=settings.ca_bundle)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(
                "`ca_bundle` is not a file of PEM certificates", field="ca_bundle"
            ) from exc


def _endpoint_url(settings: Settings, profile: Mapping[str, Any]) -> str:
    """The server that settings, environment or profile name, empty where none does."""
    if settings.endpoint_url is not None:
        return settings.endpoint_url
    named = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    return str(next(filter(None, named), None) or profile.get("endpoint_url") or "")


def _not_encrypted(settings: Settings) -> str:
    source = "the SDK's endpoint (AWS_ENDPOINT_URL, or of the profile)"
    return PLAIN_HTTP.format("`endpoint_url`" if settings.endpoint_url else source)


def quiet_sdk_logs() -> None:
    """Keep the SDK's debug lines out of a log whose root level is DEBUG.

    They hold request headers, session tokens among them. A level that somebody set for these
    loggers on purpose stays.
    """
    for name in ("aioboto3", "aiobotocore", "boto3", "botocore"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def open_client(settings: Settings) -> Opened:
    """Make botocore's S3 client; no request goes out. Threads use it within an Exchange.

    The first request looks for credentials. Takes about 0.1 s of CPU the first time: the SDK's
    service model.

    Raises:
        AccessError: Plain http to another machine that nobody has allowed.
    """
    core = _session(settings)
    core.get_component("credential_provider").providers.insert(0, _Provider())
    client = boto3.Session(botocore_session=core).client(
        "s3", config=Config(**config_for(settings, core)), **client_options(settings)
    )
    check_and_adapt(client, settings)
    roots = roots_for(settings, core)
    transport = BoundedSession(
        verify=roots,
        proxies=get_environ_proxies(client.meta.endpoint_url),
        timeout=(settings.connect_timeout_s, settings.read_timeout_s),
        max_pool_connections=settings.max_concurrency,
    )
    client.meta.events.register("before-send.s3", transport.send)
    return Opened(client, chain_credentials(settings), roots, transport)


def chain_credentials(settings: Settings) -> ChainCredentials:
    """What signs, for each SDK; nothing is looked for yet."""
    return ChainCredentials(functools.partial(_find_credentials, settings))


def _find_credentials(settings: Settings) -> Any:
    """Walk the SDK's chain from its beginning; those of the role where one is set.

    May ask services and commands, so it takes its time.

    Raises:
        NoCredentialsError: The SDK's; there are none.
    """
    core = _session(settings)
    # Services of credentials are clients of this session; botocore gives each a minute, five times.
    core.set_default_client_config(Config(**_timeouts(settings), retries={"total_max_attempts": 2}))
    source = core.get_credentials()
    if source is None:
        raise NoCredentialsError
    if not settings.role_arn:
        return source
    fetcher = AssumeRoleCredentialFetcher(
        client_creator=functools.partial(core.create_client, region_name=settings.region),
        source_credentials=source,
        role_arn=settings.role_arn,
        extra_args={"RoleSessionName": "s3ec"},
    )
    return DeferredRefreshableCredentials(
        refresh_using=fetcher.fetch_credentials, method="s3ec-assume-role"
    )


def address_of(client: Any, bucket: str) -> Address:
    """Ask the SDK where it would send a request; none goes out.

    That is the only place that knows partitions, dual-stack, FIPS, access points and the
    endpoints of environment and profile.
    """
    found: list[Address] = []

    def answer(params: dict[str, Any], **_: Any) -> tuple[AWSResponse, dict[str, Any]]:
        signing = params["context"]["signing"]
        url = params["url"].removesuffix("/key")
        found.append(Address(url, signing["region"], signing["signing_name"]))
        return AWSResponse(params["url"], 200, {}, None), {}

    event = "before-call.s3.HeadObject"
    client.meta.events.register_last(event, answer)
    try:
        client.head_object(Bucket=bucket, Key="key")
    finally:
        client.meta.events.unregister(event, answer)
    return found[0]


@functools.cache
def _loader() -> Any:
    """The SDK's reader of its service models: parsed once for all sessions of this process."""
    return get_session().get_component("data_loader")


def _session(settings: Settings) -> Session:
    return configured(get_session(), settings)


def configured(core: Any, settings: Settings) -> Any:
    """A session of botocore, or of a kin of it, as the settings want it."""
    core.register_component("data_loader", _loader())
    if settings.profile is not None:
        core.set_config_variable("profile", settings.profile)
    return core


def client_options(settings: Settings) -> dict[str, Any]:
    """What the S3 client of each SDK is made with, beside its configuration."""
    return {
        "endpoint_url": settings.endpoint_url,
        "region_name": settings.region,
        "verify": str(settings.ca_bundle) if settings.ca_bundle else None,
    }


def config_for(settings: Settings, core: Any) -> dict[str, Any]:
    """The configuration of each SDK's S3 client.

    Args:
        core: The session, for what the profile says.
    """
    # Over HTTPS the checksum and TLS guard the body; hashing it for the signature as well would
    # cost more than the transfer. Over HTTP the signature is all there is.
    over_tls = not _endpoint_url(settings, core.get_scoped_config()).lower().startswith("http:")
    s3_options: dict[str, Any] = {"addressing_style": _addressing_style(settings)}
    if over_tls:
        s3_options["payload_signing_enabled"] = False
    return {
        **_timeouts(settings),
        "max_pool_connections": settings.max_concurrency,
        # One attempt in all, whatever AWS_MAX_ATTEMPTS says: retries are a wrapper of ours.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        # Checksums are ours on both ways, see BotocoreStore.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": f"s3ec/{s3ec.__version__}",
        "s3": s3_options,
    }


def check_and_adapt(client: Any, settings: Settings) -> None:
    """Have each SDK's S3 client do less than it would.

    Raises:
        AccessError: Plain http to another machine that nobody has allowed.
    """
    # Once more, where a section of services in the profile names the server.
    if not settings.allow_http and is_plain_http_elsewhere(client.meta.endpoint_url):
        raise AccessError(_not_encrypted(settings), code="PlainHttp")
    client.meta.events.register_last("before-call.s3", _drop_expect)
    client.meta.events.register_last("before-call.s3.DeleteObjects", _send_md5)
    client.meta.events.register_last("before-parameter-build.s3", _stay_in_region)


def roots_for(settings: Settings, core: Any) -> str:
    """PEM file of the authorities to trust, where the SDK would look for it."""
    named = settings.ca_bundle or core.get_config_variable("ca_bundle")
    return str(named or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True))


def _timeouts(settings: Settings) -> dict[str, float]:
    return {
        "connect_timeout": settings.connect_timeout_s,
        "read_timeout": settings.read_timeout_s,
    }


def _addressing_style(settings: Settings) -> str:
    if settings.path_style is None:
        return "auto"
    return "path" if settings.path_style else "virtual"


class _Provider:
    """What botocore calls a credential provider: the first one that loads something wins."""

    METHOD = ThreadCredentials.method
    CANONICAL_NAME = None

    def load(self) -> ThreadCredentials:
        return ThreadCredentials()


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    """Send bodies at once: aiohttp waits for "100 Continue" without a limit, botocore a second."""
    params["headers"].pop("Expect", None)


def _send_md5(params: dict[str, Any], **_: Any) -> None:
    """Guard a batch of deletions as servers have always wanted it; botocore sends a CRC-32 instead.

    Directory buckets take no MD5.
    """
    if params["context"].get("signing", {}).get("signing_name") == "s3":
        digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
        params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
        params["context"].pop("checksum", None)


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    """Mark the request as redirected already.

    botocore would otherwise find the bucket's region and ask there: two more requests for each
    of the first ones, and a silent trip to another region for the rest.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True

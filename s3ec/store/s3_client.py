# SPDX-License-Identifier: Apache-2.0
"""The SDK's client: how it is made from the settings, and how its requests travel.

botocore calls a blocking transport, which times out only after a silence, and reads an error or a
page of a listing to its end, however long it is. Here another thread can abort a request by
shutting its socket down, and such responses have a size limit. botocore's own transport checks
certificates below. Redirects are not followed. network.py supplies the proxy and the
authorities. Checked with botocore 1.40 and 1.44, urllib3 2.8.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import functools
import hashlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
)
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ConnectionClosedError,
    HTTPClientError,
    InvalidRegionError,
    NoCredentialsError,
    ProfileNotFound,
    SSLError,
)
from botocore.httpsession import URLLib3Session
from botocore.response import StreamingBody
from botocore.session import Session, get_session
from botocore.utils import parse_timestamp, validate_region_name
from urllib3.exceptions import HTTPError

import s3ec
from s3ec.errors import AccessError, ConfigError
from s3ec.settings import PLAIN_HTTP, Settings, is_amazons, is_plain_http_elsewhere
from s3ec.store.credentials import ChainCredentials
from s3ec.store.network import Proxy, check_roots, proxy_for, roots_for

T = TypeVar("T")

IDLE_S = 20.0
"""A connection that was idle for longer is closed, not reused: firewalls and load balancers drop
an idle connection after a minute or more, and answer its next request with a reset."""

ANSWER_BYTES = 8 * 2**20
"""Longest error or page of a listing: 1000 names of 1 KiB, where a byte may be escaped as five."""

# urllib3 needs this codec for each connection. A child that is forked while a thread of its parent
# imports the codec would never find it.
codecs.lookup("idna")

# Bytes that are read at a time from a response that is not an object.
_PIECE_BYTES = 256 * 1024
_BODILESS = frozenset({204, 304})


class Exchange:
    """One operation's request and response, run by one thread at a time, aborted by any thread.

    States:

    - idle: no thread works for it.
    - running: a thread is in ``run``, on the connection that ``uses`` and ``is_done_with`` report.
    - aborted, for good: a running thread gets an error from its socket, and a later ``run`` fails
      at once. The connection is closed when no thread is running.

    Attributes:
        credentials: The SDK's tuple that signs the request.
        is_aborted: True if no caller waits for it any more.
        is_reused: True if its connection served another request before.
        wants_fresh: True if it must not take a connection that served another request.
    """

    def __init__(self) -> None:
        self.credentials: Any = None
        self.is_aborted = self.is_reused = self.wants_fresh = False
        self._lock = threading.Lock()
        self._is_running = False
        self._connection: Any = None
        self._socket: socket.socket | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` as this thread's exchange, so that its requests can be aborted.

        Raises:
            ConnectionClosedError: The SDK's; the exchange was aborted before.
        """
        with self._lock:
            if self.is_aborted:
                raise ConnectionClosedError(endpoint_url="", error="given up")
            self._is_running = True
        before, _of_thread.exchange = _of_thread.exchange, self
        try:
            return function()
        finally:
            _of_thread.exchange = before
            with self._lock:
                self._is_running = False
                self._close_aborted()

    def abort(self) -> None:
        """Make the thread's current or next wait for the server fail at once."""
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    # Not SSLSocket's own, which also removes the TLS layer under a reading thread.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            self._close_aborted()

    def _close_aborted(self) -> None:
        """Close the connection once no thread reads from it; under the lock."""
        if self.is_aborted and not self._is_running and self._connection is not None:
            self._connection.close()
            self._connection = self._socket = None

    def uses(self, connection: Any) -> None:
        """Note the connection that works for this exchange from now on."""
        with self._lock:
            self._connection, self._socket = connection, connection.sock
        if self.is_aborted:
            self.abort()

    def is_done_with(self, connection: Any) -> None:
        """Release the connection for others: an abort of this exchange must not shut it down."""
        with self._lock:
            if self._connection is connection:
                self._connection = self._socket = None


class _OfThread(threading.local):
    """The exchange that a thread works for; by default one that is never aborted."""

    def __init__(self) -> None:
        self.exchange = Exchange()


_of_thread = _OfThread()


class ThreadCredentials:
    """The credentials of the thread's exchange, with which the SDK's client signs."""

    method = "s3ec"

    def get_frozen_credentials(self) -> Any:
        return _of_thread.exchange.credentials

    def get_deferred_property(self, name: str) -> Callable[[], None]:
        """Return no account id: some endpoints contain one, those of S3 do not."""
        return lambda: None


class _Connection:
    """The code that both kinds of connection share."""

    sock: Any
    exchange: Exchange | None = None
    idle_since_s: float | None = None  # None until it has served a request

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.idle_since_s = None
        self._begin()

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:
            self._begin()
        super().request(*args, **kwargs)  # type: ignore[misc]

    def _begin(self) -> None:
        # For sending only: reading the response has the read timeout again. The request's deadline
        # limits the sending of a body; it shuts the socket down.
        self.sock.settimeout(None)
        self.exchange = _of_thread.exchange
        self.exchange.is_reused = self.idle_since_s is not None
        self.exchange.uses(self)


class _HttpConnection(_Connection, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _HttpsConnection(_Connection, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool:
    """The code that both kinds of pool share."""

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:
        # urllib3 would fail at a 303 in botocore's headers, before it checks `retries`.
        return super().urlopen(*args, **{**kwargs, "redirect": False})  # type: ignore[misc]

    def _get_conn(self, timeout: float | None = None) -> Any:
        conn = super()._get_conn(timeout)  # type: ignore[misc]
        if conn.idle_since_s is not None and (
            time.monotonic() - conn.idle_since_s > IDLE_S or _of_thread.exchange.wants_fresh
        ):
            conn.close()  # the request opens it again
        return conn

    def _put_conn(self, conn: Any) -> None:
        if conn is not None:
            conn.idle_since_s = time.monotonic()
            if conn.exchange is not None:
                conn.exchange.is_done_with(conn)
                conn.exchange = None
        super()._put_conn(conn)  # type: ignore[misc]


class _HttpPool(_Pool, AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpConnection


class _HttpsPool(_Pool, AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpsConnection


class BoundedSession(URLLib3Session):  # type: ignore[misc]
    """botocore's transport, with a limit for every request and every response."""

    def __init__(self, way: Way, settings: Settings) -> None:
        super().__init__(
            verify=way.roots,
            proxies=way.proxies,
            timeout=(settings.connect_timeout_s, settings.read_timeout_s),
            max_pool_connections=settings.max_concurrency,
        )
        # Its managers hold this same mapping.
        self._pool_classes_by_scheme.update(http=_HttpPool, https=_HttpsPool)

    def _get_ssl_context(self) -> ssl.SSLContext:
        context: ssl.SSLContext = super()._get_ssl_context()
        context.set_default_verify_paths()  # the system's too, which obstore always trusts
        return context

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """Send a request that botocore has prepared; a handler of its event ``before-send``.

        Raises:
            HTTPClientError: The SDK's: no response, or one that is too long.
        """
        is_object = request.stream_output
        request.stream_output = True  # or botocore would read all of it
        response = self._send(request)
        announced = response.headers.get("content-length")
        if announced is not None and not (announced.isascii() and announced.isdigit()):
            response.raw.close()
            raise HTTPClientError(error="the length of the answer is not a number")
        if is_object and response.status_code < 300:
            return response
        has_body = request.method != "HEAD" and response.status_code not in _BODILESS
        # As botocore does where it reads the response itself.
        response._content = _read_answer(response.raw, announced if has_body else None)
        return response

    def _send(self, request: Any) -> AWSResponse:
        """Send a request; send it again if its reused connection had been dropped while idle."""
        try:
            return super().send(request)
        except (ConnectionClosedError, SSLError):
            exchange = _of_thread.exchange
            if exchange.is_aborted or not exchange.is_reused:
                raise
            exchange.wants_fresh = True
            request.reset_stream()
            try:
                return super().send(request)
            finally:
                exchange.wants_fresh = False


def read_piece(stream: StreamingBody, nbytes: int | None = None) -> bytes:
    """Read the next ``nbytes`` of a body; without ``nbytes``, all the rest.

    Raises:
        IncompleteReadError, ResponseStreamingError: The SDK's; the body ended early.
        HTTPClientError: The SDK's, for any other fault.
    """
    try:
        piece: bytes = stream.read(nbytes)
    except HTTPError as exc:  # botocore has already mapped those that it knows
        raise HTTPClientError(error=exc) from exc
    return piece


def _read_answer(raw: Any, announced: str | None) -> bytes:
    body = bytearray()
    with contextlib.closing(StreamingBody(raw, announced)) as stream:
        while part := read_piece(stream, _PIECE_BYTES):
            body += part
            if len(body) > ANSWER_BYTES:
                raise HTTPClientError(error=f"answered with more than {ANSWER_BYTES} bytes")
    return bytes(body)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the SDK sends requests for the objects of one bucket, and the scope of the signature.

    Attributes:
        url: Up to the slash before an object's key; the bucket is in the host or in the path.
        service: ``s3`` for all but a few kinds of bucket.
    """

    url: str
    region: str
    service: str

    @property
    def is_amazons(self) -> bool:
        """True if only Amazon can answer there, which TLS proves."""
        return self.url.startswith("https:") and is_amazons(self.url)


@dataclass(frozen=True, slots=True)
class Way:
    """How the requests of a store reach their server; decided once per client.

    Attributes:
        address: The bucket's.
        proxy: The proxy that requests pass; None for none.
        roots: PEM file of the authorities to trust in addition to the system's.
    """

    address: Address
    proxy: Proxy | None
    roots: str

    @property
    def proxies(self) -> dict[str, str]:
        """The proxy, as botocore's argument."""
        return {urlsplit(self.address.url).scheme: self.proxy.url} if self.proxy else {}

    @property
    def by(self) -> str:
        """The proxy for messages, to follow the request's name; empty without one."""
        return f" through the proxy {self.proxy}" if self.proxy else ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The SDK's client, its credentials, its way, and its transport where that is ours."""

    client: Any
    credentials: ChainCredentials
    way: Way
    transport: BoundedSession | None = None


def check_settings(settings: Settings) -> None:
    """Report at start-up the faults that the SDK would report at the first request.

    Raises:
        ConfigError: No such profile, not a region's name, not a file of certificates, plain http
            to another machine, a proxy that cannot be used.
    """
    quiet_sdk_logs()
    core = new_session(settings)
    try:
        endpoint_url = _endpoint_url(settings, core.get_scoped_config())
    except ProfileNotFound as exc:
        raise ConfigError(
            f"`profile` (or AWS_PROFILE): {exc}; see ~/.aws/config and ~/.aws/credentials",
            field="profile",
        ) from exc
    except BotoCoreError as exc:
        raise ConfigError(f"the SDK's shared configuration cannot be used: {exc}") from exc
    if not settings.allow_http and is_plain_http_elsewhere(endpoint_url):
        raise ConfigError(f"`allow_http`: {_not_encrypted(settings)}", field="allow_http")
    region = settings.region
    if region is None:
        region = core.get_config_variable("region")
    try:
        if region == "":  # which botocore's pattern fits
            raise InvalidRegionError(region_name="")
        validate_region_name(region)
    except InvalidRegionError as exc:
        source = " (of AWS_DEFAULT_REGION or the profile)" if settings.region is None else ""
        raise ConfigError(
            f"`region`{source} is not a region's name; write one such as us-east-1, or unset it",
            field="region",
        ) from exc
    check_roots(settings, core)
    proxy_for(endpoint_url or "https://s3.amazonaws.com")


def _endpoint_url(settings: Settings, profile: Mapping[str, Any]) -> str:
    """The server's URL from settings, environment or profile; empty if none names one."""
    if settings.endpoint_url is not None:
        return settings.endpoint_url
    named = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    return str(next(filter(None, named), None) or profile.get("endpoint_url") or "")


def _not_encrypted(settings: Settings) -> str:
    source = "the SDK's endpoint (AWS_ENDPOINT_URL, or of the profile)"
    return PLAIN_HTTP.format("`endpoint_url`" if settings.endpoint_url else source)


def quiet_sdk_logs() -> None:
    """Keep the SDK's debug lines out of a log whose root level is DEBUG.

    These lines hold request headers, session tokens among them. A level that was set for these
    loggers explicitly stays.
    """
    for name in ("aioboto3", "aiobotocore", "boto3", "botocore"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))


def open_client(settings: Settings, *, patient: bool = False) -> Opened:
    """Make botocore's S3 client; no request is sent. Threads use it within an Exchange.

    The first call takes about 0.1 s of CPU, to load the SDK's service model.

    Args:
        patient: As in ``chain_credentials``.

    Raises:
        AccessError: Plain http to another machine, which the settings do not allow.
    """
    core = new_session(settings)
    core._credentials = ThreadCredentials()  # as set_credentials does
    client = _new_client(core, settings)
    way = _way_of(client, settings, core)
    transport = BoundedSession(way, settings)
    client.meta.events.register("before-send.s3", transport.send)
    return Opened(client, chain_credentials(settings, patient=patient), way, transport)


def _new_client(core: Any, settings: Settings) -> Any:
    # Not through boto3, which would import its transfer manager.
    config = Config(**config_for(settings, core))
    client = core.create_client("s3", config=config, **client_options(settings))
    check_and_adapt(client, settings)
    return client


def check_and_adapt(client: Any, settings: Settings) -> None:
    """Check the server of an SDK's S3 client, and adapt the requests that it sends.

    Raises:
        AccessError: Plain http to another machine, which the settings do not allow.
    """
    # Checked again, for a profile whose services section names the server.
    if not settings.allow_http and is_plain_http_elsewhere(client.meta.endpoint_url):
        raise AccessError(_not_encrypted(settings), code="PlainHttp")
    client.meta.events.register_last("before-call.s3", _drop_expect)
    if settings.requester_pays:
        client.meta.events.register_last("before-call.s3", _pay)
    client.meta.events.register_last("before-call.s3.DeleteObjects", _send_md5)
    client.meta.events.register_last("before-parameter-build.s3", _stay_in_region)


def way_to(settings: Settings) -> Way:
    """The way of a store's requests, for callers with a client of their own.

    Raises:
        AccessError, ConfigError: As ``open_client`` and ``proxy_for``.
    """
    core = new_session(settings)
    core.set_credentials("nobody", "unused")
    with contextlib.closing(_new_client(core, settings)) as client:
        return _way_of(client, settings, core)


def _way_of(client: Any, settings: Settings, core: Any) -> Way:
    """Where the SDK would send requests, and by which proxy and authorities."""
    address = address_of(client, settings.bucket)
    return Way(address, proxy_for(address.url), roots_for(settings, core))


def chain_credentials(settings: Settings, *, patient: bool) -> ChainCredentials:
    """The credentials that sign for each SDK; none are searched for yet.

    Args:
        patient: True if a request waits until a search for credentials ends. In an engine it does
            not.
    """
    found = ChainCredentials(functools.partial(find_credentials, settings))
    if patient:
        found.patience_s = found.longest_look_s
    return found


def find_credentials(settings: Settings) -> Any:
    """Walk the SDK's chain from its beginning.

    May ask services and commands, so it can take seconds.

    Raises:
        NoCredentialsError: The SDK's; there are none.
    """
    core = new_session(settings)
    # Credential services are clients of this session; botocore gives each five times a minute.
    core.set_default_client_config(Config(**timeouts(settings), retries={"total_max_attempts": 2}))
    source = core.get_credentials()
    if source is None:
        raise NoCredentialsError
    return source


def address_of(client: Any, bucket: str) -> Address:
    """Ask the SDK where it would send a request; none is sent.

    Only the SDK knows partitions, dual-stack, FIPS, access points and the endpoints of
    environment and profile.
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
    """The SDK's loader of service models: they are parsed once for all sessions of this process."""
    return get_session().get_component("data_loader")


def new_session(settings: Settings) -> Session:
    """Make a session of botocore, configured by the settings."""
    return configured(get_session(), settings)


def configured(core: Any, settings: Settings) -> Any:
    """Configure a session of either SDK by the settings, and return it."""
    core.register_component("data_loader", _loader())
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
    if settings.profile is not None:
        core.set_config_variable("profile", settings.profile)
    return core


def parse_time(value: Any) -> datetime:
    """Parse a time with the SDK's result; a time of a listing a hundred times as fast.

    The SDK tries every common format, which takes most of the time of a listing.
    """
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        moment = None
    # Without a time zone it may also be a number of seconds.
    return moment if moment and moment.tzinfo else parse_timestamp(value)


def client_options(settings: Settings) -> dict[str, Any]:
    """The arguments of an S3 client in addition to its configuration."""
    return {"endpoint_url": settings.endpoint_url, "region_name": settings.region}


def config_for(settings: Settings, core: Any) -> dict[str, Any]:
    """The configuration of each SDK's S3 client; ``core`` is its session."""
    s3_options: dict[str, Any] = {"addressing_style": addressing_style(settings)}
    if not _endpoint_url(settings, core.get_scoped_config()).lower().startswith("http:"):
        # Over HTTPS the checksum and TLS guard the body; hashing it for the signature as well would
        # cost more than the transfer. Over HTTP the signature is all there is.
        s3_options["payload_signing_enabled"] = False
    return {
        **timeouts(settings),
        "max_pool_connections": settings.max_concurrency,
        # One attempt in all, whatever AWS_MAX_ATTEMPTS says: our wrapper retries.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        # We compute the checksums in both directions, see BotocoreStore.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": f"s3ec/{s3ec.__version__}",
        "s3": s3_options,
    }


def encryption(settings: Settings, sse: str | None = None) -> dict[str, str]:
    """The SDK's arguments of a write that request encryption.

    Args:
        sse: The kind; None for that of the settings, ``none`` for no encryption.
    """
    sse = sse or settings.sse
    asked = {} if sse == "none" else {"ServerSideEncryption": sse}
    if sse == "aws:kms" and settings.sse_kms_key_id:
        asked["SSEKMSKeyId"] = settings.sse_kms_key_id
    return asked


def timeouts(settings: Settings) -> dict[str, float]:
    """The timeouts of each client's configuration, those of credential services included."""
    return {
        "connect_timeout": settings.connect_timeout_s,
        "read_timeout": settings.read_timeout_s,
    }


def addressing_style(settings: Settings) -> str:
    """The SDK's name for the place of the bucket's name in a URL."""
    if settings.path_style is None:
        return "auto"
    return "path" if settings.path_style else "virtual"


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    """Send bodies at once: botocore waits a second for "100 Continue", aiohttp without limit."""
    params["headers"].pop("Expect", None)


def _pay(params: dict[str, Any], **_: Any) -> None:
    """Accept the cost of a request to a requester-pays bucket; the header is signed."""
    params["headers"]["x-amz-request-payer"] = "requester"


def _send_md5(params: dict[str, Any], **_: Any) -> None:
    """Send the MD5 that servers have always required of a batch delete; botocore sends a CRC-32.

    Directory buckets take no MD5.
    """
    if params["context"].get("signing", {}).get("signing_name") == "s3":
        digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
        params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
        params["context"].pop("checksum", None)


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    """Mark the request as redirected already.

    Otherwise botocore would find the bucket's region and send the request there: two more
    requests for each of the first ones, and silent traffic to another region for the rest.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True

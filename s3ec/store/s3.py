# SPDX-License-Identifier: Apache-2.0
"""A bucket whose bodies travel through obstore, in Rust and outside the interpreter's lock.

obstore makes only GET and PUT requests; botocore makes the rest, see BotocoreStore. obstore's
listing takes a web page for an empty bucket, ends at the first foreign name with an empty part and
matches whole parts of names only. The SDK also holds the credentials.

obstore's errors are only types: absent, taken, denied, or "generic". If a type does not tell the
reason, botocore makes the request too: see ObstoreStore. Checked with obstore 0.12.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from botocore.exceptions import ClientError
from obstore import exceptions as obs
from obstore.store import S3Store

import s3ec
from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    CutBodyError,
    UnavailableError,
)
from s3ec.settings import Settings
from s3ec.store import obstore_runtime
from s3ec.store.base import Blob, content_type_of
from s3ec.store.botocore_s3 import BotocoreStore, Form, SdkSlot
from s3ec.store.concurrency import RequestSlot
from s3ec.store.network import certificates
from s3ec.store.obstore_runtime import held
from s3ec.store.s3_client import IDLE_S, Address, Way
from s3ec.store.s3_errors import SDK_ERRORS, error_of

log = logging.getLogger(__name__)
T = TypeVar("T")

# Up to this size a body is collected in one buffer of the announced length. A server that announces
# much and sends nothing then costs so much address space, which no process dies of.
COLLECT_BYTES = 64 * 2**20
# A body whose announced length may be wrong is collected in chunks of at most this size. No part
# that s3ec requests is as large.
_CHUNK_BYTES = 9 * 2**20

OBSTORE_ERRORS = (obs.BaseError, OSError, NotImplementedError, ValueError)
"""The exceptions of obstore, except its panics."""


def is_panic(exc: BaseException) -> bool:
    """True if obstore failed inside: in a coroutine, or in a plain call as a BaseException."""
    return type(exc).__name__ in ("RustPanic", "PanicException")


def http_options(settings: Settings) -> dict[str, Any]:
    """obstore's HTTP options, for every cloud."""
    return {
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "pool_idle_timeout": timedelta(seconds=IDLE_S),
        # In effect off: the deadline of the slot ends a request.
        "timeout": timedelta(days=1),
        "user_agent": f"s3ec/{s3ec.__version__}",
    }


async def read_result(
    result: Any, slot: RequestSlot, most: int, silence_s: float, *, is_part: bool
) -> Blob:
    """Read the body of a result of obstore's get.

    Args:
        most: A longer body is refused unread.
        silence_s: After so long without a byte obstore times out.
        is_part: True if a range was requested.

    Raises:
        CorruptEntryError: As Store.get.
        UnavailableError: obstore timed out.
    """
    start, stop = result.range
    expected = stop - start
    slot.expect(expected, most)
    begun_s = time.monotonic()
    try:
        if expected <= COLLECT_BYTES and not is_part:
            # Collected in Rust; the view holds that memory, and nothing is copied here. Only for a
            # whole object is `expected` the length by which the body is read: a part can announce
            # one length for itself and another for the body.
            body: Blob = memoryview(await held(result.bytes_async()))
        else:
            body = await _read_piecewise(result, expected)
    except TimeoutError:  # a deadline of ours
        raise
    except OBSTORE_ERRORS:
        if time.monotonic() - begun_s >= silence_s:
            raise UnavailableError(f"{slot.what}: timed out") from None
        raise CutBodyError(f"{slot.what}: the body ended before its {expected} bytes") from None
    if len(body) != expected:
        raise CutBodyError(f"{slot.what}: {len(body)} bytes where {expected} were announced")
    return body


async def _read_piecewise(result: Any, expected: int) -> bytes:
    """Read a body whose announced length may be wrong: little more than that length is kept."""
    chunks: list[bytes] = []
    nbytes = 0
    # One byte more than a correct part has: that arrives as one chunk, whose size shows that it is
    # the last. Then nothing is joined, and no further read is needed.
    wanted = min(expected + 1, _CHUNK_BYTES)
    stream = result.stream(min_chunk_size=wanted)
    with contextlib.suppress(StopAsyncIteration):
        while nbytes <= expected:
            chunk = await held(anext(stream))
            chunks.append(chunk)
            nbytes += len(chunk)
            if len(chunk) < wanted:
                break
    if len(chunks) == 1:
        return bytes(chunks[0])
    # In a thread: joining releases the interpreter's lock.
    return await asyncio.to_thread(b"".join, chunks)


# An address where no process can listen.
_NOWHERE = "http://127.0.0.1:0"
OPINION_S = 1.0
"""How long botocore's last result counts; botocore is not asked again sooner if it failed."""
# How long botocore makes all requests after obstore has failed.
_REST_S = 60.0
_DENIED = (obs.PermissionDeniedError, obs.UnauthenticatedError)
_DENIAL = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}


class ObstoreStore(BotocoreStore):
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    Limits, deadlines and errors are those of BotocoreStore. The SDK makes requests that obstore
    cannot make: for odd names, see _is_plain; with a warning, in the cases that _obstacle names;
    and for a minute all requests, if obstore fails twice where botocore succeeds: responses without
    a length, a range that is not honoured, a server certificate that is an authority's as well.

    If obstore fails and its error does not tell why, botocore makes the same request, one at a
    time. Its result is the request's, and decides about the others that fail within a second:

    - botocore failed as well, or was refused for all requests: the others fail with its error, and
      botocore is not asked again. So a store that fails or throttles gets one more request a
      second, and not twice as many.
    - botocore succeeded: the connection was at fault, such as one that was dropped while idle.
      botocore makes the others too, and a new client of obstore the requests that follow. Until
      obstore succeeds with such a request it is in doubt, and rests after another failure.
    """

    def __init__(self, settings: Settings, *, patient: bool = False) -> None:
        super().__init__(settings, patient=patient)
        self._signed_by: Any = None
        self._clients: dict[str, S3Store] = {}
        self._asking = asyncio.Lock()
        # botocore's last result: an error that every request would get, None for a response.
        self._told_s, self._told = float("-inf"), cast(Exception | None, None)
        self._doubts: set[str] = set()  # kinds of requests
        self._resting_until_s = 0.0
        self._bucket_is_there = False
        self._warned: set[str] = set()

    async def close(self) -> None:
        await super().close()
        # obstore closes a client's connections when no reference to it is left.
        self._clients.clear()

    async def _get_object(
        self, slot: SdkSlot, key: str, most: int, wanted: range | None = None
    ) -> Blob | None:
        part: Any = {} if wanted is None else {"range": (wanted.start, wanted.stop)}

        async def get(client: S3Store) -> Any:
            try:
                result = await held(obstore.get_async(client, key, options=part))
            except FileNotFoundError:  # or there is no such bucket
                if not self._bucket_is_there:
                    raise
                return None
            if result.meta["e_tag"] is None:  # a portal's page, which does not make an object bad
                raise UnavailableError(f"{slot.what}: the answer is not an S3 server's")
            return result

        kind = "reads" if wanted is None else "reads of ranges"
        sdk = functools.partial(super()._get_object, slot, key, most, wanted)
        result = await self._by_obstore(slot, kind, key, get, sdk)
        if result is None or isinstance(result, (bytes, memoryview)):  # from the SDK
            return result
        silence_s = self._settings.read_timeout_s
        return await read_result(result, slot, most, silence_s, is_part=wanted is not None)

    async def _put_object(
        self, slot: SdkSlot, key: str, body: Sequence[bytes | memoryview], form: Form
    ) -> None:
        # obstore reads the pieces in place, but only as bytes.
        pieces = [memoryview(piece).cast("B") for piece in body]
        about = {"Content-Type": content_type_of(key)}

        async def put(client: S3Store) -> None:
            buffers = [held(piece[:]) for piece in pieces]
            await held(
                # The condition is a header of the client: so 409 and 412 have different types.
                obstore.put_async(
                    client, key, buffers, attributes=about, mode="overwrite", use_multipart=False
                )
            )

        kind = "writes" + " without a checksum" * (not form.checksum)
        kind += " without a condition" * (not form.condition)
        sdk = functools.partial(super()._put_object, slot, key, body, form)
        await self._by_obstore(slot, kind, key, put, sdk, form)

    async def _by_obstore(
        self,
        slot: SdkSlot,
        kind: str,
        key: str,
        send: Callable[[S3Store], Awaitable[T]],
        ask_sdk: Callable[[], Awaitable[T]],
        form: Form | None = None,
    ) -> T:
        """Make a request with obstore, or with botocore where obstore cannot or fails.

        Args:
            kind: The kind of the request, for messages.
            send: Makes the request with a client of obstore.
            ask_sdk: Makes the request with botocore.
            form: The form of a write; None for a read.
        """
        what = slot.what
        client = await self._client_for(slot, kind, key, form)
        if client is None:
            return await ask_sdk()
        begun_s = time.monotonic()
        try:
            result = await send(client)
        except TimeoutError:  # a deadline of ours
            raise
        except OBSTORE_ERRORS as exc:
            failure = exc.with_traceback(None)  # else it would keep the client
        except BaseException as exc:
            if not is_panic(exc):
                raise
            # obstore has printed its own message to stderr.
            raise UnavailableError(f"{what}: obstore failed inside") from exc
        else:
            self._doubts.discard(kind)
            self._bucket_is_there = True
            return result
        if form is not None and isinstance(failure, obs.PreconditionError):
            raise ConflictError(f"{what}: 412 PreconditionFailed")
        if isinstance(failure, obs.AlreadyExistsError):
            raise UnavailableError(f"{what}: 409 Conflict", status=409)
        is_denied = isinstance(failure, _DENIED)
        is_absent = isinstance(failure, FileNotFoundError)
        is_generic = not is_denied and not is_absent
        if is_generic and time.monotonic() - begun_s >= self._settings.read_timeout_s:
            # The read timeout has passed.
            raise UnavailableError(f"{what}: timed out")
        async with self._asking:
            is_recent = time.monotonic() - self._told_s < OPINION_S
            if is_recent and self._told is not None:
                raise self._told.with_traceback(None)
            if is_recent and is_denied:
                raise ClientError(_DENIAL, "GetObject" if form is None else "PutObject")
            # By now the bucket is known to exist, or the faulty connections are closed.
            is_known = is_recent and (is_absent or client not in self._clients.values())
            if not (is_known or self._is_resting):
                return await self._second_opinion(slot, kind, ask_sdk, is_generic=is_generic)
        return await ask_sdk()

    async def _second_opinion(
        self, slot: SdkSlot, kind: str, ask_sdk: Callable[[], Awaitable[T]], *, is_generic: bool
    ) -> T:
        """Make a request with botocore after obstore failed at it, and note the result."""
        try:
            result = await ask_sdk()
        except SDK_ERRORS as exc:
            meaning = error_of(exc, slot.what, self._region())
            is_for_all = isinstance(meaning, UnavailableError) or (
                isinstance(meaning, AccessError) and meaning.is_general
            )
            self._note(exc if is_for_all else None)
            raise
        except CorruptEntryError:  # the server did respond with a body
            self._note(None)
            raise
        self._note(None)
        if is_generic:
            if self._doubts:
                self._rest(kind)
            self._doubts.add(kind)
            self._clients.clear()  # their connections are in doubt
        return result

    def _note(self, told: Exception | None) -> None:
        self._told_s, self._told = time.monotonic(), told
        self._bucket_is_there |= told is None

    @property
    def _is_resting(self) -> bool:
        return time.monotonic() < self._resting_until_s

    def _rest(self, kind: str) -> None:
        self._resting_until_s = time.monotonic() + _REST_S
        self._warn_once(f"obstore fails at {kind}, and botocore does not")

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            log.warning("botocore does the work of obstore here: %s", problem)

    async def _client_for(
        self, slot: SdkSlot, kind: str, key: str, form: Form | None
    ) -> S3Store | None:
        """Return a client of obstore with the SDK's credentials; None to use the SDK instead.

        Renewed credentials, about once an hour, get new clients: that takes 5 to 15 ms and closes
        the open connections; a request under way keeps its own.
        """
        opened = slot.opened
        frozen = await opened.credentials.get_frozen_credentials()
        if problem := self._obstacle(opened.way, frozen):
            self._warn_once(problem)
            return None
        if self._is_resting or not _is_plain(key):
            return None
        if frozen != self._signed_by:
            self._signed_by = frozen
            self._clients.clear()
            self._doubts.clear()  # the old credentials may have caused the failures
        await obstore_runtime.start(self._slots)
        purpose = "reads" if form is None else kind
        client = self._clients.get(purpose)
        if client is None:
            try:
                client = self._clients[purpose] = self._new_client(form, opened.way, frozen)
            except OBSTORE_ERRORS:  # such as a certificate that it cannot read
                self._rest(kind)
                return None
        return client

    def _obstacle(self, way: Way, frozen: Any) -> str:
        """Return why obstore may not be used; empty if it may.

        obstore always follows redirects. Another host or port then gets no signature, but it gets
        the session token. So requests to any host but the server's are sent to ``_NOWHERE``, where
        no process can listen, as if a proxy were there. That does not stop requests to other ports
        and to names below the host's. Those are Amazon's as well where the host is.
        """
        if problem := obstore_runtime.obstacle():
            return problem
        if way.address.service != "s3":
            return "obstore cannot sign for this kind of bucket"
        if way.proxy is not None:
            return f"obstore would follow redirects through the proxy {way.proxy}"
        if frozen.token and not way.address.is_amazons:
            return "obstore would send the session token to where a redirect leads"
        return ""

    def _new_client(self, form: Form | None, way: Way, frozen: Any) -> S3Store:
        return S3Store(
            self._settings.bucket,
            client_options=self._http_options(form, way),
            # Retries are a wrapper of ours.
            retry_config={"max_retries": 0},
            # Not as configuration, which obstore's object exposes.
            credential_provider=_provider(frozen),
            **self._s3_options(form, way.address),
        )

    def _http_options(self, form: Form | None, way: Way) -> Any:
        over_tls = way.address.url.startswith("https:")
        options = {
            **http_options(self._settings),
            "allow_http": not over_tls,
            "proxy_url": _NOWHERE,
            "proxy_excludes": urlsplit(way.address.url).hostname or "",
        }
        if form is None:
            # For a write it would limit the time to send the body as well.
            options["read_timeout"] = timedelta(seconds=self._settings.read_timeout_s)
        elif form.condition:
            options["default_headers"] = {"If-None-Match": "*"}  # signed as others are
        if over_tls:
            # In addition to the system's, which a slim container does not have.
            options["root_certificate"] = certificates(way.roots)
        return options

    def _s3_options(self, form: Form | None, address: Address) -> Any:
        """obstore's own settings, defaults included: it reads unset ones from AWS_ variables.

        Two of those cannot be overridden here, AWS_SERVER_SIDE_ENCRYPTION with its relatives and
        AWS_CHECKSUM_ALGORITHM; both only add a header to a write.
        """
        over_tls = address.url.startswith("https:")
        options: dict[str, Any] = {
            # The URL holds the bucket already, be it in the host or in the path.
            "virtual_hosted_style_request": True,
            "endpoint": address.url,
            "aws_endpoint_url_s3": address.url,
            "region": address.region,
            "conditional_put": "etag",
            "request_payer": self._settings.requester_pays,
            "s3_express": False,
            "skip_signature": False,
            "unsigned_payload": over_tls,
        }
        if form is None:
            return options
        if form.checksum:
            # Over HTTP the signature needs the SHA-256 of the body anyway; over HTTPS the other
            # one takes a tenth of its time.
            options["checksum_algorithm"] = "CRC64NVME" if over_tls else "SHA256"
        if self._settings.sse != "none":
            options["server_side_encryption"] = self._settings.sse
            if self._settings.sse_kms_key_id:
                options["sse_kms_key_id"] = self._settings.sse_kms_key_id
        return options


def _is_plain(key: str) -> bool:
    """True if obstore takes a name as it is; it refuses some, and makes "a" of "a/"."""
    return key.isprintable() and not any(part in ("", ".", "..") for part in key.split("/"))


def _provider(frozen: Any) -> Any:
    """Make obstore's credential provider; called once, since it reports no expiry."""

    def credentials() -> dict[str, Any]:
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None,
        }

    return credentials

# SPDX-License-Identifier: Apache-2.0
"""A bucket whose bodies travel through obstore, in Rust and outside the interpreter's lock.

Only GET and PUT are obstore's; the rest is botocore's, see BotocoreStore. obstore's listing takes
a web page for an empty bucket, ends at the first foreign name with an empty part and matches
whole parts of names only, and its errors for requests without a body hold no code. The SDK also
says where the bucket is and holds the credentials. Checked with obstore 0.12.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from botocore.exceptions import ClientError
from obstore.store import S3Store

import s3ec
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.settings import Settings
from s3ec.store import obstore_runtime
from s3ec.store.base import Blob, content_type_of
from s3ec.store.botocore_s3 import BotocoreStore, RequestSlot
from s3ec.store.concurrency import Extend, Reply
from s3ec.store.network import certificates
from s3ec.store.obstore_errors import sdk_errors
from s3ec.store.obstore_runtime import held
from s3ec.store.s3_client import Address, Way
from s3ec.store.s3_errors import (
    SDK_ERRORS,
    AskAgainError,
    BrokenConnectionError,
    UnfitError,
    status_of,
)

log = logging.getLogger(__name__)

# Up to here a body is collected in one buffer of the announced length; a server that announces
# much and sends nothing then costs this much address space, and no process is ended for lack of it.
COLLECT_BYTES = 64 * 2**20
# A body whose length may be a lie is collected in chunks of this size at most. No part that s3ec
# asks for is as large.
_CHUNK_BYTES = 9 * 2**20


def http_options(settings: Settings) -> dict[str, Any]:
    """obstore's options for the HTTP of every cloud."""
    return {
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        # Off, so to speak: the deadline of the slot ends a request.
        "timeout": timedelta(days=1),
        "user_agent": f"s3ec/{s3ec.__version__}",
    }


class ObstoreReply:
    """What obstore's get returned.

    Args:
        result: obstore's GetResult.
        errors: What the transport's errors are mapped by while the body comes.
        is_part: See Reply.
    """

    def __init__(
        self, result: Any, errors: Callable[[], AbstractContextManager[None]], *, is_part: bool
    ) -> None:
        start, stop = result.range
        self.nbytes: int | None = stop - start
        self.is_part = is_part
        self._result = result
        self._errors = errors

    async def read(self, max_bytes: int, what: str, extend: Extend) -> Blob:
        expected = self.nbytes or 0
        try:
            with self._errors():
                if expected <= COLLECT_BYTES and not self.is_part:
                    # Collected in Rust; the view holds that memory, and nothing is copied here.
                    # Only of a whole object is `expected` what the connection goes by: a part
                    # can say one length for itself and another for the body.
                    body: Blob = memoryview(await held(self._result.bytes_async()))
                else:
                    body = await self._read_piecewise(expected)
        except BrokenConnectionError as exc:
            raise CorruptEntryError(
                f"{what}: the body ended before its {expected} bytes", reason="length"
            ) from exc
        if len(body) != expected:
            raise CorruptEntryError(
                f"{what}: {len(body)} bytes where {expected} were announced", reason="length"
            )
        return body

    async def _read_piecewise(self, expected: int) -> bytes:
        """A body whose announced length may be a lie: little more is kept than it says."""
        chunks: list[bytes] = []
        nbytes = 0
        # One byte more than an honest part has: that comes as one chunk, whose size says that it
        # is the last. Nothing is joined, and nobody has to ask whether more comes.
        wanted = min(expected + 1, _CHUNK_BYTES)
        stream = self._result.stream(min_chunk_size=wanted)
        with contextlib.suppress(StopAsyncIteration):
            while nbytes <= expected:
                chunk = await held(anext(stream))
                chunks.append(chunk)
                nbytes += len(chunk)
                if len(chunk) < wanted:
                    break
        if len(chunks) == 1:
            return bytes(chunks[0])
        # In a thread, where joining lets go of the interpreter's lock.
        return await asyncio.to_thread(b"".join, chunks)

    def close(self) -> None:
        # Dropping it gives the connection back, or closes it where the body was not read whole.
        self._result = None


# What a server says to requests signed for another region, among others.
_PERHAPS_WRONG_REGION = frozenset({301, 302, 307, 308, 400, 403})
# Where nobody can listen.
_NOWHERE = "http://127.0.0.1:0"


class ObstoreStore(BotocoreStore):
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    Limits, deadlines and errors are those of BotocoreStore. What obstore cannot do goes the SDK's
    way: names with empty, ``.`` or ``..`` parts or control characters, and with a warning

    - requests whose reply it cannot read (no length, a range not honoured), a second time,
    - all of a bucket that is signed for otherwise, such as a directory bucket,
    - all behind a proxy, and all that is signed with a session token for a server that is not
      Amazon's, see _obstacle,
    - all of a server whose certificate is an authority's as well, as self-signed ones are,
    - all in a child that was forked after obstore had started its threads, and in a process that
      is ending, see obstore_runtime.
    """

    def __init__(self, settings: Settings, *, patient: bool = False) -> None:
        super().__init__(settings, patient=patient)
        self._signed_by: Any = None
        self._clients: dict[str, S3Store] = {}
        self._bucket_region: str | None = None
        self._unfit = ""
        self._warned: set[str] = set()

    async def close(self) -> None:
        await super().close()
        # obstore closes a client's connections when nothing holds it any more.
        self._clients.clear()

    def abandon(self) -> None:
        """End the requests that are under way soon; for another thread, when the process ends."""
        self._slots.abandon()

    async def _get_object(self, slot: RequestSlot, key: str, wanted: range | None = None) -> Reply:
        what = self._what("GET", key)
        client = await self._client_for("reads", key, what)
        if client is None:
            return await super()._get_object(slot, key, wanted)
        part: Any = {} if wanted is None else {"range": (wanted.start, wanted.stop)}
        try:
            with sdk_errors(what, "GetObject"):
                result = await held(obstore.get_async(client, key, options=part))
        except ClientError as exc:
            await self._add_region(slot, exc)
            raise
        except AskAgainError as exc:
            self._note(exc)
            return await super()._get_object(slot, key, wanted)
        errors = functools.partial(sdk_errors, what, "GetObject")
        return ObstoreReply(result, errors, is_part=wanted is not None)

    async def _put_object(
        self,
        slot: RequestSlot,
        key: str,
        body: Sequence[bytes | memoryview],
        what: str,
        *,
        checksum: bool,
    ) -> None:
        client = await self._client_for("writes" if checksum else "bare writes", key, what)
        if client is None:
            await super()._put_object(slot, key, body, what, checksum=checksum)
            return
        try:
            with sdk_errors(what, "PutObject"):
                await held(
                    obstore.put_async(
                        client,
                        key,
                        # obstore reads the pieces where they lie, but only as bytes.
                        [held(memoryview(piece).cast("B")) for piece in body],
                        attributes={"Content-Type": content_type_of(key)},
                        mode="create",
                        use_multipart=False,
                    )
                )
        except ClientError as exc:
            await self._add_region(slot, exc)
            raise
        except AskAgainError as exc:
            self._note(exc)
            await super()._put_object(slot, key, body, what, checksum=checksum)

    def _note(self, exc: AskAgainError) -> None:
        if isinstance(exc, UnfitError):
            self._unfit = f"obstore refuses this server ({exc})"
        else:
            self._warn_once("obstore cannot read a reply,", exc)

    def _warn_once(self, problem: str, detail: object = "") -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            log.warning("botocore does the work of obstore here: %s %s", problem, detail)

    async def _client_for(self, purpose: str, key: str, what: str) -> S3Store | None:
        """A client of obstore that signs with the SDK's credentials of this moment.

        Renewed credentials get new clients, which happens about once an hour: it takes 5 to 15 ms
        and costs the open connections; a request under way keeps its own.

        Returns:
            None where the request goes the SDK's way.
        """
        opened = self._opened
        if opened is None:
            raise UnavailableError(f"{what}: the store was closed")
        frozen = await opened.credentials.get_frozen_credentials()
        if problem := self._obstacle(opened.way, frozen):
            self._warn_once(problem)
            return None
        if not _is_plain(key):
            return None
        if frozen != self._signed_by:
            self._signed_by = frozen
            self._clients.clear()
        await obstore_runtime.start(self)
        if purpose not in self._clients:
            try:
                self._clients[purpose] = self._new_client(purpose, opened.way, frozen, what)
            except AskAgainError as exc:
                self._note(exc)
                return None
        return self._clients[purpose]

    def _obstacle(self, way: Way, frozen: Any) -> str:
        """Why obstore may not be used, empty if it may.

        It follows redirects, and nothing turns that off. Another host or port gets no signature
        then, but the session token. So requests to any host but the server's are sent where nobody
        can listen (``_NOWHERE``), as if a proxy were there. That does not hold back what goes to
        other ports and to names below the host's. Those are Amazon's as well where the host is.
        """
        if problem := obstore_runtime.obstacle() or self._unfit:
            return problem
        if way.address.service != "s3":
            return "obstore cannot sign for this kind of bucket"
        if way.proxy is not None:
            return f"obstore would follow redirects through the proxy {way.proxy}"
        if frozen.token and not way.address.is_amazons:
            return "obstore would send the session token to where a redirect leads"
        return ""

    def _new_client(self, purpose: str, way: Way, frozen: Any, what: str) -> S3Store:
        with sdk_errors(what, "HeadBucket"):
            return S3Store(
                self._settings.bucket,
                client_options=self._http_options(purpose, way),
                # Retries are a wrapper of ours.
                retry_config={"max_retries": 0},
                # Not as configuration, which obstore's object shows to everybody.
                credential_provider=_provider(frozen),
                **self._s3_options(purpose, way.address),
            )

    def _http_options(self, purpose: str, way: Way) -> Any:
        over_tls = way.address.url.startswith("https:")
        options = {
            **http_options(self._settings),
            "allow_http": not over_tls,
            "proxy_url": _NOWHERE,
            "proxy_excludes": urlsplit(way.address.url).hostname or "",
        }
        if purpose == "reads":
            # Over a write it would be the limit for sending the body as well.
            options["read_timeout"] = timedelta(seconds=self._settings.read_timeout_s)
        if over_tls:
            # In addition to the system's, which a slim container has none of.
            options["root_certificate"] = certificates(way.roots)
        return options

    def _s3_options(self, purpose: str, address: Address) -> Any:
        """obstore's own settings, also at their defaults: it reads AWS_ variables for the others.

        Two of those cannot be undone here, AWS_SERVER_SIDE_ENCRYPTION with its kin and
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
            "request_payer": False,
            "s3_express": False,
            "skip_signature": False,
            "unsigned_payload": over_tls,
        }
        if purpose == "writes":
            # Over HTTP the signature needs the SHA-256 of the body anyway; over HTTPS the other
            # one takes a tenth of its time.
            options["checksum_algorithm"] = "CRC64NVME" if over_tls else "SHA256"
        if purpose != "reads" and self._settings.sse != "none":
            options["server_side_encryption"] = self._settings.sse
            if self._settings.sse_kms_key_id:
                options["sse_kms_key_id"] = self._settings.sse_kms_key_id
        return options

    async def _add_region(self, slot: RequestSlot, exc: ClientError) -> None:
        """Put the bucket's region into an error in which the SDK would know it."""
        status = status_of(exc)
        if status in _PERHAPS_WRONG_REGION:
            headers = exc.response["ResponseMetadata"]["HTTPHeaders"]
            headers["x-amz-bucket-region"] = await self._ask_region(slot, status)

    async def _ask_region(self, slot: RequestSlot, status: int) -> str:
        """The bucket's region as the server tells it; empty where it does not.

        Asked once for refusals, which can be many and mostly have other reasons, and for
        redirections until it is known.
        """
        if self._bucket_region is None or (status < 400 and not self._bucket_region):
            try:
                answer = await self._call(slot, "head_bucket")
            except ClientError as exc:  # the header comes with refusals too
                answer = exc.response
            except SDK_ERRORS:
                return ""
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            self._bucket_region = str(headers.get("x-amz-bucket-region", ""))
        return self._bucket_region


def _is_plain(key: str) -> bool:
    """Whether obstore takes a name as it is; it refuses some, and makes "a" of "a/"."""
    return key.isprintable() and not any(part in ("", ".", "..") for part in key.split("/"))


def _provider(frozen: Any) -> Any:
    """What obstore calls for credentials; once, as these do not expire in its eyes."""

    def credentials() -> dict[str, Any]:
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None,
        }

    return credentials

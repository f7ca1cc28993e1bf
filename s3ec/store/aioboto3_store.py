# SPDX-License-Identifier: Apache-2.0
"""A bucket through aioboto3: one SDK client, bounded in time, size and concurrency.

The SDK does less here than it could: no retries (time is ours, see retry.py), no following
of regions (a wrong region is an error that names the right one), no checksum of what is read
(the object's own is checked by codec). What cannot be switched off: aiohttp sends a request once
more when its connection breaks before a reply, so a PUT whose reply was lost can conflict with
itself. Checked with aioboto3 15.5, aiobotocore 2.25 and aiohttp 3.14.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from s3ec.errors import AccessError, UnavailableError
from s3ec.forks import call_in_forks
from s3ec.settings import Settings
from s3ec.store.base import Blob, ObjectInfo, check_folder, check_name, check_range, content_type_of
from s3ec.store.deadline import answer_begun, page_begun
from s3ec.store.replies import Extend, Reply, SdkReply, read_body
from s3ec.store.sdk_client import Opened, check_settings, open_client
from s3ec.store.sdk_errors import CREDENTIAL_CODES, boundary, code_of, is_absent, status_of
from s3ec.store.turns import Turns

# A page of a listing: 1000 entries of a name of up to 1 KiB each, in XML.
_PAGE_BYTES = 2**21
_CHECKSUM_REFUSED = frozenset({"InvalidArgument", "InvalidRequest", "NotImplemented"})


@dataclass(frozen=True, slots=True)
class Turn:
    """One operation's hold on the store.

    Attributes:
        client: The SDK's.
        extend: Grants the time that a body of so many bytes may take.
    """

    client: Any
    extend: Extend


class Aioboto3Store:
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    May be made before a loop exists; the SDK client is made once, in the loop of the first call,
    and later calls must come from that loop. At most ``settings.max_concurrency`` requests are
    out at a time, others wait their turn without a limit. From then on each is bounded by the
    timeouts of ``settings`` and by the least throughput.

    Args:
        settings: Where the bucket is and how to reach it.
        page_size: Entries asked for per page of a listing.
        least_bytes_per_s: A body that comes or goes slower is a fault (UnavailableError): the
            SDK's read timeout is not reached by a trickle, and does not guard an upload.

    Raises:
        ConfigError: Profile, region or CA file cannot be used.
    """

    def __init__(
        self, settings: Settings, *, page_size: int = 1000, least_bytes_per_s: float = 65536.0
    ) -> None:
        check_settings(settings)
        self._settings = settings
        self._root = f"{settings.prefix}/" if settings.prefix else ""
        self._page_size = page_size
        self._turns = Turns(settings, least_bytes_per_s)
        self._opening = asyncio.Lock()
        self._resources = contextlib.AsyncExitStack()
        self._opened: Opened | None = None
        self._send_checksum = True
        self._parents: list[object] = []
        call_in_forks(self, Aioboto3Store._after_fork)

    def _after_fork(self) -> None:
        """In the child: the connections are the parent's. Kept, since the server heard a close."""
        self._parents += [self._opened, self._resources]
        self._opening = asyncio.Lock()
        self._resources = contextlib.AsyncExitStack()
        self._opened = None
        self._turns.after_fork()

    def __repr__(self) -> str:
        endpoint = self._settings.endpoint_url or "AWS"
        return f"Aioboto3Store(s3://{self._settings.bucket}/{self._root} at {endpoint})"

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        key = self._key(name)
        what = self._what("GET", key)
        async with self._turn(what) as turn:
            reply = await self._get_object(turn, key)
            return None if reply is None else await read_body(reply, max_bytes, what, turn.extend)

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        check_range(start, length)
        key = self._key(name)
        what = self._what("GET", key)
        async with self._turn(what) as turn:
            try:
                reply = await self._get_object(turn, key, range(start, start + length))
            except ClientError as exc:
                if status_of(exc) == 416:  # the object ends before `start`
                    return b""
                raise
            if reply is None:
                return None
            if reply.is_part:
                return await read_body(reply, length, what, turn.extend)
            # The whole object, from a server that knows no ranges or has none of an empty body.
            whole = await read_body(reply, start + length, what, turn.extend)
            return whole[start:]

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        key = self._key(name)
        nbytes = sum(memoryview(piece).nbytes for piece in body)
        what = self._what("PUT", key)
        async with self._turn(what) as turn:
            turn.extend(nbytes)
            try:
                await self._put_object(turn, key, body, what, checksum=self._send_checksum)
            except ClientError as exc:
                refused = status_of(exc) == 501 or code_of(exc) in _CHECKSUM_REFUSED
                if not (self._send_checksum and refused):
                    raise
            else:
                return
            turn.extend(nbytes)
            await self._put_object(turn, key, body, what, checksum=False)
            # Only now is it known that the checksum was what the server did not like.
            self._send_checksum = False

    async def head(self, name: str) -> ObjectInfo | None:
        key = self._key(name)
        what = self._what("HEAD", key)
        async with self._turn(what) as turn:
            try:
                response = await turn.client.head_object(Bucket=self._settings.bucket, Key=key)
            except ClientError as exc:
                if is_absent(exc):
                    return None
                raise
            if "ETag" not in response:
                raise UnavailableError(f"{what}: the answer is not an S3 server's")
            modified = response.get("LastModified")
            modified_s = modified.timestamp() if modified else 0.0
            return ObjectInfo(name, int(response.get("ContentLength", 0)), modified_s)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        after = {"StartAfter": self._root + start_after} if start_after else {}
        async for page in self._pages(prefix, after):
            found = list(self._entries_of(page))
            page_begun(len(found), is_last=not page["IsTruncated"])
            for info in found:
                yield info

    def _entries_of(self, page: Any) -> Iterator[ObjectInfo]:
        for entry in page.get("Contents", ()):
            key = str(entry["Key"])
            # The root itself can be listed, as a folder marker made by a console.
            if key.startswith(self._root) and key != self._root:
                modified = entry.get("LastModified")
                modified_s = modified.timestamp() if modified else 0.0
                yield ObjectInfo(key[len(self._root) :], int(entry["Size"]), modified_s)

    async def list_folders(self, prefix: str) -> Sequence[str]:
        check_folder(prefix)
        above = self._root + prefix
        folders: dict[str, None] = {}
        async for page in self._pages(prefix, {"Delimiter": "/"}):
            for entry in page.get("CommonPrefixes", ()):
                folders[str(entry["Prefix"]).removeprefix(above)] = None
        return tuple(folders)

    async def delete(self, name: str) -> None:
        key = self._key(name)
        async with self._turn(self._what("DELETE", key)) as turn:
            try:
                await turn.client.delete_object(Bucket=self._settings.bucket, Key=key)
            except ClientError as exc:
                if not is_absent(exc):
                    raise

    async def close(self) -> None:
        async with self._opening:
            self._opened = None
            # aiohttp's close does not wake a reader whose connection it closes.
            self._turns.close()
            await self._resources.aclose()

    def _key(self, name: str) -> str:
        check_name(name)
        return self._root + name

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} s3://{self._settings.bucket}/{key}"

    def _region(self) -> str:
        if self._opened is not None:
            return str(self._opened.client.meta.region_name)
        return self._settings.region or "unset"

    @contextlib.asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[Turn]:
        """The client, one of the places, a deadline and the error boundary around one request."""
        asked_s = time.monotonic()
        try:
            with boundary(what, self._region):
                client = await self._open()
                # The pool has as many connections as there are places, so nothing waits behind
                # the deadline for a connection.
                async with self._turns.take(what) as extend:
                    asked_s = time.monotonic()
                    yield Turn(client, extend)
            if self._opened is not None:
                self._opened.credentials.accepted(asked_s)
        except AccessError as exc:
            if exc.code in CREDENTIAL_CODES and self._opened is not None:
                self._opened.credentials.refused(exc.code, asked_s)
            raise

    async def _open(self) -> Any:
        self._turns.check_loop()
        async with self._opening:
            if self._turns.is_closed:
                raise RuntimeError("the store is closed")
            if self._opened is None:
                self._opened = await self._connect()
            return self._opened.client

    async def _connect(self) -> Opened:
        """Make what the first request needs; called under the lock of _open."""
        return await open_client(self._settings, self._resources)

    async def _get_object(self, turn: Turn, key: str, wanted: range | None = None) -> Reply | None:
        """Ask for an object or a range of its bytes; None where it is absent.

        Raises:
            ClientError: The SDK's, for any other refusal.
        """
        part = {} if wanted is None else {"Range": f"bytes={wanted.start}-{wanted.stop - 1}"}
        try:
            return SdkReply(
                await turn.client.get_object(Bucket=self._settings.bucket, Key=key, **part)
            )
        except ClientError as exc:
            if is_absent(exc):
                return None
            raise

    async def _put_object(
        self,
        turn: Turn,
        key: str,
        body: Sequence[bytes | memoryview],
        what: str,
        *,
        checksum: bool,
    ) -> None:
        """Send an object that may not exist yet.

        Raises:
            ClientError: The SDK's, for any refusal.
        """
        # The SDK wants one buffer; an only piece of type bytes is not copied.
        whole = body[0] if len(body) == 1 and isinstance(body[0], bytes) else b"".join(body)
        extra: dict[str, str] = {}
        if checksum:
            # As a header of our own: the SDK's would be a trailer over HTTPS, in a chunked
            # encoding that several S3-compatible servers do not understand.
            crc = await asyncio.to_thread(zlib.crc32, whole)
            extra["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        if self._settings.sse != "none":
            extra["ServerSideEncryption"] = self._settings.sse
        if self._settings.sse_kms_key_id:
            extra["SSEKMSKeyId"] = self._settings.sse_kms_key_id
        response = await turn.client.put_object(
            Bucket=self._settings.bucket,
            Key=key,
            # Shares the memory of `whole`; as bare bytes aiohttp would write it in one go.
            Body=io.BytesIO(whole),
            ContentType=content_type_of(key),
            IfNoneMatch="*",
            **extra,
        )
        if "ETag" not in response:
            raise UnavailableError(f"{what}: the answer is not an S3 server's")

    async def _pages(self, prefix: str, extra: dict[str, str]) -> AsyncIterator[Any]:
        what = self._what("LIST", self._root + prefix)
        token = ""
        while True:
            resume = {"ContinuationToken": token} if token else {}
            async with self._turn(what) as turn:
                turn.extend(_PAGE_BYTES)
                page = await turn.client.list_objects_v2(
                    Bucket=self._settings.bucket,
                    Prefix=self._root + prefix,
                    MaxKeys=self._page_size,
                    **extra,
                    **resume,
                )
            answer_begun()
            # An empty page must be an S3 server's word: what is not listed may get deleted.
            if "IsTruncated" not in page:
                raise UnavailableError(f"{what}: the answer is not a listing")
            yield page
            if not page["IsTruncated"]:
                return
            last, token = token, page.get("NextContinuationToken", "")
            if token in ("", last):
                raise UnavailableError(f"{what}: the listing does not advance")

# SPDX-License-Identifier: Apache-2.0
"""A bucket through botocore, in threads: one client, bounded in time, size and concurrency.

The SDK does less here than it could: no retries (retry.py does them), no following of regions (a
wrong region is an error that names the right one), no checksum of reads (codec checks the
object's own). Each request runs in a thread of this store; a caller that gives up aborts it there,
see s3_client.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError
from botocore.parsers import ResponseParserError

from s3ec.errors import (
    AccessError,
    CorruptEntryError,
    CutBodyError,
    S3ECError,
    UnavailableError,
)
from s3ec.runtime import DaemonPool
from s3ec.settings import Settings
from s3ec.store.base import (
    Blob,
    ObjectInfo,
    UnorderedListingError,
    check_batch,
    check_folder_name,
    check_name,
    check_range,
    content_type_of,
    delete_each,
)
from s3ec.store.concurrency import RequestSlot, RequestSlots
from s3ec.store.s3_client import (
    Exchange,
    Opened,
    check_settings,
    encryption,
    open_client,
    read_piece,
)
from s3ec.store.s3_errors import (
    boundary,
    code_of,
    error_of_key,
    is_absent,
    others_may_help,
    reading_answer,
    status_of,
)

T = TypeVar("T")

# A page of a listing: 1000 entries of a name of up to 1 KiB each, in XML.
_PAGE_BYTES = 2**21
# Codes of a server that has no request for several deletions.
_NO_BATCHES = frozenset({"MethodNotAllowed", "NotImplemented"})
# Codes of a server that does not know a header of a write.
_HEADER_REFUSED = frozenset({"InvalidArgument", "InvalidRequest", "NotImplemented"})


class SdkSlot(RequestSlot):
    """A slot with the SDK's objects for one request.

    Attributes:
        opened: The SDK's client, with its credentials and transport.
        exchange: The exchange of the thread that works for it.
    """

    __slots__ = ("exchange", "opened")

    def __init__(self, slots: RequestSlots, what: str, opened: Opened) -> None:
        super().__init__(slots, what)
        self.opened = opened
        self.exchange = Exchange()


class Form(NamedTuple):
    """The optional headers that a write is sent with."""

    checksum: bool
    condition: bool


class BotocoreStore:
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    May be made before a loop exists; the SDK's client is made at the first call, and later calls
    must come from the loop of that one. At most ``settings.max_concurrency`` requests are out at a
    time, each bounded by the timeouts of ``settings`` and by the least throughput.

    Args:
        settings: Where the bucket is and how to reach it.
        patient: True if a request waits for credentials until a search for them ends.

    Attributes:
        page_size: Entries requested per page of a listing.

    Raises:
        ConfigError: Profile, region or CA file cannot be used.
    """

    page_size = 1000

    def __init__(self, settings: Settings, *, patient: bool = False) -> None:
        check_settings(settings)
        self._settings = settings
        self._patient = patient
        self._root = f"{settings.prefix}/" if settings.prefix else ""
        self._slots = RequestSlots(settings)
        self._opening = asyncio.Lock()
        self._opened: Opened | None = None
        self._pool = DaemonPool(settings.max_concurrency, "s3ec-sdk")
        self._form = Form(checksum=True, condition=True)
        self._form_works = False
        self._has_batches = True
        # S3 Express One Zone. It lists in no order, by whole folders, and from the start only.
        self._is_directory = settings.bucket.endswith(("--x-s3", "--xa-s3"))

    def __repr__(self) -> str:
        endpoint = self._settings.endpoint_url or "AWS"
        name = type(self).__name__
        return f"{name}(s3://{self._settings.bucket}/{self._root} at {endpoint})"

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        key = self._key(name)
        async with self._slot("GET", key) as slot:
            return await self._get_object(slot, key, max_bytes)

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        check_range(start, length)
        key = self._key(name)
        async with self._slot("GET", key) as slot:
            try:
                return await self._get_object(slot, key, length, range(start, start + length))
            except ClientError as exc:
                if status_of(exc) == 416:  # the object ends before `start`
                    return b""
                raise

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        key = self._key(name)
        nbytes = sum(memoryview(piece).nbytes for piece in body)
        async with self._slot("PUT", key) as slot:
            refusal: ClientError | None = None
            for form in self._forms():
                slot.extend(nbytes)
                try:
                    await self._put_object(slot, key, body, form)
                except ClientError as exc:
                    refused = status_of(exc) == 501 or code_of(exc) in _HEADER_REFUSED
                    if not refused or self._form_works:
                        raise
                    refusal = refusal or exc
                else:
                    # Only now is it known which header the server refused.
                    self._form, self._form_works = form, True
                    return
            if refusal is not None:
                raise refusal

    def _forms(self) -> Sequence[Form]:
        """The forms to try, best first: until one has worked, a server may refuse any header."""
        if self._form_works:
            return (self._form,)
        return tuple(
            Form(checksum=checksum, condition=condition)
            for condition in (True, False)
            for checksum in (True, False)
        )

    async def head(self, name: str) -> ObjectInfo | None:
        key = self._key(name)
        async with self._slot("HEAD", key) as slot:
            response = await _unless_absent(self._call(slot, "head_object", Key=key))
            if response is None:
                return None
            if "ETag" not in response:
                raise UnavailableError(f"{slot.what}: the answer is not an S3 server's")
            with reading_answer():
                return ObjectInfo(name, int(response.get("ContentLength", 0)), _written_s(response))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        folder, after = prefix, {"StartAfter": self._root + start_after} if start_after else {}
        if self._is_directory:
            folder, after = prefix[: prefix.rfind("/") + 1], {}
        begun = False
        try:
            async for found in self._pages(folder, after, self._entries_of):
                for info in found:
                    begun = True
                    is_later = not self._is_directory or info.name > start_after
                    if is_later and info.name.startswith(prefix):
                        yield info
        except UnavailableError as exc:
            if self._is_directory and begun:
                raise UnorderedListingError(str(exc)) from exc
            raise

    def _entries_of(self, page: Any) -> Iterator[ObjectInfo]:
        for entry in page.get("Contents", ()):
            key = str(entry["Key"])
            # The root itself can be listed, as a folder marker made by a console.
            if key.startswith(self._root) and key != self._root:
                name = key[len(self._root) :]
                yield ObjectInfo(name, int(entry["Size"]), _written_s(entry))

    def list_tags(self) -> AsyncIterator[Sequence[tuple[str, int, str]]]:
        """Name, bytes and ETag of all objects, page by page; not a part of Store."""
        return self._pages("", {}, self._tags_of)

    def _tags_of(self, page: Any) -> Iterator[tuple[str, int, str]]:
        for entry in page.get("Contents", ()):
            name = str(entry["Key"]).removeprefix(self._root)
            yield name, int(entry["Size"]), str(entry["ETag"])

    async def list_folders(self, prefix: str) -> Sequence[str]:
        check_folder_name(prefix)
        above = self._root + prefix
        folders: dict[str, None] = {}

        def folders_of(page: Any) -> Iterator[str]:
            if any("/" in name.removeprefix(above) for name in _objects_of(page)):
                # A listing would leave out objects in folders that are not named.
                raise UnavailableError(f"{self._what('LIST', above)}: `delimiter` is not heeded")
            return _folders_of(page)

        async for found in self._pages(prefix, {"Delimiter": "/"}, folders_of):
            folders.update((folder.removeprefix(above), None) for folder in found)
        return tuple(folders)

    async def delete(self, name: str) -> None:
        key = self._key(name)
        async with self._slot("DELETE", key) as slot:
            answer = await _unless_absent(self._call(slot, "delete_object", Key=key))
            about = answer["ResponseMetadata"] if answer else {}
            kind = about.get("HTTPHeaders", {}).get("content-type", "")
            # The SDK reads no body. A 204 has none, whatever type some servers give it.
            if kind.startswith("text/html") and about.get("HTTPStatusCode") != 204:
                raise ResponseParserError("the answer is not an S3 server's")

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        check_batch(names)
        # The XML of a batch cannot hold every character.
        together = [name for name in dict.fromkeys(names) if name.isprintable()]
        left = await delete_each(self, [name for name in names if not name.isprintable()])
        if self._has_batches and together:
            try:
                return {**left, **await self._delete_objects(together)}
            except AccessError as exc:
                if exc.code not in _NO_BATCHES and exc.code not in ("405", "501"):
                    raise
                self._has_batches = False
        return {**left, **await delete_each(self, together)}

    async def _delete_objects(self, names: Sequence[str]) -> dict[str, S3ECError]:
        keys = {self._key(name): name for name in names}
        async with self._slot("DELETE", f"{next(iter(keys))} and {len(keys) - 1} more") as slot:
            slot.extend(_PAGE_BYTES)
            batch = {"Objects": [{"Key": key} for key in keys]}
            answer = await self._call(slot, "delete_objects", Delete=batch)
            told = {str(entry.get("Key")) for entry in answer.get("Deleted", ())}
            refused = {str(entry.get("Key")): entry for entry in answer.get("Errors", ())}
            if not told and not refused:
                raise UnavailableError(f"{slot.what}: the answer is not an S3 server's")
        left: dict[str, S3ECError] = {}
        for key in keys.keys() - (told - refused.keys()):
            what = self._what("DELETE", key)
            # An object that the response does not name may still be there.
            error: S3ECError | None = UnavailableError(f"{what}: the answer does not tell of it")
            if key in refused:
                error = error_of_key(refused[key], what, self._region())
            if error is not None:
                left[keys[key]] = error
        return left

    async def close(self) -> None:
        async with self._opening:
            opened, self._opened = self._opened, None
            # Ends requests under way, which closing a client does not.
            self._slots.close()
            if opened is not None:
                await opened.credentials.close()
                await self._disconnect(opened)
            self._pool.shutdown(wait=False)

    def _key(self, name: str) -> str:
        check_name(name)
        return self._root + name

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} s3://{self._settings.bucket}/{key}"

    def _region(self) -> str:
        if self._opened is not None:
            return str(self._opened.client.meta.region_name)
        return self._settings.region or "unset"

    def _by(self) -> str:
        return self._opened.way.by if self._opened is not None else ""

    @contextlib.asynccontextmanager
    async def _slot(self, verb: str, key: str) -> AsyncIterator[SdkSlot]:
        """Provide the client, a place, a deadline and the error boundary of an operation."""
        what = self._what(verb, key)
        with boundary(what, self._region, self._by):
            # There are as many threads and connections as places, so behind the deadline a request
            # waits only for requests that were given up a moment ago.
            async with SdkSlot(self._slots, what, await self._open()) as slot:
                yield slot

    async def _open(self) -> Opened:
        self._slots.check_loop()
        if self._opened is not None:
            return self._opened
        async with self._opening:
            self._slots.check_loop()
            if self._opened is None:
                self._opened = await self._connect()
            return self._opened

    async def _connect(self) -> Opened:
        """Make the client for the first request; called under the lock of _open."""
        opening = functools.partial(open_client, self._settings, patient=self._patient)
        return await asyncio.get_running_loop().run_in_executor(self._pool, opening)

    async def _disconnect(self, opened: Opened) -> None:
        """Close the connections of _connect's client."""
        opened.client.close()
        if opened.transport is not None:
            opened.transport.close()

    async def _call(self, slot: SdkSlot, operation: str, **params: Any) -> Any:
        """Make a request to the bucket with the SDK; repeat a refused one with other credentials.

        Args:
            operation: Name of the client's method.
            params: Its arguments; ``Bucket`` is this one unless it is given.

        Raises:
            ClientError: The SDK's, for a refusal.
            ResponseParserError: The SDK's, for a response that it cannot read.
        """
        call = functools.partial(
            getattr(slot.opened.client, operation), **{"Bucket": self._settings.bucket, **params}
        )
        credentials = slot.opened.credentials
        signing = slot.exchange.credentials = await credentials.get_frozen_credentials()
        try:
            return await self._run(slot, functools.partial(_ask, call))
        except ClientError as exc:
            if not others_may_help(exc):
                raise
            others = await credentials.others(signing, code_of(exc))
            if others is None:
                raise
        slot.exchange.credentials = others
        body = params.get("Body", io.BytesIO())
        body.seek(0)
        slot.extend(max(len(body.getbuffer()), _PAGE_BYTES))
        return await self._run(slot, functools.partial(_ask, call))

    async def _run(self, slot: SdkSlot, function: Callable[[], T]) -> T:
        """Call a function in a thread; a cancellation aborts the thread's wait for the server."""
        if self._slots.is_closed:
            raise UnavailableError("the store was closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, slot.exchange.run, function)
        except asyncio.CancelledError:
            slot.exchange.abort()
            raise

    async def _get_object(
        self, slot: SdkSlot, key: str, most: int, wanted: range | None = None
    ) -> Blob | None:
        """Read an object, or a range of its bytes; None if it is absent.

        Args:
            most: The most bytes that may come, of the object or the range.

        Raises:
            ClientError: The SDK's, for any refusal.
            CorruptEntryError: As Store.get.
        """
        part = {} if wanted is None else {"Range": f"bytes={wanted.start}-{wanted.stop - 1}"}
        response = await _unless_absent(self._call(slot, "get_object", Key=key, **part))
        if response is None:
            return None
        status, before = response["ResponseMetadata"]["HTTPStatusCode"], 0
        # `rclone serve s3` sends a range with status 200. Others send the whole object with it:
        # they do not support ranges, or not those of an empty body.
        if wanted is not None and status != 206 and "ContentRange" not in response:
            before = wanted.start
        most += before
        nbytes: int | None = response.get("ContentLength")
        stream = response["Body"]
        try:
            if "ETag" not in response:  # a portal's page, which does not make an object bad
                raise ResponseParserError("the answer is not an S3 server's")
            slot.expect(nbytes, most)
        except (CorruptEntryError, ResponseParserError):
            stream.close()
            raise
        try:
            # A body sent in chunks has no announced length.
            limit = most + 1 if nbytes is None else None
            body: bytes = await self._run(slot, functools.partial(self._read, stream, limit))
        except (IncompleteReadError, ResponseStreamingError) as exc:
            if nbytes is None:
                raise
            raise CutBodyError(f"{slot.what}: the body ended before its {nbytes} bytes") from exc
        if len(body) > most:
            raise CorruptEntryError(f"{slot.what}: more than {most} bytes", reason="size")
        return body[before:]

    def _read(self, stream: Any, most: int | None) -> Any:
        """Read at most ``most`` bytes of a body; in a thread."""
        with contextlib.closing(stream):
            return read_piece(stream, most)

    async def _put_object(
        self, slot: SdkSlot, key: str, body: Sequence[bytes | memoryview], form: Form
    ) -> None:
        """Send an object that must not exist yet.

        Raises:
            ClientError: The SDK's, for any refusal.
        """
        # The SDK takes one buffer; a single piece of type bytes is not copied.
        whole = body[0] if len(body) == 1 and isinstance(body[0], bytes) else b"".join(body)
        extra = encryption(self._settings)
        if form.condition:
            extra["IfNoneMatch"] = "*"
        if form.checksum:
            # Our own header: the SDK's would be a trailer over HTTPS, in a chunked encoding that
            # several S3-compatible servers do not understand.
            crc = await asyncio.to_thread(zlib.crc32, whole)
            extra["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        response = await self._call(
            slot,
            "put_object",
            Key=key,
            # Shares the memory of `whole`; plain bytes would be written at once.
            Body=io.BytesIO(whole),
            ContentType=content_type_of(key),
            **extra,
        )
        if "ETag" not in response:
            raise ResponseParserError("the answer is not an S3 server's")

    async def _pages(
        self, prefix: str, extra: dict[str, str], items_of: Callable[[Any], Iterator[T]]
    ) -> AsyncIterator[Sequence[T]]:
        """Yield the items of each page of a listing.

        Args:
            extra: Arguments for the SDK.
            items_of: Extracts the items from the SDK's page.
        """
        token, first = "", None
        while True:
            resume = {"ContinuationToken": token} if token else {}
            async with self._slot("LIST", self._root + prefix) as slot:
                slot.extend(_PAGE_BYTES)
                page = await self._call(
                    slot,
                    "list_objects_v2",
                    Prefix=self._root + prefix,
                    MaxKeys=self.page_size,
                    **extra,
                    **resume,
                )
                with reading_answer():
                    names = (*_objects_of(page), *_folders_of(page))
                    if not all(name.startswith(self._root + prefix) for name in names):
                        # A deletion of all listed names would delete objects of others.
                        raise UnavailableError(f"{slot.what}: other names were listed")
                    items = list(items_of(page))
            # An empty page must come from an S3 server: entries that are not listed may be deleted.
            if "IsTruncated" not in page:
                raise UnavailableError(f"{slot.what}: the answer is not a listing")
            if items and items[0] == first:  # with a new token each time it would never end
                raise UnavailableError(f"{slot.what}: the listing does not advance")
            first = next(iter(items), first)
            yield items
            if not page["IsTruncated"]:
                return
            last, token = token, page.get("NextContinuationToken", "")
            if token in ("", last):
                raise UnavailableError(f"{slot.what}: the listing does not advance")


def _ask(call: Callable[[], Any]) -> Any:
    """Make the SDK's call, which reads the response's head; in a thread."""
    with reading_answer():
        return call()


def _objects_of(page: Any) -> Iterator[str]:
    return (str(entry["Key"]) for entry in page.get("Contents", ()))


def _folders_of(page: Any) -> Iterator[str]:
    return (str(entry["Prefix"]) for entry in page.get("CommonPrefixes", ()))


def _written_s(entry: Any) -> float:
    """When an object was written, from a response of the SDK, Unix time; 0 if it does not say."""
    modified = entry.get("LastModified")
    return float(modified.timestamp()) if modified else 0.0


async def _unless_absent(request: Awaitable[T]) -> T | None:
    """The result of a request for an object; None if there is no such object."""
    try:
        return await request
    except ClientError as exc:
        if is_absent(exc):
            return None
        raise

# SPDX-License-Identifier: Apache-2.0
"""The protocol of a store: operations over names relative to a prefix.

Every transport and wrapper implements Store and passes the suite in ``s3ec.testing.contract``.
Retry, breaker and faults are each a Store around a Store; ``Wrapper`` is their common base.
A large object is read range by range, with several requests under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from s3ec.counters import Report, unreported
from s3ec.errors import CorruptEntryError, S3ECError, UnavailableError

Blob: TypeAlias = bytes | memoryview
"""Bytes of an object, read-only, one byte per item; a view if the transport owns the memory."""

DELETE_AT_A_TIME = 1000
"""Names that one call of delete_many takes; S3's limit of one request."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object.

    Attributes:
        name: Relative to the store's prefix.
        nbytes: Size.
        modified_s: Last change, seconds since the epoch; 0 if the store does not say.
    """

    name: str
    nbytes: int
    modified_s: float = 0.0


class Store(Protocol):
    """An object store. Safe for use by many coroutines of one event loop.

    Every method may raise UnavailableError (try later) or AccessError (refused); each method
    documents its other errors. Names never start with a slash. Absence is None.
    """

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        """Read a whole object; None if absent.

        Args:
            max_bytes: Larger objects are refused before their body is read.

        Raises:
            CorruptEntryError: The object is larger than ``max_bytes`` (reason ``size``).
                CutBodyError: The body ended before its announced length.
        """
        ...

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        """Read bytes ``start`` to ``start + length``, fewer if the object ends; None if absent."""
        ...

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        """Create an object from pieces, whole or not at all; never replaces one.

        Raises:
            ConflictError: The name is taken.
        """
        ...

    async def head(self, name: str) -> ObjectInfo | None:
        """Size and time of an object; None if absent."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield all objects whose name starts with ``prefix``; pages are fetched as needed.

        The order is the server's own; callers may not rely on it. ``start_after`` is sent to
        the server, which lists names that it considers later.
        """
        ...

    async def list_folders(self, prefix: str) -> Sequence[str]:
        """Folders directly below ``prefix`` that hold objects, each with its trailing slash."""
        ...

    async def delete(self, name: str) -> None:
        """Remove an object; an absent one is no error."""
        ...

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        """Remove objects, in one request if the server supports that.

        Args:
            names: At most DELETE_AT_A_TIME; a repeated name counts once.

        Returns:
            For each name that may still be there, why: UnavailableError (try again) or
            AccessError. Empty when all are gone; an absent object is no error.

        Raises:
            ValueError: Too many names, or an invalid one; nothing was deleted.
            UnavailableError, AccessError: The whole request failed; each object may still be there.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Further calls are errors of the caller."""
        ...


def check_name(name: str) -> None:
    """Raise ValueError for a name that would not be below the store's prefix."""
    if not name or name.startswith("/"):
        raise ValueError("an object's name is not empty and does not start with a slash")


def check_batch(names: Sequence[str]) -> None:
    """Raise ValueError for more names than delete_many takes, or one that check_name refuses."""
    if len(names) > DELETE_AT_A_TIME:
        raise ValueError(f"at most {DELETE_AT_A_TIME} names are deleted at a time")
    for name in names:
        check_name(name)


async def delete_each(store: Store, names: Sequence[str]) -> dict[str, S3ECError]:
    """Do delete_many by single deletions; the store limits how many are under way."""
    left: dict[str, S3ECError] = {}

    async def delete(name: str) -> None:
        try:
            await store.delete(name)
        except S3ECError as exc:
            left[name] = exc

    await asyncio.gather(*(delete(name) for name in dict.fromkeys(names)))
    return left


def check_range(start: int, length: int) -> None:
    """Raise ValueError for a range that a header cannot express, or that servers differ on."""
    if start < 0 or length < 1:
        raise ValueError("a range starts at 0 or later and has 1 byte or more")


def check_folder_name(prefix: str) -> None:
    """Raise ValueError for a prefix that does not end with the slash of a folder."""
    if prefix and not prefix.endswith("/"):
        raise ValueError("a folder's prefix is empty or ends with a slash")


def content_type_of(key: str) -> str:
    """The content type of an object, for browsers and consoles."""
    return "application/json" if key.endswith(".json") else "binary/octet-stream"


T = TypeVar("T")


class Wrapper:
    """A Store whose operations are those of ``inner``, each awaited by ``_around``.

    A subclass overrides ``_around``, or single operations.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await one operation; any but ``list``, which is not a single request.

        Args:
            op: Name of the method of Store.
            name: Of the object, or the prefix; several names are one per line.
            call: Makes the request; may be called again.
        """
        return await call()

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._around("get", name, lambda: self._inner.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._around(
            "get_range", name, lambda: self._inner.get_range(name, start, length)
        )

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        await self._around("put_if_absent", name, lambda: self._inner.put_if_absent(name, body))

    async def head(self, name: str) -> ObjectInfo | None:
        return await self._around("head", name, lambda: self._inner.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        pages = self._inner.list(prefix, start_after=start_after)
        try:
            async for info in pages:
                yield info
        finally:
            # A caller that leaves early must not leave a request behind.
            if isinstance(pages, AsyncGenerator):
                await pages.aclose()

    async def list_folders(self, prefix: str) -> Sequence[str]:
        return await self._around("list_folders", prefix, lambda: self._inner.list_folders(prefix))

    async def delete(self, name: str) -> None:
        await self._around("delete", name, lambda: self._inner.delete(name))

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        return await self._around(
            "delete_many", "\n".join(names), lambda: self._inner.delete_many(names)
        )

    async def close(self) -> None:
        await self._inner.close()


async def parts_as_they_come(
    store: Store, name: str, ranges: Sequence[range], *, at_a_time: int, first_alone: bool
) -> AsyncGenerator[tuple[int, Blob | None], None]:
    """Read ranges of an object in parallel, and yield each as soon as it has arrived.

    A caller that may leave early closes it (``contextlib.aclosing``). Requests under way are then
    cancelled, and have ended when that returns.

    Args:
        ranges: Offsets in bytes, in order.
        at_a_time: Only so many ranges are requested, counted from the first that is not done. So
            the caller may keep ranges that arrive early until they are needed.
        first_alone: True to request the others only when the caller is done with the first.

    Yields:
        A range's position in ``ranges``, and the result of ``get_range``: None if the object is
        gone. The range is done when the caller takes the next one.
    """
    under_way: dict[asyncio.Future[Blob | None], int] = {}
    done: set[int] = set()
    begun = first = 0
    try:
        while first < len(ranges):
            width = 1 if first_alone and not first else at_a_time
            while begun < min(first + width, len(ranges)):
                asked = store.get_range(name, ranges[begun].start, len(ranges[begun]))
                under_way[asyncio.ensure_future(asked)] = begun
                begun += 1
            came, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for request in sorted(came, key=under_way.__getitem__):
                yield under_way[request], request.result()
                done.add(under_way.pop(request))
            del came, request  # their bodies would stay in memory while others arrive
            while first in done:
                done.discard(first)
                first += 1
    finally:
        for request in under_way:
            request.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


PART_BYTES = 8 * 2**20
"""Large objects of known size are read in ranges of this size."""


class UnorderedListingError(UnavailableError):
    """A listing without order failed. After its first entry it cannot be resumed."""


class NoSpaceError(UnavailableError):
    """The disk of a ``file`` URL is full. Nothing can be written until space is freed."""


class VanishedError(Exception):
    """An object is gone from the bucket: deleted, or replaced by a newer snapshot of the index."""


async def whole_parts(
    store: Store, name: str, nbytes: int, *, at_a_time: int
) -> AsyncGenerator[tuple[int, Blob], None]:
    """Read an object of known size in whole ranges; yield each as soon as it has arrived.

    The caller closes it as parts_as_they_come.

    Args:
        nbytes: Of the object.
        at_a_time: As in parts_as_they_come.

    Yields:
        The offset of a range, and its bytes.

    Raises:
        VanishedError: The object is not in the store.
        CorruptEntryError: The object is shorter.
        UnavailableError, AccessError: The store did not answer.
    """
    ranges = [range(at, min(at + PART_BYTES, nbytes)) for at in range(0, nbytes, PART_BYTES)]
    coming = parts_as_they_come(store, name, ranges, at_a_time=at_a_time, first_alone=False)
    async with aclosing(coming) as parts:
        async for number, part in parts:
            if part is None:
                raise VanishedError(name)
            at = ranges[number].start
            if len(part) != len(ranges[number]):
                raise CorruptEntryError(
                    f"{name}: ends at {at + len(part)} of {nbytes} bytes", reason="length"
                )
            yield at, part
            del part  # or it would stay in memory during the wait for the next


async def get_in_parts(
    store: Store, name: str, nbytes: int, *, at_a_time: int, report: Report = unreported
) -> bytearray:
    """Read a whole object of known size into memory.

    Args:
        nbytes: Of the object.
        at_a_time: As in parts_as_they_come.
        report: Called with the number of bytes that have arrived.

    Raises:
        VanishedError, CorruptEntryError, UnavailableError, AccessError: As whole_parts.
    """
    whole, done = bytearray(nbytes), 0
    async with aclosing(whole_parts(store, name, nbytes, at_a_time=at_a_time)) as parts:
        async for at, part in parts:
            whole[at : at + len(part)] = part
            done += len(part)
            report("downloading", done, nbytes)
    return whole

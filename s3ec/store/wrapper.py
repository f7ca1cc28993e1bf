# SPDX-License-Identifier: Apache-2.0
"""What stores around a store have in common: every operation goes through one method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from s3ec.errors import AccessError, S3ECError, UnavailableError
from s3ec.store.base import Blob, ObjectInfo, Store

T = TypeVar("T")


class _SomeLeftError(UnavailableError):
    """Of several names some are to be asked for again; only ``_around`` sees it."""

    def __init__(self, reasons: Sequence[UnavailableError]) -> None:
        worst = next((reason for reason in reasons if reason.is_throttle), reasons[0])
        super().__init__(
            str(worst),
            status=worst.status,
            retry_after_s=worst.retry_after_s,
            is_throttle=worst.is_throttle,
        )


class Wrapper:
    """A Store whose operations are those of ``inner``, each awaited by ``_around``."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    async def _around(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await one operation, or one entry of a listing.

        Args:
            op: Name of the method of Store.
            call: Makes the request; may be called again, except for ``list``. That of
                ``delete_many`` raises where some names are to be asked for again, and asks for
                no others then.
        """
        raise NotImplementedError

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._around("get", lambda: self._inner.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._around("get_range", lambda: self._inner.get_range(name, start, length))

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        await self._around("put_if_absent", lambda: self._inner.put_if_absent(name, body))

    async def head(self, name: str) -> ObjectInfo | None:
        return await self._around("head", lambda: self._inner.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        pages = self._inner.list(prefix, start_after=start_after)
        next_entry = self._next_of(pages)
        try:
            while True:
                try:
                    info = await next_entry()
                except StopAsyncIteration:
                    return
                yield info
        finally:
            # A caller that leaves early must not leave a request behind.
            if isinstance(pages, AsyncGenerator):
                await pages.aclose()

    def _next_of(self, pages: AsyncIterator[ObjectInfo]) -> Callable[[], Awaitable[ObjectInfo]]:
        """What brings the next entry of a listing, or raises StopAsyncIteration."""
        return lambda: self._around("list", pages.__anext__)

    async def list_folders(self, prefix: str) -> Sequence[str]:
        return await self._around("list_folders", lambda: self._inner.list_folders(prefix))

    async def delete(self, name: str) -> None:
        await self._around("delete", lambda: self._inner.delete(name))

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        left: dict[str, S3ECError] = {}
        wanted = list(names)

        async def ask() -> None:
            nonlocal wanted
            answer = await self._inner.delete_many(wanted)
            for name in wanted:
                left.pop(name, None)
            left.update(answer)
            reasons = {n: exc for n, exc in answer.items() if isinstance(exc, UnavailableError)}
            wanted = list(reasons)
            if reasons:
                raise _SomeLeftError(list(reasons.values()))

        try:
            await self._around("delete_many", ask)
        except _SomeLeftError:
            pass
        except (UnavailableError, AccessError) as exc:
            if not left:  # there was no answer about any of them
                raise
            left.update(dict.fromkeys(wanted, exc))
        return left

    async def close(self) -> None:
        await self._inner.close()

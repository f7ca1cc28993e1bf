# SPDX-License-Identifier: Apache-2.0
"""The authoritative listing of ``objects/``, in parallel by prefix."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

from s3ec.counters import Report, unreported
from s3ec.errors import UnavailableError
from s3ec.identity import Key, Layout, digest_of_name, is_object_name
from s3ec.index.snapshot import Rows
from s3ec.store.base import ObjectInfo, Store, UnorderedListingError
from s3ec.store.concurrency import in_parallel

BATCH = 1000
"""Objects that are yielded at a time: one page of a listing."""
FEW = 4096
"""Up to so many objects are listed page by page: requests for each of 256 folders cost more."""
# In a row: a hundred thousand requests are sent, and some will fail.
ATTEMPTS = 4
PAUSE_S = 1.0
"""The pause before the second attempt; it grows by as much before each further one."""
_FAN_OUT = re.compile(r"[0-9a-f]{2}/")


async def list_side_by_side(
    store: Store,
    first: str,
    prefixes: Callable[[], Awaitable[Iterable[str]]],
) -> AsyncGenerator[list[ObjectInfo], None]:
    """List objects in batches, in no order. The caller closes it.

    If there are more than FEW objects, several requests at a time list them.

    Args:
        first: The common prefix of all objects, to find out if they are few.
        prefixes: Finds prefixes that hold all objects; called if they are many. Each listing waits
            until its last batch is taken.

    Raises:
        UnavailableError: The store does not answer now; part of the listing is missing.
        AccessError: Listing is refused.
    """
    found: asyncio.Queue[list[ObjectInfo]] = asyncio.Queue(1)

    async def read(prefix: str) -> None:
        batch: list[ObjectInfo] = []
        async for info in listed(store, prefix):
            batch.append(info)
            if len(batch) == BATCH:
                await found.put(batch)
                batch = []
        if batch:
            await found.put(batch)

    async def read_all() -> None:
        few = await at_most(store, first, FEW)
        if few is None:
            await in_parallel(await prefixes(), read)
            return
        for start in range(0, len(few), BATCH):
            await found.put(few[start : start + BATCH])

    reading = asyncio.create_task(read_all(), name="s3ec-list")
    taking: asyncio.Task[list[ObjectInfo]] | None = None
    try:
        while not reading.done() or not found.empty():
            taking = asyncio.create_task(found.get(), name="s3ec-list-take")
            await asyncio.wait((taking, reading), return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                yield taking.result()
            else:
                taking.cancel()
        await reading
    finally:
        for task in filter(None, (reading, taking)):
            task.cancel()
        await asyncio.gather(*filter(None, (reading, taking)), return_exceptions=True)


async def list_objects(
    store: Store, layout: Layout, *, report: Report = unreported
) -> AsyncGenerator[list[ObjectInfo], None]:
    """List every entry. Objects that are empty or have no name of ours are left out.

    Costs, order and errors are as for list_side_by_side; the caller closes it.

    Args:
        report: Called with the number of yielded entries.
    """
    objects, count = layout.objects, 0
    listing = list_side_by_side(store, objects, lambda: leaf_folders(store, objects))
    async with aclosing(listing) as batches:
        async for infos in batches:
            entries = [
                info
                for info in infos
                if info.nbytes > 0 and is_object_name(info.name.removeprefix(objects))
            ]
            if entries:
                yield entries
                count += len(entries)
                report("listing objects", count, None)


async def at_most(store: Store, prefix: str, most: int) -> list[ObjectInfo] | None:
    """All objects below a prefix; None if there are more than ``most``. Raises what listed does."""
    found: list[ObjectInfo] = []
    async with aclosing(listed(store, prefix)) as listing:
        async for info in listing:
            if len(found) == most:
                return None
            found.append(info)
    return found


async def listed(store: Store, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
    """A listing that resumes after a failure, if the server lists in the order of names.

    Raises:
        UnavailableError: The store does not answer now, or failed in a listing without order.
        AccessError: It refuses.
    """
    last, in_order, failures = "", True, 0
    while True:
        try:
            async for info in store.list(prefix, start_after=last):
                in_order = in_order and info.name > last
                last, failures = info.name, 0
                yield info
            return
        except UnavailableError as exc:
            failures += 1
            if last and isinstance(exc, UnorderedListingError):
                in_order = False
            if failures == ATTEMPTS or not in_order:
                raise
            await asyncio.sleep(PAUSE_S * failures)


async def leaf_folders(store: Store, objects: str) -> list[str]:
    """The folders that hold objects, by the first two digits of a hash, also those of adapters."""
    top = await list_folders(store, objects)
    found = [folder for folder in top if _FAN_OUT.fullmatch(folder.removeprefix(objects))]
    adapters = [folder for folder in top if folder not in found]
    nested = await in_parallel(adapters, lambda folder: list_folders(store, folder))
    return found + [folder for folders in nested for folder in folders]


async def list_folders(store: Store, prefix: str) -> list[str]:
    """The prefixes of the folders directly below another one."""
    return [prefix + folder for folder in await store.list_folders(prefix)]


def key_of_object(layout: Layout, name: str) -> Key:
    """Key of a listed object. Its identifier is empty, since a name does not contain it."""
    below = name.removeprefix(layout.objects)
    return Key("", below, digest_of_name(below))


def rows_of(layout: Layout, infos: Sequence[ObjectInfo]) -> Rows:
    """The rows of listed entries: digest and size; about 3 us each."""
    names = [info.name.removeprefix(layout.objects) for info in infos]
    return Rows.of([digest_of_name(name) for name in names], [info.nbytes for info in infos])

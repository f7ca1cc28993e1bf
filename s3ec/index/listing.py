# SPDX-License-Identifier: Apache-2.0
"""The authoritative listing of ``objects/``: in parallel by prefix, or as a set of digests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np

from s3ec.counters import Report, unreported
from s3ec.errors import UnavailableError
from s3ec.identity import Key, Layout, digest_of_name, entry_name
from s3ec.index.rows import Rows
from s3ec.index.segment import SortedRuns
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.concurrency import in_parallel

BATCH = 4096
"""Objects that are handed on at a time."""
FEW = 4096
"""So many are listed one page after the other: requests for each of 256 folders cost more."""
# In a row: a hundred thousand requests are sent, and some will fail.
ATTEMPTS = 4
PAUSE_S = 1.0
"""Before the second attempt; before each further one it is so much longer."""
_FAN_OUT = re.compile(r"[0-9a-f]{2}/")
_MAX_TIME_S = 2**32 - 1

Take = Callable[[Sequence[ObjectInfo]], Awaitable[None]]


async def list_objects(
    store: Store,
    layout: Layout,
    take: Take,
    *,
    report: Report = unreported,
    expected: int | None = None,
) -> None:
    """List every entry. Objects that are empty or have no name of ours are left out.

    One request per 1000 objects; where there are many, 16 at a time, by folder.

    Args:
        take: Gets some objects at a time, from several coroutines.
        report: Told how many were handed on.
        expected: How many there may be, for ``report``.

    Raises:
        UnavailableError: The store does not answer now; part of the listing is missing.
        AccessError: Listing is refused.
    """
    objects = layout.objects
    count = 0

    async def hand_on(batch: Sequence[ObjectInfo]) -> None:
        nonlocal count
        await take(batch)
        count += len(batch)
        report("listing objects", count, None if expected is None else max(expected, count))

    def is_entry(info: ObjectInfo) -> bool:
        return info.nbytes > 0 and entry_name(info.name.removeprefix(objects)) is not None

    few = await few_objects(store, objects)
    if few is not None:
        found = [info for info in few if is_entry(info)]
        if found:
            await hand_on(found)
        return

    async def read(prefix: str) -> None:
        batch: list[ObjectInfo] = []
        async for info in listed(store, objects + prefix):
            if is_entry(info):
                batch.append(info)
            if len(batch) == BATCH:
                await hand_on(batch)
                batch = []
        if batch:
            await hand_on(batch)

    await in_parallel(await _prefixes(store, objects), read)


async def few_objects(store: Store, prefix: str) -> list[ObjectInfo] | None:
    """All objects below a prefix; None if there are more than FEW.

    Raises:
        UnavailableError, AccessError: As listed.
    """
    found: list[ObjectInfo] = []
    async with aclosing(listed(store, prefix)) as listing:
        async for info in listing:
            if len(found) == FEW:
                return None
            found.append(info)
    return found


async def listed(store: Store, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
    """A listing that goes on where it broke off, if the server lists in the order of names.

    Raises:
        UnavailableError: The store does not answer now, or broke off a listing without order.
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
        except UnavailableError:
            failures += 1
            if failures == ATTEMPTS or not in_order:
                raise
            await asyncio.sleep(PAUSE_S * failures)


async def _prefixes(store: Store, objects: str) -> list[str]:
    """Folders named by the first two digits of a hash, also those of adapters."""
    top = await store.list_folders(objects)
    adapters = [folder for folder in top if not _FAN_OUT.fullmatch(folder)]

    async def below(folder: str) -> list[str]:
        return [folder + inner for inner in await store.list_folders(objects + folder)]

    nested = await in_parallel(adapters, below)
    direct = [folder for folder in top if _FAN_OUT.fullmatch(folder)]
    return [*direct, *(prefix for prefixes in nested for prefix in prefixes)]


def key_of_object(layout: Layout, name: str) -> tuple[Key, int]:
    """Key and revision of a listed object. Its identifier is empty: a name does not tell it."""
    plain, revision = _entry_name(layout, name)
    return Key("", plain, digest_of_name(plain)), revision


def _entry_name(layout: Layout, name: str) -> tuple[str, int]:
    below = name.removeprefix(layout.objects)
    return entry_name(below) or (below, 0)


async def read_listing(
    store: Store,
    layout: Layout,
    folder: Path,
    *,
    report: Report = unreported,
    expected: int | None = None,
) -> SortedRuns:
    """List every entry and keep digests, sizes and times.

    Args:
        folder: For files, see SortedRuns.
        report, expected: As for list_objects.

    Raises:
        UnavailableError, AccessError: As list_objects.
        TierError: The folder is full.
    """
    listed = SortedRuns(folder, layout.namespace)
    turn = asyncio.Lock()

    async def take(infos: Sequence[ObjectInfo]) -> None:
        rows = await asyncio.to_thread(rows_of, layout, infos)
        # The others may well wait: this bounds what is in memory, too.
        async with turn:
            await asyncio.to_thread(listed.add, rows)

    await list_objects(store, layout, take, report=report, expected=expected)
    return listed


def rows_of(layout: Layout, infos: Sequence[ObjectInfo]) -> Rows:
    """What a listing says of entries: digest, size and time; about 3 us each.

    An entry's revision has its digest. It is what readers end with, and its row counts: also
    where both were stored within one second, so it is that much later.
    """
    found = [_entry_name(layout, info.name) for info in infos]
    digests = b"".join(digest_of_name(name) for name, _ in found)
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    times = [
        min(max(int(info.modified_s), 0) + revision, _MAX_TIME_S)
        for info, (_, revision) in zip(infos, found, strict=True)
    ]
    return Rows.of_digests(
        halves[:, 0],
        halves[:, 1],
        nbytes=np.array([info.nbytes for info in infos], np.uint64),
        time_s=np.array(times, np.uint32),
    )


async def list_digests(store: Store, layout: Layout, found: set[bytes]) -> int:
    """Add the digest of every entry to a set. A listing that breaks off is continued.

    Args:
        found: About 100 bytes of memory for each; holds what was seen also where this fails.

    Returns:
        How many objects are no entries.

    Raises:
        UnavailableError: Part of the listing failed.
        AccessError: Listing is refused.
    """
    junk = 0
    async for info in listed(store, layout.objects):
        entry = entry_name(info.name.removeprefix(layout.objects))
        if info.nbytes > 0 and entry is not None:
            found.add(digest_of_name(entry[0]))
        else:
            junk += 1
    return junk

# SPDX-License-Identifier: Apache-2.0
"""Deletes entries: first their objects, then, in the index, what says that they are there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from s3ec.counters import Counters
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key, Layout, digest_of_name, entry_name
from s3ec.index.announce import BATCH_ITEMS, Announcer
from s3ec.index.known_times import DELTAS, KnownTimes
from s3ec.index.making import temporary_folder
from s3ec.index.object_listing import list_objects
from s3ec.index.parallel import in_parallel
from s3ec.store.base import ObjectInfo, Store

# Writing a few kilobytes takes no longer where the bucket answers at all.
_TELL_S = 60.0
# Nor does asking after what a DELETE has left.
_LOOK_S = 10.0


class Deleter:
    """Deletes entries in batches; made by ``deleting``."""

    def __init__(
        self, store: Store, layout: Layout, announcer: Announcer, times: KnownTimes
    ) -> None:
        self._store = store
        self._layout = layout
        self._announcer = announcer
        self._times = times

    async def delete(self, keys: Sequence[Key]) -> None:
        """Delete some entries with all revisions, and announce that; those that are absent too.

        Killed in between, the index holds entries without an object: each costs readers one
        request, and ``s3ec manifest rebuild`` mends it.

        Raises:
            UnavailableError: The store does not answer now. What is known to be deleted was
                announced, unless the message says otherwise.
            AccessError: It refuses.
        """

        async def find(key: Key) -> list[str]:
            return await object_names(self._store, self._layout, key) or [self._layout.object(key)]

        found = await in_parallel(keys, find)
        await self.delete_objects(dict(zip(keys, found, strict=True)))

    async def delete_objects(
        self, objects: Mapping[Key, Sequence[str]], *, kept: Container[Key] = ()
    ) -> None:
        """Delete the named objects of some entries; raises what delete raises.

        Args:
            kept: Entries that have other objects, so that readers are told nothing.
        """
        keys = list(objects)
        for start in range(0, len(keys), BATCH_ITEMS):
            await self._delete_batch(keys[start : start + BATCH_ITEMS], objects, kept)

    async def _delete_batch(
        self, keys: Sequence[Key], objects: Mapping[Key, Sequence[str]], kept: Container[Key]
    ) -> None:
        await self._times.prepare(keys)
        confirmed: list[bool] = []
        unknown: dict[Key, None] = {}  # asked for, and no answer

        async def delete(key: Key) -> None:
            if key not in kept:
                unknown[key] = None
            for name in objects[key]:
                await self._store.delete(name)
            if key not in kept:
                del unknown[key]
                # At once, so that its time is before that of whoever stores the entry again.
                self._announcer.add(key, None, confirmed.append)

        try:
            await in_parallel(keys, delete)
        finally:
            for key in await self._gone({key: objects[key] for key in unknown}):
                self._announcer.add(key, None, confirmed.append)
            await _tell(self._announcer)
        if not all(confirmed):
            raise UnavailableError("the deletion could not be announced")

    async def _gone(self, objects: Mapping[Key, Sequence[str]]) -> list[Key]:
        """Those that are not there: of a request without an answer only the bucket knows more.

        What it does not tell is not announced: readers find out by asking for it.
        """

        async def is_gone(names: Sequence[str]) -> bool:
            try:
                async with asyncio.timeout(_LOOK_S):
                    return not any([await self._store.head(name) for name in names])
            except (UnavailableError, AccessError, TimeoutError):
                return False

        gone = await in_parallel(objects.values(), is_gone)
        return [key for key, it_is in zip(objects, gone, strict=True) if it_is]


async def _tell(announcer: Announcer) -> None:
    """Wait until readers are told, and give up where the bucket does not take it.

    Raises:
        UnavailableError: It was given up.
    """
    count = len(announcer)
    try:
        async with asyncio.timeout(_TELL_S):
            await announcer.flush()
    except TimeoutError as exc:
        announcer.close()
        raise UnavailableError(
            f"{count} objects are deleted, and readers could not be told: they find out "
            "by asking for them; `s3ec manifest rebuild` tells them"
        ) from exc


@asynccontextmanager
async def deleting(
    store: Store, layout: Layout, *, clock: Callable[[], float] = time.time
) -> AsyncIterator[Deleter]:
    """Reads what the index holds, for as long as entries are deleted.

    Args:
        clock: Seconds since the epoch.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
        TierError: The folder for temporary files is full: 42 bytes for each entry of the index.
    """
    with temporary_folder(None, DELTAS) as folder:
        times = KnownTimes(store, layout, folder)
        await times.open()
        announcer = Announcer(store, layout, Counters(), known_time_s=times, clock=clock)
        try:
            yield Deleter(store, layout, announcer, times)
        finally:
            try:
                if len(announcer):  # broken off while it was told
                    await _tell(announcer)
            finally:
                announcer.close()


async def object_names(store: Store, layout: Layout, key: Key) -> list[str]:
    """Names of an entry's objects that are there, revisions included; one listing."""
    listed = [info.name async for info in store.list(layout.revisions(key))]
    found = {name: entry_name(name.removeprefix(layout.objects)) for name in listed}
    return [name for name, entry in found.items() if entry and entry[0] == key.name]


def key_of_object(layout: Layout, name: str) -> tuple[Key, int]:
    """Key and revision of a listed object; the identifier, which it alone knows, is empty."""
    below = name.removeprefix(layout.objects)
    plain, revision = entry_name(below) or (below, 0)
    return Key("", plain, digest_of_name(plain)), revision


@dataclass(slots=True)
class Older:
    """Entries that were last changed before some time.

    Attributes:
        entries: How many.
        nbytes: Their size.
    """

    entries: int = 0
    nbytes: int = 0

    def take(self, infos: Sequence[ObjectInfo], before_s: float) -> list[ObjectInfo]:
        """Count those that are older; one whose time the store does not say is not."""
        old = [info for info in infos if 0 < info.modified_s < before_s]
        self.entries += len(old)
        self.nbytes += sum(info.nbytes for info in old)
        return old


async def count_older(store: Store, layout: Layout, before_s: float) -> Older:
    """What delete_older would delete, by an authoritative listing; raises what it raises."""
    older = Older()

    async def take(infos: Sequence[ObjectInfo]) -> None:
        older.take(infos, before_s)

    await list_objects(store, layout, take)
    return older


async def delete_older(store: Store, layout: Layout, before_s: float) -> Older:
    """Delete all entries that were last changed before a time, by an authoritative listing.

    Args:
        before_s: Seconds since the epoch, by the server's clock.

    Raises:
        UnavailableError: The store does not answer now; some may be deleted and announced.
        AccessError: It refuses.
        TierError: As deleting.
    """
    older = Older()
    turn = asyncio.Lock()  # a delta after the other
    kept: set[Key] = set()  # entries of several objects, of which one is young
    async with deleting(store, layout) as deleter:

        async def take(infos: Sequence[ObjectInfo]) -> None:
            async with turn:
                old = older.take(infos, before_s)
                objects: dict[Key, list[str]] = {}
                for info in old:
                    objects.setdefault(key_of_object(layout, info.name)[0], []).append(info.name)
                # A server that lists by name has the revisions before the first object.
                gone = {info.name for info in old}
                for info in infos:
                    key, revision = key_of_object(layout, info.name)
                    if info.name not in gone and (revision or key in objects):
                        kept.add(key)
                await deleter.delete_objects(objects, kept=kept)

        await list_objects(store, layout, take)
    return older

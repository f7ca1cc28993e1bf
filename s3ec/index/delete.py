# SPDX-License-Identifier: Apache-2.0
"""Deletes entries, or a whole namespace: the objects first; readers learn of it afterwards.

This node's engines read the deleted keys from its files. Other engines get one 404 for a key, and
the next listing leaves it out. Of a namespace the entries are deleted first and the descriptor
last. If a deletion is interrupted, the next one finds and deletes the rest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from s3ec.counters import Report, unreported
from s3ec.errors import ConflictError, S3ECError
from s3ec.identity import Key, Layout
from s3ec.index.listing import (
    key_of_object,
    list_folders,
    list_objects,
    list_side_by_side,
    listed,
)
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Made, rebuild
from s3ec.index.names import ServerClock
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store
from s3ec.store.concurrency import in_parallel

# Each takes a server half a second or more. S3 allows 3500 deletions a second below one prefix;
# deletions that it refuses for that are sent again.
_REQUESTS_AT_A_TIME = 10


async def delete_entries(
    store: Store,
    layout: Layout,
    keys: Iterable[Key],
    *,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> None:
    """Delete some entries, 1,000 per request; an absent entry is no error.

    A request that fails does not stop the others.

    Args:
        node: This node's files, where its engines read of it; others learn by one 404 each.
        report: Called with the number of deleted entries.

    Raises:
        UnavailableError: The store does not answer now; some may be deleted.
        AccessError: It refuses.
    """
    every = {layout.object(key): key.digest for key in keys}

    def gone(names: Sequence[str]) -> None:
        if node is not None:
            node.add_missing([every[name] for name in names])

    await _delete(store, list(every), gone, report)


async def _delete(
    store: Store,
    names: Sequence[str],
    gone: Callable[[Sequence[str]], None] = lambda _: None,
    report: Report = unreported,
) -> None:
    done = 0
    errors: list[S3ECError] = []

    async def delete(start: int) -> None:
        nonlocal done
        batch = names[start : start + DELETE_AT_A_TIME]
        try:
            left = await store.delete_many(batch)
        except S3ECError as exc:  # of the whole request: each object may be there or not
            left = dict.fromkeys(batch, exc)
        errors.extend(left.values())
        deleted = [name for name in batch if name not in left]
        await asyncio.to_thread(gone, deleted)
        done += len(deleted)
        report("deleting", done, len(names))

    starts = range(0, len(names), DELETE_AT_A_TIME)
    await in_parallel(starts, delete, width=_REQUESTS_AT_A_TIME)
    if errors:
        raise errors[0]


async def delete_chosen(
    store: Store,
    layout: Layout,
    choose: Callable[[Sequence[ObjectInfo]], Sequence[ObjectInfo]],
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    node: NodeFolder | None = None,
    folder: Path | None = None,
    report: Report = unreported,
) -> Made:
    """Delete listed objects while the listing is read; the others become a new snapshot.

    Args:
        choose: Returns those of some listed objects that are to be deleted.
        deleted: Called with the keys of deleted entries.
        node: This node's files, where its engines read of it.
        folder: For temporary files, as of ``maker.rebuild``.
        report: Called with the number of listed objects.

    Raises:
        UnavailableError, AccessError: As delete_entries. No snapshot is written.
        TierError: The folder for temporary files is full.
    """
    gone: list[bytes] = []

    async def delete(some: Sequence[Key]) -> None:
        await delete_entries(store, layout, some, node=node)
        gone.extend(key.digest for key in some)
        deleted(some)

    async def listing() -> AsyncGenerator[list[ObjectInfo], None]:
        waiting: list[Key] = []  # to be deleted, until they fill one set of requests
        async with aclosing(list_objects(store, layout, report=report)) as batches:
            async for infos in batches:
                yield infos
                waiting += [key_of_object(layout, info.name) for info in choose(infos)]
                if len(waiting) >= DELETE_AT_A_TIME * _REQUESTS_AT_A_TIME:
                    await delete(waiting)
                    waiting = []
        await delete(waiting)

    return await rebuild(store, layout, folder=folder, listing=listing(), gone=gone)


async def find_objects(
    store: Store, layout: Layout, keys: Iterable[Key], *, report: Report = unreported
) -> dict[Key, ObjectInfo | None]:
    """Find the objects of some entries, with one request each; None for an absent object.

    Args:
        report: Called with the number of entries that were checked.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    wanted = list(dict.fromkeys(keys))
    looked = itertools.count(1)

    async def find(key: Key) -> ObjectInfo | None:
        info = await store.head(layout.object(key))
        report("looking", next(looked), len(wanted))
        return info

    return dict(zip(wanted, await in_parallel(wanted, find), strict=True))


@dataclass(slots=True)
class Contents:
    """What a namespace holds.

    Attributes:
        objects: How many objects there are in all.
        nbytes: Their size.
        entries: Objects below ``objects/``.
        entry_nbytes: Their size.
        others: Objects that s3ec did not put there.
        stored_s: When an object outside the index was last written, by the server's clock; 0 if
            the server does not say.
    """

    objects: int = 0
    nbytes: int = 0
    entries: int = 0
    entry_nbytes: int = 0
    others: int = 0
    stored_s: float = 0.0

    def idle_s(self, now_s: float) -> float | None:
        """Seconds since the last write outside the index; None if the store does not say."""
        return now_s - self.stored_s if self.stored_s else None

    def add(self, layout: Layout, info: ObjectInfo) -> None:
        """Count one object.

        Writes to the index are no sign of use: deleting entries and merging deltas write there too.
        """
        self.objects += 1
        self.nbytes += info.nbytes
        if info.name.startswith(layout.manifest):
            return
        self.stored_s = max(self.stored_s, info.modified_s)
        if info.name.startswith(layout.objects):
            self.entries += 1
            self.entry_nbytes += info.nbytes
        elif not info.name.startswith((layout.descriptor, layout.modalities, layout.catalog)):
            self.others += 1


async def survey(store: Store, layout: Layout, *, report: Report = unreported) -> Contents:
    """Count the objects of a namespace; if there are many, by listing 16 folders at a time.

    Args:
        report: Called with the number of counted objects.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    contents = Contents()

    async def prefixes() -> list[str]:
        folders = await list_folders(store, layout.everything)
        others = [folder for folder in folders if folder != layout.objects]
        return [layout.descriptor, *others, *await list_folders(store, layout.objects)]

    async with aclosing(list_side_by_side(store, layout.everything, prefixes)) as batches:
        async for infos in batches:
            for info in infos:
                # Foreign objects beside the folders do not count, however they are listed.
                above = info.name.rpartition("/")[0] + "/"
                if info.name == layout.descriptor or above not in (
                    layout.everything,
                    layout.objects,
                ):
                    contents.add(layout, info)
            report("listing objects", contents.objects, None)
    return contents


async def remove_namespace(
    store: Store, layout: Layout, idle_s: float, *, report: Report = unreported
) -> Contents:
    """Delete everything in a namespace, 1000 objects per request.

    Args:
        idle_s: Refuse if something was stored within so many seconds; 0 to skip this check.
        report: Called with the number of deleted objects.

    Returns:
        What was there.

    Raises:
        ConflictError: A process stored something just now, or during the removal; in the first
            case nothing was deleted.
        UnavailableError: The store does not answer now. Some objects are deleted; another call
            deletes the rest.
        AccessError: It refuses.
    """
    # Before the listing, which may take longer than `idle_s` and miss objects stored meanwhile.
    clock = ServerClock()
    if idle_s:
        await store.delete(await clock.ask(store, layout))
    contents = await survey(store, layout, report=report)
    age_s = clock.now_s() - contents.stored_s
    if idle_s and contents.stored_s and age_s < idle_s:
        raise ConflictError(
            f"something was stored in {layout.namespace} {max(age_s, 0):.0f} s ago, so an engine "
            "may be writing there; stop it and wait, or give a lower `--idle`"
        )
    done = 0

    async def delete(names: list[str]) -> None:
        nonlocal done
        await _delete(store, names)
        done += len(names)
        report("deleting", done, max(done, contents.objects))

    entries = list_side_by_side(store, layout.objects, lambda: list_folders(store, layout.objects))
    waiting: list[str] = []
    async with aclosing(entries) as batches:
        async for infos in batches:
            waiting += [info.name for info in infos]
            if len(waiting) >= DELETE_AT_A_TIME * _REQUESTS_AT_A_TIME:
                await delete(waiting)
                waiting = []
    await delete(waiting)
    rest = [info.name async for info in listed(store, layout.everything)]
    await delete([name for name in rest if name != layout.descriptor])
    left = [info.name async for info in listed(store, layout.everything)]
    if left not in ([], [layout.descriptor]):
        raise ConflictError(
            f"something was stored in {layout.namespace} while it was removed, such as {left[0]}; "
            "stop the engines that write there, and call it again"
        )
    await store.delete(layout.descriptor)
    return contents

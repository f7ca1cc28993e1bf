# SPDX-License-Identifier: Apache-2.0
"""Deletes entries, or a whole namespace: the objects go, and readers find out.

The engines of this node are told. Others get one 404 for a key, and the next listing leaves it
out. Of a namespace the entries go first and the descriptor last. What is broken off is completed
by the next attempt, which finds all that is left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from s3ec.counters import Report, unreported
from s3ec.errors import ConflictError, S3ECError
from s3ec.identity import Key, Layout
from s3ec.index import listing as listing_module
from s3ec.index.listing import (
    FEW,
    at_most,
    key_of_object,
    list_folders,
    list_objects,
    list_side_by_side,
    listed,
)
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Made, listing_snapshot, newest_rows
from s3ec.index.names import ServerClock
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store
from s3ec.store.concurrency import in_parallel

# Each takes a server half a second or more. S3 allows 3500 deletions a second below one prefix, and
# what it refuses for that is sent again.
_REQUESTS_AT_A_TIME = 10
# Deleting is slower than listing page after page, which leaves more of the server to it.
_PAGES_AHEAD = 16
# From so many entries on, one listing of all objects is tried first.
_MANY = 32


async def delete_entries(
    store: Store,
    layout: Layout,
    keys: Iterable[Key],
    *,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> None:
    """Delete some entries, 1,000 a request; those that are absent too.

    A request that fails does not stop the others.

    Args:
        node: This node's files, so that its engines are told; others learn by one 404 each.
        report: Told how many are gone.

    Raises:
        UnavailableError: The store does not answer now; some may be deleted.
        AccessError: It refuses.
    """
    every = list(dict.fromkeys(keys))
    done = 0
    errors: list[S3ECError] = []

    async def delete(start: int) -> None:
        nonlocal done
        batch = {layout.object(key): key for key in every[start : start + DELETE_AT_A_TIME]}
        left: dict[str, S3ECError] = {}
        try:
            left = await store.delete_many(list(batch))
            errors.extend(left.values())
        except S3ECError as exc:  # of the request as a whole: each may be there or not
            errors.append(exc)
            left = dict.fromkeys(batch, exc)
        gone = [key for name, key in batch.items() if name not in left]
        if node is not None and gone:
            await asyncio.to_thread(node.add_missing, [key.digest for key in gone])
        done += len(gone)
        report("deleting", done, len(every))

    starts = range(0, len(every), DELETE_AT_A_TIME)
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
    """Delete objects that a listing shows, while it is read; what is left becomes a snapshot.

    Args:
        choose: Given some listed objects, says which of them go.
        deleted: Told of entries that are gone.
        node: This node's files, so that its engines are told.
        folder: For temporary files, as of ``maker.listing_snapshot``.
        report: Told how many objects were looked at.

    Raises:
        UnavailableError, AccessError: As delete_entries. No snapshot is written.
        TierError: The folder for temporary files is full.
    """
    waiting: list[Key] = []  # what goes, until it fills the requests of a round
    async with listing_snapshot(store, layout, folder=folder) as snapshot:

        async def delete() -> None:
            some = waiting[: DELETE_AT_A_TIME * _REQUESTS_AT_A_TIME]
            del waiting[: len(some)]
            await delete_entries(store, layout, some, node=node)
            snapshot.deleted(some)
            deleted(some)

        expected = await newest_rows(store, layout)
        few = _PAGES_AHEAD * listing_module.FEW
        listing = list_objects(store, layout, report=report, expected=expected, few=few)
        async with aclosing(listing) as batches:
            async for infos in batches:
                await snapshot.add(infos)
                waiting += [key_of_object(layout, info.name) for info in choose(infos)]
                if len(waiting) >= DELETE_AT_A_TIME * _REQUESTS_AT_A_TIME:
                    await delete()
        while waiting:
            await delete()
        return await snapshot.commit()


async def find_objects(
    store: Store, layout: Layout, keys: Iterable[Key], *, report: Report = unreported
) -> dict[Key, ObjectInfo | None]:
    """The object of each of some entries; None for one that is not there.

    A request for each, 16 at a time; where many are asked for and few are there, one listing.

    Args:
        report: Told how many were looked for.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    wanted = list(dict.fromkeys(keys))
    if len(wanted) > _MANY:
        few = await at_most(store, layout.objects, FEW)
        if few is not None:
            there = {info.name: info for info in few}
            return {key: there.get(layout.object(key)) for key in wanted}
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
        entries: Objects below ``objects/``.
        entry_nbytes: Their size.
        index_files: Objects of the index.
        index_nbytes: Their size.
        records: ``namespace.json`` and what is below ``modality/`` and ``catalog/``.
        others: Objects that s3ec did not put there.
        nbytes: Size of everything.
        stored_s: When an entry or a record was last written, by the server's clock; 0 where it
            does not say.
    """

    entries: int = 0
    entry_nbytes: int = 0
    index_files: int = 0
    index_nbytes: int = 0
    records: int = 0
    others: int = 0
    nbytes: int = 0
    stored_s: float = 0.0

    @property
    def objects(self) -> int:
        """How many objects there are in all."""
        return self.entries + self.index_files + self.records + self.others

    def idle_s(self, now_s: float) -> float | None:
        """Seconds since something was stored, None where the store does not say."""
        return now_s - self.stored_s if self.stored_s else None

    def add(self, layout: Layout, info: ObjectInfo) -> None:
        """Count one object.

        The index is no sign of life: deleting entries and merging what is known write there too.
        """
        self.nbytes += info.nbytes
        if info.name.startswith(layout.manifest):
            self.index_files += 1
            self.index_nbytes += info.nbytes
            return
        self.stored_s = max(self.stored_s, info.modified_s)
        if info.name.startswith(layout.objects):
            self.entries += 1
            self.entry_nbytes += info.nbytes
        elif info.name == layout.descriptor or info.name.startswith(
            (layout.modalities, layout.catalog)
        ):
            self.records += 1
        else:
            self.others += 1


async def survey(store: Store, layout: Layout, *, report: Report = unreported) -> Contents:
    """Count what is in a namespace; if that is much, by listing 16 of its folders at a time.

    Args:
        report: Told how many objects were counted.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    contents = Contents()
    expected: int | None = None

    async def prefixes() -> list[str]:
        nonlocal expected
        expected = await newest_rows(store, layout)
        folders = await list_folders(store, layout.everything)
        others = [folder for folder in folders if folder != layout.objects]
        return [*others, *await list_folders(store, layout.objects)]

    listing = list_side_by_side(store, layout.everything, prefixes)
    has_descriptor = False
    async with aclosing(listing) as batches:
        async for infos in batches:
            for info in infos:
                has_descriptor = has_descriptor or info.name == layout.descriptor
                # What lies in none of the folders does not count, however it is listed.
                above = info.name.rpartition("/")[0] + "/"
                if info.name == layout.descriptor or above not in (
                    layout.everything,
                    layout.objects,
                ):
                    contents.add(layout, info)
            report("listing objects", contents.objects, expected)
    # It lies in none of the folders, so a namespace that is read by folders leaves it out.
    if not has_descriptor and (descriptor := await store.head(layout.descriptor)) is not None:
        contents.add(layout, descriptor)
    return contents


async def remove_namespace(
    store: Store, layout: Layout, idle_s: float, *, report: Report = unreported
) -> Contents:
    """Delete everything in a namespace, 1000 objects a request.

    Args:
        idle_s: Refuse where something was stored so short a time ago; 0 to ask for nothing.
        report: Told how many objects are gone.

    Returns:
        What was there.

    Raises:
        ConflictError: Somebody stored something just now, or while it was removed; in the first
            case nothing was deleted.
        UnavailableError: The store does not answer now. Some is deleted; calling again goes on.
        AccessError: It refuses.
    """
    # Before it is listed, which may take longer than `idle_s`: what comes meanwhile is not seen.
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
    waiting: list[str] = []  # until they fill a request
    done = 0

    async def remove(prefix: str) -> None:
        async for info in listed(store, prefix):
            if info.name != layout.descriptor:
                waiting.append(info.name)
            if len(waiting) >= DELETE_AT_A_TIME:
                await delete()

    async def delete() -> None:
        nonlocal done
        names = waiting[:DELETE_AT_A_TIME]
        del waiting[:DELETE_AT_A_TIME]
        for error in (await store.delete_many(names)).values():
            raise error
        done += len(names)
        report("deleting", done, max(done, contents.objects))

    if contents.entries > FEW:  # side by side, then what is left
        await in_parallel(await list_folders(store, layout.objects), remove)
        await delete()
    for prefix in (layout.objects, layout.everything):
        await remove(prefix)
        await delete()
    left = [info.name async for info in listed(store, layout.everything)]
    if left not in ([], [layout.descriptor]):
        raise ConflictError(
            f"something was stored in {layout.namespace} while it was removed, such as {left[0]}; "
            "stop the engines that write there, and call it again"
        )
    await store.delete(layout.descriptor)
    return contents

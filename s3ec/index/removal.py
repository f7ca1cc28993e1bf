# SPDX-License-Identifier: Apache-2.0
"""Removes a whole namespace: entries first, then the index, the records, the descriptor last.

Whatever breaks it off, the rest is found and removed by the next attempt: a namespace is there for
as long as one object of it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from s3ec.counters import Report, unreported
from s3ec.errors import ConflictError
from s3ec.identity import Layout
from s3ec.index.cleaning import server_time
from s3ec.index.deletion import expected_entries
from s3ec.index.object_listing import listed
from s3ec.index.parallel import in_parallel
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store


@dataclass(slots=True)
class Contents:
    """What a namespace holds.

    Attributes:
        entries: Objects below ``objects/``, revisions included.
        entry_nbytes: Their size.
        index_files: Objects of the index.
        index_nbytes: Their size.
        records: ``namespace.json`` and what is below ``modality/``.
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
        elif info.name == layout.descriptor or info.name.startswith(layout.modalities):
            self.records += 1
        else:
            self.others += 1


async def survey(store: Store, layout: Layout, *, report: Report = unreported) -> Contents:
    """Count what is in a namespace, by a listing of its folders, 16 at a time.

    Args:
        report: Told how many objects were counted.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    contents = Contents()
    expected = await expected_entries(store, layout)

    async def count(folder: str) -> None:
        async for info in listed(store, folder):
            contents.add(layout, info)
            if contents.objects % DELETE_AT_A_TIME == 0:
                report("listing objects", contents.objects, expected)

    folders = await _folders(store, layout.everything)
    await in_parallel([folder for folder in folders if folder != layout.objects], count)
    await in_parallel(await _folders(store, layout.objects), count)
    descriptor = await store.head(layout.descriptor)
    if descriptor is not None:
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
    contents = await survey(store, layout, report=report)
    await _require_idle(store, layout, contents, idle_s)
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

    await in_parallel(await _folders(store, layout.objects), remove)
    await delete()
    # Of the index the heads first: without one, readers look for no base.
    for prefix in (layout.objects, layout.heads, layout.manifest, layout.everything):
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


async def _folders(store: Store, prefix: str) -> list[str]:
    return [prefix + folder for folder in await store.list_folders(prefix)]


async def _require_idle(store: Store, layout: Layout, contents: Contents, idle_s: float) -> None:
    if not idle_s or not contents.stored_s:
        return
    age_s = await server_time(store) - contents.stored_s
    if age_s < idle_s:
        raise ConflictError(
            f"something was stored in {layout.namespace} {max(age_s, 0):.0f} s ago, so an engine "
            "may be writing there; stop it and wait, or give a lower `--idle`"
        )

# SPDX-License-Identifier: Apache-2.0
"""Deletes entries, or a whole namespace.

Of an entry a first tombstone is told, then its objects go, then a second tombstone is told;
``Deleter`` says why. Of a namespace the entries go first, then the index, the records, and the
descriptor last. What is broken off is completed by the next attempt, which finds all that is left.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from s3ec.counters import Counters, Report, unreported
from s3ec.errors import AccessError, ConflictError, S3ECError, UnavailableError
from s3ec.identity import Key, Layout
from s3ec.index import listing as listing_module
from s3ec.index.announce import Announcer
from s3ec.index.base_writer import in_temporary_folder, server_time
from s3ec.index.listing import (
    FEW,
    at_most,
    key_of_object,
    list_folders,
    list_objects,
    list_side_by_side,
    listed,
)
from s3ec.index.manifest import indexed_entries
from s3ec.index.merged_rows import DELTAS, LastModifiedIndex
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store
from s3ec.store.concurrency import in_parallel


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
        expected = await indexed_entries(store, layout)
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
    now_s = await server_time(store) if idle_s else 0.0
    contents = await survey(store, layout, report=report)
    age_s = now_s - contents.stored_s
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


FLUSH_S = 60.0
"""An announcement takes no longer where the bucket answers at all."""
# How long it is found out what a request without an answer has left.
_LOOK_S = 10.0
# Deleting is slower than listing page after page, which leaves more of the server to it.
_PAGES_AHEAD = 16
# From so many entries on, one listing of all objects is tried first.
_MANY = 32
ROUND_OBJECTS = 2500
"""Objects that are deleted before readers are told; their tombstones are 105 kB."""
# The first tombstone is so much earlier than the second: times of rows are whole seconds.
_APART_S = 1
_UNHIDDEN = "nothing was deleted, since readers could not be told"
_UNTOLD = (
    "readers could not be told what is deleted and what is not: they find out by asking for it; "
    "`s3ec manifest rebuild` tells them"
)
# Each takes a server half a second or more. S3 allows 3500 deletions a second below one prefix, and
# what it refuses for that is sent again.
_REQUESTS_AT_A_TIME = 10
# While the objects of one round are deleted, readers are told of another one.
_ROUNDS_AT_A_TIME = 4


class Deleter:
    """Deletes entries in rounds of up to 2500 objects; made by ``deleting``.

    States of an entry:

    =======  =======  ========================================================================
    state    goes to  when
    =======  =======  ========================================================================
    stored   hidden   a first tombstone of its round is confirmed
    hidden   gone     its object is deleted, and a second tombstone is confirmed
    hidden   stored   the bucket kept the object, or did not say: its row is announced again
    =======  =======  ========================================================================

    **Why a tombstone first.** Who has heard it asks for nothing that is going. A process that is
    killed in between leaves objects that no reader knows of. The next ``gc`` lists and deletes
    them, and who encodes such a picture finds its object and announces it again. With the objects
    first it would leave up to a round of rows without an object, each of which costs every reader
    a request in vain.

    **Why another one behind.** A producer that has heard the first one stores the entry again. If
    its conditional write comes before the deletion, it finds the object and announces that. Its row
    is one second later than the tombstone that it knew, and would stay when the object is gone.
    So the first tombstone is dated a second before the deletion is asked for, and the second one
    with the deletion: among equal times a deletion counts. If the write comes after the deletion,
    the object is there, and its row is dated after the second tombstone and wins.

    A row that wins by mistake, such as by a clock that jumped, is no harm: a reader gets a 404,
    holds the key for absent for 60 s, and the next producer stores it. No order of these steps can
    give a wrong tensor, since a name stands for the same bytes for ever.

    A request that fails does not stop the others of its round. The error is raised at the end of
    the round, and no other round begins. Calls of ``delete`` may overlap if no entry is in two of
    them; together they have 10 requests under way.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        announcer: Announcer,
        times: LastModifiedIndex,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._layout = layout
        self._announcer = announcer
        self._times = times
        self._clock = clock
        self._requests = asyncio.Semaphore(_REQUESTS_AT_A_TIME)

    async def delete(self, keys: Iterable[Key], *, report: Report = unreported) -> None:
        """Delete some entries, those that are absent too, and announce that.

        One request for each 1000 objects, and two announcements for each round.

        Args:
            report: Told how many entries are gone.

        Raises:
            UnavailableError: The store does not answer now. Readers know what is deleted and what
                is not, unless the message says otherwise.
            AccessError: It refuses.
        """
        every = list(dict.fromkeys(keys))
        done = 0

        def count(entries: int) -> None:
            nonlocal done
            done += entries
            report("deleting", done, len(every))

        for start in range(0, len(every), ROUND_OBJECTS):
            await self._delete_round(every[start : start + ROUND_OBJECTS], count)

    async def _delete_round(self, keys: Sequence[Key], count: Callable[[int], None]) -> None:
        await self._times.prepare(keys)
        gone: set[Key] = set()
        asked_s = self._clock()
        confirmed: list[bool] = []
        errors: list[S3ECError] = []
        try:
            for key in keys:
                self._announcer.add(key, None, confirmed.append, at_s=asked_s - _APART_S)
            await _flush(self._announcer, _UNHIDDEN)
            if not all(confirmed):
                raise UnavailableError(_UNHIDDEN)
            asked_s = self._clock()
            errors = await self._delete_objects(keys, gone, count, confirmed)
        finally:
            for key in keys:
                if key not in gone:
                    self._show(key, confirmed)
            await _flush(self._announcer, _UNTOLD)
        if errors:
            raise errors[0]
        if not all(confirmed):
            raise UnavailableError("the deletion could not be announced")

    async def _delete_objects(
        self,
        keys: Sequence[Key],
        gone: set[Key],
        count: Callable[[int], None],
        confirmed: list[bool],
    ) -> list[S3ECError]:
        """Delete the objects of hidden entries, and announce those that are gone.

        Args:
            gone: Gets those that are.
            confirmed: Gets whether each announcement is confirmed, by the next flush.

        Returns:
            Why some are left, in the order of the requests.
        """
        batches = _equal_batches(keys)
        errors: dict[int, S3ECError] = {}
        unknown: set[Key] = set()  # there was no answer about them
        asked_s = self._clock()  # for the last one

        async def delete(number: int) -> None:
            async with self._requests:
                await request(number)

        async def request(number: int) -> None:
            """Note errors and do not raise them, so that the other requests can end."""
            nonlocal asked_s
            batch = {self._layout.object(key): key for key in batches[number]}
            # Before the request, so that its time is before that of whoever stores an entry again.
            at_s = asked_s = self._clock()
            refused: set[Key] = set()
            unanswered = set(batch.values())
            try:
                left = await self._store.delete_many(list(batch))
                refused = {batch[n] for n, exc in left.items() if isinstance(exc, AccessError)}
                unanswered = {
                    batch[n] for n, exc in left.items() if isinstance(exc, UnavailableError)
                }
                if left:
                    errors[number] = next(iter(left.values()))
                else:
                    count(len(batch))
            except S3ECError as exc:  # of the request as a whole
                errors[number] = exc
                if isinstance(exc, AccessError):
                    refused, unanswered = unanswered, set()
            finally:
                # Before anything is awaited: it may be broken off here.
                self._hide(set(batch.values()) - refused - unanswered, at_s, gone, confirmed)
                unknown.update(unanswered)

        try:
            await in_parallel(range(len(batches)), delete, width=len(batches))
        finally:
            self._hide(await self._gone(unknown), asked_s, gone, confirmed)
        return [errors[number] for number in sorted(errors)]

    def _hide(
        self, keys: Iterable[Key], at_s: float, gone: set[Key], confirmed: list[bool]
    ) -> None:
        """Announce the second tombstone of some entries, later than the first one."""
        for key in keys:
            gone.add(key)
            known_s = self._times(key) + _APART_S
            self._announcer.add(key, None, confirmed.append, at_s=at_s, known_s=known_s)

    def _show(self, key: Key, confirmed: list[bool]) -> None:
        """Announce an entry again that is still there, as the index knew it."""
        facts = self._times.facts(key)
        if facts is not None:
            known_s = self._times(key) + _APART_S
            self._announcer.add(key, facts, confirmed.append, known_s=known_s)

    async def _gone(self, keys: Iterable[Key]) -> list[Key]:
        """Those that are not there. After a request without an answer only the bucket knows.

        What it does not tell is shown again: readers find out by asking for it.
        """
        gone: list[Key] = []

        async def look(key: Key) -> None:
            with suppress(UnavailableError, AccessError):
                if await self._store.head(self._layout.object(key)) is None:
                    gone.append(key)

        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await in_parallel(keys, look)
        return gone


def _equal_batches(keys: Sequence[Key]) -> list[Sequence[Key]]:
    """Divide entries among as few requests as possible, of about equal size."""
    requests = -(-len(keys) // DELETE_AT_A_TIME)
    size = -(-len(keys) // requests)
    return [keys[start : start + size] for start in range(0, len(keys), size)]


async def _flush(announcer: Announcer, otherwise: str) -> None:
    """Wait until readers are told, and give up where the bucket does not take it.

    Args:
        otherwise: What to say then.

    Raises:
        UnavailableError: It was given up.
    """
    count = len(announcer)
    try:
        async with asyncio.timeout(FLUSH_S):
            await announcer.flush()
    except TimeoutError as exc:
        announcer.close()
        raise UnavailableError(f"{count} entries: {otherwise}") from exc


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
    async with in_temporary_folder(None, DELTAS) as folder:
        times = LastModifiedIndex(store, layout, folder)
        await times.open()
        announcer = Announcer(
            store,
            layout,
            Counters(),
            known_time_s=times,
            clock=clock,
            batch_s=math.inf,  # a round ends with a flush
            batch_items=ROUND_OBJECTS,
        )
        try:
            yield Deleter(store, layout, announcer, times, clock)
        finally:
            try:
                if len(announcer):  # broken off while it was told
                    await _flush(announcer, _UNTOLD)
            finally:
                announcer.close()


async def delete_entries(
    store: Store,
    layout: Layout,
    keys: Iterable[Key],
    *,
    report: Report = unreported,
    clock: Callable[[], float] = time.time,
) -> None:
    """Delete some entries, and announce that; those that are absent too.

    Args:
        report: Told how many entries are gone.
        clock: Seconds since the epoch.

    Raises:
        UnavailableError, AccessError: As Deleter.delete.
        TierError: As deleting.
    """
    async with deleting(store, layout, clock=clock) as deleter:
        await deleter.delete(keys, report=report)


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


async def delete_chosen(
    store: Store,
    layout: Layout,
    choose: Callable[[Sequence[ObjectInfo]], Sequence[ObjectInfo]],
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    report: Report = unreported,
) -> None:
    """Delete objects that an authoritative listing shows, while it is still being read.

    Rounds have 2500 objects, and four of them overlap.

    Args:
        choose: Given some listed objects, says which of them go.
        deleted: Told of entries that are gone, and whose deletion is announced.
        report: Told how many objects were looked at.

    Raises:
        UnavailableError: The store does not answer now; some may be deleted and announced.
        AccessError: It refuses.
        TierError: As deleting.
    """
    waiting: list[Key] = []  # what goes, until it fills a round
    rounds: list[asyncio.Task[None]] = []
    async with deleting(store, layout) as deleter:

        async def delete(keys: Sequence[Key]) -> None:
            await deleter.delete(keys)
            deleted(keys)

        def has_no_room() -> bool:
            return len(rounds) == _ROUNDS_AT_A_TIME and not any(each.done() for each in rounds)

        async def begin() -> None:
            """Begin a round, when there is room for one."""
            if len(rounds) == _ROUNDS_AT_A_TIME:
                await asyncio.wait(rounds, return_when=asyncio.FIRST_COMPLETED)
            for each in [one for one in rounds if one.done()]:
                rounds.remove(each)
                await each  # after one that failed no other begins
            some = waiting[:ROUND_OBJECTS]
            del waiting[:ROUND_OBJECTS]
            rounds.append(asyncio.create_task(delete(some), name="s3ec-delete"))

        expected = await indexed_entries(store, layout)
        listing = list_objects(
            store, layout, report=report, expected=expected, few=_PAGES_AHEAD * listing_module.FEW
        )
        try:
            async with aclosing(listing) as batches:
                async for infos in batches:
                    waiting += [key_of_object(layout, info.name) for info in choose(infos)]
                    while len(waiting) >= ROUND_OBJECTS * (1 + has_no_room()):
                        await begin()
            while waiting:
                await begin()
            for each in rounds:
                await each
        except UnavailableError:  # what has begun is told
            await _ended(rounds)
            raise
        finally:
            for each in rounds:
                each.cancel()
            await _ended(rounds)


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until some tasks have ended, however that was."""
    await asyncio.gather(*tasks, return_exceptions=True)

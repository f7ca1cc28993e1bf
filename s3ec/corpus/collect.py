# SPDX-License-Identifier: Apache-2.0
"""Deletes the entries of a namespace that are not needed: old ones, or too many.

A bucket knows when an object was stored, and nothing of its use.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from s3ec.corpus.entries import CorpusEntry, entries_of
from s3ec.corpus.makers import MadeBy, names_made_by, open_makers
from s3ec.counters import Report, unreported
from s3ec.errors import AccessError, ConfigError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index.delete import delete_chosen
from s3ec.index.listing import list_objects
from s3ec.index.local import NodeFolder
from s3ec.index.names import ServerClock
from s3ec.store.base import ObjectInfo, Store
from s3ec.tenant import Tenant

# When it was stored, and what tells equals apart.
Rank = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Rules:
    """What goes: that which all rules that are given agree on.

    Attributes:
        older_than_s: Stored so long ago.
        max_bytes: The oldest, until the rest of what lies below ``adapter`` fits.
        adapter: Only what lies in the folder of this LoRA adapter; None for everything.
        made_by: Only what was made so.
    """

    older_than_s: float | None = None
    max_bytes: int | None = None
    adapter: str | None = None
    made_by: MadeBy | None = None

    def check(self) -> None:
        """Raise ConfigError where they are no rules to delete by."""
        if self.older_than_s is None and self.max_bytes is None and self.made_by is None:
            raise ConfigError(
                "nothing says what is to go; give `--older-than`, `--max-bytes` or `--made-by`",
                field="older_than",
            )


@dataclass(slots=True)
class Choice:
    """Which objects go, and how many that were.

    Attributes:
        rules: The rules.
        layout: The namespace.
        now_s: Ages count to here. With ``max_bytes`` or ``made_by`` nothing goes that was stored
            later.
        last: With ``max_bytes`` the last one that goes by rank; None where all go or none was
            found yet.
        names: With ``made_by`` the objects that were made so; None without.
        objects: That go.
        nbytes: Their size.
        left_objects: That stay, of those below the adapter's folder.
        left_bytes: Their size.
    """

    rules: Rules
    layout: Layout
    now_s: float
    last: Rank | None = None
    names: Set[str] | None = None
    objects: int = 0
    nbytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0

    def __call__(self, infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Those of some listed objects that go; they are counted."""
        chosen = []
        for info in infos:
            if not self._is_below(info):
                continue
            if self._agrees(info) and (self.last is None or _rank(info) <= self.last):
                chosen.append(info)
                self.objects += 1
                self.nbytes += info.nbytes
            else:
                self.left_objects += 1
                self.left_bytes += info.nbytes
        return chosen

    def _is_below(self, info: ObjectInfo) -> bool:
        adapter = self.rules.adapter
        return adapter is None or info.name.startswith(f"{self.layout.objects}{adapter}/")

    def _agrees(self, info: ObjectInfo) -> bool:
        """Whether its age lets it go. One without a time stays."""
        rules = self.rules
        age_s = self.now_s - info.modified_s
        is_counted = rules.max_bytes is not None or self.names is not None
        if not info.modified_s or (is_counted and age_s < 0):
            return False
        if self.names is not None and info.name not in self.names:
            return False
        return rules.older_than_s is None or age_s > rules.older_than_s


def _rank(info: ObjectInfo) -> Rank:
    """The lowest goes first."""
    return info.modified_s, info.name


async def choose(
    store: Store,
    layout: Layout,
    rules: Rules,
    now_s: float,
    *,
    tenant: Tenant | None = None,
    headers: Callable[[int], object] = lambda count: None,
    report: Report = unreported,
) -> Choice:
    """Find out by a listing what would go, and count it; changes nothing.

    With ``made_by`` there is one more listing, and a request for each entry of which the catalogue
    does not say what made it.

    Memory: with ``max_bytes`` some 150 bytes for each object that the other rules let go, with
    ``made_by`` some 500.

    Args:
        now_s: Ages count to here.
        tenant: Whose secret is in the names.
        headers: Told how many headers will be read, before the first one is.
        report: Told how many objects were looked at.

    Raises:
        ConfigError: As Rules.check.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    rules.check()
    choice = Choice(rules, layout, now_s)
    if rules.made_by is not None:
        names = await _made_by(store, choice, rules.made_by, tenant, headers, report)
        choice = Choice(rules, layout, now_s, names=names)
    found: list[tuple[Rank, int]] = []
    async with aclosing(list_objects(store, layout, report=report)) as batches:
        async for infos in batches:
            chosen = choice(infos)
            if rules.max_bytes is not None:
                found += [(_rank(info), info.nbytes) for info in chosen]
    if rules.max_bytes is None:
        return choice
    return _until_the_rest_fits(choice, found, rules.max_bytes)


async def _made_by(
    store: Store,
    choice: Choice,
    wanted: MadeBy,
    tenant: Tenant | None,
    headers: Callable[[int], object],
    report: Report,
) -> set[str]:
    """Of what the other rules choose, the objects that were made so."""
    makers = await open_makers(store, choice.layout, tenant)
    listing = list_objects(store, choice.layout, report=report)
    async with aclosing(listing) as batches:

        async def entries() -> AsyncIterator[list[CorpusEntry]]:
            async for infos in batches:
                yield list(entries_of(choice.layout, choice(infos)))

        return await names_made_by(store, wanted, makers, entries(), headers=headers, report=report)


def _until_the_rest_fits(choice: Choice, found: list[tuple[Rank, int]], most: int) -> Choice:
    """The same choice, with the last one that has to go."""
    surplus = choice.left_bytes + choice.nbytes - most
    found.sort()
    sums = np.cumsum([nbytes for _, nbytes in found], dtype=np.int64)
    count = 0 if surplus <= 0 else min(int(np.searchsorted(sums, surplus)) + 1, len(found))
    gone = int(sums[count - 1]) if count else 0
    return replace(
        choice,
        last=found[count - 1][0] if count else (-math.inf, ""),
        objects=count,
        nbytes=gone,
        left_objects=choice.left_objects + len(found) - count,
        left_bytes=choice.left_bytes + choice.nbytes - gone,
    )


async def collect(
    store: Store,
    layout: Layout,
    choice: Choice,
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Choice:
    """Delete what ``choose`` has chosen, as a listing of now shows it.

    What was stored or deleted since is left alone. What is left becomes a snapshot of the index.

    Args:
        choice: By choose.
        deleted: Told of entries that are gone.
        node: This node's files of the index, so that its engines are told.
        report: Told how many objects were looked at.

    Returns:
        What went.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses; some may be
            deleted, and no snapshot is written.
        TierError: The folder for temporary files is full.
    """
    done = replace(choice, objects=0, nbytes=0, left_objects=0, left_bytes=0)
    await delete_chosen(store, layout, done, deleted=deleted, node=node, report=report)
    return done


@dataclass(frozen=True, slots=True)
class Collection:
    """What ``Corpus.gc`` found, and whether it is gone.

    Attributes:
        namespace: Where.
        objects: That went, or would in a dry run.
        nbytes: Their size.
        left_objects: That stay, of those that the adapter's rule leaves.
        left_bytes: Their size.
        done: Whether they were deleted; False of a dry run.
        dropped_rows: Rows of the catalogue that went with them.
        problem: Why the catalogue's rows are left, empty where they are not.
    """

    namespace: str
    objects: int
    nbytes: int
    left_objects: int
    left_bytes: int
    done: bool
    dropped_rows: int = 0
    problem: str = ""


async def collect_garbage(
    store: Store,
    layout: Layout,
    rules: Rules,
    *,
    tenant: Tenant | None,
    dry_run: bool,
    node: NodeFolder | None = None,
    headers: Callable[[int], object] = lambda count: None,
    report: Report = unreported,
    clock: Callable[[], float] = time.time,
) -> Collection:
    """Choose and delete, or only count.

    Args:
        store: The bucket.
        rules: What goes.
        tenant: Whose secret is in the names.
        dry_run: Only say what would go.
        node: As for collect.
        headers: As for choose.
        report: Told how many objects were looked at.
        clock: Seconds since the epoch; for a dry run, which writes nothing to ask the server.

    Raises:
        ConfigError, UnavailableError, AccessError, TierError: As choose and collect.
    """
    # The times of objects are the server's: a clock of ours that is ahead would make them old.
    now_s = clock() if dry_run else await _server_time_s(store, layout)
    rules.check()
    choice = Choice(rules, layout, now_s)
    if dry_run or rules.max_bytes is not None or rules.made_by is not None:
        choice = await choose(
            store, layout, rules, now_s, tenant=tenant, headers=headers, report=report
        )
    if dry_run:
        return _collection(choice, done=False)
    names: set[str] = set()
    done = await collect(
        store,
        layout,
        choice,
        deleted=lambda keys: names.update(key.name for key in keys),
        node=node,
        report=report,
    )
    dropped, problem = await drop_deleted_rows(store, layout, names, tenant)
    return _collection(done, done=True, dropped_rows=dropped, problem=problem)


async def _server_time_s(store: Store, layout: Layout) -> float:
    server = ServerClock()
    await server.ask(store, layout)
    return server.now_s()


def _collection(
    choice: Choice, *, done: bool, dropped_rows: int = 0, problem: str = ""
) -> Collection:
    return Collection(
        choice.layout.namespace,
        choice.objects,
        choice.nbytes,
        choice.left_objects,
        choice.left_bytes,
        done,
        dropped_rows,
        problem,
    )


async def drop_deleted_rows(
    store: Store, layout: Layout, names: Set[str], tenant: Tenant | None
) -> tuple[int, str]:
    """Drop the catalogue's rows of entries that were deleted, and were not stored again since.

    Costs a listing where there is no catalogue, and else to read and write it, and a HEAD for each
    of these entries that it has.

    Args:
        names: Of the entries' objects, below ``objects/``.
        tenant: Whose secret is in the names.

    Returns:
        How many, and why they are left: the extra is missing, or the store does not answer; empty
        where they are not.
    """
    from s3ec.corpus.catalog import drop_rows, list_parts

    def was_deleted(identifier: str) -> bool:
        key = make_key(identifier, tenant)
        return key is not None and key.name in names

    try:
        if not names or not await list_parts(store, layout):
            return 0, ""
        return await drop_rows(store, layout, was_deleted, tenant=tenant), ""
    except (ConfigError, UnavailableError, AccessError) as exc:
        return 0, str(exc)

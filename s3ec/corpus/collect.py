# SPDX-License-Identifier: Apache-2.0
"""Deletes entries of a namespace: those that are named, old ones, or the oldest of too many.

A bucket knows when an object was stored, and nothing of its use.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from s3ec.corpus.entries import CorpusEntry, entries_of
from s3ec.corpus.makers import MadeBy, names_made_by
from s3ec.counters import Report, unreported
from s3ec.errors import AccessError, ConfigError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index.delete import delete_chosen, delete_entries, find_objects
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
class Collection:
    """Which objects go, how many that were, and whether they are gone.

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
        done: Whether they were deleted; False of a dry run.
        dropped_rows: Rows of the catalogue that went with them.
        problem: Why the catalogue's rows are left, empty where they are not.
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
    done: bool = False
    dropped_rows: int = 0
    problem: str = ""

    @property
    def namespace(self) -> str:
        """Where."""
        return self.layout.namespace

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
    headers: Callable[[int], object] = lambda count: None,
    report: Report = unreported,
) -> Collection:
    """Find out by a listing what would go, and count it; changes nothing.

    With ``made_by`` there is one more listing, and a request for each entry that the other rules
    let go. Memory: with ``max_bytes`` some 150 bytes for each object that the other rules let go,
    with ``made_by`` some 500.

    Args:
        now_s: Ages count to here.
        headers: Told how many headers will be read, before the first one is.
    """
    rules.check()
    choice = Collection(rules, layout, now_s)
    if rules.made_by is not None:
        names = await _made_by(store, choice, rules.made_by, headers, report)
        choice = Collection(rules, layout, now_s, names=names)
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
    choice: Collection,
    wanted: MadeBy,
    headers: Callable[[int], object],
    report: Report,
) -> set[str]:
    """Of what the other rules choose, the objects that were made so."""
    listing = list_objects(store, choice.layout, report=report)
    async with aclosing(listing) as batches:

        async def entries() -> AsyncIterator[list[CorpusEntry]]:
            async for infos in batches:
                yield list(entries_of(choice.layout, choice(infos)))

        return await names_made_by(store, wanted, entries(), headers=headers, report=report)


def _until_the_rest_fits(
    choice: Collection, found: list[tuple[Rank, int]], most: int
) -> Collection:
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
    choice: Collection,
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Collection:
    """Delete what ``choose`` has chosen, as a listing of now shows it; returns what went.

    What was stored or deleted since is left alone. What is left becomes a snapshot of the index;
    where this is broken off, none is written.

    Args:
        deleted: Told of entries that are gone.
        node: This node's files of the index, so that its engines are told.
    """
    done = replace(choice, objects=0, nbytes=0, left_objects=0, left_bytes=0)
    await delete_chosen(store, layout, done, deleted=deleted, node=node, report=report)
    return done


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
    """Choose and delete, or only count; see Corpus.gc.

    Args:
        tenant: Whose secret is in the names.
        clock: Seconds since the epoch; for a dry run, which writes nothing to ask the server.
    """
    # The times of objects are the server's: a clock of ours that is ahead would make them old.
    now_s = clock() if dry_run else await _server_time_s(store, layout)
    rules.check()
    choice = Collection(rules, layout, now_s)
    if dry_run or rules.max_bytes is not None or rules.made_by is not None:
        choice = await choose(store, layout, rules, now_s, headers=headers, report=report)
    if dry_run:
        return choice
    digests: set[bytes] = set()
    done = await collect(
        store,
        layout,
        choice,
        deleted=lambda keys: digests.update(key.digest for key in keys),
        node=node,
        report=report,
    )
    done.done = True
    done.dropped_rows, done.problem = await drop_deleted_rows(store, layout, digests, tenant)
    done.problem = done.problem or await _fold_catalog(store, layout)
    return done


async def _server_time_s(store: Store, layout: Layout) -> float:
    server = ServerClock()
    await server.ask(store, layout)
    return server.now_s()


@dataclass(frozen=True, slots=True)
class Deletion:
    """What ``Corpus.delete`` found, and whether it is gone.

    Attributes:
        namespace: Where.
        objects: The object of each identifier as it was; None where the entry was not there.
        done: Whether they were deleted; False of a dry run.
        dropped_rows: Rows of the catalogue that went with them.
        problem: Why the catalogue's rows are left, empty where they are not.
    """

    namespace: str
    objects: Mapping[str, ObjectInfo | None]
    done: bool
    dropped_rows: int = 0
    problem: str = ""

    @property
    def count(self) -> int:
        """Entries that were there; one that was named twice counts once."""
        return len({info.name for info in self.objects.values() if info})

    @property
    def nbytes(self) -> int:
        """Size of their objects together."""
        sizes = {info.name: info.nbytes for info in self.objects.values() if info}
        return sum(sizes.values())

    @property
    def absent(self) -> Sequence[str]:
        """Identifiers of which nothing was there."""
        return [identifier for identifier, info in self.objects.items() if not info]


async def delete(
    store: Store,
    layout: Layout,
    keys: Mapping[str, Key],
    *,
    tenant: Tenant | None,
    dry_run: bool,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Deletion:
    """Delete entries by their keys, and the catalogue's rows of them; see Corpus.delete.

    Args:
        keys: By what the caller calls them.
        tenant: Whose secret is in the names.
    """
    found = await find_objects(store, layout, keys.values(), report=report)
    by_text = {text: found[key] for text, key in keys.items()}
    if dry_run:
        return Deletion(layout.namespace, by_text, done=False)
    await delete_entries(store, layout, found, node=node, report=report)
    digests = {key.digest for key in keys.values()}
    dropped, problem = await drop_deleted_rows(store, layout, digests, tenant)
    return Deletion(layout.namespace, by_text, True, dropped, problem)


async def drop_deleted_rows(
    store: Store, layout: Layout, digests: Set[bytes], tenant: Tenant | None
) -> tuple[int, str]:
    """Drop the catalogue's rows of entries that were deleted, and were not stored again since.

    Costs a listing where there is no catalogue, and else to read and write it, and a HEAD for each
    of these entries that it has.

    Args:
        digests: Of the entries.

    Returns:
        How many, and why they are left: pyarrow is missing, or the store does not answer; empty
        where they are not.
    """
    from s3ec.corpus.catalog import CatalogWriter, list_parts

    def was_deleted(identifier: str) -> bool:
        key = make_key(identifier, tenant)
        return key is not None and key.digest in digests

    try:
        if not digests or not await list_parts(store, layout):
            return 0, ""
        return await CatalogWriter(store, layout).drop(was_deleted, tenant=tenant), ""
    except (ConfigError, UnavailableError, AccessError) as exc:
        return 0, str(exc)


async def _fold_catalog(store: Store, layout: Layout) -> str:
    """Make few parts of those that jobs left in the catalogue; returns why not, as above."""
    from s3ec.corpus.catalog import CatalogWriter, list_parts

    try:
        if len(await list_parts(store, layout)) > 1:
            await CatalogWriter(store, layout).fold(everything=True)
    except (ConfigError, UnavailableError, AccessError) as exc:
        return str(exc)
    return ""

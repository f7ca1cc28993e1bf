# SPDX-License-Identifier: Apache-2.0
"""Checks whether index, listing, objects and catalogue of a namespace agree, and repairs them.

``index.maker`` compares the index with a listing, this module compares the catalogue with the same
listing, and ``deep_check`` checks the bytes of the objects. An audit changes nothing. A repair:

- It reads a corrupt object again. If it is still whole and bad it is deleted at once.
- If index and listing differ, or an object was deleted, it rebuilds the index from a listing. So
  producers store deleted entries again.
- It checks again for the object of a row of the catalogue. If it is gone the row is dropped.

An object that could not be read is never deleted: a store that fails makes nothing corrupt. Nor is
an object of a newer format, nor anything that is no entry of the namespace, whatever an audit's
state says. Bad objects are not kept: nothing would ever read them, and the producer's copy replaces
them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from s3ec.corpus.deep_check import AuditState, BadObject, DeepCheck, check_object, check_objects
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, CorruptEntryError
from s3ec.identity import Key, Layout, is_object_name, make_key
from s3ec.index.delete import delete_entries
from s3ec.index.listing import key_of_object
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Verified, rebuild, verify
from s3ec.index.snapshot import Rows
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 20
# Small: between the check of an object and its deletion a process may store it again.
_AT_A_TIME = 256


@dataclass(slots=True)
class CatalogCheck:
    """How the catalogue compares with the listing.

    Attributes:
        rows: Rows of the catalogue, the newest of each document and place.
        gone: Rows whose entry has no object.
        unlisted: Entries without a row; that is no fault.
        gone_digests: Digests of the entries of the rows in ``gone``; zeros if nothing can be
            stored under an identifier.
        examples: Documents of some of these rows.
        problem: Why the catalogue cannot be read; empty if it can.
    """

    rows: int = 0
    gone: int = 0
    unlisted: int = 0
    gone_digests: set[bytes] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class Audit:
    """The result of an audit.

    Attributes:
        index: How the index compares with the listing.
        catalog: How the catalogue compares; None if there is none, or it was not checked.
        deep: The result of reading the objects; None if none was read.
    """

    index: Verified
    catalog: CatalogCheck | None = None
    deep: DeepCheck | None = None

    @property
    def agrees(self) -> bool:
        """True if the audit found no fault."""
        catalog_agrees = self.catalog is None or not (self.catalog.gone or self.catalog.problem)
        return (
            self.index.index_agrees and catalog_agrees and (self.deep is None or self.deep.agrees)
        )


async def audit(
    store: Store,
    layout: Layout,
    *,
    tenant: Tenant | None = None,
    catalog: bool = True,
    deep: bool = False,
    state: AuditState | None = None,
    report: Report = unreported,
) -> Audit:
    """Compare index, listing and catalogue of a namespace; see Corpus.verify.

    Memory: some 200 MiB for the index, 200 bytes for each row of the catalogue, and objects of 256
    MiB together, or one that is larger.

    Args:
        tenant: The tenant whose secret is in the names.
        state: Where a deep check resumes; None to begin and to keep nothing. After a failure of
            the store or the disk it has the progress.
    """
    # First the catalogue, then the listing: a row comes after its entry.
    rows = _CatalogRows(tenant)
    is_there, problem = False, ""
    if catalog:
        try:
            is_there = await rows.read(store, layout)
        except (ConfigError, CorruptEntryError) as exc:
            problem = str(exc)
    look = rows.look if is_there else None
    found = Audit(await verify(store, layout, look=look, report=report))
    if is_there:
        found.catalog = await rows.result(store, layout)
    elif problem:
        found.catalog = CatalogCheck(problem=problem)
    if deep:
        found.deep = await check_objects(
            store, layout, state, expected=found.index.objects, report=report
        )
    return found


# -- the catalogue -----------------------------------------------------------------------------


class _CatalogRows:
    """The entries of the catalogue's rows; a listing removes those that have an object."""

    def __init__(self, tenant: Tenant | None) -> None:
        self._tenant = tenant
        self._counts: dict[str, npt.NDArray[np.bool_]] = {}
        self._gone: set[bytes] = set()  # digests
        self._unlisted = 0

    async def read(self, store: Store, layout: Layout) -> bool:
        """Read the catalogue; False if there is none.

        Raises:
            ConfigError: pyarrow is missing.
            CorruptEntryError: None of its parts can be used.
        """
        from s3ec.corpus.catalog import list_parts, read_parts
        from s3ec.corpus.catalog_file import Winners

        if not await list_parts(store, layout):
            return False
        winners, ulids = Winners(), []
        digests: list[Sequence[bytes]] = []
        problems: list[CorruptEntryError] = []

        def take(table: pa.Table) -> None:
            winners.add(table)
            digests.append(list(self._digests(table)))

        async with aclosing(read_parts(store, layout, problem=problems.append)) as coming:
            async for ulid, table in coming:
                ulids.append(ulid)
                await asyncio.to_thread(take, table)
                del table
        if problems and not ulids:
            raise problems[0]
        self._counts = dict(zip(ulids, winners.masks(), strict=True))
        for some, mask in zip(digests, self._counts.values(), strict=True):
            self._gone.update(itertools.compress(some, mask))
        return True

    def _digests(self, table: pa.Table) -> Iterator[bytes]:
        """The digest of each row's entry; zeros for an identifier that can have no object."""
        for batch in table.column("identifier").chunks:
            for identifier in batch.to_pylist():
                key = make_key(identifier, self._tenant)
                yield bytes(16) if key is None else key.digest

    def look(self, there: Rows) -> None:
        """Note the entries of one range of the listing."""
        halves = np.stack([there.hi, there.lo], axis=1).astype(">u8").tobytes()
        found = {halves[at : at + 16] for at in range(0, len(halves), 16)}
        self._unlisted += len(found - self._gone)
        self._gone -= found

    async def result(self, store: Store, layout: Layout) -> CatalogCheck:
        """Return the result, after all ranges; parts are read again to count rows that are gone."""
        from s3ec.corpus.catalog import read_parts

        gone = self._gone
        total = sum(int(mask.sum()) for mask in self._counts.values())
        found = CatalogCheck(total, unlisted=self._unlisted, gone_digests=gone)

        def take(table: pa.Table, counts: npt.NDArray[np.bool_]) -> None:
            documents = table.column("document")
            for row, digest in enumerate(self._digests(table)):
                if counts[row] and digest in gone:
                    found.gone += 1
                    if len(found.examples) < _SHOWN:
                        found.examples.append(documents[row].as_py())

        async with aclosing(read_parts(store, layout, only=self._counts if gone else ())) as coming:
            async for ulid, table in coming:
                await asyncio.to_thread(take, table, self._counts[ulid])
        return found


# -- repair ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Repair:
    """The result of a repair.

    Attributes:
        deleted: Corrupt objects that were deleted.
        spared: Objects that an audit called corrupt, and that were good, gone or unreadable when
            they were read again, or are no entries of the namespace.
        snapshot: Name of the new snapshot of the index; empty if the old one was right.
        dropped: Rows of the catalogue that were dropped.
    """

    deleted: int = 0
    spared: int = 0
    snapshot: str = ""
    dropped: int = 0


async def repair(
    store: Store,
    layout: Layout,
    found: Audit,
    *,
    tenant: Tenant | None = None,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Repair:
    """Repair what ``audit`` found; see Corpus.repair. If interrupted, it can be repeated.

    Args:
        tenant: The tenant whose secret is in the names.
        node: This node's files of the index, where its engines read which entries were deleted.
    """
    done = Repair()
    if found.deep is not None and found.deep.bad:
        await _delete_corrupt(store, layout, found.deep.bad, done, node, report)
    if done.deleted or not found.index.index_agrees:
        done.snapshot = str((await rebuild(store, layout, report=report)).name)
    if found.catalog is not None and found.catalog.gone:
        from s3ec.corpus.catalog import CatalogWriter

        gone = found.catalog.gone_digests

        def is_gone(identifier: str) -> bool:
            key = make_key(identifier, tenant)
            return key is None or key.digest in gone

        done.dropped = await CatalogWriter(store, layout).drop(is_gone, tenant=tenant)
    return done


async def _delete_corrupt(
    store: Store,
    layout: Layout,
    bad: list[BadObject],
    done: Repair,
    node: NodeFolder | None,
    report: Report,
) -> None:
    """Delete the objects that are still corrupt, in batches."""
    names = list(dict.fromkeys(one.name for one in bad))

    async def look(name: str) -> Key | None:
        below = name.removeprefix(layout.objects)
        if not name.startswith(layout.objects) or not is_object_name(below):
            return None  # the state is a file, which any process may have written
        info = await store.head(name)
        kind = "gone" if info is None else (await check_object(store, layout, info)).kind
        return key_of_object(layout, name) if kind == "corrupt" else None

    for start in range(0, len(names), _AT_A_TIME):
        some = names[start : start + _AT_A_TIME]
        corrupt = [key for key in await in_parallel(some, look) if key is not None]
        await delete_entries(store, layout, corrupt, node=node)
        done.deleted += len(corrupt)
        done.spared += len(some) - len(corrupt)
        report("mending", start + len(some), len(names))

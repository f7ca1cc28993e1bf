# SPDX-License-Identifier: Apache-2.0
"""Mends what an audit found, with the owners of each kind of thing.

- A corrupt object is read again. If it still comes whole and bad it is deleted, and its entry is
  announced as deleted, so that producers store it again.
- Where index and listing differ the index is made anew from a listing. What it lacked is in it
  then, and what it only believed is not.
- The object of a row of the catalogue is looked for again. If it is gone the row is dropped.

What could not be read is never deleted: a store that fails makes nothing corrupt. Bad objects are
not kept aside. Nothing would ever read them, and the producer's copy is what makes good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3ec.corpus.deep_check import BadObject, check_object
from s3ec.identity import Key, Layout, make_key
from s3ec.index.base_writer import BuildOptions
from s3ec.index.delete import deleting
from s3ec.index.listing import key_of_object
from s3ec.index.rebuild import rebuild
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    from s3ec.corpus.audit import Audit


@dataclass(slots=True)
class Repair:
    """What was mended.

    Attributes:
        deleted: Corrupt objects.
        spared: Of those that were found corrupt: good, gone or unreadable when they were read
            again.
        version: Of the new base of the index; None where the old one was right.
        dropped: Rows of the catalogue.
    """

    deleted: int = 0
    spared: int = 0
    version: int | None = None
    dropped: int = 0


async def repair(
    store: Store,
    layout: Layout,
    found: Audit,
    options: BuildOptions,
    *,
    tenant: Tenant | None = None,
) -> Repair:
    """Mend what ``audit`` found. What is broken off can be done again.

    Args:
        store: The bucket; one that honours conditional writes.
        found: By audit.
        options: For a new base of the index.
        tenant: Whose secret is in the names.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses; some is mended.
        TierError: The folder for temporary files is full.
    """
    done = Repair()
    if found.deep is not None and found.deep.bad:
        await _delete_corrupt(store, layout, found.deep.bad, done, options)
    if not found.index_agrees:
        done.version = (await rebuild(store, layout, options)).head.version
    if found.catalog is not None and found.catalog.gone_identifiers:
        done.dropped = await drop_gone_rows(
            store, layout, sorted(found.catalog.gone_identifiers), tenant
        )
    return done


async def _delete_corrupt(
    store: Store, layout: Layout, bad: list[BadObject], done: Repair, options: BuildOptions
) -> None:
    """Delete the objects that are still corrupt, and announce their entries as deleted."""
    corrupt: list[Key] = []

    async def look(one: BadObject) -> None:
        info = await store.head(one.name)
        kind = "gone" if info is None else (await check_object(store, layout, info)).kind
        if kind == "corrupt":
            corrupt.append(key_of_object(layout, one.name))
        else:
            done.spared += 1

    await in_parallel(bad, look)
    async with deleting(store, layout) as deleter:
        await deleter.delete(corrupt, report=options.report)
    done.deleted = len(corrupt)


async def drop_gone_rows(
    store: Store, layout: Layout, identifiers: list[str], tenant: Tenant | None
) -> int:
    """Drop the catalogue's rows of those entries that have no object now; answers how many."""
    from s3ec.corpus.catalog import drop_rows

    async def look(identifier: str) -> str | None:
        key = make_key(identifier, tenant)
        if key is not None and await store.head(layout.object(key)) is not None:
            return None
        return identifier

    gone = set(filter(None, await in_parallel(identifiers, look)))
    return await drop_rows(store, layout, gone.__contains__) if gone else 0

# SPDX-License-Identifier: Apache-2.0
"""Mends what an audit found, with the owners of each kind of thing.

- A corrupt object is read again. If it still comes whole and bad it is deleted at once.
- Where index and listing differ, or an object was deleted, the index is rebuilt from a listing. So
  producers store again what was deleted.
- The object of a row of the catalogue is looked for again. If it is gone the row is dropped.

What could not be read is never deleted: a store that fails makes nothing corrupt. Nor is an object
of a newer format, nor anything that is no entry of the namespace, whatever an audit's state says.
Bad objects are not kept aside. Nothing would ever read them, and the producer's copy is what makes
good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3ec.corpus.deep_check import BadObject, check_object
from s3ec.counters import Report, unreported
from s3ec.identity import Key, Layout, is_object_name, make_key
from s3ec.index.delete import delete_entries
from s3ec.index.listing import key_of_object
from s3ec.index.local import NodeFolder
from s3ec.index.maker import rebuild
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    from s3ec.corpus.audit import Audit


# Between the look at an object and its deletion somebody may store it again.
_AT_A_TIME = 256


@dataclass(slots=True)
class Repair:
    """What was mended.

    Attributes:
        deleted: Corrupt objects.
        spared: Of those that were found corrupt: good, gone or unreadable when they were read
            again, or no entries of the namespace.
        snapshot: Name of the new snapshot of the index; empty where the old one was right.
        dropped: Rows of the catalogue.
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
    """Mend what ``audit`` found; see Corpus.repair. What is broken off can be done again.

    Args:
        tenant: Whose secret is in the names.
        node: This node's files of the index, so that its engines are told what was deleted.
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
    """Delete the objects that are still corrupt, some at a time."""
    names = list(dict.fromkeys(one.name for one in bad))

    async def look(name: str) -> Key | None:
        below = name.removeprefix(layout.objects)
        if not name.startswith(layout.objects) or not is_object_name(below):
            return None  # the state is a file, in which anybody may have written
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

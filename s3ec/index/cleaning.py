# SPDX-License-Identifier: Apache-2.0
"""Deletes what no reader can need any more: old bases, merged deltas, what dead compactions left.

All ages are by the server's clock. Whatever is in doubt stays: it is garbage and not an error.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress

from s3ec.errors import AccessError, ConflictError, CorruptEntryError
from s3ec.identity import Layout
from s3ec.index.base_writer import ABANDONED_S
from s3ec.index.head import Head
from s3ec.index.making import GRACE_S
from s3ec.index.parallel import in_parallel
from s3ec.index.snapshot import Snapshot, newest_head, read_head, take_snapshot
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.open import PROBE_PREFIX

log = logging.getLogger(__name__)


async def clean(store: Store, layout: Layout, *, grace_s: float = GRACE_S) -> int:
    """Delete what has been superseded for ``grace_s`` by the server's clock.

    A base is old once another head has been there for so long, and a delta is done with once such
    a head and the newest one contain it. A run without a head goes where it cannot become a base
    any more, or after a day. Costs one listing where nothing could be due.

    Returns:
        Objects deleted; 0 also where this identity may not delete, which is logged.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: Listing or reading is refused.
        CorruptEntryError: The newest head is unusable.
    """
    # Listed after what was committed last, so that the head that counts is among it.
    snapshot = await take_snapshot(store, layout)
    heads = await _read_heads(store, layout, snapshot)
    if not _due(snapshot, heads, math.inf, grace_s) and len(snapshot.heads) < 2:
        return 0
    try:
        now_s = await server_time(store)
        due = [info.name for info in _due(snapshot, heads, now_s, grace_s)]
        await in_parallel(due, store.delete)
        # Last: without its head a base would look like one that is being written.
        old = [info.name for info in _old_heads(snapshot, now_s, grace_s)]
        await in_parallel(old, store.delete)
    except AccessError as exc:
        log.warning("old files of the index stay in the bucket: %s", exc)
        return 0
    return len(due) + len(old)


async def _read_heads(store: Store, layout: Layout, snapshot: Snapshot) -> dict[int, Head]:
    """All heads that can be read; the newest one must be."""
    newest = await newest_head(store, layout, snapshot)
    heads = {} if newest is None else {newest.version: newest}

    async def read(version: int) -> None:
        with suppress(CorruptEntryError):
            head = await read_head(store, layout, version)
            if head is not None:
                heads[version] = head

    await in_parallel(snapshot.heads.keys() - heads.keys(), read)
    return heads


def _due(
    snapshot: Snapshot, heads: dict[int, Head], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Shards, filters and deltas that may go at this time of the server."""
    settled = _settled(snapshot, now_s, grace_s)
    due: list[ObjectInfo] = []
    for (version, run), files in snapshot.runs.items():
        if version > snapshot.version:
            # It may be being written, and it may still become a base.
            unused = _are_older(files, now_s, ABANDONED_S)
        elif version < settled:
            unused = True
        else:
            # What is not the run of its version's head never will be: that name is taken.
            lost = version in heads and heads[version].run != run
            unused = lost and _are_older(files, now_s, grace_s)
        if unused:
            due += files
    if settled in heads:
        done = heads[settled].merged & heads[snapshot.version].merged
        due += [snapshot.deltas[ulid] for ulid in sorted(done & snapshot.deltas.keys())]
    return due


def _old_heads(snapshot: Snapshot, now_s: float, grace_s: float) -> list[ObjectInfo]:
    settled = _settled(snapshot, now_s, grace_s)
    return [info for version, info in snapshot.heads.items() if version < settled]


def _settled(snapshot: Snapshot, now_s: float, grace_s: float) -> int:
    """The newest version that has been there for so long, 0 where none has."""
    settled = (v for v, info in snapshot.heads.items() if _are_older([info], now_s, grace_s))
    return max(settled, default=0)


def _are_older(files: Sequence[ObjectInfo], now_s: float, age_s: float) -> bool:
    """Whether all of these were there for so long; not where the store does not say."""
    return all(info.modified_s > 0 and now_s - info.modified_s > age_s for info in files)


async def server_time(store: Store) -> float:
    """The server's clock, from a throwaway object; 0 where it does not say.

    Raises:
        AccessError: This identity may not write or delete.
        UnavailableError: The store does not answer now.
    """
    name = PROBE_PREFIX + secrets.token_hex(8)
    await store.delete(name)  # whoever may not delete leaves nothing behind
    try:
        with suppress(ConflictError):  # our own first attempt, whose reply was lost
            await store.put_if_absent(name, [b"s3ec asked what time it is here; can be deleted\n"])
        info = await store.head(name)
    finally:
        await store.delete(name)
    return info.modified_s if info else 0.0

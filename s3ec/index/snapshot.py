# SPDX-License-Identifier: Apache-2.0
"""One authoritative listing of ``manifest/``: which deltas, bases and heads the bucket holds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import OBJECT_SUFFIX, Layout
from s3ec.index.head import MAX_HEAD_BYTES, Head, parse_head
from s3ec.store.base import ObjectInfo, Store

Run = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one listing showed. Names of no known form are left out, and so never deleted.

    Attributes:
        deltas: ULID to object.
        heads: Version to object.
        runs: Version and run to the shards and filters of that run.
    """

    deltas: Mapping[str, ObjectInfo]
    heads: Mapping[int, ObjectInfo]
    runs: Mapping[Run, Sequence[ObjectInfo]]

    @property
    def version(self) -> int:
        """Of the newest base, 0 where there is none."""
        return max(self.heads, default=0)


async def take_snapshot(store: Store, layout: Layout) -> Snapshot:
    """List all of ``manifest/``, one request per 1000 objects.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    deltas: dict[str, ObjectInfo] = {}
    heads: dict[int, ObjectInfo] = {}
    runs: dict[Run, list[ObjectInfo]] = defaultdict(list)
    async for info in store.list(layout.manifest):
        if (ulid := layout.delta_of(info.name)) is not None:
            deltas[ulid] = info
        elif (version := layout.version_of(info.name)) is not None:
            heads[version] = info
        elif info.name.endswith(OBJECT_SUFFIX) and (run := layout.run_of(info.name)) is not None:
            runs[run].append(info)
    return Snapshot(deltas, heads, dict(runs))


async def read_head(store: Store, layout: Layout, version: int) -> Head | None:
    """The head of one version, or None where it is gone.

    Raises:
        CorruptEntryError: It cannot be used; the message names it. Reason ``version`` where a
            newer s3ec wrote it.
    """
    name = layout.head(version)
    blob = await store.get(name, max_bytes=MAX_HEAD_BYTES)
    if blob is None:
        return None
    # It may name a hundred thousand deltas.
    head = await asyncio.to_thread(parse_head, blob, name=name)
    if head.version != version:
        raise CorruptEntryError(f"{name}: says it is version {head.version}", reason="header")
    return head


async def newest_head(store: Store, layout: Layout, snapshot: Snapshot) -> Head | None:
    """The head that readers use now; None where there is no base yet.

    Raises:
        CorruptEntryError: As read_head.
        UnavailableError: It vanished since it was listed.
    """
    if not snapshot.version:
        return None
    head = await read_head(store, layout, snapshot.version)
    if head is None:
        raise UnavailableError(f"{layout.head(snapshot.version)} vanished while it was looked at")
    return head

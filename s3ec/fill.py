# SPDX-License-Identifier: Apache-2.0
"""Copies missing objects to a replica: entries that came from home, and the index.

This makes the replication of buckets optional. Nothing waits for a copy. A copy that fails is left
out, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import TOO_LARGE, AccessError, ConflictError, S3ECError, TierError
from s3ec.identity import Key, Layout
from s3ec.index.deltas import list_deltas
from s3ec.index.local import NodeFolder
from s3ec.index.names import SnapshotName, deltas_prefix, snapshots_prefix
from s3ec.index.reader import ManifestIndex
from s3ec.runtime import LoopThread, contained, jitter
from s3ec.store.base import PART_BYTES, Store
from s3ec.store.places import Place
from s3ec.tier.open_entry import OpenEntry

log = logging.getLogger(__name__)

MIRROR_EVERY_S = 300.0
"""How often a node checks whether the replica has the index."""
_LOADED_S = 1.0  # how often it checks whether the index is loaded
_MOST_WAITING = 100_000  # keys
_MAX_RECORD_BYTES = 2**21


class Filler:
    """Copies to one replica; one object at a time, paced. The loop's thread only.

    Counters: ``place.NAME.filled`` and ``.unfilled`` (copies that failed, found no
    room in the queue, or whose entry was evicted or damaged).
    """

    def __init__(
        self,
        place: Place,
        home: Store,
        layout: Layout,
        loop: LoopThread,
        counters: Counters,
        open_entry: Callable[[Key], OpenEntry | None],
        *,
        bytes_per_minute: int,
        mirrors: bool = True,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Start no task yet.

        Args:
            home: Store that records and deltas are read from.
            open_entry: Opens an entry of this node's disk; blocking.
            bytes_per_minute: The pace of copies.
            mirrors: True if the replica is a bucket, and takes the index, too.
            pause: Waits for the given seconds.
        """
        self.mirrors = mirrors
        self._place = place
        self._home = home
        self._layout = layout
        self._loop = loop
        self._counters = counters
        self._open_entry = open_entry
        self._bytes_per_s = bytes_per_minute / 60
        self._pause = pause
        self._waiting: deque[Key] = deque()
        self._task: asyncio.Task[None] | None = None
        self._refused = False

    def offer(self, key: Key) -> None:
        """Queue a copy of a fetched entry if the replica lacks it. Never waits."""
        if self._refused or not self._place.lacks(self._layout.object(key)):
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._place.count("unfilled")
            return
        self._waiting.append(key)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="s3ec-fill")

    def close(self) -> None:
        """Drop queued copies, and cancel the running one; the loop's thread."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                key = self._waiting.popleft()
                with contained(self._counters, "a copy to %s", self._place.name):
                    await self._copy(key)
        finally:
            self._task = None

    async def _copy(self, key: Key) -> None:
        try:
            body = await self._loop.disk(self._read, key)
        except (OSError, TierError):
            body = None
        if body is None:  # it was evicted, or damaged
            self._place.count("unfilled")
        elif await self._put(name := self._layout.object(key), [body]):
            self._place.has(name)

    def _read(self, key: Key) -> bytes | None:
        """Return the bytes of an entry, which were verified on arrival; blocking."""
        entry = self._open_entry(key)
        return None if entry is None else os.pread(entry.fd, entry.nbytes, 0)

    async def _put(self, name: str, body: Sequence[bytes | memoryview]) -> bool:
        """Copy one object; True if the replica has it now."""
        nbytes, is_there = sum(map(len, body)), False
        try:
            await self._place.store.put_if_absent(name, body)
            is_there = True
            self._place.count("filled")
        except ConflictError:
            return True
        except S3ECError as exc:
            self._place.count("unfilled")
            if isinstance(exc, AccessError) and exc.code != TOO_LARGE and not self._refused:
                self._refused = True
                self._waiting.clear()
                log.warning("%s takes no copies until the next start: %s", self._place.name, exc)
        # The pace also covers copies that a full place refuses: they were sent. It also bounds a
        # burst: the queue overflows.
        await self._pause(nbytes / self._bytes_per_s)
        return is_there

    # -- the index -------------------------------------------------------------------------------

    async def mirror_forever(self, index: ManifestIndex, folder: NodeFolder) -> None:
        """Check every five minutes whether the replica has the index, until cancelled."""
        while not index.loaded:
            await self._pause(_LOADED_S)
        while not self._refused:
            with contained(self._counters, "the index of %s", self._place.name):
                try:
                    await self.mirror(index, folder)
                except S3ECError as exc:
                    log.info("the index cannot be copied to %s now: %s", self._place.name, exc)
            await self._pause(MIRROR_EVERY_S * jitter.uniform(0.5, 1.5))

    async def mirror(self, index: ManifestIndex, folder: NodeFolder) -> None:
        """Copy records, deltas and the snapshot of this node that are missing on the replica.

        Raises:
            UnavailableError, AccessError: The replica cannot be listed, or home read.
        """
        snapshot, ulids = index.files
        prefix = deltas_prefix(self._layout)
        near, modalities = self._place.store, self._layout.modalities
        there = {prefix + ulid for ulid in await list_deltas(near, self._layout, snapshot)}
        there |= {info.name async for info in near.list(modalities)}
        records = [info.name async for info in self._home.list(modalities)]
        for name in [self._layout.descriptor, *records, *(prefix + ulid for ulid in ulids)]:
            if name in there or self._refused:
                continue
            body = await self._home.get(name, max_bytes=_MAX_RECORD_BYTES)
            if body is not None:
                await self._put(name, [bytes(body)])
        if snapshot != SnapshotName():
            await self._mirror_snapshot(snapshot, folder)

    async def _mirror_snapshot(self, snapshot: SnapshotName, folder: NodeFolder) -> None:
        name = f"{snapshots_prefix(self._layout)}{snapshot}"
        if self._refused or await self._place.store.head(name) is not None:
            return
        path = folder.rows_path(snapshot)
        try:
            whole = memoryview(await asyncio.to_thread(safetensors_file.map_file, path))
        except OSError:  # a newer snapshot has replaced it
            return
        pieces = [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]
        await self._put(name, pieces)

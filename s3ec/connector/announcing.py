# SPDX-License-Identifier: Apache-2.0
"""Announces what the bucket took, and keeps it in the spool until that is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from s3ec.codec import Header
from s3ec.identity import Key
from s3ec.index.announce import ANNOUNCE_S, Announcer
from s3ec.index.rows import Facts
from s3ec.node import Node
from s3ec.tier import Spool

# One part in so many of `cache_bytes` may be spooled only for want of an announcement: a quarter
# of the spool's share. Where announcements fail for long, saves go on with the rest.
_KEPT_SHARE = 16
# A disk thread unlinks so many before another call gets its turn.
_REMOVED_AT_ONCE = 64


class Announcing:
    """The last part of a save; uploads and hooks never wait for it.

    Memory holds a key and some numbers per embedding. A process that ends in between leaves the
    spooled file; the next one finds the object in the bucket, and announces it.
    """

    def __init__(self, node: Node, spool: Spool, ended: Callable[[], None]) -> None:
        """Set up; nothing runs yet.

        Args:
            ended: Called in the loop's thread when ``left`` becomes 0. Must not wait.
        """
        self._node = node
        self._spool = spool
        self._ended = ended
        self._announcer = Announcer(
            node.store,
            node.layout,
            node.counters,
            known_time_s=node.index.known_time_s,
            batch_s=ANNOUNCE_S,
        )
        self._limit_bytes = int(node.settings.cache_bytes) // _KEPT_SHARE
        self._kept_bytes = 0
        self._removable: list[tuple[bytes, int]] = []
        self._removing: asyncio.Task[None] | None = None
        self.left = 0

    def hurry(self) -> None:
        """Announce what waits at once, whatever failed before."""
        self._announcer.hurry(retry=True)

    def close(self) -> None:
        """Announce no more; what is spooled stays there."""
        self._announcer.close()

    async def add(
        self, key: Key, header: Header, nbytes: int, *, mine: bool, news: bool = False
    ) -> None:
        """Take one embedding that is in the bucket; waits at most for a file to be unlinked.

        Args:
            nbytes: Of the whole object.
            mine: This upload put it there. Otherwise it is somebody's of the same name: of the
                same shape, but perhaps of other last digits.
            news: It is a revision: what the index has about the entry is about a bad object.
        """
        spooled = self._spool.holds(key.digest)  # not where the disk refused it
        if not (mine or news) and self._node.index.is_announced(key):
            if spooled:
                await self._node.loop.disk(self._spool.remove, key.digest)
            return
        shape = header.shape
        checksum = int(header.checksum[:8], 16) if mine else 0
        facts = Facts(nbytes, shape.rows, shape.width, shape.dtype, checksum)
        kept_bytes = nbytes if spooled and self._kept_bytes + nbytes <= self._limit_bytes else 0
        self.left += 1
        self._kept_bytes += kept_bytes
        # Before the index hears of it otherwise: the row must be later than what is known.
        self._announcer.add(key, facts, partial(self._done, key.digest, kept_bytes))
        if mine or news:
            # Not where it was there before: an entry that this process holds for gone or bad may
            # be the very one, and would be fetched in vain at every request.
            self._node.index.add(key, facts)
        if self._kept_bytes > self._limit_bytes // 2:
            self._announcer.hurry()
        if spooled and not kept_bytes:
            # A crash before it is announced leaves it to `s3ec manifest rebuild`.
            await self._node.loop.disk(self._spool.remove, key.digest)

    def _done(self, digest: bytes, kept_bytes: int, confirmed: bool) -> None:
        if confirmed and kept_bytes:
            self._removable.append((digest, kept_bytes))
            if self._removing is None:
                self._removing = asyncio.get_running_loop().create_task(
                    self._remove(), name="s3ec-unspool"
                )
            return
        if not confirmed and not kept_bytes:  # what is spooled is left to the next process
            self._node.counters.add("announce_dropped")
        self._leave(1)

    async def _remove(self) -> None:
        while self._removable:
            batch = self._removable[:_REMOVED_AT_ONCE]
            del self._removable[:_REMOVED_AT_ONCE]
            await self._node.loop.disk(self._unspool, [digest for digest, _ in batch])
            self._kept_bytes -= sum(nbytes for _, nbytes in batch)
            self._leave(len(batch))
        self._removing = None

    def _unspool(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._spool.remove(digest)

    def _leave(self, count: int) -> None:
        self.left -= count
        if self.left == 0:
            self._ended()

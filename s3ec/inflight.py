# SPDX-License-Identifier: Apache-2.0
"""A bound on the bytes that coroutines of one loop hold at a time."""

from __future__ import annotations

import asyncio


class ByteBudget:
    """Who needs more than is free waits; what is larger than the budget goes alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self, nbytes: int) -> None:
        """Wait until so many bytes more may be held; anything may be alone."""
        while self._held_bytes and self._held_bytes + nbytes > self._limit_bytes:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room
        self._held_bytes += nbytes

    def free(self, nbytes: int) -> None:
        """Give back what was taken."""
        self._held_bytes -= nbytes
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

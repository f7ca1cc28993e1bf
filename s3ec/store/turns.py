# SPDX-License-Identifier: Apache-2.0
"""Bounds on a store's requests: one loop, so many at a time, and so long each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from s3ec.errors import UnavailableError
from s3ec.settings import Settings
from s3ec.store.deadline import Extend


class Turns:
    """Hands out places and deadlines.

    Args:
        settings: ``max_concurrency`` places, and the timeouts that a deadline is made of.
        least_bytes_per_s: A body that comes or goes slower is past its deadline.

    Attributes:
        is_closed: Whether close() was called.
    """

    def __init__(self, settings: Settings, least_bytes_per_s: float) -> None:
        self.is_closed = False
        self._bytes_per_s = least_bytes_per_s
        # Connect, then the reply's head, then silence within the body: each may take its limit.
        self._budget_s = settings.connect_timeout_s + 2 * settings.read_timeout_s
        self._places = settings.max_concurrency
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: the loop is the parent's, and so is what is under way."""
        self._slots = asyncio.Semaphore(self._places)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: set[asyncio.Timeout] = set()

    def check_loop(self) -> None:
        """Bind the store to the loop of its first call.

        Raises:
            RuntimeError: Called from another one, or after close().
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("a store serves one event loop; make another one for this loop")
        if self.is_closed:
            raise RuntimeError("the store is closed")
        self._loop = loop

    @contextlib.asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[Extend]:
        """Wait for a place without a limit; what then happens has a deadline.

        Yields:
            Grants the time that a body of so many bytes may take, from the call on.

        Raises:
            UnavailableError: The store was closed meanwhile.
            TimeoutError: The deadline has passed.
        """
        async with self._slots, asyncio.timeout(self._limit_s(0)) as deadline:
            if self.is_closed:  # while this one waited for its turn
                raise UnavailableError(f"{what}: the store was closed")
            loop = asyncio.get_running_loop()

            def extend(nbytes: int) -> None:
                if not self.is_closed:  # close() has set the last deadline there is
                    deadline.reschedule(loop.time() + self._limit_s(nbytes))

            self._under_way.add(deadline)
            try:
                yield extend
            finally:
                self._under_way.discard(deadline)

    def close(self) -> None:
        """End what is under way, and let nothing begin."""
        self.is_closed = True
        self._end()

    def abandon(self) -> None:
        """End what is under way soon; for another thread, when the process ends."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for deadline in self._under_way:
            if not deadline.expired():
                deadline.reschedule(0.0)

    def _limit_s(self, nbytes: int) -> float:
        return self._budget_s + nbytes / self._bytes_per_s

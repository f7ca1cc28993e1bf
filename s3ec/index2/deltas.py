# SPDX-License-Identifier: Apache-2.0
"""Deltas: rows that one writer stored, announced to all readers."""

from __future__ import annotations

from collections.abc import Callable

from s3ec.counters import Counters
from s3ec.identity import Key, Layout
from s3ec.index2.names import NEVER
from s3ec.store.base import Store

PAUSE_S = 2.0
"""The least pause between two deltas of a writer; a second for each writer of the fleet if that
is more."""
BATCH_ROWS = 65_536
"""Rows of one delta at most."""
MAX_WAITING = 100_000
"""Keys that may wait to be announced."""


class Announcer:
    """Collects what one process stored, and writes it until the bucket confirms it.

    States of a key: waiting (after ``add``), sending (in the delta that is written), and then
    confirmed or given up, which its callbacks are told once. A failed write stays in sending and
    is tried again under a new name, without limit. It is given up by ``close``, by an error of
    ours, and where too much waits.

    For the loop's thread only. The task runs while something waits.

    Counters: ``announced`` (keys) and ``announce_failed``.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        counters: Counters,
        *,
        writers: Callable[[], int] = lambda: 1,
        newest: Callable[[], str] = lambda: NEVER,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            writers: How many writers the fleet has (``ManifestIndex.writers``); no I/O.
            newest: The newest name that this process has accepted (``ManifestIndex.newest``).
            pause_s: The least pause between two deltas; how long the first key waits for others.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """How many keys wait for a confirmation."""
        raise NotImplementedError

    def add(self, key: Key, nbytes: int, done: Callable[[bool], None]) -> None:
        """Announce one key soon; never waits.

        Args:
            nbytes: Size of its object; 0 where it is not known.
            done: Called once in the loop's thread: True when the bucket has confirmed the delta,
                False when it was given up. Must not wait.
        """
        raise NotImplementedError

    def send_soon(self) -> None:
        """Send what waits now, without waiting out the pace or a pause after a failure."""
        raise NotImplementedError

    async def flush(self) -> None:
        """Return once all that waits now is confirmed or given up, however long that takes."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what waits, and take no more; returns at once. Idempotent."""
        raise NotImplementedError

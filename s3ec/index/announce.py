# SPDX-License-Identifier: Apache-2.0
"""Tells the readers of a corpus what was stored or deleted: small segments, appended in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from s3ec.counters import Counters
from s3ec.errors import AccessError, ConflictError, UnavailableError
from s3ec.identity import Key, Layout
from s3ec.index.manifest import OVERLAP_S, Ulids
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.index.segment import encode_segment
from s3ec.runtime import Backoff, contained, jitter
from s3ec.store.base import Store

log = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
"""How long the first item of a batch waits for others."""
BATCH_ITEMS = 1000
"""A batch of so many waits for no more."""

MAX_WAITING = 100_000
"""Keys that may wait for a confirmation; about 600 bytes each."""
FIRST_PAUSE_S = 0.5
"""After a failure at most; twice as long after each further one."""
DENIED_PAUSE_S = 60.0
"""A refusal lasts until somebody changes a policy, and too many refusals open the breaker."""
CALIBRATE_EVERY = 1000
"""Deltas between two looks at the server's clock; an idle writer makes none."""

_MAX_PAUSE_S = 15.0
_MAX_TIME_S = 2**32 - 1  # what the column holds
# A retry takes a new name where the last one is older than this: readers find a delta late if it
# appears under an old name.
_NAME_AGE_S = OVERLAP_S / 10
# The server's times are whole seconds.
_RESOLUTION_S = 2.0


@dataclass(slots=True)
class _Item:
    """What readers are to be told about one key.

    Attributes:
        facts: None: it was deleted.
        added_s: When, by this machine's clock.
        least_s: Its row's time is at least this, to win over what the index knew before.
        done: Called once each.
    """

    facts: EntryInfo | None
    added_s: float
    least_s: int
    done: list[Callable[[bool], None]]


class Announcer:
    """Collects what one process has to tell, and writes it until the bucket confirms it.

    States of a key: waiting (after ``add``), sending (in the batch that is written), and then
    confirmed or given up, which its callback is told once. A key that is added again while it
    waits replaces what waits. A failed write stays in sending and is tried again, without limit.
    It is given up by ``close``, by an error of ours, and where too much waits.

    One delta is written at a time, so what comes later has a later name. For the loop's thread
    only. The task runs while something waits. Holds small records, at most 100,000.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        counters: Counters,
        *,
        known_time_s: Callable[[Key], int] = lambda _: 0,
        clock: Callable[[], float] = time.time,
        batch_s: float = ANNOUNCE_S,
        batch_items: int = BATCH_ITEMS,
        uniform: Callable[[float, float], float] = jitter.uniform,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            known_time_s: Time of the row that the index holds of a key, a tombstone's too; 0 where
                it holds none. No I/O.
            clock: Seconds since the epoch.
            batch_s: How long the first item of a batch waits for others.
            batch_items: A batch of so many waits for no more, and is one delta.
            uniform: Draws a pause after a failure.
        """
        self._store = store
        self._layout = layout
        self._counters = counters
        self._known_time_s = known_time_s
        self._clock = clock
        self._batch_s = batch_s
        self._batch_items = batch_items
        self._uniform = uniform
        self._waiting: dict[bytes, _Item] = {}
        self._sending: dict[bytes, _Item] = {}
        self._urgent = 0  # so many of those that wait are not held back for a fuller batch
        self._due = asyncio.Event()
        self._retry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._names = Ulids()
        self._offset_s = 0.0  # the server's clock is so far ahead of ours
        self._until_look = 0  # deltas until the next look at it
        self._complained = False
        self._said_full = False

    def __len__(self) -> int:
        """How many keys wait for a confirmation."""
        return len(self._sending.keys() | self._waiting.keys())

    def add(
        self,
        key: Key,
        facts: EntryInfo | None,
        done: Callable[[bool], None],
        *,
        at_s: float | None = None,
        known_s: int | None = None,
    ) -> None:
        """Announce one key soon; never waits.

        To be called before this process's own index hears of it: the row is made to win over
        what the index knows.

        Args:
            facts: What was stored, its time left out; None: the key was deleted.
            done: Called once in the loop's thread: True when the bucket has confirmed it, False
                when it was given up (closed, too much waits, an error of ours). Must not wait,
                and should hold little: it is kept until then.
            at_s: When it was so, seconds since the epoch by this machine's clock; None: now.
            known_s: The row wins over what is no later than this, by the bucket's clock; None:
                over what the index knows now.
        """
        if self._closed or len(self._waiting) >= MAX_WAITING:
            if not self._closed and not self._said_full:
                self._said_full = True
                log.error(
                    "more than %d keys wait to be announced; further ones may be missing from "
                    "the index until `s3ec manifest rebuild`",
                    MAX_WAITING,
                )
            done(False)
            return
        added_s = self._clock() if at_s is None else at_s
        known_s = self._known_time_s(key) if known_s is None else known_s
        item = _Item(facts, added_s, known_s + 1, [done])
        earlier = self._waiting.pop(key.digest, None)
        if earlier is not None:  # the later one is true; one row tells it for both
            item.done[:0] = earlier.done
        self._waiting[key.digest] = item
        if len(self._waiting) >= self._batch_items:
            self._due.set()
        self._start()

    def send_soon(self) -> None:
        """Send what waits now, without waiting for a fuller batch or out a pause after a failure.

        Returns at once.
        """
        self._urgent = len(self._waiting)
        self._due.set()
        self._retry.set()

    async def flush(self) -> None:
        """Return once all that waits now is confirmed or given up, however long that takes."""
        items = [*self._sending.values(), *self._waiting.values()]
        left = len(items)
        settled = asyncio.Event()

        def one(_: bool) -> None:
            nonlocal left
            left -= 1
            if not left:
                settled.set()

        for item in items:
            item.done.append(one)
        self.send_soon()
        if items:
            await settled.wait()

    def close(self) -> None:
        """Give up what waits, and take no more; returns at once. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    # -- the task ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="s3ec-announce")
            # Not a `finally`, which a task that is cancelled before its first step never reaches.
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and not self._closed:
            if self._waiting:  # it came after the last look
                self._start()
            return
        self._closed = True
        left = [*self._sending.values(), *self._waiting.values()]
        self._sending, self._waiting = {}, {}
        _tell(left, confirmed=False)

    async def _run(self) -> None:
        while self._waiting:
            self._sending = await self._collect()
            confirmed = False
            # The other batches may do where this one fails.
            with contained(self._counters, "announcing %d keys", len(self._sending)):
                await self._send(self._sending)
                confirmed = True
            items, self._sending = list(self._sending.values()), {}
            _tell(items, confirmed=confirmed)

    async def _collect(self) -> dict[bytes, _Item]:
        """Wait for a batch, and take it."""
        if not self._urgent and len(self._waiting) < self._batch_items:
            self._due.clear()
            await _wait(self._due, self._batch_s)
        batch = dict(islice(self._waiting.items(), self._batch_items))
        for digest in batch:
            del self._waiting[digest]
        self._urgent = max(0, self._urgent - len(batch))
        return batch

    async def _send(self, batch: dict[bytes, _Item]) -> None:
        """Write one delta, and a second one if the first showed that our clock is off."""
        started_s = self._clock()
        name = await self._put(batch)
        if self._until_look == 0:
            self._until_look = CALIBRATE_EVERY
            moved_s = await self._calibrate(name, started_s, self._clock())
            if abs(moved_s) > OVERLAP_S / 2:
                log.warning(
                    "this machine's clock is %.0f s off the bucket's; names and times of the "
                    "index are corrected by that",
                    self._offset_s,
                )
            if abs(moved_s) > _RESOLUTION_S:
                # Rows with too early a time lose against deletions of entries that were stored
                # again since. Readers may have looked past a name that is far too early.
                await self._put(batch)
        self._until_look -= 1
        self._counters.add("announced", len(batch))

    async def _put(self, batch: dict[bytes, _Item]) -> str:
        """Write one delta, trying until the bucket has it; returns its name."""
        body = encode_segment(self._rows(batch), self._layout.namespace)
        backoff = Backoff(FIRST_PAUSE_S, _MAX_PAUSE_S, uniform=self._uniform)
        name, named_s = "", 0.0
        while True:
            now_s = self._clock() + self._offset_s
            if not name or not 0 <= now_s - named_s <= _NAME_AGE_S:
                name, named_s = self._names.next(now_s), now_s
            self._retry.clear()  # before the attempt: who hurries during it does not wait after it
            try:
                await self._store.put_if_absent(self._layout.delta(name), body)
            except ConflictError:
                pass  # our own, its reply was lost: nobody else has the name
            except (UnavailableError, AccessError) as exc:
                self._failed(exc)
                pause_s = backoff.next_s()
                denied = isinstance(exc, AccessError)
                await _wait(self._retry, DENIED_PAUSE_S if denied else pause_s)
                continue
            self._complained = False
            return name

    def _rows(self, batch: dict[bytes, _Item]) -> Rows:
        told: list[tuple[bytes, EntryInfo | Tombstone]] = []
        for digest, item in batch.items():
            time_s = min(max(int(item.added_s + self._offset_s), item.least_s), _MAX_TIME_S)
            if item.facts is None:
                told.append((digest, Tombstone(time_s)))
            else:
                told.append((digest, item.facts._replace(time_s=time_s)))
        return Rows.from_facts(told).sorted_unique()

    async def _calibrate(self, name: str, before_s: float, after_s: float) -> float:
        """Set our clock by the time that the server gave a delta; returns the change, seconds.

        Args:
            before_s: By our clock, when it was first sent.
            after_s: When it was confirmed.
        """
        try:
            info = await self._store.head(self._layout.delta(name))
        except AccessError as exc:  # one who may write but not read
            log.debug("no look at the bucket's clock: %s", exc)
            return 0.0
        except UnavailableError as exc:
            log.debug("no look at the bucket's clock: %s", exc)
            self._until_look = 1  # the next delta is as good
            return 0.0
        if info is None or not info.modified_s:
            return 0.0
        # A lost reply makes the two far apart, with the server's time somewhere in between.
        offset_s = info.modified_s - min(max(info.modified_s, before_s), after_s)
        if abs(offset_s) <= _RESOLUTION_S:
            offset_s = 0.0
        moved_s, self._offset_s = offset_s - self._offset_s, offset_s
        if moved_s < 0:
            self._names = Ulids()  # the old one makes no earlier names
        return moved_s

    def _failed(self, exc: UnavailableError | AccessError) -> None:
        self._counters.add("announce_failed")
        if not self._complained:
            self._complained = True
            log.warning(
                "what this process stores cannot be announced to readers of the corpus and will "
                "be tried again: %s",
                exc,
            )


def _tell(items: list[_Item], *, confirmed: bool) -> None:
    for item in items:
        for done in item.done:
            done(confirmed)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, at most so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()

# SPDX-License-Identifier: Apache-2.0
"""Deltas: rows that one writer stored, announced to all readers, and a node's overlay of them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    CutBodyError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import Key, Layout, is_ulid
from s3ec.index.bloom import bloom, words_for
from s3ec.index.names import (
    AHEAD_S,
    MARGIN_S,
    NEVER,
    Names,
    ServerClock,
    SnapshotName,
    deltas_prefix,
    first_ulid,
    is_ahead,
    time_s,
    window_start,
    writer_of,
)
from s3ec.index.snapshot import Rows, Segment, columns_of, encode, merge
from s3ec.runtime import Backoff, contained, jitter
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.concurrency import in_parallel

log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""The least pause between two deltas of a writer; a second for each writer of the fleet if that
is more."""
BATCH_ROWS = 65_536
"""Rows of one delta at most."""
MAX_DELTA_BYTES = 2 * 2**20
MAX_WAITING = 100_000
"""Keys that may wait to be announced."""
_READS_AT_A_TIME = 8
_ASK_CLOCK_EVERY = 1000  # deltas
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 15.0
# A refusal lasts until a person changes a policy, and too many refusals open the breaker.
_DENIED_PAUSE_S = 60.0

# -- reading ---------------------------------------------------------------------------------------


async def list_deltas(
    store: Store,
    layout: Layout,
    snapshot: SnapshotName,
    newest: str = NEVER,
    *,
    left_out: Callable[[str], object] = lambda _: None,
) -> dict[str, ObjectInfo]:
    """List the deltas that count for a snapshot, by ULID; one LIST for each thousand.

    Names that are no ULID, or that are ahead of the server's clock, are left out.

    Args:
        newest: The newest known delta, if all others were listed before: deltas named more than
            15 minutes before it are not listed again.
        left_out: Called with names that are ahead of the server's clock.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    prefix = deltas_prefix(layout)
    first = max(window_start(snapshot.ulid), first_ulid(time_s(newest) - MARGIN_S - AHEAD_S))
    found: dict[str, ObjectInfo] = {}

    async def collect(start_after: str) -> None:
        async for info in store.list(prefix, start_after=start_after):
            ulid = info.name.removeprefix(prefix)
            # A server may ignore `start-after`, and list older names.
            if not is_ulid(ulid) or ulid < first:
                continue
            if is_ahead(ulid, info):
                left_out(info.name)
            else:
                found[ulid] = info

    try:
        await collect(prefix + first if first > NEVER else "")
    except AccessError as exc:
        if exc.is_general or first == NEVER:
            raise
        await collect("")  # the server refuses `start-after`
    return found


async def read_deltas(
    store: Store, layout: Layout, ulids: Iterable[str]
) -> dict[str, Rows | S3ECError | None]:
    """Read the rows of some deltas, in any order.

    Returns:
        For each delta its rows, None if the bucket no longer has it, or the CorruptEntryError,
        UnavailableError or AccessError of its read. One that fails does not delay the others.
    """
    wanted = list(ulids)

    async def read(ulid: str) -> Rows | S3ECError | None:
        name = deltas_prefix(layout) + ulid
        problem: S3ECError
        for _ in range(2):  # a body that was damaged on its way is good the next time
            try:
                body = await store.get(name, max_bytes=MAX_DELTA_BYTES)
                return None if body is None else parse_delta(body, layout, name)
            except CutBodyError as exc:  # a merge without this delta would lose its rows
                problem = UnavailableError(str(exc))
            except CorruptEntryError as exc:
                problem = exc
            except (UnavailableError, AccessError) as exc:
                return exc
        return problem

    found = await in_parallel(wanted, read, width=_READS_AT_A_TIME)
    return dict(zip(wanted, found, strict=True))


def parse_delta(body: bytes | memoryview, layout: Layout, name: str) -> Rows:
    """Parse and check a whole delta. Raises CorruptEntryError with its name."""
    segment = Segment.parse(body, layout.namespace, name=name)
    segment.check()
    return segment.rows


# -- a node's overlay ------------------------------------------------------------------------------

KIND = "overlay-3"


@dataclass(frozen=True, eq=False)
class Overlay:
    """The rows of the deltas that were read for a snapshot. Immutable; any thread may look up.

    Attributes:
        snapshot: The name of that snapshot.
        segment: The rows, each digest once.
        words: Their filter, see ``bloom``.
        read: ULIDs of the deltas, in rising order.
    """

    snapshot: SnapshotName
    segment: Segment
    words: memoryview[int]
    read: Sequence[str]

    @classmethod
    def empty(cls, snapshot: SnapshotName) -> Overlay:
        """Make the overlay of a snapshot without deltas."""
        words = memoryview(bytes(8)).cast("Q")
        return cls(snapshot, Segment.of(Rows.of([], [])), words, ())

    @property
    def fresh_deltas(self) -> int:
        """Deltas that are not older than the snapshot."""
        return len(self.read) - bisect_left(self.read, self.snapshot.ulid)

    @property
    def fresh_rows(self) -> int:
        """About how many rows the fresh deltas have."""
        return len(self.segment) * self.fresh_deltas // max(1, len(self.read))

    @property
    def writers(self) -> int:
        """How many writers made the deltas of the last 15 minutes."""
        if not self.read:
            return 0
        first = first_ulid(time_s(self.read[-1]) - MARGIN_S)
        return len({writer_of(ulid) for ulid in self.read[bisect_left(self.read, first) :]})

    def encode_with(self, deltas: Mapping[str, Rows], namespace: str) -> list[bytes | memoryview]:
        """Encode this overlay and further deltas as the next file; 20 ms for 100,000 rows.

        Args:
            deltas: ULID to rows; none that the overlay has already.
            namespace: Of all of them.

        Returns:
            The pieces of the file.
        """
        rows = merge([self.segment.rows, *deltas.values()])
        read = "".join(sorted((*self.read, *deltas)))
        metadata = {"s3ec": KIND, "namespace": namespace, "of": str(self.snapshot)}
        columns = {
            "filter": np.concatenate(list(bloom(rows))),
            **columns_of(rows),
            "read": np.frombuffer(read.encode(), "u1"),
        }
        return safetensors_file.encode_columns(metadata, columns)

    @classmethod
    def parse(cls, blob: bytes | memoryview, namespace: str) -> Overlay:
        """Parse a whole file. All of it is checked, since it is not synced to the device.

        Raises:
            CorruptEntryError: It is damaged, or not of this namespace.
        """
        more = {"filter": "<u8", "read": "u1"}
        segment = Segment.parse(blob, namespace, name="overlay", kind=KIND, more=more)
        segment.check_bytes()
        words, text = segment.column("filter"), segment.column("read").tobytes().decode("latin-1")
        width = len(NEVER)
        read = [text[at : at + width] for at in range(0, len(text), width)]
        snapshot = SnapshotName.parse(segment.metadata.get("of", ""))
        if snapshot is None or len(words) != words_for(len(segment)) or not all(map(is_ulid, read)):
            raise CorruptEntryError("overlay: columns do not fit", reason="shape")
        return cls(snapshot, segment, np.require(words, requirements="A").data, read)


# -- announcing ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    """One key to announce, and its callbacks."""

    nbytes: int
    done: list[Callable[[bool], None]]


class Announcer:
    """Collects the keys that one process stored, and announces them in deltas.

    A key waits from ``add`` until a delta with its row is confirmed, or until it is given up; then
    its callbacks are called once. A failed write is repeated under a new name, without limit. A key
    is given up by ``close``, after an error of ours, and when too many wait.

    For the loop's thread only. The task runs while a key waits.

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
        clock: ServerClock | None = None,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            writers: How many writers the fleet has (``ManifestIndex.writers``); no I/O.
            newest: The newest name that this process has accepted (``ManifestIndex.newest``).
            pause_s: The least pause between two deltas; how long the first key waits for others.
            clock: The server's clock; a new one if None.
        """
        self._store = store
        self._layout = layout
        self._counters = counters
        self._writers = writers
        self._newest = newest
        self._pause_s = pause_s
        self._waiting: dict[bytes, _Item] = {}
        self._sending = 0  # how many of these, from the first, are in the delta being written
        self._urgent = 0  # how many of the others are sent without a pause
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._names = Names()
        self._clock = clock or ServerClock()
        self._until_ask = 0  # deltas until the clock is asked again
        self._sent_s = -math.inf
        self._complained = False
        self._said_full = False

    def __len__(self) -> int:
        """How many keys wait for a confirmation."""
        return len(self._waiting)

    def add(self, key: Key, nbytes: int, done: Callable[[bool], None]) -> None:
        """Announce one key soon; never waits.

        Args:
            nbytes: Size of its object; 0 if not known.
            done: Called once in the loop's thread: with True when the bucket has confirmed the
                delta, with False when the key was given up. Must not wait.
        """
        item = self._waiting.get(key.digest)
        if self._closed or (item is None and len(self._waiting) >= MAX_WAITING):
            if not self._closed and not self._said_full:
                self._said_full = True
                log.error(
                    "more than %d keys wait to be announced; further ones are missing from the "
                    "index until the next listing",
                    MAX_WAITING,
                )
            done(False)
            return
        if item is None:
            self._waiting[key.digest] = _Item(nbytes, [done])
        else:
            item.nbytes = nbytes or item.nbytes
            item.done.append(done)
        if not self._sending and len(self._waiting) >= BATCH_ROWS:
            self._hurry.set()
        self._start()

    def send_soon(self) -> None:
        """Send the waiting keys now, without the rest of a pause, also of one after a failure."""
        self._urgent = len(self._waiting) - self._sending
        self._hurry.set()

    def close(self) -> None:
        """Give up the waiting keys, and take no more; returns at once. Idempotent."""
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
            if self._waiting:  # a key came after the last check
                self._start()
            return
        self._closed = True
        self._settle(list(self._waiting), confirmed=False)

    async def _run(self) -> None:
        while self._waiting:
            await self._wait_for_more()
            batch = dict(islice(self._waiting.items(), BATCH_ROWS))
            self._sending = len(batch)
            self._urgent = max(0, self._urgent - len(batch))
            self._sent_s = time.monotonic()
            confirmed = False
            # If this batch fails, the others may still succeed.
            with contained(self._counters, "announcing %d keys", len(batch)):
                await self._put(batch)
                confirmed = True
            self._settle(list(batch), confirmed=confirmed)

    def _settle(self, digests: list[bytes], *, confirmed: bool) -> None:
        items = [self._waiting.pop(digest) for digest in digests]
        self._sending = 0
        for item in items:
            for done in item.done:
                done(confirmed)

    async def _wait_for_more(self) -> None:
        """Wait until the pause is over, a batch is full, or ``send_soon`` is called."""
        if not self._urgent and len(self._waiting) < BATCH_ROWS:
            self._hurry.clear()
            pace_s = max(self._pause_s, self._pause_s / PAUSE_S * self._writers())
            since_s = time.monotonic() - self._sent_s
            await _wait(self._hurry, max(self._pause_s, pace_s - since_s))

    async def _put(self, batch: Mapping[bytes, _Item]) -> None:
        """Write one delta; repeat until the bucket has it."""
        body = encode_delta(
            list(batch), [item.nbytes for item in batch.values()], self._layout.namespace
        )
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S, uniform=jitter.uniform)
        while True:
            self._hurry.clear()  # before the attempt: `send_soon` during it skips the next pause
            try:
                await self._ask_clock()
                # A new name for each attempt: readers list names around the present time.
                name = self._names.next(self._clock.now_s(), at_least=self._newest())
                await self._store.put_if_absent(deltas_prefix(self._layout) + name, body)
            except ConflictError:
                pass  # it is ours, and its reply was lost: no other process uses the name
            except (UnavailableError, AccessError) as exc:
                self._failed(exc)
                pause_s = backoff.next_s()
                denied = isinstance(exc, AccessError)
                await _wait(self._hurry, _DENIED_PAUSE_S if denied else pause_s)
                continue
            self._complained = False
            self._until_ask -= 1
            self._counters.add("announced", len(batch))
            return

    async def _ask_clock(self) -> None:
        if self._until_ask > 0:
            return
        # A process that may not read what it wrote goes by its own clock.
        with suppress(AccessError):
            await self._clock.ask(self._store, self._layout)
        self._until_ask = _ASK_CLOCK_EVERY
        self._names = Names()  # new names need not exceed those by a clock that was ahead

    def _failed(self, exc: UnavailableError | AccessError) -> None:
        self._counters.add("announce_failed")
        if not self._complained:
            self._complained = True
            log.warning(
                "what this process stores cannot be announced to readers of the corpus and will "
                "be tried again: %s",
                exc,
            )


def encode_delta(
    digests: Sequence[bytes], nbytes: Sequence[int], namespace: str
) -> list[bytes | memoryview]:
    """Encode a delta as pieces; digests in any order."""
    return encode(merge([Rows.of(digests, nbytes)]), namespace)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, at most ``timeout_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()

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
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    CutBodyError,
    UnavailableError,
)
from s3ec.identity import Key, Layout, is_ulid
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
    window_start_s,
    writer_of,
)
from s3ec.index.snapshot import (
    Array,
    Rows,
    Segment,
    checked_columns,
    concat,
    encode,
    fences_of,
    slot_bits,
    sorted_order,
)
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
# A refusal lasts until somebody changes a policy, and too many refusals open the breaker.
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
    """The deltas that count for a snapshot, by ULID; one LIST for each thousand.

    Names that are no ULID, or that no server's clock made, are left out.

    Args:
        newest: The newest one that is known, where all others were looked for: what was named
            more than 15 minutes before it, and has not come by now, is late.
        left_out: Told of names that no server's clock made.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    prefix = deltas_prefix(layout)
    since_s = max(window_start_s(snapshot.ulid), time_s(newest) - MARGIN_S - AHEAD_S)
    first = first_ulid(since_s)
    found: dict[str, ObjectInfo] = {}

    async def collect(start_after: str) -> None:
        async for info in store.list(prefix, start_after=start_after):
            ulid = info.name.removeprefix(prefix)
            # A server may not heed `start-after`, and list what is older.
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
        await collect("")  # the server refuses `start-after`, as S3's directory buckets do
    return found


async def read_deltas(
    store: Store, layout: Layout, ulids: Iterable[str]
) -> dict[str, Rows | CorruptEntryError | UnavailableError | AccessError | None]:
    """The rows of some deltas, in any order.

    Returns:
        For each its rows, None where the bucket has it no more, or why there are none. One that
        cannot be had keeps back no other.
    """
    wanted = list(ulids)

    async def read(
        ulid: str,
    ) -> Rows | CorruptEntryError | UnavailableError | AccessError | None:
        name = deltas_prefix(layout) + ulid
        problem: CorruptEntryError | UnavailableError
        for _ in range(2):  # what was damaged on its way is good the next time
            try:
                body = await store.get(name, max_bytes=MAX_DELTA_BYTES)
                return None if body is None else parse_delta(body, layout, name)
            except CutBodyError as exc:  # a union that leaves it out would lose its rows
                problem = UnavailableError(str(exc))
            except CorruptEntryError as exc:
                problem = exc
            except (UnavailableError, AccessError) as exc:
                return exc
        return problem

    found = await in_parallel(wanted, read, width=_READS_AT_A_TIME)
    return dict(zip(wanted, found, strict=True))


def parse_delta(body: bytes | memoryview, layout: Layout, name: str) -> Rows:
    """Check a whole delta. Raises CorruptEntryError, which names it."""
    segment = Segment.parse(body, layout.namespace, name=name)
    segment.check()
    return segment.rows


# -- a node's overlay ------------------------------------------------------------------------------

KIND = "overlay-2"
_FEW_ROWS = 2**14  # at a time, where numpy lets no other thread run: half a millisecond
_COLUMNS = {
    **dict.fromkeys(("digest_hi", "digest_lo"), "<u8"),
    **dict.fromkeys(("nbytes", "named_s", "fences"), "<u4"),
    **dict.fromkeys(("marks", "read"), "u1"),
}


@dataclass(frozen=True, eq=False)
class Overlay:
    """The rows of all deltas that count for a snapshot. Immutable; any thread may look up.

    Attributes:
        snapshot: That one.
        segment: The rows, each digest once.
        named_s: When the newest delta was named that has a row; uint32 seconds, shape (rows,).
        marks: A bit for each value of the low bits of digests' first halves; most digests that
            are not here find a 0. A power of two of bytes.
        ulids: Of the deltas, in rising order, one behind the other.
    """

    snapshot: SnapshotName
    segment: Segment
    named_s: Array
    marks: memoryview
    ulids: str

    @classmethod
    def empty(cls, snapshot: SnapshotName) -> Overlay:
        """That of a snapshot of which no delta was read."""
        rows = Rows.of([], [])
        return cls(snapshot, Segment.of(rows), np.empty(0, "<u4"), memoryview(b"\0"), "")

    @cached_property
    def read(self) -> list[str]:
        """ULIDs of the deltas, in rising order."""
        width = len(NEVER)
        return [self.ulids[at : at + width] for at in range(0, len(self.ulids), width)]

    @cached_property
    def fresh_rows(self) -> int:
        """Rows that the snapshot does not hold for certain."""
        return int(np.count_nonzero(self.named_s >= int(time_s(self.snapshot.ulid))))

    @property
    def fresh_deltas(self) -> int:
        """Deltas of these."""
        return len(self.read) - bisect_left(self.read, self.snapshot.ulid)

    @property
    def writers(self) -> int:
        """Writers of the deltas of the last 15 minutes."""
        if not self.read:
            return 0
        first = first_ulid(time_s(self.read[-1]) - MARGIN_S)
        return len({writer_of(ulid) for ulid in self.read[bisect_left(self.read, first) :]})

    def named(self, hi: int, lo: int) -> int:
        """When the newest delta was named that has this digest, in seconds; -1 for none."""
        row = self.segment.find(hi, lo)
        return -1 if row < 0 else int(self.named_s[row])

    def encode_with(
        self, snapshot: SnapshotName, deltas: Mapping[str, Rows], namespace: str
    ) -> list[bytes | memoryview]:
        """The pieces of the file of the next overlay; 20 ms for 100,000 rows.

        What does not count for its snapshot is left out.

        Args:
            snapshot: The next overlay's.
            deltas: ULID to rows; none that is here already.
            namespace: Of all of them.
        """
        start_s = window_start_s(snapshot.ulid)
        first = first_ulid(start_s)
        read = sorted(ulid for ulid in {*self.read, *deltas} if ulid >= first)
        stay: Any = self.named_s >= start_s
        if stay.all():
            stay = slice(None)
        parts, named = [self.segment.rows.select(stay)], [self.named_s[stay]]
        for ulid, rows in deltas.items():
            parts.append(rows)
            named.append(np.full(len(rows), int(time_s(ulid)), "<u4"))
        rows, named_s = _newest(concat(parts), np.concatenate(named))
        columns = {
            "digest_hi": rows.hi,
            "digest_lo": rows.lo,
            "nbytes": rows.nbytes,
            "named_s": named_s,
            "fences": fences_of(rows.hi, slot_bits(len(rows))),
            "marks": _marks(rows.hi),
            "read": np.frombuffer("".join(read).encode(), "u1"),
        }
        metadata = {
            "s3ec": KIND,
            "namespace": namespace,
            "entries": str(len(rows)),
            "of": str(snapshot),
        }
        return safetensors_file.encode_columns(metadata, columns)

    @classmethod
    def parse(cls, blob: bytes | memoryview, namespace: str) -> Overlay:
        """A whole file; all of it is read, since it is not synced to the device.

        Raises:
            CorruptEntryError: It is damaged, or none of this namespace.
        """
        whole, name = memoryview(blob), "overlay"
        front = safetensors_file.parse_columns(whole, kind=KIND, namespace=namespace, name=name)
        front.check_data(whole, name)
        found = checked_columns(front, whole, _COLUMNS, name)
        snapshot = SnapshotName.parse(front.metadata.get("of", ""))
        marks, ulids = found["marks"], found["read"].tobytes().decode("ascii", "replace")
        if (
            snapshot is None
            or len(found["named_s"]) != len(found["digest_hi"])
            or len(ulids) % len(NEVER)
            or len(marks) < 1
            or len(marks) & (len(marks) - 1)
        ):
            raise CorruptEntryError("overlay: columns do not fit", reason="shape")
        rows = Rows(found["digest_hi"], found["digest_lo"], found["nbytes"])
        return cls(
            snapshot,
            Segment(rows, found["fences"], name=name, blob=whole),
            found["named_s"],
            marks.data,
            ulids,
        )


def _newest(rows: Rows, named_s: Array) -> tuple[Rows, Array]:
    """One row of each digest, with the latest time of all of its rows."""
    if not len(rows):
        return rows, named_s
    order = sorted_order(rows.hi, rows.lo)
    rows, named_s = rows.select(order), named_s.take(order)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (rows.hi[1:] != rows.hi[:-1]) | (rows.lo[1:] != rows.lo[:-1])
    if begins.all():
        return rows, named_s
    starts = np.flatnonzero(begins)
    last = np.append(starts[1:], len(rows)) - 1
    return rows.select(last), np.maximum.reduceat(named_s, starts)


def _marks(hi: Array) -> Array:
    """16 to 32 bits a digest; one in 20 that is not there finds a 1."""
    bits = 8 << (2 * len(hi)).bit_length()
    found = np.zeros(bits, np.bool_)
    for start in range(0, len(hi), _FEW_ROWS):
        found[hi[start : start + _FEW_ROWS] & np.uint64(bits - 1)] = True
    return np.packbits(found, bitorder="little")


# -- announcing ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    """One key to announce, and whom to tell of it."""

    nbytes: int
    done: list[Callable[[bool], None]]


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
        clock: ServerClock | None = None,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            writers: How many writers the fleet has (``ManifestIndex.writers``); no I/O.
            newest: The newest name that this process has accepted (``ManifestIndex.newest``).
            pause_s: The least pause between two deltas; how long the first key waits for others.
            clock: The server's time; a new one if None.
        """
        self._store = store
        self._layout = layout
        self._counters = counters
        self._writers = writers
        self._newest = newest
        self._pause_s = pause_s
        self._waiting: dict[bytes, _Item] = {}
        self._sending: dict[bytes, _Item] = {}
        self._urgent = 0  # so many of those that wait are not held back
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
        return len(self._sending.keys() | self._waiting.keys())

    def add(self, key: Key, nbytes: int, done: Callable[[bool], None]) -> None:
        """Announce one key soon; never waits.

        Args:
            nbytes: Size of its object; 0 where it is not known.
            done: Called once in the loop's thread: True when the bucket has confirmed the delta,
                False when it was given up. Must not wait.
        """
        waiting = self._waiting.get(key.digest)
        if self._closed or (waiting is None and len(self._waiting) >= MAX_WAITING):
            if not self._closed and not self._said_full:
                self._said_full = True
                log.error(
                    "more than %d keys wait to be announced; further ones are missing from the "
                    "index until the next listing",
                    MAX_WAITING,
                )
            done(False)
            return
        if waiting is None:
            self._waiting[key.digest] = _Item(nbytes, [done])
        else:
            waiting.nbytes = nbytes or waiting.nbytes
            waiting.done.append(done)
        if len(self._waiting) >= BATCH_ROWS:
            self._hurry.set()
        self._start()

    def send_soon(self) -> None:
        """Send what waits now, without waiting out the pace or a pause after a failure."""
        self._urgent = len(self._waiting)
        self._hurry.set()

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
                await self._put(self._sending)
                confirmed = True
            items, self._sending = list(self._sending.values()), {}
            _tell(items, confirmed=confirmed)

    async def _collect(self) -> dict[bytes, _Item]:
        """Wait for a batch, by the pace, and take it."""
        if not self._urgent and len(self._waiting) < BATCH_ROWS:
            self._hurry.clear()
            pace_s = max(self._pause_s, self._pause_s / PAUSE_S * self._writers())
            since_s = time.monotonic() - self._sent_s
            await _wait(self._hurry, max(self._pause_s, pace_s - since_s))
        batch = dict(islice(self._waiting.items(), BATCH_ROWS))
        for digest in batch:
            del self._waiting[digest]
        self._urgent = max(0, self._urgent - len(batch))
        self._sent_s = time.monotonic()
        return batch

    async def _put(self, batch: Mapping[bytes, _Item]) -> None:
        """Write one delta, until the bucket has it."""
        body = encode_delta(
            list(batch), [item.nbytes for item in batch.values()], self._layout.namespace
        )
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S, uniform=jitter.uniform)
        while True:
            self._hurry.clear()  # before the attempt: who hurries during it does not wait after it
            try:
                await self._ask_clock()
                # A new name for each attempt: readers look for it around its time.
                name = self._names.next(self._clock.now_s(), at_least=self._newest())
                await self._store.put_if_absent(deltas_prefix(self._layout) + name, body)
            except ConflictError:
                pass  # our own, its reply was lost: nobody else has the name
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
        try:
            await self._clock.ask(self._store, self._layout)
        except AccessError as exc:  # one who may not read what it wrote: by our own clock
            log.debug("no look at the bucket's clock: %s", exc)
        self._until_ask = _ASK_CLOCK_EVERY
        # Names by a clock that was ahead are not to be kept up with.
        self._names = Names(of=self._names)

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
    """The pieces of a delta; digests in any order, each once."""
    rows = Rows.of(digests, nbytes)
    return encode(rows.select(sorted_order(rows.hi, rows.lo)), namespace)


def _tell(items: list[_Item], *, confirmed: bool) -> None:
    for item in items:
        for done in item.done:
            done(confirmed)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, at most so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()

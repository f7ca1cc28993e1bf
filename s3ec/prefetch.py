# SPDX-License-Identifier: Apache-2.0
"""Brings wanted embeddings to this node and pins them, off the scheduler's thread.

``submit`` and ``drain`` are memory only and callable from any thread; everything else happens
on a LoopThread and its disk pool.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, TierError, UnavailableError
from s3ec.identity import Key, Layout
from s3ec.index.base import Index
from s3ec.loop import LoopThread
from s3ec.modality import ModalityRecords, Record
from s3ec.store.base import Store
from s3ec.tier import Pin, Tier
from s3ec.tier.local import LocalKeys

log = logging.getLogger(__name__)


class Priority(enum.IntEnum):
    """Order of the queue: what a request waits for now comes before what it may need later."""

    DEMAND = 0
    LOOKAHEAD = 1


class Outcome(enum.Enum):
    """How a fetch ended."""

    READY = "ready"
    ABSENT = "absent"  # neither here nor in the bucket
    MISMATCH = "mismatch"  # there, but not what this request needs
    CORRUPT = "corrupt"  # there, but unusable, twice
    UNAVAILABLE = "unavailable"  # the bucket or the disk did not answer in time


@dataclass(frozen=True, slots=True)
class Want:
    """One embedding that somebody asks for.

    Attributes:
        key: What to bring.
        modality: Selects the width and dtype that the entry must have.
        rows: Rows that the request has room for; other entries are a mismatch.
        priority: Place in the queue; a later want for the same key can only improve it.
    """

    key: Key
    modality: str
    rows: int
    priority: Priority = Priority.DEMAND


@dataclass(frozen=True, slots=True)
class Fetched:
    """The end of one want. Whoever drains it owns the pin and must release it."""

    want: Want
    outcome: Outcome
    pin: Pin | None = None
    source: Literal["tier", "bucket"] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the prefetcher; bytes are of entries being downloaded at one moment."""

    max_concurrency: int = 16
    max_inflight_bytes: int = 2**30
    max_queued: int = 100_000
    deadline_s: float = 30.0


class Prefetcher:
    """A queue of wants and a bounded number of fetches."""

    def __init__(
        self,
        loop: LoopThread,
        *,
        store: Store,
        tier: Tier,
        layout: Layout,
        index: Index,
        records: ModalityRecords,
        local: LocalKeys,
        counters: Counters,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._store = store
        self._tier = tier
        self._layout = layout
        self._index = index
        self._records = records
        self._local = local
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._sequence = 0
        self._reset()
        _PREFETCHERS.add(self)

    def _reset(self) -> None:
        """Start empty; also in a forked child, where the parent's tasks and pins are not ours."""
        self._done: deque[Fetched] = deque()
        # The rest is touched by the loop's thread only.
        self._heap: list[tuple[int, int, Want]] = []
        self._waiting: dict[bytes, Priority] = {}
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._inflight_bytes = 0
        self._room_wanted: list[asyncio.Future[None]] = []
        self._unpinning: set[asyncio.Task[None]] = set()

    # -- any thread ------------------------------------------------------------------------

    def submit(self, wants: Sequence[Want]) -> None:
        """Queue some wants; a want that is queued or running already is not doubled."""
        if not wants:
            return
        try:
            self._loop.call(self._enqueue, list(wants))
        except RuntimeError:  # stopped, or no thread to be had
            self._done.extend(Fetched(want, Outcome.UNAVAILABLE) for want in wants)

    @property
    def has_news(self) -> bool:
        """Whether drain would return something."""
        return bool(self._done)

    def drain(self) -> list[Fetched]:
        """Take what has finished since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def release(self, pins: Iterable[Pin]) -> None:
        """Unpin in the disk pool; never waits."""
        pins = list(pins)
        if pins:
            with suppress(RuntimeError):  # stopped: closing the tier gives all pins back
                self._loop.submit(self._unpin(pins))

    # -- the loop's thread -----------------------------------------------------------------

    async def _unpin(self, pins: Sequence[Pin]) -> None:
        for pin in pins:
            await self._loop.disk(self._tier.unpin, pin)

    def _give_back(self, pin: Pin) -> None:
        """Unpin what a fetch that was cancelled no longer hands out."""
        task = asyncio.get_running_loop().create_task(self._unpin([pin]), name="s3ec-unpin")
        self._unpinning.add(task)
        task.add_done_callback(self._unpinning.discard)

    async def _pinning(self, function: Callable[..., Pin | None], *args: object) -> Pin | None:
        """Await a disk call that pins; its pin is given back if we are cancelled meanwhile."""

        def too_late(call: asyncio.Future[Pin | None]) -> None:
            if not call.cancelled() and call.exception() is None and (pin := call.result()):
                self._give_back(pin)

        call = asyncio.ensure_future(self._loop.disk(function, *args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(too_late)
            raise

    async def _reserve(self, nbytes: int) -> None:
        """Wait until so many bytes more may be in flight; anything may be alone."""
        while self._inflight_bytes and self._inflight_bytes + nbytes > (
            self._limits.max_inflight_bytes
        ):
            room = asyncio.get_running_loop().create_future()
            self._room_wanted.append(room)
            await room
        self._inflight_bytes += nbytes

    def _free(self, nbytes: int) -> None:
        self._inflight_bytes -= nbytes
        wanted, self._room_wanted = self._room_wanted, []
        for room in wanted:
            if not room.done():
                room.set_result(None)

    def _enqueue(self, wants: list[Want]) -> None:
        for want in wants:
            digest = want.key.digest
            queued = self._waiting.get(digest)
            if digest in self._running or (queued is not None and queued <= want.priority):
                continue
            if queued is None and len(self._waiting) >= self._limits.max_queued:
                self._counters.add("prefetch.overflow")
                self._done.append(Fetched(want, Outcome.UNAVAILABLE))
                continue
            # An improved want is pushed again; the worse entry is skipped when it surfaces.
            self._waiting[digest] = want.priority
            self._sequence += 1
            heapq.heappush(self._heap, (want.priority, self._sequence, want))
        self._start_some()

    def _start_some(self) -> None:
        while self._heap and len(self._running) < self._limits.max_concurrency:
            priority, _, want = heapq.heappop(self._heap)
            digest = want.key.digest
            if self._waiting.get(digest) != priority:
                continue
            del self._waiting[digest]
            task = asyncio.get_running_loop().create_task(
                self._run(want), name=f"s3ec-fetch-{digest.hex()[:8]}"
            )
            self._running[digest] = task

    async def _run(self, want: Want) -> None:
        started = self._clock()
        result = Fetched(want, Outcome.UNAVAILABLE)
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                result = await self._fetch(want)
        except asyncio.CancelledError:
            # Only the end of the loop does this: nothing more is to be started.
            self._heap.clear()
            self._waiting.clear()
            raise
        except (UnavailableError, TimeoutError, TierError) as exc:
            log.debug("fetch of %s: %s", want.key.digest.hex(), exc)
        except AccessError as exc:
            self._counters.add("fetch.denied")
            log.debug("fetch of %s: %s", want.key.digest.hex(), exc)
        except Exception:
            # The top of a task: nothing above would report it, and a request waits for it.
            self._counters.add("internal_errors")
            log.exception("fetch of %s", want.key.digest.hex())
        finally:
            seconds = self._clock() - started
            self._count(result, seconds)
            self._done.append(Fetched(want, result.outcome, result.pin, result.source, seconds))
            self._running.pop(want.key.digest, None)
            self._start_some()

    def _count(self, result: Fetched, seconds: float) -> None:
        self._counters.add(f"fetch.{result.outcome.value}")
        if result.pin is not None:
            self._counters.add(f"fetch_items.{result.source}")
            self._counters.add(f"fetch_bytes.{result.source}", result.pin.nbytes)
            self._counters.add(f"fetch_seconds.{result.source}", seconds)
            log.debug(
                "fetched digest=%s source=%s nbytes=%d seconds=%.6f",
                result.want.key.digest.hex(),
                result.source,
                result.pin.nbytes,
                seconds,
            )

    async def _fetch(self, want: Want) -> Fetched:
        pin = await self._pinning(self._tier.pin, want.key)
        if pin is not None:
            return await self._check_local(want, pin)
        self._local.discard(want.key)
        record = await self._records.get(want.modality)
        if record is None:
            self._counters.add("mismatch.no_record")
            return Fetched(want, Outcome.MISMATCH)
        return await self._download(want, Shape(want.rows, record.width, record.dtype))

    async def _check_local(self, want: Want, pin: Pin) -> Fetched:
        try:
            record = await self._records.get(want.modality)
        except (UnavailableError, AccessError):
            # The entry was compared with the record before it came to the tier; a restart while
            # the bucket is down can still be served from here.
            record = Record(pin.header.shape.width, pin.header.shape.dtype)
        except BaseException:
            self._give_back(pin)
            raise
        expected = None if record is None else Shape(want.rows, record.width, record.dtype)
        if self._fits(pin.header, want, expected):
            return Fetched(want, Outcome.READY, pin, "tier")
        self._give_back(pin)
        return Fetched(want, Outcome.MISMATCH)

    def _fits(self, header: Header, want: Want, expected: Shape | None) -> bool:
        """Whether this entry is what the request has room for; counts what differs."""
        if expected is None:
            self._counters.add("mismatch.no_record")
            return False
        for field in ("rows", "width", "dtype"):
            if getattr(header.shape, field) != getattr(expected, field):
                if self._counters.get(f"mismatch.{field}") == 0:
                    log.warning(
                        "an entry of %s has %s %s where the request needs %s; it counts as a "
                        "miss (logged once per kind)",
                        self._layout.namespace,
                        field,
                        getattr(header.shape, field),
                        getattr(expected, field),
                    )
                self._counters.add(f"mismatch.{field}")
                return False
        if header.modality != want.modality:
            self._counters.add("mismatch.modality")
            return False
        return True

    async def _download(self, want: Want, expected: Shape) -> Fetched:
        # An honest entry is the tensor and a header; anything larger is refused unread.
        max_bytes = expected.nbytes + 8 + codec.HEADER_LIMIT
        name = self._layout.object(want.key)
        await self._reserve(max_bytes)
        try:
            for attempt in (1, 2):
                try:
                    body = await self._store.get(name, max_bytes=max_bytes)
                    if body is None:
                        self._index.forget(want.key)
                        return Fetched(want, Outcome.ABSENT)
                    header = await self._loop.disk(self._verify, body, want.key)
                    break
                except CorruptEntryError as exc:
                    if exc.reason == "size":
                        # Of no use to this request, whose rows a client may have made up; it
                        # may be what the next one needs.
                        self._counters.add("mismatch.size")
                        return Fetched(want, Outcome.MISMATCH)
                    self._counters.add(f"corrupt.{exc.reason}")
                    log.warning(
                        "entry %s is unusable (attempt %d): %s", want.key.digest.hex(), attempt, exc
                    )
            else:
                self._index.forget(want.key)
                return Fetched(want, Outcome.CORRUPT)
            if not self._fits(header, want, expected):
                return Fetched(want, Outcome.MISMATCH)
            pin = await self._pinning(self._keep, want.key, body)
        finally:
            self._free(max_bytes)
        if pin is None:
            return Fetched(want, Outcome.UNAVAILABLE)
        return Fetched(want, Outcome.READY, pin, "bucket")

    def _verify(self, body: bytes, key: Key) -> Header:
        return codec.verify(body, namespace=self._layout.namespace, identifier=key.identifier)

    def _keep(self, key: Key, body: bytes) -> Pin | None:
        self._tier.publish(key, [body])
        self._local.add(key)
        return self._tier.pin(key)


_PREFETCHERS: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for prefetcher in list(_PREFETCHERS):
        prefetcher._reset()


os.register_at_fork(after_in_child=_after_fork_in_child)

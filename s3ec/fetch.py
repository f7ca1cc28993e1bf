# SPDX-License-Identifier: Apache-2.0
"""One fetch of an embedding: the request, the sources it may come from, and the result."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    CorruptEntryError,
    CutBodyError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Key, Layout
from s3ec.index.reader import BAD_OBJECT_TTL_S, ManifestIndex
from s3ec.modality import ModalityRecords, Record
from s3ec.runtime import LoopThread
from s3ec.spans import Spans
from s3ec.store.base import Blob, Store, parts_as_they_come
from s3ec.store.places import Place, past_bad_copies
from s3ec.tier.claims import Claim
from s3ec.tier.entries import LocalKeys
from s3ec.tier.entry_writer import Incoming
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.residents import Residents
from s3ec.tier.tier import Tier

log = logging.getLogger(__name__)


class ByteBudget:
    """Bounds the bytes in use: a caller waits for room, and one above the budget runs alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_used(self) -> bool:
        """True if any bytes are in use."""
        return self._held_bytes > 0

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` fit into the budget, or nothing else is in use; then take them."""
        while self._held_bytes and self._held_bytes + nbytes > self._limit_bytes:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room
        self._held_bytes += nbytes

    def free(self, nbytes: int) -> None:
        """Release bytes that were taken."""
        self._held_bytes -= nbytes
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)


class Priority(enum.IntEnum):
    """Order of the queue: items that a request waits for come before those it may need later."""

    DEMAND = 0
    LOOKAHEAD = 1
    FORGOTTEN = 2  # no request waits for it any more; it may still be of use


class FetchOutcome(enum.Enum):
    """How a fetch ended."""

    READY = "ready"
    ABSENT = "absent"  # neither here nor in the bucket
    MISMATCH = "mismatch"  # there, but it does not fit this request
    CORRUPT = "corrupt"  # there, but unusable, twice; or known to be so, and not fetched
    UNAVAILABLE = "unavailable"  # the bucket or the disk did not answer in time


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One embedding that a caller requests.

    Attributes:
        key: The embedding's key.
        modality: Selects the width and dtype that the entry must have.
        rows: Rows that the request has room for; other entries are a mismatch.
        priority: Place in the queue; a later request for the same key can only improve it.
    """

    key: Key
    modality: str
    rows: int
    priority: Priority = Priority.DEMAND


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of one request. The caller passes ``entry`` to ``Residents.release`` when done."""

    want: FetchRequest
    outcome: FetchOutcome
    entry: OpenEntry | None = None
    source: Literal["tier", "bucket"] | None = None
    seconds: float = 0.0


# Larger objects are fetched in ranges of this size, since one connection to S3 carries some
# 95 MiB/s. Ranges of half the size arrive sooner and cost more requests: they are for an object
# that is fetched alone.
PART_BYTES = 4 * 2**20
# This many ranges of one object, or twice as many halves, are requested or wait for verification.
PARTS_AT_A_TIME = 8
# A large object gets as much more time than a small one as it needs at this rate.
_LEAST_BYTES_PER_S = 2**20
# An entry on this node waits at most this long for the bucket's record of its modality.
_RECORD_PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Sources:
    """Where entries come from and go to: one process's parts, see Node.

    ``fetched`` is called with each key that came from the bucket; it must not wait.
    """

    store: Store
    tier: Tier
    layout: Layout
    index: ManifestIndex
    records: ModalityRecords
    local: LocalKeys
    residents: Residents
    spans: Spans = field(default_factory=Spans)
    fetched: Callable[[Key], None] = lambda _: None


class Fetcher:
    """Fetches one embedding per call; any number of concurrent calls. The loop's thread only.

    ``max_inflight_bytes`` bounds the bytes of bodies in memory over all calls; a larger body is
    fetched alone.
    """

    def __init__(
        self, loop: LoopThread, sources: Sources, counters: Counters, *, max_inflight_bytes: int
    ) -> None:
        self._loop = loop
        self._store = sources.store
        self._entries = sources.tier.entries
        self._writer = sources.tier.writer
        self._claims = sources.tier.claims
        self._layout = sources.layout
        self._index = sources.index
        self._records = sources.records
        self._local = sources.local
        self._residents = sources.residents
        self._fetched = sources.fetched
        self._counters = counters
        self._budget = ByteBudget(max_inflight_bytes)

    async def look(self, want: FetchRequest) -> FetchResult | None:
        """Open an entry on this node's disk, without waiting for the bucket.

        Returns:
            The result; None if the entry is not here, or cannot be opened.

        Raises:
            TierError: The disk does not answer.
        """
        if self._loop.watch.hangs:
            raise TierError("the disk does not answer")
        entry = await self._loop.disk(self._entries.open, want.key)
        if entry is None:
            self._local.discard(want.key)
            return None
        return await self._check_local(want, entry)

    async def fetch(
        self, want: FetchRequest, deadline: asyncio.Timeout, *, ignore_claim: bool
    ) -> FetchResult | None:
        """Bring one entry to this node.

        Args:
            deadline: Ends this call; moved for a large object.
            ignore_claim: True to fetch it even while another process does.

        Returns:
            The result; None if another process fetches it.

        Raises:
            UnavailableError, AccessError, TierError: The bucket or the disk failed or refused.
        """
        key = want.key
        if self._loop.watch.hangs:
            raise TierError("the disk does not answer")
        look = partial(self._entries.open_or_claim, key, ignore_claim=ignore_claim)
        found = await self._loop.disk(look, undo=self._release_claim)
        if found is None:
            with suppress(UnavailableError, AccessError):  # start reading it, for ``longer_s``
                await self._records.get_soon(want.modality, 0.0)
            return None
        if isinstance(found, OpenEntry):
            return await self._check_local(want, found)
        try:
            self._local.discard(key)
            if self._index.is_bad(key):
                return FetchResult(want, FetchOutcome.CORRUPT)
            record = await self._records.get(want.modality)
            if record is None:  # no embedding of this modality was stored yet
                self._counters.add("mismatch.no_record")
                return FetchResult(want, FetchOutcome.ABSENT)
            expected = Shape(want.rows, record.width, record.dtype)
            return await self._download(want, expected, deadline)
        finally:
            self._loop.disk_soon(self._claims.release, found)

    def longer_s(self, want: FetchRequest) -> float:
        """Return how much more time than a small object this one may take; from memory.

        Returns:
            Seconds; 0 if its size is not known, since no record of its modality was read yet.
        """
        record = self._records.expected(want.modality)
        if record is None:
            return 0.0
        return _longer_s(_most_bytes(Shape(want.rows, record.width, record.dtype)))

    def _release_claim(self, found: object) -> None:
        """Release a claim whose caller is gone; blocking. An open entry needs no release."""
        if isinstance(found, Claim):
            self._claims.release(found)

    # -- entries on this node ------------------------------------------------------------------

    async def _check_local(self, want: FetchRequest, entry: OpenEntry) -> FetchResult:
        try:
            record = await self._records.get_soon(want.modality, _RECORD_PATIENCE_S)
        except (UnavailableError, AccessError):
            # The entry was compared with the record before it came to the tier. So a restart while
            # the bucket is down or slow can still be served from here.
            record = Record(entry.header.shape.width, entry.header.shape.dtype)
        if record is None:  # just saved here: its upload will write the record first
            self._counters.add("mismatch.no_record")
            return FetchResult(want, FetchOutcome.ABSENT)
        self._residents.add(want.key.digest, entry)
        misfit = _misfit(entry.header, want, Shape(want.rows, record.width, record.dtype))
        if misfit is None:
            return FetchResult(want, FetchOutcome.READY, entry, "tier")
        return self._mismatch(want, misfit, entry.header)

    def _mismatch(self, want: FetchRequest, field: str, found: Header) -> FetchResult:
        """Count a mismatch: this request cannot use the entry, others may.

        Args:
            field: The field that differs.
            found: The entry's header.
        """
        told = field in ("rows", "width", "dtype")
        if told and not self._counters.get(f"mismatch.{field}"):
            log.warning(
                "an entry of %s does not fit a request by its %s (it has %d rows of width %d, %s); "
                "it counts as a miss (logged once per kind)",
                *(self._layout.namespace, field),
                *(found.shape.rows, found.shape.width, found.shape.dtype),
            )
        self._counters.add(f"mismatch.{field}")
        return FetchResult(want, FetchOutcome.MISMATCH)

    # -- objects in the bucket -----------------------------------------------------------------

    async def _download(
        self, want: FetchRequest, expected: Shape, deadline: asyncio.Timeout
    ) -> FetchResult:
        max_bytes = _most_bytes(expected)
        whole = max_bytes <= PART_BYTES
        held_bytes = min(max_bytes, PARTS_AT_A_TIME * PART_BYTES)
        part_bytes = PART_BYTES if self._budget.is_used else PART_BYTES // 2
        await self._budget.take(held_bytes)
        try:
            _extend(deadline, _longer_s(max_bytes))
            return await self._ask_bucket(want, expected, None if whole else part_bytes)
        finally:
            self._budget.free(held_bytes)

    async def _ask_bucket(
        self, want: FetchRequest, expected: Shape, part_bytes: int | None
    ) -> FetchResult:
        """Fetch the object, and again if it is bad; as a whole if part_bytes is None."""
        key = want.key
        # True if the index lists an object of this size.
        fits = expected.nbytes < (self._index.nbytes(key) or 0) <= _most_bytes(expected)

        async def read(replicas: set[Place]) -> FetchResult | None:
            if part_bytes is None:
                found = await self._receive(want, expected)
            else:
                ranges = _ranges(expected, part_bytes)
                found = await self._receive_parts(want, expected, ranges, at_once=fits)
            if found is not None and found.outcome is FetchOutcome.MISMATCH and replicas:
                # The copy is valid but does not fit; it may be old. Home may have one that fits.
                raise CorruptEntryError("a copy of a replica does not fit", reason="size")
            return found

        for attempt in (1, 2):
            try:
                answer = await past_bad_copies(
                    self._layout.object(key),
                    read,
                    lambda exc: self._counters.add(f"corrupt.{exc.reason}"),
                )
            except CorruptEntryError as exc:
                if exc.reason == "size" and not fits:
                    # It does not fit this request, whose rows a client may have made up; it may
                    # fit the next one.
                    self._counters.add("mismatch.size")
                    return FetchResult(want, FetchOutcome.MISMATCH)
                self._note_corrupt(key, attempt, exc)
                if attempt == 2 and isinstance(exc, CutBodyError):
                    return FetchResult(want, FetchOutcome.UNAVAILABLE)
                continue
            if answer is None:
                if self._index.maybe_contains(key):
                    # The index need not note a key that it never held. It may appear at any moment.
                    self._index.mark_missing(key, absent=True)
                return FetchResult(want, FetchOutcome.ABSENT)
            self._index.mark_present(key)
            if answer.entry is not None:
                self._fetched(key)
            return answer
        return FetchResult(want, FetchOutcome.CORRUPT)

    def _note_corrupt(self, key: Key, attempt: int, exc: CorruptEntryError) -> None:
        """Count a bad copy; after the second whole one the object is a miss for an hour."""
        self._counters.add(f"corrupt.{exc.reason}")
        name = self._layout.object(key)
        if attempt == 1:
            log.info("object %s came bad and is fetched once more: %s", name, exc)
            return
        if isinstance(exc, CutBodyError):
            log.info("object %s does not come whole now: %s", name, exc)
            return
        self._index.mark_bad(key)
        self._counters.add("bad_objects")
        log.warning(
            "object %s is bad (%s): %s. This process treats it as a miss for %.0f s, and nothing "
            "is stored under its name until `s3ec verify --deep --repair` has deleted it",
            *(name, exc.reason, exc, BAD_OBJECT_TTL_S),
        )

    async def _receive(self, want: FetchRequest, expected: Shape) -> FetchResult | None:
        """Fetch an object as a whole; None if it is absent."""
        name = self._layout.object(want.key)
        body = await self._store.get(name, max_bytes=_most_bytes(expected))
        if body is None:
            return None
        kept = await self._loop.disk(self._keep, want, expected, body)
        if not isinstance(kept, OpenEntry):
            return self._mismatch(want, *kept)
        return FetchResult(want, FetchOutcome.READY, kept, "bucket")

    def _keep(
        self, want: FetchRequest, expected: Shape, body: Blob
    ) -> tuple[str, Header] | OpenEntry:
        """Verify a body, and keep it if it fits the request; blocking."""
        header = codec.verify(body, namespace=self._layout.namespace, identifier=want.key.stored)
        misfit = _misfit(header, want, expected)
        if misfit is not None:
            return misfit, header
        entry = self._writer.receive(want.key, [body], header)
        self._note_here(want.key, entry)
        return entry

    def _note_here(self, key: Key, entry: OpenEntry) -> None:
        self._local.add(key)
        self._residents.add(key.digest, entry)

    async def _receive_parts(
        self,
        want: FetchRequest,
        expected: Shape,
        ranges: Sequence[range],
        *,
        at_once: bool,
    ) -> FetchResult | None:
        """Fetch a large object in ranges that are written as they arrive; None if it is absent.

        Args:
            ranges: Ranges that cover the object.
            at_once: True to request all ranges at once. Else the first one alone comes first: it
                shows whether the object exists and fits.
        """
        disk, name = self._loop.disk, self._layout.object(want.key)
        at_a_time = PARTS_AT_A_TIME * PART_BYTES // len(ranges[0])
        incoming: Incoming | None = None
        early: list[tuple[int, Blob]] = []
        coming = parts_as_they_come(
            self._store, name, ranges, at_a_time=at_a_time, first_alone=not at_once
        )
        try:
            async with aclosing(coming) as parts:
                async for number, part in parts:
                    if part is None and incoming is None:
                        return None
                    if part is None:
                        raise CorruptEntryError("it vanished while it was read", reason="length")
                    if len(part) > len(ranges[number]):
                        raise CorruptEntryError("a range is longer than asked", reason="length")
                    if number:
                        early.append((ranges[number].start, part))
                    else:
                        begun = await disk(self._begin, want, expected, part, undo=_discard)
                        if not isinstance(begun, Incoming):
                            return self._mismatch(want, *begun)
                        incoming = begun
                    del part  # so that only parts_as_they_come bounds the parts in memory
                    if incoming is not None and early:
                        await disk(incoming.put, early)
                        early = []
            if incoming is None:
                return None
            entry = await disk(self._commit, want.key, incoming)
        finally:
            if incoming is not None:
                self._loop.disk_soon(incoming.discard)
        return FetchResult(want, FetchOutcome.READY, entry, "bucket")

    def _begin(
        self, want: FetchRequest, expected: Shape, first: Blob
    ) -> Incoming | tuple[str, Header]:
        """Check the header of an object, and make room for the rest; blocking."""
        verifier = codec.Verifier(
            first, namespace=self._layout.namespace, identifier=want.key.stored
        )
        misfit = _misfit(verifier.header, want, expected)
        if misfit is not None:
            return misfit, verifier.header
        return self._writer.begin(want.key, first, verifier)

    def _commit(self, key: Key, incoming: Incoming) -> OpenEntry:
        entry = incoming.commit()
        self._note_here(key, entry)
        return entry


def _misfit(header: Header, want: FetchRequest, expected: Shape) -> str | None:
    """Return the first field in which an entry does not fit the request; None if it fits."""
    for name in ("rows", "width", "dtype"):
        if getattr(header.shape, name) != getattr(expected, name):
            return name
    return None if header.modality == want.modality else "modality"


def _most_bytes(expected: Shape) -> int:
    """Return the largest valid size: tensor and header. Anything larger is refused unread."""
    return expected.nbytes + 8 + codec.HEADER_LIMIT


def _longer_s(max_bytes: int) -> float:
    """Return the seconds by which a large object's deadline is later than a small one's."""
    return max_bytes / _LEAST_BYTES_PER_S if max_bytes > PART_BYTES else 0.0


def _ranges(expected: Shape, part_bytes: int) -> list[range]:
    """Return the ranges to fetch a large object in; the last one has room for any header."""
    starts = list(range(0, expected.nbytes, part_bytes))
    stops = [*starts[1:], _most_bytes(expected)]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _extend(deadline: asyncio.Timeout, seconds: float) -> None:
    when = deadline.when()
    if when is not None and seconds:
        deadline.reschedule(when + seconds)


def _discard(incoming: object) -> None:
    if isinstance(incoming, Incoming):
        incoming.discard()

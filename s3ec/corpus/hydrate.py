# SPDX-License-Identifier: Apache-2.0
"""Hydrate: fill this node's tier from the bucket before traffic comes, with every byte verified.

Entries are read from the replicas first, as an engine reads them; home says which entries exist.

A hydration does not use an engine's prefetcher. A prefetcher fetches what a request needs, by
rows, width and modality, holds it open for that request, and evicts for it. Here only the object
itself tells these, no request waits, and no entry may be evicted for a new one. Both use the same
parts below: checksums, files, claims, and the announcements that other processes read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from s3ec import codec
from s3ec.corpus.entries import (
    MAX_ENTRY_BYTES,
    CorpusEntry,
    Outage,
    checked_header,
    download,
    scan,
)
from s3ec.counters import Counters, Report, unreported
from s3ec.errors import AccessError, ConfigError, CorruptEntryError, TierError, UnavailableError
from s3ec.fetch import ByteBudget
from s3ec.identity import Key, Layout, digest_of_name
from s3ec.modality import ModalityRecords, Record
from s3ec.node import open_tier
from s3ec.runtime import Backoff, LoopThread
from s3ec.store.base import PART_BYTES, Blob, Store
from s3ec.store.concurrency import Pace, for_each
from s3ec.store.open import open_places
from s3ec.store.places import Place, past_bad_copies
from s3ec.tier.claims import Claim
from s3ec.tier.evictor import NoRoomError
from s3ec.tier.files import is_full
from s3ec.tier.tier import Tier

if TYPE_CHECKING:
    from s3ec.settings import Settings

log = logging.getLogger(__name__)

# Bytes of bodies in memory at a time; a larger body is fetched alone.
_MAX_INFLIGHT_BYTES = 2**30
# The pauses between checks of an entry that another process fetches, and how long to wait for it.
# A process that hangs must not keep a pod from starting.
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.25
_CLAIM_PATIENCE_S = 30.0
# Attempts to fetch an object that arrives bad; one of them may only find its size.
_ATTEMPTS = 3
# Entries that one call of a disk thread checks, along with the room that is left.
_LOOKS = 16
# Entries get times of use in the order in which they were requested, so that the last one is
# evicted first. A float of today's time is not exact to a microsecond.
_RANK_S = 2e-6


@dataclass(frozen=True, slots=True)
class Wanted:
    """One entry to fetch.

    Attributes:
        key: Its key. The identifier may be empty.
        label: Its name in reports.
        nbytes: Size of its object; 0 if not known.
    """

    key: Key
    label: str
    nbytes: int = 0


FULL = "full"
"""The reason to stop that is no fault: fetches that have begun are completed."""


@dataclass(slots=True)
class Hydration:
    """The result of a hydration. Each requested entry counts once, so the counts add up to all.

    Attributes:
        namespace: Of the entries.
        folder: The tier's, ``cache_dir``.
        here: Entries that were on this node already, or that other processes fetched meanwhile.
        fetched: Entries that were fetched...
        fetched_bytes: ...and their size.
        left_out: Entries that were not tried, see ``stopped``...
        left_out_bytes: ...and their size as far as it was known.
        absent: Labels of entries that the bucket does not have.
        damaged: Labels of unusable entries, and in a word why.
        failed: Labels of entries that the store did not return, and why.
        stopped: The first reason for which entries were left out: ``full`` (the tier), or the
            error of the store or the disk as a sentence. Empty if none was left out.
        seconds: How long it took.
    """

    namespace: str
    folder: str
    here: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    left_out: int = 0
    left_out_bytes: int = 0
    absent: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    seconds: float = 0.0

    @property
    def wanted(self) -> int:
        """How many entries were requested."""
        others = len(self.absent) + len(self.damaged) + len(self.failed)
        return self.here + self.fetched + self.left_out + others

    @property
    def status(self) -> Literal["complete", "partial"]:
        """``complete`` if all requested entries are on this node now."""
        return "complete" if self.here + self.fetched == self.wanted else "partial"


def wanted_entry(entry: CorpusEntry) -> Wanted:
    """The request for an entry that was found or listed. Its size is 0 if not known."""
    return Wanted(Key("", entry.name, digest_of_name(entry.name)), entry.label, entry.nbytes)


async def everything(store: Store, layout: Layout) -> AsyncGenerator[Sequence[Wanted], None]:
    """All entries of a namespace in batches, as a listing shows them. The caller closes it."""
    async with aclosing(scan(store, layout.namespace)) as batches:
        async for entries in batches:
            yield list(map(wanted_entry, entries))


async def hydrate(
    store: Store,
    layout: Layout,
    wanted: Sequence[Wanted] | None,
    *,
    settings: Settings,
    loop: LoopThread,
    rate_limit_bytes_per_s: int | None = None,
    report: Report = unreported,
) -> Hydration:
    """Fetch entries into this node's tier; runs on ``loop``. See Corpus.hydrate.

    Args:
        settings: Say where the tier is, how large it may be, and how many objects are requested
            at a time.
        loop: Makes the disk calls.

    Raises:
        ConfigError: ``rate_limit_bytes_per_s`` is less than 1.

    Returns:
        The result, also where the store or the disk failed in the middle.
    """
    if rate_limit_bytes_per_s is not None and rate_limit_bytes_per_s < 1:
        raise ConfigError(
            f"`rate_limit_bytes_per_s` {rate_limit_bytes_per_s} is out of range; take 1 or more, "
            "or leave it out",
            field="rate_limit_bytes_per_s",
        )
    counters = Counters()
    tier = await loop.disk(
        partial(open_tier, settings, layout.namespace, counters, evicts=False), undo=Tier.close
    )
    places = None
    try:
        places = open_places(settings, store, counters, is_entry=layout.is_entry)
        work = _Hydrator(places or store, layout, loop, tier, Pace(rate_limit_bytes_per_s), report)
        source = everything(store, layout) if wanted is None else _one_batch(wanted)
        return await work.run(source, settings.max_concurrency)
    finally:
        if places is not None:  # home is the caller's
            await places.close_replicas()
        await asyncio.to_thread(tier.close)


class _MisfitError(Exception):
    """An entry is good, but differs from its modality's record: no request can use it."""


class _Hydrator:
    """One run. The loop's thread only.

    Each requested entry ends in exactly one count of Hydration. An entry without room is left out,
    and the next one is tried. After a fault of the store or the disk, entries on this node are
    still found, and the rest is counted as left out.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        loop: LoopThread,
        tier: Tier,
        pace: Pace,
        report: Report,
    ) -> None:
        self._store = store
        self._layout = layout
        self._disk = loop.disk
        self._tier = tier
        self._pace = pace
        self._report = report
        self._reading = ModalityRecords(store, layout)
        # A record that a replica returns while home does not answer counts too, to the job's end.
        self._records: dict[str, Record] = {}
        self._budget = ByteBudget(_MAX_INFLIGHT_BYTES)
        self._found = Hydration(layout.namespace, str(tier.folders.root))
        self._learning = asyncio.Lock()
        self._began_s = time.time()
        self._rank = 0
        self._outage = Outage()
        self._has_given_up = False
        # Bytes that still fit, by the last check; and bytes of fetches that have begun.
        self._room_bytes = self._coming_bytes = 0

    async def run(self, batches: AsyncGenerator[Sequence[Wanted], None], width: int) -> Hydration:
        started_s = time.monotonic()
        async with aclosing(batches):
            await for_each(self._looked_at(batches), self._see_to, width=width)
        self._found.seconds = time.monotonic() - started_s
        return self._found

    async def _see_to(self, what: tuple[Wanted, bool]) -> None:
        one, is_here = what
        self._rank += 1
        used_s = self._began_s - self._rank * _RANK_S
        if is_here:
            self._found.here += 1
        elif self._has_given_up or not self._reserve(one.nbytes):
            self._found.left_out += 1
            self._found.left_out_bytes += one.nbytes
        else:
            await self._bring(one, used_s)
        self._report("hydrating", self._found.fetched_bytes, None)

    async def _looked_at(
        self, batches: AsyncGenerator[Sequence[Wanted], None]
    ) -> AsyncGenerator[tuple[Wanted, bool], None]:
        """The requested entries, each with True if it is on this node.

        They are checked in batches: handing a call to a disk thread takes longer than a check.
        """
        async for batch in batches:
            for start in range(0, len(batch), _LOOKS):
                some = batch[start : start + _LOOKS]
                try:
                    are_here, room_bytes = await self._disk(self._look, some)
                except (OSError, TierError) as exc:
                    self._stop(f"the disk refuses: {exc}")
                    are_here, room_bytes = [False] * len(some), 0
                self._room_bytes = room_bytes - self._coming_bytes
                for looked_at in zip(some, are_here, strict=True):
                    yield looked_at

    def _look(self, some: Sequence[Wanted]) -> tuple[list[bool], int]:
        """Which entries are here, and the room that is left, shared with others; blocking."""
        are_here = [self._tier.entries.contains(one.key) for one in some]
        return are_here, 0 if all(are_here) else self._tier.evictor.room_bytes()

    async def _bring(self, one: Wanted, used_s: float) -> None:
        """Fetch an entry that is not here; count it in any case."""
        found = self._found
        brought_bytes = 0
        try:
            # Before the claim: a process that waits with a claim keeps others waiting.
            await self._pace.take(one.nbytes)
            claim = await self._claim_patiently(one)
            if claim is None:
                found.here += 1
                return
            try:
                brought_bytes = await self._fetch(one, used_s)
            finally:
                self._tier.claims.release(claim)
            self._outage.ends_with(None)
            if brought_bytes:
                found.fetched += 1
                found.fetched_bytes += brought_bytes
            else:
                found.absent.append(one.label)
        except CorruptEntryError as exc:
            self._outage.ends_with(None)
            found.damaged[one.label] = exc.reason
        except _MisfitError as exc:
            self._outage.ends_with(None)
            found.damaged[one.label] = str(exc)
        except (UnavailableError, AccessError) as exc:
            found.failed[one.label] = str(exc)
            if self._outage.ends_with(exc):
                self._stop(str(exc))
        except TierError as exc:
            self._stop(_full_or(exc))
            found.left_out += 1
            found.left_out_bytes += one.nbytes
        finally:
            self._coming_bytes -= one.nbytes
            self._room_bytes += one.nbytes - brought_bytes

    def _stop(self, reason: str) -> None:
        """Note why entries are left out; the first reason counts."""
        self._found.stopped = self._found.stopped or reason
        self._has_given_up = self._has_given_up or reason != FULL

    # -- what is here ----------------------------------------------------------------------------

    async def _claim_patiently(self, one: Wanted) -> Claim | None:
        """Claim an entry; None if it is on this node by now.

        An entry that another process fetches is waited for. After a limit both fetch it, since the
        other process may hang.
        """
        looks, waited_s = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S), 0.0
        while True:
            # A few system calls on a file in memory. No request waits for this loop.
            claim = self._tier.claims.take(one.key.digest)
            if claim is None and waited_s >= _CLAIM_PATIENCE_S:
                claim = Claim()
            if claim is not None:
                # In this order: the process that had the claim before has published by now.
                if not self._tier.entries.contains(one.key):
                    return claim
                self._tier.claims.release(claim)
                return None
            pause_s = looks.next_s()
            await asyncio.sleep(pause_s)
            waited_s += pause_s

    def _reserve(self, nbytes: int) -> bool:
        """Reserve room for ``nbytes`` more; False if there is none.

        Smaller entries that come later may still fit. Once an entry was left out, none of unknown
        size is tried: it might be downloaded for nothing.
        """
        if nbytes > self._room_bytes or (not nbytes and self._found.stopped):
            self._stop(FULL)
            return False
        self._room_bytes -= nbytes
        self._coming_bytes += nbytes
        return True

    # -- what the bucket has ---------------------------------------------------------------------

    async def _fetch(self, one: Wanted, used_s: float) -> int:
        """Fetch one object, again if it is bad.

        Returns:
            Its size; 0 if it is absent.

        Raises:
            CorruptEntryError: It stays bad.
            _MisfitError: Another attempt would change nothing.
        """
        name, nbytes, attempt = self._layout.object(one.key), one.nbytes, 1
        while True:
            try:
                receive = partial(self._receive, one.key, name, nbytes, used_s)
                received = await past_bad_copies(name, receive)
            except CorruptEntryError as exc:
                if attempt == _ATTEMPTS:
                    raise
                if exc.reason == "size":  # it was not known, or differs from the listing's
                    info = await self._store.head(name)
                    if info is None:
                        return 0
                    nbytes = info.nbytes
                else:
                    log.warning("%s is unusable (attempt %d): %s", name, attempt, exc)
                attempt += 1
                continue
            await self._pace.take(max(0, (received or 0) - one.nbytes))
            return received or 0

    async def _receive(
        self, key: Key, name: str, nbytes: int, used_s: float, _: Set[Place]
    ) -> int | None:
        """Download a whole object, and publish it; returns its size, None if it is absent.

        An unknown size is read from the object's own header. Asking home for it may be slow or
        fail, and a request for fewer bytes than a replica has would count as a miss there.
        """
        if nbytes > MAX_ENTRY_BYTES:
            raise CorruptEntryError(f"{nbytes} bytes are more than a job reads", reason="size")
        held_bytes = nbytes or PART_BYTES
        await self._budget.take(held_bytes)
        try:
            if nbytes:
                body = await download(self._store, name, nbytes)
            else:
                body = await self._store.get_range(name, 0, PART_BYTES)
            if body is None:
                return None
            header = checked_header(body, self._layout.namespace, key.digest)
            if nbytes or len(body) < PART_BYTES:
                await self._require_fit(header)
                await self._disk(self._keep, key, body, header, used_s)
                return len(body)
            nbytes = header.total_bytes
            del body  # not in memory together with the whole object
        finally:
            self._budget.free(held_bytes)
        return await self._receive(key, name, nbytes, used_s, _)

    def _keep(self, key: Key, body: Blob, header: codec.Header, used_s: float) -> None:
        """Check the values of an entry, and publish it; blocking."""
        codec.check_data(header, memoryview(body)[header.data_start :])
        self._tier.writer.receive(key, [body], header, used_s=used_s)

    async def _require_fit(self, header: codec.Header) -> None:
        """Raise _MisfitError for an entry that differs from its modality's record."""
        modality = header.modality
        async with self._learning:  # one request for all callers at a time
            record = self._records.get(modality) or await self._reading.get(modality)
            if record is None:
                raise _MisfitError("no record of its modality")
            self._records[modality] = record
        for name in ("width", "dtype"):
            if getattr(header.shape, name) != getattr(record, name):
                raise _MisfitError(name)


def _full_or(exc: TierError) -> str:
    cause = exc.__cause__
    full = isinstance(exc, NoRoomError) or (isinstance(cause, OSError) and is_full(cause))
    return FULL if full else str(exc)


async def _one_batch(wanted: Sequence[Wanted]) -> AsyncGenerator[Sequence[Wanted], None]:
    yield wanted

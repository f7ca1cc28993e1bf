# SPDX-License-Identifier: Apache-2.0
"""The queue of fetches: brings embeddings to this node, off the scheduler's thread.

``submit`` and ``drain`` touch memory only and may be called from any thread. Everything
else happens on a LoopThread and its disk pool.

There are two lanes, so that an entry on this node never waits for the bucket. The disk lane opens
entries that the disk is believed to hold. The download lane fetches the others. A request that
another process of the node is fetching waits outside both lanes. Its claim is checked every few
milliseconds. Once the claim is gone, the entry is opened from the disk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from s3ec.counters import Counters
from s3ec.errors import AccessError, TierError, UnavailableError
from s3ec.fetch import Fetcher, FetchOutcome, FetchRequest, FetchResult, Priority, Sources
from s3ec.runtime import Backoff, LoopThread, contained
from s3ec.spans import Work
from s3ec.store.concurrency import within
from s3ec.store.places import tell_of_home

__all__ = [
    "FetchOutcome",
    "FetchRequest",
    "FetchResult",
    "Limits",
    "Prefetcher",
    "Priority",
    "Sources",
]

log = logging.getLogger(__name__)

# The pause between two checks of waiting requests: at first, and at most while nothing changes.
_FIRST_LOOK_S = 0.002
_LAST_LOOK_S = 0.02
# Claims that one call of a disk thread checks; one takes about 2 us.
_LOOKS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the prefetcher.

    Attributes:
        max_concurrency: Concurrent downloads, and likewise concurrent disk reads.
        max_inflight_bytes: Bytes of bodies in memory at a time.
        max_queued: Requests that have not begun.
        deadline_s: Deadline of one fetch from its start; a large object gets more.
        claim_patience_s: How long a request waits for another process that fetches the same entry
            and may hang, before it is fetched here too. A large object gets as much more as its
            deadline does: a claim's owner that keeps its pace is not overtaken.
    """

    max_concurrency: int = 16
    max_inflight_bytes: int = 2**30
    max_queued: int = 100_000
    deadline_s: float = 30.0
    claim_patience_s: float = 5.0


class _Lane:
    """Requests queued in one lane, by priority and arrival, and the number that are running."""

    def __init__(self) -> None:
        self._queues: dict[Priority, OrderedDict[bytes, _Place]] = {
            priority: OrderedDict() for priority in Priority
        }
        self.under_way = 0

    def add(self, place: _Place, *, first: bool = False) -> None:
        """Queue a request behind the others of its priority, or before them."""
        digest, queue = place.want.key.digest, self._queues[place.want.priority]
        queue[digest] = place
        if first:
            queue.move_to_end(digest, last=False)

    def remove(self, place: _Place) -> None:
        """Remove a request, if it is queued here."""
        self._queues[place.want.priority].pop(place.want.key.digest, None)

    def take(self) -> _Place | None:
        """Return the next request; None if none is queued."""
        for queue in self._queues.values():
            if queue:
                return queue.popitem(last=False)[1]
        return None


@dataclass(slots=True)
class _Place:
    """Where a request is: queued in a lane, going (it has a task), or parked (waits for a claim).

    ========  =========  ====================================================================
    state     goes to    when
    ========  =========  ====================================================================
    (new)     queued     in the disk lane if the disk is believed to hold it, else to download
    queued    queued     its priority rises, or drops since no request waits any more
    queued    going      its lane has room
    going     queued     the disk does not have it: it moves to the download lane
    going     parked     another process of the node fetches it
    parked    queued     that claim is gone or too old: its disk read is queued
    going     (ended)    there is a result, which ``drain`` returns
    ========  =========  ====================================================================
    """

    want: FetchRequest
    lane: _Lane
    parked_s: float | None = None
    task: asyncio.Task[None] | None = None


class Prefetcher:
    """A queue of requests and a bounded number of fetches."""

    def __init__(
        self,
        loop: LoopThread,
        sources: Sources,
        *,
        counters: Counters,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._sources = sources
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._done: deque[FetchResult] = deque()
        self._far: deque[FetchRequest] = deque()
        # The rest is touched by the loop's thread only.
        self._fetcher = Fetcher(
            loop, sources, counters, max_inflight_bytes=limits.max_inflight_bytes
        )
        self._places: dict[bytes, _Place] = {}
        self._looks, self._downloads = _Lane(), _Lane()
        self._has_ended = False
        self._parked: dict[bytes, _Place] = {}
        self._watch: asyncio.Task[None] | None = None

    # -- any thread ------------------------------------------------------------------------

    def submit(self, wants: Sequence[FetchRequest]) -> None:
        """Queue some requests; one that is queued or running already is not added twice.

        FORGOTTEN puts a request that has not begun behind all others. It is still fetched and has
        a result, and a later request brings it forward again.
        """
        if not wants:
            return
        try:
            self._loop.call(self._enqueue, list(wants))
        except RuntimeError:  # stopped, or no thread can be started
            self._done.extend(FetchResult(want, FetchOutcome.UNAVAILABLE) for want in wants)

    @property
    def has_news(self) -> bool:
        """True if drain or drain_far would return something."""
        return bool(self._done or self._far)

    def drain(self) -> list[FetchResult]:
        """Return the results since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def drain_far(self) -> list[FetchRequest]:
        """Return the requests that continued to home since the last call; call it before drain."""
        return [self._far.popleft() for _ in range(len(self._far))]

    # -- the loop's thread -----------------------------------------------------------------

    def _enqueue(self, wants: list[FetchRequest]) -> None:
        for want in wants:
            digest = want.key.digest
            place = self._places.get(digest)
            if place is None:
                under_way = self._looks.under_way + self._downloads.under_way
                if len(self._places) - under_way >= self._limits.max_queued:
                    self._done.append(FetchResult(want, FetchOutcome.UNAVAILABLE))
                    continue
                lane = self._looks if self._sources.local(want.key) else self._downloads
                place = self._places[digest] = _Place(want, lane)
                lane.add(place)
            elif place.task is None and (
                want.priority < place.want.priority or want.priority is Priority.FORGOTTEN
            ):
                place.lane.remove(place)
                place.want = want
                if digest not in self._parked:
                    place.lane.add(place)
        self._start_some()

    def _start_some(self) -> None:
        if self._has_ended:
            return
        for lane in (self._looks, self._downloads):
            self._start_some_of(lane)

    def _start_some_of(self, lane: _Lane) -> None:
        while lane.under_way < self._limits.max_concurrency and (place := lane.take()) is not None:
            lane.under_way += 1
            place.task = asyncio.get_running_loop().create_task(
                self._run(place), name=f"s3ec-fetch-{place.want.key.digest.hex()[:8]}"
            )

    def stop(self) -> None:
        """Cancel the running fetches, and start no more; in the loop's thread.

        The store is closed next, and no fetch may use a closed one.
        """
        self._has_ended = True
        self._parked.clear()
        for place in list(self._places.values()):
            if place.task is not None:
                place.task.cancel()

    async def _run(self, place: _Place) -> None:
        want, lane = place.want, place.lane
        started, work = self._clock(), self._sources.spans.begin()
        result: FetchResult | None = FetchResult(want, FetchOutcome.UNAVAILABLE)
        try:
            with contained(self._counters, "fetch of %s", want.key.digest.hex()):
                result = await self._fetch(place)
        except BaseException:
            self.stop()  # this task is cancelled only at the end of the node or the loop
            raise
        finally:
            place.task = None
            lane.under_way -= 1
            if result is None and lane is self._looks:
                self._requeue(place, self._downloads)
            elif result is None:
                self._park(place)
            else:
                self._end(place, result, self._clock() - started)
                if work is not None:
                    self._end_span(work, result, remote=lane is self._downloads)
            self._start_some()

    async def _fetch(self, place: _Place) -> FetchResult | None:
        """Run the request in its lane; return None if it must move on."""
        want = place.want
        try:
            async with within(self._limits.deadline_s) as deadline:
                if place.lane is self._looks:
                    return await self._fetcher.look(want)
                late = self._is_late(place)
                tell_of_home.set(partial(self._far.append, want))  # in this task alone
                return await self._fetcher.fetch(want, deadline, ignore_claim=late)
        except (UnavailableError, TimeoutError, TierError) as exc:
            log.debug("fetch of %s: %s", want.key.digest.hex(), exc)
            return FetchResult(want, FetchOutcome.UNAVAILABLE)
        except AccessError as exc:
            return self._denied(want, exc)

    def _denied(self, want: FetchRequest, exc: AccessError) -> FetchResult:
        """Return the result of a refused fetch; a refusal of this key alone counts as absent.

        S3 denies absent keys to a caller without permission to list. Other keys may be there.
        """
        if not self._counters.get("fetch.denied"):
            log.warning("an entry is denied and counts as a miss (logged once): %s", exc)
        self._counters.add("fetch.denied")
        if exc.is_general:
            return FetchResult(want, FetchOutcome.UNAVAILABLE)
        if self._sources.index.maybe_contains(want.key):
            self._sources.index.mark_missing(want.key)
        return FetchResult(want, FetchOutcome.ABSENT)

    def _end(self, place: _Place, result: FetchResult, seconds: float) -> None:
        want = place.want
        self._count(result, seconds)
        self._done.append(FetchResult(want, result.outcome, result.entry, result.source, seconds))
        del self._places[want.key.digest]

    def _end_span(self, work: Work, result: FetchResult, *, remote: bool) -> None:
        """Report a fetch to tracing.

        Args:
            remote: True if the fetch ran in the download lane.
        """
        want, outcome, entry = result.want, result.outcome, result.entry
        went_wrong = outcome in (FetchOutcome.CORRUPT, FetchOutcome.UNAVAILABLE)
        with contained(self._counters, "span of a fetch"):
            self._sources.spans.end(
                "s3ec.fetch",
                work,
                {
                    "s3ec.key": want.key.digest.hex(),
                    "s3ec.modality": want.modality,
                    "s3ec.rows": want.rows,
                    "s3ec.priority": want.priority.name.lower(),
                    "s3ec.outcome": outcome.value,
                    "s3ec.source": result.source,
                    "s3ec.bytes": None if entry is None else entry.nbytes,
                },
                remote=remote and result.source != "tier",
                error=outcome.value if went_wrong else "",
            )

    def _count(self, result: FetchResult, seconds: float) -> None:
        sums: dict[str, float] = {f"fetch.{result.outcome.value}": 1}
        if result.entry is not None:
            sums[f"fetch_items.{result.source}"] = 1
            sums[f"fetch_bytes.{result.source}"] = result.entry.nbytes
            sums[f"fetch_seconds.{result.source}"] = seconds
            self._counters.observe(f"fetch_time.{result.source}", seconds)
            log.debug(
                "fetched digest=%s source=%s nbytes=%d seconds=%.6f",
                result.want.key.digest.hex(),
                result.source,
                result.entry.nbytes,
                seconds,
            )
        self._counters.add_all(sums)

    def _requeue(self, place: _Place, lane: _Lane) -> None:
        """Queue the request in a lane, before others of its priority: it has waited already."""
        place.lane = lane
        lane.add(place, first=True)

    # -- what another process fetches --------------------------------------------------------

    def _park(self, place: _Place) -> None:
        if place.parked_s is None:
            self._counters.add("fetch_parked")
            place.parked_s = self._clock()
        self._parked[place.want.key.digest] = place
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(
                self._watch_parked(), name="s3ec-parked"
            )

    def _is_late(self, place: _Place) -> bool:
        """Return True if it waited so long that the process that fetches it may hang."""
        if place.parked_s is None:
            return False
        patience_s = self._limits.claim_patience_s + self._fetcher.longer_s(place.want)
        return self._clock() - place.parked_s >= patience_s

    async def _watch_parked(self) -> None:
        looks = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        try:
            while self._parked:
                await asyncio.sleep(looks.next_s())
                if await self._look_at_parked():
                    looks.reset()
        finally:
            self._watch = None

    async def _look_at_parked(self) -> bool:
        """Queue the waiting requests whose claim is gone or too old; True if there were any."""
        digests = list(itertools.islice(self._parked, _LOOKS))
        try:
            async with asyncio.timeout(self._limits.claim_patience_s):
                taken = await self._loop.disk(self._taken, digests)
        except TimeoutError:  # the disk may hang: queue all, so that their disk reads report it
            digests, taken = list(self._parked), set()
        moved = False
        for digest in digests:
            place = self._parked.pop(digest, None)
            if place is None:
                continue
            if digest not in taken or self._is_late(place):
                self._requeue(place, self._looks)
                moved = True
            else:
                self._parked[digest] = place  # behind those that were not checked yet
        if moved:
            self._start_some()
        return moved

    def _taken(self, digests: Sequence[bytes]) -> set[bytes]:
        """Return the digests that a process holds a claim for; blocking."""
        return set(filter(self._sources.tier.claims.is_taken, digests))

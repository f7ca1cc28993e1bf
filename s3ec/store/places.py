# SPDX-License-Identifier: Apache-2.0
"""One corpus in several places: replicas near this node, which are read first, and home.

Embeddings are immutable, named by their content and checked after each read. So a copy from any
place is either right or refused, and the places only need an order.

- **Entries** are read from the replicas in their order and from home last. The next place is asked
  when one fails, does not have the entry, or is late. Only home's 404 is an absence.
- **Everything else** (the index, records) is read from home, and from a replica if home does not
  answer.
- **Writes** go home. **Deletions** go to all places.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from cachetools import TTLCache

from s3ec.counters import Counters, RecentTimes
from s3ec.errors import (
    AccessError,
    CorruptEntryError,
    CutBodyError,
    S3ECError,
    UnavailableError,
)
from s3ec.store.base import Blob, ObjectInfo, Store, Wrapper
from s3ec.store.endpoint import Endpoint

T = TypeVar("T")
Read = Callable[[Store], Awaitable[Blob | None]]
log = logging.getLogger(__name__)

LAG_S = 60.0
"""How long a place is not asked for an entry that it did not have."""
BAD_S = 3600.0
"""How long a place is not asked for an entry of which it sent a bad copy."""
LATE_AT_FIRST_S = 0.5
"""An answer that takes longer is late, as long as few response times are known."""
_MOST_NAMES = 100_000
# Rarer than a second request to the same place: this one may cross regions.
_SAMPLES, _FEWEST, _LATE, _TIMES = 128, 32, 0.95, 2.0
_served: ContextVar[set[Place] | None] = ContextVar("served", default=None)
tell_of_home: ContextVar[Callable[[], None]] = ContextVar("tell_of_home", default=lambda: None)
"""Called when a read of an entry moves on from the replicas to home; must not wait."""


class Health(Protocol):
    """Whether reads are worth a try; a Breaker is one."""

    @property
    def is_open(self) -> bool:
        """True where no place is asked now. Memory only."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe; 0 if a breaker is closed."""
        ...


class Place:
    """A replica, and what this process knows of it. For one event loop.

    Counters: ``place.NAME.hits``, ``.lag`` (an entry that home may have was missing there),
    ``.failed``, ``.bad`` (its copy was refused), ``.late`` (the next place was asked as well) and
    ``.skipped`` (its breaker is open); ``place_bytes.NAME``.

    Attributes:
        answers: How many answers it has given, of any kind.
        name: In messages and counters: the name of its bucket or server, without a dot.
        store: With breaker and retries.
        endpoint: Its health.
        fill: True if missing entries are copied there.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        endpoint: Endpoint,
        counters: Counters,
        *,
        fill: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.store = store
        self.endpoint = endpoint
        self.fill = fill
        self.answers = 0
        self._counters = counters
        self._lag: TTLCache[str, bool] = TTLCache(_MOST_NAMES, LAG_S, clock)
        self._bad: TTLCache[str, bool] = TTLCache(_MOST_NAMES, BAD_S, clock)
        self._times = RecentTimes(_SAMPLES, few=_FEWEST)
        self._complained = False

    def count(self, what: str) -> None:
        """Add to one of its counters."""
        self._counters.add(f"place.{self.name}.{what}")

    def is_worth_asking(self, name: str) -> bool:
        """False while its breaker is open, and for an entry that was missing or bad lately."""
        if name in self._lag or name in self._bad:
            return False
        if self.endpoint.breaker.refuses:
            self.count("skipped")
            return False
        return True

    def lacks(self, name: str) -> bool:
        """True if it was asked for this entry lately and did not return it."""
        return name in self._lag

    def lag(self, name: str) -> None:
        """Note that the place does not have an entry."""
        self.answers += 1
        self._lag[name] = True
        self.count("lag")

    def has(self, name: str) -> None:
        """Note that the place has an entry now."""
        self._lag.pop(name, None)

    def blame(self, name: str, exc: CorruptEntryError) -> None:
        """Note a copy that came cut, does not fit, or is bad: a miss of this place alone."""
        # A copy that was cut on its way may be whole, and one that does not fit may fit the next
        # request: a client may have made up the rows of this one.
        if isinstance(exc, CutBodyError) or exc.reason == "size":
            self.lag(name)
        else:
            self.refuse(name)

    def refuse(self, name: str) -> None:
        """Note that the place's copy of an entry is bad."""
        self.answers += 1
        self._bad[name] = True
        self.count("bad")
        if not self._complained:
            self._complained = True
            log.warning(
                "%s holds a bad copy of %s; it counts as a miss of this place for an hour, and so "
                "does each further one",
                *(self.name, name),
            )

    def late_s(self) -> float:
        """Seconds after which an answer is late: twice as long as nineteen in twenty take.

        A probe of the breaker is late at once, since no request may wait for it.
        """
        if self.endpoint.breaker.is_open:
            return 0.0
        found = self._times.quantile(_LATE)
        return LATE_AT_FIRST_S if found is None else _TIMES * found

    def delivered(self, nbytes: int, seconds: float) -> None:
        """Note that the place returned an entry."""
        self.answers += 1
        self._times.add(seconds)
        self.count("hits")
        self._counters.add(f"place_bytes.{self.name}", nbytes)

    def lost(self, name: str, *, is_silent: bool) -> None:
        """Note that another place was faster.

        Args:
            is_silent: True if this one has answered no request since it was asked.
        """
        if self.fill:  # it may or may not have this entry; a copy that is offered finds out
            self._lag[name] = True
        if not is_silent:
            return
        silence = UnavailableError(f"{self.name} does not answer, another place does")
        if self.endpoint.breaker.missed(silence):
            self._counters.add("breaker.opened")
            self.endpoint.places.dismiss()


@contextlib.contextmanager
def served_by() -> Iterator[set[Place]]:
    """Collect the replicas that served the reads inside the block; empty if home served all."""
    places: set[Place] = set()
    token = _served.set(places)
    try:
        yield places
    finally:
        _served.reset(token)


def _note_served(place: Place) -> None:
    served = _served.get()
    if served is not None:
        served.add(place)


async def past_bad_copies(
    name: str,
    read: Callable[[set[Place]], Awaitable[T]],
    told: Callable[[CorruptEntryError], None] = lambda _: None,
) -> T:
    """Read and check an entry, and read it again without each replica whose copy is bad.

    Args:
        read: Gets the set of replicas, which fills as they serve the read. Raises CorruptEntryError
            for bad bytes; it is called again then, if a replica sent them.
        told: Called with the error of each bad copy.

    Raises:
        CorruptEntryError: The bytes were home's.
    """
    while True:
        with served_by() as replicas:
            try:
                return await read(replicas)
            except CorruptEntryError as exc:
                if not replicas:
                    raise
                told(exc)
                for place in replicas:
                    place.blame(name, exc)


class AllPlaces:
    """The health of several places: closed if one of them is."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._breakers = [endpoint.breaker for endpoint in endpoints]

    @property
    def is_open(self) -> bool:
        """True where no place is asked now. Memory only."""
        return all(breaker.is_open for breaker in self._breakers)

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe of any place."""
        return min(breaker.pause_s for breaker in self._breakers)


@dataclass(slots=True)
class _Asked:
    """A request under way.

    Attributes:
        place: None for home.
        answers: The place's count of answers when this was sent or last found late.
        is_probe: True if the place's breaker was open: an answer closes it, however late.
    """

    place: Place | None
    started_s: float
    answers: int
    is_probe: bool

    @property
    def is_silent(self) -> bool:
        """True if the place has answered no request since."""
        return self.place is not None and self.place.answers == self.answers


class DeletesEverywhere(Wrapper):
    """A Store over home whose deletions go to the replicas as well.

    Only home's result counts. If a replica does not delete, that is logged once, and counted.

    Args:
        home: With retries.
        replicas: Any number.
    """

    def __init__(self, home: Store, replicas: Sequence[Place]) -> None:
        super().__init__(home)
        self.replicas = tuple(replicas)
        self._named_places: set[str] = set()

    async def delete(self, name: str) -> None:
        await super().delete(name)
        for place in self.replicas:
            with self._named(place):
                await place.store.delete(name)

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        left = await super().delete_many(names)
        gone = [name for name in names if name not in left]
        for place in self.replicas:
            with self._named(place):
                refused = await place.store.delete_many(gone)
                for exc in refused.values():
                    raise exc
        return left

    @contextlib.contextmanager
    def _named(self, place: Place) -> Iterator[None]:
        try:
            yield
        except S3ECError as exc:
            place.count("undeleted")
            if place.name not in self._named_places:
                self._named_places.add(place.name)
                log.warning("what is deleted stays in %s: %s", place.name, exc)

    async def close_replicas(self) -> None:
        """Close the replicas, and leave home open."""
        for place in self.replicas:
            await place.store.close()

    async def close(self) -> None:
        await super().close()
        await self.close_replicas()


class PlacesStore(DeletesEverywhere):
    """A Store over home that reads entries from the replicas first.

    Args:
        home: With breaker and retries.
        replicas: In the order in which they are asked.
        is_entry: True for the name of an entry, and not for that of the index or a record.
    """

    def __init__(
        self,
        home: Store,
        replicas: Sequence[Place],
        *,
        is_entry: Callable[[str], bool],
    ) -> None:
        super().__init__(home, replicas)
        self._is_entry = is_entry
        self._probes: set[asyncio.Task[Blob | None]] = set()

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        return await self._read(name, lambda store: store.get(name, max_bytes=max_bytes))

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        return await self._read(name, lambda store: store.get_range(name, start, length))

    def _read(self, name: str, read: Read) -> Awaitable[Blob | None]:
        if self._is_entry(name):
            return self._near_first(name, read)
        return self._home_first(read)

    # -- the index and records -----------------------------------------------------------------

    async def _home_first(self, read: Callable[[Store], Awaitable[T | None]]) -> T | None:
        try:
            return await read(self._inner)
        except UnavailableError:
            for place in self._answering():
                with contextlib.suppress(S3ECError):
                    found = await read(place.store)
                    if found is not None:
                        _note_served(place)
                        return found
            raise

    def _answering(self) -> Iterator[Place]:
        return (place for place in self.replicas if not place.endpoint.breaker.refuses)

    async def head(self, name: str) -> ObjectInfo | None:
        if self._is_entry(name):  # asked before a write, where only home counts
            return await super().head(name)
        return await self._home_first(lambda store: store.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        home = super().list(prefix, start_after=start_after)
        begun = False
        found: Sequence[ObjectInfo] = ()
        try:
            async for info in home:
                begun = True
                yield info
        except UnavailableError:
            # A listing of entries must show what home holds; and half a listing is useless.
            elsewhere = None if begun else await self._list_near(prefix, start_after)
            if elsewhere is None:
                raise
            found = elsewhere
        finally:
            await home.aclose()
        for info in found:
            yield info

    async def _list_near(self, prefix: str, start_after: str) -> Sequence[ObjectInfo] | None:
        if self._is_entry(prefix):
            return None
        for place in self._answering():
            with contextlib.suppress(S3ECError):
                listed = place.store.list(prefix)  # some servers refuse `start-after`
                found = [info async for info in listed if info.name > start_after]
                _note_served(place)
                return found
        return None

    # -- entries ---------------------------------------------------------------------------------

    async def _near_first(self, name: str, read: Read) -> Blob | None:
        left: list[Place | None] = [
            *(place for place in self.replicas if place.is_worth_asking(name)),
            None,
        ]
        clock = asyncio.get_running_loop().time
        under_way: dict[asyncio.Task[Blob | None], _Asked] = {}
        error: S3ECError | None = None

        def ask_next() -> _Asked:
            place, is_probe = left.pop(0), False
            if place is None:
                tell_of_home.get()()
            else:
                place.endpoint.budget.pay_in()
                is_probe = place.endpoint.breaker.is_open
            task = asyncio.ensure_future(read(self._inner if place is None else place.store))
            asked = _Asked(place, clock(), 0 if place is None else place.answers, is_probe)
            under_way[task] = asked
            return asked

        try:
            newest = ask_next()
            while under_way:
                place = newest.place
                patience_s = place.late_s() if left and place is not None else None
                done, _ = await asyncio.wait(
                    under_way, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and place is not None:
                    # Late: the next place is asked as well, if the budget allows it. If this place
                    # answers no request at all, it always is: its breaker opens soon.
                    if newest.is_silent or place.endpoint.budget.take():
                        place.count("late")
                        newest = ask_next()
                    else:
                        newest.answers = place.answers
                for task in done:
                    asked = under_way.pop(task)
                    try:
                        body = task.result()
                    except S3ECError as exc:
                        self._failed(asked.place, name, exc)
                        error = exc if asked.place is None else error or exc
                    else:
                        if body is None and asked.place is not None:
                            asked.place.lag(name)
                        else:
                            self._won(name, asked, body, clock(), under_way.values())
                            return body
                    if left and (asked is newest or not under_way):
                        newest = ask_next()
            if error is None:
                raise RuntimeError(f"nobody was asked for {name}")
            raise error
        finally:
            for task, asked in list(under_way.items()):
                # The probe continues: otherwise a place slower than the next would stay out.
                if asked.place is not None and asked.is_probe:
                    del under_way[task]
                    self._probes.add(task)
                    task.add_done_callback(partial(self._probe_ended, asked.place, name))
                else:
                    task.cancel()
            if under_way:  # wait until they have released what they hold
                await asyncio.gather(*under_way, return_exceptions=True)

    def _probe_ended(self, place: Place, name: str, task: asyncio.Task[Blob | None]) -> None:
        self._probes.discard(task)
        if not task.cancelled() and task.exception() is None and task.result() is not None:
            place.has(name)

    async def close_replicas(self) -> None:
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await super().close_replicas()

    def _won(
        self, name: str, asked: _Asked, body: Blob | None, now_s: float, losers: Iterable[_Asked]
    ) -> None:
        if asked.place is not None and body is not None:
            asked.place.delivered(len(body), now_s - asked.started_s)
            _note_served(asked.place)
        for loser in losers:
            if loser.place is not None:
                loser.place.lost(name, is_silent=loser.is_silent)

    def _failed(self, place: Place | None, name: str, exc: S3ECError) -> None:
        if place is None:
            return
        place.count("failed")
        if isinstance(exc, CorruptEntryError):
            place.blame(name, exc)
        elif isinstance(exc, AccessError) and not exc.is_general:
            # S3 answers 403 for an absent key if the caller may not list.
            place.lag(name)

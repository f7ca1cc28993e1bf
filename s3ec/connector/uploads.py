# SPDX-License-Identifier: Apache-2.0
"""The second half of a save: from the spool to the bucket, and from there into the index.

It serves this process's own saves and what dead processes left. Each is written as an object, once,
after the bucket's records allow it. Then it is announced, and kept in the spool until the
announcement is confirmed. ``saves.py`` has the first half, and the life of a save as a whole.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from s3ec import codec
from s3ec.codec import Header
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, TierError, UnavailableError
from s3ec.identity import MAX_REVISION, Key
from s3ec.index.announce import ANNOUNCE_S, Announcer
from s3ec.index.rows import EntryInfo
from s3ec.modality import SETTLED_S, Record
from s3ec.node import Node
from s3ec.runtime import PATIENCE_S, contained
from s3ec.store.base import Store
from s3ec.store.open import with_conditional_put
from s3ec.tier import Loaded, Spool, Spooled

log = logging.getLogger(__name__)

# After a write that took longer the bucket is asked when it was.
_SLOW_WRITE_S = 2.0


class Answer(enum.Enum):
    """What the bucket made of an embedding."""

    STORED = enum.auto()
    EXISTED = enum.auto()
    REFUSED = enum.auto()
    """It may never be stored."""


class ObjectWriter:
    """Writes objects, each once. The loop's thread only; any number of calls at once."""

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self._node = node
        self._clock = clock
        self._described_s = -math.inf
        self._store: Store | None = None
        self._ready: asyncio.Lock | None = None
        self._disagreed: set[str] = set()

    async def write(
        self, key: Key, revision: int, header: Header, pieces: Sequence[bytes | memoryview]
    ) -> Answer:
        """Write one revision of an entry: the first that this node does not know to be bad.

        Args:
            pieces: Of the whole object.

        Raises:
            UnavailableError, AccessError: The bucket did not do its part; it may later.
        """
        if revision > MAX_REVISION:
            self._node.counters.add("save_problem.revisions")
            return Answer.REFUSED
        store = await self._prepared()
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._node.records.settle(header.modality, mine)
        if record != mine:
            self._refuse(header.modality, record, mine)
            return Answer.REFUSED
        try:
            await store.put_if_absent(self._node.layout.object(key, revision), pieces)
        except ConflictError:
            self._node.counters.add("save.existed")
            return Answer.EXISTED
        return Answer.STORED

    def _refuse(self, modality: str, record: Record, mine: Record) -> None:
        self._node.counters.add("save_problem.record")
        if modality not in self._disagreed:
            self._disagreed.add(modality)
            log.error(
                "nothing of modality %s is saved: namespace %s holds %s, this model gives %s",
                modality,
                self._node.namespace.name,
                record,
                mine,
            )

    async def _prepared(self) -> Store:
        """The store for writing; the first call probes it. Now and then the descriptor is written.

        Again because `s3ec ns rm` may have deleted it, as with the records.
        """
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if self._store is None:
                self._store = await with_conditional_put(self._node.store)
            now_s = self._clock()
            if not 0 <= now_s - self._described_s < SETTLED_S:
                with suppress(ConflictError):
                    await self._store.put_if_absent(
                        self._node.layout.descriptor, [self._node.namespace.to_json()]
                    )
                self._described_s = now_s
            return self._store


# One part in so many of `cache_bytes` may be spooled only for want of an announcement: a quarter
# of the spool's share. Where announcements fail for long, saves go on with the rest.
KEPT_SHARE = 16
# A disk thread unlinks so many in one call, so that others are not held up.
REMOVED_AT_ONCE = 64


# While the disk hangs, how long to wait before looking whether it answers again.
_HANG_PAUSE_S = 1.0
# A spooled file that cannot be read so often stays for the next process.
_DISK_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long an Uploader rests.

    Attributes:
        first_s: Before the second attempt of an upload; then twice as long each time.
        longest_s: At most, whatever the bucket asks for.
        adopt_every_s: Between two searches for what other processes of this node left when they
            died.
    """

    first_s: float = 0.5
    longest_s: float = 15.0
    adopt_every_s: float = 60.0


@dataclass(slots=True)
class Upload:
    """One embedding on its way to the bucket.

    Attributes:
        digest: Its name in the spool.
        nbytes: Size of its file, which is read when its turn comes; 0 with ``pieces``.
        key: None for what a dead process left, until its file was read.
        pieces: Header and object where the disk did not take it; else None.
        spooled: What the spool holds of it, to be removed in the end; None where it has nothing.
        adopted: A dead process left it.
        written: What the bucket made of it, of which revision, and since when at the earliest;
            None until it has answered.
    """

    digest: bytes
    nbytes: int
    key: Key | None = None
    pieces: tuple[Header, Sequence[bytes | memoryview]] | None = None
    spooled: Spooled | None = None
    adopted: bool = False
    written: tuple[Answer, int, _Since] | None = None


class _Since(NamedTuple):
    """From when on an object was there.

    Attributes:
        at_s: By this machine's clock, seconds since the epoch; 0 where only ``known_s`` counts.
        known_s: Time of the latest row that was known then, by the bucket's clock.
    """

    at_s: float
    known_s: int


class Uploader:
    """A queue, and a bounded number of uploads that are tried again until the bucket answers.

    What is in memory only comes first, then fresh saves, then adopted ones, which never take more
    than a quarter of the places; a quarter stays free of uploads altogether. While the disk hangs
    nothing spooled is begun, and what hangs in it takes no place.

    What is in the bucket is announced, and then leaves the spool. Uploads and hooks never wait for
    that. Memory holds a key and some numbers per embedding meanwhile. A process that ends in
    between leaves the spooled file; the next one finds the object in the bucket, and announces it.

    Attributes:
        unannounced: How many are in the bucket and not announced yet; from another thread, about.
    """

    def __init__(
        self,
        node: Node,
        spool: Spool,
        *,
        inflight_bytes: int,
        ended: Callable[[Upload, bool], None],
        announced: Callable[[], None],
        pauses: Pauses | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            inflight_bytes: Of spooled files in memory at a time; a larger one goes alone.
            ended: Called in the loop's thread once per upload, also when the loop ends; True
                where the bucket took it. Must not wait.
            announced: Called there when nothing is unannounced any more. Must not wait.
            pauses: None for the usual ones.
            clock: Seconds since the epoch.
        """
        self._node = node
        self._spool = spool
        self._objects = ObjectWriter(node, clock)
        self._inflight_limit_bytes = inflight_bytes
        self._ended = ended
        self._announced = announced
        self._pauses = pauses or Pauses()
        self._clock = clock
        self._announcer = Announcer(
            node.store,
            node.layout,
            node.counters,
            known_time_s=node.index.known_time_s,
            clock=clock,
            batch_s=ANNOUNCE_S,
        )
        self.unannounced = 0
        places = node.settings.max_concurrency
        # The rest is the fetches': requests wait for those, and uploads may hang for long.
        self._max_active = max(1, places - places // 4)
        self._max_adopted = max(1, places // 4)
        self._adopting = True
        # The loop's thread only.
        self._stopped = False
        self._unspooled: deque[Upload] = deque()
        self._fresh: deque[Upload] = deque()
        self._adopted: deque[Upload] = deque()
        self._active: dict[asyncio.Task[None], Upload] = {}
        self._reading = 0  # of these, from the spool
        # What stays in the spool for want of an announcement only.
        self._kept_limit_bytes = int(node.settings.cache_bytes) // KEPT_SHARE
        self._kept_bytes = 0
        self._removable: list[tuple[Spooled, int]] = []
        self._removing: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None

    # -- any thread --------------------------------------------------------------------------

    def submit(self, upload: Upload) -> None:
        """Queue one; never waits.

        Raises:
            RuntimeError: The loop is stopped.
        """
        self._node.loop.call(self._enqueue, upload)

    def start_adopting(self) -> None:
        """Look for what dead processes left, now and every minute; returns at once."""
        self._node.loop.submit(self._adopt_forever())

    def stop_adopting(self) -> None:
        """Look no more; what was found is still uploaded."""
        self._adopting = False

    def flush(self) -> None:
        """Announce what waits for that at once, whatever failed before; never waits."""
        with suppress(RuntimeError):  # the loop has ended already
            self._node.loop.call(partial(self._announcer.send_soon, retry=True))

    def stop(self) -> None:
        """Break off what is under way; returns at once. What is spooled stays there."""
        self._adopting = False
        with suppress(RuntimeError):  # the loop has ended already
            self._node.loop.call(self._cancel)

    @property
    def adopted_left(self) -> int:
        """How many of those are not in the bucket yet; from another thread, about."""
        return len(self._adopted) + sum(up.adopted for up in list(self._active.values()))

    # -- the loop's thread -------------------------------------------------------------------

    def _cancel(self) -> None:
        self._stopped = True
        self._announcer.close()  # what is spooled stays there
        for waiting in (self._unspooled, self._fresh, self._adopted):
            waiting.clear()
        for task in self._active:
            task.cancel()

    async def _adopt_forever(self) -> None:
        while self._adopting:
            with contained(self._node.counters, "adopting the spool"):
                found = await self._node.loop.disk_long(self._spool.adopt)
                for one in found:
                    self._enqueue(Upload(one.digest, one.nbytes, spooled=one, adopted=True))
                if found:
                    log.info("uploading %d embeddings that a dead process left", len(found))
            await asyncio.sleep(self._pauses.adopt_every_s)

    def _enqueue(self, upload: Upload) -> None:
        if self._stopped:
            self._ended(upload, False)
            return
        if upload.pieces is not None:
            self._unspooled.append(upload)
        else:
            (self._adopted if upload.adopted else self._fresh).append(upload)
        self._start_some()

    def _start_some(self) -> None:
        while (upload := self._next()) is not None:
            task = asyncio.get_running_loop().create_task(
                self._run(upload), name=f"s3ec-upload-{upload.digest.hex()[:8]}"
            )
            self._active[task] = upload

    def _next(self) -> Upload | None:
        """Take the next one that may start now."""
        active = self._active.values()
        hangs = self._node.loop.watch.hangs
        if len(active) - (self._reading if hangs else 0) >= self._max_active:
            return None
        if self._unspooled:
            return self._unspooled.popleft()
        if hangs:
            self._look_again_later()
            return None
        if self._fresh:
            waiting = self._fresh
        elif self._adopted and sum(up.adopted for up in active) < self._max_adopted:
            waiting = self._adopted
        else:
            return None
        reading = sum(up.nbytes for up in active)
        if reading and reading + waiting[0].nbytes > self._inflight_limit_bytes:
            return None
        return waiting.popleft()

    def _look_again_later(self) -> None:
        if self._looking is None:
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(_HANG_PAUSE_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        if not self._stopped:
            self._start_some()

    async def _run(self, upload: Upload) -> None:
        stored = False
        started = time.monotonic()
        try:
            with contained(self._node.counters, "upload of %s", upload.digest.hex()):
                header = await self._until_answered(upload)
                if header is not None:
                    stored = True
                    self._count(upload, header, time.monotonic() - started)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._active.pop(task, None)
            self._ended(upload, stored)
        # Not reached when the loop ends: then nothing more is to be started.
        self._start_some()

    def _count(self, upload: Upload, header: Header, seconds: float) -> None:
        nbytes = header.shape.nbytes
        sums = {"save.items": 1, "save.bytes": nbytes, "save.seconds": seconds}
        self._node.counters.add_all(sums)
        log.debug("stored digest=%s nbytes=%d seconds=%.6f", upload.digest.hex(), nbytes, seconds)

    async def _until_answered(self, upload: Upload) -> Header | None:
        """Try until the bucket took it (its header), or had it or may not take it (None).

        None also for what cannot be read any more. Between two attempts a spooled embedding
        is not in memory.
        """
        pause_s = self._pauses.first_s
        unread = 0
        while True:
            asked_s = 0.0
            try:
                return await self._attempt(upload)
            except TierError as exc:
                unread += 1
                if unread == _DISK_ATTEMPTS:
                    self._node.counters.add("save_problem.unreadable")
                    log.error("embedding %s stays in the spool: %s", upload.digest.hex(), exc)
                    return None
            except (UnavailableError, AccessError) as exc:
                kind = "denied" if isinstance(exc, AccessError) else "unavailable"
                if self._node.counters.get(f"save_problem.{kind}") == 0:
                    log.warning("uploads are failing and will be tried again: %s", exc)
                self._node.counters.add(f"save_problem.{kind}")
                asked_s = getattr(exc, "retry_after_s", None) or 0.0
            # At random, or all processes of a fleet would come back at once.
            drawn_s = random.uniform(pause_s / 2, pause_s)
            await asyncio.sleep(max(drawn_s, min(asked_s, self._pauses.longest_s)))
            pause_s = min(pause_s * 2, self._pauses.longest_s)

    async def _attempt(self, upload: Upload) -> Header | None:
        if upload.pieces is not None:
            header, pieces = upload.pieces
        else:
            self._reading += 1
            try:
                loaded = await self._node.loop.disk(self._load, upload)
            finally:
                self._reading -= 1
            if loaded is None:
                return None
            # Of an adopted one vLLM's name may not be known; it is of one's own.
            upload.key = upload.key or loaded.key
            header, pieces = loaded.header, [loaded.blob]
        if upload.key is None:  # a queued upload with pieces has one
            raise ValueError("an upload without a key")
        if upload.written is None:
            revision = await self._revision_of(upload.key)
            # Before the request: who deletes the object while the answer is on its way does it
            # later, also where this process has heard of that by then.
            since = _Since(self._clock(), self._node.index.known_time_s(upload.key))
            answer = await self._objects.write(upload.key, revision, header, pieces)
            upload.written = answer, revision, since
            if upload.adopted:
                self._node.counters.add("spool.replayed")
        answer, revision, since = upload.written
        if answer is Answer.REFUSED:
            if upload.spooled is not None:
                await self._node.loop.disk(self._spool.remove, upload.spooled)
            return None
        # Not removed yet: the next one of a process killed here finds its object there, and
        # announces it.
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        if revision:
            await self._node.loop.disk(self._node.bad_objects.heal, upload.key, revision)
        mine, news = answer is Answer.STORED, revision > 0
        if mine:
            # It waited, for its place or for the server: it may have been deleted before it came.
            is_doubtful = self._clock() - since.at_s > _SLOW_WRITE_S
        else:
            is_doubtful = news or not self._node.index.is_announced(upload.key)
        if is_doubtful:
            name = self._node.layout.object(upload.key, revision)
            since = await self._since_when(upload, name, since)
        # A revision is announced whoever wrote it: what readers know is the row of a bad object.
        await self._announce(
            *(upload.key, upload.spooled, header, nbytes), mine=mine, news=news, since=since
        )
        return header if mine else None

    async def _since_when(self, upload: Upload, name: str, asked: _Since) -> _Since:
        """When an object that is there was stored: it may be gone, or be so soon.

        Args:
            upload: It was found there, or put there.
            name: Of the object.
            asked: When it was asked for.

        Raises:
            UnavailableError: It is gone, so it is to be stored; or the bucket does not answer, and
                only this is to be asked again.
        """
        try:
            info = await self._node.store.head(name)
        except AccessError as exc:  # one who may write but not read
            log.debug("no look at what was there: %s", exc)
            return asked
        if info is None:
            upload.written = None
            raise UnavailableError(f"{name} was there, and was deleted while it was saved")
        if not info.modified_s:
            return asked
        return _Since(0.0, max(int(info.modified_s) - 1, asked.known_s))

    async def _revision_of(self, key: Key) -> int:
        """The first that no process of this node knows to be bad; who fetches may be another."""
        loop, bad_objects = self._node.loop, self._node.bad_objects
        if not loop.watch.hangs:
            with suppress(TimeoutError):  # what is in memory does not wait for a disk that hangs
                async with asyncio.timeout(PATIENCE_S):
                    await loop.disk(bad_objects.catch_up)
        return bad_objects.revision(key)

    def _load(self, upload: Upload) -> Loaded | None:
        """Read an embedding back from the disk; blocking.

        Raises:
            TierError: The disk did not answer.
        """
        loaded = self._spool.load(upload.digest)
        if loaded is not None or upload.key is None:
            return loaded
        if self._node.loop.closed:  # and the tier, perhaps
            raise TierError("the end")
        loaded = self._load_entry(upload.key)
        if loaded is None:
            self._node.counters.add("save_problem.vanished")
            log.error("embedding %s vanished from the disk", upload.digest.hex())
        return loaded

    def _load_entry(self, key: Key) -> Loaded | None:
        """From the tier, where somebody emptied the spool."""
        pin = self._node.tier.entries.pin(key)
        if pin is None:
            return None
        try:
            blob = pin.path.read_bytes()
            name = self._node.namespace.name
            return Loaded(key, codec.verify(blob, namespace=name, identifier=key.stored), blob)
        except CorruptEntryError as exc:
            self._node.tier.entries.quarantine(key, exc.reason)
            return None
        except OSError as exc:
            raise TierError(f"cannot read {pin.path}: {exc}") from exc
        finally:
            self._node.tier.entries.unpin(pin)

    # -- the loop's thread: from the bucket into the index ------------------------------------

    async def _announce(
        self,
        key: Key,
        spooled: Spooled | None,
        header: Header,
        nbytes: int,
        *,
        mine: bool,
        news: bool,
        since: _Since,
    ) -> None:
        """Have one announced that is in the bucket; waits at most for a file to be unlinked.

        Args:
            spooled: What is removed then, unless a later save has taken its place.
            nbytes: Of the whole object.
            mine: This upload put it there. Otherwise it is somebody's of the same name: of the
                same shape, but perhaps of other last digits.
            news: It is a revision: what the index has about the entry is about a bad object.
            since: When it was there; later deletions win.
        """
        if spooled is not None and not self._spool.holds(spooled):
            spooled = None
        if not (mine or news) and self._node.index.is_announced(key):
            if spooled is not None:
                await self._node.loop.disk(self._spool.remove, spooled)
            return
        shape = header.shape
        checksum = int(header.checksum[:8], 16) if mine else 0
        facts = EntryInfo(nbytes, shape.rows, shape.width, shape.dtype, checksum)
        fits = self._kept_bytes + nbytes <= self._kept_limit_bytes
        kept = spooled if fits else None
        kept_bytes = nbytes if kept is not None else 0
        self.unannounced += 1
        self._kept_bytes += kept_bytes
        done = partial(self._answered, kept, kept_bytes)
        self._announcer.add(key, facts, done, at_s=since.at_s, known_s=since.known_s)
        if mine or news:
            # Not where it was there before: an entry that this process holds for gone or bad may
            # be the very one, and would be fetched in vain at every request.
            self._node.index.add(key, facts)
        if self._kept_bytes > self._kept_limit_bytes // 2:
            self._announcer.send_soon(retry=True)
        if spooled is not None and kept is None:
            # A crash before it is announced leaves it to `s3ec manifest rebuild`.
            await self._node.loop.disk(self._spool.remove, spooled)

    def _answered(self, kept: Spooled | None, kept_bytes: int, confirmed: bool) -> None:
        """The announcement is in the bucket, or was given up as the loop ends."""
        if confirmed and kept is not None:
            self._removable.append((kept, kept_bytes))
            if self._removing is None:
                self._removing = asyncio.get_running_loop().create_task(
                    self._remove(), name="s3ec-unspool"
                )
            return
        if not confirmed and kept is None:  # what is spooled is left to the next process
            self._node.counters.add("announce_dropped")
        self._leave(1)

    async def _remove(self) -> None:
        while self._removable:
            batch = self._removable[:REMOVED_AT_ONCE]
            del self._removable[:REMOVED_AT_ONCE]
            await self._node.loop.disk(self._unspool, [kept for kept, _ in batch])
            self._kept_bytes -= sum(nbytes for _, nbytes in batch)
            self._leave(len(batch))
        self._removing = None

    def _unspool(self, confirmed: list[Spooled]) -> None:
        for spooled in confirmed:
            self._spool.remove(spooled)

    def _leave(self, count: int) -> None:
        self.unannounced -= count
        if self.unannounced == 0:
            self._announced()

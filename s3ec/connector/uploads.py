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
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cachetools import LRUCache

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, TierError, UnavailableError
from s3ec.fetch import Sources
from s3ec.identity import Key, Namespace
from s3ec.index.deltas import PAUSE_S, Announcer
from s3ec.index.reader import ManifestIndex
from s3ec.modality import SETTLED_S, Record
from s3ec.runtime import Backoff, LoopThread, contained
from s3ec.spans import Work, note
from s3ec.store.base import Store
from s3ec.store.open import with_conditional_put
from s3ec.tier import Loaded, Spool, Spooled

log = logging.getLogger(__name__)

# One part in so many of `cache_bytes` may be spooled only for want of an announcement: a quarter
# of the spool's share. Where announcements fail for long, saves go on with the rest.
KEPT_SHARE = 16
# A disk thread unlinks so many in one call, so that others are not held up.
REMOVED_AT_ONCE = 64
# While the disk hangs, how long to wait before looking whether it answers again.
_HANG_PAUSE_S = 1.0
# A spooled file that cannot be read so often stays for the next process.
_DISK_ATTEMPTS = 5
# So many names of bad objects are remembered, so that each is logged once.
_REMEMBERED_NAMES = 1024


class Answer(enum.Enum):
    """What the bucket made of an embedding."""

    STORED = enum.auto()
    EXISTED = enum.auto()
    REFUSED = enum.auto()
    """It may never be stored."""
    BLOCKED = enum.auto()
    """An object that this process knows to be bad has its name."""


class ObjectWriter:
    """Writes objects, each once. The loop's thread only; any number of calls at once.

    States: new, then ready for good after the first call that reached the bucket. It has tried
    then whether the server obeys conditional writes. The namespace's descriptor is written at
    first, and again SETTLED_S after that, since `s3ec ns rm` may have deleted it.
    """

    def __init__(
        self,
        sources: Sources,
        namespace: Namespace,
        counters: Counters,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._sources = sources
        self._namespace = namespace
        self._counters = counters
        self._clock = clock
        self._described_s = -math.inf
        self._store: Store | None = None
        self._ready: asyncio.Lock | None = None
        self._disagreed: set[str] = set()
        self._blocked: LRUCache[bytes, None] = LRUCache(_REMEMBERED_NAMES)

    async def write(self, key: Key, header: Header, pieces: Sequence[bytes | memoryview]) -> Answer:
        """Write one entry.

        Args:
            pieces: Of the whole object.

        Raises:
            UnavailableError, AccessError: The bucket did not do its part; it may later.
        """
        store = await self._prepared()
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._sources.records.settle(header.modality, mine, store=store)
        if record != mine:
            self._refuse(header.modality, record, mine)
            return Answer.REFUSED
        try:
            await store.put_if_absent(self._sources.layout.object(key), pieces)
        except ConflictError:
            if self._sources.index.is_bad(key):
                self._give_up(key)
                return Answer.BLOCKED
            self._counters.add("save.existed")
            return Answer.EXISTED
        return Answer.STORED

    def _give_up(self, key: Key) -> None:
        self._counters.add("save_problem.bad_object")
        if key.digest not in self._blocked:
            self._blocked[key.digest] = None
            log.warning(
                "an embedding is not stored: a bad object has its name, %s, until `s3ec verify "
                "--deep --repair` deletes it (logged once per name)",
                self._sources.layout.object(key),
            )

    def _refuse(self, modality: str, record: Record, mine: Record) -> None:
        self._counters.add("save_problem.record")
        if modality not in self._disagreed:
            self._disagreed.add(modality)
            log.error(
                "nothing of modality %s is saved: namespace %s holds %s, this model gives %s",
                modality,
                self._namespace.name,
                record,
                mine,
            )

    async def _prepared(self) -> Store:
        """The store for writing, after the namespace was described."""
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if self._store is None:
                self._store = await with_conditional_put(self._sources.store)
            now_s = self._clock()
            if not 0 <= now_s - self._described_s < SETTLED_S:
                with suppress(ConflictError):
                    await self._store.put_if_absent(
                        self._sources.layout.descriptor, [self._namespace.to_json()]
                    )
                self._described_s = now_s
            return self._store


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
        began_s: When its copy off the device began, monotonic; None where that is not known.
        answer: The bucket's; None until it came.
    """

    digest: bytes
    nbytes: int
    key: Key | None = None
    pieces: tuple[Header, Sequence[bytes | memoryview]] | None = None
    spooled: Spooled | None = None
    adopted: bool = False
    began_s: float | None = None
    answer: Answer | None = None


class Uploader:
    """A queue, and a bounded number of uploads that are tried again until the bucket answers.

    States of an upload:

    =========  =========  ====================================================================
    state      goes to    when
    =========  =========  ====================================================================
    (new)      waiting    ``submit``, or it was adopted from a dead process
    waiting    active     its turn has come, and it has a place
    active     pausing    the bucket, or the disk, did not do its part; the place is kept
    pausing    active     the pause is over
    any        given up   ``stop``; what is spooled stays for the next process
    active     given up   it is refused for good, or a bad object has its name, or its file is
                          bad, gone or unreadable
    active     written    the bucket has it; ``ended`` is told, and the place is free
    written    announced  a delta with its row is confirmed, or the index held the row before
    =========  =========  ====================================================================

    What is in memory only comes first, then fresh saves, then adopted ones, which never take more
    than a quarter of the places; a quarter stays free of uploads altogether. While the disk hangs
    nothing spooled is begun, and what hangs in it takes no place.

    Uploads and hooks never wait for announcements. Memory holds a key and some numbers per
    embedding meanwhile. A process that ends in between leaves the spooled file; the next one finds
    the object in the bucket, and announces it. ``_leave_spool`` says when a file goes.

    Attributes:
        unannounced: How many are in the bucket and not announced yet; from another thread, about.
    """

    def __init__(
        self,
        loop: LoopThread,
        sources: Sources,
        counters: Counters,
        namespace: Namespace,
        index: ManifestIndex,
        spool: Spool,
        *,
        cache_bytes: int,
        max_concurrency: int,
        inflight_bytes: int,
        ended: Callable[[Upload, bool], None],
        announced: Callable[[], None],
        pauses: Pauses | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            sources: Where the objects go.
            namespace: For its descriptor.
            index: Of what is announced.
            cache_bytes: The setting, of which some may wait to be announced.
            max_concurrency: Requests under way at a time, those of fetches included.
            inflight_bytes: Of spooled files in memory at a time; a larger one goes alone.
            ended: Called in the loop's thread once per upload, also when the loop ends; True
                where the bucket took it. Must not wait.
            announced: Called there when nothing is unannounced any more. Must not wait.
            pauses: None for the usual ones.
            clock: Seconds since the epoch.
        """
        self._loop = loop
        self._sources = sources
        self._counters = counters
        self._namespace = namespace
        self._index = index
        self._spool = spool
        self._objects = ObjectWriter(sources, namespace, counters, clock=clock)
        self._inflight_limit_bytes = inflight_bytes
        self._ended = ended
        self._announced = announced
        self._pauses = pauses or Pauses()
        self._announcer = Announcer(
            sources.store,
            sources.layout,
            counters,
            writers=lambda: index.writers,
            newest=lambda: index.newest,
            pause_s=PAUSE_S,
        )
        self.unannounced = 0
        # The rest is the fetches': requests wait for those, and uploads may hang for long.
        self._max_active = max(1, max_concurrency - max_concurrency // 4)
        self._max_adopted = max(1, max_concurrency // 4)
        self._adopting = True
        # The loop's thread only.
        self._stopped = False
        self._unspooled: deque[Upload] = deque()
        self._fresh: deque[Upload] = deque()
        self._adopted: deque[Upload] = deque()
        self._active: dict[asyncio.Task[None], Upload] = {}
        self._reading = 0  # of these, from the spool
        # What stays in the spool for want of an announcement only.
        self._kept_limit_bytes = cache_bytes // KEPT_SHARE
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
        self._loop.call(self._enqueue, upload)

    def start_adopting(self) -> None:
        """Look for what dead processes left, now and every minute; returns at once."""
        self._loop.submit(self._adopt_forever())

    def stop_adopting(self) -> None:
        """Look no more; what was found is still uploaded."""
        self._adopting = False

    def flush(self) -> None:
        """Announce what waits for that at once, whatever failed before; never waits."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call(self._announcer.send_soon)

    def stop(self) -> None:
        """Break off what is under way; returns at once. What is spooled stays there."""
        self._adopting = False
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call(self._cancel)

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
            with contained(self._counters, "adopting the spool"):
                found = await self._loop.disk_long(self._spool.adopt)
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
        hangs = self._loop.watch.hangs
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
        started, work = time.monotonic(), self._sources.spans.begin()
        try:
            with contained(self._counters, "upload of %s", upload.digest.hex()):
                header = await self._until_answered(upload)
                if header is not None:
                    stored = True
                    self._count(upload, header, time.monotonic() - started)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._active.pop(task, None)
            self._ended(upload, stored)
            self._end_span(work, upload)
        # Not reached when the loop ends: then nothing more is to be started.
        self._start_some()

    def _end_span(self, work: Work | None, upload: Upload) -> None:
        """Tell tracing of a save, where there is any."""
        answer = upload.answer
        refused = answer in (None, Answer.REFUSED, Answer.BLOCKED)
        outcome = "given_up" if answer is None else answer.name.lower()
        with contained(self._counters, "span of a save"):
            self._sources.spans.end(
                "s3ec.save",
                work,
                {
                    "s3ec.key": upload.digest.hex(),
                    "s3ec.outcome": outcome,
                    "s3ec.bytes": upload.nbytes or None,
                    "s3ec.adopted": upload.adopted,
                },
                remote=True,
                error=outcome if refused else "",
            )

    def _count(self, upload: Upload, header: Header, seconds: float) -> None:
        nbytes = header.shape.nbytes
        sums = {"save.items": 1, "save.bytes": nbytes, "save.seconds": seconds}
        self._counters.add_all(sums)
        if upload.began_s is not None:
            self._counters.observe("save_time", time.monotonic() - upload.began_s)
        log.debug("stored digest=%s nbytes=%d seconds=%.6f", upload.digest.hex(), nbytes, seconds)

    async def _until_answered(self, upload: Upload) -> Header | None:
        """Try until the bucket took it (its header), or had it or may not take it (None).

        None also for what cannot be read any more. Between two attempts a spooled embedding
        is not in memory.
        """
        backoff = Backoff(self._pauses.first_s, self._pauses.longest_s)
        unread = 0
        while True:
            asked_s = 0.0
            note("attempts")
            try:
                return await self._attempt(upload)
            except TierError as exc:
                unread += 1
                if unread == _DISK_ATTEMPTS:
                    self._counters.add("save_problem.unreadable")
                    log.error("embedding %s stays in the spool: %s", upload.digest.hex(), exc)
                    return None
            except (UnavailableError, AccessError) as exc:
                kind = "denied" if isinstance(exc, AccessError) else "unavailable"
                if self._counters.get(f"save_problem.{kind}") == 0:
                    log.warning("uploads are failing and will be tried again: %s", exc)
                self._counters.add(f"save_problem.{kind}")
                asked_s = getattr(exc, "retry_after_s", None) or 0.0
            await asyncio.sleep(max(backoff.next_s(), min(asked_s, self._pauses.longest_s)))

    async def _attempt(self, upload: Upload) -> Header | None:
        """Do what was not done yet. Returns what ``_until_answered`` does."""
        content = upload.pieces or await self._read(upload)
        if content is None:
            return None
        header, pieces = content
        if upload.key is None:  # a queued upload with pieces has one
            raise ValueError("an upload without a key")
        if upload.answer is None:
            upload.answer = await self._objects.write(upload.key, header, pieces)
            if upload.adopted:
                self._counters.add("spool.replayed")
        is_kept = False
        if upload.answer in (Answer.STORED, Answer.EXISTED):
            nbytes = sum(memoryview(piece).nbytes for piece in pieces)
            is_kept = self._announce(upload, upload.key, nbytes)
        spooled = upload.spooled
        # A later save may have replaced the file. Then the disk, which may hang, is not waited for.
        if spooled is not None and not is_kept and self._spool.holds(spooled):
            await self._leave_spool([spooled])
        return header if upload.answer is Answer.STORED else None

    async def _read(self, upload: Upload) -> tuple[Header, Sequence[bytes | memoryview]] | None:
        """What is spooled, and its key; None where it cannot be had any more."""
        self._reading += 1
        try:
            loaded = await self._loop.disk(self._load, upload)
        finally:
            self._reading -= 1
        if loaded is None:
            return None
        # Of an adopted one vLLM's name may not be known; it is of one's own.
        upload.key = upload.key or loaded.key
        return loaded.header, [loaded.blob]

    def _load(self, upload: Upload) -> Loaded | None:
        """Read an embedding back from the disk; blocking.

        Raises:
            TierError: The disk did not answer.
        """
        loaded = self._spool.load(upload.digest)
        if loaded is not None or upload.key is None:
            return loaded
        if self._loop.closed:  # and the tier, perhaps
            raise TierError("the end")
        loaded = self._load_entry(upload.key)
        if loaded is None:
            self._counters.add("save_problem.vanished")
            log.error("embedding %s vanished from the disk", upload.digest.hex())
        return loaded

    def _load_entry(self, key: Key) -> Loaded | None:
        """From the tier, where somebody emptied the spool."""
        entry = self._sources.tier.entries.open(key)
        if entry is None:
            return None
        try:
            with open(entry.fd, "rb", closefd=False) as file:
                blob = file.read()
            name = self._namespace.name
            return Loaded(key, codec.verify(blob, namespace=name, identifier=key.stored), blob)
        except CorruptEntryError as exc:
            self._sources.tier.entries.drop_bad(key, exc.reason, inode=entry.inode)
            return None
        except OSError as exc:
            raise TierError(f"cannot read {entry.path}: {exc}") from exc

    # -- the loop's thread: from the bucket into the index ------------------------------------

    def _announce(self, upload: Upload, key: Key, nbytes: int) -> bool:
        """Have one announced that is in the bucket, without waiting for that.

        Args:
            nbytes: Of the whole object; another one of the same name has as many but for some
                digits.

        Returns:
            Whether the spool keeps it until the announcement is confirmed.
        """
        index = self._index
        mine = upload.answer is Answer.STORED
        if not mine and index.is_announced(key):
            return False
        kept = upload.spooled
        if kept is not None and not self._spool.holds(kept):  # a later save has taken its place
            kept = None
        if self._kept_bytes + nbytes > self._kept_limit_bytes:
            kept = None
        kept_bytes = nbytes if kept is not None else 0
        self.unannounced += 1
        self._kept_bytes += kept_bytes
        self._announcer.add(key, nbytes, partial(self._answered, kept, kept_bytes))
        if mine:
            # Not where it was there before: an entry that this process holds for gone or bad may
            # be the very one, and would be fetched in vain at every request.
            index.add(key, nbytes)
        if self._kept_bytes > self._kept_limit_bytes // 2:
            self._announcer.send_soon()
        return kept is not None

    def _answered(self, kept: Spooled | None, kept_bytes: int, confirmed: bool) -> None:
        """The announcement is in the bucket, or was given up as the loop ends."""
        if confirmed and kept is not None:
            self._removable.append((kept, kept_bytes))
            if self._removing is None:
                self._removing = asyncio.get_running_loop().create_task(
                    self._remove_confirmed(), name="s3ec-unspool"
                )
            return
        if not confirmed and kept is None:  # what is spooled is left to the next process
            self._counters.add("announce_dropped")
        self._settle(1)

    async def _remove_confirmed(self) -> None:
        while self._removable:
            batch = self._removable[:REMOVED_AT_ONCE]
            del self._removable[:REMOVED_AT_ONCE]
            await self._leave_spool([kept for kept, _ in batch])
            self._kept_bytes -= sum(nbytes for _, nbytes in batch)
            self._settle(len(batch))
        self._removing = None

    async def _leave_spool(self, entries: Sequence[Spooled]) -> None:
        """Remove some entries from the spool: the only way out of it for what was uploaded.

        An entry leaves when one of these is true, and not before:

        - its announcement is confirmed,
        - the index holds a row of the object that was there already,
        - it may never be stored, or a bad object has its name,
        - it is in the bucket, and too much is kept for want of an announcement; a process that is
          killed before this one's leaves it to `s3ec manifest rebuild`,
        - a later save has taken its place; then nothing is removed.
        """

        def remove() -> None:
            for spooled in entries:
                self._spool.remove(spooled)

        await self._loop.disk(remove)

    def _settle(self, count: int) -> None:
        self.unannounced -= count
        if self.unannounced == 0:
            self._announced()

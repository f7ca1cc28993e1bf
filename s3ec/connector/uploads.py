# SPDX-License-Identifier: Apache-2.0
"""The second half of a save: from the spool to the bucket, and from there into the index.

It serves this process's own saves and those left by dead processes. Each is written as an object,
once, after the bucket's records allow it. Then it is announced, and kept in the spool until the
announcement is confirmed. ``saves.py`` has the first half, and the life of a save as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from s3ec.codec import Header
from s3ec.errors import AccessError, ConflictError, TierError, UnavailableError
from s3ec.identity import Key
from s3ec.index.deltas import PAUSE_S, Announcer
from s3ec.modality import SETTLED_S, Record
from s3ec.node import Node
from s3ec.runtime import Backoff, contained
from s3ec.spans import Work, note
from s3ec.store.base import Store
from s3ec.store.open import with_conditional_put
from s3ec.tier.spool import Loaded, Spool, Spooled

log = logging.getLogger(__name__)

# The pause before the second attempt of an upload. It doubles each time, up to LONGEST_PAUSE_S,
# whatever the bucket asks for.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
# The pause between two searches for saves that dead processes of this node left.
ADOPT_EVERY_S = 60.0
# A disk thread unlinks this many files in one call, so that other calls are not delayed.
REMOVED_AT_ONCE = 64

Answer = Literal["stored", "existed", "refused", "bad_object"]
"""The bucket's answer to an upload. Refused: it may never be stored. Bad object: an object that
this process knows to be bad has its name."""


@dataclass(slots=True)
class Upload:
    """One embedding on its way to the bucket.

    Attributes:
        digest: Its name in the spool.
        nbytes: Size of its file, which is read when the upload starts; 0 with ``pieces``.
        key: None for an adopted one, until its file was read.
        pieces: Header and object if the disk did not take it; else None.
        spooled: Its file in the spool, to be removed in the end; None if it has none.
        adopted: True if a dead process left it.
        began_s: When its copy off the device began, monotonic; None if not known.
        answer: The bucket's answer; None until it has answered.
        gives_way: True if it was refused and others wait: those go first.
    """

    digest: bytes
    nbytes: int
    key: Key | None = None
    pieces: tuple[Header, Sequence[bytes | memoryview]] | None = None
    spooled: Spooled | None = None
    adopted: bool = False
    began_s: float | None = None
    answer: Answer | None = None
    gives_way: bool = False


class Uploader:
    """A queue, and a bounded number of uploads that are retried until the bucket answers.

    States of an upload:

    =========  =========  ====================================================================
    state      goes to    when
    =========  =========  ====================================================================
    (new)      waiting    ``submit`` of a spooled one, or it was adopted from a dead process
    (new)      active     ``submit`` of one that is in memory only
    waiting    active     there is room for it
    active     pausing    the bucket failed or refused, or its file cannot be read
    pausing    active     the pause is over
    pausing    waiting    the pause is over, only it was refused, and others wait: those go first
    any        given up   ``stop``; a spooled file stays for the next process
    active     given up   it is refused for good, or a bad object has its name, or its file is
                          bad or gone
    active     written    the bucket has it; ``ended`` is called
    written    announced  a delta with its row is confirmed, or the index held the row before
    =========  =========  ====================================================================

    Fresh saves come before adopted ones, which take at most a quarter of the active slots. Uploads
    leave a quarter of ``max_concurrency`` to fetches. Reading a file takes no request slot, so a
    disk that hangs delays no upload from memory.

    Uploads and hooks never wait for announcements. Memory holds a key and some numbers per
    embedding meanwhile. A process that ends in between leaves the spooled file; the next one finds
    the object in the bucket, and announces it. ``_leave_spool`` says when a file is removed.

    The namespace's descriptor is written before the first object, and again SETTLED_S after that,
    since `s3ec ns rm` may have deleted it.

    Attributes:
        unannounced: Number of objects in the bucket that are not announced yet; approximate if
            read from another thread.
    """

    def __init__(
        self,
        node: Node,
        spool: Spool,
        *,
        inflight_bytes: int,
        ended: Callable[[Upload, bool], None],
        announced: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start to search for saves of dead processes, now and every minute.

        Args:
            inflight_bytes: Bytes of spooled files in memory at a time; a larger file goes alone.
            ended: Called in the loop's thread once per upload, also when the loop ends; True if
                this upload stored the object. Must not wait.
            announced: Called there once all objects are announced. Must not wait.
            clock: Seconds since the epoch.
        """
        self._loop = node.loop
        self._sources = node.sources
        self._counters = node.counters
        self._namespace = node.namespace
        self._index = node.index
        self._spool = spool
        self._inflight_limit_bytes = inflight_bytes
        self._ended = ended
        self._announced = announced
        self._clock = clock
        self._announcer = Announcer(
            node.store,
            node.layout,
            node.counters,
            writers=lambda: node.index.writers,
            newest=lambda: node.index.newest,
            pause_s=PAUSE_S,
        )
        self.unannounced = 0
        # The rest is for fetches: requests wait for those, and uploads may hang for long.
        self._max_active = max(1, (most := node.settings.max_concurrency) - most // 4)
        self._max_adopted = max(1, most // 4)
        self._adopting = True
        # The loop's thread only.
        self._requests = asyncio.Semaphore(self._max_active)
        self._stopped = False
        self._fresh: deque[Upload] = deque()
        self._adopted: deque[Upload] = deque()
        self._active: dict[asyncio.Task[None], Upload] = {}
        self._removable: list[Spooled] = []
        # State of writing objects.
        self._preparing = asyncio.Lock()
        self._store: Store | None = None
        self._described_s = -math.inf
        self._disagreed: set[str] = set()
        self._loop.submit(self._adopt_forever())

    # -- any thread --------------------------------------------------------------------------

    def submit(self, upload: Upload) -> None:
        """Queue one; never waits.

        Raises:
            RuntimeError: The loop is stopped.
        """
        self._loop.call(self._enqueue, upload)

    def stop_adopting(self) -> None:
        """Stop searching for saves of dead processes; those found are still uploaded."""
        self._adopting = False

    def flush(self) -> None:
        """Send pending announcements at once, whatever failed before; never waits."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call(self._announcer.send_soon)

    def stop(self) -> None:
        """Cancel the running uploads; returns at once. Spooled files stay there."""
        self._adopting = False
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call(self._cancel)

    @property
    def adopted_left(self) -> int:
        """Number of adopted saves that are not in the bucket yet; approximate in other threads."""
        return len(self._adopted) + sum(up.adopted for up in list(self._active.values()))

    # -- the loop's thread -------------------------------------------------------------------

    def _cancel(self) -> None:
        self._stopped = True
        self._announcer.close()  # spooled files stay there
        self._fresh.clear()
        self._adopted.clear()
        for task in self._active:
            task.cancel()

    async def _adopt_forever(self) -> None:
        while self._adopting:
            with contained(self._counters, "adopting the spool"):
                found = await asyncio.to_thread(self._spool.adopt)
                for one in found:
                    self._enqueue(Upload(one.digest, one.nbytes, spooled=one, adopted=True))
                if found:
                    log.info("uploading %d embeddings that a dead process left", len(found))
            await asyncio.sleep(ADOPT_EVERY_S)

    def _enqueue(self, upload: Upload) -> None:
        if self._stopped:
            self._ended(upload, False)
        elif upload.pieces is not None:
            self._start(upload)
        else:
            (self._adopted if upload.adopted else self._fresh).append(upload)
            self._start_some()

    def _start_some(self) -> None:
        """Start uploads of spooled files while there is room."""
        while self._fresh or self._adopted:
            active = [up for up in self._active.values() if up.pieces is None]
            adopted = sum(up.adopted for up in active)
            waiting = self._fresh or (self._adopted if adopted < self._max_adopted else None)
            if not waiting or len(active) >= self._max_active:
                return
            reading = sum(up.nbytes for up in active)
            if reading and reading + waiting[0].nbytes > self._inflight_limit_bytes:
                return
            self._start(waiting.popleft())

    def _start(self, upload: Upload) -> None:
        task = asyncio.get_running_loop().create_task(
            self._run(upload), name=f"s3ec-upload-{upload.digest.hex()[:8]}"
        )
        self._active[task] = upload

    async def _run(self, upload: Upload) -> None:
        stored = False
        started, work = time.monotonic(), self._sources.spans.begin()
        try:
            with contained(self._counters, "upload of %s", upload.digest.hex()):
                header = await self._until_answered(upload, work)
                if header is not None:
                    stored = True
                    self._count(upload, header, time.monotonic() - started)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._active.pop(task, None)
            if upload.gives_way:
                upload.gives_way = False
                (self._adopted if upload.adopted else self._fresh).append(upload)
            else:
                self._ended(upload, stored)
                if work is not None:
                    self._end_span(work, upload)
        # Not reached when the loop ends: then no upload may start.
        self._start_some()

    def _end_span(self, work: Work, upload: Upload) -> None:
        outcome = upload.answer or "given_up"
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
                error="" if outcome in ("stored", "existed") else outcome,
            )

    def _count(self, upload: Upload, header: Header, seconds: float) -> None:
        nbytes = header.shape.nbytes
        sums = {"save.items": 1, "save.bytes": nbytes, "save.seconds": seconds}
        self._counters.add_all(sums)
        if upload.began_s is not None:
            self._counters.observe("save_time", time.monotonic() - upload.began_s)
        log.debug("stored digest=%s nbytes=%d seconds=%.6f", upload.digest.hex(), nbytes, seconds)

    async def _until_answered(self, upload: Upload, work: Work | None) -> Header | None:
        """Retry until the file can be read and the bucket answers.

        Between two attempts a spooled embedding is not in memory.

        Returns:
            The header if this stored the object. None if it existed or was refused, or if its file
            is not available.
        """
        backoff: Backoff | None = None
        while True:
            if work is not None:
                note("attempts")
            try:
                return await self._attempt(upload)
            except (TierError, UnavailableError, AccessError) as exc:
                kind = "denied" if isinstance(exc, AccessError) else "unavailable"
                kind = "unreadable" if isinstance(exc, TierError) else kind
                if self._counters.get(f"save_problem.{kind}") == 0:
                    log.warning("uploads are failing and will be tried again: %s", exc)
                self._counters.add(f"save_problem.{kind}")
                asked_s = getattr(exc, "retry_after_s", None) or 0.0
                is_alone = isinstance(exc, AccessError) and not exc.is_general
            if is_alone and upload.pieces is None and (self._fresh or self._adopted):
                # For example, larger than a proxy accepts: a few such would take all slots.
                await asyncio.sleep(LONGEST_PAUSE_S)
                upload.gives_way = True
                return None
            backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            await asyncio.sleep(max(backoff.next_s(), min(asked_s, LONGEST_PAUSE_S)))

    async def _attempt(self, upload: Upload) -> Header | None:
        """Do the steps that are not done yet. Returns what ``_until_answered`` does."""
        if upload.pieces is not None and upload.key is not None:
            key, (header, pieces) = upload.key, upload.pieces
        else:
            loaded = await self._loop.disk(self._read, upload)
            if loaded is None:
                return None
            # An adopted save may not know vLLM's name; an own save does.
            key = upload.key = upload.key or loaded.key
            header, pieces = loaded.header, [loaded.blob]
        is_kept = False
        async with self._requests:
            if upload.answer is None:
                upload.answer = await self._write(key, header, pieces)
                if upload.adopted:
                    self._counters.add("spool.replayed")
        if upload.answer in ("stored", "existed"):
            nbytes = sum(memoryview(piece).nbytes for piece in pieces)
            is_kept = self._announce(upload, key, nbytes)
        spooled = upload.spooled
        # A later save may have replaced the file. Then do not wait for the disk, which may hang.
        if spooled is not None and not is_kept and self._spool.holds(spooled):
            await self._leave_spool([spooled])
        return header if upload.answer == "stored" else None

    def _read(self, upload: Upload) -> Loaded | None:
        """Read an embedding back from the spool; blocking. None if it is gone or bad.

        Raises:
            TierError: The disk did not answer.
        """
        loaded = self._spool.load(upload.digest)
        if loaded is None and upload.key is not None and not self._loop.closed:
            self._counters.add("save_problem.vanished")
            log.error("embedding %s vanished from the disk", upload.digest.hex())
            # Do not serve here an entry that no other node will get.
            self._sources.residents.discard(upload.digest)
            self._sources.tier.entries.drop_bad(upload.key, "vanished from the spool")
        return loaded

    # -- the loop's thread: into the bucket ----------------------------------------------------

    async def _write(
        self, key: Key, header: Header, pieces: Sequence[bytes | memoryview]
    ) -> Answer:
        """Write one object, unless it exists.

        Raises:
            UnavailableError, AccessError: The bucket failed or refused; it may succeed later.
        """
        store = await self._prepared()
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._sources.records.settle(header.modality, mine, store=store)
        if record != mine:
            self._counters.add("save_problem.record")
            if header.modality not in self._disagreed:
                self._disagreed.add(header.modality)
                log.error(
                    "nothing of modality %s is saved: namespace %s holds %s, this model gives %s",
                    *(header.modality, self._namespace.name, record, mine),
                )
            return "refused"
        name = self._sources.layout.object(key)
        try:
            await store.put_if_absent(name, pieces)
        except ConflictError:
            if not self._index.is_bad(key):
                self._counters.add("save.existed")
                return "existed"
            self._counters.add("save_problem.bad_object")  # the fetch that found it logged it
            return "bad_object"
        return "stored"

    async def _prepared(self) -> Store:
        """Return the store for writing, once conditional writes of the server were checked.

        The namespace's descriptor is written by then.
        """
        async with self._preparing:
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

    # -- the loop's thread: from the bucket into the index ------------------------------------

    def _announce(self, upload: Upload, key: Key, nbytes: int) -> bool:
        """Queue the announcement of an object in the bucket, without waiting for it.

        If this upload did not store it, another process did, under the same name: with the same
        shape, but perhaps with other last digits of its values.

        Args:
            nbytes: Size of the whole object.

        Returns:
            True if the spool keeps it until the announcement is confirmed.
        """
        index, mine = self._index, upload.answer == "stored"
        # It may have been found bad since the bucket answered.
        if not mine and (index.is_announced(key) or index.is_bad(key)):
            return False
        kept = upload.spooled
        if kept is not None and not self._spool.holds(kept):  # a later save has taken its place
            kept = None
        self.unannounced += 1
        self._announcer.add(key, nbytes, partial(self._answered, kept))
        if mine:
            # Not if it existed before: this process may know that very object as missing or bad,
            # and every request would fetch it without result.
            index.add(key, nbytes)
        return kept is not None

    def _answered(self, kept: Spooled | None, confirmed: bool) -> None:
        """Process an announcement that is in the bucket, or was given up as the loop ends."""
        if confirmed and kept is not None:
            self._removable.append(kept)
            if len(self._removable) == 1:  # it starts only after all of a batch were added
                self._loop.submit(self._remove_confirmed())
            return
        if not confirmed and kept is None:  # a spooled one is left to the next process
            self._counters.add("announce_dropped")
        self._settle(1)

    async def _remove_confirmed(self) -> None:
        confirmed, self._removable = self._removable, []
        for at in range(0, len(confirmed), REMOVED_AT_ONCE):
            batch = confirmed[at : at + REMOVED_AT_ONCE]
            await self._leave_spool(batch)
            self._settle(len(batch))

    async def _leave_spool(self, entries: Sequence[Spooled]) -> None:
        """Remove some entries from the spool: the only way out of it for uploaded entries.

        An entry leaves when one of these is true, and not before:

        - its announcement is confirmed,
        - the index holds a row of the object that was there already,
        - it may never be stored, or a bad object has its name,
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

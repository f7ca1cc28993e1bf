# SPDX-License-Identifier: Apache-2.0
"""The index of one process: lock-free lookups in mapped files, and refreshes from the bucket."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, S3ECError, TierError, UnavailableError
from s3ec.identity import Key, Layout, split_digest
from s3ec.index.bloom import MASKS, WORD_BYTES, words_for
from s3ec.index.child import Job, Jobs, in_process
from s3ec.index.deltas import Overlay, list_deltas, read_deltas
from s3ec.index.local import OVERLAY, NodeFolder
from s3ec.index.names import NEVER, SnapshotName, deltas_prefix, list_snapshots, window_start
from s3ec.index.snapshot import Rows, Segment, merge
from s3ec.store.base import PART_BYTES, ObjectInfo, Store
from s3ec.store.places import Place, served_by

log = logging.getLogger(__name__)

NEGATIVE_TTL_S = 60.0
"""How long a key is denied after the bucket did not have it."""
BAD_OBJECT_TTL_S = 3600.0
"""How long a key is denied after its object arrived bad."""
SNAPSHOTS_EVERY = 30
"""Every so many refreshes from the bucket, snapshots and all deltas are listed."""
MAX_OWN = 2**18
"""The most keys that this process denies, or has stored and no delta has announced yet."""
# Refreshes before a failed download is tried again; after each further failure twice as many.
_RETRY_REFRESHES = 3
_REFRESH = "refresh"  # the claim of the process that asks the bucket for this node
_TAKE_OVER = 3  # refreshes without a sign of it, until others ask too
# A listing is due if one fetch in a hundred finds nothing; a few fetches prove nothing.
_MANY_VANISHED = 32
_VANISHED_SHARE = 0.01


class IndexCounts(NamedTuple):
    """The size of an index.

    Attributes:
        fresh_deltas: Deltas that the snapshot may not hold.
        fresh_rows: Rows of these.
        overlay_rows: Rows of all deltas that count, with those of the 15 minutes before.
        snapshot_rows: Rows of the snapshot.
        snapshot: Its name; the default value for none.
    """

    fresh_deltas: int
    fresh_rows: int
    overlay_rows: int
    snapshot_rows: int
    snapshot: SnapshotName


class _Own(NamedTuple):
    """What this process itself knows of a key; it overrides the rows.

    Attributes:
        nbytes: Size of the object that it stored, 0 if not known; None if the key is denied.
        until_s: When this knowledge expires, by the monotonic clock.
        is_bad: True if the key is denied because its object is unusable.
    """

    nbytes: int | None
    until_s: float = math.inf
    is_bad: bool = False


class _View(NamedTuple):
    """The rows and filters that lookups read; replaced as a whole.

    Attributes:
        overlay: Rows of the deltas.
        snapshot: Rows of the snapshot.
        words: Its filter.
    """

    overlay: Overlay
    snapshot: Segment
    words: memoryview[int]

    def nbytes(self, hi: int, lo: int) -> int | None:
        """Size of an object, 0 if not known; None if no row names it."""
        for segment in (self.overlay.segment, self.snapshot):
            row = segment.find(hi, lo)
            if row >= 0:
                return segment.nbytes(row)
        return None

    def lookup(self, own: dict[bytes, _Own], ask: Callable[[Key], bool]) -> Callable[[Key], bool]:
        """Make a function that returns whether a key is held.

        A lookup is a dozen small steps, and a call in Python would cost as much as two of them, so
        filters and rows are searched inline.

        Args:
            own: What this process itself knows.
            ask: The lookup of these keys.
        """
        recent, find_recent = self.overlay.words, self.overlay.segment.find
        words, masks, low_bits = self.words, MASKS, len(MASKS) - 1
        recent_count, count = len(recent), len(words)
        shift, fences, his, los = self.snapshot.lookup_parts()
        find = self.snapshot.find

        def lookup(key: Key) -> bool:
            if key.digest in own:
                return ask(key)
            hi, lo = key.digest_hi, key.digest_lo
            top = hi >> 32
            # As bloom.maybe, first of the overlay's filter, then of the snapshot's.
            mask = masks[lo & low_bits]
            if recent[top * recent_count >> 32] & mask == mask and find_recent(hi, lo) >= 0:
                return True
            if words[top * count >> 32] & mask != mask:
                return False
            # Segment.find, with the first two steps of its search: most slots hold two to four
            # rows.
            slot = hi >> shift
            try:
                row = fences[slot]
                found = his[row]
                if found < hi:
                    row += 1
                    found = his[row]
                    if found < hi:
                        row = bisect_left(his, hi, row + 1, fences[slot + 1])
                        found = his[row]
                return found == hi and (los[row] == lo or find(hi, lo) >= 0)
            except IndexError:  # past the last row
                return False

        return lookup


def _view_of_nothing() -> _View:
    overlay = Overlay.empty(SnapshotName())
    return _View(overlay, overlay.segment, overlay.words)


class ManifestIndex:
    """Which keys are worth fetching, as far as this node knows. Any thread may look up.

    A True is a hint, never a promise: only bytes that are open on this node are granted. A lookup
    reads, in this order: what this process itself knows, the rows of the deltas, and the snapshot.
    Deltas and snapshot each have a filter in front.

    What this process knows of a key is one of these. It is *missing* after ``mark_missing`` here or
    in another process of the node, for a minute, or until this process reads a delta that names it.
    It is *bad* after ``mark_bad``, for an hour. It is *stored here* after ``add``, until a delta or
    a snapshot holds it. The next call for the key replaces each, but ``mark_missing`` leaves a bad
    key bad. Past ``MAX_OWN`` keys the oldest are dropped.

    One process per node asks the bucket: it holds the claim ``refresh``. The others read the files
    that it writes. If it fails, another process tries next. If no process has tried for three
    refreshes, each asks for itself.

    Counters: ``index.missing`` (keys that could not be fetched), ``index.vanished`` (of these, keys
    that the index held and the bucket did not), ``index.downloads`` (deltas and snapshots),
    ``index.refused`` (unusable files of the index), ``index.fetch_failed`` (failed downloads of
    snapshots).

    Attributes:
        maybe_contains: True if the corpus probably holds a key; about a microsecond, no lock. Do
            not keep it: each refresh with new rows replaces it.
        poll_s: Seconds between two calls of ``refresh``.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        folder: NodeFolder,
        *,
        jobs: Jobs,
        disk: Callable[..., Awaitable[Any]],
        counters: Counters,
        refresh_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing before the first refresh.

        Args:
            store: The bucket.
            layout: Of the namespace.
            folder: This node's files.
            jobs: Runs downloads, see ``child``.
            disk: Runs blocking calls in a thread.
            counters: Where to count.
            refresh_s: How often a node asks the bucket.
            clock: Monotonic seconds.
        """
        self._store = store
        self._layout = layout
        self._folder = folder
        self._jobs = jobs
        self._disk = disk
        self._counters = counters
        self._refresh_s = refresh_s
        self._clock = clock
        self.poll_s = refresh_s / 4
        self._loaded = False
        self._asking = asyncio.Lock()
        self._claim: int | None = None
        self._until_whole = 0  # refreshes until one that lists snapshots and all deltas
        self._inode = 0  # of the overlay that is open
        self._asked_s: float | None = None  # its time: when the bucket last answered
        self._tried_s = -math.inf  # when this process last asked the bucket, monotonic
        self._fetch: asyncio.Task[None] | None = None
        self._failures = 0  # of these, in a row
        self._newest = SnapshotName()  # the newest one that the bucket holds
        self._refused: set[str] = set()  # names of files that could not be used
        self._lock = threading.Lock()  # held by writers of the next attribute, never by lookups
        self._own: dict[bytes, _Own] = {}  # the oldest first
        self._gone: list[bytes] = []  # to be announced to the node's other processes
        self._missing_place = (0, 0)
        self._present = self._vanished = 0
        self._said_vanished = self._complained = False
        self._view = _view_of_nothing()
        self.maybe_contains: Callable[[Key], bool] = self._view.lookup(self._own, self._holds)

    # -- lookups -----------------------------------------------------------------------------

    def _holds(self, key: Key) -> bool:
        """The slow half of maybe_contains: keys of which this process itself knows something."""
        return self.nbytes(key) is not None

    def _known(self, digest: bytes) -> _Own | None:
        own = self._own.get(digest)
        return own if own is not None and self._clock() < own.until_s else None

    def nbytes(self, key: Key) -> int | None:
        """Size of a key's object, 0 if not known; None if the key is not held."""
        own = self._known(key.digest)
        return self._view.nbytes(key.digest_hi, key.digest_lo) if own is None else own.nbytes

    def is_announced(self, key: Key) -> bool:
        """True if a delta or a snapshot names the entry, so that all readers find it.

        An entry that this process stored and no delta has announced does not count, nor does a
        denied key: the process that finds its object announces it again.
        """
        own = self._known(key.digest)
        is_denied = own is not None and own.nbytes is None
        return not is_denied and self._view.nbytes(key.digest_hi, key.digest_lo) is not None

    def is_bad(self, key: Key) -> bool:
        """True if this process found the key's object unusable within the last hour; no I/O."""
        own = self._known(key.digest)
        return own is not None and own.is_bad

    @property
    def loaded(self) -> bool:
        """True after the first refresh that opened the newest snapshot, or found none."""
        return self._loaded

    @property
    def writers(self) -> int:
        """Writers of the fleet that announced something in the last 15 minutes; at least 1."""
        return max(1, self._view.overlay.writers)

    @property
    def files(self) -> tuple[SnapshotName, Sequence[str]]:
        """The snapshot that is open, and the ULIDs of the deltas that were read for it."""
        overlay = self._view.overlay
        return overlay.snapshot, overlay.read

    @property
    def newest(self) -> str:
        """The newest name of a delta or snapshot that was accepted; names.NEVER for none."""
        overlay = self._view.overlay
        return max(overlay.snapshot.ulid, *overlay.read[-1:], NEVER)

    @property
    def wants_listing(self) -> bool:
        """True if more than one fetch in a hundred found nothing since the last listing."""
        fetches = self._present + self._vanished
        return self._vanished >= _MANY_VANISHED and self._vanished > _VANISHED_SHARE * fetches

    def answered_s(self) -> float | None:
        """Seconds since the bucket last answered a refresh of this node; None for never."""
        return None if self._asked_s is None else max(0.0, self._folder.clock() - self._asked_s)

    def counts(self) -> IndexCounts:
        """The index's size. No I/O."""
        overlay, snapshot = self._view.overlay, self._view.snapshot
        return IndexCounts(
            overlay.fresh_deltas,
            overlay.fresh_rows,
            len(overlay.segment),
            len(snapshot),
            overlay.snapshot,
        )

    def levels(self) -> dict[str, float]:
        """The index's gauges, by name. No I/O."""
        counts = self.counts()
        found = {"level.index_entries": float(counts.overlay_rows + counts.snapshot_rows)}
        if (age_s := self.answered_s()) is not None:
            found["level.index_age_seconds"] = age_s
        return found

    # -- what this process learns --------------------------------------------------------------

    def add(self, key: Key, nbytes: int = 0) -> None:
        """Note that a key was just confirmed stored: lookups find it from now on; no I/O."""
        self._learn(key.digest, _Own(nbytes))

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """Deny a key that cannot be fetched, for a minute; no I/O.

        Args:
            absent: True if the bucket does not have it; the next refresh announces that to the
                node's other engines. False if the bucket refused.
        """
        if absent:
            self._gone.append(key.digest)
            if self.maybe_contains(key):
                self._counters.add("index.vanished")
                self._vanished += 1
        self._counters.add("index.missing")
        if not self.is_bad(key):
            self._learn(key.digest, _Own(None, self._clock() + NEGATIVE_TTL_S))

    def mark_present(self, key: Key) -> None:
        """Note that a GET has found the key's object; no I/O."""
        self._present += 1

    def mark_bad(self, key: Key) -> None:
        """Deny a key whose object is unusable, for an hour; no I/O."""
        self._counters.add("index.missing")
        self._learn(key.digest, _Own(None, self._clock() + BAD_OBJECT_TTL_S, is_bad=True))

    def _learn(self, digest: bytes, own: _Own) -> None:
        with self._lock:
            self._own[digest] = own

    def _forget(self, view: _View | None, news: Sequence[Rows] = ()) -> None:
        """Drop what has expired, and the oldest if there are too many.

        Args:
            view: A new view, if any: keys that it holds need not be remembered as stored here.
            news: Rows of new deltas: keys that they name are no longer missing.
        """
        now_s, known, named = self._clock(), list(self._own.items()), Segment.of(merge(news))
        for number, (digest, own) in enumerate(known):
            hi, lo = split_digest(digest)
            is_over = own.until_s <= now_s or len(known) - number > MAX_OWN
            if own.nbytes is not None:
                is_over = is_over or (view is not None and view.nbytes(hi, lo) is not None)
            elif not own.is_bad:
                is_over = is_over or named.find(hi, lo) >= 0
            if is_over:
                with self._lock:
                    if self._own.get(digest) is own:
                        del self._own[digest]

    # -- the loop's thread -----------------------------------------------------------------

    async def refresh(self, *, now: bool = False) -> None:
        """Open what the node has read; ask the bucket if that is older than ``refresh_s``.

        One LIST, and a GET for each new delta. A new snapshot is downloaded in the background.

        Args:
            now: Ask the bucket in any case, and wait for the newest snapshot.

        Raises:
            UnavailableError, AccessError: The bucket did not answer; known rows stay.
            TierError: This node's disk refused; known rows stay.
        """
        fetch = None
        async with self._asking:
            if await self._disk(self._take_over) or now:
                self._tried_s = self._clock()
                try:
                    fetch = await self._ask(now=now)
                except S3ECError:  # the next try is another process's: it may have other keys
                    self._release_claim()
                    raise
        if now and fetch is not None:
            await fetch

    async def close(self) -> None:
        """End background work; lookups continue with the known rows."""
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.gather(self._fetch, return_exceptions=True)
        self._release_claim()

    def _release_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            self._folder.release(claim)

    def _must_ask(self) -> bool:
        """True if this process must ask the bucket now; may take the node's claim."""
        # A little early, or a poll just before the time would wait for the next poll.
        due_s = self._refresh_s * 0.9
        if self._clock() - self._tried_s < due_s:
            return False  # nor may a process that has just failed take the claim, see refresh
        # Negative if the clock was set back. Read before the claim is taken: its new holder must
        # touch it at once, since all others go by its age.
        age_s = self._folder.claim_age_s(_REFRESH)
        if self._claim is None:
            with suppress(TierError):  # then this process asks for itself
                self._claim = self._folder.try_claim(_REFRESH)
        if self._claim is None:
            age_s = self._folder.claim_age_s(_REFRESH)
            return not 0 <= age_s < _TAKE_OVER * self._refresh_s
        if self._asked_s is not None and 0 <= age_s < due_s:
            return False  # the previous holder has just asked
        self._folder.touch_claim(_REFRESH)
        return True

    def _take_over(self) -> bool:
        """Open what another process of this node has written, and exchange missing keys.

        Returns:
            True if this process must ask the bucket now.
        """
        is_other = False
        try:
            is_other = self._open()
        except (OSError, CorruptEntryError) as exc:
            # Left by an earlier process, or its snapshot was removed: it is written again.
            self._inode, self._asked_s = 0, None
            if not isinstance(exc, FileNotFoundError):
                self._refuse(OVERLAY, exc)
        self._loaded = self._loaded or is_other
        self._share_missing()
        self._forget(self._view if is_other else None)
        if self.wants_listing and not self._said_vanished:
            self._said_vanished = True
            log.warning(
                "the index of %s holds objects that are gone from the bucket; where no engine "
                "writes there, run `s3ec manifest rebuild`",
                self._layout.namespace,
            )
        return self._must_ask()

    def _share_missing(self) -> None:
        gone, self._gone = self._gone, []
        if gone:
            self._folder.add_missing(gone)
        *place, news = self._folder.read_missing(*self._missing_place)
        self._missing_place = (place[0], place[1])
        for digest, at_s in news:
            left_s = NEGATIVE_TTL_S - (self._folder.clock() - at_s)
            # The file has our own marks as well, and a later store of this process counts more.
            if 0 < left_s <= NEGATIVE_TTL_S and digest not in self._own:
                self._learn(digest, _Own(None, self._clock() + left_s))

    def _open(self) -> bool:
        """Make lookups use the node's overlay, and the snapshot that it names.

        Returns:
            True if the overlay had changed.

        Raises:
            CorruptEntryError, OSError: The files are not here, or are invalid.
        """
        path = self._folder.path / OVERLAY
        about = path.lstat()
        is_other = about.st_ino != self._inode
        if is_other:
            whole = memoryview(safetensors_file.map_file(path))
            overlay = Overlay.parse(whole, self._layout.namespace)
            old = self._view
            _, snapshot, words = old
            if overlay.snapshot != old.overlay.snapshot:
                snapshot, words = self._open_snapshot(overlay.snapshot)
            view = _View(overlay, snapshot, words)
            self._view = view
            self.maybe_contains = view.lookup(self._own, self._holds)
            if overlay.snapshot.listed != old.overlay.snapshot.listed:
                self._present = self._vanished = 0
            self._inode = about.st_ino
        self._asked_s = about.st_mtime
        return is_other

    def _open_snapshot(self, name: SnapshotName) -> tuple[Segment, memoryview[int]]:
        """Map a snapshot and its filter; a millisecond. Raises as _open."""
        if name == SnapshotName():
            empty = _view_of_nothing()
            return empty.snapshot, empty.words
        segment = Segment.open(self._folder.rows_path(name), self._layout.namespace)
        words = memoryview(safetensors_file.map_file(self._folder.filter_path(name)))
        if len(words) != words_for(len(segment)) * WORD_BYTES:
            raise CorruptEntryError(f"{name}: filter of another size", reason="length")
        return segment, words.cast("Q")

    def _refuse(self, name: str, exc: Exception) -> None:
        self._counters.add("index.refused")
        if name not in self._refused:
            self._refused.add(name)
            log.warning("a file of the index cannot be used: %s", exc)

    def _leave_out(self, name: str) -> None:
        """Log a name that is left out, once: servers whose clocks disagree make such names."""
        if name not in self._refused:
            self._refuse(name, ValueError(f"{name} has a name that is ahead of the server's date"))

    # -- asking the bucket ---------------------------------------------------------------------

    async def _ask(self, *, now: bool) -> asyncio.Task[None] | None:
        """Read new deltas, and list snapshots if that is due; returns a snapshot's download."""
        is_whole = now or self._until_whole <= 0
        self._until_whole = (SNAPSHOTS_EVERY if is_whole else self._until_whole) - 1
        try:
            with served_by() as replicas:
                if is_whole and self._fetch is None:
                    await self._look_for_snapshots(replicas)
                fetch = self._fetch  # it may have failed when the deltas are read
                await self._read_deltas(self._view.overlay, replicas, is_whole=is_whole)
        except S3ECError:
            self._until_whole = 0
            raise
        if replicas:  # they do not show what home has: it is asked as soon as it answers
            self._until_whole = 0
        else:
            self._loaded = self._loaded or self._newest == self._view.overlay.snapshot
        return fetch

    async def _look_for_snapshots(self, replicas: set[Place]) -> None:
        """Begin to download the newest snapshot, if there is a newer one.

        Args:
            replicas: The replicas that served the listing, which fills it. Empty if home did.
        """
        found = await list_snapshots(self._store, self._layout, left_out=self._leave_out)
        shown = oldest = self._view.overlay.snapshot
        if not replicas and found and found[0][0] < shown:
            # A replica had this one while home did not answer, and home does not have it. It may be
            # of a listing of the replica, where most is missing. Home's snapshots count as newer.
            oldest = SnapshotName()
        newer = [one for one in found if one[0] > oldest and one[1].name not in self._refused]
        self._newest = newer[0][0] if newer else shown
        if newer:
            bring = self._bring(newer, None if oldest == shown else shown)
            self._fetch = asyncio.create_task(bring, name="s3ec-index-fetch")
            self._fetch.add_done_callback(self._brought)

    async def _bring(
        self, newer: Sequence[tuple[SnapshotName, ObjectInfo]], foreign: SnapshotName | None
    ) -> None:
        """Show the first usable snapshot, once all of its deltas are read.

        Args:
            newer: Snapshots to try, in this order.
            foreign: The shown snapshot if home does not have it: any of ``newer`` replaces it.
        """
        self._failures = min(self._failures + 1, SNAPSHOTS_EVERY)
        for name, info in newer:
            try:
                await self._disk(self._open_snapshot, name)
            except (OSError, CorruptEntryError):  # not on this node, or damaged by its disk
                await self._disk(self._folder.need_room, info.nbytes)
                job = Job("fetch", self._layout.namespace, str(self._folder.path), str(name))
                # A child takes a second to start. A snapshot of one request is read sooner here,
                # and delays no hook.
                is_small = info.nbytes <= PART_BYTES
                try:
                    await (in_process(self._store) if is_small else self._jobs)(job)
                except CorruptEntryError as exc:
                    self._refuse(info.name, exc)
                    continue
                self._counters.add("index.downloads")
            async with self._asking:
                overlay = self._view.overlay
                if name > overlay.snapshot or overlay.snapshot == foreign:
                    # For most new snapshots the known deltas do not count any more.
                    counts = not overlay.read or overlay.read[0] >= window_start(name.ulid)
                    overlay = replace(overlay, snapshot=name) if counts else Overlay.empty(name)
                    try:
                        with served_by() as replicas:
                            await self._read_deltas(overlay, replicas, is_whole=True)
                    except (UnavailableError, AccessError):  # the snapshot itself is here by now
                        self._failures = 0
                        raise
                self._loaded = True
            return

    def _brought(self, task: asyncio.Task[None]) -> None:
        self._fetch = None
        if task.cancelled() or (exc := task.exception()) is None:
            self._failures = 0
            return
        rest = _RETRY_REFRESHES << self._failures - 1 if self._failures else 1
        self._until_whole = min(rest, SNAPSHOTS_EVERY) - 1
        self._counters.add("index.fetch_failed")
        if not self._complained:
            self._complained = True
            log.warning("a snapshot of the index cannot be had now: %s", exc)

    async def _read_deltas(self, overlay: Overlay, replicas: set[Place], *, is_whole: bool) -> None:
        """Read the deltas that an overlay does not hold, and write and show the next overlay.

        Args:
            replicas: The replicas that served this refresh so far, while home does not answer.
            is_whole: List all deltas that count, and read again those that were unusable. Otherwise
                only deltas that may be new are listed.
        """
        newest = NEVER if is_whole else max(overlay.read, default=NEVER)
        # While the first snapshot is on its way, the deltas that count for that one.
        is_first = overlay.snapshot == SnapshotName()
        since = self._newest if is_first else overlay.snapshot
        found = await list_deltas(
            self._store, self._layout, since, newest, left_out=self._leave_out
        )
        prefix = deltas_prefix(self._layout)
        new = [
            ulid
            for ulid in found.keys() - set(overlay.read)
            if is_whole or prefix + ulid not in self._refused
        ]
        rows: dict[str, Rows] = {}
        failed: S3ECError | None = None
        for ulid, answer in (await read_deltas(self._store, self._layout, new)).items():
            if isinstance(answer, Rows):
                rows[ulid] = answer
                self._counters.add("index.downloads")
            elif isinstance(answer, CorruptEntryError) or (
                isinstance(answer, AccessError) and not answer.is_general
            ):
                self._refuse(prefix + ulid, answer)
            elif answer is not None:
                failed = answer
        if failed is None or overlay is self._view.overlay:
            await self._disk(self._write, overlay, rows, not replicas)
        # Last: one delta that cannot be read now must not delay the others. A new snapshot waits
        # for all of its deltas, since the rows that it replaces are shown meanwhile.
        if failed is not None:
            raise failed

    def _write(self, overlay: Overlay, rows: dict[str, Rows], is_homes: bool) -> None:
        """Write the next overlay to the node's files, and open it. Raises TierError.

        Args:
            is_homes: True if home itself has answered; the file's time says when it last did.
        """
        if rows or overlay is not self._view.overlay or not self._inode:
            pieces = overlay.encode_with(rows, self._layout.namespace)
            self._folder.write(OVERLAY, pieces)
        if is_homes:
            self._folder.touch(OVERLAY)
        try:
            self._open()
        except (OSError, CorruptEntryError) as exc:
            raise TierError(f"cannot read what was written: {exc}") from exc
        self._forget(self._view, list(rows.values()))
        self._folder.remove_older(overlay.snapshot)
        self._folder.remove_unused()

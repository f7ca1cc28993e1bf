# SPDX-License-Identifier: Apache-2.0
"""The index of one process: lookups from mapped files without a lock, and how it follows."""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import (
    CorruptEntryError,
    S3ECError,
    TierError,
)
from s3ec.identity import Key, Layout, split_digest
from s3ec.index.bloom import BLOCK_BYTES, blocks_for
from s3ec.index.child import Job, Jobs
from s3ec.index.deltas import Overlay, list_deltas, read_deltas
from s3ec.index.local import OVERLAY, FileId, NodeFolder
from s3ec.index.names import (
    NEVER,
    SnapshotName,
    deltas_prefix,
    list_snapshots,
)
from s3ec.index.snapshot import Rows, Segment
from s3ec.store.base import ObjectInfo, Store
from s3ec.tier.entry_writer import Disk

log = logging.getLogger(__name__)

NEGATIVE_TTL_S = 60.0
"""How long a key is denied after the bucket did not have it."""
BAD_OBJECT_TTL_S = 3600.0
"""How long a key is denied after its object came bad."""
SNAPSHOTS_EVERY = 30
"""Snapshots are looked for at every so manieth look at the bucket."""
MAX_DENIED = 100_000
MAX_STORED = 1_000_000
"""Keys that this process stored and that no delta has told yet."""
# Before a download that failed is tried again; after each further one twice as many.
_RETRY_REFRESHES = 3
_TAKE_OVER = 3  # refreshes without the process that asks the bucket for this node
# Keys that may be stored or denied before the next refresh without making other lookups slower.
_ROOM = 256
# One fetch in a hundred that finds nothing asks for a listing; of a few that says nothing.
_MANY_VANISHED = 32
_VANISHED_SHARE = 0.01


class Index(Protocol):
    """Which keys are worth fetching. Lookups are memory only and callable from any thread.

    A True is a hint, never a promise: only bytes that are open on this node are granted.
    """

    def maybe_contains(self, key: Key) -> bool:
        """Whether the corpus probably holds this key; no I/O, about a microsecond."""
        ...

    def nbytes(self, key: Key) -> int | None:
        """Size of a key's object, 0 where it is not known; None where the key is not held."""
        ...

    def add(self, key: Key, nbytes: int = 0) -> None:
        """The key was just confirmed stored."""
        ...

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: deny it for a minute.

        Args:
            absent: The bucket said 404. Otherwise it refused.
        """
        ...

    def mark_present(self, key: Key) -> None:
        """A GET has found the key's object."""
        ...

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: deny it for an hour."""
        ...

    def is_bad(self, key: Key) -> bool:
        """True if this process knows that the key's object is unusable; no I/O."""
        ...


class IndexCounts(NamedTuple):
    """How large an index is.

    Attributes:
        fresh_deltas: Deltas that the snapshot does not hold for certain.
        fresh_rows: Rows of these.
        overlay_rows: Rows of all deltas that count, with those of the 15 minutes before.
        snapshot_rows: Rows of the snapshot.
        snapshot: Its name; the default for none.
    """

    fresh_deltas: int
    fresh_rows: int
    overlay_rows: int
    snapshot_rows: int
    snapshot: SnapshotName


class _Denied:
    """Keys that are denied for now. Each is believed again after a while.

    ``until_s`` may be read by any thread without a lock; everything else is under the owner's.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self.until_s: dict[bytes, float] = {}
        self._ttl_s = ttl_s
        self._clock = clock

    def holds(self, digest: bytes) -> bool:
        until_s = self.until_s.get(digest)
        return until_s is not None and self._clock() < until_s

    def add_locked(self, digest: bytes, age_s: float = 0.0) -> None:
        """Deny a key; the oldest ones make room where there are too many.

        Args:
            age_s: How long ago it was found gone.
        """
        self.until_s.pop(digest, None)
        self.until_s[digest] = self._clock() + self._ttl_s - age_s
        while len(self.until_s) > MAX_DENIED:
            del self.until_s[next(iter(self.until_s))]

    def sweep_locked(self) -> None:
        """Drop the oldest keys whose time is over."""
        now = self._clock()
        while self.until_s and self.until_s[oldest := next(iter(self.until_s))] <= now:
            del self.until_s[oldest]


class _View(NamedTuple):
    """What lookups read, replaced as a whole.

    Attributes:
        overlay: Rows of the deltas.
        snapshot: Rows of the snapshot.
        blocks: Its filter.
        marks: A byte for each value of the low bits of digests; 1 for what this process itself
            knows more about. Marks are added and never taken out.
    """

    overlay: Overlay
    snapshot: Segment
    blocks: memoryview
    marks: bytearray

    @property
    def name(self) -> SnapshotName:
        return self.overlay.snapshot

    def holds(self, key: Key) -> bool:
        """Whether any row names this key."""
        hi, lo = key.digest_hi, key.digest_lo
        return self.overlay.segment.find(hi, lo) >= 0 or self.snapshot.find(hi, lo) >= 0

    def nbytes(self, key: Key) -> int | None:
        for segment in (self.overlay.segment, self.snapshot):
            row = segment.find(key.digest_hi, key.digest_lo)
            if row >= 0:
                return segment.nbytes(row)
        return None

    def lookup(self, exceptions: Callable[[Key], bool]) -> Callable[[Key], bool]:
        """A function that says whether a key is held.

        A lookup is a dozen small steps, and each call in Python would cost as much as two, so
        filter and rows are looked up inline.

        Args:
            exceptions: Answers for the keys that are marked.
        """
        marks, mask = self.marks, len(self.marks) - 1
        recent, find_recent = self.overlay.marks, self.overlay.segment.find
        recent_mask = len(recent) * 8 - 1
        blocks, count = self.blocks, len(self.blocks) // BLOCK_BYTES
        shift, fences, his, los = self.snapshot.lookup_parts()
        find = self.snapshot.find

        def lookup(key: Key) -> bool:
            hi = key.digest_hi
            if marks[hi & mask]:
                return exceptions(key)
            lo = key.digest_lo
            at = hi & recent_mask
            if recent[at >> 3] >> (at & 7) & 1 and find_recent(hi, lo) >= 0:
                return True
            # The filter, see bloom.maybe.
            at = ((hi >> 32) * count >> 32) << 6
            some = lo & 0x3FFFF  # numbers of up to 30 bits take half of the time
            if not blocks[at + (some >> 3 & 63)] >> (some & 7) & 1:
                return False
            some >>= 9
            if not blocks[at + (some >> 3)] >> (some & 7) & 1:
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
            except IndexError:  # behind the last row
                return False

        return lookup


def _no_marks(keys: int) -> bytearray:
    """Marks of no key, with room for so many: 8 to 16 bytes each."""
    return bytearray(8 << (keys + _ROOM).bit_length())


def _first_view() -> _View:
    nothing = Segment.of(Rows.of([], []))
    return _View(Overlay.empty(SnapshotName()), nothing, memoryview(bytes(64)), _no_marks(0))


class ManifestIndex:
    """What the corpus holds, as far as this node was told. Lookups from any thread.

    A lookup asks in this order: keys that are denied, keys that this process stored itself, rows
    of the deltas, and the snapshot behind its filter.

    ``mark_missing`` makes a key denied; that ends after a minute, when the key is stored here, or
    when a delta names it. ``mark_bad`` makes a key denied, too; that ends after an hour, or when
    the key is stored here. ``add`` makes a key stored here; that ends when a delta or a snapshot
    holds it, when it is denied, and where more than a million are stored here.

    Of a node's processes one asks the bucket: it holds the claim ``refresh``. The others take over
    the files that it writes. Where it has written nothing for three refreshes, each asks for
    itself.

    Counters: ``index.missing`` (keys that were not to be had), ``index.vanished`` (of these,
    keys that the index held and the bucket did not), ``index.downloads`` (deltas and snapshots),
    ``index.refused`` (files of the index that could not be used), ``index.fetch_failed``
    (downloads of snapshots).

    Attributes:
        maybe_contains: Whether the corpus probably holds a key; about a microsecond, no lock.
            Replaced by each refresh with news: not to be kept.
        poll_s: Call ``refresh`` so often.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        folder: NodeFolder,
        *,
        jobs: Jobs,
        disk: Disk,
        counters: Counters,
        refresh_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is read before the first refresh.

        Args:
            store: The bucket.
            layout: Of the namespace.
            folder: This node's files.
            jobs: Runs downloads, see ``child``.
            disk: Runs what blocks.
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
        self._refreshing: asyncio.Lock | None = None
        self._claim: int | None = None
        self._looks = 0
        self._file: FileId | None = None  # the overlay that is open
        self._asked_s: float | None = None  # its time: when the bucket last answered
        self._begun_s = clock()
        self._tried_s = -math.inf  # when this process last asked the bucket, monotonic
        self._fetch: asyncio.Task[None] | None = None
        self._fetched: SnapshotName | None = None  # lies here, and is not open yet
        self._failures = 0  # of downloads, in a row
        self._problem: BaseException | None = None  # of the last one, but for what is refused
        self._refused: set[str] = set()  # names of files that cannot be used
        # All deltas of this snapshot that came in time were read. By this process: where another
        # one asked in between, the next look for a snapshot finds what that one has missed.
        self._complete: SnapshotName | None = None
        self._not_given: list[str] = []  # deltas that the bucket lists and did not give
        self._unusable: set[str] = set()  # deltas that were damaged when they were read
        self._missing_place = (0, 0)
        # Held by writers of the dictionaries and the marks, never by lookups.
        self._lock = threading.Lock()
        self._missing = _Denied(NEGATIVE_TTL_S, clock)
        self._bad = _Denied(BAD_OBJECT_TTL_S, clock)
        self._stored: dict[bytes, tuple[Key, int]] = {}  # the oldest first
        self._marked: list[int] = []  # first halves of digests that were marked in this view
        self._gone: list[bytes] = []  # the node's other processes are to hear of these
        self._present = self._vanished = 0
        self._said_vanished = self._complained = False
        self._view = _first_view()
        self.maybe_contains: Callable[[Key], bool] = self._view.lookup(self._exception)

    # -- lookups -----------------------------------------------------------------------------

    def _exception(self, key: Key) -> bool:
        """As maybe_contains, for a key about which this process may know more."""
        digest = key.digest
        if self._missing.holds(digest) or self._bad.holds(digest):
            return False
        return digest in self._stored or self._view.holds(key)

    def nbytes(self, key: Key) -> int | None:
        """Size of a key's object, 0 where it is not known; None where the key is not held."""
        digest = key.digest
        if self._missing.holds(digest) or self._bad.holds(digest):
            return None
        stored = self._stored.get(digest)
        return self._view.nbytes(key) if stored is None else stored[1]

    def is_announced(self, key: Key) -> bool:
        """Whether all readers are told that the entry is there.

        What this process stored itself and no delta has told does not count, nor does a key that
        is denied: whoever finds its object tells that again.
        """
        return not self._missing.holds(key.digest) and self._view.holds(key)

    def is_bad(self, key: Key) -> bool:
        """True if this process found the key's object unusable within the last hour."""
        return self._bad.holds(key.digest)

    @property
    def loaded(self) -> bool:
        """True after the first refresh that knew the newest snapshot, or that there is none."""
        return self._loaded

    @property
    def writers(self) -> int:
        """Writers of the fleet that announced something in the last 15 minutes; at least 1."""
        return max(1, self._view.overlay.writers)

    @property
    def files(self) -> tuple[SnapshotName, Sequence[str]]:
        """The snapshot that is open, and the ULIDs of the deltas that were read since."""
        return self._view.name, self._view.overlay.read

    @property
    def newest(self) -> str:
        """The newest name of a delta or snapshot that was accepted; names.NEVER for none."""
        return max((self._view.name.ulid, *self._view.overlay.read[-1:]))

    @property
    def wants_listing(self) -> bool:
        """True if more than one fetch in a hundred found nothing since the last listing."""
        fetches = self._present + self._vanished
        return self._vanished >= _MANY_VANISHED and self._vanished > _VANISHED_SHARE * fetches

    def answered_s(self) -> float | None:
        """Seconds since the bucket last answered a refresh of this node; None for never."""
        return None if self._asked_s is None else max(0.0, self._folder.clock() - self._asked_s)

    def counts(self) -> IndexCounts:
        """How large it is. No I/O."""
        overlay, snapshot = self._view.overlay, self._view.snapshot
        return IndexCounts(
            overlay.fresh_deltas,
            overlay.fresh_rows,
            len(overlay.segment),
            len(snapshot),
            overlay.snapshot,
        )

    def levels(self) -> dict[str, float]:
        """What the gauges say of it. No I/O."""
        counts = self.counts()
        found = {"level.index_entries": float(counts.overlay_rows + counts.snapshot_rows)}
        if (age_s := self.answered_s()) is not None:
            found["level.index_age_seconds"] = age_s
        return found

    # -- what this process learns --------------------------------------------------------------

    def add(self, key: Key, nbytes: int = 0) -> None:
        """The key was just confirmed stored: found from now on."""
        with self._lock:
            self._mark_locked(key.digest_hi)
            self._missing.until_s.pop(key.digest, None)
            self._bad.until_s.pop(key.digest, None)
            self._stored.pop(key.digest, None)
            self._stored[key.digest] = key, nbytes
            while len(self._stored) > MAX_STORED:
                del self._stored[next(iter(self._stored))]

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: deny it for a minute; no I/O.

        Args:
            absent: The bucket does not have it; the node's other engines hear of it with the next
                refresh. Otherwise it refused.
        """
        vanished = absent and self.maybe_contains(key)
        self._deny(key, self._missing)
        if absent:
            self._gone.append(key.digest)
        if vanished:
            self._counters.add("index.vanished")
            self._vanished += 1

    def mark_present(self, key: Key) -> None:
        """A GET has found the key's object; no I/O."""
        self._present += 1

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: deny it for an hour; no I/O."""
        self._deny(key, self._bad)

    def _deny(self, key: Key, denied: _Denied) -> None:
        with self._lock:
            self._mark_locked(key.digest_hi)
            denied.add_locked(key.digest)
            self._stored.pop(key.digest, None)
        self._counters.add("index.missing")

    def _mark_locked(self, hi: int) -> None:
        # First of all: a lookup that finds no mark asks nothing else.
        marks = self._view.marks
        marks[hi & (len(marks) - 1)] = 1
        self._marked.append(hi)

    # -- the loop's thread -----------------------------------------------------------------

    async def refresh(self, *, now: bool = False) -> None:
        """Take over what the node knows; ask the bucket where that is older than ``refresh_s``.

        One LIST, and a GET for each new delta. A new snapshot is downloaded in the background.

        Args:
            now: Ask the bucket, whatever the node knows, and wait for the newest snapshot.

        Raises:
            UnavailableError, AccessError: The bucket did not answer; what is known stays.
            CorruptEntryError: A snapshot cannot be used; another one, or the next, is tried.
            TierError: This node's disk refused; what is known stays.
        """
        if self._refreshing is None:
            self._refreshing = asyncio.Lock()
        async with self._refreshing:
            if not (await self._disk(self._take_over) or now):
                return
            self._tried_s = self._clock()
            self._take_problem()
            lost, refused = 0, len(self._refused)
            await self._ask(now=now)
            # A download may have failed already: of what is refused the predecessor is tried.
            while now and (
                self._fetch or self._fetched or self._problem or len(self._refused) > refused
            ):
                refused = len(self._refused)
                if self._fetch is not None:
                    await asyncio.wait({self._fetch})
                if (problem := self._take_problem()) is not None:
                    lost += 1  # by this disk, which is asked for it once more
                    if lost > 1 or not isinstance(problem, CorruptEntryError):
                        raise problem
                await self._ask(now=True)

    def _take_problem(self) -> BaseException | None:
        problem, self._problem = self._problem, None
        return problem

    async def close(self) -> None:
        """End what runs in the background; lookups go on with what is known."""
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.gather(self._fetch, return_exceptions=True)
        if self._claim is not None:
            self._folder.release(self._claim)
            self._claim = None

    def _must_ask(self) -> bool:
        """Whether it is this process's turn to ask the bucket; may take the node's claim."""
        if self._claim is None:
            with suppress(TierError):  # asks for itself
                self._claim = self._folder.try_claim("refresh")
        # A little early, or a poll that comes a moment before its time would wait for the next.
        due_s = self._refresh_s * 0.9
        if self._clock() - self._tried_s < due_s:
            return False
        is_mine = self._claim is not None
        if self._asked_s is None:  # who has the claim has just begun, too
            return is_mine or self._clock() - self._begun_s >= _TAKE_OVER * self._refresh_s
        if self._asked_s > self._folder.clock():  # it was set back
            return True
        patience_s = due_s if is_mine else _TAKE_OVER * self._refresh_s
        return self._folder.clock() - self._asked_s >= patience_s

    def _take_over(self) -> bool:
        """Open what another process of this node has written, and tell it what was gone.

        Returns:
            Whether it is this process's turn to ask the bucket.
        """
        gone, self._gone = self._gone, []
        if gone:
            self._folder.add_missing(gone)
        found = self._folder.find(OVERLAY)
        if found is not None and (self._file is None or found.inode != self._file.inode):
            try:
                self._open(found)
                self._loaded = True
            except (OSError, CorruptEntryError) as exc:
                # One of an earlier life, or a snapshot that was removed: begin anew.
                self._refuse(OVERLAY, exc)
                self._file = self._asked_s = None
        elif found is None:
            self._file = self._asked_s = None
        if found is not None and self._file is not None:
            self._file = found
            self._asked_s = found.modified_s
        *place, news = self._folder.read_missing(*self._missing_place)
        self._missing_place = (place[0], place[1])
        self._sweep(news)
        return self._must_ask()

    def _open(self, file: FileId) -> None:
        path = self._folder.path / OVERLAY
        whole = safetensors_file.map_file(path)
        overlay = Overlay.parse(memoryview(whole), self._layout.namespace)
        if overlay.snapshot == self._view.name:
            snapshot, blocks = self._view.snapshot, self._view.blocks
        else:
            snapshot, blocks = self._open_snapshot(overlay.snapshot)
        self._install(overlay, snapshot, blocks)
        self._file, self._asked_s = file, file.modified_s

    def _open_snapshot(self, name: SnapshotName) -> tuple[Segment, memoryview]:
        """Map a snapshot and its filter; a millisecond.

        Raises:
            CorruptEntryError, OSError: They are not here, or not what they should be.
        """
        if name == SnapshotName():
            empty = _first_view()
            return empty.snapshot, empty.blocks
        segment = Segment.open(self._folder.rows_path(name), self._layout.namespace)
        mapped = safetensors_file.map_file(self._folder.filter_path(name))
        mapped.madvise(mmap.MADV_WILLNEED)
        blocks = memoryview(mapped)
        if len(blocks) != blocks_for(len(segment)) * BLOCK_BYTES:
            raise CorruptEntryError(f"{name}: filter of another size", reason="length")
        return segment, blocks

    def _install(self, overlay: Overlay, snapshot: Segment, blocks: memoryview) -> None:
        """Have lookups use these from now on."""
        old = self._view
        view = _View(overlay, snapshot, blocks, old.marks)
        # The lock is taken for moments only: hooks wait for it.
        told = [digest for digest, (key, _) in self._stored.copy().items() if view.holds(key)]
        named = [
            digest
            for digest in self._missing.until_s.copy()
            if overlay.named(*split_digest(digest)) > old.overlay.named(*split_digest(digest))
        ]
        with self._lock:
            for digest in told:
                self._stored.pop(digest, None)
            for digest in named:
                self._missing.until_s.pop(digest, None)
        self._show(view)
        if overlay.snapshot.listed != old.name.listed:
            self._present = self._vanished = 0

    def _show(self, view: _View) -> None:
        """Replace the view, with marks for what this process knows now."""
        with self._lock:
            self._marked = []
        known = [*self._stored.copy(), *self._missing.until_s.copy(), *self._bad.until_s.copy()]
        marks = _no_marks(len(known))
        mask = len(marks) - 1
        for digest in known:
            marks[split_digest(digest)[0] & mask] = 1
        with self._lock:
            for hi in self._marked:  # since a moment ago
                marks[hi & mask] = 1
            self._view = view._replace(marks=marks)
            self.maybe_contains = self._view.lookup(self._exception)

    def _sweep(self, news: list[tuple[bytes, float]]) -> None:
        """Deny what other processes found gone, and believe again what was denied long enough."""
        now_s = self._folder.clock()
        with self._lock:
            for digest, at_s in news:
                age_s = now_s - at_s
                # Our own marks come back as well, and what was stored here since counts more.
                is_known = digest in self._stored or self._missing.holds(digest)
                if 0 <= age_s < NEGATIVE_TTL_S and not is_known:
                    self._mark_locked(split_digest(digest)[0])
                    self._missing.add_locked(digest, age_s)
            self._missing.sweep_locked()
            self._bad.sweep_locked()
            marked = len(self._marked)
        if marked > _ROOM:
            self._show(self._view)
        if self.wants_listing and not self._said_vanished:
            self._said_vanished = True
            log.warning(
                "the index of %s holds objects that are gone from the bucket; where no engine "
                "writes there, run `s3ec manifest rebuild`",
                self._layout.namespace,
            )

    def _refuse(self, name: str, exc: Exception) -> None:
        self._counters.add("index.refused")
        if name not in self._refused:
            self._refused.add(name)
            log.warning("a file of the index cannot be used: %s", exc)

    def _leave_out(self, name: str) -> None:
        """A clock of several servers that do not agree makes such names: say it once for each."""
        if name not in self._refused:
            self._refuse(name, ValueError(f"{name} has a name that is ahead of the server's date"))

    # -- asking the bucket ---------------------------------------------------------------------

    async def _ask(self, *, now: bool) -> None:
        """Look for a new snapshot where that is due, then for new deltas."""
        is_newest = False
        if self._fetch is None and (now or self._looks % SNAPSHOTS_EVERY == 0):
            self._unusable.clear()  # what was damaged on its way is good the next time
            self._complete = None
            is_newest = await self._look_for_snapshots()
        self._looks += 1
        overlay, fetched = self._view.overlay, self._fetched
        name = max(overlay.snapshot, fetched or SnapshotName())
        # All that count, beside looks for a snapshot; else those that may have come since.
        newest = max(overlay.read, default=NEVER) if name == self._complete else NEVER
        found = await list_deltas(self._store, self._layout, name, newest, left_out=self._leave_out)
        new = found.keys() - set(overlay.read) - self._unusable
        # Of those that the bucket did not give, one shows whether it does now: many refusals in a
        # row would keep the breaker open.
        again = [ulid for ulid in self._not_given if ulid in new]
        answers = await read_deltas(self._store, self._layout, new - set(again[1:]))
        rows: dict[str, Rows] = {}
        failed: dict[str, S3ECError] = {}
        for ulid, answer in answers.items():
            if isinstance(answer, Rows):
                rows[ulid] = answer
                self._counters.add("index.downloads")
            elif isinstance(answer, CorruptEntryError):
                self._unusable.add(ulid)
                self._refuse(deltas_prefix(self._layout) + ulid, answer)
            elif answer is not None:
                failed[ulid] = answer
        await self._disk(self._write, overlay, name, rows)
        self._complete = None if failed or again[1:] else name
        if again and again[0] not in failed:
            again = []  # they may be had now: the next refresh asks for all
        self._not_given = [*again[1:], *failed]
        if self._fetched == fetched:
            self._fetched = None
        self._loaded = self._loaded or is_newest or name != SnapshotName()
        # Last: one delta that the bucket lists and cannot read must not keep back the others.
        for exc in failed.values():
            raise exc

    async def _look_for_snapshots(self) -> bool:
        """Begin to download the newest snapshot; True if there is none that is newer."""
        mine = max(self._view.name, self._fetched or SnapshotName())
        for name, info in await list_snapshots(self._store, self._layout, left_out=self._leave_out):
            if name <= mine:
                break
            if info.name in self._refused:
                continue
            self._fetch = asyncio.create_task(self._bring(name, info), name="s3ec-index-fetch")
            self._fetch.add_done_callback(self._brought)
            return False
        return True

    async def _bring(self, name: SnapshotName, info: ObjectInfo) -> None:
        path = self._folder.rows_path(name)
        if not await self._disk(path.is_file):
            job = Job("fetch", self._layout.namespace, str(self._folder.path), str(name))
            try:
                await self._disk(self._folder.need_room, info.nbytes)
                await self._jobs(job)
            except CorruptEntryError as exc:
                self._refuse(info.name, exc)
                raise
            self._counters.add("index.downloads")
        try:
            await self._disk(self._open_snapshot, name)
        except (OSError, CorruptEntryError) as exc:
            await self._disk(path.unlink, True)  # this disk's fault: the next look brings it again
            raise CorruptEntryError(f"{name} on this node: {exc}", reason="disk") from exc
        self._fetched = name

    def _brought(self, task: asyncio.Task[None]) -> None:
        self._fetch = None
        if task.cancelled() or (exc := task.exception()) is None:
            self._failures = 0
            return
        # Of one that is refused the predecessor is tried at once; another try takes a process.
        is_refused = isinstance(exc, CorruptEntryError) and exc.reason != "disk"
        rest = min(_RETRY_REFRESHES << self._failures, SNAPSHOTS_EVERY - 1)
        self._failures = min(self._failures + 1, SNAPSHOTS_EVERY)
        self._looks = 0 if is_refused else -rest
        self._problem = None if is_refused else exc
        self._counters.add("index.fetch_failed")
        if not self._complained and not isinstance(exc, CorruptEntryError):
            self._complained = True
            log.warning("a snapshot of the index cannot be had now: %s", exc)

    def _write(self, overlay: Overlay, name: SnapshotName, rows: dict[str, Rows]) -> None:
        """Write what was heard for the node, and open it."""
        if not rows and name == overlay.snapshot and self._file is not None:
            self._folder.touch(OVERLAY)
            found = self._folder.find(OVERLAY)
            if found is not None and found.inode == self._file.inode:
                self._file, self._asked_s = found, found.modified_s
                return
        pieces = overlay.encode_with(name, rows, self._layout.namespace)
        self._folder.write(OVERLAY, pieces)
        self._folder.touch(OVERLAY)
        written = self._folder.find(OVERLAY)
        if written is None:
            raise TierError(f"{self._folder.path / OVERLAY} vanished")
        try:
            self._open(written)
        except (OSError, CorruptEntryError) as exc:
            raise TierError(f"cannot read what was written: {exc}") from exc
        self._folder.remove_older(name)

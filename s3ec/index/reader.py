# SPDX-License-Identifier: Apache-2.0
"""The index made from the manifest: lookups from memory and mapped files, without a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from s3ec.identity import Key, split_digest
from s3ec.index.cache import IndexCache
from s3ec.index.follower import Follower, FollowOptions
from s3ec.index.lookup import PresenceFilter, View
from s3ec.index.manifest import OVERLAP_S
from s3ec.index.missing import BAD_OBJECT_TTL_S, NEGATIVE_TTL_S, NegativeCache, VanishAlarm
from s3ec.index.rows import Array, EntryInfo
from s3ec.index.segment import Segment

# Keys that this process stored and that no delta has told yet.
_RECENT_ENTRIES = 1_000_000
# Keys that may be stored or lost before the next View without making other lookups slower. Small:
# the bytes should stay in the processor's nearest cache.
_ROOM = 256


class _Stored(NamedTuple):
    """What this process stored itself, and until when it is believed without being told."""

    facts: EntryInfo
    until_s: float


class ManifestIndex:
    """What the corpus holds, as far as this process was told. Lookups from any thread.

    A lookup asks in this order: keys that the bucket lacked a moment ago or whose object is bad
    (denied), keys that this process stored itself (found), and the View, which a refresh replaces
    as a whole.

    ``mark_missing`` makes a key denied. That ends after a minute, when the key is stored here, or
    when a new delta tells of it. ``mark_bad`` makes a key denied, too. That ends after an hour,
    when the key is stored here, or when a view has a later row of it than the view before: somebody
    deleted the object and stored the entry again. ``add`` makes a key stored here. That ends when a
    view tells of the store or of a later deletion, when the key is marked missing or bad, or after
    ten minutes with a base.

    Counters: ``index.forgotten`` (keys that were not to be had), ``index.vanished`` (of these,
    keys that the index held and the bucket did not), and those of Follower and IndexCache.

    Attributes:
        maybe_contains: Whether the corpus probably holds a key; about a microsecond, no lock.
            Replaced with the View: not to be kept.
    """

    def __init__(
        self,
        cache: IndexCache,
        *,
        options: FollowOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read before the first refresh.

        Args:
            cache: This node's files of the index, and the way to the bucket.
            options: How the bucket is followed; defaults if None.
            clock: Monotonic seconds.
            wall_clock: Seconds since the epoch.
        """
        self._counters = cache.counters
        self._clock = clock
        self._wall_clock = wall_clock
        # Held by writers of the two dictionaries and the filter, never by lookups.
        self._lock = threading.Lock()
        self._gone = NegativeCache(NEGATIVE_TTL_S, clock)
        self._bad = NegativeCache(BAD_OBJECT_TTL_S, clock)
        self._recent: dict[bytes, _Stored] = {}  # the oldest first
        self._alarm = VanishAlarm(cache.layout.namespace, cache.counters, clock)
        self._view = View()
        self._began_s, self._refreshed_s = wall_clock(), clock()
        self._lag_s: float | None = None
        # Of what is in either dictionary or in the View's overlay.
        self._overrides = PresenceFilter(np.empty(0, "<u8"), room=_ROOM)
        self.maybe_contains: Callable[[Key], bool] = self._maybe_contains
        self._follower = Follower(
            cache,
            options=options or FollowOptions(),
            install=self._show,
            clock=clock,
        )

    @property
    def loaded(self) -> bool:
        """Whether the first base was opened, or the objects were listed."""
        return self._follower.loaded

    def counts(self) -> tuple[int, int, int]:
        """Deltas that are in no base, rows in them, and keys in the base. No I/O."""
        return self._follower.deltas, *self._view.counts()

    def levels(self) -> dict[str, float]:
        """What the gauges say of it. No I/O."""
        view = self._view
        rows, keys = view.counts()
        found = {
            "level.index_entries": rows + keys + len(view.listing or ()),
            "level.index_age_seconds": max(0.0, self._clock() - self._refreshed_s),
        }
        if self._lag_s is not None:
            found["level.index_lag_seconds"] = self._lag_s
        return found

    # -- lookups -----------------------------------------------------------------------------

    def _maybe_contains(self, key: Key) -> bool:
        digest = key.digest
        if self._gone.holds(digest) or self._bad.holds(digest):
            return False
        return digest in self._recent or self._view.maybe(key)

    def holds(self, key: Key) -> bool:
        """As maybe_contains, and False where only a filter says so."""
        digest = key.digest
        if self._gone.holds(digest) or self._bad.holds(digest):
            return False
        return digest in self._recent or self._view.holds(key)

    def facts(self, key: Key) -> EntryInfo | None:
        """What is known of an entry that is probably there; some microseconds."""
        digest = key.digest
        if self._gone.holds(digest) or self._bad.holds(digest):
            return None
        recent = self._recent.get(digest)
        if recent is not None:
            return recent.facts
        latest = self._view.latest(digest)
        return None if latest is None or latest[1] else latest[0]

    def is_bad(self, key: Key) -> bool:
        """True if this process found the key's object unusable within the last hour."""
        return self._bad.holds(key.digest)

    def is_announced(self, key: Key) -> bool:
        """Whether all readers are told that the entry is there; a filter alone is no proof.

        Whatever this process found or stored since does not count.
        """
        latest = self._view.latest(key.digest)
        return latest is not None and not latest[1]

    def known_time_s(self, key: Key) -> int:
        """Time of the latest row about this key, a tombstone's too; 0 where there is none."""
        latest = self._view.latest(key.digest)
        recent = self._recent.get(key.digest)
        return max(latest[0].time_s if latest else 0, recent.facts.time_s if recent else 0)

    # -- what this process learns --------------------------------------------------------------

    def add(self, key: Key, facts: EntryInfo | None = None) -> None:
        """The key was just confirmed stored: found from now on."""
        # Later than what is known of it, a deletion by somebody whose clock is ahead above all.
        time_s = max(int(self._wall_clock()), self.known_time_s(key) + 1)
        stored = _Stored((facts or EntryInfo())._replace(time_s=time_s), self._clock() + OVERLAP_S)
        with self._lock:
            self._overrides.add(
                key.digest_hi
            )  # first: a lookup that finds no mark asks nothing else
            self._gone.discard_locked(key.digest)
            self._bad.discard_locked(key.digest)
            self._recent.pop(key.digest, None)
            self._recent[key.digest] = stored
            while len(self._recent) > _RECENT_ENTRIES:
                del self._recent[next(iter(self._recent))]

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: answer False for a while.

        Args:
            absent: The bucket does not have it; otherwise it refused.
        """
        vanished = absent and self.maybe_contains(key)
        self._deny(key, self._gone)
        if vanished:
            self._counters.add("index.vanished")
            self._alarm.note(key)

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: answer False for an hour."""
        self._deny(key, self._bad)

    def _deny(self, key: Key, denied: NegativeCache) -> None:
        with self._lock:
            self._overrides.add(key.digest_hi)
            denied.add_locked(key.digest)
            self._recent.pop(key.digest, None)
        self._counters.add("index.forgotten")

    # -- the loop's thread -----------------------------------------------------------------

    async def refresh(self) -> None:
        """Look for news in the bucket: one listing, and what is new.

        Raises:
            UnavailableError, AccessError: The bucket did not answer; what is known stays.
        """
        failed = await self._follower.refresh()
        with self._lock:
            self._gone.sweep_locked()
            self._bad.sweep_locked()
            self._sweep_recent_locked()
        # Last: one delta that the bucket lists and cannot read must not keep back the others.
        for exc in failed:
            raise exc
        self._refreshed_s = self._clock()

    async def close(self) -> None:
        """End what runs in the background; lookups go on with what is known."""
        await self._follower.close()

    def _sweep_recent_locked(self) -> None:
        """Drop what was stored long ago, so that the base answers for it.

        It may have been announced, deleted by others and merged between two refreshes: then no
        row ever says so. A listing does not see deletions as fast, so without a base it stays.
        """
        now_s = self._clock()
        while self._recent and self._view.base is not None:
            oldest = next(iter(self._recent))
            if self._recent[oldest].until_s > now_s:
                return
            del self._recent[oldest]

    def _show(self, view: View, new: Segment | None) -> None:
        """Take a new view, and settle what it says of keys that are looked up before it.

        Args:
            new: Rows of deltas that are in no earlier view.
        """
        before = self._view
        is_new_base = view.base is not None and view.base is not before.base
        with self._lock:
            self._overrides = self._overrides_locked(view)
            self._view = view
            self.maybe_contains = view.lookup(self._overrides, self._maybe_contains)
        if is_new_base:
            self._alarm.reset()
        if new is not None:
            self._note_lag(new)
            self._heal(new)
        self._believe_what_was_mended(before, view)
        settled = {
            digest: stored
            for digest, stored in list(self._recent.items())
            if view.knows_of(digest, stored.facts)
        }
        with self._lock:
            for digest, stored in settled.items():
                if self._recent.get(digest) is stored:  # and was not stored once more meanwhile
                    del self._recent[digest]

    def _note_lag(self, new: Segment) -> None:
        """How long the newest of these rows took to get here; what is older than we says nothing.

        Rows have the time at which their object was stored, by the bucket's clock.
        """
        newest_s = int(new.rows().time_s.max()) if len(new) else 0
        if newest_s >= self._began_s:
            self._lag_s = max(0.0, self._wall_clock() - newest_s)

    def _overrides_locked(self, view: View) -> PresenceFilter:
        """A filter of all digests for which the base alone cannot answer."""
        halves: list[Array] = [] if view.overlay is None else [view.overlay.rows().digest_hi]
        halves += [
            np.frombuffer(b"".join(digests), ">u8")[::2].astype("<u8")
            for digests in (self._gone.until, self._bad.until, self._recent)
        ]
        return PresenceFilter(np.concatenate(halves), room=_ROOM)

    def _heal(self, new: Segment) -> None:
        """Believe denied keys again that new deltas tell of."""
        healed = []
        for digest in list(self._gone.until):
            row = new.find(*split_digest(digest))
            if row >= 0 and not new.deleted(row):
                healed.append(digest)
        with self._lock:
            for digest in healed:
                self._gone.discard_locked(digest)

    def _believe_what_was_mended(self, before: View, view: View) -> None:
        """Believe bad keys again of which the new view has a later row or tombstone.

        Somebody deleted the bad object, and perhaps stored the entry again. Not every new row says
        so: a process that finds the bad object under its name announces it, with the time at which
        it was stored.
        """
        mended = []
        for digest in list(self._bad.until):
            latest, known = view.latest(digest), before.latest(digest)
            known_s = known[0].time_s if known is not None else 0
            if latest is not None and latest[0].time_s > known_s:
                mended.append(digest)
        with self._lock:
            for digest in mended:
                self._bad.discard_locked(digest)

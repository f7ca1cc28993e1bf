# SPDX-License-Identifier: Apache-2.0
"""What a reader knows of the corpus at one moment, for lookups from any thread without a lock.

It is the mapped base, the rows of the deltas that are in no base, and a filter of one byte that
says of most digests that they are in neither.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from s3ec.errors import CorruptEntryError
from s3ec.identity import Key, split_digest
from s3ec.index.bloom import Bloom
from s3ec.index.manifest import BaseManifest, Shard
from s3ec.index.rows import Array, EntryInfo, Rows, concat
from s3ec.index.segment import LookupParts, Segment


class Unknown(Enum):
    """What a filter knows of a key that it does not rule out."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN


class Base:
    """Every key of one version, by its rows (exact) or by its filters. Immutable.

    All files are mapped when it is made, off the scheduler's thread; a lookup afterwards makes no
    system call and cannot fail, also once the files were unlinked. Any thread may look up.
    Dropping the last reference unmaps the files.

    Attributes:
        entries: Keys.
        exact: Whether it knows rows; a filter says "maybe" for a few keys that are not there.
    """

    __slots__ = ("_blooms", "_finds", "_segments", "entries", "exact")

    def __init__(self, head: BaseManifest, parts: Sequence[Segment | Bloom]) -> None:
        """Put a head's shards together.

        Args:
            head: What was committed.
            parts: For each shard in order its segment, or for each its filter.

        Raises:
            CorruptEntryError: A part is not what the head says of it.
        """
        segments: list[Segment] = []
        blooms: list[Bloom] = []
        if len(parts) != len(head.shards):
            raise CorruptEntryError(
                f"{len(parts)} files for {len(head.shards)} shards", reason="shape"
            )
        for shard, part in zip(head.shards, parts, strict=True):
            # One slot for each leading byte, so that a lookup needs no search for its shard.
            slots = shard.last - shard.first + 1
            if isinstance(part, Segment):
                _check_segment(shard, part)
                segments += [part] * slots
            else:
                _check_entries(shard, part, part.name)
                blooms += [part] * slots
        if segments and blooms:
            raise CorruptEntryError("rows and filters in one base", reason="shape")
        self.entries = head.entries
        self.exact = not blooms
        self._segments = segments
        self._finds = [segment.find for segment in segments]  # bound once: 50 ns a lookup
        self._blooms = blooms

    @classmethod
    def open(
        cls,
        head: BaseManifest,
        paths: Sequence[str | os.PathLike[str]],
        namespace: str,
        *,
        exact: bool,
    ) -> Base:
        """Map the files of a head, which were checked when they were downloaded.

        Cost: some 0.1 ms a shard. To be called off the scheduler's thread.

        Args:
            head: What was committed.
            paths: One for each shard in order: segments where ``exact``, otherwise filters.
            namespace: Which one it must be of.
            exact: Which kind of files these are.

        Raises:
            CorruptEntryError: A file is not what the head says of it.
            OSError: A file cannot be opened.
        """
        if exact:
            return cls(head, [Segment.open(path, namespace) for path in paths])
        return cls(head, [Bloom.open(path, namespace) for path in paths])

    def maybe(self, hi: int, lo: int) -> bool:
        """Whether the base holds this digest, given as identity.split_digest does; no I/O."""
        finds = self._finds
        if finds:
            return finds[hi >> 56](hi, lo) >= 0
        return self._blooms[hi >> 56].maybe(hi, lo)

    def find(self, hi: int, lo: int) -> EntryInfo | Literal[Unknown.UNKNOWN] | None:
        """What is known of a digest; None where it is not there.

        UNKNOWN where only a filter was asked, and did not say no.
        """
        if self.exact:
            segment = self._segments[hi >> 56]
            row = segment.find(hi, lo)
            return None if row < 0 else segment.facts(row)
        return UNKNOWN if self.maybe(hi, lo) else None

    def lookup_parts(self) -> list[LookupParts]:
        """Segment.lookup_parts for each leading byte; none where it is not exact."""
        return [segment.lookup_parts() for segment in self._segments]

    def segments(self) -> list[Segment]:
        """All shards in order; none where it is not exact."""
        return list(dict.fromkeys(self._segments))


def _check_segment(shard: Shard, segment: Segment) -> None:
    """Check the structure of a shard; reads two rows.

    Raises:
        CorruptEntryError: It has other rows than the head says.
    """
    _check_entries(shard, segment, segment.name)
    if segment.may_hold_tombstones and segment.rows().deleted.any():
        raise CorruptEntryError(f"{segment.name}: tombstones in a base", reason="shape")
    ends = segment.rows().digest_hi[[0, -1]] if len(segment) else np.empty(0, "<u8")
    if not all(shard.first <= int(hi) >> 56 <= shard.last for hi in ends):
        raise CorruptEntryError(
            f"{segment.name}: has digests outside of {shard.first:02x}-{shard.last:02x}",
            reason="order",
        )


def _check_entries(shard: Shard, part: Segment | Bloom, name: str) -> None:
    if len(part) != shard.entries:
        raise CorruptEntryError(
            f"{name}: {len(part)} entries, expected {shard.entries}", reason="size"
        )


class Overlay:
    """The newest row of each key, and the delta that it comes from; 46 bytes a row. Immutable.

    Of two rows for a key the later ``time_s`` counts, and where they are equal a tombstone, or that
    of the later ULID. So what a delta adds depends on no order in which deltas come, and no delta
    has to be read again when one with an older name appears.

    Attributes:
        ulids: Of all deltas in it, those too whose rows all lost.
        segment: For lookups; None where there are no rows.
    """

    __slots__ = ("_names", "_rows", "_sources", "segment", "ulids")

    def __init__(
        self,
        names: list[str] | None = None,
        rows: Rows | None = None,
        sources: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Empty; the arguments are for ``plus``.

        Args:
            names: ULIDs in rising order.
            rows: Sorted by digest.
            sources: For each row the place of its delta in ``names``.
        """
        self._names = names or []
        self._rows = Rows.empty() if rows is None else rows
        self._sources = np.empty(0, np.uint32) if sources is None else sources
        self.ulids = frozenset(self._names)
        self.segment = Segment.of(self._rows) if len(self._rows) else None

    def plus(self, deltas: Mapping[str, Rows]) -> Overlay:
        """An overlay with these deltas too, whatever their age. Reads no file.

        Args:
            deltas: ULID to rows; none that is here already.
        """
        names = sorted([*self._names, *deltas])
        places = {name: place for place, name in enumerate(names)}
        moved = np.array([places[name] for name in self._names], np.uint32)
        added = sorted(deltas)
        sources = np.concatenate(
            [
                moved[self._sources],
                *(np.full(len(deltas[name]), places[name], np.uint32) for name in added),
            ]
        )
        rows = concat([self._rows, *(deltas[name] for name in added)])
        if self._names and added and added[0] < self._names[-1]:
            # Of rows that are equally late the last one counts: so they have to be in order.
            order = np.argsort(sources, kind="stable")
            rows, sources = rows.select(order), sources[order]
        stay = rows.winners()
        return Overlay(names, rows.select(stay), sources[stay])


class PresenceFilter:
    """A byte for each value of the low bits of digests' first halves: 1 where the set has it.

    A 1 means "perhaps", a 0 "no". Nothing is ever taken out. One thread at a time may add, any
    may look: ``marks[hi & mask]``.

    Attributes:
        marks: A power of two of bytes, 8 to 16 a digest, so that one in ten that is not in the
            set finds a 1.
        mask: What of a first half selects its byte.
    """

    __slots__ = ("marks", "mask")

    def __init__(self, hi: Array, *, room: int = 0) -> None:
        """Mark what is in the set now; some 10 ns a digest.

        Args:
            hi: First halves of the digests, shape (n,).
            room: How many more may be added before it lets through more than it should.
        """
        digests = len(hi) + room
        found = np.zeros(8 << digests.bit_length() if digests else 1, "u1")
        self.mask = len(found) - 1
        found[(hi & np.uint64(self.mask)).astype(np.intp)] = 1
        self.marks = bytearray(found)

    def add(self, hi: int) -> None:
        """Mark one more."""
        self.marks[hi & self.mask] = 1


class View:
    """A base, the deltas that are not in it, and where there is no base a listing. Immutable.

    Of two rows for one key the later one counts, and a delta's where both are equally late.

    Attributes:
        base: The newest one that could be opened, if any.
        overlay: All rows of the deltas, merged; None where there are none.
        listing: Digests of what ``objects/`` holds, where no base says it (completely).
    """

    __slots__ = ("_base_maybe", "_marks", "_mask", "_overlaid", "base", "listing", "overlay")

    def __init__(
        self,
        base: Base | None = None,
        overlay: Segment | None = None,
        listing: Set[bytes] | None = None,
    ) -> None:
        self.base = base
        self.overlay = overlay if overlay is not None and len(overlay) else None
        self.listing = listing
        # What is bound once is not looked up a million times a second.
        self._base_maybe = None if base is None else base.maybe
        rows = Rows.empty() if self.overlay is None else self.overlay.rows()
        # Items of a memoryview cost half of what numpy's do.
        self._marks = rows.deleted.data
        # Most keys are not in the overlay; a look at one byte says so in a tenth of a search.
        overlaid = PresenceFilter(rows.digest_hi)
        self._overlaid, self._mask = overlaid.marks, overlaid.mask

    def counts(self) -> tuple[int, int]:
        """Rows of deltas, and keys in the base."""
        return len(self.overlay or ()), 0 if self.base is None else self.base.entries

    def maybe(self, key: Key) -> bool:
        """Whether the corpus probably holds this key."""
        hi, lo = key.digest_hi, key.digest_lo
        if self._overlaid[hi & self._mask] and self.overlay is not None:
            row = self.overlay.find(hi, lo)
            if row >= 0:
                return not self._marks[row] or self._outlived(hi, lo, row)
        maybe = self._base_maybe
        if maybe is not None and maybe(hi, lo):
            return True
        return self.listing is not None and key.digest in self.listing

    def lookup(
        self, overrides: PresenceFilter, fallback: Callable[[Key], bool]
    ) -> Callable[[Key], bool]:
        """A function that answers as ``fallback`` does, in half of the time for most keys.

        A lookup is a dozen small steps, and each call in Python would cost as much as two.

        Args:
            overrides: Lets through the digests about which ``fallback`` knows more than the base.
            fallback: Answers for all keys.
        """
        base = self.base
        if base is None or not base.exact or self.listing is not None:
            return fallback
        shards, marks, mask = base.lookup_parts(), overrides.marks, overrides.mask

        def lookup(key: Key) -> bool:
            hi = key.digest_hi
            if marks[hi & mask]:
                return fallback(key)
            # Segment.find, inline, and the first two steps of its search as well: most slots hold
            # two to four rows.
            shift, slots, fences, his, los = shards[hi >> 56]
            slot = hi >> shift & slots
            try:
                row = fences[slot]
                found = his[row]
                if found < hi:
                    row += 1
                    found = his[row]
                    if found < hi:
                        row = bisect_left(his, hi, row + 1, fences[slot + 1])
                        found = his[row]
                return found == hi and (los[row] == key.digest_lo or fallback(key))
            except IndexError:  # behind the last row
                return False

        return lookup

    def holds(self, key: Key) -> bool:
        """As maybe, but False where only a filter says that the key is there."""
        if self.base is None or self.base.exact:
            return self.maybe(key)
        hi, lo = key.digest_hi, key.digest_lo
        row = -1 if self.overlay is None else self.overlay.find(hi, lo)
        if row >= 0:
            return not self._marks[row]
        return self.listing is not None and key.digest in self.listing

    def latest(self, digest: bytes) -> tuple[EntryInfo, bool] | None:
        """What is known of a key, and whether it was deleted; None where no row says anything.

        Some microseconds.
        """
        hi, lo = split_digest(digest)
        in_base = self._in_base(hi, lo)
        if self.overlay is not None:
            row = self.overlay.find(hi, lo)
            if row >= 0:
                facts = self.overlay.facts(row)
                if in_base is None or facts.time_s >= in_base.time_s:
                    return facts, self.overlay.deleted(row)
        return None if in_base is None else (in_base, False)

    def knows_of(self, digest: bytes, facts: EntryInfo) -> bool:
        """Whether this knows of a store, or of a later deletion.

        Args:
            facts: What was stored, with the time of that.
        """
        latest = self.latest(digest)
        if latest is None:
            return False
        row, deleted = latest
        return not deleted or row.time_s >= facts.time_s

    def _in_base(self, hi: int, lo: int) -> EntryInfo | None:
        found = None if self.base is None else self.base.find(hi, lo)
        return None if found is UNKNOWN else found

    def _outlived(self, hi: int, lo: int, row: int) -> bool:
        """Whether the base has a row that is later than this tombstone."""
        in_base = self._in_base(hi, lo)
        if in_base is None or self.overlay is None:
            return False
        return in_base.time_s > self.overlay.facts(row).time_s

# SPDX-License-Identifier: Apache-2.0
"""What a reader knows of the corpus at one moment, for lookups from any thread without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from s3ec.identity import Key, split_digest
from s3ec.index.base_index import UNKNOWN, Base
from s3ec.index.listing import ListingIndex
from s3ec.index.rows import Facts, Rows
from s3ec.index.segment import Segment
from s3ec.index.sieve import Sieve


class View:
    """A base, the deltas that are not in it, and where there is no base a listing. Immutable.

    Of two rows for one key the later one counts, and a delta's where both are equally late.

    Attributes:
        base: The newest one that could be opened, if any.
        overlay: All rows of the deltas, merged; None where there are none.
        listing: What ``objects/`` holds, where no base says it (completely).
    """

    __slots__ = ("_base_maybe", "_marks", "_mask", "_overlaid", "base", "listing", "overlay")

    def __init__(
        self,
        base: Base | None = None,
        overlay: Segment | None = None,
        listing: ListingIndex | None = None,
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
        sieve = Sieve(rows.digest_hi)
        self._overlaid, self._mask = sieve.marks, sieve.mask

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
        return self.listing is not None and self.listing.maybe_contains(key)

    def lookup(self, apart: Sieve, otherwise: Callable[[Key], bool]) -> Callable[[Key], bool]:
        """``otherwise``, or what answers as it does and takes half of the time for most keys.

        A lookup is a dozen small steps, and each call in Python would cost as much as two.

        Args:
            apart: Lets through the digests about which ``otherwise`` knows more than the base.
            otherwise: Answers for all keys.
        """
        base = self.base
        if base is None or not base.exact or self.listing is not None:
            return otherwise
        shards, marks, mask = base.lookup_parts(), apart.marks, apart.mask

        def lookup(key: Key) -> bool:
            hi = key.digest_hi
            if marks[hi & mask]:
                return otherwise(key)
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
                return found == hi and (los[row] == key.digest_lo or otherwise(key))
            except IndexError:  # behind the last row
                return False

        return lookup

    def holds(self, key: Key) -> bool:
        """As maybe, without what only a filter says."""
        if self.base is None or self.base.exact:
            return self.maybe(key)
        hi, lo = key.digest_hi, key.digest_lo
        row = -1 if self.overlay is None else self.overlay.find(hi, lo)
        if row >= 0:
            return not self._marks[row]
        return self.listing is not None and self.listing.maybe_contains(key)

    def latest(self, digest: bytes) -> tuple[Facts, bool] | None:
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

    def _in_base(self, hi: int, lo: int) -> Facts | None:
        found = None if self.base is None else self.base.find(hi, lo)
        return None if found is UNKNOWN else found

    def _outlived(self, hi: int, lo: int, row: int) -> bool:
        """Whether the base has a row that is later than this tombstone."""
        in_base = self._in_base(hi, lo)
        if in_base is None or self.overlay is None:
            return False
        return in_base.time_s > self.overlay.facts(row).time_s

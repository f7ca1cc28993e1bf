# SPDX-License-Identifier: Apache-2.0
"""What a reader knows of the corpus at one moment, for lookups from any thread without a lock."""

from __future__ import annotations

from s3ec.identity import Key
from s3ec.index.base_index import UNKNOWN, Base
from s3ec.index.listing import ListingIndex
from s3ec.index.rows import Facts, split_digest
from s3ec.index.segment import Segment


class View:
    """A base, the deltas that are not in it, and where there is no base a listing. Immutable.

    Of two rows for one key the later one counts, and a delta's where both are equally late.

    Attributes:
        base: The newest one that could be opened, if any.
        overlay: All rows of the deltas, merged; None where there are none.
        listing: What ``objects/`` holds, where no base says it (completely).
    """

    __slots__ = ("_marks", "base", "listing", "overlay")

    def __init__(
        self,
        base: Base | None = None,
        overlay: Segment | None = None,
        listing: ListingIndex | None = None,
    ) -> None:
        self.base = base
        self.overlay = overlay if overlay is not None and len(overlay) else None
        self.listing = listing
        # Items of a memoryview cost half of what numpy's do.
        self._marks = None if self.overlay is None else self.overlay.rows().deleted.data

    def counts(self) -> tuple[int, int]:
        """Rows of deltas, and keys in the base."""
        return len(self.overlay or ()), 0 if self.base is None else self.base.entries

    def maybe(self, key: Key) -> bool:
        """Whether the corpus probably holds this key."""
        hi, lo = split_digest(key.digest)
        if self.overlay is not None and self._marks is not None:
            row = self.overlay.find(hi, lo)
            if row >= 0:
                return not self._marks[row] or self._outlived(hi, lo, row)
        if self.base is not None and self.base.maybe(hi, lo):
            return True
        return self.listing is not None and self.listing.maybe_contains(key)

    def holds(self, key: Key) -> bool:
        """As maybe, without what only a filter says."""
        hi, lo = split_digest(key.digest)
        if self.overlay is not None:
            row = self.overlay.find(hi, lo)
            if row >= 0:
                return not self.overlay.deleted(row) or self._outlived(hi, lo, row)
        if self.base is not None and self.base.exact and self.base.maybe(hi, lo):
            return True
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

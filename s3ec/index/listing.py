# SPDX-License-Identifier: Apache-2.0
"""An index made by listing ``objects/``: exact, about 100 bytes of memory per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cachetools import TTLCache

from s3ec.counters import Counters
from s3ec.identity import Key, Layout, digest_of_name, entry_name
from s3ec.index.healing import NEGATIVE_ENTRIES, NEGATIVE_TTL_S
from s3ec.index.object_listing import listed
from s3ec.index.rows import Facts
from s3ec.store.base import Store


class ListingIndex:
    """Digests of all entries of one namespace, renewed as a whole by every refresh.

    A refresh replaces what it saw listed but keeps keys that were added while it ran. Objects
    that people or lifecycle rules delete vanish with the next refresh; until then the first
    404 puts the key into a negative cache whose TTL lets it heal by itself.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        counters: Counters,
        *,
        negative_ttl_s: float = NEGATIVE_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._layout = layout
        self._counters = counters
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        self._added: set[bytes] | None = None  # keys added while a refresh runs
        self._gone: TTLCache[bytes, bool] = TTLCache(NEGATIVE_ENTRIES, negative_ttl_s, timer=clock)
        self.loaded = False

    def __len__(self) -> int:
        return len(self._known)

    def maybe_contains(self, key: Key) -> bool:
        """One set lookup; takes the lock only for keys that the set holds."""
        if key.digest not in self._known:
            return False
        with self._lock:
            return key.digest not in self._gone

    def holds(self, key: Key) -> bool:
        """As maybe_contains: a listing is exact."""
        return self.maybe_contains(key)

    def facts(self, key: Key) -> Facts | None:
        """A listing tells nothing of an entry but that it is there."""
        return None

    def add(self, key: Key, facts: Facts | None = None) -> None:
        """Remember a key that was just stored; ends its negative entry."""
        with self._lock:
            self._known.add(key.digest)
            self._gone.pop(key.digest, None)
            if self._added is not None:
                self._added.add(key.digest)

    def forget(self, key: Key, *, absent: bool = False) -> None:
        """Answer False for this key until the negative TTL has passed."""
        with self._lock:
            self._gone[key.digest] = True
            self._known.discard(key.digest)
            if self._added is not None:
                self._added.discard(key.digest)
        self._counters.add("index.forgotten")

    async def refresh(self) -> None:
        """List everything once; what breaks off goes on where it was, as ``listed`` does.

        Raises:
            UnavailableError: Part of the listing failed; what was known stays, and what was
                seen before the failure is added.
            AccessError: Listing is refused.
        """
        seen: set[bytes] = set()
        junk = 0
        complete = False
        with self._lock:
            self._added = set()
        try:
            prefix = self._layout.objects
            async for info in listed(self._store, prefix):
                found = entry_name(info.name[len(prefix) :])
                if info.nbytes > 0 and found is not None:
                    seen.add(digest_of_name(found[0]))
                else:
                    junk += 1
            complete = True
        finally:
            with self._lock:
                added, self._added = self._added or set(), None
                # Not a new set: copying a large one would hold up the scheduler at the lock.
                seen |= added if complete else self._known
                self._known = seen
        self.loaded = True
        if junk:
            self._counters.add("index.junk", junk)

# SPDX-License-Identifier: Apache-2.0
"""An index for tests of those who ask one: a set of keys, without a bucket behind it."""

from __future__ import annotations

from collections.abc import Callable

from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.missing import BAD_OBJECT_TTL_S, NEGATIVE_TTL_S, NegativeCache
from s3ec.index.rows import EntryInfo


class FakeIndex:
    """Holds what it was told to, and denies for a while what it was told is not to be had."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._counters = counters
        self._known: set[bytes] = set()
        self._missing = NegativeCache(NEGATIVE_TTL_S, clock)
        self._bad = NegativeCache(BAD_OBJECT_TTL_S, clock)

    def maybe_contains(self, key: Key) -> bool:
        denied = self._missing.holds(key.digest) or self.is_bad(key)
        return key.digest in self._known and not denied

    def holds(self, key: Key) -> bool:
        return self.maybe_contains(key)

    def facts(self, key: Key) -> EntryInfo | None:
        return None

    def add(self, key: Key, facts: EntryInfo | None = None) -> None:
        self._known.add(key.digest)
        self._missing.discard_locked(key.digest)
        self._bad.discard_locked(key.digest)

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        self._known.discard(key.digest)
        self._missing.add_locked(key.digest)
        self._counters.add("index.forgotten")

    def mark_bad(self, key: Key) -> None:
        self._bad.add_locked(key.digest)

    def is_bad(self, key: Key) -> bool:
        return self._bad.holds(key.digest)

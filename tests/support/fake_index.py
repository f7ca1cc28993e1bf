# SPDX-License-Identifier: Apache-2.0
"""An index for tests of those who ask one: a set of keys, without a bucket behind it."""

from __future__ import annotations

from collections.abc import Callable

from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.reader import BAD_OBJECT_TTL_S, NEGATIVE_TTL_S


class FakeIndex:
    """Holds what it was told to, and denies for a while what it was told is not to be had."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._counters = counters
        self._clock = clock
        self._known: dict[bytes, int] = {}
        self._denied_until_s: dict[bytes, float] = {}
        self._bad_until_s: dict[bytes, float] = {}

    def maybe_contains(self, key: Key) -> bool:
        denied = self._clock() < self._denied_until_s.get(key.digest, 0.0)
        return key.digest in self._known and not denied and not self.is_bad(key)

    def nbytes(self, key: Key) -> int | None:
        return self._known.get(key.digest) if self.maybe_contains(key) else None

    def add(self, key: Key, nbytes: int = 0) -> None:
        self._known[key.digest] = nbytes
        self._denied_until_s.pop(key.digest, None)
        self._bad_until_s.pop(key.digest, None)

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        self._denied_until_s[key.digest] = self._clock() + NEGATIVE_TTL_S
        self._counters.add("index.missing")

    def mark_present(self, key: Key) -> None:
        self._counters.add("index.present")

    def mark_bad(self, key: Key) -> None:
        self._bad_until_s[key.digest] = self._clock() + BAD_OBJECT_TTL_S

    def is_bad(self, key: Key) -> bool:
        return self._clock() < self._bad_until_s.get(key.digest, 0.0)

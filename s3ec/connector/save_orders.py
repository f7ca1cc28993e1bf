# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half has stored: which embeddings, and each of them once.

With `save` = worth only what is encoded a second time. Most pictures that people send are never
sent again. What was encoded once is remembered by its key alone, and stored when it is encoded once
more.

The scheduler's thread owns all of it. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3ec.connector.item_tracker import LEASE_S
from s3ec.connector.messages import Save
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.reader import ManifestIndex

# Of one generation. Two of them take about 20 MB.
GENERATION_KEYS = 1 << 17


class SeenKeys:
    """Remembers the keys that were seen lately: two sets, the newer one being filled.

    When it is full the older one is dropped. So the last GENERATION_KEYS different keys are always
    known, and none of those before the last two times as many.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def add(self, key: Key) -> bool:
        """Note one key; whether it was seen before. Half of a digest tells keys apart."""
        digest = key.digest_hi
        if digest in self._newer:
            return True
        if len(self._newer) >= GENERATION_KEYS:
            self._older, self._newer = self._newer, set()
        self._newer.add(digest)
        return digest in self._older


class SaveOrders:
    """Remembers what was ordered, so that an embedding is not saved by each of its requests.

    An order is over when the bucket holds the embedding, when it is not to be saved, or after
    LEASE_S: a save that was dropped or failed may be tried again.

    Attributes:
        ordered_s: Identifier to when it was ordered. For reading.
    """

    def __init__(
        self,
        index: ManifestIndex,
        placeholder_of: Callable[[Any], dict[str, Any] | None],
        counters: Counters,
        clock: Callable[[], float],
        seen: SeenKeys | None,
    ) -> None:
        """Nothing was ordered yet.

        Args:
            seen: What was encoded lately; None where everything is stored.
        """
        self._index = index
        self._seen = seen
        self._counters = counters
        self._placeholder_of = placeholder_of
        self._clock = clock
        self.ordered_s: dict[str, float] = {}

    def order(self, key: Key, feature: Any) -> Save | None:
        """What to save of a feature that is about to be encoded; None where that is done."""
        if feature.identifier in self.ordered_s or self._index.maybe_contains(key):
            return None
        if self._seen is not None and not self._seen.add(key):
            self._counters.add("save_declined")
            return None
        return self._order(key, feature, on_device=False)

    def again(self, key: Key, feature: Any) -> Save | None:
        """What to save of a feature that the device holds; None where that is done."""
        # A bad object has its name: a save of what is encoded tries, one of each hit would not fare
        # better.
        if self._index.maybe_contains(key) or self._index.is_bad(key):
            return None
        return self._order(key, feature, on_device=True)

    def _order(self, key: Key, feature: Any, *, on_device: bool) -> Save:
        self.ordered_s[feature.identifier] = self._clock()
        placeholder = self._placeholder_of(feature)
        return Save(feature.modality, placeholder, on_device=on_device, renamed=key.renamed)

    def release(self, identifier: str) -> None:
        """The bucket holds it, or it will not be saved: it may be ordered again."""
        self.ordered_s.pop(identifier, None)

    def sweep(self, now: float) -> None:
        """End what has lasted too long."""
        for identifier, since_s in list(self.ordered_s.items()):
            if now - since_s > LEASE_S:
                del self.ordered_s[identifier]

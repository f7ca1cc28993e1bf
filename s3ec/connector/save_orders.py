# SPDX-License-Identifier: Apache-2.0
"""Decides which embeddings the scheduler half orders to store, and orders each once.

With `save` = worth, an embedding is stored only when it is encoded a second time: most images that
people send are never sent again. After the first encode only its key is remembered.

The scheduler's thread owns all state. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3ec.connector.item_tracker import LEASE_S
from s3ec.connector.messages import Save
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.reader import ManifestIndex

# Keys of one generation. Two generations take about 20 MB.
GENERATION_KEYS = 1 << 17


class SeenKeys:
    """Remembers recent keys in two sets, of which the newer one is being filled.

    When the newer set is full, the older one is dropped. So the last GENERATION_KEYS different keys
    are always known, and no key before the last 2 x GENERATION_KEYS.
    """

    def __init__(self) -> None:
        """Start without keys."""
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def add(self, key: Key) -> bool:
        """Note one key; return True if it was seen before. Half of the digest identifies it."""
        digest = key.digest_hi
        if digest in self._newer:
            return True
        if len(self._newer) >= GENERATION_KEYS:
            self._older, self._newer = self._newer, set()
        self._newer.add(digest)
        return digest in self._older


class SaveOrders:
    """Remembers save orders, so that not every request for an embedding saves it.

    An order ends when the bucket holds the embedding, when it will not be saved, or after LEASE_S:
    a save that was dropped or failed may be retried.

    Attributes:
        ordered_s: Identifier to the time of its order. Read-only.
    """

    def __init__(
        self,
        index: ManifestIndex,
        placeholder_of: Callable[[Any], dict[str, Any] | None],
        counters: Counters,
        clock: Callable[[], float],
        seen: SeenKeys | None,
    ) -> None:
        """Start without orders.

        Args:
            seen: Keys that were encoded recently; None if everything is stored.
        """
        self._index = index
        self._seen = seen
        self._counters = counters
        self._placeholder_of = placeholder_of
        self._clock = clock
        self.ordered_s: dict[str, float] = {}

    def order(self, key: Key, feature: Any) -> Save | None:
        """Order the save of a feature that is about to be encoded; None if none is needed."""
        if feature.identifier in self.ordered_s or self._index.maybe_contains(key):
            return None
        if self._seen is not None and not self._seen.add(key):
            self._counters.add("save_declined")
            return None
        return self._order(key, feature, on_device=False)

    def again(self, key: Key, feature: Any) -> Save | None:
        """Order the save of a feature that the device holds; None if none is needed."""
        # If a bad object has its name, only a fresh encode tries a save; one for each hit would not
        # succeed either.
        if self._index.maybe_contains(key) or self._index.is_bad(key):
            return None
        return self._order(key, feature, on_device=True)

    def _order(self, key: Key, feature: Any, *, on_device: bool) -> Save:
        self.ordered_s[feature.identifier] = self._clock()
        placeholder = self._placeholder_of(feature)
        return Save(feature.modality, placeholder, on_device=on_device, renamed=key.renamed)

    def release(self, identifier: str) -> None:
        """End an order: the bucket holds it, or it will not be saved. It may be ordered again."""
        self.ordered_s.pop(identifier, None)

    def sweep(self, now: float) -> None:
        """End orders that are older than LEASE_S."""
        for identifier, since_s in list(self.ordered_s.items()):
            if now - since_s > LEASE_S:
                del self.ordered_s[identifier]

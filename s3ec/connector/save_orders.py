# SPDX-License-Identifier: Apache-2.0
"""Which embeddings the worker half is told to save; in memory, for the scheduler's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3ec.connector.items import LEASE_S, RETRY_AFTER_S
from s3ec.connector.plan import Save
from s3ec.identity import Key
from s3ec.index.base import Index


class SaveOrders:
    """Remembers what was ordered, so that an embedding is not saved by each of its requests."""

    def __init__(
        self,
        index: Index,
        placeholder_of: Callable[[Any], dict[str, Any] | None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._placeholder_of = placeholder_of
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._again_s: dict[str, float] = {}  # those that the device held already

    def __len__(self) -> int:
        return len(self._since_s) + len(self._again_s)

    def order(self, key: Key, feature: Any) -> Save | None:
        """What to save of a feature that is about to be encoded; None where that is done."""
        identifier = feature.identifier
        if identifier in self._since_s or self._index.holds(key):
            return None
        self._since_s[identifier] = self._clock()
        return Save(feature.modality, self._placeholder_of(feature))

    def is_recent(self, identifier: str) -> bool:
        """Whether what the device holds was ordered to be stored, too lately to do so again."""
        again_s = self._again_s.get(identifier)
        return again_s is not None and self._clock() - again_s < RETRY_AFTER_S

    def again(self, feature: Any) -> Save:
        """What to save of a feature that the device holds, whatever was ordered before.

        The worker knows whether it is under way.
        """
        self._again_s[feature.identifier] = self._clock()
        return Save(feature.modality, self._placeholder_of(feature), on_device=True)

    def release(self, identifier: str) -> None:
        """The bucket holds it, or it will not be saved: it may be ordered again."""
        self._since_s.pop(identifier, None)
        self._again_s.pop(identifier, None)

    def sweep(self, now: float) -> None:
        """A save that was dropped or failed may be tried again at the next encode."""
        for ordered_s, lease_s in ((self._since_s, LEASE_S), (self._again_s, RETRY_AFTER_S)):
            for identifier, since_s in list(ordered_s.items()):
                if now - since_s > lease_s:
                    del ordered_s[identifier]

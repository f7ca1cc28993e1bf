# SPDX-License-Identifier: Apache-2.0
"""The question a scheduler asks of an index, and how an index hears of news."""

from __future__ import annotations

from typing import Protocol

from s3ec.identity import Key


class Index(Protocol):
    """Which keys are worth fetching. Lookups are memory only and callable from any thread.

    A True is a hint, never a promise: only bytes that are pinned on this node are granted.
    """

    def maybe_contains(self, key: Key) -> bool:
        """Whether the corpus probably holds this key; no I/O, about a microsecond."""
        ...

    def add(self, key: Key) -> None:
        """The key was just confirmed stored."""
        ...

    def forget(self, key: Key) -> None:
        """The bucket said 404, or its copy is bad: answer False for a while."""
        ...

    async def refresh(self) -> None:
        """Look for news in the bucket; may raise UnavailableError or AccessError."""
        ...

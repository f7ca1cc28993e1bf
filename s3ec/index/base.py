# SPDX-License-Identifier: Apache-2.0
"""The protocol of an index: what a scheduler asks it, and what it learns from this process."""

from __future__ import annotations

from typing import Protocol

from s3ec.identity import Key
from s3ec.index.rows import EntryInfo


class Index(Protocol):
    """Which keys are worth fetching. Lookups are memory only and callable from any thread.

    A True is a hint, never a promise: only bytes that are open on this node are granted.
    """

    def maybe_contains(self, key: Key) -> bool:
        """Whether the corpus probably holds this key; no I/O, about a microsecond."""
        ...

    def holds(self, key: Key) -> bool:
        """Whether a writer announced this key; never True by a filter's false positive."""
        ...

    def facts(self, key: Key) -> EntryInfo | None:
        """What is known of an entry; None where nothing is. No I/O, some microseconds."""
        ...

    def add(self, key: Key, facts: EntryInfo | None = None) -> None:
        """The key was just confirmed stored.

        Args:
            facts: What was stored, where the caller knows it; the time is not looked at.
        """
        ...

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: answer False for a while.

        Args:
            absent: The bucket said 404. Otherwise it refused.
        """
        ...

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: answer False for an hour."""
        ...

    def is_bad(self, key: Key) -> bool:
        """True if this process knows that the key's object is unusable; no I/O."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""Which entries this node's disk is believed to hold, answered from memory."""

from __future__ import annotations

from collections.abc import Iterable

from s3ec.identity import Key, digest_of_name


class LocalKeys:
    """A set of digests; a hint, callable from any thread.

    Other processes publish and evict in the same folder, so both answers can be stale: a
    wrong True costs one look at the disk, a wrong False one download.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._next: set[bytes] | None = None  # while a scan is read

    def __call__(self, key: Key) -> bool:
        return key.digest in self._digests

    def add(self, key: Key) -> None:
        """The entry was just published here."""
        self._digests.add(key.digest)
        if (scanned := self._next) is not None:
            scanned.add(key.digest)

    def discard(self, key: Key) -> None:
        """A look at the disk did not find it."""
        self._digests.discard(key.digest)
        if (scanned := self._next) is not None:
            scanned.discard(key.digest)

    def replace(self, names: Iterable[str]) -> None:
        """Start over from a scan of the folder, which may take its time; one scan at a time."""
        self._next = scanned = set()
        try:
            for name in names:
                scanned.add(digest_of_name(name))
            self._digests = scanned
        finally:
            self._next = None

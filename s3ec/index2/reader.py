# SPDX-License-Identifier: Apache-2.0
"""The index of one process: lookups from mapped files without a lock, and how it follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from s3ec.counters import Counters
from s3ec.identity import Key, Layout
from s3ec.index2.child import Jobs
from s3ec.index2.local import NodeFolder
from s3ec.index2.names import SnapshotName
from s3ec.store.base import Store
from s3ec.tier.entry_writer import Disk

NEGATIVE_TTL_S = 60.0
"""How long a key is denied after the bucket did not have it."""
BAD_OBJECT_TTL_S = 3600.0
"""How long a key is denied after its object came bad."""


class Index(Protocol):
    """Which keys are worth fetching. Lookups are memory only and callable from any thread.

    A True is a hint, never a promise: only bytes that are open on this node are granted.
    """

    def maybe_contains(self, key: Key) -> bool:
        """Whether the corpus probably holds this key; no I/O, about a microsecond."""
        ...

    def nbytes(self, key: Key) -> int | None:
        """Size of a key's object, 0 where it is not known; None where the key is not held."""
        ...

    def add(self, key: Key, nbytes: int = 0) -> None:
        """The key was just confirmed stored."""
        ...

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: deny it for a minute.

        Args:
            absent: The bucket said 404. Otherwise it refused.
        """
        ...

    def mark_present(self, key: Key) -> None:
        """A GET has found the key's object."""
        ...

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: deny it for an hour."""
        ...

    def is_bad(self, key: Key) -> bool:
        """True if this process knows that the key's object is unusable; no I/O."""
        ...


class IndexCounts(NamedTuple):
    """How large an index is.

    Attributes:
        deltas: Whose rows are in the overlay.
        overlay_rows: Rows of these.
        snapshot_rows: Rows of the snapshot.
        snapshot: Its name; the default for none.
    """

    deltas: int
    overlay_rows: int
    snapshot_rows: int
    snapshot: SnapshotName


class ManifestIndex:
    """What the corpus holds, as far as this node was told. Lookups from any thread.

    A lookup asks in this order: keys that are denied, keys that this process stored itself, rows
    of the deltas, and the snapshot behind its filter.

    ``mark_missing`` makes a key denied; that ends after a minute, when the key is stored here, or
    when a delta names it. ``mark_bad`` makes a key denied, too; that ends after an hour, or when
    the key is stored here. ``add`` makes a key stored here; that ends when a delta or a snapshot
    holds it, when it is denied, and where more than a million are stored here.

    Counters: ``index.missing`` (keys that were not to be had), ``index.vanished`` (of these,
    keys that the index held and the bucket did not), ``index.downloads``, ``index.refused`` (files
    of the index that could not be used), ``index.refresh_failed``.

    Attributes:
        maybe_contains: Whether the corpus probably holds a key; about a microsecond, no lock.
            Replaced by each refresh with news: not to be kept.
        poll_s: Call ``refresh`` so often.
    """

    maybe_contains: Callable[[Key], bool]

    def __init__(
        self,
        store: Store,
        layout: Layout,
        folder: NodeFolder,
        *,
        jobs: Jobs,
        disk: Disk,
        counters: Counters,
        refresh_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read before the first refresh.

        Args:
            store: The bucket.
            layout: Of the namespace.
            folder: This node's files.
            jobs: Runs downloads, see ``child``.
            disk: Runs what blocks.
            counters: Where to count.
            refresh_s: How often a node asks the bucket.
            clock: Monotonic seconds.
            wall_clock: Seconds since the epoch, as the file system has them.
        """
        raise NotImplementedError

    async def refresh(self, *, now: bool = False) -> None:
        """Take over what the node knows; ask the bucket where that is older than ``refresh_s``.

        One LIST, and a GET for each new delta. A new snapshot is downloaded in the background.

        Args:
            now: Ask the bucket, whatever the node knows.

        Raises:
            UnavailableError, AccessError: The bucket did not answer; what is known stays.
            TierError: This node's disk refused; what is known stays.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End what runs in the background; lookups go on with what is known."""
        raise NotImplementedError

    @property
    def loaded(self) -> bool:
        """True after the first refresh that knew the newest snapshot, or that there is none."""
        raise NotImplementedError

    @property
    def writers(self) -> int:
        """Writers of the fleet that announced something in the last 15 minutes; at least 1."""
        raise NotImplementedError

    @property
    def newest(self) -> str:
        """The newest name of a delta or snapshot that was accepted; NEVER for none."""
        raise NotImplementedError

    def answered_s(self) -> float | None:
        """Seconds since the bucket last answered a refresh of this node; None for never."""
        raise NotImplementedError

    def counts(self) -> IndexCounts:
        """How large it is. No I/O."""
        raise NotImplementedError

    def levels(self) -> dict[str, float]:
        """What the gauges say of it. No I/O."""
        raise NotImplementedError

    def nbytes(self, key: Key) -> int | None:
        """Size of a key's object, 0 where it is not known; None where the key is not held."""
        raise NotImplementedError

    def is_announced(self, key: Key) -> bool:
        """Whether all readers are told that the entry is there.

        What this process stored itself and no delta has told does not count.
        """
        raise NotImplementedError

    def is_bad(self, key: Key) -> bool:
        """True if this process found the key's object unusable within the last hour."""
        raise NotImplementedError

    def add(self, key: Key, nbytes: int = 0) -> None:
        """The key was just confirmed stored: found from now on."""
        raise NotImplementedError

    def mark_missing(self, key: Key, *, absent: bool = False) -> None:
        """The key is not to be had: deny it for a minute; no I/O.

        Args:
            absent: The bucket does not have it; the node's other engines hear of it with the next
                refresh. Otherwise it refused.
        """
        raise NotImplementedError

    def mark_present(self, key: Key) -> None:
        """A GET has found the key's object; no I/O."""
        raise NotImplementedError

    def mark_bad(self, key: Key) -> None:
        """The key's object is unusable: deny it for an hour; no I/O."""
        raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""Residents: the entries that a request may be granted at once, since each is held open.

An entry that is not resident is read from the disk, verified, and granted a scheduling pass later.
After the start of a process, residents come from a walk over the folder, the most recently used
first. Then each entry that this process opens or downloads becomes one.
"""

from __future__ import annotations

import heapq
import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from s3ec.codec import Header
from s3ec.identity import Key, digest_of_name
from s3ec.runtime import Background
from s3ec.tier.entries import Entries
from s3ec.tier.open_entry import OpenEntry

_log = logging.getLogger(__name__)

MOST_RESIDENTS = 65_536
"""One takes a descriptor and about 2 KiB of memory."""
FEW_RESIDENTS = 1024
"""With fewer, the log says so."""
VERIFIED_FOR_S = 3600.0
"""How long a verified checksum is trusted. Each load verifies again. If the bytes rot meanwhile,
the load that detects it gets the bucket's copy."""
# The pause between two passes, at least; a pass takes at most one part in this many of a thread.
_TURN_S = 1.0
_SHARE = 50
# A pass opens entries of the walk for this long before it checks for evicted ones.
_FILL_S = 1.0
# Hashing entries that were not requested yet takes at most a quarter of a thread.
_HASH_SHARE = 4
_LONGEST_PAUSE_S = 0.25
_STOP_TIMEOUT_S = 1.0


def allowed_residents() -> int:
    """Return how many descriptors residents may take: half of what this process may open.

    Raises the soft limit to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return MOST_RESIDENTS
    return min(MOST_RESIDENTS, soft // 2)


class Residents:
    """This process's residents in one namespace. ``get`` and ``release`` touch memory only.

    States of an entry:

    ========  ========  ====================================================================
    state     goes to   when
    ========  ========  ====================================================================
    (none)    resident  it was opened or downloaded, or the walk after the start found it
    resident  (none)    its file has no name any more, or the table is full and others were
                        used later, or it was found bad
    ========  ========  ====================================================================

    Attributes:
        modalities: Modalities of all entries that have been resident. Read-only.

    A thread of its own closes files, since that may wait for the disk: it takes over each reference
    that a hook releases.
    """

    def __init__(
        self,
        entries: Entries,
        *,
        may_grant: Callable[[Header], bool],
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open nothing and start no thread yet.

        Args:
            entries: Entries of the namespace.
            may_grant: True if an entry may be granted at once, at this moment. Memory only.
            most: See ``allowed_residents``.
            clock: Monotonic seconds.
        """
        self._entries = entries
        self._may_grant = may_grant
        self._most = most
        self._clock = clock
        self._open: dict[bytes, OpenEntry] = {}
        self.modalities: set[str] = set()
        self._released: deque[OpenEntry] = deque()
        self._filling: Iterator[None] | None = None
        self._is_closed = False
        self._thread = Background("s3ec-residents", self._turn)

    # -- any thread, memory only ---------------------------------------------------------------

    def get(self, digest: bytes, now: float) -> OpenEntry | None:
        """Return the entry if it was verified recently and may be granted.

        Args:
            digest: ``Key.digest``.
            now: Monotonic seconds.
        """
        entry = self._open.get(digest)
        if entry is None or now - entry.verified_s > VERIFIED_FOR_S:
            return None
        if not self._may_grant(entry.header):
            return None
        entry.used_s = now
        return entry

    def discard(self, digest: bytes) -> None:
        """Drop an entry whose file was found bad."""
        self.release(filter(None, [self._open.pop(digest, None)]))

    def release(self, entries: Iterable[OpenEntry]) -> None:
        """Release these in this object's thread, which closes files without other references."""
        if not self._is_closed:  # else no thread would take them
            self._released.extend(entries)

    # -- any thread --------------------------------------------------------------------------

    def add(self, digest: bytes, entry: OpenEntry) -> None:
        """Add an entry that was just opened and verified."""
        if self._is_closed or not self._most:
            return
        entry.used_s = entry.verified_s
        self._put(digest, entry)
        self._thread.wake()

    def start(self) -> None:
        """Open the entries on the disk, the most recently used first, in the thread; once."""
        if self._filling is None:
            if self._most < FEW_RESIDENTS:
                _log.warning(
                    "this process may open few files, so only %d entries of this node can be "
                    "granted at once; raise its hard limit (`ulimit -Hn`, LimitNOFILE)",
                    self._most,
                )
            self._filling = self._fill()
            self._thread.wake()

    def close_evicted(self) -> None:
        """Close evicted entries, so that the disk frees those open only here; blocking."""
        self._sweep(lambda: None)
        self._released.clear()

    def close(self) -> None:
        """Release all entries; for good."""
        self._is_closed = True
        self._thread.stop(_STOP_TIMEOUT_S)
        self._filling = iter(())  # a stopped iterator has an entry in its frame
        self._open.clear()
        self._released.clear()

    def __len__(self) -> int:
        return len(self._open)

    # -- the thread --------------------------------------------------------------------------

    def _turn(self, pause: Callable[[], None]) -> float:
        began_s = self._clock()
        self._thread.wake()  # for the next pass
        self._released.clear()
        is_filling = False
        for _ in self._filling or ():
            pause()
            is_filling = self._clock() - began_s >= _FILL_S
            if is_filling:
                break
        swept_s = self._clock()
        self._sweep(pause)
        rest_s = max(_TURN_S, (self._clock() - swept_s) * _SHARE)
        return 0.0 if is_filling else rest_s

    def _fill(self) -> Iterator[None]:
        """Open and verify the folder's entries, slowly enough for other threads to work."""
        used = ((mtime_ns, name) for name, mtime_ns in self._entries.uses())
        for _, name in heapq.nlargest(self._most, used):
            digest = digest_of_name(name)
            if digest in self._open:
                continue
            began_s = self._clock()
            entry = self._entries.open(Key("", name, digest))
            if entry is not None:
                self._put(digest, entry)
                took_s = self._clock() - began_s
                time.sleep(min(took_s * (_HASH_SHARE - 1), _LONGEST_PAUSE_S))
            yield

    def _sweep(self, pause: Callable[[], None]) -> None:
        """Drop evicted entries, and those that exceed the table."""
        # A dict's copy is atomic; a list of its items is not, see gc.
        for number, (digest, entry) in enumerate(self._open.copy().items()):
            if entry.is_evicted:
                self._drop(digest, entry)
            if number % 256 == 0:
                pause()
        excess = len(self._open) - self._most
        if excess > 0:
            # Drop some more, or the next new entry would need a check of all again.
            many = excess + self._most // 16
            items = self._open.copy().items()
            for digest, entry in heapq.nsmallest(many, items, key=lambda item: item[1].used_s):
                self._drop(digest, entry)

    def _put(self, digest: bytes, entry: OpenEntry) -> None:
        old = self._open.get(digest)
        self._open[digest] = entry
        if old is not None:
            self.release([old])
        self.modalities.add(entry.header.modality)

    def _drop(self, digest: bytes, entry: OpenEntry) -> None:
        if self._open.get(digest) is entry:  # else another file took its place
            del self._open[digest]

# SPDX-License-Identifier: Apache-2.0
"""The node tier: entries as files, shared by every process of the node; wires its parts.

Counters: ``tier.evicted``, ``tier.evicted_bytes``, ``tier.bad_files``, and ``tier.errors`` (errors
of the disk).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from s3ec import runtime
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import is_namespace_name
from s3ec.tier.claims import Claims
from s3ec.tier.entries import Entries
from s3ec.tier.entry_writer import EntryWriter
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import DiskErrors, Folders, is_full, make_folder
from s3ec.tier.mounts import IN_MEMORY, require_local
from s3ec.tier.news import NewsReader, NewsWriter
from s3ec.tier.residents import Residents, allowed_residents
from s3ec.tier.spool import Spool


class Tier:
    """One namespace's view of the node's folder. All its parts are blocking and thread-safe.

    Open from the start, and closed for good by ``close``. After that there are no entries, and
    writes raise TierError.

    Attributes:
        folders: The paths.
        claims: Which process of the node fetches which entry.
        entries: Opens entries, claims absent ones, deletes bad ones.
        evictor: Keeps the folder below its budget, which is for all namespaces together.
        writer: Writes new entries.
        is_in_memory: True if reads need no disk.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        counters: Counters,
        clock: Callable[[], float] = time.time,
        check_values: bool = False,
        evicts: bool = True,
    ) -> None:
        """Create and check the folders, and sweep the temp files of dead processes.

        The cost does not depend on the number of entries: the total is read from a file that all
        processes update. If it is missing or bad, the first publish starts a count in the
        background, and at most 1/64 of the budget is published before.

        Args:
            root: The folder; may itself be a symbolic link, but nothing below it may.
            namespace: ``Namespace.name``.
            budget_bytes: High water mark. Eviction takes the least recently used entry of any
                namespace.
            min_free_bytes: Free space of the disk that publishing never goes below.
            clock: Seconds since the epoch; may jump, either way.
            check_values: True if ``Entries.open`` must read and hash the values as well.
            evicts: False if a publish must not evict existing entries.

        Raises:
            ValueError: Not a namespace's name.
            TierError: The folder is shared with other machines, or not ours alone, or cannot be
                written; names the fix.
        """
        if not is_namespace_name(namespace):
            raise ValueError(f"not a namespace's name: {namespace!r:.100}")
        self._is_closed = False
        self._namespace = namespace
        self._counters = counters
        self._clock = clock
        self.folders = folders = Folders(Path(os.path.realpath(root)))
        self._disk_errors = errors = DiskErrors(folders.root, counters)
        self.claims = Claims(folders, namespace, errors)
        self.entries = Entries(
            *(folders, namespace, self.claims, errors, counters),
            check_values=check_values,
        )
        self.evictor = Evictor(
            *(folders, errors, counters),
            clock=clock,
            budget_bytes=budget_bytes,
            min_free_bytes=min_free_bytes,
            evicts=evicts,
        )
        self.writer = EntryWriter(
            *(folders, self.entries, self.evictor),
            NewsWriter(folders, namespace, errors),
            clock=clock,
        )
        self._opened: list[Spool | NewsReader | Residents] = []
        try:
            self._open()
        except OSError as exc:
            raise TierError(
                f"cannot use {root}: {exc}; set `cache_dir` to a folder on a local "
                "disk that this user may write"
            ) from exc

    def close(self) -> None:
        """Close all parts; entries and spool stay on the disk. Idempotent. Never raises."""
        self._is_closed = True
        self.entries.close()
        self.evictor.close()
        self.claims.close()
        for part in self._opened:
            part.close()

    def open_spool(self, destination: str) -> Spool:
        """Open the spool, which keeps entries until the bucket has them; ends with this tier.

        Args:
            destination: 16 hex digits that stand for the bucket and the folder in it.

        Raises:
            TierError: The tier is closed.
        """
        self._require_open()
        spool = Spool(
            *(self.folders, self.evictor, self._disk_errors, self._counters),
            namespace=self._namespace,
            destination=destination,
            clock=self._clock,
        )
        self._opened.append(spool)
        return spool

    def follow_news(self, notify: Callable[[list[bytes]], None]) -> NewsReader:
        """Return a reader of new entries of any process; the caller starts it, the tier ends it.

        Args:
            notify: Takes their digests, in the reader's thread; must not wait.

        Raises:
            TierError: The tier is closed.
        """
        self._require_open()
        reader = NewsReader(self.folders, self._namespace, self._disk_errors, notify)
        self._opened.append(reader)
        return reader

    def open_residents(self, may_grant: Callable[[Header], bool]) -> Residents:
        """Open the residents, which this process may grant at once; ends with this tier.

        Args:
            may_grant: True if an entry may be granted at once, at this moment. Memory only.

        Raises:
            TierError: The tier is closed.
        """
        self._require_open()
        residents = Residents(self.entries, may_grant=may_grant, most=allowed_residents())
        self._opened.append(residents)
        self.evictor.close_evicted = residents.close_evicted
        return residents

    def need_room(self, nbytes: int) -> None:
        """Make room for a file that is no entry, and count it; blocking.

        Raises:
            TierError: There is no room, or the disk refused.
        """
        try:
            self.evictor.need_room(nbytes)
        except OSError as exc:
            raise TierError(f"no room for {nbytes} bytes: {exc}") from exc
        self.evictor.account(nbytes)

    def _require_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is not open")

    def _open(self) -> None:
        self.is_in_memory = require_local(self.folders.root) in IN_MEMORY
        runtime.keep_files(f"{self.folders.version}/")
        fresh = not os.path.lexists(self.folders.version)
        self.folders.make()
        self.evictor.open(fresh=fresh)
        for last in (False, False, True):  # a few entries free a few inodes only
            try:
                make_folder(self.entries.objects)
                return
            except OSError as exc:
                # A disk that filled up while no process evicted must not prevent the next start.
                if last or not is_full(exc) or not self.evictor.make_room(0, full=True):
                    raise

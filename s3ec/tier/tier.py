# SPDX-License-Identifier: Apache-2.0
"""The node tier: entries as files, shared by every process of the node; its parts, wired.

Counters: ``tier.evicted``, ``tier.evicted_bytes``, ``tier.bad_files``, and ``tier.errors`` (what
the disk refused).
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
    what would be written raises TierError.

    Attributes:
        folders: Where things lie.
        claims: Who fetches what, among all processes of the node.
        entries: What is here: open, claim what is absent, delete what is bad.
        evictor: Keeps the folder below its budget, which is for all namespaces together.
        writer: Puts new entries here.
        is_in_memory: No disk has to answer a read.
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
        """Make and check the folders, and sweep what dead processes left.

        Costs the same however many entries there are: the total is read from a file that all
        processes keep. Where it is missing or bad, the first publish has it counted in the
        background, and not more than 1/64 of the budget is published before.

        Args:
            root: The folder; may itself be a symbolic link, nothing below it may.
            namespace: ``Namespace.name``.
            budget_bytes: High water mark. Eviction takes the least recently used entry of any
                namespace.
            min_free_bytes: Free space of the disk that publishing never goes below.
            clock: Seconds since the epoch; may jump, either way.
            check_values: Have ``Entries.open`` read and hash the values as well.
            evicts: False where nothing that is here may go for what is published.

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
        """Entries and spool stay on the disk. Never raises; more than once is fine."""
        self._is_closed = True
        self.entries.close()
        self.evictor.close()
        self.claims.close()
        for part in self._opened:
            part.close()

    def open_spool(self, destination: str) -> Spool:
        """A place to keep entries until the bucket has them; ends with this tier.

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
        """What hears of entries that any process puts here; to be started, ends with this tier.

        Args:
            notify: Takes their digests, in a thread of the reader's; must not wait.

        Raises:
            TierError: The tier is closed.
        """
        self._require_open()
        reader = NewsReader(self.folders, self._namespace, self._disk_errors, notify)
        self._opened.append(reader)
        return reader

    def open_residents(self, may_grant: Callable[[Header], bool]) -> Residents:
        """What this process may grant at once; ends with this tier.

        Args:
            may_grant: Whether an entry may be, as things stand. Memory only.

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
            TierError: There will be no room, or the disk refused.
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
                # A disk that filled up while nobody evicted must not keep the next one out.
                if last or not is_full(exc) or not self.evictor.make_room(0, full=True):
                    raise

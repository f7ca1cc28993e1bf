# SPDX-License-Identifier: Apache-2.0
"""Compaction: base and deltas become the next base, as a stream of shards.

Writers do it themselves. Of all that see a large backlog, one does it as a rule.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConfigError,
    CorruptEntryError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Layout
from s3ec.index.base_writer import (
    BaseWriter,
    BuildOptions,
    BuildResult,
    clean,
    in_temporary_folder,
    write_base,
)
from s3ec.index.manifest import (
    MAX_MERGED,
    BaseManifest,
    ManifestListing,
    newest_head,
    take_snapshot,
)
from s3ec.index.merged_rows import Deltas, MergedRows
from s3ec.index.rebuild import rebuild
from s3ec.index.rows import ROW_BYTES
from s3ec.runtime import Backoff, contained, jitter
from s3ec.store.base import Store
from s3ec.store.open import require_conditional_put
from s3ec.tier import IndexFiles

log = logging.getLogger(__name__)

MAX_DELTAS = 128
"""Unmerged deltas that are never too many; each costs a reader that starts a request."""
# A large base may have more of them, one for so many keys: each compaction writes it anew, and
# every reader downloads it.
_KEYS_PER_DELTA = 10_000
MIN_ROWS = 65536
"""Rows in unmerged deltas that are never too many: 3 MB of every reader's memory."""
# Or this share of the base: so a base is written again for each eighth that it grows.
_ROWS_SHARE = 1 / 8

LOOK_EVERY_S = 10.0
"""Between two looks at what this process knows of the backlog."""
SPREAD_S = 30.0
"""Waited for at random: writers of other nodes see the same backlog at the same time."""
FIRST_PAUSE_S = 60.0
"""After a compaction that failed or was in vain; twice as long after each further one."""
MAX_PAUSE_S = 1800.0
"""The longest of these pauses."""
LEFT_S = 600.0
"""What could not be merged counts as backlog again after this time: it may be readable by then."""
_TASK = "compact"
_FOLDERS = ("all", "stored")


async def compact(
    store: Store, layout: Layout, options: BuildOptions | None = None
) -> BuildResult | None:
    """Merge all deltas into a new base, then delete what is older than the grace period.

    The first base is made by ``rebuild``, since entries may be older than the index. Safe to
    kill at any time and to run in many places at once: readers see the old base or the new one.

    Memory: about four shards of 2**20 rows (200 MiB), however many entries there are.

    Args:
        store: The bucket; one that honours conditional writes.
        layout: The namespace.
        options: None for the defaults.

    Returns:
        None where another one was faster; what this one wrote is deleted then.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
        CorruptEntryError: The base is unusable; the message names the file. A delta that is
            unusable, or cannot be read, is left out and named in the result.
        TierError: The folder for temporary files is full.
    """
    options = options or BuildOptions()
    snapshot = await take_snapshot(store, layout)
    head = await newest_head(store, layout, snapshot)
    if head is None:
        return await rebuild(store, layout, options)
    result = BuildResult(head, 0, 0)
    if snapshot.unmerged(head):
        try:
            merged = await _merge(store, layout, options, snapshot, head)
        except CorruptEntryError:
            if (await take_snapshot(store, layout)).version != head.version:
                return None  # the old base was deleted while it was read
            raise
        if merged is None:
            return None
        result = merged
    removed = await clean(store, layout, grace_s=options.grace_s)
    return replace(result, removed=removed)


async def _merge(
    store: Store,
    layout: Layout,
    options: BuildOptions,
    snapshot: ManifestListing,
    head: BaseManifest,
) -> BuildResult | None:
    """Make the next base; ``head`` itself if no delta could be merged, None if another was first.

    A base holds no deletions. So what deletes waits as long as a delta cannot be read: that one
    may hold a row that was deleted, and would bring it back when it is merged.
    """
    kept = head.merged & snapshot.deltas.keys()
    room = max(0, MAX_MERGED - len(kept))
    wanted = snapshot.unmerged(head)[:room]
    async with in_temporary_folder(options.folder, *_FOLDERS) as folder:
        rows, deltas = MergedRows(store, layout, head, folder / _FOLDERS[0]), Deltas()
        await rows.add_deltas(wanted, deltas)
        problems = deltas.problems
        waiting = frozenset(deltas.deleting if deltas.unread else ())
        if waiting:
            # Of what was read, and of nothing else: one that can be read now may delete what one
            # that could be read before has stored.
            stored = sorted(deltas.read - waiting)
            rows, deltas = MergedRows(store, layout, head, folder / _FOLDERS[1]), Deltas()
            await rows.add_deltas(stored, deltas)
            problems |= deltas.problems
        made: BaseManifest | None = head
        if deltas.read:
            writer = BaseWriter(store, layout, head.version + 1, options)
            await write_base(writer, rows.between, rows.max_entries)
            made = await writer.commit(kept | deltas.read)
        if made is None:
            return None
        return BuildResult(made, len(deltas.read), 0, problems, waiting)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a compaction would merge.

    Attributes:
        deltas: That are in no base.
        rows: In them.
        entries: In the base.
    """

    deltas: int
    rows: int
    entries: int

    @property
    def is_large(self) -> bool:
        """Whether a compaction pays."""
        return self.deltas > max(MAX_DELTAS, self.entries // _KEYS_PER_DELTA) or self.rows > max(
            MIN_ROWS, self.entries * _ROWS_SHARE
        )


class ElectedCompactor:
    """Looks at what its process knows of the backlog, and compacts where nobody else does.

    States: resting, while the backlog that this process knows of is small; spreading, which is a
    wait of random length; compacting, under this node's claim and where the bucket's backlog is
    large too; pausing. A base that was made leads to resting. A compaction that failed, was in vain
    or was not begun leads to pausing, and that to resting. It ends for good where the server is
    none to compact on.

    Costs no request while the backlog is small. Two nodes may compact at once: one of them has
    worked in vain then. In the loop's thread; sorting and hashing happen in other threads.

    Counters: ``compact.bases`` and ``compact.failed``.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        *,
        backlog: Callable[[], Backlog],
        files: IndexFiles,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before ``run_forever``.

        Args:
            backlog: As far as this process knows; no I/O.
            files: This node's, for their claims: one of its processes compacts at a time.
            clock: Monotonic seconds.
        """
        self._store = store
        self._layout = layout
        self._backlog = backlog
        self._files = files
        self._counters = counters
        self._clock = clock
        self._left: Set[str] = frozenset()  # deltas that the last compaction could not merge...
        self._left_until_s = 0.0  # ...and how long they do not count

    async def run_forever(self) -> None:
        """Compact whenever it pays, until cancelled, or for good where the server forbids it."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            await asyncio.sleep(LOOK_EVERY_S * jitter.uniform(0.9, 1.1))
            if not self._backlog().is_large:
                continue
            await asyncio.sleep(jitter.uniform(0, SPREAD_S))
            with contained(self._counters, "compacting the index of %s", self._layout.namespace):
                try:
                    if await self.compact_if_needed():
                        backoff.reset()
                        continue
                except ConfigError as exc:
                    self._counters.add("compact.failed")
                    log.warning("the index of %s is not compacted: %s", self._layout.namespace, exc)
                    return
                except (UnavailableError, AccessError, CorruptEntryError, TierError) as exc:
                    self._note(exc)
            await asyncio.sleep(backoff.next_s())

    async def compact_if_needed(self) -> bool:
        """Look at the bucket, and compact where the backlog is still large and nobody is at it.

        Returns:
            Whether a base was made.

        Raises:
            UnavailableError, AccessError, CorruptEntryError, TierError: As compact.
            ConfigError: This server is none to compact on.
        """
        if not self._backlog().is_large:
            return False
        # Cancelled only when the node ends, and then the tier gives the claim back.
        claim = await asyncio.to_thread(self._files.try_claim, _TASK)
        if claim is None:
            return False
        try:
            if not (await self._real_backlog()).is_large:
                return False
            await require_conditional_put(self._store)
            made = await compact(self._store, self._layout)
        finally:
            await asyncio.to_thread(self._files.claims.release, claim)
        if made is not None:
            self._left = made.corrupt.keys() | made.waiting
            self._left_until_s = self._clock() + LEFT_S
        if made is None or not made.merged:
            return False
        for problem in made.corrupt.values():
            log.warning("a delta stays out of the index: %s", problem)
        self._counters.add("compact.bases")
        log.info(
            "index of %s: %d deltas merged, base %d has %d keys",
            self._layout.namespace,
            made.merged,
            made.head.version,
            made.head.entries,
        )
        return True

    async def _real_backlog(self) -> Backlog:
        """The backlog in the bucket, by sizes: another process may have compacted meanwhile.

        Without what could not be merged a moment ago, or each compaction would call for the next.
        """
        left = self._left if self._clock() < self._left_until_s else frozenset()
        snapshot = await take_snapshot(self._store, self._layout)
        head = await newest_head(self._store, self._layout, snapshot)
        waiting = set(snapshot.unmerged(head)) - left
        sizes = [snapshot.deltas[ulid].nbytes for ulid in waiting]
        # The bucket lists sizes, not rows.
        return Backlog(len(sizes), sum(sizes) // ROW_BYTES, head.entries if head else 0)

    def _note(self, exc: S3ECError) -> None:
        if not self._counters.get("compact.failed"):
            log.warning("the index cannot be compacted now and will be later: %s", exc)
        self._counters.add("compact.failed")

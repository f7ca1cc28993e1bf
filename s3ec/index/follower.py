# SPDX-License-Identifier: Apache-2.0
"""Keeps a View up to date: one listing per refresh, deltas at once, bases in the background."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal

from s3ec.errors import AccessError, CorruptEntryError, S3ECError, TierError, UnavailableError
from s3ec.index.cache import IndexCache
from s3ec.index.listing import list_digests
from s3ec.index.lookup import Overlay, View
from s3ec.index.manifest import BaseManifest, ManifestListing, ManifestPoller, read_head
from s3ec.index.rows import Rows
from s3ec.index.segment import Segment
from s3ec.store.base import ObjectInfo, VanishedError

log = logging.getLogger(__name__)

# With `auto` the rows of a base may take this share of the tier.
_EXACT_SHARE = 1 / 8
# More of it than this share, which `exact` may ask for, would leave too little to the entries.
_LARGEST_SHARE = 1 / 2
# A base that is refused is tried again so late, unless a newer one comes.
_RETRY_S = 600.0
# Deltas that the bucket did not give are asked for once more by the next refresh, and then so late.
_ASK_AGAIN_S = 60.0
# Until so many in a row have failed: more would open the breaker, for what may be lost for good.
_MOST_FAILURES = 2
_UNREAD_AT_A_TIME = 4
# Where there is no base the objects are listed; a listing that takes long is repeated rarely.
_LISTING_EVERY_S = 600.0
_LISTING_SHARE = 0.1
# A base may vanish while it is downloaded; the next one may too.
_CHASES = 3
_NEWER = "a newer format"


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How a reader follows the corpus.

    Attributes:
        mode: Rows of the base (``exact``), its filters (``bloom``), or what fits (``auto``).
        cache_bytes: Budget of the node's tier.
        patience_s: How long a refresh waits for a base or a listing that it has begun; after
            that it ends, and the next one goes on with deltas meanwhile.
    """

    mode: Literal["exact", "bloom", "auto"] = "auto"
    cache_bytes: int = 50 * 2**30
    patience_s: float = 5.0


class Follower:
    """Looks at the bucket for one reader, and shows each new View through ``install``.

    A delta is pending once it was listed, and applied once its rows are in the overlay. It leaves
    the overlay when a base is shown that contains it. One that the bucket did not give stays
    pending, and is asked for behind the others, seldom. A delta, head or base that is damaged is
    refused, and tried again after the next full listing; one of a newer format stays refused.

    States of the view: nothing; a listing of the objects; a base; both. A base is opened beside
    the refreshes, since that may be a long download. The objects are listed while there is no base,
    or while something is refused because a newer s3ec wrote it.

    For the loop's thread only.

    Counters: ``index.refused`` (files), ``index.vanished_base`` and ``index.bases`` (opened).
    """

    def __init__(
        self,
        cache: IndexCache,
        *,
        options: FollowOptions,
        install: Callable[[View, Segment | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is read yet.

        Args:
            cache: This node's files, and the way to the bucket.
            install: Takes each new view, and the rows of deltas that are new in it.
            clock: Monotonic seconds.
        """
        self._cache = cache
        self._layout = cache.layout
        self._counters = cache.counters
        self._options = options
        self._install = install
        self._clock = clock
        self._watch = ManifestPoller(cache.store, cache.layout)
        self._view = View()
        self._head: BaseManifest | None = None  # of the base in the view
        self._listed: dict[int, ObjectInfo] = {}  # heads as they were when they were read
        self._overlay = Overlay()  # the deltas in the view
        self._pending: set[str] = set()  # seen and not applied
        self._unread: dict[str, S3ECError] = {}  # of these, what the bucket did not give, and why
        self._ask_again_s = -math.inf
        self._refused: dict[str, str] = {}  # name of what is in the bucket: reason
        self._warned: set[str] = set()  # names of what the log has a line about
        self._not_before: dict[int, float] = {}  # bases that could not be opened
        self._listing_due_s = clock()
        self._changing = asyncio.Lock()  # who makes a new view from the old one
        self._filling: asyncio.Task[None] | None = None
        self.loaded = False

    @property
    def deltas(self) -> int:
        """How many deltas are in the view."""
        return len(self._overlay.ulids)

    async def refresh(self) -> list[S3ECError]:
        """Look once. That is one request if nothing is new.

        Returns:
            Why some deltas that the bucket lists could not be fetched; the others are in use.

        Raises:
            UnavailableError, AccessError: The bucket did not answer; what is known stays.
        """
        known = self._head
        news = await self._watch.look()
        if known is not None and await self._is_made_anew(known, news):
            # Its base answers until another one, or a listing, can do so.
            self._head = None
            self._listing_due_s = self._clock()
        if news.complete:
            self._forgive(news)
        newest = await self._newest_head(news)
        failed = await self._apply(news, newest)
        await self._fill_up(newest)
        if news.complete:
            await self._cache.clean_deltas(self._overlay.ulids | news.deltas.keys())
        return failed

    async def close(self) -> None:
        """End what runs in the background."""
        task, self._filling = self._filling, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    # -- heads -------------------------------------------------------------------------------

    async def _is_made_anew(self, known: BaseManifest, news: ManifestListing) -> bool:
        """Whether the manifest was replaced since this head was read.

        A head is deleted after a newer one only, and never written twice: unless somebody deleted
        the manifest by hand or the namespace, or the server ignores If-None-Match.
        """
        if not news.version:
            # Rarely, and not by one listing: to list all objects in vain may take minutes.
            return news.complete and not (await self._watch.look(complete=True)).version
        if news.version != known.version:
            return news.version < known.version
        info, name = news.heads[known.version], self._layout.head(known.version)
        if self._listed.get(known.version) == info or name in self._refused:
            return False
        try:
            head = await read_head(self._cache.store, self._layout, known.version)
        except CorruptEntryError as exc:
            self._refuse(name, exc)
            return False
        self._listed[known.version] = info
        return head is not None and head.run != known.run

    async def _newest_head(self, news: ManifestListing) -> BaseManifest | None:
        """The newest head that can be read; that of the open base if none is newer."""
        for version in sorted(news.heads, reverse=True):
            if self._head is not None and version <= self._head.version:
                break
            name = self._layout.head(version)
            if name in self._refused:
                continue
            try:
                head = await read_head(self._cache.store, self._layout, version)
            except CorruptEntryError as exc:
                self._refuse(name, exc)
                continue
            if head is not None:
                self._listed[version] = news.heads[version]
                return head
        return self._head

    def _refuse(self, name: str, exc: CorruptEntryError) -> None:
        """Note what cannot be used. The log has a line for each, and one for all newer formats."""
        self._counters.add("index.refused")
        self._refused[name] = exc.reason
        if exc.reason == "version":
            self._warn_once(
                _NEWER,
                f"the index of {self._layout.namespace} was written by a newer s3ec ({exc}); until "
                "this one is updated the objects are listed instead",
            )
        else:
            self._warn_once(name, f"{name} is refused, and the index goes without it: {exc}")

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", message)

    def _forgive(self, news: ManifestListing) -> None:
        """Let damaged files be tried again, and drop notes about files that are gone."""
        there = {self._layout.delta(ulid) for ulid in news.deltas}
        there |= {self._layout.head(version) for version in news.heads}
        self._refused = {
            name: reason
            for name, reason in self._refused.items()
            if reason == "version" and name in there
        }
        self._warned &= there | {_NEWER}
        self._not_before = {v: at for v, at in self._not_before.items() if v in news.heads}
        self._listed = {v: info for v, info in self._listed.items() if v in news.heads}

    # -- deltas ------------------------------------------------------------------------------

    async def _apply(self, news: ManifestListing, newest: BaseManifest | None) -> list[S3ECError]:
        """Fetch what is new, and merge it into the overlay.

        Returns:
            Why some could not be fetched; they stay pending.
        """
        self._pending |= news.deltas.keys()
        # Before there is a base, the one to come will hold what is merged into it.
        self._drop_pending(self._head or newest)
        if not self._pending:
            return []
        found = await self._cache.deltas(self._pending - self._unread.keys())
        found |= await self._read_unread()
        failed = _failed(found)
        self._unread |= failed
        # Others may have come from a look for a new base.
        self._pending -= found.keys() - failed.keys()
        self._refuse_deltas(found)
        async with self._changing:
            good = {ulid: rows for ulid, rows in found.items() if isinstance(rows, Rows)}
            if self._head is not None:  # it may have come meanwhile
                good = {u: rows for u, rows in good.items() if u not in self._head.merged}
            if not good:
                return list(self._unread.values())
            overlay = await self._cache.disk(self._overlay.plus, good)
            new = await self._cache.disk(Overlay().plus, good)
            self._overlay = overlay
            self._show(View(self._view.base, overlay.segment, self._view.listing), new.segment)
        return list(self._unread.values())

    async def _read_unread(self) -> dict[str, Rows | S3ECError | None]:
        """Ask again for what the bucket did not give: one, and more while that goes well."""
        found: dict[str, Rows | S3ECError | None] = {}
        failures, width = 0, 1
        if self._clock() < self._ask_again_s:
            return found
        left = list(self._unread)
        while left and failures < _MOST_FAILURES:
            some, left = left[:width], left[width:]
            for ulid in some:
                del self._unread[ulid]  # one that fails again goes to the end
            answer = await self._cache.deltas(some)
            found |= answer
            failed = len(_failed(answer))
            failures = failures + failed if failed else 0
            width = 1 if failed else min(2 * width, _UNREAD_AT_A_TIME)
        if _failed(found):
            self._ask_again_s = self._clock() + _ASK_AGAIN_S
        return found

    def _drop_pending(self, head: BaseManifest | None) -> None:
        self._pending -= self._overlay.ulids
        if head is not None:
            self._pending -= head.merged
        self._pending = {u for u in self._pending if self._layout.delta(u) not in self._refused}
        self._unread = {u: why for u, why in self._unread.items() if u in self._pending}

    def _refuse_deltas(self, found: Mapping[str, object]) -> None:
        for ulid, rows in found.items():
            if isinstance(rows, CorruptEntryError):
                self._refuse(self._layout.delta(ulid), rows)

    async def _applied_rows(self, ulids: set[str]) -> dict[str, Rows]:
        """The rows of deltas that were applied before; most are on this node's disk.

        Those that are gone from there and from the bucket were merged long ago. Those that the
        bucket does not give now are pending again.
        """
        found = await self._cache.deltas(ulids)
        failed = _failed(found)
        self._pending |= failed.keys()
        self._unread |= failed
        return {ulid: rows for ulid, rows in found.items() if isinstance(rows, Rows)}

    def _show(self, view: View, new: Segment | None = None) -> None:
        self._view = view
        self._install(view, new)

    # -- bases and listings ------------------------------------------------------------------

    async def _fill_up(self, newest: BaseManifest | None) -> None:
        """Begin to open a base or to list the objects when that is due; wait, but not for long."""
        if self._filling is None:
            due = self._is_due(newest)
            if not due and not self._is_listing_due():
                self._drop_listing()
                return
            self._filling = asyncio.get_running_loop().create_task(
                self._fill(newest if due else None), name="s3ec-index-fill"
            )
            # Nobody may be left to look at it.
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._filling
        await asyncio.wait({task}, timeout=self._options.patience_s)
        if task.done():
            self._filling = None
            task.result()

    def _is_due(self, newest: BaseManifest | None) -> bool:
        if newest is None or (self._head is not None and newest.version <= self._head.version):
            return False
        return self._clock() >= self._not_before.get(newest.version, -math.inf)

    def _needs_listing(self) -> bool:
        return self._head is None or "version" in self._refused.values()

    def _is_listing_due(self) -> bool:
        return self._needs_listing() and self._clock() >= self._listing_due_s

    def _drop_listing(self) -> None:
        if self._view.listing is not None and not self._needs_listing():
            self._show_listing(None)

    async def _fill(self, newest: BaseManifest | None) -> None:
        if newest is not None:
            await self._open_base(newest)
        if self._is_listing_due():
            await self._list_objects()
        self.loaded = True

    async def _open_base(self, head: BaseManifest) -> None:
        """Show a base and drop the deltas that are in it."""
        for _ in range(_CHASES):
            try:
                await self._swap_in(head)
                return
            except VanishedError as exc:
                # A newer one has replaced it, or somebody deleted it.
                self._counters.add("index.vanished_base")
                news = await self._watch.look()
                self._pending |= news.deltas.keys()
                newer = await self._newest_head(news)
                if newer is None or newer.version <= head.version:
                    self._give_up(head, f"{exc} is gone")
                    return
                head = newer
            except (CorruptEntryError, TierError) as exc:
                self._counters.add("index.refused")
                self._give_up(head, str(exc))
                return

    def _give_up(self, head: BaseManifest, why: str) -> None:
        self._not_before[head.version] = self._clock() + _RETRY_S
        name = self._layout.head(head.version)
        self._warn_once(name, f"the base of {name} cannot be used: {why}")

    async def _swap_in(self, head: BaseManifest) -> None:
        exact = self._is_exact(head)
        nbytes = head.nbytes if exact else head.bloom_nbytes
        if nbytes > self._options.cache_bytes * _LARGEST_SHARE:
            raise TierError(
                f"its {'rows' if exact else 'filters'} are {nbytes} bytes, over half of "
                f"`cache_bytes` ({self._options.cache_bytes})"
            )
        base = await self._cache.base(head, exact=exact)
        async with self._changing:
            rows = await self._applied_rows(await self._left_by(head))
            self._head, self._overlay = head, await self._cache.disk(Overlay().plus, rows)
            listing = self._view.listing if self._needs_listing() else None
            self._show(View(base, self._overlay.segment, listing))
        self._counters.add("index.bases")
        log.info(
            "index of %s: base %d with %d keys, %s",
            self._layout.namespace,
            head.version,
            head.entries,
            "exact" if base.exact else "by its filters",
        )
        await self._cache.clean(head)

    async def _left_by(self, head: BaseManifest) -> set[str]:
        """Deltas of the overlay that are not in this base.

        A head does not name what an earlier base has merged and the bucket has no more. For a
        reader that passed over that base they are the past.
        """
        left = set(self._overlay.ulids - head.merged)
        if left:
            news = await self._watch.look(complete=True)
            self._pending |= news.deltas.keys()
            left &= news.deltas.keys()
        return left

    def _is_exact(self, head: BaseManifest) -> bool:
        if self._options.mode == "auto":
            return head.nbytes <= self._options.cache_bytes * _EXACT_SHARE
        return self._options.mode == "exact"

    async def _list_objects(self) -> None:
        """List the objects, and show what was seen.

        Also what was seen before the listing failed, beside what is known: that is worth having.
        """
        started_s = self._clock()
        found: set[bytes] = set()
        # Before the objects: what was merged or deleted by now, the listing says.
        past = await self._past_deltas() if self._head is None else set()
        try:
            await list_digests(self._cache.store, self._layout, found)
        except BaseException:
            found |= self._view.listing or set()
            self._show_listing(found)
            raise
        await self._start_over(found, past)
        now_s = self._clock()
        pause_s = max(_LISTING_EVERY_S, (now_s - started_s) / _LISTING_SHARE)
        self._listing_due_s = now_s + pause_s

    async def _past_deltas(self) -> set[str]:
        """Deltas of the overlay that the bucket has no more, or that are in the newest base."""
        seen = set(self._overlay.ulids)
        if seen:
            news = await self._watch.look(complete=True)
            self._pending |= news.deltas.keys()
            seen -= set(news.unmerged(await self._newest_head(news)))
        return seen

    async def _start_over(self, listing: Set[bytes], past: set[str]) -> None:
        """Show a complete listing. Where no head is known, it replaces base and past deltas."""
        async with self._changing:
            if self._head is not None:
                self._show_listing(listing)
                return
            if past & self._overlay.ulids:
                rows = await self._applied_rows(set(self._overlay.ulids - past))
                self._overlay = await self._cache.disk(Overlay().plus, rows)
            self._show(View(None, self._overlay.segment, listing))

    def _show_listing(self, listing: Set[bytes] | None) -> None:
        self._show(View(self._view.base, self._view.overlay, listing))


def _failed(found: Mapping[str, Rows | S3ECError | None]) -> dict[str, S3ECError]:
    """The deltas of which the bucket did not say whether they are good."""
    return {
        ulid: rows
        for ulid, rows in found.items()
        if isinstance(rows, UnavailableError | AccessError)
    }

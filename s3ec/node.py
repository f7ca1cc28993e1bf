# SPDX-License-Identifier: Apache-2.0
"""One process's share of the cache: store, tier, index and prefetcher, put together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import ClassVar
from urllib.parse import urlsplit

from s3ec import runtime
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.errors import AccessError, ConfigError, CorruptEntryError, TierError, UnavailableError
from s3ec.fill import Filler
from s3ec.identity import (
    DESCRIPTOR_BYTES,
    Key,
    KeyPolicy,
    Layout,
    Namespace,
    canonical_json,
    naming_of,
)
from s3ec.index.child import in_child, in_process
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Maintainer
from s3ec.index.reader import ManifestIndex
from s3ec.modality import ModalityRecords, Record
from s3ec.prefetch import Limits, Prefetcher, Sources
from s3ec.runtime import DiskWatch, LoopThread, call_within, contained, jitter
from s3ec.settings import Settings
from s3ec.spans import Spans
from s3ec.store.base import Store
from s3ec.store.endpoint import Endpoint
from s3ec.store.open import open_places, open_store, resilient
from s3ec.store.places import AllPlaces, Health
from s3ec.tenant import FIELD as TENANT_FIELD
from s3ec.tier.entries import LocalKeys
from s3ec.tier.tier import Tier

log = logging.getLogger(__name__)

# How often the set of entries on this node's disk is read again, since other processes evict. New
# entries of theirs are announced at once.
_RESCAN_S = 600.0
# How often the gauges are updated, and how often one of them is read from the disk.
_LEVELS_EVERY_S = 1.0
_TIER_BYTES_EVERY_S = 10.0
# For the few folders and files that are checked and created at the start.
_OPEN_TIMEOUT_S = 30.0
# The bucket counts as reachable if a refresh succeeded within this many intervals and seconds.
_FRESH_REFRESHES = 4
_FRESH_S = 10.0
# The shortest pause between two probes of a store that is down.
_BETWEEN_PROBES_S = 0.5


class Node:
    """Builds the parts of one process in the right order and ends them in the reverse one.

    Construction touches the disk (the tier's folder) but never the network: an engine starts
    the same whether the bucket answers or not.

    States: made, following the bucket and the folder from ``follow_the_bucket`` on, closed for
    good by ``close``. The last user's ``release`` closes a shared node.

    A node belongs to the process that made it. A forked child has none of its threads, so no thread
    releases their locks, and the child must not use it: hooks answer like a miss, ``shared`` makes
    another, and ``release`` and ``close`` do nothing. The child keeps the object, since the
    destructors of some parts would reach the parent's connections.

    Attributes:
        process: Number of the process that made it, see ``runtime.process_number``. Hooks compare
            the two numbers themselves.
        users: Halves that share it.
        encode_costs: Cost of encoding here, measured in this process or reported by workers.
        levels: Gauge values, by counter; replaced as a whole each second once ``keep_levels`` was
            called. Read-only.
    """

    _shared: ClassVar[dict[tuple[int, str, str], Node]] = {}
    # By process. Reentrant, since a signal handler may release, see Counters.
    _locks: ClassVar[dict[int, threading.RLock]] = {}

    @classmethod
    def _sharing(cls) -> threading.RLock:
        return cls._locks.setdefault(runtime.process_number, threading.RLock())

    @classmethod
    def shared(cls, settings: Settings, namespace: Namespace) -> Node:
        """Return this process's node for these settings; pair with release().

        vLLM puts scheduler and worker into one process unless it runs tensor parallel: then they
        share one client, one index and one set of counters.
        """
        with cls._sharing():
            slot = (runtime.process_number, namespace.name, settings.model_dump_json())
            node = cls._shared.get(slot)
            if node is None:
                node = cls._shared[slot] = cls(settings, namespace)
            node.users += 1
            return node

    def release(self, timeout_s: float) -> None:
        """Give a shared node back; the last user closes it."""
        if self.is_foreign:
            return
        with self._sharing():
            self.users -= 1
            if self.users > 0:
                return
            for slot, node in list(self._shared.items()):
                if node is self:
                    del self._shared[slot]
        self.close(timeout_s)

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        *,
        store: Store | None = None,
        endpoint: Endpoint | None = None,
        name: str = "s3ec",
    ) -> None:
        """Set up.

        Args:
            settings: This process's settings.
            namespace: The namespace that this engine reads and writes.
            store: The bucket, without retries; opened from the settings if None.
            endpoint: The bucket's health and limits; None for those of the settings.
            name: Name of the loop thread.

        Raises:
            ConfigError: The settings cannot work, such as an unknown profile, or the namespace
                is another tenant's.
            TierError: The cache folder cannot be used; the message says why.
        """
        self.users = 0
        self.process = runtime.process_number
        self._following: list[Future[None]] = []
        self.levels: Mapping[str, float] = {}
        self._level_sources: list[Callable[[], Mapping[str, float]]] = []
        self._tier_bytes: int | None = None
        self.encode_costs = EncodeCosts()
        self.settings = settings
        self.namespace = namespace
        self.naming = _naming(settings, namespace)
        self.layout = Layout(namespace.name)
        self.counters = Counters()
        self.endpoint = endpoint or Endpoint(settings.max_concurrency)
        self.loop = LoopThread(name, watch=DiskWatch(self.counters))
        self.store = home = resilient(
            store or open_store(settings), self.endpoint, self.counters, hedge=settings.hedge
        )
        self.breaker: Health = self.endpoint.breaker
        places = open_places(settings, home, self.counters, is_entry=self.layout.is_entry)
        near = () if places is None else places.replicas
        if places is not None:
            self.store = places
            self.breaker = AllPlaces([*(place.endpoint for place in near), self.endpoint])
        self.tier = open_tier(settings, namespace.name, self.counters)
        self._fillers = [
            Filler(
                *(place, home, self.layout, self.loop, self.counters, self.tier.entries.open),
                bytes_per_minute=replica.fill_bytes_per_minute,
                mirrors=replica.bucket is not None,
            )
            for place, replica in zip(near, settings.replicas, strict=True)
            if place.fill
        ]
        self.destination = destination_of(settings)
        self.local = LocalKeys()
        self._news = self.tier.follow_news(self.local.add_all)
        self.residents = self.tier.open_residents(self._may_grant)
        self._fresh_s = _FRESH_REFRESHES * settings.index_refresh_s + _FRESH_S
        if (settings.url or "").startswith("file:"):
            self._fresh_s = -math.inf
        self.records = ModalityRecords(self.store, self.layout)
        self._index_folder = NodeFolder.of(
            self.tier.folders, namespace.name, need_room=self.tier.need_room
        )
        self._index_jobs = in_process(self.store) if store else in_child(settings)
        self.index = ManifestIndex(
            *(self.store, self.layout, self._index_folder),
            jobs=self._index_jobs,
            disk=asyncio.to_thread,
            counters=self.counters,
            refresh_s=settings.index_refresh_s,
        )
        self.sources = Sources(
            self.store,
            self.tier,
            self.layout,
            self.index,
            self.records,
            self.local,
            self.residents,
            Spans(_span_attributes(settings, namespace.name)),
            self._fetched,
        )
        self.prefetcher = Prefetcher(
            self.loop,
            self.sources,
            counters=self.counters,
            limits=Limits(max_concurrency=settings.max_concurrency),
        )

    @property
    def is_foreign(self) -> bool:
        """True if a parent of this process made it."""
        return self.process != runtime.process_number

    def follow_the_bucket(self) -> None:
        """Start to read the index, and to refresh it when due; returns at once."""
        self._following.append(self.loop.submit(self._refresh_forever()))
        self._following.append(self.loop.submit(self._follow_the_folder()))
        self._following.append(self.loop.submit(self._watch_tier_bytes()))
        for filler in self._fillers:
            if not filler.mirrors:
                continue
            mirror = filler.mirror_forever(self.index, self._index_folder)
            self._following.append(self.loop.submit(mirror))
        self.keep_levels(self._levels)

    def _fetched(self, key: Key) -> None:
        for filler in self._fillers:
            filler.offer(key)

    # -- gauges ------------------------------------------------------------------------------

    def keep_levels(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Add a source of gauges to ``levels``, which is updated each second; returns at once.

        Args:
            source: Called in the loop's thread each second; must not wait.
        """
        with self._sharing():
            self._level_sources.append(source)
            if len(self._level_sources) == 1:
                self._following.append(self.loop.submit(self._keep_levels_forever()))

    async def _keep_levels_forever(self) -> None:
        while True:
            with contained(self.counters, "levels"):
                found: dict[str, float] = {"level.breaker_open": float(self.breaker.is_open)}
                for source in list(self._level_sources):
                    found |= source()
                self.levels = found
            await asyncio.sleep(_LEVELS_EVERY_S)

    def _levels(self) -> dict[str, float]:
        """Return gauges that are equal in all processes of the node; one process reports them."""
        found = {"level.tier_budget_bytes": float(self.settings.cache_bytes), **self.index.levels()}
        if self._tier_bytes is not None:
            found["level.tier_bytes"] = self._tier_bytes
        return found

    async def _watch_tier_bytes(self) -> None:
        while True:
            with contained(self.counters, "size of the tier"), suppress(OSError, TierError):
                if not self.loop.watch.hangs:
                    self._tier_bytes = await self.loop.disk(self.tier.evictor.used_bytes)
            await asyncio.sleep(_TIER_BYTES_EVERY_S)

    def maintain_the_index(self) -> None:
        """Start to make index snapshots when due; for a process that follows and may write."""
        maintainer = Maintainer(
            *(self.index, self.layout, self._index_folder, self._index_jobs, self.counters)
        )
        self._following.append(self.loop.submit(maintainer.run_forever()))

    async def _refresh_forever(self) -> None:
        complained = False
        while True:
            with contained(self.counters, "index refresh"):
                try:
                    if self.breaker.is_open:
                        await self._probe()
                    await self.index.refresh()
                    answered_s = self.index.answered_s()
                    # A refresh without a request never fails, so it proves nothing.
                    if answered_s is not None and answered_s < self.index.poll_s:
                        complained = False
                    await self._know_records()
                except (UnavailableError, AccessError, CorruptEntryError, TierError) as exc:
                    if not complained:
                        log.warning("cannot read the index, trying again later: %s", exc)
                    complained = True
                    self.counters.add("index.refresh_failed")
            pause_s = refresh_pause_s(self.index.poll_s, self.breaker)
            await asyncio.sleep(pause_s * jitter.uniform(0.9, 1.1))

    async def _know_records(self) -> None:
        """Read the records of the residents' modalities, so that they can be granted at once."""
        for modality in list(self.residents.modalities):
            with suppress(UnavailableError, AccessError):  # says nothing about the index
                await self.records.get_soon(modality, 0.0)

    def _may_grant(self, header: Header) -> bool:
        """Return True if an entry that was verified before may be granted at once; memory only.

        If it has rotted since, its load needs the bucket's copy. So the bucket must have answered a
        refresh of this node recently. Never if the bucket is a local folder, which may lie on the
        same bad disk.
        """
        answered_s = self.index.answered_s()
        if answered_s is None or answered_s > self._fresh_s:
            return False
        record = self.records.known(header.modality)
        return record is not None and record == Record(header.shape.width, header.shape.dtype)

    async def _probe(self) -> None:
        """Send one small request that the breaker may let through, even if there are no others.

        It is a read, because the breaker's rest from reads ends with one; the descriptor exists
        once anything is stored.
        """
        await self.store.get(self.layout.descriptor, max_bytes=DESCRIPTOR_BYTES)

    async def _follow_the_folder(self) -> None:
        # Before the walk, so that no entry is missed between the two.
        await asyncio.to_thread(self._news.start)
        while True:
            with contained(self.counters, "tier scan"):
                try:
                    await asyncio.to_thread(self._walk_the_folder)
                except TierError as exc:
                    log.warning("cannot read the cache folder: %s", exc)
            await asyncio.sleep(_RESCAN_S)

    def _walk_the_folder(self) -> None:
        self.local.replace(self.tier.entries.names())
        self.residents.start()

    def close(self, timeout_s: float) -> None:
        """End everything within about ``timeout_s``. Idempotent."""
        if self.is_foreign or self.loop.closed:
            return
        for task in self._following:
            task.cancel()
        try:
            self._end_loop(timeout_s)
        finally:  # else its files and locks would stay until the process ends
            try:
                call_within(timeout_s, self.tier.close)
            except TimeoutError:
                log.warning(
                    "the disk of `cache_dir` does not answer; what is open stays until it does"
                )

    def _end_loop(self, timeout_s: float) -> None:
        try:
            self.loop.run(self._close(), timeout_s)
        except (TimeoutError, UnavailableError) as exc:
            log.debug("closing the store: %r", exc)
        finally:
            self.loop.stop(timeout_s)

    async def _close(self) -> None:
        self.prefetcher.stop()
        for filler in self._fillers:
            filler.close()
        await self.index.close()
        await self.store.close()


def refresh_pause_s(interval_s: float, breaker: Health) -> float:
    """Return how long to wait before the index is read again, and the store is probed."""
    if not breaker.is_open:
        return interval_s
    # The breaker's pause may be 0 while another probe is running, which may take seconds with a
    # silent server.
    return min(interval_s, max(breaker.pause_s, _BETWEEN_PROBES_S) + 0.05)


def open_tier(
    settings: Settings,
    namespace: str,
    counters: Counters,
    *,
    evicts: bool = True,
    check_values: bool = False,
) -> Tier:
    """Open this node's tier, or fail in time if the disk does not answer. Blocking.

    Args:
        check_values: True to hash entries as they are opened, even if ``verify`` does not ask so.

    Raises:
        TierError: The folder cannot be used, or does not answer; names the fix.
    """
    make = partial(
        Tier,
        settings.cache_dir,
        namespace,
        budget_bytes=int(settings.cache_bytes),
        min_free_bytes=int(settings.min_free_bytes),
        counters=counters,
        # The worker hashes its reads as well, but then it is too late for a miss: if the bucket
        # does not answer, the engine ends.
        check_values=check_values or settings.verify == "always",
        evicts=evicts,
    )
    try:
        return call_within(_OPEN_TIMEOUT_S, make)
    except TimeoutError as exc:
        raise TierError(
            f"{settings.cache_dir} has not answered for {_OPEN_TIMEOUT_S:.0f} s; set "
            "`cache_dir` to a folder on a local disk that works"
        ) from exc


def _naming(settings: Settings, namespace: Namespace) -> KeyPolicy:
    naming = naming_of(settings)
    mine = naming.tenant.id if naming.tenant else None
    if namespace.descriptor.get("tenant") != mine:
        raise ConfigError(
            f"namespace {namespace.name} was described under another `{TENANT_FIELD}` than the "
            "one that is set",
            field=TENANT_FIELD,
        )
    return naming


def _span_attributes(settings: Settings, namespace: str) -> dict[str, str | int]:
    """Return the attributes of every span, with OpenTelemetry's names if any (semconv 1.30)."""
    found: dict[str, str | int] = {"s3ec.namespace": namespace}
    if settings.url is not None:
        return found
    found["aws.s3.bucket"] = settings.bucket
    server = urlsplit(settings.endpoint_url or "")
    if server.hostname:
        found["server.address"] = server.hostname
        if server.port is not None:
            found["server.port"] = server.port
    return found


def destination_of(settings: Settings) -> str:
    """Return 16 hex digits that identify the bucket of saves: a namespace may be in several."""
    where = [settings.endpoint_url, settings.bucket, settings.prefix]
    if settings.url:  # only then, so that spooled entries for S3 keep their names
        where = [settings.url]
    return hashlib.sha256(canonical_json(where).encode()).hexdigest()[:16]

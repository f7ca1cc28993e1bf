# SPDX-License-Identifier: Apache-2.0
"""This node's copies of the index's files: each downloaded by one process, verified, then named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from functools import partial

from s3ec import safetensors_file
from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, S3ECError, TierError, UnavailableError
from s3ec.identity import Layout
from s3ec.index.bloom import Bloom
from s3ec.index.lookup import Base
from s3ec.index.manifest import BaseFile, BaseManifest
from s3ec.index.merged_rows import read_delta
from s3ec.index.rows import Rows
from s3ec.index.segment import MAX_DELTA_BYTES, Segment, parse_segment
from s3ec.store.base import Blob, Store
from s3ec.store.concurrency import in_parallel
from s3ec.tier import IndexFile, IndexFiles
from s3ec.tier.claims import Claim, LookAgain
from s3ec.tier.entry_writer import Disk, Incoming, download

# Parts of one object, asked for or waiting to be written.
PARTS = 2
# At a time. So, with what one download asks for ahead, 64 MiB of a base are in memory at most.
FILES = 4
_DELTAS = 8
# How soon a file that another process downloads is looked for again, at first and at most.
_FIRST_LOOK_S = 0.005
_LAST_LOOK_S = 0.1
# A process that has a claim for so long may hang.
_PATIENCE_S = 60.0
# Deltas that the bucket has no more, and newer bases than the newest, go from here an hour after
# they came: until then another process, which has seen less or more than this one, may need them.
_LEFT_S = 3600.0


class IndexCache:
    """Of one namespace. For one event loop; any number of calls at once.

    Files have the names that they have in the bucket below ``manifest/``, are never changed, and
    stay mapped where they are in use when they are removed. What the disk does not take is an
    error for a base, and kept in memory for a delta.

    Counters: ``index.downloads`` and ``index.not_kept``.

    Attributes:
        store: The bucket.
        layout: Of the namespace.
        disk: Runs what blocks.
        counters: Where to count.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        files: IndexFiles,
        disk: Disk,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Touches nothing.

        Args:
            disk: Runs what blocks.
            clock: Seconds since the epoch, as the file system has them.
        """
        self.store = store
        self.layout = layout
        self.disk = disk
        self.counters = counters
        self._files = files
        self._clock = clock
        self._unkept: dict[str, Rows] = {}

    # -- deltas ------------------------------------------------------------------------------

    async def deltas(self, ulids: Iterable[str]) -> dict[str, Rows | S3ECError | None]:
        """The rows of some deltas.

        Returns:
            For each its rows (views of its bytes), None where the bucket has it no more, or why
            there are none: CorruptEntryError where it is refused, UnavailableError or AccessError
            where the bucket did not answer. One that cannot be had keeps back no other.
        """
        wanted = list(ulids)
        found: dict[str, Rows | S3ECError | None] = {}
        found.update(await self.disk(self._open_deltas, wanted))
        missing = [ulid for ulid in wanted if ulid not in found]

        async def bring(ulid: str) -> Rows | S3ECError | None:
            try:
                return await self._delta(ulid)
            except (CorruptEntryError, UnavailableError, AccessError) as exc:
                return exc

        fetched = await in_parallel(missing, bring, width=_DELTAS)
        return found | dict(zip(missing, fetched, strict=True))

    def _open_deltas(self, ulids: Iterable[str]) -> dict[str, Rows]:
        """Those that are on this node and good."""
        found = {}
        for ulid in ulids:
            kept = self._unkept.get(ulid)  # the loop's thread may drop it meanwhile
            rows = self._open_delta(ulid) if kept is None else kept
            if rows is not None:
                found[ulid] = rows
        return found

    def _open_delta(self, ulid: str) -> Rows | None:
        name = self._local(self.layout.delta(ulid))
        try:
            body = self._files.read(name, max_bytes=MAX_DELTA_BYTES)
            # All of it, since it may not have survived a power cut as it was.
            return None if body is None else parse_segment(body, self.layout.namespace, name=name)
        except (OSError, TierError, CorruptEntryError):
            self._files.remove(name)
            return None

    def _check_doubtful(self, name: str, check: Callable[[], object]) -> None:
        """Read a file that may not have survived a power cut as it was."""
        file = self._files.find(name)
        if file is not None and self._files.is_doubtful(file):
            check()
            self._files.trust(name)

    async def _delta(self, ulid: str) -> Rows | None:
        rows: Rows | None = None

        async def fetch() -> None:
            nonlocal rows
            found = await read_delta(self.store, self.layout, ulid)
            if found is not None:
                body, rows = found
                self.counters.add("index.downloads")
                await self.disk(self._keep_delta, ulid, body, rows)

        await self._alone(self._local(self.layout.delta(ulid)), fetch)
        # Another process may have brought it.
        return rows if rows is not None else await self.disk(self._open_delta, ulid)

    def _keep_delta(self, ulid: str, body: Blob, rows: Rows) -> None:
        """Write what was received, or hold it where the disk does not take it."""
        try:
            self._files.write(self._local(self.layout.delta(ulid)), body)
        except TierError:
            self.counters.add("index.not_kept")
            self._unkept[ulid] = rows

    # -- bases -------------------------------------------------------------------------------

    async def base(self, head: BaseManifest, *, exact: bool) -> Base:
        """Open a base, downloading what is not here.

        Args:
            exact: With all rows; else with the filters only.

        Raises:
            VanishedError: It was replaced.
            CorruptEntryError: A file of it is refused, named in the message.
            TierError: The disk refused.
            UnavailableError, AccessError: The bucket did not answer.
        """
        if exact:
            files = [(head.segment_name(self.layout, it), it.segment) for it in head.shards]
        else:
            files = [(head.bloom_name(self.layout, it), it.bloom) for it in head.shards]
        try:
            return await self._open_base(head, files, exact=exact)
        except CorruptEntryError:
            # This disk's fault or the bucket's: a second try will tell. What is as the bucket has
            # it stays, or one bad file would have the whole base downloaded again and again.
            for name, blob in files:
                await self.disk(self._remove_other, self._local(name), blob)
            return await self._open_base(head, files, exact=exact)

    async def _open_base(
        self, head: BaseManifest, files: Sequence[tuple[str, BaseFile]], *, exact: bool
    ) -> Base:
        bad: list[CorruptEntryError] = []

        async def bring(file: tuple[str, BaseFile]) -> None:
            try:
                await self._base_file(*file, exact=exact)
            except CorruptEntryError as exc:
                bad.append(exc)  # the good ones come all the same: the next try needs them

        await in_parallel(files, bring, width=FILES)
        if bad:
            raise bad[0]
        paths = [self._files.path(self._local(name)) for name, _ in files]
        try:
            return await self.disk(
                lambda: Base.open(head, paths, self.layout.namespace, exact=exact)
            )
        except OSError as exc:
            raise TierError(f"cannot open the index on this node: {exc}") from exc

    def _remove_other(self, local: str, blob: BaseFile) -> None:
        """Remove a file that is not the one that the head names."""
        try:
            here = safetensors_file.map_file(self._files.path(local))
            if BaseFile.of([memoryview(here)]) == blob:
                return
        except FileNotFoundError:
            return
        except (OSError, CorruptEntryError):
            pass
        self._files.remove(local)

    async def _base_file(self, name: str, blob: BaseFile, *, exact: bool) -> None:
        local = self._local(name)

        def check(path: str) -> None:
            kind = Segment if exact else Bloom
            whole = memoryview(safetensors_file.map_file(path))
            kind.parse(whole, self.layout.namespace, name=name).check()

        def check_again() -> None:
            try:
                check(self._files.path(local))
            except OSError as exc:  # fetched anew, as a damaged one
                raise CorruptEntryError(f"{name} cannot be read: {exc}", reason="disk") from exc

        async def fetch() -> None:
            nbytes, disk = blob.nbytes, self.disk
            begin = partial(self._files.begin, local, name, nbytes, blob.xxh3, check)
            incoming = await disk(begin, undo=Incoming.discard)
            try:
                await download(self.store, name, incoming, disk=disk, at_a_time=PARTS)
                await disk(incoming.commit)
            finally:
                await asyncio.shield(disk(incoming.discard))  # also where this is cancelled
            self.counters.add("index.downloads")

        await self._alone(local, fetch, nbytes=blob.nbytes)
        await self.disk(self._check_doubtful, local, check_again)

    # -- what is not needed any more -----------------------------------------------------------

    async def clean(self, head: BaseManifest) -> None:
        """Remove the files that this base has replaced.

        Those of newer bases stay at first: they are another process's, which is ahead of us. After
        an hour they are of a manifest that was made anew, and whose versions began at 1 again.
        """
        old_s = self._clock() - _LEFT_S
        merged = {self._local(self.layout.delta(ulid)) for ulid in head.merged}
        keep = self._local(self.layout.run(head.version, head.run))
        for ulid in head.merged & self._unkept.keys():
            del self._unkept[ulid]

        def is_replaced(file: IndexFile) -> bool:
            run = self.layout.run_of(self.layout.manifest + file.name)
            if run is None:
                return file.name in merged
            if run[0] > head.version:
                return file.modified_s < old_s
            return not file.name.startswith(keep)

        await self.disk(self._remove, is_replaced)

    async def clean_deltas(self, needed: Set[str]) -> None:
        """Remove deltas that came here long ago and are neither in the bucket nor in use.

        Args:
            needed: ULIDs of those that are.
        """
        for ulid in self._unkept.keys() - needed:
            del self._unkept[ulid]
        keep = {self._local(self.layout.delta(ulid)) for ulid in needed}
        old_s = self._clock() - _LEFT_S

        def is_left(file: IndexFile) -> bool:
            is_delta = self.layout.delta_of(self.layout.manifest + file.name) is not None
            return is_delta and file.name not in keep and file.modified_s < old_s

        await self.disk(self._remove, is_left)

    def _remove(self, which: Callable[[IndexFile], bool]) -> None:
        for file in list(self._files.walk()):
            if which(file):
                self._files.remove(file.name)

    # -- helpers -----------------------------------------------------------------------------

    def _local(self, name: str) -> str:
        """A name in the bucket as IndexFiles has it."""
        return name.removeprefix(self.layout.manifest)

    async def _alone(
        self, name: str, fetch: Callable[[], Awaitable[None]], *, nbytes: int | None = None
    ) -> None:
        """Fetch a file that is not here, unless another process of the node does.

        Args:
            nbytes: One of another size is fetched again.
        """
        looks, waited_s = LookAgain(_FIRST_LOOK_S, _LAST_LOOK_S), 0.0
        while (claim := await self._claim(name)) is None and waited_s < _PATIENCE_S:
            waited_s += await looks.pause()
        try:
            # After the claim: who had it before us has finished by now.
            found = await self.disk(self._files.find, name)
            if found is None or nbytes not in (None, found.nbytes):
                await fetch()
        finally:
            if claim is not None:
                await asyncio.shield(self.disk(self._release, claim))

    async def _claim(self, name: str) -> Claim | None:
        return await self.disk(self._files.try_claim, name, undo=self._release)

    def _release(self, claim: Claim | None) -> None:
        if claim is not None:
            self._files.claims.release(claim)

# SPDX-License-Identifier: Apache-2.0
"""This node's copies of the index's files: each downloaded by one process, verified, then named.

A download goes in parts, some of them asked for ahead, and is verified at its end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from s3ec import codec, safetensors_file
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Layout
from s3ec.index.bloom import Bloom
from s3ec.index.lookup import Base
from s3ec.index.manifest import BaseManifest, Blob
from s3ec.index.rows import Rows
from s3ec.index.segment import MAX_DELTA_BYTES, Segment, parse_segment
from s3ec.store.base import Store, parts_in_order
from s3ec.store.concurrency import in_parallel
from s3ec.tier import IndexFile, IndexFiles

T = TypeVar("T")

PART_BYTES = 8 * 2**20
# Of one object, asked for or waiting to be written.
_PARTS = 2


class VanishedError(Exception):
    """A file of a base is gone from the bucket: a newer base has replaced it."""


class Disk(Protocol):
    """Awaits a blocking call in another thread; ``LoopThread.disk`` is one."""

    def __call__(self, function: Callable[..., T], *args: object) -> Awaitable[T]: ...


class _File:
    """A file in the making. Blocking; calls exclude each other.

    A cancelled coroutine leaves a call running in its thread: it must find the file closed, and
    not another one under its descriptor.
    """

    def __init__(self, files: IndexFiles, local: str, name: str, blob: Blob) -> None:
        self._lock = threading.Lock()
        self._files = files
        self._local = local
        self._name = name
        self._blob = blob
        self._running = codec.running_checksum()
        self._temp = files.begin(blob.nbytes)
        self._over = False

    def append(self, part: bytes | memoryview) -> None:
        """Write what comes next."""
        with self._lock:
            if self._over:
                return
            try:
                self._temp.append([part])
            except OSError as exc:
                raise TierError(f"cannot write {self._name}: {exc}") from exc
            self._running.update(part)

    def finish(self, check: Callable[[str], object]) -> None:
        """Give the file its name if it is good."""
        with self._lock:
            if self._over:
                return
            if self._running.hexdigest() != self._blob.xxh3:
                raise CorruptEntryError(f"{self._name}: wrong checksum", reason="checksum")
            check(self._temp.path)
            self._over = True
            self._files.finish(self._local, self._temp)

    def discard(self) -> None:
        """Leave nothing behind; fine after finish."""
        with self._lock:
            self._over = True
            self._temp.discard()


async def download(
    store: Store,
    name: str,
    blob: Blob,
    *,
    files: IndexFiles,
    local: str,
    disk: Disk,
    check: Callable[[str], object],
) -> None:
    """Bring one object to this node.

    Args:
        name: In the store.
        blob: Its size and checksum.
        local: Its name in ``files``.
        check: Gets the path of the whole file before it has its name; raises
            CorruptEntryError where its content is refused. Runs in ``disk``.

    Raises:
        VanishedError: It is not in the store.
        CorruptEntryError: Its size, checksum or content is wrong.
        TierError: The disk refused.
        UnavailableError, AccessError: The store did not answer.
    """
    file = await disk(_File, files, local, name, blob)
    try:
        done, starts = 0, range(0, blob.nbytes, PART_BYTES)
        async with aclosing(parts_in_order(store, name, starts, at_a_time=_PARTS)) as parts:
            async for part in parts:
                if part is None:
                    raise VanishedError(name)
                if len(part) != min(PART_BYTES, blob.nbytes - done):
                    raise CorruptEntryError(
                        f"{name}: ends at {done + len(part)} of {blob.nbytes} bytes",
                        reason="length",
                    )
                await disk(file.append, part)
                done += len(part)
                del part  # not one more in memory while the next is waited for
        await disk(file.finish, check)
    finally:
        file.discard()  # an unlink where something went wrong; nothing that waits for a disk else


# At a time. So, with what one download asks for ahead, 64 MiB of a base are in memory at most.
_FILES = 4
_DELTAS = 8
# How soon a file that another process downloads is looked for again, at first and at most.
_FIRST_LOOK_S = 0.005
_LAST_LOOK_S = 0.1
# A process that has a claim for so long may hang.
_PATIENCE_S = 60.0
# Deltas that the bucket has no more go from here an hour after they came: until then another
# process, which has not seen the newest base yet, may need them.
_LEFT_S = 3600.0


class IndexCache:
    """Of one namespace. For one event loop; any number of calls at once.

    Files have the names that they have in the bucket below ``manifest/``, are never changed, and
    stay mapped where they are in use when they are removed. What the disk does not take is an
    error for a base, and kept in memory for a delta.

    Counters: ``index.downloads``, ``index.downloaded_bytes`` and ``index.not_kept``.

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

    async def deltas(self, ulids: Iterable[str]) -> dict[str, Rows | CorruptEntryError | None]:
        """The rows of some deltas.

        Returns:
            For each its rows (views of its bytes), None where the bucket has it no more, or why
            it is refused.

        Raises:
            UnavailableError, AccessError: The bucket did not answer.
        """
        wanted = list(ulids)
        found: dict[str, Rows | CorruptEntryError | None] = {}
        found.update(await self.disk(self._open_deltas, wanted))
        missing = [ulid for ulid in wanted if ulid not in found]
        fetched = await in_parallel(missing, self._delta, width=_DELTAS)
        return found | dict(zip(missing, fetched, strict=True))

    def _open_deltas(self, ulids: Iterable[str]) -> dict[str, Rows]:
        """Those that are on this node and good."""
        found = {}
        for ulid in ulids:
            rows = self._unkept[ulid] if ulid in self._unkept else self._open_delta(ulid)
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

    async def _delta(self, ulid: str) -> Rows | CorruptEntryError | None:
        rows: Rows | None = None

        async def fetch() -> None:
            nonlocal rows
            rows = await self._fetch_delta(ulid)

        refused: CorruptEntryError | None = None
        for _ in range(2):
            try:
                await self._alone(self._local(self.layout.delta(ulid)), fetch)
            except CorruptEntryError as exc:
                refused = exc
                if exc.reason == "version":
                    break
                continue
            # Another process may have brought it.
            return rows if rows is not None else await self.disk(self._open_delta, ulid)
        return refused

    async def _fetch_delta(self, ulid: str) -> Rows | None:
        name = self.layout.delta(ulid)
        body = await self.store.get(name, max_bytes=MAX_DELTA_BYTES)
        if body is None:
            return None
        self._count(len(body))
        return await self.disk(self._keep_delta, ulid, name, body)

    def _keep_delta(self, ulid: str, name: str, body: bytes | memoryview) -> Rows:
        """Check what was received and write it, or hold it where the disk does not take it."""
        rows = parse_segment(body, self.layout.namespace, name=name)
        try:
            file = self._files.begin(len(body))
            try:
                file.append([body])
                self._files.finish(self._local(name), file)
            finally:
                file.discard()
        except (OSError, TierError):
            self.counters.add("index.not_kept")
            self._unkept[ulid] = rows
        return rows

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
        self, head: BaseManifest, files: Sequence[tuple[str, Blob]], *, exact: bool
    ) -> Base:
        await in_parallel(files, lambda it: self._base_file(*it, exact=exact), width=_FILES)
        paths = [self._files.path(self._local(name)) for name, _ in files]
        try:
            return await self.disk(
                lambda: Base.open(head, paths, self.layout.namespace, exact=exact)
            )
        except OSError as exc:
            raise TierError(f"cannot open the index on this node: {exc}") from exc

    def _remove_other(self, local: str, blob: Blob) -> None:
        """Remove a file that is not the one that the head names."""
        try:
            if Blob.of([memoryview(safetensors_file.map_file(self._files.path(local)))]) == blob:
                return
        except FileNotFoundError:
            return
        except (OSError, CorruptEntryError):
            pass
        self._files.remove(local)

    async def _base_file(self, name: str, blob: Blob, *, exact: bool) -> None:
        local = self._local(name)

        def check(path: str) -> None:
            kind = Segment if exact else Bloom
            whole = memoryview(safetensors_file.map_file(path))
            kind.parse(whole, self.layout.namespace, name=name).check()

        async def fetch() -> None:
            await download(
                self.store, name, blob, files=self._files, local=local, disk=self.disk, check=check
            )
            self._count(blob.nbytes)

        await self._alone(local, fetch, nbytes=blob.nbytes)
        path = self._files.path(local)
        await self.disk(self._check_doubtful, local, lambda: check(path))

    # -- what is not needed any more -----------------------------------------------------------

    async def clean(self, head: BaseManifest) -> None:
        """Remove the files that this base has replaced.

        Those of newer bases stay: they are another process's, which is ahead of us.
        """
        merged = {self._local(self.layout.delta(ulid)) for ulid in head.merged}
        keep = self._local(self.layout.run(head.version, head.run))
        for ulid in head.merged & self._unkept.keys():
            del self._unkept[ulid]

        def is_replaced(file: IndexFile) -> bool:
            run = self.layout.run_of(self.layout.manifest + file.name)
            if run is None:
                return file.name in merged
            return run[0] <= head.version and not file.name.startswith(keep)

        await self.disk(self._remove, is_replaced)

    async def clean_deltas(self, needed: Collection[str]) -> None:
        """Remove deltas that came here long ago and are neither in the bucket nor in use.

        Args:
            needed: ULIDs of those that are.
        """
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

    def _count(self, nbytes: int) -> None:
        self.counters.add("index.downloads")
        self.counters.add("index.downloaded_bytes", nbytes)

    async def _alone(
        self, name: str, fetch: Callable[[], Awaitable[None]], *, nbytes: int | None = None
    ) -> None:
        """Fetch a file that is not here, unless another process of the node does.

        Args:
            nbytes: One of another size is fetched again.
        """
        pause_s, waited_s = _FIRST_LOOK_S, 0.0
        while True:
            claim = self._files.try_claim(name)
            if claim is None and waited_s < _PATIENCE_S:
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                pause_s = min(pause_s * 1.5, _LAST_LOOK_S)
                continue
            try:
                # After the claim: who had it before us has finished by now. One stat.
                found = self._files.find(name)
                if found is None or nbytes not in (None, found.nbytes):
                    await fetch()
                return
            finally:
                if claim is not None:
                    self._files.release(claim)

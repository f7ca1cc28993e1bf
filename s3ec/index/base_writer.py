# SPDX-License-Identifier: Apache-2.0
"""Writes a base: shards and filters under names of its own, then the head that commits them.

Afterwards it deletes what no reader can need any more: old bases, merged deltas, what dead
compactions left. All ages are by the server's clock. Whatever is in doubt stays: it is garbage and
not an error.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from s3ec import runtime
from s3ec.counters import Report, unreported
from s3ec.errors import (
    AccessError,
    ConflictError,
    CorruptEntryError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Layout
from s3ec.index.bloom import build_bloom
from s3ec.index.manifest import (
    MAX_VERSION,
    BaseFile,
    BaseManifest,
    ManifestListing,
    Shard,
    newest_head,
    read_head,
    shard_ranges,
    take_snapshot,
)
from s3ec.index.rows import Rows
from s3ec.index.segment import encode_segment
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import probe_name
from s3ec.tier.files import take_lock

log = logging.getLogger(__name__)

GRACE_S = 3600.0
"""A reader that is slower than this finds files gone, and lists again."""
_PREFIX, _LOCK = "s3ec-work-", "lock"
# Between the making of a folder and its lock lies less.
_UNLOCKED_S = 3600.0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a base is made.

    Attributes:
        grace_s: How long what it supersedes is kept, by the server's clock.
        folder: Where a folder for temporary files may be made; None for the system's place. At
            most 42 bytes for each entry of the deltas, and for each object that is listed.
        clock: Seconds since the epoch.
        report: Told how far it is.
    """

    grace_s: float = GRACE_S
    folder: Path | None = None
    clock: Callable[[], float] = time.time
    report: Report = unreported


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a compaction or a rebuild did.

    Attributes:
        head: The base that readers use now.
        merged: Deltas that went into it; 0 where a compaction had nothing to do.
        removed: Old objects deleted.
        corrupt: Deltas that are unusable or could not be read, and were left where they are: ULID
            to what is wrong.
        waiting: Deltas that were left for later because of these.
    """

    head: BaseManifest
    merged: int
    removed: int
    corrupt: Mapping[str, str] = field(default_factory=dict)
    waiting: Set[str] = frozenset()


@contextmanager
def temporary_folder(parent: Path | None, *names: str) -> Iterator[Path]:
    """A folder for one piece of work; those of processes that were killed are removed first.

    Args:
        parent: Where; None for the system's place.
        names: Of folders to make in it.

    Raises:
        TierError: It cannot be made.
    """
    with ExitStack() as stack:
        try:
            place = Path(parent or tempfile.gettempdir())
            _sweep(place)
            runtime.keep_files(f"{os.path.realpath(place)}/{_PREFIX}")
            folder = _locked_folder(place, stack)
            for name in names:
                (folder / name).mkdir()
        except OSError as exc:
            raise TierError(f"cannot make a folder for temporary files: {exc}") from exc
        yield folder


@asynccontextmanager
async def in_temporary_folder(parent: Path | None, *names: str) -> AsyncIterator[Path]:
    """As temporary_folder, for a loop, which waits for no disk."""
    made = temporary_folder(parent, *names)
    folder = await asyncio.to_thread(made.__enter__)
    try:
        yield folder
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


def _locked_folder(place: Path, stack: ExitStack) -> Path:
    """Make a folder that nobody sweeps before the stack ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        # Not by TemporaryDirectory, which would do it at the end of a forked child, too.
        stack.callback(weakref.finalize(stack, _remove, folder, runtime.process_number))
        lock = stack.enter_context((folder / _LOCK).open("wb"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have had the lock a moment sooner, and swept it.
        if (folder / _LOCK).exists():
            return folder


def _remove(folder: Path, process: int) -> None:
    if process == runtime.process_number:
        # A thread of a cancelled piece of work may still be writing there.
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove what others of this user left; a large compaction that was killed leaves 500 MB."""
    for folder in place.glob(_PREFIX + "*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
                _remove_dead(folder)


def _remove_dead(folder: Path) -> None:
    """Remove it where nobody holds its lock, which the kernel lets go with the process."""
    try:
        fd = take_lock(folder / _LOCK)
    except BlockingIOError:
        return
    if fd is None:  # made just now, or half removed
        if time.time() - folder.lstat().st_mtime > _UNLOCKED_S:
            shutil.rmtree(folder)
        return
    try:
        # Under the lock: who has just made the folder waits for it, and sees that it is gone.
        shutil.rmtree(folder)
    finally:
        os.close(fd)


# A run without a head may be one that is being written. So long after its last file it is taken
# for a dead compaction's, and a live one has given up long before.
ABANDONED_S = 86400.0
_LONGEST_S = ABANDONED_S / 2


async def write_base(
    writer: BaseWriter, between: Callable[[int, int], Awaitable[Rows]], max_entries: int
) -> None:
    """Write all shards of a base, one in memory at a time.

    Args:
        writer: A fresh one.
        between: Gives the rows of a range of leading bytes; asked in rising order.
        max_entries: At least as many as there are.

    Raises:
        S3ECError: That of the writer or of ``between``; what was written is deleted then.
    """
    try:
        ranges = shard_ranges(max_entries)
        for number, (first, last) in enumerate(ranges):
            writer.report("writing shards", number, len(ranges))
            await writer.add(first, last, await between(first, last))
    except S3ECError:  # or each of an elected writer's attempts would stay for a day
        await writer.discard()
        raise


class BaseWriter:
    """One attempt to become version N of the base.

    Nothing that it writes is seen by readers before ``commit``; of several writers of one version
    the one whose head is first wins.

    Args:
        store: The bucket.
        layout: The namespace.
        version: To become.
        options: How the base is made.

    Attributes:
        nbytes: Bytes of all files written so far.
        report: Told how far it is.

    Raises:
        CorruptEntryError: There is no such version (``reason`` is ``version``).
    """

    def __init__(self, store: Store, layout: Layout, version: int, options: BuildOptions) -> None:
        if version > MAX_VERSION:  # its name would sort before, and no reader know it
            raise CorruptEntryError(
                f"{layout.head(MAX_VERSION)} leaves no version for another base, so somebody made "
                "it up; delete it, and run `s3ec manifest rebuild`",
                reason="version",
            )
        self.nbytes = 0
        self.report = options.report
        self._store = store
        self._layout = layout
        self._version = version
        self._clock = options.clock
        self._started_s = options.clock()
        self._run = secrets.token_hex(8)
        self._shards: list[Shard] = []
        self._names: list[str] = []

    async def add(self, first: int, last: int, rows: Rows) -> None:
        """Write one shard and its filter; ranges in rising order, from 0 to 255.

        Raises:
            UnavailableError: The store does not answer now.
            AccessError: It refuses.
        """
        layout, namespace = self._layout, self._layout.namespace
        segment = await asyncio.to_thread(lambda: list(encode_segment(rows, namespace)))
        segment_blob = await self._put(layout.shard(self._version, self._run, first, last), segment)
        del segment
        bloom = await asyncio.to_thread(
            lambda: list(build_bloom(rows.digest_hi, rows.digest_lo, namespace))
        )
        bloom_blob = await self._put(layout.bloom(self._version, self._run, first, last), bloom)
        self._shards.append(Shard(first, last, len(rows), segment_blob, bloom_blob))

    async def _put(self, name: str, pieces: list[bytes | memoryview]) -> BaseFile:
        blob = await asyncio.to_thread(BaseFile.of, pieces)
        self._names.append(name)
        # Nobody else makes this name: where it is taken, the reply to our own put was lost.
        with suppress(ConflictError):
            await self._store.put_if_absent(name, pieces)
        self.nbytes += blob.nbytes
        return blob

    async def commit(self, merged: Collection[str]) -> BaseManifest | None:
        """Make this the base that readers use, unless another became this version first.

        Args:
            merged: ULIDs of the deltas that are in it and may still be in the bucket.

        Returns:
            None where another one was first; what this one wrote is deleted then, or by the next
            clean-up.

        Raises:
            UnavailableError: The store does not answer, or this took so long that the shards may
                have been deleted meanwhile. Whether it is committed is unknown then.
            AccessError: The store refuses.
        """
        head = BaseManifest(
            version=self._version,
            run=self._run,
            created_s=int(self._clock()),
            entries=sum(shard.entries for shard in self._shards),
            shards=tuple(self._shards),
            merged=frozenset(merged),
        )
        if self._clock() - self._started_s > _LONGEST_S:
            await self.discard()
            raise UnavailableError("writing the base took half a day; start again")
        try:
            await self._store.put_if_absent(
                self._layout.head(self._version), [await asyncio.to_thread(head.to_json)]
            )
        except ConflictError:
            if not await self._is_committed():
                await self.discard()
                return None
        # Heads that were superseded for long are deleted, and the name of one is free again.
        return None if await self._is_behind() else head

    async def _is_committed(self) -> bool:
        """Whether the head that is in the way is ours: the reply to it may have been lost."""
        found = await read_head(self._store, self._layout, self._version)
        if found is None:
            raise UnavailableError(f"{self._layout.head(self._version)} is there and is not")
        return found.run == self._run

    async def _is_behind(self) -> bool:
        """Whether there is a newer head; a clean-up deletes ours then."""
        async for info in self._store.list(self._layout.heads):
            if (self._layout.version_of(info.name) or 0) > self._version:
                return True
        return False

    async def discard(self) -> None:
        """Delete what was written; what cannot be deleted now is left to a later clean-up."""
        try:
            await in_parallel(self._names, self._store.delete)
        except (AccessError, UnavailableError):
            return


async def clean(store: Store, layout: Layout, *, grace_s: float = GRACE_S) -> int:
    """Delete what has been superseded for ``grace_s`` by the server's clock.

    A base is old once another head has been there for so long, and a delta is done with once such
    a head and the newest one contain it. A run without a head goes where it cannot become a base
    any more, or after a day. Costs one listing where nothing could be due.

    Returns:
        Objects deleted; 0 also where this identity may not delete, which is logged.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: Listing or reading is refused.
        CorruptEntryError: The newest head is unusable.
    """
    # Listed after what was committed last, so that the head that counts is among it.
    snapshot = await take_snapshot(store, layout)
    heads = await _read_heads(store, layout, snapshot)
    if not _due(snapshot, heads, math.inf, grace_s) and len(snapshot.heads) < 2:
        return 0
    try:
        now_s = await server_time(store)
        due = [info.name for info in _due(snapshot, heads, now_s, grace_s)]
        await in_parallel(due, store.delete)
        # Last: without its head a base would look like one that is being written.
        old = [info.name for info in _old_heads(snapshot, now_s, grace_s)]
        await in_parallel(old, store.delete)
    except AccessError as exc:
        log.warning("old files of the index stay in the bucket: %s", exc)
        return 0
    return len(due) + len(old)


async def _read_heads(
    store: Store, layout: Layout, snapshot: ManifestListing
) -> dict[int, BaseManifest]:
    """All heads that can be read; the newest one must be."""
    newest = await newest_head(store, layout, snapshot)
    heads = {} if newest is None else {newest.version: newest}

    async def read(version: int) -> None:
        with suppress(CorruptEntryError):
            head = await read_head(store, layout, version)
            if head is not None:
                heads[version] = head

    await in_parallel(snapshot.heads.keys() - heads.keys(), read)
    return heads


def _due(
    snapshot: ManifestListing, heads: dict[int, BaseManifest], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Shards, filters and deltas that may be deleted at this time of the server's clock."""
    settled = _settled(snapshot, now_s, grace_s)
    due: list[ObjectInfo] = []
    for (version, run), files in snapshot.runs.items():
        if version > snapshot.version:
            # It may be being written, and it may still become a base.
            unused = _are_older(files, now_s, ABANDONED_S)
        elif version < settled:
            unused = True
        else:
            # What is not the run of its version's head never will be: that name is taken.
            lost = version in heads and heads[version].run != run
            unused = lost and _are_older(files, now_s, grace_s)
        if unused:
            due += files
    if settled in heads:
        done = heads[settled].merged & heads[snapshot.version].merged
        due += [snapshot.deltas[ulid] for ulid in sorted(done & snapshot.deltas.keys())]
    return due


def _old_heads(snapshot: ManifestListing, now_s: float, grace_s: float) -> list[ObjectInfo]:
    settled = _settled(snapshot, now_s, grace_s)
    return [info for version, info in snapshot.heads.items() if version < settled]


def _settled(snapshot: ManifestListing, now_s: float, grace_s: float) -> int:
    """The newest version that has been there for so long, 0 where none has."""
    settled = (v for v, info in snapshot.heads.items() if _are_older([info], now_s, grace_s))
    return max(settled, default=0)


def _are_older(files: Sequence[ObjectInfo], now_s: float, age_s: float) -> bool:
    """Whether all of these are older than ``age_s``; False where the store tells no time."""
    return all(info.modified_s > 0 and now_s - info.modified_s > age_s for info in files)


async def server_time(store: Store) -> float:
    """The server's clock, from a throwaway object; 0 where it does not say.

    Raises:
        AccessError: This identity may not write or delete.
        UnavailableError: The store does not answer now.
    """
    name = probe_name()
    await store.delete(name)  # whoever may not delete leaves nothing behind
    try:
        with suppress(ConflictError):  # our own first attempt, whose reply was lost
            await store.put_if_absent(name, [b"s3ec asked what time it is here; can be deleted\n"])
        info = await store.head(name)
    finally:
        await store.delete(name)
    return info.modified_s if info else 0.0

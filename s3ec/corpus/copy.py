# SPDX-License-Identifier: Apache-2.0
"""Copies the entries of a namespace from one store into another: buckets, folders, namespaces.

``s3ec cp`` does that between two corpora, and ``transfer.py`` exports and imports by it. Every byte
that passes this process is checked before it is written. Where both buckets are of one server and
the namespace stays, the server copies by itself.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from s3ec import codec
from s3ec.corpus.corpus import ATTEMPTS
from s3ec.corpus.entries import CorpusEntry, read_entry, read_header, scan
from s3ec.corpus.selection import CopyOptions, Transferred, Wanted
from s3ec.counters import Counters, unreported
from s3ec.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    UnavailableError,
)
from s3ec.fetch import ByteBudget
from s3ec.identity import (
    DESCRIPTOR_BYTES,
    Key,
    Layout,
    Namespace,
    digest_of_name,
    make_key,
)
from s3ec.index.child import in_process
from s3ec.index.delete import find_objects
from s3ec.index.deltas import Announcer
from s3ec.index.listing import BATCH, FEW, list_objects
from s3ec.index.local import NodeFolder
from s3ec.index.maker import newest_rows
from s3ec.index.reader import ManifestIndex
from s3ec.modality import ModalityRecords, Record
from s3ec.namespaces import differences
from s3ec.runtime import await_in_thread
from s3ec.safetensors_file import plain_json
from s3ec.store.base import NoSpaceError, ObjectInfo, Store
from s3ec.store.concurrency import Pace, in_parallel
from s3ec.store.retry import RetryStore

if TYPE_CHECKING:
    from s3ec.settings import Settings
    from s3ec.store.botocore_s3 import BotocoreStore

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 2 * 2**30
"""Nothing larger is copied: it is in memory as a whole. A video of ten minutes has less."""
INFLIGHT_BYTES = 256 * 2**20
"""Entries in memory at a time; a larger one goes alone."""
# Each was tried five times by then. So many in a row are an outage, and no bad entries.
_OUTAGE = 32
_SHOWN_DIFFERENCES = 5
# An announcement takes no longer where the bucket answers at all.
_FLUSH_S = 60.0


# -- where from ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """An entry whose every byte was checked.

    Attributes:
        header: As it is stored.
        pieces: The whole object.
        data: The values in it.
    """

    header: codec.Header
    pieces: Sequence[bytes | memoryview]
    data: memoryview


class Origin(Protocol):
    """What is copied from."""

    async def count(self) -> int | None:
        """About how many entries there are; None where that is not known."""
        ...

    def batches(self) -> AsyncGenerator[Sequence[CorpusEntry], None]:
        """The wanted entries. To be closed."""
        ...

    @property
    def asked(self) -> Mapping[str, str]:
        """What is asked for by name, as Wanted has it."""
        ...

    async def read(self, entry: CorpusEntry) -> Content | None:
        """An entry; None where it is gone.

        Raises:
            CorruptEntryError: It is not what it should be.
        """
        ...


class NamespaceOrigin:
    """A namespace of any store.

    Args:
        fits: Whether the target can hold an entry of this name; the others are skipped.

    Attributes:
        skipped: How many were.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        wanted: Wanted,
        *,
        fits: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self._layout = layout
        self._wanted = wanted
        self._fits = fits
        self.skipped = 0

    @property
    def asked(self) -> Mapping[str, str]:
        return self._wanted.names or {}

    async def count(self) -> int | None:
        if self._wanted.names is not None:
            return len(self._wanted.names)
        return await newest_rows(self._store, self._layout) if self._wanted.is_all else None

    async def batches(self) -> AsyncGenerator[Sequence[CorpusEntry], None]:
        async with aclosing(self._listed()) as listing:
            async for entries in listing:
                wanted = [entry for entry in entries if self._wanted.has(entry.name)]
                fitting = [entry for entry in wanted if self._fits(entry.name)]
                self.skipped += len(wanted) - len(fitting)
                yield fitting

    async def _listed(self) -> AsyncGenerator[Sequence[CorpusEntry], None]:
        names = self._wanted.names
        if names is None or len(names) > FEW:
            async with aclosing(
                scan(self._store, self._layout.namespace, adapter=self._wanted.adapter)
            ) as batches:
                async for entries in batches:
                    yield entries
            return
        keys = [Key("", name, digest_of_name(name)) for name in names if self._wanted.has(name)]
        found = await find_objects(self._store, self._layout, keys)
        objects, namespace = self._layout.objects, self._layout.namespace
        every = [
            CorpusEntry(namespace, info.name.removeprefix(objects), info.nbytes, info.modified_s)
            for info in found.values()
            if info is not None
        ]
        for start in range(0, len(every), BATCH):
            yield every[start : start + BATCH]

    async def read(self, entry: CorpusEntry) -> Content | None:
        embedding = await read_entry(self._store, entry, unreported, header_first=False)
        if embedding is None:
            return None
        return Content(embedding.header, [embedding.file], embedding.data)


# -- where to --------------------------------------------------------------------------------------


class Target(Protocol):
    """What is copied into."""

    async def prepare(self, names: Collection[str]) -> None:
        """See what is there: entries of these names, or all where there are none."""
        ...

    async def has(self, entry: CorpusEntry, *, deep: bool) -> bool:
        """Whether an entry is there already.

        Raises:
            CorruptEntryError: It is there and bad, and nothing is ever replaced.
        """
        ...

    async def write(self, entry: CorpusEntry, content: Content) -> codec.Header | None:
        """Write an entry; returns its header as it is stored, None where it was there.

        Raises:
            CorruptEntryError: It cannot be stored here.
        """
        ...

    async def settle(self, entries: Mapping[CorpusEntry, codec.Header | None]) -> int:
        """Tell readers of entries that are there, with their headers where those are known.

        Returns:
            How many of them are news.
        """
        ...


class NamespaceTarget:
    """A namespace of any store. Nothing in it is ever replaced.

    Memory: about 150 bytes for each entry that is there.

    Args:
        store: One that honours conditional writes, or looks before it writes.
        same_bytes: Entries are copied as they are, so that another size is another entry.
    """

    def __init__(self, store: Store, layout: Layout, *, same_bytes: bool) -> None:
        self._store = store
        self._layout = layout
        self._same_bytes = same_bytes
        self._records = ModalityRecords(store, layout)
        self._nbytes: dict[bytes, int] = {}
        self._readers: _Readers | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[NamespaceTarget]:
        """Read the index, for as long as entries are copied.

        Raises:
            UnavailableError, AccessError: The store does not answer, or refuses.
            TierError: The folder for temporary files is full.
        """
        async with _telling(self._store, self._layout) as self._readers:
            yield self

    async def prepare(self, names: Collection[str]) -> None:
        if 0 < len(names) <= FEW:
            keys = [Key("", name, digest_of_name(name)) for name in names]
            found = await find_objects(self._store, self._layout, keys)
            self._add(filter(None, found.values()))
            return
        async with aclosing(list_objects(self._store, self._layout)) as batches:
            async for infos in batches:
                self._add(infos)

    def _add(self, infos: Iterable[ObjectInfo]) -> None:
        for info in infos:
            name = info.name.removeprefix(self._layout.objects)
            self._nbytes[digest_of_name(name)] = info.nbytes

    async def has(self, entry: CorpusEntry, *, deep: bool) -> bool:
        nbytes = self._nbytes.get(digest_of_name(entry.name))
        if nbytes is None:
            return False
        looks_good = nbytes == entry.nbytes or not self._same_bytes
        if (deep or not looks_good) and not await self._is_good(entry, deep=deep):
            raise _bad_there()
        return True

    async def _is_good(self, entry: CorpusEntry, *, deep: bool = True) -> bool:
        info = await self._store.head(self._layout.objects + entry.name)
        if info is None or info.nbytes > MAX_ENTRY_BYTES:
            return False
        there = CorpusEntry(self._layout.namespace, entry.name, info.nbytes, info.modified_s)
        try:
            if deep:
                found = await read_entry(self._store, there, unreported, header_first=False)
                return found is not None
            return await read_header(self._store, there) is not None
        except CorruptEntryError:
            return False

    async def write(self, entry: CorpusEntry, content: Content) -> codec.Header | None:
        header, pieces = content.header, content.pieces
        if header.namespace != self._layout.namespace:
            header = replace(header, namespace=self._layout.namespace)
            front = codec.encode_header(header)
            header = replace(header, data_start=len(front))
            pieces = [front, content.data]
        await self.require_record(header)
        try:
            await self._store.put_if_absent(self._layout.objects + entry.name, pieces)
        except ConflictError:
            # Somebody was faster, or it is a file that a power cut left empty.
            if await self._is_good(entry):
                return None
            raise _bad_there() from None
        return header

    async def require_good(self, entry: CorpusEntry) -> None:
        """Read what the server copied a moment ago, and delete it where it is bad.

        Raises:
            CorruptEntryError: It was.
        """
        if not await self._is_good(entry):
            await self._store.delete(self._layout.objects + entry.name)
            raise CorruptEntryError("its copy is bad, and was deleted again", reason="checksum")

    async def require_record(self, header: codec.Header) -> None:
        """Refuse an entry that is not as wide, or of the type, that the namespace has on record.

        Raises:
            CorruptEntryError: It is not. No engine would take it.
        """
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._records.settle(header.modality, mine)
        if record != mine:
            raise CorruptEntryError(
                f"its width is {mine.width} and its type {mine.dtype}, and the namespace "
                f"has {record.width} and {record.dtype} for {header.modality}",
                reason="shape",
            )

    async def settle(self, entries: Mapping[CorpusEntry, codec.Header | None]) -> int:
        if self._readers is None:
            raise RuntimeError("the target is not open")
        stored: dict[Key, int] = {}
        present: dict[Key, int] = {}
        for entry, header in entries.items():
            digest = digest_of_name(entry.name)
            key = Key("", entry.name, digest)
            if header is None:
                present[key] = self._nbytes.get(digest, entry.nbytes)
            else:
                stored[key] = header.total_bytes or entry.nbytes
        return await self._readers.tell(stored, present)


def _bad_there() -> CorruptEntryError:
    return CorruptEntryError(
        "what is there is bad, and nothing is replaced; `s3ec verify --deep --repair` deletes it",
        reason="checksum",
    )


class _Readers:
    """Tells the readers of a namespace of entries that they do not know; see ``_telling``."""

    def __init__(self, index: ManifestIndex, announcer: Announcer) -> None:
        self._index = index
        self._announcer = announcer

    async def tell(self, stored: dict[Key, int], present: dict[Key, int]) -> int:
        """Announce entries with the sizes of their objects; returns how many.

        Args:
            stored: Stored a moment ago. Announced whatever the index holds: a listing that began
                before may not have seen them.
            present: There before. Those that the index holds are left out.

        Raises:
            UnavailableError: The store took no announcement for a minute.
        """
        known = self._index.is_announced
        news = stored | {key: nbytes for key, nbytes in present.items() if not known(key)}
        confirmed: list[bool] = []
        for key, nbytes in news.items():
            self._announcer.add(key, nbytes, confirmed.append)
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._announcer.flush()
        except TimeoutError:
            self._announcer.close()
        if not all(confirmed):
            raise UnavailableError(
                f"{len(news)} entries are stored, and readers could not be told; run it again"
            )
        return len(news)


@asynccontextmanager
async def _telling(store: Store, layout: Layout) -> AsyncIterator[_Readers]:
    """Reads what the index holds, for as long as readers are told.

    Raises:
        UnavailableError, AccessError: The store does not answer, or refuses.
        TierError: The folder for temporary files is full.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = ManifestIndex(
            *(store, layout, NodeFolder(Path(folder))),
            jobs=in_process(store),
            disk=await_in_thread,
            counters=Counters(),
        )
        announcer = Announcer(store, layout, Counters())
        try:
            await index.refresh(now=True)
            yield _Readers(index, announcer)
        finally:
            announcer.close()
            await index.close()


class ServerCopies:
    """Has the server of two buckets copy entries by itself.

    The header of each is read first, which is one request for 16 KiB. Values are not looked at
    unless ``deep``: a damaged entry is then damaged in both buckets, as readers find out.

    States: able, until the server refuses to copy from the other bucket; then unable for good.
    """

    def __init__(
        self, store: BotocoreStore, source: Store, from_: Settings, layout: Layout
    ) -> None:
        self._store = store
        self._retried = RetryStore(store, Counters(), attempts=ATTEMPTS)
        self._source = source
        self._bucket = from_.bucket
        self._root = f"{from_.prefix}/" if from_.prefix else ""
        self._layout = layout
        self._look_first = True
        self._tried = False
        self.is_able = True

    async def copy(self, entry: CorpusEntry, target: NamespaceTarget) -> codec.Header:
        """Copy one entry.

        Raises:
            ConflictError: The name is taken.
            AccessError: The server does not copy for these credentials.
            CorruptEntryError: The entry has no usable header, is gone, or the copy differs.
        """
        found = await read_header(self._source, entry)
        if found is None or found.header is None:
            raise CorruptEntryError("it is gone", reason="length")
        await target.require_record(found.header)
        name = self._layout.objects + entry.name
        await self._ask(entry, name)
        if not self._tried:
            self._tried = True
            await self._try_condition(entry, name)
        return found.header

    async def _try_condition(self, entry: CorpusEntry, name: str) -> None:
        """Find out whether the server obeys the condition on a copy: the same one once more."""
        try:
            await self._store.copy_from(
                self._bucket, self._root + entry.object_name, name, look_first=False
            )
        except ConflictError:
            self._look_first = False
        except (AccessError, UnavailableError, CorruptEntryError) as exc:
            log.debug("each copy is preceded by a look: %s", exc)

    async def _ask(self, entry: CorpusEntry, name: str) -> None:
        key, look_first = self._root + entry.object_name, self._look_first
        try:
            await self._retried.ask(
                "copy_from",
                name,
                lambda: self._store.copy_from(self._bucket, key, name, look_first=look_first),
            )
        except AccessError:
            self.is_able = False
            raise


def server_of(
    store: Store, target: Settings, source_store: Store, source: Settings, layout: Layout
) -> ServerCopies | None:
    """What copies between two buckets by itself; None where nothing does.

    Args:
        store: The target's, without a wrapper.
    """
    from s3ec.store.botocore_s3 import BotocoreStore

    same = ("endpoint_url", "region", "profile")
    if not isinstance(store, BotocoreStore) or source.url or target.url:
        return None
    if any(getattr(source, name) != getattr(target, name) for name in same):
        return None
    return ServerCopies(store, source_store, source, layout)


# -- the work --------------------------------------------------------------------------------------


class Copying:
    """One run over all wanted entries.

    States of an entry: listed; present, where the target has it; else read, checked, written, and
    then told to readers, with up to a thousand others. One that fails has a reason in the result,
    and the others go on. What is listed again by a later run is present, and told if it was not:
    so whatever breaks this off, the next run goes on there.

    Attributes:
        result: What became of them.
        there: Keys of those that the target has, and the size of the object; 0 where that was
            not looked at.
    """

    def __init__(
        self,
        origin: Origin,
        target: Target,
        options: CopyOptions,
        result: Transferred,
        by_server: ServerCopies | None = None,
    ) -> None:
        self._origin = origin
        self._target = target
        self._options = options
        self._by_server = by_server
        self._pace = Pace(options.rate_limit_bytes_per_s)
        self._memory = ByteBudget(INFLIGHT_BYTES)
        self._total: int | None = None
        self._done = 0
        self._in_a_row = 0
        self._fresh: dict[CorpusEntry, codec.Header | None] = {}
        self.result = result
        self.there: dict[bytes, int] = {}

    async def run(self) -> None:
        """Copy all; what was copied is told also where this is broken off.

        Raises:
            NoSpaceError: The disk is full.
            UnavailableError, AccessError: One of the stores does not answer, or refuses all.
        """
        self._total = await self._origin.count()
        await self._target.prepare(self._origin.asked)
        async with aclosing(self._origin.batches()) as batches:
            async for entries in batches:
                await self._copy(entries)
        for name, text in self._origin.asked.items():
            label = CorpusEntry("", name, 0, 0.0).label
            if digest_of_name(name) not in self.there and label not in self.result.failures:
                self.result.failures[text] = "it is not there"

    async def _copy(self, entries: Sequence[CorpusEntry]) -> None:
        try:
            await in_parallel(entries, self._one, width=self._options.max_concurrency)
        except NoSpaceError:
            self._fresh.clear()  # that would need space, too; the next run does it
            raise
        finally:
            fresh, self._fresh = self._fresh, {}
            if fresh:
                self.result.announced += await self._target.settle(fresh)

    async def _one(self, entry: CorpusEntry) -> None:
        await self._memory.take(entry.nbytes)
        try:
            await self._try(entry)
            self._in_a_row = 0
        except NoSpaceError:
            raise
        except (CorruptEntryError, UnavailableError, AccessError) as exc:
            self.result.failures[entry.label] = str(exc)
            if isinstance(exc, CorruptEntryError):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                is_general = isinstance(exc, AccessError) and exc.is_general
                if is_general or self._in_a_row >= _OUTAGE:
                    raise
        finally:
            self._memory.free(entry.nbytes)
        self._done += 1
        self._options.report("copying", self._done, self._total)

    async def _try(self, entry: CorpusEntry) -> None:
        if await self._target.has(entry, deep=self._options.deep):
            self._note(entry, None, is_new=False)
            return
        if entry.nbytes > MAX_ENTRY_BYTES:
            raise CorruptEntryError(f"{entry.nbytes} bytes, more than any entry has", reason="size")
        await self._pace.take(entry.nbytes)
        if self._by_server is not None and self._by_server.is_able:
            with suppress(AccessError):  # other credentials may read the source
                await self._have_copied(self._by_server, entry)
                return
        content = await self._origin.read(entry)
        if content is None:
            raise CorruptEntryError("it is gone", reason="length")
        header = await self._target.write(entry, content)
        self._note(entry, header, is_new=header is not None)

    async def _have_copied(self, server: ServerCopies, entry: CorpusEntry) -> None:
        target = self._target
        if not isinstance(target, NamespaceTarget):
            raise TypeError("servers copy into namespaces only")
        try:
            header = await server.copy(entry, target)
        except ConflictError:
            self._note(entry, None, is_new=False)
            return
        if self._options.deep:
            await target.require_good(entry)
        self.result.by_server += 1
        self._note(entry, header, is_new=True)

    def _note(self, entry: CorpusEntry, header: codec.Header | None, *, is_new: bool) -> None:
        self._fresh[entry] = header
        self.there[digest_of_name(entry.name)] = header.total_bytes if header else 0
        if is_new:
            self.result.copied += 1
            self.result.nbytes += entry.nbytes
        else:
            self.result.present += 1


# -- a whole namespace -----------------------------------------------------------------------------


async def copy_namespace(
    places: Places,
    wanted: Wanted,
    options: CopyOptions,
    *,
    same_encoder: bool = False,
    by_server: ServerCopies | None = None,
) -> Transferred:
    """Copy the wanted entries of one namespace, its records and its rows of the catalogue.

    Args:
        same_encoder: Go on where the two namespaces differ: the caller knows that the embeddings
            are the same.
        by_server: What copies between the two without us.

    Raises:
        ConfigError: The namespaces differ, or one has no descriptor.
        UnavailableError, AccessError: A store does not answer, or refuses. What was copied stays,
            and the next call goes on from there.
        TierError: The folder for temporary files is full.
    """
    await _agree(places, same_encoder=same_encoder)
    result = Transferred(places.layout.namespace, places.to_layout.namespace)
    is_same = places.layout == places.to_layout
    origin = NamespaceOrigin(places.source, places.layout, wanted)
    target = NamespaceTarget(places.target, places.to_layout, same_bytes=is_same)
    async with target.open():
        copying = Copying(origin, target, options, result, by_server if is_same else None)
        await copying.run()
    await _copy_catalog(places, copying.there, result)
    return result


@dataclass(frozen=True, slots=True)
class Places:
    """Two namespaces, each in a store; the second store honours conditional writes."""

    source: Store
    layout: Layout
    target: Store
    to_layout: Layout


async def _copy_catalog(places: Places, there: Mapping[bytes, int], result: Transferred) -> None:
    """Append those rows of entries that were copied which are news to the other catalogue.

    A document that it has from another source, of another picture, stays what it is there.
    """
    from s3ec.corpus.catalog import append_rows, list_parts, read_table
    from s3ec.corpus.catalog_file import to_rows

    if not there or not await list_parts(places.source, places.layout):
        return
    try:
        theirs = await read_table(places.source, places.layout)
        known = {
            (row.document, row.page, row.modality): (row.stored_s, row.uri, row.sha256)
            for row in to_rows(await read_table(places.target, places.to_layout))
        }
        news, kept = [], []
        for row in to_rows(theirs):
            key = make_key(row.identifier)
            if key is None or key.digest not in there:
                continue
            mine = known.get((row.document, row.page, row.modality))
            if mine is not None and row.uri != mine[1] and row.sha256 != mine[2]:
                kept.append(row.document)
            elif mine is None or mine[0] < row.stored_s:
                news.append(replace(row, nbytes=there[key.digest] or row.nbytes))
        if kept:
            result.failures["catalog"] = (
                f"{len(kept)} rows are left out, since their document is another file of another "
                f"source there: {kept[0]!r:.200}"
            )
        await append_rows(places.target, places.to_layout, news)
    except (CorruptEntryError, ConfigError) as exc:  # its parts, or the extra is missing
        result.failures["catalog"] = str(exc)
        return
    result.catalogued = len(news)


async def _agree(places: Places, *, same_encoder: bool) -> None:
    """Make sure that the embeddings of the one namespace are those of the other.

    Where the other is not there yet, and is the same, it is begun: with its descriptor.
    """
    theirs = await _descriptor(places.source, places.layout)
    there = await _descriptor(places.target, places.to_layout)
    if places.layout == places.to_layout:
        if theirs is None and there is None:
            raise ConfigError(
                f"{places.layout.descriptor} is not there, so nobody can tell of which model these "
                "entries are; export or copy them anew",
                field="namespace",
            )
        if theirs is not None and there is None:
            with suppress(ConflictError):
                await places.target.put_if_absent(places.to_layout.descriptor, [theirs.to_json()])
        return
    if there is None:
        raise ConfigError(
            f"there is no {places.to_layout.descriptor} to copy into; start an engine of that "
            "model with this bucket first",
            field="to_namespace",
        )
    if same_encoder:
        return
    found = differences(there.descriptor, theirs.descriptor if theirs else {})
    lines = "".join(f"\n  {line}" for line in found[:_SHOWN_DIFFERENCES])
    raise ConfigError(
        f"{places.layout.namespace} and {places.to_layout.namespace} are of different models; "
        "say that their encoders are the same (`same_encoder`, `--same-encoder`) if you know that "
        f"the embeddings are equal:{lines}",
        field="same_encoder",
    )


async def _descriptor(store: Store, layout: Layout) -> Namespace | None:
    """The descriptor of a namespace; None where there is none.

    Raises:
        ConfigError: It is not that of this namespace.
    """
    try:
        body = await store.get(layout.descriptor, max_bytes=DESCRIPTOR_BYTES)
        if body is None:
            return None
        content = plain_json(bytes(body).decode("utf-8"))
        found = Namespace.from_descriptor(content if isinstance(content, dict) else {})
    except (CorruptEntryError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{layout.descriptor} is unusable; restore it from a copy", field="namespace"
        ) from exc
    if found.name != layout.namespace:
        raise ConfigError(
            f"{layout.descriptor} is that of {found.name}; restore it from a copy",
            field="namespace",
        )
    return found

# SPDX-License-Identifier: Apache-2.0
"""Copies a corpus to and from a folder, for sites without a network; and from a folder of vLLM's.

The folder has the names of the bucket, so that ``url: file:///FOLDER`` serves it as it is. vLLM's
folder is that of its ECExampleConnector (0.32): a folder for each content hash with one file, which
does not name model, modality or checksum.

Every byte is checked between reading and writing. Existing entries are skipped, and nothing is ever
replaced, so the next run completes one that was interrupted. At the end a listing becomes the
index, by which readers find the entries. In a folder each file appears whole or not at all, by a
rename, since memory sticks have no hard links. No symbolic link is followed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from s3ec import codec
from s3ec.corpus.bucket import ATTEMPTS
from s3ec.corpus.entries import (
    MAX_ENTRY_BYTES,
    CorpusEntry,
    Outage,
    entries_of,
    read_entry,
    read_header,
    scan,
)
from s3ec.counters import Counters, Report, unreported
from s3ec.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from s3ec.fetch import ByteBudget
from s3ec.identity import Key, Layout, Namespace, digest_of_name, make_key
from s3ec.index.delete import find_objects
from s3ec.index.listing import BATCH, listed
from s3ec.index.maker import newest_rows, rebuild
from s3ec.modality import ModalityRecords, Record
from s3ec.namespaces import read_namespaces
from s3ec.store.base import NoSpaceError, Store, Wrapper
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import open_store
from s3ec.store.retry import RetryStore
from s3ec.tenant import Tenant
from s3ec.tier.files import is_temp_name, write_file

if TYPE_CHECKING:
    from s3ec.corpus.catalog_file import CatalogRow
    from s3ec.settings import Settings

# Bytes of entries in memory at a time; a larger entry is copied alone.
_INFLIGHT_BYTES = 256 * 2**20
# vllm/distributed/ec_transfer/ec_connector/example_connector.py of 0.32.
_EXAMPLE = re.compile(r"([0-9a-f]{64})/encoder_cache\.safetensors")
_EXAMPLE_NAME = "encoder_cache.safetensors"


@dataclass(slots=True)
class Transferred:
    """The counts and the failures of a copy.

    Attributes:
        namespace: Of the entries.
        copied: Entries that were written now.
        nbytes: Their size.
        present: Entries that the target had before.
        skipped: Files of vLLM's layout whose folder is no content hash.
        catalogued: Rows of the catalogue that were new in the target.
        failures: Entries that could not be copied, by label or by the caller's name, and why.
    """

    namespace: str
    copied: int = 0
    nbytes: int = 0
    present: int = 0
    skipped: int = 0
    catalogued: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``complete``; ``partial`` if some could not be copied; ``failed`` if none could."""
        if not self.failures:
            return "complete"
        return "partial" if self.copied + self.present else "failed"


async def export(
    store: Store,
    layout: Layout,
    folder: Path,
    *,
    settings: Settings,
    keys: Mapping[str, Key] | None = None,
    report: Report = unreported,
) -> Transferred:
    """Copy entries of a namespace into a folder; see Corpus.export.

    Args:
        keys: The keys of the entries to copy, by the caller's names; None for all.
    """
    await asyncio.to_thread(_begin, folder, layout)
    async with _opened(folder, settings, writes=True) as target:
        result = await _copy_namespace(store, target, layout, settings, keys, report)
    # The files have their names; this writes their bytes to the disk, which may be pulled out.
    await asyncio.to_thread(os.sync)
    return result


async def import_folder(
    folder: Path,
    store: Store,
    layout: Layout,
    *,
    settings: Settings,
    report: Report = unreported,
) -> Transferred:
    """Copy a namespace from a folder; see Corpus.import_from.

    Args:
        store: The bucket, which honours conditional writes or checks before it writes.
        settings: Of the bucket's corpus.
    """
    async with _opened(folder, settings) as source:
        return await _copy_namespace(source, store, layout, settings, None, report)


async def import_example(
    folder: Path,
    store: Store,
    layout: Layout,
    *,
    modality: str,
    settings: Settings,
    report: Report = unreported,
) -> Transferred:
    """Copy a folder in vLLM's layout; see Corpus.import_example.

    Shape, type and finite numbers are checked, and compared with the namespace's record.

    Args:
        store, settings: As for import_folder.
    """
    async with _opened(folder, settings) as source:
        origin = _ExampleSource(source, layout, modality, Tenant.read(settings.tenant_key))
        copying = _Copying(store, layout, origin.read, settings, report)
        await copying.run(origin.entries(), None)
        copying.result.skipped = origin.skipped
    if not origin.found:
        raise NotFoundError(f"{folder} holds no HASH/{_EXAMPLE_NAME}; name a folder of that layout")
    await rebuild(store, layout, report=report)
    return copying.result


# -- the copy --------------------------------------------------------------------------------------

# An entry whose every byte was checked: its header, and the whole object in our layout.
_Checked = tuple[codec.Header, Sequence[bytes | memoryview]]


class _Copying:
    """One run over the entries to copy. Nothing in the target is ever replaced.

    An entry ends as present, as copied, or as a failure with its reason; a failure does not stop
    the others.

    Args:
        target: A store that honours conditional writes, or checks before it writes.
        read: Reads an entry of the source, and checks it; None if it is gone. Raises
            CorruptEntryError if it is bad.

    Attributes:
        result: The counts and failures so far.
        there: Digests of the entries that the target has now.
    """

    def __init__(
        self,
        target: Store,
        layout: Layout,
        read: Callable[[CorpusEntry], Awaitable[_Checked | None]],
        settings: Settings,
        report: Report,
    ) -> None:
        self._target = target
        self._layout = layout
        self._read = read
        self._records = ModalityRecords(target, layout)
        self._report = report
        self._width = settings.max_concurrency
        self._memory = ByteBudget(_INFLIGHT_BYTES)
        self._outage = Outage()
        self._done = 0
        self.result = Transferred(layout.namespace)
        self.there: set[bytes] = set()

    async def run(
        self, batches: AsyncGenerator[Sequence[CorpusEntry], None], total: int | None
    ) -> None:
        """Copy all entries.

        Args:
            batches: The entries; ``run`` closes it.
            total: About how many there are, for the report.

        Raises:
            NoSpaceError: The disk is full.
            UnavailableError, AccessError: A store does not answer, or refuses every request.
        """
        self._total = total
        async with aclosing(batches):
            async for entries in batches:
                await in_parallel(entries, self._copy, width=self._width)

    async def _copy(self, entry: CorpusEntry) -> None:
        await self._memory.take(entry.nbytes)
        try:
            is_new = await self._copy_if_absent(entry)
        except NoSpaceError:
            raise
        except (CorruptEntryError, UnavailableError, AccessError) as exc:
            self.result.failures[entry.label] = str(exc)
            if self._outage.ends_with(exc):
                raise
        else:
            self._outage.ends_with(None)
            self.there.add(digest_of_name(entry.name))
            self.result.copied += is_new
            self.result.present += not is_new
            self.result.nbytes += entry.nbytes if is_new else 0
        finally:
            self._memory.free(entry.nbytes)
        self._done += 1
        self._report("copying", self._done, self._total)

    async def _copy_if_absent(self, entry: CorpusEntry) -> bool:
        """Copy an entry; False if the target has it already."""
        name = self._layout.objects + entry.name
        info = await self._target.head(name)
        if info is not None:
            if info.nbytes != entry.nbytes:
                await self._require_good(entry, info.nbytes)
            return False
        if entry.nbytes > MAX_ENTRY_BYTES:
            raise CorruptEntryError(f"{entry.nbytes} bytes, more than any entry has", reason="size")
        checked = await self._read(entry)
        if checked is None:
            raise CorruptEntryError("it is gone", reason="length")
        header, pieces = checked
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._records.settle(header.modality, mine)
        if record != mine:  # no engine would take it
            raise CorruptEntryError(
                f"its width is {mine.width} and its type {mine.dtype}, and the namespace "
                f"has {record.width} and {record.dtype} for {header.modality}",
                reason="shape",
            )
        try:
            await self._target.put_if_absent(name, pieces)
        except ConflictError:  # another process was faster, or it is an empty file
            info = await self._target.head(name)
            await self._require_good(entry, 0 if info is None else info.nbytes)
            return False
        return True

    async def _require_good(self, entry: CorpusEntry, nbytes: int) -> None:
        """Check the header of an existing entry: a power cut may have left half of it."""
        with suppress(CorruptEntryError):
            if await read_header(self._target, replace(entry, nbytes=nbytes)) is not None:
                return
        raise CorruptEntryError(
            "what is there is bad, and nothing is replaced; `s3ec verify --deep --repair` deletes "
            "it",
            reason="checksum",
        )


async def _copy_namespace(
    source: Store,
    target: Store,
    layout: Layout,
    settings: Settings,
    keys: Mapping[str, Key] | None,
    report: Report,
) -> Transferred:
    """Copy entries, the descriptor, the records and the catalogue's rows; then list the target."""
    await _agree(source, target, layout)

    async def read(entry: CorpusEntry) -> _Checked | None:
        found = await read_entry(source, entry, unreported)
        return None if found is None else (found.header, [found.file])

    copying = _Copying(target, layout, read, settings, report)
    result = copying.result
    if keys is None:
        await copying.run(scan(source, layout.namespace), await newest_rows(source, layout))
    else:
        await copying.run(_entries_of(source, layout, [*keys.values()]), len(keys))
        for text, key in keys.items():
            label = CorpusEntry("", key.name, 0, 0.0).label
            if key.digest not in copying.there and label not in result.failures:
                result.failures[text] = "it is not there"
    await _copy_rows(source, target, layout, copying.there, result)
    await rebuild(target, layout, report=report)
    return result


async def _entries_of(
    source: Store, layout: Layout, keys: Sequence[Key]
) -> AsyncGenerator[Sequence[CorpusEntry], None]:
    """Find those of some entries that exist."""
    for start in range(0, len(keys), BATCH):
        found = await find_objects(source, layout, keys[start : start + BATCH])
        yield list(entries_of(layout, filter(None, found.values())))


async def _agree(source: Store, target: Store, layout: Layout) -> None:
    """Check that both sides hold the namespace of that name; create it in the target if absent.

    Raises:
        ConfigError: No descriptor tells the model, or it is of another namespace.
    """
    theirs, there = await _descriptor(source, layout), await _descriptor(target, layout)
    if theirs and not there:
        with suppress(ConflictError):  # another process was faster, or the object is unusable
            body = Namespace.from_descriptor(theirs).to_json()
            await target.put_if_absent(layout.descriptor, [body])
        there = await _descriptor(target, layout)
    if not there:
        raise ConfigError(
            f"{layout.descriptor} is not there, or is unusable, so nobody can tell of which model "
            "these entries are; restore it from a copy",
            field="namespace",
        )


async def _descriptor(store: Store, layout: Layout) -> Mapping[str, Any]:
    """Read a namespace's descriptor; empty if there is none that can be used."""
    [about] = await read_namespaces(store, [layout.namespace])
    if not about.descriptor:
        return {}
    try:
        name = Namespace.from_descriptor(about.descriptor).name
    except ConfigError:
        name = "no model"
    if name != layout.namespace:
        raise ConfigError(
            f"{layout.descriptor} is that of {name}; restore it from a copy", field="namespace"
        )
    return about.descriptor


async def _copy_rows(
    source: Store, target: Store, layout: Layout, there: Set[bytes], result: Transferred
) -> None:
    """Append rows of copied entries that are missing in the target's catalogue."""
    from s3ec.corpus.catalog import CatalogWriter, list_parts, read_table
    from s3ec.corpus.catalog_file import to_rows

    if not there or not await list_parts(source, layout):
        return
    try:
        known = {_key_of_row(row) for row in to_rows(await read_table(target, layout))}
        news = []
        for row in to_rows(await read_table(source, layout)):
            key = make_key(row.identifier)
            if key is not None and key.digest in there and _key_of_row(row) not in known:
                news.append(row)
        await CatalogWriter(target, layout).append(news)
        result.catalogued = len(news)
    except (CorruptEntryError, ConfigError) as exc:  # its parts, or pyarrow is missing
        result.failures["catalog"] = str(exc)


def _key_of_row(row: CatalogRow) -> tuple[object, ...]:
    return row.document, row.page, row.modality, row.uri


# -- the folder ------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(
    folder: Path, settings: Settings, *, writes: bool = False
) -> AsyncGenerator[Store, None]:
    bare = open_store(folder_settings(folder, settings))
    store = RetryStore(_Renaming(bare, folder) if writes else bare, Counters(), attempts=ATTEMPTS)
    try:
        yield store
    finally:
        await store.close()


def folder_settings(folder: Path, settings: Settings) -> Settings:
    """Make the settings of a corpus in an existing folder, from those of another corpus.

    Raises:
        ConfigError: It is no folder, or its path cannot be a corpus.
    """
    from pydantic import ValidationError

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that an export made", field="folder")
    try:
        return type(settings).model_validate(
            {
                "url": folder.resolve().as_uri(),
                "max_concurrency": settings.max_concurrency,
                "tenant_key": settings.tenant_key,
            }
        )
    except ValidationError as exc:
        raise ConfigError(
            f"{str(folder)!r:.200} cannot be a corpus; take a folder whose path has printable "
            "characters and at most 512 bytes",
            field="folder",
        ) from exc


def _begin(folder: Path, layout: Layout) -> None:
    """Make a folder, and remove temporary files of killed exports. No link is followed.

    An export that runs at the same time writes the files again that it loses by this.

    Raises:
        TierError: The folder cannot be made, or is none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise TierError(
            f"cannot write {folder}: {exc.strerror}; name a folder that this user may write to"
        ) from exc
    ours = folder / layout.namespace
    for above, _, names in os.walk(ours) if not ours.is_symlink() else ():
        for name in filter(is_temp_name, names):
            with suppress(OSError):
                os.unlink(os.path.join(above, name))


class _Renaming(Wrapper):
    """A folder in which files appear by a rename, after a check; it needs no hard links.

    If two processes write one name at once, the later one wins: an entry has the same bytes.
    """

    def __init__(self, inner: Store, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        if await self.head(name) is not None:  # which follows no symbolic link either
            raise ConflictError(f"PUT {name}: it is there already")
        try:
            await asyncio.to_thread(self._write, self._folder / name, body)
        except OSError as exc:
            said = f"{self._folder / name}: {exc.strerror}"
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError(f"{said}: the disk is full; free some of it") from exc
            raise UnavailableError(said) from exc

    @staticmethod
    def _write(path: Path, body: Sequence[bytes | memoryview]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, body)


# -- vLLM's layout ---------------------------------------------------------------------------------


class _ExampleSource:
    """A folder in vLLM's layout, as entries of a namespace.

    Args:
        layout: Of the namespace whose entries these are.
        modality: Of all of them.
        tenant: The tenant whose secret is in their names.

    Attributes:
        found: Files of this layout.
        skipped: Files whose folder is no content hash.
    """

    def __init__(self, store: Store, layout: Layout, modality: str, tenant: Tenant | None) -> None:
        self._store = store
        self._layout = layout
        self._modality = modality
        self._tenant = tenant
        self._keys: dict[str, Key] = {}  # by the object's name
        self.found = self.skipped = 0

    async def entries(self) -> AsyncGenerator[Sequence[CorpusEntry], None]:
        """All entries, in batches. The caller closes it."""
        batch: list[CorpusEntry] = []
        async for info in listed(self._store, ""):
            if not info.name.endswith(f"/{_EXAMPLE_NAME}"):
                continue
            self.found += 1
            match = _EXAMPLE.fullmatch(info.name)
            if match is None or (key := make_key(match[1], self._tenant)) is None:
                self.skipped += 1
                continue
            self._keys[key.name] = key
            batch.append(
                CorpusEntry(self._layout.namespace, key.name, info.nbytes, info.modified_s)
            )
            if len(batch) == BATCH:
                yield batch
                batch = []
        yield batch

    async def read(self, entry: CorpusEntry) -> _Checked | None:
        """Read an entry in our layout; None if it is gone."""
        key = self._keys[entry.name]
        name = f"{key.identifier}/{_EXAMPLE_NAME}"
        blob = await self._store.get(name, max_bytes=entry.nbytes)
        if blob is None:
            return None
        shape, data = await asyncio.to_thread(_example_tensor, bytes(blob))
        if not codec.is_finite(data, shape.dtype):
            raise CorruptEntryError(f"{name}: the tensor holds NaN or infinity", reason="nonfinite")
        header = codec.Header(
            identifier=key.stored,
            namespace=self._layout.namespace,
            modality=self._modality,
            shape=shape,
            checksum=codec.checksum(data),
            placeholder=None,
        )
        return header, [codec.encode_header(header), data]


def _example_tensor(file: bytes) -> tuple[codec.Shape, memoryview]:
    """The shape and the values of a file with one tensor.

    Raises:
        CorruptEntryError: The file has not one tensor of rows and width, of an embedding's type.
    """
    try:
        [(name, tensor)] = safetensors.deserialize(file)  # type: ignore[no-untyped-call]
        rows, width = tensor["shape"]
        dtype = codec.DTYPES[tensor["dtype"]][0]
    except safetensors.SafetensorError as exc:
        raise CorruptEntryError(f"no safetensors file: {exc}", reason="header") from exc
    except (ValueError, KeyError) as exc:
        raise CorruptEntryError(
            f"not one tensor `{codec.TENSOR_NAME}` of rows and width in bfloat16, float16 or "
            "float32",
            reason="header",
        ) from exc
    shape = codec.Shape(rows, width, dtype)
    if name != codec.TENSOR_NAME or not 0 < shape.nbytes <= codec.MAX_TENSOR_BYTES:
        raise CorruptEntryError("another tensor, or a shape without values", reason="shape")
    return shape, memoryview(tensor["data"]).toreadonly()

# SPDX-License-Identifier: Apache-2.0
"""A corpus to and from a folder, for sites without a network: our layout, and vLLM's.

Ours has the names of the bucket, so that ``url: file:///FOLDER`` serves it as it is. vLLM's is that
of its ECExampleConnector (0.32): a folder for each content hash with one file in it, which says
nothing of model, modality or checksum.

Each file appears whole or not at all: the store of ``file`` URLs writes beside it and links, and
where the file system has no links (those of memory sticks) it is renamed. What a killed export
leaves beside is removed by the next one. No symbolic link is followed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec import codec
from s3ec.corpus.copy import (
    MAX_ENTRY_BYTES,
    Content,
    Copying,
    NamespaceOrigin,
    NamespaceTarget,
    Places,
    copy_namespace,
)
from s3ec.corpus.corpus import ATTEMPTS
from s3ec.corpus.entries import CorpusEntry
from s3ec.corpus.selection import CopyOptions, Transferred, Wanted
from s3ec.counters import Counters
from s3ec.errors import ConfigError, ConflictError, CorruptEntryError, UnavailableError
from s3ec.identity import OBJECT_SUFFIX, Layout, canonical_json, make_key
from s3ec.index.deltas import list_deltas
from s3ec.index.listing import BATCH, listed
from s3ec.index.maker import rebuild
from s3ec.index.names import SnapshotName, list_snapshots
from s3ec.safetensors_file import plain_json
from s3ec.store.base import NoSpaceError, Store, Wrapper
from s3ec.store.open import PROBE_PREFIX, open_store
from s3ec.store.retry import RetryStore
from s3ec.tenant import Tenant
from s3ec.tier.files import TempFile

if TYPE_CHECKING:
    from s3ec.settings import Settings


# vllm/distributed/ec_transfer/ec_connector/example_connector.py of 0.32.
_EXAMPLE = re.compile(r"([0-9a-f]{64})/encoder_cache\.safetensors")
_EXAMPLE_NAME = "encoder_cache.safetensors"
# What a file system says that has no hard links (FAT).
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
# obstore's names for what it is still writing, and ours.
_UNFINISHED = re.compile(r"\.(?:safetensors|json|parquet)#\d+$|^\.tmp-[0-9a-f]{16}$")
_CONTENT_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})" + re.escape(OBJECT_SUFFIX))
_ALIGNMENT = 8  # what the safetensors library asks for


# -- the folder ------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(
    folder: Path, settings: Settings, *, has_links: bool = True
) -> AsyncIterator[Store]:
    bare = open_store(folder_settings(folder, settings))
    plain = bare if has_links else _Renaming(bare, folder)
    store = RetryStore(plain, Counters(), attempts=ATTEMPTS)
    try:
        yield store
    finally:
        await store.close()


def folder_settings(folder: Path, settings: Settings) -> Settings:
    """The settings of a corpus in a folder that is there, beside those of another corpus.

    Raises:
        ConfigError: It is no folder, or its path cannot be a corpus.
    """
    from pydantic import ValidationError

    from s3ec.settings import Settings

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that an export made", field="folder")
    try:
        return Settings.model_validate(
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


@asynccontextmanager
async def _for_writing(folder: Path, ours: str) -> AsyncIterator[bool]:
    """Make a folder, keep other exports away, and remove what a killed one left.

    Args:
        ours: Pattern of the folders in it that exports write to; what else lies there is not ours.

    Yields:
        Whether its file system has hard links.

    Raises:
        ConfigError: It cannot be made, or is no folder.
        ConflictError: Another export writes into it.
    """
    fd = await asyncio.to_thread(_open_folder, folder)
    try:
        await asyncio.to_thread(_sweep, folder, ours)
        yield await asyncio.to_thread(_has_links, folder)
        # The files have their names; this brings their bytes to the disk, which may be pulled out.
        with suppress(OSError):
            await asyncio.to_thread((folder / PROBE_PREFIX).rmdir)
        await asyncio.to_thread(os.sync)
    finally:
        os.close(fd)


def _open_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            f"{folder}: {exc.strerror}; name a folder that this user may write to", field="folder"
        ) from exc
    try:
        # Where the file system has no locks on folders, nobody is kept away.
        with suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise ConflictError(
                    f"another export writes into {folder}; wait for it, or stop it"
                ) from exc
    except BaseException:
        os.close(fd)
        raise
    return fd


def _has_links(folder: Path) -> bool:
    try:
        with TempFile(str(folder), private=False) as file:
            link = f"{file.path}-link"
            os.link(file.path, link)
            os.unlink(link)
    except OSError as exc:
        return exc.errno not in _NO_LINK  # what else is wrong, the first entry will tell
    return True


class _Renaming(Wrapper):
    """A folder without hard links, for the only one who writes there: looks, and renames."""

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
        with TempFile(str(path.parent), private=False) as file:
            file.append(body)
            file.close()
            os.replace(file.path, path)
            file.is_named = True


def _sweep(folder: Path, ours: str) -> None:
    """Remove what killed exports left. Links stay: what they lead to is not ours."""
    for below in folder.glob(ours):
        if below.is_symlink():
            continue
        for above, _, names in os.walk(below):
            for name in filter(_UNFINISHED.search, names):
                with suppress(OSError):
                    os.unlink(os.path.join(above, name))


# -- out -------------------------------------------------------------------------------------------


async def export(
    store: Store,
    layout: Layout,
    folder: Path,
    wanted: Wanted,
    options: CopyOptions,
    *,
    form: str,
    settings: Settings,
) -> Transferred:
    """Copy the wanted entries of a namespace into a folder.

    Args:
        form: ``s3ec`` or ``vllm``.
        settings: Of the corpus.

    Raises:
        ConfigError: The folder cannot be made, or holds another corpus of that name.
        ConflictError: Another export writes there.
        NoSpaceError: Its disk is full. What was copied stays.
        UnavailableError, AccessError, TierError: As copy_namespace.
    """
    ours = "[0-9a-f]" * 64 if form == "vllm" else layout.namespace
    async with (
        _for_writing(folder, ours) as has_links,
        _opened(folder, settings, has_links=has_links) as target,
    ):
        if form == "vllm":
            origin = NamespaceOrigin(
                store, layout, wanted, fits=lambda name: _CONTENT_NAME.fullmatch(name) is not None
            )
            result = Transferred(layout.namespace)
            await Copying(origin, ExampleTarget(target), options, result).run()
            result.skipped = origin.skipped
            return result
        places = Places(store, layout, target, layout)
        result = await copy_namespace(places, wanted, options)
        snapshots = await list_snapshots(target, layout)
        newest = snapshots[0][0] if snapshots else SnapshotName()
        if any(ulid >= newest.ulid for ulid in await list_deltas(target, layout, newest)):
            await rebuild(target, layout, report=options.report)
        return result


class ExampleTarget:
    """A folder in vLLM's layout. Only entries under a content hash have a place in it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._nbytes: dict[str, int] = {}

    async def prepare(self, names: Collection[str]) -> None:
        async for info in listed(self._store, ""):
            self._nbytes[info.name] = info.nbytes

    async def has(self, entry: CorpusEntry, *, deep: bool) -> bool:
        name = self._name(entry)
        nbytes = self._nbytes.get(name)
        if nbytes is None:
            return False
        if deep:
            blob = await self._store.get(name, max_bytes=nbytes)
        else:
            blob = await self._store.get_range(name, 0, 8 + codec.HEADER_LIMIT)
        try:
            shape, start = example_shape(memoryview(blob or b""))
            if start + shape.nbytes != nbytes:
                raise CorruptEntryError(f"{nbytes} bytes", reason="length")
            if deep and blob and not codec.is_finite(memoryview(blob)[start:], shape.dtype):
                raise CorruptEntryError("NaN or infinity", reason="nonfinite")
        except CorruptEntryError as exc:
            raise CorruptEntryError(
                f"{name} is there and unusable ({exc}); remove it", reason=exc.reason
            ) from exc
        return True

    async def write(self, entry: CorpusEntry, content: Content) -> codec.Header | None:
        try:
            front = example_header(content.header.shape)
            await self._store.put_if_absent(self._name(entry), [front, content.data])
        except ConflictError:
            return None
        return content.header

    async def settle(self, entries: Mapping[CorpusEntry, codec.Header | None]) -> int:
        return 0

    @staticmethod
    def _name(entry: CorpusEntry) -> str:
        match = _CONTENT_NAME.fullmatch(entry.name)
        if match is None:
            raise ValueError(f"{entry.name} has no content hash")
        return f"{match[1]}/{_EXAMPLE_NAME}"


# -- in --------------------------------------------------------------------------------------------


async def import_example(
    folder: Path,
    target: Store,
    layout: Layout,
    wanted: Wanted,
    options: CopyOptions,
    *,
    modality: str,
    settings: Settings,
) -> Transferred:
    """Copy entries from a folder in vLLM's layout into a namespace.

    Nothing in such a folder says of which model it is, or whether its values are what they were:
    the caller knows that. Shape, type and finite numbers are checked, and the namespace's record.

    Args:
        modality: Of all of them, such as ``image``.
        settings: Of the corpus.

    Raises:
        ConfigError: There is no such folder.
        UnavailableError, AccessError, TierError: As copy_namespace.
    """
    result = Transferred(to_namespace=layout.namespace)
    into = NamespaceTarget(target, layout, same_bytes=False)
    async with _opened(folder, settings) as source, into.open():
        tenant = Tenant.read(settings.tenant_key)
        origin = ExampleOrigin(source, layout, wanted, modality, tenant)
        await Copying(origin, into, options, result).run()
    result.skipped = origin.skipped
    return result


class ExampleOrigin:
    """A folder in vLLM's layout, as entries of a namespace.

    Attributes:
        skipped: Files whose folder is no content hash.
    """

    def __init__(
        self, store: Store, layout: Layout, wanted: Wanted, modality: str, tenant: Tenant | None
    ) -> None:
        self._store = store
        self._layout = layout
        self._wanted = wanted
        self._modality = modality
        self._tenant = tenant
        self.skipped = 0
        self._hashes: dict[str, str] = {}

    @property
    def asked(self) -> Mapping[str, str]:
        return self._wanted.names or {}

    async def count(self) -> int | None:
        return len(self.asked) or None

    async def batches(self) -> AsyncGenerator[Sequence[CorpusEntry], None]:
        batch: list[CorpusEntry] = []
        async for info in listed(self._store, ""):
            match = _EXAMPLE.fullmatch(info.name)
            key = make_key(match[1], self._tenant) if match else None
            if match is None or key is None:
                self.skipped += info.name.endswith(f"/{_EXAMPLE_NAME}")
            elif self._wanted.has(key.name):
                self._hashes[key.name] = match[1]
                name, namespace = key.name, self._layout.namespace
                batch.append(CorpusEntry(namespace, name, info.nbytes, info.modified_s))
            if len(batch) == BATCH:
                yield batch
                batch = []
        yield batch

    async def read(self, entry: CorpusEntry) -> Content | None:
        content_hash = self._hashes[entry.name]
        name = f"{content_hash}/{_EXAMPLE_NAME}"
        blob = await self._store.get(name, max_bytes=min(entry.nbytes, MAX_ENTRY_BYTES))
        if blob is None:
            return None
        view = memoryview(blob).toreadonly()
        shape, start = example_shape(view)
        data = view[start:]
        if len(data) != shape.nbytes:
            raise CorruptEntryError(
                f"{name}: {len(data)} bytes of tensor, expected {shape.nbytes}", reason="length"
            )
        if not codec.is_finite(data, shape.dtype):
            raise CorruptEntryError(f"{name}: the tensor holds NaN or infinity", reason="nonfinite")
        key = make_key(content_hash, self._tenant)
        header = codec.Header(
            identifier=key.stored if key else "",
            namespace=self._layout.namespace,
            modality=self._modality,
            shape=shape,
            checksum=codec.checksum(data),
            placeholder=None,
        )
        front = codec.encode_header(header)
        return Content(replace(header, data_start=len(front)), [front, data], data)


# -- one file of vLLM's layout ---------------------------------------------------------------------


def example_header(shape: codec.Shape) -> bytes:
    """What stands in front of the values, as the safetensors library reads it."""
    body = canonical_json({codec.TENSOR_NAME: codec.tensor_entry(shape)}).encode()
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    return struct.pack("<Q", len(body)) + body


def example_shape(blob: memoryview) -> tuple[codec.Shape, int]:
    """The shape in the front of a file, and where its values begin.

    Raises:
        CorruptEntryError: Not a file with one tensor of rows and width, of a type that embeddings
            have.
    """
    if len(blob) < 8:
        raise CorruptEntryError("too short", reason="length")
    (length,) = struct.unpack("<Q", blob[:8])
    if length > codec.HEADER_LIMIT or 8 + length > len(blob):
        raise CorruptEntryError("its header is longer than it may be", reason="header")
    try:
        content = plain_json(bytes(blob[8 : 8 + length]).decode("utf-8"))
        names = content.keys() - {"__metadata__"}
        tensor: dict[str, Any] = content[codec.TENSOR_NAME]
        rows, width = tensor["shape"]
        dtype = codec.DTYPES[tensor["dtype"]][0]
        plain = all(type(number) is int and number > 0 for number in (rows, width))
        offsets = tensor["data_offsets"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptEntryError(
            f"no tensor `{codec.TENSOR_NAME}` of rows and width in bfloat16, float16 or float32",
            reason="header",
        ) from exc
    if not plain or names != {codec.TENSOR_NAME}:
        raise CorruptEntryError("more than one tensor, or a shape without values", reason="shape")
    shape = codec.Shape(rows, width, dtype)
    if offsets != [0, shape.nbytes] or shape.nbytes > codec.MAX_TENSOR_BYTES:
        raise CorruptEntryError("shape and length of its tensor disagree", reason="shape")
    return shape, 8 + length

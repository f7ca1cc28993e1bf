# SPDX-License-Identifier: Apache-2.0
"""The entries of a corpus: find, list and read them, with every byte checked."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from s3ec import codec
from s3ec.counters import Report, unreported
from s3ec.errors import (
    AccessError,
    AmbiguousError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import (
    OBJECT_SUFFIX,
    Key,
    Layout,
    digest_of_name,
    is_content_hash,
    is_object_name,
    key_of_header,
    make_key,
)
from s3ec.store.base import (
    PART_BYTES,
    Blob,
    ObjectInfo,
    Store,
    VanishedError,
    get_in_parts,
)
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

# The folder of an adapter whose name cannot be a folder's, or must stay secret.
_HASHED_ADAPTER = re.compile(r"[tx]-[0-9a-f]{64}")
# 8 hex digits distinguish four thousand million images, and contain the fan-out folder's name.
_HASH_PREFIX = re.compile(r"(?:(?P<lora>[a-z0-9-]+):)?(?P<mark>[tx]-)?(?P<hex>[0-9a-f]{8,64})")
_SHOWN_MATCHES = 5
MAX_ENTRY_BYTES = 2 * 2**30
"""Jobs refuse larger entries: a whole entry is in memory. A video of ten minutes has less."""
_PARTS_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class CorpusEntry:
    """One stored embedding.

    Attributes:
        namespace: Its namespace.
        name: Of its object, below ``objects/``.
        nbytes: Size of the object.
        modified_s: Last change, seconds since the epoch; 0 if the store does not say.
        header: The entry's header: modality, shape (rows, width), dtype, checksum and placeholder.
            None if it was only listed.
    """

    namespace: str
    name: str
    nbytes: int
    modified_s: float
    header: codec.Header | None = None

    @property
    def object_name(self) -> str:
        """Name of the object, relative to the corpus's prefix."""
        return f"{Layout(self.namespace).objects}{self.name}"

    @property
    def label(self) -> str:
        """Its short name, which ``stat`` and ``get`` take too: the content hash, or ``x-`` or
        ``t-`` and a digest.
        """
        path = PurePosixPath(self.name)
        stem = path.name.removesuffix(OBJECT_SUFFIX)
        return f"{path.parts[0]}:{stem}" if len(path.parts) == 3 else stem

    @property
    def digest(self) -> str:
        """Its key in the index, 32 hex digits."""
        return digest_of_name(self.name).hex()

    @property
    def identifier(self) -> str | None:
        """vLLM's name for it; None if only a digest of the name is known.

        A content hash is in the object's name; a name that a client chose is only in the header.
        Under a ``tenant_key`` the name is not stored at all.
        """
        if self.header is not None:
            key = key_of_header(self.header.identifier, digest_of_name(self.name))
            return key.identifier or None if key else None
        label = self.label
        adapter = label.rpartition(":")[0]
        return label if is_content_hash(label) and not _HASHED_ADAPTER.fullmatch(adapter) else None

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last change; None if the store does not say."""
        return now_s - self.modified_s if self.modified_s else None


@dataclass(frozen=True, slots=True)
class Embedding:
    """One embedding with its bytes, every one of them checked.

    Attributes:
        entry: Its entry, with the header.
        header: Its header, the same as that of the entry.
        file: The whole entry as it is stored, a safetensors file; read-only.
    """

    entry: CorpusEntry
    header: codec.Header
    file: memoryview

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width): one row for each placeholder token."""
        return self.header.shape.rows, self.header.shape.width

    @property
    def dtype(self) -> str:
        """torch's name of the type: ``bfloat16``, ``float16`` or ``float32``."""
        return self.header.shape.dtype

    @property
    def data(self) -> memoryview:
        """The values as bytes: row-major, little-endian, read-only, not copied."""
        return self.file[self.header.data_start :]

    def to_numpy(self) -> npt.NDArray[np.floating[Any]]:
        """The values as an array of shape (rows, width).

        numpy has no bfloat16. Such an embedding becomes float32, which holds each of its values
        exactly: a copy, of twice the bytes. Other types are a read-only view, without a copy.
        """
        import numpy as np

        if self.dtype != "bfloat16":
            kind = "<f2" if self.dtype == "float16" else "<f4"
            return np.frombuffer(self.data, kind).reshape(self.shape)
        # The upper half of a float32 is the same number in bfloat16.
        upper = np.frombuffer(self.data, "<u2").astype("<u4")
        return (upper << 16).view("<f4").reshape(self.shape)

    def to_torch(self) -> torch.Tensor:
        """The values as a tensor of shape (rows, width) and the stored dtype, on the CPU.

        A copy: the tensor owns its memory and may be written to. Needs torch.
        """
        import torch

        values = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype))
        return values.view(self.shape)


async def scan(store: Store, namespace: str) -> AsyncGenerator[Sequence[CorpusEntry], None]:
    """List the entries of a namespace in batches, in no order. The caller closes it."""
    from s3ec.index.listing import list_objects

    layout = Layout(namespace)
    async with aclosing(list_objects(store, layout)) as batches:
        async for infos in batches:
            yield list(entries_of(layout, infos))


def entries_of(layout: Layout, infos: Iterable[ObjectInfo]) -> Iterator[CorpusEntry]:
    """The entries among listed objects; foreign objects are left out."""
    for info in infos:
        name = info.name.removeprefix(layout.objects)
        if is_object_name(name):
            yield CorpusEntry(layout.namespace, name, info.nbytes, info.modified_s)


def is_hash_prefix(text: str) -> bool:
    """True if this may be the beginning of a content hash or of a label."""
    return _HASH_PREFIX.fullmatch(text) is not None


async def find_entry(
    store: Store, namespace: str, wanted: str, tenant: Tenant | None
) -> CorpusEntry | None:
    key = make_key(wanted, tenant)
    if key is not None:
        info = await store.head(Layout(namespace).object(key))
        if info is not None:
            return CorpusEntry(namespace, key.name, info.nbytes, info.modified_s)
    shape = _HASH_PREFIX.fullmatch(wanted)
    return None if shape is None else await _find_by_prefix(store, namespace, wanted, shape)


async def _find_by_prefix(
    store: Store, namespace: str, wanted: str, shape: re.Match[str]
) -> CorpusEntry | None:
    lora = f"{shape['lora']}/" if shape["lora"] else ""
    stem = f"{shape['mark'] or ''}{shape['hex']}"
    layout, found = Layout(namespace), list[CorpusEntry]()
    async for info in store.list(f"{layout.objects}{lora}{shape['hex'][:2]}/{stem}"):
        found += entries_of(layout, [info])
        if len(found) > _SHOWN_MATCHES:
            break
    if len(found) > 1:
        listed = "".join(f"\n  {entry.label}" for entry in found[:_SHOWN_MATCHES])
        more = "\n  ..." if len(found) > _SHOWN_MATCHES else ""
        raise AmbiguousError(f"several entries begin with `{wanted}`:{listed}{more}")
    return found[0] if found else None


async def read_header(store: Store, entry: CorpusEntry) -> CorpusEntry | None:
    """Read and check the header of an entry, by one range request; None if the entry is gone.

    Raises:
        CorruptEntryError: It is not an entry, has another length than its header says, or is a
            copy of another entry.
    """
    blob = await store.get_range(entry.object_name, 0, 8 + codec.HEADER_LIMIT)
    if blob is None:
        return None
    with _naming(entry):
        header = checked_header(blob, entry.namespace, digest_of_name(entry.name))
        if header.total_bytes != entry.nbytes:
            raise CorruptEntryError(
                f"the object has {entry.nbytes} bytes, its header says {header.total_bytes}",
                reason="length",
            )
    return replace(entry, header=header)


async def read_entry(store: Store, entry: CorpusEntry, report: Report) -> Embedding | None:
    """Read a whole entry, and check every byte; of a large one the header is read first."""
    if entry.nbytes > PART_BYTES and await read_header(store, entry) is None:
        return None
    with _naming(entry):
        blob = await download(store, entry.object_name, entry.nbytes, report)
        if blob is None:
            return None
        header = checked_header(blob, entry.namespace, digest_of_name(entry.name))
        view = memoryview(blob).toreadonly()
        codec.check_data(header, view[header.data_start :])
    return Embedding(replace(entry, header=header), header, view)


@contextmanager
def _naming(entry: CorpusEntry) -> Iterator[None]:
    """Put the object's name in front of an error's message."""
    try:
        yield
    except CorruptEntryError as exc:
        raise CorruptEntryError(
            f"corrupt entry {entry.object_name} ({exc.reason}): {exc}", reason=exc.reason
        ) from exc


def checked_header(blob: Blob, namespace: str, digest: bytes) -> codec.Header:
    """Parse an entry's header; refuse it if its identifier does not belong to the object's name.

    Args:
        digest: Of the object's name.
    """
    header = codec.parse_header(blob)
    if key_of_header(header.identifier, digest) is None:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    codec.check_identity(header, namespace=namespace, identifier=header.identifier)
    return header


class Outage:
    """Distinguishes a store that is down, or refuses everything, from bad entries."""

    # Each was tried five times before it counts.
    _MOST_FAILURES = 16

    def __init__(self) -> None:
        self._in_a_row = 0

    def ends_with(self, error: S3ECError | None) -> bool:
        """Note how a request ended; True if further requests are useless."""
        if not isinstance(error, UnavailableError | AccessError):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        is_general = isinstance(error, AccessError) and error.is_general
        return is_general or self._in_a_row >= self._MOST_FAILURES


async def download(
    store: Store, name: str, nbytes: int, report: Report = unreported
) -> Blob | None:
    """Read all bytes of an object; None if absent. A large one is read in ranges, with progress.

    Args:
        nbytes: Its listed size; a larger object is refused (the reason is ``size``).
    """
    if nbytes <= PART_BYTES:
        return await store.get(name, max_bytes=nbytes)
    try:
        whole = await get_in_parts(store, name, nbytes, at_a_time=_PARTS_AT_A_TIME, report=report)
    except VanishedError:
        return None
    return memoryview(whole).toreadonly()


def key_of(text: str, tenant: Tenant | None) -> Key | None:
    """The key of an ID: an identifier as vLLM spells it, a label, or an object's name.

    A label gives the name of the object, whatever the origin of its identifier.

    Returns:
        None if nothing can be stored under it.
    """
    lora, _, stem = text.rpartition(":")
    name = text
    is_label = stem[:2] in ("x-", "t-") or _HASHED_ADAPTER.fullmatch(lora)
    if is_label and not is_object_name(text):  # an object's folder may begin like a label
        folder = f"{lora}/" if lora else ""
        name = f"{folder}{stem.removeprefix('x-').removeprefix('t-')[:2]}/{stem}{OBJECT_SUFFIX}"
    if is_object_name(name):
        return Key("", name, digest_of_name(name))
    return make_key(text, tenant)

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

# The folder of an adapter whose name does not make one, or may not be read.
_HASHED_ADAPTER = re.compile(r"[tx]-[0-9a-f]{64}")
# 8 hex digits tell four thousand million images apart, and name the fan-out folder.
_HASH_PREFIX = re.compile(r"(?:(?P<lora>[a-z0-9-]+):)?(?P<mark>[tx]-)?(?P<hex>[0-9a-f]{8,64})")
_SHOWN_MATCHES = 5
MAX_ENTRY_BYTES = 2 * 2**30
"""Jobs take nothing larger: it is in memory as a whole. A video of ten minutes has less."""
_PARTS_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class CorpusEntry:
    """One stored embedding.

    Attributes:
        namespace: Where it lies.
        name: Of its object, below ``objects/``.
        nbytes: Size of the object.
        modified_s: Last change, seconds since the epoch; 0 where the store does not say.
        header: What the entry says of itself: modality, shape (rows, width), dtype, checksum and
            placeholder. None where it was only listed.
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
        """vLLM's name for it; None where only a digest of that is known.

        A content hash is in the object's name; what a client chose is in the header only. Under a
        ``tenant_key`` it is nowhere.
        """
        if self.header is not None:
            key = key_of_header(self.header.identifier, digest_of_name(self.name))
            return key.identifier or None if key else None
        label = self.label
        adapter = label.rpartition(":")[0]
        return label if is_content_hash(label) and not _HASHED_ADAPTER.fullmatch(adapter) else None

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last change, None where the store does not say."""
        return now_s - self.modified_s if self.modified_s else None


@dataclass(frozen=True, slots=True)
class Embedding:
    """One embedding with its bytes, every one of them checked.

    Attributes:
        entry: What it is.
        header: What it says of itself, the same as that of the entry.
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
    """The entries of a namespace, some at a time, in no order. To be closed."""
    from s3ec.index.listing import list_objects

    layout = Layout(namespace)
    async with aclosing(list_objects(store, layout)) as batches:
        async for infos in batches:
            yield list(entries_of(layout, infos))


def entries_of(layout: Layout, infos: Iterable[ObjectInfo]) -> Iterator[CorpusEntry]:
    """Those of listed objects that are entries; foreign objects are left out."""
    for info in infos:
        name = info.name.removeprefix(layout.objects)
        if is_object_name(name):
            yield CorpusEntry(layout.namespace, name, info.nbytes, info.modified_s)


def is_hash_prefix(text: str) -> bool:
    """Whether this may be the beginning of a content hash or of a label."""
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
    """The entry with its checked header, by one range request; None where it is gone.

    Raises:
        CorruptEntryError: Not an entry, of another length than it says, or a copy of another.
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
    """A whole entry, every byte of it checked; of a large one the header first."""
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
    """Put the object's name in front of what is wrong with it."""
    try:
        yield
    except CorruptEntryError as exc:
        raise CorruptEntryError(
            f"corrupt entry {entry.object_name} ({exc.reason}): {exc}", reason=exc.reason
        ) from exc


def checked_header(blob: Blob, namespace: str, digest: bytes) -> codec.Header:
    """Refuse an entry that lies where its own identifier does not belong.

    Args:
        digest: Of the object's name.
    """
    header = codec.parse_header(blob)
    if key_of_header(header.identifier, digest) is None:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    codec.check_identity(header, namespace=namespace, identifier=header.identifier)
    return header


class Outage:
    """Tells a store that is down, or that refuses everything, from entries that are bad."""

    # Each was tried five times by then.
    _MOST_FAILURES = 16

    def __init__(self) -> None:
        self._in_a_row = 0

    def ends_with(self, error: S3ECError | None) -> bool:
        """Note how a request ended; True if no further one is worth it."""
        if not isinstance(error, UnavailableError | AccessError):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        is_general = isinstance(error, AccessError) and error.is_general
        return is_general or self._in_a_row >= self._MOST_FAILURES


async def download(
    store: Store, name: str, nbytes: int, report: Report = unreported
) -> Blob | None:
    """All bytes of an object. A large one comes by ranges, so that its progress is seen.

    Args:
        nbytes: Its size, as it was listed; what is larger is refused (the reason is ``size``).
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

    A label says where its entry lies, whoever gave its identifier.

    Returns:
        None where nothing can be stored under it.
    """
    lora, _, stem = text.rpartition(":")
    name = text
    is_label = stem[:2] in ("x-", "t-") or _HASHED_ADAPTER.fullmatch(lora)
    if is_label and not is_object_name(text):  # whose folder may begin so, too
        folder = f"{lora}/" if lora else ""
        name = f"{folder}{stem.removeprefix('x-').removeprefix('t-')[:2]}/{stem}{OBJECT_SUFFIX}"
    if is_object_name(name):
        return Key("", name, digest_of_name(name))
    return make_key(text, tenant)

# SPDX-License-Identifier: Apache-2.0
"""What the look-around commands ask of a corpus: which namespace, which entry, which bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from s3ec import codec
from s3ec.counters import Counters
from s3ec.doctor.namespaces import list_namespaces
from s3ec.errors import ConfigError, CorruptEntryError, S3ECError
from s3ec.identity import OBJECT_SUFFIX, Layout, digest_of_name, entry_name, key_of_header, make_key
from s3ec.settings import Settings
from s3ec.store.base import Blob, Store
from s3ec.store.open import require_conditional_put, with_conditional_put
from s3ec.store.retry import RetryOptions, RetryStore
from s3ec.tenant import Tenant

T = TypeVar("T")

# 8 hex digits tell four thousand million images apart, and name the fan-out folder.
_PREFIX = re.compile(
    r"(?:(?P<lora>[a-z0-9-]+):)?(?P<mark>[tx]-)?(?P<hex>[0-9a-f]{8,64})(?P<revision>\.r[1-9])?"
)
_SHOWN_MATCHES = 5
# Of each request: commands that send thousands should not end with the first that fails.
_ATTEMPTS = 5


class NotFoundError(S3ECError):
    """The namespace or entry that was asked for is not in the bucket."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored embedding, as listed; its content is not known yet.

    Attributes:
        namespace: Where it lies.
        name: Below ``objects/``.
        nbytes: Size of the object.
        modified_s: Last change, seconds since the epoch, 0 where the store does not say.
    """

    namespace: str
    name: str
    nbytes: int
    modified_s: float

    @property
    def object_name(self) -> str:
        """Name relative to the store's prefix."""
        return f"{Layout(self.namespace).objects}{self.name}"

    @property
    def label(self) -> str:
        """What ``s3ec stat`` accepts: the content hash, or ``x-`` or ``t-`` and a digest;
        ``.r1`` behind it is the first revision.
        """
        path = PurePosixPath(self.name)
        stem = path.name.removesuffix(OBJECT_SUFFIX)
        return f"{path.parts[0]}:{stem}" if len(path.parts) == 3 else stem

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last change, None where the store does not say."""
        return now_s - self.modified_s if self.modified_s else None


def with_store(settings: Settings, call: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store, run one coroutine with it and close it again."""

    async def run() -> T:
        from s3ec.store.open import open_store

        store = open_store(settings)
        try:
            return await call(store)
        finally:
            await store.close()

    return asyncio.run(run())


def with_manifest(
    settings: Settings,
    namespace: str | None,
    call: Callable[[Store, Layout], Awaitable[T]],
    *,
    write: bool = False,
    compacts: bool = False,
) -> T:
    """Run one coroutine on a namespace, with a store that asks again where one answer fails.

    Args:
        namespace: As for choose_namespace.
        write: Find out first whether the server honours conditional writes.
        compacts: Do nothing where it does not.

    Raises:
        NotFoundError, ConfigError: As choose_namespace.
        ConfigError: See ``compacts``.
    """

    async def run(bare: Store) -> T:
        store: Store = RetryStore(bare, Counters(), options=RetryOptions(attempts=_ATTEMPTS))
        layout = Layout(await choose_namespace(store, namespace))
        if compacts:
            await require_conditional_put(store)
        return await call(await with_conditional_put(store) if write else store, layout)

    return with_store(settings, run)


async def choose_namespace(store: Store, wanted: str | None) -> str:
    """The namespace that was named in full or by its beginning, or the only one there is.

    Raises:
        NotFoundError: The bucket has none, or none of that name.
        ConfigError: Several fit; the message lists them.
    """
    names = await list_namespaces(store)
    if wanted in names:
        return wanted
    fitting = [name for name in names if name.startswith(wanted or "")]
    if len(fitting) == 1:
        return fitting[0]
    listed = "".join(f"\n  {name}" for name in fitting or names)
    if fitting:
        raise ConfigError(f"{len(fitting)} namespaces fit; name one of them:{listed}")
    if not names:
        raise NotFoundError("no namespace here yet; check --bucket and --prefix")
    raise NotFoundError(f"no namespace `{wanted}`; there are:{listed}")


async def entries(store: Store, namespace: str, folder: str = "") -> AsyncIterator[Entry]:
    """All entries below a folder of ``objects/``; foreign objects are left out."""
    objects = Layout(namespace).objects
    async for info in store.list(objects + folder):
        name = info.name.removeprefix(objects)
        if entry_name(name) is not None:
            yield Entry(namespace, name, info.nbytes, info.modified_s)


async def find(store: Store, namespace: str, wanted: str, tenant: Tenant | None) -> Entry:
    """The entry of an identifier, or of the beginning of its hash; of several revisions the last.

    Args:
        wanted: An identifier as vLLM spells it, a name as ``s3ec ls`` prints it, or at least
            8 hex digits of a content hash.
        tenant: Whose secret is in the names.

    Raises:
        NotFoundError: Nothing has that name.
        ConfigError: Several entries begin so.
    """
    key = make_key(wanted, tenant)
    if key is not None:
        found = [each async for each in entries(store, namespace, _stem(key.name) + ".")]
        if found:
            return max(found, key=_place)
    shape = _PREFIX.fullmatch(wanted)
    if shape is not None:
        return await _find_by_prefix(store, namespace, wanted, shape)
    raise NotFoundError(
        f"no entry for this identifier in {namespace}; a hash may be cut to 8 or more hex digits"
    )


async def _find_by_prefix(store: Store, namespace: str, wanted: str, shape: re.Match[str]) -> Entry:
    lora = f"{shape['lora']}/" if shape["lora"] else ""
    stem = f"{shape['mark'] or ''}{shape['hex']}{shape['revision'] or ''}"
    last: dict[str, Entry] = {}
    async for entry in entries(store, namespace, f"{lora}{shape['hex'][:2]}/{stem}"):
        name, _ = _place(entry)
        last[name] = max(last.get(name, entry), entry, key=_place)
        if len(last) > _SHOWN_MATCHES:
            break
    found = list(last.values())
    if not found:
        raise NotFoundError(f"no entry begins with `{wanted}` in {namespace}")
    if len(found) > 1:
        listed = "".join(f"\n  {entry.label}" for entry in found[:_SHOWN_MATCHES])
        more = "\n  ..." if len(found) > _SHOWN_MATCHES else ""
        raise ConfigError(f"several entries begin with `{wanted}`:{listed}{more}")
    return found[0]


def _stem(name: str) -> str:
    return name.removesuffix(OBJECT_SUFFIX)


def _place(entry: Entry) -> tuple[str, int]:
    """Name of the entry without its revision, and the revision."""
    return entry_name(entry.name) or (entry.name, 0)


async def read_header(store: Store, entry: Entry) -> codec.Header:
    """The checked header of an entry, by one range request.

    Raises:
        NotFoundError: Deleted meanwhile.
        CorruptEntryError: Not an entry, of another length than it says, or a copy of another.
    """
    blob = await store.get_range(entry.object_name, 0, 8 + codec.HEADER_LIMIT)
    if blob is None:
        raise NotFoundError("the entry was deleted while we looked")
    with _naming(entry):
        header = codec.parse_header(blob)
        _check_place(header, entry)
        if header.total_bytes != entry.nbytes:
            raise CorruptEntryError(
                f"the object has {entry.nbytes} bytes, its header says {header.total_bytes}",
                reason="length",
            )
    return header


@contextmanager
def _naming(entry: Entry) -> Iterator[None]:
    """Put the object's name in front of what is wrong with it."""
    try:
        yield
    except CorruptEntryError as exc:
        raise CorruptEntryError(
            f"corrupt entry {entry.object_name} ({exc.reason}): {exc}", reason=exc.reason
        ) from exc


def _check_place(header: codec.Header, entry: Entry) -> None:
    """Refuse an entry that lies where its own identifier does not belong."""
    if key_of_header(header.identifier, digest_of_name(_place(entry)[0])) is None:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    codec.check_identity(header, namespace=entry.namespace, identifier=header.identifier)


async def read_verified(store: Store, entry: Entry) -> tuple[codec.Header, Blob]:
    """A whole entry, every byte of it checked; its header first, which bounds the download.

    Raises:
        NotFoundError: Deleted meanwhile.
        CorruptEntryError: ``reason`` says what is wrong.
    """
    await read_header(store, entry)
    with _naming(entry):
        blob = await store.get(entry.object_name, max_bytes=entry.nbytes)
        if blob is None:
            raise NotFoundError("the entry was deleted while we looked")
        header = codec.parse_header(blob)
        _check_place(header, entry)
        codec.check_data(header, memoryview(blob)[header.data_start :])
    return header, blob

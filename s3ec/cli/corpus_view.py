# SPDX-License-Identifier: Apache-2.0
"""What the look-around commands ask of a corpus: which namespace, which entry, which bytes."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

from s3ec import codec
from s3ec.cli.errors import AmbiguousError, NotFoundError
from s3ec.cli.options import NamespaceChoice
from s3ec.cli.output import print_note, safe
from s3ec.counters import Counters, Report, unreported
from s3ec.doctor.bucket import mend_endpoint
from s3ec.doctor.namespaces import StoredNamespace, list_namespaces, read_namespaces
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import (
    OBJECT_SUFFIX,
    Layout,
    digest_of_name,
    entry_name,
    is_content_hash,
    key_of_header,
    make_key,
)
from s3ec.index.listing import in_parallel
from s3ec.settings import Settings
from s3ec.store.base import Blob, Store, parts_in_order
from s3ec.store.open import require_conditional_put, with_conditional_put
from s3ec.store.retry import RetryOptions, RetryStore
from s3ec.tenant import Tenant

T = TypeVar("T")

# 8 hex digits tell four thousand million images apart, and name the fan-out folder.
_PREFIX = re.compile(
    r"(?:(?P<lora>[a-z0-9-]+):)?(?P<mark>[tx]-)?(?P<hex>[0-9a-f]{8,64})(?P<revision>\.r1)?"
)
# The folder of an adapter whose name does not make one, or may not be read.
HASHED_ADAPTER = re.compile(r"[tx]-[0-9a-f]{64}")
# What an operating system and HTTP libraries say of a server that cannot be reached at all.
_NOBODY = re.compile(
    r"(connection refused|errno 111|connect call failed)|name or service not known|"
    r"nodename nor servname|name resolution|failed to lookup address|no address associated",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(https?://[^\s\"'?]*)\?[^\s\"']*")
_SHOWN_MATCHES = 5
_SHOWN_CHOICES = 20
# Of each request: commands that send thousands should not end with the first that fails.
_ATTEMPTS = 5
_PART_BYTES = 8 * 2**20
_PARTS_AT_A_TIME = 4


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

    @property
    def identifier(self) -> str | None:
        """vLLM's name for it, where the object's name tells: of a content hash it does."""
        name, _ = _place(self)
        plain = Entry(self.namespace, name, 0, 0).label
        adapter = plain.rpartition(":")[0]
        return plain if is_content_hash(plain) and not HASHED_ADAPTER.fullmatch(adapter) else None

    def document(self, now_s: float) -> dict[str, Any]:
        """What the listing says of it, for ``--json``."""
        return {
            "label": self.label,
            "identifier": self.identifier,
            "digest": digest_of_name(_place(self)[0]).hex(),
            "bytes": self.nbytes,
            "age_s": self.age_s(now_s),
            "object": self.object_name,
        }

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
        except UnavailableError as exc:
            plain = _nobody_answers(exc, settings)
            if plain is None:
                raise
            raise plain from exc
        finally:
            await store.close()

    return asyncio.run(run())


def _nobody_answers(exc: UnavailableError, settings: Settings) -> UnavailableError | None:
    """The same error in the words of ``s3ec doctor``; None where the server did answer, or where
    its own words will do.

    A library repeats the whole request, and does not say that the connection was refused.
    """
    said = []
    seen: BaseException | None = exc
    while seen is not None:
        said.append(str(seen))
        seen = seen.__cause__ or seen.__context__
    found = _NOBODY.search(" ".join(said))
    if exc.status:
        return None
    if found is None:
        text = _QUERY.sub(r"\1", str(exc))
        if text == str(exc):
            return None
        return UnavailableError(f"{text}; {mend_endpoint(settings, '')}")
    reason = "connection refused" if found[1] else "Name or service not known"
    where = settings.endpoint_url or str(settings.corpus)
    return UnavailableError(f"{where}: {reason}; {mend_endpoint(settings, reason)}")


def with_retries(settings: Settings, call: Callable[[Store], Awaitable[T]]) -> T:
    """The same with a store that asks again where one answer fails: for many requests."""

    async def run(bare: Store) -> T:
        return await call(RetryStore(bare, Counters(), options=RetryOptions(attempts=_ATTEMPTS)))

    return with_store(settings, run)


def with_manifest(
    settings: Settings,
    choice: NamespaceChoice,
    call: Callable[[Store, Layout], Awaitable[T]],
    *,
    write: bool = False,
    compacts: bool = False,
) -> T:
    """Run one coroutine on a namespace, with a store that asks again where one answer fails.

    Args:
        choice: As for choose_namespace.
        write: Find out first whether the server honours conditional writes.
        compacts: Do nothing where it does not.

    Raises:
        NotFoundError, AmbiguousError: As choose_namespace.
        ConfigError: See ``compacts``.
    """

    async def run(store: Store) -> T:
        layout = Layout(await choose_namespace(store, choice))
        if compacts:
            await require_conditional_put(store)
        return await call(await with_conditional_put(store) if write else store, layout)

    return with_retries(settings, run)


def namespaces_within(settings: Settings, *, timeout_s: float) -> list[str]:
    """The names of all namespaces.

    Raises:
        TimeoutError: The store took longer.
    """
    return with_store(settings, lambda store: asyncio.wait_for(list_namespaces(store), timeout_s))


async def choose_namespace(store: Store, choice: NamespaceChoice) -> str:
    """The namespace that fits; of several of one model the newest, which a note on stderr names.

    The newest is the one whose ``namespace.json`` was written last: its first producer began last.

    Raises:
        NotFoundError: The bucket has none, or none that fits.
        AmbiguousError: Several models fit, or the store says of none when it was written; the
            message lists the options to choose with.
    """
    names = await list_namespaces(store)
    if not names:
        raise NotFoundError("no namespace here yet; check --bucket and --prefix")
    if choice == NamespaceChoice() and len(names) == 1:
        return names[0]
    if choice.name in names and choice.model is None:
        return choice.name
    found = await read_namespaces(store, names)
    fitting = _fitting(found, choice)
    if len(fitting) == 1:
        return fitting[0].name
    if not fitting:
        raise NotFoundError(f"{_wish(choice)}; take one of these:{_choices(found)}")
    models = {model_of(each) for each in fitting}
    if len(models) == 1:
        newest = await _newest(store, [each.name for each in fitting])
        if newest is not None:
            model = safe(models.pop())
            print_note(f"taking {newest}, the newest of {len(fitting)} namespaces of {model}")
            return newest
    raise AmbiguousError(
        f"{len(fitting)} namespaces fit; add one of these:{_choices(fitting)}", field="namespace"
    )


def model_of(namespace: StoredNamespace) -> str:
    """The model's name, or its readable part in the namespace's where the descriptor is gone."""
    model = namespace.descriptor.get("model")
    return model if isinstance(model, str) else namespace.slug


def _fitting(found: Sequence[StoredNamespace], choice: NamespaceChoice) -> list[StoredNamespace]:
    """Those that the options allow; what is named in full is not ambiguous."""
    begin = choice.name or ""
    left = [each for each in found if each.name == begin]
    left = left or [each for each in found if each.name.startswith(begin)]
    if choice.model is None:
        return left
    wanted = choice.model.casefold()
    named = [each for each in left if wanted in (model_of(each).casefold(), each.slug)]
    return named or [
        each for each in left if wanted in model_of(each).casefold() or wanted in each.slug
    ]


async def _newest(store: Store, names: Sequence[str]) -> str | None:
    """The one that was made last; None where the store says of none when that was."""
    infos = await in_parallel(names, lambda name: store.head(Layout(name).descriptor))
    times_s = [info.modified_s if info else 0.0 for info in infos]
    newest_s = max(times_s)
    return names[times_s.index(newest_s)] if newest_s else None


def _wish(choice: NamespaceChoice) -> str:
    """What was asked for and is not there."""
    asked = [f"{choice.origin} `{choice.name}`"] if choice.name else []
    asked += [f"--model `{choice.model}`"] if choice.model else []
    return f"no namespace fits {' and '.join(asked)}"


def _choices(found: Sequence[StoredNamespace]) -> str:
    """The options to paste, one a line: of each model, and of each namespace."""
    models = sorted({model_of(each) for each in found})
    options = [f"--model {shlex.quote(model)}" for model in models] if len(models) > 1 else []
    options += [f"--namespace {each.name}" for each in found]
    more = len(options) - _SHOWN_CHOICES
    lines = options[:_SHOWN_CHOICES] + [f"and {more} more, see `s3ec ns`"] * (more > 0)
    return "".join(f"\n  {line}" for line in lines)


async def entries(store: Store, namespace: str, folder: str = "") -> AsyncIterator[Entry]:
    """All entries below a folder of ``objects/``; foreign objects are left out."""
    objects = Layout(namespace).objects
    async for info in store.list(objects + folder):
        name = info.name.removeprefix(objects)
        if entry_name(name) is not None:
            yield Entry(namespace, name, info.nbytes, info.modified_s)


async def find(store: Store, namespace: str, wanted: str, tenant: Tenant | None) -> Entry:
    """The entry of an identifier, or of the beginning of its hash; of two revisions the last.

    Args:
        wanted: An identifier as vLLM spells it, a name as ``s3ec ls`` prints it, or at least
            8 hex digits of a content hash.
        tenant: Whose secret is in the names.

    Raises:
        NotFoundError: Nothing has that name.
        AmbiguousError: Several entries begin so.
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
        raise AmbiguousError(f"several entries begin with `{wanted}`:{listed}{more}")
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


async def read_verified(
    store: Store, entry: Entry, *, report: Report = unreported
) -> tuple[codec.Header, Blob]:
    """A whole entry, every byte of it checked; its header first, which bounds the download.

    Args:
        report: Told how many bytes of a large one have come.

    Raises:
        NotFoundError: Deleted meanwhile.
        CorruptEntryError: ``reason`` says what is wrong.
    """
    await read_header(store, entry)
    with _naming(entry):
        blob = await _download(store, entry, report)
        if blob is None:
            raise NotFoundError("the entry was deleted while we looked")
        header = codec.parse_header(blob)
        _check_place(header, entry)
        codec.check_data(header, memoryview(blob)[header.data_start :])
    return header, blob


async def _download(store: Store, entry: Entry, report: Report) -> Blob | None:
    """All bytes of an object; a large one by ranges, or nobody would see how far it is."""
    if entry.nbytes <= _PART_BYTES:
        return await store.get(entry.object_name, max_bytes=entry.nbytes)
    whole = bytearray()
    starts = range(0, entry.nbytes, _PART_BYTES)
    parts = parts_in_order(store, entry.object_name, starts, at_a_time=_PARTS_AT_A_TIME)
    async with aclosing(parts):
        async for part in parts:
            if part is None:
                return None
            whole += part
            report("downloading", len(whole), entry.nbytes)
    return memoryview(whole).toreadonly()

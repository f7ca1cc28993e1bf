# SPDX-License-Identifier: Apache-2.0
"""A corpus, the embeddings in one bucket: look around, read, delete and check, from any program.

``s3ec.Corpus`` is the public class, and the command line uses it too. It is synchronous. What it
does runs on an asyncio loop of its own in one thread, so it also works in a notebook, where a loop
runs already, and several threads may share one. The coroutines below the class do the work.

It needs neither vLLM nor torch: only the call that makes a tensor imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from s3ec import codec
from s3ec.counters import Counters, Report, unreported
from s3ec.errors import (
    AmbiguousError,
    ConfigError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import (
    OBJECT_SUFFIX,
    Key,
    Layout,
    digest_of_name,
    entry_name,
    is_content_hash,
    key_of_header,
    make_key,
)
from s3ec.namespaces import (
    NamespaceInfo,
    Wording,
    choose_namespace,
    describe_namespace,
    list_namespaces,
    read_namespaces,
)
from s3ec.runtime import LoopThread
from s3ec.store.base import (
    PART_BYTES,
    Blob,
    ObjectInfo,
    Store,
    VanishedError,
    get_in_parts,
)
from s3ec.store.concurrency import REQUESTS_AT_A_TIME, in_parallel
from s3ec.store.open import open_store, require_conditional_put, with_conditional_put
from s3ec.store.retry import RetryStore
from s3ec.store.unreachable import in_plain_words
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from s3ec.index.rebuild import Verified
    from s3ec.settings import Settings

T = TypeVar("T")
log = logging.getLogger(__name__)

NAMESPACE_VARIABLE = "S3EC_NAMESPACE"
# Of each request: work of thousands of requests should not end with the first that fails.
ATTEMPTS = 5
# The folder of an adapter whose name does not make one, or may not be read.
_HASHED_ADAPTER = re.compile(r"[tx]-[0-9a-f]{64}")
# 8 hex digits tell four thousand million images apart, and name the fan-out folder.
_HASH_PREFIX = re.compile(
    r"(?:(?P<lora>[a-z0-9-]+):)?(?P<mark>[tx]-)?(?P<hex>[0-9a-f]{8,64})(?P<revision>\.r1)?"
)
# The first digits of a hash name a folder of the bucket.
_HASH_BEGIN = re.compile(r"(?:[tx]-)?([0-9a-f]{2})[0-9a-f]*")
_FAN_OUT = re.compile(r"[0-9a-f]{2}/")
_SHOWN_MATCHES = 5
_PARTS_AT_A_TIME = 4
_CLOSE_S = 5.0


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
        ``t-`` and a digest. ``.r1`` behind it is the first revision.
        """
        path = PurePosixPath(self.name)
        stem = path.name.removesuffix(OBJECT_SUFFIX)
        return f"{path.parts[0]}:{stem}" if len(path.parts) == 3 else stem

    @property
    def plain_name(self) -> str:
        """The name without its revision."""
        return _name_and_revision(self)[0]

    @property
    def digest(self) -> str:
        """Its key in the index, 32 hex digits."""
        return digest_of_name(self.plain_name).hex()

    @property
    def identifier(self) -> str | None:
        """vLLM's name for it; None where only a digest of that is known.

        A content hash is in the object's name; what a client chose is in the header only. Under a
        ``tenant_key`` it is nowhere.
        """
        if self.header is not None:
            key = key_of_header(self.header.identifier, digest_of_name(self.plain_name))
            return key.identifier or None if key else None
        plain = replace(self, name=self.plain_name).label
        adapter = plain.rpartition(":")[0]
        return plain if is_content_hash(plain) and not _HASHED_ADAPTER.fullmatch(adapter) else None

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


@dataclass(frozen=True, slots=True)
class Deletion:
    """What ``delete`` found, and whether it is gone.

    Attributes:
        namespace: Where.
        objects: The objects of each identifier as they were, revisions included; none where the
            entry was not there.
        done: Whether they were deleted; False of a dry run.
    """

    namespace: str
    objects: Mapping[str, Sequence[ObjectInfo]]
    done: bool

    @property
    def count(self) -> int:
        """Entries that were there; one that was named twice counts once."""
        return len({infos[0].name for infos in self.objects.values() if infos})

    @property
    def nbytes(self) -> int:
        """Size of their objects together."""
        sizes = {info.name: info.nbytes for infos in self.objects.values() for info in infos}
        return sum(sizes.values())

    @property
    def absent(self) -> Sequence[str]:
        """Identifiers of which nothing was there."""
        return [identifier for identifier, infos in self.objects.items() if not infos]


class Corpus:
    """The embeddings of one bucket and prefix. A context manager; safe to use from any thread.

    States: open until ``close``, then closed for good. It opens no connection before the first
    call that needs one. A forked child opens a corpus of its own.

    **Which namespace.** ``namespace`` is a name or the beginning of one, ``model`` a part of a
    model's name. Without both, the variable ``S3EC_NAMESPACE`` is the namespace. If several fit
    and all are of one model, the newest is taken, and a line in the log (INFO) names it. A choice
    is made once for each corpus and kept. It costs one listing, and two requests for each namespace
    where the name is not given in full.

    **Errors** of all methods, beside those that each names: ``ConfigError``, a wrong argument;
    ``UnavailableError``, the store does not answer well now, also not in five attempts;
    ``AccessError``, it refuses: credentials, permission, no such bucket. All are ``S3ECError``. An
    entry that is absent is None, not an error.

    **report**, where a method takes it, is called with what is done, how much of it, and of how
    much (None where that is not known). It is called in another thread, and must return soon.
    """

    @classmethod
    def open(
        cls,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        url: str | None = None,
        bucket: str | None = None,
        prefix: str | None = None,
        endpoint_url: str | None = None,
    ) -> Corpus:
        """Open the corpus that arguments and settings name. No request goes out yet.

        The places are those of the command line. An argument wins over ``settings``, those over
        ``S3EC_*`` variables, those over the file that ``S3EC_CONFIG`` names. Credentials come from
        the SDK's own chain.

        Args:
            settings: Settings by name, as in ``ec_connector_extra_config``; or a ``Settings`` that
                was loaded before, and then nothing else.
            url: A corpus outside S3, such as ``file:///FOLDER`` or ``gs://BUCKET``.
            bucket: The bucket's name, or ``s3://BUCKET/PREFIX``.
            prefix: Folder inside the bucket.
            endpoint_url: URL of an S3-compatible server; AWS if it is set nowhere.

        Raises:
            ConfigError: A setting is unknown, wrong or missing, or the profile, region or CA file
                cannot be used. The message names the field and the fix.
        """
        from s3ec.config import load_settings
        from s3ec.settings import Settings

        given = {"url": url, "bucket": bucket, "prefix": prefix, "endpoint_url": endpoint_url}
        arguments = {name: value for name, value in given.items() if value is not None}
        if not isinstance(settings, Settings):
            settings = load_settings(
                settings, origin="`settings`", options=arguments, as_arguments=True
            ).settings
        elif arguments:
            raise ConfigError(
                f"`{next(iter(arguments))}` beside loaded `settings`: give one of the two",
                field=next(iter(arguments)),
            )
        return cls(settings)

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | None = None,
        attempts: int = ATTEMPTS,
        wording: Wording | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """For programs that have settings at hand; others call ``open``.

        Args:
            settings: Where the corpus is.
            store: The bucket, without retries; opened from the settings if None.
            attempts: How often each request is sent at most.
            wording: How messages call arguments; as in Python if None.
            note: Told which namespace was taken where several fit; the log if None.

        Raises:
            ConfigError: Profile, region or CA file cannot be used.
        """
        self.settings = settings
        self._store = RetryStore(store or open_store(settings), Counters(), attempts=attempts)
        self._wording = wording or Wording()
        self._note = note or (lambda text: log.info("%s", text))
        self._thread = LoopThread("s3ec-corpus")
        self._closed = False
        # Several threads may fill these, each with the same.
        self._chosen: dict[tuple[str | None, str | None], str] = {}
        self._writable: Store | None = None

    def __repr__(self) -> str:
        return f"Corpus({str(self.settings.corpus)!r})"

    def __enter__(self) -> Corpus:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections, within 10 s. Calling it again does nothing."""
        if self._closed:
            return
        with suppress(UnavailableError, TimeoutError):
            self.run(lambda store: asyncio.wait_for(store.close(), _CLOSE_S))
        self._closed = True
        self._thread.stop(_CLOSE_S)

    # -- namespaces ----------------------------------------------------------------------------

    def namespaces(self, *, count: bool = False) -> Sequence[NamespaceInfo]:
        """All namespaces, sorted by name; none where nothing was stored yet.

        Costs one listing and four requests for each of them.

        Args:
            count: Count entries and bytes too; lists every object, 1000 a request.
        """

        async def look(store: Store) -> list[NamespaceInfo]:
            found = await read_namespaces(store, await list_namespaces(store))
            return await in_parallel(found, lambda one: describe_namespace(store, one, count=count))

        return self.run(look)

    def choose(self, namespace: str | None = None, *, model: str | None = None) -> str:
        """The name of the namespace that fits, see the class.

        Raises:
            NotFoundError: The bucket has none, or none that fits.
            AmbiguousError: Several models fit, or the store says of none when it was written; the
                message lists what to choose from.
        """
        wording = self._wording
        variable = os.environ.get(NAMESPACE_VARIABLE)
        if variable and not namespace and not model:
            namespace, wording = variable, replace(wording, origin=NAMESPACE_VARIABLE)
        asked = namespace or None, model or None
        if asked not in self._chosen:
            name, note = self.run(lambda store: choose_namespace(store, *asked, wording))
            self._chosen[asked] = self._chosen[name, None] = name
            if note:
                self._note(note)
        return self._chosen[asked]

    # -- entries -------------------------------------------------------------------------------

    def find(
        self, identifier: str, *, namespace: str | None = None, model: str | None = None
    ) -> CorpusEntry | None:
        """The entry of an identifier as a listing shows it; of two revisions the last.

        Costs one listing of a few names, two where the identifier is not known in full.

        Args:
            identifier: As vLLM spells it, a label, or 8 or more hex digits of a content hash.

        Returns:
            None where there is none, also for what is never stored.

        Raises:
            NotFoundError, AmbiguousError: No namespace fits, or several do.
            AmbiguousError: Several entries begin so; the message lists some.
        """
        name = self.choose(namespace, model=model)
        return self.run(lambda store: _find(store, name, identifier, self.tenant))

    def stat(
        self,
        identifier: str | CorpusEntry,
        *,
        namespace: str | None = None,
        model: str | None = None,
    ) -> CorpusEntry | None:
        """What is stored under an identifier: size, age, shape, dtype and the rest of its header.

        Costs what find costs, and one request for the first 16 KiB. Its values are not read.

        Args:
            identifier: As for find; or an entry of this corpus, which needs no search.

        Returns:
            The entry with its header; None where there is none.

        Raises:
            ConfigError: Nothing is ever stored under this identifier: it is empty, longer than
                4096 bytes, not Unicode, or a counter of one process.
            CorruptEntryError: It is there, but it is not what it should be. ``reason`` says why.
            NotFoundError, AmbiguousError: As find.
        """
        entry = self._entry(identifier, namespace, model)
        if entry is None:
            return None
        return self.run(lambda store: _read_header(store, entry))

    def get(
        self,
        identifier: str | CorpusEntry,
        *,
        namespace: str | None = None,
        model: str | None = None,
        report: Report = unreported,
    ) -> Embedding | None:
        """An embedding with all its bytes, each of them checked.

        Costs what stat costs, and the download: one request, or one for each 8 MiB, four at a
        time. Memory: the entry once.

        Args:
            identifier: As for stat.
            report: Told how many bytes of a large one have come.

        Returns:
            None where there is none.

        Raises:
            ConfigError, CorruptEntryError, NotFoundError, AmbiguousError: As stat.
        """
        entry = self._entry(identifier, namespace, model)
        if entry is None:
            return None
        return self.run(lambda store: _read(store, entry, report))

    def list(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        starts_with: str = "",
        adapter: str | None = None,
    ) -> Iterator[CorpusEntry]:
        """The entries of one namespace, in no order, as the store lists them.

        Costs one request for each 1000 entries. Where there are more than 4096, a request for each
        of up to 256 folders comes on top, 16 at a time. What is ahead of the caller is at most some
        thousand entries. Every revision is an entry here.

        Args:
            starts_with: Only entries whose label begins so.
            adapter: Only entries of the LoRA adapter of this name.

        Raises:
            ConfigError: Nothing is ever stored under this adapter.
            NotFoundError, AmbiguousError: No namespace fits, or several do.
        """
        folder = None if adapter is None else self.adapter_folder(adapter)
        if adapter is not None and folder is None:
            raise ConfigError(
                "`adapter` is no name under which anything is stored; leave it out for all entries",
                field="adapter",
            )
        name = self.choose(namespace, model=model)
        return self._entries(scan(self._store, name, starts_with=starts_with, adapter=folder))

    def delete(
        self,
        identifiers: str | CorpusEntry | Iterable[str | CorpusEntry],
        *,
        namespace: str | None = None,
        model: str | None = None,
        by_name: bool = False,
        dry_run: bool = False,
        report: Report = unreported,
    ) -> Deletion:
        """Delete entries with all their revisions, and tell every reader by the index.

        First the objects go, then the index says so. What is absent is announced too, since the
        index may hold it. A node that has a copy on its disk serves it until it is evicted. Costs a
        listing for each entry, 16 at a time, one request for each 1000 objects, and one
        announcement for each 10,000. The first deletion also tries a conditional write, with four
        small requests.

        Args:
            identifiers: In full, as vLLM spells them; or entries, all of one namespace, which need
                not be named then.
            by_name: The texts are labels or objects' names, as list has them.
            dry_run: Only say what would go.
            report: Told how many entries are gone.

        Returns:
            What was there, and whether it was deleted.

        Raises:
            ConfigError: An identifier under which nothing is stored, no name of an entry, or
                entries of another namespace; nothing was deleted.
            UnavailableError, AccessError: Some may be left. What is gone was announced, unless the
                message says otherwise.
            TierError: The folder for temporary files is full: 42 bytes for each entry of the index.
            NotFoundError, AmbiguousError: No namespace fits, or several do.
        """
        given = (identifiers,) if isinstance(identifiers, str | CorpusEntry) else (*identifiers,)
        keys = dict(self._key_to_delete(one, by_name) for one in given)
        places = {one.namespace for one in given if isinstance(one, CorpusEntry)}
        if places and namespace is None and model is None:
            namespace = min(places)
        name = self.choose(namespace, model=model)
        if places - {name}:
            raise ConfigError(
                f"`identifiers` holds entries of {max(places - {name})}, and `namespace` is "
                f"{name}; delete those of each namespace by themselves",
                field="namespace",
            )

        async def work(store: Store, layout: Layout) -> Deletion:
            from s3ec.index.delete import delete_entries, find_objects

            found = await find_objects(store, layout, keys.values(), report=report)
            if not dry_run:
                await delete_entries(store, layout, found, report=report)
            by_text = {text: tuple(found[key]) for text, key in keys.items()}
            return Deletion(layout.namespace, by_text, done=not dry_run)

        return self.within(work, name, write=not dry_run)

    def verify(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        report: Report = unreported,
    ) -> Verified:
        """Compare the index with a listing of all objects; changes nothing.

        Costs a download of the whole index and a listing of everything, 16 requests at a time.
        Memory: some 200 MiB; temporary files of 42 bytes for each entry. Entries that are stored or
        deleted meanwhile are not complained about.

        Args:
            report: Told how far it is.

        Returns:
            What the index lacks (``missing``), only believes (``extra``) or has with another size
            (``differing``), with examples; ``agrees`` where there is nothing of that.

        Raises:
            CorruptEntryError: The index is unusable; the message names the file.
            TierError: The folder for temporary files is full.
            NotFoundError, AmbiguousError: No namespace fits, or several do.
        """

        async def work(store: Store, layout: Layout) -> Verified:
            from s3ec.index.base_writer import BuildOptions
            from s3ec.index.rebuild import verify

            options = BuildOptions(bloom_fpr=self.settings.bloom_fpr, report=report)
            return await verify(store, layout, options)

        return self.within(work, namespace, model=model)

    # -- what has no method --------------------------------------------------------------------

    def run(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run a coroutine of s3ec's own parts on the store, and wait. For s3ec's commands.

        Whoever breaks it off, as Ctrl-C does, waits until the coroutine has cleaned up.

        Raises:
            S3ECError: The corpus is closed; and what the coroutine raises.
        """
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work(self._store)
            except UnavailableError as exc:
                plain = in_plain_words(exc, self.settings)
                if plain is None:
                    raise
                raise plain from exc
            finally:
                ended.set()

        future = self._submit(watched())
        try:
            return future.result()
        except CancelledError as exc:
            raise S3ECError("this corpus was closed meanwhile; open another one") from exc
        finally:
            if not future.done():
                future.cancel()
                ended.wait()

    def within(
        self,
        work: Callable[[Store, Layout], Awaitable[T]],
        namespace: str | None = None,
        *,
        model: str | None = None,
        write: bool = False,
        compacts: bool = False,
    ) -> T:
        """As run, on one namespace.

        Args:
            write: Find out first whether the server honours conditional writes.
            compacts: Refuse a server that does not.

        Raises:
            ConfigError: See ``compacts``.
            NotFoundError, AmbiguousError: No namespace fits, or several do.
        """
        layout = Layout(self.choose(namespace, model=model))

        async def call(store: Store) -> T:
            if compacts:
                await require_conditional_put(store)
            if write and self._writable is None:
                self._writable = await with_conditional_put(store)
            return await work(self._writable if write and self._writable else store, layout)

        return self.run(call)

    @property
    def tenant(self) -> Tenant | None:
        """The tenant whose secret is in the names; None without one.

        Raises:
            ConfigError: It cannot be read, or is too short.
        """
        return Tenant.read(self.settings.tenant_key)

    def adapter_folder(self, adapter: str) -> str | None:
        """The folder of an adapter, by its name or as a label spells it; None where it has none."""
        if _HASHED_ADAPTER.fullmatch(adapter):
            return adapter
        key = make_key(f"{adapter}:{'0' * 64}", self.tenant)
        return key.name.partition("/")[0] if key else None

    def key_of(self, text: str, *, by_name: bool = False) -> Key | None:
        """The key of an identifier; with ``by_name`` that of a label or an object's name.

        Returns:
            None where nothing can be stored under it.
        """
        if not by_name:
            return make_key(text, self.tenant)
        name = text
        if not text.endswith(OBJECT_SUFFIX):
            lora, _, stem = text.rpartition(":")
            folder = f"{lora}/" if lora else ""
            fan_out = stem.removeprefix("x-").removeprefix("t-")[:2]
            name = f"{folder}{fan_out}/{stem}{OBJECT_SUFFIX}"
        found = entry_name(name)
        return Key("", found[0], digest_of_name(found[0])) if found else None

    def _key_to_delete(self, one: str | CorpusEntry, by_name: bool) -> tuple[str, Key]:
        if isinstance(one, CorpusEntry):
            one, by_name = one.name, True
        key = self.key_of(_text(one), by_name=by_name)
        if key is None and by_name:
            raise ConfigError(
                f"{one!r:.100} in `identifiers` is no name of an entry; `list` has their labels",
                field="identifiers",
            )
        if key is None:
            raise _never_stored(one, "identifiers")
        return one, key

    def _entry(
        self, what: str | CorpusEntry, namespace: str | None, model: str | None
    ) -> CorpusEntry | None:
        if isinstance(what, CorpusEntry):
            return what
        if make_key(_text(what), self.tenant) is None:
            raise _never_stored(what, "identifier")
        return self.find(what, namespace=namespace, model=model)

    def _entries(
        self, batches: AsyncGenerator[Sequence[CorpusEntry], None]
    ) -> Iterator[CorpusEntry]:
        async def following(_: Store) -> Sequence[CorpusEntry] | None:
            return await anext(batches, None)

        async def end() -> None:
            await batches.aclose()

        try:
            while (batch := self.run(following)) is not None:
                yield from batch
        finally:
            # Nobody waits: the garbage collector may come here, in any thread.
            with suppress(S3ECError):
                self._submit(end())

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()  # nobody will await it
            raise S3ECError("this corpus is closed; open another one")
        try:
            return self._thread.submit(coroutine)
        except RuntimeError as exc:  # it ends just now, or no descriptor is left
            raise S3ECError(f"this corpus cannot be used: {exc}") from exc


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"`identifier` is a text, not {type(value).__name__}; take vLLM's identifier, a label "
            "or an entry",
            field="identifier",
        )
    return value


def _never_stored(identifier: str, argument: str) -> ConfigError:
    return ConfigError(
        f"{identifier!r:.100} in `{argument}` is an identifier under which nothing is stored; take "
        "a content hash, or a client's own name of 1 to 4096 bytes",
        field=argument,
    )


# -- entries -----------------------------------------------------------------------------------


async def scan(
    store: Store,
    namespace: str,
    *,
    starts_with: str = "",
    adapter: str | None = None,
    width: int = REQUESTS_AT_A_TIME,
) -> AsyncGenerator[Sequence[CorpusEntry], None]:
    """The entries of a namespace, some at a time, in no order. To be closed.

    Args:
        starts_with: Only those whose label begins so.
        adapter: Only those in the folder of this adapter.
        width: Folders that are listed at a time. Each waits until what it found is taken.
    """
    from s3ec.index.listing import list_side_by_side

    layout = Layout(namespace)
    above, narrow = _place(starts_with, adapter)
    listing = list_side_by_side(
        store,
        None if narrow else layout.objects + above,
        lambda: _prefixes(store, layout, starts_with, above, narrow),
        width=width,
    )
    async with aclosing(listing) as batches:
        async for infos in batches:
            found = [
                entry
                for entry in _entries(layout, infos)
                if _is_wanted(entry, starts_with, adapter)
            ]
            if found:
                yield found


def _is_wanted(entry: CorpusEntry, begin: str, adapter: str | None) -> bool:
    if not begin and adapter is None:  # a label takes 3 us
        return True
    label = entry.label
    return label.startswith(begin) and adapter in (None, label.rpartition(":")[0])


def _place(begin: str, adapter: str | None) -> tuple[str, str | None]:
    """Find the folder below ``objects/`` that holds all labels that begin so.

    Returns:
        The adapter's folder, empty for all; and the beginning of the names of objects, None where
        the label's beginning does not tell it.
    """
    if adapter is None and ":" in begin:
        adapter = begin.partition(":")[0]
    above = "" if adapter is None else f"{adapter}/"
    match = _HASH_BEGIN.fullmatch(begin if adapter is None else begin.removeprefix(f"{adapter}:"))
    return above, match and f"{above}{match[1]}/{match[0]}"


async def _prefixes(
    store: Store, layout: Layout, begin: str, above: str, narrow: str | None
) -> list[str]:
    """Beginnings of objects' names that hold all that is wanted, to list side by side."""
    if narrow and above:
        return [layout.objects + narrow]
    prefix = layout.objects + above
    below = await store.list_folders(prefix)
    if narrow:
        # What looks like a hash may be the beginning of an adapter's name.
        below = [narrow, *(f for f in below if f.startswith(begin) and not _FAN_OUT.fullmatch(f))]
    return [prefix + folder for folder in below]


async def _listed(store: Store, namespace: str, folder: str) -> AsyncIterator[CorpusEntry]:
    """All entries below a folder of ``objects/``."""
    layout = Layout(namespace)
    async for info in store.list(layout.objects + folder):
        for entry in _entries(layout, [info]):
            yield entry


def _entries(layout: Layout, infos: Iterable[ObjectInfo]) -> Iterator[CorpusEntry]:
    """Those of listed objects that are entries; foreign objects are left out."""
    for info in infos:
        name = info.name.removeprefix(layout.objects)
        if entry_name(name) is not None:
            yield CorpusEntry(layout.namespace, name, info.nbytes, info.modified_s)


def is_hash_prefix(text: str) -> bool:
    """Whether this may be the beginning of a content hash or of a label."""
    return _HASH_PREFIX.fullmatch(text) is not None


async def _find(
    store: Store, namespace: str, wanted: str, tenant: Tenant | None
) -> CorpusEntry | None:
    key = make_key(wanted, tenant)
    if key is not None:
        stem = key.name.removesuffix(OBJECT_SUFFIX)
        found = [each async for each in _listed(store, namespace, f"{stem}.")]
        if found:
            return max(found, key=_name_and_revision)
    shape = _HASH_PREFIX.fullmatch(wanted)
    return None if shape is None else await _find_by_prefix(store, namespace, wanted, shape)


async def _find_by_prefix(
    store: Store, namespace: str, wanted: str, shape: re.Match[str]
) -> CorpusEntry | None:
    lora = f"{shape['lora']}/" if shape["lora"] else ""
    stem = f"{shape['mark'] or ''}{shape['hex']}{shape['revision'] or ''}"
    last: dict[str, CorpusEntry] = {}
    async for entry in _listed(store, namespace, f"{lora}{shape['hex'][:2]}/{stem}"):
        name = entry.plain_name
        last[name] = max(last.get(name, entry), entry, key=_name_and_revision)
        if len(last) > _SHOWN_MATCHES:
            break
    found = list(last.values())
    if len(found) > 1:
        listed = "".join(f"\n  {entry.label}" for entry in found[:_SHOWN_MATCHES])
        more = "\n  ..." if len(found) > _SHOWN_MATCHES else ""
        raise AmbiguousError(f"several entries begin with `{wanted}`:{listed}{more}")
    return found[0] if found else None


def _name_and_revision(entry: CorpusEntry) -> tuple[str, int]:
    return entry_name(entry.name) or (entry.name, 0)


async def _read_header(store: Store, entry: CorpusEntry) -> CorpusEntry | None:
    """The entry with its checked header, by one range request; None where it is gone.

    Raises:
        CorruptEntryError: Not an entry, of another length than it says, or a copy of another.
    """
    blob = await store.get_range(entry.object_name, 0, 8 + codec.HEADER_LIMIT)
    if blob is None:
        return None
    with _naming(entry):
        header = _checked_header(blob, entry)
        if header.total_bytes != entry.nbytes:
            raise CorruptEntryError(
                f"the object has {entry.nbytes} bytes, its header says {header.total_bytes}",
                reason="length",
            )
    return replace(entry, header=header)


async def read_modality(store: Store, entry: CorpusEntry) -> str | None:
    """What kind of item an entry is of, such as ``image``; None where it is gone.

    Raises:
        CorruptEntryError: No usable header.
    """
    found = await _read_header(store, entry)
    return found.header.modality if found and found.header else None


async def _read(store: Store, entry: CorpusEntry, report: Report) -> Embedding | None:
    """A whole entry, every byte of it checked; its header first, which bounds the download."""
    if await _read_header(store, entry) is None:
        return None
    with _naming(entry):
        blob = await _download(store, entry, report)
        if blob is None:
            return None
        header = _checked_header(blob, entry)
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


def _checked_header(blob: Blob, entry: CorpusEntry) -> codec.Header:
    """Refuse an entry that lies where its own identifier does not belong."""
    header = codec.parse_header(blob)
    if key_of_header(header.identifier, digest_of_name(entry.plain_name)) is None:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    codec.check_identity(header, namespace=entry.namespace, identifier=header.identifier)
    return header


async def _download(store: Store, entry: CorpusEntry, report: Report) -> Blob | None:
    """All bytes of an object. A large one comes by ranges, so that its progress is seen."""
    if entry.nbytes <= PART_BYTES:
        return await store.get(entry.object_name, max_bytes=entry.nbytes)
    try:
        whole = await get_in_parts(
            store, entry.object_name, entry.nbytes, at_a_time=_PARTS_AT_A_TIME, report=report
        )
    except VanishedError:
        return None
    return memoryview(whole).toreadonly()

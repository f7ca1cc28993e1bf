# SPDX-License-Identifier: Apache-2.0
"""The job that fills a corpus: what is left to encode, who encodes it, and what is confirmed.

A thread pool reads and names items, the caller's thread keeps the encoder at work, and a thread of
its own waits for the bucket and writes the catalogue. ``encoder.py`` says who encodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from s3ec.corpus.catalog import append_rows, read_table
from s3ec.corpus.catalog_file import CatalogRow
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.encoder import Encoded, Encoder, EncoderError, Picture
from s3ec.corpus.entries import CorpusEntry, find_entry, read_header
from s3ec.counters import Counters, Report, unreported
from s3ec.errors import (
    AccessError,
    ConfigError,
    CorruptEntryError,
    S3ECError,
    SourceError,
    UnavailableError,
)
from s3ec.identity import Key, Layout, Namespace, naming_of
from s3ec.index.cache import IndexCache
from s3ec.index.follower import FollowOptions
from s3ec.index.reader import ManifestIndex
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import with_conditional_put
from s3ec.tier import Tier

if TYPE_CHECKING:
    from s3ec.corpus.corpus import Corpus
    from s3ec.corpus.sources import SourceItem

T = TypeVar("T")
log = logging.getLogger(__name__)

Status = Literal["complete", "partial", "failed"]
Identifier = Literal["content", "sha256"]

STAMP = "s3ec_file"
"""In ``extra`` of a catalogue row: size and mtime of the file, and dots per inch of a PDF's page."""

# How often the index is asked for what was confirmed. Writers announce every 2 s.
_LOOK_S = 1.0
# Items that are encoded and not confirmed. More would only fill the spool.
_MOST_UNCONFIRMED = 2048
# Rows of the catalogue that are written at once, and how long one waits at most for others.
_ROWS_AT_A_TIME = 5000
_ROWS_EVERY_S = 30.0
# Items that are read and named ahead of the encoder, for each thread that reads.
_AHEAD = 4
_MOST_READERS = 8
_REPORT_EVERY = 64


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job works.

    Attributes:
        identifier: What embeddings are called: vLLM's content hash, or ``sha256:HEX`` for clients
            that send that as ``uuid``.
        shard: This job's part and the number of parts, such as (0, 4).
        limit: Most items of the source that are looked at; None for all.
        patience_s: How long the bucket may confirm nothing before the job ends without it.
    """

    identifier: Identifier = "content"
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        number, parts = self.shard
        if not 0 <= number < parts:
            raise ConfigError(
                f"`shard` {number}/{parts} is none; write it as 0/4, from 0/4 to 3/4",
                field="shard",
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError("`limit` must be 1 or more; leave it out for all", field="limit")
        if self.identifier not in ("content", "sha256"):
            raise ConfigError(
                f"`identifier` {self.identifier!r:.50} is none; it is `content` or `sha256`",
                field="identifier",
            )


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that has no embedding, or none that is confirmed, and why."""

    document: str
    page: int | None
    uri: str
    reason: str


@dataclass(slots=True)
class PrecomputeReport:
    """What a job did.

    Attributes:
        namespace: Where the embeddings are.
        items: Of the source, in this shard, that were looked at.
        done_before: Of these, what the catalogue and the index had.
        catalogued: What the index had and the catalogue lacked.
        encoded: What was encoded, confirmed by the bucket and catalogued.
        failures: What could not be read or encoded.
        unconfirmed: What was encoded, and the bucket has not confirmed.
        read_bytes: Of the files that were read.
        stored_bytes: Of the objects of what was encoded.
        seconds: How long the job took, and of that how long the encoder was there.
        is_stopped: It was told to end before the end of the source.
        problem: Why it ended before that by itself; else empty.
    """

    namespace: str = ""
    items: int = 0
    done_before: int = 0
    catalogued: int = 0
    encoded: int = 0
    failures: list[Failure] = field(default_factory=list)
    unconfirmed: list[Failure] = field(default_factory=list)
    read_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    engine_started: bool = False
    is_stopped: bool = False
    problem: str = ""

    @property
    def confirmed(self) -> int:
        """Items that the catalogue and the bucket have now."""
        return self.done_before + self.catalogued + self.encoded

    @property
    def status(self) -> Status:
        """``complete``: all of the source is there. ``failed``: nothing of it is."""
        if not (self.failures or self.unconfirmed or self.is_stopped or self.problem):
            return "complete"
        return "partial" if self.confirmed else "failed"

    def to_json(self) -> dict[str, Any]:
        """As a plain document, for ``--report`` and ``--json``."""

        def listed(failures: Sequence[Failure]) -> list[dict[str, Any]]:
            names = ("document", "page", "uri", "reason")
            return [{name: getattr(each, name) for name in names} for each in failures]

        seconds = max(self.seconds, 1e-9)
        return {
            "status": self.status,
            "namespace": self.namespace,
            "item_count": self.items,
            "done_before_count": self.done_before,
            "catalogued_count": self.catalogued,
            "encoded_count": self.encoded,
            "failed_count": len(self.failures),
            "unconfirmed_count": len(self.unconfirmed),
            "read_bytes": self.read_bytes,
            "stored_bytes": self.stored_bytes,
            "seconds": round(self.seconds, 3),
            "items_per_s": round(self.items / seconds, 3),
            "encoded_per_s": round(self.encoded / seconds, 3),
            "stored_bytes_per_s": round(self.stored_bytes / seconds),
            "engine_started": self.engine_started,
            "stopped": self.is_stopped,
            "problem": self.problem or None,
            "failures": listed(self.failures),
            "unconfirmed": listed(self.unconfirmed),
        }


@dataclass(frozen=True, slots=True)
class _Origin:
    """What is known of an item without its bytes."""

    item: SourceItem
    sha256: str
    stamp: list[int] | None

    def failure(self, reason: str) -> Failure:
        return _failure(self.item, reason)

    def row(self, like: CatalogRow, stored_s: float) -> CatalogRow:
        """Its row: ``like`` is one of the same embedding."""
        extra = dict(self.item.extra)
        if self.stamp is not None:
            extra[STAMP] = self.stamp
        return CatalogRow(
            document=self.item.document,
            page=self.item.page,
            uri=self.item.uri,
            sha256=self.sha256,
            identifier=like.identifier,
            modality=self.item.modality,
            rows=like.rows,
            width=like.width,
            dtype=like.dtype,
            placeholder=like.placeholder,
            nbytes=like.nbytes,
            stored_s=stored_s,
            extra=extra,
        )


def _failure(item: SourceItem, reason: str) -> Failure:
    return Failure(item.document, item.page, item.uri, reason)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is to be done for one item; exactly one of these, or nothing where it is done.

    Attributes:
        failure: It cannot be read.
        row: The embedding is there and known: only this row is new.
        found: The embedding is there under this identifier, and no row tells of it.
        picture: To be encoded; with ``found`` as its likely name.
    """

    read_bytes: int = 0
    origin: _Origin | None = None
    failure: Failure | None = None
    row: CatalogRow | None = None
    found: str | None = None
    picture: Picture | None = None


class Ledger:
    """What the bucket has by its own word: the index for embeddings, the catalogue for documents.

    Coroutines run on the corpus's loop. ``holds``, and what reads the catalogue, are for any
    thread.
    """

    def __init__(self, corpus: Corpus, namespace: Namespace) -> None:
        """Open this node's files of the index; no request goes out.

        Raises:
            ConfigError: ``cache_dir`` cannot be used, or the tenant's secret cannot be read.
        """
        settings = corpus.settings
        self._corpus = corpus
        self._layout = Layout(namespace.name)
        self._naming = naming_of(settings)
        # A catalogue would say what a secret is to keep: which picture lies under which name.
        self._has_catalogue = self._naming.tenant is None
        self.catalogue = CatalogIndex()
        self._writable: Store | None = None
        counters = Counters()
        self._tier = Tier(
            settings.cache_dir,
            namespace.name,
            budget_bytes=int(settings.cache_bytes),
            min_free_bytes=int(settings.min_free_bytes),
            counters=counters,
        )
        self._options = FollowOptions(mode="exact", cache_bytes=int(settings.cache_bytes))
        self._counters = counters
        self._index: ManifestIndex | None = None

    def close(self) -> None:
        """Let go of this node's files."""
        index, self._index = self._index, None
        if index is not None:
            self._corpus.run(lambda store: index.close())
        self._tier.close()

    def open(self) -> None:
        """Read the index and the catalogue.

        Raises:
            UnavailableError, AccessError: The bucket does not answer.
            CorruptEntryError: A part of the catalogue is unusable.
        """
        self._corpus.run(self._open)

    async def _open(self, store: Store) -> None:
        cache = IndexCache(
            store, self._layout, self._tier.open_index(), _in_thread, self._counters
        )
        index = self._index = ManifestIndex(cache, options=self._options)
        await index.refresh()
        while not index.loaded:
            await asyncio.sleep(_LOOK_S)
            await index.refresh()
        if self._has_catalogue:
            table = await read_table(store, self._layout)
            self.catalogue = await asyncio.to_thread(CatalogIndex.from_table, table)

    def key(self, identifier: str) -> Key | None:
        """Where an identifier's embedding lies; None where nothing may be stored under it."""
        return self._naming.make_key(identifier)

    def holds(self, key: Key) -> bool:
        """Whether a writer has said that the bucket confirmed this one."""
        return self._index is not None and self._index.holds(key)

    async def refresh(self) -> None:
        """Hear what writers have said since.

        Raises:
            UnavailableError, AccessError: The bucket does not answer.
        """
        if self._index is not None:
            await self._index.refresh()

    async def describe(self, store: Store, identifier: str, key: Key) -> CatalogRow | None:
        """What the bucket says of an embedding, by its own header; None where it is gone.

        Raises:
            UnavailableError, AccessError: The bucket does not answer.
            CorruptEntryError: It is not what it should be.
        """
        facts = self._index.facts(key) if self._index is not None else None
        entry: CorpusEntry | None = None
        if facts is not None and facts.nbytes:
            entry = CorpusEntry(self._layout.namespace, key.name, facts.nbytes, 0.0)
            try:
                entry = await read_header(store, entry)
            except CorruptEntryError:  # a bad object stays where its revision was written
                entry = None
        if entry is None:
            name = self._layout.namespace
            entry = await find_entry(store, name, identifier, self._naming.tenant)
            entry = entry and await read_header(store, entry)
        if entry is None or entry.header is None:
            return None
        shape = entry.header.shape
        return CatalogRow(
            document="",
            page=None,
            uri="",
            sha256="",
            identifier=identifier,
            modality=entry.header.modality,
            rows=shape.rows,
            width=shape.width,
            dtype=shape.dtype,
            placeholder=entry.header.placeholder,
            nbytes=entry.nbytes,
            stored_s=0.0,
            extra={},
        )

    async def append(self, store: Store, rows: Sequence[CatalogRow]) -> None:
        """Add rows to the catalogue, confirmed when this returns."""
        if not rows or not self._has_catalogue:
            return
        if self._writable is None:
            self._writable = await with_conditional_put(store)
        await append_rows(self._writable, self._layout, rows)


async def _in_thread(
    function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None
) -> T:
    call = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        if undo is not None:
            call.add_done_callback(lambda done: done.exception() or undo(done.result()))
        raise


@dataclass(slots=True)
class _Unconfirmed:
    """An embedding that the bucket has to confirm, and the items that wait for it."""

    identifier: str
    key: Key
    encoded: list[_Origin] = field(default_factory=list)
    others: list[_Origin] = field(default_factory=list)

    @property
    def origins(self) -> list[_Origin]:
        return [*self.encoded, *self.others]


class Confirmations:
    """Waits for the bucket, then writes the catalogue; a thread of its own.

    States of an item:

    ===========  ===========  ==================================================================
    state        goes to      when
    ===========  ===========  ==================================================================
    (new)        waiting      ``add``: it is encoded, or the index had it
    (new)        confirmed    ``add_row``: the embedding and its facts were known
    waiting      confirmed    the index tells of it, and its header was read back
    confirmed    catalogued   the bucket has confirmed a part of the catalogue with its row
    waiting      unconfirmed  the end came first
    ===========  ===========  ==================================================================

    What is counted is catalogued. A job that is killed before that finds the embedding in the
    index, and only adds the row.
    """

    def __init__(
        self, corpus: Corpus, ledger: Ledger, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._corpus = corpus
        self._ledger = ledger
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[bytes, _Unconfirmed] = {}
        self._rows: list[tuple[CatalogRow, bool]] = []
        self._ending = False
        self._is_idle = True
        self._problem = ""
        self._moved_s = time.monotonic()
        self.encoded = self.catalogued = self.stored_bytes = 0
        self._thread = threading.Thread(target=self._run, name="s3ec-confirm", daemon=True)
        self._thread.start()

    # -- the job's thread --------------------------------------------------------------------

    def add(self, identifier: str, key: Key, origin: _Origin, *, encoded: bool) -> None:
        """Wait for the bucket to confirm an embedding, for this item."""
        with self._changed:
            waiting = self._waiting.setdefault(key.digest, _Unconfirmed(identifier, key))
            (waiting.encoded if encoded else waiting.others).append(origin)
            self._moved_s = time.monotonic() if len(self._waiting) == 1 else self._moved_s
            self._changed.notify_all()

    def join(self, key: Key, origin: _Origin) -> bool:
        """Have an item wait for what another one has encoded; False where none has."""
        with self._changed:
            waiting = self._waiting.get(key.digest)
            if waiting is not None:
                waiting.others.append(origin)
            return waiting is not None

    def add_row(self, row: CatalogRow) -> None:
        """Write a row for an embedding that is there."""
        with self._changed:
            self._rows.append((row, False))
            self._changed.notify_all()

    def wait_for_room(self, stopped: threading.Event, patience_s: float) -> None:
        """Return when fewer wait than may; the bucket sets the pace then.

        Raises:
            EncoderError: It has confirmed nothing for too long.
        """
        with self._changed:
            while len(self._waiting) >= _MOST_UNCONFIRMED and not stopped.is_set():
                if time.monotonic() - self._moved_s > patience_s:
                    raise EncoderError(
                        f"the bucket has confirmed nothing for {patience_s:.0f} s{self._why()}"
                    )
                self._changed.wait(_LOOK_S)

    def settle(self, patience_s: float) -> None:
        """Wait until all is confirmed and catalogued, for as long as that goes on."""
        with self._changed:
            self._moved_s = time.monotonic()
            while self._waiting or self._rows or not self._is_idle:
                if time.monotonic() - self._moved_s > patience_s:
                    return
                self._changed.wait(_LOOK_S)

    def end(self) -> list[Failure]:
        """Write what is confirmed, and end the thread; the items that are not."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        reason = f"the bucket has not confirmed it{self._why()}; run the job again"
        left = [origin.failure(reason) for each in self._waiting.values() for origin in each.origins]
        reason = f"the catalogue could not be written{self._why()}; run the job again"
        return left + [Failure(row.document, row.page, row.uri, reason) for row, _ in self._rows]

    def _why(self) -> str:
        return f" ({self._problem})" if self._problem else ""

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        written_s = time.monotonic()
        while True:
            with self._changed:
                while not (self._waiting or self._rows or self._ending):
                    self._is_idle = True
                    self._changed.notify_all()
                    self._changed.wait()
                    written_s = time.monotonic()
                self._is_idle = False
                is_last = self._ending
            try:
                self._look()
                late = time.monotonic() - written_s >= _ROWS_EVERY_S
                if is_last or late or not self._waiting or len(self._rows) >= _ROWS_AT_A_TIME:
                    self._write()
                    written_s = time.monotonic()
                self._problem = ""
            except (UnavailableError, AccessError, CorruptEntryError) as exc:
                if not self._problem:
                    log.warning("the bucket is asked again: %s", exc)
                self._problem = str(exc)
            except Exception as exc:
                # The top of the thread: the job must end with a report.
                log.exception("waiting for the bucket")
                self._problem = f"{type(exc).__name__}: {exc}"
            if is_last:
                return
            with self._changed:
                if not self._ending and (self._waiting or self._problem):
                    self._changed.wait(_LOOK_S)

    def _look(self) -> None:
        """Ask the index, and read the headers of what it tells of."""
        with self._changed:
            if not self._waiting:
                return
        found = self._corpus.run(self._confirmed)
        now_s = self._clock()
        with self._changed:
            for digest, facts in found:
                each = self._waiting.pop(digest)
                rows = [(origin.row(facts, now_s), True) for origin in each.encoded]
                rows += [(origin.row(facts, now_s), False) for origin in each.others]
                self._rows += rows
            if found:
                self._moved_s = time.monotonic()
            self._changed.notify_all()

    async def _confirmed(self, store: Store) -> list[tuple[bytes, CatalogRow]]:
        await self._ledger.refresh()
        with self._changed:
            waiting = list(self._waiting.values())
        told = [each for each in waiting if self._ledger.holds(each.key)]

        async def read(each: _Unconfirmed) -> CatalogRow | None:
            return await self._ledger.describe(store, each.identifier, each.key)

        facts = await in_parallel(told, read)
        return [
            (each.key.digest, row) for each, row in zip(told, facts, strict=True) if row is not None
        ]

    def _write(self) -> None:
        with self._changed:
            batch = list(self._rows)
        if not batch:
            return
        self._corpus.run(lambda store: self._ledger.append(store, [row for row, _ in batch]))
        with self._changed:
            del self._rows[: len(batch)]
            for row, encoded in batch:
                self.encoded += encoded
                self.catalogued += not encoded
                self.stored_bytes += row.nbytes if encoded else 0
            self._moved_s = time.monotonic()
            self._changed.notify_all()


class Job:
    """Brings the items of a source into a corpus. Used once.

    States: new, then running in ``run``, and ended. ``stop`` has it end soon.
    """

    def __init__(
        self,
        corpus: Corpus,
        items: Iterable[SourceItem],
        encoder: Encoder,
        options: JobOptions | None = None,
        *,
        total: Callable[[], int | None] = lambda: None,
        report: Report = unreported,
    ) -> None:
        """Nothing is read yet.

        Args:
            corpus: Where to.
            items: Taken one by one, as they are needed.
            encoder: Closed at the end of ``run``.
            options: How it works.
            total: How many items there are, as far as that is known.
            report: Told how many are done.

        Raises:
            ConfigError: The settings refuse what ``identifier`` asks for.
        """
        self._options = options or JobOptions()
        if self._options.identifier == "sha256" and not corpus.settings.trust_client_ids:
            raise ConfigError(
                "`identifier` = sha256 is a name that clients choose, and `trust_client_ids` = "
                "false takes none of those; set it to true, or take `content`",
                field="identifier",
            )
        self._corpus = corpus
        self._items = items
        self._encoder = encoder
        self._total = total
        self._tell = report
        self._stopped = threading.Event()
        self._under_way: dict[int, _Origin] = {}
        self._begun: set[bytes] = set()  # keys of these, as far as they are known
        self._twins: dict[bytes, list[_Origin]] = {}
        self.report = PrecomputeReport()
        self._ledger: Ledger | None = None
        self._confirmations: Confirmations | None = None

    def stop(self) -> None:
        """Have ``run`` end soon: what is encoded is saved and reported. Also in a signal handler."""
        self._stopped.set()
        self._encoder.stop()

    @property
    def progress(self) -> PrecomputeReport:
        """The report so far, with what was confirmed by now."""
        self._take_counts()
        return self.report

    def run(self) -> PrecomputeReport:
        """Do it, and return what was done. Faults of items, engine and bucket are in the report.

        Raises:
            ConfigError: The model, an argument, a setting or the source cannot work.
            UnavailableError, AccessError: The bucket did not answer at the start.
            CorruptEntryError: The catalogue is unusable.
        """
        began_s = time.monotonic()
        try:
            self._open()
            self._encode_all()
        finally:
            self._end()
            self.report.seconds = time.monotonic() - began_s
        return self.report

    def _open(self) -> None:
        namespace = self._encoder.namespace()
        self.report.namespace = namespace.name
        self._ledger = Ledger(self._corpus, namespace)
        self._ledger.open()
        self._confirmations = Confirmations(self._corpus, self._ledger)

    def _encode_all(self) -> None:
        try:
            for encoded in self._encoder.encode(self._pictures()):
                self._take(encoded)
        except EncoderError as exc:
            log.exception("the job ends")
            self.report.problem = str(exc)
        self.report.is_stopped = self._stopped.is_set()

    def _end(self) -> None:
        """Let saves come to their end, and count."""
        self.report.engine_started = self._encoder.is_running
        confirmations, ledger = self._confirmations, self._ledger
        try:
            if confirmations is not None:
                confirmations.settle(self._options.patience_s if not self.report.problem else 0.0)
        finally:
            # Which waits for the last uploads once more, and announces them.
            self._encoder.close()
            if confirmations is not None:
                self.report.unconfirmed = confirmations.end()
                self._take_counts()
            if ledger is not None:
                ledger.close()
        left = "the job ended before it was encoded"
        if self.report.problem:
            self.report.unconfirmed += [each.failure(left) for each in self._under_way.values()]

    def _take_counts(self) -> None:
        confirmations = self._confirmations
        if confirmations is not None:
            self.report.encoded = confirmations.encoded
            self.report.catalogued = confirmations.catalogued
            self.report.stored_bytes = confirmations.stored_bytes

    # -- what is to be done ------------------------------------------------------------------

    def _pictures(self) -> Iterator[Picture]:
        """Those that are to be encoded; all other items are seen to on the way."""
        for plan in self._plans():
            self._count(plan)
            picture = self._picture_of(plan)
            if picture is None:
                continue
            self._require_confirmations().wait_for_room(self._stopped, self._options.patience_s)
            if self._stopped.is_set():
                return
            yield picture

    def _count(self, plan: _Planned) -> None:
        report = self.report
        report.items += 1
        report.read_bytes += plan.read_bytes
        if plan.failure is not None:
            report.failures.append(plan.failure)
        elif plan.row is None and plan.found is None and plan.picture is None:
            report.done_before += 1
        if report.items % _REPORT_EVERY == 0 or self._under_way:
            self._show()

    def _show(self) -> None:
        done = self.report.items - len(self._under_way)
        self._tell("precomputing", done, self._total())

    def _picture_of(self, plan: _Planned) -> Picture | None:
        """What is left to encode of a plan; None where it is done, or waits for what is."""
        confirmations = self._require_confirmations()
        if plan.row is not None:
            confirmations.add_row(plan.row)
            return None
        if plan.origin is None or (plan.found is None and plan.picture is None):
            return None
        key = None if plan.found is None else self._require_ledger().key(plan.found)
        if plan.picture is None:
            if key is not None and plan.found is not None:
                confirmations.add(plan.found, key, plan.origin, encoded=False)
            return None
        if key is not None:
            if confirmations.join(key, plan.origin):
                return None
            if key.digest in self._begun:
                self._twins.setdefault(key.digest, []).append(plan.origin)
                return None
            self._begun.add(key.digest)
        self._under_way[plan.picture.number] = plan.origin
        return plan.picture

    def _take(self, encoded: Encoded) -> None:
        """Note what became of a picture, and of those that are the same."""
        origin = self._under_way.pop(encoded.number)
        key = None
        if encoded.identifier is not None:
            key = self._require_ledger().key(encoded.identifier)
        problem = encoded.problem or "nothing is stored under its identifier"
        twins = self._twins.pop(key.digest, []) if key is not None else []
        if key is not None and encoded.identifier is not None:
            self._begun.discard(key.digest)
            add = self._require_confirmations().add
            add(encoded.identifier, key, origin, encoded=True)
            for twin in twins:
                add(encoded.identifier, key, twin, encoded=False)
        else:
            self.report.failures.append(origin.failure(problem))
        self._show()

    def _plans(self) -> Iterator[_Planned]:
        """Plans of the items, in their order, made ahead by some threads."""
        readers = min(_MOST_READERS, len(os.sched_getaffinity(0)))
        window: deque[Future[_Planned]] = deque()
        items = enumerate(self._mine())
        with ThreadPoolExecutor(readers, "s3ec-read") as pool:
            try:
                while not self._stopped.is_set():
                    for number, item in itertools.islice(items, readers * _AHEAD - len(window)):
                        window.append(pool.submit(self._plan, number, item))
                    if not window:
                        return
                    yield window.popleft().result()
            finally:
                for each in window:
                    each.cancel()

    def _mine(self) -> Iterator[SourceItem]:
        """The items of this shard. Which one has an item does not depend on the others."""
        number, parts = self._options.shard
        mine = (item for item in self._items if parts == 1 or _shard_of(item, parts) == number)
        return itertools.islice(mine, self._options.limit)

    def _plan(self, number: int, item: SourceItem) -> _Planned:
        """In a thread: what is to be done for one item, by what the bucket has."""
        try:
            return self._plan_readable(number, item)
        except SourceError as exc:
            return _Planned(failure=_failure(item, exc.reason))
        except EncoderError:
            raise
        except S3ECError as exc:  # a bucket that the item lies in, above all
            return _Planned(failure=_failure(item, str(exc)))

    def _plan_readable(self, number: int, item: SourceItem) -> _Planned:
        ledger = self._require_ledger()
        stamp = stamp_of(item)
        mine = _row_of(item, ledger.catalogue.by_document(item.document, item.page))
        data: bytes | None = None
        if mine is not None and stamp is not None and mine.extra.get(STAMP) == stamp:
            sha256 = mine.sha256
        else:
            data = item.read()
            sha256 = hashlib.sha256(data).hexdigest()
        nbytes = len(data or b"")
        origin = _Origin(item, sha256, stamp)
        known = mine
        if mine is None or mine.sha256 != sha256 or not self._is_wanted(mine):
            known = ledger.catalogue.by_sha256(sha256)
        if known is not None and self._is_wanted(known) and known.modality == item.modality:
            key = ledger.key(known.identifier)
            if key is not None and ledger.holds(key):
                row = origin.row(known, time.time())
                is_same = mine is not None and _says_the_same(mine, row)
                return _Planned(nbytes, origin, row=None if is_same else row)
        if data is None:
            data = item.read()
            nbytes = len(data)
        uuid = f"sha256:{sha256}" if self._options.identifier == "sha256" else None
        picture = Picture(number, item.modality, data, uuid)
        name = self._encoder.identify(picture)
        key = None if name is None else ledger.key(name)
        if name is not None and key is not None and ledger.holds(key):
            return _Planned(nbytes, origin, found=name)
        return _Planned(nbytes, origin, found=name, picture=picture)

    def _is_wanted(self, row: CatalogRow) -> bool:
        """Whether its embedding is called as this job calls them."""
        by_client = row.identifier == f"sha256:{row.sha256}"
        return by_client == (self._options.identifier == "sha256")

    def _require_ledger(self) -> Ledger:
        if self._ledger is None:
            raise EncoderError("the job has not begun")
        return self._ledger

    def _require_confirmations(self) -> Confirmations:
        if self._confirmations is None:
            raise EncoderError("the job has not begun")
        return self._confirmations


def _row_of(item: SourceItem, rows: Sequence[CatalogRow]) -> CatalogRow | None:
    return next(
        (row for row in rows if row.page == item.page and row.modality == item.modality), None
    )


def _says_the_same(old: CatalogRow, new: CatalogRow) -> bool:
    """Whether a new row would only have a later time."""
    names = ("uri", "sha256", "identifier", "rows", "width", "dtype", "nbytes")
    return dict(old.extra) == dict(new.extra) and all(
        getattr(old, name) == getattr(new, name) for name in names
    )


def _shard_of(item: SourceItem, parts: int) -> int:
    return zlib.crc32(f"{item.document}\0{item.page}".encode()) % parts


def stamp_of(item: SourceItem) -> list[int] | None:
    """By what a file is taken for the one that was read before; None for what is no file here.

    Size and time of the last change, and for a page how it is drawn.
    """
    address = urlsplit(item.uri)
    if address.scheme != "file":
        return None
    try:
        found = os.stat(unquote(address.path))
    except OSError:
        return None
    stamp = [found.st_size, found.st_mtime_ns]
    return stamp if item.page is None else [*stamp, item.options.dpi]


def total_of(make_items: Callable[[], Iterable[SourceItem]], options: JobOptions) -> Any:
    """Count the items of a source beside the job; what is known of that by now."""
    counted: list[int | None] = [None]

    def count() -> None:
        number, parts = options.shard
        try:
            total = sum(
                1 for item in make_items() if parts == 1 or _shard_of(item, parts) == number
            )
        except Exception:
            log.debug("the items are not counted", exc_info=True)
            return
        counted[0] = total if options.limit is None else min(total, options.limit)

    threading.Thread(target=count, name="s3ec-count", daemon=True).start()
    return lambda: counted[0]

# SPDX-License-Identifier: Apache-2.0
"""What a job waits for: the bucket's word for each embedding, then a row in the catalogue.

``Ledger`` asks the bucket, by the index and by the catalogue. ``Confirmations`` is the job's queue
of what is encoded and not confirmed yet, with the thread that works on it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from s3ec.corpus.catalog import CatalogWriter, check_row, read_table
from s3ec.corpus.catalog_file import STAMP, CatalogRow
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.encoder import EncoderError
from s3ec.corpus.entries import CorpusEntry, find_entry, read_header
from s3ec.corpus.reading import without_secrets
from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.identity import Key, Layout, Namespace, naming_of
from s3ec.index.child import in_process
from s3ec.index.local import NodeFolder
from s3ec.index.reader import ManifestIndex
from s3ec.runtime import await_in_thread
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import with_conditional_put
from s3ec.tier import Tier

if TYPE_CHECKING:
    from s3ec.corpus.bucket import OpenBucket
    from s3ec.corpus.sources import SourceItem

Counted = Literal["encoded", "catalogued", "renewed"]
log = logging.getLogger(__name__)

# How often the index is asked for what was confirmed. Writers announce every 2 s.
_LOOK_S = 1.0
# Items that are encoded and not confirmed. More would only fill the spool.
_MOST_UNCONFIRMED = 2048
# Rows of the catalogue that are written at once, and how long one waits at most for others.
_ROWS_AT_A_TIME = 5000
_ROWS_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that has no embedding, or none that is confirmed, and why."""

    document: str
    page: int | None
    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of an item without its bytes.

    Attributes:
        stamp: How it was named, and by what its file is known again.
    """

    item: SourceItem
    sha256: str
    stamp: str

    def failure(self, reason: str) -> Failure:
        return failure_of(self.item, reason)

    def row(self, like: CatalogRow, stored_s: float) -> CatalogRow:
        """Its row: ``like`` is one of the same embedding."""
        extra = {**self.item.extra, STAMP: self.stamp}
        return CatalogRow(
            document=self.item.document,
            page=self.item.page,
            uri=without_secrets(self.item.uri),
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
            made_by=like.made_by,
        )


# For what is not known of an item before it is encoded.
_ANY = CatalogRow("", None, "", "", "0" * 64, "image", 1, 1, "bfloat16", None, 1, 0.0, {})


def failure_of(item: SourceItem, reason: str) -> Failure:
    return Failure(item.document, item.page, without_secrets(item.uri), reason)


class Ledger:
    """What the bucket has by its own word: the index for embeddings, the catalogue for documents.

    Coroutines run on the corpus's loop. ``holds``, and what reads the catalogue, are for any
    thread.

    Attributes:
        has_catalogue: False under a tenant's secret, where ``catalogue`` stays empty.
        catalogue: As it was at the start.
    """

    def __init__(self, corpus: OpenBucket, namespace: Namespace) -> None:
        """Open this node's tier; no request goes out.

        Raises:
            ConfigError: ``cache_dir`` cannot be used, or the tenant's secret cannot be read.
        """
        settings = corpus.settings
        self._corpus = corpus
        self._layout = Layout(namespace.name)
        self._naming = naming_of(settings)
        # A catalogue would say what a secret is to keep: which picture lies under which name.
        self.has_catalogue = self._naming.tenant is None
        self.catalogue = CatalogIndex()
        self._writer: CatalogWriter | None = None
        counters = Counters()
        self._tier = Tier(
            settings.cache_dir,
            namespace.name,
            budget_bytes=int(settings.cache_bytes),
            min_free_bytes=int(settings.min_free_bytes),
            counters=counters,
        )
        self._counters = counters
        self._index: ManifestIndex | None = None

    def close(self) -> None:
        """Fold the parts that this job has written, and let go of this node's files."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                self._corpus.run(lambda store: writer.fold())
            except S3ECError as exc:  # such as that of a job without the right to delete
                log.info("the catalogue's parts are left to `s3ec gc`: %s", exc)
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
        index = self._index = ManifestIndex(
            *(store, self._layout),
            NodeFolder.of(
                self._tier.folders, self._layout.namespace, need_room=self._tier.need_room
            ),
            jobs=in_process(store),
            disk=await_in_thread,
            counters=self._counters,
            refresh_s=0.0,  # each look asks the bucket
        )
        await index.refresh(now=True)
        if self.has_catalogue:
            table = await read_table(store, self._layout)
            self.catalogue = await asyncio.to_thread(CatalogIndex.from_table, table)

    def key(self, identifier: str) -> Key | None:
        """Where an identifier's embedding lies; None where nothing may be stored under it."""
        return self._naming.make_key(identifier)

    def holds(self, key: Key) -> bool:
        """Whether a writer has said that the bucket confirmed this one."""
        return self._index is not None and self._index.maybe_contains(key)

    def mark_missing(self, key: Key) -> None:
        """The bucket does not hold what the index names; the node's engines are told."""
        if self._index is not None:
            self._index.mark_missing(key, absent=True)

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
        nbytes = self._index.nbytes(key) if self._index is not None else None
        entry: CorpusEntry | None = None
        if nbytes:
            entry = CorpusEntry(self._layout.namespace, key.name, nbytes, 0.0)
            try:
                entry = await read_header(store, entry)
            except CorruptEntryError:  # its size may be another than the index says
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
            made_by=entry.header.maker.made_by,
        )

    def require_row(self, origin: Origin) -> None:
        """Refuse an item that the catalogue cannot name, before it is encoded.

        Raises:
            ConfigError: Says what is wrong with it; all rows written with its own would be lost.
        """
        if self.has_catalogue:
            check_row(origin.row(_ANY, 0.0))

    async def append(self, store: Store, rows: Sequence[CatalogRow]) -> None:
        """Add rows to the catalogue, confirmed when this returns."""
        if not rows or not self.has_catalogue:
            return
        if self._writer is None:
            self._writer = CatalogWriter(await with_conditional_put(store), self._layout)
        await self._writer.append(rows)


@dataclass(slots=True)
class _Unconfirmed:
    """An embedding that the bucket has to confirm, and the items that wait for it."""

    identifier: str
    key: Key
    encoded: list[Origin] = field(default_factory=list)
    others: list[Origin] = field(default_factory=list)

    @property
    def origins(self) -> list[Origin]:
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
    waiting      unconfirmed  its object is bad, or the end came first
    ===========  ===========  ==================================================================

    What is counted is catalogued. A job that is killed before that finds the embedding in the
    index, and only adds the row.
    """

    def __init__(
        self, corpus: OpenBucket, ledger: Ledger, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._corpus = corpus
        self._ledger = ledger
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[bytes, _Unconfirmed] = {}
        self._rows: list[tuple[CatalogRow, Counted]] = []
        self._failures: list[Failure] = []
        self._ending = False
        self._is_idle = True
        self._problem = ""
        self._has_failed = False
        self._said_gone = False
        self._moved_s = time.monotonic()
        self.encoded = self.catalogued = self.stored_bytes = 0
        self._thread = threading.Thread(target=self._run, name="s3ec-confirm", daemon=True)
        self._thread.start()

    # -- the job's thread --------------------------------------------------------------------

    def add(self, identifier: str, key: Key, origin: Origin, *, encoded: bool) -> None:
        """Wait for the bucket to confirm an embedding, for this item."""
        with self._changed:
            waiting = self._waiting.setdefault(key.digest, _Unconfirmed(identifier, key))
            (waiting.encoded if encoded else waiting.others).append(origin)
            self._moved_s = time.monotonic() if len(self._waiting) == 1 else self._moved_s
            self._changed.notify_all()

    def join(self, key: Key, origin: Origin) -> bool:
        """Have an item wait for what another one has encoded; False where none has."""
        with self._changed:
            waiting = self._waiting.get(key.digest)
            if waiting is not None:
                waiting.others.append(origin)
            return waiting is not None

    def add_row(self, row: CatalogRow, *, is_new: bool) -> None:
        """Write a row for an embedding that is there.

        Args:
            is_new: The document had none; else it only says something else of it.
        """
        with self._changed:
            self._rows.append((row, "catalogued" if is_new else "renewed"))
            self._changed.notify_all()

    def wait_for_room(self, stopped: threading.Event, patience_s: float) -> None:
        """Return when fewer wait than may; the bucket sets the pace then.

        Raises:
            EncoderError: It has confirmed nothing for too long.
        """
        with self._changed:
            while self._has_failed or len(self._waiting) >= _MOST_UNCONFIRMED:
                if stopped.is_set():
                    return
                if self._has_failed:
                    raise EncoderError(f"nothing can be confirmed{self._why()}")
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
                if self._has_failed or time.monotonic() - self._moved_s > patience_s:
                    return
                self._changed.wait(_LOOK_S)

    def end(self) -> list[Failure]:
        """Write what is confirmed, and end the thread; the items that are not."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        reason = f"the bucket has not confirmed it{self._why()}; run the job again"
        left = [
            origin.failure(reason) for each in self._waiting.values() for origin in each.origins
        ]
        reason = f"the catalogue could not be written{self._why()}; run the job again"
        left += self._failures
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
                self._problem, self._has_failed = f"{type(exc).__name__}: {exc}", True
            if is_last or self._has_failed:
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
                if isinstance(facts, str):
                    self._failures += [one.failure(facts) for one in each.origins]
                    continue
                self._rows += [(one.row(facts, now_s), "encoded") for one in each.encoded]
                self._rows += [(one.row(facts, now_s), "catalogued") for one in each.others]
            if found:
                self._moved_s = time.monotonic()
            self._changed.notify_all()

    async def _confirmed(self, store: Store) -> list[tuple[bytes, CatalogRow | str]]:
        """What the index tells of, by digest: its row, or why it will not be had."""
        await self._ledger.refresh()
        with self._changed:
            waiting = list(self._waiting.values())
        told = [each for each in waiting if self._ledger.holds(each.key)]

        async def read(each: _Unconfirmed) -> CatalogRow | str | None:
            try:
                row = await self._ledger.describe(store, each.identifier, each.key)
            except CorruptEntryError as exc:  # it blocks its key, and is to keep no other back
                return f"{exc}; `s3ec verify --deep --repair` deletes it, then run the job again"
            if row is None:  # it was deleted, or is stored a moment from now
                self._ledger.mark_missing(each.key)
            return row

        rows = await in_parallel(told, read)
        gone = rows.count(None)
        if gone and not self._said_gone:
            self._said_gone = True
            log.warning(
                "the index names %d embeddings that the bucket does not hold, and engines do not "
                "store those again until `s3ec manifest rebuild`, or the next listing",
                gone,
            )
        return [
            (each.key.digest, row) for each, row in zip(told, rows, strict=True) if row is not None
        ]

    def _write(self) -> None:
        with self._changed:
            batch = list(self._rows)
        if not batch:
            return
        self._corpus.run(lambda store: self._ledger.append(store, [row for row, _ in batch]))
        with self._changed:
            del self._rows[: len(batch)]
            for row, how in batch:
                self.encoded += how == "encoded"
                self.catalogued += how == "catalogued"
                self.stored_bytes += row.nbytes if how == "encoded" else 0
            self._moved_s = time.monotonic()
            self._changed.notify_all()

# SPDX-License-Identifier: Apache-2.0
"""Confirmations of a job: the bucket confirms each embedding, then the catalogue gets its row.

``Ledger`` reads the bucket's index and its catalogue. ``Confirmations`` keeps the embeddings that
are encoded but not confirmed yet, and the rows that are not written yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from s3ec.corpus.catalog import CatalogWriter, read_table
from s3ec.corpus.catalog_file import STAMP, CatalogRow, check_row
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.encoder import EncoderError
from s3ec.corpus.entries import CorpusEntry, read_header
from s3ec.corpus.reading import without_secrets
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, S3ECError
from s3ec.identity import Key, Layout, Namespace, naming_of
from s3ec.index.child import in_process
from s3ec.index.reader import ManifestIndex
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel

if TYPE_CHECKING:
    from s3ec.corpus.bucket import OpenBucket
    from s3ec.corpus.precompute import PrecomputeReport
    from s3ec.corpus.sources import SourceItem

Counted: TypeAlias = Literal["encoded", "catalogued", "renewed"]
log = logging.getLogger(__name__)

# How often the index is read for new confirmations. Writers announce every 2 s.
_LOOK_S = 1.0
# The most embeddings that are encoded and not confirmed. More would only fill the spool.
_MOST_UNCONFIRMED = 2048
# Rows of the catalogue that are written at once, and how long a row waits at most for others.
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
        sha256: Of its bytes; empty until they are read.
        stamp: How it was named, and what identifies its file in a later job.
    """

    item: SourceItem
    sha256: str
    stamp: str

    def row(self, like: CatalogRow, stored_s: float) -> CatalogRow:
        """Make its row from ``like``, a row of the same embedding."""
        item = self.item
        return replace(
            like,
            document=item.document,
            page=item.page,
            uri=without_secrets(item.uri),
            sha256=self.sha256,
            modality=item.modality,
            stored_s=stored_s,
            extra={**item.extra, STAMP: self.stamp},
        )


# The values of a row before its item is read and encoded.
_ANY = CatalogRow("", None, "", "", "0" * 64, "image", 1, 1, "bfloat16", None, 1, 0.0, {})


def failure_of(item: SourceItem, reason: str) -> Failure:
    return Failure(item.document, item.page, without_secrets(item.uri), reason)


class Ledger:
    """What the bucket has: embeddings by its index, documents by its catalogue.

    Coroutines run on the corpus's loop. ``holds``, and reads of the catalogue, are for any thread.

    Attributes:
        has_catalogue: False under a tenant's secret, where ``catalogue`` stays empty.
        catalogue: As it was at the start.
        index: Asks the bucket with each refresh.
        key: Makes the key of an identifier; None if nothing may be stored under it.
    """

    index: ManifestIndex

    def __init__(self, corpus: OpenBucket, namespace: Namespace) -> None:
        """Read the index, into this node's files, and the catalogue.

        Raises:
            ConfigError: The tenant's secret cannot be read.
            TierError: ``cache_dir`` cannot be used.
            UnavailableError, AccessError: The bucket does not answer.
            CorruptEntryError: A part of the catalogue is unusable.
        """
        self._corpus = corpus
        self._layout = Layout(namespace.name)
        naming = naming_of(corpus.settings)
        self.key = naming.make_key
        # A catalogue would reveal what the secret protects: which picture has which name.
        self.has_catalogue = naming.tenant is None
        self.catalogue = CatalogIndex()
        self._writer: CatalogWriter | None = None
        corpus.run(self._open)

    def close(self) -> None:
        """Fold the parts that this job has written, and release this node's files."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                self._corpus.run(lambda store: writer.fold())
            except S3ECError as exc:  # such as that of a job without the right to delete
                log.info("the catalogue's parts are left to `s3ec gc`: %s", exc)
        self._corpus.run(lambda store: self.index.close())

    async def _open(self, store: Store) -> None:
        self.index = ManifestIndex(
            *(store, self._layout, self._corpus.index_folder(self._layout)),
            jobs=in_process(store),
            disk=asyncio.to_thread,
            counters=Counters(),
            refresh_s=0.0,
        )
        try:
            await self.index.refresh(now=True)
            if self.has_catalogue:
                table = await read_table(store, self._layout)
                self.catalogue = await asyncio.to_thread(CatalogIndex.from_table, table)
        except BaseException:
            await self.index.close()  # its claim on this node's refreshes
            raise

    def holds(self, key: Key) -> bool:
        """True if a writer has announced that the bucket confirmed this key's entry."""
        return self.index.maybe_contains(key)

    async def describe(self, store: Store, key: Key) -> CatalogRow | None:
        """Describe an embedding by the header of its object; None if the object is gone.

        Raises:
            UnavailableError, AccessError: The bucket does not answer.
            CorruptEntryError: The object is not a valid entry.
        """
        # One request: the index has the size. An object of that name from another s3ec may have
        # another size; then the bucket is asked for it.
        told = CorpusEntry(self._layout.namespace, key.name, self.index.nbytes(key) or 0, 0.0)
        try:
            entry = await read_header(store, told)
        except CorruptEntryError:
            info = await store.head(told.object_name)
            if info is None:
                return None
            entry = await read_header(store, replace(told, nbytes=info.nbytes))
        if entry is None or entry.header is None:
            return None
        header = entry.header
        return replace(
            _ANY,
            identifier=key.identifier,
            rows=header.shape.rows,
            width=header.shape.width,
            dtype=header.shape.dtype,
            placeholder=header.placeholder,
            nbytes=entry.nbytes,
            made_by=header.made_by,
        )

    def require_row(self, origin: Origin) -> None:
        """Refuse an item that the catalogue cannot name, before it is encoded.

        Raises:
            ConfigError: Says what is wrong with it; all rows in its batch would be lost.
        """
        if self.has_catalogue:
            check_row(replace(origin, sha256=origin.sha256 or _ANY.identifier).row(_ANY, 0.0))

    async def append(self, store: Store, rows: Sequence[CatalogRow]) -> None:
        """Add rows to the catalogue; they are confirmed when this returns."""
        if self.has_catalogue:
            if self._writer is None:
                self._writer = CatalogWriter(store, self._layout)
            await self._writer.append(rows)


class Confirmations:
    """Waits for the bucket, then writes the catalogue, in a thread of its own.

    ``wait_for_room`` and ``settle`` wait for the thread, and ``end`` ends it.

    States of an item:

    ===========  ===========  ==================================================================
    state        goes to      when
    ===========  ===========  ==================================================================
    (new)        waiting      ``add``: it is encoded, or the index had it
    (new)        confirmed    ``add_row``: the embedding and its facts were known
    waiting      confirmed    the index has its key, and its header was read back
    confirmed    catalogued   the bucket has confirmed a part of the catalogue with its row
    waiting      failed       its object is bad, or the end came first
    ===========  ===========  ==================================================================

    An item is counted once it is catalogued. If a job is killed before that, the next one finds the
    embedding in the index, and only adds the row. A request that fails is repeated, until the end.

    Args:
        report: Gets the counts of catalogued items, and the failures.
    """

    def __init__(self, corpus: OpenBucket, ledger: Ledger, report: PrecomputeReport) -> None:
        self._corpus = corpus
        self._ledger = ledger
        self._report = report
        self._waiting: dict[Key, list[tuple[Origin, Counted]]] = {}
        self._rows: list[tuple[CatalogRow, Counted]] = []
        self._problem = self._gone = ""
        self._is_settling = self._is_ending = False  # no more will come
        self._moved_s = self._written_s = time.monotonic()
        self._lock = threading.Condition()  # of all above; notified after each pass
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._work, name="s3ec-confirm", daemon=True)
        self._thread.start()

    def add(self, key: Key, origin: Origin, how: Counted) -> None:
        """Wait for the bucket to confirm an embedding."""
        with self._lock:
            if not self._waiting:
                self._moved_s = time.monotonic()
            self._waiting.setdefault(key, []).append((origin, how))

    def waits_for(self, key: Key) -> bool:
        """True if an item waits for this embedding."""
        return key in self._waiting

    def add_row(self, row: CatalogRow, how: Counted) -> None:
        """Queue the row of an embedding that the bucket has."""
        with self._lock:
            self._rows.append((row, how))
            if len(self._rows) >= _ROWS_AT_A_TIME and not self._problem:
                self._soon.set()

    def wait_for_room(self, stopped: threading.Event, patience_s: float) -> None:
        """Wait until fewer embeddings wait than the limit, so that the bucket sets the pace.

        Raises:
            EncoderError: The bucket has confirmed nothing for ``patience_s``.
        """
        with self._lock:
            while len(self._waiting) >= _MOST_UNCONFIRMED and not stopped.is_set():
                if time.monotonic() - self._moved_s > patience_s:
                    raise EncoderError(
                        f"the bucket has confirmed nothing for {patience_s:.0f} s{self._why()}"
                    )
                self._lock.wait(_LOOK_S)

    def settle(self, patience_s: float) -> None:
        """Wait until all is confirmed and catalogued, or until ``patience_s`` without progress."""
        with self._lock:
            self._is_settling, self._moved_s = True, time.monotonic()
            self._soon.set()
            while (self._waiting or self._rows) and time.monotonic() - self._moved_s <= patience_s:
                self._lock.wait(_LOOK_S)

    def end(self) -> None:
        """Check once more, write the confirmed rows, and report the items that are unconfirmed."""
        self._is_ending = True
        self._soon.set()
        self._thread.join()
        self._round()
        reason = f"the bucket has not confirmed it{self._why()}; run the job again"
        left = [failure_of(one.item, reason) for each in self._waiting.values() for one, _ in each]
        reason = f"the catalogue could not be written{self._why()}; run the job again"
        left += [Failure(row.document, row.page, row.uri, reason) for row, _ in self._rows]
        self._report.unconfirmed += left

    def _why(self) -> str:
        why = self._problem or self._gone
        return f" ({why})" if why else ""

    # -- in its thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_ending:
            self._round()
            self._soon.wait(_LOOK_S)
            self._soon.clear()  # before the pass, which sees what came until then

    def _round(self) -> None:
        problem = ""
        for step in (self._look, self._write):
            try:
                step()
            except Exception as exc:  # the job must end with a report, whatever it is
                problem = str(exc) or type(exc).__name__
                if not self._problem:
                    is_ours = isinstance(exc, S3ECError)
                    log.warning("the bucket is asked again: %s", exc, exc_info=not is_ours)
        with self._lock:
            self._problem = problem
            self._lock.notify_all()

    def _look(self) -> None:
        """Refresh the index, and read the headers of the waiting entries that it has."""
        with self._lock:
            keys = [*self._waiting]
        if keys:
            found = self._corpus.run(lambda store: self._confirmed(store, keys))
            with self._lock:
                self._confirm(found)

    async def _confirmed(
        self, store: Store, keys: Sequence[Key]
    ) -> Mapping[Key, CatalogRow | str | None]:
        """For each key that the index has: its row, why it is unusable, or None if it is gone."""
        await self._ledger.index.refresh()
        told = [key for key in keys if self._ledger.holds(key)]

        async def read(key: Key) -> CatalogRow | str | None:
            try:
                row = await self._ledger.describe(store, key)
            except CorruptEntryError as exc:  # it blocks its own key, and must delay no other
                return f"{exc}; `s3ec verify --deep --repair` deletes it, then run the job again"
            if row is None:  # not requested each second; and this node's engines store it again
                self._ledger.index.mark_missing(key, absent=True)
            return row

        found = dict(zip(told, await in_parallel(told, read), strict=True))
        if None in found.values():
            await self._ledger.index.refresh()  # announces it to this node's engines
        return found

    def _confirm(self, found: Mapping[Key, CatalogRow | str | None]) -> None:
        now_s = time.time()
        for key, facts in found.items():
            if facts is None:  # engines of other nodes do not store it until the rebuild
                self._gone = (
                    "the index names what the bucket does not hold; `s3ec manifest rebuild` mends "
                    "that"
                )
                continue
            self._moved_s = time.monotonic()
            for origin, how in self._waiting.pop(key, ()):
                if isinstance(facts, str):
                    self._report.unconfirmed.append(failure_of(origin.item, facts))
                else:
                    self._rows.append((origin.row(facts, now_s), how))

    def _write(self) -> None:
        """Write the rows that wait, if a write is due."""
        with self._lock:
            is_late = time.monotonic() - self._written_s >= _ROWS_EVERY_S
            is_last = self._is_ending or (self._is_settling and not self._waiting)
            is_due = is_late or is_last or len(self._rows) >= _ROWS_AT_A_TIME
            batch = [*self._rows] if is_due else []
        if not batch:
            return
        rows = [row for row, _ in batch]
        self._corpus.run(lambda store: self._ledger.append(store, rows))
        with self._lock:
            del self._rows[: len(batch)]
            for row, how in batch:
                self._report.encoded += how == "encoded"
                self._report.catalogued += how == "catalogued"
                self._report.stored_bytes += row.nbytes if how == "encoded" else 0
            self._moved_s = self._written_s = time.monotonic()

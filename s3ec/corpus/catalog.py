# SPDX-License-Identifier: Apache-2.0
"""The catalogue: which document, page and file each embedding of a corpus belongs to.

The catalogue is a folder of Parquet files in the bucket, its parts. A part is written once, under a
ULID by the server's clock, and never changed. A row names the part with which it was appended, and
of two rows for one document, page, modality and place that of the later part counts. So neither the
order in which parts are read matters, nor rows that two parts share. This makes folding safe: a
fold first writes one part with all rows of some others, and then deletes those. Two folds at once,
or one that is killed between the two steps, leave rows twice and lose none.

A job appends parts as it runs, and folds them at its end. ``gc`` folds parts of jobs that were
killed, or that may not delete. A part whose name is later than its own date was not named by the
server's clock: it is left out, with a message, since its rows would count for good.

Rows do not tell whether an entry still exists; the index and the bucket do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from s3ec.corpus.catalog_file import (
    COLUMNS,
    KEY,
    MAX_PART_BYTES,
    MAX_UNPACKED_BYTES,
    OWN_ROWS,
    PART,
    CatalogRow,
    Winners,
    decode_part,
    encode_part,
    free_unused,
    in_parts,
    newest,
    require_pyarrow,
    schema,
    to_rows,
    to_table,
)
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    UnavailableError,
)
from s3ec.identity import Layout, make_key
from s3ec.index.listing import listed
from s3ec.index.names import NEVER, Names, ServerClock, is_ahead
from s3ec.namespaces import read_namespaces
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store, VanishedError, get_in_parts
from s3ec.store.concurrency import in_parallel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from s3ec.corpus.bucket import OpenBucket
    from s3ec.tenant import Tenant

log = logging.getLogger(__name__)

FOLDED_BYTES = 4 * 2**20
"""Size limit of a folded part. Only parts of less than half of it are folded, so that a large
catalogue is not rewritten again and again. In memory they take some 50 MiB."""
_RANGES_AT_A_TIME = 4
# The most listings of one read; another is needed if a fold has deleted parts of the one before.
_LISTINGS = 10


# -- what is there ---------------------------------------------------------------------------------


async def list_parts(store: Store, layout: Layout) -> dict[str, ObjectInfo]:
    """List the parts by ULID, in rising order; objects without a part's name are left out.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    found = {}
    async for info in listed(store, layout.catalog):
        ulid = layout.catalog_part_of(info.name)
        if ulid is not None:
            found[ulid] = info
    return dict(sorted(found.items()))


async def read_parts(
    store: Store,
    layout: Layout,
    *,
    problem: Callable[[CorruptEntryError], object] = log.debug,
    only: Collection[str] | None = None,
) -> AsyncGenerator[tuple[str, pa.Table], None]:
    """Read each part once, with its ULID, also during a fold. The caller closes it.

    At its end every listed part was read. Rows of parts that a fold deletes meanwhile are in the
    part that the fold wrote, which is read as well. Memory: parts of FOLDED_BYTES together, or one
    that is larger.

    Args:
        problem: Called with the error of each unusable part.
        only: ULIDs of the parts to read; None for all. Parts that are gone are left out.

    Raises:
        ConfigError: pyarrow is missing.
        UnavailableError: The store does not answer now, or parts vanish again and again.
        AccessError: It refuses.
    """
    require_pyarrow()

    async def read(part: tuple[str, ObjectInfo]) -> pa.Table | CorruptEntryError | None:
        try:
            return await _read_part(store, layout, *part)
        except VanishedError:
            return None
        except CorruptEntryError as exc:
            return exc

    known: set[str] = set()
    for _ in range(_LISTINGS):
        parts = await list_parts(store, layout)
        new = {ulid: info for ulid, info in parts.items() if ulid not in known}
        if only is not None:
            new = {ulid: info for ulid, info in new.items() if ulid in only}
        has_vanished = False
        for some in _groups(new):
            answers = await in_parallel([(ulid, new[ulid]) for ulid in some], read)
            for ulid in some:
                answer = answers.pop(0)
                if answer is None:
                    has_vanished = True
                    continue
                known.add(ulid)
                if isinstance(answer, CorruptEntryError):
                    problem(answer)
                else:
                    yield ulid, answer
                del answer  # not in memory while others are read
            free_unused()
        if not has_vanished or only is not None:
            return
    raise UnavailableError(f"{layout.catalog}: its parts are folded over and over")


def _groups(parts: Mapping[str, ObjectInfo]) -> Iterator[list[str]]:
    """Group parts, in their order, by FOLDED_BYTES together, or one that is larger."""
    group: list[str] = []
    nbytes = 0
    for ulid, info in parts.items():
        if group and nbytes + info.nbytes > FOLDED_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(ulid)
        nbytes += info.nbytes
    if group:
        yield group


async def _read_part(store: Store, layout: Layout, ulid: str, info: ObjectInfo) -> pa.Table:
    """Download one part and check it; once more if it was damaged on its way.

    Raises:
        VanishedError: The bucket no longer has it.
        CorruptEntryError: It is unusable; the message names it.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    if is_ahead(ulid, info):
        raise CorruptEntryError(
            f"{info.name}: its name is of a time after its own date, so its rows would count for "
            "good; delete it, and run the job again that wrote it",
            reason="time",
        )
    if info.nbytes > MAX_PART_BYTES:
        raise CorruptEntryError(
            f"{info.name}: {info.nbytes} bytes are too many for a part of the catalogue",
            reason="size",
        )

    async def read() -> pa.Table:
        blob = await get_in_parts(store, info.name, info.nbytes, at_a_time=_RANGES_AT_A_TIME)
        return await asyncio.to_thread(
            decode_part, blob, layout.namespace, ulid=ulid, name=info.name
        )

    try:
        return await read()
    except CorruptEntryError as exc:
        if exc.reason in ("size", "version", "namespace"):
            raise
    return await read()


async def read_table(
    store: Store,
    layout: Layout,
    *,
    columns: Sequence[str] = COLUMNS,
    note: Callable[[str], None] | None = None,
) -> pa.Table:
    """Read the whole catalogue, sorted by document and page, with the newest row of each.

    Memory: some 500 bytes per row, and up to half as much again while it is sorted.

    Args:
        columns: The columns to keep.
        note: Called with a message for each unusable part that is left out; the log if None.

    Raises:
        ConfigError: pyarrow is missing.
        CorruptEntryError: None of its parts can be used; the message names one.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    problems: list[CorruptEntryError] = []
    async with aclosing(read_parts(store, layout, problem=problems.append)) as coming:
        kept = [name for name in (*COLUMNS, PART) if name in {*KEY, PART, *columns}]
        tables = [table.select(kept) async for _, table in coming]
    if problems and not tables:
        raise problems[0]
    for exc in problems:
        (note or log.warning)(f"this part of the catalogue is left out: {exc}")
    if not tables:
        return schema().empty_table().select(columns)
    return (await asyncio.to_thread(newest, tables)).select(columns)


# -- writing ---------------------------------------------------------------------------------------


def refuse_tenant(is_one: bool) -> None:
    """Raise ConfigError if a tenant's secret hides the names that a catalogue would reveal.

    Jobs call it before they encode, since they append later.
    """
    if is_one:
        raise ConfigError(
            "`tenant_key`: there is no catalogue with a tenant's secret, since it would hold in "
            "plain text what the secret hides: identifiers, documents and hashes of files",
            field="tenant_key",
        )


class CatalogWriter:
    """Writes into a catalogue: appends rows, folds parts, drops rows. For one event loop.

    The first write reads the server's clock: a PUT, a HEAD and a deletion.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        """Set up; no request is sent.

        Raises:
            ConfigError: pyarrow is missing.
        """
        require_pyarrow()
        self._store = store
        self._layout = layout
        self._clock = ServerClock()
        self._is_clock_set = False
        self._names = Names()
        self._own: set[str] = set()

    async def append(self, rows: Iterable[CatalogRow]) -> None:
        """Append rows as one new part; the bucket has confirmed it when this returns.

        A row replaces rows that were confirmed when this began; of two new rows for one document
        and place the last counts. Costs a LIST and a PUT, and a GET the first time. A great many
        rows become several parts.

        Args:
            rows: None of them is written if one is invalid.

        Raises:
            ConfigError: A value is invalid, or the namespace has a tenant's secret.
            UnavailableError, AccessError: The store does not answer now, or refuses. The rows may
                be stored or not, and may be appended again.
        """
        tables = [to_table(some) for some in in_parts(rows)]
        if tables and not self._is_clock_set:
            [about] = await read_namespaces(self._store, [self._layout.namespace])
            refuse_tenant("tenant" in about.descriptor)
        for table in tables:
            name = await self._next_name()
            self._own.add(name)
            await self._put(name, await asyncio.to_thread(_last_of_each, table, name))

    async def fold(self, *, everything: bool = False) -> None:
        """Merge the small parts that this writer has appended, or all small parts, into few.

        Unusable parts stay as they are.

        Raises:
            UnavailableError, AccessError: The store does not answer now, or refuses. No row is
                lost.
        """
        parts = await list_parts(self._store, self._layout)
        small = {
            ulid: info
            for ulid, info in parts.items()
            if info.nbytes < FOLDED_BYTES // 2 and (everything or ulid in self._own)
        }
        for group in _groups(small):
            if len(group) < 2:
                continue
            coming = read_parts(self._store, self._layout, only=group)
            async with aclosing(coming):
                read = {ulid: table async for ulid, table in coming}
            if len(read) > 1:
                await self._require_deletions()
                ulids, tables = list(read), list(read.values())
                del read
                await self._write(await asyncio.to_thread(newest, tables))
                await self._delete(ulids)

    async def drop(self, is_suspect: Callable[[str], bool], *, tenant: Tenant | None = None) -> int:
        """Rewrite the catalogue without rows whose entry is gone, and delete its old parts.

        An entry is checked after the catalogue was read: a row is written after its entry, so an
        entry that a job stores again meanwhile keeps its row. An older row of the same document and
        place is dropped with the newer one: it describes an earlier state of the document. A fold
        at the same time may bring rows back; the next audit finds them again. Costs a HEAD for each
        suspect of each part. Memory: some 100 bytes per row, and a part.

        Args:
            is_suspect: True if the entry of an identifier may be gone. Called in another thread.
            tenant: The tenant whose secret is in the names.

        Returns:
            How many rows were dropped.

        Raises:
            UnavailableError, AccessError: The store does not answer now, or refuses. No other row
                is lost.
        """
        store, layout = self._store, self._layout
        winners, ulids = Winners(), []

        def suspects(table: pa.Table) -> list[str]:
            return list(filter(is_suspect, table.column("identifier").unique().to_pylist()))

        async def is_gone(identifier: str) -> bool:
            key = make_key(identifier, tenant)
            return key is None or await store.head(layout.object(key)) is None

        any_suspect = False
        async with aclosing(read_parts(store, layout)) as coming:
            async for ulid, table in coming:
                ulids.append(ulid)
                await asyncio.to_thread(winners.add, table)
                any_suspect = any_suspect or bool(await asyncio.to_thread(suspects, table))
                del table
        if not any_suspect:
            return 0
        await self._require_deletions()
        counts = dict(zip(ulids, winners.masks(), strict=True))
        dropped, old = 0, []
        # Parts are read again, since only the rows' keys were kept. All is written before anything
        # is deleted: an older row must not count meanwhile.
        async with aclosing(read_parts(store, layout, only=ulids)) as coming:
            async for ulid, table in coming:
                names = await asyncio.to_thread(suspects, table)
                looked = await in_parallel(names, is_gone)
                gone = [name for name, absent in zip(names, looked, strict=True) if absent]
                left, went = await asyncio.to_thread(_without, table, counts[ulid], gone)
                dropped += went
                if len(left) < len(table):
                    old.append(ulid)
                    await self._write(left)
                del table, left
        await self._delete(old)
        return dropped

    async def _require_deletions(self) -> None:
        """Delete an unused name: a caller that may not delete would add a part with each fold."""
        await self._store.delete(self._layout.catalog_part(await self._next_name()))

    async def _write(self, table: pa.Table) -> None:
        """Write rows, with their column ``part``, as one part or several."""
        while len(table):
            some = table.slice(0, OWN_ROWS)
            while len(some) > 1 and some.nbytes > MAX_UNPACKED_BYTES // 2:
                some = some.slice(0, len(some) // 2)
            await self._put(self._names.next(self._clock.now_s()), some)
            table = table.slice(len(some))

    async def _delete(self, ulids: Sequence[str]) -> None:
        old = [self._layout.catalog_part(ulid) for ulid in ulids]
        for start in range(0, len(old), DELETE_AT_A_TIME):
            left = await self._store.delete_many(old[start : start + DELETE_AT_A_TIME])
            for exc in left.values():
                raise exc

    async def _next_name(self) -> str:
        """Make a name by the server's clock, later than all names by that clock."""
        if not self._is_clock_set:
            asked = await self._clock.ask(self._store, self._layout)
            self._is_clock_set = True
            with suppress(UnavailableError, AccessError):  # the next snapshot's maker deletes it
                await self._store.delete(asked)
        parts = await list_parts(self._store, self._layout)
        there = (ulid for ulid, info in parts.items() if not is_ahead(ulid, info))
        return self._names.next(self._clock.now_s(), at_least=max(there, default=NEVER))

    async def _put(self, ulid: str, table: pa.Table) -> None:
        body = await asyncio.to_thread(encode_part, table, self._layout.namespace)
        with suppress(ConflictError):  # it is ours, its reply was lost: no other uses the name
            await self._store.put_if_absent(self._layout.catalog_part(ulid), [body])


def _last_of_each(table: pa.Table, ulid: str) -> pa.Table:
    import pyarrow as pa

    part = pa.array([ulid], pa.large_string()).take(pa.repeat(pa.scalar(0), len(table)))
    return newest([table.append_column(schema(part=True).field(PART), part)])


def _without(
    table: pa.Table, counts: npt.NDArray[np.bool_], gone: Sequence[str]
) -> tuple[pa.Table, int]:
    """The rows that count without those of gone entries, and how many were of gone entries."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column("identifier")
    is_gone = pc.is_in(column, value_set=pa.array(gone, column.type))
    newest_rows = pa.chunked_array([pa.array(counts)])
    left = table.filter(pc.and_not(newest_rows, is_gone))
    return left, int(counts.sum()) - len(left)


# -- for programs ----------------------------------------------------------------------------------


class Catalog:
    """The catalogue of one namespace; ``Corpus.catalog`` makes it. Safe to use from any thread.

    Each method reads the whole catalogue again; ``index`` does so only after a change.

    Errors of all methods, in addition to those that each names: as those of Corpus; and
    ``CorruptEntryError`` if no part of the catalogue can be used. Unusable parts are left out if
    others can be used, with a warning in the log.

    Attributes:
        namespace: Its name.
        settings: Of the corpus.
    """

    def __init__(self, corpus: OpenBucket, namespace: str) -> None:
        """Use Corpus.catalog.

        Raises:
            ConfigError: pyarrow is missing.
        """
        require_pyarrow()
        self.namespace = namespace
        self.settings = corpus.settings
        self._corpus = corpus
        self._known: tuple[frozenset[str], CatalogIndex] | None = None

    def __repr__(self) -> str:
        return f"Catalog({self._corpus!r}, {self.namespace!r})"

    def append(self, rows: Iterable[CatalogRow]) -> None:
        """Append rows; the bucket has confirmed them when this returns.

        Raises:
            ConfigError: A value is invalid, or ``tenant_key`` is set.
        """
        refuse_tenant(self._corpus.settings.tenant_key is not None)
        given = list(rows)
        self._corpus.within(
            lambda store, layout: CatalogWriter(store, layout).append(given),
            self.namespace,
            write=True,
        )

    def table(self) -> pa.Table:
        """All rows as a pyarrow table, the newest of each document, page, modality and place."""
        return self._corpus.within(read_table, self.namespace)

    def rows(self) -> Iterator[CatalogRow]:
        """All rows, sorted by document and page."""
        return to_rows(self.table())

    def find(self, document: str, page: int | None = None) -> list[CatalogRow]:
        """Find the rows of a document, by page; with ``page`` only those of that page."""
        return CatalogIndex.from_table(self.table()).by_document(document, page)

    def index(self) -> CatalogIndex:
        """Load the catalogue into memory, for many lookups. The returned index never changes.

        A later call costs one LIST if nothing was appended since; else it reads all of it.
        """

        async def work(store: Store, layout: Layout) -> CatalogIndex:
            parts = frozenset(await list_parts(store, layout))
            if self._known is None or self._known[0] != parts:
                table = await read_table(store, layout)
                self._known = parts, await asyncio.to_thread(CatalogIndex.from_table, table)
            return self._known[1]

        return self._corpus.within(work, self.namespace)

# SPDX-License-Identifier: Apache-2.0
"""The catalogue: which document, page and file each embedding of a corpus belongs to.

It is a folder of Parquet files in the bucket, its parts. A part is written once, under a ULID, and
never changed. A row says with which part it was appended, and of two rows for one document, page
and modality that of the later part counts. So the order in which parts are read does not matter,
nor do rows that two parts hold both. That is what makes merging safe: a merge first writes one
part with all rows of some others, and then deletes those. Two merges at once, or one that was
killed between the two steps, leave rows twice and lose none.

Rows say nothing about whether an entry is still there; the index and the bucket tell that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence, Set
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from s3ec.corpus.catalog_file import (
    COLUMNS,
    MAX_PART_BYTES,
    MAX_PART_ROWS,
    MAX_UNPACKED_BYTES,
    PART,
    CatalogRow,
    check_row,
    decode_part,
    encode_part,
    in_parts,
    newest,
    require_pyarrow,
    schema,
    to_rows,
    to_table,
)
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.catalog_query import export_table, require_suffix, run_sql, select
from s3ec.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    UnavailableError,
)
from s3ec.identity import Layout, make_key
from s3ec.index.listing import listed
from s3ec.index.names import Names, time_s
from s3ec.namespaces import read_namespaces
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store, VanishedError, get_in_parts
from s3ec.store.concurrency import in_parallel

if TYPE_CHECKING:
    import pyarrow as pa

    from s3ec.corpus.corpus import Corpus
    from s3ec.tenant import Tenant

__all__ = [
    "Catalog",
    "CatalogFollower",
    "CatalogIndex",
    "CatalogRow",
    "PartReader",
    "append_rows",
    "check_row",
    "drop_rows",
    "list_parts",
    "merge_parts",
    "read_table",
    "refuse_tenant",
]

log = logging.getLogger(__name__)

MAX_PARTS = 64
"""Where there are more, an append merges the small ones."""
# A part is merged while all that are merged with it have so many bytes in the bucket, so that a
# large catalogue is not written again and again. In memory they take about ten times as many.
MERGED_BYTES = 48 * 2**20
# Fewer are not worth it: the same rows would be written too often.
_FEWEST_MERGED = MAX_PARTS // 2
_MOST_MERGED = 1000  # what one request deletes
FOLLOWED_BYTES = 2**30
"""What a follower's index may have in memory: two million rows."""
_PARTS_AT_A_TIME = 4
# Each one after a merge has taken away what the one before had named.
_LISTINGS = 10

_MERGED_ROWS = MAX_PART_ROWS
_MERGED_UNPACKED_BYTES = MAX_UNPACKED_BYTES // 2

# -- what is there ---------------------------------------------------------------------------------


async def list_parts(store: Store, layout: Layout) -> dict[str, ObjectInfo]:
    """The parts by their ULID, in rising order; what has no name of a part is left out.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    found = {}
    async for info in listed(store, layout.catalog):
        ulid = layout.catalog_part_of(info.name)
        if ulid is not None:
            found[ulid] = info
    return dict(sorted(found.items()))


class PartReader:
    """Reads each part of a catalogue once, also while parts are merged. For one event loop.

    Attributes:
        problems: Object name to why it cannot be used, of those that are still there.
        known: ULIDs of the parts that are still there and were read, or cannot be used.
    """

    def __init__(self, store: Store, layout: Layout, *, at_a_time: int = _PARTS_AT_A_TIME) -> None:
        """Set up; no request goes out.

        Args:
            at_a_time: Parts that are read, and in memory, at once.

        Raises:
            ConfigError: The extra is missing.
        """
        require_pyarrow()
        self._store = store
        self._layout = layout
        self._at_a_time = at_a_time
        self.problems: dict[str, CorruptEntryError] = {}
        self.known: set[str] = set()

    async def read_new(self) -> AsyncGenerator[pa.Table, None]:
        """The parts that were not read yet, each as it comes; to be closed.

        When it has ended, every part that the bucket lists was read. Those that a merge takes away
        meanwhile are in the part that it wrote, and that is read as well.

        Raises:
            UnavailableError: The store does not answer now, or parts vanish again and again. What
                was handed out by then, but for the last, is not read again.
            AccessError: It refuses.
        """
        for _ in range(_LISTINGS):
            parts = await list_parts(self._store, self._layout)
            self.known &= parts.keys()
            there = {info.name for info in parts.values()}
            self.problems = {name: exc for name, exc in self.problems.items() if name in there}
            new = [(ulid, info) for ulid, info in parts.items() if ulid not in self.known]
            vanished = False
            for start in range(0, len(new), self._at_a_time):
                some = new[start : start + self._at_a_time]
                tables = await in_parallel(some, self._read)
                for (ulid, info), table in zip(some, tables, strict=True):
                    if table is None and info.name not in self.problems:
                        vanished = True
                        continue
                    if table is not None:
                        yield table
                    self.known.add(ulid)  # not before the caller has done with it
                del tables, table  # not in memory while others come
            if not vanished:
                return
        raise UnavailableError(f"{self._layout.catalog}: its parts are merged over and over")

    async def _read(self, part: tuple[str, ObjectInfo]) -> pa.Table | None:
        ulid, info = part
        try:
            return await read_part(self._store, self._layout, ulid, info)
        except VanishedError:
            return None
        except CorruptEntryError as exc:
            self.problems[info.name] = exc
            return None


async def read_part(store: Store, layout: Layout, ulid: str, info: ObjectInfo) -> pa.Table:
    """Download one part and check it; once more where it was damaged on its way.

    Raises:
        VanishedError: The bucket has it no more.
        CorruptEntryError: It is unusable; the message names it.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    if info.nbytes > MAX_PART_BYTES:
        raise CorruptEntryError(
            f"{info.name}: {info.nbytes} bytes are too many for a part of the catalogue",
            reason="size",
        )

    async def read() -> pa.Table:
        blob = await get_in_parts(store, info.name, info.nbytes, at_a_time=_PARTS_AT_A_TIME)
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
    store: Store, layout: Layout, *, note: Callable[[str], None] | None = None
) -> pa.Table:
    """The whole catalogue, sorted by document and page, the newest row of each.

    Memory: some 350 bytes a row, and 1,250 while it is made.

    Args:
        note: Told of each part that cannot be used and was left out; the log if None.

    Raises:
        ConfigError: The extra is missing.
        CorruptEntryError: None of its parts can be used; the message names one.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    reader = PartReader(store, layout)
    async with aclosing(reader.read_new()) as coming:
        tables = [table async for table in coming]
    if reader.problems and not tables:
        raise next(iter(reader.problems.values()))
    for exc in reader.problems.values():
        (note or log.warning)(f"this part of the catalogue is left out: {exc}")
    if not tables:
        return schema().empty_table()
    return (await asyncio.to_thread(newest, tables)).select(COLUMNS)


class CatalogFollower:
    """Keeps an index of a growing catalogue, for programs that live long. For one event loop.

    ``refresh`` lists the folder and downloads what is new. Where parts are gone, merged or written
    anew without some rows, it reads everything again, and puts the new index in place at the end. A
    refresh that fails or is cancelled loses nothing; the next one goes on.

    Attributes:
        index: What is known. It never changes: refresh puts another one in its place. So any
            thread may take it and look up, without a lock.
        is_full: The index has reached its bound, and nothing more is read.
    """

    def __init__(self, store: Store, layout: Layout, *, max_bytes: int = FOLLOWED_BYTES) -> None:
        """Set up; no request goes out.

        Args:
            max_bytes: Nothing more is read when the index has so many, some 440 for each row.
                While rows are added, up to four times as much is in memory.

        Raises:
            ConfigError: The extra is missing.
        """
        self.index = CatalogIndex()
        self.is_full = False
        self._store = store
        self._layout = layout
        self._reader = PartReader(store, layout)
        self._max_bytes = max_bytes
        # One at a time: each of two would put its own rows in place of the other's.
        self._turn = asyncio.Lock()
        self._told: set[str] = set()

    @property
    def problems(self) -> dict[str, CorruptEntryError]:
        """Object name to why it cannot be used."""
        return self._reader.problems

    async def refresh(self) -> None:
        """Learn what was appended before this was called. Several calls take turns.

        Costs one LIST where nothing is new.

        Raises:
            UnavailableError, AccessError: The store does not answer now, or refuses.
        """
        async with self._turn:
            parts = await list_parts(self._store, self._layout)
            if not self.is_full and self._reader.known != parts.keys():
                try:
                    await self._read(parts.keys())
                finally:
                    self._warn()

    async def _read(self, parts: Set[str]) -> None:
        reader, index = self._reader, self.index
        if not reader.known <= parts:
            reader, index = PartReader(self._store, self._layout), CatalogIndex()
        async with aclosing(reader.read_new()) as coming:
            async for table in coming:
                index = await asyncio.to_thread(index.with_rows, table)
                if reader is self._reader:
                    self.index = index
                if index.nbytes > self._max_bytes:
                    self._stop()
                    break
        self._reader, self.index = reader, index

    def _stop(self) -> None:
        self.is_full = True
        log.warning(
            "%s: more than %d bytes of the catalogue are in memory; what else it holds is not "
            "known here",
            self._layout.catalog,
            self._max_bytes,
        )

    def _warn(self) -> None:
        for name, exc in self._reader.problems.items():
            if name not in self._told:
                log.warning("this part of the catalogue is left out: %s", exc)
        self._told = set(self._reader.problems)


# -- writing ---------------------------------------------------------------------------------------


def refuse_tenant(is_one: bool) -> None:
    """Raise ConfigError where a tenant's secret hides the names that a catalogue would spell out.

    For jobs that append later: before anything is encoded.
    """
    if is_one:
        raise ConfigError(
            "`tenant_key`: there is no catalogue with a tenant's secret, since it would hold in "
            "plain text what the secret hides: identifiers, documents and hashes of files",
            field="tenant_key",
        )


async def append_rows(store: Store, layout: Layout, rows: Iterable[CatalogRow]) -> None:
    """Append rows as one new part, confirmed by the bucket when this returns.

    A row counts before those that were confirmed when this began, and of two with one document,
    page and modality the last. Costs one GET, one LIST and one PUT. Where there are more than
    MAX_PARTS parts, the small ones are merged. A great many rows become several parts.

    Args:
        rows: None of them is written where one is wrong.

    Raises:
        ConfigError: A value is not what it should be, the extra is missing, or the namespace is
            that of a tenant's secret.
        UnavailableError, AccessError: The store does not answer now, or refuses. The rows may be
            there or not, and may be appended again.
    """
    require_pyarrow()
    tables = [to_table(some) for some in in_parts(rows)]
    if not tables:
        return
    [about] = await read_namespaces(store, [layout.namespace])
    refuse_tenant("tenant" in about.descriptor)
    parts = await list_parts(store, layout)
    for table in tables:
        ulid = _next_name(parts)
        named = await asyncio.to_thread(_last_of_each, table, ulid)
        parts[ulid] = await _put_part(store, layout, ulid, named)
    if len(parts) > MAX_PARTS:
        try:
            await merge_parts(store, layout)
        except UnavailableError as exc:
            log.warning("the catalogue's parts are not merged now: %s", exc)
        except AccessError as exc:  # engines and jobs need no right to delete
            log.info("the catalogue's parts are left to `s3ec catalog merge`: %s", exc)


def _last_of_each(table: pa.Table, ulid: str) -> pa.Table:
    import pyarrow as pa

    part = pa.array([ulid], pa.large_string()).take(pa.repeat(pa.scalar(0), len(table)))
    return newest([table.append_column(schema(part=True).field(PART), part)])


async def _put_part(store: Store, layout: Layout, ulid: str, table: pa.Table) -> ObjectInfo:
    name = layout.catalog_part(ulid)
    body = await asyncio.to_thread(encode_part, table, layout.namespace)
    with suppress(ConflictError):  # our own, its reply was lost: nobody else has the name
        await store.put_if_absent(name, [body])
    return ObjectInfo(name, len(body), time.time())


def _next_name(parts: Iterable[str]) -> str:
    """A name later than all that are there, also if their writers' clocks are ahead of ours."""
    last = max(parts, default="")
    least_s = time_s(last) + 0.0015 if last else 0.0
    # Each its own, since a maker of names is for one thread.
    return Names().next(max(time.time(), least_s))


async def merge_parts(store: Store, layout: Layout, *, fewest: int = _FEWEST_MERGED) -> int:
    """Write one part that holds all rows of the small ones, then delete those.

    What cannot be used is left where it is. Any number may merge at once, and one may be killed at
    any time.

    Args:
        fewest: So many parts are worth it.

    Returns:
        How many parts were merged.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses. No row is lost.
    """
    parts = await list_parts(store, layout)
    small = _small_parts(parts)
    if len(small) < max(fewest, 2):
        return 0
    # Who may not delete would add a large part with each merge. A name that nobody has tells.
    await store.delete(layout.catalog_part(_next_name(parts)))
    read: dict[str, pa.Table] = {}
    rows = nbytes = 0

    async def one(ulid: str) -> tuple[str, pa.Table | None]:
        try:
            return ulid, await read_part(store, layout, ulid, parts[ulid])
        except (VanishedError, CorruptEntryError):
            return ulid, None  # merged by somebody else; or readers will tell

    for start in range(0, len(small), _PARTS_AT_A_TIME):
        for ulid, table in await in_parallel(small[start : start + _PARTS_AT_A_TIME], one):
            if table is None:
                continue
            rows, nbytes = rows + len(table), nbytes + table.nbytes
            if rows <= _MERGED_ROWS and nbytes <= _MERGED_UNPACKED_BYTES:
                read[ulid] = table
        if rows > _MERGED_ROWS or nbytes > _MERGED_UNPACKED_BYTES:
            break
    if len(read) < 2:
        return 0
    merged = await asyncio.to_thread(newest, list(read.values()))
    await _put_part(store, layout, _next_name(parts), merged)
    left = await store.delete_many([parts[ulid].name for ulid in read])
    for exc in left.values():
        raise exc
    log.debug("%d parts of the catalogue became one of %d rows", len(read), len(merged))
    return len(read)


def _small_parts(parts: dict[str, ObjectInfo]) -> list[str]:
    """The smallest, as many as may be merged together."""
    small: list[str] = []
    nbytes = 0
    for ulid, info in sorted(parts.items(), key=lambda item: (item[1].nbytes, item[0])):
        nbytes += info.nbytes
        if nbytes > MERGED_BYTES or len(small) == _MOST_MERGED:
            break
        small.append(ulid)
    return small


async def drop_rows(
    store: Store,
    layout: Layout,
    is_suspect: Callable[[str], bool],
    *,
    tenant: Tenant | None = None,
) -> int:
    """Write the catalogue anew without rows whose entry is gone, then delete its old parts.

    An entry is looked for after the catalogue was read: a row comes after its entry, so one that
    was stored again, by whoever fills the corpus meanwhile, keeps its row. An older row of the same
    document, page and modality goes with a newer one: it is of what the document was before. A
    merge that is under way may bring rows back; they are found again by the next audit. One that is
    killed leaves both, and the next call goes on. Costs a HEAD for each suspect. Memory: as
    read_table.

    Args:
        is_suspect: Whether the entry of an identifier may be gone. Called in another thread.
        tenant: Whose secret is in the names.

    Returns:
        How many rows were dropped.

    Raises:
        ConfigError: The extra is missing.
        UnavailableError, AccessError: The store does not answer now, or refuses. No other row is
            lost.
    """
    reader = PartReader(store, layout)
    async with aclosing(reader.read_new()) as coming:
        tables = [table async for table in coming]
    if not tables:
        return 0
    read = sorted(reader.known - {layout.catalog_part_of(name) for name in reader.problems})
    whole = await asyncio.to_thread(newest, tables)
    del tables
    suspects = await asyncio.to_thread(_those, whole, is_suspect)

    async def is_gone(identifier: str) -> bool:
        key = make_key(identifier, tenant)
        return key is None or await store.head(layout.object(key)) is None

    looked = await in_parallel(suspects, is_gone)
    gone = [identifier for identifier, absent in zip(suspects, looked, strict=True) if absent]
    left = await asyncio.to_thread(_without, whole, gone)
    dropped = len(whole) - len(left)
    if not dropped:
        return 0
    del whole
    parts = await list_parts(store, layout)
    await store.delete(layout.catalog_part(_next_name(parts)))  # as in merge_parts
    while len(left):
        some = left.slice(0, MAX_PART_ROWS)
        while len(some) > 1 and some.nbytes > _MERGED_UNPACKED_BYTES:
            some = some.slice(0, len(some) // 2)
        ulid = _next_name(parts)
        parts[ulid] = await _put_part(store, layout, ulid, some)
        left = left.slice(len(some))
    for start in range(0, len(read), DELETE_AT_A_TIME):
        names = [layout.catalog_part(ulid) for ulid in read[start : start + DELETE_AT_A_TIME]]
        for exc in (await store.delete_many(names)).values():
            raise exc
    return dropped


def _those(table: pa.Table, is_suspect: Callable[[str], bool]) -> list[str]:
    return list(filter(is_suspect, table.column("identifier").unique().to_pylist()))


def _without(table: pa.Table, identifiers: Sequence[str]) -> pa.Table:
    """The rows that are not of these entries."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column("identifier")
    wanted = pa.array(identifiers, column.type)
    return table.filter(pc.invert(pc.is_in(column, value_set=wanted)))


# -- for programs ----------------------------------------------------------------------------------


class Catalog:
    """The catalogue of one namespace; ``Corpus.catalog`` makes it. Safe to use from any thread.

    Each method reads the whole catalogue anew, except ``index``, which keeps what it has read.

    Errors of all methods beside those that each names: as those of Corpus; and
    ``CorruptEntryError`` where no part of the catalogue can be used. Parts that cannot be used are
    left out where others can, with a warning in the log.

    Attributes:
        namespace: Its name.
        settings: Of the corpus.
    """

    def __init__(self, corpus: Corpus, namespace: str) -> None:
        """Use Corpus.catalog.

        Raises:
            ConfigError: The extra is missing.
        """
        require_pyarrow()
        self.namespace = namespace
        self.settings = corpus.settings
        self._corpus = corpus
        self._follower: CatalogFollower | None = None

    def __repr__(self) -> str:
        return f"Catalog({self._corpus!r}, {self.namespace!r})"

    def append(self, rows: Iterable[CatalogRow]) -> None:
        """Append rows, confirmed by the bucket when this returns.

        Raises:
            ConfigError: A value is not what it should be, or ``tenant_key`` is set.
        """
        refuse_tenant(self._corpus.settings.tenant_key is not None)
        given = list(rows)
        self._corpus.within(
            lambda store, layout: append_rows(store, layout, given), self.namespace, write=True
        )

    def table(self) -> pa.Table:
        """All rows as a table of pyarrow, the newest of each document, page and modality."""
        return self._corpus.within(read_table, self.namespace)

    def rows(self, where: str | None = None) -> Iterator[CatalogRow]:
        """The rows, sorted by document and page unless ``where`` changes that.

        Args:
            where: A condition in SQL over the columns, such as ``modality = 'image' AND rows >
                1000``; None for all.

        Raises:
            ConfigError: DuckDB does not take the condition, or is not installed.
        """
        table = self.table()
        return to_rows(table if where is None else select(table, where))

    def find(self, document: str, page: int | None = None) -> list[CatalogRow]:
        """The rows of a document by page; with ``page`` only those of that page."""
        return CatalogIndex.from_table(self.table()).by_document(document, page)

    def index(self) -> CatalogIndex:
        """The catalogue in memory, for many lookups. What is returned does not change any more.

        A later call reads what was appended since: one LIST where that is nothing.
        """

        async def work(store: Store, layout: Layout) -> CatalogIndex:
            if self._follower is None:
                self._follower = CatalogFollower(store, layout, max_bytes=sys.maxsize)
            follower = self._follower
            await follower.refresh()
            if follower.problems and not len(follower.index):
                raise next(iter(follower.problems.values()))
            return follower.index

        return self._corpus.within(work, self.namespace)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all rows to a file, whole or not at all.

        Args:
            path: Its suffix says how: ``.parquet``, ``.csv`` or ``.jsonl``.

        Returns:
            How many rows.

        Raises:
            ConfigError: The suffix is none of those.
            TierError: The file cannot be written.
        """
        require_suffix(path)
        table = self.table()
        export_table(table, path)
        return len(table)

    def sql(self, query: str) -> pa.Table:
        """What DuckDB answers to a question about the table ``catalog``.

        It sees the catalogue and nothing else: no file, no network.

        Raises:
            ConfigError: DuckDB does not take the question, or is not installed.
        """
        return run_sql(self.table(), query)

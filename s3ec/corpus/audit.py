# SPDX-License-Identifier: Apache-2.0
"""Says whether index, listing, objects and catalogue of a namespace agree; changes nothing.

The index is compared with a listing by ``index.maker``, the catalogue with the same listing, and
what the objects hold with what they should by ``deep_check``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from s3ec.corpus.deep_check import AuditState, DeepCheck, check_objects
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, CorruptEntryError
from s3ec.identity import Layout, make_key
from s3ec.index.listing import FEW
from s3ec.index.maker import Verified, verify
from s3ec.index.snapshot import Rows, is_in
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.tenant import Tenant

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 20


@dataclass(slots=True)
class CatalogCheck:
    """How the catalogue compares with the listing.

    Attributes:
        rows: Of the catalogue, the newest of each document and place.
        gone: Rows whose entry has no object.
        unlisted: Entries without a row; that is no fault.
        gone_identifiers: Those of the rows in ``gone``.
        examples: Documents of some of these rows.
        problem: Why the catalogue cannot be read; empty where it can.
    """

    rows: int = 0
    gone: int = 0
    unlisted: int = 0
    gone_identifiers: set[str] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class Audit:
    """What an audit found.

    Attributes:
        index: How the index compares with the listing.
        catalog: None where there is none, or it was not looked at.
        deep: None where no object was read.
    """

    index: Verified
    catalog: CatalogCheck | None = None
    deep: DeepCheck | None = None

    @property
    def agrees(self) -> bool:
        """Whether there is nothing to complain about."""
        catalog_agrees = self.catalog is None or not (self.catalog.gone or self.catalog.problem)
        return (
            self.index.index_agrees and catalog_agrees and (self.deep is None or self.deep.agrees)
        )


async def audit(
    store: Store,
    layout: Layout,
    *,
    tenant: Tenant | None = None,
    catalog: bool = True,
    deep: bool = False,
    state: AuditState | None = None,
    report: Report = unreported,
) -> Audit:
    """Compare index, listing and catalogue of a namespace; see Corpus.verify.

    Memory: some 200 MiB for the index, the catalogue's identifiers, and 16 objects of up to 8 MiB;
    larger ones come in parts of 8 MiB.

    Args:
        tenant: Whose secret is in the names.
        state: Where a deep check goes on; None to begin and to keep nothing. It knows how far this
            came where the store or the disk fails.
    """
    # First the catalogue, then the listing: a row comes after its entry.
    rows = await _CatalogRows.read(store, layout, tenant) if catalog else None
    if deep:
        store = _ListedOnce(store, layout.objects)
    look = rows.look if isinstance(rows, _CatalogRows) else None
    found = Audit(await verify(store, layout, look=look, report=report))
    if rows is not None:
        found.catalog = rows.result() if isinstance(rows, _CatalogRows) else rows
    if deep:
        found.deep = await check_objects(
            store, layout, state, expected=found.index.objects, report=report
        )
    return found


class _ListedOnce(Wrapper):
    """Remembers the listing of one prefix that has few objects, for who asks for it again.

    Servers exist that take a tenth of the time of reading large objects to list them.
    """

    def __init__(self, inner: Store, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._infos: list[ObjectInfo] | None = None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        # One that goes on after a failure has not all of it.
        is_whole = prefix == self._prefix and not start_after
        if is_whole and self._infos is not None:
            for info in self._infos:
                yield info
            return
        infos: list[ObjectInfo] = []
        async with aclosing(super().list(prefix, start_after=start_after)) as listing:
            async for info in listing:
                if is_whole and len(infos) <= FEW:
                    infos.append(info)
                yield info
        if is_whole and len(infos) <= FEW:
            self._infos = infos


# -- the catalogue -----------------------------------------------------------------------------


class _CatalogRows:
    """The catalogue's entries as digests, and which of them a listing has shown."""

    def __init__(self, table: pa.Table, tenant: Tenant | None) -> None:
        self._table = table
        names = table.column("identifier").unique().to_pylist()
        keys = {name: make_key(name, tenant) for name in names}
        # What can have no object is gone in any case.
        self._keyed = {key.digest: name for name, key in keys.items() if key is not None}
        self._unkeyed = [name for name, key in keys.items() if key is None]
        self._digests = sorted(self._keyed)
        self._rows = Rows.of(self._digests, [0] * len(self._digests))
        self._there: npt.NDArray[np.bool_] = np.zeros(len(self._digests), np.bool_)
        self._unlisted = 0

    @classmethod
    async def read(
        cls, store: Store, layout: Layout, tenant: Tenant | None
    ) -> _CatalogRows | CatalogCheck | None:
        """None where there is no catalogue; what is wrong where it cannot be read."""
        from s3ec.corpus.catalog import list_parts, read_table

        if not await list_parts(store, layout):
            return None
        try:
            return cls(await read_table(store, layout), tenant)
        except (ConfigError, CorruptEntryError) as exc:
            return CatalogCheck(problem=str(exc))

    def look(self, there: Rows) -> None:
        """Note the entries of one range of the listing, which are sorted."""
        if not len(there):
            return
        first = int(np.searchsorted(self._rows.hi, there.hi[0]))
        stop = int(np.searchsorted(self._rows.hi, there.hi[-1], side="right"))
        found = is_in(self._rows.select(slice(first, stop)), there)
        self._there[first:stop] |= found
        self._unlisted += len(there) - int(found.sum())

    def result(self) -> CatalogCheck:
        """What came out, when all ranges were looked at."""
        import pyarrow as pa
        import pyarrow.compute as pc

        absent = [self._digests[row] for row in np.flatnonzero(~self._there)]
        gone = {self._keyed[digest] for digest in absent} | set(self._unkeyed)
        wanted = pa.array(sorted(gone), pa.string())
        column = self._table.column("identifier").cast(pa.string())
        rows = self._table.filter(pc.is_in(column, value_set=wanted))
        examples = rows.column("document").slice(0, _SHOWN).to_pylist()
        return CatalogCheck(len(self._table), len(rows), self._unlisted, gone, examples)

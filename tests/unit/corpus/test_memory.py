# SPDX-License-Identifier: Apache-2.0
"""What jobs over a corpus need of memory for each entry, as Python, numpy and Arrow count it."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pyarrow as pa
import pytest

from s3ec.corpus.audit import audit
from s3ec.corpus.catalog import CatalogWriter
from s3ec.corpus.collect import Rules, collect_garbage
from s3ec.identity import Layout
from s3ec.index.maker import rebuild
from s3ec.store.base import Store, Wrapper
from s3ec.testing.memory_store import MemoryStore
from tests.support.catalogues import LAYOUT, row
from tests.unit.cli.corpus import content_hash

T = TypeVar("T")
FEW, MANY = 2000, 6000
# 256 MiB for 200,000 entries are 1,342 bytes for each; half of it is left to allocators.
MOST_BYTES = 670
# Of what is chosen among all: with more than this a listing is kept as objects of Python.
MOST_CHOSEN_BYTES = 130


def filled(count: int) -> MemoryStore:
    """Entries that nobody reads, and a catalogue in parts of 500 rows."""
    store = MemoryStore()
    names = [content_hash(str(number)) for number in range(count)]
    for name in names:
        store.bucket.objects[f"{LAYOUT.objects}{name[:2]}/{name}.safetensors"] = b"x"
        store.bucket.modified_s[f"{LAYOUT.objects}{name[:2]}/{name}.safetensors"] = 1.7e9

    async def fill() -> None:
        writer = CatalogWriter(store, LAYOUT)
        for start in range(0, count, 500):
            rows = enumerate(names[start : start + 500], start)
            await writer.append([row(f"{n:06}.png", identifier=name) for n, name in rows])

    asyncio.run(fill())
    return store


class Watched(Wrapper):
    """Notes the most that Arrow holds whenever the store is asked."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.before = self.most = pa.total_allocated_bytes()

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.most = max(self.most, pa.total_allocated_bytes())
        answer = await call()
        if op == "list_folders":  # what it took of memory is that of the server in this process
            tracemalloc.reset_peak()
        return answer


async def gc(store: Store, layout: Layout) -> None:
    found = await collect_garbage(
        store, layout, Rules(older_than_s=60.0), tenant=None, dry_run=False
    )
    assert found.objects == found.dropped_rows > 0


async def gc_by_size(store: Store, layout: Layout) -> None:
    rules = Rules(max_bytes=1)
    assert (await collect_garbage(store, layout, rules, tenant=None, dry_run=True)).objects


JOBS = {"gc": gc, "gc --max-bytes": gc_by_size, "verify": audit, "rebuild": rebuild}


def peaks_of(job: Callable[[Store, Layout], Awaitable[object]], count: int) -> tuple[int, int]:
    """Bytes of Python and numpy at most, and of Arrow."""
    store = Watched(filled(count))

    async def work() -> None:
        await job(store, LAYOUT)

    tracemalloc.start()
    try:
        asyncio.run(work())
        return tracemalloc.get_traced_memory()[1], store.most - store.before
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And small batches of deletions, so that what is bounded shows as that."""
    monkeypatch.setattr("s3ec.corpus.catalog.FOLDED_BYTES", 2**16)
    monkeypatch.setattr("s3ec.index.delete._REQUESTS_AT_A_TIME", 1)


@pytest.mark.parametrize("job", JOBS)
def test_memory_of_a_job_grows_by_little_for_each_entry(job: str) -> None:
    peaks_of(JOBS[job], 2)  # what is made at the first use of modules belongs to no entry
    (few, few_of_arrow), (many, many_of_arrow) = (peaks_of(JOBS[job], n) for n in (FEW, MANY))
    grown = (many - few) / (MANY - FEW)
    most = MOST_CHOSEN_BYTES if job == "gc --max-bytes" else MOST_BYTES
    assert grown < most, f"{grown:.0f} bytes for each entry"
    assert many_of_arrow < 2 * few_of_arrow + 2**20, "the catalogue is read part by part"

# SPDX-License-Identifier: Apache-2.0
"""Listings of many pages with junk in them, some of which break off: gone on with, and right.

The pages are made up (see pages.py): no server here holds a million objects. The transports and
all that is above them are the real ones.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from s3ec.identity import Layout, digest_of_name
from s3ec.index import listing, snapshot
from s3ec.index.listing import list_objects, rows_of
from s3ec.index.snapshot import PARTS, Segment, Spill, merge
from s3ec.runtime import LoopThread
from s3ec.settings import Settings
from s3ec.store.base import Store
from s3ec.store.open import open_store
from tests.faults.embeddings import NAMESPACE
from tests.faults.pages import Pages
from tests.support.indexes import sizes_in

LAYOUT = Layout(NAMESPACE.name)
_TIMEOUT_S = 300.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")


def store_of(pages: Pages, cache_dir: Path) -> Store:
    return open_store(
        Settings.model_validate(
            {
                "bucket": "made-up",
                "prefix": "corpus",
                "endpoint_url": pages.url,
                "region": "us-east-1",
                "cache_dir": str(cache_dir),
            }
        )
    )


async def listed_into(store: Store, spill: Spill) -> None:
    async with aclosing(list_objects(store, LAYOUT)) as batches:
        async for infos in batches:
            await asyncio.to_thread(spill.add, rows_of(LAYOUT, infos))


def test_long_listing_that_breaks_off_is_gone_on_with_and_its_junk_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FEW", 100_000)
    loop = LoopThread("listing")
    with Pages(f"corpus/{LAYOUT.objects}", 8_000, breaks=3) as pages:
        store = store_of(pages, tmp_path)
        try:
            with closing(Spill(tmp_path)) as spill:
                loop.run(listed_into(store, spill), _TIMEOUT_S)
                parts = [Segment.of(merge(spill.part(number))) for number in range(PARTS)]
                found = {digest for part in parts for digest in sizes_in(part)}
        finally:
            loop.run(store.close(), _TIMEOUT_S)
            loop.stop(_TIMEOUT_S)
        assert pages.broken >= 3
        given = len(pages.asked) - pages.broken
        assert given == -(-(pages.entries + pages.junk) // 1000)  # no page twice
        assert pages.junk > 0
        assert found == {digest_of_name(pages.name(number)) for number in range(pages.entries)}


def test_memory_of_a_listing_for_a_snapshot_does_not_grow_with_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 160 bytes an object; its name and its row in memory take several times that."""
    monkeypatch.setattr(snapshot, "_RUN_ROWS", 2048)
    monkeypatch.setattr(listing, "BATCH", 512)
    monkeypatch.setattr(listing, "FEW", 100)
    # What other threads allocate meanwhile counts too, so the smallest of several.
    small, large = (
        min(peak_of_listing(tmp_path / f"{entries}-{n}", entries) for n in range(3))
        for entries in (3_000, 9_000)
    )
    assert large - small < 6_000 * 160


def peak_of_listing(folder: Path, entries: int) -> int:
    """Bytes that were allocated at the most. One page is under way at a time, whatever the load."""
    folder.mkdir()
    loop = LoopThread("listing")
    with (
        closing(Spill(folder)) as spill,
        Pages(f"corpus/{LAYOUT.objects}", entries, folders=1, breaks=5) as pages,
    ):
        store = store_of(pages, folder)
        try:
            loop.run(store.list_folders(LAYOUT.objects), _TIMEOUT_S)  # imports, connections
            tracemalloc.start()
            loop.run(listed_into(store, spill), _TIMEOUT_S)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            loop.run(store.close(), _TIMEOUT_S)
            loop.stop(_TIMEOUT_S)
        assert pages.broken
        assert sum(len(merge(spill.part(number))) for number in range(PARTS)) == entries
    return peak

# SPDX-License-Identifier: Apache-2.0
"""The index on a real server: pages of listings, its clock, and names of every kind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.index.child import Job, in_child, in_process
from s3ec.index.delete import delete_chosen, delete_entries
from s3ec.index.deltas import Announcer, encode_delta
from s3ec.index.local import NodeFolder
from s3ec.index.maker import make_listing, make_union, rebuild, verify
from s3ec.index.names import Names, ServerClock, deltas_prefix
from s3ec.index.reader import ManifestIndex
from s3ec.settings import Settings
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.store.s3 import ObstoreStore
from tests.contract.conftest import Configure, Transport
from tests.support.indexes import all_announced
from tests.unit.index.corpus import LAYOUT, NAMESPACE, in_thread, key_of, keys_of

PAGE = 1000


@pytest.fixture
def transport() -> Transport:
    return ObstoreStore


def reader(store: Store, folder: Path, settings: Settings | None = None) -> ManifestIndex:
    jobs = in_process(store) if settings is None else in_child(settings)
    return ManifestIndex(
        store, LAYOUT, NodeFolder(folder), jobs=jobs, disk=in_thread, counters=Counters()
    )


def held(index: ManifestIndex, *texts: object) -> list[object]:
    return [text for text in texts if index.maybe_contains(key_of(text))]


async def save(store: Store, *texts: object) -> None:
    for key in keys_of(*texts):
        await store.put_if_absent(LAYOUT.object(key), [b"entry"])


async def announce(store: Store, *texts: object, wall_off_s: float = 0.0) -> None:
    clock = ServerClock(wall_clock=lambda: time.time() + wall_off_s)
    announcer = Announcer(store, LAYOUT, Counters(), pause_s=0.0, clock=clock)
    for key in keys_of(*texts):
        announcer.add(key, 5, lambda _: None)
    await all_announced(announcer)


@pytest.mark.parametrize("prefix", ["", "index/plain", "größe/圖 片+&"])
async def test_an_index_lives_below_any_prefix(
    on_seaweed: Configure,
    transport: Transport,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("s3ec.index.maker.is_union_due", lambda *_: True)
    monkeypatch.setattr("s3ec.index.maker.UNION_EVERY_S", -10.0)
    name = f"{prefix}/{transport.__name__}" if prefix else ""
    store = transport(on_seaweed(prefix=name))
    index = reader(store, tmp_path / "reader")
    try:
        await save(store, 1, 2)
        first = await make_listing(store, LAYOUT, NodeFolder(tmp_path / "maker"))
        assert first is not None
        assert first.rows == 2
        # A writer whose clock is a year slow names its deltas by the server's.
        await save(store, 3)
        await announce(store, 3, wall_off_s=-3.2e7)
        await index.refresh(now=True)
        assert held(index, 1, 2, 3, 4) == [1, 2, 3]
        made = await make_union(store, LAYOUT, NodeFolder(tmp_path / "maker"))
        assert made is not None
        assert (made.rows, made.name.listed) == (3, first.name.listed)
        found = await verify(store, LAYOUT)
        assert (found.objects, found.entries, found.snapshot) == (3, 3, made.name)
        assert found.index_agrees
        await delete_entries(store, LAYOUT, keys_of(1), node=NodeFolder(tmp_path / "reader"))
        await index.refresh(now=True)
        assert held(index, 1, 2, 3) == [2, 3]
        last = await delete_chosen(
            store, LAYOUT, lambda infos: [i for i in infos if key_of(2).name in i.name]
        )
        assert last.rows == 1
        assert last.removed >= 1  # the first listing: two snapshots stay
    finally:
        await index.close()
        await _empty(store)


async def test_deltas_on_both_sides_of_a_page_are_read(
    on_seaweed: Configure, tmp_path: Path
) -> None:
    store = ObstoreStore(on_seaweed(prefix="index-pages"))
    index = reader(store, tmp_path)
    names = Names()
    now_s = time.time()

    async def put(number: int) -> None:
        body = encode_delta([key_of(number).digest], [5], NAMESPACE)
        await store.put_if_absent(deltas_prefix(LAYOUT) + names.next(now_s - 30), body)

    try:
        await in_parallel(range(PAGE + 1), put)
        await index.refresh(now=True)
        assert held(index, *range(PAGE + 1)) == list(range(PAGE + 1))
        assert index.counts().fresh_deltas == PAGE + 1
    finally:
        await index.close()
        await _empty(store)


async def test_a_child_opens_the_bucket_by_the_settings_of_its_parent(
    on_seaweed: Configure, transport: Transport, tmp_path: Path
) -> None:
    settings = on_seaweed(prefix=f"index-child-{transport.__name__}")
    store = transport(settings)
    index = reader(store, tmp_path / "reader", settings)
    try:
        await save(store, *range(10))
        job = Job("listing", NAMESPACE, str(tmp_path / "maker"))
        assert await in_child(settings)(job) != ""
        await index.refresh(now=True)
        assert held(index, *range(12)) == list(range(10))
        assert (await rebuild(store, LAYOUT)).rows == 10
    finally:
        await index.close()
        await _empty(store)


async def _empty(store: Store) -> None:
    names = [info.name async for info in store.list(LAYOUT.namespace)]
    await in_parallel(names, store.delete)
    await store.close()

# SPDX-License-Identifier: Apache-2.0
"""Compaction on a real server: pages of listings, its clock, and names of every kind."""

from __future__ import annotations

import pytest
from s3ec.index.base_writer import BuildOptions
from s3ec.index.compaction import compact
from s3ec.index.manifest import take_snapshot
from s3ec.index.rebuild import rebuild, verify
from s3ec.index.rows import EntryInfo
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.manifests import put_delta, put_object, ulid_of, view

from s3ec.store.concurrency import in_parallel
from s3ec.store.s3 import ObstoreStore
from tests.contract.conftest import Configure, Transport

PAGE = 1000


async def test_deltas_on_both_sides_of_a_page_are_merged(on_seaweed: Configure) -> None:
    store = ObstoreStore(on_seaweed(prefix="manifest-pages"))
    try:
        await compact(store, LAYOUT)
        keys = [key_of(number) for number in range(PAGE + 1)]

        async def announce(number: int) -> None:
            await put_delta(store, number, {keys[number]: EntryInfo(9, time_s=number)})

        await in_parallel(range(PAGE + 1), announce)
        made = await compact(store, LAYOUT)
        assert made is not None
        assert made.head.merged == {ulid_of(number) for number in range(PAGE + 1)}
        assert set(await view(store)) == {key.digest for key in keys}
    finally:
        await store.close()


@pytest.mark.parametrize("prefix", ["", "manifest/plain", "größe/圖 片+&"])
async def test_an_index_lives_below_any_prefix(
    on_seaweed: Configure, transport: Transport, prefix: str
) -> None:
    name = f"{prefix}/{transport.__name__}" if prefix else ""
    store = transport(on_seaweed(prefix=name))
    try:
        for number in (1, 2):
            await put_object(store, key_of(number), 100)
        first = (await rebuild(store, LAYOUT)).head
        await put_delta(store, 3, {key_of(3): EntryInfo(100, time_s=1)})
        await put_object(store, key_of(3), 100)
        made = await compact(store, LAYOUT, BuildOptions(grace_s=-60))
        assert made is not None
        assert made.head.entries == 3
        assert (await verify(store, LAYOUT)).agrees
        # By the server's clock the first base is old, and the delta is merged.
        snapshot = await take_snapshot(store, LAYOUT)
        assert set(snapshot.runs) == {(first.version + 1, made.head.run)}
        assert not snapshot.deltas
    finally:
        await _empty(store)


async def _empty(store: ObstoreStore) -> None:
    names = [info.name async for info in store.list(LAYOUT.namespace)]
    await in_parallel(names, store.delete)
    await store.close()

# SPDX-License-Identifier: Apache-2.0
"""The index on a real server: pages of listings, its clock, and names of every kind."""

from __future__ import annotations

import pytest

from s3ec.index.maker import rebuild, verify
from s3ec.store.concurrency import in_parallel
from s3ec.store.s3 import ObstoreStore
from tests.contract.conftest import Configure, Transport
from tests.support.indexes import LAYOUT, announce, key_of, put_object, view

PAGE = 1000


async def test_deltas_on_both_sides_of_a_page_are_read(on_seaweed: Configure) -> None:
    store = ObstoreStore(on_seaweed(prefix="manifest-pages"))
    try:
        await rebuild(store, LAYOUT)
        keys = [key_of(number) for number in range(PAGE + 1)]
        await in_parallel(keys, lambda key: announce(store, [key]))
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
        assert (await rebuild(store, LAYOUT)).rows == 2
        await announce(store, [key_of(3)], nbytes=100)
        await put_object(store, key_of(3), 100)
        assert await view(store) == dict.fromkeys((key_of(n).digest for n in (1, 2, 3)), 100)
        assert (await rebuild(store, LAYOUT)).rows == 3
        found = await verify(store, LAYOUT)
        assert found.index_agrees
        assert (found.objects, found.entries) == (3, 3)
        names = [info.name async for info in store.list(LAYOUT.manifest)]
        assert names
        assert all(name.startswith(f"{LAYOUT.manifest}v2/") for name in names)
    finally:
        await _empty(store)


async def _empty(store: ObstoreStore) -> None:
    names = [info.name async for info in store.list(LAYOUT.namespace)]
    await in_parallel(names, store.delete)
    await store.close()

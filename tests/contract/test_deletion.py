# SPDX-License-Identifier: Apache-2.0
"""Deleting many entries on a real server: how many requests it takes, and what is left."""

from __future__ import annotations

import re

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.index.delete import delete_chosen, delete_entries, remove_namespace
from s3ec.index.maker import verify
from s3ec.store.concurrency import in_parallel
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import LocalS3
from tests.contract.conftest import Configure
from tests.support.indexes import LAYOUT, key_of, put_object

ENTRIES = 1010  # a request takes 1000
KEYS = [key_of(("deletion", number)) for number in range(ENTRIES)]


# botocore's deletions are obstore's as well.
@pytest.mark.parametrize("by", ["age", "key", "namespace"])
async def test_more_than_a_thousand_entries_go_with_two_requests(
    on_seaweed: Configure, local_s3: LocalS3, by: str
) -> None:
    prefix = f"deletion/{by}"
    uploader = ObstoreStore(on_seaweed(prefix=prefix))
    try:
        await in_parallel(KEYS, lambda key: put_object(uploader, key, 9))
    finally:
        await uploader.close()
    with FaultProxy(local_s3.endpoint_url) as proxy:
        store = ObstoreStore(on_seaweed(prefix=prefix, endpoint_url=proxy.url))
        try:
            if by == "age":
                await delete_chosen(store, LAYOUT, lambda infos: infos)
            elif by == "key":
                await delete_entries(store, LAYOUT, KEYS)
            else:
                assert (await remove_namespace(store, LAYOUT, 0.0)).entries == ENTRIES
            asked = [f"{r.method} {r.target}" for r in proxy.requests]
            assert not [info.name async for info in store.list(LAYOUT.objects)]
            assert (await verify(store, LAYOUT)).index_agrees
        finally:
            await store.close()
    assert len([line for line in asked if re.match(r"POST .*\?delete", line)]) == 2
    # A listing leaves a snapshot of what is left; nothing else is said of what was deleted.
    assert not [line for line in asked if re.match("PUT .*/manifest/v2/delta/", line)]
    snapshots = [line for line in asked if re.match("PUT .*/manifest/v2/snapshot/", line)]
    assert len(snapshots) == (1 if by == "age" else 0)
    assert not [line for line in asked if re.match("DELETE .*/objects/", line)]

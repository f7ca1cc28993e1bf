# SPDX-License-Identifier: Apache-2.0
"""Times of a store: how they are read, and that the probe object goes again."""

from __future__ import annotations

import pytest

from s3ec.doctor.latency import AT_ONCE, measure_store
from s3ec.errors import AccessError, CorruptEntryError, UnavailableError
from s3ec.store.base import Blob, Wrapper
from s3ec.testing.memory_store import MemoryStore

NAME = ".s3ec-probe/x"


class Watched(Wrapper):
    """Counts reads, and how many of them there are at a time."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.reads = self.now = self.most = 0
        self.fails_after: int | None = None
        self.may_delete = True
        self.short = False

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        import asyncio

        self.reads += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.fails_after is not None and self.reads > self.fails_after:
            raise UnavailableError("down")
        found = await super().get(name, max_bytes=max_bytes)
        return found[:-1] if self.short and found is not None else found

    async def delete(self, name: str) -> None:
        if not self.may_delete:
            raise AccessError("no", code="AccessDenied")
        await super().delete(name)


@pytest.fixture
def store() -> Watched:
    return Watched(MemoryStore())


async def test_alone_and_together(store: Watched) -> None:
    found = await measure_store(store, NAME, 1000, reads=40)
    assert found.reads == 40
    assert 0 < found.p50_ms <= found.p90_ms <= found.p99_ms
    assert store.reads == 81  # one opens the connection
    assert store.most == AT_ONCE
    assert found.node_mb_s > 0
    assert found.left is None
    assert await store.head(NAME) is None


async def test_a_large_object_is_read_in_ranges(store: Watched) -> None:
    found = await measure_store(store, NAME, 9 * 2**20, reads=2)
    assert store.reads == 0
    assert found.nbytes == 9 * 2**20


async def test_a_slow_store_is_read_less_often(store: Watched) -> None:
    found = await measure_store(store, NAME, 1000, reads=40, longest_s=0.0)
    assert 3 <= found.reads < 40


async def test_failure_leaves_no_object(store: Watched) -> None:
    store.fails_after = 5
    with pytest.raises(UnavailableError):
        await measure_store(store, NAME, 1000)
    assert await store.head(NAME) is None


async def test_a_short_answer_is_no_measurement(store: Watched) -> None:
    store.short = True
    with pytest.raises(CorruptEntryError):
        await measure_store(store, NAME, 1000)


async def test_what_may_not_be_deleted_is_named(store: Watched) -> None:
    store.may_delete = False
    found = await measure_store(store, NAME, 1000, reads=3)
    assert found.left == NAME

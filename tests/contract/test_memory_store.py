# SPDX-License-Identifier: Apache-2.0
"""The suite against the store in memory, bare and inside every wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from s3ec.counters import Counters
from s3ec.store.base import Store
from s3ec.store.endpoint import Endpoint
from s3ec.store.open import HeadBeforePut, resilient
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.fault_store import FaultStore
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

Wrap = Callable[[Store], Store]


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    bucket = MemoryBucket()
    yield bucket
    assert MemoryStore(bucket).check() == []


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def make_store(self, bucket: MemoryBucket) -> MakeStore:
        return lambda prefix: MemoryStore(bucket, prefix=prefix)


class _Wrapped(StoreContract):
    wrap: Wrap

    @pytest.fixture
    def make_store(self, bucket: MemoryBucket) -> MakeStore:
        return lambda prefix: type(self).wrap(MemoryStore(bucket, prefix=prefix))


class TestHeadBeforePut(_Wrapped):
    wrap = staticmethod(HeadBeforePut)


class TestFaultStoreWithoutFaults(_Wrapped):
    wrap = staticmethod(FaultStore)


class TestResilientStore(_Wrapped):
    wrap = staticmethod(lambda inner: resilient(inner, Endpoint(4), Counters(), hedge=True))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from s3ec.errors import AccessError, ConflictError, UnavailableError
from s3ec.testing.fault_store import Fault, FaultStore, Script, cut, flip, replace
from s3ec.testing.memory_store import MemoryStore


async def test_fault_strikes_the_named_operation_as_often_as_told() -> None:
    fault = Fault(op="get", name="^bad/", error=AccessError, skip=1, times=2)
    store = FaultStore(MemoryStore(), Script([fault]))
    assert await store.get("bad/x", max_bytes=1) is None
    for _ in range(2):
        with pytest.raises(AccessError, match="bad/x"):
            await store.get("bad/x", max_bytes=1)
    assert await store.get("bad/x", max_bytes=1) is None
    assert await store.get("good/x", max_bytes=1) is None
    assert await store.head("bad/x") is None
    assert fault.struck == 2
    assert store.calls == {"get": 5, "head": 1}
    assert store.log[0] == ("get", "bad/x")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (cut(2), b"01"),
        (flip(0), b"1123"),
        (flip(31), b"012\xb3"),
        (flip(-1), b"012\xb3"),
        (replace(b"other"), b"other"),
    ],
)
async def test_bytes_read_are_changed(change: object, expected: bytes) -> None:
    inner = MemoryStore()
    await inner.put_if_absent("x", [b"0123"])
    store = FaultStore(inner, Script([Fault(op="get|get_range", change=change)]))
    assert await store.get("x", max_bytes=10) == expected
    assert await store.get_range("x", 0, 4) == expected
    assert await store.get("absent", max_bytes=10) is None
    assert await inner.get("x", max_bytes=10) == b"0123"


async def test_lost_reply_stores_and_fails() -> None:
    inner = MemoryStore()
    store = FaultStore(inner, Script([Fault(op="put_if_absent", lost_reply=True, times=1)]))
    with pytest.raises(UnavailableError):
        await store.put_if_absent("x", [b"body"])
    with pytest.raises(ConflictError):
        await store.put_if_absent("x", [b"body"])
    assert await inner.get("x", max_bytes=10) == b"body"


async def test_partial_fault_of_delete_many_fails_the_names_that_match() -> None:
    inner = MemoryStore()
    for name in ("good/1", "good/2", "bad/1"):
        await inner.put_if_absent(name, [b"x"])
    fault = Fault(op="delete_many", name="^bad/", error=AccessError, partial=True, times=1)
    store = FaultStore(inner, Script([fault]))
    left = await store.delete_many(["bad/1", "good/1"])
    assert list(left) == ["bad/1"]
    assert isinstance(left["bad/1"], AccessError)
    assert set(inner.bucket.objects) == {"good/2", "bad/1"}
    assert await store.delete_many(["bad/1", "good/2"]) == {}
    assert store.calls == {"delete_many": 2}

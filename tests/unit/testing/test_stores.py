# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading

import pytest

from s3ec.errors import AccessError, ConflictError, UnavailableError
from s3ec.testing.fault_store import Dice, Fault, FaultStore, Gate, Script, cut, flip, replace
from s3ec.testing.memory_store import MemoryBucket, MemoryStore


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


async def test_first_fault_that_is_not_used_up_strikes() -> None:
    faults = [Fault(error=AccessError, times=1), Fault(error=UnavailableError, times=1)]
    store = FaultStore(MemoryStore(), Script(faults))
    with pytest.raises(AccessError):
        await store.delete("x")
    with pytest.raises(UnavailableError):
        await store.list_folders("")
    await store.delete("x")


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


async def test_listing_whose_reply_is_lost_breaks_after_its_entries() -> None:
    inner = MemoryStore()
    await inner.put_if_absent("x", [b""])
    store = FaultStore(inner, Script([Fault(op="list", lost_reply=True)]))
    listing = store.list("")
    assert (await anext(listing)).name == "x"
    with pytest.raises(UnavailableError):
        await anext(listing)


async def test_latency_is_slept_by_the_injected_sleep() -> None:
    slept = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    store = FaultStore(MemoryStore(), Script([Fault(op="head", latency_s=3600)]), sleep=sleep)
    assert await store.head("x") is None
    assert await store.get("x", max_bytes=1) is None
    assert slept == [3600]


async def test_gate_holds_operations_until_another_thread_opens_it() -> None:
    gate = Gate()
    store = FaultStore(MemoryStore(), Script([Fault(op="head", gate=gate)]))
    held = [asyncio.create_task(store.head("x")) for _ in range(3)]

    def open_when_reached() -> None:
        assert gate.reached.wait(30)
        gate.release()

    thread = threading.Thread(target=open_when_reached)
    thread.start()
    assert await asyncio.wait_for(asyncio.gather(*held), 30) == [None] * 3
    thread.join()
    assert await store.head("x") is None  # it stays open


async def test_gate_survives_a_waiter_whose_loop_is_gone() -> None:
    gate = Gate()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.wait(), 0.01)

    await asyncio.to_thread(asyncio.run, give_up())
    gate.release()
    await gate.wait()


async def test_equal_seeds_give_equal_faults() -> None:
    async def history(seed: int) -> list[bool]:
        store = FaultStore(MemoryStore(), Dice(seed, [Fault(error=UnavailableError)], share=0.3))
        outcomes = []
        for i in range(200):
            try:
                await store.head(f"n{i}")
            except UnavailableError:
                outcomes.append(False)
            else:
                outcomes.append(True)
        return outcomes

    first = await history(1)
    assert first == await history(1)
    assert first != await history(2)
    assert 30 < first.count(False) < 90


async def test_dice_choose_among_the_faults_that_fit() -> None:
    faults = [Fault(op="put_if_absent", error=AccessError), Fault(op="head", error=AccessError)]
    store = FaultStore(MemoryStore(), Dice(1, faults, share=1.0))
    assert await store.get("x", max_bytes=1) is None
    with pytest.raises(AccessError):
        await store.head("x")


def test_memory_store_complains_about_what_no_server_holds() -> None:
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    assert store.check() == []
    bucket.objects["/x"] = b""
    bucket.objects["n" * 1025] = b""
    bucket.modified_s["ghost"] = 1.0
    assert len(store.check()) == 3


async def test_memory_stores_share_a_bucket_and_list_it_backwards() -> None:
    bucket = MemoryBucket()
    one = MemoryStore(bucket, prefix="p", clock=lambda: 12.5)
    other = MemoryStore(bucket, prefix="p")
    for name in ("b", "a", "c"):
        await one.put_if_absent(name, [b"x"])
    assert [info.name async for info in other.list("")] == ["c", "b", "a"]
    info = await other.head("a")
    assert info is not None
    assert info.modified_s == 12.5
    await one.close()
    with pytest.raises(RuntimeError, match="closed"):
        await one.head("a")


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

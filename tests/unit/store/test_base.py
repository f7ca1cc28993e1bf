# SPDX-License-Identifier: Apache-2.0
"""Several deletions at once inside the wrappers, and several ranges of one object."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.store import base
from s3ec.store.base import VanishedError, get_in_parts, parts_as_they_come
from s3ec.store.endpoint import Budget, Endpoint
from s3ec.store.retry import RetryStore
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore

NAMES = ["a", "b", "c"]


class Asked(MemoryStore):
    """Notes what each request names."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        self.batches.append(list(names))
        return await super().delete_many(names)


@pytest.fixture
async def bucket() -> Asked:
    bucket = Asked()
    for name in NAMES:
        await bucket.put_if_absent(name, [b"x"])
    return bucket


def retrying(inner: FaultStore, endpoint: Endpoint | None = None) -> RetryStore:
    async def sleep(seconds: float) -> None:
        pass

    return RetryStore(inner, Counters(), endpoint=endpoint, sleep=sleep)


def partial(name: str, error: type[S3ECError], times: int | None = 1) -> Fault:
    return Fault(op="delete_many", name=name, error=error, partial=True, times=times)


async def test_only_names_that_may_yet_be_deleted_are_asked_for_again(bucket: Asked) -> None:
    faults = [partial("b", UnavailableError)]
    store = retrying(FaultStore(bucket, Script(faults)))
    assert await store.delete_many(NAMES) == {}
    assert bucket.batches == [["a", "c"], ["b"]]
    assert bucket.bucket.objects == {}


async def test_a_refused_name_is_not_asked_for_again_and_is_reported(bucket: Asked) -> None:
    both = Fault(op="delete_many", name="^[ab]$", partial=True, times=1)
    both.error = lambda m: (AccessError if m.endswith("a") else UnavailableError)(m)
    store = retrying(FaultStore(bucket, Script([both])))
    left = await store.delete_many(NAMES)
    assert {name: type(exc) for name, exc in left.items()} == {"a": AccessError}
    assert bucket.batches == [["c"], ["b"]]
    assert set(bucket.bucket.objects) == {"a"}


async def test_what_stays_unavailable_is_reported_with_its_reason(bucket: Asked) -> None:
    store = retrying(FaultStore(bucket, Script([partial("b", UnavailableError, times=None)])))
    left = await store.delete_many(NAMES)
    assert list(left) == ["b"]
    assert isinstance(left["b"], UnavailableError)
    assert "for b" in str(left["b"])


async def test_a_request_that_fails_as_a_whole_raises_and_one_after_an_answer_does_not(
    bucket: Asked,
) -> None:
    down = Fault(op="delete_many", error=AccessError)
    with pytest.raises(AccessError):
        await retrying(FaultStore(bucket, Script([down]))).delete_many(NAMES)
    first = partial("b", UnavailableError)
    left = await retrying(FaultStore(bucket, Script([first, down]))).delete_many(NAMES)
    assert {name: type(exc) for name, exc in left.items()} == {"b": AccessError}


async def test_a_whole_failure_is_repeated_within_the_budget(bucket: Asked) -> None:
    faults = FaultStore(bucket, Script([Fault(op="delete_many", error=UnavailableError, times=1)]))
    spent = Endpoint(8)
    spent.budget = Budget(0.0, at_most=1.0, at_first=0.0)
    with pytest.raises(UnavailableError):
        await retrying(faults, spent).delete_many(NAMES)
    assert await retrying(faults).delete_many(NAMES) == {}


# -- ranges of one object ------------------------------------------------------------------------

RANGES = [range(at, at + 10) for at in range(0, 80, 10)]


class Answering(MemoryStore):
    """Answers a range when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, asyncio.Future[bytes | None]] = {}

    async def get_range(self, name: str, start: int, length: int) -> Any:
        number = start // 10
        self.asked[number] = asyncio.get_running_loop().create_future()
        return await self.asked[number]

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.asked[number].set_result(b"%d" % number)


async def until_asked(store: Answering, count: int) -> None:
    for _ in range(20):  # turns of the loop; nothing else has to happen
        await asyncio.sleep(0)
    assert len(store.asked) == count


async def test_ranges_come_as_they_are_answered_and_none_lies_far_ahead_of_the_first() -> None:
    store = Answering()
    coming = parts_as_they_come(store, "a", RANGES, at_a_time=3, first_alone=False)
    async with aclosing(coming) as parts:
        for answered, asked in ((2, 3), (1, 3), (0, 3), (3, 6), (5, 7), (4, 7), (7, 8), (6, 8)):
            following = asyncio.ensure_future(anext(parts))
            await until_asked(store, asked)
            store.answer(answered)
            assert await following == (answered, b"%d" % answered)
        with pytest.raises(StopAsyncIteration):
            await anext(parts)


async def test_first_range_alone_is_asked_for_before_the_others() -> None:
    store = Answering()
    coming = parts_as_they_come(store, "a", RANGES, at_a_time=4, first_alone=True)
    async with aclosing(coming) as parts:
        following = asyncio.ensure_future(anext(parts))
        await until_asked(store, 1)
        store.answer(0)
        assert await following == (0, b"0")
        following = asyncio.ensure_future(anext(parts))
        await until_asked(store, 5)
        store.answer(4)
        assert await following == (4, b"4")


async def test_who_leaves_early_or_hears_an_error_leaves_no_request_behind() -> None:
    store = Answering()
    coming = parts_as_they_come(store, "a", RANGES, at_a_time=4, first_alone=False)
    async with aclosing(coming) as parts:
        following = asyncio.ensure_future(anext(parts))
        await until_asked(store, 4)
        store.asked[2].set_exception(UnavailableError("no"))
        with pytest.raises(UnavailableError):
            await following
    assert all(one.done() for one in store.asked.values())
    store.asked.clear()
    async with aclosing(
        parts_as_they_come(store, "a", RANGES, at_a_time=4, first_alone=False)
    ) as parts:
        following = asyncio.ensure_future(anext(parts))
        await until_asked(store, 4)
        store.answer(1, 3)
        assert await following == (1, b"1")
    assert all(one.done() for one in store.asked.values())


@pytest.mark.parametrize(
    ("nbytes", "error"), [(25, None), (26, CorruptEntryError), (31, CorruptEntryError)]
)
async def test_an_object_is_put_together_from_whole_ranges(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, error: type[Exception] | None
) -> None:
    monkeypatch.setattr(base, "PART_BYTES", 10)
    store, body = MemoryStore(), bytes(range(25))
    with pytest.raises(VanishedError, match="name"):
        await get_in_parts(store, "name", nbytes, at_a_time=2)
    await store.put_if_absent("name", [body])
    coming = get_in_parts(store, "name", nbytes, at_a_time=2)
    if error is None:
        assert await coming == body
    else:
        with pytest.raises(error, match="name: ends at 25 of"):
            await coming


class Part(bytearray):
    """A body that can be counted while it lives."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Bodies:
    """Answers all requests that are under way at once.

    Attributes:
        most: How many bodies were in memory at a time.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Part] = weakref.WeakSet()
        self.most = 0

    async def get_range(self, name: str, start: int, length: int) -> Part:
        await asyncio.sleep(0.001)
        part = Part(length)
        self.alive.add(part)
        self.most = max(self.most, len(self.alive))
        return part


async def test_bodies_that_were_taken_do_not_stay_while_others_come() -> None:
    store: Any = Bodies()
    coming = parts_as_they_come(store, "a", [RANGES[0]] * 20, at_a_time=4, first_alone=False)
    async with aclosing(coming) as parts:
        async for number, part in parts:
            del part
            if number % 4 == 3:
                await asyncio.sleep(0.02)
    assert store.most <= 5  # those of four requests, and one that is being answered

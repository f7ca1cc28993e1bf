# SPDX-License-Identifier: Apache-2.0
"""Parts of a catalogue that are merged: nothing is lost, whoever merges at once or is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec.corpus.catalog import (
    MAX_PARTS,
    CatalogFollower,
    CatalogRow,
    PartReader,
    append_rows,
    drop_rows,
    list_parts,
    merge_parts,
    read_table,
)
from s3ec.corpus.catalog_file import to_rows
from s3ec.errors import AccessError, UnavailableError
from s3ec.store.base import Store, Wrapper
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.support.catalogues import LAYOUT, row
from tests.support.waiting import until

T = TypeVar("T")


class KilledError(Exception):
    """The process ends here."""


async def rows_of(store: Store) -> list[CatalogRow]:
    return list(to_rows(await read_table(store, LAYOUT)))


async def with_parts(count: int) -> MemoryStore:
    """Parts of which each has a row of its own, and one that the next part replaces."""
    store = MemoryStore()
    for number in range(count):
        mine = row(f"{number:03}.png", rows=number + 1)
        await append_rows(store, LAYOUT, [mine, row("shared.png", rows=number + 1)])
    return store


def expected(count: int) -> list[CatalogRow]:
    own = [row(f"{number:03}.png", rows=number + 1) for number in range(count)]
    return [*own, row("shared.png", rows=count)]


def copy_of(store: MemoryStore) -> MemoryStore:
    return MemoryStore(MemoryBucket(dict(store.bucket.objects), dict(store.bucket.modified_s)))


# -- alone -----------------------------------------------------------------------------------------


async def test_an_append_merges_where_there_are_many_parts() -> None:
    store = await with_parts(MAX_PARTS)
    assert len(await list_parts(store, LAYOUT)) == MAX_PARTS
    last = row("999.png")
    await append_rows(store, LAYOUT, [last])
    assert len(await list_parts(store, LAYOUT)) == 1
    assert await rows_of(store) == sorted(
        [*expected(MAX_PARTS), last], key=lambda found: found.document
    )


async def test_few_parts_are_not_merged() -> None:
    store = FaultStore(await with_parts(5))
    assert await merge_parts(store, LAYOUT) == 0
    assert set(store.calls) == {"list"}


async def test_large_parts_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await with_parts(4)
    large = [row(f"large {number}", extra={"n": "x" * 99 + str(number)}) for number in range(500)]
    await append_rows(store, LAYOUT, large)
    largest = max((await list_parts(store, LAYOUT)).values(), key=lambda info: info.nbytes)
    assert await merge_parts(copy_of(store), LAYOUT, fewest=2) == 5
    monkeypatch.setattr("s3ec.corpus.catalog._MERGED_ROWS", 100)
    assert await merge_parts(store, LAYOUT, fewest=2) == 4
    assert largest.name in store.bucket.objects
    assert len(await list_parts(store, LAYOUT)) == 2
    monkeypatch.setattr("s3ec.corpus.catalog.MERGED_BYTES", largest.nbytes)
    assert await merge_parts(store, LAYOUT, fewest=2) == 0
    assert len(await rows_of(store)) == 505


async def test_what_cannot_be_used_is_left_where_it_is() -> None:
    store = await with_parts(3)
    broken = LAYOUT.catalog_part("01JC0000000000000000000000")
    await store.put_if_absent(broken, [b"PAR1"])
    assert await merge_parts(store, LAYOUT, fewest=2) == 3
    assert broken in store.bucket.objects
    assert await rows_of(store) == expected(3)


async def test_who_may_not_delete_does_not_merge(caplog: pytest.LogCaptureFixture) -> None:
    memory = await with_parts(MAX_PARTS)
    store = FaultStore(memory, Script([Fault("delete|delete_many", error=AccessError)]))
    caplog.set_level("INFO")
    for number in range(3):
        await append_rows(store, LAYOUT, [row(f"z{number}.png")])
    assert len(await list_parts(memory, LAYOUT)) == MAX_PARTS + 3
    assert "catalog merge" in caplog.text
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


async def test_an_append_stands_where_merging_fails(caplog: pytest.LogCaptureFixture) -> None:
    memory = await with_parts(MAX_PARTS)
    store = FaultStore(memory, Script([Fault("delete", error=UnavailableError)]))
    await append_rows(store, LAYOUT, [row("z.png")])
    assert (await rows_of(memory))[-1] == row("z.png")
    assert "not merged" in caplog.text


# -- killed, and two at once -----------------------------------------------------------------------


@pytest.mark.parametrize("lost_reply", [False, True], ids=["before", "after"])
async def test_merge_that_is_killed_at_any_step_loses_nothing(lost_reply: bool) -> None:
    full = await with_parts(6)
    whole = FaultStore(copy_of(full))
    assert await merge_parts(whole, LAYOUT, fewest=2) == 6
    steps = sum(whole.calls.values())
    assert steps >= 9  # a list, a deletion, six reads, a part, their deletion
    for step in range(steps):
        store = copy_of(full)
        kill = Fault(error=KilledError, lost_reply=lost_reply, skip=step, times=1)
        with pytest.raises(KilledError):
            await merge_parts(FaultStore(store, Script([kill])), LAYOUT, fewest=2)
        assert await rows_of(store) == expected(6)
        await merge_parts(store, LAYOUT, fewest=2)
        assert await rows_of(store) == expected(6)
        assert len(await list_parts(store, LAYOUT)) == 1


async def test_merge_of_which_some_deletions_fail_loses_nothing() -> None:
    store = await with_parts(6)
    parts = list(await list_parts(store, LAYOUT))
    some = Fault("delete_many", parts[2], error=UnavailableError, partial=True)
    with pytest.raises(UnavailableError):
        await merge_parts(FaultStore(store, Script([some])), LAYOUT, fewest=2)
    assert len(await list_parts(store, LAYOUT)) == 2
    assert await rows_of(store) == expected(6)


async def test_two_merges_at_once_lose_nothing() -> None:
    store = await with_parts(6)
    await asyncio.gather(
        *(merge_parts(MemoryStore(store.bucket), LAYOUT, fewest=2) for _ in range(3))
    )
    assert await rows_of(store) == expected(6)
    await merge_parts(store, LAYOUT, fewest=2)
    assert await rows_of(store) == expected(6)


async def test_merged_part_does_not_count_over_what_was_appended_meanwhile() -> None:
    store = await with_parts(3)
    gate = Gate()
    slow = FaultStore(store, Script([Fault("put_if_absent", gate=gate)]))
    merging = asyncio.create_task(merge_parts(slow, LAYOUT, fewest=2))
    await until(gate.reached.is_set)
    await append_rows(store, LAYOUT, [row("shared.png", rows=99)])
    gate.release()
    assert await merging == 3
    assert (await rows_of(store))[-1].rows == 99


async def test_reader_lists_again_where_parts_vanish() -> None:
    store = await with_parts(6)
    gate = Gate()
    slow = FaultStore(store, Script([Fault("get_range", gate=gate)]))
    reading = asyncio.create_task(rows_of(slow))
    await until(gate.reached.is_set)
    await merge_parts(store, LAYOUT, fewest=2)
    gate.release()
    assert await reading == expected(6)
    assert slow.calls["list"] == 2


# -- who follows -----------------------------------------------------------------------------------


async def test_follower_reads_each_part_once() -> None:
    memory = await with_parts(3)
    store = FaultStore(memory)
    follower = CatalogFollower(store, LAYOUT)
    assert follower.index.by_document("000.png") == []
    await follower.refresh()
    before = follower.index
    assert store.calls == {"list": 2, "get_range": 3}
    await append_rows(memory, LAYOUT, [row("shared.png", rows=50)])
    await follower.refresh()
    await follower.refresh()
    assert store.calls == {"list": 5, "get_range": 4}
    assert [found.rows for found in follower.index.by_document("shared.png")] == [50]
    assert [found.rows for found in before.by_document("shared.png")] == [3]


async def test_follower_is_not_confused_by_merges() -> None:
    memory = await with_parts(3)
    store = FaultStore(memory)
    follower = CatalogFollower(store, LAYOUT)
    await follower.refresh()
    await merge_parts(memory, LAYOUT, fewest=2)
    await append_rows(memory, LAYOUT, [row("shared.png", rows=50)])
    await follower.refresh()
    assert store.calls == {"list": 4, "get_range": 5}
    for number in range(3):
        [found] = follower.index.by_document(f"{number:03}.png")
        assert found.rows == number + 1
    assert [found.rows for found in follower.index.by_document("shared.png")] == [50]


async def test_follower_forgets_rows_that_were_dropped() -> None:
    memory = await with_parts(3)
    await append_rows(memory, LAYOUT, [row("gone.png", identifier="gone")])
    follower = CatalogFollower(memory, LAYOUT)
    await follower.refresh()
    before = follower.index
    assert await drop_rows(memory, LAYOUT, lambda identifier: identifier == "gone") == 1
    await follower.refresh()
    assert before.by_identifier("gone") == row("gone.png", identifier="gone")
    assert follower.index.by_identifier("gone") is None
    assert len(follower.index.by_document("001.png")) == 1


async def test_follower_keeps_its_index_where_reading_anew_fails() -> None:
    memory = await with_parts(3)
    script = Script()
    follower = CatalogFollower(FaultStore(memory, script), LAYOUT)
    await follower.refresh()
    await merge_parts(memory, LAYOUT, fewest=2)
    await append_rows(memory, LAYOUT, [row("new.png")])
    script.faults = [Fault("get_range", error=UnavailableError, skip=1, times=1)]
    with pytest.raises(UnavailableError):
        await follower.refresh()
    assert [found.rows for found in follower.index.by_document("shared.png")] == [3]
    await follower.refresh()
    assert follower.index.by_document("new.png") == [row("new.png")]
    assert [found.rows for found in follower.index.by_document("shared.png")] == [3]


async def test_follower_keeps_what_it_knows_where_the_store_fails() -> None:
    memory = await with_parts(3)
    script = Script()
    follower = CatalogFollower(FaultStore(memory, script), LAYOUT)
    await follower.refresh()
    await append_rows(memory, LAYOUT, [row("new.png")])
    script.faults = [Fault("get_range", error=UnavailableError, times=1)]
    with pytest.raises(UnavailableError):
        await follower.refresh()
    assert len(follower.index.by_document("000.png")) == 1
    await follower.refresh()
    assert follower.index.by_document("new.png") == [row("new.png")]


async def test_follower_that_is_cancelled_goes_on_with_the_next_call() -> None:
    memory = await with_parts(6)
    gate = Gate()
    store = FaultStore(memory, Script([Fault("get_range", gate=gate, skip=4)]))
    follower = CatalogFollower(store, LAYOUT)
    first = asyncio.create_task(follower.refresh())
    await until(gate.reached.is_set)
    second = asyncio.create_task(follower.refresh())
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.release()
    await second
    assert len(follower.index.by_document("005.png")) == 1


async def test_part_that_nobody_was_done_with_is_read_again() -> None:
    reader = PartReader(await with_parts(3), LAYOUT)
    async with aclosing(reader.read_new()) as coming:
        await anext(coming)
        await anext(coming)  # broken off with the second one
    async with aclosing(reader.read_new()) as coming:
        assert [len(table) async for table in coming] == [2, 2]


async def test_follower_takes_no_more_than_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    memory = await with_parts(20)
    store = FaultStore(memory)
    follower = CatalogFollower(store, LAYOUT, max_bytes=1000)
    await follower.refresh()
    known, calls = len(follower.index), store.calls.copy()
    assert follower.is_full
    assert 0 < known < 20
    await follower.refresh()
    assert (len(follower.index), store.calls - calls) == (known, Counter(list=1))
    assert "not known here" in caplog.text


async def test_follower_names_a_damaged_part_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = await with_parts(2)
    broken = LAYOUT.catalog_part("01JC0000000000000000000000")
    await memory.put_if_absent(broken, [b"PAR1"])
    store = FaultStore(memory)
    follower = CatalogFollower(store, LAYOUT)
    for _ in range(3):
        await follower.refresh()
    assert len(follower.index.by_document("001.png")) == 1
    assert caplog.text.count(broken) == 1
    assert store.calls["get_range"] == 4, "a damaged one is tried twice, and then no more"


# -- any order of anything -------------------------------------------------------------------------


class Turns(Wrapper):
    """A store whose requests each wait until they are let go."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.waiting: list[asyncio.Future[None]] = []

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn
        return await call()

    def let_go(self, number: int) -> None:
        self.waiting = [turn for turn in self.waiting if not turn.done()]
        if self.waiting:
            self.waiting.pop(number % len(self.waiting)).set_result(None)


@dataclass
class Job:
    """One append, merge, or reading, from its begin to its end."""

    task: asyncio.Task[Any]
    begin: int
    document: str = ""
    rows: int = 0
    end: int | None = None

    @property
    def is_done(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


class World:
    """What was done, and what may be read after it."""

    def __init__(self) -> None:
        self.store = Turns(MemoryStore())
        self.follower = CatalogFollower(self.store, LAYOUT)
        self.jobs: list[Job] = []
        self.ticks = itertools.count(1)

    def begin(self, work: Coroutine[Any, Any, Any], document: str = "", rows: int = 0) -> None:
        job = Job(asyncio.ensure_future(work), next(self.ticks), document, rows)
        job.task.add_done_callback(lambda _: setattr(job, "end", next(self.ticks)))
        self.jobs.append(job)

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    def step(self, action: tuple[str, int]) -> None:
        what, number = action
        if what == "append":
            document, rows = f"{number % 2}.png", len(self.jobs) + 1
            self.begin(append_rows(self.store, LAYOUT, [row(document, rows=rows)]), document, rows)
        elif what == "merge":
            self.begin(merge_parts(self.store, LAYOUT, fewest=2))
        elif what == "read":
            self.begin(self.read())
        elif what == "refresh":
            self.begin(self.refresh())
        elif what == "kill" and self.jobs:
            self.jobs[number % len(self.jobs)].task.cancel()
        else:
            self.store.let_go(number)

    async def read(self) -> None:
        begin = next(self.ticks)
        found = await rows_of(self.store)
        self.check({each.document: each.rows for each in found}, begin)

    async def refresh(self) -> None:
        begin = next(self.ticks)
        await self.follower.refresh()
        index = self.follower.index
        rows = [each for n in range(2) for each in index.by_document(f"{n}.png")]
        self.check({each.document: each.rows for each in rows}, begin)

    def check(self, found: dict[str, int], begin: int) -> None:
        """Nothing is missing or old that was confirmed before somebody began to read."""
        for document in ("0.png", "1.png"):
            appends = [job for job in self.jobs if job.document == document]
            before = [job for job in appends if job.is_done and (job.end or begin) < begin]
            if document not in found:
                assert not before, f"{document} is lost"
                continue
            [mine] = [job for job in appends if job.rows == found[document]]
            for job in before:
                assert mine.end is None or mine.end > job.begin, f"{document} is an old one"


ACTIONS = st.tuples(
    st.sampled_from(["append", "append", "merge", "read", "refresh", "kill", *["go"] * 14]),
    st.integers(0, 7),
)
# Two parts, so that there is something to merge from the beginning.
FIRST = [("append", 0), *[("go", 0)] * 4, ("append", 1), *[("go", 0)] * 4, ("merge", 0)]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(ACTIONS, min_size=40, max_size=120))
def test_no_order_of_appends_merges_and_deaths_loses_the_newest_row(
    actions: Sequence[tuple[str, int]],
) -> None:
    async def live() -> None:
        world = World()
        for action in [*FIRST, *actions]:
            world.step(action)
            await world.settle()
        while not all(job.task.done() for job in world.jobs):
            world.store.let_go(0)
            await world.settle()
        for job in world.jobs:
            if not job.task.cancelled() and job.task.exception() is not None:
                raise job.task.exception() or AssertionError
        world.step(("read", 0))
        world.step(("refresh", 0))
        while not all(job.task.done() for job in world.jobs[-2:]):
            world.store.let_go(0)
            await world.settle()
        for job in world.jobs[-2:]:
            job.task.result()

    async def at_once(function: Callable[..., T], *args: Any, **named: Any) -> T:
        return function(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        # So that only the drawn actions decide who comes first.
        patch.setattr("asyncio.to_thread", at_once)
        asyncio.run(live())

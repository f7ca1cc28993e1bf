# SPDX-License-Identifier: Apache-2.0
"""Parts of a catalogue that are folded: nothing is lost, whoever folds at once or is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.corpus.catalog import (
    CatalogRow,
    CatalogWriter,
    list_parts,
    read_table,
)
from s3ec.corpus.catalog_file import to_rows
from s3ec.corpus.confirmations import Ledger
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Layout, Namespace
from s3ec.store.base import Store, Wrapper
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.support.catalogues import LAYOUT, row
from tests.support.waiting import until

T = TypeVar("T")
BROKEN = "01JC0000000000000000000000"


class KilledError(Exception):
    """The process ends here."""


async def rows_of(store: Store) -> list[CatalogRow]:
    return list(to_rows(await read_table(store, LAYOUT)))


async def fold(store: Store) -> None:
    await CatalogWriter(store, LAYOUT).fold(everything=True)


async def with_parts(count: int) -> MemoryStore:
    """Parts of which each has a row of its own, and one that the next part replaces."""
    store = MemoryStore()
    for number in range(count):
        mine = row(f"{number:03}.png", rows=number + 1)
        await CatalogWriter(store, LAYOUT).append([mine, row("shared.png", rows=number + 1)])
    return store


def expected(count: int) -> list[CatalogRow]:
    own = [row(f"{number:03}.png", rows=number + 1) for number in range(count)]
    return [*own, row("shared.png", rows=count)]


def copy_of(store: MemoryStore) -> MemoryStore:
    return MemoryStore(MemoryBucket(dict(store.bucket.objects), dict(store.bucket.modified_s)))


# -- alone -----------------------------------------------------------------------------------------


async def test_writer_folds_its_own_parts_and_no_others() -> None:
    store = await with_parts(2)
    before = set(await list_parts(store, LAYOUT))
    writer = CatalogWriter(store, LAYOUT)
    for number in (2, 3):
        await writer.append([row(f"{number:03}.png", rows=number + 1), row("shared.png", rows=4)])
    await writer.fold()
    parts = set(await list_parts(store, LAYOUT))
    assert len(parts) == 3
    assert before < parts
    assert await rows_of(store) == expected(4)


async def test_large_parts_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await with_parts(4)
    large = [row(f"large {number}", extra={"n": "x" * 99 + str(number)}) for number in range(500)]
    await CatalogWriter(store, LAYOUT).append(large)
    largest = max((await list_parts(store, LAYOUT)).values(), key=lambda info: info.nbytes)
    other = copy_of(store)
    await fold(other)
    assert len(await list_parts(other, LAYOUT)) == 1
    monkeypatch.setattr("s3ec.corpus.catalog.FOLDED_BYTES", 2 * largest.nbytes)
    await fold(store)
    assert largest.name in store.bucket.objects
    assert len(await rows_of(store)) == 505


async def test_fold_of_many_rows_goes_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await with_parts(9)
    each = max(info.nbytes for info in (await list_parts(store, LAYOUT)).values())
    monkeypatch.setattr("s3ec.corpus.catalog.FOLDED_BYTES", 3 * each)
    await fold(store)
    assert len(await list_parts(store, LAYOUT)) == 3
    assert await rows_of(store) == expected(9)


async def test_what_cannot_be_used_is_left_where_it_is() -> None:
    store = await with_parts(3)
    broken = LAYOUT.catalog_part(BROKEN)
    await store.put_if_absent(broken, [b"PAR1"])
    await fold(store)
    assert len(await list_parts(store, LAYOUT)) == 2
    assert broken in store.bucket.objects
    assert await rows_of(store) == expected(3)


async def test_who_may_not_delete_does_not_fold() -> None:
    memory = await with_parts(3)
    store = FaultStore(memory, Script([Fault("delete|delete_many", error=AccessError)]))
    for _ in range(3):
        with pytest.raises(AccessError):
            await fold(store)
    assert len(await list_parts(memory, LAYOUT)) == 3


def test_job_folds_its_parts_at_its_end(tmp_path: Path) -> None:
    memory = MemoryStore()
    namespace = Namespace.from_descriptor({"model": "acme/vision"})
    layout = Layout(namespace.name)
    given = {"bucket": "corpus", "cache_dir": str(tmp_path), "min_free_bytes": 0}
    with Corpus(load_settings(given).settings, store=memory) as corpus:
        ledger = Ledger(corpus, namespace)
        for number in range(3):
            rows = [row(f"{number}.png")]
            corpus.run(lambda store, rows=rows: ledger.append(store, rows))
        assert len(corpus.run(lambda store: list_parts(store, layout))) == 3
        ledger.close()
        assert len(corpus.run(lambda store: list_parts(store, layout))) == 1
        assert len(list(corpus.catalog(namespace.name).rows())) == 3


# -- killed, and two at once -----------------------------------------------------------------------


@pytest.mark.parametrize("lost_reply", [False, True], ids=["before", "after"])
async def test_fold_that_is_killed_at_any_step_loses_nothing(lost_reply: bool) -> None:
    full = await with_parts(6)
    whole = FaultStore(copy_of(full))
    await fold(whole)
    steps = sum(whole.calls.values())
    assert steps >= 14  # three lists, six reads, the time, a deletion, a part, their deletion
    for step in range(steps):
        store = copy_of(full)
        kill = Fault(error=KilledError, lost_reply=lost_reply, skip=step, times=1)
        with pytest.raises(KilledError):
            await fold(FaultStore(store, Script([kill])))
        assert await rows_of(store) == expected(6)
        await fold(store)
        assert await rows_of(store) == expected(6)
        assert len(await list_parts(store, LAYOUT)) == 1


async def test_fold_of_which_some_deletions_fail_loses_nothing() -> None:
    store = await with_parts(6)
    parts = list(await list_parts(store, LAYOUT))
    some = Fault("delete_many", parts[2], error=UnavailableError, partial=True)
    with pytest.raises(UnavailableError):
        await fold(FaultStore(store, Script([some])))
    assert len(await list_parts(store, LAYOUT)) == 2
    assert await rows_of(store) == expected(6)


async def test_two_folds_at_once_lose_nothing() -> None:
    store = await with_parts(6)
    await asyncio.gather(*(fold(MemoryStore(store.bucket)) for _ in range(3)))
    assert await rows_of(store) == expected(6)
    await fold(store)
    assert await rows_of(store) == expected(6)


async def test_folded_part_does_not_count_over_what_was_appended_meanwhile() -> None:
    store = await with_parts(3)
    gate = Gate()
    slow = FaultStore(store, Script([Fault("put_if_absent", name="/catalog/", gate=gate)]))
    folding = asyncio.create_task(fold(slow))
    await until(gate.reached.is_set)
    await CatalogWriter(store, LAYOUT).append([row("shared.png", rows=99)])
    gate.release()
    await folding
    assert (await rows_of(store))[-1].rows == 99


async def test_reader_lists_again_where_parts_vanish() -> None:
    store = await with_parts(6)
    gate = Gate()
    slow = FaultStore(store, Script([Fault("get_range", gate=gate)]))
    reading = asyncio.create_task(rows_of(slow))
    await until(gate.reached.is_set)
    await fold(store)
    gate.release()
    assert await reading == expected(6)
    assert slow.calls["list"] == 2


async def test_dropped_rows_are_gone_and_older_ones_do_not_come_back() -> None:
    store = await with_parts(3)
    await CatalogWriter(store, LAYOUT).append([row("000.png", identifier="gone")])

    def is_suspect(identifier: str) -> bool:
        return identifier == "gone"

    parts = list(await list_parts(store, LAYOUT))
    assert await CatalogWriter(store, LAYOUT).drop(is_suspect) == 1
    assert await rows_of(store) == expected(3)[1:]
    left = await list_parts(store, LAYOUT)
    assert (len(left), parts[2] in left) == (2, True), "without rows, and as it was"


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
    """One append, fold, or reading, from its begin to its end."""

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
            self.begin(
                CatalogWriter(self.store, LAYOUT).append([row(document, rows=rows)]), document, rows
            )
        elif what == "fold":
            self.begin(fold(self.store))
        elif what == "read":
            self.begin(self.read())
        elif what == "kill" and self.jobs:
            self.jobs[number % len(self.jobs)].task.cancel()
        else:
            self.store.let_go(number)

    async def read(self) -> None:
        begin = next(self.ticks)
        found = await rows_of(self.store)
        self.check({each.document: each.rows for each in found}, begin)

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
    st.sampled_from(["append", "append", "fold", "read", "kill", *["go"] * 18]),
    st.integers(0, 7),
)
# Two parts, so that there is something to fold from the beginning.
FIRST = [("append", 0), *[("go", 0)] * 7, ("append", 1), *[("go", 0)] * 7, ("fold", 0)]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(ACTIONS, min_size=40, max_size=120))
def test_no_order_of_appends_folds_and_deaths_loses_the_newest_row(
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
        while not world.jobs[-1].task.done():
            world.store.let_go(0)
            await world.settle()
        world.jobs[-1].task.result()

    async def at_once(function: Callable[..., T], *args: Any, **named: Any) -> T:
        return function(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        # So that only the drawn actions decide who comes first.
        patch.setattr("asyncio.to_thread", at_once)
        asyncio.run(live())

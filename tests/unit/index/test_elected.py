# SPDX-License-Identifier: Apache-2.0
"""The elected compactor: seldom, by one process of a node, and never louder than needed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, UnavailableError
from s3ec.index import compaction
from s3ec.index.compaction import (
    LEFT_S,
    MAX_DELTAS,
    MIN_ROWS,
    Backlog,
    ElectedCompactor,
    compact,
)
from s3ec.index.manifest import read_head
from s3ec.index.rows import EntryInfo
from s3ec.store.endpoint import BreakerStore, Endpoint
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier import IndexFiles, Tier
from tests.support.clock import Clock
from tests.support.file_calls import file_calls_of
from tests.support.overwriting import OverwritingStore
from tests.support.waiting import reached, until
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.manifests import names, put_delta, ulid_of, view


@pytest.fixture
def store(memory: MemoryStore, script: Script) -> FaultStore:
    return FaultStore(memory, script)


@pytest.fixture
def files(tmp_path: Path, counters: Counters) -> Iterator[IndexFiles]:
    tier = Tier(
        tmp_path, LAYOUT.namespace, budget_bytes=1 << 20, min_free_bytes=0, counters=counters
    )
    yield tier.open_index()
    tier.close()


@pytest.fixture
def backlog() -> list[Backlog]:
    return [Backlog(MAX_DELTAS + 1, 0, 0)]


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def compactor(
    store: FaultStore, files: IndexFiles, counters: Counters, backlog: list[Backlog], clock: Clock
) -> ElectedCompactor:
    return ElectedCompactor(
        store, LAYOUT, backlog=lambda: backlog[0], files=files, counters=counters, clock=clock
    )


async def pile_up(memory: MemoryStore, count: int = MAX_DELTAS + 1) -> None:
    await compact(memory, LAYOUT)
    for number in range(count):
        await put_delta(memory, number, {key_of(number): EntryInfo(9, time_s=1)})


@pytest.mark.parametrize(
    ("backlog", "large"),
    [
        (Backlog(0, 0, 0), False),
        (Backlog(MAX_DELTAS, MIN_ROWS, 0), False),
        (Backlog(MAX_DELTAS + 1, 1, 10**6), True),
        (Backlog(MAX_DELTAS + 1, 1, 10**8), False),
        (Backlog(10_001, 1, 10**8), True),
        (Backlog(1, MIN_ROWS + 1, 0), True),
        (Backlog(1, 10**6, 8 * 10**6), False),
        (Backlog(1, 10**6 + 1, 8 * 10**6), True),
    ],
)
def test_a_backlog_is_large_by_deltas_or_by_its_share_of_rows(
    backlog: Backlog, large: bool
) -> None:
    assert backlog.is_large is large


async def test_a_large_backlog_is_compacted(
    memory: MemoryStore, compactor: ElectedCompactor, counters: Counters, files: IndexFiles
) -> None:
    await pile_up(memory)
    assert await compactor.compact_if_needed()
    assert counters.get("compact.bases") == 1
    assert len(await view(memory)) == MAX_DELTAS + 1
    assert files.try_claim("compact") is not None


@pytest.mark.parametrize("first", [True, False])
async def test_the_loop_makes_no_call_that_a_disk_has_to_answer(
    memory: MemoryStore, compactor: ElectedCompactor, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    if first:
        for number in range(MAX_DELTAS + 1):
            await put_delta(memory, number, {key_of(number): EntryInfo(9, time_s=1)})
    else:
        await pile_up(memory)
    calls = file_calls_of(threading.get_ident(), monkeypatch)
    await compactor.compact_if_needed()
    assert len(await view(memory)) == (0 if first else MAX_DELTAS + 1)
    assert calls == []


async def test_a_small_backlog_costs_no_request(
    store: FaultStore, compactor: ElectedCompactor, backlog: list[Backlog]
) -> None:
    backlog[0] = Backlog(MAX_DELTAS, MIN_ROWS, 0)
    assert not await compactor.compact_if_needed()
    assert store.log == []


async def test_what_somebody_else_compacted_meanwhile_is_left_alone(
    memory: MemoryStore, compactor: ElectedCompactor
) -> None:
    await pile_up(memory)
    await compact(memory, LAYOUT)
    before = names(memory.bucket)
    assert not await compactor.compact_if_needed()
    assert names(memory.bucket) == before


async def test_what_cannot_be_merged_does_not_call_for_one_compaction_after_the_other(
    memory: MemoryStore, script: Script, compactor: ElectedCompactor, counters: Counters
) -> None:
    await pile_up(memory, 2 * MAX_DELTAS)
    lost = [ulid_of(number) for number in range(MAX_DELTAS + 1)]
    script.faults.append(Fault("get", "|".join(lost), error=UnavailableError))
    assert await compactor.compact_if_needed()
    await put_delta(memory, 9999, {key_of("new"): EntryInfo(9, time_s=1)})
    assert not await compactor.compact_if_needed()
    assert counters.get("compact.bases") == 1


@pytest.mark.parametrize("error", [AccessError, partial(UnavailableError, status=500)])
async def test_deltas_that_are_lost_for_good_open_no_breaker(
    memory: MemoryStore,
    store: FaultStore,
    script: Script,
    files: IndexFiles,
    counters: Counters,
    error: Callable[[str], Exception],
) -> None:
    await pile_up(memory, 2 * MAX_DELTAS)
    lost = "|".join(ulid_of(number) for number in range(40))
    script.faults.append(Fault("get", lost, error=error))
    endpoint = Endpoint(16)
    one = ElectedCompactor(
        *(BreakerStore(store, endpoint, counters), LAYOUT),
        backlog=lambda: Backlog(MAX_DELTAS + 1, 0, 0),
        files=files,
        counters=counters,
    )
    assert await one.compact_if_needed()
    head = await read_head(memory, LAYOUT, 2)
    assert head is not None
    assert len(head.merged) == 2 * MAX_DELTAS - 40
    assert counters.get("breaker.opened") == 0


async def test_what_could_not_be_read_for_a_moment_is_merged_later(
    memory: MemoryStore, script: Script, compactor: ElectedCompactor, clock: Clock
) -> None:
    await pile_up(memory, 2 * MAX_DELTAS)
    script.faults.append(Fault("get", "/delta/", error=UnavailableError))
    with contextlib.suppress(UnavailableError):
        assert not await compactor.compact_if_needed()
    script.faults.clear()
    clock.now_s += LEFT_S
    assert await compactor.compact_if_needed()
    assert len(await view(memory)) == 2 * MAX_DELTAS


async def test_while_another_process_of_the_node_is_at_it_nothing_is_asked(
    memory: MemoryStore, store: FaultStore, script: Script, compactor: ElectedCompactor
) -> None:
    await pile_up(memory)
    gate = Gate()
    script.faults.append(Fault("put_if_absent", "/base/", gate=gate))
    first = asyncio.create_task(compactor.compact_if_needed())
    await reached(gate)
    asked = len(store.log)
    assert not await compactor.compact_if_needed()
    assert len(store.log) == asked
    gate.release()
    assert await first


async def test_the_claim_is_given_back_when_the_bucket_fails(
    memory: MemoryStore, script: Script, compactor: ElectedCompactor, files: IndexFiles
) -> None:
    await pile_up(memory)
    script.faults.append(Fault("put_if_absent", "/head/", error=UnavailableError))
    with pytest.raises(UnavailableError):
        await compactor.compact_if_needed()
    assert files.try_claim("compact") is not None


@contextlib.asynccontextmanager
async def running(compactor: ElectedCompactor) -> AsyncIterator[None]:
    task = asyncio.create_task(compactor.run_forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "SPREAD_S", "FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(compaction, name, 0.001)


@pytest.mark.usefixtures("hasty")
async def test_it_goes_on_after_every_kind_of_failure(
    memory: MemoryStore,
    script: Script,
    compactor: ElectedCompactor,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await pile_up(memory)
    script.faults += [
        Fault("list", error=UnavailableError, times=2),
        Fault("put_if_absent", error=AccessError, times=2),
        Fault("list", error=ValueError, times=1),
    ]
    async with running(compactor):
        await until(lambda: counters.get("compact.bases") >= 1)
    assert counters.get("compact.failed") >= 3
    assert counters.get("internal_errors") == 1
    assert caplog.text.count("cannot be compacted now") == 1
    assert len(await view(memory)) == MAX_DELTAS + 1


async def test_server_without_conditional_writes_is_never_compacted_and_that_is_said_once(
    files: IndexFiles,
    counters: Counters,
    backlog: list[Backlog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compaction, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(compaction, "SPREAD_S", 0.0)
    memory = OverwritingStore()
    for number in range(MAX_DELTAS + 1):
        await put_delta(memory, number, {key_of(number): EntryInfo(9, time_s=1)})
    before = set(memory.bucket.objects)
    compactor = ElectedCompactor(
        memory, LAYOUT, backlog=lambda: backlog[0], files=files, counters=counters
    )
    await compactor.run_forever()  # comes to an end
    assert set(memory.bucket.objects) == before
    assert counters.get("compact.failed") == 1
    assert caplog.text.count("ignores If-None-Match") == 1
    assert files.try_claim("compact") is not None

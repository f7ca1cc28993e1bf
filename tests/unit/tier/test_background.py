# SPDX-License-Identifier: Apache-2.0
"""Eviction ahead of the limits: by a thread, started late and ended promptly."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec import runtime
from s3ec.counters import Counters
from s3ec.runtime import Background
from s3ec.tier import evictor
from tests.support.clock import Clock
from tests.support.on_disk import Asleep, audit_of, make_room, running_total, usage_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.tier.cases import (
    HOUR_S,
    SIZE,
    MakeTier,
    entry,
    fill,
    key_of,
    left,
    refusing,
)

pytestmark = pytest.mark.usefixtures("background")


def evictor_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "s3ec-evictor"}


def test_thread_evicts_to_the_low_mark_before_the_budget_is_full(
    make_tier: MakeTier, clock: Clock
) -> None:
    tier = make_tier(budget_bytes=100 * SIZE)
    fill(tier, *range(95))
    clock.now_s += HOUR_S
    assert left(tier, 95) == set(range(95))
    fill(tier, 95)  # past 95%
    eventually(lambda: len(left(tier, 96)) == 90)
    assert left(tier, 96) == set(range(6, 96))
    # The walk writes its sum down at its end, after the last file has gone.
    eventually(lambda: running_total(tier) == usage_of(tier).total_bytes)
    assert audit_of(tier) == []


def test_publish_walks_only_where_it_would_break_the_budget(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    walkers: list[str] = []
    take = evictor.scan_tier

    def note(*arguments: object) -> object:
        walkers.append(threading.current_thread().name)
        return take(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(evictor, "scan_tier", note)
    tier = make_tier(budget_bytes=100 * SIZE)
    fill(tier, *range(95))
    assert walkers == []
    # One that is larger than what is left: nobody has begun to make room for it.
    large = key_of("large")
    tier.writer.publish(large, [entry(large, rows=64)])
    mine = threading.current_thread().name
    assert walkers == [mine]
    assert usage_of(tier).total_bytes <= 90 * SIZE
    # Past 95%, and the thread walks. What comes meanwhile can count twice until its next walk.
    fill(tier, *range(95, 101))
    eventually(lambda: "s3ec-evictor" in walkers)
    # Down to 90 each time; what is published after its last round stays, if it is below 95.
    eventually(lambda: usage_of(tier).total_bytes <= 95 * SIZE)


def test_thread_keeps_ahead_of_the_free_space_floor(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    tier = make_tier(budget_bytes=1000 * SIZE, min_free_bytes=100 * SIZE)
    free = [1000]
    monkeypatch.setattr(
        evictor, "free_bytes", lambda folder: (free[0] + 60 - len(left(tier, 60))) * SIZE
    )
    fill(tier, *range(60))
    clock.now_s += HOUR_S
    assert left(tier, 60) == set(range(60))
    free[0] = 110  # above the floor, so publishing itself has no reason to evict
    fill(tier, 60)
    # 12.5 ahead of the floor (a quarter of 5% of the budget), and a 64th of the budget
    eventually(lambda: len(left(tier, 60)) == 60 - 19)


def test_folder_of_unknown_size_takes_a_64th_of_the_budget_without_a_count(
    make_tier: MakeTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(budget_bytes=640 * SIZE)
    fill(tier, *range(600))
    tier.close()
    (root / "v1" / "usage").unlink()
    monkeypatch.setattr(evictor, "Background", Asleep)  # the thread gets no turn
    tier = make_tier(budget_bytes=640 * SIZE)
    fill(tier, *range(600, 610))
    assert running_total(tier) == 640 * SIZE  # nearly full, for all that is known
    fill(tier, *range(610, 700))
    assert usage_of(tier).total_bytes <= 640 * SIZE
    assert running_total(tier) == usage_of(tier).total_bytes


def test_close_ends_a_walk_in_the_middle(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, ended = threading.Event(), threading.Event()

    def endless(folders: object, pause: Callable[[], None]) -> object:
        entered.set()
        try:
            while True:
                pause()
        finally:
            ended.set()

    tier = make_tier(budget_bytes=100 * SIZE)
    before = evictor_threads()
    monkeypatch.setattr(evictor, "scan_tier", endless)
    monkeypatch.setattr(runtime, "_STOP_TIMEOUT_S", DEADLINE_S)
    fill(tier, *range(96))
    assert entered.wait(DEADLINE_S)
    tier.close()
    assert ended.is_set()
    assert evictor_threads() - before == set()
    monkeypatch.undo()
    assert make_room(make_tier()) == 0  # the lock is free


def test_round_that_fails_is_counted_and_the_thread_goes_on(
    make_tier: MakeTier,
    monkeypatch: pytest.MonkeyPatch,
    counters: Counters,
    clock: Clock,
) -> None:
    tier = make_tier(budget_bytes=100 * SIZE)
    monkeypatch.setattr(evictor, "REST_S", 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(evictor, "scan_tier", refusing(errno.EIO, "disk gone"))
        fill(tier, *range(96))
        eventually(lambda: counters.get("tier.errors") > 0)
    clock.now_s += HOUR_S
    fill(tier, 96)
    eventually(lambda: len(left(tier, 97)) == 90)


def test_work_that_raises_is_logged_and_done_again_at_the_next_wake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = threading.Semaphore(0)

    def work(pause: Callable[[], None]) -> float:
        calls.release()
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(runtime, "FAULT_REST_S", 0.0)
    thread = Background("test-background", work)
    for _ in range(2):
        thread.wake()
        assert calls.acquire(timeout=DEADLINE_S)
    thread.stop()
    assert "a fault of ours" in caplog.text
    thread.wake()
    assert not [each for each in threading.enumerate() if each.name == "test-background"]


def test_process_that_can_start_no_thread_publishes_and_evicts_nevertheless(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tier = make_tier(budget_bytes=100 * SIZE)
    fill(tier, *range(120))
    assert usage_of(tier).total_bytes <= 100 * SIZE
    tier.close()


def test_walks_in_the_background_leave_the_interpreter_now_and_then(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3ec.tier import entries, scan

    pauses: list[int] = []
    tier = make_tier()
    fill(tier, *range(50))
    monkeypatch.setattr(scan, "FILES_PER_PAUSE", 10)
    monkeypatch.setattr(entries, "yield_gil", lambda: pauses.append(os.getpid()))
    assert len(list(tier.entries.names())) == 50
    assert len(pauses) == 5

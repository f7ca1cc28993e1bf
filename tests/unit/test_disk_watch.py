# SPDX-License-Identifier: Apache-2.0
"""Whether the disk answers, known from how long calls take."""

from __future__ import annotations

import threading

import pytest

from s3ec.counters import Counters
from s3ec.runtime import DiskWatch
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def watch(clock: Clock, counters: Counters) -> DiskWatch:
    return DiskWatch(counters, patience_s=5.0, clock=clock)


def test_one_call_that_does_not_come_back_is_a_hang_until_it_does(
    watch: DiskWatch, clock: Clock, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2):
        first = watch.begin()
        clock.now_s += 3
        second = watch.begin()
        clock.now_s += 3
        assert watch.hangs
        assert watch.hangs
        assert counters.get("tier.hung") == times
        watch.end(first)
        assert not watch.hangs  # the other one is younger
        watch.end(second)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "cache_dir" in warnings[0].message


def test_asking_bears_calls_that_begin_and_end_meanwhile(watch: DiskWatch) -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            watch.run(int)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        assert not any(watch.hangs for _ in range(20_000))
    finally:
        over.set()
        for worker in workers:
            worker.join()

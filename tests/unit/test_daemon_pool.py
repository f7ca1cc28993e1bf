# SPDX-License-Identifier: Apache-2.0
"""Threads that hold nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from s3ec.runtime import DaemonPool, call_within

DEADLINE_S = 20.0


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    pool = DaemonPool(2, "s3ec-test-pool")
    yield pool
    pool.shutdown()


def test_results_and_errors_come_back(pool: DaemonPool) -> None:
    assert pool.submit(divmod, 7, 2).result(DEADLINE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(DEADLINE_S)
    assert pool.submit(int, "11", base=2).result(DEADLINE_S) == 3


def test_threads_are_daemons_started_when_needed_and_no_more_than_allowed(
    pool: DaemonPool,
) -> None:
    assert pool.threads == []
    pool.submit(int).result(DEADLINE_S)
    assert len(pool.threads) == 1
    go_on = threading.Event()
    calls = [pool.submit(go_on.wait, DEADLINE_S) for _ in range(6)]
    assert len(pool.threads) == 2
    assert all(thread.daemon for thread in pool.threads)
    go_on.set()
    assert all(call.result(DEADLINE_S) for call in calls)


def test_what_has_not_begun_can_be_cancelled(pool: DaemonPool) -> None:
    go_on = threading.Event()
    first = [pool.submit(go_on.wait, DEADLINE_S) for _ in range(2)]
    later = pool.submit(int)
    assert later.cancel()
    go_on.set()
    assert all(call.result(DEADLINE_S) for call in first)
    assert pool.submit(int).result(DEADLINE_S) == 0


def test_shutdown_does_what_was_asked_or_cancels_it() -> None:
    for cancels in (False, True):
        pool, begun, go_on = DaemonPool(1, "s3ec-test-pool"), threading.Event(), threading.Event()
        pool.submit(lambda begun=begun, go_on=go_on: (begun.set(), go_on.wait(DEADLINE_S)))
        assert begun.wait(DEADLINE_S)
        later = pool.submit(int)
        pool.shutdown(wait=False, cancel_futures=cancels)
        with pytest.raises(RuntimeError, match="has ended"):
            pool.submit(int)
        go_on.set()
        pool.shutdown()
        assert later.cancelled() == cancels


def test_call_that_hangs_is_left_alone() -> None:
    hung = threading.Event()
    with pytest.raises(TimeoutError):
        call_within(0.01, hung.wait)
    hung.set()
    assert call_within(DEADLINE_S, hung.wait)
    with pytest.raises(ZeroDivisionError):
        call_within(DEADLINE_S, lambda: 1 / 0)

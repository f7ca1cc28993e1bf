# SPDX-License-Identifier: Apache-2.0
"""Threads that hold nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from s3ec.runtime import DaemonPool, call_within
from tests.support.waiting import DEADLINE_S


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    pool = DaemonPool(2, "s3ec-test-pool")
    yield pool
    pool.shutdown()


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

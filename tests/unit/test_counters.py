# SPDX-License-Identifier: Apache-2.0
"""Sums that no thread loses, and the order of recent times."""

from __future__ import annotations

import threading

from s3ec.counters import TIME_BOUNDS_S, Counters, Increments, Observed, RecentTimes, observed
from tests.support.waiting import DEADLINE_S


def test_no_addition_is_lost_between_threads() -> None:
    counters = Counters()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(DEADLINE_S)
        for _ in range(2000):
            counters.add("hits")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert counters.get("hits") == 16_000


def test_a_quantile_is_of_the_last_times_and_there_is_none_of_few() -> None:
    times = RecentTimes(20, few=4)
    for seconds in (5.0, 5.0, 5.0):
        times.add(seconds)
        assert times.quantile(0.5) is None
    for number in range(48):
        times.add(float(number))
    assert times.quantile(0) == 28.0
    assert times.quantile(0.95) == 47.0


def test_observed_times_are_told_by_bucket_and_as_increments() -> None:
    counters = Counters()
    increments = Increments(counters)
    counters.observe("wait_time", TIME_BOUNDS_S[0])
    counters.observe("wait_time", 1e9)
    counters.add("wait_time")  # a count of the same name is none of its buckets
    last = len(TIME_BOUNDS_S)
    assert list(observed(increments.take())) == [
        Observed("wait_time", 0, 1, TIME_BOUNDS_S[0]),
        Observed("wait_time", last, 1, 1e9),
    ]
    counters.observe("wait_time", 2e9)
    assert list(observed(increments.take())) == [Observed("wait_time", last, 1, 2e9)]
    assert list(observed(counters.snapshot()))[1] == Observed("wait_time", last, 2, 3e9)

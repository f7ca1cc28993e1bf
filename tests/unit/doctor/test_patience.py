# SPDX-License-Identifier: Apache-2.0
"""Only waiting for answers uses up the doctor's time."""

from __future__ import annotations

import time

from s3ec.doctor.run import Patience, busy_s
from tests.support.clock import Clock


def test_waiting_counts_and_being_busy_does_not() -> None:
    clock, busy = Clock(0.0), Clock(0.0)
    patience = Patience(2.0, clock=clock, busy=busy)
    clock.now_s, busy.now_s = 9.0, 8.0
    assert not patience.is_over()
    clock.now_s = 10.5
    assert patience.is_over()


def test_no_machine_is_so_busy_that_it_never_ends() -> None:
    clock, busy = Clock(0.0), Clock(0.0)
    patience = Patience(2.0, clock=clock, busy=busy)
    clock.now_s = busy.now_s = 19.0
    assert not patience.is_over()
    clock.now_s = busy.now_s = 21.0
    assert patience.is_over()


def test_computing_is_being_busy() -> None:
    before_s, started_s = busy_s(), time.process_time()
    while time.process_time() - started_s < 0.05:
        pass
    assert busy_s() - before_s >= 0.05

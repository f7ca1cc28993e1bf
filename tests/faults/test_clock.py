# SPDX-License-Identifier: Apache-2.0
"""The machine's clock set back and forth, while entries are fetched, saved and evicted."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from s3ec.tier.tier import Tier
from tests.faults.embeddings import ENTRY_BYTES
from tests.faults.machine import Corpus, Machine
from tests.support.on_disk import make_room

_DAY_S = 86400.0


class Jump:
    """The machine's clock, set forward; the files' own times are the kernel's."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Jump:
    clock = Jump()
    monkeypatch.setattr("s3ec.node.Tier", partial(Tier, clock=clock))
    return clock


@pytest.mark.parametrize("jump_s", [-365 * _DAY_S, -1.0, 100 * 365 * _DAY_S])
def test_clock_that_jumps_keeps_what_is_used_most_and_the_folder_in_order(
    tmp_path: Path, clock: Jump, jump_s: float
) -> None:
    corpus = Corpus()
    corpus.stock(*range(40))
    with Machine(corpus, tmp_path / "cache", cache_bytes=str(20 * ENTRY_BYTES)) as machine:
        for first in range(0, 40, 10):
            if first == 20:
                clock.ahead_s = jump_s
            for number in range(first, first + 10):
                # The first five are used all the time, and so are never the oldest.
                wanted = {number, *range(5)}
                assert machine.serve(*wanted) == wanted
        assert {machine.file(number).name for number in range(5)} <= {
            name.rpartition("/")[2] for name in machine.node.tier.entries.names()
        }
        machine.save(*range(100, 104))
        machine.wait_confirmed(*range(100, 104))
        machine.assert_in_order()
    clock.ahead_s = -jump_s
    with Machine(corpus, tmp_path / "cache", cache_bytes=str(20 * ENTRY_BYTES)) as machine:
        for number in range(20, 30):
            assert machine.serve(number) == {number}
        machine.assert_in_order()


@pytest.mark.parametrize("jump_s", [-_DAY_S, _DAY_S])
def test_clock_that_jumps_while_the_spool_is_full_loses_nothing(
    tmp_path: Path, clock: Jump, jump_s: float
) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, tmp_path / "cache") as machine:
        machine.save(*range(8))
        machine.wait_written(*range(8))
        clock.ahead_s = jump_s
        make_room(machine.node.tier, clock=clock)
        gate.release()
        machine.wait_confirmed(*range(8))
        machine.assert_in_order()


def test_writer_whose_file_looks_old_after_a_jump_is_not_disturbed(
    tmp_path: Path, clock: Jump
) -> None:
    """A sweep takes a temp file of more than an hour for an abandoned one."""
    corpus = Corpus()
    corpus.stock(*range(12))
    with Machine(corpus, tmp_path / "cache", cache_bytes=str(4 * ENTRY_BYTES)) as machine:
        clock.ahead_s = _DAY_S
        for _ in range(3):  # several at once, and each that evicts sweeps
            machine.serve(*range(12))
        assert machine.serve(0, 1) == {0, 1}
        machine.assert_in_order()

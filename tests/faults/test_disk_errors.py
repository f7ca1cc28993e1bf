# SPDX-License-Identifier: Apache-2.0
"""A disk that answers EIO: a real file system shut down by the kernel, and single calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.machine import Corpus, Machine
from tests.support.disks import FailingDisk, failing_disk
from tests.support.waiting import eventually


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path) as disk:
        yield disk


def test_failing_disk_is_a_miss_and_saves_pass_it_by(disk: FailingDisk) -> None:
    corpus = Corpus()
    corpus.stock(*range(8))
    with Machine(corpus, disk.path / "cache") as machine:
        assert machine.serve(*range(4)) == set(range(4))
        granted = machine.grant(0, 1)
        disk.fail()
        machine.load(granted)  # from the bucket
        assert machine.node.counters.get("load.rescued") == 2
        assert machine.serve(*range(8)) == set()
        machine.save(*range(10, 14))
        eventually(lambda: corpus.has(*range(10, 14)))
        disk.mend()
        assert machine.serve(*range(8), *range(10, 14)) == {*range(8), *range(10, 14)}
        machine.save(*range(20, 24))
        machine.wait_confirmed(*range(20, 24))
        machine.assert_in_order()
    with Machine(corpus, disk.path / "cache") as machine:
        assert machine.serve(*range(8)) == set(range(8))
        machine.assert_in_order()


def test_spool_on_a_failing_disk_is_uploaded_by_the_next_process(disk: FailingDisk) -> None:
    """Until then its uploads take all places, and leave room for what goes from memory."""
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, disk.path / "cache", max_concurrency="1") as machine:
        machine.save(*range(6))
        machine.wait_written(*range(6))
        disk.fail()
        machine.save(6, 7)
        gate.release()
        eventually(lambda: corpus.has(6, 7))
        eventually(lambda: machine.node.counters.get("save_problem.unreadable") > 0)
    disk.mend()
    with Machine(corpus, disk.path / "cache") as machine:
        machine.wait_confirmed(*range(6))
        assert machine.serve(*range(6)) == set(range(6))
        machine.assert_in_order()


def every(nth: int, function: Callable[..., object]) -> Callable[..., object]:
    """The call, but each nth one fails."""
    calls = 0

    def maybe(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls % nth == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*args, **kwargs)

    return maybe


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *[(call, 3) for call in ("writev", "pread", "fstat", "link", "replace", "unlink")],
        *[(call, 1) for call in ("writev", "pread", "link", "mkdir", "statvfs")],
    ],
)
def test_call_that_fails_now_and_then_costs_misses_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    corpus = Corpus()
    corpus.stock(*range(8))
    with Machine(corpus, tmp_path / "cache") as machine:
        machine.serve(*range(4))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, every(nth, getattr(os, call)))
            machine.serve(*range(8))
            machine.save(*range(10, 16))
            machine.wait_written(*range(10, 16))
            if (call, nth) != ("pread", 1):  # nothing can be read from the spool
                eventually(lambda: corpus.has(*range(10, 16)))
            machine.serve(*range(8), *range(10, 16))
        machine.serve(*range(8))
        assert machine.serve(*range(8)) == set(range(8))
        machine.assert_in_order()
    with Machine(corpus, tmp_path / "cache") as machine:
        machine.wait_confirmed(*range(10, 16))
        machine.assert_in_order()

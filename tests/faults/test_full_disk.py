# SPDX-License-Identifier: Apache-2.0
"""A disk that is full: fetches are misses, saves go to the bucket from memory, nothing is half."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.embeddings import ENTRY_BYTES, spooled_below
from tests.faults.machine import Corpus, Machine
from tests.support.disks import small_tmpfs
from tests.support.waiting import eventually

_DISK_BYTES = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB: 15 entries."""
    with small_tmpfs(tmp_path / "disk", size=_DISK_BYTES, inodes=200) as folder:
        yield folder


def fill(disk: Path, *, leave: int) -> Path:
    """Something of somebody else's that takes all the room but a little."""
    hog = disk / "hog"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    hog.write_bytes(bytes(free - leave))
    return hog


@pytest.mark.parametrize("leave", [0, ENTRY_BYTES // 2])
def test_fetch_is_a_miss_while_the_disk_is_full_and_works_again_with_room(
    disk: Path, leave: int
) -> None:
    corpus = Corpus()
    corpus.stock(*range(6))
    with Machine(corpus, disk / "cache") as machine:
        hog = fill(disk, leave=leave)
        assert machine.serve(*range(6)) == set()
        machine.assert_in_order()
        assert set(machine.node.tier.entries.names()) == set()
        hog.unlink()
        assert machine.serve(*range(6)) == set(range(6))
        machine.assert_in_order()


def test_more_entries_than_the_disk_holds_are_served_one_after_the_other(disk: Path) -> None:
    corpus = Corpus()
    corpus.stock(*range(60))
    with Machine(corpus, disk / "cache") as machine:
        for number in range(60):
            assert machine.serve(number) == {number}
        machine.assert_in_order()
        machine.serve(*range(60))  # those that are in time for what eviction frees
        machine.assert_in_order()


def test_open_files_that_fill_the_disk_leave_the_others_unserved_and_stay_right(
    disk: Path,
) -> None:
    """Evicting them frees nothing as long as they are open."""
    corpus = Corpus()
    corpus.stock(*range(40))
    with Machine(corpus, disk / "cache") as machine:
        fetched = machine.grant(*range(40))
        held = [number for number, one in fetched.items() if one.entry is not None]
        assert 8 < len(held) < 16
        machine.load(fetched)
        fetched.clear()
        machine.assert_in_order()
        assert machine.serve(*range(30, 36)) == set(range(30, 36))
        machine.assert_in_order()


@pytest.mark.parametrize("leave", [0, ENTRY_BYTES // 2])
def test_saves_on_a_full_disk_reach_the_bucket_and_are_not_shown_half(
    disk: Path, leave: int
) -> None:
    corpus = Corpus()
    with Machine(corpus, disk / "cache") as machine:
        hog = fill(disk, leave=leave)
        machine.save(*range(8))
        machine.wait_confirmed(*range(8))
        machine.assert_in_order()
        assert set(machine.node.tier.entries.names()) == set()
        assert machine.node.counters.get("spool.refused") == 8
        hog.unlink()
        machine.save(*range(8, 12))
        machine.wait_confirmed(*range(8, 12))
        assert machine.serve(*range(12)) == set(range(12))
        machine.assert_in_order()


def test_spool_that_fills_the_disk_keeps_what_it_took_and_the_rest_goes_from_memory(
    disk: Path,
) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, disk / "cache") as machine:
        machine.save(*range(40))
        machine.wait_written(*range(40))
        assert 8 < len(spooled_below(machine.cache_dir)) < 16
        machine.assert_in_order()
        gate.release()
        machine.wait_confirmed(*range(40))
        machine.assert_in_order()


def test_spool_that_fills_the_disk_is_finished_by_the_next_process(disk: Path) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, disk / "cache") as machine:
        machine.save(*range(8))
        machine.wait_written(*range(8))
    assert len(spooled_below(disk / "cache")) == 8
    gate.release()
    fill(disk, leave=0)
    with Machine(corpus, disk / "cache") as machine:
        machine.wait_confirmed(*range(8))
        machine.assert_in_order()


def test_disk_without_inodes_serves_nothing_new_and_recovers(disk: Path) -> None:
    corpus = Corpus()
    corpus.stock(*range(4))
    with Machine(corpus, disk / "cache") as machine:
        files = []
        while os.statvfs(disk).f_favail:
            files.append(disk / f"file-{len(files)}")
            files[-1].touch()
        assert machine.serve(*range(4)) == set()
        machine.save(*range(10, 14))
        machine.wait_confirmed(*range(10, 14))
        machine.assert_in_order()
        for file in files:
            file.unlink()
        eventually(lambda: machine.serve(*range(4)) == set(range(4)))
        machine.assert_in_order()

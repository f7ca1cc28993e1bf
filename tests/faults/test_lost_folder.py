# SPDX-License-Identifier: Apache-2.0
"""The cache folder deleted, or made read-only, under a running node; then all is well again."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.faults.embeddings import spooled_below
from tests.faults.machine import Corpus, Machine, delete
from tests.support.disks import as_plain_user, read_only, small_tmpfs
from tests.support.waiting import DEADLINE_S, eventually


def test_deleted_folder_is_made_again_by_fetches_and_saves(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.stock(*range(8))
    with Machine(corpus, tmp_path / "cache") as machine:
        assert machine.serve(*range(8)) == set(range(8))
        for round_ in range(3):
            delete(machine.cache_dir)
            assert machine.serve(*range(8)) == set(range(8))
            machine.assert_in_order()
            delete(machine.cache_dir)
            saved = range(10 * round_ + 10, 10 * round_ + 14)
            machine.save(*saved)
            machine.wait_confirmed(*saved)
            assert machine.serve(*saved) == set(saved)
            machine.assert_in_order()


def test_what_was_granted_is_read_though_the_folder_is_deleted_before_its_load(
    tmp_path: Path,
) -> None:
    corpus = Corpus()
    corpus.stock(*range(4))
    with Machine(corpus, tmp_path / "cache") as machine:
        fetched = machine.grant(*range(4))
        delete(machine.cache_dir)
        machine.load(fetched)
        assert machine.node.counters.get("load.failed") == 0
        fetched.clear()
        assert machine.serve(*range(4)) == set(range(4))
        machine.assert_in_order()


def test_folder_deleted_again_and_again_during_traffic_serves_no_wrong_byte(
    tmp_path: Path,
) -> None:
    corpus = Corpus()
    corpus.stock(*range(16))
    over = threading.Event()

    def delete() -> None:
        while not over.wait(0.02):  # not to order anything: to hit any moment
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    with Machine(corpus, tmp_path / "cache") as machine:
        deleting = threading.Thread(target=delete)
        deleting.start()
        try:
            for number in range(100, 130):
                machine.serve(*range(16))
                machine.save(number)
        finally:
            over.set()
            deleting.join()
        # Those whose file was deleted before the bucket had them are lost, and no more than that.
        eventually(lambda: not spooled_below(machine.cache_dir))
        assert machine.serve(*range(16)) == set(range(16))
        machine.assert_in_order()
        saved, counts = range(100, 130), machine.node.counters
        eventually(lambda: sum(map(corpus.has, saved)) + counts.get("save_problem.vanished") >= 30)
        machine.save(200)
        machine.wait_confirmed(200)


def test_deleted_spool_is_said_and_does_not_hold_up_the_queue(tmp_path: Path) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, tmp_path / "cache", max_concurrency="1") as machine:
        machine.save(*range(4))
        machine.wait_written(*range(4))
        assert gate.reached.wait(DEADLINE_S)
        delete(machine.cache_dir)
        gate.release()
        eventually(lambda: machine.node.counters.get("save_problem.vanished") == 3)
        assert corpus.has(0)  # whose bytes were in memory
        for number in range(1, 4):
            # Its upload ends a moment after it was counted.
            eventually(partial(machine.offer, number))
        machine.wait_confirmed(*range(4))
        machine.assert_in_order()


@contextmanager
def folders_of_mode_500(top: Path) -> Iterator[None]:
    folders = [Path(folder) for folder, _, _ in os.walk(top)]
    for folder in folders:
        folder.chmod(0o500)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o700)


@pytest.fixture(params=["mount", "mode"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder that can be frozen: a disk, or one whose modes hold for this user."""
    if request.param == "mount":
        with small_tmpfs(tmp_path / "disk", size=2**23, inodes=1000) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as folder, as_plain_user(folder):
        yield Path(folder)


def frozen(place: Path) -> AbstractContextManager[None]:
    return read_only(place) if os.path.ismount(place) else folders_of_mode_500(place / "cache")


def test_read_only_folder_serves_what_it_can_and_heals(place: Path) -> None:
    corpus = Corpus()
    corpus.stock(*range(8))
    with Machine(corpus, place / "cache") as machine:
        assert machine.serve(*range(4)) == set(range(4))
        granted = machine.grant(*range(4))
        with frozen(place):
            machine.load(granted)
            assert machine.serve(*range(4)) == set(range(4))  # nobody has to write for that
            machine.serve(*range(8))  # what cannot come is not said to be there
            machine.save(*range(10, 14))
            machine.wait_confirmed(*range(10, 14))  # from memory
        granted.clear()
        assert machine.serve(*range(8), *range(10, 14)) == {*range(8), *range(10, 14)}
        machine.save(*range(20, 24))
        machine.wait_confirmed(*range(20, 24))
        machine.assert_in_order()
    with Machine(corpus, place / "cache") as machine:
        machine.assert_in_order()


def test_spool_that_became_read_only_reaches_the_bucket_and_is_emptied_later(
    place: Path,
) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, place / "cache") as machine:
        machine.save(*range(4))
        machine.wait_written(*range(4))
        with frozen(place):
            gate.release()
            eventually(lambda: corpus.has(*range(4)))
            eventually(lambda: machine.node.counters.get("tier.errors") >= 4)
        machine.assert_in_order()
    # What could not be removed is uploaded again, which changes nothing, and then removed.
    with Machine(corpus, place / "cache") as machine:
        machine.wait_confirmed(*range(4))
        machine.assert_in_order()

# SPDX-License-Identifier: Apache-2.0
"""The running total: shared by all processes, believed only where it can be."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier import Tier, usage
from s3ec.tier.files import Folders, try_lock
from s3ec.tier.usage import Figures, RunningTotal
from tests.unit.tier.cases import entry, key_at


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "cache")
    folders.make()
    return folders


@pytest.fixture
def running(folders: Folders) -> RunningTotal:
    return RunningTotal(folders)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda blob: blob[:40] + bytes([blob[40] ^ 1]) + blob[41:],
    "short": lambda blob: blob[:-1],
    "long": lambda blob: blob + b"\0",
    "empty": lambda blob: b"",
    "zeros": lambda blob: bytes(len(blob)),
}


def test_new_folder_is_counted_from_the_start(running: RunningTotal) -> None:
    assert not running.read().counted
    assert running.open(fresh=True).counted
    assert running.add(700).total_bytes == 700
    assert running.open(fresh=True).total_bytes == 700


def test_folder_without_a_total_is_not_taken_for_an_empty_one(running: RunningTotal) -> None:
    assert not running.open(fresh=False).counted
    figures = running.add(700)
    assert (figures.counted, figures.total_bytes) == (False, 700)
    figures = running.recount(figures, 5000)
    assert (figures.counted, figures.total_bytes) == (True, 5000)


def test_what_is_added_during_a_walk_is_not_lost(running: RunningTotal) -> None:
    running.open(fresh=True)
    running.add(100)
    mark = running.read()
    running.add(30)
    assert running.recount(mark, 1000).total_bytes == 1030


def test_total_that_was_lost_during_a_walk_keeps_what_was_added_since(
    running: RunningTotal, folders: Folders
) -> None:
    running.open(fresh=True)
    running.add(100)
    mark = running.read()
    folders.usage.unlink()
    running.add(30)
    figures = running.recount(mark, 1000)
    assert (figures.counted, figures.total_bytes) == (True, 1030)


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_total_is_no_total_and_is_begun_anew(
    running: RunningTotal, folders: Folders, damage: str
) -> None:
    running.open(fresh=True)
    running.add(100)
    folders.usage.write_bytes(DAMAGES[damage](folders.usage.read_bytes()))
    assert running.read() == Figures()
    figures = running.add(30)
    assert (figures.counted, figures.total_bytes) == (False, 30)
    assert running.read() == figures


def test_total_of_another_version_is_no_total(running: RunningTotal, folders: Folders) -> None:
    running.open(fresh=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage, "_MAGIC", b"s3ecuse\x02")
        RunningTotal(folders).add(100)
    assert running.read() == Figures()


def test_total_of_another_boot_is_counted_again_and_keeps_the_times(
    running: RunningTotal, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.open(fresh=True)
    before = running.add(100, newest=(1 << 60, 1 << 50))
    monkeypatch.setattr(usage, "_boot_id", lambda: b"after the restart"[:16])
    figures = running.open(fresh=False)
    assert not figures.counted
    assert figures.newest == before.newest
    assert running.open(fresh=False) == figures


def test_threads_and_forks_lose_no_addition(running: RunningTotal, folders: Folders) -> None:
    running.open(fresh=True)
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _ in range(200):
                    RunningTotal(folders).add(3)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    with ThreadPoolExecutor(4) as pool:
        for adding in [pool.submit(running.add, 5) for _ in range(400)]:
            adding.result()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 3
    assert running.read().total_bytes == 3 * 200 * 3 + 400 * 5


def test_lock_of_a_stopped_process_is_an_error_not_a_hang(
    make_tier: Callable[..., Tier], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    monkeypatch.setattr(usage, "_LOCK_TIMEOUT_S", 0.02)
    with (root / "v1" / "usage").open("rb") as file:
        assert try_lock(file.fileno())
        with pytest.raises(OSError, match="stopped process"):
            tier.estimated_bytes()
    assert tier.estimated_bytes() == 0


def test_total_is_private_whatever_the_umask(running: RunningTotal, folders: Folders) -> None:
    before = os.umask(0o777)
    try:
        running.open(fresh=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folders.usage.stat().st_mode) == 0o600


def test_publish_that_cannot_be_counted_stands_and_is_reported(
    make_tier: Callable[..., Tier],
    monkeypatch: pytest.MonkeyPatch,
    counters: Counters,
) -> None:
    tier, key = make_tier(), key_at(0)

    def refuse(*arguments: object, **options: object) -> Figures:
        raise OSError("usage cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(RunningTotal, "add", refuse)
        tier.publish(key, [entry(key)])
    assert tier.pin(key) is not None
    assert counters.get("tier.errors") == 1
    assert tier.estimated_bytes() == 0
    tier.make_room()  # any round puts it right
    assert tier.estimated_bytes() == tier.usage().total_nbytes == len(entry(key))

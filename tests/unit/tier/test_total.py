# SPDX-License-Identifier: Apache-2.0
"""The running total: shared by all processes, believed only where it can be."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from s3ec.counters import Counters
from s3ec.tier.evictor import Figures, RunningTotal
from s3ec.tier.files import Folders, try_lock
from tests.on_disk import make_room, running_total, usage_of
from tests.unit.tier.cases import MakeTier, entry, key_at, publish


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "cache")
    folders.make()
    return folders


@pytest.fixture
def running(folders: Folders) -> RunningTotal:
    return RunningTotal(folders)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda blob: blob[:20] + bytes([blob[20] ^ 1]) + blob[21:],
    "short": lambda blob: blob[:-1],
    "long": lambda blob: blob + b"\0",
    "empty": lambda blob: b"",
    "zeros": lambda blob: bytes(len(blob)),
}


def test_new_folder_is_counted_from_the_start(running: RunningTotal) -> None:
    assert not running.read().counted
    running.begin()
    assert running.read().counted
    assert running.add(700).total_bytes == 700
    running.begin()
    assert running.read() == Figures(counted=True, total_bytes=700)


def test_total_of_who_was_faster_than_the_one_that_made_the_folder_stands(
    running: RunningTotal,
) -> None:
    running.add(700)
    running.begin()
    assert running.read() == Figures(counted=False, total_bytes=700)


def test_folder_without_a_total_is_not_taken_for_an_empty_one(running: RunningTotal) -> None:
    figures = running.add(700)
    assert (figures.counted, figures.total_bytes) == (False, 700)
    figures = running.recount(figures, 5000)
    assert (figures.counted, figures.total_bytes) == (True, 5000)


def test_what_is_added_during_a_walk_is_not_lost(running: RunningTotal) -> None:
    running.begin()
    running.add(100)
    before = running.read()
    running.add(30)
    assert running.recount(before, 1000).total_bytes == 1030


@pytest.mark.parametrize("added_bytes", [30, 300])
def test_total_that_was_lost_during_a_walk_keeps_what_was_added_since(
    running: RunningTotal, folders: Folders, added_bytes: int
) -> None:
    running.begin()
    running.add(100)
    before = running.read()
    folders.usage.unlink()
    running.add(added_bytes)
    figures = running.recount(before, 1000)
    assert (figures.counted, figures.total_bytes) == (True, 1000 + added_bytes)


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_total_is_no_total_and_is_begun_anew(
    running: RunningTotal, folders: Folders, damage: str
) -> None:
    running.begin()
    running.add(100)
    folders.usage.write_bytes(DAMAGES[damage](folders.usage.read_bytes()))
    assert running.read() == Figures()
    figures = running.add(30)
    assert (figures.counted, figures.total_bytes) == (False, 30)
    assert running.read() == figures


def former_file(total_bytes: int) -> bytes:
    """As the release before this one wrote it: of 80 bytes, with a boot id, an epoch and times."""
    body = struct.pack(
        "<8s16s6Q", b"s3ecuse\x01", bytes(range(16)), 7, 1, total_bytes, 9, 1 << 60, 0
    )
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_total_of_the_former_release_is_unknown_and_begun_anew(
    running: RunningTotal, folders: Folders
) -> None:
    folders.usage.write_bytes(former_file(5000))
    assert running.read() == Figures()
    assert running.add(30) == running.read() == Figures(counted=False, total_bytes=30)
    assert len(folders.usage.read_bytes()) == 32


def test_total_of_the_former_release_is_mended_by_the_first_walk(
    make_tier: MakeTier, root: Path
) -> None:
    first = make_tier()
    for number in range(4):
        publish(first, number)
    first.close()
    (root / "v1" / "usage").write_bytes(former_file(123))
    tier = make_tier()
    publish(tier, 4)
    assert running_total(tier) == len(entry(key_at(4)))  # so not more than 1/64 of the budget
    make_room(tier)
    assert running_total(tier) == usage_of(tier).total_nbytes > 4 * 512


def test_former_release_takes_the_total_of_this_one_for_none() -> None:
    """An engine of it beside one of ours counts anew, and believes no figure that means another."""
    assert len(Figures(counted=True, total_bytes=5000).pack()) != len(former_file(0))


def test_threads_and_forks_lose_no_addition(running: RunningTotal, folders: Folders) -> None:
    running.begin()
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
    running: RunningTotal, folders: Folders
) -> None:
    running.begin()
    with folders.usage.open("rb") as file:
        assert try_lock(file.fileno())
        with pytest.raises(OSError, match="stopped process"):
            RunningTotal(folders, lock_timeout_s=0.02).read()
    assert running.read().counted


def test_total_is_private_whatever_the_umask(running: RunningTotal, folders: Folders) -> None:
    before = os.umask(0o777)
    try:
        running.begin()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folders.usage.stat().st_mode) == 0o600


def test_publish_that_cannot_be_counted_stands_and_is_reported(
    make_tier: MakeTier,
    monkeypatch: pytest.MonkeyPatch,
    counters: Counters,
) -> None:
    tier, key = make_tier(), key_at(0)

    def refuse(*arguments: object, **options: object) -> Figures:
        raise OSError("usage cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(RunningTotal, "add", refuse)
        tier.writer.publish(key, [entry(key)])
    assert tier.entries.pin(key) is not None
    assert counters.get("tier.errors") == 1
    assert running_total(tier) == 0
    make_room(tier)  # any round puts it right
    assert running_total(tier) == usage_of(tier).total_nbytes == len(entry(key))

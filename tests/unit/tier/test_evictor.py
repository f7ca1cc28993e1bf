# SPDX-License-Identifier: Apache-2.0
"""Keeping below the budget: the running total, who goes first, one evictor, and a cheap start."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key, digest_of_name
from s3ec.runtime import PATIENCE_S
from s3ec.tier import evictor, files
from s3ec.tier.entries import LocalKeys
from s3ec.tier.evictor import RunningTotal
from s3ec.tier.files import Folders, free_bytes, try_lock
from tests.support.clock import Clock
from tests.support.file_calls import file_calls_of
from tests.support.on_disk import audit_of, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    OTHER_NAMESPACE,
    SIZE,
    MakeTier,
    child,
    entry,
    even,
    file_of,
    fill,
    key_at,
    left,
    opened,
    publish,
    read,
    refusing,
    served,
    unspool,
    use,
)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "cache")
    folders.make()
    return folders


@pytest.fixture
def running(folders: Folders) -> RunningTotal:
    return RunningTotal(folders)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda blob: blob[:12] + bytes([blob[12] ^ 1]) + blob[13:],
    "short": lambda blob: blob[:-1],
    "long": lambda blob: blob + b"\0",
    "empty": lambda blob: b"",
    "zeros": lambda blob: bytes(len(blob)),
}


def test_what_is_added_during_a_walk_is_not_lost(running: RunningTotal) -> None:
    running.begin()
    running.add(100, unknown_bytes=0)
    running.add(30, unknown_bytes=0)
    running.recount(100, 1000)
    assert running.read() == 1030


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_total_is_no_total_and_is_begun_anew(
    running: RunningTotal, folders: Folders, damage: str
) -> None:
    running.begin()
    running.add(100, unknown_bytes=0)
    folders.usage.write_bytes(DAMAGES[damage](folders.usage.read_bytes()))
    assert running.read() is None
    assert running.add(30, unknown_bytes=9000) == 9030 == running.read()


def test_threads_and_forks_lose_no_addition(
    running: RunningTotal, folders: Folders, patient: None
) -> None:
    running.begin()
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _ in range(200):
                    RunningTotal(folders).add(3, unknown_bytes=0)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    with ThreadPoolExecutor(4) as pool:
        for adding in [pool.submit(running.add, 5, unknown_bytes=0) for _ in range(400)]:
            adding.result()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 3
    assert running.read() == 3 * 200 * 3 + 400 * 5


def test_lock_of_a_stopped_process_is_an_error_not_a_hang(
    running: RunningTotal, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.tier.evictor.TOTAL_LOCK_TIMEOUT_S", 0.02)
    running.begin()
    with folders.usage.open("rb") as file:
        assert try_lock(file.fileno())
        with pytest.raises(OSError, match="stopped process"):
            running.read()
    assert running.read() == 0


def test_publish_that_cannot_be_counted_stands_and_is_reported(
    make_tier: MakeTier,
    monkeypatch: pytest.MonkeyPatch,
    counters: Counters,
) -> None:
    tier, key = make_tier(), key_at(0)

    with monkeypatch.context() as patch:
        patch.setattr(RunningTotal, "add", refusing(errno.EIO, "usage cannot be written"))
        tier.writer.publish(key, [entry(key)])
    assert tier.entries.open(key) is not None
    assert counters.get("tier.errors") == 1
    assert running_total(tier) == 0
    make_room(tier)  # any round puts it right
    assert running_total(tier) == usage_of(tier).total_bytes == len(entry(key))


def test_who_does_not_evict_stops_where_the_others_would_begin(make_tier: MakeTier) -> None:
    budget = 20 * len(entry(even(0)))
    fill(make_tier(budget_bytes=budget), *range(17))
    ours = make_tier(budget_bytes=budget, evicts=False)
    assert ours.evictor.room_bytes() == 2 * budget // 20  # of 95%
    fill(ours, 17, 18)
    with pytest.raises(evictor.NoRoomError, match="would make the node's processes evict"):
        fill(ours, 19)
    assert ours.evictor.room_bytes() == 0
    assert ours.evictor.make_room(budget, full=True, wait=True) == 0
    assert left(ours, 20) == set(range(19))


def test_who_does_not_evict_counts_a_folder_that_nobody_has_counted(make_tier: MakeTier) -> None:
    budget = 20 * len(entry(even(0)))
    tier = make_tier(budget_bytes=budget)
    fill(tier, *range(10))
    tier.folders.usage.unlink()
    ours = make_tier(budget_bytes=budget, evicts=False)
    assert ours.evictor.room_bytes() == 9 * budget // 20
    fill(ours, 10)
    assert left(ours, 20) == set(range(11))


def test_budget_is_for_all_namespaces_together(make_tier: MakeTier) -> None:
    other = make_tier(namespace=OTHER_NAMESPACE)
    for number in range(6):
        other.writer.publish(even(number), [entry(even(number), namespace=OTHER_NAMESPACE)])
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(6))
    assert left(tier, 6) == set(range(6))
    assert 0 < len(left(other, 6)) < 6
    assert audit_of(tier) == []


def test_full_disk_refuses_when_the_spool_holds_everything(make_tier: MakeTier) -> None:
    tier = make_tier()
    spool = tier.open_spool(DESTINATION)
    for number in range(3):
        tier.writer.publish(even(number), [entry(even(number))], spool=spool)
    tier.close()
    tier = make_tier(min_free_bytes=1 << 60)
    spool = tier.open_spool(DESTINATION)
    assert len(spool.adopt()) == 3
    with pytest.raises(TierError, match="min_free_bytes"):
        publish(tier, 0)
    assert left(tier, 3) == {0, 1, 2}
    unspool(spool, even(0))
    with pytest.raises(TierError, match="min_free_bytes"):
        publish(tier, 0)
    assert left(tier, 3) == {1, 2}


def test_full_disk_refuses_when_all_that_was_evicted_is_still_open(
    make_tier: MakeTier, large_disk: Path
) -> None:
    """The name frees the budget, and the last one that closes the file frees its blocks."""
    nbytes = len(entry(even(0), rows=2**14))  # a MiB
    floor = free_bytes(large_disk) - 4 * nbytes
    tier = make_tier(large_disk, min_free_bytes=floor)
    blobs = [entry(even(number), rows=2**14) for number in range(4)]
    held = []
    for number in range(3):
        tier.writer.publish(even(number), [blobs[number]])
        held.append(opened(tier, even(number)))
    for _ in range(2):
        with pytest.raises(TierError, match="min_free_bytes"):
            tier.writer.publish(even(3), [blobs[3]])
    assert free_bytes(large_disk) >= floor
    assert [read(one, even(number)) for number, one in enumerate(held)] == blobs[:3]
    held.clear()
    tier.writer.publish(even(3), [blobs[3]])
    assert served(tier, even(3)) == blobs[3]


def test_disk_short_of_free_space_evicts_only_what_is_missing(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(budget_bytes=100 * SIZE, min_free_bytes=50 * SIZE)
    fill(tier, *range(20))
    gone = lambda: 20 - len(left(tier, 20))  # noqa: E731
    monkeypatch.setattr(evictor, "free_bytes", lambda folder: (49 + gone()) * SIZE)
    publish(tier, 0)
    assert left(tier, 20) == set(range(4, 20))  # 1 + 1 and a hundredth of the budget or so


def test_second_evictor_does_not_wait_but_a_publish_past_the_budget_does(
    make_tier: MakeTier, root: Path, patient: None
) -> None:
    tier = make_tier(budget_bytes=3 * SIZE)
    with child("occupy", root) as other:
        assert other.hear() == "locked"
        fill(tier, *range(3))
        assert make_room(tier, SIZE, budget_bytes=3 * SIZE) == 0
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(fill, tier, *range(4))
            other.say()
            publishing.result()
        other.end()
    assert tier.entries.contains(even(3))
    assert usage_of(tier).entry_bytes <= 3 * SIZE


def test_publishes_behind_a_stopped_evictor_wait_once_and_then_are_refused_at_once(
    make_tier: MakeTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk thread that waits for longer would be taken for a disk that hangs."""
    tier = make_tier(budget_bytes=3 * SIZE)
    mine, waits, lock = threading.current_thread(), list[float](), evictor.evict_lock

    def noted(folders: Folders, *, wait_s: float = 0.0) -> AbstractContextManager[bool]:
        if threading.current_thread() is mine:  # the background never waits
            waits.append(wait_s)
        return lock(folders, wait_s=0.0)

    monkeypatch.setattr(evictor, "evict_lock", noted)
    now_s = time.monotonic()
    monkeypatch.setattr(evictor, "time", SimpleNamespace(monotonic=lambda: now_s))
    with child("occupy", root) as other:
        assert other.hear() == "locked"
        fill(tier, *range(3))
        for _ in range(2):
            with pytest.raises(TierError, match="another eviction is still under way"):
                fill(tier, 3)
        assert tier.evictor.make_room(SIZE, full=True, wait=True) == 0
        assert waits == [evictor.TURN_WAIT_S, 0.0]
        assert waits[0] < PATIENCE_S
        now_s += 60
        with pytest.raises(TierError, match="another eviction is still under way"):
            fill(tier, 3)
        assert waits[2:] == [evictor.TURN_WAIT_S]
        assert left(tier, 4) == set(range(3))
        other.say()
        other.end()
    now_s += 60
    monkeypatch.setattr(evictor, "TURN_WAIT_S", 60.0)  # the background may be at it
    monkeypatch.setattr(evictor, "evict_lock", lock)
    fill(tier, 3)
    assert tier.entries.contains(even(3))


def test_copy_of_a_rounds_descriptor_does_not_keep_evictors_out(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    copies: list[int] = []

    def copy_first(fd: int) -> bool:
        copies.append(os.dup(fd))  # as a fork by C code does, which runs no hook of ours
        return try_lock(fd)

    with monkeypatch.context() as patch:
        patch.setattr(files, "try_lock", copy_first)
        assert make_room(tier, SIZE, budget_bytes=10 * SIZE) == 2 * SIZE
    assert make_room(tier, 3 * SIZE, budget_bytes=10 * SIZE) == 2 * SIZE
    for copy in copies:
        os.close(copy)


def test_entry_used_during_the_round_is_spared(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    take = evictor.scan_tier

    def use_after(*arguments: object) -> object:
        scan = take(*arguments)  # type: ignore[arg-type]
        use(tier, even(0), clock)
        return scan

    monkeypatch.setattr(evictor, "scan_tier", use_after)
    make_room(tier, SIZE, budget_bytes=10 * SIZE)
    assert left(tier, 10) == {0, *range(3, 10)}


def test_uses_that_a_clock_ahead_noted_go_first_and_cost_one_eviction(
    make_tier: MakeTier, clock: Clock
) -> None:
    """Else they would stay for a day, and what is in use would be evicted in their place."""
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(6))
    clock.now_s -= 86400
    fill(tier, *range(6, 10))
    for number in range(2):  # the oldest of all, and in use
        use(tier, even(number), clock)
    assert make_room(tier, 4 * SIZE, budget_bytes=10 * SIZE, clock=clock) == 5 * SIZE
    assert left(tier, 10) == {0, 1, 7, 8, 9}  # and of the others in the order of their use


def test_foreign_files_are_complained_about_but_neither_counted_nor_deleted(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier(budget_bytes=5 * SIZE)
    fill(tier, *range(5))
    objects = root / "v1" / "objects"
    folder = file_of(root, even(0)).parent
    foreign = [
        root / "v1" / "README",
        objects / "notes.txt",
        folder / "upload.safetensors.part",
        folder / f"{'f' * 64}.safetensors",  # a good name in the wrong folder
        root / "v1" / "incoming" / "stray",
    ]
    for path in foreign:
        path.write_bytes(bytes(100 * SIZE))
    link = folder / f"00{'a' * 62}.safetensors"
    link.symlink_to(foreign[0])
    assert usage_of(tier).entry_bytes == 5 * SIZE
    assert make_room(tier, budget_bytes=5 * SIZE) == 0
    make_room(tier, 5 * SIZE, budget_bytes=5 * SIZE)
    assert all(os.path.lexists(path) for path in [*foreign, link])
    complaints = audit_of(tier)
    assert len(complaints) == 6
    for path in [*foreign, link]:
        assert any(str(path) in complaint for complaint in complaints)


def test_free_bytes_is_what_a_plain_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(f_bavail=3, f_bfree=5, f_bsize=4096, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert free_bytes(tmp_path) == 3 * 512


def test_folders_that_lost_their_last_entry_go_too(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier(budget_bytes=4 * SIZE)
    for number in range(40):
        publish(tier, number)
    folders = {path for path in (root / "v1" / "objects").rglob("*") if path.is_dir()}
    assert len(folders) <= 1 + 4 * 2
    assert audit_of(tier) == []


def start(make_tier: MakeTier) -> list[str]:
    """The calls of the file system that opening one takes."""
    with pytest.MonkeyPatch.context() as patch:
        calls = file_calls_of(threading.get_ident(), patch)
        make_tier()
    return calls


def walks(calls: list[str]) -> list[str]:
    """Those that list a folder of entries."""
    return [call for call in calls if re.match("(scandir|listdir).*/objects", call)]


def names_of(count: int) -> list[str]:
    """Object names, evenly spread over the 256 folders."""
    return [f"{n % 256:02x}/{n % 256:02x}{n:062x}.safetensors" for n in range(count)]


def link_entries(objects: Path, names: list[str]) -> None:
    """Many names for few files: cheap to make, and entries like others to every walk."""
    for number, name in enumerate(names):
        path = objects / name
        if number % 30_000 == 0:  # file systems limit the names of one file
            source = objects.parent.parent / "incoming" / f"source{number}"
            source.write_bytes(entry(key_at(0)))
        if number < 256:
            path.parent.mkdir(mode=0o700)
        os.link(source, path)


@pytest.mark.parametrize("count", [300, pytest.param(40_000, marks=pytest.mark.slow)])
def test_start_costs_the_same_however_many_entries_there_are(
    make_tier: MakeTier, root: Path, count: int
) -> None:
    make_tier().close()
    empty = start(make_tier)
    link_entries(root / "v1" / "objects" / NAMESPACE, names_of(count))
    full = start(make_tier)
    assert walks(full) == []
    assert len(full) == len(empty)
    (root / "v1" / "usage").unlink()
    assert walks(start(make_tier)) == []
    tier = make_tier()
    local = LocalKeys()
    local.replace(tier.entries.names())
    assert all(local(Key("", name, digest_of_name(name))) for name in names_of(count))

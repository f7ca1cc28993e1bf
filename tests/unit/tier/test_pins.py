# SPDX-License-Identifier: Apache-2.0
"""Pins: bytes that stay, folders that are swept only when their process is gone."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier import Tier, pins
from s3ec.tier.files import own_start_time, seems_alive, start_time, try_lock
from tests.support.clock import Clock
from tests.support.on_disk import audit_of, evict, make_room, usage_of
from tests.unit.tier.cases import (
    MakeTier,
    child,
    entry,
    file_of,
    files_below,
    key_at,
    pin_folders,
    pinned,
    publish,
    read,
    refusing,
)


def test_absent_entry_pins_as_none_and_is_no_error(tier: Tier, counters: Counters) -> None:
    assert tier.entries.pin(key_at(0)) is None
    publish(tier, 0)
    evict(tier, key_at(0))
    assert tier.entries.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 0


def test_pinned_bytes_survive_evict_deletion_and_republish(tier: Tier) -> None:
    key = key_at(0)
    pins = []
    drops = (partial(evict, tier), lambda key: tier.entries.drop_bad(key, "checksum"))
    for seed, drop in enumerate(drops):
        tier.writer.publish(key, [entry(key, seed=seed)])
        pins.append(tier.entries.pin(key))
        drop(key)
        assert not tier.entries.contains(key)
    tier.writer.publish(key, [entry(key, seed=2)])
    for seed, pin in enumerate(pins):
        assert pin is not None
        assert read(pin, key) == entry(key, seed=seed)


def test_pins_of_one_entry_are_independent_and_unpin_is_idempotent(tier: Tier) -> None:
    key = key_at(0)
    tier.writer.publish(key, [entry(key)])
    one, two = pinned(tier, key), pinned(tier, key)
    assert one.path != two.path
    for _ in range(2):
        tier.entries.unpin(one)
    assert not one.path.exists()
    assert read(two, key) == entry(key)


def test_unpin_leaves_the_pins_of_another_tier_alone(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier()
    key = key_at(0)
    one.writer.publish(key, [entry(key)])
    pin = pinned(one, key)
    two.entries.unpin(pin)
    two.close()
    assert read(pin, key) == entry(key)


def test_close_drops_pins_and_their_folder_and_keeps_entries(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    publish(tier, 0)
    pin = pinned(tier, key_at(0))
    tier.close()
    assert not pin.path.exists()
    assert pin_folders(root) == []
    assert file_of(root, key_at(0)).exists()
    tier.entries.unpin(pin)


def test_usage_counts_what_only_a_pin_keeps(tier: Tier) -> None:
    sizes = []
    for number in range(2):
        tier.writer.publish(key_at(number), [entry(key_at(number), rows=number + 1)])
        pin = pinned(tier, key_at(number))
        sizes.append(pin.nbytes)
    tier.entries.pin(key_at(1))  # a second name of the same bytes
    usage = usage_of(tier)
    assert (usage.entries, usage.nbytes) == (2, sum(sizes))
    assert (usage.pinned_nbytes, usage.held_nbytes) == (sum(sizes), 0)
    evict(tier, key_at(1))
    usage = usage_of(tier)
    assert (usage.entries, usage.nbytes) == (1, sizes[0])
    assert (usage.pinned_nbytes, usage.held_nbytes) == (sum(sizes), sizes[1])
    assert usage.total_nbytes == sum(sizes)


def test_publish_and_pin_note_the_time_of_use(tier: Tier, root: Path, clock: Clock) -> None:
    key = key_at(0)
    clock.now_s += 100
    tier.writer.publish(key, [entry(key)])
    assert abs(file_of(root, key).stat().st_mtime - clock.now_s) < 1e-5
    clock.now_s += 100
    tier.entries.pin(key)
    assert abs(file_of(root, key).stat().st_mtime - clock.now_s) < 1e-5


def test_pin_notes_the_time_also_where_the_entrys_own_is_ahead(
    tier: Tier, root: Path, clock: Clock
) -> None:
    """A clock that was set back: else the entry would be the newest until it has caught up."""
    publish(tier, 0)
    clock.now_s -= 86400
    tier.entries.pin(key_at(0))
    assert abs(file_of(root, key_at(0)).stat().st_mtime - clock.now_s) < 1e-5


# File systems without hard links


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_without_hard_links_a_pin_is_a_copy_and_counted(
    tier: Tier, root: Path, clock: Clock, counters: Counters, monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "link", refusing(error, os.strerror(error)))
    key = key_at(0)
    assert tier.entries.pin(key) is None
    tier.writer.publish(key, [entry(key)])
    clock.now_s += 100
    pin = pinned(tier, key)
    # The entry is touched, not the copy.
    assert abs(file_of(root, key).stat().st_mtime - clock.now_s) < 1e-5
    assert usage_of(tier).held_nbytes == pin.nbytes
    evict(tier, key)
    assert read(pin, key) == entry(key)
    assert counters.get("tier.pin_copies") == 1


def test_copied_pin_respects_free_space_and_leaves_nothing(
    make_tier: MakeTier, root: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    publish(tier, 0)
    tier.close()

    monkeypatch.setattr(os, "link", refusing(errno.EPERM, "no links here"))
    tier = make_tier(min_free_bytes=1 << 60)
    assert tier.entries.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 1
    assert files_below(root / "v1" / "pins") == {pins.LOCK_NAME}


def test_copy_that_ends_early_is_no_pin(
    tier: Tier, root: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM, "no links here"))
    monkeypatch.setattr(os, "sendfile", lambda *arguments: 0)
    publish(tier, 0)
    assert tier.entries.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 1
    assert files_below(root / "v1" / "pins") == {pins.LOCK_NAME}


# Other processes


def test_living_process_keeps_its_pins_and_a_killed_one_loses_them(
    make_tier: MakeTier, root: Path, counters: Counters
) -> None:
    tier = make_tier()
    publish(tier, 0)
    with child("hold", root, 0) as other:
        path = Path(other.hear())
        assert path.parent.name.startswith(f"{other.pid}-{start_time(other.pid)}")
        make_room(make_tier())
        assert path.exists()
        assert audit_of(tier) == []
        other.kill()
    (complaint,) = audit_of(tier)
    assert str(path.parent) in complaint
    make_room(tier, counters=counters)
    assert not path.parent.exists()
    assert audit_of(tier) == []


def test_reused_process_id_is_not_taken_for_the_old_process(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    start = own_start_time()
    folders = [
        root / "v1" / "pins" / f"{os.getpid()}-{wanted}-01234567"
        for wanted in (start, str(int(start) - 1))
    ]
    for folder in folders:
        folder.mkdir(mode=0o700)
        (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    make_tier()
    assert [folder.exists() for folder in folders] == [True, False]
    assert audit_of(tier) == []


def test_pins_of_another_containers_process_are_kept_while_their_lock_is_held(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    # Its own /proc would know this process; ours does not, as after `docker run` on one node.
    folder = root / "v1" / "pins" / f"{2**31 - 1}-1-01234567"
    folder.mkdir(mode=0o700)
    (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    with (folder / pins.LOCK_NAME).open("wb") as lock:
        assert try_lock(lock.fileno())
        make_tier()
        assert audit_of(tier) == []
        assert files_below(folder) == {f"0-{'0' * 32}.safetensors", pins.LOCK_NAME}
    make_tier()
    assert not folder.exists()


def test_folder_of_the_dead_with_something_foreign_in_it_stays(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    folder = root / "v1" / "pins" / f"{2**31 - 1}-1-01234567"
    folder.mkdir(mode=0o700)
    (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    (folder / "notes.txt").write_text("mine")
    make_tier()
    assert files_below(folder) == {"notes.txt"}
    assert len(audit_of(tier)) == 2


def test_pin_folder_that_is_swept_while_it_is_made_is_made_again(
    make_tier: MakeTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tier()
    lock, calls = try_lock, []

    def sweep_first(fd: int) -> bool:
        calls.append(fd)
        if len(calls) == 1:  # another container's sweeper, which sees no such process
            (new,) = set(pin_folders(root)) - before
            (new / pins.LOCK_NAME).unlink()
            new.rmdir()
        return lock(fd)

    before = set(pin_folders(root))
    monkeypatch.setattr(pins, "try_lock", sweep_first)
    tier = make_tier()
    assert len(calls) == 2
    assert len(set(pin_folders(root)) - before) == 1
    assert audit_of(tier) == []


def test_zombie_counts_as_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert start_time(pid) is None
        assert not seems_alive(pid)
    finally:
        os.waitpid(pid, 0)
    assert not seems_alive(pid)
    assert seems_alive(os.getpid(), own_start_time())
    assert not seems_alive(os.getpid(), "1")


def test_pin_that_could_not_be_dropped_is_dropped_after_the_next_one(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tier, 0)
    stuck, free = pinned(tier, key_at(0)), pinned(tier, key_at(0))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(errno.EROFS, "read-only"))
        tier.entries.unpin(stuck)
        tier.entries.unpin(stuck)
    assert stuck.path.exists()
    tier.entries.unpin(free)
    assert not stuck.path.exists()

# SPDX-License-Identifier: Apache-2.0
"""Pins: bytes that stay, folders that are swept only when their process is gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier import Tier, process_folders
from s3ec.tier.files import own_start_time, seems_alive, start_time, try_lock
from tests.unit.tier.cases import (
    Clock,
    child,
    entry,
    file_of,
    files_below,
    key_at,
    read,
)
from tests.unit.tier.cases import pin_folders as folders_in


def test_absent_entry_pins_as_none_and_is_no_error(tier: Tier, counters: Counters) -> None:
    assert tier.pin(key_at(0)) is None
    tier.publish(key_at(0), [entry(key_at(0))])
    tier.evict(key_at(0))
    assert tier.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 0


def test_pinned_bytes_survive_evict_quarantine_and_republish(tier: Tier) -> None:
    key = key_at(0)
    pins = []
    for seed, drop in enumerate((tier.evict, lambda key: tier.quarantine(key, "checksum"))):
        tier.publish(key, [entry(key, seed=seed)])
        pins.append(tier.pin(key))
        drop(key)
        assert not tier.contains(key)
    tier.publish(key, [entry(key, seed=2)])
    for seed, pin in enumerate(pins):
        assert pin is not None
        assert read(pin, key) == entry(key, seed=seed)


def test_pins_of_one_entry_are_independent_and_unpin_is_idempotent(tier: Tier) -> None:
    key = key_at(0)
    tier.publish(key, [entry(key)])
    one, two = tier.pin(key), tier.pin(key)
    assert one is not None
    assert two is not None
    assert one.path != two.path
    for _ in range(2):
        tier.unpin(one)
    assert not one.path.exists()
    assert read(two, key) == entry(key)


def test_unpin_leaves_the_pins_of_another_tier_alone(make_tier: Callable[..., Tier]) -> None:
    one, two = make_tier(), make_tier()
    key = key_at(0)
    one.publish(key, [entry(key)])
    pin = one.pin(key)
    assert pin is not None
    two.unpin(pin)
    two.close()
    assert read(pin, key) == entry(key)


def test_close_drops_pins_and_their_folder_and_keeps_entries(
    make_tier: Callable[..., Tier], root: Path
) -> None:
    tier = make_tier()
    tier.publish(key_at(0), [entry(key_at(0))])
    pin = tier.pin(key_at(0))
    assert pin is not None
    tier.close()
    assert not pin.path.exists()
    assert folders_in(root) == []
    assert file_of(root, key_at(0)).exists()
    tier.unpin(pin)


def test_usage_counts_what_only_a_pin_keeps(tier: Tier) -> None:
    sizes = []
    for number in range(2):
        tier.publish(key_at(number), [entry(key_at(number), rows=number + 1)])
        pin = tier.pin(key_at(number))
        assert pin is not None
        sizes.append(pin.nbytes)
    tier.pin(key_at(1))  # a second name of the same bytes
    usage = tier.usage()
    assert (usage.entries, usage.nbytes) == (2, sum(sizes))
    assert (usage.pinned_nbytes, usage.held_nbytes) == (sum(sizes), 0)
    tier.evict(key_at(1))
    usage = tier.usage()
    assert (usage.entries, usage.nbytes) == (1, sizes[0])
    assert (usage.pinned_nbytes, usage.held_nbytes) == (sum(sizes), sizes[1])
    assert usage.total_nbytes == sum(sizes)


def test_publish_and_pin_note_the_time_of_use(tier: Tier, root: Path, clock: Clock) -> None:
    key = key_at(0)
    clock.now_s += 100
    tier.publish(key, [entry(key)])
    assert file_of(root, key).stat().st_mtime == clock.now_s
    clock.now_s += 100
    tier.pin(key)
    assert file_of(root, key).stat().st_mtime == clock.now_s


def test_pin_is_a_later_use_than_another_process_made_with_a_clock_ahead(
    make_tier: Callable[..., Tier], root: Path, clock: Clock
) -> None:
    tier, ahead = make_tier(), make_tier()
    clock.now_s += 1000
    ahead.publish(key_at(0), [entry(key_at(0))])
    used_ns = file_of(root, key_at(0)).stat().st_mtime_ns
    clock.now_s -= 1000
    tier.pin(key_at(0))
    assert file_of(root, key_at(0)).stat().st_mtime_ns > used_ns


def test_clock_that_jumps_back_never_sets_an_earlier_time_and_keeps_the_order(
    tier: Tier, root: Path, clock: Clock
) -> None:
    times = []
    for number in (0, 1, 2):
        tier.publish(key_at(number), [entry(key_at(number))])
        clock.now_s -= 1000
    for number in (1, 0, 2, 1):
        tier.pin(key_at(number))
        times.append(file_of(root, key_at(number)).stat().st_mtime_ns)
    assert times == sorted(set(times))
    assert times[0] > int((clock.now_s + 3000) * 1e9)


def test_order_of_use_goes_on_after_a_restart_with_a_clock_set_back(
    make_tier: Callable[..., Tier], root: Path, clock: Clock
) -> None:
    tier = make_tier()
    for number in range(2):
        tier.publish(key_at(number), [entry(key_at(number))])
    tier.close()
    clock.now_s -= 86400
    tier = make_tier()
    tier.pin(key_at(0))
    times = [file_of(root, key_at(number)).stat().st_mtime_ns for number in range(2)]
    assert times[0] > times[1]


def test_time_of_use_in_the_far_future_is_left_alone(
    make_tier: Callable[..., Tier], root: Path, clock: Clock
) -> None:
    tier = make_tier()
    for number in range(2):
        tier.publish(key_at(number), [entry(key_at(number))])
    far_ns = (1 << 62) + 1000
    os.utime(file_of(root, key_at(0)), ns=(far_ns, far_ns))
    stored_ns = file_of(root, key_at(0)).stat().st_mtime_ns
    tier.make_room()
    assert tier.pin(key_at(0)) is not None
    assert tier.pin(key_at(1)) is not None
    assert file_of(root, key_at(0)).stat().st_mtime_ns == stored_ns
    assert file_of(root, key_at(1)).stat().st_mtime < clock.now_s + 1


# File systems without hard links


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_without_hard_links_a_pin_is_a_copy_and_counted(
    tier: Tier, root: Path, clock: Clock, counters: Counters, monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:  # fmt: skip
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    key = key_at(0)
    assert tier.pin(key) is None
    tier.publish(key, [entry(key)])
    clock.now_s += 100
    pin = tier.pin(key)
    assert pin is not None
    assert file_of(root, key).stat().st_mtime == clock.now_s  # the entry is touched, not the copy
    assert tier.usage().held_nbytes == pin.nbytes
    tier.evict(key)
    assert read(pin, key) == entry(key)
    assert counters.get("tier.pin_copies") == 1


def test_copied_pin_respects_free_space_and_leaves_nothing(
    make_tier: Callable[..., Tier], root: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    tier.publish(key_at(0), [entry(key_at(0))])
    tier.close()

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    tier = make_tier(min_free_bytes=1 << 60)
    assert tier.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 1
    assert files_below(root / "v1" / "pins") == {process_folders.LOCK_NAME}


def test_copy_that_ends_early_is_no_pin(
    tier: Tier, root: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "sendfile", lambda *arguments: 0)
    tier.publish(key_at(0), [entry(key_at(0))])
    assert tier.pin(key_at(0)) is None
    assert counters.get("tier.errors") == 1
    assert files_below(root / "v1" / "pins") == {process_folders.LOCK_NAME}


# Other processes


def test_living_process_keeps_its_pins_and_a_killed_one_loses_them(
    make_tier: Callable[..., Tier], root: Path, counters: Counters
) -> None:
    tier = make_tier()
    tier.publish(key_at(0), [entry(key_at(0))])
    with child("hold", root, 0) as other:
        path = Path(other.hear())
        assert path.parent.name.startswith(f"{other.pid}-{start_time(other.pid)}")
        make_tier().make_room()
        assert path.exists()
        assert tier.check() == []
        other.kill()
    (complaint,) = tier.check()
    assert str(path.parent) in complaint
    tier.make_room()
    assert not path.parent.exists()
    assert counters.get("tier.swept") == 1
    assert tier.check() == []


def test_reused_process_id_is_not_taken_for_the_old_process(
    make_tier: Callable[..., Tier], root: Path
) -> None:
    tier = make_tier()
    start = own_start_time()
    folders = [
        root / "v1" / "pins" / f"{os.getpid()}-{wanted}{suffix}"
        for wanted in (start, str(int(start) - 1))
        for suffix in ("", "-01234567")
    ]
    for folder in folders:
        folder.mkdir(mode=0o700)
        (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    make_tier()
    assert [folder.exists() for folder in folders] == [True, True, False, False]
    assert tier.check() == []


def test_pins_of_another_containers_process_are_kept_while_their_lock_is_held(
    make_tier: Callable[..., Tier], root: Path
) -> None:
    tier = make_tier()
    # Its own /proc would know this process; ours does not, as after `docker run` on one node.
    folder = root / "v1" / "pins" / f"{2**31 - 1}-1-01234567"
    folder.mkdir(mode=0o700)
    (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    with (folder / process_folders.LOCK_NAME).open("wb") as lock:
        assert try_lock(lock.fileno())
        make_tier()
        assert tier.check() == []
        assert files_below(folder) == {f"0-{'0' * 32}.safetensors", process_folders.LOCK_NAME}
    make_tier()
    assert not folder.exists()


def test_folder_of_the_dead_with_something_foreign_in_it_stays(
    make_tier: Callable[..., Tier], root: Path
) -> None:
    tier = make_tier()
    folder = root / "v1" / "pins" / f"{2**31 - 1}-1-01234567"
    folder.mkdir(mode=0o700)
    (folder / f"0-{'0' * 32}.safetensors").write_bytes(b"pinned")
    (folder / "notes.txt").write_text("mine")
    make_tier()
    assert files_below(folder) == {"notes.txt"}
    assert len(tier.check()) == 2


def test_pin_folder_that_is_swept_while_it_is_made_is_made_again(
    make_tier: Callable[..., Tier], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tier()
    lock, calls = try_lock, []

    def sweep_first(fd: int) -> bool:
        calls.append(fd)
        if len(calls) == 1:  # another container's sweeper, which sees no such process
            (new,) = set(folders_in(root)) - before
            (new / process_folders.LOCK_NAME).unlink()
            new.rmdir()
        return lock(fd)

    before = set(folders_in(root))
    monkeypatch.setattr(process_folders, "try_lock", sweep_first)
    tier = make_tier()
    assert len(calls) == 2
    assert len(set(folders_in(root)) - before) == 1
    assert tier.check() == []


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
    tier.publish(key_at(0), [entry(key_at(0))])
    stuck, free = tier.pin(key_at(0)), tier.pin(key_at(0))
    assert stuck is not None
    assert free is not None

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        tier.unpin(stuck)
        tier.unpin(stuck)
    assert stuck.path.exists()
    tier.unpin(free)
    assert not stuck.path.exists()

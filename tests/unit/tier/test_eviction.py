# SPDX-License-Identifier: Apache-2.0
"""The byte budget: least recently used goes first, one evictor, pinned entries stay."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier import evictor, files
from s3ec.tier.files import free_bytes, try_lock
from tests.on_disk import audit_of, evict, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    HOUR_S,
    OTHER_NAMESPACE,
    SIZE,
    Clock,
    MakeTier,
    child,
    entry,
    even,
    file_of,
    fill,
    key_at,
    key_of,
    left,
    pinned,
    publish,
    read,
)


def test_publish_past_the_budget_evicts_the_least_recently_used_to_the_low_mark(
    make_tier: MakeTier, counters: Counters
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    assert left(tier, 10) == set(range(10))
    tier.entries.pin(even(0))  # used: no longer the oldest
    pin = tier.entries.pin(even(1))
    assert pin is not None
    tier.entries.unpin(pin)
    fill(tier, 15)
    assert left(tier, 10) == set(range(10)) - {2, 3}
    assert usage_of(tier).nbytes == 9 * SIZE  # 90% of the budget
    assert counters.get("tier.evicted") == 2
    assert counters.get("tier.evicted_bytes") == 2 * SIZE
    assert audit_of(tier) == []


def test_make_room_below_the_budget_does_nothing(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    assert make_room(tier, budget_bytes=10 * SIZE) == 0
    assert make_room(tier, SIZE, budget_bytes=10 * SIZE) == 2 * SIZE
    assert left(tier, 10) == set(range(2, 10))


def test_lowered_budget_is_kept_after_a_restart(make_tier: MakeTier) -> None:
    tier = make_tier()
    fill(tier, *range(10))
    tier.close()
    tier = make_tier(budget_bytes=5 * SIZE)
    fill(tier, 15)
    assert usage_of(tier).nbytes <= 5 * SIZE
    assert left(tier, 16) >= {15}


def test_budget_is_for_all_namespaces_together(make_tier: MakeTier) -> None:
    other = make_tier(namespace=OTHER_NAMESPACE)
    for number in range(6):
        other.writer.publish(even(number), [entry(even(number), namespace=OTHER_NAMESPACE)])
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(6))
    assert left(tier, 6) == set(range(6))
    assert 0 < len(left(other, 6)) < 6
    assert audit_of(tier) == []


def test_pinned_entries_are_passed_over_and_read_well(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    pins = [pinned(tier, even(number)) for number in range(3)]
    for number in range(3, 10):  # so that the pinned ones are the oldest
        tier.entries.unpin(pinned(tier, even(number)))
    assert make_room(tier, 4 * SIZE, budget_bytes=10 * SIZE) == 5 * SIZE
    assert left(tier, 10) == {0, 1, 2, 8, 9}
    for number, pin in enumerate(pins):
        assert read(pin, even(number)) == entry(even(number))


def test_pins_of_another_process_are_passed_over(
    make_tier: MakeTier, root: Path, clock: Clock
) -> None:
    tier = make_tier(budget_bytes=4 * SIZE)
    publish(tier, 0)
    with child("hold", root, 0) as other:
        path = Path(other.hear())
        fill(tier, *range(8))
        assert tier.entries.contains(key_at(0))
        assert path.read_bytes() == entry(key_at(0))
        other.say()
        other.end()
    clock.now_s += HOUR_S  # the other's was the machine's
    fill(tier, *range(8))
    assert not tier.entries.contains(key_at(0))


def test_budget_full_of_pins_still_takes_entries(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=3 * SIZE)
    for number in range(6):
        fill(tier, number)
        pinned(tier, even(number))
    assert make_room(tier, budget_bytes=3 * SIZE) == 0
    assert usage_of(tier).nbytes == 6 * SIZE
    assert audit_of(tier) == []


def test_held_bytes_count_against_the_budget(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(6))
    for number in range(4):
        tier.entries.pin(even(number))
        evict(tier, even(number))
    assert make_room(tier, 4 * SIZE, budget_bytes=10 * SIZE) == 0
    assert make_room(tier, 5 * SIZE, budget_bytes=10 * SIZE) == 2 * SIZE
    assert usage_of(tier).held_nbytes == 4 * SIZE


def test_full_disk_refuses_when_pins_hold_everything(make_tier: MakeTier) -> None:
    tier = make_tier()
    fill(tier, *range(3))
    tier.close()
    tier = make_tier(min_free_bytes=1 << 60)
    pins = [pinned(tier, even(number)) for number in range(3)]
    with pytest.raises(TierError, match="min_free_bytes"):
        publish(tier, 0)
    assert left(tier, 3) == {0, 1, 2}
    tier.entries.unpin(pins[0])
    with pytest.raises(TierError, match="min_free_bytes"):
        publish(tier, 0)
    assert left(tier, 3) == {1, 2}


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
    make_tier: MakeTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(budget_bytes=3 * SIZE)
    with child("occupy", root) as other:
        assert other.hear() == "locked"
        fill(tier, *range(3))
        assert make_room(tier, SIZE, budget_bytes=3 * SIZE) == 0
        with monkeypatch.context() as patch:
            patch.setattr(evictor, "ROUND_TIMEOUT_S", 0.05)
            with pytest.raises(TierError, match="another process has been evicting"):
                fill(tier, *range(4))
        assert left(tier, 4) == set(range(3))
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(fill, tier, *range(4))
            other.say()
            publishing.result()
        other.end()
    assert tier.entries.contains(even(3))
    assert usage_of(tier).nbytes <= 3 * SIZE


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


def test_budget_holds_for_what_several_tiers_publish(make_tier: MakeTier) -> None:
    one, two = make_tier(budget_bytes=64 * SIZE), make_tier(budget_bytes=64 * SIZE)
    for number in range(100):
        for tier, name in ((one, f"a{number}"), (two, f"b{number}")):
            tier.writer.publish(key_of(name), [entry(key_of(name))])
            assert usage_of(tier).nbytes <= 64 * SIZE
            assert running_total(one) == running_total(two)


def test_entry_used_during_the_round_is_spared(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    take = evictor.take_census

    def use_after(*arguments: object) -> object:
        census = take(*arguments)  # type: ignore[arg-type]
        pin = tier.entries.pin(even(0))
        assert pin is not None
        tier.entries.unpin(pin)
        return census

    monkeypatch.setattr(evictor, "take_census", use_after)
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
        tier.entries.unpin(pinned(tier, even(number)))
    assert make_room(tier, 4 * SIZE, budget_bytes=10 * SIZE, clock=clock) == 5 * SIZE
    assert left(tier, 10) == {0, 1, 7, 8, 9}  # and of the others in the order of their use


def test_clock_that_is_set_back_by_little_keeps_the_order_of_the_times(
    make_tier: MakeTier, clock: Clock
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    for number in range(10):
        fill(tier, number)
        clock.now_s -= 20
    assert make_room(tier, SIZE, budget_bytes=10 * SIZE, clock=clock) == 2 * SIZE
    assert left(tier, 10) == set(range(8))


def test_entry_that_somebody_else_removes_during_the_round_is_no_trouble(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    fill(tier, *range(10))
    take = evictor.take_census

    def remove_after(*arguments: object) -> object:
        census = take(*arguments)  # type: ignore[arg-type]
        evict(tier, even(0))
        return census

    monkeypatch.setattr(evictor, "take_census", remove_after)
    make_room(tier, SIZE, budget_bytes=10 * SIZE, counters=counters)
    assert usage_of(tier).nbytes <= 9 * SIZE
    assert counters.get("tier.errors") == 0


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
        root / "v1" / "pins" / "stray",
    ]
    for path in foreign:
        path.write_bytes(bytes(100 * SIZE))
    link = folder / f"00{'a' * 62}.safetensors"
    link.symlink_to(foreign[0])
    assert usage_of(tier).nbytes == 5 * SIZE
    assert make_room(tier, budget_bytes=5 * SIZE) == 0
    make_room(tier, 5 * SIZE, budget_bytes=5 * SIZE)
    assert all(os.path.lexists(path) for path in [*foreign, link])
    complaints = audit_of(tier)
    assert len(complaints) == 6
    for path in [*foreign, link]:
        assert any(str(path) in complaint for complaint in complaints)


def test_free_bytes_is_what_a_plain_user_may_write(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= found.f_bfree * found.f_frsize


def test_folders_that_lost_their_last_entry_go_too(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier(budget_bytes=4 * SIZE)
    for number in range(40):
        publish(tier, number)
    folders = {path for path in (root / "v1" / "objects").rglob("*") if path.is_dir()}
    assert len(folders) <= 1 + 4 * 2
    assert audit_of(tier) == []

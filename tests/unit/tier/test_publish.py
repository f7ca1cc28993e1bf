# SPDX-License-Identifier: Apache-2.0
"""Publishing: whole or not at all, private, found again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier import Tier, files
from tests.on_disk import audit_of, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    HOUR_S,
    NAMESPACE,
    OTHER_NAMESPACE,
    Clock,
    child,
    entry,
    file_of,
    key_at,
    key_of,
    new_tier,
    read,
    temps_below,
)


@pytest.mark.parametrize("number", range(3))
def test_published_entry_is_pinned_with_the_same_bytes(tier: Tier, number: int) -> None:
    key = key_at(number)
    blob = entry(key)
    tier.writer.publish(key, [blob[:7], memoryview(blob)[7:200], b"", memoryview(blob)[200:]])
    assert tier.entries.contains(key)
    pin = tier.entries.pin(key)
    assert pin is not None
    assert read(pin, key) == blob


def test_entry_lies_under_its_object_name_as_the_bucket_has_it(tier: Tier, root: Path) -> None:
    key = key_of("a" * 64)
    tier.writer.publish(key, [entry(key)])
    path = root / "v1" / "objects" / NAMESPACE / "aa" / f"{'a' * 64}.safetensors"
    assert path.read_bytes() == entry(key)


def test_pieces_of_wide_values_are_counted_in_bytes(tier: Tier) -> None:
    key = key_at(0)
    blob = entry(key)
    assert len(blob) % 8 == 0
    tier.writer.publish(key, [memoryview(blob).cast("Q")])
    assert usage_of(tier).nbytes == len(blob)
    assert running_total(tier) == len(blob)


def test_a_thousand_pieces_become_one_file(tier: Tier) -> None:
    key = key_at(0)
    blob = entry(key, rows=64)
    tier.writer.publish(key, [blob[at : at + 3] for at in range(0, len(blob), 3)])
    pin = tier.entries.pin(key)
    assert pin is not None
    assert read(pin, key) == blob


def test_short_writes_are_continued(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: write(fd, [bytes(views[0])[:5]]))
    key = key_at(0)
    tier.writer.publish(key, [entry(key)[:8], entry(key)[8:]])
    pin = tier.entries.pin(key)
    assert pin is not None
    assert read(pin, key) == entry(key)


def test_a_file_system_that_writes_nothing_is_an_error_not_a_loop(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(TierError, match="wrote nothing"):
        tier.writer.publish(key_at(0), [entry(key_at(0))])


def test_publishing_again_replaces_and_keeps_what_was_pinned(tier: Tier) -> None:
    key = key_at(0)
    tier.writer.publish(key, [entry(key, seed=1)])
    old = tier.entries.pin(key)
    tier.writer.publish(key, [entry(key, seed=2)])
    new = tier.entries.pin(key)
    assert old is not None
    assert new is not None
    assert read(old, key) == entry(key, seed=1)
    assert read(new, key) == entry(key, seed=2)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_files_and_folders_are_private_whatever_the_umask(
    make_tier: Callable[..., Tier], root: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        tier = make_tier(root / "deep" / "down")
        for number in range(3):
            tier.writer.publish(key_at(number), [entry(key_at(number))])
            tier.entries.pin(key_at(number))
        make_room(tier)
        tier.entries.quarantine(key_at(0), "checksum")
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items()), found
    assert audit_of(tier) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_failed_write_raises_and_leaves_the_old_entry_and_no_temp(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    key = key_at(0)
    tier.writer.publish(key, [entry(key, seed=1)])
    pin = tier.entries.pin(key)

    def fail(fd: int, pieces: object) -> None:
        os.write(fd, b"half")
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(TierError, match=os.strerror(error)) as caught:
        tier.writer.publish(key, [entry(key, seed=2)])
    assert isinstance(caught.value.__cause__, OSError)
    assert temps_below(root) == set()
    assert file_of(root, key).read_bytes() == entry(key, seed=1)
    assert pin is not None


def test_interrupted_write_leaves_no_temp(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int, pieces: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tier.writer.publish(key_at(0), [entry(key_at(0))])
    assert temps_below(root) == set()
    assert not tier.entries.contains(key_at(0))


def test_full_quota_evicts_as_much_and_tries_once_more(
    make_tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    for number in range(4):
        tier.writer.publish(key_at(number), [entry(key_at(number))])
    write_all, failures = files.write_all, [OSError(errno.EDQUOT, "quota")]

    def fail_once(fd: int, pieces: list[bytes]) -> None:
        if failures:
            raise failures.pop()
        write_all(fd, pieces)

    monkeypatch.setattr(files, "write_all", fail_once)
    tier.writer.publish(key_at(4), [entry(key_at(4))])
    assert [tier.entries.contains(key_at(number)) for number in range(5)] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert audit_of(tier) == []


def test_file_size_limit_in_the_middle_of_a_write_is_a_tier_error(root: Path) -> None:
    with child("limit", root) as other:
        assert "File too large" in other.hear()
        assert other.hear() == "False set()"
        other.end()


def test_entry_above_the_budget_is_refused_and_evicts_nothing(
    make_tier: Callable[..., Tier],
) -> None:
    tier = make_tier(budget_bytes=2000)
    tier.writer.publish(key_at(0), [entry(key_at(0))])
    with pytest.raises(TierError, match="more than the budget"):
        tier.writer.publish(key_at(1), [bytes(2001)])
    assert tier.entries.contains(key_at(0))


def test_a_closed_tier_is_empty(root: Path) -> None:
    tier, key = new_tier(root), key_at(0)
    tier.writer.publish(key, [entry(key)])
    assert tier.entries.pin(key) is not None
    for _ in range(2):
        tier.close()
        with pytest.raises(TierError, match="not open"):
            tier.writer.publish(key, [entry(key)])
        assert tier.entries.pin(key) is None
        assert not tier.entries.contains(key)
        tier.entries.quarantine(key, "checksum")
    assert file_of(root, key).exists()


def test_restart_finds_entries_and_counts_their_bytes(make_tier: Callable[..., Tier]) -> None:
    first = make_tier()
    blobs = {key_at(number): entry(key_at(number), rows=number + 1) for number in range(5)}
    for key, blob in blobs.items():
        first.writer.publish(key, [blob])
    first.close()
    second = make_tier()
    assert running_total(second) == sum(map(len, blobs.values())) == usage_of(second).nbytes
    assert sorted(second.entries.names()) == sorted(key.name for key in blobs)
    for key, blob in blobs.items():
        pin = second.entries.pin(key)
        assert pin is not None
        assert read(pin, key) == blob
    assert audit_of(second) == []


def test_namespaces_share_a_folder_and_not_their_entries(make_tier: Callable[..., Tier]) -> None:
    key = key_at(0)
    one, two = make_tier(), make_tier(namespace=OTHER_NAMESPACE)
    one.writer.publish(key, [entry(key)])
    assert not two.entries.contains(key)
    assert two.entries.pin(key) is None
    assert list(two.entries.names()) == []
    assert usage_of(two) == usage_of(one)
    two.writer.publish(key, [entry(key, namespace=OTHER_NAMESPACE)])
    assert two.entries.pin(key) is not None
    assert audit_of(one) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "tiny", "Tiny-0123456789abcdef"])
def test_namespace_that_is_none_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Tier(root, name, budget_bytes=1, min_free_bytes=0, counters=Counters())


def test_killed_publish_leaves_a_temp_that_the_next_open_sweeps(
    make_tier: Callable[..., Tier], root: Path, counters: Counters
) -> None:
    bystander = make_tier()
    with child("stop_before_rename", root, 0) as other:
        temp = Path(other.hear())
        assert temp.stat().st_size == len(entry(key_at(0)))
        assert audit_of(bystander) == []  # its writer lives
        other.kill()
    assert not bystander.entries.contains(key_at(0))
    complaints = audit_of(bystander)
    assert len(complaints) == 2  # the temp file and the folder of pins
    assert str(temp) in "".join(complaints)
    assert audit_of(make_tier()) == []
    assert temps_below(root) == set()
    assert counters.get("tier.swept") == 2


def test_temp_of_a_living_process_is_swept_after_an_hour(
    make_tier: Callable[..., Tier], root: Path, clock: Clock
) -> None:
    tier = make_tier()
    folder = file_of(root, key_at(0)).parent
    folder.mkdir(mode=0o700, parents=True)
    temp = folder / f".tmp-{os.getpid()}-{'0' * 16}"
    for age_s, kept in ((HOUR_S - 1, True), (HOUR_S + 1, False)):
        temp.touch(mode=0o600)
        os.utime(temp, (clock() - age_s, clock() - age_s))
        make_room(tier, clock=clock)
        assert temp.exists() is kept


def test_temp_of_another_containers_process_is_kept_while_it_is_locked(
    make_tier: Callable[..., Tier], root: Path, clock: Clock
) -> None:
    tier = make_tier()
    folder = file_of(root, key_at(0)).parent
    folder.mkdir(mode=0o700, parents=True)
    temp = folder / f".tmp-{2**31 - 1}-{'0' * 16}"  # above any pid_max
    with temp.open("wb") as file:
        temp.chmod(0o600)
        os.utime(temp, (clock(), clock()))
        assert files.try_lock(file.fileno())
        make_room(tier)
        assert temp.exists()
    make_room(tier)
    assert not temp.exists()


def test_temp_that_a_neighbour_swept_is_written_again(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all, calls = files.write_all, []

    def sweep_first(fd: int, pieces: list[bytes]) -> None:
        write_all(fd, pieces)
        if not calls:
            (temp,) = (path for path in root.rglob(".tmp-*"))
            temp.unlink()
        calls.append(fd)

    monkeypatch.setattr(files, "write_all", sweep_first)
    key = key_at(0)
    tier.writer.publish(key, [entry(key)])
    assert len(calls) == 2
    assert tier.entries.pin(key) is not None


def test_hot_path_never_walks_the_folder(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("walked the folder")

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    for number in range(50):
        key = key_at(number)
        tier.writer.publish(key, [entry(key)])
        assert tier.entries.contains(key)
        pin = tier.entries.pin(key)
        assert pin is not None
        tier.entries.unpin(pin)
        assert tier.entries.pin(key_at(number + 1000)) is None
    monkeypatch.undo()

# SPDX-License-Identifier: Apache-2.0
"""The spool: entries that outlive eviction and their process, and end with exactly one owner."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier.scan import SpoolFileName
from s3ec.tier.spool import Spool
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, usage_of
from tests.support.waiting import DEADLINE_S
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    OTHER_NAMESPACE,
    SIZE,
    MakeTier,
    child,
    digests_of,
    entry,
    file_of,
    key_at,
    locks_below,
    publish,
    refusing,
    spool_files,
    spooled,
    spooled_below,
    temps_below,
    unspool,
)
from tests.unit.tier.test_entries import BAD

KEY = key_at(0)


DEAD = "0123456789abcdef"


def name_of(number: int, owner: str = DEAD) -> str:
    digest = key_at(number).digest.hex()
    return f"{NAMESPACE}--{DESTINATION}--{owner}-0--{digest}.safetensors"


@pytest.fixture
def spool(tier: Tier) -> Spool:
    return tier.open_spool(DESTINATION)


def left_by_the_dead(root: Path, *numbers: int, lock: bool = True, owner: str = DEAD) -> Path:
    """What a process of long ago left; gives the folder."""
    folder = root / "v1" / "spool"
    for number in numbers:
        path = folder / name_of(number, owner)
        path.touch(mode=0o600)
        path.write_bytes(entry(key_at(number)))
    if lock:
        (folder / f"{owner}.lock").touch(mode=0o600)
    return folder


# One process


def test_spooled_entry_is_one_file_with_two_names_beside_the_lock_of_its_owner(
    tier: Tier, spool: Spool, root: Path, counters: Counters
) -> None:
    assert locks_below(root) == []
    publish(tier, 0, spool=spool)
    (path,), (lock,) = spool_files(root), locks_below(root)
    parts = SpoolFileName.parse(path.name)
    assert parts == SpoolFileName(NAMESPACE, DESTINATION, lock.stem, KEY.digest)
    assert lock.stat().st_mode & 0o777 == 0o600
    assert path.samefile(file_of(root, KEY))
    assert path.stat().st_mode & 0o777 == 0o600
    assert spool.held(KEY.digest) is not None
    assert spool.nbytes == SIZE
    usage = usage_of(tier)
    assert (usage.entry_bytes, usage.spooled_bytes, usage.held_bytes) == (SIZE, SIZE, 0)
    assert usage.total_bytes == SIZE
    assert counters.get("tier.errors") == 0


def about(seconds: float) -> Any:
    """The clock of these tests goes on a little each time that it is looked at."""
    return pytest.approx(seconds, abs=2)


def test_the_spool_says_how_many_wait_and_since_when_the_oldest_does(
    tier: Tier, spool: Spool, clock: Clock
) -> None:
    assert (spool.count, spool.oldest_s()) == (0, 0.0)
    for number in range(3):
        publish(tier, number, spool=spool)
        clock.now_s += 10
    assert (spool.count, spool.oldest_s()) == (3, about(30))
    unspool(spool, key_at(1))
    assert (spool.count, spool.oldest_s()) == (2, about(30))
    publish(tier, 0, spool=spool)  # once more
    assert (spool.count, spool.oldest_s()) == (2, about(10))
    unspool(spool, key_at(2))
    assert spool.oldest_s() == about(0)
    unspool(spool, key_at(0))
    assert (spool.count, spool.oldest_s()) == (0, 0.0)


def test_what_is_adopted_counts_from_its_last_use(
    make_tier: MakeTier, root: Path, clock: Clock
) -> None:
    one = make_tier()
    publish(one, 0, spool=one.open_spool(DESTINATION))
    one.close()
    used_s = file_of(root, KEY).stat().st_mtime
    clock.now_s = used_s + 50
    spool = make_tier().open_spool(DESTINATION)
    spool.adopt()
    assert spool.count == 1
    assert spool.oldest_s() == about(50)


def test_save_that_comes_while_an_earlier_one_is_being_removed_is_kept(
    tier: Tier, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tier.writer.publish(KEY, [entry(KEY)], spool=spool)
    assert first is not None
    removing, go_on = threading.Event(), threading.Event()
    unlink = os.unlink

    def slow(path: str) -> None:
        if path == first.path and not removing.is_set():
            removing.set()
            go_on.wait(0.2)  # the second save either waits for us, or comes in between
        unlink(path)

    monkeypatch.setattr(os, "unlink", slow)
    confirming = threading.Thread(target=spool.remove, args=(first,))
    confirming.start()
    assert removing.wait(DEADLINE_S)
    tier.writer.publish(KEY, [entry(KEY, seed=1)], spool=spool)
    go_on.set()
    confirming.join(DEADLINE_S)
    assert spooled(spool, KEY) == entry(KEY, seed=1)


def test_removed_entry_that_the_disk_keeps_is_finished_by_the_next_process(
    make_tier: MakeTier, root: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_tier()
    spool = one.open_spool(DESTINATION)
    publish(one, 0, 3, spool=spool)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(errno.EROFS, "read-only"))
        unspool(spool, KEY)
    assert counters.get("tier.errors") == 1
    assert spool.held(KEY.digest) is None
    assert spool.load(KEY.digest) is None
    assert spool.nbytes == SIZE
    assert usage_of(one).spooled_bytes == 2 * SIZE  # the budget counts it
    one.close()
    two = make_tier().open_spool(DESTINATION)
    assert len(two.adopt()) == 2
    for number in (0, 3):
        unspool(two, key_at(number))
    assert spooled_below(root) == []


def test_entry_does_not_appear_where_the_spool_cannot_hold_it(
    tier: Tier, spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EIO, "disk gone"))
    with pytest.raises(TierError, match="disk gone"):
        publish(tier, 0, spool=spool)
    assert not tier.entries.contains(KEY)
    assert spool.held(KEY.digest) is None
    assert temps_below(root) == set()
    assert spool.nbytes == 0


def test_owner_whose_lock_was_deleted_goes_on_under_another_name(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    spool = tier.open_spool(DESTINATION)
    publish(tier, 0, spool=spool)
    locks_below(root)[0].unlink()
    publish(tier, 3, spool=spool)
    assert len(locks_below(root)) == 1
    for number in (0, 3):
        assert spooled(spool, key_at(number)) == entry(key_at(number))
    # Nobody can tell any more that the first one's owner lives: it is uploaded twice, no harm.
    other = make_tier().open_spool(DESTINATION)
    assert [one.digest for one in other.adopt()] == [KEY.digest]


def test_spool_of_a_closed_tier_and_a_bad_destination_are_refused(tier: Tier) -> None:
    for destination in ("", "../up", "0" * 15, "G" * 16):
        with pytest.raises(ValueError, match="not a destination"):
            tier.open_spool(destination)
    tier.close()
    with pytest.raises(TierError, match="not open"):
        tier.open_spool(DESTINATION)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        f"{NAMESPACE}--{DESTINATION}--{'0' * 32}.safetensors",
        f"{NAMESPACE}--{DESTINATION}--{DEAD}--{'0' * 32}.safetensors",
        f"{NAMESPACE}--{DESTINATION}--{DEAD}-0--{'0' * 31}.safetensors",
        f"{NAMESPACE}--{DESTINATION}--{DEAD}-0--{'0' * 32}.safetensors.bak",
        f"nothing--{DESTINATION}--{DEAD}-0--{'0' * 32}.safetensors",
        f"../{NAMESPACE}--{DESTINATION}--{DEAD}-0--{'0' * 32}.safetensors",
    ],
)
def test_other_names_are_no_spool_names(name: str) -> None:
    assert SpoolFileName.parse(name) is None


def test_spool_name_of_a_namespace_with_dashes_reads_back() -> None:
    namespace, digest = "a--b--0123456789abcdef-0123456789abcdef", bytes(range(16))
    name = f"{namespace}--{DESTINATION}--{DEAD}-7--{digest.hex()}.safetensors"
    assert SpoolFileName.parse(name) == SpoolFileName(namespace, DESTINATION, DEAD, digest)


# Bad entries


@pytest.mark.parametrize("bad", BAD)
def test_bad_entry_is_not_loaded_but_deleted_and_counted(
    tier: Tier, spool: Spool, root: Path, counters: Counters, bad: str
) -> None:
    blob, _ = BAD[bad]
    tier.writer.publish(KEY, [blob], spool=spool)
    assert len(audit_of(tier)) == 2  # both names
    assert spool.load(KEY.digest) is None
    assert spooled_below(root) == []
    assert spool.nbytes == 0
    assert counters.get("tier.bad_files") == 1
    assert tier.entries.open(KEY) is None  # the same bytes, and whoever opens them finds out
    assert not tier.entries.contains(KEY)
    assert usage_of(tier).total_bytes == 0


def test_better_entry_of_the_tier_stays_when_the_spooled_one_is_bad(
    tier: Tier, spool: Spool
) -> None:
    tier.writer.publish(KEY, [b"rubbish"], spool=spool)
    tier.writer.publish(KEY, [entry(KEY)])
    assert spool.load(KEY.digest) is None
    assert tier.entries.open(KEY) is not None


@pytest.mark.parametrize("kind", ["symlink", "pipe", "folder"])
def test_what_is_not_a_file_is_deleted_and_not_followed_or_waited_for(
    tier: Tier, spool: Spool, root: Path, tmp_path: Path, kind: str
) -> None:
    path = left_by_the_dead(root) / name_of(0)
    (tmp_path / "outside").write_bytes(entry(KEY))
    if kind == "symlink":
        path.symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(mode=0o700)
    assert [one.digest for one in spool.adopt()] == [KEY.digest]
    assert spool.load(KEY.digest) is None
    assert spooled_below(root) == []
    assert (tmp_path / "outside").read_bytes() == entry(KEY)


def test_disk_that_does_not_answer_is_an_error_and_the_entry_stays(
    tier: Tier, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tier, 0, spool=spool)

    with monkeypatch.context() as patch:
        patch.setattr("s3ec.tier.spool.open_entry", refusing(errno.EMFILE, "too many open files"))
        with pytest.raises(TierError, match="too many"):
            spool.load(KEY.digest)
    assert spool.load(KEY.digest) is not None


def test_check_finds_what_does_not_belong_into_the_spool(tier: Tier, root: Path) -> None:
    folder = left_by_the_dead(root, 0, 1)
    assert audit_of(tier) == []  # it waits for the next process that writes
    (folder / "notes.txt").touch(mode=0o600)
    (folder / "stray").mkdir(mode=0o700)
    (folder / name_of(0)).chmod(0o644)
    (folder / name_of(1)).rename(folder / name_of(2))
    complaints = audit_of(tier)
    assert len(complaints) == 4
    for part in ("notes.txt", "stray", "mode 644", "another identifier"):
        assert any(part in complaint for complaint in complaints)
    shutil.rmtree(folder)


# Adoption


def test_what_a_closed_tier_left_is_adopted_by_the_next_one(
    make_tier: MakeTier, root: Path, counters: Counters
) -> None:
    one = make_tier()
    publish(one, 0, 1, 2, spool=one.open_spool(DESTINATION))
    two = make_tier()
    spool = two.open_spool(DESTINATION)
    assert spool.adopt() == []  # its owner lives
    one.close()
    assert audit_of(two) == []
    assert {one.digest for one in spool.adopt()} == {key_at(n).digest for n in range(3)}
    assert spooled_below(root) == digests_of(*range(3))
    assert spool.nbytes == sum(len(entry(key_at(number))) for number in range(3))
    assert spool.adopt() == []
    assert counters.get("spool.adopted") == 3
    for number in range(3):
        assert spooled(spool, key_at(number)) == entry(key_at(number))
        unspool(spool, key_at(number))
    two.close()
    assert os.listdir(root / "v1" / "spool") == []
    assert audit_of(two) == []


def test_entries_of_other_models_and_buckets_stay_for_processes_of_theirs(
    make_tier: MakeTier, root: Path
) -> None:
    one = make_tier()
    publish(one, 0, spool=one.open_spool(DESTINATION))
    one.close()
    other_model = make_tier(namespace=OTHER_NAMESPACE)
    assert other_model.open_spool(DESTINATION).adopt() == []
    other_bucket = make_tier()
    assert other_bucket.open_spool("f" * 16).adopt() == []
    assert spooled_below(root) == digests_of(0)
    assert len(make_tier().open_spool(DESTINATION).adopt()) == 1
    assert audit_of(other_model) == []


@pytest.mark.parametrize("lock", [True, False])
def test_left_overs_of_the_dead_are_taken_with_or_without_their_lock(
    tier: Tier, spool: Spool, root: Path, lock: bool
) -> None:
    left_by_the_dead(root, 0, 1, lock=lock)
    assert len(spool.adopt()) == 2
    for number in (0, 1):
        unspool(spool, key_at(number))
    spool.close()
    assert locks_below(root) == []


@pytest.mark.parametrize("bad", [False, True])
def test_second_copy_of_what_we_hold_is_taken_over_once_the_first_has_gone(
    tier: Tier, spool: Spool, root: Path, bad: bool
) -> None:
    left_by_the_dead(root, 0, 1)
    first = entry(KEY, seed=1)
    if bad:
        first = first[:-1] + bytes([first[-1] ^ 1])
    tier.writer.publish(KEY, [first], spool=spool)
    assert [one.digest for one in spool.adopt()] == [key_at(1).digest]
    assert len(spool_files(root)) == 3
    if bad:
        assert spool.load(KEY.digest) is None
    else:
        assert spooled(spool, KEY) == first
        assert spool.adopt() == []
        unspool(spool, KEY)
    assert [one.digest for one in spool.adopt()] == [KEY.digest]
    assert spooled(spool, KEY) == entry(KEY)
    assert [lock for lock in locks_below(root) if DEAD in lock.name] == []


def test_save_that_comes_while_an_older_copy_is_taken_over_leaves_none_of_it(
    tier: Tier, spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_the_dead(root, 0)
    later = entry(KEY, seed=1)
    rename = os.rename

    def rename_late(path: str, target: str) -> None:
        tier.writer.publish(KEY, [later], spool=spool)
        rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_late)
        assert spool.adopt() == []
    assert spooled(spool, KEY) == later
    assert spool.nbytes == len(later)
    unspool(spool, KEY)
    assert spool_files(root) == []
    assert spool.nbytes == 0


def test_adoption_that_fails_in_the_middle_is_finished_by_the_next_one(
    tier: Tier, spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_the_dead(root, *range(3))
    lstat, calls = os.lstat, []

    def second_fails(path: str) -> os.stat_result:
        if "--" in str(path):
            calls.append(path)
            if len(calls) == 2:
                raise OSError(errno.EIO, "disk gone")
        return lstat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", second_fails)
        assert len(spool.adopt()) == 1
    assert len(spool.adopt()) == 2
    assert spooled_below(root) == digests_of(*range(3))
    for number in range(3):
        assert spooled(spool, key_at(number)) == entry(key_at(number))


def test_lock_of_the_dead_goes_when_all_that_they_left_was_taken_over(
    tier: Tier, spool: Spool, root: Path
) -> None:
    before = open_below(root)
    for number in range(3):
        left_by_the_dead(root, number, owner=f"{number:016x}")
        assert len(spool.adopt()) == 1
        assert len(locks_below(root)) == 1  # its own
        unspool(spool, key_at(number))
    spool.close()
    assert locks_below(root) == []
    assert open_below(root) == before


@pytest.mark.slow
def test_eight_adopters_at_once_share_the_entries_of_the_dead_and_none_has_two_owners(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    count = 40
    with ExitStack() as stack:
        victims = [stack.enter_context(child("spool", root, n * count, count)) for n in range(3)]
        adopters = [stack.enter_context(child("adopt", root)) for _ in range(8)]
        for victim in victims:
            assert victim.hear() == str(victim.pid)
        for adopter in adopters:
            assert adopter.hear() == "ready"
        for victim in victims:
            victim.kill()
        for adopter in adopters:
            adopter.say()
        got = [adopter.hear().split() for adopter in adopters]
        assert [adopter.hear() for adopter in adopters] == ["True"] * len(adopters)
        digests = [digest for share in got for digest in share]
        assert len(digests) == len(set(digests)) == 3 * count
        assert set(digests) == {key_at(number).digest.hex() for number in range(3 * count)}
        assert spooled_below(root) == digests_of(*range(3 * count))
        assert audit_of(tier) == []
        for adopter in adopters:
            adopter.say()
        for adopter in adopters:
            adopter.end()
    assert os.listdir(root / "v1" / "spool") == []
    assert audit_of(tier) == []

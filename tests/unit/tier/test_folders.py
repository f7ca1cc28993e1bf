# SPDX-License-Identifier: Apache-2.0
"""The folder itself: whose it may be, and what happens when it vanishes, fills or freezes."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier import entries, evictor
from tests.support.disks import give_to_group, small_tmpfs
from tests.support.on_disk import audit_of, make_room, usage_of
from tests.unit.tier.cases import (
    NAMESPACE,
    MakeTier,
    entry,
    even,
    file_of,
    fill,
    key_at,
    new_tier,
    opened,
    publish,
    read,
    refusing,
    served,
)

KEY = key_at(1)  # with a LoRA folder


def test_root_of_another_user_is_refused_with_the_fix(tmp_path: Path) -> None:
    folder = Path("/usr")
    if os.geteuid() == 0:
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
    with pytest.raises(TierError, match=r"belongs to uid .* `chown .*cache_dir"):
        new_tier(folder)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2777, 0o702])
def test_root_that_others_may_write_is_refused_with_the_fix(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(TierError, match=rf"`chmod 700 {root}`.*{root}/s3ec"):
        new_tier(root)
    root.chmod(0o755)
    tier = new_tier(root)
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
@pytest.mark.parametrize("mode", [0o770, 0o2770])
def test_root_that_a_group_may_write_is_refused_where_it_is_not_one_of_ours(
    root: Path, mode: int
) -> None:
    root.mkdir()
    os.chown(root, -1, 65534)
    root.chmod(mode)
    with pytest.raises(TierError, match=rf"mode {mode:o}, group 65534\); `chmod 700"):
        new_tier(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_volume_that_was_given_to_our_group_is_used_whoever_owns_it(
    make_tier: MakeTier, plain_user: Path
) -> None:
    gid, user = os.getegid(), os.geteuid()
    os.seteuid(0)
    os.chown(plain_user, 0, -1)
    os.seteuid(user)
    give_to_group(plain_user, gid)
    for _ in range(2):
        tier = make_tier(plain_user)
        publish(tier, 1, 2)
        give_to_group(plain_user, gid)  # kubelet was restarted
        publish(tier, 3)
        assert read(opened(tier, key_at(1)), key_at(1)) == entry(key_at(1))
        assert audit_of(tier) == []
        tier.close()
        give_to_group(plain_user, gid)  # the pod is started again


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_tier_of_another_user_in_a_volume_of_our_group_is_refused_with_the_fix(
    make_tier: MakeTier, plain_user: Path
) -> None:
    make_tier(plain_user).close()
    give_to_group(plain_user, os.getegid())
    os.seteuid(0)
    os.setegid(65534)
    with pytest.raises(TierError, match=rf"{plain_user}/v1 belongs to uid 65534 .*`chown 0"):
        new_tier(plain_user)
    os.seteuid(65534)


@pytest.mark.parametrize("name", ["v1", "v1/objects", f"v1/objects/{NAMESPACE}", "v1/spool"])
def test_inner_folder_that_is_a_link_a_file_or_open_to_others_is_refused(
    make_tier: MakeTier, root: Path, tmp_path: Path, name: str
) -> None:
    make_tier().close()
    inner, elsewhere = root / name, tmp_path / "elsewhere"
    inner.chmod(0o777)
    with pytest.raises(TierError, match="writable by other users"):
        new_tier(root)
    inner.chmod(0o700)
    inner.rename(elsewhere)
    inner.symlink_to(elsewhere)
    with pytest.raises(TierError, match="symbolic link"):
        new_tier(root)
    inner.unlink()
    inner.touch()
    with pytest.raises(TierError, match="not a folder"):
        new_tier(root)


def test_root_may_be_a_link_and_is_resolved_once(
    make_tier: MakeTier, root: Path, tmp_path: Path
) -> None:
    real, other, link = tmp_path / "real", tmp_path / "other", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    tier = make_tier(link)
    link.unlink()
    link.symlink_to(other)
    tier.writer.publish(KEY, [entry(KEY)])
    assert file_of(real, KEY).exists()
    assert not other.exists()
    assert audit_of(tier) == []


def test_root_that_is_a_file_is_refused(root: Path) -> None:
    root.touch()
    with pytest.raises(TierError, match="not a folder"):
        new_tier(root)
    with pytest.raises(TierError, match="set `cache_dir`"):
        new_tier(root / "below")


def test_disk_out_of_inodes_is_walked_once_for_many_publishes(
    make_tier: MakeTier, tmp_path: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the entries goes at once, as where the budget is used up."""
    rounds, scan = [], evictor.scan_tier
    monkeypatch.setattr(evictor, "scan_tier", lambda *args: rounds.append(1) or scan(*args))
    with small_tmpfs(tmp_path / "disk", size=1 << 23, inodes=330) as disk:
        tier = make_tier(disk)
        fill(tier, *range(600))  # some 300 beyond the end
        assert len(usage_of(tier).entries) > 250
        assert audit_of(tier) == []
    assert counters.get("tier.evicted") > 250
    assert len(rounds) < 20


def test_what_is_evicted_from_a_full_disk_is_closed_at_once(
    make_tier: MakeTier, tmp_path: Path, counters: Counters
) -> None:
    """Else each publish evicts more, and no file gives its inode back."""
    with small_tmpfs(tmp_path / "disk", size=1 << 23, inodes=330) as disk:
        tier = make_tier(disk)
        residents = tier.open_residents(lambda header: True)
        for number in range(600):
            fill(tier, number)
            residents.add(even(number).digest, opened(tier, even(number)))
        assert len(usage_of(tier).entries) > 250
    assert 250 < counters.get("tier.evicted") < 350


@pytest.mark.parametrize("floor", [False, True])
def test_what_others_have_open_on_a_full_disk_is_not_made_up_for_by_evicting_more(
    make_tier: MakeTier,
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
    floor: bool,
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(evictor, "time", SimpleNamespace(monotonic=lambda: now_s))
    with small_tmpfs(tmp_path / "disk", size=1 << 20, inodes=0 if floor else 330) as disk:
        tier = make_tier(disk, budget_bytes=1 << 20, min_free_bytes=1 << 17 if floor else 0)
        held, number = [], 0
        while not counters.get("tier.evicted"):
            with suppress(TierError):
                fill(tier, number)
                held.append(opened(tier, even(number)))
            number += 1
        for _ in range(20):
            with pytest.raises(TierError):
                fill(tier, number)
        assert 0 < counters.get("tier.evicted") < len(held) / 5
        held.clear()  # the others have looked at theirs
        now_s += 60
        fill(tier, number)
        assert audit_of(tier) == []


def test_disk_that_is_full_at_the_start_is_served_from_and_loses_nothing_by_that(
    make_tier: MakeTier, small_disk: Path
) -> None:
    tier = make_tier(small_disk)
    for number in range(6):
        publish(tier, number)
    tier.close()
    for number in range(os.statvfs(small_disk).f_favail):
        (small_disk / f"somebody's {number}").touch()
    tier = make_tier(small_disk)
    assert len(usage_of(tier).entries) == 6
    for number in range(6):
        assert served(tier, key_at(number)) == entry(key_at(number))
    publish(tier, 5)  # which evicts
    assert 0 < len(usage_of(tier).entries) < 6
    assert served(tier, key_at(5)) == entry(key_at(5))
    assert audit_of(tier) == []


def test_disk_that_is_full_of_other_things_is_refused_and_left_alone(
    make_tier: MakeTier, small_disk: Path
) -> None:
    count = os.statvfs(small_disk).f_favail
    for number in range(count):
        (small_disk / f"somebody's {number}").touch()
    for spare in range(2):  # no room for the folder, then none for those in it
        with pytest.raises(TierError, match="No space"):
            new_tier(small_disk)
        left = {path.name for path in small_disk.iterdir()} - {"v1"}
        assert left == {f"somebody's {number}" for number in range(spare, count)}
        (small_disk / f"somebody's {spare}").unlink()
    for number in range(2, 20):
        (small_disk / f"somebody's {number}").unlink()
    make_tier(small_disk)


def test_folder_without_permission_is_refused_counted_and_bypassed(
    plain_user: Path, make_tier: MakeTier, counters: Counters
) -> None:
    root = plain_user / "cache"
    tier = make_tier(root)
    tier.writer.publish(KEY, [entry(KEY)])
    folder = file_of(root, KEY).parent
    folder.chmod(0)
    assert tier.entries.open(KEY) is None
    assert not tier.entries.contains(KEY)
    assert counters.get("tier.errors") == 2
    with pytest.raises(TierError, match="Permission denied"):
        tier.writer.publish(KEY, [entry(KEY)])
    assert make_room(tier) == 0
    assert any(f"cannot read {folder}" in complaint for complaint in audit_of(tier))
    folder.chmod(0o700)
    assert tier.entries.open(KEY) is not None
    plain_user.chmod(0o500)
    with pytest.raises(TierError, match=r"Permission denied.*set `cache_dir`"):
        new_tier(plain_user / "new")
    plain_user.chmod(0o700)
    tier.close()


def test_refusals_are_counted_each_time_and_logged_once(
    make_tier: MakeTier, counters: Counters, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tier = make_tier()
    tier.writer.publish(KEY, [entry(KEY)])

    monkeypatch.setattr(entries, "open_entry", refusing(errno.EIO, "disk gone"))
    for _ in range(5):
        assert tier.entries.open(KEY) is None
    assert counters.get("tier.errors") == 5
    assert [record.levelname for record in caplog.records if "disk gone" in record.message] == [
        "WARNING"
    ]

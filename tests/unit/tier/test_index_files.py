# SPDX-License-Identifier: Apache-2.0
"""The index's files: whole or absent, counted, shown, and not evicted while they are in use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from s3ec.errors import TierError
from s3ec.index.local import OVERLAY, NodeFolder
from s3ec.index.names import SnapshotName
from s3ec.tier.tier import Tier
from tests.support.on_disk import audit_of, running_total, usage_of
from tests.unit.tier.cases import (
    HOUR_S,
    NAMESPACE,
    MakeTier,
    entry,
    index_of,
    key_at,
)

SNAPSHOT = SnapshotName("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW")
ROWS, FILTER = f"{SNAPSHOT}.rows", f"{SNAPSHOT}.filter"
DAY_S = 24 * HOUR_S


def here(files: NodeFolder) -> set[str]:
    return set(os.listdir(files.path)) if files.path.exists() else set()


@pytest.mark.parametrize("name", [ROWS, FILTER, OVERLAY])
def test_a_file_is_there_whole_under_its_name(tier: Tier, root: Path, name: str) -> None:
    files = index_of(tier)
    assert files.find(name) is None
    files.write(name, [b"ro", b"ws"])
    assert (root / "v1" / "index" / NAMESPACE / name).read_bytes() == b"rows"
    found = files.find(name)
    assert found is not None
    assert found.st_size == 4
    assert here(files) == {name}
    assert audit_of(tier) == []


def test_a_file_that_is_broken_off_leaves_nothing(tier: Tier) -> None:
    files = index_of(tier)
    with pytest.raises(KeyError), files.new_file(ROWS, 4):
        raise KeyError
    assert here(files) == set()


def test_files_count_for_the_budget_and_are_not_evicted(make_tier: MakeTier) -> None:
    nbytes = len(entry(key_at(0)))
    tier = make_tier(budget_bytes=10 * nbytes)
    for number in range(6):
        tier.writer.publish(key_at(number), [entry(key_at(0))])
    index_of(tier).write(ROWS, [bytes(6 * nbytes)])
    usage = usage_of(tier)
    assert usage.index_bytes == 6 * nbytes
    assert usage.total_bytes == usage.entry_bytes + 6 * nbytes <= 10 * nbytes
    assert running_total(tier) >= usage.total_bytes
    assert len(usage.entries) < 6
    for number in range(10, 20):
        tier.writer.publish(key_at(number), [entry(key_at(0))])
    assert usage_of(tier).total_bytes <= 10 * nbytes
    assert usage_of(tier).index_bytes == 6 * nbytes


def test_files_of_a_model_that_nobody_used_for_a_week_go_and_nothing_else(tier: Tier) -> None:
    places: dict[int, NodeFolder] = {}
    for days in (6, 8, 9):
        places[days] = files = index_of(tier, f"tiny-gemma3-{days:016x}")
        for name in (ROWS, FILTER):
            files.write(name, [b"rows"])
        claim = files.try_claim("refresh")
        assert claim is not None
        files.release(claim)
        if days == 9:
            (files.path / "notes.txt").write_text("mine")
        used_s = time.time() - days * DAY_S
        os.utime(files.path, (used_s, used_s))
    ours = index_of(tier)
    ours.write(ROWS, [b"rows"])
    os.utime(ours.path, (0, 0))
    ours.touch(ROWS)
    ours.remove_unused()
    assert here(ours) == {ROWS}
    assert here(places[6]) == {ROWS, FILTER, "lock-refresh"}
    assert not places[8].path.exists()
    assert here(places[9]) == {"notes.txt"}
    outside = NodeFolder(places[6].path)
    os.utime(places[6].path, (0, 0))
    outside.remove_unused()  # such as a command's: it is in no tier
    assert here(ours) == {ROWS}
    assert here(places[6]) == {ROWS, FILTER, "lock-refresh"}
    (places[9].path / "notes.txt").unlink()


def test_a_full_disk_is_an_error_and_leaves_nothing(make_tier: MakeTier, small_disk: Path) -> None:
    tier = make_tier(small_disk)
    with pytest.raises(TierError):
        index_of(tier).write(ROWS, [bytes(2 << 20)])
    assert here(index_of(tier)) == set()
    assert audit_of(tier) == []


def test_an_emptied_cache_is_made_again(tier: Tier) -> None:
    files = index_of(tier)
    files.write(ROWS, [b"rows"])
    os.unlink(files.rows_path(SNAPSHOT))
    for folder in (files.path, files.path.parent):
        os.rmdir(folder)
    files.write(ROWS, [b"rows"])
    assert files.find(ROWS) is not None
    assert audit_of(tier) == []


def test_foreign_files_are_complained_about(make_tier: MakeTier) -> None:
    tier = make_tier()
    files = index_of(tier)
    files.write(ROWS, [b"rows"])
    claim = files.try_claim("make")
    assert claim is not None
    files.add_missing([bytes(16)])
    foreign = files.path / "notes.txt"
    foreign.write_text("mine")
    assert [str(foreign) in complaint for complaint in audit_of(tier)] == [True]
    files.release(claim)

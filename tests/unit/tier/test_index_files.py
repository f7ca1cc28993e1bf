# SPDX-License-Identifier: Apache-2.0
"""The index's files: whole or absent, counted, shown, and not evicted while they are in use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.index.local import OVERLAY, NodeFolder
from s3ec.index.names import SnapshotName
from s3ec.tier import Tier
from tests.support.on_disk import audit_of, running_total, usage_of
from tests.unit.tier.cases import (
    HOUR_S,
    NAMESPACE,
    SIZE,
    MakeTier,
    entry,
    fill,
    index_of,
    key_at,
    left,
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
    assert usage.index_nbytes == 6 * nbytes
    assert usage.total_nbytes == usage.nbytes + 6 * nbytes <= 10 * nbytes
    assert running_total(tier) >= usage.total_nbytes
    assert usage.entries < 6
    for number in range(10, 20):
        tier.writer.publish(key_at(number), [entry(key_at(0))])
    assert usage_of(tier).total_nbytes <= 10 * nbytes
    assert usage_of(tier).index_nbytes == 6 * nbytes


def stock_index(tier: Tier, number: int, nbytes: int, *, unused_s: float) -> NodeFolder:
    """The index of another model, which no process has used for so long."""
    files = index_of(tier, f"tiny-gemma3-{number:016x}")
    for name in (ROWS, FILTER):
        files.write(name, [bytes(nbytes // 2)])
    used_s = time.time() - unused_s
    os.utime(files.path, (used_s, used_s))
    return files


def test_index_that_nobody_uses_any_more_goes_before_any_entry(
    make_tier: MakeTier, root: Path, counters: Counters
) -> None:
    tier = make_tier(budget_bytes=20 * SIZE)
    unused = [stock_index(tier, days, 4 * SIZE, unused_s=days * DAY_S) for days in (8, 30, 9)]
    used = stock_index(tier, 6, 4 * SIZE, unused_s=6 * DAY_S)
    fill(tier, *range(4))
    assert [len(here(files)) for files in (*unused, used)] == [2, 2, 2, 2]
    fill(tier, 4)  # 21 of 20: down to 18
    assert [len(here(files)) for files in (*unused, used)] == [2, 0, 2, 2]
    fill(tier, *range(5, 16))
    assert [len(here(files)) for files in (*unused, used)] == [0, 0, 0, 2]
    assert left(tier, 16) == set(range(16))
    assert counters.get("tier.evicted") == 0
    assert running_total(tier) == usage_of(tier).total_nbytes
    assert len(list((root / "v1" / "index").iterdir())) == 1
    fill(tier, *range(16, 40))
    assert len(here(used)) == 2
    assert audit_of(tier) == []


def test_index_that_is_touched_is_in_use(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    files = stock_index(tier, 1, 4 * SIZE, unused_s=8 * DAY_S)
    files.touch(ROWS)
    fill(tier, *range(20))
    assert len(here(files)) == 2
    assert usage_of(tier).total_nbytes <= 10 * SIZE


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


def test_a_task_is_claimed_by_one_at_a_time(make_tier: MakeTier) -> None:
    first, second = index_of(make_tier()), index_of(make_tier())
    claim = first.try_claim("make")
    assert claim is not None
    assert second.try_claim("make") is None
    other = second.try_claim("refresh")
    assert other is not None
    first.release(claim)
    again = second.try_claim("make")
    assert again is not None
    second.release(again)
    second.release(other)

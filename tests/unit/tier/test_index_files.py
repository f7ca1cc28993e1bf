# SPDX-License-Identifier: Apache-2.0
"""The index's files: whole or absent, counted, shown, and not evicted while they are in use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.tier import IndexFiles, Tier
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    HOUR_S,
    NAMESPACE,
    OTHER_NAMESPACE,
    SIZE,
    MakeTier,
    entry,
    fill,
    key_at,
    left,
    temps_below,
)

SHARD = "base/000000000007-0123456789abcdef/00-ff.safetensors"
DELTA = "delta/01ARZ3NDEKTSV4RRFFQ69G5FAV.safetensors"
DAY_S = 24 * HOUR_S


def write(files: IndexFiles, name: str, body: bytes = b"rows") -> str:
    files.write(name, body)
    return files.path(name)


@pytest.mark.parametrize("name", [SHARD, DELTA])
def test_a_file_is_there_whole_under_its_name(tier: Tier, root: Path, name: str) -> None:
    files = tier.open_index()
    assert files.find(name) is None
    path = write(files, name)
    assert path == files.path(name) == str(root / "v1" / "index" / NAMESPACE / name)
    assert Path(path).read_bytes() == b"rows"
    found = files.find(name)
    assert found is not None
    assert (found.name, found.nbytes) == (name, 4)
    assert list(files.walk()) == [found]
    assert not files.is_doubtful(found)


def test_small_files_are_read_whole_and_nothing_else_is(
    tier: Tier, root: Path, tmp_path: Path
) -> None:
    files = tier.open_index()
    assert files.read(DELTA, max_bytes=4) is None
    path = Path(write(files, DELTA))
    assert files.read(DELTA, max_bytes=4) == b"rows"
    with pytest.raises(CorruptEntryError, match="too large"):
        files.read(DELTA, max_bytes=3)
    before = open_below(root)
    path.unlink()
    path.symlink_to(tmp_path / "else")
    (tmp_path / "else").write_bytes(b"else")
    with pytest.raises(CorruptEntryError, match="regular"):
        files.read(DELTA, max_bytes=4)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptEntryError, match="regular"):
        files.read(DELTA, max_bytes=1 << 20)
    path.rmdir()
    assert open_below(root) == before


def test_a_file_that_comes_in_parts_is_there_after_its_last_good_one(
    tier: Tier, root: Path
) -> None:
    files = tier.open_index()
    seen: list[bytes] = []
    checksum = codec.checksum(b"rows")

    def look(path: str) -> None:
        seen.append(Path(path).read_bytes())

    for parts, good in (([b"ro"], False), ([b"ro", b"wS"], False), ([b"ro", b"ws"], True)):
        incoming = files.begin(SHARD, "one of it", 4, checksum, look)
        for number, part in enumerate(parts):
            assert list(files.walk()) == []
            incoming.put([(2 * number, part)])
        if good:
            incoming.commit()
        else:
            with pytest.raises(CorruptEntryError, match="one of it: wrong checksum"):
                incoming.commit()
        assert temps_below(root) == set()
    assert seen == [b"rows"]
    assert files.find(SHARD) is not None


@pytest.mark.parametrize(
    "name",
    ["", "x", "delta/", "delta/../x.json", "../delta/x.json", "/delta/x.json", "head/1.json",
     "base/7-0/x.json", "delta/a/b.json", "delta/.tmp-1-0123456789abcdef", "delta/x\n.json"],
)  # fmt: skip
def test_names_that_the_index_does_not_have_are_refused(tier: Tier, name: str) -> None:
    files = tier.open_index()
    with pytest.raises(ValueError, match="name of the index"):
        files.path(name)


def test_removed_files_take_their_folder_along(tier: Tier, root: Path) -> None:
    files = tier.open_index()
    other = SHARD.replace("00-ff", "00-7f")
    write(files, SHARD)
    write(files, other)
    files.remove(SHARD)
    assert [each.name for each in files.walk()] == [other]
    files.remove(other)
    files.remove(other)
    assert list((root / "v1" / "index" / NAMESPACE / "base").iterdir()) == []


def test_an_open_file_survives_its_removal(tier: Tier) -> None:
    files = tier.open_index()
    with open(write(files, SHARD), "rb") as file:
        files.remove(SHARD)
        assert file.read() == b"rows"


def test_namespaces_have_files_of_their_own(make_tier: MakeTier, tier: Tier) -> None:
    write(tier.open_index(), SHARD)
    assert list(make_tier(namespace=OTHER_NAMESPACE).open_index().walk()) == []


def test_files_count_for_the_budget_and_are_not_evicted(make_tier: MakeTier) -> None:
    nbytes = len(entry(key_at(0)))
    tier = make_tier(budget_bytes=10 * nbytes)
    for number in range(6):
        tier.writer.publish(key_at(number), [entry(key_at(0))])
    write(tier.open_index(), SHARD, bytes(6 * nbytes))
    usage = usage_of(tier)
    assert usage.index_nbytes == 6 * nbytes
    assert usage.total_nbytes == usage.nbytes + 6 * nbytes <= 10 * nbytes
    assert running_total(tier) >= usage.total_nbytes
    assert tier.open_index().find(SHARD) is not None
    assert usage.entries < 6
    for number in range(10, 20):
        tier.writer.publish(key_at(number), [entry(key_at(0))])
    assert usage_of(tier).total_nbytes <= 10 * nbytes
    assert usage_of(tier).index_nbytes == 6 * nbytes


def stock_index(make_tier: MakeTier, number: int, nbytes: int, *, unused_s: float) -> IndexFiles:
    """The index of another model, which no process has used for so long."""
    files = make_tier(namespace=f"tiny-gemma3-{number:016x}").open_index()
    for name in (SHARD, DELTA):
        write(files, name, bytes(nbytes // 2))
    used_s = time.time() - unused_s
    os.utime(Path(files.path("delta/0.x")).parents[1], (used_s, used_s))
    return files


def test_index_that_nobody_uses_any_more_goes_before_any_entry(
    make_tier: MakeTier, root: Path, counters: Counters
) -> None:
    tier = make_tier(budget_bytes=20 * SIZE)
    unused = [stock_index(make_tier, days, 4 * SIZE, unused_s=days * DAY_S) for days in (8, 30, 9)]
    used = stock_index(make_tier, 6, 4 * SIZE, unused_s=6 * DAY_S)
    fill(tier, *range(4))
    assert [len(list(files.walk())) for files in (*unused, used)] == [2, 2, 2, 2]
    fill(tier, 4)  # 21 of 20: down to 18
    assert [len(list(files.walk())) for files in (*unused, used)] == [2, 0, 2, 2]
    fill(tier, *range(5, 16))
    assert [len(list(files.walk())) for files in (*unused, used)] == [0, 0, 0, 2]
    assert left(tier, 16) == set(range(16))
    assert counters.get("tier.evicted") == 0
    assert running_total(tier) == usage_of(tier).total_nbytes
    assert len(list((root / "v1" / "index").iterdir())) == 1
    fill(tier, *range(16, 40))
    assert len(list(used.walk())) == 2
    assert audit_of(tier) == []


def test_index_that_is_touched_is_in_use(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    files = stock_index(make_tier, 1, 4 * SIZE, unused_s=8 * DAY_S)
    files.touch()
    fill(tier, *range(20))
    assert len(list(files.walk())) == 2
    assert usage_of(tier).total_nbytes <= 10 * SIZE


def test_index_that_is_not_here_can_be_touched(tier: Tier, root: Path) -> None:
    tier.open_index().touch()
    assert not (root / "v1" / "index" / NAMESPACE).exists()


def test_index_that_nobody_uses_stays_while_there_is_room(make_tier: MakeTier) -> None:
    tier = make_tier()
    files = stock_index(make_tier, 1, SIZE, unused_s=8 * DAY_S)
    fill(tier, *range(10))
    make_room(tier)
    assert len(list(files.walk())) == 2


def test_a_file_larger_than_the_budget_is_refused(make_tier: MakeTier) -> None:
    files = make_tier(budget_bytes=1000).open_index()
    with pytest.raises(TierError, match="1001"):
        files.write(SHARD, bytes(1001))


def test_a_full_disk_is_an_error_and_leaves_nothing(make_tier: MakeTier, small_disk: Path) -> None:
    tier = make_tier(small_disk)
    files = tier.open_index()
    with pytest.raises(TierError):
        files.write(SHARD, bytes(2 << 20))
    assert audit_of(tier) == []


def test_an_emptied_cache_is_made_anew(tier: Tier, root: Path) -> None:
    files = tier.open_index()
    write(files, SHARD)
    files.remove(SHARD)
    for folder in ("base", ""):
        os.rmdir(root / "v1" / "index" / NAMESPACE / folder)
    write(files, SHARD)
    assert files.find(SHARD) is not None


def test_foreign_files_are_complained_about(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    write(tier.open_index(), SHARD)
    foreign = root / "v1" / "index" / NAMESPACE / "notes.txt"
    foreign.write_text("mine")
    assert [str(foreign) in complaint for complaint in audit_of(tier)] == [True]


def test_a_file_from_before_this_boot_is_doubtful_until_it_is_trusted(tier: Tier) -> None:
    files = tier.open_index()
    os.utime(write(files, SHARD), (1, 1))
    found = files.find(SHARD)
    assert found is not None
    assert files.is_doubtful(found)
    files.trust(SHARD)
    found = files.find(SHARD)
    assert found is not None
    assert not files.is_doubtful(found)


def test_a_task_is_claimed_by_one_at_a_time(make_tier: MakeTier) -> None:
    first, second = make_tier().open_index(), make_tier().open_index()
    claim = first.try_claim("compact")
    assert claim is not None
    assert second.try_claim("compact") is None
    other = second.try_claim(SHARD)
    assert other is not None
    first.claims.release(claim)
    again = second.try_claim("compact")
    assert again is not None
    second.claims.release(again)
    second.claims.release(other)


def test_a_tier_that_is_not_open_has_no_index(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.close()
    with pytest.raises(TierError):
        tier.open_index()

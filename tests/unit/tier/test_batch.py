# SPDX-License-Identifier: Apache-2.0
"""Several calls of one thread together: counted, told of and looked at once, and no less safe."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier.files import Batch
from tests.support.file_calls import file_calls_of
from tests.support.on_disk import audit_of, running_total, usage_of
from tests.unit.tier.cases import SIZE, MakeTier, entry, even, fill, left, opened, read, refusing


def test_what_is_published_together_is_counted_once_at_the_end(make_tier: MakeTier) -> None:
    tier = make_tier()
    fill(tier, 0)
    with Batch():
        fill(tier, 1)
        with pytest.MonkeyPatch.context() as patch:
            calls = file_calls_of(threading.get_ident(), patch)
            fill(tier, *range(2, 10))
        assert running_total(tier) == SIZE
    assert running_total(tier) == 10 * SIZE == usage_of(tier).nbytes
    assert [call for call in calls if call.startswith("lstat")] == []
    assert audit_of(tier) == []


def test_other_threads_do_not_take_part(make_tier: MakeTier) -> None:
    tier = make_tier()
    with Batch():
        fill(tier, 0)
        other = threading.Thread(target=fill, args=(tier, 1))
        other.start()
        other.join()
        assert running_total(tier) == SIZE
    assert running_total(tier) == 2 * SIZE


def test_budget_is_kept_inside_too(make_tier: MakeTier) -> None:
    tier = make_tier(budget_bytes=10 * SIZE)
    with Batch():
        for number in range(40):
            fill(tier, number)
            assert usage_of(tier).nbytes <= 10 * SIZE
    assert len(left(tier, 40)) <= 10
    assert audit_of(tier) == []


def test_folder_that_vanishes_inside_is_made_again(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    with Batch():
        fill(tier, 0)
        shutil.rmtree(root)
        fill(tier, 0)
        assert read(opened(tier, even(0)), even(0)) == entry(even(0))
        shutil.rmtree(tier.folders.objects)
        fill(tier, 1)
    assert left(tier, 2) == {1}
    assert audit_of(tier) == []


def test_spoiled_folder_is_refused_by_the_next_ones(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    with Batch():
        fill(tier, 0)
    (root / "v1").chmod(0o777)
    with Batch(), pytest.raises(TierError, match="writable by other users"):
        fill(tier, 1)
    (root / "v1").chmod(0o700)
    with Batch():
        fill(tier, 1)
    assert left(tier, 2) == {0, 1}


def test_all_are_told_of_at_the_end(make_tier: MakeTier) -> None:
    tier = make_tier()
    told = threading.Event()
    heard: list[bytes] = []

    def hear(digests: list[bytes]) -> None:
        heard.extend(digests)
        if len(heard) == 5:
            told.set()

    reader = tier.follow_news(hear)
    reader.start()
    with Batch():
        fill(tier, *range(5))
    assert told.wait(20)
    assert heard == [even(number).digest for number in range(5)]


def test_a_block_in_which_nothing_happens_writes_nothing(
    make_tier: MakeTier, root: Path, counters: Counters
) -> None:
    tier = make_tier()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with Batch():
        assert not tier.entries.contains(even(0))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert counters.get("tier.errors") == 0


def test_batch_whose_end_fails_leaves_no_look_behind(make_tier: MakeTier, root: Path) -> None:
    tier, batch = make_tier(), Batch()

    def fill_and_spoil_the_end() -> None:
        with batch:
            fill(tier, 0)
            batch.share("other", list[int], refusing(errno.EIO, "a fault of ours"))

    with pytest.raises(OSError, match="fault of ours"):
        fill_and_spoil_the_end()
    assert running_total(tier) == SIZE  # what fails keeps nothing else from its end
    (root / "v1").chmod(0o777)
    with pytest.raises(TierError, match="writable by other users"):
        fill(tier, 0)
    (root / "v1").chmod(0o700)


def test_what_is_shared_is_made_once_and_ended_once() -> None:
    batch, ended = Batch(), []
    with batch:
        assert batch.share("one", list[int], ended.append) is batch.share(
            "one", list[int], ended.append
        )
        batch.share("other", list[int], ended.append).append(1)
        assert not ended
    assert sorted(ended) == [[], [1]]

# SPDX-License-Identifier: Apache-2.0
"""Many processes and threads on one folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.tier.files import free_bytes
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, evict, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    MakeTier,
    child,
    entry,
    key_at,
    opened,
    read,
    temps_below,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]  # many at once


def test_sixteen_processes_publish_and_open_one_key(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    with ExitStack() as stack:
        others = [stack.enter_context(child("race", root, 12)) for _ in range(16)]
        for other in others:
            assert other.hear() == "ready"
        for other in others:
            other.say()
        for other in others:
            assert other.hear() == "done"
            other.end()
    assert audit_of(tier) == []
    assert usage_of(tier).entries == 1
    assert usage_of(tier).held_nbytes == 0
    assert temps_below(root) == set()


def test_evictors_of_other_processes_never_take_a_readers_bytes(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    keys = [key_at(number) for number in range(8)]
    budget_bytes = 4 * len(entry(keys[0]))
    for key in keys:
        tier.writer.publish(key, [entry(key)])
    held = {key: opened(tier, key) for key in keys[:4]}
    with ExitStack() as stack:
        others = [
            stack.enter_context(child("churn", root, budget_bytes, first, 100))
            for first in (1000, 2000)
        ]
        for other in others:
            assert other.hear() == "ready"
            other.say()
        # Meanwhile: files that are opened and closed, of entries that the others evict.
        for turn in range(400):
            key = keys[turn % len(keys)]
            if not tier.entries.contains(key):
                tier.writer.publish(key, [entry(key)])
            one = tier.entries.open(key)
            if one is not None:
                assert read(one, key) == entry(key)
            for kept in held.values():
                assert os.fstat(kept.fd).st_size == kept.nbytes
        for other in others:
            assert other.hear() == "done"
            other.end()
    for key, kept in held.items():
        assert read(kept, key) == entry(key)
    assert audit_of(tier) == []


ROWS = 1000
LARGE = len(entry(key_at(0), rows=ROWS))  # 64 KB, and all about the same
PAGE = 4096  # files take whole ones, and folders one each


def flood(root: Path, budget_bytes: int, min_free_bytes: int, look: Callable[[], None]) -> int:
    """Four processes publish at once while ``look`` looks on; answers how many were refused."""
    with ExitStack() as stack:
        others = [
            stack.enter_context(child("flood", root, budget_bytes, min_free_bytes, ROWS, number))
            for number in range(4)
        ]
        for other in others:
            assert other.hear() == "ready"
        for other in others:
            other.say()
        with ThreadPoolExecutor(1) as pool:
            hearing = pool.submit(lambda: [int(other.hear()) for other in others])
            while not hearing.done():
                look()
        for other in others:
            other.say()
            other.end()
        return sum(hearing.result())


def test_four_processes_that_publish_at_once_keep_the_budget(
    make_tier: MakeTier, large_disk: Path
) -> None:
    budget_bytes = 40 * LARGE
    tier = make_tier(large_disk, budget_bytes=budget_bytes)
    free = free_bytes(large_disk)
    seen: list[int] = []
    # A walk takes time, in which others evict and publish; the disk tells all in one moment.
    refused = flood(large_disk, budget_bytes, 0, lambda: seen.append(free - free_bytes(large_disk)))
    assert refused == 0
    # Four are in flight: each may have been let through before the others were counted.
    assert max(seen) <= budget_bytes + 4 * LARGE + 44 * 2 * PAGE
    assert max(seen) > budget_bytes // 2
    assert make_room(tier, budget_bytes=budget_bytes) >= 0
    assert running_total(tier) == usage_of(tier).total_nbytes <= budget_bytes
    assert audit_of(tier) == []


def test_four_processes_that_publish_at_once_keep_the_free_space_floor(
    make_tier: MakeTier, large_disk: Path
) -> None:
    min_free_bytes = 20 * LARGE
    tier = make_tier(large_disk, min_free_bytes=min_free_bytes)
    seen: list[int] = []
    flood(large_disk, 1 << 30, min_free_bytes, lambda: seen.append(free_bytes(large_disk)))
    assert min(seen) >= min_free_bytes - 4 * (LARGE + 3 * PAGE)
    assert min(seen) < 2 * min_free_bytes
    assert audit_of(tier) == []


def test_threads_share_one_tier(make_tier: MakeTier, counters: Counters) -> None:
    size = len(entry(key_at(0)))
    tier = make_tier(budget_bytes=12 * size)
    start = threading.Barrier(8)

    def work(worker: int) -> int:
        start.wait()
        seen = 0
        for turn in range(60):
            key = key_at((worker * 7 + turn) % 24)
            tier.writer.publish(key, [entry(key)])
            one = tier.entries.open(key)
            if turn % 5 == worker % 5:
                make_room(tier, size, budget_bytes=12 * size, counters=counters)
            if turn % 11 == worker:
                evict(tier, key)
            if one is not None:
                assert read(one, key) == entry(key)
                seen += 1
        return seen

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 240
    make_room(tier, budget_bytes=12 * size)
    assert usage_of(tier).total_nbytes <= 12 * size
    assert open_below(tier.folders.objects) == []
    assert running_total(tier) == usage_of(tier).total_nbytes
    assert counters.get("tier.errors") == 0
    assert audit_of(tier) == []


def test_publishing_while_another_thread_closes_ends_in_a_tier_error(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    refused = threading.Event()

    def work() -> None:
        for number in range(100_000):
            key = key_at(number % 10)
            try:
                tier.writer.publish(key, [entry(key)])
            except TierError:
                refused.set()
                return
            tier.entries.open(key)

    thread = threading.Thread(target=work)
    thread.start()
    tier.close()
    thread.join()
    assert refused.is_set()
    assert open_below(root) == []
    assert audit_of(tier) == []

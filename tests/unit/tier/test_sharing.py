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

from s3ec.errors import TierError
from s3ec.tier.files import free_bytes
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    MakeTier,
    child,
    entry,
    key_at,
    opened,
    read,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]  # many at once


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
    assert running_total(tier) == usage_of(tier).total_bytes <= budget_bytes
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

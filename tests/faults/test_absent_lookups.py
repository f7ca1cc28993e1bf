# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of lookups of pictures that nobody stored: memory stays, the bucket is not asked."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.index.reader import ManifestIndex
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import key_at
from tests.faults.indexed import Bucket, noding, refresh, run_rebuild, run_union
from tests.faults.lookups import Lookups
from tests.support.clock import Clock

_MINUTES = 10
_STOCKED = range(4)
_ANNOUNCED = range(1000, 4000)  # a filter of few keys is never wrong
_FIRST_ABSENT = 10_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(ManifestIndex.__init__.__kwdefaults__, "clock", clock)
    return clock


@pytest.fixture
def proxy(local_s3: LocalS3, signed: None) -> Iterator[FaultProxy]:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield proxy


def fill(local_s3: LocalS3, name: str, proxy: FaultProxy, folder: Path) -> Bucket:
    bucket = Bucket(local_s3, name, "corpus", proxy.url)
    bucket.stock(*_STOCKED)
    with noding(bucket.settings(folder / "maker")) as node:
        run_rebuild(node, ago_s=10)
        bucket.announce(*_ANNOUNCED)
        assert run_union(node) is not None
    return bucket


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_lookups_of_what_nobody_stored_cost_no_request_and_no_memory(
    local_s3: LocalS3, s3_bucket: str, proxy: FaultProxy, tmp_path: Path, clock: Clock
) -> None:
    """Each picture another one, as from clients that send what they please."""
    bucket = fill(local_s3, s3_bucket, proxy, tmp_path)
    rounds, each = 120, 1000
    with noding(bucket.settings(tmp_path / "cache")) as node:
        refresh(node)
        proxy.requests.clear()
        lookups = Lookups(node, clock)
        resident = []
        for number in range(rounds):
            first = _FIRST_ABSENT + number * each
            lookups.ask(range(first, first + each))
            clock.now_s += _MINUTES * 60 / rounds
            if number % 10 == 9:
                resident.append(resident_bytes())
        assert proxy.requests == []
        assert not lookups.fetched
        # The memory of recent keys is full after 65,536 of them, which is before the eighth look.
        # The machine may add to the memory at any time, but hardly between all looks.
        grown = [after - before for before, after in itertools.pairwise(resident[7:])]
        assert min(grown) < 3 * 2**20
        assert node.counters.get("internal_errors") == 0
        assert not any(node.index.maybe_contains(key_at(n)) for n in range(*_absent(100)))


def _absent(count: int) -> tuple[int, int]:
    return _FIRST_ABSENT, _FIRST_ABSENT + count

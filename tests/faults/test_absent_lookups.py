# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of lookups of pictures that nobody stored: memory stays, the bucket is not asked."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from s3ec.index.missing import NEGATIVE_TTL_S
from s3ec.index.reader import ManifestIndex

from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.node import Node
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import ROWS, identifier_at, key_at
from tests.faults.indexed import Bucket, noding, refresh, run_compact, run_rebuild
from tests.support.clock import Clock
from tests.support.waiting import eventually

_MINUTES = 10
_STOCKED = range(4)
_ANNOUNCED = range(1000, 4000)  # a filter of few keys is never wrong
_FIRST_ABSENT = 10_000


class Lookups:
    """A scheduler that is asked for one picture by each of its requests."""

    def __init__(self, node: Node, clock: Clock) -> None:
        role = Role(
            producer=True,
            consumer=True,
            window_tokens=2048,
            ranks=1,
            steps_in_flight=1,
            defer_timeout_s=1e9,
        )
        self.half = SchedulerHalf(
            role,
            index=node.index,
            local=node.local,
            prefetcher=node.prefetcher,
            residents=node.residents,
            store=node.breaker,
            disk=node.loop.watch,
            needs_embedding=lambda _: False,
            placeholder_of=lambda _: {},
            counters=node.counters,
            clock=clock,
        )
        self.fetched: Counter[int] = Counter()

    def ask(self, numbers: Iterable[int]) -> None:
        """One lookup each; those that are worth a fetch wait until it has ended."""
        waiting = [n for n in numbers if not self._ensure(n)]
        self.fetched.update(waiting)
        self._step()
        for number in waiting:
            eventually(lambda number=number: self._ensure(number))  # type: ignore[misc]
            self.half.request_finished(SimpleNamespace(request_id=f"r{number}"))
        self._step()

    def _ensure(self, number: int) -> bool:
        position = SimpleNamespace(offset=0, length=ROWS, get_num_embeds=lambda: ROWS)
        feature = SimpleNamespace(
            identifier=identifier_at(number), modality="image", data={}, mm_position=position
        )
        request: Any = SimpleNamespace(
            request_id=f"r{number}", mm_features=[feature], num_prompt_tokens=ROWS
        )
        return self.half.ensure_cache_available(request, 0)

    def _step(self) -> None:
        self.half.build_connector_meta((), scheduled_tokens=1)


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
        run_rebuild(node)
        bucket.announce(*_ANNOUNCED)
        assert run_compact(node) is not None
    return bucket


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def asked_for_objects(proxy: FaultProxy) -> Counter[str]:
    targets = (request.target for request in proxy.requests if "/objects/" in request.target)
    return Counter(target.rpartition("/")[2].partition("?")[0] for target in targets)


def test_lookups_of_what_nobody_stored_cost_no_request_and_no_memory(
    local_s3: LocalS3, s3_bucket: str, proxy: FaultProxy, tmp_path: Path, clock: Clock
) -> None:
    """Each picture another one, as from clients that send what they please."""
    bucket = fill(local_s3, s3_bucket, proxy, tmp_path)
    rounds, each = 120, 1000
    with noding(bucket.settings(tmp_path / "cache", index="exact")) as node:
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


def test_what_a_filter_is_wrong_about_costs_one_request_for_each_negative_ttl(
    local_s3: LocalS3, s3_bucket: str, proxy: FaultProxy, tmp_path: Path, clock: Clock
) -> None:
    """Some pictures over and over again, as where a document is asked about by many."""
    bucket = fill(local_s3, s3_bucket, proxy, tmp_path)
    rounds, popular, others = 40, 300, 100
    with noding(bucket.settings(tmp_path / "cache", index="bloom", hedge="false")) as node:
        refresh(node)
        proxy.requests.clear()
        lookups = Lookups(node, clock)
        for number in range(rounds):
            first = _FIRST_ABSENT + popular + number * others
            lookups.ask(range(*_absent(popular)))
            lookups.ask(range(first, first + others))
            refresh(node)
            clock.now_s += _MINUTES * 60 / rounds
        assert lookups.fetched  # the fault
        gets = asked_for_objects(proxy)
        ttls = _MINUTES * 60 / NEGATIVE_TTL_S
        assert max(gets.values()) <= ttls
        again = {n: count for n, count in lookups.fetched.items() if n < _FIRST_ABSENT + popular}
        assert all(gets[key_at(n).name.rpartition("/")[2]] >= ttls / 2 for n in again)
        assert sum(gets.values()) == node.counters.get("fetch.absent")
        assert node.counters.get("index.vanished") == node.counters.get("fetch.absent")
        assert len(gets) < 0.06 * (popular + rounds * others)

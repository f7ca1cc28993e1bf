# SPDX-License-Identifier: Apache-2.0
"""Ranks that are asked whether they see the scheduler's tier: both halves, with real folders."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3ec.connector import saves
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.shared_tier import SharedTier, tier_id
from s3ec.connector.vllm_config import Role
from s3ec.identity import Namespace
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryBucket
from s3ec.tier.files import Folders
from tests.support.clock import Clock
from tests.support.waiting import DEADLINE_S
from tests.unit.connector.processes import Process
from tests.unit.connector.scheduling import (
    feature,
    has_no_pixels,
    identifier_of,
    key_of,
    request,
)

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
WorkerHalf = pytest.importorskip("s3ec.connector.worker").WorkerHalf

NAMESPACE = Namespace.from_descriptor({"model": "tiny"})
ROWS, WIDTH = 4, 8


def tensor_of(text: str) -> Any:
    seed = int(identifier_of(text)[:8], 16)
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def entry(identifier: str, tensor: Any, **more: Any) -> bytes:
    header = saves.describe(
        tensor, modality="image", identifier=identifier, namespace=NAMESPACE.name, **more
    )
    return b"".join(saves.encode(header, tensor))


class RankRig:
    """One rank's process: a node with a folder of its own choice, and the worker half."""

    def __init__(self, rank: int, folder: Path, bucket: MemoryBucket) -> None:
        self.rank = rank
        process = Process(folder, shared=bucket, cache_dir=folder)
        self.node = process.node
        self.cache: dict[str, Any] = {}
        self.worker = WorkerHalf(
            self.node,
            saves=None,
            device=lambda: torch.device("cpu"),
            rank=lambda: rank,
            encoder=lambda: "cpu x1",
            drain_timeout_s=1,
        )

    def execute(self, plan: StepPlan) -> WorkerReport | None:
        """What the model runner does in one step."""
        if plan.tier is not None:
            self.worker.look_for_tier(plan.tier)
        self.worker.start_load_caches(self.cache, plan)
        report: WorkerReport | None = self.worker.report()
        return report


def node_on(folder: Path, bucket: MemoryBucket) -> Node:
    return Process(folder, shared=bucket, cache_dir=folder).node


class Engine:
    """A scheduler and ranks with folders of their own choice; V1 unless told otherwise."""

    def __init__(self, here: Path, folders: list[Path], *, v2: bool = False) -> None:
        self.bucket = MemoryBucket()
        self.node = node_on(here, self.bucket)
        self.ranks = [RankRig(rank, path, self.bucket) for rank, path in enumerate(folders)]
        self.v2 = v2  # its workers are called in steps without tokens
        self.clock = Clock()
        role = Role(
            producer=True,
            consumer=True,
            window_tokens=100,
            ranks=len(folders),
            steps_in_flight=1,
            defer_timeout_s=2.0,
        )
        self.half = SchedulerHalf(
            role,
            index=self.node.index,
            local=self.node.local,
            prefetcher=self.node.prefetcher,
            residents=self.node.residents,
            store=self.node.breaker,
            disk=self.node.loop.watch,
            needs_embedding=has_no_pixels,
            placeholder_of=lambda _: {},
            counters=self.node.counters,
            shared_tier=SharedTier(len(folders), tier_id(self.node.tier)),
            clock=self.clock,
        )
        self.node.loop.run(self.node.records.settle("image", Record(WIDTH, "bfloat16")), 10)

    def close(self) -> None:
        for rank in self.ranks:
            rank.node.close(DEADLINE_S)
        self.node.close(DEADLINE_S)

    def stock(self, *texts: str) -> None:
        for text in texts:
            key = key_of(identifier_of(text))
            blob = entry(identifier_of(text), tensor_of(text))
            self.bucket.objects[self.node.layout.object(key)] = blob
            self.node.index.add(key)

    def ask(self, asker: Any) -> bool:
        return self.half.ensure_cache_available(asker, 0)

    def schedule(self, asker: Any) -> list[bool]:
        granted = []
        for index, each in enumerate(asker.mm_features):
            granted.append(self.half.has_cache_item(each.identifier))
            self.half.update_state_after_alloc(asker, index)
        return granted

    def step(self, *, tokens: int = 10, silent: int | None = None) -> StepPlan:
        """One pass and its execution; plan and reports cross processes as vLLM sends them.

        Args:
            tokens: That are scheduled.
            silent: A rank whose report gets lost.
        """
        plan = self.half.build_connector_meta([], scheduled_tokens=tokens)
        if not tokens and not self.v2:
            return plan
        sent = pickle.dumps(plan)
        merged = WorkerReport()
        for rank in self.ranks:
            report = rank.execute(pickle.loads(sent))
            if report is not None and rank.rank != silent:
                merged.merge(pickle.loads(pickle.dumps(report)))
        self.half.update_connector_output(merged)
        return plan

    def step_until(
        self, condition: Callable[[], bool], what: str, *, silent: int | None = None
    ) -> None:
        """Busy steps, as while other requests decode."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"in vain: {what}"
            assert self.ask(request("another", feature("not in the corpus")))
            self.step(silent=silent)
            time.sleep(0.001)  # the fetching threads need the interpreter too

    def load(self, asker: Any) -> None:
        """Wait for what the request needs, schedule it, and check what every rank loaded."""
        self.step_until(lambda: self.ask(asker), "the request can be scheduled")
        assert all(self.schedule(asker))
        self.step()
        for rank in self.ranks:
            for each in asker.mm_features:
                assert each.identifier in rank.cache

    def item_state(self, text: str) -> str:
        item = self.half.tracker.items.get(identifier_of(text))
        return "gone" if item is None else item.state.name


@pytest.fixture(autouse=True)
def _disk_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the bucket would be asked instead where the machine is busy."""
    monkeypatch.setattr("s3ec.connector.loads.PATIENCE_S", 3600.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Two ranks beside the scheduler."""
    engine = Engine(tmp_path, [tmp_path, tmp_path])
    yield engine
    engine.close()


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[Engine]:
    """The second rank sees another folder."""
    engine = Engine(tmp_path / "here", [tmp_path / "here", tmp_path / "there"])
    yield engine
    engine.close()


def test_ranks_that_see_the_tier_load_what_the_scheduler_has_open(engine: Engine) -> None:
    engine.stock("a", "b")
    assert engine.step().tier is not None
    assert engine.step().tier is None  # once is enough
    asker = request("r", feature("a"), feature("b", 10))
    assert not engine.ask(asker)
    engine.load(asker)
    for rank in engine.ranks:
        for text in ("a", "b"):
            assert torch.equal(rank.cache[identifier_of(text)], tensor_of(text))
        assert rank.node.counters.get("load.failed") == 0
        assert rank.node.counters.get("fetch.ready") == 0


def test_nothing_is_granted_or_waited_for_before_every_rank_was_heard(engine: Engine) -> None:
    engine.stock("a")
    asker = request("r", feature("a"))
    assert engine.ask(asker)
    assert engine.schedule(asker) == [False]
    engine.step(silent=1)
    engine.step_until(
        lambda: engine.item_state("a") == "gone",
        "it has come all the same",
        silent=1,
    )
    engine.half.on_device.clear()
    later = request("later", feature("a"))
    assert engine.ask(later)
    assert engine.schedule(later) == [False]
    engine.step()
    engine.half.on_device.clear()
    engine.load(request("last", feature("a")))


def test_where_one_rank_sees_another_folder_nothing_is_granted_or_saved_and_one_line_says_so(
    parted: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    parted.stock("a")
    with caplog.at_level(logging.WARNING, "s3ec"):
        for _ in range(5):
            parted.step()
    (record,) = caplog.records
    assert "ranks 1 do not see the scheduler's `cache_dir`" in record.getMessage()
    asker = request("r", feature("a"), feature("new", 10))
    assert parted.ask(asker)
    assert parted.schedule(asker) == [False, False]
    plan = parted.step()
    assert (plan.loads, plan.saves, plan.tier) == ([], {}, None)


def test_without_pixels_a_request_fails_where_nothing_can_be_granted(parted: Engine) -> None:
    parted.stock("a")
    asker = request("r", feature("a", pixels=False))
    assert not parted.ask(asker)
    assert parted.half.take_unavailable_requests() == set()  # nobody knows yet
    parted.step()
    assert not parted.ask(asker)
    assert parted.half.take_unavailable_requests() == {"r"}


def test_without_pixels_a_request_waits_for_the_ranks_but_not_for_ever(engine: Engine) -> None:
    """The V1 runner calls no worker hook in a step without tokens, so nobody answers."""
    engine.stock("a")
    asker = request("r", feature("a", pixels=False))
    assert not engine.ask(asker)
    engine.step(tokens=0)
    assert not engine.ask(asker)
    assert engine.half.take_unavailable_requests() == set()
    engine.clock.now_s += NO_PIXELS_WAIT_S
    assert not engine.ask(asker)
    assert engine.half.take_unavailable_requests() == {"r"}


def test_where_workers_hear_of_steps_without_tokens_a_request_without_pixels_is_served(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, [tmp_path], v2=True)
    try:
        engine.stock("a")
        asker = request("r", feature("a", pixels=False))
        give_up_s = time.monotonic() + DEADLINE_S
        while not engine.ask(asker):
            assert time.monotonic() < give_up_s
            engine.step(tokens=0)
            time.sleep(0.001)
        assert engine.schedule(asker) == [True]
    finally:
        engine.close()


# -- what counts as one node -------------------------------------------------------------------


def shares(here: Path, there: Path, mark: Any = None) -> bool:
    bucket = MemoryBucket()
    scheduler, rank = node_on(here, bucket), RankRig(0, there, bucket)
    try:
        report = rank.execute(StepPlan(1, tier=mark or tier_id(scheduler.tier)))
        assert report is not None
        return report.sees_tier[0]
    finally:
        rank.node.close(DEADLINE_S)
        scheduler.close(DEADLINE_S)


def test_one_folder_is_shared_and_two_are_not(tmp_path: Path) -> None:
    assert shares(tmp_path / "a", tmp_path / "a")
    assert not shares(tmp_path / "a", tmp_path / "b")


def test_a_folder_under_two_names_is_shared_where_the_schedulers_name_works(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert shares(tmp_path / "link", tmp_path / "real")
    assert shares(tmp_path / "real", tmp_path / "link")


def test_a_folder_whose_name_does_not_exist_here_is_not_shared(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    node = node_on(tmp_path / "a", bucket)
    mark = tier_id(node.tier)
    node.close(DEADLINE_S)
    folder = mark.folder.replace("/a/", "/mounted-elsewhere/")
    moved = replace(mark, folder=folder)
    assert not shares(tmp_path / "a", tmp_path / "a", moved)


def test_a_folder_of_another_host_is_not_shared(tmp_path: Path) -> None:
    node = node_on(tmp_path / "a", MemoryBucket())
    try:
        mark = tier_id(node.tier)
        assert shares(tmp_path / "a", tmp_path / "a", mark)
        other = replace(mark, host="another kernel")
        assert not shares(tmp_path / "a", tmp_path / "a", other)
    finally:
        node.close(DEADLINE_S)


def test_a_rank_whose_own_disk_does_not_answer_is_asked_again(
    engine: Engine, tmp_path: Path
) -> None:
    """One fault of a moment is no other folder: the engine would go without a cache for good."""
    broken = engine.ranks[1].node.tier
    folders, broken.folders = broken.folders, Folders(tmp_path / "cannot be looked at")
    assert engine.step().tier is not None
    broken.folders = folders
    assert engine.step().tier is not None
    assert engine.step().tier is None
    engine.stock("a")
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.load(asker)

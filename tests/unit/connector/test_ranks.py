# SPDX-License-Identifier: Apache-2.0
"""Ranks on other nodes: the scheduler half, two worker halves, and a tier for each of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec.connector import saves
from s3ec.connector.item_tracker import LEASE_S, RETRY_AFTER_S
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.remote_ranks import Ranks
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.errors import UnavailableError
from s3ec.identity import Namespace
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.testing.fault_store import Fault, Gate
from s3ec.testing.memory_store import MemoryBucket
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
remote = pytest.importorskip("s3ec.connector.remote_ranks")

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
        self.node, self.faults = process.node, process.faults
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
        self.worker.start_load_caches(self.cache, self.worker.follow(plan))
        report: WorkerReport | None = self.worker.report()
        return report

    def pins(self) -> list[Path]:
        """Files that hold this process's pins."""
        return [path for path in self.node.tier.pins.folder().iterdir() if path.name != ".lock"]


def node_on(folder: Path, bucket: MemoryBucket) -> Node:
    return Process(folder, shared=bucket, cache_dir=folder).node


class Engine:
    """A scheduler on one node and ranks on others; V1 unless told otherwise."""

    def __init__(
        self, here: Path, folders: list[Path], *, called_without_tokens: bool = False
    ) -> None:
        self.bucket = MemoryBucket()
        self.node = node_on(here, self.bucket)
        self.ranks = [RankRig(rank, path, self.bucket) for rank, path in enumerate(folders)]
        self.called_without_tokens = called_without_tokens
        self.clock = Clock()
        self.bookkeeping = Ranks(
            len(folders),
            remote.tier_id(self.node.tier),
            steps_in_flight=1,
            called_without_tokens=called_without_tokens,
        )
        role = Role(
            producer=False,
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
            store=self.node.breaker,
            disk=self.node.loop.watch,
            needs_embedding=has_no_pixels,
            placeholder_of=lambda _: {},
            counters=self.node.counters,
            ranks=self.bookkeeping,
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

    def step(
        self, *, tokens: int = 10, loses: Callable[[WorkerReport], bool] = lambda _: False
    ) -> StepPlan:
        """One pass and its execution; plan and reports cross processes as vLLM sends them.

        Args:
            tokens: That are scheduled.
            loses: Whether the reports of its execution get lost.
        """
        plan = self.half.build_connector_meta([], scheduled_tokens=tokens)
        if not tokens and not self.called_without_tokens:
            return plan
        sent = pickle.dumps(plan)
        merged = WorkerReport()
        for rank in self.ranks:
            report = rank.execute(pickle.loads(sent))
            if report is not None:
                merged.merge(pickle.loads(pickle.dumps(report)))
        if not loses(merged):
            self.half.update_connector_output(merged)
        return plan

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Busy steps, as while other requests decode."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"in vain: {what}"
            assert self.ask(request("another", feature("not in the corpus")))
            self.step()
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

    def all_given_back(self) -> bool:
        rigs = (len(rank.pins()) + len(rank.worker.local_pins) for rank in self.ranks)
        own = [path for path in self.node.tier.pins.folder().iterdir() if path.name != ".lock"]
        return not sum(rigs) and not own


@pytest.fixture(autouse=True)
def _disk_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the bucket would be asked instead where the machine is busy."""
    monkeypatch.setattr("s3ec.connector.loads.PATIENCE_S", 3600.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "here", [tmp_path / "here", tmp_path / "there"])
    yield engine
    engine.close()


def test_ranks_on_two_nodes_load_the_same_image_each_from_its_own_disk(engine: Engine) -> None:
    engine.stock("a", "b")
    engine.step()  # in which the ranks are heard
    asker = request("r", feature("a"), feature("b", 10))
    assert not engine.ask(asker)
    engine.load(asker)
    for rank in engine.ranks:
        assert rank.node.counters.get("load.failed") == 0
        assert rank.node.counters.get("load.rescued") == 0
        for text in ("a", "b"):
            assert torch.equal(rank.cache[identifier_of(text)], tensor_of(text))
    assert engine.ranks[0].node.counters.get("fetch.ready") == 0  # reads the scheduler's pins
    assert engine.ranks[1].node.counters.get("fetch.ready") == 2
    engine.step_until(engine.all_given_back, "all pins are given back")
    assert len(engine.bookkeeping) == 0


def test_nothing_is_granted_or_waited_for_before_every_rank_was_heard(engine: Engine) -> None:
    engine.stock("a")
    asker = request("r", feature("a"))
    assert engine.ask(asker)
    assert engine.schedule(asker) == [False]
    engine.step()
    engine.step_until(lambda: engine.item_state("a") == "READY", "prepared all the same")


def test_nothing_is_granted_before_the_slow_rank_is_ready(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    gate = Gate()
    engine.ranks[1].faults.append(Fault(op="get", name="objects/", gate=gate))
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.step()
    assert gate.reached.wait(DEADLINE_S)
    engine.step_until(
        lambda: engine.half.tracker.items[identifier_of("a")].pin is not None, "here it is pinned"
    )
    for _ in range(5):
        assert not engine.ask(asker)
        assert not engine.half.has_cache_item(identifier_of("a"))
        engine.step()
    engine.clock.now_s += 2.0
    assert engine.ask(asker)  # it has waited long enough
    assert engine.schedule(asker) == [False]
    engine.step()
    gate.release()
    engine.step_until(lambda: engine.item_state("a") == "READY", "it serves the next request")


def test_a_rank_that_cannot_have_it_ends_the_wait(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    engine.ranks[1].faults.append(Fault(op="get", name="objects/", error=UnavailableError))
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.step_until(lambda: engine.item_state("a") == "FAILED", "the failure is known")
    assert engine.ask(asker)
    assert engine.schedule(asker) == [False]
    engine.step_until(engine.all_given_back, "what the others pinned is given back")
    engine.ranks[1].faults.clear()
    engine.clock.now_s += RETRY_AFTER_S + 1
    engine.step()
    later = request("later", feature("a"))
    engine.half.on_device.clear()
    engine.load(later)


def test_ranks_that_hold_other_bytes_of_one_image_do_not_compute_from_them(
    engine: Engine,
) -> None:
    """Another engine of that node encoded it too, and encoders do not repeat their bits."""
    engine.stock("a")
    engine.step()
    mine = entry(identifier_of("a"), tensor_of("something else"))
    engine.ranks[1].node.tier.writer.publish(key_of(identifier_of("a")), [mine])
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.step_until(lambda: engine.item_state("a") == "FAILED", "the difference is seen")
    assert engine.ask(asker)
    assert engine.schedule(asker) == [False]
    assert engine.node.counters.get("mismatch.ranks") == 1
    engine.step_until(engine.all_given_back, "all pins are given back")


def test_the_same_bytes_behind_another_header_are_loaded(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    mine = entry(identifier_of("a"), tensor_of("a"), placeholder={"grid": [[1] * 100]})
    engine.ranks[1].node.tier.writer.publish(key_of(identifier_of("a")), [mine])
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.load(asker)
    assert torch.equal(engine.ranks[1].cache[identifier_of("a")], tensor_of("a"))
    assert engine.ranks[1].node.counters.get("load.failed") == 0


def test_on_an_idle_engine_nobody_waits_for_orders_that_do_not_go_out(engine: Engine) -> None:
    """The V1 runner calls no worker hook in a step without tokens."""
    engine.stock("a")
    engine.step()
    for _ in range(3):
        engine.step(tokens=0)
    asker = request("r", feature("a"))
    assert engine.ask(asker)
    assert engine.schedule(asker) == [False]
    engine.step()  # the encoder's own step takes the orders along
    engine.step_until(lambda: engine.item_state("a") == "READY", "ready for the next request")
    engine.half.on_device.clear()
    engine.load(request("next", feature("a")))


def test_an_engine_that_falls_idle_does_not_keep_a_request_waiting(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.step(tokens=0)
    assert engine.ask(asker)


def test_where_workers_hear_of_steps_without_tokens_an_idle_engine_waits(tmp_path: Path) -> None:
    engine = Engine(
        tmp_path / "here", [tmp_path / "here", tmp_path / "there"], called_without_tokens=True
    )
    try:
        engine.stock("a")
        engine.step(tokens=0)
        asker = request("r", feature("a"))
        give_up_s = time.monotonic() + DEADLINE_S
        assert not engine.ask(asker)
        while not engine.ask(asker):
            assert time.monotonic() < give_up_s
            engine.step(tokens=0)
            time.sleep(0.001)
        assert engine.schedule(asker) == [True]
    finally:
        engine.close()


def test_without_pixels_it_waits_on_an_idle_engine_too_but_not_for_ever(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    engine.step(tokens=0)
    asker = request("r", feature("a", pixels=False))
    assert not engine.ask(asker)
    engine.step(tokens=0)
    assert not engine.ask(asker)
    assert engine.half.take_unavailable_requests() == set()
    engine.clock.now_s += NO_PIXELS_WAIT_S
    assert not engine.ask(asker)
    assert engine.half.take_unavailable_requests() == {"r"}


def test_a_client_that_leaves_early_leaves_no_pin_behind(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    asker = request("r", feature("a"))
    engine.ask(asker)
    engine.step()
    engine.half.request_finished(asker)
    engine.step_until(lambda: engine.item_state("a") == "READY", "it arrives all the same")
    engine.clock.now_s += LEASE_S + 2
    engine.step_until(engine.all_given_back, "all pins are given back")
    assert len(engine.bookkeeping) == 0


def test_released_and_wanted_again_in_one_pass_is_pinned_anew(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    first = request("first", feature("a"))
    engine.ask(first)
    engine.load(first)
    # Loaded and released. It has no pixels, so it is pinned though the device holds it.
    second = request("second", feature("a", pixels=False))
    assert not engine.ask(second)
    orders = engine.step().ranks
    assert orders is not None
    assert orders.release
    assert orders.prepare
    engine.step_until(lambda: engine.ask(second), "pinned anew")
    assert engine.schedule(second) == [True]


def test_freed_before_its_load_went_out_and_granted_again_is_loaded(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    first = request("first", feature("a"))
    engine.step_until(lambda: engine.ask(first), "ready")
    assert engine.schedule(first) == [True]
    engine.half.build_connector_meta([], scheduled_tokens=0)
    plan = engine.half.build_connector_meta([identifier_of("a")], scheduled_tokens=0)
    assert plan.loads == []
    engine.load(request("second", feature("a")))


def test_a_lost_report_costs_a_wait_and_heals(engine: Engine) -> None:
    engine.stock("a")
    engine.step()
    asker = request("r", feature("a"))
    assert not engine.ask(asker)
    engine.step()
    give_up_s = time.monotonic() + DEADLINE_S
    item = engine.half.tracker.items[identifier_of("a")]
    lost: list[WorkerReport] = []

    def is_ready(report: WorkerReport) -> bool:
        if report.ready:
            lost.append(report)
        return bool(report.ready)

    while not (item.pin or engine.node.prefetcher.has_news) or not lost:
        assert time.monotonic() < give_up_s
        engine.step(loses=is_ready)  # with others missing too, nobody would wait for ranks
        time.sleep(0.001)
    engine.step()
    assert engine.item_state("a") == "FETCHING"
    assert not engine.ask(asker)
    engine.clock.now_s += 2.0
    assert engine.ask(asker)
    engine.clock.now_s += LEASE_S + 2
    engine.step()
    assert engine.item_state("a") == "gone"
    engine.load(request("later", feature("a")))


def test_a_rank_in_a_new_process_prepares_again_before_anything_is_granted(
    engine: Engine, tmp_path: Path
) -> None:
    engine.stock("a")
    engine.step()
    first = request("first", feature("a"))
    engine.step_until(lambda: engine.ask(first), "ready")
    engine.ranks[1].node.close(DEADLINE_S)
    engine.ranks[1] = RankRig(1, tmp_path / "elsewhere", engine.bucket)
    engine.step()
    assert engine.item_state("a") == "FETCHING"
    engine.load(first)
    assert engine.ranks[1].node.counters.get("load.rescued") == 0


def test_a_load_that_reaches_a_rank_which_has_no_pin_is_rescued(
    engine: Engine, tmp_path: Path
) -> None:
    """The process was replaced after the grant, and nobody could know."""
    engine.stock("a")
    engine.step()
    asker = request("r", feature("a"))
    engine.step_until(lambda: engine.ask(asker), "ready")
    assert engine.schedule(asker) == [True]
    engine.ranks[1].node.close(DEADLINE_S)
    engine.ranks[1] = RankRig(1, tmp_path / "elsewhere", engine.bucket)
    for path in engine.node.tier.pins.folder().iterdir():
        if path.name != ".lock":
            path.rename(path.with_name("another-node-does-not-see-it"))
    engine.ranks[0].cache[identifier_of("a")] = tensor_of("a")
    engine.step()
    assert torch.equal(engine.ranks[1].cache[identifier_of("a")], tensor_of("a"))
    assert engine.ranks[1].node.counters.get("load.rescued") == 1


# -- what counts as one node -------------------------------------------------------------------


def shares(here: Path, there: Path, mark: Any = None) -> bool:
    bucket = MemoryBucket()
    scheduler, rank = node_on(here, bucket), RankRig(0, there, bucket)
    try:
        plan = StepPlan(1, ranks=remote.RankOrders(mark or remote.tier_id(scheduler.tier)))
        report = rank.execute(plan)
        assert report is not None
        return report.present[0].shares
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
    mark = remote.tier_id(node.tier)
    node.close(DEADLINE_S)
    moved = remote.TierId(mark.host, mark.folder.replace("/a/", "/mounted-elsewhere/"))
    assert not shares(tmp_path / "a", tmp_path / "a", moved)


def test_a_folder_of_another_host_is_not_shared(tmp_path: Path) -> None:
    node = node_on(tmp_path / "a", MemoryBucket())
    try:
        mark = remote.tier_id(node.tier)
        assert shares(tmp_path / "a", tmp_path / "a", mark)
        other = remote.TierId("another kernel", mark.folder)
        assert not shares(tmp_path / "a", tmp_path / "a", other)
    finally:
        node.close(DEADLINE_S)


def test_where_all_ranks_share_the_node_no_orders_are_given(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "here", [tmp_path / "here", tmp_path / "here"])
    try:
        engine.stock("a")
        engine.step()
        for _ in range(3):
            engine.step(tokens=0)
        asker = request("r", feature("a"))
        assert not engine.ask(asker)  # worth waiting for, idle or not
        give_up_s = time.monotonic() + DEADLINE_S
        while not engine.ask(asker):
            assert time.monotonic() < give_up_s
            engine.step(tokens=0)
            time.sleep(0.001)
        engine.load(asker)
        assert len(engine.bookkeeping) == 0
        assert all(rank.node.counters.get("fetch.ready") == 0 for rank in engine.ranks)
    finally:
        engine.close()

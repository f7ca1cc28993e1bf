# SPDX-License-Identifier: Apache-2.0
"""The worker half: loads from granted files, rescues, and what it hands to the save queue."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec.connector.messages import Save, StepPlan, WorkerReport
from s3ec.counters import observed
from s3ec.errors import UnavailableError
from s3ec.testing.fault_store import Fault
from tests.unit.connector.processes import HASHES, Process, tensor
from tests.unit.tier.cases import key_of

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
WorkerHalf = pytest.importorskip("s3ec.connector.worker").WorkerHalf


class Rig(Process):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: list[int] = []
        self.saved: list[tuple[str, Save, torch.Tensor]] = []
        self.rank = 0
        self.worker = self.half()

    def half(self, **other: Any) -> WorkerHalf:
        return WorkerHalf(
            self.node,
            saves=self,
            device=lambda: torch.device("cpu"),
            rank=lambda: self.rank,
            drain_timeout_s=1,
            **other,
        )

    # As a SaveQueue.
    def put(self, identifier: str, save: Save, tensor: torch.Tensor, *, step: int) -> bool:
        self.steps.append(step)
        self.saved.append((identifier, save, tensor))
        return True

    def take_stored(self) -> list[str]:
        return []

    def drain(self, timeout_s: float) -> int:
        return 0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_granted_embeddings_are_loaded_and_reported(rig: Rig) -> None:
    loads = [rig.granted(identifier, tensor(n)) for n, identifier in enumerate(HASHES)]
    cache: dict[str, torch.Tensor] = {}
    rig.worker.start_load_caches(cache, StepPlan(step=7, loads=loads))
    for number, identifier in enumerate(HASHES):
        assert torch.equal(cache[identifier], tensor(number))
    report = rig.worker.report()
    assert report is not None
    assert report.loaded == {7: {0}}
    assert report.counts["load.items"] == len(HASHES)
    assert rig.worker.report() is None


def test_embedding_that_the_device_holds_is_left_alone(rig: Rig) -> None:
    load = rig.granted(HASHES[0], tensor(1))
    mine = tensor(2)
    cache = {HASHES[0]: mine}
    rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert cache[HASHES[0]] is mine


def test_load_that_cannot_be_had_anywhere_raises_with_the_file_and_fills_nothing_in(
    rig: Rig,
) -> None:
    load = rig.granted(HASHES[0], tensor())
    rig.lose(load)
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError, match=r"cannot be read from .*safetensors.*bucket"):
        rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert cache == {}
    assert rig.worker.report() is None or not rig.worker.report()


def test_what_was_granted_is_rescued_though_its_object_was_found_bad(rig: Rig) -> None:
    """It may have been repaired since, and the engine ends without it."""
    load = rig.granted(HASHES[0], tensor(1))
    rig.bucket.objects[rig.object_name(HASHES[0])] = rig.entry(HASHES[0], tensor(1))
    rig.node.index.mark_bad(key_of(HASHES[0]))
    rig.lose(load)
    cache: dict[str, torch.Tensor] = {}
    rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert torch.equal(cache[HASHES[0]], tensor(1))
    assert rig.node.counters.get("load.rescued") == 1


@pytest.mark.parametrize("stored", ["bad", "absent", "other"])
def test_what_was_granted_is_never_rescued_from_a_bad_object(rig: Rig, stored: str) -> None:
    load = rig.granted(HASHES[0], tensor(1))
    if stored != "absent":
        misfit = rig.entry(HASHES[0], tensor(2)[:2]) if stored == "other" else b"<html>"
        rig.bucket.objects[rig.object_name(HASHES[0])] = misfit
    rig.lose(load)
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError, match="bucket"):
        rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert cache == {}
    assert rig.node.counters.get("load.rescued") == 0


def test_load_with_a_dead_bucket_raises_in_time(rig: Rig) -> None:
    load = rig.granted(HASHES[0], tensor())
    rig.lose(load)
    rig.faults.append(Fault(error=UnavailableError))
    with pytest.raises(RuntimeError, match="bucket"):
        rig.worker.start_load_caches({}, StepPlan(step=1, loads=[load]))
    assert rig.faults[0].struck >= 1


@pytest.mark.parametrize("other", [tensor(1)[:3], tensor(1)[:, :7], tensor().to(torch.float16)])
def test_entry_of_another_shape_than_granted_is_never_loaded(rig: Rig, other: torch.Tensor) -> None:
    load = rig.granted(HASHES[0], tensor())
    changed = rig.entry(HASHES[0], other.contiguous())
    Path(load.path).write_bytes(changed)
    rig.bucket.objects[rig.object_name(HASHES[0])] = changed
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError):
        rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert cache == {}


def test_entry_of_another_namespace_is_never_loaded(rig: Rig) -> None:
    load = rig.granted(HASHES[0], tensor())
    foreign = rig.entry(HASHES[0], tensor(5), namespace="other-0123456789abcdef")
    Path(load.path).write_bytes(foreign)
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError):
        rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert cache == {}


# Several at a time


def test_rows_of_another_picture_under_the_same_identifier_are_replaced(rig: Rig) -> None:
    """vLLM keeps them where it evicts the one and makes room for the other in one pass."""
    load = rig.granted(HASHES[0], tensor(1))
    cache = {HASHES[0]: torch.full((tensor(1).shape[0] + 8, tensor(1).shape[1]), 7.0)}
    rig.worker.start_load_caches(cache, StepPlan(step=1, loads=[load]))
    assert torch.equal(cache[HASHES[0]], tensor(1))


def test_failed_load_leaves_the_others_in_place(rig: Rig) -> None:
    loads = [rig.granted(identifier, tensor(n)) for n, identifier in enumerate(HASHES)]
    for number in (2, 5):
        rig.lose(loads[number])
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(RuntimeError, match=re.escape(loads[2].path)):
        rig.worker.start_load_caches(cache, StepPlan(step=1, loads=loads))
    assert set(cache) == set(HASHES) - {HASHES[2], HASHES[5]}
    for number, identifier in enumerate(HASHES):
        if identifier in cache:
            assert torch.equal(cache[identifier], tensor(number))
    report = rig.worker.report()
    assert report is None or not report.loaded


def test_only_what_the_scheduler_named_is_saved_and_only_by_rank_0(rig: Rig) -> None:
    cache = {HASHES[0]: tensor(), HASHES[1]: tensor()}
    plan = StepPlan(step=1, saves={HASHES[0]: Save("image", {})})
    rig.worker.save_caches(cache, HASHES[1], plan)
    rig.rank = 1
    rig.worker.save_caches(cache, HASHES[0], plan)
    assert rig.saved == []


def test_what_the_device_holds_is_stored_as_the_step_begins(rig: Rig) -> None:
    held, fresh, skipped = HASHES[:3]
    on_device = Save("image", {}, on_device=True)
    saves = {held: on_device, fresh: Save("image", {}), skipped: on_device}
    plan = StepPlan(step=7, saves=saves)
    rig.worker.start_save_caches({held: tensor(1), fresh: tensor(2)}, plan)
    assert [(name, save) for name, save, _ in rig.saved] == [(held, on_device)]
    assert rig.steps == [7]


def test_what_gauges_say_is_reported_by_rank_once_and_not_where_the_scheduler_sees_it(
    rig: Rig,
) -> None:
    assert rig.worker.report() is None
    rig.rank = 3
    for level in (1.0, 1.0):  # looked at anew, and still the same
        rig.node.levels = {"level.spool_entries": level}
        report = rig.worker.report()
        assert report is not None
        assert report.levels == {3: {"level.spool_entries": level}}
        assert rig.worker.report() is None
    merged = WorkerReport(levels={0: {"level.spool_entries": 2.0}}).merge(report)
    assert set(merged.levels) == {0, 3}
    rig.node.users = 2
    rig.node.levels = {"level.spool_entries": 5.0}
    assert rig.worker.report() is None


def test_the_time_of_a_steps_loads_is_observed_once(rig: Rig) -> None:
    loads = [rig.granted(identifier, tensor(n)) for n, identifier in enumerate(HASHES)]
    cache: dict[str, torch.Tensor] = {}
    rig.worker.start_load_caches(cache, StepPlan(step=7, loads=loads))
    (one,) = observed(rig.node.counters.snapshot())
    assert (one.histogram, one.many) == ("load_time", 1)
    assert one.seconds == pytest.approx(rig.node.counters.get("load.seconds"))

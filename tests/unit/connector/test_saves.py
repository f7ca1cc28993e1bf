# SPDX-License-Identifier: Apache-2.0
"""The save queue: what reaches tier and bucket, and what happens when they do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.config import Settings
from s3ec.connector.plan import Save
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Namespace, make_key
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

torch = pytest.importorskip("torch")
SaveQueue = pytest.importorskip("s3ec.connector.saves").SaveQueue

IMAGE = Save("image", {"image_grid_thw": [1, 2, 2]})
HASHES = [f"{n:064x}" for n in range(1, 40)]
_DEADLINE_S = 20.0


def tensor(seed: int = 0, *, width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, width, generator=generator).to(torch.bfloat16)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Rig:
    def __init__(self, folder: Path, *, min_free_bytes: str = "0") -> None:
        self.bucket = MemoryBucket()
        self.faults: list[Fault] = []
        self.store = FaultStore(MemoryStore(self.bucket), Script(self.faults))
        settings = Settings.model_validate(
            {"bucket": "corpus", "cache_dir": folder / "tier", "min_free_bytes": min_free_bytes}
        )
        self.node = Node(settings, Namespace.from_descriptor({"model": "tiny"}), store=self.store)
        self.queues: list[SaveQueue] = []

    def queue(self, *, budget_bytes: int = 2**20, overflow: str = "block") -> SaveQueue:
        queue = SaveQueue(self.node, budget_bytes=budget_bytes, overflow=overflow)
        self.queues.append(queue)
        return queue

    def stored(self, identifier: str) -> bytes | None:
        key = make_key(identifier)
        assert key is not None
        return self.bucket.objects.get(self.node.layout.object(key))

    def close(self) -> None:
        for queue in self.queues:
            queue.drain(0)
        self.node.close(5)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_saved_tensor_is_in_bucket_and_tier_and_reads_back(rig: Rig) -> None:
    queue = rig.queue()
    assert queue.put(HASHES[0], IMAGE, tensor(1))
    assert queue.drain(_DEADLINE_S) == 0

    blob = rig.stored(HASHES[0])
    assert blob is not None
    header = codec.verify(blob, namespace=rig.node.namespace.name, identifier=HASHES[0])
    assert header.placeholder == {"image_grid_thw": [1, 2, 2]}
    assert header.modality == "image"
    read = codec.to_tensor(header, bytearray(blob[header.data_start :]))
    assert torch.equal(read, tensor(1))
    key = make_key(HASHES[0])
    assert key is not None
    assert rig.node.tier.contains(key)
    assert rig.node.local(key)
    assert rig.node.index.maybe_contains(key)
    assert queue.take_report() == ([HASHES[0]], [HASHES[0]])
    assert rig.node.tier.check() == []


def test_first_save_writes_descriptor_and_modality_record(rig: Rig) -> None:
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    layout = rig.node.layout
    assert rig.bucket.objects[layout.descriptor] == rig.node.namespace.to_json()
    assert rig.bucket.objects[layout.modality("image")] == b'{"dtype":"bfloat16","width":8}'
    assert not [name for name in rig.bucket.objects if name.startswith(".s3ec-probe/")]


def test_tensor_of_another_width_than_the_record_is_not_saved(rig: Rig) -> None:
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: rig.stored(HASHES[0]) is not None)
    queue.put(HASHES[1], IMAGE, tensor(width=16))
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[1]) is None
    assert rig.node.counters.get("save_problem.record") == 1
    assert rig.node.records.known("image") == Record(8, "bfloat16")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tensor_that_is_not_finite_is_not_saved(rig: Rig, bad: float) -> None:
    queue = rig.queue()
    spoiled = tensor()
    spoiled[3, 7] = bad
    queue.put(HASHES[0], IMAGE, spoiled)
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.bucket.objects == {}
    assert rig.node.counters.get("save_problem.refused.nonfinite") == 1


def test_refused_identifier_is_not_taken(rig: Rig) -> None:
    assert not rig.queue().put("renderer0-mm-1-image-0", IMAGE, tensor())
    assert rig.bucket.objects == {}


def test_upload_is_repeated_until_the_bucket_confirms(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.connector.saves._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(rig.node.breaker, "_first_pause_s", 0.01)
    monkeypatch.setattr(rig.node.breaker, "_pause_s", 0.01)
    rig.faults += [
        Fault(op="put_if_absent", name="objects/", error=UnavailableError, times=7),
        Fault(op="put_if_absent", name="objects/", error=AccessError, times=2),
    ]
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    assert [fault.struck for fault in rig.faults] == [7, 2]
    assert rig.stored(HASHES[0]) is not None
    assert rig.node.counters.get("save_problem.unavailable") >= 1
    assert rig.node.counters.get("save_problem.denied") >= 1


def test_lost_reply_of_a_stored_object_leaves_one_object_and_ends(rig: Rig) -> None:
    rig.faults.append(Fault(op="put_if_absent", name="objects/", lost_reply=True, times=1))
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.faults[0].struck == 1
    assert rig.stored(HASHES[0]) is not None
    assert rig.node.counters.get("save.existed") == 1


def test_entry_that_is_in_the_way_is_not_announced(rig: Rig) -> None:
    key = make_key(HASHES[0])
    assert key is not None
    rig.bucket.objects[rig.node.layout.object(key)] = b"rubbish"
    rig.node.index.forget(key)
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) == b"rubbish"  # never overwritten by a serving engine
    assert not rig.node.index.maybe_contains(key)
    assert queue.take_report() == ([HASHES[0]], [])


def test_full_queue_drops_and_counts_where_it_may_not_wait(rig: Rig) -> None:
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    one = tensor()
    queue = rig.queue(budget_bytes=one.numel() * 2, overflow="drop")
    assert queue.put(HASHES[0], IMAGE, one)
    assert gate.reached.wait(_DEADLINE_S)
    assert not queue.put(HASHES[1], IMAGE, tensor())
    assert rig.node.counters.get("save_problem.dropped") == 1
    gate.release()
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None
    assert rig.stored(HASHES[1]) is None


def test_full_queue_waits_where_the_work_must_be_complete(rig: Rig) -> None:
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    one = tensor()
    queue = rig.queue(budget_bytes=one.numel() * 2, overflow="block")
    queue.put(HASHES[0], IMAGE, one)
    assert gate.reached.wait(_DEADLINE_S)
    taken = threading.Event()

    def second() -> None:
        if queue.put(HASHES[1], IMAGE, tensor(2)):
            taken.set()

    thread = threading.Thread(target=second)
    thread.start()
    eventually(lambda: rig.node.counters.get("save.blocked") > 0)
    assert not taken.is_set()
    gate.release()
    assert taken.wait(_DEADLINE_S)
    thread.join()
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[1]) is not None


def test_one_tensor_larger_than_the_budget_is_taken_alone(rig: Rig) -> None:
    queue = rig.queue(budget_bytes=1)
    assert queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None


def test_drain_with_a_dead_bucket_ends_at_its_deadline_and_counts(rig: Rig) -> None:
    rig.faults.append(Fault(error=UnavailableError))
    queue = rig.queue()
    for identifier in HASHES[:3]:
        queue.put(identifier, IMAGE, tensor())
    assert queue.drain(0.2) == 3
    assert rig.node.counters.get("save_problem.abandoned") == 3
    assert not queue.put(HASHES[5], IMAGE, tensor())


def test_full_disk_does_not_keep_an_entry_from_the_bucket(tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_free_bytes="1EiB")
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(_DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None
    assert queue.take_report() == ([], [HASHES[0]])
    rig.close()


def test_many_saves_are_all_stored_once(rig: Rig) -> None:
    queue = rig.queue(budget_bytes=300)
    for number, identifier in enumerate(HASHES):
        queue.put(identifier, IMAGE, tensor(number))
    assert queue.drain(_DEADLINE_S) == 0
    assert all(rig.stored(identifier) for identifier in HASHES)
    assert rig.node.counters.get("save.items") == len(HASHES)
    assert rig.node.counters.get("internal_errors") == 0

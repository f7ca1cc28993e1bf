# SPDX-License-Identifier: Apache-2.0
"""The save queue: what reaches tier, spool and bucket, and what happens when they do not answer."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.connector.messages import Save
from s3ec.counters import observed
from s3ec.errors import AccessError, TierError, UnavailableError
from s3ec.modality import Record
from s3ec.store.endpoint import BreakerOptions
from s3ec.testing.fault_store import Fault, Gate
from s3ec.tier.spool import Spool
from tests.support.file_calls import file_calls_of
from tests.support.on_disk import audit_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.connector.processes import HASHES, Process, tensor
from tests.unit.tier.cases import key_of

torch = pytest.importorskip("torch")
SaveQueue = pytest.importorskip("s3ec.connector.saves").SaveQueue
saves = pytest.importorskip("s3ec.connector.saves")
uploads = pytest.importorskip("s3ec.connector.uploads")
staging_module = pytest.importorskip("s3ec.connector.staging")
AcceleratorStaging, HostStaging = staging_module.AcceleratorStaging, staging_module.HostStaging
accelerators = pytest.importorskip("tests.unit.connector.accelerators")
safetensors_torch = pytest.importorskip("safetensors.torch")

IMAGE = Save("image", {"image_grid_thw": [1, 2, 2]})

# A disk on which nothing may be written: embeddings go to the bucket from memory.
NO_ROOM = "1EiB"
ENTRY_BYTES = 456  # of a tensor of these tests, with its header


@pytest.fixture(autouse=True)
def _patches(monkeypatch: pytest.MonkeyPatch) -> None:
    Rig.patches = monkeypatch


class Rig(Process):
    """One process's save queues."""

    patches: pytest.MonkeyPatch

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **more)
        self.queues: list[SaveQueue] = []

    def queue(
        self, *, budget_bytes: int = 2**20, overflow: str = "block", **more: Any
    ) -> SaveQueue:
        queue = SaveQueue(self.node, budget_bytes=budget_bytes, overflow=overflow, **more)
        self.queues.append(queue)
        return queue

    def pause(self, *, first_s: float = 0.5, longest_s: float = 15.0) -> None:
        """Of uploads that fail."""
        self.patches.setattr(uploads, "FIRST_PAUSE_S", first_s)
        self.patches.setattr(uploads, "LONGEST_PAUSE_S", longest_s)

    def stage(self, staging: Any) -> None:
        self.patches.setattr(saves, "open_staging", lambda _: staging)

    def put_spooled(self, queue: SaveQueue, *identifiers: str) -> None:
        """Queue some, and wait until they are on the disk and none is in memory."""
        for identifier in identifiers:
            assert queue.put(identifier, IMAGE, tensor())
        eventually(lambda: all(self.node.local(key_of(each)) for each in identifiers))
        assert self.spooled() >= len(identifiers)

    def record(self) -> Record | None:
        return self.node.loop.run(self.node.records.get("image"), DEADLINE_S)

    def close(self) -> None:
        for queue in self.queues:
            queue.drain(0)
        super().close()


def dead_process(folder: Path, *identifiers: str) -> Rig:
    """One that ended while the bucket took nothing, and left these in the spool."""
    rig = Rig(folder)
    rig.faults.append(Fault(error=UnavailableError))
    rig.put_spooled(rig.queue(), *identifiers)
    rig.close()
    return rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize("renamed", ["", f"video-0123456789abcdef:{HASHES[0]}"])
def test_saved_tensor_is_in_bucket_and_tier_and_reads_back(rig: Rig, renamed: str) -> None:
    queue, name = rig.queue(), renamed or HASHES[0]
    assert queue.put(HASHES[0], replace(IMAGE, renamed=renamed), tensor(1))
    assert queue.drain(DEADLINE_S) == 0

    blob = rig.stored(name)
    assert blob is not None
    header = codec.verify(blob, namespace=rig.node.namespace.name, identifier=name)
    assert header.placeholder == {"image_grid_thw": [1, 2, 2]}
    assert header.modality == "image"
    read = safetensors_torch.load(blob)["ec_cache"]
    assert torch.equal(read, tensor(1))
    key = key_of(name)
    assert rig.node.tier.entries.contains(key)
    assert rig.node.local(key)
    assert rig.node.index.maybe_contains(key)
    assert queue.take_stored() == [HASHES[0]]
    assert rig.spooled() == 0
    assert audit_of(rig.node.tier) == []


def test_an_entry_says_what_made_it_and_the_first_writer_s_word_stays(rig: Rig) -> None:
    for version in ("0.32.0", "0.33.0"):
        queue = rig.queue(made_by=f"vllm={version}")
        assert queue.put(HASHES[0], IMAGE, tensor(1))
        assert queue.drain(DEADLINE_S) == 0
        blob = rig.stored(HASHES[0])
        assert blob is not None
        assert codec.parse_header(blob).made_by == "vllm=0.32.0"


def test_what_waits_is_in_the_gauges_and_its_time_is_observed_when_the_bucket_confirms(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, breaker=NEVER_OPEN)
    down = Fault(op="put_if_absent", error=UnavailableError)
    rig.faults.append(down)
    rig.pause(first_s=0.001, longest_s=0.001)
    queue = rig.queue()
    rig.put_spooled(queue, *HASHES[:2])
    eventually(lambda: queue.levels()["level.save_queue_entries"] == 0)
    found = queue.levels()
    assert found["level.spool_entries"] == 2
    assert found["level.spool_oldest_seconds"] >= 0
    rig.faults.clear()
    assert queue.drain(DEADLINE_S) == 0
    assert rig.node.counters.get("save.queued") == 2
    times = [one for one in observed(rig.node.counters.snapshot()) if one.histogram == "save_time"]
    assert sum(one.many for one in times) == 2
    assert set(queue.levels().values()) == {0}
    rig.close()


def test_first_save_writes_descriptor_and_modality_record(rig: Rig) -> None:
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    layout = rig.node.layout
    assert rig.bucket.objects[layout.descriptor] == rig.node.namespace.to_json()
    assert rig.bucket.objects[layout.modality("image")] == b'{"dtype":"bfloat16","width":8}'


def test_tensor_of_another_width_than_the_record_is_not_saved(rig: Rig) -> None:
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: rig.stored(HASHES[0]) is not None)
    queue.put(HASHES[1], IMAGE, tensor(width=16))
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[1]) is None
    assert rig.counted("save_problem.record") == 1
    assert rig.record() == Record(8, "bfloat16")
    assert rig.spooled() == 0  # refused for good


@pytest.mark.parametrize(
    ("identifier", "value", "reason"),
    [
        *((HASHES[0], float(bad), "nonfinite") for bad in ("nan", "inf", "-inf")),
        ("renderer0-mm-1-image-0", 1.0, "identifier"),
    ],
)
def test_what_may_not_be_stored_is_refused(
    rig: Rig, identifier: str, value: float, reason: str
) -> None:
    queue, one = rig.queue(), tensor()
    one[3, 7] = value
    queue.put(identifier, IMAGE, one)
    assert queue.drain(DEADLINE_S) == 0
    assert rig.bucket.objects == {}
    assert rig.counted(f"save_problem.refused.{reason}") == 1


# A breaker that lets a probe through soon, and one that never opens.
SHORT_PAUSES = BreakerOptions(first_pause_s=0.01, max_pause_s=0.01)
NEVER_OPEN = BreakerOptions(threshold=10**6)


@pytest.mark.slow
def test_upload_is_repeated_until_the_bucket_confirms(tmp_path: Path) -> None:
    rig = Rig(tmp_path, breaker=SHORT_PAUSES)
    rig.faults += [
        Fault(op="put_if_absent", name="objects/", error=UnavailableError, times=7),
        Fault(op="put_if_absent", name="objects/", error=AccessError, times=2),
    ]
    rig.pause(first_s=0.01, longest_s=0.05)
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert [fault.struck for fault in rig.faults] == [7, 2]
    assert rig.stored(HASHES[0]) is not None
    assert rig.counted("save_problem.unavailable") >= 1
    assert rig.counted("save_problem.denied") >= 1
    rig.close()


def test_lost_reply_of_a_stored_object_leaves_one_object_and_ends(rig: Rig) -> None:
    rig.faults.append(Fault(op="put_if_absent", name="objects/", lost_reply=True, times=1))
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert rig.faults[0].struck == 1
    assert rig.stored(HASHES[0]) is not None
    assert rig.counted("save.existed") == 1
    assert rig.spooled() == 0


def test_entry_that_is_in_the_way_is_not_believed_to_be_good(rig: Rig) -> None:
    key = key_of(HASHES[0])
    rig.bucket.objects[rig.node.layout.object(key)] = b"rubbish"
    rig.node.index.mark_missing(key)
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) == b"rubbish"  # never overwritten by a serving engine
    assert not rig.node.index.maybe_contains(key)
    assert queue.take_stored() == []


@pytest.mark.parametrize("overflow", ["drop", "block"])
@pytest.mark.parametrize("where", ["memory", "spool"])
def test_full_queue_drops_and_counts_or_waits_where_the_work_must_be_complete(
    tmp_path: Path, where: str, overflow: str
) -> None:
    """Memory fills where the disk takes nothing; the spool's share where it does."""
    gate, one = Gate(), tensor()
    disk = {"min_free_bytes": NO_ROOM} if where == "memory" else {"cache_bytes": 4 * ENTRY_BYTES}
    rig = Rig(tmp_path, **disk)
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    budget_bytes = one.numel() * 2 if where == "memory" else 2**20
    queue = rig.queue(budget_bytes=budget_bytes, overflow=overflow)
    assert queue.put(HASHES[0], IMAGE, one)
    assert gate.reached.wait(DEADLINE_S)
    taken: list[bool] = []
    second = threading.Thread(target=lambda: taken.append(queue.put(HASHES[1], IMAGE, tensor(2))))
    second.start()
    told = "save.blocked" if overflow == "block" else "save_problem.dropped"
    eventually(lambda: rig.counted(told) > 0)
    if overflow == "block":
        assert not taken
        gate.release()
    second.join()
    assert taken == [overflow == "block"]
    gate.release()
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None
    assert (rig.stored(HASHES[1]) is not None) is taken[0]
    rig.close()


def test_a_hook_waits_a_bounded_time_for_a_bucket_that_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, one = Gate(), tensor()
    rig = Rig(tmp_path, cache_bytes=4 * ENTRY_BYTES)
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    Rig.patches.setattr(uploads, "PAUSE_S", 0.0)
    Rig.patches.setattr(saves, "MAX_BLOCKED_S", 0.05)
    queue = rig.queue()
    assert queue.put(HASHES[0], IMAGE, one)
    assert gate.reached.wait(DEADLINE_S)
    for number in range(1, 6):  # in steps of their own: the bound is for the outage
        assert not queue.put(HASHES[number], IMAGE, one, step=number)
    assert rig.counted("save_problem.dropped") == 5
    assert rig.counted("save.blocked") == 1  # those behind the first did not wait at all
    assert caplog.text.count("not saved, and are encoded") == 1
    gate.release()
    eventually(lambda: rig.spooled() == 0)
    assert HASHES[0] in queue.take_stored()
    assert queue.put(HASHES[6], IMAGE, one)
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[6]) is not None
    assert "5 embeddings were not saved" in caplog.text  # so that a job does not look complete
    rig.close()


def test_a_bucket_that_takes_something_now_and_then_blocks_no_step_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PAUSE_S", 3600.0)  # it would wake the hook that waits
    dead = dead_process(tmp_path, HASHES[9])
    first, last = Gate(), Gate()
    rig = Rig(tmp_path, shared=dead.bucket, cache_bytes=4 * 1300)
    rig.faults += [
        Fault(op="put_if_absent", name=HASHES[9], gate=first),
        Fault(op="put_if_absent", name=HASHES[0], gate=last),
    ]
    Rig.patches.setattr(saves, "MAX_BLOCKED_S", 0.05)
    queue = rig.queue()
    assert first.reached.wait(DEADLINE_S)
    assert queue.put(HASHES[0], IMAGE, tensor())
    assert last.reached.wait(DEADLINE_S)
    large = tensor(width=128)  # finds no room beside one of the others
    assert not queue.put(HASHES[1], IMAGE, large, step=1)
    first.release()
    eventually(lambda: HASHES[9] in queue.take_stored())  # the bucket took it
    assert not queue.put(HASHES[2], IMAGE, large, step=1)
    assert rig.counted("save.blocked") == 1
    assert not queue.put(HASHES[3], IMAGE, large, step=2)
    assert rig.counted("save.blocked") == 2
    last.release()
    rig.close()


def test_a_spool_full_of_what_waits_for_its_announcement_is_announced_at_once(
    tmp_path: Path,
) -> None:
    Rig.patches.setattr(uploads, "PAUSE_S", 3600.0)
    rig = Rig(tmp_path, cache_bytes=4 * ENTRY_BYTES)
    queue = rig.queue()
    assert queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: HASHES[0] in queue.take_stored())
    assert rig.spooled() == 1
    assert queue.put(HASHES[1], IMAGE, tensor(1))
    assert rig.counted("announced") == 1
    assert rig.counted("save_problem.dropped") == 0
    rig.close()


def test_one_tensor_larger_than_the_budget_is_taken_alone(rig: Rig) -> None:
    queue = rig.queue(budget_bytes=1)
    assert queue.put(HASHES[0], IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None


def test_drain_with_a_dead_bucket_ends_at_its_deadline_and_says_what_is_left(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.faults.append(Fault(error=UnavailableError))
    queue = rig.queue()
    rig.put_spooled(queue, *HASHES[:3])
    assert queue.drain(0.2) == 3
    assert rig.counted("spool.left") == 3
    assert rig.counted("save_problem.abandoned") == 0
    assert "3 embeddings; they stay in the spool" in caplog.text
    assert "lost" not in caplog.text
    assert not queue.put(HASHES[5], IMAGE, tensor())


def test_drain_announces_what_the_bucket_took(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PAUSE_S", 3600.0)
    queue = rig.queue()
    for identifier in HASHES[:5]:
        queue.put(identifier, IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert rig.counted("announced") == 5
    assert any("/manifest/v2/delta/" in name for name in rig.bucket.objects)
    assert rig.spooled() == 0


def test_drain_that_cannot_announce_leaves_it_to_the_next_process(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.faults.append(Fault(op="put_if_absent", name="manifest/", error=AccessError))
    queue = rig.queue()
    for identifier in HASHES[:3]:
        queue.put(identifier, IMAGE, tensor())
    stored: list[str] = []

    def all_stored() -> bool:
        stored.extend(queue.take_stored())
        return len(stored) == 3

    eventually(all_stored)
    assert queue.drain(0.1) == 3
    assert rig.counted("spool.left") == 3
    assert rig.counted("save_problem.abandoned") == 0
    assert rig.spooled() == 3
    assert "3 embeddings are in the bucket and not in its index yet" in caplog.text
    assert sorted(stored) == HASHES[:3]


def test_nothing_is_asked_of_the_bucket_after_a_drain(tmp_path: Path) -> None:
    rig = Rig(tmp_path, breaker=NEVER_OPEN)
    dead = Fault(error=UnavailableError)
    rig.faults.append(dead)
    rig.pause(first_s=0.001, longest_s=0.001)
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: dead.struck > 3)
    assert queue.drain(0) == 1
    rig.node.loop.run(asyncio.sleep(0), DEADLINE_S)  # behind the end of the uploads
    asked = dead.struck
    rig.node.loop.run(asyncio.sleep(0.3), DEADLINE_S)
    assert dead.struck == asked
    rig.close()


def test_only_what_neither_disk_nor_bucket_took_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, min_free_bytes=NO_ROOM)
    rig.faults.append(Fault(error=UnavailableError))
    queue = rig.queue()
    for identifier in HASHES[:3]:
        queue.put(identifier, IMAGE, tensor())
    assert queue.drain(0.2) == 3
    assert rig.counted("save_problem.abandoned") == 3
    assert rig.counted("spool.left") == 0
    assert "3 embeddings are lost" in caplog.text
    rig.close()


def test_save_that_gets_no_thread_gives_its_room_back_and_the_next_one_is_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = rig.queue(budget_bytes=64)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            queue.put(HASHES[0], IMAGE, tensor())
    for identifier in HASHES[:2]:
        assert queue.put(identifier, IMAGE, tensor())
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[0]) is not None


# The spool


def test_tensor_leaves_memory_when_it_is_on_the_disk(rig: Rig) -> None:
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    queue = rig.queue(budget_bytes=64)
    one = tensor()
    kept = weakref.ref(one)
    queue.put(HASHES[0], IMAGE, one)
    del one
    gc.collect()
    assert kept() is None  # the queue has a copy
    assert gate.reached.wait(DEADLINE_S)
    eventually(lambda: rig.spooled() == 1)
    rig.put_spooled(queue, *HASHES[1:5])  # each fills the budget
    gate.release()
    assert queue.drain(DEADLINE_S) == 0
    assert all(rig.stored(identifier) for identifier in HASHES[:5])


def test_buffer_is_not_reused_while_it_is_uploaded_from_memory(tmp_path: Path) -> None:
    gate = Gate()
    rig = Rig(tmp_path, min_free_bytes=NO_ROOM)
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    staging = HostStaging()
    rig.stage(staging)
    queue = rig.queue()
    for number, identifier in enumerate(HASHES[:6]):
        queue.put(identifier, IMAGE, tensor(number))
    assert gate.reached.wait(DEADLINE_S)
    gate.release()
    assert queue.drain(DEADLINE_S) == 0
    assert rig.counted("spool.refused") == 6
    assert sorted(queue.take_stored()) == HASHES[:6]
    for number, identifier in enumerate(HASHES[:6]):
        assert torch.equal(rig.read(identifier), tensor(number))
    assert accelerators.is_all_idle(staging.saves)
    rig.close()


@pytest.mark.parametrize("problem", ["nonfinite", "copy"])
def test_save_that_fails_gives_its_room_back(rig: Rig, problem: str) -> None:
    staging = HostStaging()
    rig.stage(staging)
    queue = rig.queue(budget_bytes=64)
    bad = torch.full((4, 8), float("nan"), dtype=torch.bfloat16)
    if problem == "nonfinite":
        queue.put(HASHES[0], IMAGE, bad)
    else:
        meta = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
        with pytest.raises((NotImplementedError, TypeError)):
            queue.put(HASHES[0], IMAGE, meta)
    assert queue.put(HASHES[1], IMAGE, tensor())  # when there is room again
    assert queue.drain(DEADLINE_S) == 0
    assert rig.stored(HASHES[1]) is not None
    assert accelerators.is_all_idle(staging.saves)


def test_hook_does_not_wait_for_the_device_and_the_writer_does(rig: Rig) -> None:
    device = accelerators.FakeAccelerator()
    staging = AcceleratorStaging(device)
    rig.stage(staging)
    queue = rig.queue()
    device.streams[1].held = True
    output = tensor(1)
    assert queue.put(HASHES[0], IMAGE, output)  # returns while nothing is copied yet
    assert rig.stored(HASHES[0]) is None
    device.release()
    assert queue.drain(DEADLINE_S) == 0
    assert torch.equal(rig.read(HASHES[0]), tensor(1))
    assert accelerators.is_all_idle(staging.saves)


def test_queue_drops_before_it_copies(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cache_bytes=4 * ENTRY_BYTES)
    rig.faults.append(Fault(op="put_if_absent", name="objects/", error=UnavailableError))
    queue = rig.queue(overflow="drop")
    rig.put_spooled(queue, HASHES[0])
    meta = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")  # would fail to be copied
    assert not queue.put(HASHES[1], IMAGE, meta)
    assert rig.counted("save_problem.dropped") == 1
    rig.close()


def test_next_process_uploads_what_the_last_one_could_not(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.faults.append(Fault(error=UnavailableError))
    queue = first.queue()
    first.put_spooled(queue, *HASHES[:5])
    assert queue.take_stored() == []
    first.close()
    assert first.bucket.objects == {}

    second = Rig(tmp_path, shared=first.bucket)
    assert second.spooled() == 5
    queue = second.queue(overflow="drop")
    eventually(lambda: second.counted("spool.replayed") == 5)
    assert queue.drain(DEADLINE_S) == 0
    for identifier in HASHES[:5]:
        second.read(identifier)
        key = key_of(identifier)
        assert second.node.index.maybe_contains(key)
    assert sorted(queue.take_stored()) == HASHES[:5]
    assert second.counted("save.items") == 5
    assert second.spooled() == 0
    assert audit_of(second.node.tier) == []
    second.close()
    assert list((tmp_path / "tier" / "v1" / "spool").iterdir()) == []


def test_a_save_that_is_always_refused_holds_up_no_other(tmp_path: Path) -> None:
    """As one that is larger than a proxy takes, where it has one of few places."""
    rig = Rig(tmp_path, breaker=NEVER_OPEN, max_concurrency=1)
    rig.pause(first_s=0.001, longest_s=0.001)
    large = Fault(
        op="put_if_absent",
        name=key_of(HASHES[0]).name,
        error=lambda message: AccessError(message, code="413", is_general=False),
    )
    rig.faults.append(large)
    rig.put_spooled(rig.queue(), *HASHES[:3])
    eventually(lambda: rig.spooled() == 1)
    assert rig.stored(HASHES[1]) is not None
    assert rig.stored(HASHES[2]) is not None
    large.times = large.struck
    eventually(lambda: rig.spooled() == 0)
    rig.close()


def test_adopted_uploads_that_hang_leave_room_for_fresh_ones(tmp_path: Path) -> None:
    first = dead_process(tmp_path, *HASHES[:20])

    second = Rig(tmp_path, shared=first.bucket, max_concurrency=4)
    hang = Gate()
    names = "|".join(HASHES[:20])
    second.faults.append(Fault(op="put_if_absent", name=names, gate=hang))
    queue = second.queue()
    assert hang.reached.wait(DEADLINE_S)
    for identifier in HASHES[20:30]:
        queue.put(identifier, IMAGE, tensor())
    eventually(lambda: all(second.stored(identifier) for identifier in HASHES[20:30]))
    assert not any(second.stored(identifier) for identifier in HASHES[:20])
    hang.release()
    assert queue.drain(DEADLINE_S) == 0
    assert all(second.stored(identifier) for identifier in HASHES[:20])
    assert second.spooled() == 0
    second.close()


def test_uploads_that_hang_leave_a_quarter_of_the_places_to_fetches(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_concurrency=8)
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", name="objects/", gate=gate))
    queue = rig.queue()
    rig.put_spooled(queue, *HASHES[:12])

    def hanging() -> int:
        return sum(op == "put_if_absent" and "objects/" in name for op, name in rig.store.log)

    eventually(lambda: hanging() >= 6)
    for _ in range(20):  # so that whatever else may start has started
        rig.node.loop.run(rig.node.loop.disk(int), DEADLINE_S)
    assert hanging() == 6
    gate.release()
    assert queue.drain(DEADLINE_S) == 0
    rig.close()


def test_processes_that_die_later_are_found_too(tmp_path: Path) -> None:
    second = Rig(tmp_path)
    Rig.patches.setattr(uploads, "ADOPT_EVERY_S", 0.02)
    second.queue()
    first = Rig(tmp_path)
    first.faults.append(Fault(error=UnavailableError))
    first.put_spooled(first.queue(), *HASHES[:2])
    assert second.counted("spool.adopted") == 0
    first.close()
    eventually(lambda: second.stored(HASHES[0]) is not None)
    eventually(lambda: second.stored(HASHES[1]) is not None)
    second.close()


def test_fresh_save_of_an_adopted_entry_stores_it_once(tmp_path: Path) -> None:
    first = dead_process(tmp_path, HASHES[0])

    second = Rig(tmp_path, shared=first.bucket)
    hang = Gate()
    second.faults.append(Fault(op="put_if_absent", name=HASHES[0], gate=hang, times=1))
    queue = second.queue()
    assert hang.reached.wait(DEADLINE_S)
    assert queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: second.stored(HASHES[0]) is not None)
    hang.release()
    assert queue.drain(DEADLINE_S) == 0
    assert second.counted("save.items") == 1
    assert second.spooled() == 0
    assert second.counted("internal_errors") == 0
    second.close()


def test_spooled_file_that_cannot_be_read_is_tried_again_and_then_left_for_the_next_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load, refusals = Spool.load, [2, 10**6]

    def refuse_some(spool: Spool, digest: bytes) -> Any:
        if refusals[0]:
            refusals[0] -= 1
            raise TierError("too many open files")
        return load(spool, digest)

    monkeypatch.setattr(Spool, "load", refuse_some)
    rig.pause(first_s=0.001, longest_s=0.001)
    queue = rig.queue()
    queue.put(HASHES[0], IMAGE, tensor())
    eventually(lambda: rig.stored(HASHES[0]) is not None)
    eventually(lambda: rig.spooled() == 0)
    refusals.pop(0)
    queue.put(HASHES[1], IMAGE, tensor())
    eventually(lambda: rig.counted("save_problem.unreadable") > 8)
    assert queue.drain(0) == 1
    assert rig.stored(HASHES[1]) is None
    assert rig.spooled() == 1
    assert caplog.text.count("too many open files") == 1


def test_the_loop_makes_no_call_that_a_disk_has_to_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def thread() -> int:
        return threading.get_ident()

    # What an earlier test left closes its files in whichever thread collects the garbage.
    gc.collect()
    gc.disable()
    try:
        calls = file_calls_of(rig.node.loop.run(thread(), DEADLINE_S), monkeypatch)
        queue = rig.queue()
        assert queue.put(HASHES[0], IMAGE, tensor(0))
        eventually(lambda: rig.stored(HASHES[0]) is not None)
        rig.bucket.objects[rig.node.layout.object(key_of(HASHES[1]))] = b"<html>"
        rig.node.index.mark_bad(key_of(HASHES[1]))
        assert queue.put(HASHES[1], IMAGE, tensor(1))
        assert queue.drain(DEADLINE_S) == 0
    finally:
        gc.enable()
    assert rig.counted("save_problem.bad_object") == 1
    assert calls == []

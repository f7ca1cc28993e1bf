# SPDX-License-Identifier: Apache-2.0
"""Host memory, and staging on the CPU and on a device whose copies the test holds back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from s3ec.codec import Shape
from tests.support.waiting import DEADLINE_S

torch = pytest.importorskip("torch")
accelerators = pytest.importorskip("tests.unit.connector.accelerators")
staging = pytest.importorskip("s3ec.connector.staging")
FakeAccelerator, HostPool = accelerators.FakeAccelerator, staging.HostPool

KIB = 1024
SMALLEST = 64 * KIB
SHAPE = Shape(4, 8, "float32")


# -- the pool of host buffers ----------------------------------------------------------------------


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_take_at_the_limit_waits_for_a_copy_to_end() -> None:
    pool = HostPool(allocate, idle_bytes=SMALLEST, limit_bytes=SMALLEST)
    first, event = pool.take(1), accelerators.FakeEvent()
    pool.give(first, after=event)
    waits = threading.Event()
    event.synchronize = lambda: (waits.set(), event.happened.wait(DEADLINE_S))
    taken: list[torch.Tensor] = []
    thread = in_a_thread(lambda: taken.append(pool.take(1)))
    assert waits.wait(DEADLINE_S)
    assert taken == []
    event.happened.set()
    thread.join(DEADLINE_S)
    assert taken[0] is first
    assert pool.held_bytes == SMALLEST


def test_take_does_not_wait_for_ever_for_takers_that_hang_in_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "PATIENCE_S", 0.01)
    pool = HostPool(allocate, idle_bytes=SMALLEST, limit_bytes=SMALLEST)
    hung = pool.take(1)
    taken: list[object] = []
    thread = in_a_thread(lambda: taken.append(pool.take(1)))
    thread.join(DEADLINE_S)
    waits = thread.is_alive()
    pool.give(hung)
    thread.join(DEADLINE_S)
    assert not waits
    assert taken != [hung]


def test_limit_holds_with_many_takers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE_S", 60.0)
    sizes = [64 * KIB, 128 * KIB, 256 * KIB]
    pool = HostPool(allocate, idle_bytes=512 * KIB, limit_bytes=512 * KIB)
    most = []

    def work(seed: int) -> None:
        for number in range(200):
            buffer = pool.take(sizes[(seed + number) % 3])
            most.append(pool.held_bytes)
            event = accelerators.FakeEvent()
            event.happened.set()
            pool.give(buffer, after=event if number % 2 else None)

    threads = [in_a_thread(lambda seed=seed: work(seed)) for seed in range(4)]
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert max(most) <= 512 * KIB
    pool.take(512 * KIB)
    assert pool.held_bytes == 512 * KIB  # so nothing else is taken


def test_idle_buffers_of_sizes_not_used_for_long_go_first() -> None:
    pool = HostPool(allocate, idle_bytes=192 * KIB)
    old, new = pool.take(64 * KIB), pool.take(128 * KIB)
    pool.give(old)
    pool.give(new)
    assert pool.held_bytes == 192 * KIB
    another = pool.take(64 * KIB)
    assert another is old
    more = pool.take(64 * KIB)
    pool.give(another)
    pool.give(more)
    assert pool.held_bytes == 128 * KIB  # both small ones; the large one went


def test_failed_allocation_takes_nothing() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise MemoryError

    pool = HostPool(refuse, idle_bytes=0, limit_bytes=SMALLEST)
    for _ in range(3):
        with pytest.raises(MemoryError):
            pool.take(1)
    assert pool.held_bytes == 0


def test_buffer_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    pool = HostPool(allocate, idle_bytes=2**20)
    with torch.inference_mode():
        buffer = pool.take(1)
        values = buffer.values(torch.float16, (3, 4))
    assert buffer.values(torch.float16, (3, 4)) is values
    for one in (buffer.memory, values):
        one.zero_()
        assert not one.is_inference()


# -- one suite for both kinds of device -----------------------------------------------------------


def values(seed: int) -> torch.Tensor:
    return torch.full((SHAPE.rows, SHAPE.width), float(seed))


def fill(memory: torch.Tensor, seed: int) -> None:
    memory.view(-1)[: SHAPE.nbytes] = values(seed).view(torch.uint8).view(-1)


def load(device: staging.Staging, seed: int) -> torch.Tensor:
    buffer = device.take(SHAPE)
    fill(buffer.memory, seed)
    return device.to_device(buffer, SHAPE)


def accelerated(fake: FakeAccelerator, **other: int) -> staging.AcceleratorStaging:
    return staging.AcceleratorStaging(fake, **other)


@pytest.fixture(params=["host", "accelerator"])
def either(request: pytest.FixtureRequest) -> staging.Staging:
    return staging.HostStaging() if request.param == "host" else accelerated(FakeAccelerator())


def test_loaded_tensors_have_the_values_and_share_no_memory(either: staging.Staging) -> None:
    loaded = [load(either, seed) for seed in range(6)]
    either.finish_loads(loaded)
    for seed, tensor in enumerate(loaded):
        assert tensor.shape == (SHAPE.rows, SHAPE.width)
        assert torch.equal(tensor, values(seed))
    loaded[0].zero_()
    assert torch.equal(loaded[1], values(1))


def test_memory_is_aligned_for_vector_loads(either: staging.Staging) -> None:
    assert either.take(SHAPE).memory.data_ptr() % 64 == 0


def test_copy_to_the_host_survives_changes_of_the_output(either: staging.Staging) -> None:
    batch = torch.arange(64, dtype=torch.float32).view(8, 8)
    copy = either.to_host(batch[2:6])
    batch.zero_()
    host = copy.wait()
    assert torch.equal(host, torch.arange(16, 48, dtype=torch.float32).view(4, 8))
    assert host.is_contiguous()


def test_copy_of_an_output_that_is_not_contiguous_is(either: staging.Staging) -> None:
    output = torch.arange(32, dtype=torch.float32).view(8, 4).t()
    host = either.to_host(output).wait()
    assert torch.equal(host, output)
    assert host.is_contiguous()


def test_released_memory_is_reused_and_disowned_memory_is_not(either: staging.Staging) -> None:
    first = either.to_host(values(1))
    place = first.wait().data_ptr()
    first.release()
    second = either.to_host(values(2))
    kept = second.wait()
    assert kept.data_ptr() == place
    second.disown()
    second.release()  # nothing any more
    for seed in range(3, 8):
        either.to_host(values(seed)).release()
    assert torch.equal(kept, values(2))


# A device with streams


def test_buffer_of_a_load_is_not_reused_while_its_copy_is_held_back() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    fake.streams[0].held = True
    loaded = [load(device, seed) for seed in range(4)]
    assert len(fake.allocated) == 4  # none could be reused
    fake.release()
    for seed, tensor in enumerate(loaded):
        assert torch.equal(tensor, values(seed))
    again = [load(device, seed) for seed in range(4)]
    assert len(fake.allocated) == 4
    assert all(torch.equal(tensor, values(seed)) for seed, tensor in enumerate(again))


def test_computing_stream_waits_once_for_all_loads() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    fake.streams[0].held = True
    loaded = [load(device, seed) for seed in range(3)]
    assert "computing waits" not in fake.log
    device.finish_loads(loaded)
    seen: list[bool] = []
    fake.computing.queue(
        lambda: seen.extend(torch.equal(one, values(seed)) for seed, one in enumerate(loaded))
    )
    assert seen == []  # the thread went on, the device did not
    fake.release()
    assert seen == [True] * 3
    assert fake.log.count("computing waits") == 1
    assert fake.protected == [(tensor.data_ptr(), "computing") for tensor in loaded]


def test_load_buffers_are_bounded() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake, load_buffer_bytes=2 * 64 * 1024)
    tensors = [load(device, seed) for seed in range(20)]
    assert len(fake.allocated) <= 2
    assert all(torch.equal(tensor, values(seed)) for seed, tensor in enumerate(tensors))


@pytest.mark.parametrize("what", ["copy", "record"])
def test_failed_load_gives_its_bytes_back_and_never_reuses_what_may_be_read(what: str) -> None:
    fake = FakeAccelerator()
    device = accelerated(fake, load_buffer_bytes=64 * 1024)
    fake.streams[0].held = True
    fake.fail_next = what
    with pytest.raises(RuntimeError, match=what):
        load(device, 1)
    assert device.loads.held_bytes == 0
    tensor = load(device, 2)  # does not wait for room
    fake.release()
    assert torch.equal(tensor, values(2))
    assert len(fake.allocated) == 2


def test_memory_that_nothing_came_of_is_reused_at_once() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake, load_buffer_bytes=64 * 1024)
    for _ in range(3):
        device.drop(device.take(SHAPE))
    assert len(fake.allocated) == 1


def test_save_runs_behind_the_computation_and_keeps_the_output_s_memory() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    output = torch.zeros(4, 8)
    fake.computing.held = True
    fake.computing.queue(lambda: output.fill_(7))
    copy = device.to_host(output)  # returns at once
    fake.computing.queue(lambda: None)
    assert fake.streams[1].queued == 3  # wait, copy, event: none of them done
    assert fake.protected == [(output.data_ptr(), "saves")]
    fake.release()
    assert torch.equal(copy.wait(), torch.full((4, 8), 7.0))


def test_what_computes_next_writes_to_an_output_only_when_that_was_copied() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    fake.streams[1].held = True
    output = values(1)
    copy = device.to_host(output)
    fake.computing.queue(lambda: output.fill_(9))
    fake.release()
    assert torch.equal(copy.wait(), values(1))
    assert torch.equal(output, values(9))


def test_released_save_buffer_is_not_reused_while_its_copy_is_held_back() -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    fake.streams[1].held = True
    first = device.to_host(values(1))
    first.release()
    second = device.to_host(values(2))
    assert len(fake.allocated) == 2
    fake.release()
    assert torch.equal(second.wait(), values(2))


@pytest.mark.parametrize("what", ["copy", "record"])
def test_failed_save_gives_its_bytes_back(what: str) -> None:
    fake = FakeAccelerator()
    device = accelerated(fake)
    fake.fail_next = what
    with pytest.raises(RuntimeError, match=what):
        device.to_host(values(1))
    assert accelerators.is_all_idle(device.saves)
    assert torch.equal(device.to_host(values(2)).wait(), values(2))


def test_cpu_is_staged_without_streams() -> None:
    made = staging.open_staging(torch.device("cpu"))
    assert isinstance(made, staging.HostStaging)


class Module:
    """What torch.cuda and its like offer, as far as Accelerator uses it."""

    def __init__(self) -> None:
        self.inside: list[object] = []
        self.recorded: list[tuple[dict[str, object], object]] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.inside.append(device)
        yield
        self.inside.pop()

    def Stream(self, *, device: torch.device) -> str:  # noqa: N802 - torch's name
        return f"stream of {device}"

    def Event(self, **kwargs: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(record=lambda stream: self.recorded.append((kwargs, stream)))

    def current_stream(self, device: torch.device) -> str:
        return f"current of {device}"


@pytest.mark.parametrize(("kind", "blocking"), [("cuda", {"blocking": True}), ("xpu", {})])
def test_device_modules_are_asked_for_the_model_s_device(
    kind: str, blocking: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    compat = pytest.importorskip("s3ec.connector.compat")
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(compat, "can_pin_memory", lambda: False)
    device = torch.device(kind, 1)
    accelerator = staging.Accelerator(device, can_pin=False)
    assert accelerator.allocate_host(10).numel() == 10
    assert accelerator.make_stream() == f"stream of {kind}:1"
    assert accelerator.current_stream() == f"current of {kind}:1"
    accelerator.record("a stream")
    assert module.recorded == [(blocking, "a stream")]
    made = staging.open_staging(device)
    assert isinstance(made, staging.AcceleratorStaging)

# SPDX-License-Identifier: Apache-2.0
"""Staging and the encode timer on a real CUDA device; skipped where there is none.

Everywhere else a device is played (``accelerators.py``). Here the copies are as late as they like.
"""

from __future__ import annotations

import random
import threading

import pytest

from s3ec.codec import Shape
from s3ec.connector.messages import Encode

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
staging = pytest.importorskip("s3ec.connector.staging")
worker = pytest.importorskip("s3ec.connector.worker")

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000  # about 0.1 s of a stream
MIB = 2**20


def open_device(**more: int) -> staging.AcceleratorStaging:
    return staging.AcceleratorStaging(staging.Accelerator(DEVICE, can_pin=True), **more)


def shape_of(number: int) -> Shape:
    return Shape(16 + number % 7 * 61, 512, "bfloat16")


def values(shape: Shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (shape.rows, shape.width), generator=generator)
    return bits.to(torch.int16)


def load(device: staging.AcceleratorStaging, shape: Shape, seed: int) -> torch.Tensor:
    buffer = device.take(shape)
    source = values(shape, seed).view(torch.uint8).reshape(-1)
    buffer.memory[: shape.nbytes] = source
    return device.to_device(buffer, shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.int16)


def test_loads_keep_their_bits_while_few_buffers_serve_many() -> None:
    device = open_device(load_buffer_bytes=MIB)
    kept = []
    for number in range(400):
        shape = shape_of(number)
        one = load(device, shape, number)
        assert one.device == DEVICE
        device.finish_loads([one])
        kept.append((shape, number, one))
    for shape, number, one in kept:
        assert torch.equal(bits(one), values(shape, number))
    assert device.loads.held_bytes <= MIB


def test_loads_of_several_threads_keep_their_bits() -> None:
    device = open_device(load_buffer_bytes=2 * MIB)
    found: dict[int, torch.Tensor] = {}

    def work(first: int) -> None:
        for number in range(first, 240, 4):
            found[number] = load(device, shape_of(number), number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.finish_loads(found.values())
    assert len(found) == 240
    for number, one in found.items():
        assert torch.equal(bits(one), values(shape_of(number), number))


def test_memory_of_a_load_is_not_reused_while_the_computing_stream_reads_it() -> None:
    device = open_device()
    shape = Shape(1024, 1024, "bfloat16")
    sums = []
    for number in range(30):
        one = load(device, shape, number)
        device.finish_loads([one])
        torch.cuda._sleep(BUSY_CYCLES // 50)
        sums.append(one.view(torch.int16).clone())
        del one  # the next load may get its memory, and must not before the clone has run
    for number, copied in enumerate(sums):
        assert torch.equal(copied.cpu(), values(shape, number))


def test_save_returns_at_once_and_has_the_values_of_its_moment() -> None:
    device = open_device()
    shape = Shape(256, 5376, "bfloat16")
    copies = []
    for number in range(20):
        output = values(shape, number).to(DEVICE)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES // 10)
        busy = torch.cuda.Event()
        busy.record()
        copies.append(device.to_host(output))
        assert not busy.query()  # the copy is queued behind what computes, and nobody waited
        output.zero_()
        del output
    for number, copy in enumerate(copies):
        assert torch.equal(copy.wait(), values(shape, number))
        copy.release()


def test_memory_of_a_released_save_is_not_reused_before_its_copy_has_ended() -> None:
    device = open_device()
    shape = Shape(256, 5376, "bfloat16")
    rng = random.Random(0)
    kept = []
    for number in range(60):
        copy = device.to_host(values(shape, number).to(DEVICE))
        if rng.random() < 0.5:
            copy.release()  # nobody wants it any more
        else:
            kept.append((number, copy))
    for number, copy in kept:
        assert torch.equal(copy.wait(), values(shape, number))


def test_copies_use_pinned_memory() -> None:
    device = open_device()
    assert device.take(Shape(16, 512, "bfloat16")).memory.is_pinned()
    assert device.to_host(torch.zeros(16, 512, device=DEVICE)).wait().is_pinned()


def test_encode_time_is_what_the_stream_took_and_nobody_waits_for_it() -> None:
    timer = worker.EncodeTimer(lambda: DEVICE)
    timer.begin([Encode("image", 256)])
    torch.cuda._sleep(BUSY_CYCLES)
    timer.end()
    assert timer.take() == []
    torch.cuda.synchronize()
    (measured,) = timer.take()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(BUSY_CYCLES)
    end.record()
    torch.cuda.synchronize()
    assert measured.seconds == pytest.approx(start.elapsed_time(end) / 1e3, rel=0.5)

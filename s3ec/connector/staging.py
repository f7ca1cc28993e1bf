# SPDX-License-Identifier: Apache-2.0
"""Embeddings between host memory and the model's device: one interface, two kinds of device.

``HostStaging`` serves engines on the CPU, ``AcceleratorStaging`` whatever has streams and
events (cuda, xpu, npu). All that depends on torch's device modules is in ``Accelerator``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from s3ec.codec import Shape
from s3ec.connector.host_pool import Buffer, Event, HostPool

# Pinned memory for loads: enough to keep a PCIe link busy while the next files are read.
LOAD_BUFFER_BYTES = 128 * 2**20
# Kept for the next saves; what is in use is bounded by the save queue.
SAVE_IDLE_BYTES = 64 * 2**20


class HostCopy:
    """A tensor on its way to the host. Not thread-safe: it wanders from thread to thread."""

    def __init__(
        self, pool: HostPool, buffer: Buffer, values: torch.Tensor, done: Event | None
    ) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer
        self._values = values
        self._done = done

    def wait(self) -> torch.Tensor:
        """The contiguous CPU tensor, when the copy has ended; off the GIL. Not to be kept."""
        if self._done is not None:
            self._done.synchronize()
        return self._values

    def release(self) -> None:
        """Let the memory be reused; the tensor must not be used from here on. Idempotent.

        A copy that is still under way is waited for by whoever takes the memory next.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give(buffer, after=self._done)

    def disown(self) -> None:
        """Leave the memory to those who use the tensor: it will never be reused."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.forget(buffer)


class Staging(Protocol):
    """Moves embeddings of one device. Thread-safe but for ``finish_loads``."""

    def take(self, shape: Shape) -> Buffer:
        """Host memory to read one embedding into, at least ``shape.nbytes`` long.

        May wait for copies to end: no thread may hold two. Ends with ``drop`` or ``to_device``.
        """

    def drop(self, buffer: Buffer) -> None:
        """Give memory back that nothing came of."""

    def forget(self, buffer: Buffer) -> None:
        """Leave memory to a reader who may write to it still: it is never reused."""

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """Begin to bring ``shape.nbytes`` of taken memory to the device; takes it over.

        Returns:
            Tensor of ``shape`` on the device, aliasing nothing that is reused. Not to be used
            before ``finish_loads``.
        """

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Let the calling thread's stream wait for these; the thread itself does not wait."""

    def to_host(self, output: torch.Tensor) -> HostCopy:
        """Begin to copy a tensor of the calling thread's stream; returns without waiting.

        The tensor may be changed or freed by later work of that stream.
        """


class HostStaging:
    """The device is the CPU: what was read is the result, a save is one copy."""

    def __init__(self) -> None:
        self._pool = HostPool(_empty, idle_bytes=SAVE_IDLE_BYTES)

    def take(self, shape: Shape) -> Buffer:
        """Fresh memory, since it becomes the result."""
        values = torch.empty(shape.rows, shape.width, dtype=getattr(torch, shape.dtype))
        return Buffer(values.view(torch.uint8), values)

    def drop(self, buffer: Buffer) -> None:
        """Nothing: it is freed with its last reference."""

    def forget(self, buffer: Buffer) -> None:
        """Nothing, likewise: the reader has the last one."""

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """The memory itself as a tensor."""
        return _values(buffer, shape)

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Nothing is under way."""

    def to_host(self, output: torch.Tensor) -> HostCopy:
        """Copy into reused memory, now."""
        buffer = self._pool.take(output.nbytes)
        try:
            values = buffer.values(output.dtype, output.shape)
            values.copy_(output.detach() if output.requires_grad else output)
        except BaseException:
            self._pool.give(buffer)
            raise
        return HostCopy(self._pool, buffer, values, None)


class Accelerator:
    """What is asked of a device: the calls that torch.cuda, torch.xpu and their like share."""

    def __init__(self, device: torch.device, *, can_pin: bool) -> None:
        """Nothing is allocated yet.

        Args:
            device: With its index: other threads begin with device 0.
            can_pin: Whether pinned memory is to be had (WSL has none); copies wait without.
        """
        self.device = device
        self._can_pin = can_pin
        self._module: Any = torch.get_device_module(device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory; takes about a millisecond."""
        with self._module.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._can_pin)

    def make_stream(self) -> Any:
        """A stream beside the one that computes."""
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """The calling thread's."""
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work and allocations inside belong to this stream (and to its device)."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the stream that ``on`` names."""
        target.copy_(source, non_blocking=True)

    def record(self, stream: Any) -> Any:
        """An event behind everything queued on a stream; a thread that waits for it sleeps."""
        kind = self._module.Event
        event = kind(blocking=True) if self.device.type == "cuda" else kind()
        event.record(stream)
        return event

    def protect(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before what is queued on a stream has run."""
        tensor.record_stream(stream)


class AcceleratorStaging:
    """Through pinned memory, on a side stream for each direction.

    A buffer is reused after the event behind its copy, never earlier. Not measured on a GPU.
    """

    def __init__(
        self, accelerator: Accelerator, *, load_buffer_bytes: int = LOAD_BUFFER_BYTES
    ) -> None:
        """Streams and buffers are made when first used.

        Args:
            accelerator: The device.
            load_buffer_bytes: Of pinned memory for loads; a larger embedding goes alone.
        """
        self._accelerator = accelerator
        allocate = accelerator.allocate_host
        self._loads = HostPool(
            allocate, limit_bytes=load_buffer_bytes, idle_bytes=load_buffer_bytes
        )
        self._saves = HostPool(allocate, idle_bytes=SAVE_IDLE_BYTES)
        self._load_stream = accelerator.make_stream()
        self._save_stream = accelerator.make_stream()

    def take(self, shape: Shape) -> Buffer:
        """Pinned memory of the bounded pool."""
        return self._loads.take(shape.nbytes)

    def drop(self, buffer: Buffer) -> None:
        """Nothing was queued for it: the next may have it at once."""
        self._loads.give(buffer)

    def forget(self, buffer: Buffer) -> None:
        """Another may be pinned in its place."""
        self._loads.forget(buffer)

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """Queue the copy into new memory of the side stream; the buffer comes back by itself."""
        device = self._accelerator
        try:
            values = _values(buffer, shape)
            with device.on(self._load_stream):
                # Allocated here too: memory that the computing stream has just freed would have
                # to be waited for.
                target = torch.empty(values.shape, dtype=values.dtype, device=device.device)
                device.copy(target, values)
                copied = device.record(self._load_stream)
        except BaseException:
            self._loads.forget(buffer)  # a copy may be under way
            raise
        self._loads.give(buffer, after=copied)
        return target

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """One event for all; the memory stays until the computing stream is through with it."""
        device = self._accelerator
        computing = device.current_stream()
        computing.wait_event(device.record(self._load_stream))
        for tensor in loaded:
            device.protect(tensor, computing)

    def to_host(self, output: torch.Tensor) -> HostCopy:
        """Queue the copy behind what the computing stream has queued so far."""
        device = self._accelerator
        output = output.detach()
        buffer = self._saves.take(output.nbytes)
        try:
            values = buffer.values(output.dtype, output.shape)
            self._save_stream.wait_event(device.record(device.current_stream()))
            with device.on(self._save_stream):
                device.copy(values, output)
                copied = device.record(self._save_stream)
            device.protect(output, self._save_stream)
        except BaseException:
            self._saves.forget(buffer)  # a copy may be under way
            raise
        return HostCopy(self._saves, buffer, values, copied)


def open_staging(device: torch.device, *, can_pin: Callable[[], bool]) -> Staging:
    """The staging of one device."""
    if device.type == "cpu":
        return HostStaging()
    return AcceleratorStaging(Accelerator(device, can_pin=can_pin()))


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _values(buffer: Buffer, shape: Shape) -> torch.Tensor:
    return buffer.values(getattr(torch, shape.dtype), (shape.rows, shape.width))

# SPDX-License-Identifier: Apache-2.0
"""Moves embeddings between host memory and the model's device: one interface, two implementations.

``HostStaging`` serves engines on the CPU, ``AcceleratorStaging`` devices with streams and events
(cuda, xpu, npu). All that depends on torch's device modules is in ``Accelerator``. Host memory
comes from a pool that is bounded in bytes; a buffer that a copy still uses is not reused.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from s3ec.codec import Shape

_SMALLEST_BYTES = 64 * 1024
# Short, since the waiting thread may be the engine's.
PATIENCE_S = 1.0
# Pinned memory for loads: enough to keep a PCIe link busy while the next files are read.
LOAD_BUFFER_BYTES = 128 * 2**20
# Kept for the next saves; the save queue bounds the buffers in use.
SAVE_IDLE_BYTES = 64 * 2**20


# A point in a stream of device work, from torch's device modules: `query` is True once all work
# before it is done, `synchronize` waits for that, off the GIL.
Event = Any


class Buffer:
    """Host memory, and the last tensor view of it.

    Attributes:
        memory: uint8 tensor on the CPU, contiguous, aligned for any dtype.
        nbytes: Its length.
    """

    __slots__ = ("_seen", "memory", "nbytes")

    def __init__(self, memory: torch.Tensor, seen: torch.Tensor | None = None) -> None:
        """Wrap some memory.

        Args:
            seen: The view that the next user is likely to ask ``values`` for.
        """
        self.memory = memory
        self.nbytes = memory.numel()
        self._seen = seen

    def values(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the start of the buffer as a tensor.

        The view is kept for the next user, who mostly needs the same shape: with cold caches,
        making a view takes longer than many copies of a tensor.
        """
        seen = self._seen
        if seen is None or seen.dtype is not dtype or seen.shape != shape:
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # as for the memory itself, see HostPool.take
                seen = self._seen = self.memory[:nbytes].view(dtype).view(shape)
        return seen


def bytes_of(memory: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous uint8 tensor on the CPU; keeps the tensor alive."""
    array: Any = memory.numpy()
    return memoryview(array).cast("B")


class HostPool:
    """Buffers of host memory that are taken, and given back for reuse. Thread-safe.

    States of a buffer:

    =======  =======  ===================================================================
    state    goes to  when
    =======  =======  ===================================================================
    (new)    taken    ``take`` finds no idle one of its size; above the limit only after its
                      wait for one timed out
    taken    idle     ``give``, and no copy uses it
    taken    flying   ``give`` with the event that ends its last copy
    taken    (gone)   ``leak``: it may still be in use, so it is never reused
    flying   idle     that event has happened, as seen by the next ``take``
    idle     taken    ``take``; the one that was given back last is reused first
    idle     (freed)  too many bytes are idle, or their room is needed for another size
    =======  =======  ===================================================================

    Page faults and pinning cost more than the copies themselves; reused memory has neither.
    Sizes are powers of two, so that embeddings with different rows share buffers (torch rounds
    pinned memory up in the same way, and the rest of other memory is never touched).
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        *,
        idle_bytes: int,
        limit_bytes: float = math.inf,
    ) -> None:
        """Allocate nothing before the first take.

        Args:
            allocate: Makes a uint8 tensor of the given number of bytes, aligned for any dtype.
            idle_bytes: Bytes of idle buffers to keep; more are freed, the least recently used
                first.
            limit_bytes: Bytes of all buffers together at which ``take`` waits; one larger buffer
                may be taken alone. If infinite, the callers have a bound of their own.
        """
        self._allocate = allocate
        self._idle_limit_bytes = idle_bytes
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._flying: deque[tuple[Event, Buffer]] = deque()
        self._flying_bytes = 0
        self._idle: list[Buffer] = []  # the last used last
        self._idle_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers: taken, waiting for their copies, and idle."""
        with self._changed:
            return self._taken_bytes + self._flying_bytes + self._idle_bytes

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``, with arbitrary content.

        At the limit this waits for a copy to end or for another caller to give a buffer back: a
        caller must not hold one buffer while it takes the next. If none is given back for
        ``PATIENCE_S``, the others hang in a disk, and this buffer exceeds the limit: there are
        few callers.

        Returns:
            A buffer whose size is the next power of two (at least 64 KiB).
        """
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        while True:
            with self._changed:
                self._collect_locked()
                idle = self._pop_idle_locked(size)
                if idle is not None:
                    return idle
                busy = self._taken_bytes + self._flying_bytes
                if not busy or busy + size <= self._limit_bytes:
                    self._shrink_locked(max(0, self._limit_bytes - busy - size))
                    self._taken_bytes += size
                    break
                if not self._flying:
                    if self._changed.wait(PATIENCE_S):
                        continue
                    self._taken_bytes += size
                    break
                event = self._flying[0][0]
            event.synchronize()
        try:
            # Hooks run in inference mode; a tensor made there could not be written elsewhere.
            with torch.inference_mode(False):
                return Buffer(self._allocate(size))
        except BaseException:
            self._untake(size)
            raise

    def give(self, buffer: Buffer, *, after: Event | None = None) -> None:
        """Give a buffer back; the caller must not use it, or a view of it, from here on.

        Args:
            after: Event at the end of the last copy that uses it; it is not reused before.
        """
        with self._changed:
            if after is None:
                self._rest_locked(buffer)
            else:
                self._flying.append((after, buffer))
                self._flying_bytes += buffer.nbytes
            self._taken_bytes -= buffer.nbytes
            self._changed.notify_all()

    def leak(self, buffer: Buffer) -> None:
        """Leave a buffer to a thread that still uses it: never reused, freed with its last use."""
        self._untake(buffer.nbytes)

    def _untake(self, nbytes: int) -> None:
        with self._changed:
            self._taken_bytes -= nbytes
            self._changed.notify_all()

    def _collect_locked(self) -> None:
        """Move buffers whose copies have ended to idle; copies of one stream end in order."""
        while self._flying and self._flying[0][0].query():
            buffer = self._flying.popleft()[1]
            self._flying_bytes -= buffer.nbytes
            self._rest_locked(buffer)

    def _rest_locked(self, buffer: Buffer) -> None:
        self._idle.append(buffer)
        self._idle_bytes += buffer.nbytes
        self._shrink_locked(self._idle_limit_bytes)

    def _pop_idle_locked(self, size: int) -> Buffer | None:
        """Return the last one given back: it is most likely to be in a processor's cache."""
        for place in reversed(range(len(self._idle))):
            if self._idle[place].nbytes == size:
                self._idle_bytes -= size
                self._taken_bytes += size
                return self._idle.pop(place)
        return None

    def _shrink_locked(self, idle_bytes: float) -> None:
        while self._idle_bytes > idle_bytes:
            self._idle_bytes -= self._idle.pop(0).nbytes


class HostCopy:
    """A tensor being copied to the host. Not thread-safe: it is handed from thread to thread."""

    def __init__(
        self, pool: HostPool, buffer: Buffer, values: torch.Tensor, done: Event | None
    ) -> None:
        self._pool = pool
        self._buffer: Buffer | None = buffer
        self._values = values
        self._done = done

    def wait(self) -> torch.Tensor:
        """Wait for the copy, off the GIL; return the contiguous CPU tensor, valid until release."""
        if self._done is not None:
            self._done.synchronize()
        return self._values

    def release(self) -> None:
        """Let the memory be reused; the tensor must not be used from here on. Idempotent.

        The memory is not reused before a copy that is still running has ended.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give(buffer, after=self._done)

    def disown(self) -> None:
        """Leave the memory to the users of the tensor: it will never be reused."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.leak(buffer)


class HostStaging:
    """Staging for the CPU: the memory read is the result, a save is one copy. Thread-safe.

    Attributes:
        saves: Buffers for saves.
    """

    def __init__(self) -> None:
        self.saves = HostPool(_empty, idle_bytes=SAVE_IDLE_BYTES)

    def take(self, shape: Shape) -> Buffer:
        """Return fresh memory to read one embedding into; it becomes the result."""
        values = torch.empty(shape.rows, shape.width, dtype=getattr(torch, shape.dtype))
        return Buffer(values.view(torch.uint8), values)

    def drop(self, buffer: Buffer) -> None:
        """Do nothing: the buffer is freed with its last reference."""

    leak = drop

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """Return the memory itself as a tensor, as made by ``take``."""
        return _values(buffer, shape)

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Do nothing: no copy is running."""

    def to_host(self, output: torch.Tensor) -> HostCopy:
        """Copy into reused memory, now."""
        buffer = self.saves.take(output.nbytes)
        try:
            values = buffer.values(output.dtype, output.shape)
            values.copy_(output.detach() if output.requires_grad else output)
        except BaseException:
            self.saves.give(buffer)
            raise
        return HostCopy(self.saves, buffer, values, None)


class Accelerator:
    """A device: the calls that torch.cuda, torch.xpu and similar modules share."""

    def __init__(self, device: torch.device, *, can_pin: bool) -> None:
        """Allocate nothing yet.

        Args:
            device: With its index: other threads begin with device 0.
            can_pin: True if pinned memory is available (not on WSL); without it copies block.
        """
        self.device = device
        self._can_pin = can_pin
        self._module: Any = torch.get_device_module(device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory; takes about a millisecond."""
        with self._module.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._can_pin)

    def make_stream(self) -> Any:
        """Create a stream beside the one that computes."""
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """Return the calling thread's stream."""
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run work and allocations inside on this stream (and its device)."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the stream set by ``on``."""
        target.copy_(source, non_blocking=True)

    def record(self, stream: Any) -> Any:
        """Record an event behind all work queued on a stream; a thread that waits for it sleeps."""
        kind = self._module.Event
        event = kind(blocking=True) if self.device.type == "cuda" else kind()
        event.record(stream)
        return event

    def protect(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before the work queued on a stream has run."""
        tensor.record_stream(stream)


class AcceleratorStaging:
    """Staging through pinned memory, with a side stream for each direction.

    A buffer is reused after the event behind its copy, never earlier. Thread-safe, except
    ``finish_loads``.

    Attributes:
        loads: Buffers for loads; bounded.
        saves: Buffers for saves.
    """

    def __init__(
        self, accelerator: Accelerator, *, load_buffer_bytes: int = LOAD_BUFFER_BYTES
    ) -> None:
        """Create the streams; buffers are allocated when first used.

        Args:
            accelerator: The device.
            load_buffer_bytes: Bytes of pinned memory for loads; a larger embedding goes alone.
        """
        self._accelerator = accelerator
        allocate = accelerator.allocate_host
        self.loads = HostPool(allocate, limit_bytes=load_buffer_bytes, idle_bytes=load_buffer_bytes)
        self.saves = HostPool(allocate, idle_bytes=SAVE_IDLE_BYTES)
        self._load_stream = accelerator.make_stream()
        self._save_stream = accelerator.make_stream()

    def take(self, shape: Shape) -> Buffer:
        """Return pinned memory to read one embedding into, at least ``shape.nbytes`` long.

        May wait for copies to end: no thread may hold two buffers. The caller ends its use with
        ``drop``, ``leak`` or ``to_device``.
        """
        return self.loads.take(shape.nbytes)

    def drop(self, buffer: Buffer) -> None:
        """Give back memory that was not used."""
        self.loads.give(buffer)

    def leak(self, buffer: Buffer) -> None:
        """Leave memory to a reader that may still write to it: it is never reused."""
        self.loads.leak(buffer)

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """Begin to copy ``shape.nbytes`` of taken memory to the device; takes the buffer over.

        Returns:
            Tensor of ``shape`` on the device, which aliases no reused memory. Not to be used
            before ``finish_loads``.
        """
        device = self._accelerator
        try:
            values = _values(buffer, shape)
            with device.on(self._load_stream):
                # Allocated on this stream too: else the copy might have to wait for memory that
                # the computing stream has just freed.
                target = torch.empty(values.shape, dtype=values.dtype, device=device.device)
                device.copy(target, values)
                copied = device.record(self._load_stream)
        except BaseException:
            self.loads.leak(buffer)  # a copy may be under way
            raise
        self.loads.give(buffer, after=copied)
        return target

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Let the calling thread's stream wait for these loads; the thread itself does not wait.

        One event for all; the memory stays until the computing stream no longer uses it.
        """
        device = self._accelerator
        computing = device.current_stream()
        computing.wait_event(device.record(self._load_stream))
        for tensor in loaded:
            device.protect(tensor, computing)

    def to_host(self, output: torch.Tensor) -> HostCopy:
        """Begin to copy a tensor of the calling thread's stream; returns without waiting.

        The tensor may be changed or freed by later work of that stream.
        """
        device = self._accelerator
        output = output.detach()
        buffer = self.saves.take(output.nbytes)
        try:
            values = buffer.values(output.dtype, output.shape)
            computing = device.current_stream()
            self._save_stream.wait_event(device.record(computing))
            with device.on(self._save_stream):
                device.copy(values, output)
                copied = device.record(self._save_stream)
            # The next computation may write to the output's memory, so it waits for the copy. That
            # costs the device the time of the copy, and no thread waits.
            computing.wait_event(copied)
            device.protect(output, self._save_stream)
        except BaseException:
            self.saves.leak(buffer)  # a copy may be under way
            raise
        return HostCopy(self.saves, buffer, values, copied)


Staging = HostStaging | AcceleratorStaging


def open_staging(device: torch.device) -> Staging:
    """Return the staging of one device."""
    if device.type == "cpu":
        return HostStaging()
    # Importing vllm takes many seconds, and the CPU does not need it.
    from s3ec.connector import compat

    return AcceleratorStaging(Accelerator(device, can_pin=compat.can_pin_memory()))


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _values(buffer: Buffer, shape: Shape) -> torch.Tensor:
    return buffer.values(getattr(torch, shape.dtype), (shape.rows, shape.width))

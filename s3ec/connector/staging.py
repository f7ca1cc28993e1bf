# SPDX-License-Identifier: Apache-2.0
"""Embeddings between host memory and the model's device: one interface, two kinds of device.

``HostStaging`` serves engines on the CPU, ``AcceleratorStaging`` whatever has streams and events
(cuda, xpu, npu). All that depends on torch's device modules is in ``Accelerator``. Host memory
comes from a pool that is bounded in bytes; what a copy still uses is not handed out again.
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
# The engine may be who waits.
PATIENCE_S = 1.0
# Pinned memory for loads: enough to keep a PCIe link busy while the next files are read.
LOAD_BUFFER_BYTES = 128 * 2**20
# Kept for the next saves; what is in use is bounded by the save queue.
SAVE_IDLE_BYTES = 64 * 2**20


# A place in a stream of device work, as torch's device modules offer it: `query` says whether all
# before it has happened, `synchronize` waits for that, off the GIL.
Event = Any


class Buffer:
    """Host memory, and the last way that somebody looked at it.

    Attributes:
        memory: uint8 tensor on the CPU, contiguous, aligned for any dtype.
        nbytes: Its length.
    """

    __slots__ = ("_seen", "memory", "nbytes")

    def __init__(self, memory: torch.Tensor, seen: torch.Tensor | None = None) -> None:
        """Wrap some memory.

        Args:
            seen: What the next user is likely to ask ``values`` for.
        """
        self.memory = memory
        self.nbytes = memory.numel()
        self._seen = seen

    def values(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Its beginning as a tensor.

        Kept for the next user, who mostly has the same shape: cold, the views of a tensor take
        longer than many a copy of one.
        """
        seen = self._seen
        if seen is None or seen.dtype is not dtype or seen.shape != shape:
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # as for the memory itself, see HostPool.take
                seen = self._seen = self.memory[:nbytes].view(dtype).view(shape)
        return seen


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, to be written to; keeps it alive."""
    array: Any = memory.numpy()
    return memoryview(array).cast("B")


class HostPool:
    """Buffers of host memory that are taken, and given back for the next taker. Thread-safe.

    States of a buffer:

    =======  =======  ===================================================================
    state    goes to  when
    =======  =======  ===================================================================
    (new)    taken    ``take`` finds no idle one of its size; past the limit only after it
                      has waited for one in vain
    taken    idle     ``give``, and no copy uses it
    taken    flying   ``give`` with the event that ends its last copy
    taken    (gone)   ``leak``: somebody may use it still, so it is never reused
    flying   idle     that event has happened, as seen by the next ``take``
    idle     taken    ``take``; the one that was given back last goes first
    idle     (freed)  too many bytes are idle, or their room is needed for another size
    =======  =======  ===================================================================

    Page faults and pinning cost more than the copies themselves; reused memory has neither.
    Sizes are powers of two, so that embeddings of different rows share buffers (torch rounds
    pinned memory up in the same way, and of other memory the rest is never touched).
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        *,
        idle_bytes: int,
        limit_bytes: float = math.inf,
    ) -> None:
        """Nothing is allocated before the first take.

        Args:
            allocate: Makes a uint8 tensor of so many bytes, aligned for any dtype.
            idle_bytes: Of unused buffers kept; the rest goes back to the allocator, what was not
                used for long first.
            limit_bytes: Of all buffers together, at which ``take`` waits; one larger buffer may
                be alone. Without one the takers keep to a bound of their own.
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
        """Of all buffers: taken, waiting for their copies, and idle."""
        with self._changed:
            return self._taken_bytes + self._flying_bytes + self._idle_bytes

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``, with what its last user left in it.

        Where the limit is reached this waits for a copy to end or for another taker to give
        back: a taker must not hold one buffer while it takes the next. Where none gives back
        for ``PATIENCE_S`` they hang in a disk, and the limit is passed by this one: there are
        few takers.

        Returns:
            As long as the next power of two (64 KiB at least).
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
        """Give a buffer back; nobody may use it, or a view of it, from here on.

        Args:
            after: Ends the last copy that uses it; it is not reused before.
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
        """Leave a buffer to whoever still uses it: it is never reused, and freed with them."""
        self._untake(buffer.nbytes)

    def _untake(self, nbytes: int) -> None:
        with self._changed:
            self._taken_bytes -= nbytes
            self._changed.notify_all()

    def _collect_locked(self) -> None:
        """Take in the buffers whose copies have ended; copies of one stream end in order."""
        while self._flying and self._flying[0][0].query():
            buffer = self._flying.popleft()[1]
            self._flying_bytes -= buffer.nbytes
            self._rest_locked(buffer)

    def _rest_locked(self, buffer: Buffer) -> None:
        self._idle.append(buffer)
        self._idle_bytes += buffer.nbytes
        self._shrink_locked(self._idle_limit_bytes)

    def _pop_idle_locked(self, size: int) -> Buffer | None:
        """The last one given back: it is the likeliest to be in a processor's cache."""
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
            self._pool.leak(buffer)


class HostStaging:
    """The device is the CPU: what was read is the result, a save is one copy. Thread-safe.

    Attributes:
        saves: Where buffers for saves come from.
    """

    def __init__(self) -> None:
        self.saves = HostPool(_empty, idle_bytes=SAVE_IDLE_BYTES)

    def take(self, shape: Shape) -> Buffer:
        """Fresh memory to read one embedding into; it becomes the result."""
        values = torch.empty(shape.rows, shape.width, dtype=getattr(torch, shape.dtype))
        return Buffer(values.view(torch.uint8), values)

    def drop(self, buffer: Buffer) -> None:
        """Nothing: it is freed with its last reference."""

    leak = drop

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """The memory itself as a tensor, as ``take`` has made it."""
        return _values(buffer, shape)

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Nothing is under way."""

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

    A buffer is reused after the event behind its copy, never earlier. Thread-safe, but for
    ``finish_loads``.

    Attributes:
        loads: Where buffers for loads come from; bounded.
        saves: Where buffers for saves come from.
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
        self.loads = HostPool(allocate, limit_bytes=load_buffer_bytes, idle_bytes=load_buffer_bytes)
        self.saves = HostPool(allocate, idle_bytes=SAVE_IDLE_BYTES)
        self._load_stream = accelerator.make_stream()
        self._save_stream = accelerator.make_stream()

    def take(self, shape: Shape) -> Buffer:
        """Pinned memory to read one embedding into, at least ``shape.nbytes`` long.

        May wait for copies to end: no thread may hold two. Ends with ``drop``, ``leak`` or
        ``to_device``.
        """
        return self.loads.take(shape.nbytes)

    def drop(self, buffer: Buffer) -> None:
        """Give memory back that nothing came of."""
        self.loads.give(buffer)

    def leak(self, buffer: Buffer) -> None:
        """Leave memory to a reader who may write to it still: it is never reused."""
        self.loads.leak(buffer)

    def to_device(self, buffer: Buffer, shape: Shape) -> torch.Tensor:
        """Begin to bring ``shape.nbytes`` of taken memory to the device; takes it over.

        Returns:
            Tensor of ``shape`` on the device, aliasing nothing that is reused. Not to be used
            before ``finish_loads``.
        """
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
            self.loads.leak(buffer)  # a copy may be under way
            raise
        self.loads.give(buffer, after=copied)
        return target

    def finish_loads(self, loaded: Iterable[torch.Tensor]) -> None:
        """Let the calling thread's stream wait for these; the thread itself does not wait.

        One event for all; the memory stays until the computing stream is through with it.
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
            # What computes next may write to the output's memory. That takes the device as long as
            # the copy, and nobody else.
            computing.wait_event(copied)
            device.protect(output, self._save_stream)
        except BaseException:
            self.saves.leak(buffer)  # a copy may be under way
            raise
        return HostCopy(self.saves, buffer, values, copied)


Staging = HostStaging | AcceleratorStaging


def open_staging(device: torch.device) -> Staging:
    """The staging of one device."""
    if device.type == "cpu":
        return HostStaging()
    # Importing vllm takes many seconds, and what stays on the CPU need not have it.
    from s3ec.connector import compat

    return AcceleratorStaging(Accelerator(device, can_pin=compat.can_pin_memory()))


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _values(buffer: Buffer, shape: Shape) -> torch.Tensor:
    return buffer.values(getattr(torch, shape.dtype), (shape.rows, shape.width))

# SPDX-License-Identifier: Apache-2.0
"""Reusable host memory, bounded in bytes; what a copy still uses is not handed out again."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_SMALLEST_BYTES = 64 * 1024
# The engine may be who waits.
PATIENCE_S = 1.0


class Event(Protocol):
    """A place in a stream of device work, as torch's device modules offer it."""

    def query(self) -> bool:
        """Whether everything before it has happened; never waits."""

    def synchronize(self) -> None:
        """Wait for that, off the GIL."""


class Buffer:
    """Host memory, and the last way that somebody looked at it.

    Attributes:
        memory: uint8 tensor on the CPU, contiguous, aligned for any dtype.
    """

    __slots__ = ("_seen", "memory")

    def __init__(self, memory: torch.Tensor, seen: torch.Tensor | None = None) -> None:
        """Wrap some memory.

        Args:
            seen: What the next user is likely to ask ``values`` for.
        """
        self.memory = memory
        self._seen = seen

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.memory.numel()

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


class HostPool:
    """Buffers of host memory that are taken, and given back for the next taker. Thread-safe.

    Page faults and pinning cost more than the copies themselves; reused memory has neither.
    Sizes are powers of two, so that embeddings of different rows share buffers (torch rounds
    pinned memory up in the same way, and of other memory the rest is never touched).
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        *,
        idle_bytes: int,
        limit_bytes: int | None = None,
    ) -> None:
        """Nothing is allocated before the first take.

        Args:
            allocate: Makes a uint8 tensor of so many bytes, aligned for any dtype.
            idle_bytes: Of unused buffers kept; the rest goes back to the allocator, sizes that
                were not used for long first.
            limit_bytes: Of all buffers together, at which ``take`` waits; one larger buffer may
                be alone. None where the takers keep to a bound of their own.
        """
        self._allocate = allocate
        self._idle_limit_bytes = idle_bytes
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._flying: deque[tuple[Event, Buffer]] = deque()
        self._flying_bytes = 0
        # Size -> buffers, the last used size last.
        self._idle: OrderedDict[int, list[Buffer]] = OrderedDict()
        self._idle_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """In the hands of takers."""
        return self._taken_bytes

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
                if self._idle.get(size):
                    return self._pop_idle_locked(size)
                if self._make_room_locked(size):
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

    def forget(self, buffer: Buffer) -> None:
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
        self._idle.setdefault(buffer.nbytes, []).append(buffer)
        self._idle.move_to_end(buffer.nbytes)
        self._idle_bytes += buffer.nbytes
        self._shrink_locked(self._idle_limit_bytes)

    def _pop_idle_locked(self, size: int) -> Buffer:
        """The last one given back: it is the likeliest to be in a processor's cache."""
        buffer = self._idle[size].pop()
        self._idle.move_to_end(size)
        self._idle_bytes -= size
        self._taken_bytes += size
        return buffer

    def _make_room_locked(self, size: int) -> bool:
        """Whether one of this size may be allocated; idle ones of other sizes go for it."""
        if self._limit_bytes is None:
            return True
        busy = self._taken_bytes + self._flying_bytes
        if busy and busy + size > self._limit_bytes:
            return False
        self._shrink_locked(max(0, self._limit_bytes - busy - size))
        return True

    def _shrink_locked(self, idle_bytes: int) -> None:
        while self._idle_bytes > idle_bytes:
            size, buffers = next(iter(self._idle.items()))
            if buffers:
                buffers.pop()
                self._idle_bytes -= size
            if not buffers:
                del self._idle[size]

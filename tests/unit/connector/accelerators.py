# SPDX-License-Identifier: Apache-2.0
"""A device without hardware: streams whose work a test can hold back, and a log of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from s3ec.connector.staging import HostPool
from tests.support.waiting import DEADLINE_S

_BUFFER_BYTES = 64 * 1024  # the smallest, which all embeddings of these tests fit into


def is_all_idle(pool: HostPool) -> bool:
    """Whether nobody has a buffer: as many as there are can be taken without a new one."""
    held_bytes = pool.held_bytes
    taken = [pool.take(1) for _ in range(held_bytes // _BUFFER_BYTES)]
    is_enough = pool.held_bytes == held_bytes
    for buffer in taken:
        pool.give(buffer)
    return is_enough


class FakeEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(DEADLINE_S), "the event never came"


class FakeStream:
    """Work in order, at once; or, while held, when the test lets it."""

    def __init__(self, device: FakeAccelerator, name: str) -> None:
        self.device = device
        self.name = name
        self.held = False
        self._queued: deque[tuple[FakeEvent | None, Callable[[], object]]] = deque()
        self._lock = threading.RLock()

    def queue(self, work: Callable[[], object], *, behind: FakeEvent | None = None) -> None:
        with self._lock:
            self._queued.append((behind, work))
        self.device.progress()

    def wait_event(self, event: FakeEvent) -> None:
        self.device.log.append(f"{self.name} waits")
        self.queue(lambda: None, behind=event)

    def progress(self) -> bool:
        """Do what may be done; whether anything was."""
        with self._lock:
            done = False
            while self._queued and not self.held:
                behind, work = self._queued[0]
                if behind is not None and not behind.query():
                    break
                self._queued.popleft()
                work()
                done = True
            return done

    def step(self) -> None:
        """Do one piece of work of a held stream."""
        with self._lock:
            _, work = self._queued.popleft()
            work()
        self.device.progress()

    @property
    def queued(self) -> int:
        return len(self._queued)


class FakeAccelerator:
    """What staging.Accelerator offers; device memory is memory of the CPU.

    Copies read their source when the stream gets to them: a buffer that was reused too early
    shows in what arrives.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self.streams: list[FakeStream] = []
        self.computing = FakeStream(self, "computing")
        self.protected: list[tuple[int, str]] = []
        self.allocated: list[torch.Tensor] = []
        self.fail_next: str | None = None
        self._on = threading.local()

    def release(self) -> None:
        for stream in (*self.streams, self.computing):
            stream.held = False
        self.progress()

    def progress(self) -> None:
        while any(stream.progress() for stream in (*self.streams, self.computing)):
            pass

    # What Accelerator has.

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self._maybe_fail("allocate")
        buffer = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        self.allocated.append(buffer)
        return buffer

    def make_stream(self) -> FakeStream:
        stream = FakeStream(self, "loads" if not self.streams else "saves")
        self.streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        return self.computing

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self._on.stream = stream
        try:
            yield
        finally:
            self._on.stream = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._maybe_fail("copy")
        stream = self._on.stream
        self.log.append(f"{stream.name} copies")
        stream.queue(lambda: target.copy_(source))

    def record(self, stream: FakeStream) -> FakeEvent:
        self._maybe_fail("record")
        event = FakeEvent()
        self.log.append(f"{stream.name} records")
        stream.queue(event.happened.set)
        return event

    def protect(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.log.append(f"{stream.name} protects")
        self.protected.append((tensor.data_ptr(), stream.name))

    def _maybe_fail(self, what: str) -> None:
        if self.fail_next == what:
            self.fail_next = None
            raise RuntimeError(f"the device refuses to {what}")

# SPDX-License-Identifier: Apache-2.0
"""How many files of s3ec a hit and a save pass, and how often calls go from one file to another.

``python -m tests.trips`` prints both for three trips. ``python -m tests.trips warm`` also prints
the moves of one of them. vLLM must be installed; no engine starts. Nodes with both halves of the
connector share a bucket in memory, on the CPU.

* **save**: from ``save_caches`` until the object is announced and the scheduler half has the
  worker's report.
* **hit**: a node with an empty disk, from the first ``ensure_cache_available`` of a request until
  the tensor is in the encoder cache and the request has ended.
* **warm**: the same on a node that is started again, whose disk holds the entry.

Each trip is made several times with other embeddings, and that with the fewest moves counts: the
first one makes what is made once, and work that is done each second falls into the others.

A profile function sees every call in every thread. A file counts where a function of it was called.
A *move* is a call whose caller is in another file; the caller is the nearest frame below that is of
s3ec. A call with no such frame, as vLLM's of a hook, is no move. Only the first step of a coroutine
is its call. Left out are modules that are imported, ``s3ec/testing``, ``s3ec/dev``, and what runs
for ever (``*_forever``, ``_poll``) with all it calls.
"""

from __future__ import annotations

import dis
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import s3ec
from s3ec.dev.rigs.vllm_cpu import install_here

PACKAGE = Path(s3ec.__file__).parent
_RESUME = dis.opmap["RESUME"]
_TIMEOUT_S = 60.0
_PAUSE_S = 0.02
# No call for so long: what a trip started has ended.
_QUIET_S = 0.2
_TIMES = 6


@dataclass
class Trip:
    """The files in which functions were called, and how often each moved to each other one."""

    files: set[str] = field(default_factory=set)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tracer:
    """Counts the calls of all threads that start after it was made, and of this one."""

    def __init__(self) -> None:
        self._trip: Trip | None = None
        self._lock = threading.Lock()
        self._names: dict[CodeType, str | None] = {}
        self._last_s = 0.0
        self._waiting = threading.local()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def counting(self) -> Iterator[Trip]:
        """Count until the block ends."""
        trip = self._trip = Trip()
        try:
            yield trip
        finally:
            self._trip = None

    def wait(self, what: str, done: Callable[[], bool] = lambda: True) -> None:
        """Wait until it is done and no thread has called anything for a while.

        Raises:
            TimeoutError: It takes too long.
        """
        deadline_s = time.monotonic() + _TIMEOUT_S
        self._waiting.now = True  # calls of ``done`` do not count
        self._last_s = time.monotonic()
        while not done() or time.monotonic() - self._last_s < _QUIET_S:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not so after {_TIMEOUT_S:.0f} s: {what}")
            time.sleep(_PAUSE_S)
        self._waiting.now = False

    def _profile(self, frame: FrameType, event: str, _arg: object) -> None:
        trip = self._trip
        if trip is None or event != "call" or getattr(self._waiting, "now", False):
            return
        here = self._name(frame.f_code)
        if here is None or not _is_first_step(frame):
            return
        caller: str | None = None
        below: FrameType | None = frame
        while below is not None:
            name = self._name(below.f_code)
            if name is not None and below.f_code.co_name.endswith(("_forever", "_poll")):
                return
            if caller is None and below is not frame:
                caller = name
            below = below.f_back
        with self._lock:
            self._last_s = time.monotonic()
            trip.files.add(here)
            if caller not in (None, here):
                trip.moves[str(caller), here] += 1

    def _name(self, code: CodeType) -> str | None:
        """The file below ``s3ec/``; None for others and for the body of a module."""
        if code not in self._names:
            path = Path(code.co_filename)
            name = None
            if path.is_relative_to(PACKAGE) and code.co_name != "<module>":
                name = path.relative_to(PACKAGE).as_posix()
            self._names[code] = None if name and name.startswith(("testing/", "dev/")) else name
        return self._names[code]


def _is_first_step(frame: FrameType) -> bool:
    """False where a coroutine or a generator resumes; the compiler marks both with ``RESUME``."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return at < 0 or code[at] != _RESUME or code[at + 1] & 3 == 0


class Half:
    """One engine's connector: a Node with a scheduler half and a worker half."""

    def __init__(self, folder: Path, store: Any) -> None:
        import torch

        from s3ec.config import load_settings
        from s3ec.dev.bench.hooks_rig import scheduler_shell
        from s3ec.dev.bench.worker_rig import worker_shell
        from s3ec.identity import Namespace
        from s3ec.node import Node

        settings = load_settings(
            {
                "bucket": "in-memory",
                "cache_dir": str(folder),
                "min_free_bytes": 0,
                "index_refresh_s": 86400,
                "defer_timeout_s": 60,
                # Else the first pictures are encoded, to learn what that costs.
                "wait": "always",
            }
        ).settings
        self.node = Node(settings, Namespace.from_descriptor({"model": "s3ec/trips"}), store=store)
        self.node.users = 2  # each half counts as one
        self.scheduler = scheduler_shell(self.node)
        self.worker = worker_shell(self.node)
        self.cache: dict[str, torch.Tensor] = {}

    def schedule(self, request: Any) -> tuple[bool, bool]:
        """One pass of the scheduler: whether the request may run, and its item is granted."""
        from s3ec.dev.bench.hooks_rig import step_output

        granted = False
        may_run = self.scheduler.ensure_cache_available(request, 0)
        if may_run:
            granted = self.scheduler.has_cache_item(request.mm_features[0].identifier)
            self.scheduler.update_state_after_alloc(request, 0)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step_output()))
        return may_run, granted

    def report(self) -> None:
        """Hand the worker's report to the scheduler half."""
        meta = self.worker.build_connector_worker_meta()
        if meta is not None:
            self.scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=meta))

    def close(self) -> None:
        """End both halves.

        Raises:
            RuntimeError: A counter says that something went wrong; names it.
        """
        told = ("internal_errors", "save_problem", "load.failed", "load.rescued", "announce.failed")
        counts = self.node.counters.snapshot()
        self.worker.shutdown()
        self.scheduler.shutdown()
        problems = {name: n for name, n in counts.items() if n and name.startswith(told)}
        if problems:
            raise RuntimeError(f"the trip did not go as it should: {problems}")


def run(folder: Path) -> dict[str, Trip]:
    """Make all trips.

    Args:
        folder: An empty one, for the disk tiers.

    Raises:
        RuntimeError: A trip did not go as it should.
    """
    import torch

    from s3ec.dev.bench.hooks_rig import Identifiers, make_request
    from s3ec.testing.memory_store import MemoryBucket, MemoryStore

    bucket, tracer = MemoryBucket(), Tracer()
    tensors = {name: torch.randn(256, 64).bfloat16() for name in Identifiers().take(_TIMES)}
    asked = {name: make_request(name, [name]) for name in tensors}
    producer = Half(folder / "producer", MemoryStore(bucket))
    trips = {"save": [_save(tracer, producer, asked[name], tensors, bucket) for name in tensors]}
    producer.close()
    for trip in ("hit", "warm"):
        consumer = Half(folder / "consumer", MemoryStore(bucket))
        index = consumer.node.index
        tracer.wait("the index is read", partial(getattr, index, "loaded"))
        trips[trip] = [_hit(tracer, consumer, request) for request in asked.values()]
        if not all(torch.equal(consumer.cache[name], saved) for name, saved in tensors.items()):
            raise RuntimeError("what was loaded is not what was saved")
        consumer.close()
    return {name: min(made, key=lambda trip: trip.moves.total()) for name, made in trips.items()}


def _save(tracer: Tracer, half: Half, request: Any, tensors: dict[str, Any], bucket: Any) -> Trip:
    name = request.mm_features[0].identifier

    def announced() -> int:
        with bucket.lock:
            return sum("/manifest/v2/delta/" in key for key in bucket.objects)

    if half.schedule(request) != (True, False):
        raise RuntimeError("what nobody has stored yet should be encoded")
    half.cache[name] = tensors[name]
    before = announced()
    with tracer.counting() as trip:
        half.worker.save_caches(half.cache, name)
        tracer.wait("the save is announced", lambda: announced() > before)
        half.report()
    half.scheduler.request_finished(request)
    return trip


def _hit(tracer: Tracer, half: Half, request: Any) -> Trip:
    may_run = granted = False
    with tracer.counting() as trip:
        while not may_run:
            may_run, granted = half.schedule(request)
            tracer.wait("the entry is fetched")
        half.worker.start_load_caches(half.cache)
        half.report()
        half.scheduler.request_finished(request)
        tracer.wait("the file is given back")
    if not granted:
        raise RuntimeError("a stored entry was not granted")
    return trip


def main(shown: list[str]) -> None:
    """Print what the trips came to, and the moves of those that are named."""
    install_here()
    with tempfile.TemporaryDirectory() as folder:
        trips = run(Path(folder))
    lines = [f"{'trip':<6}{'files':>7}{'moves':>7}"]
    lines += [f"{n:<6}{len(t.files):>7}{t.moves.total():>7}" for n, t in trips.items()]
    for name in shown:
        lines += [f"{n:>4} {one} -> {other}" for (one, other), n in trips[name].moves.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

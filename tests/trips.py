# SPDX-License-Identifier: Apache-2.0
"""How many files of s3ec a hit and a save pass through, and how often they go from one to another.

Run ``python -m tests.trips``: it prints a table on stderr and JSON on stdout. vLLM must be
installed; no engine starts. Two real Nodes, each with both halves of the connector, share a bucket
in memory. The first one saves an embedding, the second one loads it. Each does it once before, with
another embedding, so that imports and what is made once are over.

The two trips:

* **save**: from the worker's ``save_caches`` until the object is in the bucket, announced in the
  index and out of the spool, and the scheduler half has the worker's report.
* **hit**: from the first ``ensure_cache_available`` of a request until the tensor is in the
  worker's encoder cache, the file is unpinned and the request has ended. The device is the CPU.

**What counts.** A profile function (``threading.setprofile``) sees every call in every thread. A
*file* counts where a function of it was called. A *move* is a call whose caller is in another file.
The caller is the nearest frame below in the stack that is s3ec's; what lies between (asyncio, a
decorator of the standard library, a generated ``__init__``) is skipped. So what a task or a pool's
work begins with is called by ``runtime.py``, which runs the loop and the pool.
Where no frame below is s3ec's, as of a hook that vLLM calls, it is an *entry* and no move.

**What does not count.** Going on after an ``await`` or a ``yield``: only the first step of a
coroutine is its call. Modules that are imported. What stands for vLLM and the bucket:
``s3ec/testing``, ``s3ec/dev`` and this file. Polling: while a trip waits for other threads, no
hook is called, the test's own looks are not profiled. What runs for ever is left out with all it
calls (``*_forever``: refresh, rescan, compaction; ``_poll``: the look for other processes' news).
"""

from __future__ import annotations

import dis
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import s3ec

PACKAGE = Path(s3ec.__file__).parent
NOT_OURS = ("testing/", "dev/")
_RESUME = dis.opmap["RESUME"]
_TIMEOUT_S = 60.0
_LOOK_S = 0.02
# Nothing was called for so long: what a trip started has ended.
_QUIET_S = 0.5


@dataclass
class Trip:
    """What one trip came to.

    Attributes:
        calls: Function calls in each file.
        moves: Calls from one file to another one.
        threads: Moves in each thread.
        entries: Calls from outside s3ec into each file.
        passes: Scheduling passes that it took.
    """

    calls: Counter[str] = field(default_factory=Counter)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    passes: int = 0

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "file_count": len(self.calls),
            "move_count": self.moves.total(),
            "entry_count": self.entries.total(),
            "passes": self.passes,
            "moves_by_thread": dict(self.threads.most_common()),
            "calls_by_file": dict(self.calls.most_common()),
            "entries_by_file": dict(self.entries.most_common()),
            "moves": {f"{a} -> {b}": n for (a, b), n in self.moves.most_common()},
        }


class Tracer:
    """Counts the calls of all threads that start after ``install``, and of this one."""

    def __init__(self) -> None:
        self._trip: Trip | None = None
        self._lock = threading.Lock()
        self._files: dict[CodeType, str | None] = {}
        self._last_s = 0.0
        self._unseen = threading.local()

    def install(self) -> None:
        """To be called before the threads to be counted start."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def remove(self) -> None:
        """Threads that run keep the function, which does nothing then."""
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[Trip]:
        """Count until the block ends."""
        trip = self._trip = Trip()
        try:
            yield trip
        finally:
            self._trip = None

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What this thread does in the block does not count."""
        self._unseen.now = True
        try:
            yield
        finally:
            self._unseen.now = False

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Wait until it is done, and until all threads have had nothing to do for a while.

        Raises:
            TimeoutError: It takes too long.
        """
        deadline_s = time.monotonic() + _TIMEOUT_S
        with self.unseen():
            self._last_s = time.monotonic()
            while not done() or time.monotonic() - self._last_s < _QUIET_S:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"waited in vain until {what}")
                time.sleep(_LOOK_S)

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        trip = self._trip
        if trip is None or event != "call" or getattr(self._unseen, "now", False):
            return
        here = self._file(frame.f_code)
        if here is None or not _is_first_step(frame):
            return
        caller = self._caller(frame)
        if caller is _POLLING:
            return
        with self._lock:
            self._last_s = time.monotonic()
            trip.calls[here] += 1
            if caller is None:
                trip.entries[here] += 1
            elif caller != here:
                trip.moves[caller, here] += 1
                trip.threads[threading.current_thread().name] += 1

    def _caller(self, frame: FrameType) -> str | None:
        """The file of the nearest frame of s3ec below; _POLLING below what runs for ever."""
        nearest = None
        below: FrameType | None = frame
        while below is not None:
            if self._file(below.f_code) is not None:
                if below.f_code.co_name.endswith(("_forever", "_poll")):
                    return _POLLING
                if nearest is None and below is not frame:
                    nearest = self._file(below.f_code)
            below = below.f_back
        return nearest

    def _file(self, code: CodeType) -> str | None:
        """The file below ``s3ec/``; None for any other, and for the body of a module."""
        if code not in self._files:
            path = Path(code.co_filename)
            name = None
            if path.is_relative_to(PACKAGE) and code.co_name != "<module>":
                name = path.relative_to(PACKAGE).as_posix()
            if name is not None and name.startswith(NOT_OURS):
                name = None
            self._files[code] = name
        return self._files[code]


_POLLING = "(polling)"


def _is_first_step(frame: FrameType) -> bool:
    """Whether a function begins here; else a coroutine or a generator goes on.

    The compiler marks both (``RESUME``, Python 3.11 and newer); 0 is the beginning.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return at < 0 or code[at] != _RESUME or code[at + 1] & 3 == 0


class Half:
    """One engine's connector: a Node with a scheduler half and a worker half, on the CPU."""

    def __init__(self, folder: Path, store: Any) -> None:
        import torch

        from s3ec.config import load_settings
        from s3ec.dev.bench.hooks_rig import scheduler_shell
        from s3ec.dev.bench.worker_rig import worker_shell
        from s3ec.identity import Namespace
        from s3ec.node import Node

        loaded = load_settings(
            {
                "bucket": "in-memory",
                "cache_dir": str(folder),
                "min_free_bytes": 0,
                "index_refresh_s": 86400,
                "defer_timeout_s": 60,
                # Else the first pictures are encoded, to learn what that costs.
                "wait": "always",
            }
        )
        self.settings = loaded.settings
        self.node = Node(
            loaded.settings, Namespace.from_descriptor({"model": "s3ec/trips"}), store=store
        )
        self.node.users = 2  # each half counts as one
        self.scheduler = scheduler_shell(self.node)
        self.worker = worker_shell(self.node)
        self.cache: dict[str, torch.Tensor] = {}

    def pass_(self, request: Any) -> tuple[bool, bool]:
        """One scheduling pass: whether the request is let through, and its item granted."""
        from s3ec.dev.bench.hooks_rig import step_output

        (feature,) = request.mm_features
        granted = False
        let = self.scheduler.ensure_cache_available(request, 0)
        if let:
            granted = self.scheduler.has_cache_item(feature.identifier)
            self.scheduler.update_state_after_alloc(request, 0)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step_output()))
        return let, granted

    def report(self) -> None:
        """The worker's report goes to the scheduler half."""
        meta = self.worker.build_connector_worker_meta()
        if meta is not None:
            self.scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=meta))

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@dataclass
class Result:
    """What the two trips came to, and whether they happened.

    Attributes:
        is_announced: The index has the saved entry.
        is_equal: The tensor that was loaded has every bit of the one that was saved.
        problems: Counters of ours that should be 0.
    """

    save: Trip
    hit: Trip
    is_announced: bool
    is_equal: bool
    problems: dict[str, float]

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "is_announced": self.is_announced,
            "is_equal": self.is_equal,
            "problems": self.problems,
            "trips": {"hit": self.hit.document, "save": self.save.document},
        }


def run(folder: Path) -> Result:
    """Make both trips; nothing is left running.

    Args:
        folder: An empty one, for the disk tiers.
    """
    import torch

    from s3ec.corpus import Corpus
    from s3ec.dev.bench.hooks_rig import Identifiers, make_request
    from s3ec.testing.memory_store import MemoryBucket, MemoryStore

    bucket, tracer = MemoryBucket(), Tracer()
    first, second = Identifiers().take(2)
    tensors = {
        name: torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, name in enumerate((first, second))
    }
    tracer.install()
    try:
        producer = Half(folder / "producer", MemoryStore(bucket))
        try:
            for name in (first, second):
                save = _save(
                    tracer, producer, make_request(f"save {name}", [name]), tensors, bucket
                )
        finally:
            problems = _problems(producer)
            producer.close()
        with Corpus(producer.settings, store=MemoryStore(bucket)) as corpus:
            checked = corpus.verify()
        consumer = Half(folder / "consumer", MemoryStore(bucket))
        try:
            tracer.wait("the index is read", lambda: consumer.node.index.loaded)
            for name in (first, second):
                hit = _hit(tracer, consumer, make_request(f"hit {name}", [name]))
            loaded = consumer.cache[second]
        finally:
            problems |= _problems(consumer)
            consumer.close()
    finally:
        tracer.remove()
    return Result(
        save,
        hit,
        is_announced=(checked.objects, checked.entries, checked.unannounced) == (2, 2, 0),
        is_equal=torch.equal(loaded.view(torch.int16), tensors[second].view(torch.int16)),
        problems=problems,
    )


def _save(tracer: Tracer, half: Half, request: Any, tensors: dict[str, Any], bucket: Any) -> Trip:
    (feature,) = request.mm_features
    let, granted = half.pass_(request)
    if not let or granted:
        raise RuntimeError("what nobody has stored yet should be encoded")
    half.cache[feature.identifier] = tensors[feature.identifier]
    deltas = _deltas(bucket)
    with tracer.counting() as trip:
        half.worker.save_caches(half.cache, feature.identifier)
        tracer.wait("the save is announced", lambda: _deltas(bucket) > deltas)
        half.report()
    half.scheduler.request_finished(request)
    return trip


def _hit(tracer: Tracer, half: Half, request: Any) -> Trip:
    let = granted = False
    with tracer.counting() as trip:
        while not let:
            trip.passes += 1
            let, granted = half.pass_(request)
            tracer.wait("the entry is fetched", lambda: True)
        half.worker.start_load_caches(half.cache)
        half.worker.finish_load_caches(half.cache)
        half.report()
        half.scheduler.request_finished(request)
        tracer.wait("the file is unpinned", lambda: True)
    if not granted:
        raise RuntimeError("what the bucket holds was not granted")
    return trip


def _deltas(bucket: Any) -> int:
    with bucket.lock:
        return sum("/manifest/delta/" in name for name in bucket.objects)


def _problems(half: Half) -> dict[str, float]:
    told = ("internal_errors", "save_problem", "load.failed", "load.rescued", "announce.failed")
    counts = half.node.counters.snapshot()
    return {name: count for name, count in counts.items() if count and name.startswith(told)}


def main() -> None:
    """Print what both trips came to."""
    from s3ec.dev.rigs.vllm_cpu import install_here

    install_here()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder))
    out = sys.stderr.write
    out(f"{'trip':<6}{'files':>7}{'moves':>7}{'entries':>9}\n")
    for name, trip in (("hit", result.hit), ("save", result.save)):
        numbers = f"{len(trip.calls):>7}{trip.moves.total():>7}{trip.entries.total():>9}"
        out(f"{name:<6}{numbers}\n")
        for thread, count in trip.threads.most_common():
            out(f"  {count:>5} moves in {thread}\n")
    sys.stdout.write(json.dumps(result.document, indent=2) + "\n")
    if not result.is_announced or not result.is_equal or result.problems:
        sys.exit(f"the trips did not go as they should: {result.problems}")


if __name__ == "__main__":
    main()

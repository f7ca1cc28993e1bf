# SPDX-License-Identifier: Apache-2.0
"""One engine's node with its loads and saves, on a bucket in memory: the folder is what breaks."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from s3ec.connector.messages import Load, StepPlan
from s3ec.errors import UnavailableError
from s3ec.identity import digest_of_name
from s3ec.prefetch import FetchOutcome, FetchResult
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from s3ec.tier.inspection import evicted_and_open
from tests.faults.embeddings import (
    LAYOUT,
    NAMESPACE,
    RECORD,
    body_at,
    data_at,
    identifier_at,
    key_at,
    spooled_below,
)
from tests.faults.engine import Engine
from tests.support.on_disk import audit_of
from tests.support.waiting import eventually

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
# Its import of vllm warns, which only importorskip lets pass.
WorkerHalf = pytest.importorskip("s3ec.connector.worker").WorkerHalf

_NUMBERS = {key_at(number).name: number for number in range(1000)}


class Corpus:
    """A bucket that outlives the machines.

    Attributes:
        script: What goes wrong with it.
    """

    def __init__(self) -> None:
        self.script = Script()
        self._bucket = MemoryBucket()
        self._bucket.objects[LAYOUT.modality("image")] = RECORD

    def store(self) -> FaultStore:
        return FaultStore(MemoryStore(self._bucket), self.script)

    def stock(self, *numbers: int) -> None:
        for number in numbers:
            self._bucket.objects[LAYOUT.object(key_at(number))] = body_at(number)

    def hold_saves(self) -> Gate:
        """Let no object come into the bucket before the gate opens."""
        gate = Gate()
        self.script.faults.append(Fault(op="put_if_absent", name="/objects/", gate=gate))
        return gate

    def break_reads(self) -> None:
        """From here on the bucket gives nothing."""
        self.script.faults.append(Fault(op="get|get_range", error=UnavailableError))

    def has(self, *numbers: int) -> bool:
        """Whether these are there; the bytes of all that is there are compared."""
        for name, body in list(self._bucket.objects.items()):
            if name.startswith(LAYOUT.objects):
                assert body == body_at(_NUMBERS[name.removeprefix(LAYOUT.objects)])
        return all(LAYOUT.object(key_at(number)) in self._bucket.objects for number in numbers)


class Machine(Engine):
    """An engine with a worker half, on a corpus in memory."""

    def __init__(self, corpus: Corpus, cache_dir: Path, **settings: str) -> None:
        given = {"bucket": "bucket", "cache_dir": str(cache_dir), "min_free_bytes": "0"}
        super().__init__({**given, **settings}, store=corpus.store(), saves=True)
        self.corpus = corpus
        self.worker = WorkerHalf(
            self.node,
            saves=self.queue,
            device=lambda: torch.device("cpu"),
            rank=lambda: 0,
            drain_timeout_s=0.0,
        )

    def close(self, drain_s: float | None = None, *, close_s: float = 10.0) -> int:
        """End at once; what the bucket has not confirmed stays in the spool."""
        self.worker.finish()
        return super().close(0, close_s=close_s)

    def compare(self, number: int, one: FetchResult) -> None:
        """Its bytes are compared when it is loaded: until then others may take the folder away."""

    def file(self, number: int) -> Path:
        return self.cache_dir / "v1" / "objects" / NAMESPACE.name / key_at(number).name

    def load(self, fetched: Mapping[int, FetchResult]) -> None:
        """As a worker half does, with what was granted."""
        granted = {n: one.entry for n, one in fetched.items() if one.entry is not None}
        loads = [Load.of(identifier_at(number), entry) for number, entry in granted.items()]
        cache: dict[str, torch.Tensor] = {}
        self.worker.start_load_caches(cache, StepPlan(loads=loads))
        numbers = list(granted)
        granted.clear()  # a failure that was logged may hold this frame
        for number in numbers:
            tensor = cache[identifier_at(number)]
            assert bytes(tensor.contiguous().view(torch.uint8).flatten().numpy()) == data_at(number)

    def serve(self, *numbers: int) -> set[int]:
        """Fetch and load; which of them an engine would not have had to encode."""
        missing = {number for number in numbers if not self.corpus.has(number)}  # it may come soon
        fetched = self.grant(*numbers)
        self.load(fetched)
        for number, one in fetched.items():
            absent = one.outcome is FetchOutcome.ABSENT and number in missing
            assert absent or one.outcome in (FetchOutcome.READY, FetchOutcome.UNAVAILABLE)
        return {n for n, one in fetched.items() if one.outcome is FetchOutcome.READY}

    def wait_written(self, *numbers: int) -> None:
        """Until the disk took them, or refused."""

        def done() -> bool:
            in_memory = self.queue.levels()["level.save_queue_entries"]
            return bool(in_memory <= self.node.counters.get("spool.refused"))

        eventually(done)

    def wait_confirmed(self, *numbers: int) -> None:
        """Until the bucket has them and nothing waits for it."""
        eventually(lambda: self.corpus.has(*numbers) and not spooled_below(self.cache_dir))

    def assert_in_order(self) -> None:
        """The audit is clean, and what the tier shows is in the bucket or on its way there.

        What was evicted leaves the disk once nobody has it open: the caller has let go of it.
        """
        eventually(lambda: not evicted_and_open(self.node.tier.folders))
        assert audit_of(self.node.tier) == []
        names, spooled = set(self.node.tier.entries.names()), spooled_below(self.cache_dir)
        missing = [name for name in names if digest_of_name(name).hex() not in spooled]
        assert self.corpus.has(*(_NUMBERS[name] for name in missing))


def delete(folder: Path) -> None:
    """Delete a folder that others may be making files in; they may make it again at once."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:  # a part of it went meanwhile, or all of it
            if not folder.exists():
                return
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    raise TimeoutError(f"{folder} fills as fast as it is emptied")

# SPDX-License-Identifier: Apache-2.0
"""One engine's node with its loads and saves, on a bucket in memory: the folder is what breaks."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from s3ec.connector.messages import Load, Save, StepPlan
from s3ec.connector.saves import SaveQueue
from s3ec.errors import UnavailableError
from s3ec.identity import Layout, digest_of_name
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.settings import Settings
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.faults.living import ROWS, object_at
from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at, spooled_below
from tests.faults.site import eventually
from tests.on_disk import audit_of, usage_of

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
# Its import of vllm warns, which only importorskip lets pass.
WorkerHalf = pytest.importorskip("s3ec.connector.worker").WorkerHalf

_LAYOUT = Layout(NAMESPACE.name)
ENTRY_BYTES = len(b"".join(object_at(0)))


class Corpus:
    """A bucket that outlives the machines.

    Attributes:
        script: What goes wrong with it.
    """

    def __init__(self) -> None:
        self.script = Script()
        self._bucket = MemoryBucket()
        self._bucket.objects[_LAYOUT.modality("image")] = b'{"dtype":"bfloat16","width":%d}' % WIDTH

    def store(self) -> FaultStore:
        return FaultStore(MemoryStore(self._bucket), self.script)

    def stock(self, *numbers: int) -> None:
        for number in numbers:
            self._bucket.objects[_LAYOUT.object(key_at(number))] = b"".join(object_at(number))

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
        names = {key_at(number).name: number for number in range(1000)}
        prefix = _LAYOUT.object(key_at(0)).removesuffix(key_at(0).name)
        for name, body in list(self._bucket.objects.items()):
            if name.startswith(prefix):
                assert body == b"".join(object_at(names[name.removeprefix(prefix)]))
        return all(_LAYOUT.object(key_at(number)) in self._bucket.objects for number in numbers)


class Machine:
    """A context manager; whatever it serves was compared byte by byte."""

    def __init__(self, corpus: Corpus, cache_dir: Path, **settings: str) -> None:
        values = {
            "bucket": "bucket",
            "cache_dir": str(cache_dir),
            "min_free_bytes": "0",
            **settings,
        }
        self.corpus = corpus
        self.cache_dir = cache_dir
        self.node = Node(Settings.model_validate(values), NAMESPACE, store=corpus.store())
        self.queue = SaveQueue(self.node, budget_bytes=2**22, overflow="block")
        self.worker = WorkerHalf(
            self.node,
            saves=self.queue,
            device=lambda: torch.device("cpu"),
            rank=lambda: 0,
            drain_timeout_s=0.0,
        )

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End at once; what the bucket has not confirmed stays in the spool."""
        self.worker.finish()
        self.node.close(10)
        assert self.node.counters.get("internal_errors") == 0

    def file(self, number: int) -> Path:
        return self.cache_dir / "v1" / "objects" / NAMESPACE.name / key_at(number).name

    def fetch(self, *numbers: int) -> dict[int, FetchResult]:
        """As a scheduler half does; whoever calls this releases the pins."""
        wanted = {key_at(number).digest: number for number in numbers}
        self.node.prefetcher.submit([FetchRequest(key_at(n), "image", ROWS) for n in numbers])
        fetched: dict[int, FetchResult] = {}

        def have_all() -> bool:
            for one in self.node.prefetcher.drain():
                fetched[wanted[one.want.key.digest]] = one
            return len(fetched) == len(numbers)

        eventually(have_all)
        return fetched

    def load(self, fetched: dict[int, FetchResult]) -> None:
        """As a worker half does, with what was granted; then the pins are released."""
        granted = {n: one.pin for n, one in fetched.items() if one.pin is not None}
        loads = [Load.of(identifier_at(number), pin) for number, pin in granted.items()]
        cache: dict[str, Any] = {}
        self.worker.start_load_caches(cache, StepPlan(loads=loads))
        for number in granted:
            tensor = cache[identifier_at(number)]
            assert bytes(tensor.contiguous().view(torch.uint8).flatten().numpy()) == data_at(
                number, ROWS
            )
        self.node.prefetcher.release(granted.values())

    def serve(self, *numbers: int) -> set[int]:
        """Fetch and load; which of them an engine would not have had to encode."""
        missing = {number for number in numbers if not self.corpus.has(number)}  # it may come soon
        fetched = self.fetch(*numbers)
        self.load(fetched)
        for number, one in fetched.items():
            absent = one.outcome is FetchOutcome.ABSENT and number in missing
            assert absent or one.outcome in (FetchOutcome.READY, FetchOutcome.UNAVAILABLE)
        return {n for n, one in fetched.items() if one.outcome is FetchOutcome.READY}

    def save(self, *numbers: int) -> None:
        """As a worker half does after an encode."""
        for number in numbers:
            tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
            placed = self.queue.put(
                identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH)
            )
            assert placed

    def wait_written(self, *numbers: int) -> None:
        """Until the disk took them, or refused."""
        left = {identifier_at(number) for number in numbers}
        refused = len(left)

        def done() -> bool:
            left.difference_update(self.queue.take_report()[0])
            return len(left) + refused - len(numbers) <= self.node.counters.get("spool.refused")

        eventually(done)

    def wait_confirmed(self, *numbers: int) -> None:
        """Until the bucket has them and nothing waits for it."""
        eventually(lambda: self.corpus.has(*numbers) and not spooled_below(self.cache_dir))

    def assert_in_order(self) -> None:
        """The audit is clean, and what the tier shows is in the bucket or on its way there."""
        eventually(lambda: not usage_of(self.node.tier).pinned_nbytes)  # released, but not yet gone
        assert audit_of(self.node.tier) == []
        names = set(self.node.tier.entries.names())
        spooled = spooled_below(self.cache_dir)
        known = {key_at(number).name: number for number in range(1000)}
        for name in names:
            if digest_of_name(name).hex() not in spooled:
                assert self.corpus.has(known[name])


def delete(folder: Path) -> None:
    """Delete a folder that others may be making files in; they may make it again at once."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    raise TimeoutError(f"{folder} fills as fast as it is emptied")

# SPDX-License-Identifier: Apache-2.0
"""One process's node on a bucket in memory, its disk tier, and entries made by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3ec import codec
from s3ec.connector import saves
from s3ec.connector.messages import Load
from s3ec.identity import Namespace
from s3ec.node import Node
from s3ec.runtime import DiskWatch
from s3ec.settings import Settings
from s3ec.store.endpoint import BreakerOptions, Endpoint
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from s3ec.tier.open_entry import OpenEntry
from tests.support.waiting import DEADLINE_S
from tests.unit.tier.cases import key_of

HASHES = [f"{n:064x}" for n in range(1, 40)]
_HEADER = codec.Header("a", "ns", "image", codec.Shape(1, 1, "float32"), "0" * 32, data_start=64)
NOWHERE = Load("a", "/nowhere", 0, 0, 0, 0, _HEADER)
"""A granted load whose file is gone."""


def tensor(seed: int = 0, *, width: int = 8) -> Any:
    """Random values of 4 rows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, width, generator=generator).to(torch.bfloat16)


class Process:
    """What one process of an engine has; a second one on the same folder is the next process."""

    def __init__(
        self,
        folder: Path,
        *faults: Fault,
        shared: MemoryBucket | None = None,
        descriptor: dict[str, Any] | None = None,
        breaker: BreakerOptions | None = None,
        clock: Callable[[], float] = time.time,
        **settings: Any,
    ) -> None:
        """Open its node.

        Args:
            folder: For the tier, which is in ``tier`` below it.
            faults: Of the bucket.
            shared: The bucket; None for one of its own.
            descriptor: Of the namespace.
            breaker: Options of the breaker; None for the usual ones.
            clock: The bucket's.
            settings: Changes.
        """
        self.bucket = shared or MemoryBucket()
        self.open: list[OpenEntry] = []  # what was granted
        self.faults = list(faults)
        self.store = FaultStore(MemoryStore(self.bucket, clock=clock), Script(self.faults))
        given = {"bucket": "corpus", "cache_dir": folder / "tier", "min_free_bytes": 0}
        self.node = Node(
            Settings.model_validate({**given, **settings}),
            Namespace.from_descriptor(descriptor or {"model": "tiny"}),
            store=self.store,
            endpoint=Endpoint(16, breaker) if breaker else None,
        )
        # The disk of a busy machine may take longer than a request has time for.
        self.node.loop.watch = DiskWatch(self.node.counters, patience_s=3600)

    def counted(self, name: str) -> float:
        return self.node.counters.get(name)

    def spooled(self) -> int:
        # Not Path.rglob: it does not bear folders that vanish meanwhile.
        walk = os.walk(self.node.settings.cache_dir / "v1" / "spool")
        return sum(name.endswith(".safetensors") for _, _, names in walk for name in names)

    def object_name(self, identifier: str) -> str:
        return self.node.layout.object(key_of(identifier))

    def stored(self, identifier: str) -> bytes | None:
        """What the bucket holds."""
        return self.bucket.objects.get(self.object_name(identifier))

    def read(self, identifier: str) -> Any:
        """The tensor that the bucket holds, verified."""
        import safetensors.torch

        blob = self.stored(identifier)
        assert blob is not None
        codec.verify(blob, namespace=self.node.namespace.name, identifier=identifier)
        return safetensors.torch.load(blob)["ec_cache"]

    def entry(self, identifier: str, tensor: Any, **other: Any) -> bytes:
        fields = {"identifier": identifier, "namespace": self.node.namespace.name, **other}
        header = saves.describe(tensor, modality="image", **fields)
        return b"".join(saves.encode(header, tensor))

    def granted(self, identifier: str, tensor: Any) -> Load:
        """Put an entry into the tier; a granted load of it, which is held open as long as this."""
        key = key_of(identifier)
        self.node.tier.writer.publish(key, [self.entry(identifier, tensor)])
        entry = self.node.tier.entries.open(key)
        assert entry is not None
        self.open.append(entry)
        return Load.of(identifier, entry)

    def lose(self, load: Load) -> None:
        """What was granted is gone, and nobody has it open."""
        os.unlink(load.path)
        self.let_go(load)

    def let_go(self, load: Load) -> None:
        """Close what was granted."""
        self.open = [entry for entry in self.open if entry.inode != load.inode]

    def close(self) -> None:
        self.node.close(DEADLINE_S)

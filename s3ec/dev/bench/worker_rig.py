# SPDX-License-Identifier: Apache-2.0
"""The worker side of the two connectors that ``bench load`` and ``bench save`` compare.

Ours is an S3ECConnector over a real Node, wired by S3ECConnector itself, with a bucket in
memory; the other is vLLM's own ECExampleConnector. Both keep their files in folders of one file
system. Importing this module imports vllm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

from s3ec.config import load_settings
from s3ec.connector import saves
from s3ec.connector.connector import S3ECConnector, S3ECMetadata
from s3ec.connector.messages import Load, Save, StepPlan
from s3ec.connector.parts import Parts
from s3ec.dev.bench.corpus import MODALITY, NAMESPACE, SHAPE, key_of
from s3ec.dev.bench.hooks_rig import Identifiers, engine_config
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from s3ec.tier.open_entry import OpenEntry

Cache = dict[str, torch.Tensor]
_SETTLE_TIMEOUT_S = 60.0
_LOOK_S = 0.002


class WorkerRig:
    """Both connectors of one worker, and the tensors that they load and save.

    Attributes:
        tensors: Identifier to an encoder output of 2.75 MB.
        shell: Ours.
        example: vLLM's.
    """

    def __init__(self, folder: Path, count: int) -> None:
        names = Identifiers().take(count)
        made = torch.Generator().manual_seed(20_260_201)
        self.tensors: Cache = {
            name: torch.randn(SHAPE.rows, SHAPE.width, generator=made).to(torch.bfloat16)
            for name in names
        }
        self._bucket = MemoryBucket()
        extra = {"bucket": "in-memory", "cache_dir": str(folder / "tier"), "min_free_bytes": 0}
        self.node = Node(
            load_settings(extra).settings,
            NAMESPACE,
            store=MemoryStore(self._bucket),
            name="s3ec-bench",
        )
        record = self.node.records.settle(MODALITY, Record(SHAPE.width, SHAPE.dtype))
        self.node.loop.run(record, timeout_s=30)
        self.shell = worker_shell(self.node)
        example = folder / "example"
        example.mkdir()
        self.example: Any = ECExampleConnector(
            vllm_config=engine_config("ECExampleConnector", {"shared_storage_path": str(example)}),
            role=ECConnectorRole.WORKER,
        )
        for name in names:  # its folders are there, as they would be the second time
            (example / name).mkdir()
        self._entries: list[OpenEntry] = []
        self._step = 0

    def fill(self) -> list[Load]:
        """Put every tensor into tier and folder; returns the granted loads, in their order."""
        for name, tensor in self.tensors.items():
            key = key_of(name)
            header = saves.describe(
                tensor, identifier=name, namespace=self.node.namespace.name, modality=MODALITY
            )
            self.node.tier.writer.publish(key, saves.encode(header, tensor))
            entry = self.node.tier.entries.open(key)
            if entry is None:
                raise RuntimeError("an entry that was just published cannot be opened")
            self._entries.append(entry)
            self.example.save_caches(self.tensors, name)
        return [Load.of(name, one) for name, one in zip(self.tensors, self._entries, strict=True)]

    def orders(self, loads: Sequence[Load] = (), saves: Sequence[str] = ()) -> S3ECMetadata:
        """One step's orders for ours.

        Args:
            loads: Of fill.
            saves: Identifiers.
        """
        self._step += 1
        return S3ECMetadata(
            StepPlan(
                step=self._step,
                loads=list(loads),
                saves={name: Save(MODALITY, {}) for name in saves},
            )
        )

    def settle(self, saved: Sequence[str]) -> None:
        """Wait until the bucket has these, and nothing is left to do; then empty the bucket.

        Raises:
            RuntimeError: It does not get them in time.
        """
        left = set(saved)
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while left:
            report = self.shell.build_connector_worker_meta()
            if report is not None:
                left.difference_update(report.report.stored)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(left)} saves are not stored: {self._problems()}")
            time.sleep(_LOOK_S)
        self._bucket.objects.clear()

    def check(self) -> None:
        """Refuse to go on after a fault that a hook has swallowed.

        Raises:
            RuntimeError: Names the counter.
        """
        if self._problems():
            raise RuntimeError(f"it did not go as it should: {self._problems()}")

    def _problems(self) -> dict[str, float]:
        told = ("internal_errors", "save_problem", "load.failed", "load.rescued")
        counts = self.node.counters.snapshot()
        return {name: count for name, count in counts.items() if count and name.startswith(told)}

    def close(self) -> None:
        """Let go of the files and end our threads."""
        self._entries.clear()
        self.node.users += 1  # shutdown gives a shared node back
        self.shell.shutdown()


@contextmanager
def worker_rig(folder: Path, count: int) -> Iterator[WorkerRig]:
    """A rig in a folder of its own, ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    rig = WorkerRig(folder, count)
    try:
        yield rig
    finally:
        rig.close()


def example_orders(names: Sequence[str]) -> ECExampleConnectorMetadata:
    """One step's loads for ECExampleConnector."""
    metadata = ECExampleConnectorMetadata()
    for name in names:
        metadata.add_mm_data(MMMeta.make_meta(name, SHAPE.rows))
    return metadata


def worker_shell(node: Node) -> S3ECConnector:
    """S3ECConnector as its constructor leaves it in a worker, without an engine around it."""
    config = engine_config("S3ECConnector", {})
    parts = Parts(config)
    # There are no ranks where no engine set them up. Not a mock: its calls are timed.
    with mock.patch("s3ec.connector.compat.loading_rank", new=int):
        parts.start_worker(node)
    return S3ECConnector(config, ECConnectorRole.WORKER, parts=parts)

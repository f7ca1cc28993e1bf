# SPDX-License-Identifier: Apache-2.0
"""The worker half: reads granted files into the encoder cache, hands encoded tensors to saves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from s3ec import codec
from s3ec.codec import Header
from s3ec.connector import compat
from s3ec.connector.plan import Load, StepPlan, WorkerReport
from s3ec.connector.remote import OwnPins
from s3ec.connector.saves import SaveQueue
from s3ec.errors import AccessError, CorruptEntryError, UnavailableError
from s3ec.identity import make_key
from s3ec.node import Node

log = logging.getLogger(__name__)

# The last resort of a load whose pinned file failed: the engine waits for it, since without
# the embedding it would end.
_RESCUE_TIMEOUT_S = 20.0


class WorkerHalf:
    """Loads and saves of one worker process. One thread: the model runner's."""

    def __init__(
        self,
        node: Node,
        *,
        saves: SaveQueue | None,
        device: Callable[[], torch.device],
        rank: Callable[[], int],
        drain_timeout_s: float,
    ) -> None:
        """Wire the half up.

        Args:
            node: This process's parts.
            saves: Where encoded tensors go; None for a pure consumer.
            device: The model's device, asked at the first load.
            rank: Number of this worker among those that load.
            drain_timeout_s: How long finish() waits for the bucket to confirm queued saves.
        """
        self._node = node
        self._saves = saves
        self._device = device
        self._rank = rank
        self._drain_timeout_s = drain_timeout_s
        self._loaded: dict[int, set[int]] = {}
        self._counted: dict[str, float] = {}
        self._own_pins = OwnPins(node)

    def follow(self, plan: StepPlan) -> StepPlan:
        """Obey orders to ranks on other nodes; the plan as this rank should execute it."""
        return self._own_pins.follow(plan)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], plan: StepPlan) -> None:
        """Put every granted embedding into the encoder cache.

        Raises:
            RuntimeError: An embedding could be had neither from its pinned file nor from the
                bucket. vLLM would end this engine anyway; a made-up tensor would be answered
                from, and cached under the image's hash for later requests.
        """
        if not plan.loads:
            return
        started = time.perf_counter()
        nbytes = 0
        for load in plan.loads:
            if load.identifier in encoder_cache:
                continue
            one = time.perf_counter()
            tensor = self._load(load)
            with compat.sync_allowed():
                encoder_cache[load.identifier] = tensor.to(self._device())
            nbytes += load.shape.nbytes
            if log.isEnabledFor(logging.DEBUG):
                key = make_key(load.identifier)
                log.debug(
                    "loaded digest=%s nbytes=%d seconds=%.6f",
                    key.digest.hex() if key else "?",
                    load.shape.nbytes,
                    time.perf_counter() - one,
                )
        self._loaded.setdefault(plan.step, set()).add(self._rank())
        self._node.counters.add("load.items", len(plan.loads))
        self._node.counters.add("load.bytes", nbytes)
        self._node.counters.add("load.seconds", time.perf_counter() - started)

    def _load(self, load: Load) -> torch.Tensor:
        failure: Exception | None = None
        for _ in range(2):
            try:
                return read_entry(Path(load.path), load, namespace=self._node.namespace.name)
            except (OSError, CorruptEntryError) as exc:
                failure = exc
                self._node.counters.add("load.failed")
                log.warning("pinned file %s cannot be loaded: %s", load.path, exc)
        key = make_key(load.identifier)
        if key is not None and isinstance(failure, CorruptEntryError):
            self._node.tier.quarantine(key, failure.reason)  # nobody shall pin it again
        try:
            return self._rescue(load)
        except (UnavailableError, AccessError, CorruptEntryError, TimeoutError) as exc:
            raise RuntimeError(
                f"embedding cannot be read from {load.path} ({failure}), nor had from the bucket "
                f"({exc})"
            ) from exc

    def _rescue(self, load: Load) -> torch.Tensor:
        key = make_key(load.identifier)
        if key is None:
            raise CorruptEntryError("not an identifier of ours", reason="identifier")
        limit = load.shape.nbytes + 8 + codec.HEADER_LIMIT
        fetch = self._node.store.get(self._node.layout.object(key), max_bytes=limit)
        blob = self._node.loop.run(fetch, _RESCUE_TIMEOUT_S)
        if blob is None:
            raise CorruptEntryError("the bucket no longer holds it", reason="length")
        header = codec.verify(blob, namespace=self._node.namespace.name, identifier=load.identifier)
        _check_shape(header, load)
        self._node.counters.add("load.rescued")
        return codec.to_tensor(header, bytearray(memoryview(blob)[header.data_start :]))

    def save_caches(
        self, encoder_cache: Mapping[str, Any], identifier: str, plan: StepPlan
    ) -> None:
        """Copy one encoded tensor off the device and queue it; nothing else happens here."""
        save = plan.saves.get(identifier)
        if save is None or self._saves is None or self._rank() != 0:
            return
        output = encoder_cache[identifier]
        if not isinstance(output, torch.Tensor):
            self._node.counters.add("save_problem.shape")
            return
        # The output can be a view of a whole batch's: copy now and keep no reference to it.
        copy = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        with compat.sync_allowed():
            copy.copy_(output.detach())
        self._saves.put(identifier, save, copy)

    def report(self) -> WorkerReport | None:
        """What happened since the last report; None if nothing did."""
        report = WorkerReport(loaded=self._loaded)
        self._loaded = {}
        if self._saves is not None:
            report.published, report.stored = self._saves.take_report()
        self._own_pins.report(report, self._rank)
        # A scheduler half in this process reads the same counters itself.
        counts = {} if self._node.users > 1 else self._node.counters.snapshot()
        if counts and counts != self._counted:
            report.counts = {
                name: total - self._counted.get(name, 0)
                for name, total in counts.items()
                if total != self._counted.get(name, 0)
            }
            self._counted = counts
        return None if report.is_empty else report

    def finish(self) -> None:
        """Wait for queued saves within a deadline; what is left was logged and counted."""
        if self._saves is not None:
            self._saves.drain(self._drain_timeout_s)


def read_entry(path: Path, load: Load, *, namespace: str) -> torch.Tensor:
    """Read and verify one file; the tensor shares the buffer it was read into.

    Returns:
        CPU tensor of ``load.shape``.

    Raises:
        OSError: The file cannot be read.
        CorruptEntryError: It is not what was granted.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > load.shape.nbytes + 8 + codec.HEADER_LIMIT:
            raise CorruptEntryError(f"{size} bytes are too many", reason="size")
        buffer = torch.empty(size, dtype=torch.uint8)
        array: Any = buffer.numpy()
        view = memoryview(array)
        done = 0
        while done < size:
            count = file.readinto(view[done:])
            if not count:
                raise CorruptEntryError(f"ends after {done} of {size} bytes", reason="length")
            done += count
    header = codec.parse_header(view)
    codec.check_identity(header, namespace=namespace, identifier=load.identifier)
    _check_shape(header, load)
    codec.check_data(header, view[header.data_start :])
    values = buffer[header.data_start :].view(getattr(torch, header.shape.dtype))
    return values.view(header.shape.rows, header.shape.width)


def _check_shape(header: Header, load: Load) -> None:
    if header.shape != load.shape:
        raise CorruptEntryError(f"holds {header.shape}, granted was {load.shape}", reason="shape")

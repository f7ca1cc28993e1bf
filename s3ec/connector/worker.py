# SPDX-License-Identifier: Apache-2.0
"""The worker half: brings granted files into the encoder cache, and queues encoded tensors to save.

It also measures how long the encoder runs, without waiting for the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from s3ec.connector import compat
from s3ec.connector.loads import Loader, read_data
from s3ec.connector.messages import Encode, EncodeTime, Load, StepPlan, WorkerReport
from s3ec.connector.saves import SaveQueue
from s3ec.connector.staging import open_staging
from s3ec.counters import Increments
from s3ec.errors import CorruptEntryError
from s3ec.node import Node

log = logging.getLogger(__name__)

_NOTHING = WorkerReport()
# Measurements that were not reported yet; some releases of vLLM never ask for a report.
_MOST_MEASURED = 64
# Steps whose events have not passed yet. More are dropped: the device hangs, or none are taken.
_MOST_UNDER_WAY = 64


class EncodeTimer:
    """Measures how long the encoder runs in a step. One thread: the model runner's.

    vLLM's runners call the worker half directly before the encoder runs: with
    ``start_save_caches`` in a producer (0.30 and newer), then ``start_load_caches`` in a consumer.
    They call it directly after it: with the first ``save_caches`` of an encoded item, and with
    ``get_finished``. A pure producer before 0.30 measures nothing. This holds for the sources of
    0.26.0 to 0.32.0, V1 runner and V2 (``v1/worker/ec_connector_model_runner_mixin.py``,
    ``v1/worker/gpu/ec_connector.py``).

    On a GPU both points are events in the stream that the encoder runs in. Later steps check
    whether they have passed, so no thread waits for them. Gaps in which the device waits for the
    CPU count as encoding, as they should.

    A measurement is

    =========  =========  ==================================================================
    state      goes to    when
    =========  =========  ==================================================================
    (none)     begun      the encoder is about to run
    begun      under way  it was launched on a GPU
    begun      done       it has run in this thread
    begun      (none)     the next step begins: this one has failed
    under way  done       both events have passed
    under way  (none)     _MOST_UNDER_WAY newer ones are under way
    done       (none)     ``take`` returned it
    =========  =========  ==================================================================
    """

    def __init__(
        self,
        device: Callable[[], torch.device],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start idle.

        Args:
            device: The model's device.
            clock: Seconds, for a device that runs in the caller's thread.
        """
        self._device = device
        self._clock = clock
        self._begun: tuple[Sequence[Encode], Any] | None = None
        self._under_way: deque[tuple[Sequence[Encode], Any, Any]] = deque(maxlen=_MOST_UNDER_WAY)
        self._done: list[EncodeTime] = []
        self._works = True

    def begin(self, encodes: Sequence[Encode]) -> None:
        """Begin a measurement: the encoder is about to run for these items; none: no measurement.

        Items of two modalities in one step cannot be told apart, so they are not measured.
        """
        self._begun = None
        if encodes and self._works and len({one.modality for one in encodes}) == 1:
            self._begun = (encodes, self._now())

    def end(self) -> None:
        """End a measurement: the encoder ran or was launched. Only the first call counts."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        encodes, before = begun
        after = None if before is None else self._now()
        if after is None:
            return
        if isinstance(before, float):
            self._finish(encodes, after - before)
        else:
            self._under_way.append((encodes, before, after))

    def take(self) -> list[EncodeTime]:
        """Return the measurements since the last call."""
        while self._under_way and self._under_way[0][2].query():
            encodes, before, after = self._under_way.popleft()
            self._finish(encodes, before.elapsed_time(after) / 1000)
        done, self._done = self._done, []
        return done

    def _finish(self, encodes: Sequence[Encode], seconds: float) -> None:
        rows = sum(one.rows for one in encodes)
        self._done.append(EncodeTime(encodes[0].modality, len(encodes), rows, seconds))

    def _now(self) -> Any:
        """Return this moment as seconds, or as an event in the device's stream; None on failure.

        Never raises: it is called from hooks whose faults end the engine.
        """
        try:
            kind = self._device().type
            if kind == "cpu":
                return self._clock()
            event = getattr(torch, kind).Event(enable_timing=True)
            event.record()
            return event
        except Exception:
            self._works = False
            log.exception("what encoding costs is not measured on this device")
            return None


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wire the half up.

        Args:
            node: This process's parts.
            saves: Queue of encoded tensors; None for a pure consumer.
            device: The model's device, called at the first load.
            rank: Number of this worker among those that load.
            drain_timeout_s: How long finish() waits for the bucket to confirm queued saves.
            clock: Seconds, for encoders that run in this thread.
        """
        self._node = node
        self._saves = saves
        self._rank = rank
        self._drain_timeout_s = drain_timeout_s
        self._timer = EncodeTimer(device, clock=clock)
        self._measured: deque[EncodeTime] = deque(maxlen=_MOST_MEASURED)
        self._loader = Loader(node, lambda: open_staging(device()))
        self._loaded: dict[int, set[int]] = {}
        self._increments = Increments(node.counters)
        self._told_levels: Mapping[str, float] = node.levels

    def start_load_caches(self, cache: MutableMapping[str, Any], plan: StepPlan) -> None:
        """Bring every granted embedding into the encoder cache.

        The thread waits for files; the device waits for its copies by itself.

        Raises:
            RuntimeError: An embedding cannot be read from its file or from the bucket; the
                others are in place. vLLM would end this engine anyway; a made-up tensor would
                give wrong answers, and be cached under the image's hash for later requests.
        """
        if plan.loads:
            self._load(cache, plan)
        self.encoder_begins(plan, cache)

    def encoder_begins(self, plan: StepPlan, cache: Container[str]) -> None:
        """Begin to measure: the runner is about to call the encoder, or another hook first.

        The role decides which hook is the last one, so each calls this and the last call counts.

        A step is not measured if the cache holds an item that the scheduler has ordered (evicted
        and ordered again in one pass): the V2 runner does not encode it again.
        """
        encodes = [] if any(name in cache for name in plan.encodes) else [*plan.encodes.values()]
        # Also without encodes: this drops a measurement that an earlier step did not end.
        if not encodes or self._rank() == 0:
            self._timer.begin(encodes)

    def encoder_ended(self) -> None:
        """End the measurement: the runner has called the encoder for this step, if it had to."""
        self._timer.end()
        for one in self._timer.take():
            self._node.counters.add_all({"encode.seconds": one.seconds, "encode.rows": one.rows})
            costs = self._node.encode_costs
            costs.add(one.modality, one.rows, one.seconds, items=one.items)
            # A scheduler half in this process shares these costs.
            if self._node.users <= 1:
                self._measured.append(one)

    def _load(self, cache: MutableMapping[str, Any], plan: StepPlan) -> None:
        began = time.perf_counter()
        missing = {one.identifier: one for one in plan.loads if not _holds(cache, one)}
        # Large ones first: the readers take those.
        loads = sorted(missing.values(), key=lambda one: -one.shape.nbytes)
        failure: Exception | None = None
        nbytes = 0
        outcomes = self._loader.load(loads)
        for load, outcome in zip(loads, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failure = failure or outcome
            else:
                cache[load.identifier] = outcome
                nbytes += load.shape.nbytes
        seconds = time.perf_counter() - began
        self._node.counters.add("load.seconds", seconds)
        if failure is not None:
            raise failure
        self._node.counters.observe("load_time", seconds)
        self._node.counters.add_all({"load.items": len(plan.loads), "load.bytes": nbytes})
        self._loaded.setdefault(plan.step, set()).add(self._rank())

    def start_save_caches(self, cache: MutableMapping[str, Any], plan: StepPlan) -> None:
        """Store embeddings on the device that are missing in the corpus.

        An entry that a pure producer skipped holds no tensor; it stays as it is.
        """
        for identifier, save in plan.saves.items():
            if save.on_device and identifier in cache:
                self._save(cache[identifier], identifier, plan)
        self.encoder_begins(plan, cache)

    def save_caches(self, cache: Mapping[str, Any], mm_hash: str, plan: StepPlan) -> None:
        """Begin to copy one encoded tensor off the device and queue it; nothing else is done.

        Args:
            mm_hash: vLLM's identifier of it.
        """
        if mm_hash in plan.encodes:  # vLLM saves items that need no encoder before it runs
            self._timer.end()
        if mm_hash in plan.saves:
            self._save(cache[mm_hash], mm_hash, plan)

    def _save(self, output: Any, identifier: str, plan: StepPlan) -> None:
        if self._saves is None or self._rank() != 0:
            return
        save = plan.saves[identifier]
        if not isinstance(output, torch.Tensor):
            self._node.counters.add("save_problem.shape")
        else:
            self._saves.put(identifier, save, output, step=plan.step)

    def report(self) -> WorkerReport | None:
        """Return the work since the last report; None if there was none."""
        report = WorkerReport(loaded=self._loaded)
        self._loaded = {}
        if self._saves is not None:
            report.stored = self._saves.take_stored()
        if self._measured:
            report.encoded = list(self._measured)
            self._measured.clear()
        # A scheduler half in this process reads the same counters itself.
        if self._node.users <= 1:
            report.counts = self._increments.take()
            levels = self._node.levels
            if levels is not self._told_levels:
                self._told_levels = levels
                report.levels = {self._rank(): levels}
        return None if report == _NOTHING else report

    def finish(self) -> None:
        """Wait for queued saves within a deadline; the rest is logged and counted."""
        self._loader.close()
        if self._saves is not None:
            self._saves.drain(self._drain_timeout_s)


def load_without_a_half(cache: MutableMapping[str, Any], plan: StepPlan) -> None:
    """Load a plan's grants into the encoder cache, in a worker whose half did not start.

    The scheduler half may not know that, and cannot take a grant back. A plan has all that is
    needed to read a granted file and to verify it. The thread waits for the disk, without a
    fallback to the bucket.

    Raises:
        RuntimeError: A file cannot be read.
    """
    for load in plan.loads:
        if _holds(cache, load):
            continue
        shape = load.shape
        values = torch.empty(shape.rows, shape.width, dtype=getattr(torch, shape.dtype))
        try:
            read_data(load, values.view(torch.uint8))
        except (OSError, CorruptEntryError) as exc:
            raise RuntimeError(
                "this worker's half of s3ec did not start, as its log says, and it cannot read "
                f"{load.path} by itself: {exc}"
            ) from exc
        cache[load.identifier] = values.to(compat.current_device())


def _holds(encoder_cache: Mapping[str, Any], load: Load) -> bool:
    """Return True if the device holds this embedding already.

    A client may use one identifier for images of two sizes. vLLM keeps the old tensor if it evicts
    the one and makes room for the other in the same pass, since encoding would replace it.
    """
    if load.identifier not in encoder_cache:
        return False
    shape = getattr(encoder_cache[load.identifier], "shape", ())
    return tuple(shape) == (load.shape.rows, load.shape.width)

# SPDX-License-Identifier: Apache-2.0
"""Saves written behind: a bounded queue, a thread that writes the tier, a loop that uploads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from s3ec import codec
from s3ec.codec import Header
from s3ec.connector.plan import Save
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, TierError, UnavailableError
from s3ec.identity import Key, make_key
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.store.base import Store
from s3ec.store.open import ConditionalPut, HeadBeforePut, probe_conditional_put

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 15.0


@dataclass(frozen=True, slots=True)
class _Job:
    key: Key
    save: Save
    tensor: torch.Tensor
    nbytes: int


class SaveQueue:
    """Takes CPU tensors from a hook and sees them into tier and bucket.

    An entry counts as stored only after the bucket confirmed it (or said that it holds it
    already). While the bucket is away uploads are tried again until the process ends; the queue's
    byte budget bounds what that can cost.
    """

    def __init__(
        self, node: Node, *, budget_bytes: int, overflow: Literal["block", "drop"]
    ) -> None:
        self._node = node
        self._budget_bytes = budget_bytes
        self._overflow = overflow
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: dict[str, int] = {}  # identifier -> bytes, until stored or given up
        self._pending_bytes = 0
        self._published: list[str] = []
        self._stored: list[str] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        # The loop's thread only.
        self._store: Store | None = None
        self._ready: asyncio.Lock | None = None
        self._uploads: asyncio.Semaphore | None = None
        self._disagreed: set[str] = set()

    # -- the hook's thread -------------------------------------------------------------------

    def put(self, identifier: str, save: Save, tensor: torch.Tensor) -> bool:
        """Queue one embedding; the tensor must be this queue's own copy on the CPU.

        Waits for room only where ``overflow`` is ``block``.

        Returns:
            False where it was not taken: refused identifier, already queued, full, or stopping.
        """
        key = make_key(identifier)
        if key is None:
            return False
        nbytes = tensor.numel() * tensor.element_size()
        with self._changed:
            if identifier in self._pending:
                return False
            while self._pending and self._pending_bytes + nbytes > self._budget_bytes:
                if self._overflow == "drop" or self._stopping:
                    self._node.counters.add("save_problem.dropped")
                    return False
                self._node.counters.add("save.blocked")
                self._changed.wait(1.0)
            if self._stopping:
                return False
            self._pending[identifier] = nbytes
            self._pending_bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="s3ec-save", daemon=True)
                self._thread.start()
        self._jobs.put(_Job(key, save, tensor, nbytes))
        return True

    def take_report(self) -> tuple[list[str], list[str]]:
        """Identifiers published on this node, and stored in the bucket, since the last call."""
        if not self._published and not self._stored:
            return [], []
        with self._changed:
            published, self._published = self._published, []
            stored, self._stored = self._stored, []
        return published, stored

    def drain(self, timeout_s: float) -> int:
        """Take no more, wait for what is queued; returns how many are left unconfirmed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            while self._pending:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            left = len(self._pending)
        self._jobs.put(None)
        if left:
            self._node.counters.add("save_problem.abandoned", left)
            log.error("%d embeddings were not confirmed by the bucket before the end", left)
        return left

    # -- the writer's thread -----------------------------------------------------------------

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write_one(job)
            except Exception:
                # The top of the thread: it must live on for the next job.
                self._node.counters.add("internal_errors")
                log.exception("save of %s", job.key.digest.hex())
                self._end(job, stored=False)

    def _write_one(self, job: _Job) -> None:
        try:
            header = codec.describe(
                job.tensor,
                identifier=job.key.identifier,
                namespace=self._node.namespace.name,
                modality=job.save.modality,
                placeholder=job.save.placeholder,
            )
            pieces = codec.encode(header, job.tensor)
        except CorruptEntryError as exc:
            self._node.counters.add(f"save_problem.refused.{exc.reason}")
            log.warning("embedding %s is not saved: %s", job.key.digest.hex(), exc)
            self._end(job, stored=False)
            return
        try:
            self._node.tier.publish(job.key, pieces)
        except TierError as exc:
            # The bucket's copy is the one that counts; go on to it.
            log.warning("embedding %s is not on this node's disk: %s", job.key.digest.hex(), exc)
        else:
            self._node.local.add(job.key)
            with self._changed:
                self._published.append(job.key.identifier)
        self._node.loop.submit(self._upload(job, header, pieces))

    # -- the loop's thread -------------------------------------------------------------------

    async def _upload(
        self, job: _Job, header: Header, pieces: Sequence[bytes | memoryview]
    ) -> None:
        stored = False
        started = time.monotonic()
        try:
            if self._uploads is None:
                self._uploads = asyncio.Semaphore(self._node.settings.max_concurrency)
            async with self._uploads:
                stored = await self._until_answered(job, header, pieces)
            if stored:
                seconds = time.monotonic() - started
                self._node.counters.add("save.items")
                self._node.counters.add("save.bytes", job.nbytes)
                self._node.counters.add("save.seconds", seconds)
                log.debug(
                    "stored digest=%s nbytes=%d seconds=%.6f",
                    job.key.digest.hex(),
                    job.nbytes,
                    seconds,
                )
        except Exception:
            # The top of a task that nobody awaits.
            self._node.counters.add("internal_errors")
            log.exception("upload of %s", job.key.digest.hex())
        finally:
            self._end(job, stored=stored)

    async def _until_answered(
        self, job: _Job, header: Header, pieces: Sequence[bytes | memoryview]
    ) -> bool:
        """Try until the bucket took it (True), or had it or may not take it (False)."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._put(job, header, pieces)
            except (UnavailableError, AccessError) as exc:
                kind = "denied" if isinstance(exc, AccessError) else "unavailable"
                if self._node.counters.get(f"save_problem.{kind}") == 0:
                    log.warning("uploads are failing and will be tried again: %s", exc)
                self._node.counters.add(f"save_problem.{kind}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    async def _put(self, job: _Job, header: Header, pieces: Sequence[bytes | memoryview]) -> bool:
        store = await self._prepared()
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._node.records.settle(job.save.modality, mine)
        if record != mine:
            self._node.counters.add("save_problem.record")
            if job.save.modality not in self._disagreed:
                self._disagreed.add(job.save.modality)
                log.error(
                    "nothing of modality %s is saved: namespace %s holds %s, this model gives %s",
                    job.save.modality,
                    self._node.namespace.name,
                    record,
                    mine,
                )
            return False
        try:
            await store.put_if_absent(self._node.layout.object(job.key), pieces)
        except ConflictError:
            # Not announced: an entry that the index holds for gone or bad may be the very one
            # that is in the way, and would be fetched in vain at every request.
            self._node.counters.add("save.existed")
            return False
        self._node.index.add(job.key)
        return True

    async def _prepared(self) -> Store:
        """The store for writing; the first call probes it and writes the descriptor."""
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if self._store is None:
                store: Store = self._node.store
                if await probe_conditional_put(store) is ConditionalPut.IGNORED:
                    log.warning(
                        "this store ignores If-None-Match and would overwrite; s3ec asks with "
                        "HEAD before each write, which two writers can still race"
                    )
                    store = HeadBeforePut(store)
                with contextlib.suppress(ConflictError):
                    await store.put_if_absent(
                        self._node.layout.descriptor, [self._node.namespace.to_json()]
                    )
                self._store = store
            return self._store

    def _end(self, job: _Job, *, stored: bool) -> None:
        with self._changed:
            self._pending_bytes -= self._pending.pop(job.key.identifier, 0)
            if stored:
                self._stored.append(job.key.identifier)
            self._changed.notify_all()

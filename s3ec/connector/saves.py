# SPDX-License-Identifier: Apache-2.0
"""The first half of a save: off the device, through a bounded queue, to spool and tier.

``SaveQueue`` describes the life of a save. ``uploads.py`` has the second half.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from s3ec.codec import (
    DTYPES,
    Header,
    Shape,
    checksum,
    encode_header,
    is_finite,
)
from s3ec.connector.messages import Save
from s3ec.connector.staging import HostCopy, Staging, bytes_of, open_staging
from s3ec.connector.uploads import Upload, Uploader
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.node import Node
from s3ec.tier.spool import Spool, Spooled

log = logging.getLogger(__name__)

# The part of `cache_bytes` that may wait for the bucket, per process, is one in this many.
_SPOOL_SHARE = 4
# The writer begins when no save has arrived for _QUIET_S, and at the latest after _LONGEST_WAIT_S.
# Earlier it would take the GIL and the memory's bandwidth from the hook that makes the next copy.
_QUIET_S = 0.002
_LONGEST_WAIT_S = 0.02
# A hook waits at most this long for room, in one step and in one outage of the bucket. vLLM ends an
# engine of several workers when a step takes 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS).
MAX_BLOCKED_S = 60.0


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory as bytes, without a copy; keeps the tensor alive."""
    return bytes_of(tensor.detach().reshape(-1).view(torch.uint8))


def describe(
    tensor: torch.Tensor,
    *,
    identifier: str,
    namespace: str,
    modality: str,
    placeholder: Mapping[str, Any] | None = None,
    made_by: str = "",
) -> Header:
    """Return the header of a tensor that is about to be stored.

    Args:
        tensor: Contiguous, on the CPU, shape (rows, width), dtype of codec.DTYPES.
        placeholder: As in the header: None if it is not known.
        made_by: As in the header.

    Raises:
        CorruptEntryError: Not two-dimensional, empty, a dtype we do not store, or not finite
            (attention kernels have produced NaN; keeping it would spread it over a fleet).
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise CorruptEntryError(f"shape {tuple(tensor.shape)} is not (rows, width)", reason="shape")
    known = [name for name, _ in DTYPES.values()]
    if dtype not in known:
        raise CorruptEntryError(f"dtype {dtype} is not one of {known}", reason="dtype")
    # Not torch's reductions: they use the threads that compute, and beside a busy engine took 16 ms
    # (torch 2.13).
    data = tensor_bytes(tensor)
    if not is_finite(data, dtype):
        raise CorruptEntryError("the tensor holds NaN or infinity", reason="nonfinite")
    rows, width = tensor.shape
    return Header(
        identifier=identifier,
        namespace=namespace,
        modality=modality,
        shape=Shape(rows, width, dtype),
        checksum=checksum(data),
        placeholder=None if placeholder is None else dict(placeholder),
        made_by=made_by,
    )


def encode(header: Header, tensor: torch.Tensor) -> tuple[bytes, memoryview]:
    """Return one entry as two pieces, header and tensor; the tensor is not copied."""
    return encode_header(header), tensor_bytes(tensor)


class _Job(NamedTuple):
    identifier: str
    save: Save
    copy: HostCopy
    began_s: float


class SaveQueue:
    """Takes tensors from a hook and brings them into tier, bucket and index.

    The life of a save:

    =========  =========  ====================================================================
    state      goes to    when
    =========  =========  ====================================================================
    (a hook)   queued     ``put`` has begun its copy into host memory
    (a hook)   dropped    it is queued already, there is no room, or the queue is drained
    queued     spooled    the writer's thread put it into spool and tier; its memory is free
    queued     in memory  the disk refuses it: it is uploaded from memory
    queued     refused    it is not finite, not two-dimensional, or has no key
    spooled    stored     the bucket stored it, or answered that it holds it already
    in memory  stored     likewise
    spooled    refused    its width or dtype is not the namespace's, or a bad object has its name
    stored     announced  a delta with its row is confirmed; only now it leaves the spool
    =========  =========  ====================================================================

    The process may end at any time. A save in the spool, stored or not, stays on the disk, and the
    next process that makes a SaveQueue for the same namespace and bucket resumes it. A save that
    was queued or in memory is lost.

    ``put`` and ``take_stored`` belong to the hooks' thread. The writer's thread brings a save to
    ``spooled``. The Uploader on the loop's thread does the rest, and calls ``ended`` once the
    bucket has answered.

    Two bounds: ``budget_bytes`` for tensors in host memory, which are released when they are on
    the disk (their buffers are powers of two, and 64 MiB of them are kept for the next ones), and
    a quarter of ``cache_bytes`` for spooled files. If the disk fails, an embedding is uploaded from
    memory, and lost if the process ends first. While it hangs, saves stay queued, and those that
    find no room are dropped at once.
    """

    def __init__(
        self,
        node: Node,
        *,
        budget_bytes: int,
        overflow: Literal["block", "drop"],
        made_by: str = "",
    ) -> None:
        """Start to search for saves of dead processes, in the background.

        Args:
            budget_bytes: Bytes of tensors in memory; files being uploaded may take as many again.
            overflow: What put does when either bound is reached. ``block`` waits for room, at
                most MAX_BLOCKED_S in a step and since the last upload ended; from then on it
                drops, until an upload ends again.
            made_by: Software and device that make the embeddings, as in the header.
        """
        self._node = node
        self._budget_bytes = budget_bytes
        self._spool_bytes = int(node.settings.cache_bytes) // _SPOOL_SHARE
        self._overflow = overflow
        self._made_by = made_by
        self._step = 0
        self._blocked_in_step_s = self._blocked_in_outage_s = 0.0
        self._dropped = 0
        self._jobs: deque[_Job] = deque()
        # One wake-up for all jobs that arrive before the writer runs: a wake-up costs the hook more
        # than a job. False ends the writer.
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_woken = False
        self._changed = threading.Condition()
        # Identifier -> bytes in memory (0: in the spool), until stored or given up.
        self._pending: dict[str, int] = {}
        self._memory_bytes = 0
        self._stored: list[str] = []
        self._stopping = False
        self._left: int | None = None  # result of drain
        self._thread: threading.Thread | None = None
        self._stagings: dict[torch.device, Staging] = {}
        self._spool: Spool = node.tier.open_spool(node.destination)
        self._uploads = Uploader(
            node,
            self._spool,
            inflight_bytes=budget_bytes,
            ended=self._upload_ended,
            announced=self._wake,
        )

    # -- the hook's thread -------------------------------------------------------------------

    def put(self, identifier: str, save: Save, tensor: torch.Tensor, *, step: int = 0) -> bool:
        """Begin to copy one embedding off its device, and queue it.

        Waits for room only if ``overflow`` is ``block``, and for the copy only if the device is
        the CPU. Later work of the tensor's stream may change it (on the CPU: once this returns),
        and no reference to it is kept.

        Args:
            identifier: vLLM's identifier.
            save: Its facts for the header.
            tensor: On any device; may be a view of a larger one.
            step: The engine's step; in each, and in each outage, this waits MAX_BLOCKED_S in all.

        Returns:
            False if it was not taken: already queued, full, or stopping.
        """
        nbytes = tensor.nbytes
        began_s = time.monotonic()
        if step != self._step:
            self._step, self._blocked_in_step_s = step, 0.0
        with self._changed:
            if identifier in self._pending:
                return False
            if not self._make_room_locked(nbytes) or self._stopping:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._write, name="s3ec-save", daemon=True)
                thread.start()  # if there are too many threads, the next save tries again
                self._thread = thread
            self._pending[identifier] = nbytes
            self._memory_bytes += nbytes
        try:
            copy = self._staging(tensor.device).to_host(tensor)
        except BaseException:
            self._end_save(identifier, stored=False)
            raise
        self._jobs.append(_Job(identifier, save, copy, began_s))
        self._node.counters.add("save.queued")
        if not self._is_woken:
            self._is_woken = True
            self._wakeups.put(True)
        return True

    def _make_room_locked(self, nbytes: int) -> bool:
        """Wait until one more fits; return False if it is dropped."""
        is_waiting = False
        while self._is_full(nbytes):
            left_s = MAX_BLOCKED_S - max(self._blocked_in_step_s, self._blocked_in_outage_s)
            is_hopeless = self._stopping or left_s <= 0 or self._node.loop.watch.hangs
            if self._overflow == "drop" or is_hopeless:
                self._count_dropped()
                return False
            if not is_waiting:
                is_waiting = True
                self._node.counters.add("save.blocked")
                self._uploads.flush()  # saves that only wait for an announcement make room
            began_s = time.monotonic()
            self._changed.wait(min(left_s, 1.0))
            waited_s = time.monotonic() - began_s
            self._blocked_in_step_s += waited_s
            self._blocked_in_outage_s += waited_s
        return True

    def _count_dropped(self) -> None:
        self._node.counters.add("save_problem.dropped")
        if self._dropped == 0:
            log.warning(
                "the bucket, or this node's disk, takes embeddings more slowly than they are made, "
                "or not at all: those that find no room (`save_queue_bytes`, a quarter of "
                "`cache_bytes`) are not saved, and are encoded and saved another time (logged once)"
            )
        self._dropped += 1

    def _staging(self, device: torch.device) -> Staging:
        staging = self._stagings.get(device)
        if staging is None:
            staging = self._stagings[device] = open_staging(device)
        return staging

    def _is_full(self, nbytes: int) -> bool:
        """Return True if one more does not fit; any size fits alone. No system call."""
        memory = self._memory_bytes
        # Saves in memory will be in the spool next.
        spooled = memory + self._spool.nbytes
        return bool(
            (memory and memory + nbytes > self._budget_bytes)
            or (spooled and spooled + nbytes > self._spool_bytes)
        )

    def take_stored(self) -> list[str]:
        """Return the identifiers that the bucket has confirmed since the last call."""
        if not self._stored:
            return []
        with self._changed:
            stored, self._stored = self._stored, []
        return stored

    def levels(self) -> dict[str, float]:
        """Return the gauges of queue and spool; the clock is the only system call."""
        with self._changed:
            in_memory = self._in_memory_locked()
        return {
            "level.save_queue_entries": in_memory,
            "level.spool_entries": self._spool.count,
            "level.spool_oldest_seconds": self._spool.oldest_s(),
        }

    def _in_memory_locked(self) -> int:
        return sum(nbytes > 0 for nbytes in self._pending.values())

    def drain(self, timeout_s: float) -> int:
        """Refuse new saves, wait for the bucket to confirm queued and adopted ones, and stop.

        Confirmed saves are announced too, or readers of the corpus would not find them. It may be
        called more than once, and from a signal handler in any thread.

        Returns:
            Number of unconfirmed saves. Nearly all of them wait in the spool; the others are lost,
            and counted as ``save_problem.abandoned``. All calls return the first one's result.
        """
        self._uploads.stop_adopting()
        # A signal may have ended the hook between a job and its wake-up.
        self._wakeups.put(True)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if self._left is None:
                self._wait_for_bucket_locked(time.monotonic() + timeout_s)
            # A signal handler may have drained while this waited; do not count and log twice.
            if self._left is not None:
                self._uploads.stop()  # the drain that this one interrupted has yet to do it
                return self._left
            lost = self._in_memory_locked()
            spooled = len(self._pending) - lost + self._uploads.adopted_left
            unannounced = self._uploads.unannounced
            self._left = spooled + unannounced + lost
        self._wakeups.put(False)
        self._uploads.stop()
        self._log_left(spooled, unannounced, lost)
        return self._left

    def _log_left(self, spooled: int, unannounced: int, lost: int) -> None:
        if self._dropped:
            log.error(
                "%d embeddings were not saved, since there was no room for them; a job that fills "
                "a corpus is incomplete: run it again",
                self._dropped,
            )
        if spooled:
            log.warning(
                "the bucket has not confirmed %d embeddings; they stay in the spool, and the "
                "next engine on this node that saves uploads them",
                spooled,
            )
        if unannounced:
            log.warning(
                "%d embeddings are in the bucket and not in its index yet; the next engine on "
                "this node that saves announces those that are spooled",
                unannounced,
            )
        if spooled + unannounced:
            self._node.counters.add("spool.left", spooled + unannounced)
        if lost:
            self._node.counters.add("save_problem.abandoned", lost)
            log.error("%d embeddings are lost: neither bucket nor spool took them in time", lost)

    def _wait_for_bucket_locked(self, deadline: float) -> None:
        while True:
            uploading = self._pending or self._uploads.adopted_left
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not (uploading or self._uploads.unannounced):
                return
            if not uploading:
                self._uploads.flush()  # each time: failed announcements are retried
            self._changed.wait(min(left_s, 1.0))

    # -- the writer's thread -----------------------------------------------------------------

    def _write(self) -> None:
        while self._wakeups.get():
            self._wait_for_more()
            self._is_woken = False  # first: a job that arrives from here on wakes it again
            while self._jobs:
                self._write_next()

    def _wait_for_more(self) -> None:
        """Wait until the hook has been silent for a moment."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        seen = -1
        while seen != len(self._jobs) and time.monotonic() < deadline:
            seen = len(self._jobs)
            time.sleep(_QUIET_S)

    def _write_next(self) -> None:
        """Bring one job to its upload. A call of its own, so that no tensor outlives it."""
        job, upload = self._jobs.popleft(), None
        try:
            upload = self._write_one(job)
        except BaseException:
            # The top of the thread: it must survive for the next job.
            self._node.counters.add("internal_errors")
            log.exception("save of an embedding")
            job.copy.disown()  # the device may still be writing to it
        if upload is not None:
            try:
                self._uploads.submit(upload)
                return
            except RuntimeError as exc:  # the loop is stopped; a spooled file stays there
                log.debug("save of %s: %s", upload.digest.hex(), exc)
        self._end_save(job.identifier, stored=False)

    def _write_one(self, job: _Job) -> Upload | None:
        """Encode one embedding and put it on the disk; None if it must not be stored."""
        tensor, save = job.copy.wait(), job.save
        key = self._node.naming.make_key(job.identifier, save.renamed)
        try:
            if key is None:
                raise CorruptEntryError("it may not be shared", reason="identifier")
            header = describe(
                tensor,
                identifier=key.stored,
                namespace=self._node.namespace.name,
                modality=save.modality,
                placeholder=save.placeholder,
                made_by=self._made_by,
            )
            pieces = encode(header, tensor)
        except CorruptEntryError as exc:
            job.copy.release()
            self._note(f"save_problem.refused.{exc.reason}", key, "is not saved", exc)
            return None
        try:
            spooled = self._publish(key, pieces)
        except TierError as exc:
            # The bucket's copy is the one that counts: upload it all the same.
            self._note("spool.refused", key, "is not on this node's disk", exc)
            job.copy.disown()
            # The spool may hold it nevertheless, or an earlier save that this one confirms.
            spooled = self._spool.held(key.digest)
            return Upload(key.digest, 0, key, (header, pieces), spooled, began_s=job.began_s)
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        job.copy.release()
        with self._changed:
            self._memory_bytes -= self._pending[job.identifier]
            self._pending[job.identifier] = 0
            self._node.local.add(key)
            self._changed.notify_all()
        return Upload(key.digest, nbytes, key, spooled=spooled, began_s=job.began_s)

    def _note(self, counter: str, key: Key | None, what: str, exc: Exception) -> None:
        """Count a refusal. Each save may meet it, so only the first one is a warning."""
        level = logging.DEBUG if self._node.counters.get(counter) else logging.WARNING
        self._node.counters.add(counter)
        name = key.digest.hex() if key is not None else "?"
        log.log(level, "embedding %s %s: %s (logged once)", name, what, exc)

    def _publish(self, key: Key, pieces: Sequence[bytes | memoryview]) -> Spooled | None:
        watch = self._node.loop.watch
        if watch.hangs:
            raise TierError("the disk does not answer")
        publish = partial(self._node.tier.writer.publish, key, pieces, spool=self._spool)
        return watch.run(publish)

    # -- the loop's thread -------------------------------------------------------------------

    def _upload_ended(self, upload: Upload, stored: bool) -> None:
        self._blocked_in_outage_s = 0.0  # the bucket answered; uploads retry until it does
        identifier = upload.key.identifier if upload.key is not None else ""
        self._end_save(identifier, stored=stored, adopted=upload.adopted)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end_save(self, identifier: str, *, stored: bool, adopted: bool = False) -> None:
        with self._changed:
            if not adopted:
                nbytes = self._pending.pop(identifier, 0)
                self._memory_bytes -= nbytes
            if stored:
                self._stored.append(identifier)
            self._changed.notify_all()

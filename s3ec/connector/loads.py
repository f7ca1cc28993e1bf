# SPDX-License-Identifier: Apache-2.0
"""Reads granted files: several at a time off the GIL, verified, rescued from the bucket if bad."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch

from s3ec import codec
from s3ec.connector.plan import Load
from s3ec.connector.staging import Staging
from s3ec.containment import SIGNALS
from s3ec.errors import CorruptEntryError
from s3ec.identity import MAX_REVISION
from s3ec.node import Node

log = logging.getLogger(__name__)

# The last resort of a load whose pinned file failed: the engine waits for it, since without
# the embedding it would end.
_RESCUE_TIMEOUT_S = 20.0
# More do not help: a few fill the memory bus.
_MAX_READERS = 4
# Hashed while it is in the processor's last cache: 10% of a 30 MB entry. Not smaller, since each
# part costs two turns at the GIL.
_PART_BYTES = 2**22
# Follows no link and waits for no pipe's writer, should somebody have put one there.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Loader:
    """Brings embeddings from pinned files to the device.

    One thread calls it. Its readers are started with the first step that loads several, and
    again in a child after a fork.
    """

    def __init__(self, node: Node, make_staging: Callable[[], Staging]) -> None:
        """Nothing is started yet.

        Args:
            node: This process's parts.
            make_staging: Called once, by the first load.
        """
        self._node = node
        self._make_staging = make_staging
        self._readers: ThreadPoolExecutor | None = None
        self._pid = 0

    def start(self, loads: Sequence[Load], *, later: bool) -> Batch:
        """Begin with a step's loads.

        Args:
            loads: Different embeddings.
            later: The caller has other things to do before it asks for the results.
        """
        staging = self._staging  # made here, where the device is current
        batch = Batch(staging, loads, self._load)
        # The caller reads too, so one alone needs no other thread.
        handed_over = len(loads) if later else len(loads) - 1
        if handed_over > 0:
            batch.submit(self._executor(), handed_over)
        return batch

    def close(self) -> None:
        """Read no more."""
        if self._readers is not None and self._pid == os.getpid():
            self._readers.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _staging(self) -> Staging:
        return self._make_staging()

    def _executor(self) -> ThreadPoolExecutor:
        if self._readers is None or self._pid != os.getpid():
            readers = min(_MAX_READERS, len(os.sched_getaffinity(0)))
            self._readers = ThreadPoolExecutor(max(1, readers - 1), "s3ec-load")
            self._pid = os.getpid()
        return self._readers

    def _load(self, load: Load) -> torch.Tensor:
        """Bring one embedding to the device; in any thread.

        Raises:
            RuntimeError: Neither the file nor the bucket has it.
        """
        started = time.perf_counter()
        buffer = self._staging.take(load.shape)
        try:
            self._fill(buffer.memory, load)
        except BaseException:
            self._staging.drop(buffer)
            raise
        tensor = self._staging.to_device(buffer, load.shape)
        if log.isEnabledFor(logging.DEBUG):
            key = self._node.naming.make_key(load.identifier)
            log.debug(
                "loaded digest=%s nbytes=%d seconds=%.6f",
                key.digest.hex() if key else "?",
                load.shape.nbytes,
                time.perf_counter() - started,
            )
        return tensor

    def _fill(self, memory: torch.Tensor, load: Load) -> None:
        failure: BaseException | None = None
        for _ in range(2):
            try:
                read_data(load, memory, hashed=self._node.settings.verify == "always")
            except SIGNALS:
                raise
            except BaseException as exc:  # noqa: BLE001 - whatever it is, the bucket may have it
                failure = exc
                self._node.counters.add("load.failed")
                log.warning("pinned file %s cannot be loaded: %s", load.path, exc)
            else:
                return
        key = self._node.naming.make_key(load.identifier)
        if key is not None and isinstance(failure, CorruptEntryError):
            self._node.tier.quarantine(key, failure.reason)  # nobody shall pin it again
        try:
            self._rescue(load, memory)
        except SIGNALS:
            raise
        except BaseException as exc:
            raise RuntimeError(
                f"embedding cannot be read from {load.path} ({failure}), nor had from the bucket "
                f"({exc})"
            ) from exc

    def _rescue(self, load: Load, memory: torch.Tensor) -> None:
        key = self._node.naming.make_key(load.identifier)
        if key is None:
            raise CorruptEntryError("not an identifier of ours", reason="identifier")
        limit = load.shape.nbytes + 8 + codec.HEADER_LIMIT
        revision = min(self._node.bad_objects.revision(key), MAX_REVISION)
        fetch = self._node.store.get(self._node.layout.object(key, revision), max_bytes=limit)
        blob = self._node.loop.run(fetch, _RESCUE_TIMEOUT_S)
        if blob is None:
            raise CorruptEntryError("the bucket no longer holds it", reason="length")
        header = codec.verify(blob, namespace=self._node.namespace.name, identifier=key.stored)
        if header.shape != load.shape:
            raise CorruptEntryError(
                f"holds {header.shape}, granted was {load.shape}", reason="shape"
            )
        _bytes_of(memory)[: load.shape.nbytes] = memoryview(blob)[header.data_start :]
        self._node.counters.add("load.rescued")


class Batch:
    """One step's loads, in the hands of the readers and of the thread that made it."""

    def __init__(
        self, staging: Staging, loads: Sequence[Load], load: Callable[[Load], torch.Tensor]
    ) -> None:
        self._staging = staging
        self._loads = loads
        self._load = load
        self._handed_over: list[Future[torch.Tensor]] = []

    def submit(self, readers: ThreadPoolExecutor, count: int) -> None:
        """Hand the first ``count`` loads to the readers."""
        self._handed_over = [readers.submit(self._load, load) for load in self._loads[:count]]

    def finish(self) -> list[torch.Tensor | Exception]:
        """Help with the reading, wait for the rest, let the device wait for its copies.

        Returns:
            One per load, in their order; an Exception where that one failed.
        """
        theirs = len(self._handed_over)
        mine = [self._attempt(load) for load in self._loads[theirs:]]
        # What they have not begun, from the end, since they come from the front.
        while theirs and self._handed_over[theirs - 1].cancel():
            theirs -= 1
            mine.insert(0, self._attempt(self._loads[theirs]))
        done = [_outcome(future) for future in self._handed_over[:theirs]] + mine
        self._staging.finish_loads([one for one in done if isinstance(one, torch.Tensor)])
        return done

    def cancel(self) -> None:
        """Forget it: nobody will ask for the results."""
        for future in self._handed_over:
            future.cancel()

    def _attempt(self, load: Load) -> torch.Tensor | Exception:
        try:
            return self._load(load)
        except SIGNALS:
            raise
        except BaseException as exc:  # noqa: BLE001 - raised by finish's caller, behind the others
            return _as_exception(exc)


def _outcome(future: Future[torch.Tensor]) -> torch.Tensor | Exception:
    try:
        return future.result()
    except SIGNALS:
        raise
    except BaseException as exc:  # noqa: BLE001 - as above
        return _as_exception(exc)


def _as_exception(exc: BaseException) -> Exception:
    """What vLLM's own ``except Exception`` can catch: Rust's panics are none."""
    if isinstance(exc, Exception):
        return exc
    failure = RuntimeError(f"an embedding could not be loaded: {exc!r}")
    failure.__cause__ = exc
    return failure


def read_data(load: Load, memory: torch.Tensor, *, hashed: bool = True) -> None:
    """Read the values of one pinned file into memory, and verify them.

    The header is compared, not parsed again: the scheduler's process did that, and compared
    identifier, namespace and shape, when it pinned the file.

    Args:
        load: What was granted.
        memory: uint8 tensor on the CPU, contiguous, ``load.shape.nbytes`` or longer.
        hashed: False compares length and header only, and believes the values.

    Raises:
        OSError: The file cannot be read.
        CorruptEntryError: It is not what was granted.
    """
    nbytes = load.shape.nbytes
    front, view = bytearray(load.data_start), _bytes_of(memory)[:nbytes]
    checksum = codec.running_checksum()
    fd = os.open(load.path, _OPEN)
    try:
        size = os.fstat(fd).st_size
        if size != len(front) + nbytes:
            raise CorruptEntryError(
                f"{size} bytes, expected {len(front) + nbytes}", reason="length"
            )
        # All at once where nothing is hashed in between.
        step = _PART_BYTES if hashed else nbytes
        done = os.preadv(fd, [front, view[:step]], 0) - len(front)
        if hashed and done > 0:
            checksum.update(view[:done])
        while 0 < done < nbytes:
            part = view[done : done + step]
            count = os.preadv(fd, [part], len(front) + done)
            if count == 0:
                break
            if hashed:
                checksum.update(part[:count])
            done += count
    finally:
        os.close(fd)
    if done != nbytes:
        raise CorruptEntryError(f"ends after {done} bytes of tensor", reason="length")
    if codec.checksum(front) != load.front_digest:
        raise CorruptEntryError("another header than was pinned", reason="header")
    if hashed and checksum.hexdigest() != load.checksum:
        raise CorruptEntryError("checksum differs", reason="checksum")


def _bytes_of(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array).cast("B")

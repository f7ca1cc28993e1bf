# SPDX-License-Identifier: Apache-2.0
"""Brings granted files to the device: several at a time, each verified as it is read.

An embedding whose file cannot be read is rescued from the bucket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from s3ec import codec
from s3ec.codec import Header
from s3ec.connector.messages import Load
from s3ec.connector.staging import Buffer, Staging, bytes_of
from s3ec.errors import CorruptEntryError
from s3ec.identity import Key
from s3ec.node import Node
from s3ec.runtime import PASS_THROUGH, DaemonPool
from s3ec.store.places import Place, past_bad_copies
from s3ec.tier.files import touch

log = logging.getLogger(__name__)

# A part is hashed while it is in the processor's last-level cache: saves 10% of a 30 MB entry. Not
# smaller, since each part takes the GIL twice.
PART_BYTES = 2**22
# O_NONBLOCK: do not wait for the writer of a pipe, should one be there. Only links of /proc are
# followed.
_OPEN_LINK = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN = _OPEN_LINK | os.O_NOFOLLOW
# More threads do not help: a few saturate the memory bus.
MAX_READERS = 4
# Smaller entries are read sooner by one thread than by several, which contend for the GIL: five of
# 2.6 MB in memory take 2.6 ms instead of 4.3.
READERS_FROM_BYTES = 2**24
# How long the engine waits for a disk that delivers nothing, before it asks the bucket.
PATIENCE_S = 5.0
# How long it waits if the bucket delivers nothing either, before it ends: without the embedding it
# would end anyway.
STALLED_S = 60.0


def read_data(load: Load, memory: torch.Tensor, *, hashed: bool = True, wait: bool = True) -> None:
    """Read the values of one granted file into memory, verify them, and note the use.

    The header is compared, not parsed again: the scheduler's process parsed it, and compared
    identifier, namespace and shape, when it opened the file.

    Args:
        load: The granted file.
        memory: uint8 tensor on the CPU, contiguous, ``load.shape.nbytes`` or longer.
        hashed: False compares length and header only, and trusts the values.
        wait: False: read only from the page cache. The name is looked up all the same: it was when
            the file was opened, so the kernel has it cached.

    Raises:
        BlockingIOError: Not ``wait``, and a disk would have to answer.
        OSError: The file cannot be read.
        CorruptEntryError: Its content is not the granted one.
    """
    header, nbytes = load.header, load.shape.nbytes
    front, view = bytearray(header.data_start), bytes_of(memory)[:nbytes]
    checksum = codec.running_checksum()
    with _opened(load) as (fd, found):
        if found.st_size != header.total_bytes:
            raise CorruptEntryError(
                f"{found.st_size} bytes, expected {header.total_bytes}", reason="length"
            )
        flags = 0 if wait else os.RWF_NOWAIT
        # All at once if nothing is hashed in between.
        step = PART_BYTES if hashed else nbytes
        done = _read(fd, [front, view[:step]], 0, flags) - len(front)
        if flags and done <= 0:  # the kernel has only a part of a long header
            raise BlockingIOError(errno.EAGAIN, "a disk would have to answer")
        if hashed and done > 0:
            checksum.update(view[:done])
        while 0 < done < nbytes:
            part = view[done : done + step]
            count = _read(fd, [part], len(front) + done, flags)
            if count == 0:
                break
            if hashed:
                checksum.update(part[:count])
            done += count
        if done != nbytes:
            raise CorruptEntryError(f"ends after {done} bytes of tensor", reason="length")
        if codec.checksum(front) != header.front_digest:
            raise CorruptEntryError("another header than was granted", reason="header")
        if hashed and checksum.hexdigest() != header.checksum:
            raise CorruptEntryError("checksum differs", reason="checksum")
        touch(fd)


@contextmanager
def _opened(load: Load) -> Iterator[tuple[int, os.stat_result]]:
    """Open the very file that was granted: the scheduler's open descriptor, or by its name.

    Eviction removes the name. Then the scheduler's process still has the file open, and other
    processes of this user reach it through ``/proc``.

    Raises:
        FileNotFoundError: It cannot be reached from here.
        OSError: It cannot be opened.
    """
    if load.pid == os.getpid() and (found := _granted(load, load.fd)) is not None:
        yield load.fd, found
        return
    reason: OSError = FileNotFoundError(
        errno.ENOENT, "the granted file was evicted and is out of reach"
    )
    for path, flags in ((load.path, _OPEN), (f"/proc/{load.pid}/fd/{load.fd}", _OPEN_LINK)):
        try:
            fd = os.open(path, flags)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as exc:
            reason = exc
            continue
        try:
            found = _granted(load, fd)
            if found is not None:
                yield fd, found
                return
        finally:
            os.close(fd)
    raise reason


def _granted(load: Load, fd: int) -> os.stat_result | None:
    """Return the status of an open file if it is the granted one, else None."""
    try:
        found = os.fstat(fd)
    except OSError:  # closed; not possible before this load was reported
        return None
    return found if (found.st_dev, found.st_ino) == (load.device, load.inode) else None


def _read(fd: int, views: list[Any], offset: int, flags: int) -> int:
    try:
        return os.preadv(fd, views, offset, flags)
    except OSError as exc:
        if flags and exc.errno == errno.EOPNOTSUPP:
            raise BlockingIOError(errno.EAGAIN, "this file system cannot tell") from exc
        raise


def _wait_for_any(outcomes: Collection[Future[Any]], timeout_s: float) -> None:
    wait(outcomes, max(0.0, timeout_s), FIRST_COMPLETED)


_Blob = bytes | memoryview | None


class _UnreadableError(Exception):
    """A granted file cannot be read: the bucket's object replaces it."""


@dataclass(slots=True)
class _Pending:
    """One load that is not on the device yet.

    Attributes:
        read: The running read of its file; None if that has failed.
        held: The buffer that a reader reads into. The thread that pops it owns it.
        why: What is wrong with the file.
        answer: The bucket's answer, once it was asked.
        refusal: Why the answer is not usable.
    """

    load: Load
    read: Future[torch.Tensor] | None
    held: list[Buffer] = field(default_factory=list)
    why: str = "the disk does not answer"
    answer: Future[_Blob] | None = None
    refusal: Exception | None = None


class Loader:
    """Brings embeddings from granted files to the device.

    One thread calls it. That thread never waits for a disk without a bound, unless no reader can be
    started. It reads files in the page cache by itself. Large entries, and those that need the
    disk, go to reader threads, which are started when they are first needed.

    A wait for a load ends in one of four cases: it is on the device; its file is bad and so is the
    bucket's copy; the bucket has delivered its copy while a reader hangs; neither disk nor bucket
    has delivered anything for ``STALLED_S``. The bucket is asked for a file that cannot be read;
    for all files if no reader has delivered for ``PATIENCE_S``, or at once while the disk is known
    to hang.
    """

    def __init__(
        self,
        node: Node,
        make_staging: Callable[[], Staging],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait_for_any: Callable[[Collection[Future[Any]], float], None] = _wait_for_any,
    ) -> None:
        """Start no thread yet.

        Args:
            make_staging: Called once, by the first load.
            clock: Monotonic seconds.
            wait_for_any: Waits until one of the futures has ended, at most the given seconds.
        """
        self._loop = node.loop
        self._sources = node.sources
        self._counters = node.counters
        self._naming = node.naming
        self._make_staging = make_staging
        self._hashed = node.settings.verify == "always"
        self._clock = clock
        self._wait_for_any = wait_for_any
        self._readers: DaemonPool | None = None

    def load(self, loads: Sequence[Load]) -> list[torch.Tensor | Exception]:
        """Bring a step's loads to the device; the device waits for its copies by itself.

        Args:
            loads: Different embeddings, the large ones first.

        Returns:
            One per load, in their order; an Exception if that load failed.
        """
        staging = self._staging  # made here, where the device is current
        large = sum(one.shape.nbytes >= READERS_FROM_BYTES for one in loads)
        # This thread reads too, so a single load needs no other.
        split = large if large < len(loads) else max(0, large - 1)
        begun = [self._hand_over(load) for load in loads[:split]]
        begun += [self._load_here(load) for load in loads[split:]]
        # Take back what the readers have not begun; from the end, since they start at the front.
        for place in reversed(range(split)):
            one = begun[place]
            if not isinstance(one, _Pending) or one.read is None or not one.read.cancel():
                break
            begun[place] = self._load_here(loads[place])
        done = self._wait(begun)
        staging.finish_loads([one for one in done if isinstance(one, torch.Tensor)])
        return done

    def close(self) -> None:
        """Stop the readers."""
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _staging(self) -> Staging:
        return self._make_staging()

    def _hand_over(self, load: Load) -> torch.Tensor | Exception | _Pending:
        if self._readers is None:
            readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
            self._readers = DaemonPool(readers, "s3ec-load")
        held: list[Buffer] = []
        try:
            return _Pending(load, self._readers.submit(self._load, load, held, wait=True), held)
        except RuntimeError:  # no thread can start, and without its loads the engine would end
            return self._load_here(load, wait=True)

    def _load_here(self, load: Load, *, wait: bool = False) -> torch.Tensor | Exception | _Pending:
        """Bring one to the device in this thread, or hand it over if it needs the disk."""
        try:
            return self._load(load, [], wait=wait)
        except BlockingIOError:
            return self._hand_over(load)
        except _UnreadableError as exc:
            return _Pending(load, None, why=str(exc), answer=self._ask_bucket(load))
        except PASS_THROUGH:
            raise
        except BaseException as exc:  # noqa: BLE001 - raised by the caller, behind the others
            return _as_exception(exc)

    def _load(self, load: Load, held: list[Buffer], *, wait: bool) -> torch.Tensor:
        """Bring one embedding to the device.

        Raises:
            BlockingIOError: Not ``wait``, and a disk would have to answer.
            _UnreadableError: The file cannot be read.
        """
        # Keep the steps few: the bytes read go through the processor's caches, so the code and data
        # used afterwards are cold.
        buffer = self._staging.take(load.shape)
        held.append(buffer)
        try:
            self._read(load, buffer, wait=wait)
        except BaseException:
            if _pop(held) is not None:
                self._staging.drop(buffer)
            raise
        if _pop(held) is None:
            raise CancelledError  # the bucket was faster: the result is not needed
        return self._staging.to_device(buffer, load.shape)

    def _read(self, load: Load, buffer: Buffer, *, wait: bool) -> None:
        """Fill a buffer from the file."""
        try:
            if wait:
                self._loop.watch.run(partial(read_data, load, buffer.memory, hashed=self._hashed))
            else:
                in_memory = self._sources.tier.is_in_memory
                read_data(load, buffer.memory, hashed=self._hashed, wait=in_memory)
            return
        except PASS_THROUGH:
            raise
        except BaseException as exc:
            if isinstance(exc, BlockingIOError) and not wait:
                raise
            # Not the exception itself: a reference to it keeps its frames' files open.
            why = str(exc)
            reason = exc.reason if isinstance(exc, CorruptEntryError) else ""
        self._counters.add("load.failed")
        log.warning("granted file %s cannot be loaded: %s", load.path, why)
        key = self._naming.make_key(load.identifier, load.renamed)
        if key is not None and reason:
            # The bad file must not be opened again.
            self._sources.residents.discard(key.digest)
            self._sources.tier.entries.drop_bad(key, reason, inode=load.inode)
        raise _UnreadableError(why)

    def _ask_bucket(self, load: Load) -> Future[_Blob]:
        return self._loop.submit(self._get(load))

    async def _get(self, load: Load) -> _Blob:
        # Even if this process has found the object bad: the engine would end without it.
        limit = load.shape.nbytes + 8 + codec.HEADER_LIMIT
        name = self._sources.layout.object(self._key_of(load))

        async def read(replicas: set[Place]) -> _Blob:
            blob = await self._sources.store.get(name, max_bytes=limit)
            if blob is not None and replicas:
                await asyncio.to_thread(self._verified, load, blob)
            return blob

        return await past_bad_copies(name, read)

    def _key_of(self, load: Load) -> Key:
        key = self._naming.make_key(load.identifier, load.renamed)
        if key is None:
            raise CorruptEntryError("not an identifier of ours", reason="identifier")
        return key

    def _verified(self, load: Load, blob: bytes | memoryview) -> Header:
        """Verify an object that replaces a granted file; raise CorruptEntryError if it is bad."""
        header = codec.verify(
            blob,
            namespace=self._sources.layout.namespace,
            identifier=self._key_of(load).stored,
        )
        if header.shape != load.shape:
            raise CorruptEntryError(
                f"holds {header.shape}, granted was {load.shape}", reason="shape"
            )
        return header

    # -- pending loads -------------------------------------------------------------------------

    def _wait(
        self, begun: Sequence[torch.Tensor | Exception | _Pending]
    ) -> list[torch.Tensor | Exception]:
        """Wait for the readers, and ask the bucket if a file cannot be read."""
        outcomes = list(begun)
        came_s = self._clock()  # when a load was last delivered
        while left := {at: one for at, one in enumerate(outcomes) if isinstance(one, _Pending)}:
            ended = {at: self._ended(one) for at, one in left.items()}
            now_s = self._clock()
            for at, outcome in ended.items():
                if outcome is not None:
                    outcomes[at], came_s = outcome, now_s
            if any(outcome is not None for outcome in ended.values()):
                continue
            unasked = [one for one in left.values() if one.answer is None]
            patience_s = PATIENCE_S if unasked else STALLED_S
            if unasked and self._loop.watch.hangs:
                patience_s = 0.0
            if now_s < came_s + patience_s:
                self._wait_for_any(_awaited(left.values()), came_s + patience_s - now_s)
                continue
            for one in unasked:
                self._counters.add("load.hung")
                log.warning(
                    "the disk does not answer; asking the bucket for what %s holds", one.load.path
                )
                one.answer = self._ask_bucket(one.load)
            if not unasked:
                for at, one in left.items():
                    self._let_go(one)
                    outcomes[at] = _failure(one, "it has not answered in time")
        return [one for one in outcomes if not isinstance(one, _Pending)]

    def _ended(self, one: _Pending) -> torch.Tensor | Exception | None:
        """Return a load's result, from its file or the bucket; None while it is pending."""
        if one.read is not None and one.read.done():
            read = _outcome_of(one.read.result)
            if not isinstance(read, _UnreadableError):
                return read
            one.read, one.why = None, str(read)
            if one.answer is None or one.refusal is not None:  # the refusal may be old: ask again
                one.answer, one.refusal = self._ask_bucket(one.load), None
        if one.answer is not None and one.answer.done() and one.refusal is None:
            brought = _outcome_of(partial(self._bring, one, one.answer))
            if not isinstance(brought, Exception):
                return brought
            one.refusal = brought
            if one.read is not None:
                log.warning("%s", brought)  # the reader continues: it may still deliver
        return one.refusal if one.read is None else None

    def _bring(self, one: _Pending, answer: Future[_Blob]) -> torch.Tensor:
        """Bring the bucket's answer to the device, verified.

        Raises:
            RuntimeError: The bucket did not deliver; names what is wrong with the file too.
        """
        load = one.load
        try:
            blob = answer.result()
            if blob is None:
                raise CorruptEntryError("the bucket no longer holds it", reason="length")
            header = self._verified(load, blob)
        except PASS_THROUGH:
            raise
        except BaseException as exc:
            raise _failure(one, str(exc)) from exc
        self._counters.add("load.rescued")
        self._let_go(one)
        buffer = self._staging.take(load.shape)
        bytes_of(buffer.memory)[: load.shape.nbytes] = memoryview(blob)[header.data_start :]
        return self._staging.to_device(buffer, load.shape)

    def _let_go(self, one: _Pending) -> None:
        """Stop waiting for a reader, and leave it the buffer that it reads into."""
        if one.read is not None:
            one.read.cancel()
        buffer = _pop(one.held)
        if buffer is not None:
            self._staging.leak(buffer)  # the kernel may write to it for a long time


def _awaited(pending: Iterable[_Pending]) -> list[Future[Any]]:
    futures = (future for one in pending for future in (one.read, one.answer))
    return [future for future in futures if future is not None and not future.done()]


def _failure(one: _Pending, answer: str) -> RuntimeError:
    return RuntimeError(
        f"embedding cannot be read from {one.load.path} ({one.why}), nor had from the bucket "
        f"({answer})"
    )


def _pop(held: list[Buffer]) -> Buffer | None:
    """Take ownership of a buffer; None if another thread has it."""
    try:
        return held.pop()  # atomic
    except IndexError:
        return None


def _outcome_of(bring: Callable[[], torch.Tensor]) -> torch.Tensor | Exception:
    try:
        return bring()
    except PASS_THROUGH:
        raise
    except BaseException as exc:  # noqa: BLE001 - as in _load_here
        return _as_exception(exc)


def _as_exception(exc: BaseException) -> Exception:
    """Wrap a BaseException, such as Rust's panics, for vLLM's own ``except Exception``."""
    if isinstance(exc, Exception):
        return exc
    failure = RuntimeError(f"an embedding could not be loaded: {exc!r}")
    failure.__cause__ = exc
    return failure

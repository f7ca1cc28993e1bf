# SPDX-License-Identifier: Apache-2.0
"""Brings granted files to the device: several at a time, each verified as it is read.

What cannot be read from the disk is rescued from the bucket.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from s3ec import codec
from s3ec.connector.messages import Load
from s3ec.connector.staging import Buffer, Staging, bytes_of
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError
from s3ec.fetch import Sources
from s3ec.identity import KeyPolicy
from s3ec.runtime import PASS_THROUGH, DaemonPool, LoopThread
from s3ec.tier.files import touch

log = logging.getLogger(__name__)

# Hashed while it is in the processor's last cache: 10% of a 30 MB entry. Not smaller, since each
# part costs two turns at the GIL.
PART_BYTES = 2**22
# Waits for no pipe's writer, should somebody have put one there. Of links only those of /proc are
# followed.
_OPEN_LINK = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN = _OPEN_LINK | os.O_NOFOLLOW
# Linux; elsewhere a load alone is handed to a reader.
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)
# Their pages are nowhere else, and they do not know RWF_NOWAIT.
_IN_MEMORY = {"tmpfs", "ramfs"}
# The last resort of a load whose file failed: the engine waits for it, since without
# the embedding it would end.
_RESCUE_TIMEOUT_S = 20.0
# More do not help: a few fill the memory bus.
MAX_READERS = 4
# Smaller entries are read sooner by one thread than by several, which take turns at the GIL: five
# of 2.6 MB in memory take 2.6 ms instead of 4.3.
READERS_FROM_BYTES = 2**24
# How long the engine waits for a disk that delivers nothing, before the bucket is asked.
PATIENCE_S = 5.0
# How long it waits where the bucket delivers nothing either, before it ends.
STALLED_S = 60.0


def read_data(load: Load, memory: torch.Tensor, *, hashed: bool = True, wait: bool = True) -> None:
    """Read the values of one granted file into memory, verify them, and note the use.

    The header is compared, not parsed again: the scheduler's process did that, and compared
    identifier, namespace and shape, when it opened the file.

    Args:
        load: What was granted.
        memory: uint8 tensor on the CPU, contiguous, ``load.shape.nbytes`` or longer.
        hashed: False compares length and header only, and believes the values.
        wait: False: read only what the kernel has in memory. The name is looked up all the same:
            it was when the file was opened, so the kernel knows it.

    Raises:
        BlockingIOError: Not ``wait``, and a disk would have to answer.
        OSError: The file cannot be read.
        CorruptEntryError: It is not what was granted.
    """
    nbytes = load.shape.nbytes
    front, view = bytearray(load.data_start), bytes_of(memory)[:nbytes]
    checksum = codec.running_checksum()
    with _opened(load) as (fd, found):
        if found.st_size != len(front) + nbytes:
            raise CorruptEntryError(
                f"{found.st_size} bytes, expected {len(front) + nbytes}", reason="length"
            )
        flags = 0 if wait or is_in_memory(found.st_dev) else _no_wait()
        # All at once where nothing is hashed in between.
        step = PART_BYTES if hashed else nbytes
        done = _read(fd, [front, view[:step]], 0, flags) - len(front)
        if flags and done <= 0:  # of a long header the kernel has a part
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
        if codec.checksum(front) != load.front_digest:
            raise CorruptEntryError("another header than was granted", reason="header")
        if hashed and checksum.hexdigest() != load.checksum:
            raise CorruptEntryError("checksum differs", reason="checksum")
        touch(fd)


@contextmanager
def _opened(load: Load) -> Iterator[tuple[int, os.stat_result]]:
    """The very file that was granted: as the scheduler's process has it open, or by its name.

    Eviction takes the name away. Then the scheduler's process still has the file open, and other
    processes of this user reach that through ``/proc``.

    Raises:
        FileNotFoundError: It cannot be reached from here.
        OSError: It cannot be opened.
    """
    found = _own(load)
    if found is not None:
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
            found = os.fstat(fd)
            if _is_granted(load, found):
                yield fd, found
                return
        finally:
            os.close(fd)
    raise reason


def _own(load: Load) -> os.stat_result | None:
    """The file where this process has it open itself."""
    if load.pid != os.getpid():
        return None
    try:
        found = os.fstat(load.fd)
    except OSError:  # closed, which cannot be before this load was reported
        return None
    return found if _is_granted(load, found) else None


def _is_granted(load: Load, found: os.stat_result) -> bool:
    return (found.st_dev, found.st_ino) == (load.device, load.inode)


def _read(fd: int, views: list[Any], offset: int, flags: int) -> int:
    try:
        return os.preadv(fd, views, offset, flags)
    except OSError as exc:
        if flags and exc.errno == errno.EOPNOTSUPP:
            raise BlockingIOError(errno.EAGAIN, "this file system cannot tell") from exc
        raise


def _no_wait() -> int:
    if _NO_WAIT is None:
        raise BlockingIOError(errno.EAGAIN, "this system cannot tell")
    return int(_NO_WAIT)


@functools.lru_cache(maxsize=16)
def is_in_memory(device: int) -> bool:
    """Whether a file system (``st_dev``) is one of memory; looked up once."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                mount, _, about = line.partition(" - ")
                if mount.split()[2] == number:
                    return about.split()[0] in _IN_MEMORY
    except (OSError, IndexError):
        pass
    return False


def _is_large(load: Load) -> bool:
    return load.shape.nbytes >= READERS_FROM_BYTES


def _wait_for_any(outcomes: Collection[Future[Any]], timeout_s: float) -> None:
    wait(outcomes, max(0.0, timeout_s), FIRST_COMPLETED)


class Loader:
    """Brings embeddings from granted files to the device.

    One thread calls it. That thread never waits for a disk without a bound. It reads by itself
    what the kernel has in memory, and hands large entries and the rest to reader threads. Where
    none of a step's readers has delivered for ``PATIENCE_S``, or at once while the disk is known to
    hang, it asks the bucket. Readers are started when they are first needed.

    Attributes:
        clock: As given.
        wait_for_any: As given.
    """

    def __init__(
        self,
        loop: LoopThread,
        sources: Sources,
        counters: Counters,
        naming: KeyPolicy,
        make_staging: Callable[[], Staging],
        *,
        hashed: bool,
        clock: Callable[[], float] = time.monotonic,
        wait_for_any: Callable[[Collection[Future[Any]], float], None] = _wait_for_any,
    ) -> None:
        """Nothing is started yet.

        Args:
            sources: Where the bucket's copies come from.
            naming: Makes keys of what was granted.
            make_staging: Called once, by the first load.
            hashed: Whether values are verified; False believes what was granted.
            clock: Monotonic seconds.
            wait_for_any: Waits until one of the readers has ended, so many seconds at most.
        """
        self.clock = clock
        self.wait_for_any = wait_for_any
        self._loop = loop
        self._sources = sources
        self._counters = counters
        self._naming = naming
        self._make_staging = make_staging
        self._hashed = hashed
        self._readers: DaemonPool | None = None

    def start(self, loads: Sequence[Load], *, later: bool) -> StepLoads:
        """Begin with a step's loads: read what is in memory, hand the rest to readers.

        Args:
            loads: Different embeddings.
            later: The caller has other things to do before it asks for the results.
        """
        large = sum(1 for _ in takewhile(_is_large, loads))
        # The caller reads too, so one alone needs no other thread.
        handed_over = large if later or large < len(loads) else large - 1
        # The staging is made here, where the device is current.
        return StepLoads(self, self._staging, loads, handed_over)

    def close(self) -> None:
        """Read no more."""
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _staging(self) -> Staging:
        return self._make_staging()

    def hand_over(self, load: Load) -> Handed:
        """Have a reader do it."""
        if self._readers is None:
            readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
            self._readers = DaemonPool(readers, "s3ec-load")
        lease = BufferLease()
        return Handed(load, lease, self._readers.submit(self._load, load, lease))

    def load_at_once(self, load: Load) -> torch.Tensor:
        """Bring one embedding to the device, in the calling thread.

        Raises:
            BlockingIOError: A disk would have to answer.
            RuntimeError: Neither the file nor the bucket has it.
        """
        # Few steps, with little in memory: what is read goes through the processor's caches, so
        # all code and data behind it are cold.
        started = time.perf_counter()
        staging = self._staging
        buffer = staging.take(load.shape)
        try:
            self._fill(buffer.memory, load, None, wait=False)
        except BaseException:
            staging.drop(buffer)
            raise
        tensor = staging.to_device(buffer, load.shape)
        self._log_loaded(load, started)
        return tensor

    @property
    def patience_s(self) -> float:
        """How long to wait for the first of some readers now, before the bucket is asked."""
        return 0.0 if self._loop.watch.hangs else PATIENCE_S

    def note_hang(self, load: Load) -> None:
        """The disk has not delivered this one in time."""
        self._counters.add("load.hung")
        log.warning("the disk does not answer; asking the bucket for what %s holds", load.path)

    def ask_bucket(
        self, load: Load, timeout_s: float, readers: Collection[Future[torch.Tensor]]
    ) -> memoryview:
        """The bucket's copy of what a reader should have brought, verified.

        In no buffer of the staging: readers that hang may have all of them.

        Args:
            load: What was granted.
            timeout_s: Of the bucket.
            readers: The bucket is waited for no longer where one of these ends.

        Raises:
            RuntimeError: The bucket did not deliver.
        """
        return self._from_bucket(load, None, timeout_s, readers)

    def load_values(self, load: Load, values: memoryview) -> torch.Tensor:
        """Bring an embedding whose bytes are in memory to the device."""

        def fill(load: Load, memory: torch.Tensor) -> None:
            bytes_of(memory)[: load.shape.nbytes] = values

        return self._to_device(load, self._staging.take(load.shape), fill)

    def give_up(self, handed: Handed) -> None:
        """Wait for a reader no more, and leave it the buffer that it reads into."""
        left = handed.lease.give_up()
        if left is not None:
            self._staging.leak(left)  # the kernel may write to it for a long time yet

    def _load(self, load: Load, lease: BufferLease) -> torch.Tensor:
        """Bring one embedding to the device; in a reader's thread."""
        started = time.perf_counter()
        buffer = self._staging.take(load.shape)
        if not lease.take(buffer):
            self._staging.drop(buffer)
            raise _GivenUpError
        tensor = self._to_device(
            load, buffer, lambda load, memory: self._fill(memory, load, lease, wait=True), lease
        )
        self._log_loaded(load, started)
        return tensor

    def _log_loaded(self, load: Load, started: float) -> None:
        if log.isEnabledFor(logging.DEBUG):
            key = self._naming.make_key(load.identifier, load.renamed)
            log.debug(
                "loaded digest=%s nbytes=%d seconds=%.6f",
                key.digest.hex() if key else "?",
                load.shape.nbytes,
                time.perf_counter() - started,
            )

    def _to_device(
        self,
        load: Load,
        buffer: Buffer,
        fill: Callable[[Load, torch.Tensor], None],
        lease: BufferLease | None = None,
    ) -> torch.Tensor:
        try:
            fill(load, buffer.memory)
        except BaseException:
            if lease is None or lease.end():
                self._staging.drop(buffer)
            raise
        if lease is not None and not lease.end():
            raise _GivenUpError
        return self._staging.to_device(buffer, load.shape)

    def _fill(
        self, memory: torch.Tensor, load: Load, lease: BufferLease | None, *, wait: bool
    ) -> None:
        failure: BaseException | None = None
        hashed = self._hashed
        for _ in range(2):
            try:
                if wait:
                    self._loop.watch.run(partial(read_data, load, memory, hashed=hashed))
                else:
                    read_data(load, memory, hashed=hashed, wait=False)
            except (BlockingIOError, *PASS_THROUGH):
                raise
            except BaseException as exc:
                if lease is not None and lease.is_given_up:
                    raise _GivenUpError from exc
                failure = exc
                self._counters.add("load.failed")
                # Not the exception itself: what keeps it keeps what its frames have open.
                log.warning("granted file %s cannot be loaded: %s", load.path, str(exc))
            else:
                return
        key = self._naming.make_key(load.identifier, load.renamed)
        if key is not None and isinstance(failure, CorruptEntryError):
            # Nobody shall open it again.
            self._sources.residents.discard(key.digest)
            self._sources.tier.entries.drop_bad(key, failure.reason, inode=load.inode)
        try:
            bytes_of(memory)[: load.shape.nbytes] = self._from_bucket(load, failure)
        finally:
            failure = None  # its frames hold it, and all that the callers have open

    def _from_bucket(
        self,
        load: Load,
        failure: BaseException | None,
        timeout_s: float = _RESCUE_TIMEOUT_S,
        readers: Collection[Future[torch.Tensor]] = (),
    ) -> memoryview:
        """The tensor's bytes, verified.

        Raises:
            RuntimeError: Nor does the bucket deliver; it says what is wrong with the file too.
        """
        try:
            return self._rescue(load, timeout_s, readers)
        except PASS_THROUGH:
            raise
        except BaseException as exc:
            why = failure or "the disk does not answer"
            raise RuntimeError(
                f"embedding cannot be read from {load.path} ({why}), nor had from the bucket "
                f"({exc})"
            ) from exc

    def _rescue(
        self, load: Load, timeout_s: float, readers: Collection[Future[torch.Tensor]]
    ) -> memoryview:
        key = self._naming.make_key(load.identifier, load.renamed)
        if key is None:
            raise CorruptEntryError("not an identifier of ours", reason="identifier")
        # Also where this process has found the object bad: the engine ends without it.
        limit = load.shape.nbytes + 8 + codec.HEADER_LIMIT
        fetch = self._sources.store.get(self._sources.layout.object(key), max_bytes=limit)
        answer = self._loop.submit(fetch)
        _wait_for_any([answer, *readers], min(timeout_s, _RESCUE_TIMEOUT_S))
        if not answer.done():
            answer.cancel()
            raise TimeoutError("it has not answered in time")
        blob = answer.result()
        if blob is None:
            raise CorruptEntryError("the bucket no longer holds it", reason="length")
        header = codec.verify(blob, namespace=self._sources.layout.namespace, identifier=key.stored)
        if header.shape != load.shape:
            raise CorruptEntryError(
                f"holds {header.shape}, granted was {load.shape}", reason="shape"
            )
        self._counters.add("load.rescued")
        return memoryview(blob)[header.data_start :]


class _GivenUpError(Exception):
    """Nobody waits for what this reader brings."""


class BufferLease:
    """Who may reuse a load's buffer: its reader, or whoever has given that reader up.

    =========  ========  ======================================================================
    state      goes to   when
    =========  ========  ======================================================================
    waiting    reading   the reader begins, ``take``
    reading    done      the disk has answered, ``end``: the buffer is the reader's
    waiting    given up  nobody waits any more, ``give_up``: the reader will not begin
    reading    given up  likewise: the buffer is the caller's, and the kernel may still write to it
    =========  ========  ======================================================================
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: Buffer | None = None
        self.is_given_up = False

    def take(self, buffer: Buffer) -> bool:
        """The reader begins; False where nobody waits any more."""
        with self._lock:
            self._buffer = None if self.is_given_up else buffer
            return not self.is_given_up

    def end(self) -> bool:
        """The disk has answered; False where the reader was given up, and the buffer with it."""
        with self._lock:
            self._buffer = None
            return not self.is_given_up

    def give_up(self) -> Buffer | None:
        """Wait for this reader no more; the buffer that it may still read into."""
        with self._lock:
            self.is_given_up = True
            buffer, self._buffer = self._buffer, None
            return buffer


class Handed(NamedTuple):
    """One load that a reader does."""

    load: Load
    lease: BufferLease
    outcome: Future[torch.Tensor]


class StepLoads:
    """One step's loads, in the hands of the readers and of the thread that made it.

    States of a load:

    ===========  ===========  ==============================================================
    state        goes to      when
    ===========  ===========  ==============================================================
    (new)        handed over  it is large, and others follow or its result is needed later
    (new)        ended        the calling thread has read it from memory
    (new)        handed over  the kernel does not have it in memory: a disk would have to answer
    handed over  ended        a reader has it, or the bucket stood in, or both failed
    handed over  (new)        no reader has begun it when ``finish`` gets there
    handed over  dropped      ``cancel``, before a reader has begun it
    ===========  ===========  ==============================================================
    """

    def __init__(
        self, loader: Loader, staging: Staging, loads: Sequence[Load], handed_over: int
    ) -> None:
        """Hand the first loads over, and read the others as far as they are in memory."""
        self._loader = loader
        self._staging = staging
        self._loads = loads
        self._handed_over = handed_over
        self._begun: list[torch.Tensor | Exception | Handed] = [
            loader.hand_over(load) for load in loads[:handed_over]
        ]
        self._begun += [self._attempt(load) for load in loads[handed_over:]]

    def finish(self) -> list[torch.Tensor | Exception]:
        """Help with the reading, wait for the rest, let the device wait for its copies.

        Returns:
            One per load, in their order; an Exception where that one failed.
        """
        begun = self._begun
        # What they have not begun, from the end, since they come from the front.
        for place in reversed(range(self._handed_over)):
            handed = begun[place]
            if not isinstance(handed, Handed) or not handed.outcome.cancel():
                break
            begun[place] = self._attempt(self._loads[place])
        waiting = {place: one for place, one in enumerate(begun) if isinstance(one, Handed)}
        # While nothing waits for a disk, nobody has to ask how it is.
        read = _Readers(self._loader, waiting).finish() if waiting else {}
        done = [read[place] if isinstance(one, Handed) else one for place, one in enumerate(begun)]
        self._staging.finish_loads([one for one in done if isinstance(one, torch.Tensor)])
        return done

    def cancel(self) -> None:
        """Nobody will ask for the results: what has not begun does not begin."""
        for one in self._begun:
            if isinstance(one, Handed):
                one.outcome.cancel()

    def _attempt(self, load: Load) -> torch.Tensor | Exception | Handed:
        try:
            return self._loader.load_at_once(load)
        except BlockingIOError:
            return self._loader.hand_over(load)
        except PASS_THROUGH:
            raise
        except BaseException as exc:  # noqa: BLE001 - raised by finish's caller, behind the others
            return _as_exception(exc)


class _Readers:
    """Waits for a step's readers, and has the bucket stand in for them where none delivers.

    Each of their loads is waited for until one of three things happens: its reader has ended, with
    a tensor or a failure; the bucket has delivered its copy; neither disk nor bucket has delivered
    anything for ``STALLED_S``. A disk that is slow has delivered something meanwhile, and is waited
    for however long all loads of the step take it together.
    """

    def __init__(self, loader: Loader, handed: Mapping[int, Handed]) -> None:
        """Nothing is waited for yet.

        Args:
            handed: By place in the step, not empty.
        """
        self._loader = loader
        self._left = dict(handed)
        self._ended: dict[int, torch.Tensor | Exception] = {}
        self._failures: dict[int, RuntimeError] = {}  # of those that the bucket was asked for

    def finish(self) -> dict[int, torch.Tensor | Exception]:
        """Wait for all; by place, an Exception where that load failed."""
        clock = self._loader.clock
        came_s = clock()  # when something was delivered last
        ask_at_s = came_s + self._loader.patience_s
        while self._left:
            wake_at_s = min(ask_at_s, came_s + STALLED_S)
            self._loader.wait_for_any(self._outcomes(), wake_at_s - clock())
            now_s = clock()
            if self._collect():
                came_s, ask_at_s = now_s, now_s + self._loader.patience_s
            elif now_s >= came_s + STALLED_S:
                self._give_up()
            else:
                if self._ask_bucket(came_s + STALLED_S):
                    came_s = clock()
                ask_at_s = clock() + PATIENCE_S
        return self._ended

    def _outcomes(self) -> list[Future[torch.Tensor]]:
        return [one.outcome for one in self._left.values()]

    def _collect(self) -> bool:
        """Take what readers have ended with; whether one has."""
        ended = [place for place, one in self._left.items() if one.outcome.done()]
        for place in ended:
            self._ended[place] = _outcome_of(self._left.pop(place).outcome.result)
        return bool(ended)

    def _ask_bucket(self, until_s: float) -> bool:
        """Ask for each load until a reader ends or the time is over; whether anything came."""
        came = False
        for place, handed in list(self._left.items()):
            left_s = until_s - self._loader.clock()
            outcomes = self._outcomes()
            if left_s <= 0 or any(outcome.done() for outcome in outcomes):
                break
            if place not in self._failures:
                self._loader.note_hang(handed.load)
            try:
                values = self._loader.ask_bucket(handed.load, left_s, outcomes)
            except RuntimeError as exc:
                self._failures[place] = exc  # the reader goes on: it may deliver yet
                continue
            self._loader.give_up(handed)
            del self._left[place]
            bring = partial(self._loader.load_values, handed.load, values)
            self._ended[place] = _outcome_of(bring)
            came, until_s = True, self._loader.clock() + STALLED_S
        return came

    def _give_up(self) -> None:
        for place, handed in self._left.items():
            self._loader.give_up(handed)
            self._ended[place] = self._failures.get(place) or RuntimeError(
                f"embedding cannot be read from {handed.load.path} (the disk does not answer)"
            )
        self._left.clear()


def _outcome_of(bring: Callable[[], torch.Tensor]) -> torch.Tensor | Exception:
    try:
        return bring()
    except PASS_THROUGH:
        raise
    except BaseException as exc:  # noqa: BLE001 - as in _attempt
        return _as_exception(exc)


def _as_exception(exc: BaseException) -> Exception:
    """What vLLM's own ``except Exception`` can catch: Rust's panics are none."""
    if isinstance(exc, Exception):
        return exc
    failure = RuntimeError(f"an embedding could not be loaded: {exc!r}")
    failure.__cause__ = exc
    return failure

# SPDX-License-Identifier: Apache-2.0
"""Threads: the event loop, pools of daemon threads, a disk that may hang, and forks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from s3ec.counters import Counters

log = logging.getLogger(__name__)

jitter = random.SystemRandom()
"""Draws pauses. vLLM seeds the ``random`` module alike in all processes of a fleet, and a fork
copies its state. This generator has no state."""

PASS_THROUGH = (KeyboardInterrupt, SystemExit)
"""Exceptions of signal handlers, Python's and vLLM's, raised anywhere in the main thread."""


def _ends_task(exc: BaseException) -> bool:
    """Return True if an exception at the top of a task ends it on purpose, and must be re-raised.

    A task can also get the cancellation of a future that it awaits. That is a fault like any other.
    """
    if isinstance(exc, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(exc, (GeneratorExit, *PASS_THROUGH))


class Backoff:
    """Computes the pause after each failure: it doubles each time, with jitter.

    Without jitter all processes of a fleet would retry at once.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        uniform: Callable[[float, float], float] = jitter.uniform,
    ) -> None:
        """Start without a failure.

        Args:
            first_s: Longest pause after the first failure; the shortest is half of it.
            longest_s: Longest pause of all.
            uniform: Draws a number between two.
        """
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s
        self._uniform = uniform

    def next_s(self) -> float:
        """Return the pause after one more failure, in seconds."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self._longest_s)
        return self._uniform(pause_s / 2, pause_s)

    def reset(self) -> None:
        """Note a success: the next failure counts as the first one."""
        self._pause_s = self._first_s


@contextmanager
def contained(counters: Counters, doing: str, *args: object) -> Iterator[None]:
    """Count and log a fault of ours, and continue; for the top of a task that is not awaited.

    An exception that ends the task on purpose is raised: its own cancellation, a signal, the
    interpreter's end.

    Counter: ``internal_errors``.

    Args:
        doing: The work, for the log, with ``args`` for its placeholders.
    """
    try:
        yield
    except BaseException as exc:
        if _ends_task(exc):
            raise
        counters.add("internal_errors")
        log.exception(doing, *args)


T = TypeVar("T")

# How long a thread leaves the GIL to others.
_YIELD_S = 0.001
# How long a caller waits for background work to end.
_STOP_TIMEOUT_S = 5.0
FAULT_REST_S = 1.0
"""How long background work rests after a fault of ours."""

_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(ThreadPoolExecutor):
    """A thread pool whose threads are daemons.

    The interpreter joins the base class's threads when it ends. Then one read from a disk that does
    not answer would keep a process from ending. It has that base because asyncio accepts no
    other kind of executor, and uses nothing of it.

    States: open, then ended by ``shutdown``. Calls that were queued before the end are still made,
    unless they are cancelled.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        """Start no thread before it is needed.

        Args:
            name: Prefix of the threads' names; a number follows.
        """
        super().__init__(max_workers, name)
        self._most = max_workers
        self._name = name
        self._guard = threading.RLock()  # a signal handler may end it, see Counters
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._out = 0  # calls that wait or run
        self._started: list[threading.Thread] = []
        self._ended = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call for the next free thread. Never waits.

        Raises:
            RuntimeError: After shutdown, or if no thread can be started; the call is not made.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._ended:
                raise RuntimeError(f"{self._name} has ended")
            self._calls.put((future, lambda: function(*args, **kwargs)))
            self._out += 1
            if len(self._started) < min(self._out, self._most):
                try:
                    self._start_one()
                except RuntimeError:
                    future.cancel()  # or a later thread would make the call
                    raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Each thread ends when no call is left."""
        with self._guard:
            self._ended = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in self._started:
                self._calls.put(None)
        if wait:
            for thread in self._started:
                thread.join()

    def _cancel_waiting(self) -> None:
        with suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call[0].cancel()

    def _start_one(self) -> None:
        name = f"{self._name}_{len(self._started)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads; the existing ones make the call
            if not self._started:
                raise
            return
        self._started.append(thread)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _do(*call)
            del call  # its arguments may be large, and the next call may be far off
            with self._guard:
                self._out -= 1


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as exc:  # noqa: BLE001 - the future passes it on
        future.set_exception(exc)
    else:
        future.set_result(result)


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Make a call in a daemon thread of its own. The end of the process does not wait for it."""
    future: Future[T] = Future()
    threading.Thread(target=_do, args=(future, function), name=name, daemon=True).start()
    return future


def call_within(timeout_s: float, function: Callable[[], T]) -> T:
    """Make a call in a thread of its own, and wait at most ``timeout_s`` for it.

    Raises:
        TimeoutError: It has not returned, and continues in its thread. Do not use this function
            for a call that may raise one itself, such as a disk call.
        Exception: What the call raised.
    """
    return in_thread(function, "s3ec-bounded").result(timeout_s)


def yield_gil() -> None:
    """Leave the GIL to other threads for a moment; long background work calls this."""
    time.sleep(_YIELD_S)


class StoppedError(Exception):
    """Raised inside background work by its pause: the owner is ending the thread."""


class Background:
    """Work in a daemon thread of its own, which sleeps until it is woken. Thread-safe.

    =======  =======  =======================================================================
    state    goes to  when
    =======  =======  =======================================================================
    new      due      the first ``wake``, which starts the thread
    idle     due      ``wake``
    due      at work  the thread has rested from its last work
    at work  idle     the work is done, or raised an exception, which is logged
    at work  due      likewise, and ``wake`` was called meanwhile
    (any)    ended    ``stop``; work ends at its next pause
    =======  =======  =======================================================================
    """

    def __init__(self, name: str, work: Callable[[Callable[[], None]], float]) -> None:
        """Start no thread yet.

        Args:
            work: Called once after one or more wakes, with a function to call often: it
                leaves the GIL to others, and raises StoppedError. Returns the seconds to rest.
        """
        self._name = name
        self._work = work
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopping = threading.Event()

    def wake(self) -> None:
        """Request the work; no system call if it is due already. Never raises."""
        if self._wanted.is_set() and self._thread is not None:
            return
        with self._lock:
            if self._closed:
                return
            self._wanted.set()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:  # the interpreter ends, or there are too many
                    log.debug("%s: %s", self._name, exc)
                    return
                self._thread = thread

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
        """End the thread, and wait for it at most ``timeout_s``; for good.

        Returns:
            True if it has ended. A thread that waits for a hung disk ends with the process.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._stopping.set()
        self._wanted.set()
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("%s did not end; left to the process's end", self._name)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopping.is_set():
                return
            self._wanted.clear()
            try:
                rest_s = self._work(self._pause)
            except StoppedError:
                return
            except BaseException:  # the top of a thread
                log.exception("%s", self._name)
                rest_s = FAULT_REST_S
            if self._stopping.wait(rest_s):
                return

    def _pause(self) -> None:
        if self._stopping.is_set():
            raise StoppedError
        yield_gil()


# A disk that takes longer for one entry, eviction included, is too slow for a request.
PATIENCE_S = 5.0


class DiskWatch:
    """Detects from the running calls whether the disk hangs. Memory only, any thread.

    States: the disk answers, or it hangs. It hangs while the oldest running call is older than the
    patience. The first read of ``hangs`` after a change counts and logs it, once.

    Counter: ``tier.hung``, how often the disk began to hang.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without calls.

        Args:
            patience_s: Age from which on a call hangs; None for PATIENCE_S.
            clock: Monotonic seconds.
        """
        self._counters = counters
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._clock = clock
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}  # in the order of their start
        self._hung = False
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Note that a call begins, and return its number for ``end``."""
        number = next(self._numbers)
        self._begun[number] = self._clock()
        return number

    def end(self, number: int) -> None:
        """Note that a call has returned, or was never made. Idempotent."""
        self._begun.pop(number, None)

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a call in this thread."""
        number = self.begin()
        try:
            return function(*args)
        finally:
            self.end(number)

    @property
    def hangs(self) -> bool:
        """True if a call has been running for longer than the patience.

        Made for scheduler hooks: no system call and no wait.
        """
        try:
            oldest_s = next(iter(self._begun.values()))
        except StopIteration:
            hung = False
        except RuntimeError:  # calls begin or end during this read
            return self._hung
        else:
            hung = self._clock() - oldest_s > self._patience_s
        if hung != self._hung:
            self._turn(hung)
        return hung

    def _turn(self, hung: bool) -> None:
        with self._lock:
            if hung == self._hung:
                return
            self._hung = hung
        if hung:
            self._counters.add("tier.hung")
            log.warning(
                "the disk of `cache_dir` has not answered for %.0f s; it is not used until it "
                "does: images are encoded, saves wait in memory or go to the bucket from there",
                self._patience_s,
            )
        else:
            log.info("the disk of `cache_dir` answers again")


# For calls of `asyncio.to_thread`: DNS lookups, and disk calls that may take long, such as walks
# and whole files of the index. A node makes few of those at a time.
_OTHER_THREADS = 8


class LoopThread:
    """Runs coroutines in one thread, and blocking file calls in thread pools.

    The loop never waits for a disk. The end of the process does not either, since all threads are
    daemons. The loop is uvloop's if that is installed (extra ``fast``), which uses less CPU for the
    same work.

    States: new, running from the first use on, stopped for good by ``stop``. A later submit raises
    RuntimeError.

    Attributes:
        watch: Detects whether the disk hangs.
    """

    def __init__(
        self, name: str, *, disk_threads: int | None = None, watch: DiskWatch | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            name: Name of the thread.
            disk_threads: Threads for short file calls. None for half the processors, 1 to 4: each
                of them competes with the scheduler for the GIL.
            watch: Watches the file calls. None makes one.
        """
        self.watch = watch or DiskWatch(Counters())
        self._name = name
        if disk_threads is None:
            disk_threads = min(max(len(os.sched_getaffinity(0)) // 2, 1), 4)
        self._disk_threads = disk_threads
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may stop it, see Counters
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._disk_pool: DaemonPool | None = None
        self._submitted: set[Future[Any]] = set()  # the loop's own references to tasks are weak

    @property
    def closed(self) -> bool:
        """True if stop() was called."""
        return self._closed

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and not self._closed:
            return self._loop
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is stopped")
            if self._loop is None:
                try:
                    loop = _new_loop()
                except OSError as exc:  # no descriptor is left
                    raise RuntimeError(f"{self._name} cannot start: {exc}") from exc
                keep_loop(loop)
                # Daemons here too: a DNS lookup may hang as a disk does.
                loop.set_default_executor(DaemonPool(_OTHER_THREADS, f"{self._name}-other"))
                self._disk_pool = DaemonPool(self._disk_threads, f"{self._name}-disk")
                self._thread = threading.Thread(
                    target=_run_loop, args=(loop,), name=self._name, daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine; never waits. Callable from any thread.

        Raises:
            RuntimeError: Stopped, or it cannot start now.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        except RuntimeError:
            coroutine.close()  # it will not be awaited
            raise
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a plain function in the loop's thread soon; never waits.

        Raises:
            RuntimeError: Stopped, or it cannot start now.
        """
        self._running_loop().call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and wait. Not for scheduler hooks.

        Raises:
            TimeoutError: It took longer; the coroutine was cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def disk(
        self,
        function: Callable[..., T],
        *args: object,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Await a short blocking call in the disk pool; only from coroutines of this loop.

        The call is watched: if it takes longer than the patience of ``watch``, the disk hangs. A
        call that may take long, such as a walk, goes to ``asyncio.to_thread``.

        Args:
            undo: Called with the result, in the pool, if this await was cancelled, so that the
                result is not lost.
        """
        call = self._submit_to_disk(function, args)
        if call is None:
            raise RuntimeError(f"{self._name} is not running")
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if undo is not None:
                call.add_done_callback(partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[T], object], call: Future[T]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.disk_soon(undo, call.result())

    def disk_soon(self, function: Callable[..., object], *args: object) -> None:
        """Queue a short blocking call for the disk pool, without waiting; errors are logged.

        Does nothing if the loop has never run. A call that has not begun when the pool ends is
        not made.
        """
        with suppress(RuntimeError):  # it has ended
            call = self._submit_to_disk(function, args)
            if call is not None:
                call.add_done_callback(_log_error)

    def _submit_to_disk(
        self, function: Callable[..., T], args: tuple[object, ...]
    ) -> Future[T] | None:
        """Queue a watched call; None if the loop has never run."""
        if self._disk_pool is None:
            return None
        number = self.watch.begin()  # its wait for a thread counts: calls before it may hang
        try:
            call = self._disk_pool.submit(function, *args)
        except BaseException:
            self.watch.end(number)
            raise
        call.add_done_callback(lambda _: self.watch.end(number))
        return call

    def stop(self, timeout_s: float) -> None:
        """Cancel all tasks, end the thread, wait for it up to ``timeout_s``. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            loop, thread = self._loop, self._thread
            pool = self._disk_pool
        if already or loop is None or thread is None:
            return
        loop.call_soon_threadsafe(_cancel_all, loop)
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning(
                "%s did not end within %.1f s; left to the process's end", thread.name, timeout_s
            )
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _log_error(call: Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()) is not None:
        log.error("in the background", exc_info=error)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Create a loop of uvloop if that is installed, else asyncio's own.

    Raises:
        OSError: No descriptor is left.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def finish() -> None:
        # A cancelled task may start another one before it ends.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()
        loop.stop()

    # The loop holds only weak references to tasks; this one ends the loop itself.
    loop.__dict__["s3ec_finish"] = loop.create_task(finish(), name="s3ec-finish")


# -- forks -------------------------------------------------------------------------------------
#
# Objects made before a fork belong to the parent. Its threads are not in the child, and their locks
# stay locked there. So a child uses none of the objects, see Node.is_foreign. But the kernel gives
# the child copies of all descriptors, and these keep a dead parent's locks and connections.

process_number = 0
"""Grows by one in each forked child. Hooks compare it, since os.getpid() is a system call."""

_DESCRIPTORS = "/proc/self/fd"
_paths: set[str] = set()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def keep_files(path: str) -> None:
    """Make forked children close every open file below this path, lock files above all.

    Args:
        path: Absolute, without symbolic links.
    """
    _paths.add(path)


def keep_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Make forked children close the sockets of a loop, its pipe and its selector.

    Otherwise the child's garbage collection would remove a socket from the selector that the parent
    waits with, and connections would stay open for as long as the child lives.
    """
    _loops.add(loop)


def _in_child() -> None:
    global process_number  # noqa: PLW0603 - the one place that changes it
    process_number += 1
    # Replaced, not closed: their objects will close them again.
    with suppress(OSError), open(os.devnull, "rb") as nothing:
        for fd in itertools.chain(_of_loops(), _of_files()):
            with suppress(OSError):
                os.dup2(nothing.fileno(), fd, inheritable=False)


def _of_loops() -> Iterator[int]:
    """Yield each loop's selector and its descriptors, as the kernel lists them: uvloop does not."""
    for loop in list(_loops):
        # Other kinds of loops have neither, and keep their descriptors; a loop may be half closed.
        with suppress(AttributeError, OSError, ValueError):
            of_uvloop = getattr(loop, "_get_backend_id", None)
            epoll_fd = of_uvloop() if of_uvloop else loop._selector.fileno()  # type: ignore[attr-defined]
            with open(f"{_DESCRIPTORS}info/{epoll_fd}", encoding="ascii") as file:
                yield from [int(line.split()[1]) for line in file if line.startswith("tfd:")]
            yield epoll_fd
            yield loop._csock.fileno()  # type: ignore[attr-defined]  # other end of asyncio's pipe


def _of_files() -> Iterator[int]:
    paths = tuple(_paths)
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith(paths):
                yield int(name)


os.register_at_fork(after_in_child=_in_child)

# SPDX-License-Identifier: Apache-2.0
"""One asyncio loop in one named daemon thread, for code that lives in vLLM's processes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from s3ec.counters import Counters
from s3ec.daemon_pool import DaemonPool
from s3ec.disk_watch import DiskWatch
from s3ec.forks import call_in_forks

T = TypeVar("T")
log = logging.getLogger(__name__)

# For calls that may take long: walks, whole files of the index.
_LONG_THREADS = 2
# For what asyncio does in threads by itself, and what the stores do there.
_OTHER_THREADS = 8


class LoopThread:
    """Runs coroutines off the calling thread.

    The thread starts with the first use and is rebuilt in a child after a fork, since threads
    do not survive one. ``disk`` runs blocking file calls, so that the loop never waits for a disk;
    the process does not either, since the pools' threads are daemons.

    Attributes:
        watch: Knows whether the disk answers.
    """

    def __init__(
        self, name: str, *, disk_threads: int | None = None, watch: DiskWatch | None = None
    ) -> None:
        """Nothing runs yet.

        Args:
            name: The thread's.
            disk_threads: None: half the processors, 1 to 4. Each of them takes turns at the
                interpreter's lock with the scheduler.
            watch: None for one of its own.
        """
        self.watch = watch or DiskWatch(Counters())
        self._name = name
        if disk_threads is None:
            disk_threads = min(max(len(os.sched_getaffinity(0)) // 2, 1), 4)
        self._disk_threads = disk_threads
        self._closed = False
        self._left_behind: list[object] = []
        self._reset()
        call_in_forks(self, LoopThread._after_fork)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may stop it, see Counters
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pool: DaemonPool | None = None
        self._long_pool: DaemonPool | None = None

    def _after_fork(self) -> None:
        """In a forked child: the thread is not here, and the lock may be held by one that is not.

        The parent's loop is kept, never closed: the kernel object behind its selector is shared.
        """
        if self._loop is not None:
            _let_go(self._loop)
        self.watch.after_fork()
        self._left_behind += [self._loop, self._pool, self._long_pool]
        self._reset()

    @property
    def closed(self) -> bool:
        """Whether stop() was called."""
        return self._closed

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and not self._closed:
            return self._loop
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is stopped")
            if self._loop is None:
                try:
                    loop = asyncio.new_event_loop()
                except OSError as exc:  # no descriptor is left
                    raise RuntimeError(f"{self._name} cannot start: {exc}") from exc
                # A name that is looked up, or a corpus in a folder, may hang as a disk does.
                loop.set_default_executor(DaemonPool(_OTHER_THREADS, f"{self._name}-other"))
                self._pool = DaemonPool(self._disk_threads, f"{self._name}-disk")
                self._long_pool = DaemonPool(_LONG_THREADS, f"{self._name}-long")
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
            return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        except RuntimeError:
            coroutine.close()  # nobody will await it
            raise

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

        Watched: one that takes longer than ``watch`` has patience means that the disk hangs.

        Args:
            undo: Gets the result, in the pool, where we were cancelled meanwhile and nobody else
                will have it.
        """
        call = self._watched(function, *args)
        try:
            # Not shielded: that costs a turn of the loop for each call.
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if undo is not None and not call.cancel():
                call.add_done_callback(lambda done: self._undo(undo, done))
            raise

    async def disk_long(self, function: Callable[..., T], *args: object) -> T:
        """Await a blocking call that may take long, such as a walk; it holds no short one up."""
        pool = self._long_pool
        if pool is None:
            raise RuntimeError(f"{self._name} is not running")
        return await asyncio.wrap_future(pool.submit(function, *args))

    def disk_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have a short blocking call made in the disk pool; nobody waits for it.

        Only where the loop has run. What the pool has not begun when it ends is not done.
        """
        if self._pool is not None:
            with suppress(RuntimeError):  # it has ended
                self._watched(_logged, function, *args)

    def _watched(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Hand a call to the pool; its wait for a thread counts too, which may hang."""
        pool = self._pool
        if pool is None:
            raise RuntimeError(f"{self._name} is not running")
        number = self.watch.begin()
        try:
            call = pool.submit(function, *args)
        except BaseException:
            self.watch.end(number)
            raise
        call.add_done_callback(lambda _: self.watch.end(number))
        return call

    def _undo(self, undo: Callable[[T], object], done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.disk_soon(undo, done.result())

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, end the thread, wait for it up to ``timeout_s``. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            loop, thread = self._loop, self._thread
            pools = [pool for pool in (self._pool, self._long_pool) if pool is not None]
        if already or loop is None or thread is None:
            return
        loop.call_soon_threadsafe(_cancel_all, loop)
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning(
                "%s did not end within %.1f s; left to the process's end", thread.name, timeout_s
            )
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _logged(function: Callable[..., object], *args: object) -> None:
    try:
        function(*args)
    except BaseException:
        # The top of a call that nobody waits for.
        log.exception("in the background")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def finish() -> None:
        # What is cancelled may start something else first.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()
        loop.stop()

    # The loop holds only weak references to tasks; this one ends the loop itself.
    loop.__dict__["s3ec_finish"] = loop.create_task(finish(), name="s3ec-finish")


def _let_go(loop: asyncio.AbstractEventLoop) -> None:
    """Have a parent's loop stand for nothing here: its sockets, its pipe and what it waits with.

    Otherwise a socket that is collected here would be taken out of what the parent waits for, and
    connections would stay open for as long as this child. Descriptors are replaced, not closed:
    their objects will close them once more.
    """
    selector = getattr(loop, "_selector", None)  # other loops have none, and keep theirs
    if selector is None:
        return
    with suppress(OSError), open(os.devnull, "rb") as nothing:
        watched = list((selector.get_map() or {}).values())
        fds = [key.fd for key in watched] + [selector.fileno()]
        ringer = getattr(loop, "_csock", None)  # the other end of its pipe
        if ringer is not None:
            fds.append(ringer.fileno())
        for fd in fds:
            os.dup2(nothing.fileno(), fd, inheritable=False)

# SPDX-License-Identifier: Apache-2.0
"""One asyncio loop in one named daemon thread, for code that lives in vLLM's processes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class LoopThread:
    """Runs coroutines off the calling thread.

    The thread starts with the first use and is rebuilt in a child after a fork, since threads
    do not survive one. ``disk`` runs blocking file calls, so that the loop never waits for a disk.
    """

    def __init__(self, name: str, *, disk_threads: int | None = None) -> None:
        """Nothing runs yet.

        Args:
            name: The thread's.
            disk_threads: None: half the processors, 1 to 4. Each of them takes turns at the
                interpreter's lock with the scheduler.
        """
        self._name = name
        if disk_threads is None:
            disk_threads = min(max(len(os.sched_getaffinity(0)) // 2, 1), 4)
        self._disk_threads = disk_threads
        self._closed = False
        self._left_behind: list[object] = []
        self._reset()
        _LOOPS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None

    def _after_fork(self) -> None:
        """In a forked child: the thread is not here, and the lock may be held by one that is not.

        The parent's loop is kept, never closed: the kernel object behind its selector is shared.
        """
        self._left_behind += [self._loop, self._pool]
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
                loop = asyncio.new_event_loop()
                self._pool = ThreadPoolExecutor(self._disk_threads, f"{self._name}-disk")
                self._thread = threading.Thread(
                    target=_run_loop, args=(loop,), name=self._name, daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine; never waits. Callable from any thread.

        Raises:
            RuntimeError: Stopped.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        except RuntimeError:
            coroutine.close()  # nobody will await it
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a plain function in the loop's thread soon; never waits.

        Raises:
            RuntimeError: Stopped.
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
        """Await a blocking call in the disk pool; only from coroutines of this loop.

        Args:
            undo: Gets the result, in the pool, where we were cancelled meanwhile and nobody else
                will have it.
        """
        pool = self._pool
        if pool is None:
            raise RuntimeError(f"{self._name} is not running")
        call = pool.submit(function, *args)
        try:
            # Not shielded: that costs a turn of the loop for each call.
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if undo is not None and not call.cancel():
                call.add_done_callback(lambda done: self._undo(undo, done))
            raise

    def disk_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have a blocking call made in the disk pool; nobody waits for it.

        Only where the loop has run. What the pool has not begun when it ends is not done.
        """
        if self._pool is not None:
            with suppress(RuntimeError):  # it has ended
                self._pool.submit(_logged, function, *args)

    def _undo(self, undo: Callable[[T], object], done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.disk_soon(undo, done.result())

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, end the thread, wait for it up to ``timeout_s``. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            loop, thread, pool = self._loop, self._thread, self._pool
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


_LOOPS: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for loop in list(_LOOPS):
        loop._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

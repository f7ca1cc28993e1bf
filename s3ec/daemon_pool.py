# SPDX-License-Identifier: Apache-2.0
"""A thread pool whose threads hold nobody up: not the process's end, whatever they hang in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(ThreadPoolExecutor):
    """Like its base, of which it uses nothing: asyncio takes no other kind as its executor.

    The base's threads are joined when the interpreter ends, so one read from a disk that does
    not answer would keep a process from ending. These are daemons.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        """No thread is started before it is needed.

        Args:
            name: The threads', with a number behind it.
        """
        super().__init__(max_workers, name)
        self._most = max_workers
        self._name = name
        self._guard = threading.RLock()  # a signal handler may end it, see Counters
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait, or are about to
        self._started: list[threading.Thread] = []
        self._ended = False

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that were started."""
        return list(self._started)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have a call made; never waits.

        Raises:
            RuntimeError: After shutdown.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._ended:
                raise RuntimeError(f"{self._name} has ended")
            self._calls.put((future, lambda: function(*args, **kwargs)))
            if not self._free.acquire(blocking=False) and len(self._started) < self._most:
                self._start_one()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; threads end when they have nothing left to do."""
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
        thread = threading.Thread(target=_work, args=(self._calls, self._free), name=name)
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError:  # there are too many; those that there are will do it
            if not self._started:
                raise
            return
        self._started.append(thread)


def _work(calls: SimpleQueue[_Call | None], free: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        _do(*call)
        del call  # its arguments may be large, and it may be long until the next
        free.release()


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as exc:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(exc)
    else:
        future.set_result(result)


def call_within(timeout_s: float, function: Callable[[], object]) -> bool:
    """Make a call in a thread of its own, and wait for it so long; whether it has come back.

    Raises:
        Exception: What the call raised.
    """
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as exc:  # noqa: BLE001 - raised again where somebody waits
            raised.append(exc)

    thread = threading.Thread(target=call, name="s3ec-bounded", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    return not thread.is_alive()

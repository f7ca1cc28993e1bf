# SPDX-License-Identifier: Apache-2.0
"""Calls that may wait for a disk, made for a loop's coroutines with as few hand-overs as can be.

Handing a call to a thread and its outcome back costs two turns at the interpreter's lock and two
wake-ups. That is more than many of these calls take. So a thread that is at work makes what it
finds until nothing is left. Outcomes go back together: the loop is woken once for all that ended
since it last looked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

# So long calls are made in one scope, see DiskCalls.scope.
_SCOPE_S = 0.005


class Watch(Protocol):
    """Is told of calls, to tell when one hangs; see ``runtime.DiskWatch``."""

    def begin(self) -> int:
        """A call begins; its number."""

    def end(self, number: int) -> None:
        """It has come back, or was never made."""

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a call in this thread."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call. Whoever takes its ``turn`` decides: a thread to make it, its caller not to."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    number: int
    future: asyncio.Future[Any] | None = None
    undo: Callable[[Any], object] | None = None
    turn: list[None] = field(default_factory=lambda: [None])
    result: Any = None
    error: BaseException | None = None

    def take_turn(self) -> bool:
        try:
            self.turn.pop()  # atomic
        except IndexError:
            return False
        return True


class DiskCalls:
    """Calls into one pool, from one loop. All are watched, and so is their wait for a thread.

    States of a call: waiting, begun, done. A caller that is cancelled takes a waiting one back, and
    what comes of one that has begun is undone.

    Attributes:
        scope: Makes what the calls of a thread share for a few milliseconds, and what is to be
            done for all of them together at the end.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor, threads: int, watch: Watch
    ) -> None:
        """Nothing is started.

        Args:
            loop: Whose coroutines call.
            pool: Makes the calls; nobody else uses it.
            threads: Of the pool.
            watch: Is told of each call's beginning and end.
        """
        self.scope: Callable[[], AbstractContextManager[object]] = nullcontext
        self._loop = loop
        self._pool = pool
        self._threads = threads
        self._watch = watch
        self._lock = threading.RLock()  # a signal handler may stop it, see Counters
        self._waiting: deque[_Call] = deque()
        self._at_work = 0
        self._ended = False
        self._done: deque[_Call] = deque()
        self._is_told = False

    # -- the loop's thread -------------------------------------------------------------------

    async def make(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...],
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Make a call and wait for it.

        Args:
            undo: Is called with the result where nobody gets it.

        Raises:
            RuntimeError: After ``shutdown``.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        call = _Call(function, args, self._watch.begin(), future, undo)
        self._put(call)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(call, future)
            raise

    def _give_up(self, call: _Call, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            if call.take_turn():
                self._watch.end(call.number)
            # Else a thread is at it, and _deliver undoes what comes of it.
        elif future.exception() is None:  # it came in the same moment
            self._undo(call, future.result())

    def _deliver(self) -> None:
        self._is_told = False
        while True:
            try:
                call = self._done.popleft()
            except IndexError:
                return
            future = call.future
            if future is None:
                continue
            if future.done():  # cancelled
                if call.error is None:
                    self._undo(call, call.result)
            elif call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.result)
            call.result = call.error = None

    def _undo(self, call: _Call, result: Any) -> None:
        if call.undo is not None:
            with suppress(RuntimeError):  # it has ended
                self.soon(call.undo, result)

    # -- any thread --------------------------------------------------------------------------

    def soon(self, function: Callable[..., object], *args: object) -> None:
        """Make a call that nobody waits for; what it raises is logged.

        Raises:
            RuntimeError: After ``shutdown``.
        """
        self._put(_Call(function, args, self._watch.begin()))

    def shutdown(self) -> None:
        """Make no calls any more, but for those that have begun."""
        with self._lock:
            self._ended = True
            while (call := self._first()) is not None:
                self._watch.end(call.number)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, call: _Call) -> None:
        try:
            with self._lock:
                if self._ended:
                    raise RuntimeError("the disk's threads have ended")
                self._waiting.append(call)
                if self._at_work < self._threads:
                    self._at_work += 1
                    try:
                        self._pool.submit(self._work)
                    except BaseException:
                        self._at_work -= 1
                        with suppress(ValueError):
                            self._waiting.remove(call)
                        raise
        except BaseException:
            self._watch.end(call.number)
            raise

    # -- the pool's threads ------------------------------------------------------------------

    def _work(self) -> None:
        while (call := self._next()) is not None:
            scope = self.scope()
            scope.__enter__()
            try:
                until_s = time.monotonic() + _SCOPE_S
                while call is not None:
                    self._make(call)
                    call = self._first() if time.monotonic() < until_s else None
            finally:
                self._end(scope)

    def _next(self) -> _Call | None:
        """The next call; None at the end of this thread's work."""
        with self._lock:
            call = self._first()
            if call is None:
                self._at_work -= 1
            return call

    def _first(self) -> _Call | None:
        # Without the lock, so whoever looks first whether one waits may find none a moment later.
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _make(self, call: _Call) -> None:
        if not call.take_turn():
            return
        try:
            call.result = call.function(*call.args)
        except BaseException as exc:  # noqa: BLE001 - whoever waits for it gets it
            call.error = exc
        # Its arguments may be large, and it may be long until the next.
        call.function, call.args = _nothing, ()
        self._watch.end(call.number)
        if call.future is None:
            if call.error is not None:
                log.error("in the background", exc_info=call.error)
            return
        self._done.append(call)
        if not self._is_told:
            self._is_told = True
            with suppress(RuntimeError):  # the loop has ended, and with it all that waited
                self._loop.call_soon_threadsafe(self._deliver)

    def _end(self, scope: AbstractContextManager[object]) -> None:
        try:
            self._watch.run(scope.__exit__, None, None, None)
        except Exception:
            # The top of a thread.
            log.exception("in the background")


def _nothing() -> None:
    """In place of a call that was made."""

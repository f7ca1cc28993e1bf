# SPDX-License-Identifier: Apache-2.0
"""A daemon thread that works when it is woken; none before the first time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from s3ec.tier.census import breathe

_log = logging.getLogger(__name__)

# Work ends at its next pause; a disk that does not answer is not waited for.
_STOP_TIMEOUT_S = 5.0
# After work that failed by a fault of ours.
_REST_S = 1.0


class StoppedError(Exception):
    """Raised inside the work by its pause: the owner wants the thread to end."""


class Background:
    """Thread-safe. A forked child has no thread until its own first wake."""

    def __init__(self, name: str, work: Callable[[Callable[[], None]], float]) -> None:
        """Nothing is started.

        Args:
            work: Called once after one or more wakes, with a function to call often: it
                leaves the interpreter to others, and raises StoppedError. Answers the seconds
                to rest.
        """
        self._name = name
        self._work = work
        self._closed = False
        self._thread: threading.Thread | None = None
        self.after_fork()

    def wake(self) -> None:
        """Have the work done soon; no system call where it is due already. Never raises."""
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
                    _log.debug("%s: %s", self._name, exc)
                    return
                self._thread = thread

    def stop(self) -> None:
        """End the thread, and wait for it; for good."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._stopping.set()
        self._wanted.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT_S)
            if thread.is_alive():
                _log.warning("%s did not end; left to the process's end", self._name)

    def after_fork(self) -> None:
        """In the child: the thread is the parent's, and may have held the lock."""
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._thread = None

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
            except BaseException:  # noqa: BLE001 (the top of a thread)
                _log.exception("%s", self._name)
                rest_s = _REST_S
            if self._stopping.wait(rest_s):
                return

    def _pause(self) -> None:
        if self._stopping.is_set():
            raise StoppedError
        breathe()

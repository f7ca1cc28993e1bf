# SPDX-License-Identifier: Apache-2.0
"""The threads of obstore in this process: not there after a fork, to be at rest before the end.

They start with the first request and never end. A child that was forked later waits for them for
ever. And while they hand over a result they hold the interpreter's lock: CPython before 3.14 ends
a thread that asks for it during its own shutdown, which Rust answers with abort(). Seen with
obstore 0.12: one in six processes that made a request and then ended.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

_THREAD_NAME = "tokio-rt-worker"
_PAUSE_S = 0.005
# A thread that waits for the lock gets it within one pause, but may have to wait for a core.
_QUIET_ROUNDS = 3
_PATIENCE_S = 2.0

_pid: int | None = None
_is_ending = False
_users: weakref.WeakSet[User] = weakref.WeakSet()


class User(Protocol):
    """Something with requests of obstore under way."""

    @property
    def is_busy(self) -> bool:
        """Whether there are any."""
        ...

    def abandon(self) -> None:
        """End them soon; called from another thread."""
        ...


def obstacle() -> str:
    """Why obstore cannot be used in this process now, empty if it can."""
    if _is_ending:
        return "this process is ending"
    if _pid not in (None, os.getpid()):
        return "this process was forked after obstore had started its threads; spawn it"
    return ""


def start(user: User) -> None:
    """To be called before obstore's first request for a user."""
    global _pid  # noqa: PLW0603 -- obstore's runtime is one per process as well
    if _pid is None:
        _pid = os.getpid()
        atexit.register(_come_to_rest)
    _users.add(user)


def _come_to_rest() -> None:
    """Wait until no thread of obstore is inside the interpreter, nor will be."""
    global _is_ending  # noqa: PLW0603
    if _pid != os.getpid():
        return
    _is_ending = True
    users = list(_users)
    for user in users:
        user.abandon()
    quiet, until = 0, time.monotonic() + _PATIENCE_S
    while quiet < _QUIET_ROUNDS and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # without the lock
        at_rest = not any(user.is_busy for user in users) and not _is_any_running()
        quiet = quiet + 1 if at_rest else 0


def _is_any_running() -> bool:
    """Whether a thread of obstore has work; one that waits for the lock has, once it is free."""
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, fields = path.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name == _THREAD_NAME and fields.split()[0] == "R":
            return True
    return False

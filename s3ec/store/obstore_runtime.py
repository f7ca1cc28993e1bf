# SPDX-License-Identifier: Apache-2.0
"""The threads of obstore in this process: they do not survive a fork, and must rest before the end.

They start with the first request and never end. A child that was forked later waits for them for
ever. And they take the interpreter's lock to deliver a result: CPython before 3.14 ends a thread
that requests it during shutdown, which makes Rust call abort(). Seen with obstore 0.12: one in six
processes that made a request and then ended.

A thread of obstore requests the lock only for a Python object that it holds: the future it will
resolve, a buffer it sends. So each of these is noted, and the process ends once obstore has
released all of them.

The threads are not started if descriptors are short: obstore 0.12 panics then, and at every later
request of the process as well.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Any, TypeVar

import obstore
from obstore.store import MemoryStore

from s3ec.errors import UnavailableError
from s3ec.store.concurrency import RequestSlots

T = TypeVar("T")
_PAUSE_S = 0.005
_PATIENCE_S = 2.0
# obstore's threads take fewer than ten; the rest is for other code that opens some meanwhile.
_DESCRIPTORS = 32

_pid: int | None = None
_is_running = False
_is_ending = False


class _Ref(weakref.ref[Any]):
    """A weak reference that is hashed by identity; a buffer is hashed by content, if at all.

    Both methods are C functions: Python code could be interrupted in the middle of a release.
    """

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


holding: set[_Ref] = set()
_users: weakref.WeakSet[RequestSlots] = weakref.WeakSet()


def obstacle() -> str:
    """Return why obstore cannot be used in this process now; empty if it can."""
    if _is_ending:
        return "this process is ending"
    if _pid not in (None, os.getpid()):
        return "this process was forked after obstore had started its threads; spawn it"
    if not _is_running and not _has_descriptors():
        return "too few file descriptors are left to start its threads"
    return ""


async def start(user: RequestSlots) -> None:
    """Start obstore's threads. Call this before obstore's first request for a store.

    It waits for the result of the call that starts the threads: a result after the loop's end would
    print a traceback.

    Args:
        user: The slots of that store.

    Raises:
        UnavailableError: There is an obstacle.
    """
    global _pid, _is_running  # noqa: PLW0603 -- obstore's runtime is one per process as well
    if problem := obstacle():
        raise UnavailableError(problem)
    if not _is_running:
        _pid = os.getpid()
        atexit.register(_come_to_rest)
        _is_running = True
        await held(obstore.put_async(MemoryStore(), "threads", b""))  # starts them
    _users.add(user)


def _has_descriptors() -> bool:
    opened: list[int] = []
    try:
        while len(opened) < _DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)
    return True


def held(thing: T) -> T:
    """Note an object that obstore holds from now on: each of its futures, each buffer it sends."""
    holding.add(_Ref(thing, holding.discard))
    return thing


def _come_to_rest() -> None:
    """Wait until obstore holds no Python object, and thus does not need the lock."""
    global _is_ending  # noqa: PLW0603
    if _pid != os.getpid():
        return
    _is_ending = True
    for user in list(_users):
        user.abandon()
    until = time.monotonic() + _PATIENCE_S
    while holding and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # without the lock
        # Objects that obstore released without the lock are really released at the next call.
        obstore.Bytes()
    time.sleep(_PAUSE_S)  # for the last thread to return the lock

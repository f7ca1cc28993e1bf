# SPDX-License-Identifier: Apache-2.0
"""What objects do about themselves in a forked child, where locks may be held by nobody."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_WATCHED: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_forks(thing: T, after_fork: Callable[[T], None]) -> None:
    """Have ``after_fork(thing)`` called in each forked child, as long as the thing lives.

    Threads do not survive a fork, and what one of them had locked stays locked.

    Args:
        after_fork: Must not hold on to the thing itself; a function of its class does not.
    """
    _WATCHED[thing] = after_fork


def _after_fork_in_child() -> None:
    for thing, after_fork in list(_WATCHED.items()):
        after_fork(thing)


os.register_at_fork(after_in_child=_after_fork_in_child)

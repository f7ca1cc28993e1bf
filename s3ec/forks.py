# SPDX-License-Identifier: Apache-2.0
"""What a fork changes: which process this is, and what a child lets go of at once.

What was made before a fork is the parent's. Its threads are not in the child, and what they had
locked stays locked there; so a child uses nothing of it, see ``Node.is_foreign``. But the kernel
gives it copies of all descriptors: a lock outlives a dead parent in them, and so do connections.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

number = 0
"""Of this process in its line of forks: for hooks, in which os.getpid() is a system call too much.
"""

_DESCRIPTORS = "/proc/self/fd"
_paths: set[str] = set()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def keep_files(path: str) -> None:
    """Have children let go of every open file whose name begins so, locks above all.

    Args:
        path: Absolute, without symbolic links.
    """
    _paths.add(path)


def keep_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Have children let go of a loop's sockets, of its pipe and of what it waits with.

    Otherwise a socket that is collected there would be taken out of what the parent waits for, and
    connections would stay open for as long as the child.
    """
    _loops.add(loop)


def _in_child() -> None:
    global number  # noqa: PLW0603 - the one place that changes it
    number += 1
    # Replaced, not closed: their objects will close them once more.
    with suppress(OSError), open(os.devnull, "rb") as nothing:
        for fd in itertools.chain(_of_loops(), _of_files()):
            with suppress(OSError):
                os.dup2(nothing.fileno(), fd, inheritable=False)


def _of_loops() -> Iterator[int]:
    for loop in list(_loops):
        # Loops of other kinds have none of these, and keep theirs; one may be half closed.
        with suppress(AttributeError, ValueError):
            selector: Any = loop._selector  # type: ignore[attr-defined]
            yield from [key.fd for key in selector.get_map().values()]
            yield selector.fileno()
            # The other end of its pipe.
            yield loop._csock.fileno()  # type: ignore[attr-defined]


def _of_files() -> Iterator[int]:
    paths = tuple(_paths)
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # the listing's own is closed again
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith(paths):
                yield int(name)


os.register_at_fork(after_in_child=_in_child)

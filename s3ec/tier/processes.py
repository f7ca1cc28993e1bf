# SPDX-License-Identifier: Apache-2.0
"""Whether the process that left something in the folder still lives.

Two witnesses, and only where both say "dead" may anything be swept. ``/proc`` tells a reused
process id from the old one, but sees only its own container. A lock on a file is dropped by
the kernel when its owner ends, and is seen by every container that shares the folder; in
containers nearly everybody has a process id below 100, so the first witness alone would
sweep what a neighbour is using.
"""

from __future__ import annotations

import fcntl
import os


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (`/proc/PID/stat`, field 22).

    Returns:
        None where no such process runs here, a zombie included.

    Raises:
        OSError: It exists but cannot be looked at.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold anything.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def own_start_time() -> str:
    """start_time of this process; "0" where there is no ``/proc``: then the lock alone decides."""
    return start_time(os.getpid()) or "0"


def seems_alive(pid: int, start: str | None = None) -> bool:
    """Whether this process runs here, as far as ``/proc`` can tell; unsure means True.

    Args:
        start: What start_time said of it; None accepts any process with this id.
    """
    try:
        found = start_time(pid)
    except OSError:
        return True
    return found is not None and start in (None, found)


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; False where another has it.

    The lock belongs to the open file, not to the process: it ends when the last copy of the
    descriptor is closed, a forked child's included, or by unlock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give a lock back, also when a forked child still has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)

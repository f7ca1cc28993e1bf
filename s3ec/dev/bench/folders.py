# SPDX-License-Identifier: Apache-2.0
"""A scratch folder in memory, where a disk would be what is measured."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

TMPFS = Path("/dev/shm")  # noqa: S108  only where it is a tmpfs; a folder of our own in it
_PREFIX = "s3ec-bench-"


@contextlib.contextmanager
def memory_folder(otherwise: Path) -> Iterator[tuple[Path, bool]]:
    """An empty folder on tmpfs, deleted afterwards.

    Deletes first what a benchmark that was killed has left there: that is memory nobody gives
    back. The lock on a living one's folder ends with its process.

    Args:
        otherwise: Made and used where there is no tmpfs.

    Yields:
        The folder, and whether it is on tmpfs.
    """
    if not (is_tmpfs(TMPFS) and os.access(TMPFS, os.W_OK)):
        otherwise.mkdir(parents=True)
        yield otherwise, False
        return
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=TMPFS))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, True
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    for folder in TMPFS.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def is_tmpfs(path: Path) -> bool:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(line.split()[1:3] == [str(path), "tmpfs"] for line in mounts.splitlines())

# SPDX-License-Identifier: Apache-2.0
"""Reads one granted file into memory, verified; where asked to, only what needs no disk."""

from __future__ import annotations

import errno
import functools
import os
from typing import Any

import torch

from s3ec import codec
from s3ec.connector.plan import Load
from s3ec.errors import CorruptEntryError

# Hashed while it is in the processor's last cache: 10% of a 30 MB entry. Not smaller, since each
# part costs two turns at the GIL.
_PART_BYTES = 2**22
# Follows no link and waits for no pipe's writer, should somebody have put one there.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Linux; elsewhere a load alone is handed to a reader.
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)
# Their pages are nowhere else, and they do not know RWF_NOWAIT.
_IN_MEMORY = {"tmpfs", "ramfs"}


def read_data(load: Load, memory: torch.Tensor, *, hashed: bool = True, wait: bool = True) -> None:
    """Read the values of one pinned file into memory, and verify them.

    The header is compared, not parsed again: the scheduler's process did that, and compared
    identifier, namespace and shape, when it pinned the file.

    Args:
        load: What was granted.
        memory: uint8 tensor on the CPU, contiguous, ``load.shape.nbytes`` or longer.
        hashed: False compares length and header only, and believes the values.
        wait: False: read only what the kernel has in memory. The name is looked up all the same:
            it was when the file was pinned, so the kernel knows it.

    Raises:
        BlockingIOError: Not ``wait``, and a disk would have to answer.
        OSError: The file cannot be read.
        CorruptEntryError: It is not what was granted.
    """
    nbytes = load.shape.nbytes
    front, view = bytearray(load.data_start), bytes_of(memory)[:nbytes]
    checksum = codec.running_checksum()
    fd = os.open(load.path, _OPEN)
    try:
        found = os.fstat(fd)
        if found.st_size != len(front) + nbytes:
            raise CorruptEntryError(
                f"{found.st_size} bytes, expected {len(front) + nbytes}", reason="length"
            )
        flags = 0 if wait or _is_in_memory(found.st_dev) else _no_wait()
        # All at once where nothing is hashed in between.
        step = _PART_BYTES if hashed else nbytes
        done = _read(fd, [front, view[:step]], 0, flags) - len(front)
        if flags and done <= 0:  # of a long header the kernel has a part
            raise BlockingIOError(errno.EAGAIN, "a disk would have to answer")
        if hashed and done > 0:
            checksum.update(view[:done])
        while 0 < done < nbytes:
            part = view[done : done + step]
            count = _read(fd, [part], len(front) + done, flags)
            if count == 0:
                break
            if hashed:
                checksum.update(part[:count])
            done += count
    finally:
        os.close(fd)
    if done != nbytes:
        raise CorruptEntryError(f"ends after {done} bytes of tensor", reason="length")
    if codec.checksum(front) != load.front_digest:
        raise CorruptEntryError("another header than was pinned", reason="header")
    if hashed and checksum.hexdigest() != load.checksum:
        raise CorruptEntryError("checksum differs", reason="checksum")


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, to be written to."""
    array: Any = memory.numpy()
    return memoryview(array).cast("B")


def _read(fd: int, views: list[Any], offset: int, flags: int) -> int:
    try:
        return os.preadv(fd, views, offset, flags)
    except OSError as exc:
        if flags and exc.errno == errno.EOPNOTSUPP:
            raise BlockingIOError(errno.EAGAIN, "this file system cannot tell") from exc
        raise


def _no_wait() -> int:
    if _NO_WAIT is None:
        raise BlockingIOError(errno.EAGAIN, "this system cannot tell")
    return int(_NO_WAIT)


@functools.lru_cache(maxsize=16)
def _is_in_memory(device: int) -> bool:
    """Whether a file system (``st_dev``) is one of memory; looked up once."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                mount, _, about = line.partition(" - ")
                if mount.split()[2] == number:
                    return about.split()[0] in _IN_MEMORY
    except (OSError, IndexError):
        pass
    return False

# SPDX-License-Identifier: Apache-2.0
"""Single flight across processes: of all processes that need one entry, one fetches it.

A claim is a lock on one byte of ``fetch.lock``, at an offset derived from namespace and digest.
Such locks need no files of their own that could be left behind, and the kernel drops them when
their process ends in any way, SIGKILL included: the next one takes over at once. They are bound to
the open file (Linux: F_OFD_SETLK), so threads and Tiers of one process exclude each other too, and
containers that share the folder do as well. Two keys share an offset once in 2**62: then one waits
needlessly, no more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from s3ec.errors import TierError
from s3ec.tier.files import DiskErrors, Folders

# struct flock of 64-bit Linux: type, whence, start, length, pid (0 for this kind of lock).
_FLOCK = struct.Struct("hhqqi4x")
_PLACES = (1 << 62) - 1


@dataclass(slots=True, eq=False)
class Claim:
    """The right to fetch one entry; ``Claims.release`` gives it back.

    Attributes:
        place: Offset of the locked byte; None for a claim without a lock, or a released one.
    """

    place: int | None = None


class Claims:
    """One Tier's claims. Blocking and thread-safe: the file is opened under the lock."""

    def __init__(self, folders: Folders, namespace: str, disk_errors: DiskErrors) -> None:
        self._folders = folders
        self._seed = namespace.encode()
        self._refused = disk_errors.record
        self._lock = threading.Lock()
        self._fd = -1  # of ``fetch.lock``
        self._held: set[int] = set()
        self._closed = False

    def take(self, digest: bytes) -> Claim | None:
        """Claim an entry without waiting.

        Returns:
            The claim; None if another holder has it. If the file system has no such locks, and
            after ``close``, a claim without a lock: an entry may be fetched twice, which only
            wastes work.
        """
        place = self._place(digest)
        try:
            with self._lock:
                if self._closed:
                    return Claim()
                fd = self._opened()
                if place in self._held or not _set_lock(fd, fcntl.F_WRLCK, place):
                    return None
                self._held.add(place)
                return Claim(place)
        except (OSError, TierError) as exc:
            self._refused("claim", exc)
            return Claim()

    def is_taken(self, digest: bytes) -> bool:
        """Return True if take would return None now; one system call on a file in memory."""
        place = self._place(digest)
        try:
            with self._lock:
                if self._closed:
                    return False
                fd = self._opened()
                return place in self._held or _is_locked(fd, place)
        except (OSError, TierError):
            return False

    def release(self, claim: Claim) -> None:
        """Give a claim back. Idempotent. Never raises."""
        place, claim.place = claim.place, None
        with self._lock, suppress(OSError):
            if place in self._held:  # else close has ended it
                self._held.remove(place)
                _set_lock(self._fd, fcntl.F_UNLCK, place)

    def close(self) -> None:
        """Give all claims back, and take no more."""
        with self._lock:
            self._closed = True
            self._held.clear()
            self._close_file()

    def _place(self, digest: bytes) -> int:
        return xxhash.xxh3_64_intdigest(self._seed + digest) & _PLACES

    def _opened(self) -> int:
        """Return the lock file; if it was deleted, a new one as soon as no claim is held."""
        if self._fd < 0 or not (self._held or os.fstat(self._fd).st_nlink):
            self._close_file()
            self._fd = self._folders.open_own(self._folders.fetch_lock)
        return self._fd

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def _set_lock(fd: int, kind: int, place: int) -> bool:
    """Lock or unlock one byte without waiting; return False if another holder has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _is_locked(fd: int, place: int) -> bool:
    """Return True if another holder has locked this byte."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

# SPDX-License-Identifier: Apache-2.0
"""Single flight across processes: of all that want one entry, one fetches it.

A claim is a lock on one byte of ``fetch.lock``, at a place that namespace and digest give. Such
locks need no files of their own that could be left behind, and the kernel drops them when their
process ends in any way, SIGKILL included: the next one takes over at once. They are bound to the
open file (Linux: F_OFD_SETLK), so threads and Tiers of one process exclude each other too, and
containers that share the folder do as well. Two keys at one place wait for each other in vain, once
in 2**62; that is a wait and nothing else.
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
    """The right to fetch one entry; give it back with ``Claims.release``.

    Attributes:
        place: The locked byte; None for a claim that excludes nobody, or was given back.
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
            None where somebody else has it. Where the file system has no such locks, and after
            ``close``, a claim that excludes nobody: an entry may be fetched twice, which is a
            waste and no more.
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
        """Whether take would answer None now; one system call on a file in memory."""
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
        """Give a claim back; more than once is fine. Never raises."""
        place, claim.place = claim.place, None
        with self._lock, suppress(OSError):
            if place in self._held:  # else ended by close
                self._held.remove(place)
                _set_lock(self._fd, fcntl.F_UNLCK, place)

    def close(self) -> None:
        """Give all claims back, and make none any more."""
        with self._lock:
            self._closed = True
            self._held.clear()
            self._close_file()

    def _place(self, digest: bytes) -> int:
        return xxhash.xxh3_64_intdigest(self._seed + digest) & _PLACES

    def _opened(self) -> int:
        """The lock file; where somebody has deleted it, the new one as soon as nothing is held."""
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
    """Lock or unlock one byte without waiting; False where another has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _is_locked(fd: int, place: int) -> bool:
    """Whether somebody else holds this byte."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

# SPDX-License-Identifier: Apache-2.0
"""News: how the processes of a node announce new entries to each other, without walking the folder.

There is one file for the whole folder. A process that has named an entry appends one line, and
every process that serves requests checks every 20 ms whether the file has grown. A line has the
namespace, a space, and the digest in hex.

Only the delay until an entry is found depends on the file: after a lost line the index or the next
walk finds the entry, and a damaged line costs one failed open. So nothing is locked or synced.
Readers of a file that was removed read its rest before they continue with the new one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress

from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.runtime import Background
from s3ec.tier.files import DiskErrors, Folders, open_entry

LARGEST_BYTES = 2**20
"""A file that reaches this size is removed, and a new one begun."""
POLL_S = 0.02
"""One poll is one system call, about 3 us."""
# No line is longer.
_LINE_BYTES = 1024
# The pause after a poll that failed.
_REST_S = 1.0
_STOP_TIMEOUT_S = 1.0


def make_line(namespace: str, digest: bytes) -> bytes:
    """Return the line of one entry; it begins with a line feed too, in case the last line was cut.

    Args:
        namespace: ``Namespace.name``.
        digest: ``Key.digest``.
    """
    return f"\n{namespace} {digest.hex()}\n".encode()


def parse_lines(blob: bytes, namespace: str) -> tuple[list[bytes], int]:
    """Read a part of the file, which may end anywhere and hold anything.

    Returns:
        The digests of this namespace, and the number of bytes that need not be read again.
    """
    found = re.findall(rb"^%b ([0-9a-f]{32})\n" % re.escape(namespace.encode()), blob, re.MULTILINE)
    done = max(blob.rfind(b"\n") + 1, len(blob) - _LINE_BYTES)
    return [bytes.fromhex(digest.decode()) for digest in found], done


class NewsWriter:
    """Announces new entries to the node's other processes. Thread-safe; keeps no file open."""

    def __init__(self, folders: Folders, namespace: str, disk_errors: DiskErrors) -> None:
        """Touch nothing yet."""
        self._folders = folders
        self._namespace = namespace
        self._failed = disk_errors.record

    def notify(self, key: Key) -> None:
        """Announce an entry that has its name; about six short system calls. Never raises."""
        try:
            self._append(make_line(self._namespace, key.digest))
        except (OSError, TierError) as exc:
            self._failed("tell of an entry", exc)

    def _append(self, line: bytes) -> None:
        path = self._folders.news
        fd = self._folders.open_own(path, os.O_APPEND)
        try:
            # One write at the end, so that lines of several processes do not mix. A full disk may
            # take only a part of it.
            os.write(fd, line)
            if os.lseek(fd, 0, os.SEEK_CUR) >= LARGEST_BYTES:
                with suppress(FileNotFoundError):  # another process has removed it
                    if os.path.samestat(os.fstat(fd), os.lstat(path)):
                        os.unlink(path)
        finally:
            os.close(fd)


class NewsReader:
    """Follows the file from a thread of its own, since a disk may hang.

    States: new, following from ``start`` on, ended for good by ``close``.
    """

    def __init__(
        self,
        folders: Folders,
        namespace: str,
        disk_errors: DiskErrors,
        notify: Callable[[list[bytes]], None],
    ) -> None:
        """Touch nothing yet.

        Args:
            notify: Takes the digests of new entries, in the reader's thread; must not wait.
        """
        self._path = str(folders.news)
        self._namespace = namespace
        self._failed = disk_errors.record
        self._notify = notify
        self._fd: int | None = None
        self._file: os.stat_result | None = None  # status of the open file
        self._at = 0
        self._seen: tuple[int, int, int] | None = None  # device, inode, size at the last poll
        self._thread = Background("s3ec-news", self._poll)

    def start(self) -> None:
        """Start at the current end of the file; blocking. Called once. Never raises.

        A walk over the folder that begins after this, together with the lines from now on, covers
        all entries.
        """
        with suppress(OSError, CorruptEntryError):  # the thread gets the error too, and counts it
            self._look(from_start=False)
        self._thread.wake()

    def close(self) -> None:
        """End the thread; for good. While the disk hangs, the file stays open."""
        if self._thread.stop(_STOP_TIMEOUT_S):
            self._close_file()

    def _poll(self, _pause: Callable[[], None]) -> float:
        self._thread.wake()  # for the next poll
        try:
            digests = self._look()
        except (OSError, CorruptEntryError) as exc:
            self._failed("read the news", exc if isinstance(exc, OSError) else TierError(str(exc)))
            return _REST_S
        if digests:
            self._notify(digests)
        return POLL_S

    def _look(self, *, from_start: bool = True) -> list[bytes]:
        """Return the digests announced since the last poll; one system call if there are none.

        Args:
            from_start: True to read a new file from its start, not its end.
        """
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            found = None
        seen = None if found is None else (found.st_dev, found.st_ino, found.st_size)
        if seen == self._seen:
            return []
        digests = self._read_on()
        if found is None:
            self._close_file()
        elif self._file is None or not os.path.samestat(self._file, found):
            self._close_file()
            with suppress(FileNotFoundError):
                self._open_file(from_start=from_start)
            digests += self._read_on()
        self._seen = seen
        return digests

    def _open_file(self, *, from_start: bool) -> None:
        self._fd = open_entry(self._path)
        self._file = os.fstat(self._fd)
        self._at = 0 if from_start else self._file.st_size

    def _close_file(self) -> None:
        fd, self._fd, self._file = self._fd, None, None
        if fd is not None:
            os.close(fd)

    def _read_on(self) -> list[bytes]:
        if self._fd is None:
            return []
        blob = os.pread(self._fd, 2 * LARGEST_BYTES, self._at)  # no writer of ours makes it larger
        digests, done = parse_lines(blob, self._namespace)
        self._at += done
        return digests

# SPDX-License-Identifier: Apache-2.0
"""One entry of the tier, held open: the kernel's reference count is the pin.

An open file can be read until it is closed, even after its name is removed, and the end of its
process closes it. So eviction unlinks without waiting for readers, and there is nothing to sweep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from s3ec.codec import Header


class OpenEntry:
    """One entry that stays readable as long as this object is referenced.

    Dropping the last reference closes the file, which may free its blocks on the disk. A caller
    that must not wait for that passes the reference to a thread: ``Residents.release``.

    Attributes:
        path: Its name when it was opened. Another file may have that name by now, or none.
        fd: For ``os.pread`` in the process that opened it; only this object closes it.
        pid: That process.
        device, inode: Tell this file from any other on this machine.
        nbytes: Size of the whole file.
        header: Parsed and compared with the key when it was opened.
        verified_s: When the values were last compared with their checksum, monotonic seconds.
        used_s: When a request was last granted it, likewise.
    """

    __slots__ = (
        *("device", "fd", "header", "inode", "nbytes", "path", "pid"),
        *("used_s", "verified_s"),
    )

    def __init__(self, path: str, fd: int, header: Header, *, verified_s: float) -> None:
        """Take over an open file.

        Args:
            fd: Closed with this object.

        Raises:
            OSError: fstat failed; ``fd`` is closed then as well.
        """
        self.path = path
        self.fd = fd
        self.pid = os.getpid()
        self.header = header
        self.verified_s = self.used_s = verified_s
        try:
            found = os.fstat(fd)
        except BaseException:  # a reference to the exception would keep this object and its file
            self.fd = -1
            os.close(fd)
            raise
        self.device, self.inode, self.nbytes = found.st_dev, found.st_ino, found.st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # As the interpreter ends, this module's own names may be gone.
        try:  # noqa: SIM105
            close(self.fd)
        except OSError:
            pass

    @property
    def is_evicted(self) -> bool:
        """True if its name is gone or is another file's now. One system call.

        The link count does not show this: the spool may hold a link while the bucket is down.
        """
        with suppress(OSError):
            found = os.lstat(self.path)
            return (found.st_dev, found.st_ino) != (self.device, self.inode)
        return True

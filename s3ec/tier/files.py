# SPDX-License-Identifier: Apache-2.0
"""Private folders, files that appear whole or not at all, and the disk's errors.

A file is locked while it is written. The kernel drops a lock when its owner ends in any way, and
every container that shares the folder sees it. So a file whose lock can be taken has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError

_log = logging.getLogger(__name__)


class DiskErrors:
    """Disk errors of one tier: all are counted; the log has each kind once, or it would fill up."""

    def __init__(self, root: Path, counters: Counters) -> None:
        self._root = root
        self._counters = counters
        self._warned: set[tuple[str, int | None]] = set()

    def record(self, what: str, exc: OSError | TierError) -> None:
        """Count an error; log a warning for the first one of its kind.

        Args:
            what: The operation, as a verb.
        """
        self._counters.add("tier.errors")
        kind = (what, getattr(exc, "errno", None))
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        # Not the exception itself: a reference to it keeps its frames' files open.
        _log.log(level, "cache %s: cannot %s: %s", self._root, what, str(exc))


FOLDER_MODE = 0o700
FILE_MODE = 0o600

_TEMP = re.compile(r"\.tmp-[0-9a-f]{16}")
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FS_GROUP = stat.S_ISGID | stat.S_IWGRP
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_OWN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_NEW = _OPEN_OWN | os.O_CREAT
_PIECES_PER_WRITE = 512  # Linux takes 1024 (IOV_MAX)


class Folders:
    """The paths below one root. The constructor touches nothing.

    Attributes:
        root: Free of symbolic links.
        version: Holds everything of this layout; a later layout gets another folder.
        objects: Namespaces, each with the objects of the bucket's ``objects/``.
        spool: Entries that the bucket has not confirmed, and the locks of their owners.
        incoming: Files that are being written; one folder, so that sweeping it needs no walk.
        index: Namespaces, each with this node's copy of the index files.
        fetch_lock: A file. One byte per entry that a process fetches; see claims.py.
        usage: A file. The running total of all bytes here.
        news: A file. Entries that were added recently; see news.py.
        evict_lock: A file. Locked by the one process that evicts.
        inner: The folders right below ``version``.
        shared_files: The files right below ``version``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = version = root / "v1"
        self.objects = version / "objects"
        self.spool = version / "spool"
        self.incoming = version / "incoming"
        self.index = version / "index"
        self.fetch_lock = version / "fetch.lock"
        self.usage = version / "usage"
        self.news = version / "news"
        self.evict_lock = version / "evict.lock"
        self.inner = (self.objects, self.spool, self.incoming, self.index)
        locks = (self.fetch_lock, self.evict_lock)
        self.shared_files = (*locks, self.usage, self.news)

    def make(self) -> None:
        """Create missing folders and check existing ones.

        Raises:
            TierError: A folder is a symbolic link, another user's, or writable by others; see
                require_own_folder.
            OSError: A folder could not be created.
        """
        make_parents(self.root)
        make_folder(self.root, given=True)
        for folder in (self.version, *self.inner):
            make_folder(folder)

    def open_own(self, path: str | Path, flags: int = 0) -> int:
        """Open one of the few files below ``version`` that all processes share; create if missing.

        Args:
            flags: Further flags of ``os.open``.

        Returns:
            A descriptor for reading and writing; the caller closes it.

        Raises:
            OSError, TierError: As for make, or it cannot be opened.
        """
        with suppress(FileNotFoundError):
            return os.open(path, _OPEN_OWN | flags)
        self.make()  # in case the cache folder was emptied meanwhile
        return _create(path, flags)

    @contextmanager
    def locked(self, path: Path, *, wait_s: float, poll_s: float) -> Iterator[tuple[int, bool]]:
        """Open one of the shared files and hold its lock while the block runs.

        The file is opened for each use. So threads exclude each other too, and a deleted file is
        not used for long. The lock is polled, since flock has no timeout: a process that is stopped
        (a debugger, a paused container) while it holds the lock must not stop all others with it.

        Yields:
            The file's descriptor, and False if another holder kept the lock for ``wait_s``.

        Raises:
            OSError, TierError: As for open_own.
        """
        fd = self.open_own(path)
        try:
            deadline_s = time.monotonic() + wait_s
            while not (alone := try_lock(fd)) and time.monotonic() < deadline_s:
                time.sleep(poll_s)
            try:
                yield fd, alone
            finally:
                if alone:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile would keep it locked
        finally:
            os.close(fd)

    def new_file(self) -> TempFile:
        """Create a temp file; ``place`` gives it its name.

        Raises:
            OSError, TierError: As for make.
        """
        try:
            return TempFile(str(self.incoming))
        except FileNotFoundError:  # the cache folder was emptied meanwhile
            self.make()
            return TempFile(str(self.incoming))

    def place(self, file: TempFile, path: str) -> None:
        """Give a finished file its name below ``version``, replacing an existing one.

        Its lock is held until it has the name, or a sweeper would take it for a dead writer's.

        Raises:
            OSError: It has no name. FileNotFoundError: the file is gone; it can be written again.
            TierError: A missing folder cannot be created, since something else has its name.
        """
        for last in (False, False, False, True):
            try:
                os.replace(file.path, path)
                file.is_named = True
                return
            except FileNotFoundError:
                if last or not os.path.lexists(file.path):
                    raise
            with suppress(FileNotFoundError):  # a folder that vanishes again is created again
                self._make_below(path.rpartition("/")[0])

    def _make_below(self, folder: str) -> None:
        """Create a folder and those above it, as far as they are missing."""
        missing = []
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        for each in reversed(missing):
            make_folder(each)


def _create(path: str | Path, flags: int = 0) -> int:
    """Create a private file and open it for reading and writing."""
    fd = os.open(path, _OPEN_NEW | flags, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)  # the umask may have cleared bits of the mode above
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_folder(path: Path | str, *, given: bool = False) -> None:
    """Create one private folder whatever the umask, or check an existing one."""
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        require_own_folder(path, given=given)
        return
    os.chmod(path, FOLDER_MODE)


def make_parents(path: Path) -> None:
    """Create missing folders above one. Existing ones may belong to any user."""
    for folder in reversed(path.parents):
        if not folder.exists():
            make_folder(folder)


def require_own_folder(path: Path | str, *, given: bool = False) -> None:
    """Refuse a folder that other users could have filled, except members of our own groups.

    Kubernetes gives a volume to a group of the pod (fsGroup). At each mount it makes all folders in
    it writable for that group and setgid, and leaves their owners.

    Args:
        given: True if its owner may be another user, provided that it has such a mode.

    Raises:
        TierError: Names what is wrong and how to fix it.
    """
    found = os.lstat(path)
    mode, is_ours = found.st_mode, found.st_uid == os.geteuid()
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a folder"
        raise TierError(f"{path} is {kind}; remove it, or set `cache_dir` to another folder")
    if mode_for_others(found) & OTHERS_MAY_WRITE:
        close = f"`chmod 700 {path}`, or " if is_ours else ""
        raise TierError(
            f"{path} is writable by other users (mode {stat.S_IMODE(mode):o}, group "
            f"{found.st_gid}); {close}set `cache_dir` to a folder inside, such as {path}/s3ec"
        )
    if not is_ours and not (given and mode & _FS_GROUP == _FS_GROUP):
        raise TierError(
            f"{path} belongs to uid {found.st_uid} and this process runs as uid {os.geteuid()}; "
            f"`chown {os.geteuid()} {path}`, or set `cache_dir` to a folder of this user"
        )


def mode_for_others(found: os.stat_result) -> int:
    """Return the permission bits, without those of a group that this process is in."""
    mode = stat.S_IMODE(found.st_mode) & ~stat.S_ISGID
    if mode & stat.S_IRWXG and found.st_gid in (os.getegid(), *os.getgroups()):
        mode &= ~stat.S_IRWXG
    return mode


def is_full(exc: OSError) -> bool:
    """Return True if the disk, or this user's quota, is full."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Return the bytes that an unprivileged process may still write to this folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def touch(file: int | str, used_s: float | None = None) -> None:
    """Set an entry's modification time to its last use: eviction orders by that.

    Errors are ignored: the entry stays valid.

    Args:
        file: Its descriptor, or its path, which is no link.
        used_s: Seconds since the epoch; None for now.
    """
    used_ns = int((time.time() if used_s is None else used_s) * 1e9)
    with suppress(OSError):
        os.utime(file, ns=(used_ns, used_ns))


def open_entry(path: str | Path) -> int:
    """Open a regular file for reading; never follows a link, never waits for a pipe's writer.

    Returns:
        A descriptor; the caller closes it.

    Raises:
        CorruptEntryError: It is not a regular file.
        OSError: Absent, or it cannot be opened.
    """
    try:
        fd = os.open(path, _OPEN_ENTRY)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise CorruptEntryError(f"{path} is not a regular file", reason="header") from exc
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptEntryError(f"{path} is not a regular file", reason="header")
    except BaseException:
        os.close(fd)
        raise
    return fd


class TempFile:
    """A file that is being written, under a name that no reader opens.

    Not synced to the device: entries are copies of objects in the bucket. After a power cut a
    file may have its full size and hold zeros, so readers of an entry verify its checksum.

    Attributes:
        path: For the caller to rename or to remove.
        nbytes: Bytes written so far.
        is_named: True once it was renamed: ``path`` is not in use any more.
    """

    def __init__(self, folder: str, *, private: bool = True) -> None:
        """Create it.

        Args:
            private: True for a file of the cache: for this user alone, whatever the umask, and
                locked. Else the umask decides.

        Raises:
            OSError: It cannot be created; nothing is left behind.
        """
        self.nbytes = 0
        self.is_named = False
        self._fd = -1
        try:
            while True:
                self.path = f"{folder}/.tmp-{secrets.token_hex(8)}"
                if not private:
                    self._fd = os.open(self.path, _OPEN_NEW | os.O_EXCL, 0o666)
                    return
                self._fd = _create(self.path, os.O_EXCL)
                if lock_file(self._fd):
                    return
                self.close()  # a sweeper has it
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> TempFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Remove the file unless it was renamed."""
        self.discard()

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write pieces at the end.

        Raises:
            OSError: A part of them may be written.
        """
        write_all(self._fd, pieces)
        self.nbytes += sum(memoryview(piece).nbytes for piece in pieces)

    def put(self, piece: bytes | memoryview, at: int) -> None:
        """Write a piece at an offset in bytes; do not append after this.

        Raises:
            OSError: A part of it may be written.
        """
        write_all(self._fd, [piece], at)
        self.nbytes += memoryview(piece).nbytes

    def close(self, *, synced: bool = False) -> None:
        """End writing, and release the lock.

        Args:
            synced: True to wait until the bytes are on the device.

        Raises:
            OSError: The file may not hold the bytes that were written.
        """
        if synced:
            os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Remove the temp file, unless it was renamed. Idempotent. Never raises."""
        if not self.is_named:
            with suppress(OSError):
                os.unlink(self.path)  # under the lock: unlocked, it would be a dead writer's
        with suppress(OSError):
            self.close()


def write_file(path: Path, pieces: Sequence[bytes | memoryview], *, synced: bool = False) -> None:
    """Write a file that is no entry, whole or not at all, and replace one of its name.

    Args:
        synced: As for TempFile.close.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    with TempFile(str(path.parent), private=False) as file:
        file.append(pieces)
        file.close(synced=synced)
        os.replace(file.path, path)
        file.is_named = True


def write_all(fd: int, pieces: Sequence[bytes | memoryview], at: int | None = None) -> None:
    """Write pieces one after the other, without joining them in memory.

    Args:
        at: Offset in bytes; None for the file's own position.
    """
    rest = [view for piece in pieces if (view := memoryview(piece).cast("B"))]
    while rest:
        some = rest[:_PIECES_PER_WRITE]
        if at is None:
            written = os.writev(fd, some)
        else:
            written = os.pwritev(fd, some, at)
            at += written
        if written == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def sweep_temps(folder: Path) -> None:
    """Remove temp files of dead writers from a folder; never raises."""
    with suppress(OSError):
        for name in filter(is_temp_name, os.listdir(folder)):
            is_abandoned(f"{folder}/{name}", remove=True)


def is_temp_name(name: str) -> bool:
    """Return True if TempFile could have made this file name."""
    return _TEMP.fullmatch(name) is not None


def is_abandoned(path: str, *, remove: bool = False) -> bool:
    """Return True if this temp file has no writer, since its lock can be taken; never raises.

    Args:
        remove: True to remove it then, under the lock, see lock_file.
    """
    with suppress(OSError), open(os.open(path, _OPEN_OWN), "rb") as file:
        is_free = try_lock(file.fileno())
        if is_free and remove:
            os.unlink(path)
        return is_free
    return False


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; False if another holder has it.

    The lock belongs to the open file, not to the process: it ends when the last copy of the
    descriptor is closed, a forked child's included.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(fd: int) -> bool:
    """As try_lock, for a file that was just created; also False if it has no name any more.

    A sweeper takes the lock before it removes the file, and may be faster than the owner.
    """
    return try_lock(fd) and os.fstat(fd).st_nlink > 0

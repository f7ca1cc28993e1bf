# SPDX-License-Identifier: Apache-2.0
"""The index's files on this node: one folder for a namespace, shared by all processes."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from s3ec.errors import TierError
from s3ec.identity import is_namespace_name
from s3ec.index.names import SnapshotName
from s3ec.tier.files import Folders, TempFile, make_folder, make_parents, sweep_temps, try_lock
from s3ec.tier.scan import is_index_file

OVERLAY = "overlay"
MISSING = "missing"
ROWS, FILTER = ".rows", ".filter"
_UNUSED_S = 7 * 86400.0
# A digest, and when it was found missing: seconds since the epoch, by this machine's clock.
_MISSING = struct.Struct("<16sd")
_MISSING_BYTES = 65_536 * _MISSING.size


def no_bound(nbytes: int) -> None:
    """Accept any size: for folders outside of the tier."""


class NodeFolder:
    """Files of the index in one folder. Blocking and thread-safe; touches nothing when it is made.

    A file appears whole, by a rename, and is never changed afterwards: a mapped file stays good
    when its name is replaced or removed. Only ``missing`` is appended to.

    Attributes:
        path: The folder.
        need_room: Requests so many bytes of the tier, and counts them; TierError if it is full.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        *,
        above: Sequence[str] = (),
        need_room: Callable[[int], None] = no_bound,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Name a folder; make nothing yet.

        Args:
            path: Made if it is missing, for this user only.
            above: Folders that contain it; each must be ours when it is made.
            need_room: The tier's. A child process has none: its parent calls it before the start.
            clock: Seconds since the epoch; times of files are compared with it.
        """
        self.path = path
        self.need_room = need_room
        self.clock = clock
        self._folders = (*above, str(path))

    @classmethod
    def of(
        cls, folders: Folders, namespace: str, *, need_room: Callable[[int], None] = no_bound
    ) -> NodeFolder:
        """The folder of a namespace in the node's tier."""
        above = (str(folders.root), str(folders.version), str(folders.index))
        return cls(folders.index / namespace, above=above, need_room=need_room)

    def make(self) -> None:
        """Make the folder, and those above it, if they are missing.

        Raises:
            TierError: The disk refused, or the folder is not ours.
        """
        try:
            make_parents(Path(self._folders[0]))
            for folder in self._folders:
                make_folder(folder, given=True)
        except OSError as exc:
            raise TierError(
                f"cannot make {self.path}: {exc}; set `cache_dir` to a folder on a local disk that "
                "this user may write"
            ) from exc

    def rows_path(self, name: SnapshotName) -> Path:
        """The path of a snapshot's rows."""
        return self.path / f"{name}{ROWS}"

    def filter_path(self, name: SnapshotName) -> Path:
        """The path of a snapshot's filter; the file exists before the rows do."""
        return self.path / f"{name}{FILTER}"

    def find(self, name: str) -> os.stat_result | None:
        """The stat of a file in this folder; None if it is absent."""
        try:
            return os.lstat(self.path / name)
        except OSError:
            return None

    @contextmanager
    def new_file(self, name: str, nbytes: int, *, synced: bool = True) -> Iterator[BinaryIO]:
        """Open a file that gets its name when the block ends without an exception.

        Args:
            nbytes: The most bytes that it will have.
            synced: Wait until the device has it, so that a power cut leaves no file of zeros.

        Raises:
            TierError: There is no room, or the disk refused.
        """
        try:
            self.make()
            self.need_room(nbytes)
            with TempFile(str(self.path)) as temp, open(temp.path, "w+b") as file:
                yield file
                file.flush()
                if synced:
                    os.fsync(file.fileno())
                with suppress(OSError):  # a folder in its place, which no file can replace
                    os.rmdir(self.path / name)
                os.rename(temp.path, self.path / name)
                temp.is_named = True
        except OSError as exc:
            raise TierError(f"cannot write {self.path / name}: {exc}") from exc

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a whole file and name it; raises as new_file."""
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        with self.new_file(name, nbytes, synced=False) as file:
            file.writelines(pieces)

    def touch(self, name: str) -> None:
        """Set a file's time to now, by ``clock``. Never raises."""
        with suppress(OSError):
            now_ns = int(self.clock() * 1e9)
            os.utime(self.path / name, ns=(now_ns, now_ns))
            os.utime(self.path, ns=(now_ns, now_ns))  # see remove_unused

    def remove_older(self, name: SnapshotName) -> None:
        """Remove files of older snapshots, and temporary files of dead processes. Never raises."""
        sweep_temps(self.path)
        with suppress(OSError):
            for found in os.listdir(self.path):
                parsed = SnapshotName.parse(found.partition(".")[0])
                with suppress(OSError):
                    if parsed is not None and parsed < name:
                        os.unlink(self.path / found)

    def remove_unused(self) -> None:
        """Remove the files of namespaces that no process of the node used for a week.

        Mapped files stay readable. Only in a tier's folder. Never raises.
        """
        if len(self._folders) == 1:  # not in a tier: the folders beside it are not ours
            return
        with suppress(OSError):
            for item in list(os.scandir(self.path.parent)):
                with suppress(OSError):
                    unused_s = self.clock() - item.stat(follow_symlinks=False).st_mtime
                    is_ours = is_namespace_name(item.name) and item.is_dir(follow_symlinks=False)
                    if is_ours and unused_s > _UNUSED_S:
                        for name in filter(is_index_file, os.listdir(item.path)):
                            os.unlink(f"{item.path}/{name}")
                        os.rmdir(item.path)

    # -- claims ------------------------------------------------------------------------------

    def try_claim(self, task: str) -> int | None:
        """Claim a task (``refresh``, ``make``) for this process; never waits.

        Returns:
            The claim, for ``release``; None if another process has it. The kernel releases the
            claims of a process that ended.

        Raises:
            TierError: The disk refused.
        """
        fd, is_mine = -1, False
        try:
            self.make()
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self.path / f"lock-{task}", flags, 0o600)
            is_mine = try_lock(fd)
        except OSError as exc:
            raise TierError(f"cannot lock in {self.path}: {exc}") from exc
        finally:
            if fd >= 0 and not is_mine:
                os.close(fd)
        return fd if is_mine else None

    def release(self, claim: int) -> None:
        """Release a claim."""
        os.close(claim)

    def touch_claim(self, task: str) -> None:
        """Note that the holder of the claim works on its task. Never raises."""
        self.touch(f"lock-{task}")

    def claim_age_s(self, task: str) -> float:
        """Seconds since ``touch_claim`` by any process; infinite if there was no claim yet."""
        found = self.find(f"lock-{task}")
        return math.inf if found is None else self.clock() - found.st_mtime

    # -- keys that were found gone -------------------------------------------------------------

    def add_missing(self, digests: Sequence[bytes]) -> None:
        """Announce to the node's engines that the bucket does not hold these keys. Never raises.

        A file that grew large is begun again: its records count for only a minute.
        """
        now_s = self.clock()
        body = b"".join(_MISSING.pack(digest, now_s) for digest in digests)
        path = self.path / MISSING
        with suppress(OSError):
            found = self.find(MISSING)
            if found is not None and found.st_size > _MISSING_BYTES:
                path.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
                file.write(body)  # one call, so that records of several processes do not mix

    def read_missing(self, inode: int, start: int) -> tuple[int, int, list[tuple[bytes, float]]]:
        """Read the records that were appended since the last call.

        Args:
            inode, start: Results of the last call; zeros at first.

        Returns:
            Inode and offset for the next call, and digests with the time at which each was missing.
        """
        try:
            fd = os.open(self.path / MISSING, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0, 0, []
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if about.st_ino != inode or about.st_size < start:
                start = 0
            file.seek(start)
            body = file.read(_MISSING_BYTES)
        body = body[: len(body) // _MISSING.size * _MISSING.size]
        return about.st_ino, start + len(body), list(_MISSING.iter_unpack(body))

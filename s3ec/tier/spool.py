# SPDX-License-Identifier: Apache-2.0
"""The spool: entries that the bucket has not confirmed, kept past the end of their process.

Each is a hard link in a folder of the process that uploads it, made before the entry appears in
the tier: whatever this node serves from a save of its own is in the bucket or on its way there.
Eviction cannot take it, and the next process that writes to the same bucket takes over what a
dead one left. Like everything here it is not synced to the device: it survives the end of a
process, not a power cut.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import OBJECT_SUFFIX, Key, key_of_header
from s3ec.tier.entries import read_header, remove_bad
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import (
    NO_LINK,
    DiskErrors,
    Folders,
    copy_entry,
    is_temp_name,
    open_entry,
    require_own_folder,
    require_own_folders,
    take_lock,
    temp_name,
)
from s3ec.tier.process_folder import LOCK_NAME, OwnFolder, looks_dead
from s3ec.tier.scan import EntryFileName, scan_tier

_log = logging.getLogger(__name__)

# Each fails only if the folder vanishes again while it is made.
_ATTEMPTS = 4
# Up to so many ages are not worth tidying.
_SHORT_HEAP = 64


@dataclass(frozen=True, slots=True, eq=False)
class Spooled:
    """One entry that waits for the bucket. Each save has one of its own, equal to no other.

    Attributes:
        path: The file; nobody else's to touch while this process lives.
        digest: ``Key.digest``.
        nbytes: Size of the whole file.
        since_s: When it came here, seconds since the epoch. Of an adopted one when it was used
            last: no file says how long it has waited.
    """

    path: str
    digest: bytes
    nbytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """One entry as read back: every byte verified, written for this namespace.

    Attributes:
        key: From the identifier inside; its digest is the file name's.
        header: The entry's facts.
        blob: The whole object.
    """

    key: Key
    header: Header
    blob: bytes


class Spool:
    """What one process holds for one namespace and one bucket. Blocking and thread-safe.

    Made by ``Tier.open_spool``. The folder appears with the first entry.

    States of an entry:

    =======  ===========  ================================================================
    state    goes to      when
    =======  ===========  ================================================================
    (new)    held         ``add``, or ``adopt`` takes it from a dead process
    held     held         ``add`` of a later save of the entry replaces it
    held     (gone)       ``remove``, or ``load`` finds that its file has vanished
    held     left         ``remove``, and the disk keeps its file
    held     (gone)       ``load`` finds that it is bad, and deletes it
    left     (gone)       the file could be unlinked, which each later call tries again
    left     held         ``add`` or ``adopt`` gives the entry another file in its place
    held     orphaned     ``close``, or the process dies; so does left
    =======  ===========  ================================================================

    What is orphaned stays on the disk, for the ``adopt`` of another process.
    """

    def __init__(
        self,
        folders: Folders,
        evictor: Evictor,
        disk_errors: DiskErrors,
        counters: Counters,
        *,
        namespace: str,
        destination: str,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is touched yet.

        Args:
            evictor: Is told of the bytes that come onto the disk.
            clock: Seconds since the epoch.

        Raises:
            ValueError: The destination is not 16 hex digits.
        """
        place = f"{namespace}--{destination}--"
        if EntryFileName.parse(f"{place}{'0' * 32}{OBJECT_SUFFIX}") is None:
            raise ValueError(f"not a destination: {destination!r:.100}")
        self._place = place
        self._folders = folders
        self._evictor = evictor
        self._failed = disk_errors.record
        self._counters = counters
        self._clock = clock
        self._namespace = namespace
        self._above = (*folders.above, str(folders.spool))
        self._own = OwnFolder(folders)
        # Never held across a system call. Whoever links, moves or unlinks a file is in _busy with
        # its digest meanwhile: all saves of an entry have one name.
        self._lock = threading.Condition()
        self._busy: set[bytes] = set()
        self._held: dict[bytes, Spooled] = {}
        self._left: dict[bytes, Spooled] = {}  # let go of, and still on the disk
        self._nbytes = 0
        # The oldest first. What is held no more is dropped where it surfaces, or piles up.
        self._ages: list[tuple[float, int, Spooled]] = []
        self._numbers = itertools.count()
        self._said_strangers = False

    @property
    def nbytes(self) -> int:
        """Bytes that this process keeps on the disk; no system call."""
        return self._nbytes

    @property
    def count(self) -> int:
        """Entries that this process keeps on the disk; no system call."""
        return len(self._held) + len(self._left)

    def oldest_s(self) -> float:
        """How long the oldest entry has waited for the bucket; 0 where none does."""
        with self._lock:
            while self._ages and self._held.get(self._ages[0][2].digest) is not self._ages[0][2]:
                heapq.heappop(self._ages)
            return max(0.0, self._clock() - self._ages[0][0]) if self._ages else 0.0

    def held(self, digest: bytes) -> Spooled | None:
        """The save of an entry that this process answers for, if any; no system call."""
        return self._held.get(digest)

    def holds(self, spooled: Spooled) -> bool:
        """Whether that is still this very save; no system call."""
        return self._held.get(spooled.digest) is spooled

    def add(self, key: Key, source: str) -> Spooled:
        """Hold a finished file, before or after it gets its name in the tier.

        An entry of the same name (a dead process's, not looked at yet) is replaced. The
        bytes are counted: they stay on the disk whatever becomes of ``source``.

        Args:
            source: A regular file of this tier whose bytes nobody changes any more.

        Returns:
            What ``remove`` takes.

        Raises:
            OSError: It cannot be held. FileNotFoundError: ``source`` is gone.
            TierError: Closed, or no room for a copy.
        """
        with self._alone(key.digest):
            spooled = self._add(key, source)
        self._unlink_left()
        return spooled

    def _add(self, key: Key, source: str) -> Spooled:
        name = f"{self._place}{key.digest.hex()}{OBJECT_SUFFIX}"
        for _ in range(_ATTEMPTS):
            folder = self._own.path()
            target = f"{folder}/{name}"
            try:
                require_own_folders((*self._above, folder))
                nbytes = self._link(source, target)
            except FileNotFoundError:
                if not self._own.has_vanished(folder):
                    raise
                continue
            self._evictor.account(nbytes)
            spooled = Spooled(target, key.digest, nbytes, self._clock())
            self._note(spooled)
            return spooled
        raise TierError(f"{self._folders.spool} vanishes as soon as it is made")

    def remove(self, spooled: Spooled) -> None:
        """Let go of a save that the bucket holds, or refused for good; never raises.

        Nothing happens where a later save of the entry has taken its place: the bucket has not
        confirmed that one, and may have lost the earlier since. A file that the disk keeps counts
        until it is gone. That is tried again after the next call that works.
        """
        with self._alone(spooled.digest):
            if not self._let_go(spooled, on_disk=True):
                return
            try:
                self._unlink(spooled)
            except (OSError, TierError) as exc:
                # Should this process end before, the next one uploads it again, which changes
                # nothing.
                self._failed("unspool", exc)
                return
        self._unlink_left()

    def _unlink(self, spooled: Spooled) -> None:
        """Remove what was let go of from the disk, and count it no more."""
        with suppress(FileNotFoundError):
            self._require_own(spooled.path)
            os.unlink(spooled.path)
        with self._lock:
            if self._left.pop(spooled.digest, None) is not None:  # else this was closed
                self._nbytes -= spooled.nbytes

    def _unlink_left(self) -> None:
        """Try again what the disk has kept, up to the first file that it still keeps."""
        for digest in list(self._left):
            with self._alone(digest):
                left = self._left.get(digest)
                if left is None:  # another thread was faster
                    continue
                try:
                    self._unlink(left)
                except (OSError, TierError):  # was counted when it was removed
                    with self._lock:
                        if self._left.pop(digest, None) is not None:
                            self._left[digest] = left  # the last one next time
                    return

    def load(self, digest: bytes) -> Loaded | None:
        """Read and verify one entry that is held.

        Returns:
            None where it is not held, has vanished, or was bad (then it is deleted and counted).

        Raises:
            TierError: The disk did not answer; the entry stays.
        """
        spooled = self._held.get(digest)
        if spooled is None:
            return None
        try:
            self._require_own(spooled.path)
            with open(open_entry(spooled.path), "rb") as file:
                return self._checked(digest, file)
        except FileNotFoundError:
            self._let_go(spooled)
            return None
        except CorruptEntryError as exc:
            self._drop_bad(spooled, exc.reason)
            return None
        except OSError as exc:
            raise TierError(f"cannot read {spooled.path}: {exc}") from exc

    def adopt(self) -> list[Spooled]:
        """Take over what dead processes left for this namespace and bucket; never raises.

        Each entry is renamed into our folder, so of several processes that do this at once one
        gets it. A second copy of what we hold is dropped, once ours was read and is good.
        """
        taken: list[Spooled] = []
        self._unlink_left()
        try:
            require_own_folders(self._above)
            folders = [f"{self._above[-1]}/{name}" for name in os.listdir(self._above[-1])]
        except FileNotFoundError:
            return taken
        except (OSError, TierError) as exc:
            self._failed("adopt", exc)
            return taken
        for folder in folders:
            if looks_dead(folder):
                try:
                    self._take_over(folder, taken)
                except (FileNotFoundError, BlockingIOError):
                    # Another adopter is at it, or was; or the owner lives in another container.
                    continue
                except (OSError, TierError) as exc:
                    self._failed("adopt", exc)
        if taken:
            self._counters.add("spool.adopted", len(taken))
        return taken

    def close(self) -> None:
        """Leave what is held to the next process; never raises."""
        self._own.close()
        with self._lock:
            self._held.clear()
            self._left.clear()
            self._ages.clear()
            self._nbytes = 0

    @contextmanager
    def _alone(self, digest: bytes) -> Iterator[None]:
        """Nobody else of this process changes the entry's file meanwhile."""
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._busy)
            self._busy.add(digest)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(digest)
                self._lock.notify_all()

    def _require_own(self, path: str) -> None:
        require_own_folders((*self._above, path.rpartition("/")[0]))

    def _link(self, source: str, target: str) -> int:
        """Give a file its name in the spool, whole or not at all; returns its size."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in NO_LINK and not isinstance(exc, FileExistsError):
                raise
            temp = temp_name(target.rpartition("/")[0])
            try:
                self._link_or_copy(source, temp)
                os.replace(temp, target)
            finally:
                # Also after success: a rename between two names of one file does nothing.
                with suppress(FileNotFoundError):
                    os.unlink(temp)
        found = os.lstat(target)
        if not stat.S_ISREG(found.st_mode):
            os.unlink(target)
            raise TierError(f"{source} is not a regular file")
        return found.st_size

    def _link_or_copy(self, source: str, temp: str) -> None:
        try:
            os.link(source, temp, follow_symlinks=False)
            return
        except OSError as exc:
            if exc.errno not in NO_LINK:
                raise
        min_free_bytes = self._evictor.min_free_bytes
        fd, nbytes = copy_entry(source, temp, min_free_bytes=min_free_bytes, purpose="spool")
        os.close(fd)
        self._evictor.account(nbytes)
        self._counters.add("tier.spool_copies")

    def _checked(self, digest: bytes, file: BinaryIO) -> Loaded:
        nbytes = os.fstat(file.fileno()).st_size
        header = read_header(file.fileno(), nbytes)
        key = key_of_header(header.identifier, digest)
        if key is None:
            raise CorruptEntryError("written for another identifier", reason="identifier")
        codec.check_identity(header, namespace=self._namespace, identifier=key.stored)
        blob = file.read(nbytes)
        codec.check_data(header, memoryview(blob)[header.data_start :])
        return Loaded(key, header, blob)

    def _drop_bad(self, spooled: Spooled, reason: str) -> None:
        """Delete a bad entry; it is as bad under its other names."""
        with self._alone(spooled.digest):
            if self._let_go(spooled):
                self._remove_bad(spooled, reason)

    def _remove_bad(self, spooled: Spooled, reason: str) -> None:
        try:
            inode = os.lstat(spooled.path).st_ino
            remove_bad(spooled.path)
            for entry in scan_tier(self._folders).entries:
                if entry.inode == inode:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
        except FileNotFoundError:
            return
        except (OSError, TierError) as exc:
            self._failed("delete a bad entry", exc)
        self._counters.add("tier.bad_files")
        _log.warning(
            "spooled entry %s of %s was bad (%s); deleted",
            *(spooled.digest.hex(), self._namespace, reason),
        )

    def _take_over(self, folder: str, taken: list[Spooled]) -> None:
        require_own_folder(Path(folder))
        fd = take_lock(f"{folder}/{LOCK_NAME}")
        try:
            strangers = 0
            for name in os.listdir(folder):
                if is_temp_name(name):  # of an add that was not finished
                    with suppress(FileNotFoundError):
                        os.unlink(f"{folder}/{name}")
                    continue
                parts = EntryFileName.parse(name)
                if parts is None:
                    continue
                if not name.startswith(self._place):
                    strangers += 1
                elif self.load(parts.digest) is None:
                    with self._alone(parts.digest):
                        self._move(f"{folder}/{name}", parts.digest, taken)
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(f"{folder}/{name}")
            self._mention(strangers)
            self._remove_empty(folder)
        finally:
            if fd is not None:
                os.close(fd)

    def _move(self, source: str, digest: bytes, taken: list[Spooled]) -> None:
        for _ in range(_ATTEMPTS):
            folder = self._own.path()
            target = f"{folder}/{os.path.basename(source)}"
            try:
                os.rename(source, target)
                status = os.lstat(target)
            except FileNotFoundError:
                if not self._own.has_vanished(folder):
                    return  # another adopter was faster
                continue
            taken.append(Spooled(target, digest, status.st_size, status.st_mtime))
            self._note(taken[-1])
            return

    def _remove_empty(self, folder: str) -> None:
        left = set(os.listdir(folder))
        if left <= {LOCK_NAME}:
            for name in left:
                os.unlink(f"{folder}/{name}")
            os.rmdir(folder)

    def _mention(self, strangers: int) -> None:
        if strangers and not self._said_strangers:
            self._said_strangers = True
            _log.info(
                "%s holds entries of another model or for another bucket; they wait for an "
                "engine of theirs on this node",
                self._folders.spool,
            )

    def _note(self, spooled: Spooled) -> None:
        with self._lock:
            digest = spooled.digest
            old = self._held.get(digest) or self._left.pop(digest, None)  # replaced on the disk
            self._held[digest] = spooled
            self._nbytes += spooled.nbytes - (old.nbytes if old is not None else 0)
            heapq.heappush(self._ages, (spooled.since_s, next(self._numbers), spooled))
            if len(self._ages) > max(_SHORT_HEAP, 2 * len(self._held)):
                self._ages = [one for one in self._ages if self.holds(one[2])]
                heapq.heapify(self._ages)

    def _let_go(self, spooled: Spooled, *, on_disk: bool = False) -> bool:
        """Hold it no more; False where it is not what is held.

        Args:
            on_disk: Its file is still to be removed, and counts until then.
        """
        with self._lock:
            if self._held.get(spooled.digest) is not spooled:
                return False
            del self._held[spooled.digest]
            if on_disk:
                self._left[spooled.digest] = spooled
            else:
                self._nbytes -= spooled.nbytes
            return True

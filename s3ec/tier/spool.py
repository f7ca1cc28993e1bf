# SPDX-License-Identifier: Apache-2.0
"""The spool: entries that the bucket has not confirmed, kept past the end of their process.

Each is a hard link, made before the entry appears in the tier: a save that this node serves is in
the bucket or on its way there. Eviction cannot remove it. Its name has its owner, the process that
holds the lock of that name. If an owner's lock is free, the next process that writes to the same
bucket renames its files, and so adopts them. Like all files here, it is not synced to the device:
it survives the end of a process, not a power cut.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import OBJECT_SUFFIX, Key
from s3ec.tier.entries import check_place, read_header, remove_bad
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import DiskErrors, Folders, lock_file, open_entry
from s3ec.tier.scan import SpoolFileName, owner_of_lock

_log = logging.getLogger(__name__)

# An attempt fails only if the folder vanishes again while it is created.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Spooled:
    """One entry that waits for the bucket. Each save has one of its own, equal to no other.

    Attributes:
        path: The file; no other process may touch it while this one lives.
        digest: ``Key.digest``.
        nbytes: Size of the whole file.
        since_s: When it was added, seconds since the epoch. For an adopted one, its last use: no
            file records how long it has waited.
    """

    path: str
    digest: bytes
    nbytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """One entry as read back: every byte verified, written for this namespace.

    Attributes:
        key: From the identifier in the header; its digest is the file name's.
        header: The entry's header.
        blob: The whole object.
    """

    key: Key
    header: Header
    blob: bytes


class Spool:
    """The entries that one process holds for one namespace and bucket. Blocking and thread-safe.

    ``Tier.open_spool`` creates it. The lock file appears with the first entry.

    States of an entry:

    =======  ===========  ================================================================
    state    goes to      when
    =======  ===========  ================================================================
    (new)    held         ``add``, or ``adopt`` takes it from a dead process
    held     (gone)       ``remove``; ``load`` finds that its file is bad or has vanished;
                          ``add`` of a later save of the entry replaces it
    held     orphaned     ``close``, or the process dies
    =======  ===========  ================================================================

    An orphaned entry stays on the disk, for the ``adopt`` of another process. So does a file that
    the disk refuses to remove: uploading it again changes nothing.
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
        """Touch nothing yet.

        Args:
            evictor: Counts the bytes that are added to the disk.
            clock: Seconds since the epoch.

        Raises:
            ValueError: The destination is not 16 hex digits.
        """
        place = f"{namespace}--{destination}--"
        if SpoolFileName.parse(f"{place}{'0' * 16}-0--{'0' * 32}{OBJECT_SUFFIX}") is None:
            raise ValueError(f"not a destination: {destination!r:.100}")
        self._place = place
        self._folders = folders
        self._folder = str(folders.spool)
        self._evictor = evictor
        self._failed = disk_errors.record
        self._counters = counters
        self._clock = clock
        self._namespace = namespace
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # never held across a system call
        self._held: dict[bytes, Spooled] = {}  # the oldest first
        self._nbytes = 0
        self._locking = threading.Lock()  # guards the fields below
        self._owner = ""  # owner of this process's files
        self._lock_fd = -1  # holds the owner's lock
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds; no system call."""
        return self._nbytes

    @property
    def count(self) -> int:
        """Entries that this process holds; no system call."""
        return len(self._held)

    def oldest_s(self) -> float:
        """Return how long the oldest entry has waited for the bucket; 0 if none does."""
        with self._lock:
            oldest = next(iter(self._held.values()), None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest.since_s)

    def held(self, digest: bytes) -> Spooled | None:
        """Return the save of an entry that this process holds, or None; no system call."""
        return self._held.get(digest)

    def holds(self, spooled: Spooled) -> bool:
        """Return True if this very save is still held; no system call."""
        return self._held.get(spooled.digest) is spooled

    def add(self, key: Key, source: str) -> Spooled:
        """Hold a finished file, before or after it gets its name in the tier.

        The bytes are counted: they stay on the disk even if ``source`` is removed.

        Args:
            source: A regular file of this tier whose bytes do not change any more.

        Returns:
            The save, for ``remove``.

        Raises:
            OSError: It cannot be held, for example without hard links. FileNotFoundError:
                ``source`` is gone.
            TierError: Closed.
        """
        for _ in range(_ATTEMPTS):
            target = self._new_path(key.digest)
            try:
                nbytes = self._link(source, target)
            except FileNotFoundError:
                if not os.path.lexists(source):
                    raise
                continue
            self._evictor.account(nbytes)
            spooled = Spooled(target, key.digest, nbytes, self._clock())
            self._hold(spooled)
            return spooled
        raise TierError(f"{self._folder} vanishes as soon as it is made")

    def remove(self, spooled: Spooled) -> None:
        """Remove a save that the bucket holds, or refused for good; never raises.

        Nothing happens if a later save of the entry has replaced it: the bucket has not confirmed
        that one, and may have lost the earlier since.
        """
        if self._let_go(spooled):
            self._unlink(spooled.path)

    def load(self, digest: bytes) -> Loaded | None:
        """Read and verify one entry that is held.

        Returns:
            The entry; None if it is not held, has vanished, or was bad (then it is deleted and
            counted).

        Raises:
            TierError: The disk did not answer; the entry stays.
        """
        spooled = self._held.get(digest)
        if spooled is None:
            return None
        key: Key | None = None
        try:
            with open(open_entry(spooled.path), "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                # Before the length check, so that the key is known if that fails.
                front = codec.parse_header(os.pread(file.fileno(), 8 + codec.HEADER_LIMIT, 0))
                key = check_place(front, self._namespace, digest)
                header = read_header(file.fileno(), nbytes)
                blob = file.read(nbytes)
            codec.check_data(header, memoryview(blob)[header.data_start :])
            return Loaded(key, header, blob)
        except FileNotFoundError:
            self._let_go(spooled)
        except CorruptEntryError as exc:
            if self._let_go(spooled):
                self._remove_bad(spooled, key, exc.reason)
        except OSError as exc:
            raise TierError(f"cannot read {spooled.path}: {exc}") from exc
        return None

    def adopt(self) -> list[Spooled]:
        """Take over files of dead processes for this namespace and bucket; never raises.

        The process that gets a dead owner's lock renames its files to its own. A second copy of a
        held entry stays where it is until the first has left: that one may prove bad.
        """
        taken: list[Spooled] = []
        for owner in self._others():
            try:
                self._adopt_from(owner, taken)
            except (OSError, TierError) as exc:
                self._failed("adopt", exc)
        if taken:
            with self._lock:
                ordered = sorted(self._held.items(), key=lambda item: item[1].since_s)
                self._held = dict(ordered)
            self._counters.add("spool.adopted", len(taken))
        return taken

    def close(self) -> None:
        """Leave the held entries to the next process; never raises."""
        with self._locking:
            self._is_closed = True
            if self._lock_fd >= 0 and not self._held:
                self._unlink(self._lock_path(self._owner))
            self._end_lock()
        with self._lock:
            self._held.clear()
            self._nbytes = 0

    # -- owners ------------------------------------------------------------------------------

    def _lock_path(self, owner: str) -> str:
        return f"{self._folder}/{owner}.lock"

    def _new_path(self, digest: bytes) -> str:
        """Return a name that was never used, for a file of this process."""
        name = f"{self._own()}-{next(self._numbers)}--{digest.hex()}{OBJECT_SUFFIX}"
        return f"{self._folder}/{self._place}{name}"

    def _own(self) -> str:
        """Return the owner for new files; a new one if its lock file was deleted."""
        with self._locking:
            for _ in range(_ATTEMPTS):
                if self._is_closed:
                    raise TierError("the tier is closed")
                if self._lock_fd >= 0 and os.fstat(self._lock_fd).st_nlink:
                    return self._owner
                self._end_lock()
                self._owner = secrets.token_hex(8)
                self._lock_fd = self._take_lock(self._owner)
        raise TierError(f"locks in {self._folder} vanish as soon as they are made")

    def _take_lock(self, owner: str) -> int:
        """Take an owner's lock, creating its file if missing; -1 if another process has it."""
        fd = self._folders.open_own(self._lock_path(owner))
        try:
            if lock_file(fd):
                taken, fd = fd, -1
                return taken
            return -1
        finally:
            if fd >= 0:
                os.close(fd)

    def _end_lock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _others(self) -> set[str]:
        """Return other owners with files for this place, and those of locks without files.

        A place is a namespace and a bucket.
        """
        try:
            names = [] if self._is_closed else os.listdir(self._folder)
        except FileNotFoundError:
            return set()
        except OSError as exc:
            self._failed("adopt", exc)
            return set()
        owners = {name: parts.owner for name in names if (parts := SpoolFileName.parse(name))}
        ours = {owner for name, owner in owners.items() if name.startswith(self._place)}
        # A lock without files was left by a process that held nothing when it died.
        alone = {owner for name in names if (owner := owner_of_lock(name)) is not None}
        return (ours | alone - set(owners.values())) - {self._owner}

    def _adopt_from(self, owner: str, taken: list[Spooled]) -> None:
        fd = self._take_lock(owner)
        if fd < 0:  # it lives
            return
        try:
            # List again: it may have added files before it died, also for another place.
            names = [(name, SpoolFileName.parse(name)) for name in os.listdir(self._folder)]
            left = [(name, parts) for name, parts in names if parts and parts.owner == owner]
            is_empty = True
            for name, parts in left:
                is_ours = name.startswith(self._place)
                if not (is_ours and self._take(f"{self._folder}/{name}", parts.digest, taken)):
                    is_empty = False
            if is_empty:
                os.unlink(self._lock_path(owner))
        finally:
            os.close(fd)

    def _take(self, path: str, digest: bytes, taken: list[Spooled]) -> bool:
        """Hold a file of a dead process, unless the entry is held already."""
        if digest in self._held:
            return False
        found = os.lstat(path)
        spooled = Spooled(self._new_path(digest), digest, found.st_size, found.st_mtime)
        os.rename(path, spooled.path)
        with self._lock:
            is_held = digest in self._held
            if not is_held:
                self._held[digest] = spooled
                self._nbytes += spooled.nbytes
        if is_held:  # by a save that came meanwhile
            self._unlink(spooled.path)
        else:
            taken.append(spooled)
        return True

    # -- files -------------------------------------------------------------------------------

    def _link(self, source: str, target: str) -> int:
        """Give a file its name in the spool, whole or not at all; return its size."""
        os.link(source, target, follow_symlinks=False)
        found = os.lstat(target)
        if not stat.S_ISREG(found.st_mode):
            os.unlink(target)
            raise TierError(f"{source} is not a regular file")
        return found.st_size

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            self._failed("unspool", exc)

    def _remove_bad(self, spooled: Spooled, key: Key | None, reason: str) -> None:
        """Delete a bad file, and the entry of the tier that is the same file.

        Args:
            key: None if its header is bad. Then the next reader of the entry detects that.
        """
        try:
            inode = os.lstat(spooled.path).st_ino
            remove_bad(spooled.path)
        except FileNotFoundError:
            return
        except OSError as exc:
            self._failed("delete a bad entry", exc)
        else:
            path = f"{self._folders.objects}/{self._namespace}/{key.name}" if key else ""
            with suppress(OSError):
                if path and os.lstat(path).st_ino == inode:
                    os.unlink(path)
        self._counters.add("tier.bad_files")
        _log.warning(
            "spooled entry %s of %s was bad (%s); deleted",
            *(spooled.digest.hex(), self._namespace, reason),
        )

    # -- memory ------------------------------------------------------------------------------

    def _hold(self, spooled: Spooled) -> None:
        """Hold a save; remove an earlier one of the entry."""
        with self._lock:
            earlier = self._held.pop(spooled.digest, None)  # so that this one becomes the youngest
            self._held[spooled.digest] = spooled
            self._nbytes += spooled.nbytes - (earlier.nbytes if earlier is not None else 0)
        if earlier is not None:
            self._unlink(earlier.path)

    def _let_go(self, spooled: Spooled) -> bool:
        """Stop holding a save; return False if it was not held."""
        with self._lock:
            if self._held.get(spooled.digest) is not spooled:
                return False
            del self._held[spooled.digest]
            self._nbytes -= spooled.nbytes
            return True

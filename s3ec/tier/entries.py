# SPDX-License-Identifier: Apache-2.0
"""The entries of one namespace on the disk: lists them, opens them, deletes bad ones.

The file system is the truth; there is no database that could disagree with it. An entry is
byte-identical to the bucket's object, so it describes itself and a restart loses nothing.
Entries are not synced to the device, since the bucket keeps them: after a power cut a file
can have its full size and hold zeros. ``open`` checks header, identity and size, and with
``check_values`` the checksum; **a reader of an open entry checks that in any case**, and calls
``drop_bad`` when it differs. ``LocalKeys`` says from memory which entries are likely here.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError
from s3ec.identity import Key, digest_of_name, key_of_header
from s3ec.runtime import yield_gil
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.files import DiskErrors, Folders, open_entry
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.scan import entry_names

_log = logging.getLogger(__name__)

_PART_BYTES = 256 * 2**10


def read_header(fd: int, nbytes: int) -> Header:
    """Parse the front of an open file; reads at most 16 KiB, so a forged size costs no memory.

    Args:
        nbytes: Size of the file.

    Raises:
        CorruptEntryError: Not an entry, or one of another size.
        OSError: It cannot be read.
    """
    header = codec.parse_header(os.pread(fd, 8 + codec.HEADER_LIMIT, 0))
    if nbytes != header.total_bytes:
        raise CorruptEntryError(f"{nbytes} bytes, expected {header.total_bytes}", reason="length")
    return header


def check_place(header: Header, namespace: str, digest: bytes) -> Key:
    """Return the key of an entry that is stored under this digest in this namespace.

    Raises:
        CorruptEntryError: It was written for another place.
    """
    key = key_of_header(header.identifier, digest)
    if key is None:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    codec.check_identity(header, namespace=namespace, identifier=header.identifier)
    return key


def check_values(fd: int, header: Header) -> None:
    """Compare the values of an open file with its header's checksum.

    Reads them once, a part at a time: about 0.1 ms per MiB from the page cache.

    Raises:
        CorruptEntryError: They differ, or are too short.
        OSError: They cannot be read.
    """
    hashed, nbytes, done = codec.running_checksum(), header.shape.nbytes, 0
    buffer = memoryview(bytearray(min(nbytes, _PART_BYTES)))
    while done < nbytes:
        part = buffer[: nbytes - done]
        count = os.preadv(fd, [part], header.data_start + done)
        if count == 0:
            break
        hashed.update(part[:count])
        done += count
    codec.check_sum(header, done, hashed.hexdigest())


def remove_bad(path: str) -> None:
    """Delete a bad entry, or an empty folder that has an entry's name.

    Raises:
        FileNotFoundError: Nothing is there.
        OSError: The disk refuses.
    """
    try:
        os.unlink(path)
    except IsADirectoryError:
        os.rmdir(path)


class LocalKeys:
    """A set of digests that are believed to be here; a hint, callable from any thread.

    Other processes publish and evict in the same folder, so both answers can be stale: a
    wrong True costs one failed open, a wrong False one download.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._next: set[bytes] | None = None  # while a scan is read

    def __call__(self, key: Key) -> bool:
        return key.digest in self._digests

    def add(self, key: Key) -> None:
        """Add an entry that was just published here."""
        self.add_all((key.digest,))

    def add_all(self, digests: Sequence[bytes]) -> None:
        """Add entries that other processes published."""
        self._digests.update(digests)
        if (scanned := self._next) is not None:
            scanned.update(digests)

    def discard(self, key: Key) -> None:
        """Remove an entry that was not found on the disk."""
        self._digests.discard(key.digest)
        if (scanned := self._next) is not None:
            scanned.discard(key.digest)

    def replace(self, names: Iterable[str]) -> None:
        """Replace the set by a scan of the folder, which may take long; one scan at a time."""
        self._next = scanned = set()
        try:
            for name in names:
                scanned.add(digest_of_name(name))
            self._digests = scanned
        finally:
            self._next = None


class Entries:
    """The entries of one namespace, as one process sees and opens them.

    Blocking and thread-safe. Disk errors are counted, not raised. After ``close`` there are no
    entries any more.

    States of an entry on this node, each seen by all processes: absent; claimed (absent, and one
    process fetches it); here (``EntryWriter`` gave it its name). Eviction and ``drop_bad`` make it
    absent again. An open entry outlives all of that.
    """

    def __init__(
        self,
        folders: Folders,
        namespace: str,
        claims: Claims,
        disk_errors: DiskErrors,
        counters: Counters,
        *,
        check_values: bool,
    ) -> None:
        """Touch nothing yet.

        Args:
            check_values: True if ``open`` must read and hash the values as well.
        """
        self.namespace = namespace
        self.objects = str(folders.objects / namespace)
        self._claims = claims
        self._failed = disk_errors.record
        self._counters = counters
        self._hashes = check_values
        self._is_closed = False

    def close(self) -> None:
        """Report no entries from now on; open entries stay open."""
        self._is_closed = True

    def path(self, key: Key) -> str:
        """Return the path of one entry; no system call."""
        return f"{self.objects}/{key.name}"

    def uses(self) -> Iterator[tuple[str, int]]:
        """Yield object names of the entries here, with their last use in nanoseconds.

        As ``names``, with one more system call per entry.
        """
        for name in self.names():
            with suppress(OSError):
                yield name, os.lstat(f"{self.objects}/{name}").st_mtime_ns

    def names(self) -> Iterator[str]:
        """Yield object names of the entries here, in no order, as a walk finds them.

        About 3 us each; pauses 1 ms after every hundred or so, since it runs beside a scheduler.
        """
        return entry_names(self.objects, yield_gil)

    def open(self, key: Key) -> OpenEntry | None:
        """Open one entry: it can be read for as long as the result lives.

        A few system calls and one read of 16 KiB, or of the whole file with ``check_values``; no
        walk.

        Returns:
            The entry, whose reader checks the checksum. None if it is absent, or was bad (then
            it is deleted), or the disk refused (then it is counted).
        """
        if self._is_closed:
            return None
        path, fd, inode = self.path(key), -1, None
        try:
            fd = open_entry(path)
            found = os.fstat(fd)
            inode = found.st_ino
            header = read_header(fd, found.st_size)
            check_place(header, self.namespace, key.digest)
            verified_s = time.monotonic()
            if self._hashes:
                check_values(fd, header)
            taken, fd = fd, -1
            return OpenEntry(path, taken, header, verified_s=verified_s)
        except FileNotFoundError:
            pass
        except CorruptEntryError as exc:
            self._counters.add(f"corrupt.{exc.reason}")
            self.drop_bad(key, exc.reason, inode=inode)
        except OSError as exc:
            self._failed("open", exc)
        finally:
            if fd >= 0:
                os.close(fd)
        return None

    def open_or_claim(self, key: Key, *, ignore_claim: bool = False) -> OpenEntry | Claim | None:
        """Open an entry that is here, or claim the right to fetch it; never waits.

        Args:
            ignore_claim: True to fetch it even if another process, which may hang, has claimed it.

        Returns:
            The entry or a claim; None while another process (or Tier) fetches it.
        """
        for _ in range(2):  # it may arrive between the failed open and the claim
            found = self.open(key) or self._claim(key)
            if found is not None:
                return found
            if not self.contains(key):
                return Claim() if ignore_claim else None
        return Claim()  # it is here but cannot be opened: the disk refuses

    def _claim(self, key: Key) -> Claim | None:
        """Claim an entry; None if it is here, or another process fetches it."""
        claim = self._claims.take(key.digest)
        # In this order: the previous holder of the claim has published by now.
        if claim is not None and self.contains(key):
            self._claims.release(claim)
            return None
        return claim

    def contains(self, key: Key) -> bool:
        """Return True if a file has this name: one stat, nothing is read or verified."""
        if self._is_closed:
            return False
        try:
            return stat.S_ISREG(os.lstat(f"{self.objects}/{key.name}").st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            self._failed("contains", exc)
            return False

    def drop_bad(self, key: Key, reason: str, *, inode: int | None = None) -> None:
        """Delete a bad entry, so that it is not opened again. Counted; never raises.

        Args:
            reason: One word, such as ``CorruptEntryError.reason``.
            inode: Inode of the bad file: a file published since stays. None for any file.
        """
        if self._is_closed:
            return
        path = self.path(key)
        try:
            if inode is not None and os.lstat(path).st_ino != inode:
                return
            remove_bad(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            self._failed("delete a bad entry", exc)
            return
        self._counters.add("tier.bad_files")
        _log.warning("entry %s of %s was bad (%s); deleted", key.name, self.namespace, reason)

# SPDX-License-Identifier: Apache-2.0
"""The entries of one namespace on the disk: where they lie, and look, pin, drop, set aside.

A bad entry is moved to the quarantine: out of every reader's way, and kept for people to look at.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from s3ec import codec
from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.tier.files import Folders, require_own_folders
from s3ec.tier.pins import Held, Pin, Pins


class EntryPaths:
    """Names only; no system call."""

    def __init__(self, folders: Folders, namespace: str) -> None:
        self.namespace = namespace
        self.objects = str(folders.objects / namespace)
        self._above = (*folders.above, str(folders.objects), self.objects)

    def path(self, key: Key) -> str:
        """The file of one entry."""
        return f"{self.objects}/{key.name}"

    def parents(self, key: Key) -> Sequence[str]:
        """Its folders from the root down; see ``require_own_folders``."""
        folder, _, fan_out = key.name.rpartition("/")[0].rpartition("/")
        lora = (f"{self.objects}/{folder}",) if folder else ()
        return (*self._above, *lora, f"{lora[0] if lora else self.objects}/{fan_out}")


_PART_BYTES = 256 * 2**10


class _Memory(threading.local):
    def __init__(self) -> None:
        self.part = memoryview(bytearray(_PART_BYTES))


_memory = _Memory()


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


def check_values(fd: int, header: Header) -> None:
    """Compare the values of an open file with its header's checksum.

    Reads them once, a part at a time: about 0.1 ms per MiB that the kernel has in memory.

    Raises:
        CorruptEntryError: They are others, or fewer.
        OSError: They cannot be read.
    """
    hashed = codec.running_checksum()
    nbytes = header.shape.nbytes
    done = 0
    while done < nbytes:
        part = _memory.part[: min(nbytes - done, _PART_BYTES)]
        count = os.preadv(fd, [part], header.data_start + done)
        if count == 0:
            break
        hashed.update(part[:count])
        done += count
    codec.check_sum(header, done, hashed.hexdigest())


KEPT_FILES = 32
# A few bad videos must not crowd out the entries that work.
KEPT_BYTES = 1 << 28


class Quarantine:
    """The folder of bad entries: the newest KEPT_FILES, together at most KEPT_BYTES.

    The newest is kept whatever its size.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def take(self, source: str, label: str, reason: str, *, mtime_ns: int) -> bool:
        """Move whatever stands under ``source`` here.

        Args:
            label: Namespace and digest.
            reason: A word or two; becomes part of the file name.
            mtime_ns: When, for the order of what is kept.

        Returns:
            False where there was nothing to move.

        Raises:
            OSError, TierError: It could not be moved.
        """
        word = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:32] or "unknown"
        target = f"{self._folders.quarantine}/{label}-{word}"
        for last in (False, True):
            try:
                require_own_folders((*self._folders.above, str(self._folders.quarantine)))
                os.rename(source, target)
                break
            except FileNotFoundError:
                if not os.path.lexists(source):
                    return False
                if last:
                    raise
                self._folders.make()
        # After the move: before it, the evictor would take the bad entry for a fresh one.
        with suppress(OSError):
            os.utime(target, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        self._prune()
        return True

    def _prune(self) -> None:
        """Drop what is past the bounds, oldest first. Folders stay: they are not our writing."""
        found: list[tuple[int, int, str]] = []
        with os.scandir(self._folders.quarantine) as items:
            for item in items:
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        found.append((status.st_mtime_ns, status.st_size, item.path))
        found.sort(reverse=True)
        total = 0
        for rank, (_, nbytes, path) in enumerate(found):
            total += nbytes
            if rank and (rank >= KEPT_FILES or total > KEPT_BYTES):
                with suppress(OSError):
                    os.unlink(path)


_log = logging.getLogger(__name__)


class Entries:
    """Blocking and thread-safe; nothing here raises for what the disk refuses."""

    def __init__(
        self,
        paths: EntryPaths,
        pins: Pins,
        quarantine: Quarantine,
        clock: Callable[[], float],
        counters: Counters,
        failed: Callable[[str, OSError | TierError], None],
        *,
        check_values: bool,
    ) -> None:
        self._paths = paths
        self._pins = pins
        self._quarantine = quarantine
        self._clock = clock
        self._counters = counters
        self._failed = failed
        self._check_values = check_values

    def pin(self, key: Key) -> Pin | None:
        """See ``Tier.pin``."""
        try:
            require_own_folders(self._paths.parents(key))
            held = self._pins.hold(self._paths.path(key), key.digest)
            return None if held is None else self._checked(key, held)
        except FileNotFoundError:
            return None
        except CorruptEntryError as exc:  # not even a file
            self.quarantine(key, exc.reason)
        except (OSError, TierError) as exc:
            self._failed("pin", exc)
        return None

    def unpin(self, pin: Pin) -> None:
        """See ``Tier.unpin``."""
        path = str(pin.path)
        if self._pins.owns(path):
            try:
                self._pins.drop(path)
            except (OSError, TierError) as exc:
                self._failed("unpin", exc)

    def contains(self, key: Key) -> bool:
        """See ``Tier.contains``."""
        try:
            return stat.S_ISREG(os.lstat(self._paths.path(key)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            self._failed("contains", exc)
            return False

    def _evict(self, key: Key) -> None:
        """Drop the local copy; pins of it stay."""
        try:
            require_own_folders(self._paths.parents(key))
            os.unlink(self._paths.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, TierError) as exc:
            self._failed("evict", exc)

    def quarantine(self, key: Key, reason: str) -> None:
        """See ``Tier.quarantine``."""
        path = self._paths.path(key)
        label = f"{self._paths.namespace}--{key.digest.hex()}"
        try:
            require_own_folders(self._paths.parents(key))
            now_ns = int(self._clock() * 1e9)
            if not self._quarantine.take(path, label, reason, mtime_ns=now_ns):
                return
        except FileNotFoundError:
            return
        except (OSError, TierError) as exc:
            self._failed("quarantine", exc)
            self._evict(key)  # the evidence is worth less than the next reader's time
            if os.path.lexists(path):
                return
        self._counters.add("tier.quarantined")
        _log.warning(
            "entry %s of %s was bad (%s); set aside", key.name, self._paths.namespace, reason
        )

    def _checked(self, key: Key, held: Held) -> Pin | None:
        """Look into what was linked, and touch it; a bad entry is quarantined."""
        try:
            found = os.fstat(held.fd)
            try:
                header = read_header(held.fd, found.st_size)
                codec.check_identity(header, namespace=self._paths.namespace, identifier=key.stored)
                if self._check_values:
                    check_values(held.fd, header)
            except CorruptEntryError as exc:
                self._counters.add(f"corrupt.{exc.reason}")
                self._pins.drop(held.path)
                # Unless somebody has just published a better one.
                if os.lstat(self._paths.path(key)).st_ino == found.st_ino:
                    self.quarantine(key, exc.reason)
                return None
            try:
                os.utime(held.fd, ns=(found.st_atime_ns, int(self._clock() * 1e9)))
            except OSError as exc:  # the entry is as good as before
                self._failed("touch", exc)
        except BaseException:
            self._pins.drop(held.path)
            raise
        finally:
            os.close(held.fd)
        return Pin(Path(held.path), found.st_size, header)

# SPDX-License-Identifier: Apache-2.0
"""The node tier: entries as files, shared by every process of the node.

The file system is the truth; there is no database that could disagree with it. An entry is
byte-identical to the bucket's object, so it describes itself and a restart loses nothing.
Entries are not synced to the device, since the bucket keeps them: after a power cut a file
can have its full size and hold zeros. ``pin`` checks header, identity and size; **whoever
reads a pinned file checks its checksum** and calls ``quarantine`` when it differs.

Counters: ``tier.published``, ``tier.published_bytes``, ``tier.evicted``,
``tier.evicted_bytes``, ``tier.quarantined``, ``tier.pin_copies`` and ``tier.spool_copies`` (no
hard links here), ``tier.swept`` (left-overs of dead processes) and ``tier.errors`` (what the disk
refused).
"""

from __future__ import annotations

import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path

from s3ec import codec
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key, is_namespace_name
from s3ec.tier.audit import audit
from s3ec.tier.census import Usage, take_census
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import (
    AtomicFile,
    Folders,
    make_folder,
    note_use,
    require_real_folders,
    write_atomic,
)
from s3ec.tier.headers import read_header
from s3ec.tier.incoming import Incoming
from s3ec.tier.ledger import Ledger
from s3ec.tier.pins import Held, Pin, Pins
from s3ec.tier.quarantine import Quarantine
from s3ec.tier.refusals import Refusals
from s3ec.tier.spool import Spool, SpoolParts

_log = logging.getLogger(__name__)

# To write one entry: the folder may be missing, the disk full, the folder evicted meanwhile.
_ATTEMPTS = 4


class Tier:
    """One namespace's view of the node's folder. All methods are blocking and thread-safe.

    The budget is for the whole folder: eviction takes the least recently used entry of any
    namespace. Before ``open`` and after ``close`` the tier is empty: ``pin`` answers None and
    ``publish`` raises.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        counters: Counters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is touched before ``open``.

        Args:
            root: The folder; may itself be a symbolic link, nothing below it may.
            namespace: ``Namespace.name``.
            budget_bytes: High water mark.
            min_free_bytes: Free space of the disk that publishing never goes below.
            clock: Seconds since the epoch; may jump, either way.

        Raises:
            ValueError: Not a namespace's name.
        """
        if not is_namespace_name(namespace):
            raise ValueError(f"not a namespace's name: {namespace!r:.100}")
        self._given_root = Path(root)
        self._namespace = namespace
        self._budget_bytes = budget_bytes
        self._min_free_bytes = min_free_bytes
        self._counters = counters
        self._ledger = Ledger(clock)
        self._opened = False
        self._settle(self._given_root)
        _TIERS.add(self)

    def _settle(self, root: Path) -> None:
        self._folders = Folders(root)
        refusals = Refusals(root, self._counters)
        self._failed = refusals.note
        self._claims = Claims(self._folders, self._namespace, refusals)
        self._objects = str(self._folders.objects / self._namespace)
        self._above = (str(self._folders.version), str(self._folders.objects), self._objects)
        self._pins = Pins(self._folders, self._counters, min_free_bytes=self._min_free_bytes)
        self._quarantine = Quarantine(self._folders)
        self._spools: list[Spool] = []
        self._evictor = Evictor(
            self._folders,
            self._ledger,
            self._counters,
            budget_bytes=self._budget_bytes,
            min_free_bytes=self._min_free_bytes,
        )

    def open(self) -> None:
        """Make and check the folders, sweep what dead processes left, count the bytes.

        Raises:
            TierError: The folder is not ours alone, or cannot be written; names the fix.
        """
        if self._opened:
            return
        try:
            self._settle(Path(os.path.realpath(self._given_root)))
            self._folders.make()
            make_folder(Path(self._objects))
            self._evictor.open()
            self._open_pins()
        except OSError as exc:
            self._pins.close()
            raise TierError(
                f"cannot use {self._given_root}: {exc}; set `cache_dir` to a folder on a local "
                "disk that this user may write"
            ) from exc
        self._opened = True

    def close(self) -> None:
        """Drop our pins; entries and spool stay. Never raises; more than once is fine."""
        self._opened = False
        self._claims.close()
        self._pins.close()
        for spool in self._spools:
            spool.close()

    def open_spool(self, destination: str) -> Spool:
        """A place to keep entries until the bucket has them; ends with this tier.

        Args:
            destination: 16 hex digits that stand for the bucket and the folder in it.

        Raises:
            TierError: The tier is not open.
        """
        if not self._opened:
            raise TierError("the tier is not open")
        parts = SpoolParts(
            self._folders,
            self._ledger,
            self._quarantine,
            self._counters,
            self._min_free_bytes,
            self._failed,
        )
        spool = Spool(parts, namespace=self._namespace, destination=destination)
        self._spools.append(spool)
        return spool

    def pin_folder(self) -> Path:
        """Where this process's pins lie now; its name is random, and no other process's.

        Raises:
            TierError: The tier is not open, or the folder cannot be made.
        """
        if not self._opened:
            raise TierError("the tier is not open")
        try:
            return Path(self._pins.folder())
        except OSError as exc:
            raise TierError(f"cannot make a folder for pins: {exc}") from exc

    def pin(self, key: Key) -> Pin | None:
        """Hold one entry: it can be read under ``Pin.path`` until unpin.

        A few system calls and one read of 16 KiB; no walk. The time of last use is touched.

        Returns:
            None where the entry is absent, or was bad (then it is quarantined), or the disk
            refused (then it is counted). The checksum is for the reader to check.
        """
        if not self._opened:
            return None
        try:
            require_real_folders(self._parents(key))
            held = self._pins.hold(self._path(key), key.digest)
            return None if held is None else self._checked(key, held)
        except FileNotFoundError:
            return None
        except CorruptEntryError as exc:  # not even a file
            self.quarantine(key, exc.reason)
        except (OSError, TierError) as exc:
            self._failed("pin", exc)
        return None

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin; never raises.

        More than once is fine. A pin of another process (a forked child's parent) is left alone.
        """
        path = str(pin.path)
        if self._pins.owns(path):
            try:
                self._pins.drop(path)
            except OSError as exc:
                self._failed("unpin", exc)

    def publish(
        self, key: Key, pieces: Sequence[bytes | memoryview], *, spool: Spool | None = None
    ) -> None:
        """Write one entry, whole or not at all; a present one is replaced.

        May evict, which walks the folder (about 10 us per file there); most calls don't.

        Args:
            pieces: The verified bytes of the object, in order; not joined, not copied.
            spool: Holds the entry from before it appears until the bucket has it, so that a
                process killed at any point leaves no entry here that nobody uploads.

        Raises:
            TierError: Closed, larger than the budget, or the disk is full or failing. The
                spool may hold the entry nevertheless.
        """
        if not self._opened:
            raise TierError("the tier is not open")
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            self._evictor.need_room(nbytes)
            self._write(key, pieces, nbytes, spool)
        except OSError as exc:
            raise TierError(f"cannot write {self._path(key)}: {exc}") from exc
        if spool is None:  # which has told the ledger
            self._ledger.add(nbytes)
        self._counters.add("tier.published")
        self._counters.add("tier.published_bytes", nbytes)

    def begin(self, key: Key, first: bytes | memoryview, verifier: codec.Verifier) -> Incoming:
        """Receive one large entry part by part; it appears when the last one was good.

        Args:
            first: Its first bytes, which the verifier has been made from.

        Raises:
            TierError: As for publish.
        """
        if not self._opened:
            raise TierError("the tier is not open")
        nbytes = verifier.header.total_bytes
        try:
            self._evictor.need_room(nbytes)
            file = self._open_file(key)
        except OSError as exc:
            raise TierError(f"cannot write {self._path(key)}: {exc}") from exc
        return Incoming(
            file,
            first,
            verifier,
            make_room=lambda wanted: self._evictor.make_room(wanted, at_least_bytes=wanted),
            commit=partial(self._commit, key),
        )

    def pin_or_claim(self, key: Key, *, at_any_rate: bool = False) -> Pin | Claim | None:
        """Pin an entry that is here, or claim the right to fetch it; never waits.

        Args:
            at_any_rate: Claim it also while somebody else has it, who may hang.

        Returns:
            None while another process (or Tier) fetches it.
        """
        if not self._opened:
            return Claim()
        for _ in range(2):
            pin = self.pin(key)
            if pin is not None:
                return pin
            claim = self._claims.take(key.digest)
            if claim is None:
                return Claim() if at_any_rate else None
            if not self.contains(key):
                return claim
            self._claims.release(claim)  # it came just before we had the claim
        return Claim()  # here, and cannot be pinned: the disk refuses

    def is_claimed(self, key: Key) -> bool:
        """Whether somebody fetches this entry at the moment; one system call."""
        return self._opened and self._claims.is_taken(key.digest)

    def release(self, claim: Claim) -> None:
        """Give a claim back, after the entry was published or was not to be had."""
        self._claims.release(claim)

    def contains(self, key: Key) -> bool:
        """Whether a file stands under this name: one stat, nothing read, nothing promised."""
        if not self._opened:
            return False
        try:
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            self._failed("contains", exc)
            return False

    def evict(self, key: Key) -> None:
        """Drop the local copy (it can be fetched again); pins of it stay. Never raises."""
        if not self._opened:
            return
        try:
            require_real_folders(self._parents(key))
            os.unlink(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, TierError) as exc:
            self._failed("evict", exc)

    def quarantine(self, key: Key, reason: str) -> None:
        """Move the entry away so that nobody pins it again. Counted; never raises.

        Args:
            reason: One word, such as ``CorruptEntryError.reason``.
        """
        if not self._opened:
            return
        path = self._path(key)
        label = f"{self._namespace}--{key.digest.hex()}"
        try:
            require_real_folders(self._parents(key))
            if not self._quarantine.take(path, label, reason, mtime_ns=self._ledger.use_ns()):
                return
        except FileNotFoundError:
            return
        except (OSError, TierError) as exc:
            self._failed("quarantine", exc)
            self.evict(key)  # the evidence is worth less than the next reader's time
            if os.path.lexists(path):
                return
        self._counters.add("tier.quarantined")
        _log.warning("entry %s of %s was bad (%s); set aside", key.name, self._namespace, reason)

    def make_room(self, incoming_bytes: int = 0) -> int:
        """Evict where the budget or the disk's free space asks for it; walks the folder.

        Returns:
            Bytes freed; 0 also where another thread or process is at it (this one does not
            wait), where everything left is pinned, or where the disk refused (counted).
        """
        if not self._opened:
            return 0
        try:
            return self._evictor.make_room(incoming_bytes)
        except (OSError, TierError) as exc:
            self._failed("make_room", exc)
            return 0

    def names(self) -> list[str]:
        """Object names of this namespace's entries, in no order; walks the folder."""
        entries = take_census(self._folders).entries
        return [entry.name for entry in entries if entry.namespace == self._namespace]

    def usage(self) -> Usage:
        """Count what the folder holds; walks it."""
        return take_census(self._folders).usage()

    def check(self) -> list[str]:
        """Audit everything, checksums included: reads every byte of every namespace.

        Returns:
            One line per complaint; empty when all is well. Nothing is changed.
        """
        return audit(self._folders, now_s=self._ledger.now_s())

    def estimated_bytes(self) -> int:
        """The running total that decides when publish evicts; no system call.

        Never below the truth as far as this Tier's own doing goes; what other processes
        publish shows at the next walk.
        """
        return self._ledger.estimated_bytes()

    def _open_pins(self) -> None:
        try:
            self._pins.open()
        except OSError as exc:
            # A disk that filled up while nobody evicted must not keep the next one out.
            if exc.errno not in (ENOSPC, EDQUOT):
                raise
            if not self._evictor.make_room(0, at_least_bytes=1):
                raise
            self._pins.open()

    def _path(self, key: Key) -> str:
        return f"{self._objects}/{key.name}"

    def _parents(self, key: Key) -> Sequence[str]:
        folder, _, fan_out = key.name.rpartition("/")[0].rpartition("/")
        lora = (f"{self._objects}/{folder}",) if folder else ()
        return (*self._above, *lora, f"{lora[0] if lora else self._objects}/{fan_out}")

    def _checked(self, key: Key, held: Held) -> Pin | None:
        """Look into what was linked, and touch it; a bad entry is quarantined."""
        try:
            found = os.fstat(held.fd)
            try:
                header = read_header(held.fd, found.st_size)
                codec.check_identity(header, namespace=self._namespace, identifier=key.identifier)
            except CorruptEntryError as exc:
                self._pins.drop(held.path)
                # Unless somebody has just published a better one.
                if os.lstat(self._path(key)).st_ino == found.st_ino:
                    self.quarantine(key, exc.reason)
                return None
            try:
                note_use(held.fd, found, self._ledger.use_ns(found.st_mtime_ns))
            except OSError as exc:  # the entry is as good as before
                self._failed("touch", exc)
        except BaseException:
            self._pins.drop(held.path)
            raise
        finally:
            os.close(held.fd)
        return Pin(Path(held.path), found.st_size, header)

    def _write(
        self, key: Key, pieces: Sequence[bytes | memoryview], nbytes: int, spool: Spool | None
    ) -> None:
        """Write; again after a vanished folder and after a full disk, a few times at most."""
        path, parents = self._path(key), self._parents(key)
        first = None if spool is None else partial(spool.add, key)
        missing = False
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                if missing:
                    self._folders.make_below(Path(parents[-1]))
                require_real_folders(parents)
                write_atomic(path, pieces, mtime_ns=self._ledger.use_ns(), first=first)
                return
            except FileNotFoundError:
                if last:
                    raise
                missing = True
            except OSError as exc:
                # statvfs shows neither quotas nor a lack of inodes: without this a full one
                # would stay full.
                if last or exc.errno not in (ENOSPC, EDQUOT):
                    raise
                if not self._evictor.make_room(nbytes, at_least_bytes=nbytes):
                    raise

    def _open_file(self, key: Key) -> AtomicFile:
        parents = self._parents(key)
        try:
            require_real_folders(parents)
        except FileNotFoundError:
            self._folders.make_below(Path(parents[-1]))
        return AtomicFile(self._path(key))

    def _commit(self, key: Key, file: AtomicFile) -> None:
        require_real_folders(self._parents(key))
        file.commit(mtime_ns=self._ledger.use_ns())
        self._ledger.add(file.nbytes)
        self._counters.add("tier.published")
        self._counters.add("tier.published_bytes", file.nbytes)

    def _after_fork(self) -> None:
        self._ledger.after_fork()
        self._claims.after_fork()
        self._pins.after_fork()
        for spool in self._spools:
            spool.after_fork()


_TIERS: weakref.WeakSet[Tier] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for tier in list(_TIERS):
        tier._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

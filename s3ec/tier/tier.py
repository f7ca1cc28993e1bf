# SPDX-License-Identifier: Apache-2.0
"""The node tier: entries as files, shared by every process of the node.

The file system is the truth; there is no database that could disagree with it. An entry is
byte-identical to the bucket's object, so it describes itself and a restart loses nothing.
Entries are not synced to the device, since the bucket keeps them: after a power cut a file
can have its full size and hold zeros. ``pin`` checks header, identity and size, and with
``check_values`` the checksum; **whoever reads a pinned file checks that in any case**, and calls
``quarantine`` when it differs. Which entries are believed to be here is answered from memory.

Counters: ``tier.published``, ``tier.published_bytes``, ``tier.evicted``, ``tier.evicted_bytes``,
``tier.quarantined``, ``tier.pin_copies`` and ``tier.spool_copies`` (no hard links here),
``tier.swept`` (left-overs of dead processes) and ``tier.errors`` (what the disk refused).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path

from s3ec import runtime
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key, digest_of_name, is_namespace_name
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.entries import Entries, EntryPaths, Quarantine
from s3ec.tier.entry_writer import Intake, Publisher
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import DiskErrors, Folders, make_folder
from s3ec.tier.index_files import IndexFiles
from s3ec.tier.pins import Pin, Pins
from s3ec.tier.scan import entry_names, yield_gil
from s3ec.tier.spool import Spool, SpoolParts


class LocalKeys:
    """A set of digests; a hint, callable from any thread.

    Other processes publish and evict in the same folder, so both answers can be stale: a
    wrong True costs one look at the disk, a wrong False one download.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._next: set[bytes] | None = None  # while a scan is read

    def __call__(self, key: Key) -> bool:
        return key.digest in self._digests

    def add(self, key: Key) -> None:
        """The entry was just published here."""
        self._digests.add(key.digest)
        if (scanned := self._next) is not None:
            scanned.add(key.digest)

    def discard(self, key: Key) -> None:
        """A look at the disk did not find it."""
        self._digests.discard(key.digest)
        if (scanned := self._next) is not None:
            scanned.discard(key.digest)

    def replace(self, names: Iterable[str]) -> None:
        """Start over from a scan of the folder, which may take its time; one scan at a time."""
        self._next = scanned = set()
        try:
            for name in names:
                scanned.add(digest_of_name(name))
            self._digests = scanned
        finally:
            self._next = None


class Tier:
    """One namespace's view of the node's folder. All methods are blocking and thread-safe.

    The budget is for the whole folder: eviction takes the least recently used entry of any
    namespace. Before ``open`` and after ``close`` the tier is empty: ``pin`` answers None and
    ``publish`` raises.

    Attributes:
        folders: Where things lie. This and what follows is for who is made after ``open``.
        claims: Who fetches what, among all processes of the node.
        intake: What comes from the bucket, published and pinned in one go.
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
        check_values: bool = False,
    ) -> None:
        """Nothing is touched before ``open``.

        Args:
            root: The folder; may itself be a symbolic link, nothing below it may.
            namespace: ``Namespace.name``.
            budget_bytes: High water mark.
            min_free_bytes: Free space of the disk that publishing never goes below.
            clock: Seconds since the epoch; may jump, either way.
            check_values: Have ``pin`` read and hash the values as well.

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
        self._clock = clock
        self._check_values = check_values
        self._opened = False
        self._settle(self._given_root)

    def _settle(self, root: Path) -> None:
        self.folders = Folders(root)
        disk_errors = DiskErrors(root, self._counters)
        self._failed = disk_errors.record
        self.claims = Claims(self.folders, self._namespace, disk_errors)
        self._paths = EntryPaths(self.folders, self._namespace)
        self._pins = Pins(self.folders, self._counters, min_free_bytes=self._min_free_bytes)
        self._quarantine = Quarantine(self.folders)
        self._spools: list[Spool] = []
        self._evictor = Evictor(
            self.folders,
            self._clock,
            self._counters,
            budget_bytes=self._budget_bytes,
            min_free_bytes=self._min_free_bytes,
            failed=self._failed,
        )
        self._publisher = Publisher(
            self.folders, self._paths, self._evictor, self._clock, self._counters
        )
        self._entries = Entries(
            self._paths,
            self._pins,
            self._quarantine,
            self._clock,
            self._counters,
            self._failed,
            check_values=self._check_values,
        )
        self.intake = Intake(self._publisher, self._pins, self._entries, self.claims)

    def open(self) -> None:
        """Make and check the folders, and sweep what dead processes left.

        Costs the same however many entries there are: the total is read from a file that all
        processes keep. Where it is missing or bad, the first publish has it counted in the
        background, and not more than 1/64 of the budget is published before.

        Raises:
            TierError: The folder is not ours alone, or cannot be written; names the fix.
        """
        if self._opened:
            return
        try:
            self._settle(Path(os.path.realpath(self._given_root)))
            runtime.keep_files(f"{self.folders.version}/")
            fresh = not os.path.lexists(self.folders.version)
            self.folders.make()
            make_folder(Path(self._paths.objects))
            self._evictor.open(fresh=fresh)
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
        self._evictor.close()
        self.claims.close()
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
        self._require_open()
        parts = SpoolParts(
            self.folders,
            self._clock,
            self._evictor.account,
            self._quarantine,
            self._counters,
            self._min_free_bytes,
            self._failed,
        )
        spool = Spool(parts, namespace=self._namespace, destination=destination)
        self._spools.append(spool)
        return spool

    def open_index(self) -> IndexFiles:
        """Where this namespace's files of the index lie on this node.

        Raises:
            TierError: The tier is not open.
        """
        self._require_open()
        return IndexFiles(self.folders, self._namespace, self._publisher, self.claims)

    def pin_folder(self) -> Path:
        """Where this process's pins lie now; its name is random, and no other process's.

        Raises:
            TierError: The tier is not open, or the folder cannot be made.
        """
        self._require_open()
        try:
            return Path(self._pins.folder())
        except OSError as exc:
            raise TierError(f"cannot make a folder for pins: {exc}") from exc

    def pin(self, key: Key) -> Pin | None:
        """Hold one entry: it can be read under ``Pin.path`` until unpin.

        A few system calls and one read of 16 KiB, or of the whole file with ``check_values``; no
        walk. The time of last use is touched.

        Returns:
            None where the entry is absent, or was bad (then it is quarantined), or the disk
            refused (then it is counted). The reader checks the checksum.
        """
        return self._entries.pin(key) if self._opened else None

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin; never raises.

        More than once is fine. A pin of another process (a forked child's parent) is left alone.
        """
        self._entries.unpin(pin)

    def publish(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        *,
        spool: Spool | None = None,
    ) -> None:
        """Write one entry, whole or not at all; a present one is replaced, its use included.

        Eviction walks the folder (about 10 us per file there), in a thread that starts a
        little before it is needed. This call waits for a walk only where it would break the
        budget or the free-space floor otherwise.

        Args:
            pieces: The verified bytes of the object, in order; not joined, not copied.
            spool: Holds the entry from before it appears until the bucket has it, so that a
                process killed at any point leaves no entry here that nobody uploads.

        Raises:
            TierError: Closed, larger than the budget, or the disk is full or failing. The
                spool may hold the entry nevertheless.
        """
        self._require_open()
        hold = None if spool is None else partial(spool.add, key)
        # The spool tells the running total.
        self._publisher.publish(key, pieces, hold=hold, counted=spool is not None)

    def pin_or_claim(self, key: Key, *, ignore_claim: bool = False) -> Pin | Claim | None:
        """Pin an entry that is here, or claim the right to fetch it; never waits.

        Args:
            ignore_claim: Claim it also while somebody else has it, who may hang.

        Returns:
            None while another process (or Tier) fetches it.
        """
        if not self._opened:
            return Claim()
        for _ in range(2):  # it may come between the look for it and the claim
            found = self.pin(key) or self.intake.try_claim(key)
            if found is not None:
                return found
            if not self.contains(key):
                return Claim() if ignore_claim else None
        return Claim()  # here, and cannot be pinned: the disk refuses

    def contains(self, key: Key) -> bool:
        """Whether a file stands under this name: one stat, nothing read, nothing promised."""
        return self._opened and self._entries.contains(key)

    def quarantine(self, key: Key, reason: str) -> None:
        """Move the entry away so that nobody pins it again. Counted; never raises.

        Args:
            reason: One word, such as ``CorruptEntryError.reason``.
        """
        if self._opened:
            self._entries.quarantine(key, reason)

    def names(self) -> Iterator[str]:
        """Object names of this namespace's entries, in no order, as a walk finds them.

        About 3 us each; rests 1 ms after every hundred or so, since it runs beside a scheduler.
        """
        return entry_names(self._paths.objects, yield_gil)

    def _require_open(self) -> None:
        if not self._opened:
            raise TierError("the tier is not open")

    def _open_pins(self) -> None:
        try:
            self._pins.open()
        except OSError as exc:
            # A disk that filled up while nobody evicted must not keep the next one out.
            full = exc.errno in (ENOSPC, EDQUOT)
            if not full or not self._evictor.make_room(0, at_least_bytes=1):
                raise
            self._pins.open()

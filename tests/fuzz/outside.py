# SPDX-License-Identifier: Apache-2.0
"""What lies around a scheduler half, played: bucket, index, this node's tier, fetches and saves.

Time stands still until the workload moves it, and a fetch or an upload ends when the workload says
so: a run depends on its seed alone. Entries are real files in s3ec's format. Each is evicted as
soon as it is open, so the real worker half reads what is held open for it, or fails.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from s3ec import codec
from s3ec.connector import saves
from s3ec.connector.messages import Save
from s3ec.counters import Counters
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.tier.entries import LocalKeys
from s3ec.tier.open_entry import OpenEntry
from tests.support.clock import Clock
from tests.support.fake_index import FakeIndex
from tests.unit.tier.cases import key_of

WIDTH = 4
FIRST_WEIGHTS = 1


class BrokenPromiseError(Exception):
    """Something happened that must not; a real engine would end, answer wrongly, or leak.

    Attributes:
        kind: A few words that all of its kind share.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@functools.lru_cache(4096)
def embedding(identifier: str, rows: int, weights: int) -> torch.Tensor:
    """What an encoder makes of one picture; never to be written to.

    Returns:
        float32, shape (rows, WIDTH); each row says whose it is, of how many, by which weights,
        and its place.
    """
    made = torch.empty(rows, WIDTH)
    made[:, 0] = int(hashlib.sha256(identifier.encode()).hexdigest()[:5], 16)
    made[:, 1] = rows
    made[:, 2] = weights
    made[:, 3] = torch.arange(rows)
    return made


@dataclass(frozen=True, slots=True)
class Stored:
    """What the bucket or the tier holds under one identifier."""

    rows: int
    weights: int
    modality: str = "image"


class EntryFiles:
    """Entries as files, each written once for all runs of a process, and open copies of them."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self._folder = folder
        self._namespace = namespace
        self._written: dict[tuple[str, Stored], tuple[Path, codec.Header]] = {}
        self._numbers = itertools.count()

    def open(self, identifier: str, stored: Stored) -> OpenEntry:
        """An entry, open and without a name."""
        source, header = self._written.get((identifier, stored)) or self._write(identifier, stored)
        path = f"{self._folder}/open-{next(self._numbers)}"
        shutil.copyfile(source, path)
        entry = OpenEntry(path, os.open(path, os.O_RDONLY), header, verified_s=0.0)
        os.unlink(path)
        return entry

    def _write(self, identifier: str, stored: Stored) -> tuple[Path, codec.Header]:
        values = embedding(identifier, stored.rows, stored.weights)
        described = saves.describe(
            values, identifier=identifier, namespace=self._namespace, modality=stored.modality
        )
        blob = b"".join(saves.encode(described, values))
        header = codec.verify(blob, namespace=self._namespace, identifier=identifier)
        path = self._folder / f"entry-{next(self._numbers)}"
        path.write_bytes(blob)
        self._written[identifier, stored] = path, header
        return path, header


class Outside:
    """Bucket, index and tier as one process sees them.

    Attributes:
        bucket: Identifier to what the bucket holds; the first writer wins.
        tier: The same of this node's disk.
        weights: Of the model that is loaded now; the namespace stands for the first.
        down: Whether the breaker is open.
        hung: Whether the disk does not answer.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.bucket: dict[str, Stored] = {}
        self.tier: dict[str, Stored] = {}
        self.local = LocalKeys()
        self.index = FakeIndex(Counters(), clock)
        self.weights = FIRST_WEIGHTS
        self.store = SimpleNamespace(is_open=False)
        self.disk = SimpleNamespace(hangs=False)

    def upload(self, identifier: str, stored: Stored) -> None:
        """Somebody's upload ends."""
        self.bucket.setdefault(identifier, stored)

    def publish(self, identifier: str, stored: Stored) -> None:
        """An entry comes to this node's disk."""
        self.tier[identifier] = stored

    def evict(self, identifier: str) -> None:
        """The disk gives an entry up; who believed it to be there learns it at the next look."""
        self.tier.pop(identifier, None)


class PlayedPrefetcher:
    """Fetches end when the workload says so, by what is there then. Every entry is accounted for.

    It plays the residents as well: what was fetched once is granted at once for a while.

    Attributes:
        open: Identifiers of fetches under way.
        live: Entries that were handed out and not let go of, by path.
        misfits: Identifiers whose entry did not fit who asked.
    """

    def __init__(self, outside: Outside, files: EntryFiles, is_read: Callable[[str], bool]) -> None:
        """Begin with nothing.

        Args:
            outside: What can be fetched.
            files: Where entries come from.
            is_read: Whether a step that was scheduled has still to load this one.
        """
        self._outside = outside
        self._files = files
        self._is_read = is_read
        self._done: list[FetchResult] = []
        self._far: list[FetchRequest] = []
        self.open: dict[str, FetchRequest] = {}
        self.live: dict[str, OpenEntry] = {}
        self._residents: dict[bytes, tuple[str, Stored]] = {}
        self.misfits: set[str] = set()

    @property
    def news(self) -> Collection[FetchResult]:
        """What has ended and was not drained."""
        return self._done

    def submit(self, wants: Sequence[FetchRequest]) -> None:
        for want in wants:
            if self.open.setdefault(want.key.identifier, want) is want and want.key.digest[2] % 2:
                self._far.append(want)  # no replica has half of them

    @property
    def has_news(self) -> bool:
        return bool(self._done or self._far)

    def drain(self) -> list[FetchResult]:
        done, self._done = self._done, []
        return done

    def drain_far(self) -> list[FetchRequest]:
        far, self._far = self._far, []
        return far

    def get(self, digest: bytes, now: float) -> OpenEntry | None:
        name, stored = self._residents.get(digest, ("", None))
        # Half of them need a look at the disk.
        if stored is None or digest[0] % 2:
            return None
        # What was evicted is open until a sweep comes by: here at once, or never.
        found = self._outside.tier.get(name, stored if digest[1] % 2 else None)
        return self._hand_out(name, stored) if found == stored else None

    def release(self, entries: Iterable[OpenEntry]) -> None:
        for entry in entries:
            if self.live.pop(entry.path, None) is None:
                raise BrokenPromiseError("let go of twice", entry.path)
            if self._is_read(entry.path):
                raise BrokenPromiseError(
                    "let go of before it was loaded", entry.header.identifier[:12]
                )

    def _hand_out(self, name: str, stored: Stored) -> OpenEntry:
        entry = self._files.open(name, stored)
        self.live[entry.path] = entry
        return entry

    def end(self, identifier: str, fault: FetchOutcome | None = None) -> None:
        """One fetch ends, as the real one would.

        Args:
            identifier: Of an open fetch.
            fault: How it fails, whatever is there.
        """
        want = self.open.pop(identifier)
        name = want.key.stored
        outside = self._outside
        here = None if outside.disk.hangs else outside.tier.get(name)
        found = here or (
            None if outside.store.is_open or outside.disk.hangs else outside.bucket.get(name)
        )
        entry = None
        if fault is not None:
            outcome = fault
        elif found is None:
            outcome = (
                FetchOutcome.UNAVAILABLE
                if outside.store.is_open or outside.disk.hangs
                else FetchOutcome.ABSENT
            )
        elif (found.rows, found.modality) != (want.rows, want.modality):
            outcome = FetchOutcome.MISMATCH
            if here is not None:  # the next request may need just that
                self._residents[want.key.digest] = name, here
        else:
            outcome = FetchOutcome.READY
            entry = self._hand_out(name, found)
            self._residents[want.key.digest] = name, found
            outside.tier.setdefault(name, found)
            outside.local.add(want.key)
        if outcome is FetchOutcome.MISMATCH:
            self.misfits.add(identifier)
        if outcome is FetchOutcome.ABSENT and outside.index.maybe_contains(want.key):
            outside.index.mark_missing(want.key, absent=True)
        elif outcome is FetchOutcome.CORRUPT:
            outside.index.mark_bad(want.key)
        if here is None and not outside.disk.hangs and entry is None:
            outside.local.discard(want.key)
        source = None if entry is None else "bucket" if here is None else "tier"
        self._done.append(FetchResult(want, outcome, entry, source, 0.05))

    def stop(self) -> None:
        """Its node ends; what is under way is the workload's."""

    def close(self) -> None:
        """Let go of what is left."""
        self.live.clear()


class PlayedSaves:
    """Takes embeddings, and uploads them when the workload says so.

    Attributes:
        pending: Taken, and neither stored nor given up.
        full: Whether it takes no more.
    """

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self.pending: dict[str, Stored] = {}
        self._names: dict[str, str] = {}  # of those, as they are stored
        self.full = False
        self._stored: list[str] = []

    def put(self, identifier: str, save: Save, tensor: torch.Tensor, *, step: int) -> bool:
        """It never lets a step wait for room."""
        stored = Stored(len(tensor), self._outside.weights, save.modality)
        if stored.weights != FIRST_WEIGHTS:
            raise BrokenPromiseError("an embedding of other weights is saved", identifier[:12])
        if not torch.equal(tensor, embedding(identifier, stored.rows, stored.weights)):
            raise BrokenPromiseError("another embedding is saved", identifier[:12])
        if self.full or identifier in self.pending:
            return False
        self.pending[identifier] = stored
        self._names[identifier] = save.renamed or identifier
        return True

    def publish(self, identifier: str) -> None:
        """The writer has it on this node's disk, and the news of the folder tell of it."""
        name = self._names[identifier]
        self._outside.publish(name, self.pending[identifier])
        self._outside.local.add(key_of(name))

    def end(self, identifier: str, *, stored: bool) -> None:
        """The bucket has confirmed it, or it was given up."""
        entry, name = self.pending.pop(identifier), self._names.pop(identifier)
        if stored:
            self._outside.upload(name, entry)
            self._stored.append(identifier)

    def take_stored(self) -> list[str]:
        stored, self._stored = self._stored, []
        return stored

    def drain(self, timeout_s: float) -> int:
        return 0

# SPDX-License-Identifier: Apache-2.0
"""Reads every object of a namespace and checks every byte of it; can be interrupted and resumed.

It reads the objects in the order of their names, so one name, the cursor, is its position.
``AuditState`` keeps that in a file.

**Changes during a check.** An object that is stored behind the cursor is read by the next check.
One that is deleted before it is read is not reported as missing. Objects are never replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from s3ec import codec
from s3ec.corpus.entries import MAX_ENTRY_BYTES, Outage, checked_header, download
from s3ec.counters import Report, unreported
from s3ec.errors import (
    AccessError,
    CorruptEntryError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.fetch import ByteBudget
from s3ec.identity import Layout, canonical_json, digest_of_name, is_object_name
from s3ec.index.listing import FEW, at_most, leaf_folders, listed
from s3ec.namespaces import read_namespaces
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.concurrency import REQUESTS_AT_A_TIME, for_each
from s3ec.tier.files import write_file

log = logging.getLogger(__name__)

MOST_KEPT = 10_000
"""How many names of bad objects are kept, for a repair; further ones are only counted."""
_ATTEMPTS = 3
# Bytes of objects in memory at a time; a larger object is read alone.
_INFLIGHT_BYTES = 256 * 2**20
_SAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object that is corrupt, or that could not be read.

    Attributes:
        name: Relative to the corpus's prefix.
        reason: A word, see CorruptEntryError; ``unavailable`` or ``access`` if it was not read.
        message: What is wrong, as a sentence.
    """

    name: str
    reason: str
    message: str


@dataclass(slots=True)
class DeepCheck:
    """The result of reading the objects. It counts over all runs with the same state.

    Attributes:
        objects: Objects that were read whole, corrupt ones included.
        nbytes: Their size.
        gone: Objects that were deleted between the listing and their read.
        foreign: Objects below ``objects/`` with no name of ours; not read.
        newer: Objects of a newer s3ec, in a format that this release does not read. They may be
            good, and are no fault.
        unstable: Objects that were bad once and good when read again: damaged on their way.
        corrupt: Objects that were read whole twice, with the same bad bytes.
        unread: Objects that could not be read whole, or differed each time. They may be good.
        reasons: How many of ``corrupt`` for each reason.
        bad: The corrupt ones, up to MOST_KEPT.
        unreadable: The unread ones, likewise.
        resumed: How many of ``objects`` earlier runs with this state have read.
        complete: True if every object was handled.
    """

    objects: int = 0
    nbytes: int = 0
    gone: int = 0
    foreign: int = 0
    newer: int = 0
    unstable: int = 0
    corrupt: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    bad: list[BadObject] = field(default_factory=list)
    unreadable: list[BadObject] = field(default_factory=list)
    resumed: int = 0
    complete: bool = False

    @property
    def unread(self) -> int:
        """How many could not be read."""
        return len(self.unreadable)

    @property
    def agrees(self) -> bool:
        """True if the check is complete, and no object is corrupt or unread."""
        return not self.corrupt and not self.unreadable and self.complete


async def check_objects(
    store: Store,
    layout: Layout,
    state: AuditState | None = None,
    *,
    expected: int | None = None,
    width: int = REQUESTS_AT_A_TIME,
    report: Report = unreported,
) -> DeepCheck:
    """Read every object of a namespace and check every byte of it, 16 at a time.

    An object is corrupt if two reads return it whole, with the same bad bytes. So neither a store
    that fails nor damage on the way makes an object corrupt.

    Args:
        state: Where to resume, and where progress is kept; nothing is read if it is complete.
        expected: How many objects there may be, for ``report``.
        width: Objects that are read at a time.

    Raises:
        UnavailableError, AccessError: Many objects in a row could not be read, or a listing failed.
        TierError: The state cannot be written.
    """
    if state is not None and state.found.complete:
        return state.found
    [about] = await read_namespaces(store, [layout.namespace])
    check = _DeepRun(
        store, layout, state, expected=expected, report=report, is_newer=about.is_newer
    )
    try:
        await check.run(width)
    finally:
        check.save()
    return check.found


class _DeepRun:
    """One run of check_objects. Reads end in any order; the cursor waits for the first of them."""

    def __init__(
        self,
        store: Store,
        layout: Layout,
        state: AuditState | None,
        *,
        expected: int | None,
        report: Report,
        is_newer: bool,
    ) -> None:
        self._store = store
        self._layout = layout
        self._state = state
        self._is_newer = is_newer
        self._expected = expected
        self._report = report
        self.found = DeepCheck() if state is None else state.found
        self._cursor = "" if state is None else state.cursor
        self.found.resumed = self.found.objects
        self._memory = ByteBudget(_INFLIGHT_BYTES)
        # In order of arrival: else a large object waits for all others, as does the cursor.
        self._queue = asyncio.Lock()
        self._outage = Outage()
        self._numbers = self._first = 0
        # Results above the cursor, whose objects a resumed run reads again: each counts when the
        # cursor passes it.
        self._waiting: dict[int, tuple[str, Outcome]] = {}

    async def run(self, width: int) -> None:
        """Read all objects that are left."""
        await for_each(_in_order(self._store, self._layout, self._cursor), self._turn, width=width)
        await self._read_again()
        self.found.complete = True

    async def _turn(self, info: ObjectInfo) -> None:
        number, self._numbers = self._numbers, self._numbers + 1  # in the order of names
        self._end(number, info, await self._look(info))

    async def _look(self, info: ObjectInfo) -> Outcome:
        if not is_object_name(info.name.removeprefix(self._layout.objects)):
            return Outcome("foreign")
        if self._is_newer:
            return Outcome("newer")
        async with self._queue:
            await self._memory.take(info.nbytes)
        try:
            outcome = await check_object(self._store, self._layout, info)
        finally:
            self._memory.free(info.nbytes)
        if self._outage.ends_with(outcome.error) and outcome.error is not None:
            raise outcome.error
        return outcome

    def _end(self, number: int, info: ObjectInfo, outcome: Outcome) -> None:
        self._waiting[number] = info.name, outcome
        while self._first in self._waiting:
            self._cursor, outcome = self._waiting.pop(self._first)
            self._first += 1
            self._count(self._cursor, outcome)
        most = None if self._expected is None else max(self._expected, self.found.objects)
        self._report("checking bytes", self.found.objects, most)
        if self._state is not None and self._state.is_due(self._cursor):
            self.save()

    def _count(self, name: str, outcome: Outcome) -> None:
        found = self.found
        if outcome.kind in ("good", "unstable", "corrupt"):
            found.objects += 1
            found.nbytes += outcome.nbytes
        match outcome.kind:
            case "gone" | "foreign" | "newer" | "unstable" as kind:
                setattr(found, kind, getattr(found, kind) + 1)
            case "corrupt":
                found.corrupt += 1
                found.reasons[outcome.reason] = found.reasons.get(outcome.reason, 0) + 1
                if len(found.bad) < MOST_KEPT:
                    found.bad.append(BadObject(name, outcome.reason, outcome.message))
            case "unread":
                found.unreadable.append(BadObject(name, outcome.reason, outcome.message))
                if len(found.unreadable) > MOST_KEPT:
                    raise outcome.error or UnavailableError(outcome.message)

    async def _read_again(self) -> None:
        """Read again the objects that could not be read before."""
        before, self.found.unreadable = self.found.unreadable, []
        left = list(before)
        try:
            for bad in before:
                info = await self._store.head(bad.name)
                outcome = Outcome("gone") if info is None else await self._look(info)
                self._count(bad.name, outcome)
                left.pop(0)
        finally:
            self.found.unreadable += left

    def save(self) -> None:
        """Save the cursor and the results so far."""
        if self._state is not None:
            self._state.save(self._cursor)


async def _in_order(store: Store, layout: Layout, after: str) -> AsyncGenerator[ObjectInfo, None]:
    """The objects of a namespace in the order of their names. The caller closes it.

    Memory: the names of two folders, each with some 1/256 of all.

    Args:
        after: Only objects with a later name; empty for all.
    """
    few = await at_most(store, layout.objects, FEW)
    if few is not None:
        for info in _later(few, after):
            yield info
        return
    folders = sorted(await leaf_folders(store, layout.objects))
    listing: asyncio.Task[list[ObjectInfo]] | None = None
    try:
        # One folder is listed while the objects of the previous one are read.
        for folder in (*(one for one in folders if one + "\U0010ffff" > after), None):
            listed_before, listing = listing, None
            if folder is not None:
                listing = asyncio.create_task(_all_below(store, folder))
            for info in _later(await listed_before, after) if listed_before else ():
                yield info
    finally:
        if listing is not None:
            listing.cancel()
            await asyncio.gather(listing, return_exceptions=True)


def _later(infos: list[ObjectInfo], after: str) -> list[ObjectInfo]:
    later = [info for info in infos if info.name > after]
    later.sort(key=lambda info: info.name)
    return later


async def _all_below(store: Store, prefix: str) -> list[ObjectInfo]:
    return [info async for info in listed(store, prefix)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of reading one object.

    Attributes:
        kind: ``good``, ``gone``, ``foreign``, ``newer``, ``unstable``, ``corrupt`` or ``unread``.
        nbytes: Its size, if it was read whole.
        reason: What is wrong with it, in a word; see BadObject.
        message: The same as a sentence.
        digest: Of all bytes, if they are bad.
        error: The store's error, if it did not return the object.
    """

    kind: str
    nbytes: int = 0
    reason: str = ""
    message: str = ""
    digest: str = ""
    error: S3ECError | None = None


async def check_object(store: Store, layout: Layout, info: ObjectInfo) -> Outcome:
    """Read one object until it is good, or twice the same and bad.

    Errors of the store are returned in the outcome, not raised.
    """
    seen: set[str] = set()
    outcome = Outcome("unread")
    for attempt in range(_ATTEMPTS):
        outcome = await _read(store, layout, info)
        if outcome.kind == "good" and attempt:
            return replace(outcome, kind="unstable")
        is_known_bad = bool(outcome.digest) and outcome.digest in seen
        if outcome.kind in ("good", "gone") or outcome.error is not None or is_known_bad:
            return outcome
        seen.add(outcome.digest)
    return replace(outcome, kind="unread")


async def _read(store: Store, layout: Layout, info: ObjectInfo) -> Outcome:
    if info.nbytes > MAX_ENTRY_BYTES:
        said = f"{info.nbytes} bytes are more than a job reads; `s3ec rm` deletes it"
        return Outcome("unread", reason="size", message=said)
    try:
        # One byte at least: an empty object is requested too.
        blob = await download(store, info.name, max(info.nbytes, 1))
    except CorruptEntryError as exc:  # it was not read whole
        return Outcome("unread", reason=exc.reason, message=str(exc))
    except (UnavailableError, AccessError) as exc:
        word = "access" if isinstance(exc, AccessError) else "unavailable"
        return Outcome("unread", reason=word, message=str(exc), error=exc)
    if blob is None:
        return Outcome("gone")
    if len(blob) != info.nbytes:
        said = f"{len(blob)} of {info.nbytes} bytes came"
        return Outcome("unread", reason="length", message=said)
    try:
        digest = digest_of_name(info.name.removeprefix(layout.objects))
        header = checked_header(blob, layout.namespace, digest)
        codec.check_data(header, memoryview(blob)[header.data_start :])
    except CorruptEntryError as exc:  # this release cannot judge an entry of a newer s3ec
        kind = "newer" if exc.reason == "version" else "corrupt"
        return Outcome(kind, info.nbytes, exc.reason, str(exc), codec.checksum(blob))
    return Outcome("good", info.nbytes)


# -- where it was ------------------------------------------------------------------------------


class AuditState:
    """The progress of a deep check of one namespace, in a file.

    The file is written at most once a second, with the cursor and all results. So after a kill only
    the objects read since then are read again. If two checks run at once, each writes all that it
    knows, and the last write counts. A complete check begins from the start when it is opened
    again, unless the caller wants its result; so does one whose file is damaged.

    Attributes:
        found: The results so far.
        cursor: Every object up to this name was handled.
    """

    def __init__(
        self, folder: str | os.PathLike[str], of: Mapping[str, Any], *, again: bool = True
    ) -> None:
        """Open the state, or begin a new one.

        Args:
            folder: Made if it is absent. It has a file for each corpus.
            of: The ``namespace``, the corpus, and its server, which the state is of. Plain JSON.
            again: Begin from the start if it is complete.

        Raises:
            TierError: The disk refuses.
        """
        digest = codec.checksum(canonical_json(of).encode())[:16]
        self.path = Path(folder) / f"{of['namespace']}-{digest}.json"
        self.found = DeepCheck()
        self.cursor = ""
        self._due_s = 0.0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise TierError(f"cannot write {self.path}: {exc.strerror}") from exc
        self._read(again=again)

    def is_due(self, cursor: str) -> bool:
        """True if it is time to write, and the cursor has moved."""
        return cursor != self.cursor and time.monotonic() >= self._due_s

    def save(self, cursor: str) -> None:
        """Write the cursor and the results so far.

        Raises:
            TierError: The disk refuses.
        """
        self.cursor = cursor
        state = {"cursor": cursor, **asdict(self.found)}
        try:
            write_file(self.path, [json.dumps(state).encode()])
        except OSError as exc:
            raise TierError(f"cannot write {self.path}: {exc.strerror}") from exc
        self._due_s = time.monotonic() + _SAVE_S

    def _read(self, *, again: bool) -> None:
        try:
            state = json.loads(self.path.read_text())
            cursor = str(state.pop("cursor"))
            if any(type(state[name]) is not type(one) for name, one in asdict(DeepCheck()).items()):
                raise ValueError("a value is of another type")
            for name in ("bad", "unreadable"):
                state[name] = [BadObject(**one) for one in state[name]]
            found = DeepCheck(**state)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise TierError(f"cannot read {self.path}: {exc.strerror}") from exc
        except (ValueError, TypeError, KeyError, AttributeError):
            log.warning("%s is damaged; the check begins from the start", self.path)
            return
        if not (found.complete and again):
            self.found, self.cursor = found, cursor

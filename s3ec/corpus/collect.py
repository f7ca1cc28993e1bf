# SPDX-License-Identifier: Apache-2.0
"""Deletes entries of a namespace: named ones, old ones, or the oldest of too many.

A bucket knows when an object was stored, but not when it was used.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from s3ec.codec import MADE_BY_CHARACTERS
from s3ec.corpus.entries import CorpusEntry, entries_of, read_header
from s3ec.counters import Report, unreported
from s3ec.errors import AccessError, ConfigError, CorruptEntryError, UnavailableError
from s3ec.identity import Key, Layout, digest_of_name, make_key, split_digest
from s3ec.index.delete import delete_chosen, delete_entries, find_objects
from s3ec.index.listing import list_objects
from s3ec.index.local import NodeFolder
from s3ec.index.names import ServerClock
from s3ec.index.snapshot import Rows, Segment, merge
from s3ec.store.base import ObjectInfo, Store
from s3ec.store.concurrency import in_parallel
from s3ec.tenant import Tenant

_WORD = re.compile(r"([a-z]+)=([!-~]+)")
_HEADERS_AT_A_TIME = 1000
# The values that are kept of an object that may be deleted.
_FOUND = np.dtype([("modified_s", "<f8"), ("nbytes", "<i8"), ("hi", "<u8"), ("lo", "<u8")])


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which entries are deleted: those that match all given rules.

    Attributes:
        older_than_s: Entries stored longer ago than this.
        max_bytes: The oldest entries, until the rest fits.
        made_by: Name to pattern, such as ``{"vllm": "0.32.*"}``: only entries made with these
            releases, by their headers. Empty for all.
    """

    older_than_s: float | None = None
    max_bytes: int | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.older_than_s is None and self.max_bytes is None and not self.made_by:
            raise ConfigError(
                "nothing says what is to go; give `--older-than`, `--max-bytes` or `--made-by`",
                field="older_than",
            )

    def fits(self, made_by: str) -> bool:
        """True if ``made_by`` of an entry matches; an empty one does not match a rule."""
        said = dict(word.partition("=")[::2] for word in made_by.split(" "))
        return all(
            name in said and fnmatch.fnmatchcase(said[name], pattern)
            for name, pattern in self.made_by.items()
        )


def parse_made_by(text: str) -> dict[str, str]:
    """Parse names and versions with spaces or commas between them, such as ``vllm=0.32.*``.

    Raises:
        ConfigError: It is something else.
    """
    words = [_WORD.fullmatch(word) for word in re.split(r"[ ,]+", text.strip(" ,"))]
    if len(text) > MADE_BY_CHARACTERS or not all(words):
        raise ConfigError(
            f"{text!r:.100} is no list of names and versions; write `--made-by` as "
            "vllm=0.32.0, or 'vllm=0.32.* platform=NVIDIA*'",
            field="made_by",
        )
    return {word[1]: word[2] for word in words if word is not None}


@dataclass(slots=True)
class Collection:
    """Which objects are deleted, how many these are, and whether it is done.

    Attributes:
        rules: The rules.
        layout: The namespace.
        now_s: Ages count up to this time.
        chosen: The entries that a listing has chosen; those stored since ``now_s`` stay. None if
            age alone decides.
        objects: Objects that are deleted.
        nbytes: Their size.
        left_objects: Objects that stay.
        left_bytes: Their size.
        done: True if they were deleted; False for a dry run.
        dropped_rows: Rows of the catalogue that were dropped with them.
        problem: Why rows of the catalogue are left; empty if none is.
    """

    rules: Rules
    layout: Layout
    now_s: float
    chosen: Segment | None = None
    objects: int = 0
    nbytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0
    done: bool = False
    dropped_rows: int = 0
    problem: str = ""

    @property
    def namespace(self) -> str:
        """The namespace's name."""
        return self.layout.namespace

    def __call__(self, infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Select the listed objects that are deleted; all are counted."""
        chosen = [info for info in infos if self._goes(info)]
        nbytes = sum(info.nbytes for info in chosen)
        self.objects += len(chosen)
        self.nbytes += nbytes
        self.left_objects += len(infos) - len(chosen)
        self.left_bytes += sum(info.nbytes for info in infos) - nbytes
        return chosen

    def _goes(self, info: ObjectInfo) -> bool:
        """True if the rules delete the object. One without a time stays."""
        age_s, older_than_s = self.now_s - info.modified_s, self.rules.older_than_s
        if not info.modified_s or (older_than_s is not None and age_s <= older_than_s):
            return False
        if self.chosen is None:
            return True
        return age_s >= 0 and self.chosen.find(*_halves(self.layout, info)) >= 0


def _halves(layout: Layout, info: ObjectInfo) -> tuple[int, int]:
    """The digest of a listed entry, as Segment takes it."""
    return split_digest(digest_of_name(info.name.removeprefix(layout.objects)))


async def choose(
    store: Store,
    layout: Layout,
    rules: Rules,
    now_s: float,
    *,
    report: Report = unreported,
) -> Collection:
    """Find by a listing the entries that would be deleted, and count them; changes nothing.

    With ``made_by`` it sends a request for each entry that the other rules select. Memory: with
    ``max_bytes`` some 100 bytes for each of these, with ``made_by`` some 500.

    Args:
        now_s: Ages count up to this time.
    """
    choice = Collection(rules, layout, now_s)
    is_by_age = rules.max_bytes is None and not rules.made_by
    found = [np.empty(0, _FOUND)]
    to_read: list[ObjectInfo] = []

    def add(infos: Sequence[ObjectInfo]) -> None:
        rows = [(one.modified_s, one.nbytes, *_halves(layout, one)) for one in infos]
        found.append(np.array(rows, _FOUND))

    async with aclosing(list_objects(store, layout, report=report)) as batches:
        async for infos in batches:
            may_go = [one for one in choice(infos) if one.modified_s <= now_s]
            if rules.made_by:
                to_read += may_go
            elif not is_by_age:
                add(may_go)
    if is_by_age:
        return choice
    if rules.made_by:
        async for some in _made_by(store, layout, rules, to_read, report):
            add(some)
    surplus = choice.left_bytes + choice.nbytes - (rules.max_bytes or 0)
    goes = np.concatenate(found)
    found.clear()  # saves one copy of all during the sort
    if rules.max_bytes is not None:
        goes = _oldest(goes, surplus)
    hi, lo = goes["hi"].copy(), goes["lo"].copy()
    nbytes = int(goes["nbytes"].sum())
    return replace(
        choice,
        chosen=Segment.of(merge([Rows(hi, lo, np.zeros(len(goes), "<u4"))])),
        objects=len(goes),
        nbytes=nbytes,
        left_objects=choice.left_objects + choice.objects - len(goes),
        left_bytes=choice.left_bytes + choice.nbytes - nbytes,
    )


def _oldest(found: npt.NDArray[Any], surplus: int) -> npt.NDArray[Any]:
    """The oldest objects, until their bytes make up the surplus; always in the same order.

    Sorts ``found`` in place: there may be millions.
    """
    found.sort(order=("modified_s", "hi", "lo"))
    before: npt.NDArray[np.int64] = np.cumsum(found["nbytes"]) - found["nbytes"]
    return found.compress(before < surplus)


async def _made_by(
    store: Store, layout: Layout, rules: Rules, infos: Sequence[ObjectInfo], report: Report
) -> AsyncIterator[list[ObjectInfo]]:
    """The objects that match ``made_by``, in batches; one request for each object."""

    async def is_meant(entry: CorpusEntry) -> bool:
        try:
            found = await read_header(store, entry)
        except CorruptEntryError:
            return False
        return bool(found and found.header and rules.fits(found.header.made_by))

    report("reading headers", 0, len(infos))
    for start in range(0, len(infos), _HEADERS_AT_A_TIME):
        some = infos[start : start + _HEADERS_AT_A_TIME]
        meant = await in_parallel(list(entries_of(layout, some)), is_meant)
        yield list(itertools.compress(some, meant))
        report("reading headers", start + len(some), len(infos))


async def collect_garbage(
    store: Store,
    layout: Layout,
    rules: Rules,
    *,
    tenant: Tenant | None,
    dry_run: bool,
    node: NodeFolder | None = None,
    report: Report = unreported,
    clock: Callable[[], float] = time.time,
) -> Collection:
    """Choose and delete, or only count; see Corpus.gc.

    Args:
        tenant: The tenant whose secret is in the names.
        clock: Seconds since the epoch; for a dry run, which cannot ask the server by a write.
    """
    # The times of objects are the server's: a clock of ours that is ahead would make them old.
    now_s = clock()
    if not dry_run:
        server = ServerClock()
        await server.ask(store, layout)
        now_s = server.now_s()
    choice = Collection(rules, layout, now_s)
    if dry_run or rules.max_bytes is not None or rules.made_by:
        choice = await choose(store, layout, rules, now_s, report=report)
    if dry_run:
        return choice
    return await collect(store, choice, tenant=tenant, node=node, report=report)


async def collect(
    store: Store,
    choice: Collection,
    *,
    tenant: Tenant | None = None,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Collection:
    """Delete the chosen entries by a new listing; returns what was deleted.

    Entries that were stored since the choice stay. The remaining ones become a snapshot of the
    index; if this is interrupted, none is written.

    Args:
        tenant: The tenant whose secret is in the names.
        node: This node's files of the index, where its engines read of it.
    """
    layout = choice.layout
    done = replace(choice, objects=0, nbytes=0, left_objects=0, left_bytes=0, done=True)
    digests: set[bytes] = set()

    def deleted(keys: Sequence[Key]) -> None:
        digests.update(key.digest for key in keys)

    await delete_chosen(store, layout, done, deleted=deleted, node=node, report=report)
    done.dropped_rows, done.problem = await drop_deleted_rows(
        *(store, layout, digests, tenant, True)
    )
    return done


@dataclass(frozen=True, slots=True)
class Deletion:
    """The result of ``Corpus.delete``.

    Attributes:
        namespace: Of the entries.
        objects: The object of each identifier as it was; None if the entry did not exist.
        done: True if they were deleted; False for a dry run.
        dropped_rows: Rows of the catalogue that were dropped with them.
        problem: Why rows of the catalogue are left; empty if none is.
    """

    namespace: str
    objects: Mapping[str, ObjectInfo | None]
    done: bool
    dropped_rows: int = 0
    problem: str = ""

    @property
    def count(self) -> int:
        """How many entries existed; one that was named twice counts once."""
        return len({info.name for info in self.objects.values() if info})

    @property
    def nbytes(self) -> int:
        """Total size of their objects."""
        sizes = {info.name: info.nbytes for info in self.objects.values() if info}
        return sum(sizes.values())

    @property
    def absent(self) -> Sequence[str]:
        """Identifiers without an entry."""
        return [identifier for identifier, info in self.objects.items() if not info]


async def delete(
    store: Store,
    layout: Layout,
    keys: Mapping[str, Key],
    *,
    tenant: Tenant | None,
    dry_run: bool,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> Deletion:
    """Delete entries by their keys, and the catalogue's rows of them; see Corpus.delete.

    Args:
        keys: By the caller's names.
        tenant: The tenant whose secret is in the names.
    """
    found = await find_objects(store, layout, keys.values(), report=report)
    by_text = {text: found[key] for text, key in keys.items()}
    if dry_run:
        return Deletion(layout.namespace, by_text, done=False)
    await delete_entries(store, layout, found, node=node, report=report)
    digests = {key.digest for key in keys.values()}
    dropped, problem = await drop_deleted_rows(store, layout, digests, tenant)
    return Deletion(layout.namespace, by_text, True, dropped, problem)


async def drop_deleted_rows(
    store: Store, layout: Layout, digests: Set[bytes], tenant: Tenant | None, fold: bool = False
) -> tuple[int, str]:
    """Drop the catalogue's rows of entries that were deleted and not stored again since.

    Costs a listing if there is no catalogue; else a read and a write of it, and a HEAD for each of
    these entries that it has.

    Args:
        digests: Of the entries.
        fold: True to merge the small parts that jobs left, too.

    Returns:
        How many rows, and why rows or parts are left: pyarrow is missing, or the store does not
        answer; empty if none is left.
    """
    from s3ec.corpus.catalog import CatalogWriter, list_parts

    def was_deleted(identifier: str) -> bool:
        key = make_key(identifier, tenant)
        return key is not None and key.digest in digests

    dropped = 0
    try:
        if (digests or fold) and await list_parts(store, layout):
            writer = CatalogWriter(store, layout)
            if digests:
                dropped = await writer.drop(was_deleted, tenant=tenant)
            if fold:
                await writer.fold(everything=True)
    except (ConfigError, UnavailableError, AccessError) as exc:
        return dropped, str(exc)
    return dropped, ""

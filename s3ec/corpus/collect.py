# SPDX-License-Identifier: Apache-2.0
"""Deletes the entries of a namespace that are not needed: old ones, unused ones, too many.

A bucket knows when an object was stored, and nothing of its use. What was used is known to the
nodes: a trace with names (``s3ec trace --names``) says what one node's engines asked for while it
was recorded. ``Uses`` puts several together. It refuses to call anything unused for longer than the
traces look back. It cannot know of nodes whose traces it was not given.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from s3ec import trace
from s3ec.counters import Report, unreported
from s3ec.errors import AccessError, ConfigError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index.base_writer import server_time
from s3ec.index.delete import delete_chosen
from s3ec.index.listing import key_of_object, list_objects
from s3ec.index.manifest import indexed_entries
from s3ec.store.base import ObjectInfo, Store
from s3ec.tenant import Tenant

UNCOVERED_SHARE = 0.05
"""Of a time so much may lie between traces: one ends, is fetched, and the next one begins."""


@dataclass(frozen=True, slots=True)
class Uses:
    """What traces say was asked for in one namespace.

    Attributes:
        counts: How often each object was, by its name below ``objects/``.
        last_s: When last, seconds since the epoch.
        times: When each trace began and when its last event was, likewise.
    """

    counts: Counter[str] = field(default_factory=Counter)
    last_s: dict[str, float] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path], namespace: str) -> Uses:
        """Read traces with names. Memory: some 300 bytes for each object.

        Raises:
            ConfigError: Not a trace, one without names, or one that lost events; or none of them
                is of this namespace.
        """
        uses = cls()
        for path in paths:
            try:
                uses._add(path, namespace)
            except OSError as exc:
                raise ConfigError(f"cannot read {path}: {exc.strerror}", field="trace") from exc
        if not uses.times:
            raise ConfigError(
                f"`--trace`: none of these is of namespace {namespace}; name traces of it",
                field="trace",
            )
        return uses

    def _add(self, path: Path, namespace: str) -> None:
        header = trace.read_header(path)
        engines = {at for at, one in enumerate(header.engines) if one.namespace == namespace}
        if not engines:
            return
        ended_s, unnamed, named = header.began_s, 0, 0
        for event in trace.events(path):
            at_s = header.began_s + event.at_s
            ended_s = max(ended_s, at_s)
            if event.engine not in engines:
                continue
            if isinstance(event, trace.Lost):
                raise ConfigError(
                    f"{path} lacks {event.count} accesses that were not recorded, so what they "
                    "asked for would count as unused; record another one",
                    field="trace",
                )
            if event.name is None:  # of what is never stored
                unnamed += 1
                continue
            named += 1
            self.counts[event.name] += 1
            self.last_s[event.name] = max(at_s, self.last_s.get(event.name, 0.0))
        if unnamed and not named:
            raise ConfigError(
                f"{path} has hashes and no names, so nothing can be found by it; record one with "
                "`s3ec trace --names`",
                field="trace",
            )
        self.times.append((header.began_s, ended_s))

    def require(self, since_s: float, now_s: float) -> None:
        """Raise ConfigError where the traces do not look back so far without larger gaps."""
        covered_s, until_s = 0.0, since_s
        for began_s, ended_s in sorted(self.times):
            covered_s += max(0.0, min(ended_s, now_s) - max(began_s, until_s))
            until_s = max(until_s, ended_s)
        wanted_s = now_s - since_s
        if covered_s < (1 - UNCOVERED_SHARE) * wanted_s:
            raise ConfigError(
                f"`--unused-for`: the traces cover {covered_s / wanted_s:.0%} of that time, and "
                "what was used in the rest of it would be deleted; name traces of all of it, or "
                "a shorter age",
                field="unused_for",
            )


# How often it was used, when it was stored, and what tells equals apart.
Rank = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class Rules:
    """What goes: that which all rules that are given agree on.

    Attributes:
        older_than_s: Stored so long ago.
        unused_for_s: Stored, and last used, so long ago; needs ``uses``.
        max_bytes: The oldest, until the rest of what lies below ``adapter`` fits; with ``uses`` the
            least used ones first.
        adapter: Only what lies in the folder of this LoRA adapter; None for everything.
        uses: What traces say; None without them.
    """

    older_than_s: float | None = None
    unused_for_s: float | None = None
    max_bytes: int | None = None
    adapter: str | None = None
    uses: Uses | None = None

    def check(self, now_s: float) -> None:
        """Raise ConfigError where they are no rules to delete by."""
        if self.older_than_s is None and self.unused_for_s is None and self.max_bytes is None:
            raise ConfigError(
                "nothing says what is to go; give `--older-than`, `--unused-for` or `--max-bytes`",
                field="older_than",
            )
        if self.unused_for_s is None:
            return
        if self.uses is None:
            raise ConfigError(
                "`--unused-for`: a bucket does not know what is used; name what your nodes have "
                "recorded with `s3ec trace --names`: `--trace FILE`",
                field="unused_for",
            )
        self.uses.require(now_s - self.unused_for_s, now_s)


@dataclass(slots=True)
class Choice:
    """Which objects go, and how many that were.

    Attributes:
        rules: The rules.
        layout: The namespace.
        now_s: Ages count to here. With ``max_bytes`` nothing goes that was stored later.
        last: With ``max_bytes`` the last one that goes by rank; None where all go or none was
            found yet.
        objects: That go, revisions included.
        nbytes: Their size.
        left_objects: That stay, of those below the adapter's folder.
        left_bytes: Their size.
    """

    rules: Rules
    layout: Layout
    now_s: float
    last: Rank | None = None
    objects: int = 0
    nbytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0

    def __call__(self, infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Those of some listed objects that go; they are counted."""
        chosen = []
        for info in infos:
            if not self._is_below(info):
                continue
            if self._agrees(info) and (self.last is None or self.rank(info) <= self.last):
                chosen.append(info)
                self.objects += 1
                self.nbytes += info.nbytes
            else:
                self.left_objects += 1
                self.left_bytes += info.nbytes
        return chosen

    def rank(self, info: ObjectInfo) -> Rank:
        """The lowest goes first."""
        name = self._plain_name(info)
        uses = self.rules.uses
        return 0 if uses is None else uses.counts[name], info.modified_s, info.name

    def _plain_name(self, info: ObjectInfo) -> str:
        return key_of_object(self.layout, info.name)[0].name

    def _is_below(self, info: ObjectInfo) -> bool:
        adapter = self.rules.adapter
        return adapter is None or info.name.startswith(f"{self.layout.objects}{adapter}/")

    def _agrees(self, info: ObjectInfo) -> bool:
        """Whether its age and its use let it go. One without a time stays."""
        rules = self.rules
        age_s = self.now_s - info.modified_s
        if not info.modified_s or (rules.max_bytes is not None and age_s < 0):
            return False
        if rules.older_than_s is not None and age_s <= rules.older_than_s:
            return False
        if rules.unused_for_s is None or rules.uses is None:
            return True
        last_s = rules.uses.last_s.get(self._plain_name(info), 0.0)
        return min(age_s, self.now_s - last_s) > rules.unused_for_s


async def choose(
    store: Store, layout: Layout, rules: Rules, now_s: float, *, report: Report = unreported
) -> Choice:
    """Find out by a listing what would go, and count it; changes nothing.

    Memory: with ``max_bytes`` some 150 bytes for each object that the other rules let go.

    Args:
        now_s: Ages count to here.
        report: Told how many objects were looked at.

    Raises:
        ConfigError: As Rules.check.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    rules.check(now_s)
    choice = Choice(rules, layout, now_s)
    found: list[tuple[Rank, int]] = []
    expected = await indexed_entries(store, layout)
    listing = list_objects(store, layout, report=report, expected=expected)
    async with aclosing(listing) as batches:
        async for infos in batches:
            chosen = choice(infos)
            if rules.max_bytes is not None:
                found += [(choice.rank(info), info.nbytes) for info in chosen]
    if rules.max_bytes is None:
        return choice
    return _until_the_rest_fits(choice, found, rules.max_bytes)


def _until_the_rest_fits(choice: Choice, found: list[tuple[Rank, int]], most: int) -> Choice:
    """The same choice, with the last one that has to go."""
    surplus = choice.left_bytes + choice.nbytes - most
    found.sort()
    sums = np.cumsum([nbytes for _, nbytes in found], dtype=np.int64)
    count = 0 if surplus <= 0 else min(int(np.searchsorted(sums, surplus)) + 1, len(found))
    gone = int(sums[count - 1]) if count else 0
    return replace(
        choice,
        last=found[count - 1][0] if count else (-1, -math.inf, ""),
        objects=count,
        nbytes=gone,
        left_objects=choice.left_objects + len(found) - count,
        left_bytes=choice.left_bytes + choice.nbytes - gone,
    )


async def collect(
    store: Store,
    layout: Layout,
    choice: Choice,
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    report: Report = unreported,
) -> Choice:
    """Delete what ``choose`` has chosen, as a listing of now shows it.

    What was stored or deleted since is left alone. Tombstones go first and last, see
    ``index.delete.Deleter``.

    Args:
        choice: By choose.
        deleted: Told of entries that are gone.
        report: Told how many objects were looked at.

    Returns:
        What went.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses; some may be
            deleted and announced.
        TierError: The folder for temporary files is full.
    """
    done = replace(choice, objects=0, nbytes=0, left_objects=0, left_bytes=0)
    await delete_chosen(store, layout, done, deleted=deleted, report=report)
    return done


@dataclass(frozen=True, slots=True)
class Collection:
    """What ``Corpus.gc`` found, and whether it is gone.

    Attributes:
        namespace: Where.
        objects: That went, or would in a dry run; revisions included.
        nbytes: Their size.
        left_objects: That stay, of those that the adapter's rule leaves.
        left_bytes: Their size.
        done: Whether they were deleted; False of a dry run.
        dropped_rows: Rows of the catalogue that went with them.
        problem: Why the catalogue's rows are left, empty where they are not.
    """

    namespace: str
    objects: int
    nbytes: int
    left_objects: int
    left_bytes: int
    done: bool
    dropped_rows: int = 0
    problem: str = ""


async def collect_garbage(
    store: Store,
    layout: Layout,
    rules: Rules,
    *,
    tenant: Tenant | None,
    dry_run: bool,
    report: Report = unreported,
    clock: Callable[[], float] = time.time,
) -> Collection:
    """Choose and delete, or only count.

    Args:
        store: The bucket; to delete, one that was asked about conditional writes.
        rules: What goes.
        tenant: Whose secret is in the names.
        dry_run: Only say what would go.
        report: Told how many objects were looked at.
        clock: Seconds since the epoch.

    Raises:
        ConfigError, UnavailableError, AccessError, TierError: As choose and collect.
    """
    now_s = clock()
    if not dry_run:  # a clock that is ahead must not make entries old
        now_s = min(now_s, await server_time(store))
    rules.check(now_s)
    choice = Choice(rules, layout, now_s)
    if dry_run or rules.max_bytes is not None:
        choice = await choose(store, layout, rules, now_s, report=report)
    if dry_run:
        return _collection(choice, done=False)
    names: set[str] = set()
    done = await collect(
        store,
        layout,
        choice,
        deleted=lambda keys: names.update(key.name for key in keys),
        report=report,
    )
    dropped, problem = await drop_deleted_rows(store, layout, names, tenant)
    return _collection(done, done=True, dropped_rows=dropped, problem=problem)


def _collection(
    choice: Choice, *, done: bool, dropped_rows: int = 0, problem: str = ""
) -> Collection:
    return Collection(
        choice.layout.namespace,
        choice.objects,
        choice.nbytes,
        choice.left_objects,
        choice.left_bytes,
        done,
        dropped_rows,
        problem,
    )


async def drop_deleted_rows(
    store: Store, layout: Layout, names: Set[str], tenant: Tenant | None
) -> tuple[int, str]:
    """Drop the catalogue's rows of entries that were deleted.

    Costs a listing where there is no catalogue, and else to read and write it.

    Args:
        names: Of the entries' objects, below ``objects/``.
        tenant: Whose secret is in the names.

    Returns:
        How many, and why they are left: the extra is missing, or the store does not answer; empty
        where they are not.
    """
    from s3ec.corpus.catalog import drop_rows, list_parts

    def is_gone(identifier: str) -> bool:
        key = make_key(identifier, tenant)
        return key is not None and key.name in names

    try:
        if not names or not await list_parts(store, layout):
            return 0, ""
        return await drop_rows(store, layout, is_gone), ""
    except (ConfigError, UnavailableError, AccessError) as exc:
        return 0, str(exc)

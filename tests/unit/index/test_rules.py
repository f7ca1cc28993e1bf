# SPDX-License-Identifier: Apache-2.0
"""The rules of the index as a simulation, beside the real one; each rule is needed.

Writers store and announce, makers write unions and listings, a gc deletes while it lists, somebody
clears old files away, a reader refreshes. All of that takes time, in which other things happen. One
unit of time is a minute.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace

import pytest

MARGIN, IN_TIME = 15, 14
KEYS = range(12)
LOOK_EVERY = 7
STEPS = 400


@dataclass(frozen=True)
class Rules:
    """What is done about it; a rule that is False is broken.

    Attributes:
        listed_first: A snapshot is newer by LISTED, then by ULID; broken: by ULID alone.
        named_at_begin: A union is named when its making begins; broken: when it is written.
        margin: Deltas from the snapshot's ULID less a margin count; broken: from its ULID.
        keeps_deltas: Deltas of two listings are kept; broken: those since the newest ULID.
        gc_listed_at_begin: A gc's LISTED is when it began; broken: when it was written.
        looks_again: A reader looks for snapshots again and again; broken: at its start.
    """

    listed_first: bool = True
    named_at_begin: bool = True
    margin: bool = True
    keeps_deltas: bool = True
    gc_listed_at_begin: bool = True
    looks_again: bool = True


@dataclass(frozen=True)
class Snapshot:
    listed: int = 0
    ulid: int = 0
    rows: frozenset[int] = frozenset()


@dataclass
class Story:
    """What became of one key, for the judge.

    Attributes:
        deleted_at: When its object went; None while it is there, or was never stored.
        seen_from: From when on a reader must find it: a delta landed in time.
        last_name: The latest name of a delta that told of it.
    """

    deleted_at: int | None = None
    seen_from: int | None = None
    last_name: int = 0


@dataclass
class World:
    rules: Rules
    random: random.Random
    now: int = 100
    objects: set[int] = field(default_factory=set)
    deltas: dict[tuple[int, int], int] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=lambda: [Snapshot()])
    stories: dict[int, Story] = field(default_factory=lambda: {key: Story() for key in KEYS})
    landed: list[tuple[int, int]] = field(default_factory=list)  # listings: begin, refresh
    mine: Snapshot = Snapshot()
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    refreshes: int = 0

    def __post_init__(self) -> None:
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._number = itertools.count()

    # -- time ------------------------------------------------------------------------------------

    def after(self, delay: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._number), action))

    def pass_time(self) -> None:
        self.now += 1
        while self._queue and self._queue[0][0] <= self.now:
            heapq.heappop(self._queue)[2]()

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    # -- what the rules say ----------------------------------------------------------------------

    def age(self, snapshot: Snapshot) -> tuple[int, ...]:
        both = (snapshot.listed, snapshot.ulid)
        return both if self.rules.listed_first else both[1:]

    def start(self, ulid: int) -> int:
        return ulid - MARGIN if self.rules.margin else ulid

    def counted(self, ulid: int) -> dict[tuple[int, int], int]:
        return {name: key for name, key in self.deltas.items() if name[0] >= self.start(ulid)}

    # -- who does what ---------------------------------------------------------------------------

    def save(self, key: int) -> None:
        self.objects.add(key)
        self.stories[key] = Story(last_name=self.stories[key].last_name)
        self.after(self.random.randrange(5), lambda: self.announce(key))

    def announce(self, key: int) -> None:
        name = (self.now, next(self._number))
        is_slow = self.random.random() < 0.1
        delay = self.random.randrange(200 if is_slow else IN_TIME)

        def land() -> None:
            self.deltas[name] = key
            story = self.stories[key]
            story.last_name = max(story.last_name, name[0])
            if key in self.objects and delay < MARGIN and story.seen_from is None:
                story.seen_from = self.now

        self.after(delay, land)

    def delete(self, key: int) -> None:
        if key in self.objects:
            self.objects.discard(key)
            self.stories[key] = replace(self.stories[key], deleted_at=self.now, seen_from=None)

    def union(self) -> None:
        base, begin = max(self.snapshots, key=self.age), self.now
        rows = base.rows | frozenset(self.counted(base.ulid).values())

        def land() -> None:
            ulid = begin if self.rules.named_at_begin else self.now
            self.snapshots.append(Snapshot(base.listed, ulid, rows))

        self.after(self.random.randrange(12), land)

    def listing(self, victims: Iterable[int] = ()) -> None:
        begin, rows = self.now, set[int]()
        delays = [self.random.randrange(20) for _ in range(2)]

        def look(half: int) -> None:
            rows.update(key for key in self.objects if key % 2 == half)

        def drop(key: int) -> None:
            if key in rows:
                rows.discard(key)
                self.delete(key)

        def land() -> None:
            is_late = bool(victims) and not self.rules.gc_listed_at_begin
            at = self.now if is_late else begin
            self.snapshots.append(Snapshot(at, at, frozenset(rows)))
            self.landed.append((begin, self.refreshes))

        self.after(delays[0], lambda: look(0))
        passed = sum(delays)
        self.after(passed, lambda: look(1))
        for key in victims:
            passed += self.random.randrange(1, 4)
            self.after(passed, lambda each=key: drop(each))  # type: ignore[misc]
        self.after(passed + self.random.randrange(1, 6), land)

    def clear(self) -> None:
        self.snapshots = sorted(self.snapshots, key=self.age)[-2:]
        oldest = min(snapshot.listed for snapshot in self.snapshots) - 2 * MARGIN
        if not self.rules.keeps_deltas:
            oldest = max(self.snapshots, key=self.age).ulid - MARGIN
        self.deltas = {name: key for name, key in self.deltas.items() if name[0] >= oldest}

    # -- the reader and its judge ----------------------------------------------------------------

    def refresh(self) -> str:
        """One look; says which promise is broken, if any."""
        is_due = self.refreshes % LOOK_EVERY == 0 and self.rules.looks_again
        mine = self.mine
        if not self.refreshes or is_due:
            newest = max(self.snapshots, key=self.age)
            if self.age(newest) > self.age(self.mine):
                self.mine = newest
                start = newest.ulid - MARGIN
                self.read = {name: key for name, key in self.read.items() if name[0] >= start}
        # Between looks for snapshots only those deltas are listed that may have come since.
        is_whole = not self.refreshes or is_due or mine != self.mine
        since = 0 if is_whole else max(self.read, default=(0, 0))[0] - MARGIN
        self.refreshes += 1
        found = self.counted(self.mine.ulid)
        self.read.update({name: key for name, key in found.items() if name[0] >= since})
        seen = self.seen()
        began = max(
            (b for b, at in self.landed if at <= self.refreshes - LOOK_EVERY - 1), default=0
        )
        for key, story in self.stories.items():
            if story.seen_from is not None and key in self.objects and key not in seen:
                return f"{key} is there and was announced at {story.seen_from}, and is not seen"
            is_over = story.deleted_at is not None and story.deleted_at < began
            if is_over and key in seen and story.last_name < began - MARGIN:
                return f"{key} was deleted at {story.deleted_at}, listed at {began}, and is seen"
        return ""

    def seen(self) -> set[int]:
        return {*self.mine.rows, *self.read.values()}

    def step(self) -> str:
        self.pass_time()
        return self.refresh()


def run(seed: int, rules: Rules) -> str:
    """One history; the first broken promise, or nothing."""
    rng = random.Random(seed)
    world = World(rules, rng)
    keys = list(KEYS)
    for _ in range(STEPS):
        chance = rng.random()
        if chance < 0.25:
            world.save(rng.choice(keys))
        elif chance < 0.32:
            world.union()
        elif chance < 0.34:
            world.listing()
        elif chance < 0.36:
            world.listing(rng.sample(keys, 3))
        elif chance < 0.40:
            world.clear()
        if said := world.step():
            return said
    # What is missed or believed by mistake ends with a listing after a quiet quarter of an hour.
    while world.is_busy:
        world.pass_time()
    for _ in range(MARGIN + 1):
        world.pass_time()
    world.listing()
    while world.is_busy:
        world.pass_time()
    for _ in range(2 * LOOK_EVERY):
        if said := world.step():
            return said
    differ = world.seen() ^ world.objects
    return f"{sorted(differ)} differ at the end" if differ else ""


def test_the_rules_hold() -> None:
    for seed in range(300):
        assert run(seed, Rules()) == "", f"seed {seed}"


@pytest.mark.parametrize("rule", [each.name for each in fields(Rules)])
def test_each_rule_is_needed(rule: str) -> None:
    broken = replace(Rules(), **{rule: False})
    assert any(run(seed, broken) for seed in range(3000))

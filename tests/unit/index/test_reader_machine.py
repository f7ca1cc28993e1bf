# SPDX-License-Identifier: Apache-2.0
"""Readers of any age against a dictionary: what a refresh has seen, they know."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from s3ec.identity import Key
from s3ec.index.manifest import BaseManifest
from s3ec.index.rows import EntryInfo, Rows, Tombstone, merge
from s3ec.index.segment import parse_segment
from tests.support.on_disk import audit_of
from tests.unit.index.basics import LAYOUT, NAMESPACE, key_of
from tests.unit.index.corpus import Corpus, Reader

T = TypeVar("T")

KEYS = [key_of(number) for number in range(8)]
NUMBERS = st.integers(0, len(KEYS) - 1)
# Clocks of writers: all within what a reader looks back.
AHEAD_S = st.sampled_from([0.0, -500.0, -5.0, 5.0, 4000.0])
SOME = st.lists(NUMBERS, min_size=1, max_size=4, unique=True)


async def at_once(
    function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None
) -> T:
    """A disk that answers in the loop's thread: an example is as it was the last time."""
    return function(*args)


class Machine(RuleBasedStateMachine):
    """Three readers: one with rows, one with filters on the same node, one on another."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.corpus = Corpus()
        self.folder = Path(tempfile.mkdtemp(prefix="s3ec-test-"))
        self.truth: dict[Key, bool] = {}
        self.deltas: dict[str, Rows] = {}  # in the bucket
        self.heads: list[BaseManifest] = []
        self.base = Rows.empty()
        self.readers = [self.make(number) for number in range(3)]
        self.fresh = [False] * 3  # nothing has happened since its refresh
        # What a reader stored itself since its refresh. If that is deleted and compacted before it
        # looks, nothing tells it but the bucket's 404.
        self.unseen: list[set[Key]] = [set(), set(), set()]

    def make(self, number: int) -> Reader:
        folder = self.folder / ("a" if number < 2 else "b")
        reader = Reader(self.corpus, folder, mode="bloom" if number == 1 else "exact")
        reader.cache.disk = at_once
        return reader

    def happened(self) -> None:
        self.corpus.clock.now_s += 1
        self.fresh = [False] * 3

    def announce(self, *items: object, ahead_s: float) -> None:
        ulid = self.corpus.delta(*items, ahead_s=ahead_s, time_s=self.corpus.clock.now_s)
        self.deltas[ulid] = parse_segment(self.corpus.objects[LAYOUT.delta(ulid)], NAMESPACE)

    @rule(keys=SOME, ahead_s=AHEAD_S)
    def store(self, keys: list[int], ahead_s: float) -> None:
        self.happened()
        new = [KEYS[key] for key in keys]
        self.announce(*new, ahead_s=ahead_s)
        self.truth.update(dict.fromkeys(new, True))

    @rule(keys=SOME, ahead_s=AHEAD_S)
    def delete(self, keys: list[int], ahead_s: float) -> None:
        self.happened()
        gone = {KEYS[key] for key in keys}.difference(*self.unseen)
        dead = Tombstone(int(self.corpus.clock.now_s))
        if gone:
            self.announce(*((key, dead) for key in gone), ahead_s=ahead_s)
        self.truth.update(dict.fromkeys(gone, False))

    @rule(at=NUMBERS, number=st.integers(0, 2), ahead_s=AHEAD_S)
    def store_here(self, at: int, number: int, ahead_s: float) -> None:
        self.happened()
        key = KEYS[at]
        index = self.readers[number].index
        index.add(key)
        self.unseen[number].add(key)
        assert index.maybe_contains(key)
        assert index.holds(key)
        self.announce((key, EntryInfo(time_s=index.known_time_s(key))), ahead_s=ahead_s)
        self.truth[key] = True

    @rule(shards=st.sampled_from([1, 2, 4]), wipe=st.booleans())
    def compact(self, shards: int, wipe: bool) -> None:
        """All that is listed goes into a new base; with wipe nothing else is left."""
        self.happened()
        head = self.heads[-1] if self.heads else None
        merged = head.merged if head else frozenset()
        parts = [self.deltas[ulid] for ulid in sorted(self.deltas.keys() - merged)]
        self.base = merge([self.base, *parts], keep_tombstones=False)
        version = head.version + 1 if head else 1
        self.heads.append(
            self.corpus.base(version, self.base, merged=self.deltas.keys(), shards=shards)
        )
        if wipe:
            self.corpus.delete(*(LAYOUT.delta(ulid) for ulid in self.deltas))
            self.deltas.clear()
            for old in self.heads[:-1]:
                self.corpus.drop_base(old)
            del self.heads[:-1]

    @rule(number=st.integers(0, 2))
    def refresh(self, number: int) -> None:
        # Past the time for which a key that was not to be had is not believed.
        self.readers[number].clock.now_s += 61
        self.runner.run(self.readers[number].refresh())
        self.unseen[number].clear()
        self.fresh[number] = True

    @rule(number=st.integers(0, 2))
    def restart(self, number: int) -> None:
        self.readers[number].tier.close()
        self.readers[number] = self.make(number)
        self.fresh[number] = False

    @rule(number=st.integers(0, 2))
    def lose_files(self, number: int) -> None:
        for name in self.readers[number].here():
            self.readers[number].files.remove(name)

    @rule(number=st.integers(0, 2), at=NUMBERS)
    def find_it_gone(self, number: int, at: int) -> None:
        """The bucket lacks what was deleted, and a reader may hear of it so."""
        key = KEYS[at]
        reader = self.readers[number]
        if not self.truth.get(key):
            reader.index.mark_missing(key, absent=True)
            assert not reader.index.maybe_contains(key)

    @invariant()
    def who_has_looked_knows(self) -> None:
        for number, reader in enumerate(self.readers):
            if self.fresh[number]:
                for key in KEYS:
                    truth = self.truth.get(key, False)
                    assert reader.index.holds(key) is truth or number == 1
                    assert reader.index.maybe_contains(key) is truth or (number == 1 and not truth)

    def teardown(self) -> None:
        try:
            for number in range(3):
                self.refresh(number)
            self.who_has_looked_knows()
            for reader in self.readers:
                assert reader.counters.get("index.refused") == 0
                assert audit_of(reader.tier) == []
        finally:
            for reader in self.readers:
                self.runner.run(reader.close())
            self.runner.close()
            shutil.rmtree(self.folder)


TestReaders = pytest.mark.slow(Machine.TestCase)
TestReaders.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

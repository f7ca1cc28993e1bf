# SPDX-License-Identifier: Apache-2.0
"""Writers, deletions, compactions, crashes and readers in any order, against a dictionary."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from s3ec.counters import Counters
from s3ec.errors import ConflictError
from s3ec.identity import Key
from s3ec.index.announce import Announcer
from s3ec.index.base_writer import GRACE_S, BuildOptions
from s3ec.index.compaction import compact
from s3ec.index.delete import delete_entries
from s3ec.index.rebuild import rebuild, verify
from s3ec.index.rows import EntryInfo
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.corpus import Corpus, Reader
from tests.unit.index.manifests import Killed, MortalStore

T = TypeVar("T")

KEYS = [key_of(number) for number in range(6)]
# The first three are those of the writers.
MODES = ["exact", "bloom", "exact", "exact"]
# Of the writers' clocks against the bucket's.
SKEWS_S = [3600.0, -3600.0, 0.0]
PUNCTUAL = 2
NEGATIVE_TTL_S = 60.0

keys = st.sampled_from(KEYS)
writers = st.sampled_from(range(len(SKEWS_S)))
readers = st.sampled_from(range(len(MODES)))


class Manifest(RuleBasedStateMachine):
    """``told`` is what everybody who refreshes now must know: True it is there, False it is not,
    absent where nobody was told for sure.

    Between two steps some seconds pass: of two who tell opposite things of one key in the same
    second the wrong one may be believed, until the next announcement.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="s3ec-machine-"))
        self.clock = Clock()
        self.memory = MemoryStore(clock=self.clock)
        self.corpus = Corpus(self.clock, self.memory)
        self.readers = [
            Reader(self.corpus, self.folder / str(number), mode=mode)
            for number, mode in enumerate(MODES)
        ]
        self.announcers = [self._announcer(number) for number in range(len(SKEWS_S))]
        self.spools: list[dict[Key, int]] = [{} for _ in SKEWS_S]
        self.deletions = dict.fromkeys(KEYS, 0)
        self.told: dict[Key, bool] = dict.fromkeys(KEYS, False)
        self.options = BuildOptions(clock=self.clock)

    def _announcer(self, number: int) -> Announcer:
        return Announcer(
            self.memory,
            LAYOUT,
            Counters(),
            batch_s=3600.0,  # it is told when to announce
            known_time_s=self.readers[number].index.known_time_s,
            clock=lambda: self.clock.now_s + SKEWS_S[number],
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self.pass_time(5)
        return self.runner.run(coroutine)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for reader in self.readers:
            reader.clock.now_s += seconds

    def is_there(self, key: Key) -> bool:
        return LAYOUT.object(key) in self.memory.bucket.objects

    # -- writers -----------------------------------------------------------------------------

    @rule(number=writers, key=keys)
    def save(self, number: int, key: Key) -> None:
        self.run(self._save(number, key))

    async def _save(
        self, number: int, key: Key, *, deleted: bool = False, refreshed: bool = False
    ) -> None:
        """What an uploader does: the object, then the announcement, then out of the spool.

        Args:
            deleted: Somebody deletes the object before it is announced.
            refreshed: And this process hears of that.
        """
        self.spools[number][key] = self.deletions[key]
        if not self.told.get(key):
            self.told.pop(key, None)
        at_s = self.clock.now_s + SKEWS_S[number]
        known_s = self.readers[number].index.known_time_s(key)
        try:
            await self.memory.put_if_absent(LAYOUT.object(key), [b"entry"])
        except ConflictError:  # announced all the same
            info = await self.memory.head(LAYOUT.object(key))
            assert info is not None
            at_s, known_s = 0.0, max(known_s, int(info.modified_s) - 1)
        deletions = self.deletions[key]
        if deleted:
            self.pass_time(5)
            self._expect_deletion([key])
            assert await self._delete(MortalStore(self.memory, after=True), [key])
            self.pass_time(5)
        if refreshed:
            await self.readers[number].refresh()

        def done(confirmed: bool) -> None:
            if not confirmed:
                return
            if self.spools[number].get(key) == deletions:
                del self.spools[number][key]
            if deletions == self.deletions[key]:
                self.told[key] = True
            elif self.told.get(key) is False:
                # It was deleted before this came through; a base may have forgotten that.
                del self.told[key]

        facts = EntryInfo(5, 1, 8, "bfloat16", 1)
        self.announcers[number].add(key, facts, done, at_s=at_s, known_s=known_s)
        self.readers[number].index.add(key, facts)

    @rule(key=keys, refreshed=st.booleans(), existed=st.booleans())
    def save_that_is_deleted(self, key: Key, refreshed: bool, existed: bool) -> None:
        """The object is deleted after its PUT was carried out, and before it is announced."""
        if existed:
            self.corpus.store(key)
        self.run(self._save(PUNCTUAL, key, deleted=True, refreshed=refreshed))
        self.run(self.announcers[PUNCTUAL].flush())
        waiting = {key for spool in self.spools for key in spool}
        if key not in waiting:
            self.told[key] = False

    @rule(number=writers)
    def flush(self, number: int) -> None:
        self.run(self.announcers[number].flush())

    @rule(number=writers)
    def crash_and_restart(self, number: int) -> None:
        """What was not confirmed is in the spool, and is saved again by the next process."""
        self.run(self._crash_and_restart(number))

    async def _crash_and_restart(self, number: int) -> None:
        self.announcers[number].close()
        await asyncio.sleep(0)
        await self.readers[number].close()
        mode = MODES[number]
        self.readers[number] = Reader(self.corpus, self.folder / str(number), mode=mode)
        self.announcers[number] = self._announcer(number)
        for key in list(self.spools[number]):
            await self._save(number, key)

    # -- deletions ---------------------------------------------------------------------------

    @rule(
        chosen=st.lists(keys, min_size=1, max_size=3, unique=True),
        dies_at=st.none() | st.integers(0, 12),
    )
    def delete(self, chosen: list[Key], dies_at: int | None) -> None:
        self._expect_deletion(chosen)
        store = MortalStore(self.memory, dies_at, after=True)
        if self.run(self._delete(store, chosen)):
            # A save that is still to be announced may have a later time, by a clock that is ahead.
            waiting = {key for spool in self.spools for key in spool}
            self.told |= {key: False for key in chosen if key not in waiting}

    def _expect_deletion(self, chosen: list[Key]) -> None:
        for key in chosen:
            self.deletions[key] += 1
            self.told.pop(key, None)

    async def _delete(self, store: MortalStore, chosen: list[Key]) -> bool:
        """Whether it lived to the end."""

        async def whole() -> None:
            await delete_entries(store, LAYOUT, chosen, clock=self.clock)

        tasks = [asyncio.create_task(whole()), asyncio.create_task(store.died.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if not store.died.is_set() and results[0] is not None:
            raise results[0]
        return not store.died.is_set()

    # -- compactions -------------------------------------------------------------------------

    @rule()
    def compact(self) -> None:
        assert self.run(compact(self.memory, LAYOUT, self.options)) is not None

    @rule(dies_at=st.integers(0, 25), after=st.booleans())
    def compact_and_die(self, dies_at: int, after: bool) -> None:
        store = MortalStore(self.memory, dies_at, after=after)
        with suppress(Killed):
            self.run(compact(store, LAYOUT, self.options))

    @rule()
    def compact_twice_at_once(self) -> None:
        async def both() -> None:
            await asyncio.gather(*(compact(self.memory, LAYOUT, self.options) for _ in range(2)))

        self.run(both())

    @rule()
    def rebuild(self) -> None:
        self.run(rebuild(self.memory, LAYOUT, self.options))
        waiting = {key for spool in self.spools for key in spool}
        self.told = {
            key: self.is_there(key) for key in KEYS if self.is_there(key) or key not in waiting
        }

    @rule(graces=st.sampled_from([0.1, 0.6, 1.1, 30]))
    def wait(self, graces: float) -> None:
        self.pass_time(graces * GRACE_S)

    # -- readers -----------------------------------------------------------------------------

    @rule(number=readers)
    def refresh(self, number: int) -> None:
        reader = self.readers[number]
        self.run(reader.refresh())
        for key, there in self.told.items():
            found = reader.index.maybe_contains(key)
            if there and key.digest not in reader.index._gone.until:
                assert found, key.digest.hex()
            if not there and self._must_know(number, key):
                assert not found, key.digest.hex()

    def _must_know(self, number: int, key: Key) -> bool:
        """Whether this reader can know that a key is gone: filters cannot, and a process that
        stored it itself may miss a deletion that is in a base already, until its first 404.
        """
        return MODES[number] == "exact" and key.digest not in self.readers[number].index._recent

    @rule(number=readers, key=keys)
    def fetch(self, number: int, key: Key) -> None:
        index = self.readers[number].index
        if index.maybe_contains(key) and not self.is_there(key):
            index.mark_missing(key, absent=True)
            assert not index.maybe_contains(key)

    @rule(number=readers)
    def restart_reader(self, number: int) -> None:
        if number >= len(SKEWS_S):
            self.run(self.readers[number].close())
            folder = self.folder / str(number)
            self.readers[number] = Reader(self.corpus, folder, mode=MODES[number])

    # -- always ------------------------------------------------------------------------------

    @invariant()
    def what_was_told_is_true(self) -> None:
        assert all(self.is_there(key) == there for key, there in self.told.items())

    def teardown(self) -> None:
        try:
            self.runner.run(self._come_to_rest())
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)

    async def _come_to_rest(self) -> None:
        """After quiescence all agree, and after a rebuild they are right."""
        for announcer in self.announcers:
            await announcer.flush()
            announcer.close()
        self.pass_time(NEGATIVE_TTL_S + 1)
        await self._all_know(self.told)
        await compact(self.memory, LAYOUT, self.options)
        await self._all_know(self.told)
        await rebuild(self.memory, LAYOUT, self.options)
        await self._all_know({key: self.is_there(key) for key in KEYS})
        assert (await verify(self.memory, LAYOUT)).agrees
        assert self.memory.check() == []
        for reader in self.readers:
            await reader.close()

    async def _all_know(self, told: dict[Key, bool]) -> None:
        found: dict[Key, set[bool]] = {key: set() for key in KEYS}
        for number, reader in enumerate(self.readers):
            await reader.refresh()
            for key in KEYS:
                contains = reader.index.maybe_contains(key)
                assert contains or not told.get(key), key.digest.hex()
                if self._must_know(number, key):
                    found[key].add(contains)
                    assert not contains or told.get(key) is not False, key.digest.hex()
        assert all(len(answers) < 2 for answers in found.values())


TestManifest = pytest.mark.slow(Manifest.TestCase)
TestManifest.settings = settings(max_examples=20, stateful_step_count=30)

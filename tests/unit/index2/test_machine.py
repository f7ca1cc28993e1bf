# SPDX-License-Identifier: Apache-2.0
"""The index against a dictionary: writers, two makers, a gc, kills, late deltas, wrong clocks.

Held after each refresh: a key whose object is there and that a delta told of in time is found, and
nothing is found that was never stored. Held at the end: what is missed or believed by mistake ends
with the first listing that begins fifteen minutes later.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from s3ec.counters import Counters
from s3ec.index2 import listing, maker
from s3ec.index2.delete import delete_chosen
from s3ec.index2.deltas import Announcer, encode_delta
from s3ec.index2.local import NodeFolder
from s3ec.index2.maker import Made, make_union, rebuild
from s3ec.index2.names import MARGIN_S, Names, ServerClock, deltas_prefix
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from tests.support.clock import Clock
from tests.support.waiting import until
from tests.unit.index2.corpus import LAYOUT, NAMESPACE, REFRESH_S, Corpus, Reader, key_of

KEYS = st.integers(0, 7)
MAKERS = st.integers(0, 1)
SECONDS = st.sampled_from([1, 30, 300, 890, 1000, 4000])
YEAR_S = 3.2e7


class Work:
    """A maker that is held where it writes its snapshot."""

    def __init__(self, loop: asyncio.AbstractEventLoop, corpus: Corpus) -> None:
        self.gate = Gate()
        script = Script([Fault(op="put_if_absent", name="/snapshot/", gate=self.gate)])
        self.store = FaultStore(corpus.store, script)
        self._loop = loop
        self.task: asyncio.Task[Made | None] | None = None

    def begin(self, work: Coroutine[Any, Any, Made | None]) -> None:
        self.task = self._loop.create_task(work)
        self._loop.run_until_complete(self._settle())

    async def _settle(self) -> None:
        """Let it come to its gate, or to its end."""
        await until(lambda: self.task is None or self.task.done() or self.gate.reached.is_set())

    def end(self) -> None:
        self.gate.release()
        if self.task is not None:
            self._loop.run_until_complete(self.task)

    def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self._loop.run_until_complete(asyncio.gather(self.task, return_exceptions=True))


class IndexMachine(RuleBasedStateMachine):
    """What the bucket holds, what was told in time, and what a reader says."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.corpus = Corpus()
        self.reader = Reader(self.corpus, self.folder / "reader")
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(maker, "UNION_ROWS", 0)
        self.patch.setattr(maker, "UNION_EVERY_S", 0.0)
        self.patch.setattr(listing, "PAUSE_S", 0.0)
        self.stored: set[int] = set()  # ever
        self.there: set[int] = set()
        self.told: set[int] = set()  # in time, and there since
        self.late: list[tuple[float, str, bytes]] = []  # lands at, name, body
        self.work: dict[int, Work] = {}
        self.damaged = False

    def teardown(self) -> None:
        for work in self.work.values():
            work.kill()
        self.loop.run_until_complete(self.reader.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    # -- writers ---------------------------------------------------------------------------------

    def _put(self, key: int) -> None:
        self.corpus.save(key)
        self.stored.add(key)
        if key not in self.there:
            self.told.discard(key)
        self.there.add(key)

    @rule(key=KEYS, off_s=st.sampled_from([0.0, -600.0, 600.0, -YEAR_S, YEAR_S]))
    def save(self, key: int, off_s: float) -> None:
        self._put(key)
        clock = ServerClock(wall_clock=Clock(self.corpus.clock.now_s + off_s))
        self.loop.run_until_complete(self._announce(key, clock))
        self.told.add(key)

    async def _announce(self, key: int, clock: ServerClock) -> None:
        announcer = Announcer(self.corpus.store, LAYOUT, Counters(), pause_s=0.0, clock=clock)
        announcer.add(key_of(key), 5, lambda _: None)
        await announcer.flush()

    @rule(key=KEYS)
    def save_and_die(self, key: int) -> None:
        self._put(key)

    @rule(key=KEYS, late_s=st.sampled_from([60, 800, 3000]))
    def save_and_announce_late(self, key: int, late_s: int) -> None:
        self._put(key)
        name = Names().next(self.corpus.clock.now_s)
        body = b"".join(encode_delta([key_of(key).digest], [5], NAMESPACE))
        self.late.append((self.corpus.clock.now_s + late_s, name, body))

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        """Somebody deletes an object and tells nobody."""
        if key in self.there:
            self.corpus.drop(key)
            self.there.discard(key)
            self.told.discard(key)

    # -- makers ----------------------------------------------------------------------------------

    @rule(number=MAKERS, how=st.sampled_from(["union", "listing", "gc"]), keys=st.sets(KEYS))
    def begin_work(self, number: int, how: str, keys: set[int]) -> None:
        self.end_work(number)
        work = self.work[number] = Work(self.loop, self.corpus)
        if how == "union":
            node = NodeFolder(self.folder / f"maker{number}", clock=self.corpus.clock)
            work.begin(make_union(work.store, LAYOUT, node))
        elif how == "listing":
            work.begin(rebuild(work.store, LAYOUT))
        else:
            names = {LAYOUT.object(key_of(key)) for key in keys}
            work.begin(
                delete_chosen(
                    work.store, LAYOUT, lambda infos: [i for i in infos if i.name in names]
                )
            )
            self.there -= keys
            self.told -= keys

    @rule(number=MAKERS)
    def end_work(self, number: int) -> None:
        if number in self.work:
            self.work.pop(number).end()

    @rule(number=MAKERS)
    def kill_work(self, number: int) -> None:
        if number in self.work:
            self.work.pop(number).kill()

    @rule()
    def damage_the_newest_snapshot(self) -> None:
        """One that no reader has: where it has a predecessor, that one serves."""
        names = [
            info.name
            for _, info in self.loop.run_until_complete(
                maker.list_snapshots(self.corpus.store, LAYOUT)
            )
        ]
        mine = self.reader.index.counts().snapshot
        if not self.damaged and len(names) > 1 and not names[0].endswith(str(mine)):
            body = bytearray(self.corpus.objects[names[0]])
            body[-5] ^= 1
            self.corpus.objects[names[0]] = bytes(body)
            self.damaged = True

    # -- time and the reader ---------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: int) -> None:
        self.reader.pass_time(seconds)
        now_s = self.corpus.clock.now_s
        for each in [each for each in self.late if each[0] <= now_s]:
            self.late.remove(each)
            at_s, name, body = each
            self.corpus.put(deltas_prefix(LAYOUT) + name, body, modified_s=at_s)

    @rule()
    def refresh(self) -> None:
        self.loop.run_until_complete(self.reader.refresh())
        found = {key for key in range(8) if self.reader.index.maybe_contains(key_of(key))}
        assert found <= self.stored
        assert self.told <= found, f"{self.told - found} was told in time, and is not found"

    @rule()
    def refresh_a_new_reader(self) -> None:
        self.loop.run_until_complete(self.reader.close())
        self.reader = Reader(self.corpus, Path(tempfile.mkdtemp(dir=self.folder)))
        self.refresh()

    @rule()
    def look_as_engines_do(self) -> None:
        self.pass_time(int(REFRESH_S))
        self.loop.run_until_complete(self.reader.refresh(now=False))

    @rule()
    def end_of_the_story(self) -> None:
        """Quiet for fifteen minutes, a listing, and whatever was wrong is right."""
        for number in list(self.work):
            self.end_work(number)
        while self.late:
            self.pass_time(4000)
        self.pass_time(MARGIN_S + 60)
        self.loop.run_until_complete(rebuild(self.corpus.store, LAYOUT))
        self.loop.run_until_complete(self.reader.refresh())
        found = {key for key in range(8) if self.reader.index.maybe_contains(key_of(key))}
        assert found == self.there
        self.damaged = False


def test_the_index_is_a_dictionary_within_its_promises() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        IndexMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )

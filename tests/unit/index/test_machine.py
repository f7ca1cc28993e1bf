# SPDX-License-Identifier: Apache-2.0
"""The index against a dictionary: writers, two makers, a gc, kills, late deltas, wrong clocks.

Held after each refresh: a key whose object is there and that a delta told of in time is found.
Nothing is found that was never stored, nor what was gone when a listing began that has landed and
was told by no delta since. Held at the end: what is missed or believed by mistake ends
with the first listing that begins fifteen minutes later.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from s3ec.counters import Counters
from s3ec.index import listing, maker
from s3ec.index.delete import delete_chosen
from s3ec.index.deltas import Announcer, encode_delta
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Made, make_union, rebuild
from s3ec.index.names import MARGIN_S, Names, ServerClock, deltas_prefix, time_s
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from tests.support.clock import Clock
from tests.support.indexes import all_announced
from tests.support.waiting import until
from tests.unit.index.corpus import LAYOUT, NAMESPACE, REFRESH_S, Corpus, Reader, key_of

KEYS = st.integers(0, 3)
MAKERS = st.integers(0, 1)
SECONDS = st.sampled_from([1, 30, 300, 890, 1000])
YEAR_S = 3.2e7


@dataclass(frozen=True)
class _Late:
    """A delta under way: when it lands, and of which put of which key it tells."""

    at_s: float
    name: str
    body: bytes
    key: int
    number: int


class Work:
    """A maker that is held where it writes its snapshot."""

    def __init__(self, loop: asyncio.AbstractEventLoop, corpus: Corpus, begun_s: float) -> None:
        self.begun_s = begun_s  # of a listing
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
        self.gone_s: dict[int, float] = {}  # when its object went
        self.named_s: dict[int, float] = {}  # the newest delta that tells of it
        self.listed_s = 0.0  # when the newest listing began that has landed
        self.puts = 0
        self.put_number: dict[int, int] = {}  # of the object that is there
        self.late: list[_Late] = []
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
        self.puts += 1
        if key not in self.there:
            self.put_number[key] = self.puts
        self.there.add(key)

    def _name(self, key: int, name: str) -> None:
        self.named_s[key] = max(self.named_s.get(key, 0.0), time_s(name))

    def _drop(self, key: int) -> None:
        if key in self.there:
            self.there.discard(key)
            self.told.discard(key)
            self.gone_s[key] = self.corpus.clock.now_s

    @rule(key=KEYS, off_s=st.sampled_from([0.0, -600.0, 600.0, -YEAR_S, YEAR_S]))
    def save(self, key: int, off_s: float) -> None:
        self._put(key)
        clock = ServerClock(wall_clock=Clock(self.corpus.clock.now_s + off_s))
        self.loop.run_until_complete(self._announce(key, clock))
        self._name(key, max(self.corpus.index_names("delta")))
        self.told.add(key)

    async def _announce(self, key: int, clock: ServerClock) -> None:
        announcer = Announcer(self.corpus.store, LAYOUT, Counters(), pause_s=0.0, clock=clock)
        announcer.add(key_of(key), 5, lambda _: None)
        await all_announced(announcer)

    @rule(key=KEYS)
    def save_and_die(self, key: int) -> None:
        self._put(key)

    @rule(key=KEYS, late_s=st.sampled_from([60, 800, 3000]))
    def save_and_announce_late(self, key: int, late_s: int) -> None:
        self._put(key)
        name = Names().next(self.corpus.clock.now_s)
        body = b"".join(encode_delta([key_of(key).digest], [5], NAMESPACE))
        number = self.put_number[key]
        self.late.append(_Late(self.corpus.clock.now_s + late_s, name, body, key, number))

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        """Somebody deletes an object and tells nobody."""
        if key in self.there:
            self.corpus.drop(key)
            self._drop(key)

    # -- makers ----------------------------------------------------------------------------------

    @rule(
        number=MAKERS,
        how=st.sampled_from(["union", "union", "listing", "gc"]),
        keys=st.sets(KEYS, max_size=2),
    )
    def begin_work(self, number: int, how: str, keys: set[int]) -> None:
        self.end_work(number)
        begun_s = 0.0 if how == "union" else self.corpus.clock.now_s
        work = self.work[number] = Work(self.loop, self.corpus, begun_s)
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
            for key in keys:
                self._drop(key)

    @rule(number=MAKERS)
    def end_work(self, number: int) -> None:
        if number in self.work:
            work = self.work.pop(number)
            work.end()
            self.listed_s = max(self.listed_s, work.begun_s)

    @rule(number=MAKERS)
    def kill_work(self, number: int) -> None:
        if number in self.work:
            self.work.pop(number).kill()

    @rule(key=KEYS, late_s=st.sampled_from([60, 800]))
    def begin_a_union_while_a_delta_is_under_way(self, key: int, late_s: int) -> None:
        self.save_and_announce_late(key, late_s)
        self.pass_time(1)
        self.begin_work(0, "union", set())

    @rule(keys=st.sets(KEYS, max_size=2), how=st.sampled_from(["listing", "gc"]))
    def overtake_a_listing_by_a_union(self, keys: set[int], how: str) -> None:
        self.pass_time(1000)
        self.begin_work(0, how, keys)
        self.pass_time(30)
        self.begin_work(1, "union", set())
        self.end_work(1)

    @rule()
    def damage_the_newest_snapshot(self) -> None:
        """One that no reader has: where it has a predecessor, that one serves."""
        found = self.loop.run_until_complete(maker.list_snapshots(self.corpus.store, LAYOUT))
        mine = self.reader.index.counts().snapshot
        if not self.damaged and len(found) > 1 and found[0][0] != mine:
            name = found[0][1].name
            body = bytearray(self.corpus.objects[name])
            body[-5] ^= 1
            self.corpus.objects[name] = bytes(body)
            self.damaged = True
            # Names may be a moment later than what they name.
            self.listed_s = min(self.listed_s, time_s(found[1][0].listed) - 1)

    # -- time and the reader ---------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: int) -> None:
        self.reader.pass_time(seconds)
        now_s = self.corpus.clock.now_s
        for each in [each for each in self.late if each.at_s <= now_s]:
            self.late.remove(each)
            self.corpus.put(deltas_prefix(LAYOUT) + each.name, each.body, modified_s=each.at_s)
            self._name(each.key, each.name)
            in_time = each.at_s - time_s(each.name) < MARGIN_S
            if in_time and each.key in self.there and self.put_number[each.key] == each.number:
                self.told.add(each.key)

    @rule()
    def refresh(self) -> None:
        self.loop.run_until_complete(self.reader.refresh())
        found = {key for key in range(4) if self.reader.index.maybe_contains(key_of(key))}
        assert found <= self.stored
        assert self.told <= found, f"{self.told - found} was told in time, and is not found"
        for key in found - self.there:
            is_listed = self.gone_s[key] < self.listed_s
            is_told = self.named_s.get(key, 0.0) >= self.listed_s - MARGIN_S - 1
            assert not is_listed or is_told, f"{key} was gone before the listing, and is found"

    @rule()
    def refresh_a_new_reader(self) -> None:
        self.loop.run_until_complete(self.reader.close())
        self.reader = Reader(self.corpus, Path(tempfile.mkdtemp(dir=self.folder)))
        self.refresh()

    @rule()
    def look_as_engines_do(self) -> None:
        self.pass_time(int(REFRESH_S))
        self.loop.run_until_complete(self.reader.refresh(now=False))

    @precondition(lambda self: self.puts >= 12)
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
        found = {key for key in range(4) if self.reader.index.maybe_contains(key_of(key))}
        assert found == self.there
        self.damaged = False
        self.puts = 0


def test_the_index_is_a_dictionary_within_its_promises() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        IndexMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )

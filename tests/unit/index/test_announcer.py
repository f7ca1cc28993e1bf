# SPDX-License-Identifier: Apache-2.0
"""What reaches the bucket of what a process stored, when, and under which names."""

from __future__ import annotations

import asyncio
import logging

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, UnavailableError
from s3ec.index import deltas
from s3ec.index.deltas import Announcer, parse_delta
from s3ec.index.names import Names, ServerClock, deltas_prefix, time_s
from s3ec.index.snapshot import Segment
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from tests.support.clock import START_S, Clock
from tests.support.indexes import all_announced, sizes_in
from tests.support.waiting import reached, until
from tests.unit.index.corpus import LAYOUT, Corpus, key_of

_NEVER_S = 3600.0


class Rig:
    """One process's announcer, and what its bucket and its callers saw."""

    def __init__(
        self, corpus: Corpus, *faults: Fault, pause_s: float = 0.0, **options: object
    ) -> None:
        self.corpus = corpus
        self.counters = Counters()
        self.faults = list(faults)
        self.store = FaultStore(corpus.store, Script(self.faults))
        self.told: dict[object, list[bool]] = {}
        self.announcer = Announcer(
            self.store,
            LAYOUT,
            self.counters,
            pause_s=pause_s,
            **options,  # type: ignore[arg-type]
        )

    def add(self, *texts: object, nbytes: int = 5) -> None:
        for text in texts:
            told = self.told.setdefault(text, [])
            self.announcer.add(key_of(text), nbytes, told.append)

    def announced(self) -> list[dict[bytes, int]]:
        """Rows of each delta, by their names."""
        found = []
        for ulid in self.corpus.index_names("delta"):
            name = deltas_prefix(LAYOUT) + ulid
            rows = parse_delta(self.corpus.objects[name], LAYOUT, name)
            found.append(sizes_in(Segment.of(rows)))
        return found


def rows(*texts: object, nbytes: int = 5) -> dict[bytes, int]:
    return {key_of(text).digest: nbytes for text in texts}


async def test_nothing_is_asked_of_the_bucket_before_something_is_added(corpus: Corpus) -> None:
    rig = Rig(corpus)
    await all_announced(rig.announcer)
    assert not rig.store.calls


async def test_the_pace_goes_by_the_writers_of_the_fleet(corpus: Corpus) -> None:
    waited: list[float] = []

    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        waited.append(timeout_s)
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "_wait", wait)
        for writers in (1, 2, 10, 500):
            rig = Rig(corpus, pause_s=deltas.PAUSE_S, writers=lambda each=writers: each)
            rig.add("a")
            await until(lambda each=rig: each.told["a"] == [True])
            waited.clear()
            rig.add("b")
            await until(lambda each=rig: each.told["b"] == [True])
            assert waited[0] == pytest.approx(max(2.0, writers), abs=1.9)
            assert waited[0] >= 2.0


async def test_add_waits_for_nothing_while_a_delta_hangs(corpus: Corpus) -> None:
    gate = Gate()
    rig = Rig(corpus, Fault(op="put_if_absent", name="/delta/", gate=gate))
    rig.add("a")
    await reached(gate)
    rig.add("b")
    assert rig.told == {"a": [], "b": []}
    assert len(rig.announcer) == 2
    gate.release()
    await all_announced(rig.announcer)
    assert rig.announced() == [rows("a"), rows("b")]


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_delta_is_repeated_under_a_new_name_until_the_bucket_confirms_it(
    corpus: Corpus, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(corpus, Fault(op="put_if_absent", name="/delta/", error=error, times=3))
    rig.add("a")
    while not rig.told["a"]:
        rig.announcer.send_soon()
        await asyncio.sleep(0)
    assert rig.announced() == [rows("a")]
    puts = [name for op, name in rig.store.log if op == "put_if_absent" and "/delta/" in name]
    assert len(set(puts)) == len(puts) == 4
    assert rig.counters.get("announce_failed") == 3
    assert caplog.text.count("cannot be announced") == 1


async def test_a_lost_reply_costs_a_second_delta_and_no_more(corpus: Corpus) -> None:
    rig = Rig(corpus, Fault(op="put_if_absent", name="/delta/", lost_reply=True, times=1))
    rig.add("a")
    while not rig.told["a"]:
        rig.announcer.send_soon()
        await asyncio.sleep(0)
    assert rig.announced() == [rows("a"), rows("a")]
    assert rig.told["a"] == [True]


async def test_pauses_after_failures_grow(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        waited.append(timeout_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(deltas, "_wait", wait)
    monkeypatch.setattr(deltas.jitter, "uniform", lambda low, high: high)
    rig = Rig(corpus, Fault(op="put_if_absent", name="/delta/", error=UnavailableError, times=7))
    rig.add("a")
    await until(lambda: rig.told["a"] == [True])
    pauses = waited[1:]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1
    assert pauses[-1] == 15.0


async def test_names_are_not_below_the_newest_that_was_accepted(corpus: Corpus) -> None:
    newest = Names().next(START_S + 30)
    rig = Rig(corpus, newest=lambda: newest)
    rig.add("a")
    await all_announced(rig.announcer)
    assert corpus.index_names("delta")[0] > newest


async def test_a_clock_that_was_ahead_does_not_stay_ahead(corpus: Corpus) -> None:
    """One who could not ask at first goes on by the server's clock when it can."""
    wall = Clock(START_S + 3.2e7)
    rig = Rig(
        corpus,
        Fault(op="head", error=AccessError, times=1),
        clock=ServerClock(wall_clock=wall),
    )
    rig.add("a")
    await all_announced(rig.announcer)
    rig.announcer._until_ask = 0
    rig.add("b")
    await all_announced(rig.announcer)
    first, last = corpus.index_names("delta")
    assert time_s(last) > START_S + 1e7  # nobody told it better
    assert time_s(first) < START_S + 100


async def test_too_much_that_waits_is_refused_and_said_once(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deltas, "MAX_WAITING", 2)
    rig = Rig(corpus, pause_s=_NEVER_S)
    rig.add("a", "b", "c", "d")
    assert (rig.told["c"], rig.told["d"]) == ([False], [False])
    rig.add("a")  # it waits already
    assert caplog.text.count("wait to be announced") == 1
    await all_announced(rig.announcer)
    assert rig.told["a"] == [True, True]


async def test_a_full_batch_does_not_wait(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "BATCH_ROWS", 3)
    rig = Rig(corpus, pause_s=_NEVER_S)
    rig.add(*range(7))
    await until(lambda: len(rig.announced()) == 2)
    assert len(rig.announcer) == 1
    await all_announced(rig.announcer)
    assert [len(each) for each in rig.announced()] == [3, 3, 1]


async def test_a_batch_that_cannot_be_encoded_is_given_up_and_the_next_one_is_not(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[bytes]:
        raise RuntimeError("a fault of ours")

    rig = Rig(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(deltas, "encode_delta", broken)
        rig.add("a")
        await until(lambda: rig.told["a"] == [False])
    rig.add("b")
    await all_announced(rig.announcer)
    assert rig.announced() == [rows("b")]
    assert any(record.levelno >= logging.ERROR for record in caplog.records)


async def test_close_tells_everybody_once_and_takes_no_more(corpus: Corpus) -> None:
    gate = Gate()
    rig = Rig(corpus, Fault(op="put_if_absent", name="/delta/", gate=gate))
    rig.add("a")
    await reached(gate)
    rig.add("b")
    rig.announcer.close()
    rig.announcer.close()
    await until(lambda: rig.told == {"a": [False], "b": [False]})
    rig.add("c")
    assert rig.told["c"] == [False]
    gate.release()


async def test_a_key_added_while_the_last_batch_ends_is_announced_too(corpus: Corpus) -> None:
    rig = Rig(corpus)
    later: list[bool] = []
    rig.announcer.add(key_of("a"), 1, lambda _: rig.announcer.add(key_of("b"), 1, later.append))
    await until(lambda: later == [True])
    assert [len(each) for each in rig.announced()] == [1, 1]

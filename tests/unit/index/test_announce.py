# SPDX-License-Identifier: Apache-2.0
"""What reaches the bucket of what a process has to tell, when, and under which names and times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index import announce
from s3ec.index.announce import BATCH_ITEMS, Announcer
from s3ec.index.manifest import time_ms
from s3ec.index.rows import EntryInfo, Rows
from s3ec.index.segment import parse_segment
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from tests.support.logs import ours
from tests.support.waiting import until

LAYOUT = Layout("tiny-0123456789abcdef")
NOW_S = 1_700_000_000.0
FACTS = EntryInfo(1024, 4, 8, "bfloat16", 77)
_DEADLINE_S = 20.0
_NEVER_S = 3600.0
TRULY_OFF_S = announce.OVERLAP_S  # a clock that is so far off is corrected in names too


def key_at(number: int) -> Key:
    key = make_key(f"{number:064x}")
    assert key is not None
    return key


class Rig:
    """One process's announcer, and what its bucket and its callers saw."""

    def __init__(
        self,
        *faults: Fault,
        batch_s: float = _NEVER_S,
        known: dict[bytes, int] | None = None,
        shared: MemoryBucket | None = None,
        **more: Any,
    ) -> None:
        self.now_s = self.server_now_s = NOW_S
        self.bucket = shared or MemoryBucket()
        self.counters = Counters()
        self.faults = list(faults)
        self.store = FaultStore(
            MemoryStore(self.bucket, clock=lambda: self.server_now_s), Script(self.faults)
        )
        self.told: dict[int, list[bool]] = {}
        self.announcer = Announcer(
            self.store,
            LAYOUT,
            self.counters,
            known_time_s=lambda key: (known or {}).get(key.digest, 0),
            clock=lambda: self.now_s,
            batch_s=batch_s,
            **more,
        )

    def add(self, *numbers: int, facts: EntryInfo | None = FACTS) -> None:
        for number in numbers:
            self.announcer.add(key_at(number), facts, partial(self._done, number))

    def _done(self, number: int, confirmed: bool) -> None:
        self.told.setdefault(number, []).append(confirmed)

    def ulids(self) -> list[str]:
        ulids = [LAYOUT.delta_of(name) for name in self.bucket.objects]
        return sorted(ulid for ulid in ulids if ulid is not None)

    def deltas(self) -> list[Rows]:
        objects = self.bucket.objects
        return [
            parse_segment(objects[LAYOUT.delta(ulid)], LAYOUT.namespace) for ulid in self.ulids()
        ]


def contents(rows: Rows) -> dict[bytes, EntryInfo | int]:
    """Digest to facts, of tombstones to their time."""
    return {
        rows.digest(row): int(rows.time_s[row]) if rows.deleted[row] else rows.facts(row)
        for row in range(len(rows))
    }


def at(seconds: float) -> int:
    return int(NOW_S + seconds)


async def test_what_is_added_becomes_one_delta_with_facts_and_time() -> None:
    rig = Rig()
    rig.add(3, 1, 2)
    assert len(rig.announcer) == 3
    await rig.announcer.flush()
    (delta,) = rig.deltas()
    assert contents(delta) == {
        key_at(number).digest: FACTS._replace(time_s=at(0)) for number in (1, 2, 3)
    }
    assert rig.told == {1: [True], 2: [True], 3: [True]}
    assert rig.counters.get("announced") == 3
    assert [time_ms(ulid) for ulid in rig.ulids()] == [NOW_S * 1000]
    assert len(rig.announcer) == 0


async def test_nothing_is_asked_of_the_bucket_before_something_is_told() -> None:
    rig = Rig()
    await rig.announcer.flush()
    rig.announcer.send_soon()
    await asyncio.sleep(0)
    assert rig.store.log == []


async def test_batch_goes_out_when_its_time_has_come() -> None:
    rig = Rig(batch_s=0.01)
    rig.add(1)
    await until(lambda: rig.told == {1: [True]})
    rig.add(2)
    await until(lambda: rig.told == {1: [True], 2: [True]})
    assert len(rig.ulids()) == 2


async def test_full_batch_does_not_wait_and_what_is_over_it_does() -> None:
    rig = Rig()
    rig.add(*range(BATCH_ITEMS))
    await until(lambda: len(rig.told) == BATCH_ITEMS)
    rig.add(*range(BATCH_ITEMS, 2 * BATCH_ITEMS + 5))
    await until(lambda: len(rig.told) == 2 * BATCH_ITEMS)
    assert [len(delta) for delta in rig.deltas()] == [BATCH_ITEMS, BATCH_ITEMS]
    assert len(rig.announcer) == 5
    await rig.announcer.flush()
    assert [len(delta) for delta in rig.deltas()] == [BATCH_ITEMS, BATCH_ITEMS, 5]


async def test_hurry_sends_what_waits_and_holds_back_what_comes_later() -> None:
    gate = Gate()
    rig = Rig(Fault(op="put_if_absent", gate=gate, times=1))
    rig.add(1)
    rig.announcer.send_soon()
    await until(gate.reached.is_set)
    rig.add(2)
    gate.release()
    await until(lambda: rig.told == {1: [True]})
    rig.announcer.send_soon()
    await until(lambda: rig.told == {1: [True], 2: [True]})
    assert [len(delta) for delta in rig.deltas()] == [1, 1]


async def test_add_waits_for_nothing_while_a_delta_hangs() -> None:
    gate = Gate()
    rig = Rig(Fault(op="put_if_absent", gate=gate))
    rig.add(1)
    rig.announcer.send_soon()
    await until(gate.reached.is_set)
    rig.add(*range(2, 100))
    assert rig.told == {}
    assert len(rig.announcer) == 99
    gate.release()
    await rig.announcer.flush()
    assert len(rig.told) == 99


async def test_tombstone_of_a_key_that_waits_takes_the_place_of_its_facts() -> None:
    rig = Rig()
    rig.add(1, 2)
    rig.add(1, facts=None)
    rig.add(2, facts=None)
    rig.add(2, facts=FACTS)
    await rig.announcer.flush()
    (delta,) = rig.deltas()
    assert contents(delta) == {
        key_at(1).digest: at(0),
        key_at(2).digest: FACTS._replace(time_s=at(0)),
    }
    assert rig.told == {1: [True, True], 2: [True, True, True]}


@pytest.mark.parametrize("facts", [FACTS, None])
async def test_row_is_later_than_the_one_that_the_index_knows(facts: EntryInfo | None) -> None:
    known = {1: at(500), 2: at(-500), 3: 2**32 - 1}  # the last one is as late as can be
    rig = Rig(known={key_at(number).digest: time_s for number, time_s in known.items()})
    rig.add(1, 2, 3, facts=facts)
    await rig.announcer.flush()
    (delta,) = rig.deltas()
    assert dict(zip(map(delta.digest, range(3)), delta.time_s.tolist(), strict=True)) == {
        key_at(1).digest: at(501),
        key_at(2).digest: at(0),
        key_at(3).digest: 2**32 - 1,
    }


# The bucket does not answer


def pause_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(announce, "DENIED_PAUSE_S", 0.001)


async def test_delta_is_repeated_until_the_bucket_confirms_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pause_shortly(monkeypatch)
    rig = Rig(
        Fault(op="put_if_absent", error=UnavailableError, times=2),
        Fault(op="put_if_absent", error=AccessError, times=2),
    )
    rig.add(1)
    await rig.announcer.flush()
    assert rig.told == {1: [True]}
    assert len(rig.deltas()) == 1
    assert rig.counters.get("announce_failed") == 4
    assert rig.counters.get("announced") == 1
    assert caplog.text.count("cannot be announced") == 1


async def test_pauses_after_failures_grow_and_are_drawn_at_random() -> None:
    drawn_from: list[tuple[float, float]] = []

    def draw(least_s: float, most_s: float) -> float:
        drawn_from.append((least_s, most_s))
        return 0.0

    rig = Rig(Fault(op="put_if_absent", error=UnavailableError, times=7), uniform=draw)
    rig.add(1)
    await rig.announcer.flush()
    assert rig.told == {1: [True]}
    assert drawn_from == [(most_s / 2, most_s) for most_s in (0.5, 1, 2, 4, 8, 15, 15)]


async def test_lost_reply_of_a_delta_is_a_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    pause_shortly(monkeypatch)
    rig = Rig(Fault(op="put_if_absent", lost_reply=True, times=1))
    rig.add(1)
    await rig.announcer.flush()
    assert rig.told == {1: [True]}
    assert len(rig.deltas()) == 1


async def test_delta_that_comes_late_has_a_fresh_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name from the start of a long outage lies further back than readers look."""
    pause_shortly(monkeypatch)
    dead = Fault(op="put_if_absent", error=UnavailableError)
    rig = Rig(dead)
    rig.add(1)
    rig.announcer.send_soon()
    await until(lambda: dead.struck > 0)
    rig.now_s += announce.OVERLAP_S
    rig.server_now_s += announce.OVERLAP_S
    rig.faults.clear()
    await rig.announcer.flush()
    assert [time_ms(ulid) for ulid in rig.ulids()] == [at(announce.OVERLAP_S) * 1000]
    (delta,) = rig.deltas()
    assert contents(delta) == {key_at(1).digest: FACTS._replace(time_s=at(0))}


async def test_flush_waits_for_no_pause_after_a_failure() -> None:
    dead = Fault(op="put_if_absent", error=AccessError)
    rig = Rig(dead)
    rig.add(1)
    rig.announcer.send_soon()
    await until(lambda: rig.counters.get("announce_failed") == 1)
    rig.faults.clear()
    async with asyncio.timeout(_DEADLINE_S):  # much less than the pause
        await rig.announcer.flush()
    assert rig.told == {1: [True]}


async def test_hurry_during_an_attempt_that_fails_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announce, "DENIED_PAUSE_S", _NEVER_S)
    gate = Gate()
    rig = Rig(Fault(op="put_if_absent", gate=gate, error=AccessError, times=1))
    rig.add(1)
    rig.announcer.send_soon()
    await until(gate.reached.is_set)
    rig.announcer.send_soon()
    gate.release()
    await until(lambda: rig.told == {1: [True]})


async def test_too_much_that_waits_is_refused_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce, "MAX_WAITING", 3)
    rig = Rig()
    rig.add(1, 2, 3, 4, 5)
    assert rig.told == {4: [False], 5: [False]}
    assert caplog.text.count("s3ec manifest rebuild") == 1
    await rig.announcer.flush()
    assert rig.told == {1: [True], 2: [True], 3: [True], 4: [False], 5: [False]}


@pytest.mark.parametrize("kind", [ValueError, BaseException])
async def test_batch_that_cannot_be_encoded_is_given_up_and_the_next_one_is_not(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    encode = announce.encode_segment
    refused = [True]

    def refuse_once(rows: Rows, namespace: str) -> list[bytes | memoryview]:
        if refused.pop() if refused else False:
            raise kind("a fault of ours")
        return encode(rows, namespace)

    monkeypatch.setattr(announce, "encode_segment", refuse_once)
    with caplog.at_level(logging.CRITICAL):
        rig.add(1)
        await rig.announcer.flush()
    assert rig.told == {1: [False]}
    assert rig.counters.get("internal_errors") == 1
    rig.add(2)
    await rig.announcer.flush()
    assert rig.told == {1: [False], 2: [True]}


# Its end


async def give_up_before_it_starts(rig: Rig) -> None:
    rig.add(1)
    rig.announcer.close()


async def give_up_while_it_collects(rig: Rig) -> None:
    rig.add(1)
    await asyncio.sleep(0)
    rig.announcer.close()


async def give_up_while_it_sends(rig: Rig) -> None:
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", gate=gate))
    rig.add(2)
    rig.announcer.send_soon()
    await until(gate.reached.is_set)
    rig.add(1)
    rig.announcer.close()


async def give_up_with_the_loop(rig: Rig) -> None:
    rig.add(1)
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@pytest.mark.parametrize(
    "give_up",
    [
        give_up_before_it_starts,
        give_up_while_it_collects,
        give_up_while_it_sends,
        give_up_with_the_loop,
    ],
)
async def test_close_tells_everybody_once_and_takes_no_more(
    give_up: Callable[[Rig], Awaitable[None]],
) -> None:
    rig = Rig()
    await give_up(rig)
    await until(lambda: 1 in rig.told)
    await rig.announcer.flush()
    rig.add(3)
    rig.announcer.close()
    assert set(rig.told) >= {1, 3}
    assert all(answers == [False] for answers in rig.told.values())
    assert rig.ulids() == []
    assert len(rig.announcer) == 0


@pytest.mark.parametrize("later", [False, True])
async def test_key_added_while_the_last_batch_ends_is_announced_too(later: bool) -> None:
    rig = Rig()

    def add_another(_: bool) -> None:
        if later:  # the task has looked by then, and is not yet over
            asyncio.get_running_loop().call_soon(rig.add, 2)
        else:
            rig.add(2)

    rig.announcer.add(key_at(1), FACTS, add_another)
    await rig.announcer.flush()
    await until(lambda: len(rig.announcer) == 1)
    await rig.announcer.flush()
    assert rig.told == {2: [True]}


# Clocks


@pytest.mark.parametrize("off_s", [-TRULY_OFF_S, TRULY_OFF_S])
async def test_writer_whose_clock_is_far_off_announces_again_under_the_right_time(
    off_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.now_s += off_s
    rig.add(1)
    await rig.announcer.flush()
    assert sorted(time_ms(ulid) for ulid in rig.ulids()) == sorted([at(0) * 1000, at(off_s) * 1000])
    by_time = {
        time_ms(ulid): contents(rows) for ulid, rows in zip(rig.ulids(), rig.deltas(), strict=True)
    }
    assert by_time[at(0) * 1000] == {key_at(1).digest: FACTS._replace(time_s=at(0))}
    assert rig.told == {1: [True]}
    assert rig.counters.get("announced") == 1
    assert "clock is" in caplog.text

    rig.now_s += 10
    rig.server_now_s += 10
    rig.add(2)
    await rig.announcer.flush()
    assert len(rig.ulids()) == 3
    assert at(10) * 1000 in [time_ms(ulid) for ulid in rig.ulids()]
    assert rig.store.calls["head"] == 1


@pytest.mark.parametrize("off_s", [-2.0, -1.0, 1.0, 2.0])
async def test_writer_whose_clock_is_as_good_as_right_announces_once(off_s: float) -> None:
    rig = Rig()
    rig.now_s += off_s
    for number in (1, 2):
        rig.add(number)
        await rig.announcer.flush()
    assert [time_ms(ulid) // 1000 for ulid in rig.ulids()] == [at(off_s)] * 2


@pytest.mark.parametrize("off_s", [-240.0, -60.0, -3.0, 3.0, 60.0])
async def test_writer_whose_clock_is_a_little_off_announces_the_first_again_without_a_word(
    off_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """By too early a time it would lose against a deletion of what it has stored again."""
    rig = Rig()
    rig.now_s += off_s
    rig.add(1)
    await rig.announcer.flush()
    times = {int(rows.time_s[0]) for rows in rig.deltas()}
    assert times == {at(off_s), at(0)}
    assert ours(caplog) == []
    rig.add(2)
    await rig.announcer.flush()
    assert len(rig.ulids()) == 3
    told = [contents(rows) for rows in rig.deltas()]
    assert [{key_at(2).digest: FACTS._replace(time_s=at(0))}] == [
        rows for rows in told if key_at(2).digest in rows
    ]


async def test_clock_is_looked_at_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "CALIBRATE_EVERY", 3)
    rig = Rig()
    for number in range(7):
        rig.add(number)
        await rig.announcer.flush()
    assert rig.store.calls["head"] == 3


async def test_delta_that_was_long_on_its_way_does_not_move_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reply was lost, the next attempt found it: it is as old as the first one."""
    pause_shortly(monkeypatch)
    rig = Rig(
        Fault(op="put_if_absent", lost_reply=True, times=1),
        Fault(op="put_if_absent", error=UnavailableError),
    )
    rig.add(1)
    rig.announcer.send_soon()
    await until(lambda: rig.faults[1].struck > 0)
    rig.now_s += 50
    rig.server_now_s += 50
    rig.faults.clear()
    await rig.announcer.flush()
    rig.add(2)
    await rig.announcer.flush()
    assert [time_ms(ulid) for ulid in rig.ulids()] == [at(0) * 1000, at(50) * 1000]


@pytest.mark.parametrize(
    ("fault", "looks"),
    [
        (Fault(op="head", error=AccessError), 1),
        (Fault(op="head", error=UnavailableError, times=1), 2),
    ],
)
async def test_server_that_does_not_tell_its_time_is_no_problem(fault: Fault, looks: int) -> None:
    rig = Rig(fault)
    rig.now_s += TRULY_OFF_S
    for number in range(3):
        rig.add(number)
        await rig.announcer.flush()
    assert rig.told == {0: [True], 1: [True], 2: [True]}
    assert rig.store.calls["head"] == looks


async def test_two_writers_never_share_a_name() -> None:
    bucket = MemoryBucket()
    rigs = [Rig(shared=bucket) for _ in range(2)]
    for number in range(20):
        for rig in rigs:
            rig.add(number)
        await asyncio.gather(*(rig.announcer.flush() for rig in rigs))
    assert len(rigs[0].ulids()) == 40

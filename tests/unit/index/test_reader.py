# SPDX-License-Identifier: Apache-2.0
"""What a reader finds: bases, deltas, deletions, its own stores; and what a refresh asks for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key, make_key
from s3ec.index.lookup import View
from s3ec.index.manifest import OVERLAP_S
from s3ec.index.rows import EntryInfo, Tombstone
from s3ec.testing.fault_store import Fault, Gate, flip
from tests.support.clock import START_S
from tests.support.file_calls import file_calls_of
from tests.support.logs import ours
from tests.support.waiting import reached, until
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.corpus import HOUR_S, Corpus, Reader, rows_of

MakeReader = Callable[..., Reader]


async def test_the_gauges_say_how_old_the_index_is_and_how_late_news_comes(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a", "b"))
    corpus.delta("c", time_s=corpus.clock.now_s - HOUR_S)  # of before this reader
    reader.clock.now_s += 7
    assert reader.index.levels()["level.index_age_seconds"] == 7
    await reader.refresh()
    found = reader.index.levels()
    assert found["level.index_age_seconds"] == 0
    assert found["level.index_entries"] == 3
    assert "level.index_lag_seconds" not in found
    corpus.clock.now_s += 60
    corpus.delta("d")
    corpus.clock.now_s += 12
    reader.clock.now_s += 5
    await reader.refresh()
    found = reader.index.levels()
    assert found["level.index_age_seconds"] == 0
    assert found["level.index_lag_seconds"] == pytest.approx(12, abs=1)
    assert found["level.index_entries"] == 4


async def test_a_refresh_that_failed_leaves_the_index_as_old_as_it_was(reader: Reader) -> None:
    await reader.refresh()
    reader.script.faults = [Fault(op="list", error=UnavailableError)]
    reader.clock.now_s += 30
    with pytest.raises(UnavailableError):
        await reader.refresh()
    assert reader.index.levels()["level.index_age_seconds"] == 30


# -- what is found -----------------------------------------------------------------------------


async def test_a_fresh_reader_holds_nothing(reader: Reader) -> None:
    assert reader.finds("a") == [False]
    assert not reader.index.loaded
    assert reader.index.facts(key_of("a")) is None
    assert reader.index.known_time_s(key_of("a")) == 0


async def test_a_base_and_the_deltas_after_it_are_found(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a", "b"))
    corpus.delta("c")
    await reader.refresh()
    assert reader.finds("a", "b", "c", "d") == [True, True, True, False]
    assert reader.index.loaded


async def test_the_loop_makes_no_call_that_a_disk_has_to_answer(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.base(1, rows_of("a", "b"))
    calls = file_calls_of(threading.get_ident(), monkeypatch)
    corpus.delta("c")
    await reader.refresh()
    head = corpus.base(2, rows_of("a", "b", "d"))
    bad = head.segment_name(LAYOUT, head.shards[0])
    corpus.put(bad, flip(-9)(corpus.objects[bad]))
    await reader.refresh()
    corpus.base(3, rows_of("a", "b", "d"))
    await reader.refresh()
    assert reader.finds("a", "c", "d") == [True, True, True]
    assert calls == []


async def test_deltas_alone_are_found_beside_what_is_listed(corpus: Corpus, reader: Reader) -> None:
    corpus.store("a")
    corpus.delta("b")
    await reader.refresh()
    assert reader.finds("a", "b", "c") == [True, True, False]
    assert reader.index.holds(key_of("a"))


async def test_an_empty_bucket_is_fine(reader: Reader) -> None:
    await reader.refresh()
    assert reader.finds("a") == [False]
    assert reader.index.loaded


async def test_a_base_without_keys_is_fine(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of())
    await reader.refresh()
    assert reader.finds("a") == [False]


async def test_facts_come_from_the_latest_row(corpus: Corpus, reader: Reader) -> None:
    old = EntryInfo(1000, 4, 32, "bfloat16", 7, int(START_S))
    new = old._replace(rows=8, time_s=int(START_S) + 5)
    corpus.base(1, rows_of((key_of("a"), old), (key_of("b"), new)))
    corpus.delta((key_of("a"), new), (key_of("b"), old))
    await reader.refresh()
    assert reader.index.facts(key_of("a")) == new
    assert reader.index.facts(key_of("b")) == new
    assert reader.index.known_time_s(key_of("a")) == new.time_s


async def test_strange_identifiers_are_found(corpus: Corpus, reader: Reader) -> None:
    keys = [make_key(text) for text in ("図.png", "a b", "x:y:z", "\u00e9" * 1000)]
    known = [key for key in keys if key is not None]
    assert len(known) == 4
    corpus.base(1, rows_of(*known[:2]))
    corpus.delta(*known[2:])
    await reader.refresh()
    assert reader.finds(*known) == [True] * 4


# -- what a refresh asks for -------------------------------------------------------------------


async def test_an_idle_refresh_is_one_listing_and_nothing_else(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta("b")
    await reader.refresh()
    for _ in range(70):  # listings from the start are among them
        assert await reader.calls() == {"list": 1}


async def test_an_idle_refresh_without_a_base_lists_objects_rarely(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.store("a")
    await reader.refresh()
    assert await reader.calls() == {"list": 1}
    assert reader.store.log == [("list", LAYOUT.manifest)]
    reader.clock.now_s += 601
    assert await reader.calls() == {"list": 2}


async def test_merged_deltas_are_not_downloaded_by_a_fresh_reader(
    corpus: Corpus, reader: Reader
) -> None:
    merged = [corpus.delta(number) for number in range(20)]
    corpus.base(1, rows_of(*range(20)), merged=merged, shards=4)
    corpus.delta("b")
    assert await reader.calls() == {"list": 2, "get": 2, "get_range": 4}
    assert reader.finds(*range(20), "b") == [True] * 21


@pytest.mark.slow
async def test_the_order_of_a_listing_at_the_page_boundary_does_not_matter(
    corpus: Corpus, reader: Reader
) -> None:
    for number in range(1000):
        corpus.delta(number)
    await reader.refresh()
    assert all(reader.finds(*range(1000)))
    corpus.delta(1000)
    corpus.delta(1001)
    calls = await reader.calls()
    assert calls == {"list": 1, "get": 2}
    assert all(reader.finds(*range(1002)))


async def test_a_failed_listing_is_raised_and_what_is_known_stays(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    for kind in (UnavailableError, AccessError):
        reader.script.faults = [Fault(op="list", error=kind)]
        with pytest.raises(kind):
            await reader.refresh()
    assert reader.finds("a") == [True]


@pytest.mark.parametrize("what", ["delta", "head", "base"])
async def test_a_failed_download_is_tried_again_by_the_next_refresh(
    corpus: Corpus, reader: Reader, what: str
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta("b")
    reader.script.faults = [Fault(op="get.*", name=f"/{what}/", error=UnavailableError, times=1)]
    with pytest.raises(UnavailableError):
        await reader.refresh()
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_a_delta_that_the_bucket_cannot_read_keeps_back_neither_others_nor_a_base(
    corpus: Corpus, make_reader: MakeReader, error: type[Exception]
) -> None:
    bad, _ = corpus.delta("bad"), corpus.delta("good")
    corpus.base(1, rows_of("old"))
    reader = make_reader()
    reader.script.faults = [Fault(op="get", name=bad, error=error)]
    with pytest.raises(error):
        await reader.refresh()
    assert reader.finds("old", "good", "bad") == [True, True, False]
    corpus.delta("later")
    corpus.base(2, rows_of("old", "new"))
    with pytest.raises(error):
        await reader.refresh()
    assert reader.finds("new", "good", "later", "bad") == [True, True, True, False]
    reader.script.faults = []
    reader.clock.now_s += 60.0
    await reader.refresh()
    assert reader.finds("bad") == [True]


async def test_deltas_that_cannot_be_read_are_asked_for_seldom(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """Requests that fail one after the other open the breaker, and with it the whole cache."""
    bad = [corpus.delta(f"bad {number}") for number in range(8)]
    reader = make_reader()
    reader.script.faults = [Fault(op="get", name="|".join(bad), error=UnavailableError)]
    asked = []
    for _ in range(20):
        corpus.delta(f"good {len(asked)}")
        with pytest.raises(UnavailableError):
            await reader.refresh()
        asked.append(reader.script.faults[0].struck)
        reader.clock.now_s += 10.0
    assert asked[0] == 8
    assert asked[1] - asked[0] == 2
    assert asked[-1] <= 8 + 2 * 4
    assert all(reader.finds(*(f"good {number}" for number in range(20))))
    reader.script.faults = []
    reader.clock.now_s += 60.0
    await reader.refresh()
    assert all(reader.finds(*(f"bad {number}" for number in range(8))))


# -- clocks ------------------------------------------------------------------------------------


async def test_new_deltas_are_applied_by_the_next_refresh(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    for number in range(5):
        corpus.clock.now_s += 10
        corpus.delta(number)
        assert await reader.calls() == {"list": 1, "get": 1}
        assert reader.finds("a", *range(number + 1)) == [True] * (number + 2)


async def test_a_writer_an_hour_ahead_hides_nobody_elses_deltas(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta("fast", ahead_s=HOUR_S)
    await reader.refresh()
    for number in range(60):
        corpus.clock.now_s += 60
        corpus.delta(number)
        await reader.refresh()
        assert reader.finds("fast", number) == [True, True]


async def test_a_writer_an_hour_behind_is_found_by_a_listing_from_the_start(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    for _ in range(3):
        corpus.clock.now_s += 60
        corpus.delta("usual")
        await reader.refresh()
    corpus.delta("slow", ahead_s=-HOUR_S)
    for _ in range(30):
        await reader.refresh()
    assert reader.finds("slow") == [True]


async def test_a_writer_some_minutes_behind_is_found_at_once(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta("usual")
    await reader.refresh()
    corpus.delta("slow", ahead_s=-300)
    await reader.refresh()
    assert reader.finds("slow") == [True]


async def test_a_store_without_times_goes_by_names(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a"))
    for number in range(5):
        corpus.clock.now_s += 60
        corpus.delta(number)
        corpus.memory.bucket.modified_s.clear()
        await reader.refresh()
        assert reader.finds(number) == [True]


# -- deletions and rewriting -------------------------------------------------------------------


async def test_tombstones_are_honoured(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a", "b"))
    await reader.refresh()
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 1)))
    await reader.refresh()
    assert reader.finds("a", "b") == [False, True]
    assert not reader.index.holds(key_of("a"))
    assert reader.index.facts(key_of("a")) is None
    assert reader.index.known_time_s(key_of("a")) == int(START_S) + 1


async def test_a_tombstone_that_is_older_than_the_base_deletes_nothing(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a", time_s=START_S))
    corpus.delta((key_of("a"), Tombstone(int(START_S) - 1)))
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert reader.index.holds(key_of("a"))
    assert reader.index.facts(key_of("a")) is not None


async def test_deleted_and_written_again_is_found_again(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 1)))
    await reader.refresh()
    corpus.delta("a", time_s=START_S + 2)
    await reader.refresh()
    assert reader.finds("a") == [True]


@pytest.mark.parametrize("told_first", ["stored", "deleted"])
async def test_of_one_second_a_deletion_counts_whatever_is_told_first(
    corpus: Corpus, make_reader: MakeReader, told_first: str
) -> None:
    """A writer tells some seconds later what it has stored. Readers hear of both in any order."""
    early, late = make_reader("early"), make_reader("late")
    corpus.base(1, rows_of("b"))
    dead = (key_of("a"), Tombstone(int(START_S)))
    stored_s, dead_s = (1, 2) if told_first == "stored" else (2, 1)
    corpus.delta("a", ahead_s=stored_s, time_s=START_S)
    await early.refresh()
    corpus.delta(dead, ahead_s=dead_s)
    await early.refresh()
    await late.refresh()
    assert early.finds("a") == late.finds("a") == [False]


async def test_a_delta_that_appears_late_costs_no_second_look_at_the_others(
    corpus: Corpus, reader: Reader
) -> None:
    """Whatever the backlog, and also where this node's disk has lost it."""
    corpus.base(1, rows_of("base"))
    corpus.delta("a", ("twice", EntryInfo(rows=2, time_s=7)))
    corpus.delta("b")
    await reader.refresh()
    for file in list(reader.files.walk()):
        reader.files.remove(file.name)
    late = corpus.delta("late", ("twice", EntryInfo(rows=1, time_s=7)), ahead_s=-30.0)
    assert await reader.calls() == {"list": 1, "get": 1}
    assert reader.store.log[-1] == ("get", LAYOUT.delta(late))
    assert reader.finds("a", "b", "late") == [True] * 3
    twice = reader.index.facts(key_of("twice"))
    assert twice is not None
    assert twice.rows == 2  # the delta with the later name


async def test_own_stores_are_found_at_once_and_after_their_delta(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("b"))
    await reader.refresh()
    facts = EntryInfo(100, 4, 32, "bfloat16", 1)
    reader.index.add(key_of("a"), facts)
    assert reader.finds("a") == [True]
    assert reader.index.holds(key_of("a"))
    known = reader.index.facts(key_of("a"))
    assert known == facts._replace(time_s=int(START_S))
    corpus.delta((key_of("a"), facts._replace(time_s=int(START_S))))
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert reader.index.facts(key_of("a")) == known
    # Told by the delta now: a deletion of it counts.
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 1)))
    await reader.refresh()
    assert reader.finds("a") == [False]


async def test_an_own_store_is_later_than_a_deletion_by_a_clock_that_is_ahead(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("b"))
    corpus.delta((key_of("a"), Tombstone(int(START_S + HOUR_S))), ahead_s=HOUR_S)
    await reader.refresh()
    reader.index.add(key_of("a"))
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert reader.index.known_time_s(key_of("a")) == int(START_S + HOUR_S) + 1


@pytest.mark.parametrize("mode", ["exact", "bloom"])
async def test_an_own_store_that_others_deleted_and_a_base_has_merged_is_not_found_for_ever(
    corpus: Corpus, make_reader: MakeReader, mode: str
) -> None:
    reader = make_reader(mode=mode)
    corpus.base(1, rows_of("b"))
    await reader.refresh()
    reader.index.add(key_of("a"))
    # Announced, deleted and merged between two refreshes: nothing names the key any more.
    corpus.base(2, rows_of("b"))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]  # its delta may be on its way
    reader.index.add(key_of("later"))
    reader.clock.now_s += OVERLAP_S - 1
    reader.index.add(key_of("later"))
    reader.clock.now_s += 2
    await reader.refresh()
    assert reader.finds("a", "b", "later") == [False, True, True]
    assert reader.index.facts(key_of("a")) is None


async def test_an_own_store_of_the_moment_in_which_an_older_one_is_settled_is_found(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.base(1, rows_of("b"))
    await reader.refresh()
    reader.index.add(key_of("a"))
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 1)))

    def knows_of(view: View, digest: bytes, facts: EntryInfo) -> bool:
        monkeypatch.undo()
        found = view.knows_of(digest, facts)
        reader.index.add(key_of("a"))  # as the scheduler's thread may
        return found

    monkeypatch.setattr(View, "knows_of", knows_of)
    await reader.refresh()
    assert reader.finds("a") == [True]


async def test_an_own_store_is_found_as_long_as_there_is_no_base(
    corpus: Corpus, reader: Reader
) -> None:
    await reader.refresh()
    reader.index.add(key_of("a"))
    reader.clock.now_s += OVERLAP_S - 1
    await reader.refresh()
    reader.clock.now_s += 2
    await reader.refresh()
    assert reader.finds("a") == [True]


# -- new bases ---------------------------------------------------------------------------------


async def test_a_new_base_replaces_the_old_one_and_its_deltas(
    corpus: Corpus, reader: Reader
) -> None:
    old = corpus.base(1, rows_of("a"))
    merged = corpus.delta("b")
    await reader.refresh()
    left = corpus.delta("c")
    new = corpus.base(2, rows_of("a", "b"), merged=[merged])
    await reader.refresh()
    assert reader.finds("a", "b", "c", "d") == [True, True, True, False]
    assert reader.here() == {
        f"delta/{left}.safetensors",
        *(new.segment_name(LAYOUT, shard).removeprefix(LAYOUT.manifest) for shard in new.shards),
    }
    corpus.drop_base(old)
    assert await reader.calls() == {"list": 1}


async def test_a_delta_of_any_age_that_is_not_merged_is_applied(
    corpus: Corpus, reader: Reader
) -> None:
    late = corpus.delta("late", ahead_s=-24 * HOUR_S)
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    assert reader.finds("late") == [True]
    corpus.base(2, rows_of("a", "late"), merged=[late])
    await reader.refresh()
    assert reader.finds("late") == [True]
    assert f"delta/{late}.safetensors" not in reader.here()


@pytest.mark.parametrize("mode", ["exact", "bloom"])
async def test_deltas_of_a_base_that_a_reader_passed_over_are_dropped(
    corpus: Corpus, make_reader: MakeReader, mode: str
) -> None:
    """The newest head does not name them any more; an old tombstone would hide a new key."""
    reader = make_reader(mode=mode)
    corpus.base(1, rows_of("b"))
    dead = corpus.delta((key_of("a"), Tombstone(int(START_S))))
    await reader.refresh()
    corpus.base(2, rows_of("b"), merged=[dead])
    corpus.delete(LAYOUT.delta(dead))
    corpus.base(3, rows_of("b", (key_of("a"), EntryInfo(time_s=int(START_S) + 1))))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]
    assert reader.index.counts() == (0, 0, 2)


async def test_a_base_is_downloaded_beside_the_refreshes(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader(patience_s=0.0)
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    await until(lambda: reader.index.loaded)
    await reader.refresh()
    gate = Gate()
    reader.script.faults = [Fault(op="get_range", gate=gate, times=1)]
    merged = corpus.delta("b")
    corpus.base(2, rows_of("a", "b", "c"), merged=[merged])
    await reader.refresh()
    await reached(gate)
    assert reader.finds("a", "b", "c") == [True, True, False]
    corpus.delta("d")
    await reader.refresh()
    assert reader.finds("a", "b", "c", "d") == [True, True, False, True]
    gate.release()
    await until(lambda: reader.finds("c") == [True])
    assert reader.finds("a", "b", "c", "d") == [True] * 4


async def test_deltas_that_are_listed_while_others_are_downloaded_are_not_lost(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """A look from the start, for a new base, finds one that no usual look shows."""
    reader = make_reader(patience_s=0.0)
    corpus.base(1, rows_of("a"))
    corpus.delta("b")
    await reader.refresh()
    await until(lambda: reader.index.loaded)
    await reader.refresh()
    base_gate, delta_gate = Gate(), Gate()
    reader.script.faults = [
        Fault(op="get_range", gate=base_gate),
        Fault(op="get", name="/delta/", gate=delta_gate, times=1),
    ]
    corpus.base(2, rows_of("a"))
    await reader.refresh()
    await reached(base_gate)
    corpus.delta("c")
    refresh = asyncio.ensure_future(reader.refresh())
    await reached(delta_gate)
    corpus.delta("slow", ahead_s=-HOUR_S)
    base_gate.release()
    await until(lambda: reader.counters.get("index.bases") == 2)
    delta_gate.release()
    await refresh
    await reader.refresh()
    assert reader.finds("a", "b", "c", "slow") == [True] * 4


async def test_a_corpus_whose_index_started_over_is_followed(
    corpus: Corpus, reader: Reader
) -> None:
    """Somebody deleted the manifest, and had it made anew: versions begin at 1 again."""
    old = corpus.base(7, rows_of("a", "gone"))
    corpus.delta("b")
    await reader.refresh()
    corpus.drop_base(old)
    await reader.refresh()
    assert reader.finds("a", "b", "gone") == [True] * 3
    corpus.base(1, rows_of("a", "new"))
    await reader.refresh()
    assert reader.finds("a", "b", "gone", "new") == [True, True, False, True]
    assert await reader.calls() == {"list": 1}
    corpus.base(2, rows_of("a", "newer"))
    await reader.refresh()
    assert reader.finds("new", "newer") == [False, True]


async def test_a_namespace_that_was_deleted_under_a_reader_is_empty(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(3, rows_of("a"))
    corpus.delta("b")
    await reader.refresh()
    corpus.delete(*[name for name in corpus.objects if name.startswith(LAYOUT.everything)])
    for _ in range(30):
        await reader.refresh()
    assert reader.finds("a", "b") == [False, False]
    assert reader.index.counts() == (0, 0, 0)
    corpus.store("b")
    corpus.delta("b")
    await reader.refresh()
    assert reader.finds("a", "b") == [False, True]
    corpus.base(1, rows_of("b", "c"))
    await reader.refresh()
    assert reader.finds("a", "b", "c") == [False, True, True]


async def test_a_reader_whose_heads_are_gone_keeps_its_base_until_the_objects_are_listed(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader(patience_s=0.0)
    corpus.store("a")
    corpus.base(3, rows_of("a", "gone"))
    await reader.refresh()
    await until(lambda: reader.index.loaded)
    corpus.delete(LAYOUT.head(3))
    gate = Gate()
    reader.script.faults = [Fault(op="list", name="/objects/", gate=gate)]
    for _ in range(30):
        await reader.refresh()
    await reached(gate)
    assert reader.finds("a", "gone") == [True, True]
    gate.release()
    await until(lambda: reader.finds("gone") == [False])
    assert reader.finds("a") == [True]


async def test_one_listing_without_a_head_is_not_believed(corpus: Corpus, reader: Reader) -> None:
    head = corpus.base(3, rows_of("a"))
    await reader.refresh()
    for _ in range(29):
        await reader.refresh()
    corpus.delete(LAYOUT.head(3))
    gate = Gate()
    reader.script.faults = [Fault(op="list", name="/manifest/", gate=gate, skip=1)]
    looking = asyncio.create_task(reader.refresh())
    await reached(gate)
    corpus.put(LAYOUT.head(3), head.to_json())
    gate.release()
    await looking
    assert "/objects/" not in "".join(name for _, name in reader.store.log)
    assert reader.finds("a") == [True]


async def test_a_reader_whose_base_cannot_be_opened_drops_what_was_merged_with_each_listing(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader(budget_bytes=2000, mode="exact")
    corpus.base(1, rows_of(*range(200)))
    merged, gone = corpus.delta("deleted", "stays"), corpus.delta("long ago")
    await reader.refresh()
    assert reader.finds("deleted", "stays", "long ago") == [True] * 3
    corpus.store("stays", "later")
    corpus.delta("later")
    corpus.base(2, rows_of(*range(200), "stays"), merged=[merged])
    corpus.delete(LAYOUT.delta(gone))
    reader.clock.now_s += 601
    await reader.refresh()
    assert reader.finds("deleted", "long ago", "stays", "later") == [False, False, True, True]
    assert reader.index.counts() == (1, 1, 0)
    await reader.refresh()
    assert reader.index.counts() == (1, 1, 0)


async def test_an_index_that_started_over_at_the_same_version_is_followed(
    corpus: Corpus, reader: Reader
) -> None:
    old = corpus.base(1, rows_of("a", "gone"))
    stale = corpus.delta("stale")
    await reader.refresh()
    corpus.drop_base(old)
    corpus.delete(LAYOUT.delta(stale))
    corpus.clock.now_s += 1
    corpus.base(1, rows_of("a", "new"))
    corpus.delta("b")
    await reader.refresh()
    assert reader.finds("a", "b", "new", "gone", "stale") == [True] * 3 + [False] * 2
    assert await reader.calls() == {"list": 1}


async def test_a_head_that_was_only_touched_is_read_once_and_nothing_changes(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    corpus.clock.now_s += 1
    corpus.put(LAYOUT.head(1), corpus.objects[LAYOUT.head(1)])
    assert await reader.calls() == {"list": 1, "get": 1}
    assert await reader.calls() == {"list": 1}
    assert reader.finds("a") == [True]


async def test_two_heads_of_one_version_are_never_mixed(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """On a server that ignores If-None-Match the second of two compactions writes over a head."""
    early, late = make_reader(), make_reader()
    first = corpus.base(1, rows_of("both", *(f"one {n}" for n in range(50))), shards=4)
    await early.refresh()
    corpus.clock.now_s += 1
    second = corpus.base(1, rows_of("both", *(f"two {n}" for n in range(60))), shards=4)
    await late.refresh()  # on the same node, with the first one's files around
    assert late.finds("both", "two 0", "one 0") == [True, True, False]
    assert early.finds("both", "two 0", "one 0") == [True, False, True]
    await early.refresh()
    assert early.finds("both", "two 0", "one 0") == [True, True, False]
    for reader in (early, late):
        assert reader.index.counts() == (0, 0, 61)
        assert reader.counters.get("index.refused") == 0
    # What the loser committed by then goes with the next clean-up; that is no concern of readers.
    assert first.run != second.run


async def test_a_head_that_is_damaged_in_place_leaves_the_base_in_use(
    corpus: Corpus, reader: Reader
) -> None:
    head = corpus.base(1, rows_of("a"))
    await reader.refresh()
    corpus.clock.now_s += 1
    corpus.put(LAYOUT.head(1), head.to_json()[:-9])
    assert await reader.calls() == {"list": 1, "get": 1}
    assert await reader.calls() == {"list": 1}
    assert reader.finds("a") == [True]
    assert reader.counters.get("index.refused") == 1


async def test_lookups_go_on_while_the_base_is_swapped(corpus: Corpus, reader: Reader) -> None:
    """From another thread, without a moment in which a key is missing."""
    keys = [key_of(number) for number in range(200)]
    corpus.base(1, rows_of(*keys[:100]))
    merged = [corpus.delta(*keys[100:])]
    await reader.refresh()
    stop, missing, looks = False, [], 0

    def look() -> None:
        nonlocal looks
        while not stop:
            missing.extend(key for key in keys if not reader.index.maybe_contains(key))
            looks += 1

    looking = asyncio.ensure_future(asyncio.to_thread(look))
    try:
        for version in range(2, 5):
            corpus.base(version, rows_of(*keys), merged=merged)
            seen = looks
            await reader.refresh()
            await until(lambda seen=seen: looks > seen)  # type: ignore[misc]
    finally:
        stop = True
        await looking
    assert missing == []


async def test_a_base_that_vanishes_is_replaced_by_a_newer_one_in_the_same_refresh(
    corpus: Corpus, reader: Reader
) -> None:
    old = corpus.base(1, rows_of("a"), shards=8)
    gate = Gate()
    reader.script.faults = [Fault(op="get_range", name="/base/", gate=gate)]
    refresh = asyncio.ensure_future(reader.refresh())
    await reached(gate)
    corpus.base(2, rows_of("a", "b"))
    corpus.drop_base(old)
    gate.release()
    await refresh
    assert reader.finds("a", "b") == [True, True]
    assert reader.counters.get("index.vanished_base") == 1


async def test_a_vanished_shard_without_a_newer_base_leaves_the_listing(
    corpus: Corpus, reader: Reader
) -> None:
    head = corpus.base(1, rows_of("a", "b"))
    corpus.store("a")
    corpus.delete(head.segment_name(LAYOUT, head.shards[0]))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, False]
    assert await reader.calls() == {"list": 1, "get": 1}


async def test_the_newest_head_counts_whatever_the_order(corpus: Corpus, reader: Reader) -> None:
    for version in (3, 12, 9):
        corpus.base(version, rows_of(version))
    await reader.refresh()
    assert reader.finds(3, 9, 12) == [False, False, True]
    assert sum(name.startswith("base/") for name in reader.here()) == 2


# -- bloom -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"mode": "exact"}, True),
        ({"mode": "bloom"}, False),
        ({"mode": "auto"}, True),
        ({"mode": "auto", "cache_bytes": 4096}, False),
    ],
)
async def test_filters_are_taken_where_rows_are_too_much(
    corpus: Corpus, make_reader: MakeReader, options: dict[str, Any], exact: bool
) -> None:
    reader = make_reader(**options)
    corpus.base(1, rows_of(*range(100)))
    corpus.delta("delta")
    await reader.refresh()
    assert all(reader.finds(*range(100), "delta"))
    assert reader.index.holds(key_of(1)) is exact
    assert reader.index.holds(key_of("delta"))  # deltas stay exact
    assert (reader.index.facts(key_of(1)) is not None) is exact
    assert any(".bloom." in name for name in reader.here()) is not exact
    found = sum(reader.finds(*(f"other {number}" for number in range(1000))))
    assert found == 0 if exact else found < 50


async def test_a_tombstone_counts_over_a_filter(corpus: Corpus, make_reader: MakeReader) -> None:
    reader = make_reader(mode="bloom")
    corpus.base(1, rows_of("a"))
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 1)))
    await reader.refresh()
    assert reader.finds("a") == [False]


# -- healing -----------------------------------------------------------------------------------


async def test_a_key_that_the_bucket_lacks_is_not_believed_for_a_while(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    reader.index.mark_missing(key_of("a"), absent=True)
    assert reader.finds("a") == [False]
    assert not reader.index.holds(key_of("a"))
    assert reader.index.facts(key_of("a")) is None
    assert reader.counters.get("index.vanished") == 1
    await reader.refresh()
    assert reader.finds("a") == [False]
    reader.clock.now_s += 61
    await reader.refresh()
    assert reader.finds("a") == [True]


async def test_a_key_that_was_forgotten_and_is_announced_again_is_found_at_once(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a", "b"))
    await reader.refresh()
    for text in "ab":
        reader.index.mark_missing(key_of(text), absent=True)
    corpus.delta("a", (key_of("b"), Tombstone(int(START_S) + 5)))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, False]


async def test_a_key_that_was_forgotten_and_is_stored_here_is_found_at_once(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    reader.index.mark_missing(key_of("a"), absent=True)
    reader.index.add(key_of("a"))
    assert reader.finds("a") == [True]


async def test_what_the_index_never_held_does_not_count_as_vanished(reader: Reader) -> None:
    reader.index.mark_missing(key_of("a"), absent=True)
    reader.index.add(key_of("b"))
    reader.index.mark_missing(key_of("b"))  # refused, not absent
    assert reader.counters.get("index.vanished") == 0
    assert reader.counters.get("index.forgotten") == 2


def lora_key(number: int) -> Key:
    key = make_key(f"adapter:{key_of(number).name[3:67]}")
    assert key is not None
    return key


async def test_many_vanished_keys_are_one_line_in_the_log_for_each_folder(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [key_of(number) for number in range(100)]
    others = [lora_key(number) for number in range(100)]
    corpus.base(1, rows_of(*keys, *others))
    await reader.refresh()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for key in keys:
            reader.index.mark_missing(key, absent=True)
        assert len(ours(caplog)) == 1
        assert "s3ec manifest rebuild" in caplog.text
        for key in others:
            reader.index.mark_missing(key, absent=True)
    assert len(ours(caplog)) == 2
    assert "below adapter/" in ours(caplog)[1].getMessage()
    assert reader.counters.get("index.rebuild_wanted") == 2


async def test_single_deletions_over_a_long_time_ask_for_nothing(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    corpus.base(1, rows_of(*range(100)))
    await reader.refresh()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            reader.clock.now_s += 60
            reader.index.mark_missing(key_of(number), absent=True)
    assert ours(caplog) == []


async def test_after_a_rebuild_many_vanished_keys_are_told_again(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            corpus.base(version, rows_of(*range(200)))
            await reader.refresh()
            for number in range(100):
                reader.index.mark_missing(key_of(100 * (version - 1) + number), absent=True)
            assert len(ours(caplog)) == version


async def test_a_key_whose_object_is_bad_is_not_believed_for_an_hour(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a", "b"))
    await reader.refresh()
    reader.index.mark_bad(key_of("a"))
    began_s = reader.clock.now_s
    for passed_s in (0, 3599):
        reader.clock.now_s = began_s + passed_s
        await reader.refresh()
        assert reader.finds("a", "b") == [False, True]
        assert reader.index.is_bad(key_of("a"))
        assert not reader.index.holds(key_of("a"))
        assert reader.index.facts(key_of("a")) is None
        assert reader.index.is_announced(key_of("a"))
    assert reader.counters.get("index.vanished") == 0
    reader.clock.now_s = began_s + 3600
    assert reader.finds("a") == [True]
    assert not reader.index.is_bad(key_of("a"))


@pytest.mark.parametrize("later_s", [0, 1])
@pytest.mark.parametrize("by", ["delta", "base"])
async def test_a_key_whose_object_is_bad_is_believed_again_when_somebody_stores_it_later(
    corpus: Corpus, reader: Reader, by: str, later_s: int
) -> None:
    """A row of the same time says only that somebody else has found the bad object there."""
    old = EntryInfo(9, time_s=int(START_S))
    corpus.base(1, rows_of((key_of("a"), old)))
    await reader.refresh()
    reader.index.mark_bad(key_of("a"))
    new = old._replace(time_s=int(START_S) + later_s)
    if by == "delta":
        corpus.delta((key_of("a"), new))
    else:
        corpus.base(2, rows_of((key_of("a"), new)))
    await reader.refresh()
    assert reader.finds("a") == [later_s > 0]
    assert reader.index.is_bad(key_of("a")) is (later_s == 0)


async def test_a_key_whose_bad_object_was_deleted_is_absent_and_not_bad_any_more(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of((key_of("a"), EntryInfo(9, time_s=int(START_S)))))
    await reader.refresh()
    reader.index.mark_bad(key_of("a"))
    corpus.delta((key_of("a"), Tombstone(int(START_S) + 5)))
    await reader.refresh()
    assert reader.finds("a") == [False]
    assert not reader.index.is_bad(key_of("a"))  # so a save that finds the name taken is announced
    corpus.delta((key_of("a"), EntryInfo(9, time_s=int(START_S) + 6)))
    await reader.refresh()
    assert reader.finds("a") == [True]


async def test_a_key_whose_object_is_bad_and_that_is_stored_here_is_found_at_once(
    reader: Reader,
) -> None:
    reader.index.add(key_of("a"))
    reader.index.mark_bad(key_of("a"))
    assert reader.finds("a") == [False]
    reader.index.add(key_of("a"))
    assert reader.finds("a") == [True]
    assert not reader.index.is_bad(key_of("a"))

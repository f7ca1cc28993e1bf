# SPDX-License-Identifier: Apache-2.0
"""What a reader finds, by its snapshot, deltas, and what its own process did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from s3ec.errors import AccessError, UnavailableError
from s3ec.index import reader as reader_module
from s3ec.index.names import NEVER, deltas_prefix, snapshots_prefix
from s3ec.index.reader import BAD_OBJECT_TTL_S, NEGATIVE_TTL_S, SNAPSHOTS_EVERY
from s3ec.testing.fault_store import Fault, cut
from s3ec.testing.memory_store import MemoryStore
from tests.unit.index.corpus import LAYOUT, REFRESH_S, Corpus, Reader, key_of, near_of

MakeReader = Callable[..., Reader]


async def test_rows_of_snapshot_and_deltas_are_found(corpus: Corpus, reader: Reader) -> None:
    corpus.snapshot(*range(1000))
    corpus.delta("a", "b", nbytes=7)
    await reader.refresh()
    assert reader.holds(*range(1000)) == list(range(1000))
    assert reader.holds("a", "b", "c", 1001) == ["a", "b"]
    assert reader.index.nbytes(key_of("a")) == 7
    assert reader.index.nbytes(key_of(5)) == 5
    assert reader.index.nbytes(key_of("c")) is None
    assert reader.index.counts()[:4] == (1, 2, 2, 1000)


async def test_a_listing_that_ends_late_replaces_the_unions_made_meanwhile(
    corpus: Corpus, reader: Reader
) -> None:
    begun = corpus.ulid()
    reader.pass_time(500)
    corpus.delta("meanwhile")
    corpus.snapshot("gone", listed=NEVER)
    reader.pass_time(500)
    await reader.refresh()
    assert reader.holds("gone", "meanwhile") == ["gone", "meanwhile"]
    corpus.snapshot("a", ulid=begun)
    await reader.refresh()
    assert reader.holds("a", "gone", "meanwhile") == ["a", "meanwhile"]


async def test_deltas_of_fifteen_minutes_before_a_snapshot_count(
    corpus: Corpus, reader: Reader
) -> None:
    name = corpus.snapshot("a")
    corpus.delta("within", ago_s=890)
    corpus.delta("before", ago_s=910)
    await reader.refresh()
    assert reader.holds("a", "within", "before") == ["a", "within"]
    assert name.ulid == reader.index.counts().snapshot.ulid


async def test_what_lands_within_fifteen_minutes_is_found_by_the_next_look_and_later_by_a_whole_one(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot("a", ulid=corpus.ulid(ago_s=10_000))
    corpus.delta("b")
    await reader.refresh()
    listed = len(reader.store.log)
    corpus.delta("in time", ago_s=890)
    corpus.delta("late", ago_s=2000)
    reader.pass_time(REFRESH_S)
    await reader.refresh(now=False)
    assert reader.holds("a", "b", "in time", "late") == ["a", "b", "in time"]
    assert [op for op, _ in reader.store.log[listed:]] == ["list", "get"]
    await reader.refresh()
    assert reader.holds("late") == ["late"]


async def test_a_delta_that_could_not_be_had_is_asked_for_however_old_it_grows(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot("a", ulid=corpus.ulid(ago_s=10_000))
    ulid = corpus.delta("b")
    fault = reader.fault(Fault(op="get", name=ulid, error=UnavailableError))
    for _ in range(3):
        corpus.delta("c")
        with pytest.raises(UnavailableError):
            await reader.refresh(now=False)
        reader.pass_time(1000)
    fault.times = fault.struck
    await reader.refresh(now=False)
    assert reader.holds("b", "c") == ["b", "c"]


async def test_new_snapshots_are_looked_for_at_every_thirtieth_look(
    corpus: Corpus, reader: Reader
) -> None:
    await reader.refresh()
    corpus.snapshot("a")
    looks = 1
    while reader.holds("a") == [] and looks < 100:
        reader.pass_time(REFRESH_S)
        await reader.refresh(now=False)
        looks += 1
    assert looks == SNAPSHOTS_EVERY + 1


async def test_a_download_that_fails_is_tried_again_after_three_refreshes_and_then_after_six(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot("a")
    corpus.delta("b")
    fault = reader.fault(Fault(op="get_range", error=UnavailableError))
    for _ in range(12):
        with suppress(UnavailableError):
            await reader.refresh(now=False)
        assert not reader.index.loaded
        reader.pass_time(REFRESH_S)
    assert fault.struck == 3
    assert reader.holds("a", "b") == ["b"]
    assert reader.counters.get("index.fetch_failed") == 3
    for _ in range(348):  # an hour in all: each try may bring gigabytes
        with suppress(UnavailableError):
            await reader.refresh(now=False)
        reader.pass_time(REFRESH_S)
    assert fault.struck <= 16
    fault.times = fault.struck
    await reader.refresh()
    assert reader.holds("a", "b") == ["a", "b"]
    assert reader.index.loaded


async def test_a_snapshot_that_was_cut_on_its_way_is_brought_again(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot("a")
    reader.fault(Fault(op="get_range", name="snapshot/", change=cut(10), times=1))
    with suppress(UnavailableError):
        await reader.refresh(now=False)
    for _ in range(SNAPSHOTS_EVERY):
        reader.pass_time(REFRESH_S)
        await reader.refresh(now=False)
    assert reader.holds("a") == ["a"]
    assert not reader.counters.get("index.refused")


@pytest.mark.parametrize("ahead_s", [100.0, 3.2e7])
async def test_names_that_no_server_made_are_left_out(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    corpus.snapshot("a", ulid=corpus.ulid(ago_s=60))
    snapshot = corpus.snapshot("snapshot", ulid=corpus.ulid(ago_s=-ahead_s))
    delta = corpus.delta("delta", ago_s=-ahead_s)
    for _ in range(3):
        await reader.refresh()
    assert reader.holds("a", "snapshot", "delta") == ["a"]
    for name in (str(snapshot), delta):
        assert caplog.text.count(f"{name} has a name that is ahead") == 1
    assert reader.index.newest < corpus.ulid(ago_s=-1)


async def test_what_this_process_stored_is_found_at_once(reader: Reader) -> None:
    reader.index.add(key_of("a"), 9)
    assert reader.holds("a", "b") == ["a"]
    assert reader.index.nbytes(key_of("a")) == 9
    assert not reader.index.is_announced(key_of("a"))


async def test_a_missing_key_is_denied_for_a_minute(corpus: Corpus, reader: Reader) -> None:
    corpus.snapshot("a", "b")
    await reader.refresh()
    reader.index.mark_missing(key_of("a"), absent=True)
    assert reader.holds("a", "b") == ["b"]
    assert reader.index.nbytes(key_of("a")) is None
    assert not reader.index.is_announced(key_of("a"))
    assert reader.counters.get("index.vanished") == 1
    reader.pass_time(NEGATIVE_TTL_S - 1)
    assert reader.holds("a") == []
    reader.pass_time(1)
    assert reader.holds("a") == ["a"]


async def test_a_missing_key_is_believed_when_a_delta_names_it(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.delta("a", "b")
    await reader.refresh()
    reader.index.mark_missing(key_of("a"), absent=True)
    reader.index.mark_missing(key_of("b"), absent=True)
    reader.pass_time(2)
    corpus.delta("a")
    await reader.refresh()
    assert reader.holds("a", "b") == ["a"]


async def test_a_bad_key_is_denied_for_an_hour_whatever_a_delta_says(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.delta("a")
    await reader.refresh()
    reader.index.mark_bad(key_of("a"))
    reader.pass_time(5)
    corpus.delta("a")
    await reader.refresh()
    assert reader.holds("a") == []
    assert reader.index.is_bad(key_of("a"))
    reader.pass_time(BAD_OBJECT_TTL_S)
    assert reader.holds("a") == ["a"]


async def test_one_fetch_in_a_hundred_that_finds_nothing_asks_for_a_listing(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot(*range(100))
    await reader.refresh()
    for _ in range(3000):
        reader.index.mark_present(key_of(99))
    for number in range(30):
        reader.index.mark_missing(key_of(number), absent=True)
    assert not reader.index.wants_listing
    for number in range(30, 40):
        reader.index.mark_missing(key_of(number), absent=True)
    assert reader.index.wants_listing
    corpus.snapshot(*range(40, 100))
    await reader.refresh()
    assert not reader.index.wants_listing


@pytest.mark.parametrize("error", [UnavailableError("no"), AccessError("no", is_general=False)])
async def test_an_outage_keeps_what_is_known(
    corpus: Corpus, reader: Reader, error: Exception
) -> None:
    corpus.snapshot("a")
    await reader.refresh()
    fault = reader.fault(Fault(op="list", error=lambda _: error))
    reader.pass_time(REFRESH_S)
    with pytest.raises(type(error)):
        await reader.refresh()
    assert reader.holds("a") == ["a"]
    age_s = reader.index.answered_s()
    assert age_s is not None
    assert age_s >= REFRESH_S
    fault.times = fault.struck
    await reader.refresh()
    assert reader.index.answered_s() == 0


async def test_one_delta_that_cannot_be_had_keeps_back_no_other(
    corpus: Corpus, reader: Reader
) -> None:
    ulid = corpus.delta("a")
    corpus.delta("b")
    fault = reader.fault(Fault(op="get", name=ulid, error=UnavailableError, times=1))
    with pytest.raises(UnavailableError):
        await reader.refresh()
    assert reader.holds("a", "b") == ["b"]
    assert fault.struck == 1
    await reader.refresh()
    assert reader.holds("a", "b") == ["a", "b"]


async def test_writers_are_counted_by_their_names(corpus: Corpus, reader: Reader) -> None:
    assert reader.index.writers == 1
    for number in range(5):
        corpus.delta(number, ago_s=number + 1.0)
    corpus.delta("old", ago_s=1200)
    await reader.refresh()
    assert reader.index.writers == 5


@pytest.mark.parametrize("how", ["refused", "ignored"])
async def test_a_server_without_start_after_is_read_all_the_same(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """S3's directory buckets refuse it; others list from the start whatever is asked."""
    whole = type(corpus.store).list

    def list_(store: MemoryStore, prefix: str, *, start_after: str = "") -> Any:
        if start_after and how == "refused":
            raise AccessError("no start-after here", code="NotImplemented", is_general=False)
        return whole(store, prefix)

    monkeypatch.setattr(MemoryStore, "list", list_)
    corpus.snapshot("a")
    corpus.delta("b")
    corpus.delta("old", ago_s=1000)
    await reader.refresh()
    assert reader.holds("a", "b", "old") == ["a", "b"]


async def test_foreign_files_below_the_manifest_do_not_stop_a_reader(
    corpus: Corpus, reader: Reader
) -> None:
    for name in ("README", "delta/", "delta/x", "snapshot/x", "claim/x"):
        corpus.put(f"{LAYOUT.manifest}v2/{name}", b"hello")
    corpus.put(f"{LAYOUT.manifest}head/000000000001.json", b"{}")
    corpus.put(snapshots_prefix(LAYOUT) + "a" * 53, b"hello")
    corpus.put(deltas_prefix(LAYOUT) + corpus.ulid() + ".safetensors", b"hello")
    corpus.delta("a")
    await reader.refresh()
    assert reader.holds("a") == ["a"]
    assert reader.counters.get("index.refused") == 0


@pytest.mark.parametrize("is_damaged", [True, False])
async def test_deltas_that_cannot_be_used_are_asked_for_again_beside_looks_for_snapshots_only(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    """Such as archived ones. Many refusals in a row would keep the breaker open."""
    bad = [corpus.delta(f"bad {number}") for number in range(10)]
    corpus.delta("a")

    def denied(message: str) -> AccessError:
        return AccessError(message, is_general=False)

    how: Any = {"change": lambda _: b"<html>"} if is_damaged else {"error": denied}
    faults = [reader.fault(Fault(op="get", name=ulid, **how)) for ulid in bad]
    await reader.refresh()
    struck = [fault.struck for fault in faults]
    for _ in range(5):
        assert [fault.struck for fault in faults] == struck
        assert reader.holds("a") == ["a"]
        reader.pass_time(REFRESH_S)
        await reader.refresh(now=False)
    assert all(caplog.text.count(ulid) == 1 for ulid in bad)
    corpus.delta("b")
    reader.script.faults.clear()
    await reader.refresh()
    texts = [f"bad {number}" for number in range(10)]
    assert reader.holds("a", "b", *texts) == ["a", "b", *texts]


async def test_a_new_snapshot_is_shown_with_all_of_its_deltas_or_not_at_all(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.snapshot("a", ulid=corpus.ulid(ago_s=3000))
    corpus.delta("old", ago_s=2500)
    ulid = corpus.delta("b", ago_s=1000)
    await reader.refresh()
    second = corpus.snapshot("a", "c", ulid=corpus.ulid(ago_s=500))
    fault = reader.fault(Fault(op="get", name=ulid, error=UnavailableError))
    with pytest.raises(UnavailableError):
        await reader.refresh()
    assert reader.holds("a", "b", "c") == ["a", "b"]
    fault.times = fault.struck
    await reader.refresh()
    assert reader.index.counts().snapshot == second
    assert reader.holds("a", "b", "c") == ["a", "b", "c"]


async def test_of_too_many_keys_that_this_process_knows_the_oldest_are_forgotten(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MAX_OWN", 100)
    for number in range(150):
        reader.index.add(key_of(number))
    await reader.refresh()
    assert reader.holds(*range(150)) == list(range(50, 150))


# -- while home does not answer, and a replica does ------------------------------------------------


async def test_home_is_looked_at_whole_as_soon_as_it_answers_again(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.snapshot("old", ulid=corpus.ulid(ago_s=9000))
    near = near_of(corpus)
    corpus.snapshot("old", "new")
    reader = make_reader(near=near)
    down = reader.fault(Fault(error=UnavailableError))
    await reader.refresh()
    assert reader.holds("old", "new") == ["old"]
    down.times = down.struck
    reader.pass_time(REFRESH_S)
    await reader.refresh(now=False)
    assert reader.holds("old", "new") == ["old", "new"]


async def test_an_empty_replica_is_no_empty_corpus(corpus: Corpus, make_reader: MakeReader) -> None:
    corpus.snapshot("a")
    reader = make_reader(near=Corpus())
    down = reader.fault(Fault(error=UnavailableError))
    await reader.refresh()
    assert not reader.index.loaded
    down.times = down.struck
    reader.pass_time(REFRESH_S)
    await reader.refresh(now=False)
    assert reader.index.loaded
    assert reader.holds("a") == ["a"]


async def test_a_damaged_copy_of_the_index_says_nothing_of_homes(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    name = corpus.snapshot("a")
    delta = corpus.delta("b")
    near = near_of(corpus)
    for path in (snapshots_prefix(LAYOUT) + str(name), deltas_prefix(LAYOUT) + delta):
        near.put(path, near.objects[path][:-1] + b"?")
    reader = make_reader(near=near)
    down = reader.fault(Fault(error=UnavailableError))
    with suppress(UnavailableError):
        await reader.refresh()
    assert reader.holds("a", "b") == []
    down.times = down.struck
    with suppress(UnavailableError):
        await reader.refresh()
    assert reader.holds("a", "b") == ["a", "b"]


async def test_what_a_replica_says_is_no_answer_of_the_bucket(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """A grant at once counts on home's copy, should this node's have rotted."""
    corpus.snapshot("a")
    reader = make_reader(near=near_of(corpus))
    await reader.refresh()
    reader.fault(Fault(error=UnavailableError))
    for _ in range(3):
        reader.pass_time(1000)
        await reader.refresh()
    age_s = reader.index.answered_s()
    assert age_s is not None
    assert age_s >= 3000
    assert reader.holds("a") == ["a"]

# SPDX-License-Identifier: Apache-2.0
"""The engines of a node share one folder: one asks the bucket, all know what it heard."""

from __future__ import annotations

import asyncio
import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from s3ec import safetensors_file
from s3ec.errors import AccessError, TierError, UnavailableError
from s3ec.index.local import OVERLAY
from s3ec.testing.fault_store import Fault, Gate
from tests.support.waiting import DEADLINE_S, until
from tests.unit.index.corpus import REFRESH_S, Corpus, Reader, key_of, near_of
from tests.unit.tier.cases import refusing

MakeReader = Callable[..., Reader]


async def poll(readers: list[Reader], seconds: float, *expected: type[Exception]) -> None:
    """Let time pass for a node, each of whose engines polls four times a refresh."""
    step_s = REFRESH_S / 4
    for _ in range(round(seconds / step_s)):
        readers[0].corpus.clock.now_s += step_s
        for reader in readers:
            reader.clock.now_s += step_s
            with suppress(*expected):
                await reader.refresh(now=False)


async def test_news_reaches_all_engines_within_one_refresh_and_a_poll(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    readers = [make_reader() for _ in range(3)]
    await poll(readers, 2 * REFRESH_S)
    for number in range(10):
        corpus.delta(number)
        await poll(readers, REFRESH_S)
        assert [reader.holds(number) for reader in readers] == [[number]] * 3


async def test_a_new_process_starts_with_what_the_node_knows(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    first = make_reader()
    corpus.snapshot("a")
    corpus.delta("b")
    await first.refresh()
    second = make_reader()
    second.fault(Fault(error=UnavailableError))
    await second.refresh(now=False)
    assert second.holds("a", "b") == ["a", "b"]
    assert second.index.loaded
    assert not second.store.calls


async def test_another_process_takes_over_when_the_first_one_ends(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    first, second = make_reader(), make_reader()
    await poll([first, second], REFRESH_S)
    await first.close()
    corpus.delta("a")
    await poll([second], REFRESH_S)
    assert second.holds("a") == ["a"]


async def test_another_process_asks_where_the_first_one_hangs_for_three_refreshes(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    first, second = make_reader(), make_reader()
    await poll([first, second], REFRESH_S)
    corpus.delta("a")
    await poll([second], 2 * REFRESH_S)
    assert second.holds("a") == []
    await poll([second], 2 * REFRESH_S)
    assert second.holds("a") == ["a"]
    # The first one goes on from there.
    corpus.delta("b")
    await poll([first, second], 2 * REFRESH_S)
    assert first.holds("a", "b") == ["a", "b"]


async def test_one_engine_asks_for_the_node_also_while_home_does_not_answer(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.snapshot("a")
    readers = [make_reader(near=near_of(corpus)) for _ in range(4)]
    await poll(readers, 2 * REFRESH_S)
    for reader in readers:
        reader.fault(Fault(error=UnavailableError))
    before = sum(reader.store.calls["list"] for reader in readers)
    refreshes = 30
    await poll(readers, refreshes * REFRESH_S)
    lists = sum(reader.store.calls["list"] for reader in readers) - before
    assert lists <= 1.1 * 2 * refreshes  # for snapshots, too: home may be back


@pytest.mark.parametrize("error", [AccessError, UnavailableError])
async def test_one_process_that_is_refused_does_not_keep_news_from_the_others(
    corpus: Corpus, make_reader: MakeReader, error: type[Exception]
) -> None:
    """As with keys that were rotated since it started."""
    readers = [make_reader() for _ in range(3)]
    await poll(readers, REFRESH_S)
    readers[0].fault(Fault(error=error))
    corpus.delta("a")
    await poll(readers, 4 * REFRESH_S, error)
    assert [reader.holds("a") for reader in readers] == [["a"]] * 3
    # One of them asks, as before.
    before = sum(reader.store.calls["list"] for reader in readers)
    await poll(readers, 20 * REFRESH_S, error)
    assert sum(reader.store.calls["list"] for reader in readers) - before <= 24


async def test_what_one_process_found_gone_is_denied_by_all(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.snapshot("a", "b")
    readers = [make_reader() for _ in range(3)]
    await poll(readers, REFRESH_S)
    readers[1].index.mark_missing(key_of("a"), absent=True)
    await poll(readers, REFRESH_S)
    assert [reader.holds("a", "b") for reader in readers] == [["b"]] * 3
    await poll(readers, 60)
    assert [reader.holds("a", "b") for reader in readers] == [["a", "b"]] * 3


async def test_what_this_process_stored_again_is_not_denied_by_its_own_mark(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader()
    await poll([reader], REFRESH_S)
    reader.index.mark_missing(key_of("a"), absent=True)
    reader.index.add(key_of("a"))
    await poll([reader], REFRESH_S)
    assert reader.holds("a") == ["a"]


async def test_a_file_of_missing_keys_that_grew_large_begins_again(
    corpus: Corpus, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.index.local._MISSING_BYTES", 24 * 650)
    reader, other = make_reader(), make_reader()
    await poll([reader, other], REFRESH_S)
    for start in range(0, 700, 100):
        reader.folder.add_missing([key_of(n).digest for n in range(start, start + 100)])
        await reader.refresh(now=False)
    corpus.delta("a")
    await poll([reader, other], 2 * REFRESH_S)
    reader.folder.add_missing([key_of("a").digest])
    await poll([reader, other], REFRESH_S / 4)
    assert reader.holds("a") == other.holds("a") == []


async def test_a_clock_that_is_set_back_a_year_stops_nobody(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    first, second = make_reader(), make_reader()
    await poll([first, second], REFRESH_S)
    corpus.clock.now_s -= 3.2e7
    corpus.delta("a")
    await poll([first, second], 2 * REFRESH_S)
    assert first.holds("a") == second.holds("a") == ["a"]


async def test_a_snapshot_that_cannot_be_opened_here_is_not_brought_over_and_over(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a command, which waits for it, where memory cannot be mapped."""
    corpus.snapshot("a")
    map_file = safetensors_file.map_file

    def small_ones(path: Path) -> mmap.mmap:
        return map_file(path) if path.name == OVERLAY else refuse(path)

    refuse = refusing(errno.ENOMEM, "no memory")
    monkeypatch.setattr(safetensors_file, "map_file", small_ones)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TierError, match="no memory"):
            await reader.refresh(now=True)
    assert reader.store.calls["get_range"] == 1


async def test_engines_that_start_while_one_downloads_a_snapshot_wait_for_it(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.snapshot("a")
    corpus.delta("b")
    readers = [make_reader() for _ in range(4)]
    gates = [reader.fault(Fault(op="list", gate=Gate(), times=1)).gate for reader in readers]
    looks = [asyncio.create_task(readers[0].refresh(now=False))]
    await until(lambda: gates[0] is not None and gates[0].reached.is_set())
    looks += [asyncio.create_task(reader.refresh(now=False)) for reader in readers[1:]]
    for gate in gates:
        assert gate is not None
        gate.release()
    await asyncio.gather(*looks)
    await poll(readers, 3 * REFRESH_S)
    assert sum(reader.store.calls["get_range"] for reader in readers) == 1
    assert [reader.holds("a", "b") for reader in readers] == [["a", "b"]] * 4


async def test_files_of_older_snapshots_are_removed(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader()
    corpus.snapshot("a")
    await reader.refresh()
    corpus.clock.now_s += 100
    second = corpus.snapshot("b")
    await reader.refresh()
    left = sorted(path.name for path in reader.folder.path.iterdir())
    assert left == [f"{second}.filter", f"{second}.rows", "lock-refresh", OVERLAY]
    assert reader.holds("a", "b") == ["b"]


async def test_a_disk_that_refuses_is_an_error_and_what_is_known_stays(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader = make_reader()
    corpus.snapshot("a")
    await reader.refresh()

    def no_room(nbytes: int) -> None:
        raise TierError("no room")

    reader.folder.need_room = no_room
    corpus.delta("b")
    with pytest.raises(TierError):
        await reader.refresh()
    assert reader.holds("a", "b") == ["a"]

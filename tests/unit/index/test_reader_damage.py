# SPDX-License-Identifier: Apache-2.0
"""Files of an index that are damaged, forged, gone or of a newer format; and full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from s3ec import safetensors_file
from s3ec.errors import TierError
from s3ec.identity import Layout
from s3ec.index.cache import IndexCache
from s3ec.index.manifest import BaseManifest
from s3ec.index.rows import Rows
from s3ec.index.segment import encode_segment
from s3ec.runtime import LoopThread
from s3ec.safetensors_file import encode_columns
from s3ec.testing.fault_store import Fault, cut, flip
from s3ec.tier.entry_writer import Incoming
from tests.support.clock import Clock
from tests.support.file_calls import open_below
from tests.support.logs import ours
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.index.basics import LAYOUT, NAMESPACE, key_of
from tests.unit.index.corpus import HOUR_S, Corpus, Reader, rows_of

MakeReader = Callable[..., Reader]


def first_shard(head: BaseManifest) -> str:
    return head.segment_name(LAYOUT, head.shards[0])


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in ours(caplog) if each.levelno >= logging.WARNING]


def unsorted() -> bytes:
    """A segment whose rows are in the wrong order, and whose checksums are right."""
    rows = rows_of("a", "b", "c").select(np.array([2, 1, 0]))
    good = b"".join(encode_segment(rows_of("a", "b", "c"), NAMESPACE))
    fences = np.array([0, 3], "<u4")
    metadata = {"s3ec": "index-1", "namespace": NAMESPACE, "entries": "3"}
    columns = {name: column for name, column in rows.columns().items() if name != "deleted"}
    dtype = columns.pop("dtype")
    forged = b"".join(encode_columns(metadata, {**columns, "fences": fences, "dtype": dtype}))
    assert len(forged) == len(good)
    return forged


def huge() -> bytes:
    """A segment that says it has 2**60 rows."""
    good = b"".join(encode_segment(rows_of("a"), NAMESPACE))
    assert good.count(b'"entries":"1"') == 1
    return good.replace(b'"entries":"1"', f'"entries":"{2**60}"'.encode())


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut(300),
    "empty": cut(0),
    "a bit of the header": flip(100),
    "a bit of the data": flip(-9),
    "bytes behind the end": lambda body: body + bytes(64),
    "not sorted": lambda _: unsorted(),
    "2**60 rows": lambda _: huge(),
    "junk": lambda _: b"\xff" * 200,
    "another namespace": lambda _: b"".join(encode_segment(rows_of("a"), "other-" + "0" * 16)),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_delta_is_refused_by_name_and_the_others_are_applied(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    corpus.base(1, rows_of("base"))
    bad = corpus.delta("a", "b", "c")
    corpus.delta("d")
    name = LAYOUT.delta(bad)
    corpus.put(name, DAMAGES[damage](corpus.objects[name]))
    await reader.refresh()
    assert reader.finds("base", "a", "d") == [True, False, True]
    assert [name in each for each in messages(caplog)] == [True]
    assert reader.counters.get("index.refused") == 1
    assert f"delta/{bad}.safetensors" not in reader.here()
    assert await reader.calls() == {"list": 1}  # not asked for at every refresh


# What is behind the end of a file of a base is not asked for.
@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"bytes behind the end"}))
@pytest.mark.parametrize("mode", ["exact", "bloom"])
async def test_a_damaged_file_of_a_base_is_refused_by_name_and_the_old_base_stays(
    corpus: Corpus,
    make_reader: MakeReader,
    caplog: pytest.LogCaptureFixture,
    damage: str,
    mode: str,
) -> None:
    reader = make_reader(mode=mode)
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    head = corpus.base(2, rows_of("a", "b"))
    of = head.segment_name if mode == "exact" else head.bloom_name
    name = of(LAYOUT, head.shards[1])
    corpus.put(name, DAMAGES[damage](corpus.objects[name]))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, False]
    assert len(messages(caplog)) == 1
    assert name in messages(caplog)[0]
    assert await reader.calls() == {"list": 1, "get": 1}
    corpus.base(3, rows_of("a", "b"))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]


async def test_a_download_that_is_cancelled_as_it_begins_leaves_nothing(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = corpus.base(1, rows_of("a"), shards=1)
    incoming = reader.tier.folders.incoming
    begin = reader.files.begin
    begun, ended, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow(*args: Any) -> Incoming[None]:
        made = begin(*args)
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return made

    monkeypatch.setattr(reader.files, "begin", slow)
    loop = LoopThread("s3ec-test")
    try:
        cache = IndexCache(reader.store, LAYOUT, reader.files, loop.disk_long, reader.counters)

        async def broken_off() -> None:
            try:
                await cache.base(head, exact=True)
            finally:
                ended.set()

        opening = loop.submit(broken_off())
        assert begun.wait(DEADLINE_S)
        opening.cancel()
        assert ended.wait(DEADLINE_S)
        go_on.set()
        eventually(lambda: os.listdir(incoming) == [])
    finally:
        go_on.set()
        loop.stop(DEADLINE_S)
    assert open_below(incoming) == []


async def test_good_files_of_a_damaged_base_are_downloaded_once(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    head = corpus.base(2, rows_of(*range(100)), shards=8)
    name = first_shard(head)
    corpus.put(name, flip(-9)(corpus.objects[name]))
    assert await reader.calls() == {"list": 1, "get": 1, "get_range": 8 + 1}
    reader.clock.now_s += 601
    assert await reader.calls() == {"list": 1, "get": 1, "get_range": 2}


async def test_a_shard_whose_head_lies_about_its_content_is_refused(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """Right sizes and checksums, but digests of another shard."""
    head = corpus.base(1, rows_of(*range(20)))
    corpus.store("listed")
    low, high = head.shards
    swapped = [
        replace(low, segment=high.segment, entries=high.entries),
        replace(high, segment=low.segment, entries=low.entries),
    ]
    bodies = [corpus.objects[head.segment_name(LAYOUT, shard)] for shard in (high, low)]
    for shard, body in zip(head.shards, bodies, strict=True):
        corpus.put(head.segment_name(LAYOUT, shard), body)
    forged = replace(head, shards=tuple(swapped))
    corpus.put(LAYOUT.head(1), forged.to_json())
    await reader.refresh()
    assert reader.finds("listed", *range(20)) == [True] + [False] * 20
    assert len(messages(caplog)) == 1


async def test_a_reply_that_was_damaged_once_is_fetched_again(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.delta("b")
    reader.script.faults = [Fault(op="get", name="/delta/", change=flip(-9), times=1)]
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]
    assert messages(caplog) == []


async def test_a_damaged_delta_is_looked_at_again_by_a_listing_from_the_start(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    good = LAYOUT.delta(corpus.delta("b"))
    body = corpus.objects[good]
    corpus.put(good, b"junk")
    await reader.refresh()
    corpus.put(good, body)
    for _ in range(30):
        await reader.refresh()
    assert reader.finds("b") == [True]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"format":1}', b"{" * 100_000])
async def test_a_damaged_head_is_refused_by_name_and_an_older_one_is_used(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.put(LAYOUT.head(2), body)
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert [LAYOUT.head(2) in each for each in messages(caplog)] == [True]
    assert await reader.calls() == {"list": 1}


async def test_a_head_under_another_versions_name_is_refused(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.put(LAYOUT.head(2), corpus.objects[LAYOUT.head(1)])
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert len(messages(caplog)) == 1


async def test_junk_in_the_manifest_is_passed_over(corpus: Corpus, reader: Reader) -> None:
    corpus.base(1, rows_of("a"))
    for name in ("", "delta/", "delta/x", "delta/x.safetensors", "head/1.json", "head/", "zzz",
                 "head/000000000000.json", "clock/0123456789abcdef"):  # fmt: skip
        corpus.put(LAYOUT.manifest + name, b"junk")
    await reader.refresh()
    assert reader.finds("a") == [True]
    assert reader.counters.get("index.refused") == 0


# -- newer formats -----------------------------------------------------------------------------


def newer_head(corpus: Corpus, version: int) -> None:
    content = json.loads(corpus.objects[LAYOUT.head(1)])
    corpus.put(LAYOUT.head(version), json.dumps({**content, "format": 2, "new": []}).encode())


def newer_delta(corpus: Corpus) -> str:
    ulid = corpus.delta("unreadable")
    corpus.put(
        LAYOUT.delta(ulid),
        b"".join(
            encode_columns({"s3ec": "index-2", "namespace": NAMESPACE}, {"x": np.zeros(8, "<u8")})
        ),
    )
    return ulid


@pytest.mark.parametrize("what", ["head", "delta"])
async def test_a_newer_format_falls_back_to_listing_with_one_line_in_the_log(
    corpus: Corpus, reader: Reader, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.store("a", "listed")
    for version in (2, 3):
        if what == "head":
            newer_head(corpus, version)
        else:
            newer_delta(corpus)
    for _ in range(3):
        await reader.refresh()
    assert reader.finds("a", "listed", "b") == [True, True, False]
    assert len(messages(caplog)) == 1
    assert "newer s3ec" in messages(caplog)[0]
    assert await reader.calls() == {"list": 1}
    reader.clock.now_s += 601
    corpus.store("b")
    await reader.refresh()
    assert reader.finds("b") == [True]


async def test_a_base_of_this_format_ends_the_listing(corpus: Corpus, reader: Reader) -> None:
    corpus.store("listed")
    await reader.refresh()
    assert reader.finds("listed") == [True]
    corpus.base(1, rows_of("a"))
    await reader.refresh()
    assert reader.finds("a", "listed") == [True, False]
    reader.clock.now_s += 3600
    assert await reader.calls() == {"list": 1}


async def test_after_a_newer_format_is_gone_the_base_alone_counts(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    corpus.store("listed")
    newer_head(corpus, 2)
    await reader.refresh()
    await reader.refresh()
    assert reader.finds("a", "listed") == [True, True]
    corpus.delete(LAYOUT.head(2))
    for _ in range(30):
        await reader.refresh()
    assert reader.finds("a", "listed") == [True, False]


# -- this node's disk --------------------------------------------------------------------------


async def test_a_delta_that_the_disk_does_not_take_is_kept_in_memory(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise TierError("no room")

    monkeypatch.setattr(reader.files, "write", full)
    first = corpus.delta("a")
    corpus.delta("b", ahead_s=10)
    await reader.refresh()
    corpus.delta("c", ahead_s=5)  # in between, so all are merged again
    assert (await reader.calls())["get"] == 1
    assert reader.finds("a", "b", "c") == [True] * 3
    assert reader.counters.get("index.not_kept") == 3
    monkeypatch.undo()
    corpus.base(1, rows_of("a"), merged=[first])
    await reader.refresh()
    assert reader.finds("a", "b", "c") == [True] * 3


async def test_a_delta_in_memory_that_nobody_needs_any_more_is_dropped(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise TierError("no room")

    monkeypatch.setattr(reader.files, "write", full)
    ulid = corpus.delta("a")
    await reader.refresh()
    assert reader.counters.get("index.not_kept") == 1
    corpus.delete(LAYOUT.delta(ulid))  # merged and cleaned away, while this reader was behind
    corpus.base(2, rows_of("a"))
    for _ in range(30):
        await reader.refresh()
    assert await reader.cache.deltas([ulid]) == {ulid: None}


async def test_a_base_that_does_not_fit_is_told_once_and_the_objects_are_listed(
    corpus: Corpus, make_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(budget_bytes=2000, mode="exact")
    corpus.base(1, rows_of(*range(200)))
    corpus.store("listed")
    for _ in range(3):
        await reader.refresh()
    assert reader.finds("listed", 1) == [True, False]
    assert len(messages(caplog)) == 1
    assert "2000" in messages(caplog)[0]


@pytest.mark.parametrize("mode", ["exact", "bloom"])
async def test_a_base_that_would_crowd_out_the_entries_is_not_downloaded(
    corpus: Corpus, make_reader: MakeReader, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    head = corpus.base(1, rows_of(*range(200)), shards=4)
    nbytes = head.nbytes if mode == "exact" else head.bloom_nbytes
    small = make_reader(folder="small", budget_bytes=2 * nbytes - 1, mode=mode)
    assert "get_range" not in await small.calls()
    assert small.finds(1) == [False]
    assert "cache_bytes" in messages(caplog)[0]
    large = make_reader(folder="large", budget_bytes=2 * nbytes, mode=mode)
    await large.refresh()
    assert large.finds(1) == [True]


async def test_more_deltas_than_the_process_may_open_files_are_applied(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    for number in range(150):
        corpus.delta(number)
    await make_reader().refresh()
    reader = make_reader()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        assert "get" not in await reader.calls()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reader.finds(*range(150)) == [True] * 150


@pytest.mark.parametrize("harm", ["removed", "cut", "overwritten"])
async def test_files_of_this_node_that_were_harmed_are_fetched_again(
    corpus: Corpus, make_reader: MakeReader, harm: str
) -> None:
    head = corpus.base(1, rows_of("a", "b"))
    delta = corpus.delta("c")
    await make_reader().refresh()
    other = make_reader()
    names = [first_shard(head).removeprefix(LAYOUT.manifest), f"delta/{delta}.safetensors"]
    for name in names:
        other.files.remove(name)
        if harm != "removed":
            size = len(corpus.objects[LAYOUT.manifest + name])
            other.files.write(name, bytes(10 if harm == "cut" else size))
    await other.refresh()
    assert other.finds("a", "b", "c") == [True] * 3


def lose_the_end(path: Path) -> None:
    """As a power cut does with what was not synced."""
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    os.utime(path, (1, 1))


async def test_files_from_before_a_power_cut_are_read_again(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """They may hold zeros where their names and sizes are right."""
    head = corpus.base(1, rows_of("a", "b"), shards=1)
    delta = corpus.delta("c")
    await make_reader().refresh()
    other = make_reader()
    names = [first_shard(head).removeprefix(LAYOUT.manifest), f"delta/{delta}.safetensors"]
    for name in names:
        lose_the_end(Path(other.files.path(name)))
    await other.refresh()
    assert other.finds("a", "b", "c") == [True] * 3
    assert other.counters.get("index.downloads") == 2
    third = make_reader()
    for name in names:
        os.utime(third.files.path(name), (1, 1))
    await third.refresh()
    assert third.counters.get("index.downloads") == 0
    shard = third.files.find(names[0])
    assert shard is not None
    assert shard.modified_s > 1  # not read again; a delta always is


@pytest.mark.parametrize("reads", [1, 2])
async def test_a_file_that_cannot_be_read_after_a_power_cut_is_used_or_fetched_at_once(
    corpus: Corpus, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    head = corpus.base(1, rows_of("a", "b"), shards=1)
    await make_reader().refresh()
    other = make_reader()
    path = other.files.path(first_shard(head).removeprefix(LAYOUT.manifest))
    os.utime(path, (1, 1))
    failing = [path] * reads
    real = safetensors_file.map_file

    def map_file(path: str) -> Any:
        if path in failing:
            failing.remove(path)
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path)

    monkeypatch.setattr(safetensors_file, "map_file", map_file)
    await other.refresh()
    assert other.finds("a", "b") == [True] * 2
    assert other.counters.get("index.bases") == 1
    assert other.counters.get("index.downloads") == reads - 1


async def test_a_folder_that_was_emptied_under_a_reader_costs_downloads_only(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    left = corpus.delta("b", ahead_s=10)
    await reader.refresh()
    for name in reader.here():
        reader.files.remove(name)
    assert reader.finds("a", "b") == [True, True]
    corpus.delta("c", ahead_s=5)
    await reader.refresh()
    corpus.base(2, rows_of("a", "c"))
    await reader.refresh()
    assert reader.finds("a", "b", "c") == [True] * 3
    assert f"delta/{left}.safetensors" in reader.here()


async def test_a_delta_that_is_gone_everywhere_is_dropped_with_the_next_base(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.base(1, rows_of("a"))
    gone = corpus.delta("b")
    await reader.refresh()
    corpus.delete(LAYOUT.delta(gone))
    reader.files.remove(f"delta/{gone}.safetensors")
    corpus.base(2, rows_of("a"))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, False]
    assert reader.index.counts() == (0, 0, 1)


async def test_deltas_that_nobody_needs_any_more_leave_this_node(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    """Such as those that were merged while the node was off."""
    old = corpus.delta("old")
    await make_reader().refresh()
    corpus.delete(LAYOUT.delta(old))
    corpus.base(1, rows_of("old"))
    clock = Clock(time.time())
    reader = make_reader(file_clock=clock)
    await reader.refresh()
    assert f"delta/{old}.safetensors" in reader.here()  # another process may be behind
    clock.now_s = 1e12
    for _ in range(30):
        await reader.refresh()
    assert f"delta/{old}.safetensors" not in reader.here()


# -- several readers of a node -----------------------------------------------------------------


async def test_two_readers_of_one_node_download_each_file_once(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.base(1, rows_of(*range(100)), shards=8)
    for number in range(20):
        corpus.delta(1000 + number)
    readers = [make_reader(), make_reader()]
    await asyncio.gather(*(reader.refresh() for reader in readers))
    for reader in readers:
        assert all(reader.finds(*range(100), *range(1000, 1020)))
    assert sum(reader.store.calls["get_range"] for reader in readers) == 8
    fetched = [name for reader in readers for op, name in reader.store.log if op == "get"]
    assert len([name for name in fetched if "/delta/" in name]) == 20
    assert sum(reader.counters.get("index.downloads") for reader in readers) == 28


async def test_a_reader_behind_another_of_its_node_leaves_its_files_alone(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.base(1, rows_of("a"))
    ahead, behind = make_reader(), make_reader()
    await ahead.refresh()
    new = corpus.base(2, rows_of("a", "b"))
    await ahead.refresh()
    corpus.delete(LAYOUT.head(2))  # as if it had not been there when the other one looked
    await behind.refresh()
    assert behind.finds("a", "b") == [True, False]
    corpus.put(LAYOUT.head(2), new.to_json())
    assert first_shard(new).removeprefix(LAYOUT.manifest) in behind.here()
    await behind.refresh()
    assert behind.finds("a", "b") == [True, True]


async def test_a_base_of_an_index_that_started_over_leaves_this_node(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    old = corpus.base(7, rows_of("a"))
    clock = Clock(time.time())
    reader = make_reader(file_clock=clock)
    await reader.refresh()
    corpus.drop_base(old)
    corpus.base(1, rows_of("b"))
    await reader.refresh()
    name = first_shard(old).removeprefix(LAYOUT.manifest)
    assert name in reader.here()  # it may be newer than what this process has seen
    clock.now_s += 2 * HOUR_S
    corpus.base(2, rows_of("b"))
    await reader.refresh()
    assert name not in reader.here()
    assert reader.finds("b") == [True]


async def test_lookups_survive_the_removal_of_their_files(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    reader, other = make_reader(), make_reader()
    corpus.base(1, rows_of(*range(100)))
    await reader.refresh()
    corpus.base(2, rows_of(*range(100)))
    await other.refresh()
    assert all(reader.finds(*range(100)))
    assert [reader.index.facts(key_of(n)) is not None for n in range(100)] == [True] * 100


async def test_namespaces_do_not_see_each_others_index(corpus: Corpus, reader: Reader) -> None:
    rows: Rows = rows_of("a")
    other = Layout("gemma-fedcba9876543210")
    corpus.put(
        other.delta("01ARZ3NDEKTSV4RRFFQ69G5FAV"), b"".join(encode_segment(rows, other.namespace))
    )
    await reader.refresh()
    assert reader.finds("a") == [False]
    assert reader.counters.get("index.refused") == 0

# SPDX-License-Identifier: Apache-2.0
"""Heads and names of deltas: what was written is read, and nothing that cannot be true."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec.errors import CorruptEntryError
from s3ec.identity import Layout, is_ulid
from s3ec.index.manifest import (
    MAX_HEAD_BYTES,
    MAX_SHARD_ROWS,
    BaseFile,
    BaseManifest,
    Shard,
    Ulids,
    first_ulid,
    parse_head,
    shard_ranges,
    time_ms,
)

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
BLOB = BaseFile(100, "0123456789abcdef" * 2)


def head_of(*ranges: tuple[int, int, int]) -> BaseManifest:
    shards = tuple(Shard(first, last, entries, BLOB, BLOB) for first, last, entries in ranges)
    entries = sum(shard.entries for shard in shards)
    return BaseManifest(7, "0123456789abcdef", 1_700_000_000, entries, shards, frozenset({ULID}))


HEAD = head_of((0, 127, 5), (128, 255, 0))
CONTENT = json.loads(HEAD.to_json())


def reason_of(blob: bytes) -> str:
    with pytest.raises(CorruptEntryError, match=r"^000000000007\.json: ") as caught:
        parse_head(blob, name="000000000007.json")
    return caught.value.reason


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(HEAD.to_json())
    change(content)
    return json.dumps(content).encode()


def test_what_was_committed_is_read_back() -> None:
    assert parse_head(HEAD.to_json()) == HEAD
    assert parse_head(memoryview(HEAD.to_json())) == HEAD
    assert (HEAD.nbytes, HEAD.bloom_nbytes) == (200, 200)


def test_the_file_is_as_documented() -> None:
    blob = f'{{"nbytes":100,"xxh3":"{BLOB.xxh3}"}}'
    one = f'"bloom":{blob},"entries":5,"first":0,"last":255,"nbytes":100,"xxh3":"{BLOB.xxh3}"'
    assert head_of((0, 255, 5)).to_json().decode() == (
        '{"created_s":1700000000,"entries":5,"format":1,'
        f'"merged":["{ULID}"],"run":"0123456789abcdef","shards":[{{{one}}}],"version":7}}'
    )


def test_names_of_shards_are_the_layouts() -> None:
    layout = Layout("gemma-0123456789abcdef")
    run = "gemma-0123456789abcdef/manifest/base/000000000007-0123456789abcdef/"
    shard = HEAD.shards[1]
    assert HEAD.segment_name(layout, shard) == f"{run}80-ff.safetensors"
    assert HEAD.bloom_name(layout, shard) == f"{run}80-ff.bloom.safetensors"


def test_another_format_is_told_apart_from_damage() -> None:
    assert reason_of(b'{"format":2,"whatever":[]}') == "version"
    assert reason_of(b'{"format":true}') == "version"
    assert reason_of(b'{"version":1}') == "header"


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field more": lambda c: c.update(extra=1),
    "a field less": lambda c: c.pop("merged"),
    "version 0": lambda c: c.update(version=0),
    "version too large": lambda c: c.update(version=10**12),
    "version as text": lambda c: c.update(version="7"),
    "version true": lambda c: c.update(version=True),
    "a run that is a path": lambda c: c.update(run="../../../../etc/a"),
    "run in upper case": lambda c: c.update(run="0123456789ABCDEF"),
    "a negative time": lambda c: c.update(created_s=-1),
    "entries that do not add up": lambda c: c.update(entries=6),
    "2**60 entries": lambda c: c.update(entries=2**60),
    "no shards": lambda c: c.update(shards=[], entries=0),
    "shards no list": lambda c: c.update(shards={}),
    "merged no list": lambda c: c.update(merged="01ARZ"),
    "merged a path": lambda c: c.update(merged=["../../objects/ab"]),
    "merged a number": lambda c: c.update(merged=[1]),
    "a gap": lambda c: c["shards"][1].update(first=129),
    "an overlap": lambda c: c["shards"][1].update(first=127),
    "ends early": lambda c: c["shards"][1].update(last=254),
    "begins late": lambda c: c["shards"][0].update(first=1),
    "ends before it begins": lambda c: c["shards"][1].update(last=100),
    "twice the same": lambda c: c["shards"].append(copy.deepcopy(c["shards"][0])),
    "in the wrong order": lambda c: c["shards"].reverse(),
    "an empty file": lambda c: c["shards"][0].update(nbytes=0),
    "no checksum": lambda c: c["shards"][0].update(xxh3=""),
    "a shard that is none": lambda c: c.update(shards=[None]),
    "no filter": lambda c: c["shards"][0].update(bloom=None),
    "a filter without a size": lambda c: c["shards"][0].update(bloom={"xxh3": BLOB.xxh3}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_head_that_cannot_be_true_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert reason_of(changed(change)) == "header"


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format":1,"format":1}',
        b'{"format":NaN}',
        b'{"format":1' + b"0" * 5000 + b"}",
    ],
    ids=["empty", "list", "null", "not utf-8", "deep", "twice", "nan", "long number"],
)
def test_what_is_no_plain_json_is_refused(blob: bytes) -> None:
    assert reason_of(blob) == "header"


def test_a_head_over_the_limit_is_not_parsed() -> None:
    assert reason_of(b" " * (MAX_HEAD_BYTES + 1)) == "size"


@given(st.data())
def test_a_damaged_head_is_refused_or_another_valid_head(data: st.DataObject) -> None:
    blob = bytearray(HEAD.to_json())
    if data.draw(st.booleans(), label="cut"):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        head = parse_head(bytes(blob))
    except CorruptEntryError:
        return
    assert [shard.first for shard in head.shards] == [0, head.shards[0].last + 1]
    assert parse_head(head.to_json()) == head


@settings(max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_any_json_in_any_field_is_refused_or_valid(value: object) -> None:
    for field in CONTENT:
        blob = json.dumps({**CONTENT, field: value}).encode()
        with contextlib.suppress(CorruptEntryError):
            parse_head(blob)


@pytest.mark.parametrize(
    ("entries", "shards"),
    [
        (0, 1),
        (1, 1),
        (900_000, 1),
        (1_000_000, 1),
        (1_050_000, 2),
        (10**7, 16),
        (10**8, 128),
        (10**9, 256),
    ],
)
def test_ranges_cover_everything_in_a_power_of_two_of_shards(entries: int, shards: int) -> None:
    ranges = shard_ranges(entries)
    assert len(ranges) == shards
    assert parse_head(head_of(*((first, last, 1) for first, last in ranges)).to_json())
    assert entries / shards <= MAX_SHARD_ROWS or shards == 256


def test_size_and_checksum_of_pieces_are_those_of_the_file() -> None:
    whole = BaseFile.of([b"one", memoryview(b"two"), b""])
    assert whole == BaseFile.of([b"onetwo"])
    assert whole.nbytes == 6
    assert whole != BaseFile.of([b"onetwp"])


# -- names of deltas -------------------------------------------------------------------------------


NOW_S = 1_700_000_000.0
TIMES_MS = st.integers(0, 2**48 - 1)


def test_name_spells_the_published_example() -> None:
    """The time of https://github.com/ulid/spec's example, 01ARZ3NDEK..., and 80 zeros."""
    assert first_ulid(1469922850259) == "01ARZ3NDEK" + 16 * "0"
    assert time_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1469922850259
    assert first_ulid(2**48 - 1) == "7ZZZZZZZZZ" + 16 * "0"


@given(TIMES_MS, TIMES_MS)
def test_names_sort_as_their_times(one: int, other: int) -> None:
    assert time_ms(first_ulid(one)) == one
    assert (first_ulid(one) < first_ulid(other)) == (one < other)


@given(st.lists(st.floats(NOW_S - 7200, NOW_S + 7200), min_size=2, max_size=30))
def test_names_of_one_maker_ascend_whatever_its_clock_does(times_s: list[float]) -> None:
    ulids = Ulids()
    names = [ulids.next(at_s) for at_s in times_s]
    assert names == sorted(set(names))
    assert all(map(is_ulid, names))
    assert time_ms(names[0]) == int(times_s[0] * 1000)
    assert [time_ms(name) for name in names] == [
        int(max(times_s[: n + 1]) * 1000) for n in range(len(names))
    ]


def test_name_that_runs_out_of_random_bits_takes_the_next_millisecond() -> None:
    ulids = Ulids(random_bits=lambda bits: 2**bits - 1)
    first, second = ulids.next(NOW_S), ulids.next(NOW_S)
    assert first == first_ulid(int(NOW_S * 1000))[:10] + 16 * "Z"
    assert time_ms(second) == time_ms(first) + 1


@pytest.mark.parametrize(("at_ms", "held_ms"), [(-5, 0), (2**60, 2**48 - 1)])
def test_time_that_no_name_holds_becomes_the_nearest(at_ms: int, held_ms: int) -> None:
    assert time_ms(first_ulid(at_ms)) == held_ms
    assert time_ms(Ulids().next(at_ms / 1000)) == held_ms


@pytest.mark.parametrize(
    "name",
    [
        "",
        "01ARZ3NDEKTSV4RRFFQ69G5FA",
        "01ARZ3NDEKTSV4RRFFQ69G5FAVV",
        "01arz3ndektsv4rrffq69g5fav",
        "81ARZ3NDEKTSV4RRFFQ69G5FAV",  # over 128 bits
        "01ARZ3NDEKTSV4RRFFQ69G5FAI",
        "01ARZ3NDEKTSV4RRFFQ69G5FAU",
        "01ARZ3NDEKTSV4RRFFQ69G5FA\n",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV\n",
        "\u06601ARZ3NDEKTSV4RRFFQ69G5FAV",
    ],
)
def test_other_strings_are_no_names(name: str) -> None:
    assert not is_ulid(name)

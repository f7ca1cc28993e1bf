# SPDX-License-Identifier: Apache-2.0
"""Segments: every row is found, nothing else is, and no file is believed more than its size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from s3ec.errors import CorruptEntryError
from s3ec.identity import split_digest
from s3ec.index import segment
from s3ec.index.lookup import PresenceFilter, View
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.index.segment import Segment, encode_segment, parse_segment
from s3ec.safetensors_file import encode_columns
from tests.unit.index import columns
from tests.unit.index.basics import NAMESPACE
from tests.unit.index.columns import (
    OTHER,
    TOP,
    Half,
    Items,
    as_items,
    forged,
    halves_of,
    near,
    rows_of,
)

if TYPE_CHECKING:
    from s3ec.identity import Key
    from s3ec.index.lookup import Base


def file_of(rows: Rows, namespace: str = NAMESPACE) -> bytes:
    return b"".join(encode_segment(rows, namespace))


def reason_of(blob: bytes | memoryview) -> str:
    with pytest.raises(CorruptEntryError, match=r"^01AB\.safetensors: ") as caught:
        parse_segment(blob, NAMESPACE, name="01AB.safetensors")
    return caught.value.reason


def written(folder: Path, blob: bytes) -> Path:
    path = folder / "00-ff.safetensors"
    path.write_bytes(blob)
    return path


# -- round trip --------------------------------------------------------------------------------


@given(columns.items)
def test_a_file_says_what_was_put_in(items: Items) -> None:
    rows = Rows.from_facts(items).sorted_unique()
    blob = file_of(rows)
    assert as_items(parse_segment(blob, NAMESPACE)) == as_items(rows)
    assert file_of(parse_segment(blob, NAMESPACE)) == blob


@pytest.mark.parametrize("deleted", [False, True])
def test_any_safetensors_reader_opens_it(deleted: bool) -> None:
    rows = rows_of(100, deleted=deleted)
    read = safetensors.numpy.load(file_of(rows))
    fences = read.pop("fences")
    assert fences[0] == 0
    assert fences[-1] == 100
    expected = rows.columns()
    if not deleted:
        del expected["deleted"]
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[name], column) for name, column in expected.items())


def test_an_empty_segment_is_a_file_too(tmp_path: Path) -> None:
    blob = file_of(Rows.empty())
    assert len(parse_segment(blob, NAMESPACE)) == 0
    assert safetensors.numpy.load(blob)["digest_hi"].shape == (0,)
    opened = Segment.open(written(tmp_path, blob), NAMESPACE)
    assert len(opened) == 0
    assert opened.find(0, 0) == opened.find(TOP, TOP) == -1


def test_columns_of_a_parsed_file_are_views_of_it() -> None:
    blob = file_of(rows_of(10))
    whole = np.frombuffer(blob, "u1")
    rows = parse_segment(blob, NAMESPACE)
    assert all(
        np.shares_memory(whole, column)
        for name, column in rows.columns().items()
        if name != "deleted"
    )
    assert all(column.flags.aligned for column in rows.columns().values())


def test_unsorted_rows_are_not_written() -> None:
    rows = rows_of(10)
    backwards = rows.select(np.arange(9, -1, -1))
    with pytest.raises(CorruptEntryError, match="sorted"):
        encode_segment(backwards, NAMESPACE)
    with pytest.raises(CorruptEntryError, match="sorted"):
        Segment.of(backwards)
    twice = rows.select(np.array([0, 0, 1]))
    with pytest.raises(CorruptEntryError, match="sorted"):
        encode_segment(twice, NAMESPACE)


def test_too_many_rows_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MAX_ROWS", 9)
    with pytest.raises(CorruptEntryError, match="limit"):
        encode_segment(rows_of(10), NAMESPACE)


# -- lookup ------------------------------------------------------------------------------------


def inline_lookup(found_in: Segment) -> Callable[[int, int], bool]:
    """The lookup of a reader that has this segment for all leading bytes, and nothing else."""
    base = SimpleNamespace(
        exact=True,
        entries=len(found_in),
        maybe=lambda hi, lo: found_in.find(hi, lo) >= 0,
        lookup_parts=lambda: [found_in.lookup_parts()] * 256,
    )
    view = View(cast("Base", base))
    lookup = view.lookup(PresenceFilter(np.empty(0, np.uint64), room=1000), view.maybe)
    return lambda hi, lo: lookup(cast("Key", SimpleNamespace(digest_hi=hi, digest_lo=lo)))


def check_lookups(rows: Rows) -> None:
    """Every row is found at its place in both kinds of segment, and its neighbours are not."""
    expected = {half: row for row, half in enumerate(halves_of(rows))}
    for found_in in (Segment.of(rows), Segment.parse(file_of(rows), NAMESPACE)):
        assert len(found_in) == len(rows)
        for half, row in expected.items():
            assert found_in.find(*half) == row
        inline = inline_lookup(found_in)
        for half in near(rows):
            assert found_in.find(*half) == expected.get(half, -1)
            assert inline(*half) is (half in expected)
        assert all(inline(*half) for half in expected)


@given(columns.items)
def test_lookups_agree_with_a_dict(items: Items) -> None:
    rows = Rows.from_facts(items).sorted_unique()
    check_lookups(rows)
    said = dict(as_items(rows))
    found_in = Segment.of(rows)
    for digest, expected in said.items():
        row = found_in.find(*split_digest(digest))
        assert found_in.deleted(row) is isinstance(expected, Tombstone)
        if isinstance(expected, EntryInfo):
            assert found_in.facts(row) == expected


ADVERSARIAL: dict[str, list[Half]] = {
    "all zeros": [(0, 0)],
    "all ones": [(TOP, TOP)],
    "both ends": [(0, 0), (0, TOP), (TOP, 0), (TOP, TOP)],
    "one first half": [(7, lo) for lo in range(3000)],
    "one first half of zeros": [(0, lo * 2) for lo in range(3000)],
    "one first half of ones": [(TOP, TOP - lo * 2) for lo in range(3000)],
    "neighbours": [((1 << 63) + n, 0) for n in range(3000)],
    "neighbours across a carry": [((1 << 40) - 1500 + n, n) for n in range(3000)],
    "a crowd and one far away": [(n, n) for n in range(3000)] + [(TOP, 0)],
    "one and a crowd far away": [(0, 0)] + [(TOP - n, n) for n in range(3000)],
    "powers of two": [(1 << n, 1 << m) for n in range(64) for m in range(64)],
    "each leading byte": [(byte << 56, byte) for byte in range(256)],
    "one shard": [((0xAB << 56) + n * 0x1234567890, n) for n in range(3000)],
    "pairs with one first half": [(n * (TOP // 1500), lo) for n in range(1500) for lo in (1, 2)],
}


@pytest.mark.parametrize("halves", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_digests_are_found(halves: list[Half]) -> None:
    hi, lo = (np.array(half, "<u8") for half in zip(*halves, strict=True))
    check_lookups(Rows.of_digests(hi, lo).sorted_unique())


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000, 65_537])
def test_random_digests_are_found_at_every_size(count: int) -> None:
    random = np.random.default_rng(count)
    hi, lo = random.integers(0, TOP, (2, count), "<u8", endpoint=True)
    rows = Rows.of_digests(hi, lo).sorted_unique()
    found_in = Segment.of(rows)
    some = random.permutation(count)[:500].tolist()
    for row in some:
        assert found_in.find(int(rows.digest_hi[row]), int(rows.digest_lo[row])) == row
    check_lookups(rows.select(slice(0, 300)))


def test_slots_hold_few_rows_each() -> None:
    """What keeps a lookup as quick in a large segment as in a small one."""
    random = np.random.default_rng(1)
    for first, last in ((0, 255), (0xA0, 0xAF)):
        hi = random.integers(first << 56, (last + 1 << 56) - 1, 100_000, "<u8")
        rows = Rows.of_digests(np.sort(hi), np.arange(len(hi)))
        fences = safetensors.numpy.load(file_of(rows))["fences"]
        assert np.diff(fences).max() < 25
        assert len(fences) * 4 <= 2 * len(rows)  # bytes


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(1, 8))
def test_a_blob_at_any_address_can_be_looked_up(offset: int) -> None:
    rows = Rows.from_facts([(bytes([n]) * 16, EntryInfo(n)) for n in range(1, 100)])
    blob = memoryview(bytes(offset) + file_of(rows))[offset:]
    parsed = parse_segment(blob, NAMESPACE)
    for segment_ in (Segment.parse(blob, NAMESPACE), Segment.of(parsed)):
        for n in range(1, 100):
            row = segment_.find(*split_digest(bytes([n]) * 16))
            assert segment_.facts(row) == EntryInfo(n)


def test_an_opened_file_outlives_its_name(tmp_path: Path) -> None:
    rows = rows_of(1000)
    path = written(tmp_path, file_of(rows))
    opened = Segment.open(path, NAMESPACE)
    path.unlink()
    assert [opened.find(*half) for half in halves_of(rows)] == list(range(1000))
    assert opened.facts(7) == rows.facts(7)
    opened.check()


def test_rows_outlive_their_segment(tmp_path: Path) -> None:
    rows = rows_of(1000)
    opened = Segment.open(written(tmp_path, file_of(rows)), NAMESPACE)
    views = opened.rows()
    del opened
    assert as_items(views) == as_items(rows)


def test_opening_reads_no_columns(tmp_path: Path) -> None:
    """A base of a hundred shards opens in a moment; the checksum was compared before."""
    blob = bytearray(file_of(rows_of(1000)))
    blob[-1] ^= 1
    opened = Segment.open(written(tmp_path, bytes(blob)), NAMESPACE)
    with pytest.raises(CorruptEntryError, match=r"^00-ff\.safetensors: checksum"):
        opened.check()


def test_only_files_with_marks_may_hold_tombstones(tmp_path: Path) -> None:
    assert not Segment.parse(file_of(rows_of(9)), NAMESPACE).may_hold_tombstones
    assert Segment.parse(file_of(rows_of(9, deleted=True)), NAMESPACE).may_hold_tombstones


@pytest.mark.parametrize("kind", ["empty", "folder", "link", "pipe"])
def test_what_is_no_regular_file_is_not_mapped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "00-ff.safetensors"
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(written(tmp_path / "..", file_of(rows_of(3))))
    else:
        os.mkfifo(path)
    with pytest.raises((CorruptEntryError, OSError)):
        Segment.open(path, NAMESPACE)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Segment.open(tmp_path / "none", NAMESPACE)


# -- hostile files -----------------------------------------------------------------------------


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    blob = file_of(rows_of(20, deleted=True))
    assert {reason_of(blob[:length]) for length in range(len(blob))} == {"length"}
    for length in (0, 7, 8, 100, len(blob) - 1):
        with pytest.raises(CorruptEntryError):
            Segment.open(written(tmp_path, blob[:length]), NAMESPACE)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    blob = file_of(rows_of(20)) + b"\0"
    assert reason_of(blob) == "length"
    with pytest.raises(CorruptEntryError, match="expected"):
        Segment.open(written(tmp_path, blob), NAMESPACE)


def test_every_flipped_byte_is_noticed() -> None:
    rows = rows_of(20, deleted=True)
    blob = bytearray(file_of(rows))
    for at in range(len(blob)):
        bit = 1 << at % 8
        blob[at] ^= bit
        assert reason_of(bytes(blob)) in {
            *("length", "header", "version", "checksum", "namespace", "shape", "size")
        }
        blob[at] ^= bit


@given(st.data())
def test_lookups_in_damaged_columns_are_harmless(data: st.DataObject) -> None:
    """What only the full check notices: an opened file may lie, and is never read outside of."""
    rows = rows_of(40, deleted=True)
    blob = bytearray(file_of(rows))
    (length,) = np.frombuffer(blob[:8], "<u8").tolist()
    start = data.draw(st.integers(8 + length, len(blob) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=200))[: len(blob) - start]
    blob[start : start + len(damage)] = damage
    opened = Segment.parse(bytes(blob), NAMESPACE)
    for half in [*halves_of(rows), *near(rows)]:
        row = opened.find(*half)
        assert -1 <= row < len(rows)
        if row >= 0:
            assert isinstance(opened.facts(row), EntryInfo)
            assert opened.deleted(row) in (False, True)


def column(name: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content[name].update(changes)


def resized(content: dict[str, Any], entries: int) -> None:
    """All columns of another length, consistently."""
    content["__metadata__"]["entries"] = str(entries)
    at = 0
    sizes = {"U64": 8, "U32": 4, "U8": 1}
    for tensor in sorted(
        (tensor for name, tensor in content.items() if name != "__metadata__"),
        key=lambda tensor: tensor["data_offsets"],
    ):
        count = entries if tensor["shape"] == [20] else tensor["shape"][0]
        tensor["shape"] = [count]
        tensor["data_offsets"] = [at, at + count * sizes[tensor["dtype"]]]
        at = tensor["data_offsets"][1]


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda c: c["__metadata__"].update(s3ec="index-2"), "version"),
    "a filter": (lambda c: c["__metadata__"].update(s3ec="bloom-1"), "version"),
    "another namespace": (lambda c: c["__metadata__"].update(namespace=OTHER), "namespace"),
    "one row more": (lambda c: c["__metadata__"].update(entries="21"), "shape"),
    "no rows": (lambda c: c["__metadata__"].update(entries=""), "size"),
    "rows in words": (lambda c: c["__metadata__"].update(entries="twenty"), "size"),
    "rows in other digits": (lambda c: c["__metadata__"].update(entries="\u0662\u0660"), "size"),
    "minus one row": (lambda c: c["__metadata__"].update(entries="-1"), "size"),
    "2**60 rows": (lambda c: resized(c, 2**60), "header"),
    "2**39 rows": (lambda c: resized(c, 2**39), "shape"),
    "2**30 rows": (lambda c: resized(c, 2**30), "length"),
    "a checksum of nothing": (lambda c: c["__metadata__"].pop("xxh3"), "header"),
    "a column less": (lambda c: c.pop("dtype"), "length"),
    "a column of another name": (lambda c: c.update(kind=c.pop("dtype")), "shape"),
    "a column more": (
        lambda c: c.update(more={"dtype": "U8", "shape": [0], "data_offsets": [885, 885]}),
        "shape",
    ),
    "a narrow column": (column("width", dtype="U8"), "shape"),
    "an unknown type": (column("width", dtype="BF16"), "shape"),
    "a type that is a list": (column("width", dtype=["U32"]), "shape"),
    "a column that overlaps": (column("digest_lo", data_offsets=[152, 312]), "shape"),
    "a column with a gap": (column("digest_lo", data_offsets=[168, 328]), "shape"),
    "offsets backwards": (column("digest_lo", data_offsets=[320, 160]), "shape"),
    "negative offsets": (column("digest_hi", data_offsets=[-160, 0]), "shape"),
    "offsets true": (column("digest_hi", data_offsets=[False, 160]), "shape"),
    "offsets with a point": (column("digest_hi", data_offsets=[0.0, 160]), "shape"),
    "no offsets": (column("digest_hi", data_offsets=[]), "shape"),
    "a shape of nothing": (column("digest_hi", shape=[]), "shape"),
    "a shape of many": (column("digest_hi", shape=[20, 1, 1]), "shape"),
    "a shape of two": (column("digest_hi", shape=[20, 1]), "shape"),
    "a negative shape": (column("digest_hi", shape=[-20]), "shape"),
    "a shape with a point": (column("digest_hi", shape=[20.0]), "shape"),
    "a column that is a number": (lambda c: c.update(digest_hi=1), "shape"),
    "metadata of numbers": (lambda c: c["__metadata__"].update(x=1), "header"),
}


@pytest.mark.parametrize(("change", "reason"), LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_though_sealed(
    change: Callable[[dict[str, Any]], object], reason: str, tmp_path: Path
) -> None:
    blob = forged(file_of(rows_of(20)), change)
    assert reason_of(blob) == reason
    with pytest.raises(CorruptEntryError):
        Segment.open(written(tmp_path, blob), NAMESPACE)


def test_the_forger_is_believed_where_nothing_is_changed() -> None:
    blob = file_of(rows_of(20))
    assert as_items(parse_segment(forged(blob, lambda _: None), NAMESPACE)) == as_items(rows_of(20))


def with_columns(**changed: Any) -> bytes:
    """A sealed file with right checksums whose columns are not a writer's."""
    rows = rows_of(20, deleted=True)
    given = {**rows.columns(), "fences": np.array([0, 5, 20], "<u4"), **changed}
    order = sorted(given, key=lambda name: -given[name].itemsize)
    metadata = {"s3ec": segment.KIND, "namespace": NAMESPACE, "entries": "20"}
    return b"".join(encode_columns(metadata, {name: given[name] for name in order}))


SORTED = rows_of(20, deleted=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"digest_hi": SORTED.digest_hi[::-1].copy()}, "order"),
        ({"digest_hi": np.zeros(20, "<u8"), "digest_lo": np.zeros(20, "<u8")}, "order"),
        ({"fences": np.array([0, 1, 20], "<u4")}, "order"),
        ({"fences": np.array([1, 20], "<u4")}, "order"),
        ({"fences": np.array([0, 19], "<u4")}, "order"),
        ({"fences": np.array([0, 2**32 - 1, 20], "<u4")}, "order"),
        ({"fences": np.array([0], "<u4")}, "shape"),
        ({"fences": np.array([0, 5, 9, 20], "<u4")}, "shape"),
        ({"fences": np.array([0, 5, 20], "<u8")}, "shape"),
        ({"dtype": np.full(20, 4, "u1")}, "dtype"),
        ({"deleted": np.full(20, 2, "u1")}, "dtype"),
    ],
    ids=[
        *("backwards", "all equal", "other fences", "late", "early", "fences outside", "one fence"),
        *("three slots", "wide fences", "unknown dtype", "unknown mark"),
    ],
)
def test_columns_that_no_writer_writes_are_refused(changed: dict[str, Any], reason: str) -> None:
    blob = with_columns(**changed)
    assert reason_of(blob) == reason
    if reason != "shape":
        opened = Segment.parse(blob, NAMESPACE)
        for half in [*halves_of(SORTED), *near(SORTED)]:
            assert -1 <= opened.find(*half) < 20


@pytest.mark.parametrize("bits", [0, 1, 3, 8])
def test_fences_of_any_number_of_slots_are_believed(bits: int) -> None:
    """How many there are is the writer's choice."""
    edges = np.arange(1, 2**bits, dtype="<u8") << np.uint64(64 - bits) if bits else []
    inner = np.searchsorted(SORTED.digest_hi, edges)
    assert SORTED.digest_hi[0] < 2**63 <= SORTED.digest_hi[-1]  # no bits in common
    blob = with_columns(fences=np.array([0, *inner, 20], "<u4"))
    parse_segment(blob, NAMESPACE)
    opened = Segment.parse(blob, NAMESPACE)
    assert [opened.find(*half) for half in halves_of(SORTED)] == list(range(20))
    assert {opened.find(*half) for half in near(SORTED)} == {-1}


def test_more_slots_than_digests_differ_in_are_refused() -> None:
    hi = np.arange(0xAB00, 0xAB14, dtype="<u8")
    parse_segment(with_columns(digest_hi=hi, fences=np.array([0, 16, 20], "<u4")), NAMESPACE)
    fences = np.zeros(65, "<u4")
    fences[21:] = 20
    assert reason_of(with_columns(digest_hi=hi, fences=fences)) == "order"


def test_unsorted_rows_are_seen_across_the_parts_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment, "CHECK_ROWS", 5)
    parse_segment(file_of(rows_of(20)), NAMESPACE)
    hi = SORTED.digest_hi.copy()
    hi[[4, 5]] = hi[[5, 4]]
    assert reason_of(with_columns(digest_hi=hi)) == "order"


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_refused(noise: bytes, framed: bool) -> None:
    blob = len(noise).to_bytes(8, "little") + noise if framed else noise
    with pytest.raises(CorruptEntryError):
        parse_segment(blob, NAMESPACE)


def test_a_deeply_nested_header_is_refused() -> None:
    body = b'{"__metadata__":{},"x":' + b"[" * 10_000
    body += b" " * (-(8 + len(body)) % 64)
    assert reason_of(len(body).to_bytes(8, "little") + body) == "header"

# SPDX-License-Identifier: Apache-2.0
"""Parts of a catalogue that unpack to more than they say, and what is allocated for them."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from s3ec.corpus.catalog_file import decode_part, encode_part
from s3ec.errors import CorruptEntryError
from tests.support.catalogues import LAYOUT, ULID, parquet, part_table, row

GOOD = part_table(row(), row("b.png"))


def with_text(name: str, *values: str) -> pa.Table:
    return GOOD.set_column(GOOD.schema.get_field_index(name), name, pa.array(values))


def decode(body: bytes) -> pa.Table:
    return decode_part(body, LAYOUT.namespace, ulid=ULID, name="part")


def footer(body: bytes) -> Any:
    return pq.read_metadata(io.BytesIO(body))


def varint(number: int, size: int = 1) -> bytes:
    """A number as Thrift's compact protocol writes it, in ``size`` bytes at least."""
    left, found = number << 1, []
    while left or len(found) < size:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found[:-1], found[-1] & 127])


def lying(body: bytes, number: int, claimed: int) -> bytes:
    """The same file, whose footer says another number wherever it says this one."""
    start = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    said = varint(number)
    told = varint(claimed, len(said))
    assert said in body[start:]
    assert len(told) == len(said)
    return body[:start] + body[start:].replace(said, told)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "snappy"},
        {"compression": "none"},
    ],
    ids=str,
)
def test_part_is_measured_by_its_pages_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("s3ec.corpus.catalog_file.MAX_UNPACKED_BYTES", 100_000)
    whole = parquet(with_text("extra", "x" * 80_000, "y" * 80_000), **options)
    body = lying(whole, footer(whole).row_group(0).total_byte_size, 100)
    assert footer(body).row_group(0).total_byte_size == 100
    monkeypatch.delattr(pq.ParquetFile, "read_row_group")
    with pytest.raises(CorruptEntryError, match="it holds too much"):
        decode(body)


def test_page_larger_than_any_of_ours_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3ec.corpus.parquet_pages._PAGE_BYTES", 50_000)
    monkeypatch.delattr(pq.ParquetFile, "read_row_group")
    body = parquet(with_text("extra", "x" * 60_000, "{}"), compression="zstd")
    with pytest.raises(CorruptEntryError, match="bytes holds too much"):
        decode(body)


def test_page_that_unpacks_to_another_size_is_refused() -> None:
    body = parquet(with_text("extra", "x" * 60_000, "{}"), compression="zstd", use_dictionary=False)
    front = b"\x15\x00\x15"  # of the header of a page with values: its type, and then this size
    sizes = [front + varint(size) for size in range(60_000, 60_100)]
    said = next(filter(body.__contains__, sizes))
    told = front + varint(100, len(said) - len(front))
    with pytest.raises(CorruptEntryError, match="no Parquet that can be read"):
        decode(body.replace(said, told))


def test_pages_whose_values_unfold_are_refused() -> None:
    """A value that repeats the one before takes three bytes in such a page."""
    table = with_text("document", "x" * 4000, "x" * 4000)
    encoding = {"document": "DELTA_BYTE_ARRAY"}
    body = parquet(table, use_dictionary=False, column_encoding=encoding)
    with pytest.raises(CorruptEntryError, match="encoded in a way"):
        decode(body)


@pytest.mark.parametrize("claimed", [10, 4000])
def test_part_that_claims_other_rows_than_it_has_is_refused(claimed: int) -> None:
    body = lying(parquet(pa.concat_tables([part_table(row())] * 1000)), 1000, claimed)
    assert footer(body).num_rows == claimed
    with pytest.raises(CorruptEntryError, match="not as many values as it says"):
        decode(body)


def test_part_of_too_many_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3ec.corpus.parquet_pages._MOST_PAGES", 20)
    with pytest.raises(CorruptEntryError, match="more than 20 pages"):
        decode(parquet(GOOD))


def test_footer_of_many_lists_is_refused() -> None:
    many = pa.table({f"c{number}": pa.array([1]) for number in range(300)})
    with pytest.raises(CorruptEntryError, match="no Parquet that can be read"):
        decode(parquet(many))


def test_long_footer_is_refused() -> None:
    length = 5 * 2**20
    body = parquet(GOOD)[:-8] + bytes(length) + length.to_bytes(4, "little") + b"PAR1"
    with pytest.raises(CorruptEntryError, match="its footer is too long"):
        decode(body)


@pytest.mark.parametrize("claimed", [0, 1, 5000, 2**20])
@pytest.mark.parametrize("has_dictionary", [True, False])
def test_part_whose_pages_are_not_where_it_says_is_refused(
    has_dictionary: bool, claimed: int
) -> None:
    table = pa.concat_tables([GOOD] * 40)
    body = parquet(table, compression="none", use_dictionary=has_dictionary)
    column = footer(body).row_group(0).column(13)
    offset = column.dictionary_page_offset if has_dictionary else column.data_page_offset
    with pytest.raises(CorruptEntryError):
        decode(_with_offset(body, offset, claimed))


def _with_offset(body: bytes, offset: int, claimed: int) -> bytes:
    start = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    front, end = body[:start], body[start:-8].replace(varint(offset), varint(claimed))
    return front + end + len(end).to_bytes(4, "little") + b"PAR1"


def test_part_of_long_texts_of_ours_is_read() -> None:
    """So that no bound refuses what we write: Arrow makes pages of a thousand values."""
    rows = [
        row(f"{n:04}", uri=f"{n:04}" * 4000, extra={"a": f"{n:04}" * 5000}) for n in range(1100)
    ]
    body = encode_part(part_table(*rows), LAYOUT.namespace)
    assert len(decode(bytes(body))) == 1100

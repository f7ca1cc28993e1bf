# SPDX-License-Identifier: Apache-2.0
"""Measures the unpacked size of a Parquet file, by the headers of its pages, without unpacking.

A footer may claim anything. A reader allocates by the headers of pages, which have the unpacked
size of each page, and Arrow refuses a page that unpacks to another size. So their sum is a bound,
for pages whose values do not expand once more (PLAIN values and dictionaries).

Checked with Arrow 26, ``cpp/src/parquet/column_reader.cc``. Footers and headers are structs of
Thrift's compact protocol. They are parsed here, since pyarrow's ``RowGroupMetaData.column`` ends
the process if a footer is damaged in some ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from s3ec.errors import CorruptEntryError
from s3ec.store.base import Blob

# The header of a page has statistics: two values of up to 4 KiB each, as Arrow writes them.
_HEADER_BYTES = 2**16
_DATA, _DICTIONARY = 0, 2
# PLAIN, PLAIN_DICTIONARY and RLE_DICTIONARY. Parquet's other encodings repeat parts of values.
_ENCODINGS = (0, 2, 8)
# Python reads each page's header. A million rows have some thousand pages.
_MOST_PAGES = 2**14
# Arrow ends a page after a batch of 1024 values, so a page has up to 64 MiB of our texts. Unpacking
# a page takes four times its size.
_PAGE_BYTES = 80 * 2**20

_I32, _I64, _TEXT, _LIST, _STRUCT = 5, 6, 8, 9, 12  # types of Thrift's compact protocol
# Below, fields of parquet.thrift 2.12 are given by number and type.
_PAGE_HEADER = {_DATA: 5, _DICTIONARY: 7}  # data_page_header, dictionary_page_header
# Limit of a list in a footer: a part has 16 groups of some 15 columns.
_MOST_ITEMS = 256
_Struct: TypeAlias = Mapping[tuple[int, int], Any]


def unpacked_bytes(blob: Blob | bytearray, columns: Sequence[int]) -> int:
    """Unpacked size of all pages of some columns. Nothing is unpacked for it.

    Args:
        blob: The whole file.
        columns: Their numbers.

    Raises:
        CorruptEntryError: The pages do not match the footer, or are not of the kinds that a part
            of a catalogue has.
    """
    view = memoryview(blob)
    length = int.from_bytes(view[-8:-4], "little")
    try:
        return _sum(view, _Compact(view[-8 - length : -8]).struct(), columns)
    except (LookupError, RecursionError, TypeError) as exc:
        raise _wrong(f"its footer or a page of it is damaged ({exc})") from exc


def _sum(view: memoryview, footer: _Struct, columns: Sequence[int]) -> int:
    total = count = rows = 0
    for group in footer[4, _LIST]:  # row_groups
        rows += group[3, _I64]  # num_rows
        for number in columns:
            chunk = group[1, _LIST][number]
            values = 0
            for nbytes, page_values in _pages(view, chunk):
                total += nbytes
                values += page_values
                count += 1
                if count > _MOST_PAGES:
                    raise _wrong(f"it has more than {_MOST_PAGES} pages")
            if not values == chunk[3, _STRUCT][5, _I64] == group[3, _I64]:
                raise _wrong("a column has not as many values as it says")
    if rows != footer[3, _I64]:
        raise _wrong("it has not as many rows as it says")
    return total


def _wrong(text: str) -> CorruptEntryError:
    return CorruptEntryError(text, reason="header")


def _pages(view: memoryview, chunk: _Struct) -> Iterator[tuple[int, int]]:
    """Bytes and values of the pages of one column of one row group, in order."""
    column = chunk[3, _STRUCT]
    at, expected = column[9, _I64], _DATA  # data_page_offset
    dictionary = column.get((11, _I64))  # dictionary_page_offset
    if dictionary is not None:
        # A reader takes the lower of the two as the beginning.
        if not 0 < dictionary < at:
            raise _wrong("the pages of a column are in no order")
        at, expected = dictionary, _DICTIONARY
    end = at + column[7, _I64]  # total_compressed_size
    if (1, _TEXT) in chunk or not 0 < at <= end <= len(view):
        raise _wrong("a column lies outside of the file")
    while at < end:
        header = _Compact(view[at : min(end, at + _HEADER_BYTES)])
        page = header.struct()
        if page[1, _I32] != expected:
            raise _wrong(f"a page of kind {page[1, _I32]} is where none can be")
        about = page[_PAGE_HEADER[expected], _STRUCT]
        unpacked, packed, values = page[2, _I32], page[3, _I32], about[1, _I32]
        if about[2, _I32] not in _ENCODINGS:
            raise _wrong(f"a page is encoded in a way ({about[2, _I32]}) that no part has")
        if min(unpacked, packed, values) < 0:
            raise _wrong("a page is less than empty")
        largest = max(unpacked, packed)
        if largest > _PAGE_BYTES:
            raise CorruptEntryError(f"a page of {unpacked} bytes holds too much", reason="size")
        yield largest, values if expected == _DATA else 0
        at, expected = at + header.at + packed, _DATA
    if at != end:
        raise _wrong("a page is longer than its column")


class _Compact:
    """Reads structs of Thrift's compact protocol.

    A field is identified by its number and its type: readers skip one of another type. Texts and
    doubles are skipped, too: None stands for each.

    Raises:
        LookupError: A field comes twice, or the struct is cut off, or has a list that is too long
            or an unknown type.
        RecursionError: It is nested too deeply.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = bytes(data)
        self.at = 0

    def struct(self) -> dict[tuple[int, int], Any]:
        """All fields, by number and type."""
        found: dict[tuple[int, int], Any] = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._number()
            if (number, kind) in found:
                raise LookupError(f"field {number} stands twice")
            found[number, kind] = None if kind in (1, 2) else self._value(kind)
        return found

    def _value(self, kind: int) -> Any:
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._number()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 9 | 10:
                head = self._byte()
                size = head >> 4 if head < 0xF0 else self._varint()
                if size > _MOST_ITEMS:
                    raise LookupError(f"a list has {size} items")
                return [self._value(head & 15) for _ in range(size)]
            case 12:
                return self.struct()
        raise LookupError(f"no value of type {kind} is in such a struct")

    def _skip(self, nbytes: int) -> None:
        self.at += nbytes

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _varint(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise LookupError("a number is too long")

    def _number(self) -> int:
        found = self._varint()
        return found >> 1 ^ -(found & 1)

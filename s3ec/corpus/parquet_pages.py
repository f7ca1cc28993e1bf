# SPDX-License-Identifier: Apache-2.0
"""How much a Parquet file really holds, by the headers of its pages, before anything is unpacked.

A footer may claim anything. A reader allocates by the headers of pages, which say how large each
page is once it is unpacked, and a page that unpacks to another size is refused by Arrow. So their
sum is a bound, for pages whose values do not unfold once more (PLAIN values and dictionaries).

Checked with Arrow 26, ``cpp/src/parquet/column_reader.cc``. Footers and headers are structs of
Thrift's compact protocol. They are read here, since pyarrow's ``RowGroupMetaData.column`` ends the
process where a footer is damaged in some ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from s3ec.errors import CorruptEntryError
from s3ec.store.base import Blob

# Statistics stand in the header of a page: two values of up to 4 KiB each, as Arrow writes them.
_HEADER_BYTES = 2**16
_DATA, _DICTIONARY = 0, 2
# PLAIN, PLAIN_DICTIONARY and RLE_DICTIONARY. The others that Parquet knows repeat parts of values.
_ENCODINGS = (0, 2, 8)
# Each is read by Python. A million rows have some thousand pages.
_MOST_PAGES = 2**14
# Arrow ends a page after a batch of 1024 values, so that one has up to 64 MiB of our texts. To
# unpack one takes four times its size.
_PAGE_BYTES = 80 * 2**20

# What is read of a struct: its fields by number, each with its type; see parquet.thrift 2.12.
_I32, _I64, _TEXT, _LIST, _STRUCT = 5, 6, 8, 9, 12
_ABOUT_VALUES = {1: _I32, 2: _I32}  # num_values, encoding
_PAGE: Mapping[int, Any] = {1: _I32, 2: _I32, 3: _I32, 5: _ABOUT_VALUES, 7: _ABOUT_VALUES}
# num_values, total_compressed_size, data_page_offset, dictionary_page_offset
_COLUMN = {5: _I64, 7: _I64, 9: _I64, 11: _I64}
_CHUNK = {1: _TEXT, 3: _COLUMN}  # file_path, meta_data
_FOOTER = {3: _I64, 4: [{1: [_CHUNK], 3: _I64}]}  # num_rows; columns and num_rows of each group


def unpacked_bytes(blob: Blob | bytearray, columns: Sequence[int]) -> int:
    """Size of all pages of some columns when they are unpacked. Nothing is unpacked for that.

    Args:
        blob: The whole file.
        columns: Their numbers.

    Raises:
        CorruptEntryError: The pages are not those of which the footer tells, or not of the kinds
            that a part of a catalogue has.
    """
    view = memoryview(blob)
    length = int.from_bytes(view[-8:-4], "little")
    try:
        return _sum(view, _Compact(view[-8 - length : -8]).struct(_FOOTER), columns)
    except (LookupError, RecursionError) as exc:
        raise _wrong(f"its footer or a page of it is damaged ({exc})") from exc


def _sum(view: memoryview, footer: Mapping[int, Any], columns: Sequence[int]) -> int:
    total = count = rows = 0
    for group in footer[4]:
        rows += group[3]
        for number in columns:
            chunk = group[1][number]
            values = 0
            for nbytes, page_values in _pages(view, chunk):
                total += nbytes
                values += page_values
                count += 1
                if count > _MOST_PAGES:
                    raise _wrong(f"it has more than {_MOST_PAGES} pages")
            if not values == chunk[3][5] == group[3]:
                raise _wrong("a column has not as many values as it says")
    if rows != footer[3]:
        raise _wrong("it has not as many rows as it says")
    return total


def _wrong(text: str) -> CorruptEntryError:
    return CorruptEntryError(text, reason="header")


def _pages(view: memoryview, chunk: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    """Bytes and values of the pages of one column of one row group, in order."""
    column = chunk[3]
    at, nbytes, dictionary = column[9], column[7], column.get(11)
    expected = _DATA
    if dictionary is not None:
        # A reader takes the lower one of the two for the beginning.
        if not 0 < dictionary < at:
            raise _wrong("the pages of a column are in no order")
        at, expected = dictionary, _DICTIONARY
    end = at + nbytes
    if 1 in chunk or not 0 < at <= end <= len(view):
        raise _wrong("a column lies outside of the file")
    while at < end:
        header = _Compact(view[at : min(end, at + _HEADER_BYTES)])
        page = header.struct(_PAGE)
        kind, unpacked, nbytes = page[1], page[2], page[3]
        if kind != expected:
            raise _wrong(f"a page of kind {kind} is where none can be")
        about = page[7 if kind == _DICTIONARY else 5]
        values, encoding = about[1], about[2]
        if encoding not in _ENCODINGS:
            raise _wrong(f"a page is encoded in a way ({encoding}) that no part has")
        if min(unpacked, nbytes, values) < 0:
            raise _wrong("a page is less than empty")
        largest = max(unpacked, nbytes)
        if largest > _PAGE_BYTES:
            raise CorruptEntryError(f"a page of {unpacked} bytes holds too much", reason="size")
        yield largest, values if kind == _DATA else 0
        at, expected = at + header.at + nbytes, _DATA
    if at != end:
        raise _wrong("a page is longer than its column")


class _Compact:
    """Reads structs of Thrift's compact protocol.

    Where a field stands twice, or has another type than it should, readers may differ in what they
    take: such a struct is refused.

    Raises:
        LookupError: It is that, cut off, or of no type that there is.
        RecursionError: It is too deep.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = bytes(data)
        self.at = 0

    def struct(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """The wanted fields that it has, by number; the others are passed over."""
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            field = field + step if step else self._number()
            if field not in wanted:
                self._skip(kind)
                continue
            if field in found:
                raise LookupError(f"field {field} stands twice")
            found[field] = self._value(kind, wanted[field])
        return found

    def _value(self, kind: int, wanted: Any) -> Any:
        kinds: dict[type, int] = {dict: _STRUCT, list: _LIST}
        expected = kinds.get(type(wanted), wanted)
        if kind != expected:
            raise LookupError(f"type {kind} is where {expected} should be")
        if kind == _STRUCT:
            return self.struct(wanted)
        if kind != _LIST:
            return self._number() if kind in (_I32, _I64) else self._skip(kind)
        size, each = self._list()
        return [self._value(each, wanted[0]) for _ in range(size)]

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

    def _list(self) -> tuple[int, int]:
        """How many there are, and of which type."""
        head = self._byte()
        return head >> 4 if head < 0xF0 else self._varint(), head & 15

    def _skip(self, kind: int, *, in_list: bool = False) -> None:
        match kind:
            case 1 | 2:  # a field is one by its type
                self.at += in_list
            case 3:
                self.at += 1
            case 4 | 5 | 6:
                self._varint()
            case 7:
                self.at += 8
            case 8:
                length = self._varint()  # which moves on, too
                self.at += length
            case 9 | 10:
                size, each = self._list()
                for _ in range(size):
                    self._skip(each, in_list=True)
                    if self.at > len(self._data):
                        break
            case 12:
                self.struct({})
            case _:
                raise LookupError(f"no value of type {kind} is in such a struct")
        if self.at > len(self._data):
            raise LookupError("it is cut off")

# SPDX-License-Identifier: Apache-2.0
"""One part of a catalogue: its rows, and the Parquet file they are written as.

A part is plain Parquet that any reader can read. Reads here check all of it, since any process may
have written it: the unpacked size of its pages before anything is unpacked, every page's checksum,
the columns' types, and every value. Rows that pass need no further check.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from s3ec.codec import MADE_BY, MADE_BY_CHARACTERS
from s3ec.corpus.parquet_pages import unpacked_bytes
from s3ec.corpus.reading import without_secrets
from s3ec.errors import ConfigError, CorruptEntryError, TierError
from s3ec.identity import MAX_IDENTIFIER_BYTES, canonical_json, is_ulid
from s3ec.safetensors_file import plain_json
from s3ec.store.base import Blob
from s3ec.tier.files import write_file

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

KIND = "catalog-1"
_KINDS = "catalog-"
MAX_PART_BYTES = 128 * 2**20
"""Size limit of a part's file; a larger one is not read."""
MAX_PART_ROWS = 2**20
MAX_UNPACKED_BYTES = 512 * 2**20
"""Size limit of a part's columns in memory."""
OWN_ROWS = 2**16
"""The most rows of a part that is written here, so that reading parts one by one needs little
memory."""
_APPEND_BYTES = 64 * 2**20
_BATCH_ROWS = 4096
# Limits of a footer: a full part's, whose statistics may hold long texts, has 2 MiB. Limit of its
# lists, each item of which takes a reader up to 1 KiB: a part has 16 groups of some 15 columns.
_FOOTER_BYTES = 4 * 2**20
_FOOTER_ITEMS = 256

# Each text column with the most bytes of a value. Paths have at most 4096, signed URLs a few
# thousand, and a header, which also holds the placeholder, 16 KiB.
TEXTS = {
    "document": 4096,
    "uri": 2**14,
    "sha256": 64,
    "identifier": MAX_IDENTIFIER_BYTES,
    "modality": 64,
    "dtype": 64,
    "placeholder": 2**14,
    "extra": 2**16,
    "made_by": MADE_BY_CHARACTERS,
    "part": 26,
}
_NAMES = ("document", "sha256", "identifier", "modality", "dtype")  # never empty
_LEAST = {"page": 1, "rows": 1, "width": 1, "bytes": 0}
_DIGITS = 15  # of an integer that plain_json reads
_LAST_US = 253_402_300_799_999_999  # of the year 9999, the last that Python has
_NULLABLE = {"page", "placeholder"}
_JSON = ("placeholder", "extra")
COLUMNS = (
    *("document", "page", "uri", "sha256", "identifier", "modality", "rows", "width", "dtype"),
    *("placeholder", "bytes", "time", "extra", "made_by"),
)
"""The columns of a catalogue, in order. A part's file has ``part`` in addition."""
PART = "part"
"""The column with the name of the part that a row was appended with; kept when parts are merged."""
STAMP = "s3ec_file"
"""In ``extra`` of a row: size and mtime of a file, and, last, dots per inch of a PDF's page."""
KEY = ("document", "page", "modality", "uri")
"""Of two rows that agree in these the newer one counts. Files of one name in two places are two
documents."""


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """The catalogue's row of one picture, page, video or sound.

    Attributes:
        document: Its id; of a file the path relative to the source. ``document`` and ``uri``
            together identify it.
        page: From 1; None if there are no pages.
        uri: Where it came from; stored without possible secrets of a URL.
        sha256: Of the bytes that the encoder was given, 64 hex digits; of a PDF page, of its PNG.
        identifier: As vLLM spells it: its content hash, or ``sha256:HEX`` for clients that send
            that as `uuid`.
        modality: ``image``, ``video`` or ``audio``.
        rows: Of the embedding, one per placeholder token.
        width: Values per row.
        dtype: torch name, such as ``bfloat16``.
        placeholder: The fields that a request without pixels needs, such as ``{"image_grid_thw":
            [1, 16, 16]}``; None if not known.
        nbytes: Size of the object.
        stored_s: When it was stored, seconds since the epoch; kept to the microsecond.
        extra: Further values from the source; plain JSON. An integer of more than 15 digits is
            returned as text.
        made_by: Releases that made the embedding, from its header; empty if the header has none.
    """

    document: str
    page: int | None
    uri: str
    sha256: str
    identifier: str
    modality: str
    rows: int
    width: int
    dtype: str
    placeholder: Mapping[str, Any] | None
    nbytes: int
    stored_s: float
    extra: Mapping[str, Any]
    made_by: str = ""


_FIELDS = tuple(field.name for field in fields(CatalogRow))
# Two columns have another name than their field.
VALUES = [{"nbytes": "bytes", "stored_s": "time"}.get(name, name) for name in _FIELDS]
"""The columns in the order of a row's fields."""


def require_pyarrow() -> None:
    """Raise ConfigError if pyarrow is missing; call it first."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"the catalogue needs pyarrow ({exc}); pip install pyarrow", field="catalog"
        ) from exc


def schema(*, part: bool = False) -> pa.Schema:
    """The columns in memory.

    Texts have offsets of 64 bits: more than 2 GiB of text in one column cannot be sorted with
    offsets of 32 bits.

    Args:
        part: True to add the column ``part`` of a part's file.
    """
    import pyarrow as pa

    types = {
        **dict.fromkeys(TEXTS, pa.large_string()),
        **dict.fromkeys(("rows", "width", "bytes"), pa.int64()),
        "page": pa.int32(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    names = (*COLUMNS, PART) if part else COLUMNS
    return pa.schema([pa.field(name, types[name], name in _NULLABLE) for name in names])


def to_table(rows: Sequence[CatalogRow]) -> pa.Table:
    """Convert rows to a table, and check each value.

    Raises:
        ConfigError: A row cannot be in a catalogue; the message names the field.
    """
    import pyarrow as pa

    arrays = []
    for name, column in zip(_FIELDS, schema(), strict=True):
        try:
            values = [_to_value(name, getattr(row, name)) for row in rows]
            arrays.append(pa.array(values, column.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise ConfigError(
                f"a row of the catalogue: `{name}` is not what it should be: {exc}", field=name
            ) from exc
    table = pa.table(arrays, schema=schema())
    problem = _problem(table)
    if problem:
        raise ConfigError(f"a row of the catalogue: {problem}")
    return table


def check_row(row: CatalogRow) -> None:
    """Raise ConfigError for a row that a catalogue would refuse, along with all rows beside it."""
    require_pyarrow()
    to_table([row])


def _to_value(name: str, value: Any) -> Any:
    if name == "stored_s":
        return round(value * 1e6)
    if name in ("page", "rows", "width", "nbytes") and value is not None:
        return operator.index(value)  # Arrow would cut off a fraction
    if name == "uri" and isinstance(value, str):
        return without_secrets(value)  # every reader of the bucket can read it
    if name in _JSON and value is not None:
        return canonical_json(
            _with_long_numbers_as_text(dict(value)) if name == "extra" else dict(value)
        )
    return value


def _with_long_numbers_as_text(value: Any) -> Any:
    """Write numbers of many digits, such as ids, as text: readers of JSON differ in these."""
    if isinstance(value, dict):
        return {name: _with_long_numbers_as_text(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_numbers_as_text(each) for each in value]
    is_long = isinstance(value, int) and len(str(value)) > _DIGITS
    return str(value) if is_long else value


def to_rows(table: pa.Table) -> Iterator[CatalogRow]:
    """The rows of a checked table; some thousand in memory at a time."""
    import pyarrow as pa

    at = table.schema.get_field_index("time")
    plain = table.set_column(at, "time", table.column("time").cast(pa.int64()))
    for batch in plain.select(VALUES).to_batches(max_chunksize=_BATCH_ROWS):
        yield from map(to_row, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def to_row(values: Sequence[Any]) -> CatalogRow:
    """Make a row of checked values, in the order of VALUES; ``time`` in microseconds."""
    found = dict(zip(_FIELDS, values, strict=True))
    found["stored_s"] /= 1e6
    for name in _JSON:
        found[name] = None if found[name] is None else plain_json(found[name])
    return CatalogRow(**found)


def in_parts(rows: Iterable[CatalogRow]) -> Iterator[list[CatalogRow]]:
    """Split rows into lists that are small enough for one part each."""
    some: list[CatalogRow] = []
    nbytes = 0
    for row in rows:
        some.append(row)
        texts = (row.document, row.uri, row.identifier, row.placeholder, row.extra)
        nbytes += sum(len(str(text)) for text in texts)
        if len(some) == OWN_ROWS or nbytes >= _APPEND_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


class Winners:
    """Finds the rows of some tables that count: of rows with equal keys that of the newest part.

    Memory: some 100 bytes per row, whatever is in the tables.
    """

    def __init__(self) -> None:
        self._keys: list[npt.NDArray[np.uint64]] = []
        self._parts: list[tuple[list[str], npt.NDArray[np.int32]]] = []

    def add(self, table: pa.Table) -> None:
        """Add the next table, with its column ``part``; blocking, some 2 us per row."""
        keys = bytearray()
        for batch in table.select(KEY).to_batches(max_chunksize=_BATCH_ROWS):
            columns = (column.to_pylist() for column in batch.columns)
            for key in zip(*columns, strict=True):
                keys += xxhash.xxh3_128_digest(repr(key).encode())
        self._keys.append(np.frombuffer(keys, np.uint64).reshape(-1, 2))
        parts = table.column(PART).combine_chunks().dictionary_encode()
        numbers = parts.indices.to_numpy().astype(np.int32)
        self._parts.append((parts.dictionary.to_pylist(), numbers))

    def masks(self) -> list[npt.NDArray[np.bool_]]:
        """For each table a mask of the rows that count; of equal rows of one part the last."""
        names = sorted({name for known, _ in self._parts for name in known})
        ranks = {name: number for number, name in enumerate(names)}
        rank = [np.array([ranks[n] for n in known], np.int32)[at] for known, at in self._parts]
        if not rank:
            return []
        keys = np.concatenate(self._keys)
        order = np.lexsort((np.concatenate(rank), keys[:, 1], keys[:, 0]))
        counts = np.zeros(len(keys), np.bool_)
        sorted_keys = keys[order]
        is_last = np.ones(len(keys), np.bool_)
        is_last[:-1] = (sorted_keys[1:] != sorted_keys[:-1]).any(axis=1)
        counts[order[is_last]] = True
        return np.split(counts, np.cumsum([len(one) for one in rank])[:-1])


def newest(tables: list[pa.Table]) -> pa.Table:
    """Merge tables with a column ``part``: of rows with equal keys that of the newest part stays.

    The result is sorted by document and page, and has one chunk. Memory: the tables, and some of
    their columns once more.

    Args:
        tables: One or more. Emptied, so that each is freed once its rows are chosen.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    winners = Winners()
    for table in tables:
        winners.add(table)
    for number, mask in enumerate(winners.masks()):
        if not mask.all():
            tables[number] = tables[number].filter(pa.array(mask))
    whole = pa.concat_tables(tables)
    tables.clear()
    fields, columns = whole.schema, []
    order = pc.sort_indices(whole, [(name, "ascending") for name in KEY])
    for name in fields.names:  # one by one, so that each is freed once it is sorted
        columns.append(whole.column(name).take(order).combine_chunks())
        whole = whole.drop_columns([name])
        free_unused()
    return pa.table(columns, schema=fields)


def free_unused() -> None:
    """Return freed memory of Arrow to the system: its pool may keep a multiple of what it needs."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


# -- files -----------------------------------------------------------------------------------------


def encode_part(table: pa.Table, namespace: str) -> Blob:
    """Encode a part's file.

    Args:
        table: Checked rows with their column ``part``.

    Raises:
        CorruptEntryError: There are too many rows or bytes; the reason is ``size``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(table) > MAX_PART_ROWS or table.nbytes > MAX_UNPACKED_BYTES:
        raise CorruptEntryError(f"{len(table)} rows are too many for one part", reason="size")
    sink = pa.BufferOutputStream()
    # Without Arrow's own schema, which a reader would have to check as well.
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", store_schema=False, write_page_checksum=True
    ) as writer:
        writer.write_table(table, row_group_size=OWN_ROWS)
        writer.add_key_value_metadata({"s3ec": KIND, "namespace": namespace})
    whole = memoryview(sink.getvalue())
    if len(whole) > MAX_PART_BYTES:
        raise CorruptEntryError(f"{len(whole)} bytes are too many for one part", reason="size")
    return whole


def decode_part(blob: Blob | bytearray, namespace: str, *, ulid: str, name: str) -> pa.Table:
    """Decode and check a whole file; every byte of its pages is read.

    Args:
        ulid: The part's.
        name: Of the object, for messages.

    Returns:
        Its rows with their column ``part``.

    Raises:
        CorruptEntryError: The file is no part of this namespace's catalogue, or it contradicts
            itself; the message names the object.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def wrong(reason: str, text: object) -> CorruptEntryError:
        return CorruptEntryError(f"{name}: {text}", reason=reason)

    if len(blob) > MAX_PART_BYTES:
        raise wrong("size", f"{len(blob)} bytes are too many for a part of the catalogue")
    try:
        table = _decode(blob, namespace)
    except CorruptEntryError as exc:
        raise wrong(exc.reason, exc) from exc
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        MemoryError,
    ) as exc:
        raise wrong("header", f"no Parquet that can be read: {str(exc)!r:.200}") from exc
    problem = _problem(table)
    if problem:
        raise wrong("header", problem)
    if len(table) and pc.max(table.column(PART)).as_py() > ulid:
        raise wrong("header", f"`{PART}` is later than the object's own name")
    return table


def _decode(blob: Blob | bytearray, namespace: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if _FOOTER_BYTES < int.from_bytes(blob[-8:-4], "little") < len(blob):
        raise CorruptEntryError("its footer is too long", reason="size")
    footer = pq.ParquetFile(
        pa.BufferReader(pa.py_buffer(blob)),
        thrift_string_size_limit=_FOOTER_BYTES,
        thrift_container_size_limit=_FOOTER_ITEMS,
    ).metadata
    about = footer.metadata or {}
    kind = about.get(b"s3ec", b"").decode("ascii", "replace")
    if kind != KIND:
        newer = kind.startswith(_KINDS)
        raise CorruptEntryError(
            f"its kind is {kind!r:.40}, not {KIND}", reason="version" if newer else "header"
        )
    if about.get(b"namespace") != namespace.encode():
        raise CorruptEntryError("it is of another namespace", reason="namespace")
    if footer.num_rows > MAX_PART_ROWS:
        raise CorruptEntryError("it holds too much", reason="size")
    wanted = schema(part=True)
    paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
    for name in wanted.names:
        if (count := paths.count(name)) != 1:
            raise CorruptEntryError(f"it has {count} columns `{name}`, not one", reason="header")
    _require_types(footer.schema.to_arrow_schema(), wanted)
    if unpacked_bytes(blob, [paths.index(name) for name in wanted.names]) > MAX_UNPACKED_BYTES:
        raise CorruptEntryError("it holds too much", reason="size")
    # Read as dictionaries, a text that repeats a million times is in memory once until measured.
    file = pq.ParquetFile(
        pa.BufferReader(pa.py_buffer(blob)),
        metadata=footer,
        page_checksum_verification=True,
        read_dictionary=list(TEXTS),
    )
    tables, nbytes = [], 0
    for number in range(footer.num_row_groups):
        # Only the caller's thread: Arrow's pool has as many threads as there are cores.
        group = file.read_row_group(number, columns=wanted.names, use_threads=False)
        group.validate(full=True)  # UTF-8 too; before anything else uses it
        _require_types(group.schema, wanted)
        nbytes += sum(_text_bytes(name, group.column(name)) for name in TEXTS)
        if nbytes > MAX_UNPACKED_BYTES:
            raise CorruptEntryError("its texts are too long together", reason="size")
        tables.append(group.select(wanted.names).cast(wanted))
    return pa.concat_tables(tables) if tables else wanted.empty_table()


def _require_types(found: pa.Schema, wanted: pa.Schema) -> None:
    import pyarrow as pa

    for field in wanted:
        kind = found.field(field.name).type
        if field.name in TEXTS:
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            fits = pa.types.is_string(plain) or pa.types.is_large_string(plain)
        else:
            fits = kind == field.type
        if not fits:
            raise CorruptEntryError(f"its column `{field.name}` is of type {kind}", reason="header")


def _text_bytes(name: str, column: pa.ChunkedArray) -> int:
    """Size of a dictionary column if each row had its own copy of the text.

    Raises:
        CorruptEntryError: A text is too long.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        if not pa.types.is_dictionary(chunk.type):
            raise CorruptEntryError(f"its column `{name}` is of type {chunk.type}", reason="header")
        lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
        if (pc.max(lengths).as_py() or 0) > TEXTS[name]:
            raise CorruptEntryError(
                f"a value of `{name}` has more than {TEXTS[name]} bytes", reason="size"
            )
        total += pc.sum(lengths.take(chunk.indices)).as_py() or 0
    return total


def _problem(table: pa.Table) -> str:
    """The first fault in the values of a table of the right types; empty if there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in table.schema.names:
        column = table.column(name)
        if name not in _NULLABLE and column.null_count:
            return f"`{name}` is missing"
        least = pc.min(column).as_py() if name in _LEAST else None
        if least is not None and least < _LEAST[name]:
            return f"`{name}` is less than {_LEAST[name]}"
        if name in TEXTS:
            bounds = pc.min_max(pc.binary_length(column)).as_py()
            if (bounds["max"] or 0) > TEXTS[name]:
                return f"`{name}` has more than {TEXTS[name]} bytes"
            if name in _NAMES and bounds["min"] == 0:
                return f"`{name}` is empty"
    times = pc.min_max(table.column("time").cast(pa.int64())).as_py()
    if len(table) and not 0 <= times["min"] <= times["max"] <= _LAST_US:
        return "`time` is not in the years 1970 to 9999"
    is_hex = pc.match_substring_regex(table.column("sha256"), r"\A[0-9a-f]{64}\z")
    if pc.all(is_hex).as_py() is False:
        return "`sha256` is not 64 hex digits, in lower case"
    says = pc.match_substring_regex(table.column("made_by"), rf"\A(?:{MADE_BY.pattern})?\z")
    if pc.all(says).as_py() is False:
        return "`made_by` is no list of names and versions"
    parts = pc.unique(table.column(PART)).to_pylist() if PART in table.schema.names else []
    if not all(map(is_ulid, parts)):
        return f"`{PART}` is no ULID"
    return next(filter(None, (_json_problem(name, table.column(name)) for name in _JSON)), "")


def _json_problem(name: str, column: pa.ChunkedArray) -> str:
    import pyarrow.compute as pc

    # Many pages have the same value; each value is checked once.
    for text in pc.unique(column).to_pylist():
        if text is None:
            continue
        try:
            value = plain_json(text)
        except (ValueError, RecursionError):
            return f"`{name}` is not plain JSON"
        if not isinstance(value, dict):
            return f"`{name}` is not a JSON object"
    return ""


def export_table(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table to a Parquet file, whole or not at all.

    Raises:
        TierError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", store_schema=False)
    try:
        write_file(Path(path), [memoryview(sink.getvalue())])
    except OSError as exc:
        raise TierError(f"cannot write {path}: {exc.strerror}") from exc

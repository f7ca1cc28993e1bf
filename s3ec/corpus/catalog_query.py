# SPDX-License-Identifier: Apache-2.0
"""Questions to a catalogue in SQL, and a catalogue as a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.corpus.catalog_file import COLUMNS, schema
from s3ec.errors import ConfigError, TierError
from s3ec.safetensors_file import plain_json
from s3ec.tier.files import TempFile

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = "catalog"
_BATCH = 4096
# Whoever asks may have got the question from somewhere else. It sees the catalogue and nothing
# else: no file, no network, no variable of Python, and it cannot allow itself more.
# The folder for temporary files stays allowed without external access (DuckDB 2.0): there is none.
_LOCKED = (
    "SET temp_directory=''",
    "SET python_enable_replacements=false",
    "SET enable_external_access=false",
    "SET lock_configuration=true",
)


def run_sql(table: pa.Table, query: str, *, field: str = "query") -> pa.Table:
    """What DuckDB answers to a question about the table ``catalog``.

    Args:
        field: What the error calls the question.

    Raises:
        ConfigError: DuckDB does not take it, it gives no rows, or DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as exc:
        raise ConfigError(
            f"questions in SQL need DuckDB ({exc}); pip install duckdb", field=field
        ) from exc
    try:
        with duckdb.connect(
            ":memory:", config={"autoload_known_extensions": "false"}
        ) as connection:
            connection.register(_NAME, table)
            for statement in _LOCKED:
                connection.execute(statement)
            relation = connection.sql(query)
            answer = None if relation is None else relation.to_arrow_table()
    except duckdb.Error as exc:
        raise ConfigError(f"`{field}`: DuckDB says: {exc}", field=field) from exc
    if answer is None:
        raise ConfigError(
            f"`{field}` gives no rows; ask with SELECT, of the table {_NAME}", field=field
        )
    return answer


def select(table: pa.Table, where: str) -> pa.Table:
    """The rows for which a condition in SQL holds.

    Raises:
        ConfigError: As run_sql.
    """
    # The line break ends a comment in the condition.
    found = run_sql(table, f"SELECT * FROM {_NAME} WHERE ({where}\n)", field="where")  # noqa: S608
    if found.schema.names != list(COLUMNS):
        raise ConfigError("`where` is more than a condition", field="where")
    return found.cast(schema())


def _write_parquet(table: pa.Table, path: str) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd", store_schema=False)


def _write_csv(table: pa.Table, path: str) -> None:
    from pyarrow import csv

    csv.write_csv(table, path)


def _write_jsonl(table: pa.Table, path: str) -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for row in plain_rows(table):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


_WRITERS: dict[str, Callable[[pa.Table, str], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def plain_values(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows of any table as JSON has them: times in ISO 8601, what it has no word for as text."""
    for batch in table.to_batches(max_chunksize=_BATCH):
        for row in batch.to_pylist():
            yield {name: _plain(value) for name, value in row.items()}


def plain_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """As plain_values, of rows of the catalogue: JSON texts become what they say."""
    for row in plain_values(table):
        for name in ("placeholder", "extra"):
            row[name] = None if row[name] is None else plain_json(row[name])
        yield row


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def require_suffix(path: str | os.PathLike[str]) -> str:
    """The suffix of a file to write.

    Raises:
        ConfigError: It is none that says how.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _WRITERS:
        raise ConfigError(
            f"`{Path(path).name}` ends with none of {', '.join(_WRITERS)}, which say how to "
            "write it",
            field="path",
        )
    return suffix


def export_table(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table to a file, whole or not at all; its suffix says how.

    Raises:
        ConfigError: The suffix is none of those.
        TierError: The file cannot be written.
    """
    target = Path(path)
    write = _WRITERS[require_suffix(path)]
    try:
        with TempFile(os.fspath(target.parent), private=False) as temp:
            temp.close()
            write(table, temp.path)
            os.replace(temp.path, target)
            temp.is_named = True
    except OSError as exc:
        raise TierError(f"{target}: cannot be written: {exc}") from exc

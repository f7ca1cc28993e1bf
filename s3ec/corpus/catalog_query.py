# SPDX-License-Identifier: Apache-2.0
"""Conditions on a catalogue in SQL, and a catalogue as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.corpus.catalog_file import COLUMNS, schema
from s3ec.errors import ConfigError, TierError
from s3ec.tier.files import TempFile

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = "catalog"
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


def export_table(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table to a Parquet file, whole or not at all.

    Raises:
        TierError: The file cannot be written.
    """
    import pyarrow.parquet as pq

    target = Path(path)
    try:
        with TempFile(os.fspath(target.parent), private=False) as temp:
            temp.close()
            pq.write_table(table, temp.path, compression="zstd", store_schema=False)
            os.replace(temp.path, target)
            temp.is_named = True
    except OSError as exc:
        raise TierError(f"{target}: cannot be written: {exc}") from exc

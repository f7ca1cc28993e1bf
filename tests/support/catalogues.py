# SPDX-License-Identifier: Apache-2.0
"""Rows and parts of catalogues, good ones and such as nobody should write."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from s3ec.corpus.catalog_file import KIND, PART, CatalogRow, schema, to_table
from s3ec.identity import Layout

LAYOUT = Layout("tiny-0123456789abcdef")
ULID = "01JC0000000000000000000000"
LATER = "01JD0000000000000000000000"


def row(document: str = "a.png", **changes: Any) -> CatalogRow:
    """A row, as of a page of a tiny model."""
    plain = CatalogRow(
        document=document,
        page=None,
        uri=f"file:///corpus/{document}",
        sha256="ab" * 32,
        identifier="cd" * 32,
        modality="image",
        rows=64,
        width=128,
        dtype="bfloat16",
        placeholder={"image_grid_thw": [1, 16, 16]},
        nbytes=16640,
        stored_s=1_700_000_000.25,
        extra={},
    )
    return dataclasses.replace(plain, **changes)


def part_table(*rows: CatalogRow, ulid: str = ULID) -> pa.Table:
    """Rows with their part, as they are in a file."""
    table = to_table(rows)
    return table.append_column(
        schema(part=True).field(PART), pa.array([ulid] * len(table), pa.large_string())
    )


def parquet(
    table: pa.Table, *, kind: str = KIND, namespace: str = LAYOUT.namespace, **options: Any
) -> bytes:
    """A table as Parquet, past our own code."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"s3ec": kind, "namespace": namespace})
    return sink.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""The catalogue on a bucket in memory: what counts, merging, damage, and what a reader keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from s3ec.corpus.catalog import (
    CatalogRow,
    append_rows,
    list_parts,
    read_table,
)
from s3ec.corpus.catalog_file import COLUMNS, to_rows
from s3ec.identity import Layout
from s3ec.store.base import Store
from s3ec.testing.fault_store import FaultStore
from s3ec.testing.memory_store import MemoryStore

LAYOUT = Layout("tiny-0123456789abcdef")


def row(document: str = "a.png", **changes: Any) -> CatalogRow:
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


async def rows_of(store: Store) -> list[CatalogRow]:
    return list(to_rows(await read_table(store, LAYOUT)))


async def test_rows_come_back_as_they_were() -> None:
    store = MemoryStore()
    given = [
        row("b.pdf", page=2, extra={"title": "Ünïcode", "tags": [1, None, 2.5]}),
        row("b.pdf", page=1, placeholder=None),
        row("a.wav", modality="audio", placeholder={}),
    ]
    await append_rows(store, LAYOUT, given)
    assert await rows_of(store) == [given[2], given[1], given[0]]
    assert len(await list_parts(store, LAYOUT)) == 1
    assert (await read_table(store, LAYOUT)).schema.names == list(COLUMNS)


async def test_without_rows_nothing_is_written() -> None:
    store = FaultStore(MemoryStore())
    await append_rows(store, LAYOUT, [])
    assert store.calls == {}
    assert await rows_of(store) == []


async def test_the_later_append_counts_whatever_the_times_say() -> None:
    store = MemoryStore()
    await append_rows(store, LAYOUT, [row(rows=1), row(rows=2, stored_s=2e9)])
    await append_rows(store, LAYOUT, [row(rows=3, stored_s=1e9), row(modality="video", rows=4)])
    assert [found.rows for found in await rows_of(store)] == [3, 4]

# SPDX-License-Identifier: Apache-2.0
"""The catalogue on a bucket in memory: what counts, damage, and what no one should write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from s3ec.client.known import KnownCatalog
from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.corpus.catalog import Catalog, CatalogWriter, list_parts, read_table
from s3ec.corpus.catalog_file import (
    COLUMNS,
    MAX_PART_BYTES,
    MAX_PART_ROWS,
    CatalogRow,
    check_row,
    decode_part,
    encode_part,
    export_table,
    to_rows,
)
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.counters import Counters
from s3ec.errors import ConfigError, CorruptEntryError, NotFoundError, TierError
from s3ec.identity import Layout, Namespace
from s3ec.index.delete import remove_namespace, survey
from s3ec.index.names import time_s
from s3ec.store.base import Store
from s3ec.store.retry import RetryStore
from s3ec.testing.fault_store import Fault, FaultStore, Script, flip
from s3ec.testing.memory_store import MemoryStore
from tests.support.catalogues import LATER, LAYOUT, ULID, parquet, part_table, row


async def rows_of(store: Store, layout: Layout = LAYOUT) -> list[CatalogRow]:
    return list(to_rows(await read_table(store, layout)))


# -- what counts -----------------------------------------------------------------------------------


async def test_rows_come_back_as_they_were() -> None:
    store = MemoryStore()
    given = [
        row("b.pdf", page=2, extra={"title": "Ünïcode", "tags": [1, None, 2.5]}),
        row("b.pdf", page=1, placeholder=None),
        row("a.wav", modality="audio", placeholder={}),
    ]
    await CatalogWriter(store, LAYOUT).append(given)
    assert await rows_of(store) == [given[2], given[1], given[0]]
    assert (await read_table(store, LAYOUT)).schema.names == list(COLUMNS)
    assert len(await list_parts(store, LAYOUT)) == 1


async def test_long_number_of_a_source_comes_back_as_text() -> None:
    store = MemoryStore()
    await CatalogWriter(store, LAYOUT).append(
        [row(extra={"id": [10**18, {"of": -(10**15)}], "n": True})]
    )
    [found] = await rows_of(store)
    assert found.extra == {"id": [str(10**18), {"of": str(-(10**15))}], "n": True}


async def test_secrets_in_urls_are_not_stored() -> None:
    store = MemoryStore()
    await CatalogWriter(store, LAYOUT).append([row(uri="https://me:secret@h/a.png?sig=secret")])
    assert [one.uri for one in await rows_of(store)] == ["https://h/a.png?..."]


async def test_without_rows_nothing_is_written() -> None:
    store = FaultStore(MemoryStore())
    await CatalogWriter(store, LAYOUT).append([])
    assert not store.calls
    assert await rows_of(store) == []


async def test_the_later_append_counts_whatever_the_times_say() -> None:
    store = MemoryStore()
    await CatalogWriter(store, LAYOUT).append([row(rows=1), row(rows=2, stored_s=2e9)])
    await CatalogWriter(store, LAYOUT).append(
        [row(rows=3, stored_s=1e9), row(modality="video", rows=4)]
    )
    assert [found.rows for found in await rows_of(store)] == [3, 4]


async def test_files_of_one_name_in_two_folders_are_two_documents() -> None:
    store = MemoryStore()
    here, there = (row("a.png", uri=f"file:///{place}/a.png") for place in ("here", "there"))
    await CatalogWriter(store, LAYOUT).append([there])
    await CatalogWriter(store, LAYOUT).append([here])
    assert await rows_of(store) == [here, there]
    changed = dataclasses.replace(there, rows=9)
    await CatalogWriter(store, LAYOUT).append([changed])
    assert await rows_of(store) == [here, changed]


async def test_part_of_the_future_is_named_and_left_out_and_the_next_append_counts() -> None:
    store = MemoryStore()
    ahead = "7" + LATER[1:]
    name = LAYOUT.catalog_part(ahead)
    await store.put_if_absent(name, [parquet(part_table(row(rows=1), ulid=ahead))])
    with pytest.raises(CorruptEntryError, match="after its own date") as caught:
        await read_table(store, LAYOUT)
    assert str(caught.value).startswith(f"{name}: ")
    for rows in (2, 3):
        await CatalogWriter(store, LAYOUT).append([row(rows=rows)])
        assert [found.rows for found in await rows_of(store)] == [rows]
    await CatalogWriter(store, LAYOUT).fold(everything=True)
    assert name in store.bucket.objects
    assert [found.rows for found in await rows_of(store)] == [3]


async def test_name_of_a_part_is_by_the_clock_of_the_server() -> None:
    store = MemoryStore(clock=lambda: 1_700_000_000.0)
    await CatalogWriter(store, LAYOUT).append([row()])
    [ulid] = await list_parts(store, LAYOUT)
    assert abs(time_s(ulid) - 1_700_000_000.0) < 60
    assert not [name for name in store.bucket.objects if "/claim/" in name]


async def test_many_rows_become_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3ec.corpus.catalog_file.OWN_ROWS", 4)
    store = MemoryStore()
    given = [row(f"{number}.png", rows=number + 1) for number in range(10)]
    await CatalogWriter(store, LAYOUT).append([*given, row("0.png", rows=99)])
    assert len(await list_parts(store, LAYOUT)) == 3
    assert await rows_of(store) == [row("0.png", rows=99), *given[1:]]


async def test_an_append_whose_reply_was_lost_is_there_once() -> None:
    memory = MemoryStore()
    lost = Fault("put_if_absent", name="/catalog/", lost_reply=True, times=1)
    store = RetryStore(FaultStore(memory, Script([lost])), Counters(), attempts=2)
    await CatalogWriter(store, LAYOUT).append([row()])
    assert lost.struck == 1
    assert len(await list_parts(memory, LAYOUT)) == 1
    assert await rows_of(memory) == [row()]


async def test_others_in_the_folder_are_left_alone() -> None:
    store = MemoryStore()
    await store.put_if_absent(f"{LAYOUT.catalog}README.md", [b"ours"])
    await CatalogWriter(store, LAYOUT).append([row()])
    assert await rows_of(store) == [row()]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("document", ""),
        ("document", "d" * 4097),
        ("document", "\udc80.png"),
        ("document", None),
        ("page", 0),
        ("page", "1"),
        ("page", 2**31),
        ("uri", None),
        ("sha256", "AB" * 32),
        ("sha256", "ab" * 31),
        ("sha256", "ab" * 32 + "\n"),
        ("made_by", "\x1b]0;title"),
        ("made_by", "vllm=0.32.0\n"),
        ("made_by", "vllm"),
        ("made_by", "vllm=" + "1" * 600),
        ("identifier", "i" * 4097),
        ("modality", ""),
        ("rows", 0),
        ("width", -1),
        ("rows", 1.5),
        ("dtype", 7),
        ("placeholder", {"grid": float("nan")}),
        ("placeholder", {"grid": "x" * 2**14}),
        ("placeholder", [1]),
        ("nbytes", -1),
        ("stored_s", float("nan")),
        ("stored_s", 1e300),
        ("stored_s", 1e12),
        ("stored_s", -1.0),
        ("extra", None),
        ("extra", {"n": 1e400}),
        ("extra", {"n": "x" * 2**16}),
        ("extra", {"object": object()}),
    ],
)
async def test_wrong_value_is_refused_by_its_name(field: str, value: Any) -> None:
    store = MemoryStore()
    column = {"nbytes": "bytes", "stored_s": "time"}.get(field, field)
    wrong = dataclasses.replace(row("b.png"), **{field: value})
    with pytest.raises(ConfigError, match=f"`({field}|{column})`"):
        await CatalogWriter(store, LAYOUT).append([row(), wrong])
    with pytest.raises(ConfigError, match=f"`({field}|{column})`"):
        check_row(wrong)
    assert not store.bucket.objects


async def test_no_catalogue_where_a_secret_hides_the_names() -> None:
    store = MemoryStore()
    namespace = Namespace.from_descriptor({"model": "acme/vision", "tenant": "0" * 16})
    layout = Layout(namespace.name)
    await store.put_if_absent(layout.descriptor, [namespace.to_json()])
    with pytest.raises(ConfigError, match="tenant_key") as caught:
        await CatalogWriter(store, layout).append([row()])
    assert caught.value.field == "tenant_key"
    assert list(store.bucket.objects) == [layout.descriptor]
    assert await rows_of(store, layout) == []


# -- damage ----------------------------------------------------------------------------------------

GOOD = part_table(row(), row("b.png"))


def with_column(name: str, values: pa.Array) -> pa.Table:
    return GOOD.set_column(GOOD.schema.get_field_index(name), name, values)


def text(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())


BAD = {
    "empty": (b"", "no Parquet"),
    "no Parquet": (b"PAR1 it is not PAR1", "no Parquet"),
    "another kind": (parquet(GOOD, kind="index-1"), "its kind is 'index-1'"),
    "a newer kind": (parquet(GOOD, kind="catalog-2"), "its kind is 'catalog-2'"),
    "another namespace": (parquet(GOOD, namespace="other-0123456789abcdef"), "another namespace"),
    "a column is missing": (parquet(GOOD.drop_columns("uri")), "0 columns `uri`"),
    "a column twice": (
        parquet(GOOD.append_column("uri", text("u", "u"))),
        "2 columns `uri`",
    ),
    "a number as text": (parquet(with_column("rows", text("1", "2"))), "`rows` is of type string"),
    "bytes as text": (
        parquet(with_column("uri", pa.array([b"a", b"b"]))),
        "`uri` is of type binary",
    ),
    "a local time": (
        parquet(with_column("time", pa.array([1, 2], pa.timestamp("us")))),
        "`time` is of type timestamp",
    ),
    "a time of no calendar": (
        parquet(with_column("time", pa.array([1, 2**62], pa.timestamp("us", tz="UTC")))),
        "`time` is not in the years",
    ),
    "a document is missing": (
        parquet(with_column("document", text("a", None))),
        "'document' with null",
    ),
    "no JSON": (parquet(with_column("extra", text("{}", "{"))), "`extra` is not plain JSON"),
    "no JSON object": (parquet(with_column("placeholder", text("{}", "[]"))), "no.* JSON object"),
    "deep JSON": (
        parquet(with_column("extra", text("{}", '{"a":' * 9999 + "1" + "}" * 9999))),
        "`extra` is not plain JSON",
    ),
    "part is no ULID": (parquet(with_column("part", text(ULID, "part"))), "`part` is no ULID"),
    "part is later": (parquet(part_table(row(), ulid=LATER)), "`part` is later"),
    "no hash": (parquet(with_column("sha256", text("ab" * 32, "x" * 64))), "`sha256`"),
    "no maker": (parquet(with_column("made_by", text("", "vllm=\x1b[2J"))), "`made_by`"),
    "a long text": (parquet(with_column("uri", text("u" * 2**15, "u"))), "`uri` has more than"),
}


@pytest.mark.parametrize("case", BAD)
async def test_damaged_part_is_named_and_left_out(case: str) -> None:
    body, says = BAD[case]
    store = MemoryStore()
    name = LAYOUT.catalog_part(ULID)
    await store.put_if_absent(name, [body])
    with pytest.raises(CorruptEntryError, match=says) as caught:
        await read_table(store, LAYOUT)
    assert str(caught.value).startswith(f"{name}: ")
    await CatalogWriter(store, LAYOUT).append([row("good.png")])
    notes: list[str] = []
    table = await read_table(store, LAYOUT, note=notes.append)
    assert list(to_rows(table)) == [row("good.png")]
    assert [name in note for note in notes] == [True]


async def test_part_whose_texts_are_too_long_together_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A text that is there many times is in the file once.
    body = parquet(pa.concat_tables([part_table(row("x" * 4096))] * 100).combine_chunks())
    monkeypatch.setattr("s3ec.corpus.catalog_file.MAX_UNPACKED_BYTES", 100_000)
    with pytest.raises(CorruptEntryError, match="too long together"):
        decode_part(body, LAYOUT.namespace, ulid=ULID, name="part")


async def test_damaged_part_is_a_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await CatalogWriter(store, LAYOUT).append([row()])
    await store.put_if_absent(LAYOUT.catalog_part(LATER), [b"PAR1"])
    assert await rows_of(store) == [row()]
    assert LAYOUT.catalog_part(LATER) in caplog.text


async def test_part_is_read_again_where_it_was_damaged_on_its_way() -> None:
    memory = MemoryStore()
    await CatalogWriter(memory, LAYOUT).append([row()])
    once = Fault("get_range", change=flip(800), times=1)
    assert await rows_of(FaultStore(memory, Script([once]))) == [row()]
    assert once.struck == 1


async def test_part_that_is_too_large_is_not_downloaded() -> None:
    memory = MemoryStore()
    name = LAYOUT.catalog_part(ULID)
    await memory.put_if_absent(name, [bytes(MAX_PART_BYTES + 1)])
    store = FaultStore(memory)
    with pytest.raises(CorruptEntryError, match="too many for a part"):
        await read_table(store, LAYOUT)
    assert set(store.calls) == {"list"}


@pytest.mark.slow
@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_makes_another_row(bit: int) -> None:
    """Parquet's checksums cover the pages, not what is around them."""
    whole = bytes(encode_part(GOOD, LAYOUT.namespace))
    for at in range(bit, len(whole), 8):
        changed = flip(8 * at + (at // 8 + bit) % 8)(whole)
        try:
            found = decode_part(changed, LAYOUT.namespace, ulid=ULID, name="part")
        except CorruptEntryError:
            continue
        assert found.equals(GOOD), f"byte {at}"


def test_more_rows_than_a_part_has_are_refused() -> None:
    table = part_table(row())
    many = table.take(pa.array([0] * (MAX_PART_ROWS + 1)))
    with pytest.raises(CorruptEntryError, match="too many for one part"):
        encode_part(many, LAYOUT.namespace)
    with pytest.raises(CorruptEntryError, match="it holds too much"):
        decode_part(parquet(many), LAYOUT.namespace, ulid=ULID, name="part")


# -- in memory -------------------------------------------------------------------------------------


def test_index_finds_by_file_document_and_identifier() -> None:
    rows = [
        row("a.pdf", page=page, sha256=f"{page:064x}", identifier=f"id {page}") for page in (2, 1)
    ]
    rows.append(row("copy.pdf", page=9, sha256=f"{1:064x}", identifier="id 1", stored_s=2e9))
    index = CatalogIndex.from_table(part_table(*rows))
    assert len(index) == 3
    assert index.by_document("a.pdf") == [rows[1], rows[0]]
    assert index.by_document("a.pdf", 2) == [rows[0]]
    assert index.by_document("a.pdf", 3) == []
    assert index.by_sha256(f"{2:064x}") == rows[0]
    assert index.by_sha256(f"{1:064x}") == rows[2], "the one that was stored last"
    assert index.by_identifier("id 2") == rows[0]
    assert index.by_identifier("id 3") is None
    assert index.by_sha256("") is None


def test_empty_index_finds_nothing() -> None:
    for index in (CatalogIndex(), CatalogIndex.from_table(part_table())):
        assert len(index) == 0
        assert index.by_sha256("ab" * 32) is None
        assert index.by_document("a.png") == []


# -- for programs ----------------------------------------------------------------------------------

Make = Callable[..., Catalog]


@pytest.fixture
def make() -> Iterator[Make]:
    opened = []
    namespace = Namespace.from_descriptor({"model": "acme/vision"})

    def make(**settings: Any) -> Catalog:
        memory = MemoryStore()
        memory.bucket.objects[Layout(namespace.name).descriptor] = namespace.to_json()
        corpus = Corpus(load_settings({"bucket": "corpus", **settings}).settings, store=memory)
        opened.append(corpus)
        return corpus.catalog(namespace.name)

    yield make
    for corpus in opened:
        corpus.close()


@pytest.fixture
def catalog(make: Make) -> Catalog:
    found = make()
    found.append(
        [
            row("b.pdf", page=1, rows=100, extra={"title": 'a "b", c'}),
            row("b.pdf", page=2, rows=200, placeholder=None),
            row("a.wav", modality="audio", rows=300),
        ]
    )
    return found


def test_catalog_is_asked_from_a_program(catalog: Catalog) -> None:
    assert [found.rows for found in catalog.rows()] == [300, 100, 200]
    assert [found.page for found in catalog.find("b.pdf")] == [1, 2]
    assert [found.rows for found in catalog.find("b.pdf", 2)] == [200]
    assert len(catalog.index()) == 3
    assert repr(catalog) == f"Catalog(Corpus('s3://corpus'), {catalog.namespace!r})"


def test_catalog_says_how_its_corpus_is_reached(catalog: Catalog) -> None:
    known = KnownCatalog(catalog, 60)
    assert known.s3_settings is catalog.settings
    assert catalog.settings.bucket


def test_index_learns_what_was_appended_since(catalog: Catalog) -> None:
    first = catalog.index()
    assert catalog.index() is first
    catalog.append([row("new.png", sha256="f" * 64)])
    assert catalog.index().by_sha256("f" * 64) == row("new.png", sha256="f" * 64)
    assert first.by_sha256("f" * 64) is None


def test_export_is_plain_parquet_and_replaces_a_file(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"old")
    export_table(catalog.table(), tmp_path / "c.parquet")
    table = pq.read_table(tmp_path / "c.parquet")
    assert table.schema.names == list(COLUMNS)
    assert table.column("rows").to_pylist() == [300, 100, 200]
    question = f"SELECT document, page, extra FROM '{tmp_path / 'c.parquet'}' WHERE page = 1"
    assert duckdb.sql(question).fetchall() == [("b.pdf", 1, '{"title":"a \\"b\\", c"}')]
    assert len(list(tmp_path.iterdir())) == 1


def test_export_names_what_it_cannot_write(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(TierError, match="cannot write"):
        export_table(catalog.table(), tmp_path / "nowhere" / "c.parquet")
    assert list(tmp_path.iterdir()) == []


def test_tenant_cannot_append(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s" * 32)
    catalog = make(tenant_key="env:SECRET")
    with pytest.raises(ConfigError, match="tenant_key"):
        catalog.append([row()])


def test_namespace_that_is_not_there_is_an_error(make: Make) -> None:
    corpus = Corpus(load_settings({"bucket": "corpus"}).settings, store=MemoryStore())
    with corpus, pytest.raises(NotFoundError):
        corpus.catalog()


async def test_namespace_is_removed_with_its_catalogue() -> None:
    store = MemoryStore()
    await CatalogWriter(store, LAYOUT).append([row()])
    contents = await survey(store, LAYOUT)
    assert (contents.objects, contents.others) == (1, 0)
    await remove_namespace(store, LAYOUT, 0.0)
    assert store.bucket.objects == {}

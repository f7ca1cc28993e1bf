# SPDX-License-Identifier: Apache-2.0
"""``s3ec catalog`` against moto."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from s3ec.corpus.catalog import CatalogWriter
from s3ec.corpus.catalog_file import CatalogRow
from s3ec.identity import Layout
from s3ec.testing.memory_store import MemoryStore
from tests.support.catalogues import row
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus

ROWS = [
    row("b.pdf", page=1, sha256="1" * 64, identifier="sha256:" + "1" * 64, extra={"title": "B"}),
    row("b.pdf", page=2, sha256="2" * 64, identifier="2" * 64),
    row("copy.png", sha256="2" * 64, identifier="2" * 64, nbytes=1),
    row("a.wav", modality="audio", sha256="3" * 64, identifier="page \x1b[31m"),
]


def append(corpus: Corpus, namespace: str, rows: list[CatalogRow]) -> None:
    """Append rows past the command line, whose commands only read."""

    async def work() -> MemoryStore:
        store = MemoryStore()
        await CatalogWriter(store, Layout(namespace)).append(rows)
        return store

    for name, body in asyncio.run(work()).bucket.objects.items():
        corpus.put(name, body)


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    name = corpus.namespace(MODEL)
    append(corpus, name, ROWS)
    return name


def test_show_counts_by_modality(cli: Cli, namespace: str) -> None:
    found = cli.json("catalog", "show")
    assert found["namespace"] == namespace
    counts = ("row_count", "document_count", "entry_count", "bytes", "part_count")
    assert [found[name] for name in counts] == [4, 3, 3, 3 * 16640 + 1, 1]
    assert [each["modality"] for each in found["modalities"]] == ["audio", "image"]
    assert [each["row_count"] for each in found["modalities"]] == [1, 3]
    assert found["age_s"] > 0
    assert found["unusable"] == []
    text = cli("catalog", "show").stdout
    for part in (r"^audio +1 +1 ", r"^image +3 +2 ", r"^parts +1$"):
        assert re.search(part, text, re.M)


def test_empty_catalogue_is_shown_and_has_nothing(cli: Cli, corpus: Corpus) -> None:
    corpus.namespace(MODEL)
    found = cli.json("catalog", "show")
    assert (found["row_count"], found["bytes"], found["age_s"], found["modalities"]) == (
        *(0, 0, None, []),
    )
    assert re.search(r"^parts +0$", cli("catalog", "show").stdout, re.M)
    assert "catalog show" in cli("catalog", "find", "a.pdf", code=1).stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["b.pdf"], [("b.pdf", 1), ("b.pdf", 2)]),
        (["b.pdf", "--page", "2"], [("b.pdf", 2)]),
        (["--sha256", "2" * 64], [("b.pdf", 2), ("copy.png", None)]),
        (["--identifier", "sha256:" + "1" * 64], [("b.pdf", 1)]),
    ],
)
def test_find_by_document_file_and_identifier(
    cli: Cli, namespace: str, words: list[str], found: list[tuple[str, int | None]]
) -> None:
    document = cli.json("catalog", "find", *words)
    assert document["namespace"] == namespace
    assert [(each["document"], each["page"]) for each in document["entries"]] == found
    text = cli("catalog", "find", *words).stdout
    for name, _ in found:
        assert name in text
    assert {"rows", "size", "age"} <= set(text.splitlines()[0].split())


@pytest.mark.parametrize(
    "words", [["c.pdf"], ["b.pdf", "--page", "3"], ["--sha256", "4" * 64], ["--identifier", "?"]]
)
def test_find_says_where_there_is_nothing(cli: Cli, namespace: str, words: list[str]) -> None:
    assert cli.json("catalog", "find", *words, code=1)["error"]["kind"] == "not_found"


@pytest.mark.parametrize(
    "words", [[], ["b.pdf", "--sha256", "1" * 64], ["--identifier", "i", "--page", "1"]]
)
def test_find_looks_for_one_thing(cli: Cli, namespace: str, words: list[str]) -> None:
    assert "give DOCUMENT" in cli("catalog", "find", *words, code=2).stderr


def test_export_names_a_file_that_is_none_of_parquet(cli: Cli, namespace: str) -> None:
    assert "`.` must be a Parquet file" in cli("catalog", "export", ".", code=2).stderr


def test_export_writes_a_file(cli: Cli, namespace: str, tmp_path: Path) -> None:
    path = str(tmp_path / "c.parquet")
    found = cli.json("catalog", "export", path)
    assert found == {"namespace": namespace, "file": path, "row_count": 4}
    assert pq.read_table(path).num_rows == 4
    assert "4 rows written" in cli("catalog", "export", path).stderr
    assert ".parquet" in cli("catalog", "export", str(tmp_path / "c.xls"), code=2).stderr


def test_find_shows_some_rows_and_says_so(
    cli: Cli, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.cli.catalog._SHOWN_ROWS", 1)
    assert "and 1 more" in cli("catalog", "find", "b.pdf").stderr


def test_damaged_part_is_named(cli: Cli, corpus: Corpus, namespace: str) -> None:
    name = Layout(namespace).catalog_part("01JC0000000000000000000000")
    corpus.put(name, b"PAR1")
    found = cli.json("catalog", "show", code=1)
    assert (found["row_count"], found["part_count"]) == (4, 2)
    assert name in found["unusable"][0]
    assert name in cli("catalog", "show", code=1).stderr
    result = cli("catalog", "find", "b.pdf")
    assert name in result.stderr
    assert "b.pdf" in result.stdout


def test_catalogue_of_damaged_parts_alone(cli: Cli, corpus: Corpus) -> None:
    name = Layout(corpus.namespace(MODEL)).catalog_part("01JC0000000000000000000000")
    corpus.put(name, b"PAR1")
    for words in (["show"], ["find", "b.pdf"]):
        error = cli.json("catalog", *words, code=1)["error"]
        assert (error["kind"], name in error["message"]) == ("corrupt", True)

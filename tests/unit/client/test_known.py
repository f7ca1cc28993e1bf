# SPDX-License-Identifier: Apache-2.0
"""The catalogue that a client knows: from a file or from whatever answers with an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.client.known import KnownCatalog, read_export
from s3ec.corpus.catalog_file import CatalogRow, export_table, to_rows, to_table
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.errors import ConfigError, UnavailableError
from tests.support.clock import Clock
from tests.support.waiting import eventually
from tests.unit.client.conftest import row_of


@pytest.fixture
def rows(files: list[Path]) -> list[CatalogRow]:
    """One has no size and no page, the others have both."""
    first, *others = files
    return [
        row_of(first, placeholder=None),
        *(row_of(path, document="report", page=n) for n, path in enumerate(others, 1)),
    ]


def test_an_exported_file_says_what_the_catalogue_says(
    rows: list[CatalogRow], tmp_path: Path
) -> None:
    path = tmp_path / "catalogue.parquet"
    export_table(to_table(rows), path)
    assert list(to_rows(read_export(path))) == rows
    known = KnownCatalog(path, 60)
    assert known.index().by_document("report") == rows[1:]
    assert known.index().by_identifier(rows[0].identifier) == rows[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.parquet", None),
        ("cut.parquet", b"PAR1"),
        ("list.parquet", b"[1, 2]\n"),
    ],
)
def test_a_file_that_is_none_is_refused(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}` is no exported catalogue"):
        KnownCatalog(path, 60).index()


class Changing:
    """A catalogue that grows, and cannot be read at times."""

    def __init__(self, rows: list[CatalogRow]) -> None:
        self.rows = rows
        self.reads = 0
        self.problem: Exception | None = None

    def index(self) -> CatalogIndex:
        self.reads += 1
        if self.problem is not None:
            raise self.problem
        return CatalogIndex.from_table(to_table(self.rows))


def test_an_old_catalogue_is_read_anew_in_the_background(rows: list[CatalogRow]) -> None:
    source, clock = Changing(rows[:1]), Clock()
    known = KnownCatalog(source, 60, clock)
    try:
        assert len(known.index()) == len(known.index()) == 1
        assert source.reads == 1
        source.rows = rows
        clock.now_s += 60
        eventually(lambda: len(known.index()) == len(rows), "it was read anew")
    finally:
        known.close()


def test_what_was_known_stays_while_it_cannot_be_read(rows: list[CatalogRow]) -> None:
    source, clock = Changing(rows), Clock()
    known = KnownCatalog(source, 60, clock)
    try:
        known.index()
        source.problem = UnavailableError("busy")
        clock.now_s += 60
        known.index()
        eventually(lambda: source.reads == 2, "it was tried")
        assert len(known.index()) == len(rows)
        with pytest.raises(UnavailableError):
            known.read_again()
    finally:
        known.close()


def test_a_first_reading_that_fails_is_the_callers(rows: list[CatalogRow]) -> None:
    source = Changing(rows)
    source.problem = UnavailableError("busy")
    known = KnownCatalog(source, 60)
    with pytest.raises(UnavailableError):
        known.index()
    source.problem = None
    assert len(known.index()) == len(rows)

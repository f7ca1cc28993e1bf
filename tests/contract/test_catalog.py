# SPDX-License-Identifier: Apache-2.0
"""The catalogue on a real S3 server: writers at once, and what reads Parquet without s3ec."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from s3ec.corpus import Corpus
from s3ec.corpus.catalog import Catalog, CatalogWriter, list_parts
from s3ec.corpus.catalog_file import COLUMNS, PART
from s3ec.identity import Layout
from s3ec.index.delete import remove_namespace, survey
from s3ec.store.base import Store
from s3ec.testing.server import LocalS3
from tests.contract.conftest import BUCKET, Configure
from tests.support.catalogues import row
from tests.support.corpora import Bucket
from tests.unit.cli.corpus import MODEL

pytestmark = pytest.mark.s3
PAGE = Path(__file__).parents[2] / "docs/catalogue.md"
WRITERS, APPENDS = 4, 6


def write(catalog: Catalog, writer: int) -> None:
    for number in range(APPENDS):
        mine = row(f"{writer}.pdf", page=number + 1, rows=number + 1)
        catalog.append([mine, row("shared.png", rows=100 * writer + number + 1)])


def fold(corpus: Corpus, catalog: Catalog) -> int:
    """Fold all, and count the parts that are left."""

    async def work(store: Store, layout: Layout) -> int:
        await CatalogWriter(store, layout).fold(everything=True)
        return len(await list_parts(store, layout))

    return corpus.within(work, catalog.namespace, write=True)


def files(corpus: Corpus, catalog: Catalog, client: Any, folder: Path) -> list[str]:
    """The parts as they are in the bucket, downloaded by another client."""
    prefix = f"{corpus.settings.corpus.prefix}/{Layout(catalog.namespace).catalog}"
    names = []
    for info in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        names.append(str(folder / info["Key"].rpartition("/")[2]))
        client.download_file(BUCKET, info["Key"], names[-1])
    return names


def test_writers_at_once_lose_nothing_and_others_read_it(
    on_seaweed: Configure, local_s3: LocalS3, tmp_path: Path
) -> None:
    settings = on_seaweed(prefix="catalog/writers")
    with Corpus.open(settings) as corpus:
        Bucket(corpus).namespace(MODEL)
        catalog = corpus.catalog()
        with ThreadPoolExecutor(WRITERS + 1) as pool:
            writing = [pool.submit(write, catalog, writer) for writer in range(WRITERS)]
            while not all(done.done() for done in writing):
                fold(corpus, catalog)
            for done in writing:
                done.result()
        fold(corpus, catalog)
        rows = list(catalog.rows())
        own = [(found.document, found.page) for found in rows if found.page is not None]
        assert own == [
            (f"{writer}.pdf", number + 1) for writer in range(WRITERS) for number in range(APPENDS)
        ]
        [shared] = catalog.find("shared.png")
        assert shared.rows % 100 == APPENDS, "the last one of some writer"

        names = files(corpus, catalog, local_s3.client(), tmp_path)
        assert len(names) == 1
        [query] = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        query = re.sub(r"'s3://\S+'", f"'{tmp_path}/*.parquet'", query)
        found = duckdb.sql(f"SELECT * FROM ({query}) ORDER BY document, page")
        assert found.columns == list(COLUMNS)
        ours = catalog.table().select(["document", "page", "rows"]).to_pylist()
        assert found.project("document, page, rows").to_arrow_table().to_pylist() == ours
        for name in names:
            table = pq.read_table(name)
            assert table.schema.names == [*COLUMNS, PART]
            assert table.num_rows > 0


def test_fold_and_removal_on_a_real_server(on_seaweed: Configure) -> None:
    with Corpus.open(on_seaweed(prefix="catalog/fold")) as corpus:
        Bucket(corpus).namespace(MODEL)
        catalog = corpus.catalog()
        for number in range(3):
            catalog.append([row(f"{number}.png")])
        assert fold(corpus, catalog) == 1
        assert [found.document for found in catalog.rows()] == ["0.png", "1.png", "2.png"]
        removed = corpus.within(lambda store, layout: remove_namespace(store, layout, 0.0))
        assert removed.others == 0
        left = corpus.within(survey, catalog.namespace)
        assert left.objects == 0

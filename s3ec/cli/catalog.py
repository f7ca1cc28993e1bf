# SPDX-License-Identifier: Apache-2.0
"""``s3ec catalog``: which document, page and file each embedding belongs to."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import CORPUS, JsonOption, SettingsSource, option, with_options
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    counting,
    epilog,
    many,
    print_json,
    print_note,
    safe,
    timestamp,
)
from s3ec.cli.output import show as show_document
from s3ec.cli.output import table as table_of
from s3ec.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    import pyarrow as pa

    from s3ec.identity import Layout
    from s3ec.store.base import Store

# More rows than are useful at a terminal.
_SHOWN_ROWS = 1000
_SUMMED = ("document", "identifier", "modality", "bytes", "time")
_COLUMNS = ("document", "page", "modality", "rows", "bytes", "age_s", "identifier")


commands = App()
group = App(
    help="The catalogue: which document, page and file each embedding belongs to.",
    no_args_is_help=True,
    epilog=epilog(
        ("s3ec catalog show", "what has been computed in advance?"),
        ("s3ec catalog find reports/2024.pdf --page 12", "what is a page called?"),
        ("s3ec catalog export catalog.parquet", "all of it, as one file"),
    ),
)
commands.add_typer(group, name="catalog")


def _read(source: SettingsSource) -> tuple[str, pa.Table]:
    """The namespace that fits, and its catalogue. Parts that are left out are named."""
    from s3ec.corpus.catalog import read_table

    def note(text: str) -> None:
        print_note(safe(text))

    with counting("reading the catalogue"), source.corpus() as corpus:
        name = source.choose(corpus)
        return name, corpus.within(lambda store, layout: read_table(store, layout, note=note), name)


@group.command(
    "show",
    ("s3ec catalog show s3://embeddings", "of the only namespace"),
    ("s3ec catalog show --json | jq .modalities", "for machines"),
)
@with_options(CORPUS)
def show(source: SettingsSource, as_json: JsonOption = False) -> None:
    """Show the size of the catalogue: rows, documents and bytes, by modality.

    Exits with 1 if a part of it is unusable. The catalogue lists the embeddings that jobs over a
    corpus stored. It does not list entries that engines save.
    """

    async def look(store: Store, layout: Layout) -> dict[str, Any]:
        from s3ec.corpus.catalog import list_parts, read_table

        parts = await list_parts(store, layout)
        problems: list[str] = []
        table = await read_table(store, layout, columns=_SUMMED, note=problems.append)
        return {
            "namespace": layout.namespace,
            **_sums(table),
            "part_count": len(parts),
            "part_bytes": sum(info.nbytes for info in parts.values()),
            "unusable": problems,
        }

    with counting("reading the catalogue"), source.corpus() as corpus:
        document = corpus.within(look, source.choose(corpus))
    show_document(document, as_json=as_json, hide={"unusable"})
    for problem in document["unusable"]:
        print_note(safe(problem))
    if document["unusable"]:
        raise typer.Exit(EXIT_WRONG)


def _sums(table: pa.Table) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    by_modality = table.group_by("modality").aggregate(
        [("document", "count"), ("document", "count_distinct"), ("bytes", "sum")]
    )
    newest_us = pc.max(table.column("time").cast(pa.int64())).as_py()
    return {
        "row_count": len(table),
        "document_count": pc.count_distinct(table.column("document")).as_py(),
        "entry_count": pc.count_distinct(table.column("identifier")).as_py(),
        "bytes": pc.sum(table.column("bytes")).as_py() or 0,
        "age_s": None if newest_us is None else time.time() - newest_us / 1e6,
        "stored_at": timestamp(newest_us and newest_us / 1e6),
        "modalities": [
            {
                "modality": row["modality"],
                "row_count": row["document_count"],
                "document_count": row["document_count_distinct"],
                "bytes": row["bytes_sum"],
            }
            for row in by_modality.sort_by("modality").to_pylist()
        ],
    }


@group.command(
    "find",
    ("s3ec catalog find reports/2024.pdf", "all pages of a document"),
    ("s3ec catalog find --sha256 $(sha256sum < page.png | cut -c1-64)", "by a file"),
    ("s3ec catalog find --identifier 3f9a01bc... --json", "whose embedding is this?"),
)
@with_options(CORPUS)
def find(
    source: SettingsSource,
    document: Annotated[
        str | None, typer.Argument(metavar="[DOCUMENT]", help="Id of a document.")
    ] = None,
    page: Annotated[
        int | None, option("--page", "N", "Only this page of the document.", min=1)
    ] = None,
    sha256: Annotated[str | None, option("--sha256", "HEX", "SHA-256 of a file's bytes.")] = None,
    identifier: Annotated[str | None, option("--identifier", "ID", "A full identifier.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find rows of the catalogue, by document, by file or by identifier.

    Exits with 1 if there are none.
    """
    asked = {"document": document, "sha256": sha256 and sha256.lower(), "identifier": identifier}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            "find needs exactly one of these; give DOCUMENT, `--sha256` or `--identifier`"
        )
    [(column, text)] = given.items()
    if page is not None and column != "document":
        raise ConfigError("`--page` needs a document; give DOCUMENT too", field="page")
    name, table = _read(source)
    rows = _matching(table, column, text, page)
    if not rows:
        of_page = f", page {page}" if page is not None else ""
        raise NotFoundError(
            f"nothing with {column} {text!r:.100}{of_page} is in the catalogue of {name}; "
            "`s3ec catalog show` shows its contents"
        )
    if as_json:
        print_json({"namespace": name, "entries": rows})
    else:
        table_of(rows[:_SHOWN_ROWS], _COLUMNS)
        if len(rows) > _SHOWN_ROWS:
            print_note(f"and {len(rows) - _SHOWN_ROWS:,} more; --json prints all")


def _matching(table: pa.Table, column: str, text: str, page: int | None) -> list[dict[str, Any]]:
    import pyarrow.compute as pc

    from s3ec.corpus.catalog_file import to_rows

    found = table.filter(pc.equal(table.column(column), text))
    rows = []
    for row in map(asdict, to_rows(found)):
        if page in (None, row["page"]):
            stored_s, nbytes = row.pop("stored_s"), row.pop("nbytes")
            age = {"age_s": time.time() - stored_s, "stored_at": timestamp(stored_s)}
            rows.append({**row, "bytes": nbytes, **age})
    return rows


@group.command(
    "export",
    ("s3ec catalog export catalog.parquet", "for DuckDB, pandas, Spark"),
    ("s3ec catalog export catalog.parquet --model gemma-3", "of a model"),
)
@with_options(CORPUS)
def export(
    source: SettingsSource,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A Parquet file.")],
    as_json: JsonOption = False,
) -> None:
    """Write the whole catalogue to a Parquet file, and replace an existing file.

    DuckDB, pandas, Polars and Spark read it, and query it with SQL.
    """
    from s3ec.corpus.catalog_file import export_table

    if path.suffix.lower() != ".parquet":
        raise ConfigError(
            f"`{path}` must be a Parquet file; use a name that ends with .parquet",
            field="path",
        )
    name, table = _read(source)
    export_table(table, path)
    if as_json:
        print_json({"namespace": name, "file": str(path), "row_count": len(table)})
    else:
        print_note(f"{many(len(table), 'row')} written to {safe(str(path))}")

# SPDX-License-Identifier: Apache-2.0
"""``s3ec ns``, ``ls``, ``stat`` and ``get``: look into a corpus."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.help import epilog
from s3ec.cli.options import JsonOption, NamespaceOption, Source, with_settings
from s3ec.cli.output import (
    console,
    facts,
    human_age,
    human_bytes,
    print_json,
    print_note,
    progress,
    safe,
)
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.cli.corpus_view import Entry
    from s3ec.codec import Header
    from s3ec.doctor.namespaces import StoredNamespace
    from s3ec.store.base import Blob, Store

IdArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Identifier, a name that `s3ec ls` prints, or 8 or more hex digits of a hash.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the four commands to the tree."""
    app.command(
        "ns",
        epilog=epilog(
            ("s3ec ns --bucket embeddings", "which models have embeddings here?"),
            ("s3ec ns --count --json", "with their sizes, for machines"),
        ),
    )(with_settings(ns))
    app.command(
        "ls",
        epilog=epilog(
            ("s3ec ls --bucket embeddings", "the first 100 entries of the only namespace"),
            ("s3ec ls google-gemma --limit 0", "all of the namespace that begins so"),
        ),
    )(with_settings(ls))
    app.command(
        "stat",
        epilog=epilog(
            ("s3ec stat 3f9a01bc --bucket embeddings", "by the beginning of the hash"),
            ("s3ec stat page-12-of-report --verify", "by a client's own identifier, all bytes"),
        ),
    )(with_settings(stat))
    app.command(
        "get",
        epilog=epilog(
            ("s3ec get 3f9a01bc -o page.safetensors", "download, check, save"),
            ("s3ec get 3f9a01bc -o - | sha256sum", "to a pipe"),
        ),
    )(with_settings(get))


def ns(
    source: Source,
    count: Annotated[
        bool, typer.Option("--count", help="Count entries and bytes too; lists every object.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a bucket: one per model, revision, dtype and processor settings."""
    from s3ec.cli.corpus_view import entries, with_store
    from s3ec.doctor.namespaces import list_namespaces, read_namespaces

    async def collect(store: Store) -> list[dict[str, Any]]:
        rows = []
        for found in await read_namespaces(store, await list_namespaces(store)):
            row = _namespace_row(found)
            if count:
                sizes = [entry.nbytes async for entry in entries(store, found.name)]
                row.update(entries=len(sizes), bytes=sum(sizes))
            rows.append(row)
        return rows

    with progress("reading namespaces"):
        rows = with_store(source.load().settings, collect)
    if as_json:
        print_json({"namespaces": rows})
    elif rows:
        _print_namespaces(rows, count)
    else:
        print_note("no namespace here yet; a producer makes it with its first save")


def _namespace_row(found: StoredNamespace) -> dict[str, Any]:
    described = {key: found.descriptor.get(key) for key in ("model", "dtype", "revision")}
    return {"name": found.name, **described, "descriptor": dict(found.descriptor)}


def _print_namespaces(rows: list[dict[str, Any]], count: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("namespace", no_wrap=True)
    for title in ("model", "dtype", "revision"):
        table.add_column(title, overflow="fold")
    if count:
        table.add_column("entries", justify="right")
        table.add_column("size", justify="right")
    for row in rows:
        model = "(no namespace.json)" if row["model"] is None else str(row["model"])
        cells = [row["name"], model, str(row["dtype"] or "?"), str(row["revision"] or "-")]
        if count:
            cells += [str(row["entries"]), human_bytes(row["bytes"])]
        table.add_row(*(Text(safe(cell)) for cell in cells))
    console().print(table)


def ls(
    source: Source,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="Namespace or its beginning. Not needed where the bucket has one.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Entries to list; 0 lists all.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the entries of a namespace, in the order of the server."""
    from s3ec.cli.corpus_view import choose_namespace, entries, with_store

    async def collect(store: Store) -> tuple[str, list[Entry], bool]:
        name = await choose_namespace(store, namespace)
        found: list[Entry] = []
        async for entry in entries(store, name):
            if limit and len(found) == limit:
                return name, found, True
            found.append(entry)
        return name, found, False

    with progress("listing"):
        name, found, more = with_store(source.load().settings, collect)
    now_s = time.time()
    if as_json:
        rows = [
            {"id": e.label, "bytes": e.nbytes, "age_s": e.age_s(now_s), "object": e.object_name}
            for e in found
        ]
        print_json({"namespace": name, "entries": rows, "more": more})
        return
    for entry in found:
        age = human_age(entry.age_s(now_s))
        typer.echo(f"{human_bytes(entry.nbytes):>10}  {age:>8}  {entry.label}")
    total = sum(entry.nbytes for entry in found)
    rest = "; there are more (--limit 0 lists all)" if more else ""
    print_note(f"{len(found)} entries, {human_bytes(total)}, in {name}{rest}")


def stat(
    source: Source,
    identifier: IdArgument,
    namespace: NamespaceOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Download the entry and check every byte.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is stored for one image: its header, and with --verify whether it is sound."""
    from s3ec.cli.corpus_view import (
        choose_namespace,
        find,
        read_header,
        read_verified,
        with_store,
    )
    from s3ec.tenant import Tenant

    settings = source.load().settings

    async def look(store: Store) -> tuple[Entry, Header]:
        name = await choose_namespace(store, namespace)
        entry = await find(store, name, identifier, Tenant.read(settings.tenant_key))
        header = await read_header(store, entry)
        if verify:
            header, _ = await read_verified(store, entry)
        return entry, header

    with progress("verifying" if verify else "looking"):
        entry, header = with_store(settings, look)
    if as_json:
        print_json(_stat_document(entry, header, verify))
    else:
        facts(_stat_pairs(entry, header, verify))


def _stat_document(entry: Entry, header: Header, verified: bool) -> dict[str, Any]:
    return {
        "identifier": header.identifier,
        "namespace": entry.namespace,
        "object": entry.object_name,
        "modality": header.modality,
        "rows": header.shape.rows,
        "width": header.shape.width,
        "dtype": header.shape.dtype,
        "bytes": entry.nbytes,
        "xxh3": header.checksum,
        "placeholder": dict(header.placeholder),
        "age_s": entry.age_s(time.time()),
        "verified": verified,
    }


def _stat_pairs(entry: Entry, header: Header, verified: bool) -> list[tuple[str, Any]]:
    document = _stat_document(entry, header, verified)
    shape = f"{header.shape.rows} x {header.shape.width} {header.shape.dtype}"
    return [
        *((name, document[name]) for name in ("identifier", "namespace", "object", "modality")),
        ("tensor", f"{shape} (rows x width)"),
        ("bytes", f"{entry.nbytes} ({human_bytes(entry.nbytes)})"),
        ("xxh3-128", header.checksum),
        ("placeholder", json.dumps(document["placeholder"]) if header.placeholder else "-"),
        ("age", human_age(document["age_s"])),
        ("verified", "yes, every byte" if verified else "header only (--verify reads all)"),
    ]


def get(
    source: Source,
    identifier: IdArgument,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to save; `-` for stdout, or a folder."
        ),
    ],
    namespace: NamespaceOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Download one entry, check every byte, and save it as a safetensors file."""
    from s3ec.cli.corpus_view import choose_namespace, find, read_verified, with_store
    from s3ec.cli.save import check_target, save
    from s3ec.tenant import Tenant

    if output == "-" and (as_json or sys.stdout.isatty()):
        raise ConfigError("`-o -` writes the entry itself: send it into a pipe, without --json")

    settings = source.load().settings

    async def fetch(store: Store) -> tuple[Entry, Header, Blob, Path]:
        name = await choose_namespace(store, namespace)
        entry = await find(store, name, identifier, Tenant.read(settings.tenant_key))
        path = check_target(output, Path(entry.name).name, force=force)
        header, blob = await read_verified(store, entry)
        return entry, header, blob, path

    with progress("downloading"):
        entry, header, blob, path = with_store(settings, fetch)
    if output == "-":
        sys.stdout.buffer.write(blob)
        return
    save(path, blob, force=force)
    if as_json:
        print_json({**_stat_document(entry, header, True), "file": str(path)})
    else:
        print_note(f"saved {path} ({human_bytes(len(blob))}, every byte checked)")

# SPDX-License-Identifier: Apache-2.0
"""``s3ec ls``, ``stat`` and ``get``: the entries of a namespace."""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from s3ec.cli.options import (
    CORPUS,
    ID_HELP,
    JsonOption,
    SettingsSource,
    hint_of,
    with_options,
)
from s3ec.cli.output import (
    App,
    counting,
    human_bytes,
    json_text,
    note_page,
    print_json,
    print_json_line,
    print_note,
    safe,
    save,
    show,
    show_page,
    timestamp,
)
from s3ec.counters import unreported
from s3ec.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from s3ec.corpus import Corpus, CorpusEntry

_LIMIT = 100
_COLUMNS = ("label", "bytes", "age_s", "stored_at")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help=ID_HELP)]

commands = App()


def _row(entry: CorpusEntry, now_s: float) -> dict[str, Any]:
    """The listed values of an entry, by the keys of docs/commands.md."""
    return {
        "label": entry.label,
        "identifier": entry.identifier,
        "digest": entry.digest,
        "bytes": entry.nbytes,
        "age_s": entry.age_s(now_s),
        "stored_at": timestamp(entry.modified_s),
        "object": entry.object_name,
    }


@commands.command(
    "ls",
    ("s3ec ls s3://embeddings", "the first 100 entries, and how many there are"),
    ("s3ec ls --ndjson | jq -r 'select(.age_s > 90 * 86400).label'", "the old ones"),
)
@with_options(CORPUS)
def ls(
    source: SettingsSource,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=0, help="Number of entries to show; 0: all. [100; with --ndjson all]"
        ),
    ] = None,
    as_json: JsonOption = False,
    as_lines: Annotated[
        bool,
        typer.Option("--ndjson", help="Print one JSON object for each line, as entries are found."),
    ] = False,
) -> None:
    """List entries of a namespace by their labels, and count all of them.

    Lists the whole namespace, 1000 entries per request and 16 requests at a time. With --ndjson the
    lines have no order, and `s3ec ls --ndjson | head` ends when `head` does.
    """
    if as_json and as_lines:
        raise ConfigError("`--json` and `--ndjson` do not go together; leave one out")
    if limit is None:
        limit = 0 if as_lines else _LIMIT
    count = nbytes = 0
    now_s = time.time()
    # Progress would erase lines of stdout.
    shown = nullcontext(unreported) if as_lines else counting("listing")
    with shown as report, source.corpus() as corpus:
        name = source.choose(corpus)
        total = None if as_lines else _indexed(corpus, name)

        def counted() -> Iterator[CorpusEntry]:
            nonlocal count, nbytes
            for entry in corpus.list(name):
                count += 1
                nbytes += entry.nbytes
                # Entries stored after the snapshot are not in this number, so it is no total.
                report("listing", count, None if total is None or count > total else total)
                yield entry

        entries: list[CorpusEntry] = []
        if as_lines:
            for entry in counted():
                if not limit or count <= limit:
                    print_json_line(_row(entry, now_s))
        elif limit:  # keeps no more than these
            entries = heapq.nsmallest(limit, counted(), key=_label)
        else:
            entries = sorted(counted(), key=_label)
    sums = name, count, nbytes
    if as_lines:
        note_page(count, sums)
    else:
        rows = (_row(entry, now_s) for entry in entries)  # one at a time, of millions
        show_page(rows, len(entries), sums, as_json=as_json, keys=_COLUMNS)


def _label(entry: CorpusEntry) -> str:
    return entry.label


def _indexed(corpus: Corpus, namespace: str) -> int | None:
    """About how many entries there are, by the newest snapshot; None without one."""
    from s3ec.index.maker import newest_rows

    return corpus.within(newest_rows, namespace)


@commands.command(
    "stat",
    ("s3ec stat 3f9a01bc s3://embeddings", "by the beginning of the hash"),
    ("s3ec stat page-12-of-report --verify", "by a client's own identifier, all bytes"),
)
@with_options(CORPUS)
def stat(
    source: SettingsSource,
    identifier: IdArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Download the entry and check every byte.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the stored entry of one image: its header, and with --verify whether it is intact."""
    with counting("verifying" if verify else "looking"), source.corpus(attempts=1) as corpus:
        entry = corpus.stat(_find(corpus, source, identifier)) or _deleted()
        if verify:
            corpus.get(entry) or _deleted()
    about = {"verified": "(every byte)" if verify else "(the header only; --verify reads all)"}
    document = _document(entry, verify)
    if not as_json and document.get("placeholder"):
        document["placeholder"] = json_text(document["placeholder"])  # lists in it, too
    show(document, as_json=as_json, hide={"label"}, about=about)


def _find(corpus: Corpus, source: SettingsSource, identifier: str) -> CorpusEntry:
    """Find the entry in a listing.

    Raises:
        NotFoundError, AmbiguousError: There is none, or there are several.
    """
    name = source.choose(corpus)
    entry = corpus.find(identifier, namespace=name)
    if entry is not None:
        return entry
    problem = f"no entry for `{safe(identifier)}` in {name}{hint_of(identifier)}"
    raise NotFoundError(problem)


def _deleted() -> NoReturn:
    raise NotFoundError("the entry was deleted during this command")


def _document(entry: CorpusEntry, verified: bool) -> dict[str, Any]:
    document = {"namespace": entry.namespace, **_row(entry, time.time())}
    if (header := entry.header) is not None:
        document |= {
            "identifier": header.identifier,
            "modality": header.modality,
            "rows": header.shape.rows,
            "width": header.shape.width,
            "dtype": header.shape.dtype,
            "xxh3": header.checksum,
            "placeholder": None if header.placeholder is None else dict(header.placeholder),
            "made_by": header.made_by or None,
        }
    return {**document, "verified": verified}


@commands.command(
    "get",
    ("s3ec get 3f9a01bc -o page.safetensors", "download, check, save"),
    ("s3ec get 3f9a01bc -o - | sha256sum", "to a pipe"),
)
@with_options(CORPUS)
def get(
    source: SettingsSource,
    identifier: IdArgument,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File or folder to save to; `-` for stdout."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Download one entry, check every byte, and save it as a safetensors file."""
    if output == "-" and (as_json or sys.stdout.isatty()):
        raise ConfigError("`-o -` writes the entry itself: send it into a pipe, without --json")

    path = Path(output).expanduser()
    with counting("downloading", in_bytes=True) as report, source.corpus(attempts=1) as corpus:
        entry = _find(corpus, source, identifier)
        embedding = corpus.get(entry, report=report) or _deleted()
    if output == "-":
        sys.stdout.buffer.write(embedding.file)
        return
    if path.is_dir():
        path /= Path(entry.name).name
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    save(path, embedding.file)
    if as_json:
        print_json({**_document(embedding.entry, True), "file": str(path)})
    else:
        print_note(f"saved {path} ({human_bytes(len(embedding.file))}, every byte checked)")

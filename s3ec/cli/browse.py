# SPDX-License-Identifier: Apache-2.0
"""``s3ec ns``, ``ls``, ``stat`` and ``get``: look into a corpus."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from s3ec.cli.ls import EntryRow, ls
from s3ec.cli.options import (
    CONSENT,
    ID_HELP,
    JsonOption,
    NamespaceChoice,
    SettingsSource,
    hint_of,
    with_namespace,
    with_settings,
)
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    Failure,
    counting,
    epilog,
    human_bytes,
    plain,
    print_error,
    print_json,
    print_note,
    safe,
    show,
    table,
    timestamp,
)
from s3ec.cli.remove import ns_rm
from s3ec.errors import ConfigError, CorruptEntryError, NotFoundError, TierError

if TYPE_CHECKING:
    from s3ec.corpus import Corpus, CorpusEntry
    from s3ec.counters import Report
    from s3ec.namespaces import NamespaceInfo
    from s3ec.store.base import Blob, Store

CountOption = Annotated[
    bool, typer.Option("--count", help="Also count entries and bytes; this lists every object.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help=ID_HELP)]


def register(app: App) -> None:
    """Add the four commands to the tree, and two more below ``ns``."""
    namespaces = App()  # alone it lists
    namespaces.callback(
        invoke_without_command=True,
        epilog=epilog(
            ("s3ec ns s3://embeddings", "which models have embeddings here?"),
            ("s3ec ns --count --json", "with their sizes, for machines"),
        ),
    )(with_settings(ns))
    namespaces.command(
        "show",
        ("s3ec ns show", "what makes the newest namespace another one than the rest?"),
        ("s3ec ns show --model gemma-3 --json | jq .descriptor", "for machines"),
    )(with_namespace(ns_show))
    namespaces.command(
        "rm",
        ("s3ec ns rm acme-vision-0123456789abcdef", "what is in it? asks at a terminal"),
        ("s3ec ns rm acme-vision-0123456789abcdef --yes", "delete all of it"),
    )(with_settings(ns_rm, CONSENT))
    app.add_typer(namespaces, name="ns")
    app.command(
        "ls",
        ("s3ec ls s3://embeddings", "the first 100 entries, and how many there are"),
        ("s3ec ls --model gemma-3 --sort bytes --reverse", "the largest of a model"),
        ("s3ec ls --ndjson | jq -r 'select(.age_s > 90 * 86400).label'", "the old ones"),
    )(with_namespace(ls))
    app.command(
        "stat",
        ("s3ec stat 3f9a01bc s3://embeddings", "by the beginning of the hash"),
        ("s3ec stat page-12-of-report --verify", "by a client's own identifier, all bytes"),
    )(with_namespace(stat))
    app.command(
        "get",
        ("s3ec get 3f9a01bc -o page.safetensors", "download, check, save"),
        ("s3ec get 3f9a01bc -o - | sha256sum", "to a pipe"),
    )(with_namespace(get))


def ns(
    source: SettingsSource,
    ctx: typer.Context,
    count: CountOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a bucket: one for each model, revision, weights and relevant settings.

    The list shows 12 digits of each fingerprint; `s3ec ns show` shows a full description. For each
    replica it shows how many of the newest entries are missing there, and the cost of copying a
    month's new entries.
    """
    if ctx.invoked_subcommand is not None:
        if source != SettingsSource() or count or as_json:
            command = f"s3ec ns {ctx.invoked_subcommand}"
            raise ConfigError(f"write options after the command: `{command} ...`")
        return
    with counting("reading namespaces") as report, source.corpus(attempts=1) as corpus:
        found = corpus.namespaces(count=count, report=report)
        replicas = []
        if corpus.settings.replicas:
            from s3ec.doctor.replicas import replica_rows

            replicas = corpus.run(lambda store: replica_rows(store, corpus.settings, found))
    now_s = time.time()
    rows = [_namespace_row(each, now_s, count) for each in found]
    if as_json:
        print_json({"namespaces": rows, "replicas": replicas})
        return
    if rows:
        columns = (
            "namespace",
            "dtype",
            "weights",
            "indexed_count",
            "entry_count",
            "bytes",
            "age_s",
        )
        table(
            [{**row, "dtype": row["dtype"] or "(no namespace.json)"} for row in rows],
            columns if count else [name for name in columns if name in rows[0]],
        )
    else:
        print_note("no namespace here yet; a producer makes it with its first save")
    table([{**row, "problem": None} for row in replicas])
    for row in replicas:
        if row["problem"]:
            print_note(f"{row['replica']}: {safe(row['problem'])}")


def _namespace_row(found: NamespaceInfo, now_s: float, count: bool) -> dict[str, Any]:
    described = ("model", "dtype", "revision", "weights")
    return {
        "namespace": found.name,
        **{key: found.descriptor.get(key) for key in described},
        "age_s": now_s - found.stored_s if found.stored_s else None,
        "stored_at": timestamp(found.stored_s),
        "indexed_count": found.indexed,
        "descriptor": dict(found.descriptor),
        **({"entry_count": found.entries, "bytes": found.nbytes} if count else {}),
    }


def ns_show(
    source: SettingsSource,
    choice: NamespaceChoice,
    count: CountOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the full description of a namespace: the values that its engines must share."""
    with counting("reading the namespace") as report, source.corpus(attempts=1) as corpus:
        name = choice.within(corpus)
        found = corpus.run(lambda store: _describe(store, name, count, report))
    document = _namespace_row(found, time.time(), count)
    show(document, as_json=as_json, hide={"model", "dtype", "revision", "weights"})


async def _describe(store: Store, name: str, count: bool, report: Report) -> NamespaceInfo:
    from s3ec.namespaces import describe_namespace, read_namespaces

    [found] = await read_namespaces(store, [name])
    return await describe_namespace(store, found, count=count, report=report)


def stat(
    source: SettingsSource,
    choice: NamespaceChoice,
    identifier: IdArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Download the entry and check every byte.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the stored entry of one image: its header, and with --verify whether it is intact."""
    bad = None
    with counting("verifying" if verify else "looking"), source.corpus(attempts=1) as corpus:
        entry = _find(corpus, choice, identifier)
        try:
            entry = corpus.stat(entry) or _deleted()
            if verify:
                corpus.get(entry) or _deleted()
        except CorruptEntryError as exc:
            bad = exc
    document = _stat_document(entry, verify and bad is None)
    if as_json:
        print_json({**document, **(Failure.of(bad).document if bad else {})})
    else:
        show(_for_people(document, bad is not None), as_json=False)
    if bad is not None:
        print_error(str(bad))
        raise typer.Exit(EXIT_WRONG)


def _find(corpus: Corpus, choice: NamespaceChoice, identifier: str) -> CorpusEntry:
    """Find the entry in a listing.

    Raises:
        NotFoundError, AmbiguousError: There is none, or there are several.
    """
    name = choice.within(corpus)
    entry = corpus.find(identifier, namespace=name)
    if entry is not None:
        return entry
    problem = f"no entry for `{safe(identifier)}` in {name}{hint_of(identifier)}"
    raise NotFoundError(problem)


def _deleted() -> NoReturn:
    raise NotFoundError("the entry was deleted during this command")


def _stat_document(entry: CorpusEntry, verified: bool) -> dict[str, Any]:
    """What is known of an entry. Where the header is bad, that is only what the listing says."""
    header = entry.header
    listed = {"namespace": entry.namespace, **plain(EntryRow.of(entry, time.time()))}
    if header is None:
        return {**listed, "verified": verified}
    return {
        **listed,
        "identifier": header.identifier,
        "modality": header.modality,
        "rows": header.shape.rows,
        "width": header.shape.width,
        "dtype": header.shape.dtype,
        "xxh3": header.checksum,
        "placeholder": None if header.placeholder is None else dict(header.placeholder),
        "made_by": header.made_by or None,
        "verified": verified,
    }


def _for_people(document: dict[str, Any], is_bad: bool) -> dict[str, Any]:
    """The same without what says it twice: the tensor on one line, and what ``verified`` means."""
    unread = "no, it is corrupt" if is_bad else "header only (--verify reads all)"
    shown = {**document, "label": None, "verified": "yes, every byte"}
    if not document["verified"]:
        shown["verified"] = unread
    if "rows" in document:
        rows, width, dtype = (shown.pop(name) for name in ("rows", "width", "dtype"))
        placeholder = document["placeholder"]
        shown["tensor"] = f"{rows} x {width} {dtype} (rows x width)"
        shown["placeholder"] = json.dumps(placeholder) if placeholder else None
    return shown


def get(
    source: SettingsSource,
    choice: NamespaceChoice,
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

    with counting("downloading", in_bytes=True) as report, source.corpus(attempts=1) as corpus:
        entry = _find(corpus, choice, identifier)
        path = check_target(output, Path(entry.name).name, force=force)
        embedding = corpus.get(entry, report=report) or _deleted()
    if output == "-":
        sys.stdout.buffer.write(embedding.file)
        return
    save(path, [embedding.file], force=force)
    if as_json:
        print_json({**_stat_document(embedding.entry, True), "file": str(path)})
    else:
        print_note(f"saved {path} ({human_bytes(len(embedding.file))}, every byte checked)")


def check_target(output: str, default_name: str, *, force: bool) -> Path:
    """The path to save to. Checked before anything is downloaded.

    Args:
        output: As given; a folder gets ``default_name`` inside it. ``-`` is not looked at.

    Raises:
        ConfigError: There is a file already and ``force`` is not set.
    """
    path = Path(output).expanduser()
    if output == "-":
        return path
    if path.is_dir():
        path /= default_name
    if not force and path.exists():
        raise ConfigError(f"{path} exists; --force replaces it")
    return path


def save(path: Path, pieces: Sequence[Blob], *, force: bool) -> None:
    """Write a file by way of a temporary one beside it, so that it is whole or not there.

    Args:
        pieces: Of the file, one after the other.

    Raises:
        ConfigError: There is one and ``force`` is not set.
        TierError: The folder is absent, read-only or full.
    """
    from s3ec.tier.files import write_file

    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    try:
        write_file(path, pieces, synced=True)
    except OSError as exc:
        raise TierError(f"cannot write {path}: {exc.strerror}") from exc

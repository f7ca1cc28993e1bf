# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm`` and ``gc``: delete entries from the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.options import (
    CONSENT,
    CORPUS,
    ID_HELP,
    Consent,
    JsonOption,
    SettingsSource,
    duration_s,
    hint_of,
    option,
    size_bytes,
    with_options,
)
from s3ec.cli.output import (
    EXIT_PARTIAL,
    EXIT_WRONG,
    App,
    human_bytes,
    many,
    print_json,
    print_note,
    safe,
)

if TYPE_CHECKING:
    from s3ec.corpus import Corpus, CorpusEntry
    from s3ec.corpus.collect import Collection, Deletion
    from s3ec.counters import Report

_HASH_DIGITS = 64

commands = App()


@commands.command(
    "rm",
    ("s3ec rm page-12-of-report", "is it there, and how large is it? asks at a terminal"),
    ("s3ec rm 3f9a01bc8d2e x-77aa01bc8d2e --yes", "delete what `s3ec ls` prints"),
    (
        "s3ec catalog find report.pdf --json | jq -r '.entries[].identifier' | xargs s3ec rm --yes",
        "all pages of a document",
    ),
)
@with_options(CORPUS, CONSENT)
def rm(
    source: SettingsSource,
    consent: Consent,
    identifiers: Annotated[list[str], typer.Argument(metavar="ID...", help=ID_HELP)],
    as_json: JsonOption = False,
) -> None:
    """Delete entries from the bucket, and their rows in the catalogue.

    Without --yes, it deletes nothing unless you agree at a terminal. It notifies the engines of
    this node. Other engines get one miss for a deleted entry; engines that only encode need `s3ec
    manifest rebuild`. A node with a copy on its disk serves the copy until it evicts it. `s3ec
    verify` counts a deleted entry as `extra`, and exits with 1, until `s3ec manifest rebuild` has
    run. Exits with 1 if an entry did not exist; it still deletes the others. Exits with 3 if rows
    of the catalogue remain.
    """
    with source.corpus() as corpus:
        name = source.choose(corpus)
        named = {text: _named(corpus, name, text) for text in identifiers}
        typed = {one if isinstance(one, str) else one.name: text for text, one in named.items()}

        def delete(dry_run: bool, report: Report) -> Deletion:
            return corpus.delete(named.values(), namespace=name, dry_run=dry_run, report=report)

        def told(found: Deletion) -> tuple[int, str]:
            entries = many(found.count, "entry", "entries")
            return found.count, f"{entries}, {human_bytes(found.nbytes)}, from {name}"

        # An absent entry may be in the index, so it is deleted as well.
        found, _ = consent.carry_out(delete, told, as_json=as_json)
    absent = [typed[one] for one in found.absent]
    for text in absent:
        print_note(f"not there: {safe(text)}{hint_of(text)}")
    _note_rows(found)
    if as_json:
        print_json(
            {
                "namespace": name,
                "entry_count": found.count,
                "bytes": found.nbytes,
                "deleted": found.count if found.done else 0,
                "absent": absent,
                "dropped_row_count": found.dropped_rows,
                "dry_run": not found.done,
            }
        )
    if absent or found.problem:
        raise typer.Exit(EXIT_WRONG if absent else EXIT_PARTIAL)


def _named(corpus: Corpus, namespace: str, text: str) -> str | CorpusEntry:
    """The entry whose hash begins with the text; the text itself if there is no such entry."""
    from s3ec.corpus import is_hash_prefix

    is_cut = is_hash_prefix(text) and len(text.rpartition(":")[2]) < _HASH_DIGITS
    return corpus.find(text, namespace=namespace) or text if is_cut else text


@commands.command(
    "gc",
    ("s3ec gc --older-than 90d --dry-run", "how much is older than that?"),
    ("s3ec gc --older-than 90d --yes", "delete it"),
    ("s3ec gc --max-bytes 2TiB --yes", "the oldest, until the rest fits"),
    ("s3ec gc --made-by vllm=0.32.0 --dry-run", "what a faulty release stored"),
)
@with_options(CORPUS, CONSENT)
def gc(
    source: SettingsSource,
    consent: Consent,
    older_than: Annotated[
        float | None,
        option(
            "--older-than",
            "AGE",
            "Entries stored longer ago than this: `90d`, `12h`, `2w`, `30min`.",
            parser=duration_s,
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        option(
            "--max-bytes",
            "SIZE",
            "The oldest entries, until the rest fits into this size, such as `2TiB`.",
            parser=size_bytes,
        ),
    ] = None,
    made_by: Annotated[
        str | None,
        option(
            "--made-by",
            "WORDS",
            "Only entries that these releases made: `vllm=0.32.0`, or `'vllm=0.32.* "
            "platform=NVIDIA*'`; names are vllm, transformers, torch, pillow and platform. This "
            "reads the header of each entry, with one request.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries by age, total size or maker, from a listing of all objects.

    Several rules together select only entries that match all of them. Without --yes, it deletes
    nothing unless you agree at a terminal. A deleted entry that is needed again is encoded and
    stored again. Exits with 3 if rows of the catalogue remain.
    """
    with source.corpus() as corpus:
        name = source.choose(corpus)

        def collect(dry_run: bool, report: Report) -> Collection:
            return corpus.gc(
                name,
                older_than_s=older_than,
                max_bytes=max_bytes,
                made_by=made_by,
                dry_run=dry_run,
                report=report,
            )

        def told(found: Collection) -> tuple[int, str]:
            entries = many(found.objects, "entry", "entries")
            return found.objects, f"{entries}, {human_bytes(found.nbytes)}"

        found, _ = consent.carry_out(collect, told, as_json=as_json)
    _note_rows(found)
    if max_bytes is not None and found.left_bytes > max_bytes:
        print_note(f"{human_bytes(found.left_bytes)} remain, because the other rules keep them")
    if as_json:
        print_json(
            {
                "namespace": name,
                "older_than_s": older_than,
                "max_bytes": max_bytes,
                "made_by": made_by,
                "entry_count": found.objects,
                "bytes": found.nbytes,
                "left_count": found.left_objects,
                "left_bytes": found.left_bytes,
                "deleted": found.objects if found.done else 0,
                "dropped_row_count": found.dropped_rows,
                "dry_run": not found.done,
            }
        )
    if found.problem:
        raise typer.Exit(EXIT_PARTIAL)


def _note_rows(found: Collection | Deletion) -> None:
    if found.problem:
        print_note(f"rows of the catalogue remain: {safe(found.problem, limit=2000)}")

# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm``, ``gc`` and ``ns rm``: delete from the bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    ID_HELP,
    Consent,
    JsonOption,
    NamespaceChoice,
    SettingsSource,
    duration_s,
    entry_of,
    hint_of,
    option,
    optional,
    size_bytes,
    with_namespace,
)
from s3ec.cli.output import (
    EXIT_PARTIAL,
    EXIT_WRONG,
    RESUMES,
    UNCHANGED,
    App,
    counting,
    echo,
    human_bytes,
    many,
    print_json,
    print_note,
    safe,
    show,
    timestamp,
)
from s3ec.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from s3ec.corpus import Corpus
    from s3ec.corpus.collect import Collection, Deletion
    from s3ec.index.delete import Contents
    from s3ec.store.base import Store


def register(app: App) -> None:
    """Add the two commands to the tree; ``ns rm`` stands beside ``ns``."""
    app.command(
        "rm",
        ("s3ec rm page-12-of-report", "is it there, and how large is it? asks at a terminal"),
        ("s3ec rm 3f9a01bc8d2e x-77aa01bc8d2e --yes", "delete what `s3ec ls` prints"),
        (
            "s3ec catalog find report.pdf --json | jq -r '.entries[].identifier' | "
            "xargs s3ec rm --yes",
            "all pages of a document",
        ),
    )(with_namespace(rm, CONSENT))
    app.command(
        "gc",
        ("s3ec gc --older-than 90d --dry-run", "how much is older than that?"),
        ("s3ec gc --older-than 90d --yes", "delete it"),
        ("s3ec gc --max-bytes 2TiB --yes", "the oldest, until the rest fits"),
        ("s3ec gc --made-by vllm=0.32.0 --dry-run", "what a faulty release stored"),
    )(with_namespace(gc, CONSENT))


def rm(
    source: SettingsSource,
    choice: NamespaceChoice,
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
        name = choice.within(corpus)
        named = {text: entry_of(corpus, name, text) for text in identifiers}
        typed = {one if isinstance(one, str) else one.name: text for text, one in named.items()}

        def delete(dry_run: bool) -> Deletion:
            message = "looking for entries" if dry_run else "deleting entries"
            with counting(message, resume=UNCHANGED if dry_run else RESUMES) as report:
                return corpus.delete(named.values(), namespace=name, dry_run=dry_run, report=report)

        def told(found: Deletion) -> tuple[int, str]:
            entries = many(found.count, "entry", "entries")
            return found.count, f"{entries}, {human_bytes(found.nbytes)}, from {name}"

        # What is absent may be in the index, so it is deleted as well.
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


def gc(
    source: SettingsSource,
    choice: NamespaceChoice,
    consent: Consent,
    older_than: Annotated[
        str | None,
        option(
            "--older-than",
            "AGE",
            "Entries stored longer ago than this: `90d`, `12h`, `2w`, `30min`.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        option(
            "--max-bytes",
            "SIZE",
            "The oldest entries, until the rest fits into this size, such as `2TiB`.",
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
    age_s = optional(duration_s, older_than, "older_than")
    most = optional(size_bytes, max_bytes, "max_bytes")
    with source.corpus() as corpus:
        name = choice.within(corpus)

        def collect(dry_run: bool) -> Collection:
            message = "listing objects" if dry_run else "deleting entries"
            with counting(message, resume=UNCHANGED if dry_run else RESUMES) as report:
                return corpus.gc(
                    name,
                    older_than_s=age_s,
                    max_bytes=most,
                    made_by=made_by,
                    dry_run=dry_run,
                    report=report,
                )

        def told(found: Collection) -> tuple[int, str]:
            entries = many(found.objects, "entry", "entries")
            return found.objects, f"{entries}, {human_bytes(found.nbytes)}"

        found, _ = consent.carry_out(collect, told, as_json=as_json)
    _note_rows(found)
    if most is not None and found.left_bytes > most:
        print_note(f"{human_bytes(found.left_bytes)} remain, because the other rules keep them")
    if as_json:
        print_json(
            {
                "namespace": name,
                "older_than_s": age_s,
                "max_bytes": most,
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


def ns_rm(
    source: SettingsSource,
    consent: Consent,
    namespace: Annotated[str, typer.Argument(metavar="NAME", help="Full name of the namespace.")],
    idle: Annotated[
        str,
        option("--idle", "AGE", "Refuse if something was stored more recently; `0` never refuses."),
    ] = "10min",
    as_json: JsonOption = False,
) -> None:
    """Delete a namespace: all entries, the index, the records, and namespace.json last.

    Without --yes, it deletes nothing unless you agree at a terminal. First stop the engines that
    write into the namespace. After an interruption, the next call resumes. Nodes keep their copies
    on disk: `s3ec tier evict --to 0 --namespace NAME` removes them there.
    """
    idle_s = 0.0 if idle.strip() == "0" else duration_s(idle, "idle")
    with source.corpus() as corpus:
        contents = _remove(corpus, namespace, idle_s, delete=False)
        document = _contents(namespace, contents)
        if not as_json:
            show(document, as_json=False, about={"other_count": "objects that are not s3ec's"})
        what = f"{many(contents.objects, 'object')}, {human_bytes(contents.nbytes)}"
        done = consent.ask(f"delete {what}?", as_json=as_json)
        if done:
            document = _contents(namespace, _remove(corpus, namespace, idle_s, delete=True))
            if not as_json:
                objects = many(document["object_count"], "object")
                echo(f"deleted {objects}, {human_bytes(document['bytes'])}: {namespace} is gone")
    if as_json:
        deleted = document["object_count"] if done else 0
        print_json({**document, "deleted": deleted, "dry_run": not done})


def _contents(namespace: str, contents: Contents) -> dict[str, Any]:
    age_s = contents.idle_s(time.time())
    return {
        "namespace": namespace,
        "entry_count": contents.entries,
        "other_count": contents.others,
        "object_count": contents.objects,
        "bytes": contents.nbytes,
        "age_s": age_s,
        "stored_at": None if age_s is None else timestamp(time.time() - age_s),
    }


def _remove(corpus: Corpus, namespace: str, idle_s: float, *, delete: bool) -> Contents:
    """Count what the namespace holds, and delete it where ``delete`` says so."""
    message = "deleting objects" if delete else "listing objects"
    with counting(message, resume=RESUMES if delete else UNCHANGED) as report:

        async def work(store: Store) -> Contents:
            from s3ec.identity import Layout, is_namespace_name
            from s3ec.index.delete import remove_namespace, survey
            from s3ec.namespaces import list_namespaces, require_ours

            if not is_namespace_name(namespace):
                raise ConfigError(
                    f"{namespace!r:.100} is not a full namespace name; `s3ec ns` prints them"
                )
            layout = Layout(namespace)
            await require_ours(store, namespace)
            if delete:
                return await remove_namespace(store, layout, idle_s, report=report)
            contents = await survey(store, layout, report=report)
            if not contents.objects:
                listed = "".join(f"\n  {name}" for name in await list_namespaces(store))
                raise NotFoundError(f"no namespace `{namespace}`; there are:{listed or ' none'}")
            return contents

        return corpus.change(work, namespace) if delete else corpus.run(work)

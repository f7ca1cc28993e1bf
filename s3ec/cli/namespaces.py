# SPDX-License-Identifier: Apache-2.0
"""``s3ec ns``: list, describe and delete the namespaces of a bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    CORPUS,
    SETTINGS,
    Consent,
    JsonOption,
    SettingsSource,
    duration_s,
    is_for_subcommand,
    option,
    with_options,
)
from s3ec.cli.output import (
    App,
    counting,
    epilog,
    human_age,
    human_bytes,
    many,
    print_json,
    print_note,
    safe,
    show,
    table,
    timestamp,
)
from s3ec.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from s3ec.counters import Report
    from s3ec.identity import Layout
    from s3ec.index.delete import Contents
    from s3ec.namespaces import NamespaceInfo
    from s3ec.store.base import Store

_DESCRIBED = ("model", "dtype", "revision", "weights")
_COLUMNS = ("namespace", "dtype", "weights", "indexed_count", "entry_count", "bytes", "age_s")

CountOption = Annotated[
    bool, typer.Option("--count", help="Also count entries and bytes; this lists every object.")
]

commands = App()
group = App()  # alone it lists
commands.add_typer(group, name="ns")


@group.callback(
    invoke_without_command=True,
    epilog=epilog(
        ("s3ec ns s3://embeddings", "which models have embeddings here?"),
        ("s3ec ns --count --json", "with their sizes, for machines"),
    ),
)
@with_options(SETTINGS)
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
    if is_for_subcommand(ctx, source != SettingsSource(), count, as_json):
        return
    with counting("reading namespaces") as report, source.corpus(attempts=1) as corpus:
        found = corpus.namespaces(count=count, report=report)
        replicas = []
        if corpus.settings.replicas:
            from s3ec.doctor.replicas import replica_rows

            replicas = corpus.run(lambda store: replica_rows(store, corpus.settings, found))
    rows = [_row(each, count) for each in found]
    if as_json:
        print_json({"namespaces": rows, "replicas": replicas})
        return
    if rows:
        table(
            [{**row, "dtype": row["dtype"] or "(no namespace.json)"} for row in rows],
            [name for name in _COLUMNS if name in rows[0]],
        )
    else:
        print_note("no namespace here yet; a producer makes it with its first save")
    table([{**row, "problem": None} for row in replicas])
    for row in replicas:
        if row["problem"]:
            print_note(f"{row['replica']}: {safe(row['problem'])}")


def _row(found: NamespaceInfo, count: bool) -> dict[str, Any]:
    return {
        "namespace": found.name,
        **{key: found.descriptor.get(key) for key in _DESCRIBED},
        "age_s": time.time() - found.stored_s if found.stored_s else None,
        "stored_at": timestamp(found.stored_s),
        "indexed_count": found.indexed,
        "descriptor": dict(found.descriptor),
        **({"entry_count": found.entries, "bytes": found.nbytes} if count else {}),
    }


@group.command(
    "show",
    ("s3ec ns show", "what makes the newest namespace another one than the rest?"),
    ("s3ec ns show --model gemma-3 --json | jq .descriptor", "for machines"),
)
@with_options(CORPUS)
def ns_show(
    source: SettingsSource, count: CountOption = False, as_json: JsonOption = False
) -> None:
    """Show the full description of a namespace: the values that its engines must share."""
    with counting("reading the namespace") as report, source.corpus(attempts=1) as corpus:
        name = source.choose(corpus)

        async def describe(store: Store) -> NamespaceInfo:
            from s3ec.namespaces import describe_namespace, read_namespaces

            [found] = await read_namespaces(store, [name])
            return await describe_namespace(store, found, count=count, report=report)

        found = corpus.run(describe)
    show(_row(found, count), as_json=as_json, hide=set(_DESCRIBED))


def _idle_s(text: str) -> float:
    return 0.0 if text.strip() == "0" else duration_s(text)


@group.command(
    "rm",
    ("s3ec ns rm acme-vision-0123456789abcdef", "what is in it? asks at a terminal"),
    ("s3ec ns rm acme-vision-0123456789abcdef --yes", "delete all of it"),
)
@with_options(SETTINGS, CONSENT)
def ns_rm(
    source: SettingsSource,
    consent: Consent,
    namespace: Annotated[str, typer.Argument(metavar="NAME", help="Full name of the namespace.")],
    idle: Annotated[
        Any,  # seconds
        option(
            "--idle",
            "AGE",
            "Refuse if something was stored more recently; `0` never refuses.",
            parser=_idle_s,
        ),
    ] = "10min",
    as_json: JsonOption = False,
) -> None:
    """Delete a namespace: all entries, the index, the records, and namespace.json last.

    Without --yes, it deletes nothing unless you agree at a terminal. First stop the engines that
    write into the namespace. After an interruption, the next call resumes. Nodes keep their copies
    on disk: `s3ec tier evict --to 0 --namespace NAME` removes them there.
    """
    from s3ec.identity import Layout, is_namespace_name
    from s3ec.index.delete import remove_namespace

    if not is_namespace_name(namespace):
        raise ConfigError(f"{namespace!r:.100} is not a full namespace name; `s3ec ns` prints them")
    layout = Layout(namespace)
    with source.corpus() as corpus:

        def remove(dry_run: bool, report: Report) -> Contents:
            found = corpus.run(lambda store: _survey(store, layout, report))
            if dry_run:
                return found
            return corpus.change(
                lambda store: remove_namespace(store, layout, idle, report=report), namespace
            )

        def told(found: Contents) -> tuple[int, str]:
            parts = f"{many(found.entries, 'entry', 'entries')} and {found.others:,} not of s3ec"
            size, age = human_bytes(found.nbytes), human_age(found.idle_s(time.time()))
            objects = many(found.objects, "object")
            return found.objects, f"{objects}: {parts}, {size}, stored {age} ago"

        found, done = consent.carry_out(remove, told, as_json=as_json)
    if as_json:
        print_json(
            {
                "namespace": namespace,
                "entry_count": found.entries,
                "other_count": found.others,
                "object_count": found.objects,
                "bytes": found.nbytes,
                "age_s": found.idle_s(time.time()),
                "stored_at": timestamp(found.stored_s),
                "deleted": found.objects if done else 0,
                "dry_run": not done,
            }
        )


async def _survey(store: Store, layout: Layout, report: Report) -> Contents:
    """Count what a namespace holds; raise NotFoundError if that is nothing. Writes nothing."""
    from s3ec.index.delete import survey
    from s3ec.namespaces import list_namespaces, require_ours

    await require_ours(store, layout.namespace)
    found = await survey(store, layout, report=report)
    if not found.objects:
        listed = "".join(f"\n  {name}" for name in await list_namespaces(store))
        raise NotFoundError(f"no namespace `{layout.namespace}`; there are:{listed or ' none'}")
    return found

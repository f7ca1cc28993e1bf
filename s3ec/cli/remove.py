# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm``, ``gc`` and ``ns rm``: delete from the bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    Consent,
    JsonOption,
    MadeByOption,
    NamespaceChoice,
    SettingsSource,
    complete_namespace,
    duration_s,
    option,
    size_bytes,
    with_namespace,
)
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    counting,
    echo,
    facts,
    human_age,
    human_bytes,
    many,
    note_headers,
    print_json,
    print_note,
    safe,
)
from s3ec.errors import ConfigError, NotFoundError
from s3ec.payoff import STORES, StorePreset

if TYPE_CHECKING:
    from s3ec.corpus import Corpus, Deletion
    from s3ec.corpus.collect import Collection
    from s3ec.index.delete import Contents
    from s3ec.store.base import Store


def register(app: App) -> None:
    """Add the two commands to the tree; ``ns rm`` stands beside ``ns``."""
    app.command(
        "rm",
        ("s3ec rm page-12-of-report", "is it there, and how large is it? asks at a terminal"),
        ("s3ec rm --name x-3f9a01bc... --yes", "delete what `s3ec ls` prints, all 64 digits"),
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
    identifiers: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Identifiers, in full.")
    ],
    by_name: Annotated[
        bool,
        typer.Option(
            "--name", help="The arguments are names as `s3ec ls` prints them, or object names."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete entries from the bucket, and the catalogue's rows of them.

    Without --yes, nothing is deleted unless you agree at a terminal. Engines of this node are told;
    others find out when they ask for it, and those that only encode by `s3ec manifest rebuild`. A
    node that has a copy on its disk serves it until it is evicted. Exit status 1 where one was not
    there; the others are deleted all the same.
    """
    with source.corpus() as corpus:
        for text in identifiers:
            _require_key(corpus, text, by_name=by_name)
        name = choice.within(corpus)

        def delete(*, dry_run: bool) -> Deletion:
            with counting("looking" if dry_run else "deleting") as report:
                return corpus.delete(
                    identifiers, namespace=name, by_name=by_name, dry_run=dry_run, report=report
                )

        found = delete(dry_run=not consent.yes)
        count, absent = found.count, found.absent
        what = f"{many(count, 'entry', 'entries')}, {human_bytes(found.nbytes)}, from {name}"
        if not as_json:
            echo(f"deleted {what}" if consent.yes else f"would delete {what}")
            for text in absent:
                print_note(f"not there: {safe(text)}")
        # What is absent may be in the index, so it is deleted as well.
        if count and not found.done and consent.ask(f"delete {what}?", as_json=as_json):
            found = delete(dry_run=False)
            echo(f"deleted {what}")
    _note_rows(found)
    if as_json:
        print_json(
            {
                "namespace": name,
                "entry_count": count,
                "bytes": found.nbytes,
                "deleted": count if found.done else 0,
                "absent": absent,
                "dropped_row_count": found.dropped_rows,
                "dry_run": not found.done,
            }
        )
    if absent:
        raise typer.Exit(EXIT_WRONG)


def _require_key(corpus: Corpus, text: str, *, by_name: bool) -> None:
    if corpus.key_of(text, by_name=by_name) is not None:
        return
    if by_name:
        raise ConfigError(f"{text!r:.100} is no name of an entry; `s3ec ls` prints them")
    raise ConfigError(f"{text!r:.100} is an identifier under which nothing is stored")


def gc(
    source: SettingsSource,
    choice: NamespaceChoice,
    consent: Consent,
    older_than: Annotated[
        str | None,
        option("--older-than", "AGE", "What was stored so long ago: `90d`, `12h`, `2w`, `30min`."),
    ] = None,
    max_bytes: Annotated[
        str | None, option("--max-bytes", "SIZE", "The oldest until the rest fits, such as `2TiB`.")
    ] = None,
    adapter: Annotated[
        str | None, option("--adapter", "NAME", "Only entries of this LoRA adapter.")
    ] = None,
    made_by: MadeByOption = None,
    prices: Annotated[
        str | None,
        option(
            "--prices",
            "NAME",
            f"Whose storage it saves: {', '.join(STORES)}. Unset: by the endpoint.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries that are old, too many or badly made, by a listing of all objects.

    Rules that are given together narrow. Without --yes, nothing is deleted unless you agree at a
    terminal. An entry that is still needed is encoded and stored again. With --made-by the header
    is read of each entry of which the catalogue does not tell, after it was said how many that are.
    """
    age_s = None if older_than is None else duration_s(older_than, "older_than")
    most = None if max_bytes is None else size_bytes(max_bytes, "max_bytes")
    with source.corpus() as corpus:
        dollars_gb_month = _prices(prices, corpus).dollars_gb_month
        name = choice.within(corpus)

        def collect(*, dry_run: bool) -> Collection:
            with counting("listing objects" if dry_run else "deleting") as report:
                return corpus.gc(
                    name,
                    older_than_s=age_s,
                    max_bytes=most,
                    adapter=adapter,
                    made_by=made_by,
                    dry_run=dry_run,
                    headers=note_headers,
                    report=report,
                )

        def sum_of(found: Collection) -> str:
            month = found.nbytes / 1e9 * dollars_gb_month
            return (
                f"{many(found.objects, 'entry', 'entries')}, {human_bytes(found.nbytes)}, of "
                f"${month:,.2f} a month"
            )

        found = collect(dry_run=not consent.yes)
        if not as_json:
            echo(f"{'deleted' if found.done else 'would delete'} {sum_of(found)}")
        question = f"delete {sum_of(found)}?"
        if found.objects and not found.done and consent.ask(question, as_json=as_json):
            found = collect(dry_run=False)
            echo(f"deleted {sum_of(found)}")
    _note_rows(found)
    if most is not None and found.left_bytes > most:
        print_note(f"{human_bytes(found.left_bytes)} are left, since the other rules keep them")
    if as_json:
        print_json(
            {
                "namespace": name,
                "older_than_s": age_s,
                "max_bytes": most,
                "adapter": adapter,
                "made_by": made_by,
                "entry_count": found.objects,
                "bytes": found.nbytes,
                "left_count": found.left_objects,
                "left_bytes": found.left_bytes,
                "month_dollars": found.nbytes / 1e9 * dollars_gb_month,
                "deleted": found.objects if found.done else 0,
                "dropped_row_count": found.dropped_rows,
                "dry_run": not found.done,
            }
        )


def _note_rows(found: Collection | Deletion) -> None:
    if found.problem:
        print_note(f"rows of the catalogue are left: {safe(found.problem, limit=2000)}")


def _prices(name: str | None, corpus: Corpus) -> StorePreset:
    if name is None:
        from s3ec.doctor.advise import prices_of

        return prices_of(corpus.settings)
    if name not in STORES:
        raise ConfigError(
            f"`--prices` {name!r:.50} is none of {', '.join(STORES)}; take one of them",
            field="prices",
        )
    return STORES[name]


def ns_rm(
    source: SettingsSource,
    consent: Consent,
    namespace: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The namespace, in full.", autocompletion=complete_namespace
        ),
    ],
    idle: Annotated[
        str,
        option("--idle", "AGE", "Refuse where something was stored more recently; `0` takes all."),
    ] = "10min",
    as_json: JsonOption = False,
) -> None:
    """Delete a namespace: all entries, the index, the records, and namespace.json last.

    Without --yes, nothing is deleted unless you agree at a terminal. Stop the engines that write
    into it first. What was broken off goes on with the next call. Nodes keep their copies on disk:
    `s3ec tier evict --to 0 --namespace NAME` removes them there.
    """
    idle_s = 0.0 if idle.strip() == "0" else duration_s(idle, "idle")
    with source.corpus() as corpus:
        contents = _remove(corpus, namespace, idle_s, delete=False)
        if not as_json:
            _print_contents(namespace, contents)
        what = f"{many(contents.objects, 'object')}, {human_bytes(contents.nbytes)}"
        deleted = consent.ask(f"delete {what}?", as_json=as_json)
        if deleted:
            contents = _remove(corpus, namespace, idle_s, delete=True)
            what = f"{many(contents.objects, 'object')}, {human_bytes(contents.nbytes)}"
            if not as_json:
                echo(f"deleted {what}: {namespace} is gone")
    if as_json:
        print_json(
            {
                "namespace": namespace,
                "entry_count": contents.entries,
                "object_count": contents.objects,
                "bytes": contents.nbytes,
                "idle_s": contents.idle_s(time.time()),
                "deleted": contents.objects if deleted else 0,
                "dry_run": not deleted,
            }
        )


def _remove(corpus: Corpus, namespace: str, idle_s: float, *, delete: bool) -> Contents:
    """Count what the namespace holds, and delete it where ``delete`` says so."""
    with counting("deleting" if delete else "listing objects") as report:

        async def work(store: Store) -> Contents:
            from s3ec.identity import Layout, is_namespace_name
            from s3ec.index.delete import remove_namespace, survey
            from s3ec.namespaces import list_namespaces, require_ours

            if not is_namespace_name(namespace):
                raise ConfigError(
                    f"{namespace!r:.100} is no whole name of a namespace; `s3ec ns` prints them"
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

        return corpus.run(work)


def _print_contents(namespace: str, contents: Contents) -> None:
    pairs: list[tuple[str, Any]] = [
        ("namespace", namespace),
        ("entries", f"{contents.entries:,} ({human_bytes(contents.entry_nbytes)})"),
        ("in all", f"{many(contents.objects, 'object')} ({human_bytes(contents.nbytes)})"),
        ("last stored", f"{human_age(contents.idle_s(time.time()))} ago"),
    ]
    if contents.others:
        pairs.append(("others", f"{many(contents.others, 'object')} that are not s3ec's"))
    facts(pairs)

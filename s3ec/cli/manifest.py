# SPDX-License-Identifier: Apache-2.0
"""``s3ec manifest``: what the index in the bucket holds, whether that is true, making it anew."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from s3ec.cli.options import JsonOption, NamespaceChoice, SettingsSource, with_namespace
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    counting,
    echo,
    epilog,
    facts,
    human_age,
    human_bytes,
    many,
    print_json,
    print_note,
    progress,
    safe,
)

if TYPE_CHECKING:
    from s3ec.identity import Layout
    from s3ec.index.base_writer import BuildResult
    from s3ec.index.rebuild import Verified
    from s3ec.store.base import Store

_KINDS = ("missing", "extra", "differing")


def register(app: App) -> None:
    """Add ``manifest`` to the tree."""
    group = App(
        help="The index in the bucket: what it holds, whether that is true, making it anew.",
        no_args_is_help=True,
        epilog=epilog(
            ("s3ec manifest show", "how large is the index, and what waits for compaction?"),
            ("s3ec manifest verify", "does it hold what the bucket holds?"),
            ("s3ec manifest rebuild", "make it from what the bucket holds"),
        ),
    )
    group.command(
        "show",
        ("s3ec manifest show --bucket embeddings", "of the only namespace"),
        ("s3ec manifest show --json | jq .deltas.waiting_count", "for machines"),
    )(with_namespace(show))
    group.command(
        "compact",
        ("s3ec manifest compact", "merge what writers announced, delete what is superseded"),
        ("s3ec manifest compact --namespace google-gemma --json", "one model's, for machines"),
    )(with_namespace(compact))
    group.command(
        "verify",
        ("s3ec manifest verify", "exit status 1 where it differs from the bucket"),
        ("s3ec manifest verify --json | jq '.missing[].object'", "for machines"),
    )(with_namespace(verify))
    group.command(
        "rebuild",
        ("s3ec manifest rebuild", "after objects were deleted or copied by other means"),
        ("s3ec manifest rebuild --json", "for machines"),
    )(with_namespace(rebuild))
    app.add_typer(group, name="manifest")


def show(source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False) -> None:
    """Show the newest base, what waits to be merged into the next, and what is left over.

    Reads one small object and lists the index; downloads none of it.
    """

    async def look(store: Store, layout: Layout) -> dict[str, Any]:
        from s3ec.index.manifest import newest_head, take_snapshot

        snapshot = await take_snapshot(store, layout)
        head = await newest_head(store, layout, snapshot)
        merged = head.merged if head else frozenset()
        waiting = [info for ulid, info in snapshot.deltas.items() if ulid not in merged]
        used = (head.version, head.run) if head else None
        old = [info for run, infos in snapshot.runs.items() if run != used for info in infos]
        base = None
        if head is not None:
            base = {
                "version": head.version,
                "run": head.run,
                "age_s": time.time() - head.created_s,
                "entry_count": head.entries,
                "shard_count": len(head.shards),
                "bytes": head.nbytes,
                "bloom_bytes": head.bloom_nbytes,
            }
        return {
            "namespace": layout.namespace,
            "base": base,
            "deltas": {
                "waiting_count": len(waiting),
                "waiting_bytes": sum(info.nbytes for info in waiting),
                "merged_count": len(snapshot.deltas) - len(waiting),
            },
            "superseded": {"object_count": len(old), "bytes": sum(info.nbytes for info in old)},
        }

    with progress("looking"), source.corpus() as corpus:
        document = corpus.within(look, choice.within(corpus))
    if as_json:
        print_json(document)
    else:
        _print_show(document)


def _print_show(document: dict[str, Any]) -> None:
    base, deltas, superseded = (document[name] for name in ("base", "deltas", "superseded"))
    rows: list[tuple[str, Any]] = [("namespace", document["namespace"])]
    if base is None:
        rows.append(("base", "none yet: readers list the objects"))
    else:
        age = human_age(base["age_s"])
        size = f"{human_bytes(base['bytes'])} in {many(base['shard_count'], 'shard')}"
        rows += [
            ("base", f"version {base['version']}, {age} old"),
            ("entries", base["entry_count"]),
            ("size", size),
            ("filters", human_bytes(base["bloom_bytes"])),
        ]
    waiting = f"{many(deltas['waiting_count'], 'delta')}, {human_bytes(deltas['waiting_bytes'])}"
    others = f"{many(superseded['object_count'], 'object')}, {human_bytes(superseded['bytes'])}"
    rows += [
        ("to be merged", waiting),
        ("merged", f"{many(deltas['merged_count'], 'delta')}, kept for slow readers"),
        ("other bases", others),
    ]
    facts(rows)


def compact(source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False) -> None:
    """Merge all deltas into a new base, and delete what has been superseded for an hour.

    Writers do this by themselves when deltas pile up. Safe at any time, also while they do.
    """
    with counting("compacting") as report, source.corpus() as corpus:

        async def work(store: Store, layout: Layout) -> BuildResult | None:
            from s3ec.index.base_writer import BuildOptions
            from s3ec.index.compaction import compact as make

            return await make(store, layout, BuildOptions(report=report))

        made = corpus.within(work, choice.within(corpus), compacts=True)
    if made is None:
        if as_json:
            print_json({"beaten": True})
        print_note("another compaction was faster; nothing was changed")
        return
    _report(made, as_json=as_json)


def rebuild(source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False) -> None:
    """Make a new base from a listing of all objects, 1000 per request, 16 requests at a time.

    For after objects were deleted, or put there, by other means than s3ec. Safe at any time,
    also while engines write and read.
    """
    with counting("listing objects") as report, source.corpus() as corpus:

        async def work(store: Store, layout: Layout) -> BuildResult:
            from s3ec.index.base_writer import BuildOptions
            from s3ec.index.rebuild import rebuild as make

            return await make(store, layout, BuildOptions(report=report))

        made = corpus.within(work, choice.within(corpus), compacts=True)
    _report(made, as_json=as_json)


def _report(made: BuildResult, *, as_json: bool) -> None:
    head = made.head
    if as_json:
        print_json(
            {
                "beaten": False,
                "version": head.version,
                "entry_count": head.entries,
                "shard_count": len(head.shards),
                "bytes": head.nbytes,
                "bloom_bytes": head.bloom_nbytes,
                "merged": made.merged,
                "deleted": made.removed,
                "waiting_count": len(made.waiting),
                "corrupt": dict(made.corrupt),
            }
        )
    else:
        echo(
            f"base {head.version}: {many(head.entries, 'entry', 'entries')} in "
            f"{human_bytes(head.nbytes)}; {many(made.merged, 'delta')} merged, "
            f"{many(made.removed, 'old object')} deleted"
        )
        for problem in made.corrupt.values():
            print_note(f"left out: {safe(problem)}")
        if made.waiting:
            print_note(
                f"{many(len(made.waiting), 'delta')} with deletions left for later, since what was "
                "left out may hold what they delete; `s3ec manifest rebuild` goes on without it"
            )
    if made.corrupt:
        raise typer.Exit(EXIT_WRONG)


def verify(source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False) -> None:
    """Compare the index with a listing of all objects; changes nothing.

    Exit status 1 where objects are missing in it, where it holds what is not there, or where
    sizes differ. What is stored or deleted meanwhile is not complained about.
    """
    with counting("reading the index") as report, source.corpus() as corpus:
        namespace = choice.within(corpus)
        found = corpus.verify(namespace, catalog=False, report=report)
    if as_json:
        print_json({"namespace": namespace, "ok": found.agrees, **index_document(found)})
    else:
        print_verified(found)
    if not found.agrees:
        raise typer.Exit(EXIT_WRONG)


def index_document(found: Verified) -> dict[str, Any]:
    """How index and listing compare, for ``--json``."""
    return {
        "version": found.version,
        "entry_count": found.entries,
        "object_count": found.objects,
        "missing_count": found.missing,
        "extra_count": found.extra,
        "differing_count": found.differing,
        "unannounced_count": found.unannounced,
        **{kind: _examples(found, kind) for kind in _KINDS},
        "corrupt": found.corrupt,
    }


def _examples(found: Verified, kind: str) -> list[dict[str, str | None]]:
    """Some of one kind, each with the names that ``s3ec stat`` finds; null without an object."""
    from s3ec.corpus import CorpusEntry

    rows: list[dict[str, str | None]] = []
    for digest in found.examples.get(kind, ()):
        name = found.objects_of.get(digest)
        namespace, _, below = (name or "").partition("/objects/")
        label = CorpusEntry(namespace, below, 0, 0.0).label if name else None
        rows.append({"label": label, "object": name, "digest": digest})
    return rows


def print_verified(found: Verified) -> None:
    """How index and listing compare, for people."""
    facts(
        [
            ("entries", f"{found.entries} in the index, base {found.version}"),
            ("objects", f"{found.objects} in the bucket"),
            ("missing", f"{found.missing} objects are not in the index"),
            ("extra", f"{found.extra} entries have no object"),
            ("differing", f"{found.differing} have another size"),
            ("unannounced", f"{found.unannounced} of the last minute are not in the index yet"),
        ]
    )
    for kind in _KINDS:
        for row in _examples(found, kind):
            named = row["label"] or f"(no object; digest {row['digest']})"
            echo(f"  {kind:<9}  {safe(named)}")
    for problem in found.corrupt.values():
        print_note(f"unusable: {safe(problem)}")
    if not found.index_agrees:
        print_note("`s3ec manifest rebuild` makes the index say what the bucket holds")

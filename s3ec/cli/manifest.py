# SPDX-License-Identifier: Apache-2.0
"""``s3ec manifest``: what the index in the bucket holds, and rebuilding it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from s3ec.cli.options import JsonOption, NamespaceChoice, SettingsSource, with_namespace
from s3ec.cli.output import App, counting, epilog, print_note, safe, show, timestamp

if TYPE_CHECKING:
    from s3ec.identity import Layout
    from s3ec.index.maker import Made, Verified
    from s3ec.store.base import Store

# What stands behind the counts of a comparison.
ABOUT = {
    "entry_count": "in the index",
    "object_count": "in the bucket",
    "missing_count": "objects are not in the index",
    "extra_count": "entries of the index have no object",
    "unannounced_count": "young objects are not in the index yet",
}


def register(app: App) -> None:
    """Add ``manifest`` to the tree."""
    group = App(
        help="The index in the bucket: show and rebuild it. `s3ec verify` compares it with the "
        "bucket.",
        no_args_is_help=True,
        epilog=epilog(
            ("s3ec manifest show", "how large is the index, and when was the bucket listed?"),
            ("s3ec manifest rebuild", "make it from what the bucket holds"),
        ),
    )
    group.command(
        "show",
        ("s3ec manifest show s3://embeddings", "of the only namespace"),
        ("s3ec manifest show --json | jq .deltas.delta_count", "for machines"),
    )(with_namespace(show_index))
    group.command(
        "rebuild",
        ("s3ec manifest rebuild", "after objects were deleted or copied by other means"),
        ("s3ec manifest rebuild --json", "for machines"),
    )(with_namespace(rebuild))
    app.add_typer(group, name="manifest")


def show_index(
    source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False
) -> None:
    """Show the newest snapshot and the later deltas.

    Lists the index; downloads none of it.
    """

    async def look(store: Store, layout: Layout) -> dict[str, Any]:
        from s3ec.index.deltas import list_deltas
        from s3ec.index.maker import newest_rows
        from s3ec.index.names import NEVER, SnapshotName, list_snapshots, time_s

        snapshots = await list_snapshots(store, layout)
        newest = snapshots[0][0] if snapshots else SnapshotName()
        deltas = await list_deltas(store, layout, newest)
        since = [info for ulid, info in deltas.items() if ulid >= newest.ulid]
        now_s = time.time()
        snapshot = None
        if snapshots:
            made_s = time_s(newest.ulid)
            listed_s = None if newest.listed == NEVER else time_s(newest.listed)
            snapshot = {
                "name": str(newest),
                "entry_count": await newest_rows(store, layout),
                "bytes": snapshots[0][1].nbytes,
                "age_s": now_s - made_s,
                "stored_at": timestamp(made_s),
                "listed_age_s": None if listed_s is None else now_s - listed_s,
                "listed_at": timestamp(listed_s),
            }
        return {
            "namespace": layout.namespace,
            "snapshot": snapshot,
            "older_count": max(0, len(snapshots) - 1),
            "deltas": {"delta_count": len(since), "bytes": sum(info.nbytes for info in since)},
        }

    with counting("looking"), source.corpus() as corpus:
        document = corpus.within(look, choice.within(corpus))
    show(document, as_json=as_json, about={"older_count": "snapshots"})
    if document["snapshot"] is None:
        print_note("no snapshot yet; `s3ec manifest rebuild` makes one")


def rebuild(source: SettingsSource, choice: NamespaceChoice, as_json: JsonOption = False) -> None:
    """Make a snapshot from a listing of all objects, 1000 per request, 16 requests at a time.

    Use it after other tools than s3ec have deleted or stored objects. It is safe at any time, also
    while engines write and read.
    """
    with counting("listing objects") as report, source.corpus() as corpus:

        async def work(store: Store, layout: Layout) -> Made:
            from s3ec.index.maker import rebuild as make

            return await make(store, layout, report=report)

        namespace = choice.within(corpus)
        made = corpus.within(work, namespace, write=True)
    document = {
        "namespace": namespace,
        "snapshot_name": str(made.name),
        "entry_count": made.rows,
        "deleted": made.removed,
    }
    show(document, as_json=as_json, about={"deleted": "older objects of the index"})


def index_document(found: Verified) -> dict[str, Any]:
    """How index and listing compare."""
    from s3ec.index.names import SnapshotName

    return {
        "snapshot_name": None if found.snapshot == SnapshotName() else str(found.snapshot),
        "entry_count": found.entries,
        "object_count": found.objects,
        "missing_count": found.missing,
        "extra_count": found.extra,
        "unannounced_count": found.unannounced,
        "refused": found.refused,
    }


def note_index(found: Verified) -> None:
    """Name what of the index cannot be used, and what mends it."""
    for name, problem in found.refused.items():
        print_note(f"unusable: {safe(name)}: {safe(problem)}")
    if not found.index_agrees:
        print_note("`s3ec manifest rebuild` makes the index match the bucket")

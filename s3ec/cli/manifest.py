# SPDX-License-Identifier: Apache-2.0
"""``s3ec manifest rebuild``: make the index in the bucket from what the bucket holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3ec.cli.options import JsonOption, NamespaceChoice, SettingsSource, with_namespace
from s3ec.cli.output import App, counting, epilog, show

if TYPE_CHECKING:
    from s3ec.identity import Layout
    from s3ec.index.maker import Made
    from s3ec.store.base import Store


def register(app: App) -> None:
    """Add ``manifest`` to the tree."""
    group = App(
        help="The index in the bucket. `s3ec verify` compares it with the bucket.",
        no_args_is_help=True,
        epilog=epilog(("s3ec manifest rebuild", "make it from what the bucket holds")),
    )
    group.command(
        "rebuild",
        ("s3ec manifest rebuild", "after objects were deleted or copied by other means"),
        ("s3ec manifest rebuild --json", "for machines"),
    )(with_namespace(rebuild))
    app.add_typer(group, name="manifest")


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

# SPDX-License-Identifier: Apache-2.0
"""``s3ec verify`` and ``manifest rebuild``: compare index, objects, catalogue; repair them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    CORPUS,
    Consent,
    JsonOption,
    SettingsSource,
    option,
    with_options,
)
from s3ec.cli.output import (
    EXIT_WRONG,
    RESUMES,
    UNCHANGED,
    App,
    counting,
    echo,
    epilog,
    many,
    print_json,
    print_note,
    safe,
    show,
    show_some,
)
from s3ec.errors import ConfigError
from s3ec.namespaces import require_ours

if TYPE_CHECKING:
    from s3ec.corpus.audit import Audit, Repair
    from s3ec.corpus.deep_check import BadObject
    from s3ec.identity import Layout
    from s3ec.index.maker import Made
    from s3ec.store.base import Store


commands = App()
group = App(
    help="The index in the bucket. `s3ec verify` compares it with the bucket.",
    no_args_is_help=True,
    epilog=epilog(("s3ec manifest rebuild", "make it from what the bucket holds")),
)
commands.add_typer(group, name="manifest")


@commands.command(
    "verify",
    ("s3ec verify", "index, listing and catalogue; exit status 1 where they differ"),
    ("s3ec verify --deep --state ./audit", "every byte; killed, it goes on there"),
    ("s3ec verify --deep --state ./audit --repair --yes", "and mend what it found"),
    ("s3ec verify --deep --json | jq '.deep.corrupt[].object'", "for machines"),
)
@with_options(CORPUS, CONSENT)
def verify(
    source: SettingsSource,
    consent: Consent,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every object and check every byte.")
    ] = False,
    state: Annotated[
        str | None,
        option(
            "--state",
            "FOLDER",
            "Folder for the progress of --deep; the next run with it resumes there.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair the faults: delete corrupt objects, so that producers store them again, "
            "rebuild a wrong index, drop rows of the catalogue without an entry. With a complete "
            "--state it does not read the objects again.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that index, objects and catalogue agree; with --deep also check every byte.

    Exits with 1 if it finds a fault and does not repair it. With --repair and without --yes, it
    changes nothing unless you agree at a terminal. It never deletes objects that it could not read.
    It ignores entries that are stored or deleted during the check.
    """
    if state is not None and not deep:
        raise ConfigError("`--state` needs `--deep`; give it too", field="state")
    if consent.yes and not repair:
        raise ConfigError("`--yes` needs `--repair`; give it too", field="yes")
    with source.corpus() as corpus:
        namespace = source.choose(corpus)
        if repair:  # before all of it is read
            corpus.run(lambda store: require_ours(store, namespace))
        resume = RESUMES if state else UNCHANGED
        if deep and not state:
            resume = "with --state FOLDER the next one goes on there"
        with counting("reading the index", resume=resume) as report:
            found = corpus.verify(
                namespace, deep=deep, state=state, resume_complete=repair, report=report
            )
        document = {"namespace": namespace, "ok": found.agrees, **_document(found)}
        if not as_json:
            _print(found, document)
        done: Repair | None = None
        wanted = _repairable(found) if repair else ""
        if wanted and consent.ask(f"{wanted}?", as_json=as_json):
            with counting("mending", resume=RESUMES) as report:
                done = corpus.repair(found, namespace, report=report)
    document["ok"] = found.agrees or (done is not None and _is_mended(found, done))
    if repair:
        document["repaired"] = None if done is None else _repair_document(done)
        document["dry_run"] = done is None
    if as_json:
        print_json(document)
    elif done is not None:
        show(document["repaired"], as_json=False)
    elif wanted and consent.dry_run:
        print_note(f"would {wanted}")
    if done is not None and done.spared:
        print_note(f"{many(done.spared, 'object')} not deleted: not bad, gone, or unreadable")
    if not document["ok"]:
        raise typer.Exit(EXIT_WRONG)


def _repairable(found: Audit) -> str:
    """What a repair would do; empty if it can do nothing."""
    wanted = []
    if found.deep is not None and found.deep.bad:
        wanted.append(f"delete {many(len(found.deep.bad), 'corrupt object')}")
    if not found.index.index_agrees:
        wanted.append("rebuild the index")
    if found.catalog is not None and found.catalog.gone:
        wanted.append(f"drop {many(found.catalog.gone, 'row')} of the catalogue")
    return ", ".join(wanted)


def _is_mended(found: Audit, done: Repair) -> bool:
    """True if no fault is left."""
    deep, catalog = found.deep, found.catalog
    if deep is not None and (deep.unread or deep.corrupt > len(deep.bad) or done.spared):
        return False
    return catalog is None or not catalog.problem


# The words after the counts.
_ABOUT = {
    "entry_count": "in the index",
    "object_count": "in the bucket",
    "missing_count": "objects are not in the index",
    "extra_count": "entries of the index have no object",
    "unannounced_count": "young objects are not in the index yet",
    "catalog: gone": "rows of entries that have no object",
    "catalog: uncatalogued": "entries without a row",
    "deep: unread": "could not be read; they may be good",
    "deep: unstable": "came bad once, and good then",
    "deep: foreign": "below objects/ have no name of s3ec's",
    "deep: newer": "of a newer format, left alone",
}


def _print(found: Audit, document: dict[str, Any]) -> None:
    show(document, as_json=False, hide={"refused"}, about=_ABOUT)
    for name, problem in found.index.refused.items():
        print_note(f"unusable: {safe(name)}: {safe(problem)}")
    if not found.index.index_agrees:
        print_note("`s3ec manifest rebuild` makes the index match the bucket")
    catalog, deep = found.catalog, found.deep
    if catalog is not None and catalog.problem:
        print_note(f"the catalogue cannot be read: {safe(catalog.problem, limit=2000)}")
    for name in catalog.examples if catalog is not None else ():
        echo(f"gone      {safe(name)}")
    if deep is not None:
        for kind, some in (("corrupt", deep.bad), ("unread", deep.unreadable)):
            lines = [f"{kind:<8}  {safe(bad.name)}  {safe(bad.message)}" for bad in some]
            show_some(lines, say=echo)


def _document(found: Audit) -> dict[str, Any]:
    from s3ec.index.names import SnapshotName

    index, catalog, deep = found.index, found.catalog, found.deep
    document: dict[str, Any] = {
        "snapshot_name": None if index.snapshot == SnapshotName() else str(index.snapshot),
        "entry_count": index.entries,
        "object_count": index.objects,
        "missing_count": index.missing,
        "extra_count": index.extra,
        "unannounced_count": index.unannounced,
        "refused": index.refused,
    }
    if catalog is not None:
        document["catalog"] = {
            "row_count": catalog.rows,
            "gone_count": catalog.gone,
            "uncatalogued_count": catalog.unlisted,
            "documents": catalog.examples,
            "problem": catalog.problem or None,
        }
    if deep is not None:
        document["deep"] = {
            "object_count": deep.objects,
            "bytes": deep.nbytes,
            "resumed_count": deep.resumed,
            "gone_count": deep.gone,
            "foreign_count": deep.foreign,
            "newer_count": deep.newer,
            "unstable_count": deep.unstable,
            "corrupt_count": deep.corrupt,
            "unread_count": deep.unread,
            "reasons": dict(deep.reasons),
            "corrupt": [_bad(one) for one in deep.bad],
            "unread": [_bad(one) for one in deep.unreadable],
        }
    return document


def _bad(one: BadObject) -> dict[str, str]:
    return {"object": one.name, "reason": one.reason, "message": one.message}


def _repair_document(done: Repair) -> dict[str, Any]:
    return {
        "deleted": done.deleted,
        "spared_count": done.spared,
        "snapshot_name": done.snapshot or None,
        "dropped_row_count": done.dropped,
    }


@group.command(
    "rebuild",
    ("s3ec manifest rebuild", "after objects were deleted or copied by other means"),
    ("s3ec manifest rebuild --json", "for machines"),
)
@with_options(CORPUS)
def rebuild_index(source: SettingsSource, as_json: JsonOption = False) -> None:
    """Make a snapshot from a listing of all objects, 1000 per request, 16 requests at a time.

    Use it after other tools than s3ec have deleted or stored objects. It is safe at any time, also
    while engines write and read.
    """
    with counting("listing objects") as report, source.corpus() as corpus:

        async def work(store: Store, layout: Layout) -> Made:
            from s3ec.index.maker import rebuild as make

            return await make(store, layout, report=report)

        namespace = source.choose(corpus)
        made = corpus.within(work, namespace, write=True)
    document = {
        "namespace": namespace,
        "snapshot_name": str(made.name),
        "entry_count": made.rows,
        "deleted": made.removed,
    }
    show(document, as_json=as_json, about={"deleted": "older objects of the index"})

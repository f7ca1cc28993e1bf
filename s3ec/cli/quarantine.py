# SPDX-License-Identifier: Apache-2.0
"""``s3ec quarantine``: objects of the bucket that this node found bad, and forgetting them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    Consent,
    JsonOption,
    SettingsSource,
    with_cache_settings,
)
from s3ec.cli.output import EXIT_WRONG, App, epilog, human_age, many, print_json, print_note, safe
from s3ec.errors import ConfigError, TierError

if TYPE_CHECKING:
    from s3ec.tier.bad_objects import BadObject
    from s3ec.tier.files import Folders


def register(app: typer.Typer) -> None:
    """Add ``quarantine`` to the tree."""
    group = App(
        help="Objects of the bucket that came bad twice: this node asks for none of them.",
        no_args_is_help=True,
        epilog=epilog(
            ("s3ec quarantine ls", "which, why, and for how long?"),
            ("s3ec quarantine clear --all --yes", "ask for all of them again"),
        ),
    )
    group.command(
        "ls",
        epilog=epilog(
            ("s3ec quarantine ls", "of all namespaces and buckets of this node"),
            ("s3ec quarantine ls --json | jq '.objects[].object'", "for machines"),
        ),
    )(with_cache_settings(ls))
    group.command(
        "clear",
        epilog=epilog(
            ("s3ec quarantine clear 3f9a01bc...e2 --yes", "one image's, by its identifier or name"),
            ("s3ec quarantine clear --all --yes --json", "everything, for machines"),
        ),
    )(with_cache_settings(clear, CONSENT))
    app.add_typer(group, name="quarantine")


def ls(source: SettingsSource, as_json: JsonOption = False) -> None:
    """List the objects that this node does not ask the bucket for, and why.

    Needs no bucket and no network. An entry heals by itself: the next encode of its image is
    stored beside the bad object, under a revised name, which all readers find.
    """
    now_s = time.time()
    notes = [note for note in _notes(_folders(source)) if now_s < note.until_s]
    if as_json:
        print_json({"objects": [_document(note, now_s) for note in notes]})
        return
    for note in notes:
        state = f"revision {note.revision} is good" if note.good else "not stored again yet"
        typer.echo(
            f"{safe(note.name)}  {note.namespace}  {note.reason}  "
            f"since {human_age(now_s - note.since_s)}, for {human_age(note.until_s - now_s)} more  "
            f"{state}"
        )
    print_note(f"{many(len(notes), 'object')} of the bucket in quarantine on this node")


def clear(
    source: SettingsSource,
    consent: Consent,
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Identifier, or a name as `ls` prints it."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget all of them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Have this node ask for quarantined objects again, such as after they were replaced.

    Without --yes, nothing is forgotten unless you agree at a terminal. The objects themselves are
    not touched. Engines that run notice at once. Exit status 1 where the key was not in quarantine.
    """
    from s3ec.tier.bad_objects import remove_note

    if (key is None) is not everything:
        raise ConfigError("name one KEY, or give --all")
    folders = _folders(source)
    wanted = None if key is None else _names(key, source)
    meant = [note for note in _notes(folders) if wanted is None or note.name in wanted]
    now_s = time.time()
    listed = [_document(note, now_s) for note in meant]
    if not as_json:
        for note in meant:
            typer.echo(f"{safe(note.name)}  {note.namespace}  {note.reason}")
    question = f"ask for {many(len(meant), 'object')} again?"
    do = bool(meant) and consent.ask(question, as_json=as_json)
    try:
        cleared = sum(remove_note(folders, note) for note in meant) if do else 0
    except OSError as exc:
        raise TierError(f"cannot write {folders.bad_objects}: {exc.strerror}") from exc
    if as_json:
        print_json({"objects": listed, "cleared": cleared, "dry_run": not do})
    else:
        typer.echo(f"cleared {many(cleared, 'object')}")
    if wanted is not None and not meant:
        raise typer.Exit(EXIT_WRONG)


def _folders(source: SettingsSource) -> Folders:
    from s3ec.tier.files import Folders

    return Folders(Path(source.load(need_bucket=False).settings.cache_dir).resolve())


def _notes(folders: Folders) -> list[BadObject]:
    from s3ec.tier.bad_objects import read_notes

    try:
        return sorted(read_notes(folders), key=lambda note: (note.namespace, note.since_s))
    except FileNotFoundError:  # no engine has run here, or none has met a bad object
        return []
    except OSError as exc:
        raise TierError(f"cannot read {folders.bad_objects}: {exc.strerror}") from exc


def _names(text: str, source: SettingsSource) -> set[str]:
    """The object names that fit an identifier or a name."""
    from s3ec.identity import entry_name, make_key
    from s3ec.tenant import Tenant

    tenant = Tenant.read(source.load(need_bucket=False).settings.tenant_key)
    key, entry = make_key(text, tenant), entry_name(text.rpartition("/objects/")[2])
    return {name for name in (key and key.name, entry and entry[0]) if name}


def _document(note: BadObject, now_s: float) -> dict[str, Any]:
    from s3ec.identity import Layout

    return {
        "object": f"{Layout(note.namespace).objects}{note.name}",
        "namespace": note.namespace,
        "destination": note.destination,
        "reason": note.reason,
        "age_s": now_s - note.since_s,
        "remaining_s": note.until_s - now_s,
        "next_revision": note.revision,
        "next_revision_good": note.good,
    }

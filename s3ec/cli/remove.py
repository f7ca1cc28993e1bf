# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm`` and ``s3ec gc``: delete entries from the bucket, and tell every reader."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.help import EXIT_WRONG, epilog
from s3ec.cli.options import JsonOption, NamespaceOption, Source, with_settings
from s3ec.cli.output import human_age, human_bytes, print_json, print_note, progress, safe
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.identity import Key, Layout
    from s3ec.index.deletion import Older
    from s3ec.store.base import Store
    from s3ec.tenant import Tenant

_AGE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(min|h|d|w)")
_UNITS_S = {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def register(app: typer.Typer) -> None:
    """Add the two commands to the tree."""
    app.command(
        "rm",
        epilog=epilog(
            ("s3ec rm page-12-of-report", "by the identifier that a client chose, or a hash"),
            ("s3ec rm --name x-3f9a01bc...", "by a name that `s3ec ls` prints, all 64 digits"),
        ),
    )(with_settings(rm))
    app.command(
        "gc",
        epilog=epilog(
            ("s3ec gc --older-than 90d", "how much is older than that? deletes nothing"),
            ("s3ec gc --older-than 90d --yes", "delete it"),
        ),
    )(with_settings(gc))


def rm(
    source: Source,
    identifiers: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Identifiers, in full.")
    ],
    by_name: Annotated[
        bool,
        typer.Option(
            "--name", help="The arguments are names as `s3ec ls` prints them, or object names."
        ),
    ] = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries from the bucket, and tell every reader by the index.

    A node that has a copy on its disk serves it until it is evicted. Exit status 1 where one was
    not there; the others are deleted all the same.
    """
    from s3ec.cli.corpus_view import with_manifest
    from s3ec.tenant import Tenant

    settings = source.load().settings
    tenant = Tenant.read(settings.tenant_key)
    keys = [_key_of_name(text) if by_name else _key_of(text, tenant) for text in identifiers]

    async def work(store: Store, layout: Layout) -> tuple[str, list[bool]]:
        from s3ec.index.deletion import deleting, object_names
        from s3ec.index.parallel import in_parallel

        async def is_there(key: Key) -> bool:
            return bool(await object_names(store, layout, key))

        there = await in_parallel(keys, is_there)
        # Also those that are not there: the index may hold them.
        async with deleting(store, layout) as deleter:
            await deleter.delete(keys)
        return layout.namespace, there

    with progress("deleting"):
        name, there = with_manifest(settings, namespace, work, write=True)
    absent = [text for text, was in zip(identifiers, there, strict=True) if not was]
    if as_json:
        print_json({"namespace": name, "deleted": sum(there), "absent": absent})
    else:
        typer.echo(f"deleted {sum(there)} entries from {name}")
        for text in absent:
            print_note(f"not there: {safe(text)}")
    if absent:
        raise typer.Exit(EXIT_WRONG)


def _key_of(identifier: str, tenant: Tenant | None) -> Key:
    from s3ec.identity import make_key

    key = make_key(identifier, tenant)
    if key is None:
        raise ConfigError(f"{identifier!r:.100} is an identifier under which nothing is stored")
    return key


def _key_of_name(text: str) -> Key:
    """The key of an object name below ``objects/``, or of a label that ``s3ec ls`` prints."""
    from s3ec.identity import OBJECT_SUFFIX, Key, digest_of_name, entry_name

    name = text
    if not text.endswith(OBJECT_SUFFIX):
        lora, _, stem = text.rpartition(":")
        folder = f"{lora}/" if lora else ""
        fan_out = stem.removeprefix("x-").removeprefix("t-")[:2]
        name = f"{folder}{fan_out}/{stem}{OBJECT_SUFFIX}"
    found = entry_name(name)
    if found is None:
        raise ConfigError(f"{text!r:.100} is no name of an entry; `s3ec ls` prints them")
    return Key("", found[0], digest_of_name(found[0]))


def gc(
    source: Source,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Such as `90d`, `12h`, `2w`, `30min`."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only count.")] = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries that were stored long ago, by a listing of all objects.

    Without --yes nothing is deleted. How often an entry is used is not known to the bucket: an
    entry that is still needed is encoded and stored again.
    """
    age_s = _age_s(older_than)
    from s3ec.cli.corpus_view import with_manifest

    async def work(store: Store, layout: Layout) -> tuple[str, Older]:
        from s3ec.index.cleaning import server_time
        from s3ec.index.deletion import count_older, delete_older

        now_s = time.time()
        if not yes:
            return layout.namespace, await count_older(store, layout, now_s - age_s)
        # A clock that is ahead must not make entries old.
        before_s = min(now_s, await server_time(store)) - age_s
        return layout.namespace, await delete_older(store, layout, before_s)

    with progress("deleting" if yes else "listing all objects"):
        name, older = with_manifest(source.load().settings, namespace, work, write=yes)
    if as_json:
        print_json(
            {
                "namespace": name,
                "older_than_s": age_s,
                "entries": older.entries,
                "bytes": older.nbytes,
                "deleted": yes,
            }
        )
        return
    what = f"{older.entries} entries, {human_bytes(older.nbytes)}, older than {human_age(age_s)}"
    typer.echo(f"deleted {what}" if yes else f"would delete {what}")
    if not yes and older.entries:
        print_note("nothing was deleted; --yes does it")


def _age_s(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"`--older-than` {text!r:.50} is no age; write it as `90d`, `12h`, `2w` or `30min`",
            field="older_than",
        )
    return float(match[1]) * _UNITS_S[match[2]]

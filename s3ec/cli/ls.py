# SPDX-License-Identifier: Apache-2.0
"""``s3ec ls``: the entries of a namespace, chosen, sorted, and summed up."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.errors import NotFoundError
from s3ec.cli.options import JsonOption, NamespaceChoice, Source, duration_s, size_bytes
from s3ec.cli.output import (
    human_age,
    human_bytes,
    many,
    print_json,
    print_json_line,
    print_note,
    progress,
)
from s3ec.errors import ConfigError, CorruptEntryError

if TYPE_CHECKING:
    from s3ec.cli.corpus_view import Entry
    from s3ec.identity import Layout
    from s3ec.settings import Settings
    from s3ec.store.base import Store

_LIMIT = 100
# How many more than those to show are kept before the last ones are dropped.
_SORTED_AT_A_TIME = 10_000
# The first digits of a hash name a folder of the bucket.
_HASH_BEGIN = re.compile(r"(?:[tx]-)?([0-9a-f]{2})[0-9a-f]*")
_FAN_OUT = re.compile(r"[0-9a-f]{2}/")


class Sort(enum.StrEnum):
    """What to sort by."""

    NAME = "name"
    BYTES = "bytes"
    AGE = "age"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to list; None takes all.

    Attributes:
        begin: What the label starts with.
        adapter: The folder of one adapter's entries.
        sizes: Least and most bytes.
        ages_s: Least and most seconds since the last change; an unknown age does not fit.
        modality: As the entry's own header says.
    """

    begin: str | None = None
    adapter: str | None = None
    sizes: tuple[int | None, int | None] = (None, None)
    ages_s: tuple[float | None, float | None] = (None, None)
    modality: str | None = None

    def fits(self, entry: Entry, now_s: float) -> bool:
        """By what the listing says; the modality is not in it."""
        adapter, _, _ = entry.label.rpartition(":")
        if self.begin is not None and not entry.label.startswith(self.begin):
            return False
        if self.adapter is not None and adapter != self.adapter:
            return False
        age_s = entry.age_s(now_s)
        if self.ages_s != (None, None) and age_s is None:
            return False
        return _within(entry.nbytes, self.sizes) and _within(age_s or 0.0, self.ages_s)


def _within(value: float, bounds: tuple[float | None, float | None]) -> bool:
    least, most = bounds
    return (least is None or value >= least) and (most is None or value <= most)


@dataclass(slots=True)
class Found:
    """What a listing comes to; keeps no more entries than are shown.

    Attributes:
        sort: What decides which entries are the first ones; None for the order they come in.
        limit: How many are shown, 0 for all.
        keeps: Whether any are kept to be shown at the end.
        entries: Those, each with its modality where that is known; more of them until ``finish``.
        count: All that fit.
        nbytes: Their size together.
        is_cut: Whether the listing ended early, so that ``count`` and ``nbytes`` are not of all.
        unreadable: Entries whose header could not be read.
    """

    sort: Sort | None
    reverse: bool
    limit: int
    keeps: bool
    entries: list[tuple[Entry, str | None]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0
    is_cut: bool = False
    unreadable: int = 0

    def add(self, entry: Entry, modality: str | None) -> None:
        """Count one that fits."""
        self.count += 1
        self.nbytes += entry.nbytes
        if self.keeps:
            self.entries.append((entry, modality))
            if self.limit and len(self.entries) > 2 * self.limit + _SORTED_AT_A_TIME:
                self.finish()

    def finish(self) -> None:
        """Keep what is shown, in its order."""
        if self.sort is not None:
            key = _KEYS[self.sort]
            self.entries.sort(key=lambda kept: key(kept[0]), reverse=self.reverse)
        if self.limit:
            del self.entries[self.limit :]


# The youngest comes first, and what has no known age last.
_KEYS: dict[Sort, Callable[[Entry], tuple[float, str]]] = {
    Sort.NAME: lambda entry: (0, entry.label),
    Sort.BYTES: lambda entry: (entry.nbytes, entry.label),
    Sort.AGE: lambda entry: (-entry.modified_s, entry.label),
}


def ls(
    source: Source,
    choice: NamespaceChoice,
    sort: Annotated[
        Sort | None,
        typer.Option("--sort", help="Sort by this. \\[name; with --ndjson unsorted]"),
    ] = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", "-r", help="The largest, the oldest or the last first.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help="How many to show; 0: all. [100; with --ndjson all]"),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="End when --limit is reached: unsorted, without totals."),
    ] = False,
    starts_with: Annotated[
        str | None,
        typer.Option("--starts-with", metavar="TEXT", help="Only entries whose label begins so."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option("--adapter", metavar="NAME", help="Only entries of this LoRA adapter."),
    ] = None,
    modality: Annotated[
        str | None,
        typer.Option(
            "--modality",
            metavar="NAME",
            help="Only such as `image`; reads the header of each entry, one request each.",
        ),
    ] = None,
    min_size: Annotated[
        str | None, typer.Option("--min-size", metavar="SIZE", help="Such as `10MiB`.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help="Such as `10MiB`.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Such as `90d` or `12h`.")
    ] = None,
    newer_than: Annotated[
        str | None, typer.Option("--newer-than", metavar="AGE", help="Such as `90d` or `12h`.")
    ] = None,
    as_json: JsonOption = False,
    as_lines: Annotated[
        bool, typer.Option("--ndjson", help="Print one JSON object a line, as entries are found.")
    ] = False,
) -> None:
    """List entries of a namespace, and count all that fit.

    Lists the whole namespace, 1000 entries per request and 16 requests at a time, unless --quick
    is given or the filters name a folder.
    """
    if as_json and as_lines:
        raise ConfigError("`--json` and `--ndjson` do not go together; leave one out")
    if quick and (sort or reverse):
        raise ConfigError("`--quick` does not sort; leave it or `--sort` out", field="quick")
    settings = source.load().settings
    wanted = Filter(
        starts_with,
        _adapter_folder(adapter, settings),
        (_size(min_size, "min_size"), _size(max_size, "max_size")),
        (_age(older_than, "older_than"), _age(newer_than, "newer_than")),
        modality,
    )
    streams = as_lines and not (sort or reverse)
    if limit is None:
        limit = 0 if as_lines else _LIMIT
    order = None if streams or quick else sort or Sort.NAME
    found = Found(order, reverse, limit, keeps=not streams)
    now_s = time.time()

    def take(entry: Entry, kind: str | None) -> None:
        if streams and (not limit or found.count < limit):
            print_json_line(_row(entry, kind, now_s))
        found.add(entry, kind)

    async def look(store: Store, layout: Layout) -> str:
        from s3ec.index.listing import REQUESTS_AT_A_TIME, in_parallel

        folders = await _folders(store, layout, wanted)

        async def read(folder: str) -> None:
            if found.is_cut:
                return
            async for entry, kind in _fitting(store, layout, folder, wanted, now_s, found):
                if quick and limit and found.count == limit:
                    found.is_cut = True
                    return
                take(entry, kind)

        await in_parallel(folders, read, width=1 if quick else REQUESTS_AT_A_TIME)
        return layout.namespace

    from s3ec.cli.corpus_view import with_manifest

    # A spinner would take lines on stdout for its own.
    with nullcontext() if streams else progress("listing"):
        name = with_manifest(settings, choice, look)
    found.finish()
    _print(name, found, now_s, as_json=as_json, as_lines=as_lines)


def _size(text: str | None, name: str) -> int | None:
    return None if text is None else size_bytes(text, name)


def _age(text: str | None, name: str) -> float | None:
    return None if text is None else duration_s(text, name)


def _adapter_folder(adapter: str | None, settings: Settings) -> str | None:
    """The folder of an adapter, by its name or as a label spells it."""
    from s3ec.cli.corpus_view import HASHED_ADAPTER
    from s3ec.identity import make_key
    from s3ec.tenant import Tenant

    if adapter is None or HASHED_ADAPTER.fullmatch(adapter):
        return adapter
    key = make_key(f"{adapter}:{'0' * 64}", Tenant.read(settings.tenant_key))
    if key is None:
        raise ConfigError("`--adapter` is no name under which anything is stored", field="adapter")
    return key.name.partition("/")[0]


async def _folders(store: Store, layout: Layout, wanted: Filter) -> list[str]:
    """Beginnings of names below ``objects/`` that hold all that is wanted, to list side by side."""
    begin = wanted.begin or ""
    adapter = wanted.adapter
    if adapter is None and ":" in begin:
        adapter = begin.partition(":")[0]
    above = "" if adapter is None else f"{adapter}/"
    match = _HASH_BEGIN.fullmatch(begin if adapter is None else begin.removeprefix(f"{adapter}:"))
    narrow = [] if match is None else [f"{above}{match[1]}/{match[0]}"]
    if narrow and above:
        return narrow
    folders = await store.list_folders(layout.objects + above)
    if not narrow:
        return [above + folder for folder in folders]
    # What looks like a hash may be the beginning of an adapter's name.
    return narrow + [f for f in folders if f.startswith(begin) and not _FAN_OUT.fullmatch(f)]


async def _fitting(
    store: Store, layout: Layout, folder: str, wanted: Filter, now_s: float, found: Found
) -> AsyncIterator[tuple[Entry, str | None]]:
    """The entries below a folder that are wanted, and their modality where that is asked for."""
    from s3ec.cli.corpus_view import entries, read_header

    async for entry in entries(store, layout.namespace, folder):
        if not wanted.fits(entry, now_s):
            continue
        kind = None
        if wanted.modality is not None:
            try:
                kind = (await read_header(store, entry)).modality
            except NotFoundError:  # deleted since it was listed
                continue
            except CorruptEntryError:
                found.unreadable += 1
                continue
            if kind != wanted.modality:
                continue
        yield entry, kind


def _row(entry: Entry, modality: str | None, now_s: float) -> dict[str, Any]:
    return {**entry.document(now_s), **({} if modality is None else {"modality": modality})}


def _print(name: str, found: Found, now_s: float, *, as_json: bool, as_lines: bool) -> None:
    rows = [_row(entry, kind, now_s) for entry, kind in found.entries]
    if as_json:
        print_json(
            {
                "namespace": name,
                "entries": rows,
                "entry_count": None if found.is_cut else found.count,
                "bytes": None if found.is_cut else found.nbytes,
                "more": found.is_cut or len(rows) < found.count,
            }
        )
    elif as_lines:
        for row in rows:
            print_json_line(row)
    else:
        for entry, _ in found.entries:
            age = human_age(entry.age_s(now_s))
            typer.echo(f"{human_bytes(entry.nbytes):>10}  {age:>8}  {entry.label}")
    if found.unreadable:
        left_out = many(found.unreadable, "entry", "entries")
        print_note(f"{left_out} left out: no header can be read there")
    if found.is_cut:
        print_note(f"{many(found.limit, 'entry', 'entries')} of {name}; there are more")
        return
    page = "" if as_lines or len(rows) == found.count else f"; {len(rows)} shown (--limit 0: all)"
    counted = many(found.count, "entry", "entries")
    print_note(f"{counted}, {human_bytes(found.nbytes)}, in {name}{page}")

# SPDX-License-Identifier: Apache-2.0
"""``s3ec ls``: the entries of a namespace, chosen, sorted, and summed up."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    JsonOption,
    MadeByOption,
    NamespaceChoice,
    SettingsSource,
    duration_s,
    option,
    size_bytes,
)
from s3ec.cli.output import (
    echo,
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
    from s3ec.corpus import CorpusEntry
    from s3ec.corpus.makers import MadeBy
    from s3ec.identity import Layout
    from s3ec.store.base import Store

# ``modality`` and ``made_by`` of an entry, where one of them was asked for.
Facts = Mapping[str, str]
_LIMIT = 100
# Entries kept beyond those to show, before they are sorted and the last ones dropped.
_SORTED_AT_A_TIME = 10_000


class Sort(enum.StrEnum):
    """What to sort by."""

    NAME = "name"
    BYTES = "bytes"
    AGE = "age"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to list; None takes all.

    Attributes:
        sizes: Least and most bytes.
        ages_s: Least and most seconds since the last change; an unknown age does not fit.
        modality: As the entry's own header says.
        made_by: Likewise.
    """

    sizes: tuple[int | None, int | None] = (None, None)
    ages_s: tuple[float | None, float | None] = (None, None)
    modality: str | None = None
    made_by: MadeBy | None = None

    def fits(self, entry: CorpusEntry, now_s: float) -> bool:
        """Whether the listing of an entry fits; modality and maker are not in a listing."""
        age_s = entry.age_s(now_s)
        if self.ages_s != (None, None) and age_s is None:
            return False
        return _within(entry.nbytes, self.sizes) and _within(age_s or 0.0, self.ages_s)


def _within(value: float, bounds: tuple[float | None, float | None]) -> bool:
    least, most = bounds
    return (least is None or value >= least) and (most is None or value <= most)


@dataclass(slots=True)
class Found:
    """The result of a listing. Keeps little more than the entries that are shown.

    Attributes:
        sort: What decides which entries are the first ones; None for the order they come in.
        limit: How many are shown, 0 for all.
        keeps: Whether any are kept to be shown at the end.
        entries: Those, each with what is known beside the listing; more of them until ``finish``.
        count: All that fit.
        nbytes: Their size together.
        is_cut: Whether the listing ended early, so that ``count`` and ``nbytes`` are not of all.
        unreadable: Entries whose header could not be read.
    """

    sort: Sort | None
    reverse: bool
    limit: int
    keeps: bool
    entries: list[tuple[CorpusEntry, Facts]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0
    is_cut: bool = False
    unreadable: int = 0

    def add(self, entry: CorpusEntry, facts: Facts) -> None:
        """Count one that fits."""
        self.count += 1
        self.nbytes += entry.nbytes
        if self.keeps:
            self.entries.append((entry, facts))
            if self.limit and len(self.entries) > 2 * self.limit + _SORTED_AT_A_TIME:
                self.finish()

    def finish(self) -> None:
        """Sort, and drop what is not shown."""
        if self.sort is not None:
            key = _KEYS[self.sort]
            self.entries.sort(key=lambda kept: key(kept[0]), reverse=self.reverse)
        if self.limit:
            del self.entries[self.limit :]


# The youngest comes first, and what has no known age last.
_KEYS: dict[Sort, Callable[[CorpusEntry], tuple[float, str]]] = {
    Sort.NAME: lambda entry: (0, entry.label),
    Sort.BYTES: lambda entry: (entry.nbytes, entry.label),
    Sort.AGE: lambda entry: (-entry.modified_s, entry.label),
}


def ls(
    source: SettingsSource,
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
        str | None, option("--starts-with", "TEXT", "Only entries whose label begins so.")
    ] = None,
    adapter: Annotated[
        str | None, option("--adapter", "NAME", "Only entries of this LoRA adapter.")
    ] = None,
    modality: Annotated[
        str | None,
        option(
            "--modality",
            "NAME",
            "Only such as `image`; reads the header of each entry, one request each.",
        ),
    ] = None,
    made_by: MadeByOption = None,
    min_size: Annotated[str | None, option("--min-size", "SIZE", "Such as `10MiB`.")] = None,
    max_size: Annotated[str | None, option("--max-size", "SIZE", "Such as `10MiB`.")] = None,
    older_than: Annotated[
        str | None, option("--older-than", "AGE", "Such as `90d` or `12h`.")
    ] = None,
    newer_than: Annotated[
        str | None, option("--newer-than", "AGE", "Such as `90d` or `12h`.")
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
    streams = as_lines and not (sort or reverse)
    if limit is None:
        limit = 0 if as_lines else _LIMIT
    order = None if streams or quick else sort or Sort.NAME
    found = Found(order, reverse, limit, keeps=not streams)
    now_s = time.time()

    def take(entry: CorpusEntry, facts: Facts) -> None:
        if streams and (not limit or found.count < limit):
            print_json_line(_row(entry, facts, now_s))
        found.add(entry, facts)

    async def look(store: Store, layout: Layout) -> None:
        from s3ec.corpus import scan
        from s3ec.store.concurrency import REQUESTS_AT_A_TIME

        async def listed() -> AsyncGenerator[list[CorpusEntry], None]:
            width = 1 if quick else REQUESTS_AT_A_TIME
            begin = starts_with or ""
            batches = scan(store, layout.namespace, starts_with=begin, adapter=folder, width=width)
            async with aclosing(batches):
                async for batch in batches:
                    yield [entry for entry in batch if wanted.fits(entry, now_s)]

        async with aclosing(listed()) as fitting:
            async for batch in fitting:
                for some in _groups(batch, 1 if quick else len(batch)):
                    facts = await _facts_of(store, some, wanted, found)
                    for entry, known in zip(some, facts, strict=True):
                        if known is None:
                            continue
                        if quick and limit and found.count == limit:
                            found.is_cut = True
                            return
                        take(entry, known)

    from s3ec.corpus.entries import adapter_folder
    from s3ec.corpus.makers import MadeBy

    # A spinner would take lines on stdout for its own.
    with nullcontext() if streams else progress("listing"), source.corpus() as corpus:
        folder = adapter_folder(adapter, corpus.tenant)
        wanted = Filter(
            (_size(min_size, "min_size"), _size(max_size, "max_size")),
            (_age(older_than, "older_than"), _age(newer_than, "newer_than")),
            modality,
            None if made_by is None else MadeBy.parse(made_by),
        )
        name = choice.within(corpus)
        corpus.within(look, name)
    found.finish()
    _print(name, found, now_s, as_json=as_json, as_lines=as_lines)


def _size(text: str | None, name: str) -> int | None:
    return None if text is None else size_bytes(text, name)


def _age(text: str | None, name: str) -> float | None:
    return None if text is None else duration_s(text, name)


def _groups(entries: Sequence[CorpusEntry], size: int) -> Iterable[Sequence[CorpusEntry]]:
    return (entries[at : at + size] for at in range(0, len(entries), max(size, 1)))


async def _facts_of(
    store: Store, entries: Sequence[CorpusEntry], wanted: Filter, found: Found
) -> Sequence[Facts | None]:
    """What was asked for of each entry; None where it does not fit, is gone or is unreadable."""
    from s3ec.corpus import read_header
    from s3ec.store.concurrency import in_parallel

    if wanted.modality is None and wanted.made_by is None:
        return [{}] * len(entries)

    async def look(entry: CorpusEntry) -> Facts | None:
        try:
            read = await read_header(store, entry)
        except CorruptEntryError:
            found.unreadable += 1
            return None
        if read is None or read.header is None:
            return None
        facts = {"modality": read.header.modality, "made_by": read.header.maker.made_by}
        fits = wanted.modality in (None, facts["modality"])
        fits = fits and (wanted.made_by is None or wanted.made_by.fits(facts["made_by"]))
        return facts if fits else None

    return await in_parallel(entries, look)


def entry_document(entry: CorpusEntry, now_s: float) -> dict[str, Any]:
    """What the listing says of an entry, for ``--json``."""
    return {
        "label": entry.label,
        "identifier": entry.identifier,
        "digest": entry.digest,
        "bytes": entry.nbytes,
        "age_s": entry.age_s(now_s),
        "object": entry.object_name,
    }


def _row(entry: CorpusEntry, facts: Facts, now_s: float) -> dict[str, Any]:
    return {**entry_document(entry, now_s), **facts}


def _print(name: str, found: Found, now_s: float, *, as_json: bool, as_lines: bool) -> None:
    rows = [_row(entry, facts, now_s) for entry, facts in found.entries]
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
        for entry, facts in found.entries:
            age = human_age(entry.age_s(now_s))
            maker = f"  {facts['made_by']}" if facts.get("made_by") else ""
            echo(f"{human_bytes(entry.nbytes):>10}  {age:>8}  {entry.label}{maker}")
    if found.unreadable:
        left_out = many(found.unreadable, "entry", "entries")
        print_note(f"{left_out} left out: no header can be read there")
    if found.is_cut:
        print_note(f"{many(found.limit, 'entry', 'entries')} of {name}; there are more")
        return
    page = "" if as_lines or len(rows) == found.count else f"; {len(rows)} shown (--limit 0: all)"
    counted = many(found.count, "entry", "entries")
    print_note(f"{counted}, {human_bytes(found.nbytes)}, in {name}{page}")

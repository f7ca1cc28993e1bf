# SPDX-License-Identifier: Apache-2.0
"""``s3ec ls``: the entries of a namespace, sorted and summed up."""

from __future__ import annotations

import enum
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.options import JsonOption, NamespaceChoice, SettingsSource
from s3ec.cli.output import counting, note_page, print_json_line, show_page, timestamp
from s3ec.counters import unreported
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.corpus import Corpus, CorpusEntry

_LIMIT = 100
_COLUMNS = ("label", "bytes", "age_s", "stored_at")


@dataclass(frozen=True, slots=True)
class EntryRow:
    """What the listing says of an entry; the fields are keys of docs/commands.md."""

    label: str
    identifier: str | None
    digest: str
    bytes: int
    age_s: float | None
    stored_at: str | None
    object: str

    @classmethod
    def of(cls, entry: CorpusEntry, now_s: float) -> EntryRow:
        """Make one of a listed entry."""
        return cls(
            entry.label,
            entry.identifier,
            entry.digest,
            entry.nbytes,
            entry.age_s(now_s),
            timestamp(entry.modified_s),
            entry.object_name,
        )


class Sort(enum.StrEnum):
    """What to sort by."""

    NAME = "name"
    BYTES = "bytes"
    AGE = "age"


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
        typer.Option("--sort", help="Sort key. \\[name; with --ndjson unsorted]"),
    ] = None,
    reverse: Annotated[
        bool,
        typer.Option(
            "--reverse", "-r", help="Reverse the order: the largest, the oldest or the last first."
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=0, help="Number of entries to show; 0: all. [100; with --ndjson all]"
        ),
    ] = None,
    as_json: JsonOption = False,
    as_lines: Annotated[
        bool,
        typer.Option("--ndjson", help="Print one JSON object for each line, as entries are found."),
    ] = False,
) -> None:
    """List entries of a namespace, and count all of them.

    Lists the whole namespace, 1000 entries per request and 16 requests at a time. `s3ec ls
    --ndjson | head` ends when `head` does.
    """
    if as_json and as_lines:
        raise ConfigError("`--json` and `--ndjson` do not go together; leave one out")
    streams = as_lines and not (sort or reverse)
    if limit is None:
        limit = 0 if as_lines else _LIMIT
    order = _KEYS[sort or Sort.NAME]
    count = nbytes = 0
    now_s = time.time()
    # Progress would take lines on stdout for its own.
    shown = nullcontext(unreported) if streams else counting("listing")
    with shown as report, source.corpus() as corpus:
        name = choice.within(corpus)
        total = None if streams else _indexed(corpus, name)

        def counted() -> Iterator[CorpusEntry]:
            nonlocal count, nbytes
            for entry in corpus.list(name):
                count += 1
                nbytes += entry.nbytes
                # What was stored after the snapshot makes it no total.
                report("listing", count, None if total is None or count > total else total)
                yield entry

        entries: list[CorpusEntry] = []
        if streams:
            for entry in counted():
                if not limit or count <= limit:
                    print_json_line(EntryRow.of(entry, now_s))
        elif limit:  # keeps no more than these
            first = heapq.nlargest if reverse else heapq.nsmallest
            entries = first(limit, counted(), key=order)
        else:
            entries = sorted(counted(), key=order, reverse=reverse)
    sums = name, count, nbytes
    rows = (EntryRow.of(entry, now_s) for entry in entries)  # one at a time: there may be millions
    if as_lines:
        for row in rows:
            print_json_line(row)
        note_page(count, sums)
    else:
        show_page(rows, len(entries), sums, as_json=as_json, keys=_COLUMNS)


def _indexed(corpus: Corpus, namespace: str) -> int | None:
    """About how many entries there are: those of the newest snapshot; None without one."""
    from s3ec.index.maker import newest_rows

    return corpus.within(newest_rows, namespace)

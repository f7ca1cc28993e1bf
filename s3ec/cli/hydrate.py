# SPDX-License-Identifier: Apache-2.0
"""``s3ec hydrate``: fill this node's tier before traffic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CACHE,
    JsonOption,
    NamespaceChoice,
    SettingsSource,
    lines_of,
    option,
    size_bytes,
    with_namespace,
)
from s3ec.cli.output import (
    EXIT_PARTIAL,
    App,
    counting,
    facts,
    human_bytes,
    many,
    print_json,
    print_note,
    safe,
)
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.corpus import Corpus
    from s3ec.corpus.hydrate import Hydration, Wanted

# As many problems are named for people; --json names all.
_SHOWN = 20
_STOPPED = {
    "full": "the tier is full, and nothing that is in it goes for them",
    "max_bytes": "`--max-bytes` is reached",
}


def register(app: App) -> None:
    """Add ``hydrate`` to the tree."""
    app.command(
        "hydrate",
        ("s3ec hydrate --model gemma-3 --rate-limit 200MB", "everything there is room for"),
        ("s3ec tier ls --names | s3ec hydrate --ids - --name", "what another node has used"),
    )(with_namespace(hydrate, CACHE))


def hydrate(
    source: SettingsSource,
    choice: NamespaceChoice,
    cache: dict[str, Any],
    ids: Annotated[
        str | None, option("--ids", "FILE", "Only these: a file with one identifier a line, or -.")
    ] = None,
    by_name: Annotated[
        bool,
        typer.Option(
            "--name", help="The lines are names as `s3ec ls` prints them, or object names."
        ),
    ] = False,
    where: Annotated[
        str | None, option("--where", "SQL", "Only the catalogue's rows of which this is true.")
    ] = None,
    top: Annotated[int | None, option("--top", "N", "No more than the first N.", min=1)] = None,
    rate_limit: Annotated[
        str | None, option("--rate-limit", "SIZE", "Bytes per second, such as `100MB`.")
    ] = None,
    max_bytes: Annotated[
        str | None, option("--max-bytes", "SIZE", "Bring no more than this.")
    ] = None,
    max_concurrency: Annotated[
        int, option("--max-concurrency", "N", "Objects asked for at a time.")
    ] = 16,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be brought.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring entries to this node's disk tier before engines ask for them, every byte checked.

    Everything in the namespace, or what --ids or --where name, the most wanted first.
    Nothing that is in the tier goes for what comes: where it is full, the rest is left out. What is
    there already costs no request, so a run that was broken off goes on. Engines may run meanwhile.

    Exit status 3 where anything that was wanted is not on this node afterwards.
    """
    from s3ec.corpus.hydrate import HydrateOptions

    if ids is not None and where is not None:
        raise ConfigError("`--ids` and `--where` say what is wanted; give one of them")
    options = HydrateOptions(
        max_concurrency=max_concurrency,
        rate_limit_bytes_per_s=_size(rate_limit, "rate_limit"),
        max_bytes=_size(max_bytes, "max_bytes"),
        dry_run=dry_run,
    )
    if top is not None and ids is None and where is None:
        raise ConfigError(
            "`--top` needs an order; give `--ids` or `--where`, or take `--max-bytes`",
            field="top",
        )
    if by_name and ids is None:
        raise ConfigError("`--name` is about the lines of `--ids`; name a file there", field="ids")
    given = None if ids is None else lines_of(ids)
    with source.with_options(cache).corpus() as corpus:
        name = choice.within(corpus)
        wanted = _wanted(corpus, name, given, where, top)
        with counting("hydrating", in_bytes=True) as report:
            found = corpus.hydrate(
                wanted, namespace=name, by_name=by_name, options=options, report=report
            )
    if as_json:
        print_json({**asdict(found), "wanted": found.wanted, "status": found.status})
    else:
        _print(found)
    if found.status != "complete":
        raise typer.Exit(EXIT_PARTIAL)


def _size(text: str | None, name: str) -> int | None:
    return None if text is None else size_bytes(text, name)


def _wanted(
    corpus: Corpus,
    namespace: str,
    ids: list[str] | None,
    where: str | None,
    top: int | None,
) -> list[str | Wanted] | None:
    """What the options name, the most wanted first; None for everything."""
    from s3ec.corpus.hydrate import of_catalog

    if where is not None:
        rows = corpus.catalog(namespace).rows(where)
        return list(islice(of_catalog(rows, corpus.tenant), top))
    return None if ids is None else list(ids[:top])


def _print(found: Hydration) -> None:
    done = "would fetch" if found.dry_run else "fetched"
    rate = found.fetched_bytes / found.seconds if found.seconds else 0.0
    pairs = [
        ("tier", found.folder),
        ("namespace", found.namespace),
        ("here already", many(found.here, "entry", "entries")),
        (done, f"{many(found.fetched, 'entry', 'entries')}, {human_bytes(found.fetched_bytes)}"),
    ]
    if not found.dry_run:
        pairs.append(("took", f"{found.seconds:.1f} s, {human_bytes(rate)} a second"))
    if found.left_out:
        left = many(found.left_out, "entry", "entries")
        pairs.append(("left out", f"{left}, {human_bytes(found.left_out_bytes)}"))
    if found.stopped:
        pairs.append(("because", _STOPPED.get(found.stopped, found.stopped)))
    pairs.append(("status", found.status))
    facts(pairs)
    _name("absent", found.absent)
    _name("damaged", (f"{label} ({why})" for label, why in found.damaged.items()))
    _name("not to be had", (f"{label} ({why})" for label, why in found.failed.items()))


def _name(problem: str, texts: Iterable[str]) -> None:
    texts = list(texts)
    for text in texts[:_SHOWN]:
        print_note(f"{problem}: {safe(text)}")
    if len(texts) > _SHOWN:
        print_note(f"{problem}: {len(texts) - _SHOWN:,} more; --json names all of them")

# SPDX-License-Identifier: Apache-2.0
"""``s3ec tier``: show, check and empty this node's disk tier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import (
    CONSENT,
    TIER,
    Consent,
    JsonOption,
    SettingsSource,
    is_for_subcommand,
    option,
    size_bytes,
    with_options,
)
from s3ec.cli.output import (
    EXIT_WRONG,
    App,
    counting,
    echo,
    epilog,
    human_bytes,
    many,
    note_page,
    print_json,
    print_note,
    safe,
    show,
    show_page,
    timestamp,
)
from s3ec.errors import AmbiguousError, ConfigError, NotFoundError, TierError

if TYPE_CHECKING:
    from s3ec.counters import Report
    from s3ec.settings import Settings
    from s3ec.tier.inspection import Freed, Inspection
    from s3ec.tier.scan import ScannedEntry, Sum

_LIMIT = 100

_NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAME",
        help="Only entries of this namespace, or of the one whose name begins so.",
    ),
]


commands = App()
group = App()
commands.add_typer(group, name="tier")


@group.callback(
    invoke_without_command=True,
    epilog=epilog(
        ("s3ec tier", "how full is this node's cache, and how fresh?"),
        ("s3ec tier check", "is every byte of it as it should be?"),
        ("s3ec tier evict --to 10GiB", "make it smaller now"),
    ),
)
@with_options(TIER)
def tier(source: SettingsSource, ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show the contents of this node's disk tier: size, ages, spool; or run a command on it.

    Needs no bucket and no network, and may run while engines use the folder.
    """
    if is_for_subcommand(ctx, source != SettingsSource(), as_json):
        return
    settings, inspection = _open(source)
    document = {"cache_dir": str(settings.cache_dir), "bytes": 0, "entry_count": 0}
    document |= {"budget_bytes": int(settings.cache_bytes), "namespaces": []}
    if inspection is not None:
        with counting("counting entries") as report:
            found = inspection.report(now_s=time.time(), report=report)
        scan = found.scan
        document |= {
            "bytes": scan.total_bytes,
            "disk_free_bytes": found.free_bytes,
            "min_free_bytes": int(settings.min_free_bytes),
            "entry_count": len(scan.entries),
            "entry_bytes": scan.entry_bytes,
            "evicted_open_bytes": found.open_nbytes,
            "held_bytes": scan.held_bytes,
            "spool": {"entry_count": len(scan.spooled), "bytes": scan.spooled_bytes},
            "index": {"index_file_count": scan.index_files, "bytes": scan.index_bytes},
            "ages": _rows("last_used", found.ages),
            "namespaces": _rows("namespace", found.namespaces),
        }
    if inspection is not None or as_json:
        show(document, as_json=as_json)


@group.command(
    "ls",
    ("s3ec tier ls", "what was used here last?"),
    ("s3ec tier ls --names | s3ec hydrate --ids -", "to bring them to another node"),
)
@with_options(TIER)
def ls(
    source: SettingsSource,
    namespace: _NamespaceOption = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=0,
            help="Number of entries to show; 0: all. [100; with --names all]",
        ),
    ] = None,
    names: Annotated[
        bool,
        typer.Option("--names", help="Print only names, for `s3ec hydrate --ids -`."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the entries of a namespace on this node, the most recently used first.

    An entry is used when a process saves it, fetches it, or loads it into an engine. Eviction takes
    the last one of the list first. Needs no bucket, and may run while engines use the folder.
    """
    if names and as_json:
        raise ConfigError("`--json` and `--names` do not go together; leave one out")
    from s3ec.corpus import CorpusEntry

    now_s = time.time()
    _, inspection = _open(source)
    name: str | None = None
    scanned: list[ScannedEntry] = []
    # A folder without namespaces belongs to a node on which nothing was stored yet.
    if inspection is not None and (namespace is not None or inspection.namespaces()):
        name = _choose(inspection, namespace)
        with counting("counting entries") as report:
            scanned = inspection.entries(name, now_s=now_s, report=report)
    if limit is None:
        limit = 0 if names else _LIMIT
    shown = [
        CorpusEntry(one.namespace, one.name, one.nbytes, one.mtime_ns / 1e9)
        for one in scanned[: limit or None]
    ]
    rows = [
        {
            "label": one.label,
            "bytes": one.nbytes,
            "unused_s": one.age_s(now_s),
            "used_at": timestamp(one.modified_s),
        }
        for one in shown
    ]
    sums = name, len(scanned), sum(one.nbytes for one in scanned)
    if names:
        if shown:
            echo("\n".join(one.label for one in shown))
        note_page(len(shown), sums)
    else:
        show_page(rows, len(rows), sums, as_json=as_json)


@group.command(
    "check",
    ("s3ec tier check", "audit the folder of this user's settings"),
    ("s3ec tier check --cache-dir /mnt/nvme/s3ec --json", "another one, for machines"),
)
@with_options(TIER)
def check(source: SettingsSource, as_json: JsonOption = False) -> None:
    """Audit the folder: names, owners, modes, and every byte of every entry.

    Changes nothing: engines delete bad entries when they find them, and fetch them again. The next
    start deletes the files of dead processes. Exits with 1 if it finds a fault.
    """
    from s3ec.tier.inspection import complaints_about

    settings, inspection = _open(source)
    complaints: list[str] = []
    if inspection is not None:
        with counting("reading entries", in_bytes=True) as report:
            complaints = complaints_about(inspection.folders, report=report)
    if as_json:
        document = {"ok": not complaints, "cache_dir": str(settings.cache_dir)}
        print_json({**document, "complaint_count": len(complaints), "complaints": complaints})
    else:
        if complaints:
            echo("\n".join(safe(complaint, limit=2000) for complaint in complaints))
        print_note(f"{many(len(complaints), 'complaint')} about {settings.cache_dir}")
    if complaints:
        raise typer.Exit(EXIT_WRONG)


@group.command(
    "evict",
    ("s3ec tier evict --to 10GiB --dry-run", "what would go?"),
    ("s3ec tier evict --to 0 --namespace google-gemma --yes", "one model's entries"),
)
@with_options(TIER, CONSENT)
def evict(
    source: SettingsSource,
    consent: Consent,
    to: Annotated[
        int,
        option(
            "--to",
            "SIZE",
            "Size to reach, such as `10GiB` or `0`: of the whole folder, or with --namespace of "
            "its entries.",
            parser=size_bytes,
        ),
    ],
    namespace: _NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the least recently used entries.

    Without --yes, it removes nothing unless you agree at a terminal. Entries that the bucket has
    not confirmed stay. Removed entries come back from the bucket when they are needed again.
    """
    from s3ec.tier.inspection import Freed
    from s3ec.tier.scan import Sum

    _, inspection = _open(source)
    chosen = _choose(inspection, namespace) if inspection and namespace is not None else None

    def evict_to(dry_run: bool, report: Report) -> Freed:
        if inspection is None:
            return Freed(Sum(), 0, 0)
        now_s = time.time()
        return inspection.evict_to(
            to, now_s=now_s, namespace=chosen, dry_run=dry_run, report=report
        )

    def told(freed: Freed) -> tuple[int, str]:
        gone = freed.gone
        entries = many(gone.entries, "entry", "entries")
        left = human_bytes(freed.after_bytes)
        return (
            gone.entries,
            f"{human_bytes(gone.nbytes)} ({gone.nbytes} bytes, {entries}); {left} left",
        )

    verbs = "free", "freed"
    freed, done = consent.carry_out(evict_to, told, as_json=as_json, verbs=verbs)
    reached = freed.after_bytes <= to
    if as_json:
        print_json(
            {
                "namespace": chosen,
                "entry_count": freed.gone.entries,
                "bytes": freed.gone.nbytes,
                "before_bytes": freed.before_bytes,
                "after_bytes": freed.after_bytes,
                "held_bytes": freed.kept_bytes,
                "reached": reached,
                "evicted": freed.gone.entries if done else 0,
                "dry_run": not done,
            }
        )
    elif not reached:
        print_note(f"{human_bytes(to)} is not reached: the rest waits for the bucket")


def _open(source: SettingsSource) -> tuple[Settings, Inspection | None]:
    """Settings and folder. If nothing has been stored yet, it prints a note and returns None."""
    from s3ec.tier.inspection import Inspection, NoTierError

    loaded = source.load(need_bucket=False)
    origin = loaded.origins["cache_dir"]
    try:
        return loaded.settings, Inspection.open(loaded.settings.cache_dir)
    except NoTierError:
        print_note(
            f"nothing here yet: no engine has stored anything in {loaded.settings.cache_dir} "
            f"(`cache_dir` is from {origin}; --cache-dir names another folder)"
        )
        return loaded.settings, None
    except TierError as exc:
        raise TierError(
            f"{exc} (`cache_dir` is from {origin}; --cache-dir names another folder)"
        ) from exc


def _choose(inspection: Inspection, begin: str | None) -> str:
    """The namespace with this name or beginning; without one, the only namespace."""
    names = inspection.namespaces()
    found = [begin] if begin in names else [name for name in names if name.startswith(begin or "")]
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"  {safe(name)}" for name in found or names) or "  (none)"
    if begin is None:
        problem = "say which one with `--namespace`"
    else:
        fits = f"{len(found)} namespaces" if found else "no namespace"
        problem = f"`--namespace` {begin!r:.100} fits {fits}"
    error = NotFoundError if names and not found else AmbiguousError
    raise error(f"{problem}; here are:\n{listed}")


def _rows(key: str, sums: dict[str, Sum]) -> list[dict[str, Any]]:
    return [
        {key: label, "entry_count": one.entries, "bytes": one.nbytes} for label, one in sums.items()
    ]

# SPDX-License-Identifier: Apache-2.0
"""``s3ec tier``: what this node's disk holds, whether it is sound, and making it smaller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.help import EXIT_WRONG, epilog
from s3ec.cli.options import JsonOption, Source, with_cache_settings
from s3ec.cli.output import (
    console,
    facts,
    human_bytes,
    print_json,
    print_note,
    progress,
    safe,
)
from s3ec.errors import ConfigError, TierError

if TYPE_CHECKING:
    from s3ec.settings import Settings
    from s3ec.tier.inspection import Inspection, Report, Sum


def register(app: typer.Typer) -> None:
    """Add ``tier`` to the tree."""
    group = typer.Typer()
    group.callback(
        invoke_without_command=True,
        epilog=epilog(
            ("s3ec tier", "how full is this node's cache, and how fresh?"),
            ("s3ec tier check", "is every byte of it as it should be?"),
            ("s3ec tier evict --to 10GiB", "make it smaller now"),
        ),
    )(with_cache_settings(tier))
    group.command(
        "check",
        epilog=epilog(
            ("s3ec tier check", "audit the folder of this user's settings"),
            ("s3ec tier check --cache-dir /mnt/nvme/s3ec --json", "another one, for machines"),
        ),
    )(with_cache_settings(check))
    group.command(
        "evict",
        epilog=epilog(
            ("s3ec tier evict --to 10GiB --dry-run", "what would go?"),
            ("s3ec tier evict --to 0 --namespace google-gemma", "one model's entries"),
        ),
    )(with_cache_settings(evict))
    app.add_typer(group, name="tier")


def tier(source: Source, ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show what this node's disk tier holds: size, ages, pins, spool; or run a command on it.

    Needs no bucket and no network, and may run while engines use the folder.
    """
    if ctx.invoked_subcommand is not None:
        if source != Source() or as_json:
            command = f"s3ec tier {ctx.invoked_subcommand}"
            raise ConfigError(f"write options after the command: `{command} ...`")
        return
    settings, inspection = _open(source)
    with progress("counting"):
        report = inspection.report(now_s=time.time())
    if as_json:
        print_json(_document(settings, inspection, report))
    else:
        _print_report(_document(settings, inspection, report))


def check(source: Source, as_json: JsonOption = False) -> None:
    """Audit the folder: names, owners, modes, and every byte of every entry.

    Nothing is changed. Exit status 1 where there is something to complain about.
    """
    from s3ec.tier.audit import audit

    _, inspection = _open(source)
    with progress("reading every entry"):
        complaints = audit(inspection.folders, now_s=time.time())
    if as_json:
        print_json({"cache_dir": str(inspection.folders.root), "complaints": complaints})
    else:
        for complaint in complaints:
            typer.echo(safe(complaint, limit=2000))
        print_note(f"{len(complaints)} complaints about {inspection.folders.root}")
    if complaints:
        raise typer.Exit(EXIT_WRONG)


def evict(
    source: Source,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="SIZE",
            help="Size to come down to, such as `10GiB` or `0`: of the whole folder, or with "
            "--namespace of its entries.",
        ),
    ],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NS",
            help="Only entries of this namespace, or of the one whose name begins so.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove entries, those never used first, then the least recently used ones.

    What an engine has pinned and what the bucket has not confirmed stays. Entries come back
    from the bucket when they are needed again.
    """
    target_bytes = _size(to)
    _, inspection = _open(source)
    chosen = None if namespace is None else _choose(inspection, namespace)
    with progress("evicting"):
        freed = inspection.evict_to(target_bytes, namespace=chosen, dry_run=dry_run)
    reached = freed.after_bytes <= target_bytes
    if as_json:
        print_json(
            {
                "freed_bytes": freed.gone.nbytes,
                "evicted": freed.gone.entries,
                "before_bytes": freed.before_bytes,
                "after_bytes": freed.after_bytes,
                "held_bytes": freed.kept_bytes,
                "reached": reached,
                "namespace": chosen,
                "dry_run": dry_run,
            }
        )
        return
    would = "would free" if dry_run else "freed"
    typer.echo(
        f"{would} {human_bytes(freed.gone.nbytes)} ({freed.gone.nbytes} bytes, "
        f"{freed.gone.entries} entries); {human_bytes(freed.after_bytes)} left"
    )
    if not reached:
        print_note(
            f"{human_bytes(target_bytes)} is not reached: the rest is pinned by engines, waits "
            "for the bucket, or is quarantined"
        )


def _open(source: Source) -> tuple[Settings, Inspection]:
    from s3ec.tier.inspection import Inspection

    loaded = source.load(need_bucket=False)
    try:
        return loaded.settings, Inspection.open(loaded.settings.cache_dir)
    except TierError as exc:
        origin = loaded.origins["cache_dir"]
        raise ConfigError(
            f"{exc} (`cache_dir` is from {origin}; --cache-dir names another folder)",
            field="cache_dir",
        ) from exc


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as exc:
        raise ConfigError(
            f"`--to` {text!r:.50} is no size; write it as `10GiB`, `500MB` or a number of bytes",
            field="to",
        ) from exc


def _choose(inspection: Inspection, begin: str) -> str:
    names = inspection.namespaces()
    found = [begin] if begin in names else [name for name in names if name.startswith(begin)]
    if len(found) == 1:
        return found[0]
    problem = f"fits {len(found)} namespaces" if found else "fits no namespace"
    listed = "\n".join(f"  {safe(name)}" for name in found or names) or "  (none)"
    raise ConfigError(
        f"`--namespace` {begin!r:.100} {problem}; here are:\n{listed}", field="namespace"
    )


def _document(settings: Settings, inspection: Inspection, report: Report) -> dict[str, Any]:
    def row(total: Sum) -> dict[str, int]:
        return {"entries": total.entries, "bytes": total.nbytes}

    usage = report.usage
    return {
        "cache_dir": str(inspection.folders.root),
        "bytes": usage.total_nbytes,
        "budget_bytes": int(settings.cache_bytes),
        "running_total_bytes": report.running_total_bytes,
        "disk_free_bytes": report.free_bytes,
        "min_free_bytes": int(settings.min_free_bytes),
        "entries": usage.entries,
        "entry_bytes": usage.nbytes,
        "never_used": {"entries": usage.unused_entries, "bytes": usage.unused_nbytes},
        "ages": {label: row(total) for label, total in report.ages.items()},
        "namespaces": {name: row(total) for name, total in report.namespaces.items()},
        "pins": {"bytes": usage.pinned_nbytes, "processes": report.pinning_processes},
        "spool": {"entries": report.spooled_files, "bytes": usage.spooled_nbytes},
        "held_bytes": usage.held_nbytes,
        "quarantine": {"entries": report.quarantined_files, "bytes": usage.quarantined_nbytes},
        "index": {"files": report.index_files, "bytes": usage.index_nbytes},
    }


def _print_report(document: dict[str, Any]) -> None:
    budget = document["budget_bytes"]
    share = f"{100 * document['bytes'] / budget:.0f}% of {human_bytes(budget)}"
    pins, spool, quarantine = document["pins"], document["spool"], document["quarantine"]
    index = document["index"]
    facts(
        [
            ("folder", document["cache_dir"]),
            ("size", f"{human_bytes(document['bytes'])} ({share})"),
            ("disk free", human_bytes(document["disk_free_bytes"])),
            ("entries", f"{document['entries']} ({human_bytes(document['entry_bytes'])})"),
            ("pinned", f"{human_bytes(pins['bytes'])} by {pins['processes']} processes"),
            ("spooled", f"{human_bytes(spool['bytes'])} in {spool['entries']} entries"),
            ("quarantined", f"{human_bytes(quarantine['bytes'])}, {quarantine['entries']} files"),
            ("index", f"{human_bytes(index['bytes'])} in {index['files']} files"),
        ]
    )
    _print_sums("last use", document["ages"])
    if document["namespaces"]:
        _print_sums("namespace", document["namespaces"])


def _print_sums(title: str, sums: dict[str, dict[str, int]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, overflow="fold")
    table.add_column("entries", justify="right")
    table.add_column("size", justify="right")
    for name, total in sums.items():
        table.add_row(Text(safe(name)), str(total["entries"]), human_bytes(total["bytes"]))
    out = console()
    out.print()
    out.print(table)

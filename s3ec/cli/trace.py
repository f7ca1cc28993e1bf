# SPDX-License-Identifier: Apache-2.0
"""``s3ec trace``: record what the engines of this node ask for, and say what is in a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from s3ec.cli.browse import check_target, save
from s3ec.cli.options import JsonOption, SettingsSource, with_cache_settings
from s3ec.cli.output import (
    App,
    console,
    epilog,
    facts,
    many,
    print_json,
    print_note,
    progress,
)
from s3ec.errors import ConfigError, NotFoundError, TierError

if TYPE_CHECKING:
    from s3ec.tier.trace_requests import TraceFolder, TraceRequest
    from s3ec.trace import Header, Summary

# Engines look for a request, and for its end, once a second; a disk may make them late.
ENGINE_TIMEOUT_S = 10.0
_POLL_S = 0.1
_LINES_AT_ONCE = 1000


def register(app: typer.Typer) -> None:
    """Add ``trace`` to the tree."""
    group = App()
    group.callback(
        invoke_without_command=True,
        epilog=epilog(
            ("s3ec trace --seconds 60 --out trace.jsonl", "what do this node's engines ask for?"),
            ("s3ec trace --names --seconds 600 --out hot.jsonl", "the same, for `s3ec hydrate`"),
            ("s3ec trace show trace.jsonl", "what is in it?"),
        ),
    )(with_cache_settings(trace))
    group.command(
        "show",
        epilog=epilog(
            ("s3ec trace show trace.jsonl", "items, accesses, where they were found, skew"),
            ("s3ec trace show trace.jsonl --json", "the same for machines"),
        ),
    )(show)
    app.add_typer(group, name="trace")


def trace(
    source: SettingsSource,
    ctx: typer.Context,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            help="How long to record, up to a day. Ctrl-C ends it sooner and keeps what there is. "
            "[60]",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to save; a folder, or a file."),
    ] = None,
    names: Annotated[
        bool,
        typer.Option(
            "--names",
            help="Beside the hashes say what the objects are called, for `s3ec hydrate --trace`. "
            "Such a trace says which pictures were asked for.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Record what the engines of this node ask their encoder caches for; or show a trace.

    Engines need no restart and no setting. They answer to whoever may write to their `cache_dir`.
    Requests and pictures are hashed with a secret that nobody keeps.
    """
    given = source != SettingsSource() or seconds is not None or out is not None
    if ctx.invoked_subcommand is not None:
        if given or names or force or as_json:
            command = f"s3ec trace {ctx.invoked_subcommand}"
            raise ConfigError(f"write options after the command: `{command} ...`")
        return
    from s3ec.tier.trace_requests import TraceRequest

    if out is None:
        raise ConfigError("nowhere to save it; name a file with `--out FILE`", field="out")
    seconds = _checked(60.0 if seconds is None else seconds)
    path = check_target(out, "trace.jsonl", force=force)
    folder, root = _folder_of(source)
    try:
        request = TraceRequest.new(time.time(), ENGINE_TIMEOUT_S + seconds, with_names=names)
        _record(folder, root, request, seconds, lambda: save(path, _merged(folder), force=force))
    except OSError as exc:
        raise TierError(f"cannot record in {root}: {exc.strerror}") from exc
    _tell(path, as_json=as_json)


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A trace.")],
    as_json: JsonOption = False,
) -> None:
    """Say what is in a trace: items, accesses, where they were found, and how skewed they are."""
    _tell(Path(file).expanduser(), as_json=as_json)


def _checked(seconds: float) -> float:
    from s3ec.tier.trace_requests import LONGEST_S

    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(
            f"`--seconds` {seconds:g} is out of range; take 1 to {LONGEST_S:.0f}", field="seconds"
        )
    return seconds


def _folder_of(source: SettingsSource) -> tuple[TraceFolder, Path]:
    from s3ec.tier.inspection import Inspection
    from s3ec.tier.trace_requests import TraceFolder

    loaded = source.load(need_bucket=False)
    root = loaded.settings.cache_dir
    try:
        return TraceFolder(Inspection.open(root).folders), root
    except TierError as exc:
        origin = loaded.origins["cache_dir"]
        raise ConfigError(
            f"{exc} (`cache_dir` is from {origin}; --cache-dir names another folder)",
            field="cache_dir",
        ) from exc


def _record(
    folder: TraceFolder,
    root: Path,
    request: TraceRequest,
    seconds: float,
    keep: Callable[[], None],
) -> None:
    """Have engines record for so long.

    Args:
        root: For messages.
        request: What they are asked for.
        seconds: From the answer of the first engine on.
        keep: Called when they have ended; what they recorded is removed after it.

    Raises:
        ConfigError: Another command is at it.
        NotFoundError: No engine has answered.
        TierError: The disk refused.
    """
    with folder.locked() as alone:
        if not alone:
            raise ConfigError(
                f"another `s3ec trace` records in {root}; wait for its end", field="cache_dir"
            )
        try:
            folder.ask(request)
            if not _wait(lambda: bool(folder.recorded())):
                raise NotFoundError(
                    f"no engine has answered: none runs whose `cache_dir` is {root}, or it is "
                    "older than this command; start one, or name another folder with --cache-dir"
                )
            with suppress(KeyboardInterrupt), progress(f"recording for {seconds:g} s"):
                time.sleep(seconds)
            folder.withdraw()
            if not _wait(lambda: not folder.is_being_written()):
                print_note("an engine has not ended in time; its last accesses may be missing")
            keep()
        finally:
            folder.clear()


def _wait(is_so: Callable[[], bool]) -> bool:
    """Wait for what engines do within about a second; False where they did not."""
    until_s = time.monotonic() + ENGINE_TIMEOUT_S
    while not is_so():
        if time.monotonic() >= until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _merged(folder: TraceFolder) -> Iterator[bytes]:
    """What all engines have recorded, some lines at a time."""
    from s3ec import trace as traces

    # One that was killed at once may have written nothing.
    lines = traces.merge([path for path in folder.recorded() if path.stat().st_size])
    while batch := list(islice(lines, _LINES_AT_ONCE)):
        yield "".join(f"{line}\n" for line in batch).encode()


# -- what is in it -----------------------------------------------------------------------------


def _tell(path: Path, *, as_json: bool) -> None:
    from s3ec import trace as traces

    try:
        header = traces.read_header(path)
        summary = traces.summarize(traces.events(path))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", field="file") from exc
    if as_json:
        print_json({"file": str(path), **asdict(header), **asdict(summary)})
    else:
        _print(path, header, summary)


def _print(path: Path, header: Header, found: Summary) -> None:
    from rich.table import Table

    began = datetime.fromtimestamp(header.began_s, UTC)
    models = {engine.model or engine.namespace or "?" for engine in header.engines}
    rows = [
        ("file", path),
        ("began", f"{began:%Y-%m-%d %H:%M:%S} UTC"),
        ("engines", f"{len(header.engines)} ({', '.join(sorted(models))})"),
        ("accesses", f"{found.accesses:,} in {found.seconds:.1f} s"),
        ("requests", f"{found.requests:,}, put off for {found.waited_s:.1f} s in all"),
        ("items", f"{found.items:,} ({found.rows:,} rows)"),
        ("asked again", f"{found.again_share:.0%} of the accesses"),
        ("top 1%", f"of the items: {found.top_share:.0%} of the accesses"),
        ("skew", "?" if found.zipf is None else f"about Zipf's with exponent {found.zipf:.2f}"),
    ]
    if found.lost:
        rows.append(("lost", f"{many(found.lost, 'access', 'accesses')}, and not in the rest"))
    facts(rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("found")
    table.add_column("accesses", justify="right")
    table.add_column("share", justify="right")
    for name, count in found.outcomes.items():
        table.add_row(name, f"{count:,}", f"{count / found.accesses:.1%}")
    if found.outcomes:
        out = console()
        out.print()
        out.print(table)

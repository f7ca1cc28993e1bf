# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute``: encode the items of a source that are missing in the corpus."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from s3ec.cli.bench import engine_arguments
from s3ec.cli.options import SETTINGS, JsonOption, SettingsSource, option, with_options
from s3ec.cli.output import (
    App,
    counting,
    diverted_output,
    echo,
    end_with_status,
    human_bytes,
    json_text,
    print_json,
    print_note,
    safe,
    save,
    show,
    show_some,
)
from s3ec.errors import ConfigError, TierError

if TYPE_CHECKING:
    from types import FrameType

    from s3ec.corpus.confirmations import Failure
    from s3ec.corpus.precompute import PrecomputeReport
    from s3ec.corpus.ray_encoder import RayOptions

_SHOWN = (
    *("status", "namespace", "item_count", "done_before_count"),
    *("encoded_count", "catalogued_count"),
)

# The last line of a traceback, alone or behind the beginning of a line of vLLM's log.
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)")

commands = App()


@commands.command(
    "precompute",
    ("s3ec precompute /data/pages --model google/gemma-3-27b-it", "files below a folder"),
    ("s3ec precompute report.pdf --model M --dpi 200", "the pages of a PDF file"),
    ("s3ec precompute list.jsonl --model M --shard 0/4", "a quarter of a list"),
    (
        "s3ec precompute list.jsonl --model M --engine ray --ray-address auto --ray-workers 1-8",
        "on the GPUs of a Ray cluster",
    ),
)
@with_options(SETTINGS)
def precompute(
    source: SettingsSource,
    items: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a glob, a .jsonl list, or a .pdf file.",
        ),
    ],
    model: Annotated[
        str, option("--model", "MODEL", "As the server's `--model`, letter by letter.")
    ],
    identifier: Annotated[
        Literal["content", "sha256"],
        typer.Option(
            "--identifier",
            help="Name of the embeddings: vLLM's content hash, or `sha256:HEX` of the file for "
            "clients that send this as `uuid`.",
        ),
    ] = "content",
    batch: Annotated[int, option("--batch", "N", "Pictures that the engine gets at a time.")] = 64,
    shard: Annotated[
        str, option("--shard", "K/N", "This job's part of the source: `0/4`.")
    ] = "0/1",
    limit: Annotated[int | None, option("--limit", "N", "Process only so many items.")] = None,
    dpi: Annotated[
        int, option("--dpi", "N", "Resolution of a PDF's pages, in dots per inch.")
    ] = 150,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            "--engine",
            help="`local`: vLLM in this process. `ray`: vLLM in each worker of a Ray cluster.",
        ),
    ] = "local",
    ray_address: Annotated[
        str | None,
        option(
            "--ray-address",
            "ADDRESS",
            "Address of the cluster, such as `auto` for the one of this node; else `RAY_ADDRESS`.",
        ),
    ] = None,
    ray_workers: Annotated[
        str | None,
        option(
            "--ray-workers",
            "N",
            "Number of workers, or its minimum and maximum, `1-8`; 1 if unset.",
        ),
    ] = None,
    ray_gpus: Annotated[
        float | None, option("--ray-gpus", "N", "GPUs of each worker; 1 if unset.")
    ] = None,
    ray_cpus: Annotated[
        float | None, option("--ray-cpus", "N", "CPUs of each worker; 1 if unset.")
    ] = None,
    engine_args: Annotated[
        str | None,
        option(
            "--engine-args",
            "JSON",
            'Further arguments of `vllm.LLM`, such as `{"dtype": "bfloat16"}`. If the server\'s '
            "embeddings depend on an argument, use the server's value.",
        ),
    ] = None,
    report_file: Annotated[
        Path | None,
        option("--report", "FILE", "Write counts, rates and all failures to this file as JSON."),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show vLLM's own lines, and write no log file for them."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Encode the items of a source that are missing in the corpus, and catalogue them.

    Runs vLLM as `ec_producer`, as a server does. An item counts as done only after the bucket has
    confirmed it, and a second run encodes nothing twice. Ctrl-C saves the finished encodes, writes
    the report and ends. vLLM's output goes to a log file, whose path is printed last. Exit status
    0: all items of the source are stored; 3: a part of them, and the output names the rest; 1:
    none.
    """
    from s3ec.corpus.precompute import JobOptions, make_job
    from s3ec.corpus.reading import ReadOptions

    ray = {"address": ray_address, "workers": ray_workers, "gpus": ray_gpus, "cpus": ray_cpus}
    options = JobOptions(
        identifier,
        _shard(shard),
        limit,
        batch,
        engine_arguments(engine_args),
        ReadOptions(dpi),
        _ray_options(engine, {name: it for name, it in ray.items() if it is not None}),
    )
    if report_file is not None and not report_file.absolute().parent.is_dir():
        raise TierError(
            f"cannot write {report_file}: no folder {report_file.absolute().parent}; make it first"
        )
    with counting("precomputing") as tell, source.corpus() as corpus:
        job = make_job(corpus, items, model, options, report=tell)
        tell.more = lambda: _more(job.report)
        log_file = None if verbose else _new_log()
        try:
            with _ended_by_signals(job.stop), diverted_output(log_file):
                job.run()
        except BaseException:
            if log_file is not None and log_file.stat().st_size:
                print_note(f"vLLM's output: {log_file}")
            raise
        finally:
            if log_file is not None and not log_file.stat().st_size:
                log_file.unlink()
                log_file = None
            if report_file is not None:
                text = json_text(job.report.to_json(), 2) + "\n"
                save(report_file.absolute(), text.encode())
    report = job.report
    if as_json:
        print_json(report.to_json() | {"log": log_file and str(log_file)})
    else:
        _print(report, log_file)
    end_with_status(report.status)


def _shard(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal()):
        raise ConfigError(
            f"`--shard` {text!r:.50} is none; write it as 0/4, from 0/4 to 3/4", field="shard"
        )
    return int(number), int(parts)


def _ray_options(engine: str, given: dict[str, Any]) -> RayOptions | None:
    """Options of Ray; None for another engine."""
    if engine != "ray":
        if given:
            name = next(iter(given))
            raise ConfigError(f"`--ray-{name}` is for `--engine ray`", field=f"ray_{name}")
        return None
    from s3ec.corpus.ray_encoder import RayOptions

    if "workers" in given:
        least, _, most = given["workers"].partition("-")
        if not (least.isdecimal() and (most or least).isdecimal()):
            raise ConfigError(
                f"`--ray-workers` {given['workers']!r:.50}: write it as `4` or `1-8`",
                field="ray_workers",
            )
        given["workers"] = int(least), int(most or least)
    return RayOptions(**given)


@contextmanager
def _ended_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Make the first Ctrl-C or SIGTERM end the job in order; the second one works as usual."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        print_note("ending: saving the finished encodes; a second signal ends at once")
        stop()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_log() -> Path:
    """An empty file for the output of vLLM and its processes."""
    with tempfile.NamedTemporaryFile(
        prefix="s3ec-precompute-", suffix=".log", delete=False
    ) as file:
        return Path(file.name)


def _more(report: PrecomputeReport) -> str:
    text = f"; {human_bytes(report.stored_bytes)} stored"
    failed = len(report.failures)
    return f"{text}, {failed:,} failed" if failed else text


def _print(report: PrecomputeReport, log_file: Path | None) -> None:
    started = f", without {report.start_s:.0f} s to start" if report.engine_started else ""
    speed = f"{report.encoded_per_s:.2g} a second{started}"
    document = report.to_json()
    show(
        {name: document[name] for name in _SHOWN},
        as_json=False,
        about={"encoded_count": f"({human_bytes(report.stored_bytes)}, {speed})"},
    )
    if report.problem:
        echo(f"ended early: {safe(report.problem, limit=2000)}")
    elif report.is_stopped:
        echo("ended early; the same command resumes")
    _name("not encoded", report.failures)
    _name("not confirmed", report.unconfirmed)
    _name("replaced", report.replaced)
    if log_file is not None:
        echo(f"vLLM's output: {log_file}")
        if report.problem and (cause := _first_error(log_file)):
            echo(f"the first error there: {safe(cause, limit=500)}")


def _first_error(log_file: Path) -> str:
    """Return the cause, as vLLM's own message only says that its log has one; empty if none."""
    with open(log_file, errors="replace") as log:
        found = next(filter(None, map(_ERROR.search, log)), None)
    return found[1] if found else ""


def _name(what: str, items: list[Failure]) -> None:
    lines = []
    for each in items:
        page = "" if each.page is None else f", page {each.page}"
        lines.append(f"{what}: {safe(each.document)}{page}: {safe(each.reason)}")
    show_some(lines, f"{what}; --report FILE has them all", echo)

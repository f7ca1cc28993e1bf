# SPDX-License-Identifier: Apache-2.0
"""``python -m s3ec.dev.demo``: reads the options, runs the demo, prints the report."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from s3ec.cli.output import EXIT_OK, EXIT_USAGE, EXIT_WRONG, epilog
from s3ec.dev.demo.plot import write_png
from s3ec.dev.demo.render import report_console, show
from s3ec.dev.demo.steps import Steps
from s3ec.dev.rigs.engine import EngineError
from s3ec.errors import ConfigError, S3ECError

_WORK_DIR = Path(".demo")
_EXIT_INTERRUPTED = 130
_LOG_LINES = 25


class Preset(enum.StrEnum):
    """Which encoder."""

    GEMMA3_27B = "gemma3-27b"
    TINY = "tiny"
    ENCODER_27B = "encoder-27b"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    # A line each: typer keeps the breaks inside a paragraph.
    help="Encode pictures once into a real S3 bucket, answer questions from it, compare.\n\n"
    "A vLLM producer fills the bucket of a SeaweedFS server, a consumer with an empty disk tier "
    "answers from it, and an engine without the connector answers the same questions.\n\n"
    "The report goes to stdout, progress to stderr. Exit status 1 also where answers differ or "
    "one of them did not come from the bucket.",
    epilog=epilog(
        ("python -m s3ec.dev.demo", "embedding and encode time of Gemma3-27B on an L4"),
        (
            "python -m s3ec.dev.demo --preset tiny",
            "an encoder that costs nothing: answers are compared, nothing is gained",
        ),
        (
            "python -m s3ec.dev.demo --preset encoder-27b",
            "the real encoder of Gemma3-27B on this CPU: many minutes",
        ),
        (
            "python -m s3ec.dev.demo --keep ./look",
            "keep the bucket too, to look into it",
        ),
    ),
)
def main(
    preset: Annotated[
        Preset, typer.Option(help="Encoder of the random-weight model.")
    ] = Preset.GEMMA3_27B,
    images: Annotated[int, typer.Option(min=1, max=1000, help="How many pictures.")] = 12,
    keep: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            metavar="DIR",
            help="Folder for model, pictures, logs and the bucket, all kept. Unset: `.demo`, "
            "where the bucket is not kept.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, metavar="FILE", help="Write the figures as JSON."),
    ] = None,
) -> None:
    """Run the demo; see the command's help."""
    _check_vllm()
    forget_other_stores()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from s3ec.dev.demo.run import Demo, run  # needs what came with vLLM

    demo = Demo(
        preset=preset.value,
        images=images,
        work_dir=(keep or _WORK_DIR).absolute(),
        keep_bucket=keep is not None,
    )
    try:
        report = run(demo, Steps())
    except KeyboardInterrupt:
        _say("interrupted; engines and server have been ended")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except ConfigError as exc:
        _say(f"error: {exc}")
        raise typer.Exit(EXIT_USAGE) from exc
    except EngineError as exc:
        _say(f"error: {shortened(str(exc))}\nfull logs: {demo.logs}")
        raise typer.Exit(EXIT_WRONG) from exc
    except S3ECError as exc:
        _say(f"error: {exc}")
        raise typer.Exit(EXIT_WRONG) from exc
    show(report, report_console())
    plot = demo.work_dir / "report.png"
    if write_png(report, plot):
        _say(f"plot: {plot}")
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if demo.keep_bucket:
        data = shlex.quote(str(demo.bucket_data))
        _say(f"\nto look into the bucket: s3ec serve-s3 --data {data} --bucket {report.bucket}")
    if report.problems():
        _say(f"logs: {demo.logs}")
    raise typer.Exit(EXIT_WRONG if report.problems() else EXIT_OK)


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        _say("error: vLLM is not installed; `make setup` makes an environment with its CPU build")
        raise typer.Exit(EXIT_USAGE)


def forget_other_stores() -> None:
    """Drop keys, profiles, proxies and s3ec settings of the caller's own from this process.

    The demo brings its server and its keys; nothing of it may go to a bucket of the caller's.
    """
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3EC_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull


def shortened(message: str) -> str:
    """The first line of an engine's error, and the end of the log that follows it."""
    first, *rest = message.splitlines() or [""]
    return "\n".join([first, *rest[-_LOG_LINES:]])


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    app(prog_name="python -m s3ec.dev.demo")

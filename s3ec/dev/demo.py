# SPDX-License-Identifier: Apache-2.0
"""The whole job on this machine: encode into a real bucket, answer from it, compare.

``python -m s3ec.dev.demo`` runs it; ``make demo`` calls that.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from s3ec.cli.output import EXIT_OK, EXIT_USAGE, EXIT_WRONG, epilog, print_error, print_note
from s3ec.dev.rigs.engine import EngineError, EngineProcess, ec_config, image, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.errors import ConfigError, S3ECError, UnavailableError
from s3ec.identity import is_object_name
from s3ec.payoff import GPUS, MODELS
from s3ec.testing.server import LocalS3

_WORK_DIR = Path(".demo")
_EXIT_INTERRUPTED = 130
# Where stdout is no terminal the table must still not be cut.
_PIPE_WIDTH = 120
# The same for all pictures, so that answers can only differ because the pictures do.
_QUESTION = "What is in this picture?"


class Preset(enum.StrEnum):
    """Which encoder."""

    GEMMA3_27B = "gemma3-27b"
    TINY = "tiny"


@dataclass(frozen=True, slots=True)
class _Encoder:
    """What plays the encoder.

    Attributes:
        model: One of ``s3ec.dev.rigs.models.GEMMA3_PRESETS``.
        meaning: What the report says of it.
        pause_s: How long each encode takes beyond what the model's does.
        dtype: Of weights and embeddings.
    """

    model: str
    meaning: str
    pause_s: float = 0.0
    dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        """What it is, in two words or three."""
        return "simulated encoder" if self.pause_s else "real encoder, random weights"


_ENCODERS = {
    Preset.GEMMA3_27B: _Encoder(
        "embedding-2.75mb",
        "random weights. The embedding is as large as Gemma3-27B's. A small encoder makes it "
        "and then sleeps, so that an encode takes as long as Gemma3-27B's is estimated to take on "
        "an L4 (docs/does-it-pay.md).",
        MODELS["gemma3-27b"].encode_ms(GPUS["l4"], gpus=1) / 1e3,
        "float32",
    ),
    Preset.TINY: _Encoder(
        "tiny",
        "random weights; its encoder has two layers and costs next to nothing. This run shows that "
        "answers are right; its times show nothing.",
    ),
}


@dataclass(frozen=True)
class Picture:
    """One line of the report.

    Attributes:
        name: File name.
        encode_s: Of the producer's request, from reading the file to the embedding.
        ours: The consumer's answer, as EngineProcess.chat returns it.
        theirs: The answer of the engine without the connector.
    """

    name: str
    encode_s: float
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]

    @property
    def with_s(self) -> float:
        """Seconds to the first token, with the embedding from the bucket."""
        return float(self.ours["first_token_s"])

    @property
    def without_s(self) -> float:
        """Seconds to the first token in the engine that encodes the picture."""
        return float(self.theirs["first_token_s"])

    @property
    def identical(self) -> bool:
        """Whether both engines gave the same tokens with the same log probabilities."""
        return all(self.ours[part] == self.theirs[part] for part in ("token_ids", "logprobs"))


@dataclass(frozen=True)
class Report:
    """Everything the demo found out.

    Attributes:
        bucket: That held the embeddings.
        objects, nbytes: Embeddings in the bucket, the producer's warm-up among them, and their
            size.
        hits, misses, fetches: Pictures that the consumer took from the cache, that it encoded, and
            that it fetched from the bucket, by vLLM's metrics.
    """

    preset: Preset
    bucket: str
    objects: int
    nbytes: int
    pictures: Sequence[Picture]
    hits: int
    misses: int
    fetches: int

    @property
    def totals_s(self) -> dict[str, float]:
        """Seconds for all pictures, to encode them and to the first token."""
        times = [(one.encode_s, one.with_s, one.without_s) for one in self.pictures]
        sums = map(sum, zip(*times, strict=True))
        return dict(zip(("encode", "with_s3ec", "without_s3ec"), sums, strict=True))

    @property
    def headline(self) -> str:
        """The total and the kind of encoder, without which no figure of the run may be shown."""
        totals_s = self.totals_s
        return (
            f"total of {len(self.pictures)} pictures: {_seconds(totals_s['with_s3ec'])} with s3ec, "
            f"{_seconds(totals_s['without_s3ec'])} without ({_ENCODERS[self.preset].kind})"
        )

    def problems(self) -> list[str]:
        """What the run failed to show, a sentence each; empty if all is well."""
        count = len(self.pictures)
        other = [picture.name for picture in self.pictures if not picture.identical]
        distinct = {repr((p.ours["token_ids"], p.ours["logprobs"])) for p in self.pictures}
        checks = [
            (self.objects != count + 1, f"{self.objects} embeddings in the bucket for {count + 1}"),
            (self.hits != count, f"{self.hits} hits for {count} pictures"),
            (self.misses > 0, f"{self.misses} pictures were encoded by the consumer"),
            (self.fetches != count, f"{self.fetches} of {count} pictures came from the bucket"),
            (bool(other), f"other answers than without the connector: {', '.join(other)}"),
            (
                count > 1 and len(distinct) == 1,
                "all pictures have the same answer, so comparing answers shows nothing",
            ),
        ]
        return [problem for is_so, problem in checks if is_so]


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the engines share."""

    encoder: _Encoder
    model: Path
    logs: Path
    scratch: Path
    s3: LocalS3
    bucket: str
    nursery: EngineForkServer

    @contextmanager
    def engine(self, name: str, role: str | None, warm_up: Path) -> Iterator[EngineProcess]:
        """A warm engine with an empty disk tier of its own; without a connector if no role.

        Where the block ends with an exception its processes are killed.
        """
        log_path = self.logs / f"{name}.log"
        log_path.unlink(missing_ok=True)
        settings = {
            "bucket": self.bucket,
            "endpoint_url": self.s3.endpoint_url,
            "cache_dir": str(self.scratch / f"tier-{name}"),
            "cache_bytes": "4GiB",
            "min_free_bytes": "64MiB",
            # A machine that is busy with other things must not turn a slow fetch into a miss.
            "defer_timeout_s": 20,
            # With `auto` the first pictures are encoded, so that their cost becomes known.
            "wait": "always",
        }
        engine = EngineProcess(
            self.model,
            ec=None if role is None else ec_config(role, settings),
            log_path=log_path,
            media=warm_up.parent,
            env=self.s3.env() | ONE_PROCESS,
            options={"dtype": self.encoder.dtype},
            nursery=self.nursery,
        )
        try:
            with _step(f"starting and warming up the {name} (can take a minute)"):
                engine.start()
                engine.slow_encoder(self.encoder.pause_s)
                # The first forward of each kind costs seconds on a CPU, which belong to no picture.
                engine.chat([[text("How many hours has a day?")]], logprobs=3)
                _ask(engine, warm_up)
            yield engine
            with _step(f"stopping the {name}"):
                engine.stop()  # in order: a producer finishes its uploads first
        finally:
            engine.stop(timeout_s=0)


def run(preset: Preset, images: int, work_dir: Path, *, keep_bucket: bool) -> Report:
    """Run everything, one engine after another; leaves no process behind.

    Args:
        preset: Which encoder.
        images: How many pictures.
        work_dir: Absolute folder for model, pictures, logs and scratch.
        keep_bucket: Whether the server's data stays there too.

    Raises:
        ConfigError: Something is not installed here, or the folder cannot be made.
        EngineError: An engine did not start or died.
        UnavailableError: The model could not be built, or the server did not start.
    """
    from s3ec.dev.rigs.pictures import write_pictures

    encoder, logs = _ENCODERS[preset], work_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make {work_dir}: {exc.strerror}; see --keep") from exc
    with (
        # On the same disk as the rest, and emptied whatever happens.
        tempfile.TemporaryDirectory(prefix="run-", dir=work_dir) as scratch,
        LocalS3(work_dir / "s3" if keep_bucket else None) as s3,
        # It imports vLLM once for all engines, while the model is built.
        EngineForkServer(logs / "imports.log", s3.env() | ONE_PROCESS) as nursery,
    ):
        bucket = s3.create_bucket(f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        with _step(f"writing {images} pictures and a model with random weights"):
            model = _build_model(work_dir / "models", encoder.model)
            # Two more, for the warm-ups: the producer's comes to lie in the bucket, and what the
            # others warm up with must not.
            *pictures, first, other = write_pictures(work_dir / "pictures", images + 2)
        stage = _Stage(encoder, model, logs, Path(scratch), s3, bucket, nursery)
        encode_s = []
        with (
            stage.engine("producer", "ec_producer", first) as engine,
            _step(f"encoding {images} pictures into the bucket"),
        ):
            for picture in pictures:
                started = time.perf_counter()
                _ask(engine, picture, max_tokens=1)
                encode_s.append(time.perf_counter() - started)
        stored = _embeddings(s3.client(), bucket)
        with (
            stage.engine("consumer", "ec_consumer", other) as engine,
            _step("answering from the bucket, with an empty disk tier"),
        ):
            before = _counts(engine)
            ours = [_ask(engine, picture) for picture in pictures]
            counts = [now - then for now, then in zip(_counts(engine), before, strict=True)]
        with (
            stage.engine("engine-without-s3ec", None, other) as engine,
            _step("answering without s3ec"),
        ):
            theirs = [_ask(engine, picture) for picture in pictures]
        names = [picture.name for picture in pictures]
        lines = [Picture(*one) for one in zip(names, encode_s, ours, theirs, strict=True)]
        return Report(preset, bucket, len(stored), sum(stored.values()), lines, *counts)


def _build_model(folder: Path, preset: str) -> Path:
    # In a process of its own: torch would keep gigabytes of this one.
    model = folder / preset
    command = [sys.executable, "-m", "s3ec.dev.rigs.models", "gemma3", str(model)]
    done = subprocess.run(
        [*command, "--preset", preset],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"the model could not be built: {done.stdout[-2000:]}")
    return model


def _ask(engine: EngineProcess, picture: Path, max_tokens: int = 8) -> dict[str, Any]:
    prompt = [image(picture), text(_QUESTION)]
    return engine.chat([prompt], max_tokens=max_tokens, logprobs=3)[0]


def _embeddings(client: Any, bucket: str) -> dict[str, int]:
    """Name and size of each embedding in the bucket, as any S3 client sees them."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    there = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
    return {k: size for k, size in there.items() if is_object_name(k.partition("/objects/")[2])}


def _counts(engine: EngineProcess) -> list[int]:
    """Hits, misses and fetches from the bucket so far."""
    counters = engine.counters()
    return [
        int(counters.get(f"vllm:s3ec_{name}", 0))
        for name in ("hits", "misses", "fetches{source=bucket}")
    ]


@contextmanager
def _step(title: str) -> Iterator[None]:
    """Say on stderr that a step begins, and how long it took."""
    print_note(f"{title} ...")
    started, word = time.monotonic(), "FAILED after"
    try:
        yield
        word = "done in"
    finally:
        print_note(f"    {word} {time.monotonic() - started:.1f} s")


def show(report: Report, console: Console) -> None:
    """Print the whole report for a person."""
    console.print(Text(report.headline, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("picture", f"{len(report.pictures)} pictures")
    same = all(picture.identical for picture in report.pictures)
    times = [(one.encode_s, one.with_s, one.without_s) for one in report.pictures]
    for header, footer in zip(
        ("encode", "with s3ec", "without s3ec", "same answer"),
        (*map(_seconds, report.totals_s.values()), _yes(same)),
        strict=True,
    ):
        table.add_column(header, footer, justify="right", no_wrap=True)
    for one, row in zip(report.pictures, times, strict=True):
        # Of all cells, the names give way where the terminal is narrow.
        name = Text(one.name, overflow="ellipsis", no_wrap=True)
        table.add_row(name, *map(_seconds, row), _yes(one.identical))
    console.print(table)
    facts = {
        "preset": f"{report.preset}: {_ENCODERS[report.preset].meaning}",
        "bucket": f"{report.objects} embeddings, one of them of a warm-up; {report.nbytes:,} bytes",
        "consumer": f"{report.hits} hits, {report.misses} misses, {report.fetches} fetched from "
        "the bucket, into a disk tier that was empty",
        "answers": f"tokens and log probabilities identical: {_yes(same)}",
        "encode": "the producer's request, from reading the file to the embedding",
        "with s3ec": "time to the first token, with the embedding from the bucket",
        "without s3ec": "the same in an engine that has no connector and encodes the picture",
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for what, fact in facts.items():
        grid.add_row(what, Text(fact))
    console.print(grid)
    for problem in report.problems():
        console.print(Text(f"PROBLEM: {problem}", style="bold red"))


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


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
        ("python -m s3ec.dev.demo --preset tiny", "an encoder that costs nothing"),
        ("python -m s3ec.dev.demo --keep ./look", "keep the bucket too, to look into it"),
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
) -> None:
    """Run the demo; see the command's help."""
    if importlib.util.find_spec("vllm") is None:
        print_error("vLLM is not installed; `make setup` makes an environment with its CPU build")
        raise typer.Exit(EXIT_USAGE)
    forget_other_stores()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work_dir = (keep or _WORK_DIR).absolute()
    try:
        report = run(preset, images, work_dir, keep_bucket=keep is not None)
    except KeyboardInterrupt:
        print_note("interrupted; engines and server have been ended")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except (EngineError, S3ECError) as exc:
        print_error(str(exc))
        print_note(f"logs: {work_dir / 'logs'}")
        raise typer.Exit(EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_WRONG) from exc
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    show(report, Console(file=sys.stdout, highlight=False, width=width))
    if keep is not None:
        data = shlex.quote(str(work_dir / "s3"))
        print_note(f"to look into the bucket: s3ec serve-s3 --data {data} --bucket {report.bucket}")
    raise typer.Exit(EXIT_WRONG if report.problems() else EXIT_OK)


def forget_other_stores() -> None:
    """Drop keys, profiles, proxies and s3ec settings of the caller's own from this process.

    The demo brings its server and its keys; nothing of it may go to a bucket of the caller's.
    """
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3EC_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull


if __name__ == "__main__":
    app(prog_name="python -m s3ec.dev.demo")

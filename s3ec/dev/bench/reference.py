# SPDX-License-Identifier: Apache-2.0
"""``bench reference``: a request that names a picture, beside the same request with its pixels.

A producer encodes pictures of 2048 x 2048 pixels into this node's tier. Then a real API server, an
``ec_consumer`` with its engine in a process of its own, is asked about each of them twice, in turn:
by size and uuid, and by the PNG in a data URL with the same uuid. Both ways load the embedding from
the tier. Each picture comes once with its pixels, so vLLM's cache of processed pictures has none.

**CPU before scheduling** is what the API server's process took, by its own CPU clock, from before
the request until after its answer of one token: it reads, decodes and preprocesses, and the engine
schedules in another process. The little that it does about the answer is in both figures.
"""

from __future__ import annotations

import base64
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.api_server import ApiServer

_BYTES, _CPU, _TTFT = "reference.bytes_ratio", "reference.cpu_ratio", "reference.ttft_ratio"
ROWS = (
    Spec(_BYTES, "ratio", "<= 0.01"),
    Spec(_CPU, "ratio", "<= 0.2"),
    Spec(_TTFT, "ratio", "<= 0.5"),
)
_SIDE = 2048
# Qwen2-VL's own limit is 12,845,056 pixels: it would not make such a picture smaller either.
_MAX_PIXELS = _SIDE * _SIDE
# 2044 pixels are the nearest multiple of two patches of 14.
_GRID = [1, 146, 146]
_ROUNDS, _WARMUP = 8, 2
_WITHOUT, _WITH = "without pixels", "with pixels"
_LOADS, _MISSES = "vllm:s3ec_loads_total", "vllm:s3ec_misses_total"
_FLAGS: dict[str, str | int | None] = {
    "--served-model-name": "tiny",
    "--enforce-eager": None,
    "--gpu-memory-utilization": "0.3",
    "--max-model-len": 8192,
    "--max-num-batched-tokens": 8192,
    "--max-num-seqs": 2,
    "--skip-mm-profiling": None,
    # The encoder cache then has room for one picture.
    "--limit-mm-per-prompt": '{"image": 1, "video": 0}',
    # Or the second question about a picture would need no embedding.
    "--no-enable-prefix-caching": None,
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request: bytes of its body, and seconds."""

    nbytes: int
    cpu_s: float
    first_token_s: float


def run(context: Context) -> None:
    """Compare the two.

    Raises:
        CannotMeasureError: There is no vLLM, or what should be a hit was none.
    """
    from s3ec.dev.bench.hooks import need_vllm

    need_vllm(context)
    rounds = context.rounds(_ROUNDS)
    pictures = _pictures(context.scratch / "pictures", rounds + _WARMUP)
    with _server(context, pictures) as server:
        context.say(f"{rounds} rounds of two requests")
        # Far apart, so that the device has not kept what the other way has just loaded.
        half = len(pictures) // 2
        turns = {
            _WITHOUT: _bodies(pictures, pixels=False),
            _WITH: _bodies(pictures[half:] + pictures[:half], pixels=True),
        }
        cases = {name: partial(_ask, server, bodies) for name, bodies in turns.items()}
        found = measure.interleave(cases, rounds=rounds, warmup=_WARMUP)
        _check(server, 2 * len(pictures))
    for name, part in ((_BYTES, "nbytes"), (_CPU, "cpu_s"), (_TTFT, "first_token_s")):
        values = {case: [getattr(one, part) for one in asked] for case, asked in found.items()}
        ratios = measure.ratios(values[_WITHOUT], values[_WITH])
        context.report(
            name,
            statistics.median(ratios),
            samples=len(ratios),
            detail={
                "spread": measure.spread(ratios),
                "cases": measure.medians(values),
                "note": "a tiny Qwen2-VL, 5,329 rows for each picture",
            },
        )


@contextmanager
def _server(context: Context, pictures: list[Path]) -> Iterator[ApiServer]:
    """A consumer whose node holds the embeddings of all pictures."""
    from s3ec.dev.rigs.api_server import ApiServer
    from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
    from s3ec.dev.rigs.models import write_qwen_vl
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY

    model = write_qwen_vl(context.scratch / "model", "qwen2-vl", max_pixels=_MAX_PIXELS)
    folder = context.scratch / "corpus"
    folder.mkdir()
    settings = {
        "url": folder.as_uri(),
        "cache_dir": str(context.scratch / "tier"),
        "cache_bytes": "2GiB",
        "min_free_bytes": 0,
        "wait": "always",
    }
    with EngineForkServer(context.scratch / "nursery.log", STEADY) as nursery:
        context.say(f"encoding {len(pictures)} pictures")
        with EngineProcess(
            model,
            ec=ec_config("ec_producer", settings),
            log_path=context.scratch / "producer.log",
            media=context.scratch,
            env=ONE_PROCESS,
            options={"max_num_batched_tokens": 8192, "max_model_len": 8192,
                     "skip_mm_profiling": True},
            nursery=nursery,
        ) as producer:  # fmt: skip
            for picture in pictures:
                producer.chat([[image(picture, picture.stem), text("?")]], max_tokens=1)
        with ApiServer(
            model,
            ec=json.dumps(ec_config("ec_consumer", settings)),
            log_path=context.scratch / "server.log",
            env=STEADY,
            flags=_FLAGS,
            nursery=nursery,
        ) as server:
            yield server


def _pictures(folder: Path, count: int) -> list[Path]:
    """Photographs and pages, as PNG."""
    from PIL import Image

    from s3ec.dev.rigs.pictures import write_pictures

    paths = []
    for number, path in enumerate(write_pictures(folder / "small", count)):
        paths.append(folder / f"picture-{number}.png")
        with Image.open(path) as picture:
            picture.convert("RGB").resize((_SIDE, _SIDE)).save(paths[-1])
    return paths


def _bodies(pictures: list[Path], *, pixels: bool) -> Iterator[bytes]:
    for path in pictures:
        kind = "image_url" if pixels else "image_embeds"
        content: dict[str, Any] = {"image_grid_thw": _GRID}
        if pixels:
            content = {
                "url": f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            }
        part = {"type": kind, kind: content, "uuid": path.stem}
        question = {"type": "text", "text": "what is this?"}
        yield json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": [part, question]}],
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": False},
            }
        ).encode()


def _ask(server: ApiServer, bodies: Iterator[bytes]) -> _Asked:
    """The next request and its whole stream; the chunk that says why it ends has the token."""
    body = next(bodies)
    request = urllib.request.Request(  # noqa: S310 - of a server on this machine
        f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    before_s, started_s = _cpu_s(server.pid), time.perf_counter()
    first_token_s = 0.0
    with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310
        for line in reply:
            if not first_token_s and b'"finish_reason":"length"' in line.replace(b" ", b""):
                first_token_s = time.perf_counter() - started_s
    if not first_token_s:
        raise CannotMeasureError("a request was not answered with a token")
    return _Asked(len(body), _cpu_s(server.pid) - before_s, first_token_s)


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of another process, to the nanosecond.

    Linux makes the clock's number of the process's (clock_getcpuclockid(3)); /proc counts in 10 ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _check(server: ApiServer, requests: int) -> None:
    """Every request must have loaded its embedding; none was encoded.

    Raises:
        CannotMeasureError: It is not so.
    """
    deadline_s = time.monotonic() + 30
    while (loads := server.metrics().get(_LOADS, 0)) < requests and time.monotonic() < deadline_s:
        time.sleep(0.1)
    misses = server.metrics().get(_MISSES, 0)
    if misses or loads < requests:
        raise CannotMeasureError(
            f"{loads:.0f} loads and {misses:.0f} misses for {requests} requests"
        )


BENCH = Bench(ROWS, run)

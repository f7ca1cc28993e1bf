# SPDX-License-Identifier: Apache-2.0
"""What benchmarks with real engines share: a server, pictures, prompts, and what is counted."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from s3ec.dev.bench.context import CannotMeasureError

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.testing.server import LocalS3

_PATIENCE_S = 120.0
_SIDE, _BLOCKS = 112, 7


@contextlib.contextmanager
def local_server(bucket: str) -> Iterator[LocalS3]:
    """A SeaweedFS with this bucket; its keys are in this process's environment.

    Raises:
        CannotMeasureError: It is not installed, or there is no vLLM to ask it.
    """
    from s3ec.errors import ConfigError
    from s3ec.testing.server import LocalS3

    if importlib.util.find_spec("vllm") is None:
        raise CannotMeasureError("vLLM is not installed")
    try:
        server = LocalS3()
    except ConfigError as exc:
        raise CannotMeasureError(str(exc)) from exc
    with server, mock.patch.dict("os.environ", server.env()):
        server.create_bucket(bucket)
        yield server


def write_patterns(out: Path, count: int, seed: int) -> list[Path]:
    """Write pictures of coloured blocks, 1 ms each; no two are alike."""
    from PIL import Image

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        blocks = Image.frombytes("RGB", (_BLOCKS, _BLOCKS), source.randbytes(3 * _BLOCKS**2))
        path = out / f"pattern-{number:05d}.png"
        blocks.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(path)
        paths.append(path)
    return paths


def prompt(picture: Path, name: str) -> list[dict[str, Any]]:
    """A question about a picture under a name of our own."""
    from s3ec.dev.rigs.engine import image, text

    return [image(picture, name), text("what is in it?")]


def counters(engine: EngineProcess) -> dict[str, float]:
    """Its counters as of now: vLLM takes them over in the steps of a request."""
    from s3ec.dev.rigs.engine import text

    for _ in range(2):
        engine.chat([[text("what time is it?")]], max_tokens=2)
    return engine.counters()


def until(condition: Callable[[], bool], what: str, pause_s: float = 0.1) -> None:
    """Wait for a condition.

    Raises:
        CannotMeasureError: It does not come.
    """
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise CannotMeasureError(f"not so after {_PATIENCE_S:.0f} s: {what}")
        time.sleep(pause_s)

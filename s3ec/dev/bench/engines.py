# SPDX-License-Identifier: Apache-2.0
"""Real engines with a tiny model, and a bucket behind a proxy, for benchmarks of whole requests.

Each engine runs in one process of its own. Its encoder sleeps, which leaves the processor to others
as an encoder on a GPU does.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from s3ec.dev.bench.context import CannotMeasureError, Context
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.proxy import FaultProxy
    from s3ec.testing.server import LocalS3

ROWS, WIDTH = 64, 64  # of the tiny model's embeddings
_SAVES = "vllm:s3ec_saves"
_BUCKET = "engines"
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Engines:
    """What runs.

    Attributes:
        by_name: The engines.
        server: With their bucket.
        proxy: Before it.
        settings: Of s3ec, for that bucket and a tier that no engine has.
    """

    by_name: dict[str, EngineProcess]
    server: LocalS3
    proxy: FaultProxy
    settings: dict[str, Any]


@contextlib.contextmanager
def running(
    context: Context,
    roles: Mapping[str, tuple[str, Mapping[str, Any]] | None],
) -> Iterator[Engines]:
    """Start a server, a proxy and the engines, each with a tier of its own.

    Args:
        context: Of the benchmark.
        roles: Name of an engine to its role and further settings; None for one without s3ec.

    Raises:
        CannotMeasureError: There is no server or no vLLM.
    """
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.proxy import FaultProxy
    from s3ec.errors import ConfigError
    from s3ec.testing.server import LocalS3

    context.say(f"starting a server and {len(roles)} engines")
    scratch = Path(tempfile.mkdtemp(dir=context.scratch))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(LocalS3())
            model = write_gemma3(scratch / "model")
        except (ConfigError, ImportError) as exc:
            raise CannotMeasureError(str(exc)) from exc
        server.create_bucket(_BUCKET)
        # The keys, for what this process asks of it.
        stack.enter_context(mock.patch.dict("os.environ", server.env()))
        proxy = stack.enter_context(FaultProxy(server.endpoint_url))
        settings = {
            "bucket": _BUCKET,
            "endpoint_url": proxy.url,
            "min_free_bytes": 0,
            "index_refresh_s": 0.5,
            "weights": "name",
            "cache_dir": str(scratch / "tier"),
        }
        engines = {}
        for name, role in roles.items():
            ec = None
            if role is not None:
                own = {**settings, **role[1], "cache_dir": str(scratch / f"tier of {name}")}
                ec = ec_config(role[0], own, ec_connector_module_path="s3ec.connector")
            engines[name] = EngineProcess(
                model,
                ec=ec,
                log_path=scratch / f"{name}.log",
                media=context.scratch,
                env=server.env() | ONE_PROCESS,
                options=NEW_PICTURES,
            )
            stack.callback(engines[name].stop, 5)
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(EngineProcess.start, engines.values()))
        yield Engines(engines, server, proxy, settings)


def prompt(pictures: Sequence[Path], names: Sequence[str]) -> list[dict[str, Any]]:
    """A question about some pictures under names of our own."""
    from s3ec.dev.rigs.engine import image, text

    shown = [image(picture, name) for picture, name in zip(pictures, names, strict=True)]
    return [*shown, text("what is in it?")]


def counters(engine: EngineProcess) -> dict[str, float]:
    """Its counters as of now: vLLM takes them over in the steps of a request."""
    from s3ec.dev.rigs.engine import text

    for _ in range(2):
        engine.chat([[text("what time is it?")]], max_tokens=2)
    return engine.counters()


def fill(producer: EngineProcess, pictures: Sequence[Path], names: Sequence[str]) -> None:
    """Have so many pictures encoded and stored under these names."""
    before = counters(producer).get(_SAVES, 0)
    for number, name in enumerate(names):
        producer.chat([prompt([pictures[number % len(pictures)]], [name])], max_tokens=1)
    until(lambda: counters(producer).get(_SAVES, 0) - before >= len(names), "all is stored")


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

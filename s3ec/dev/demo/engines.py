# SPDX-License-Identifier: Apache-2.0
"""The engines of the demo: one at a time, and none left behind."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]  # vLLM depends on it

from s3ec.dev.demo.report import Asked
from s3ec.dev.demo.steps import Note
from s3ec.dev.rigs.engine import EngineError, EngineProcess, ec_config, image, text

# One for all pictures, so that answers can only differ because the pictures do.
_QUESTION = "What is in this picture?"
_WORDS_ONLY = "How many hours has a day?"
_TOKENS = 8
_ALTERNATIVES = 3
# vLLM ends its processes within about 6 s of an interrupt.
END_TIMEOUT_S = 20.0


def transfer_config(role: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``--ec-transfer-config`` for one role; the name alone is enough where s3ec is installed."""
    registered = {point.name for point in entry_points(group="vllm.general_plugins")}
    path = {} if "s3ec" in registered else {"ec_connector_module_path": "s3ec.connector"}
    return ec_config(role, settings, **path)


class DemoEngine:
    """One vLLM engine; as a context manager it leaves no process behind after an exception."""

    def __init__(self, engine: EngineProcess, pause_s: float = 0.0) -> None:
        """Drive ``engine``, which was not started yet; its encoder takes longer by ``pause_s``."""
        self._engine = engine
        self._pause_s = pause_s
        self._family: list[Any] = []

    def start(self, picture: Path) -> float:
        """Start and warm up: one question about words, one about ``picture``.

        The first forward of each kind costs seconds on a CPU, which belong to no picture.

        Returns:
            Seconds to a ready engine, without the warm-up.

        Raises:
            EngineError: It did not come up.
        """
        self._engine.start()
        self._family = _family(self._engine)
        self._engine.slow_encoder(self._pause_s)
        for prompt in ([text(_WORDS_ONLY)], _prompt(picture)):
            self._engine.chat([prompt], max_tokens=_TOKENS, logprobs=_ALTERNATIVES)
        return self._engine.start_s

    def stop(self) -> None:
        """Shut down in order; a producer finishes its uploads first."""
        self._engine.stop()

    def encode(self, picture: Path) -> float:
        """Have a producer encode one picture; returns the seconds it took."""
        started = time.perf_counter()
        self._engine.chat([_prompt(picture)], max_tokens=1)
        return time.perf_counter() - started

    def ask(self, pictures: Sequence[Path], note: Note) -> list[Asked]:
        """Ask the same question about each picture, one after another."""
        asked = []
        for number, picture in enumerate(pictures, start=1):
            (answer,) = self._engine.chat(
                [_prompt(picture)], max_tokens=_TOKENS, logprobs=_ALTERNATIVES
            )
            asked.append(Asked(answer["first_token_s"], answer))
            note(f"{number}/{len(pictures)} {picture.name}: {asked[-1].seconds:.2f} s")
        return asked

    def hits_and_misses(self) -> tuple[int, int]:
        """The connector's counts so far, from vLLM's metrics."""
        counters = self._engine.counters()
        return int(counters.get("vllm:s3ec_hits", 0)), int(counters.get("vllm:s3ec_misses", 0))

    def __enter__(self) -> DemoEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            end_all(self._family or _family(self._engine))
        self._engine.stop()


def _prompt(picture: Path) -> list[dict[str, Any]]:
    return [image(picture), text(_QUESTION)]


def _family(engine: EngineProcess) -> list[Any]:
    """The engine's processes as they are now; empty if it has none."""
    try:
        child = psutil.Process(engine.pid)
        return [child, *child.children(recursive=True)]
    except (EngineError, psutil.NoSuchProcess):
        return []


def end_all(family: Sequence[Any]) -> None:
    """End an engine that nobody waits for any more, with everything it started.

    The child is interrupted, so that vLLM ends its own processes; after Ctrl-C it has been
    already. Whatever is left after a while is killed: an engine core outlives a parent that
    was killed (vLLM 0.32).
    """
    # A second Ctrl-C while this takes its seconds would leave the rest behind.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in family[:1]:
            _tell(process, signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
        for process in left:
            _tell(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=END_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(process: Any, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)

# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in a child process, driven over a pipe: for tests, demo and benchmarks.

The child (``engine_child``) keeps one engine and answers one request line after another, so
that many checks share one engine start. Its standard error, vLLM's and s3ec's log, goes to a
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s3ec.dev.rigs.nursery import EngineForkServer, Forked, end, spawn
from s3ec.dev.rigs.vllm_cpu import engine_env

START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 120.0


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a request; the message ends with its log."""


def ec_config(role: str, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The content of ``--ec-transfer-config`` for one role and one set of s3ec settings."""
    return {
        "ec_connector": "S3ECConnector",
        "ec_role": role,
        "ec_connector_extra_config": dict(settings),
        **more,
    }


def image(path: Path, uuid: str | None = None) -> dict[str, Any]:
    """A picture file as part of a prompt."""
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": path.resolve().as_uri()}}
    return part if uuid is None else {**part, "uuid": uuid}


def text(words: str) -> dict[str, Any]:
    """Words as part of a prompt."""
    return {"type": "text", "text": words}


class EngineProcess:
    """One engine, usable as a context manager; not thread-safe.

    All but ``chat``, ``generate`` and the counters is for an engine in one process only.
    """

    def __init__(
        self,
        model: Path,
        *,
        ec: Mapping[str, Any] | None,
        log_path: Path,
        media: Path,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        nursery: EngineForkServer | None = None,
    ) -> None:
        """Describe the engine; start() spawns it.

        Args:
            model: Folder of the model.
            ec: Content of ``--ec-transfer-config``, or None for a plain engine.
            log_path: Where the child's log goes; appended to.
            media: Folder that picture files may come from.
            env: Additions to the environment (credentials, mostly).
            options: More arguments of ``vllm.LLM``.
            nursery: Forks the child, which then has nothing to import.
        """
        self._log_path = log_path
        self._env = engine_env({**os.environ, **(env or {})})
        self._spec = {
            "model": str(model),
            "ec": None if ec is None else dict(ec),
            "options": {"allowed_local_media_path": str(media), **(options or {})},
        }
        self._nursery = nursery
        self._child: subprocess.Popen[bytes] | Forked | None = None

    @property
    def pid(self) -> int:
        """Process id of the child that drives the engine."""
        return self._running().pid

    @property
    def log(self) -> str:
        """Everything the child has logged so far."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def start(self) -> EngineProcess:
        """Spawn the child and wait until the engine is ready.

        Raises:
            EngineError: It did not come up.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        request_read, self._request = os.pipe()
        self._reply, reply_write = os.pipe()
        with open(self._log_path, "ab") as log:
            self._child = spawn(
                "s3ec.dev.rigs.engine_child",
                env=self._env,
                log=log.fileno(),
                fds=(request_read, reply_write),
                nursery=self._nursery,
            )
        os.close(request_read)
        os.close(reply_write)
        self._replies = os.fdopen(self._reply, "rb")
        self._send(self._spec)
        return self

    def chat(
        self,
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        *,
        max_tokens: int = 8,
        logprobs: int | None = None,
    ) -> list[dict[str, Any]]:
        """Ask all prompts at once, at temperature 0.

        Args:
            prompts: Each a list of parts made by image() and text().
            max_tokens: Length of an answer.
            logprobs: Alternatives per token whose log probability is returned.

        Returns:
            Per prompt ``token_ids``, ``text``, ``finish_reason``, ``logprobs`` (per token a
            mapping from token id to log probability), ``cached_tokens`` of the prompt, and
            ``first_token_s``.

        Raises:
            EngineError: The engine died or refused a prompt.
        """
        answers: list[dict[str, Any]] = self._call(
            "chat", prompts=prompts, max_tokens=max_tokens, logprobs=logprobs
        )
        return answers

    def replay(
        self,
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        *,
        max_tokens: int,
        clients: int,
    ) -> tuple[list[float], float]:
        """Ask so many prompts at a time.

        Args:
            prompts: As of ``chat``; rendered before the first one is asked.
            max_tokens: Length of each answer.
            clients: The next one is asked when one of so many has ended.

        Returns:
            Seconds from asking each to its first token, and until all had ended.
        """
        first_token_s, seconds = self._call(
            "replay", prompts=prompts, max_tokens=max_tokens, clients=clients
        )
        return first_token_s, seconds

    def timed(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], *, max_tokens: int
    ) -> dict[str, Any]:
        """Ask all prompts at once; how long that took.

        Returns:
            Nanoseconds: ``whole`` of the call, and ``steps`` of each step of the engine.
        """
        times: dict[str, Any] = self._call("timed", prompts=prompts, max_tokens=max_tokens)
        return times

    def generate(
        self, prompt: str, multi_modal_data: Mapping[str, Any], uuids: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One prompt in vLLM's own form; nested lists in the data become integer tensors."""
        answer: dict[str, Any] = self._call(
            "generate", prompt=prompt, data=multi_modal_data, uuids=uuids
        )
        return answer

    def shuffle_vision_tower(self) -> None:
        """Give the running model other vision weights: the same ones in each engine."""
        self._call("shuffle")

    def leave_out_language_model(self) -> None:
        """Have the layers of a Gemma3 do nothing."""
        self._call("leave_out_language_model")

    def slow_encoder(self, seconds: float) -> None:
        """Have the encoder sleep so long for each picture."""
        self._call("slow_encoder", seconds=seconds)

    def work(self) -> dict[str, float]:
        """What it has done since this was asked first.

        Returns:
            ``encodes`` and ``encode_s``: pictures, and seconds inside the encoder. ``allocations``:
            embeddings that came new into the encoder cache, encoded or loaded. ``cpu_s``: of the
            process from its start, but for what its encoder took in the thread that calls it.
        """
        done: dict[str, float] = self._call("work")
        return done

    def counters(self) -> dict[str, float]:
        """Prometheus counters by name; labels of ours are appended: ``name{source=tier}``."""
        metrics: dict[str, float] = self._call("metrics")
        return metrics

    def serve_metrics(self) -> str:
        """Serve what vLLM's API server shows on /metrics; the address, ``HOST:PORT``."""
        return f"127.0.0.1:{self._call('serve_metrics')}"

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Shut the engine down in order, letting it finish its saves. Idempotent."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            os.close(self._request)  # end of requests: the child shuts its engine down
            end(child, timeout_s)
        finally:
            self._replies.close()

    def kill(self) -> None:
        """End the engine and its workers with SIGKILL, as a crash would.

        From any thread: a call that waits for an answer ends in an EngineError, and stop() or
        start() is for its thread.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running().pid, signal.SIGKILL)

    def _running(self) -> subprocess.Popen[bytes] | Forked:
        if self._child is None:
            raise EngineError("the engine is not running")
        return self._child

    def _call(self, operation: str, **arguments: Any) -> Any:
        return self._send({"operation": operation, "arguments": arguments})

    def _send(self, request: Mapping[str, Any]) -> Any:
        child = self._running()
        try:
            os.write(self._request, json.dumps(request).encode() + b"\n")
            line = self._replies.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise EngineError(f"the engine ended ({child.poll()}): {self.log[-4000:]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{self.log[-4000:]}")
        return reply["value"]

    def __enter__(self) -> EngineProcess:
        try:
            return self.start()
        except BaseException:
            self.stop(timeout_s=5)
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

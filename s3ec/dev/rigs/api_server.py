# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server as a child process."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from s3ec.dev.rigs.engine import START_TIMEOUT_S, EngineError
from s3ec.dev.rigs.nursery import EngineForkServer, Forked, end, spawn
from s3ec.dev.rigs.vllm_cpu import engine_env
from s3ec.testing.server import free_port

_MODULE = "vllm.entrypoints.openai.api_server"
_STOP_TIMEOUT_S = 60.0


class ApiServer:
    """``vllm serve`` on 127.0.0.1, usable as a context manager.

    It is started as a module: the ``vllm`` command of the CPU package looks for a distribution
    named vllm, and there is none.
    """

    def __init__(
        self,
        model: Path,
        *,
        ec: str | None,
        log_path: Path,
        env: Mapping[str, str],
        flags: Mapping[str, str | int | None],
        nursery: EngineForkServer | None = None,
    ) -> None:
        """Describe the server.

        Args:
            model: Folder of the model.
            ec: Text of ``--ec-transfer-config``, or None for a server without a connector.
            log_path: Where its log goes.
            env: Additions to the environment.
            flags: More command-line flags; None for those without a value.
            nursery: Forks the server and its engine, which then have nothing to import.
        """
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._arguments = [
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(model)),
        ]
        if ec is not None:
            self._arguments += ["--ec-transfer-config", ec]
        for flag, value in flags.items():
            self._arguments += [flag] if value is None else [flag, str(value)]
        self._log_path = log_path
        self._env = engine_env({**os.environ, **env})
        self._nursery = nursery
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=300) as reply:  # noqa: S310
            content: bytes = reply.read()
        return content.decode()

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` by name, summed over their labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name = sample.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def __enter__(self) -> ApiServer:
        with open(self._log_path, "ab") as log:
            self._process = spawn(
                _MODULE,
                self._arguments,
                env=self._env,
                log=log.fileno(),
                nursery=self._nursery,
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self._end()
            raise
        return self

    def _wait_ready(self, process: subprocess.Popen[bytes] | Forked) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                self.get("/health")
            except OSError:  # URLError and HTTPError are ones too
                time.sleep(0.1)
            else:
                return
        raise EngineError(
            f"the server did not start ({process.poll()}): {self._log_path.read_text()[-4000:]}"
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        end(process, _STOP_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self._end()

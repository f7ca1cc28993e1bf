# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on 127.0.0.1: for the tests of examples/observability, and for its picture."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import urllib3

from s3ec.errors import ConfigError, UnavailableError
from s3ec.testing.server import HOST, free_port

# Where `make prometheus` puts it.
_BUILT = Path(__file__).parents[3] / "build" / "prometheus" / "usr" / "bin"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


def find_tool(name: str) -> Path:
    """``prometheus`` or ``promtool``: on PATH, or what ``make prometheus`` has brought.

    Raises:
        ConfigError: It is not on this machine; says how to get it.
    """
    found = shutil.which(name) or shutil.which(name, path=str(_BUILT))
    if found is None:
        raise ConfigError(f"{name} is not on this machine; `make prometheus` brings it to build/")
    return Path(found)


class Prometheus:
    """One server, usable as a context manager."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Describe it; start() runs it.

        Args:
            folder: For its data, its log and its configuration; made if missing.
            config: Of ``prometheus.yml``. JSON is YAML.
        """
        self._binary = find_tool("prometheus")
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._http = urllib3.PoolManager(retries=False, timeout=30.0)
        self.port = free_port()

    @property
    def log(self) -> str:
        """What it has logged so far."""
        path = self._folder / "prometheus.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Prometheus:
        """Run it, and wait until it answers.

        Raises:
            UnavailableError: It did not come up; the message ends with its log.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "prometheus.json"
        config.write_text(json.dumps(self._config))
        # The kernel ends it with this process, where util-linux is.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with open(self._folder / "prometheus.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *guard,
                    str(self._binary),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={HOST}:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": os.defpath, "HOME": str(self._folder)},
            )
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if self._http.request("GET", self._url("/-/ready")).status == 200:
                    return self
            time.sleep(0.05)
        raise UnavailableError(f"Prometheus did not start: {self.log[-4000:]}")

    def stop(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Prometheus:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of a query now: series with ``metric`` and ``value``.

        Raises:
            UnavailableError: Prometheus refuses the expression, and says why.
        """
        result: list[dict[str, Any]] = self._ask("/api/v1/query", query=expression)["result"]
        return result

    def wait_for_targets(self, count: int, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Return once so many targets have answered; it looks for them 5 s after its start.

        Raises:
            UnavailableError: They have not.
        """
        end_s = time.monotonic() + timeout_s
        while len(self.query("up == 1")) < count:
            if time.monotonic() > end_s:
                raise UnavailableError(f"no {count} targets after {timeout_s:.0f} s")
            time.sleep(0.1)

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """The same over a time, seconds since the epoch: series with ``metric`` and ``values``."""
        result: list[dict[str, Any]] = self._ask(
            "/api/v1/query_range",
            query=expression,
            start=str(start_s),
            end=str(end_s),
            step=str(step_s),
        )["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """All rules that it has loaded, as it describes them."""
        groups = self._ask("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"

    def _ask(self, path: str, **fields: str) -> Any:
        reply = self._http.request("GET", self._url(path), fields=fields)
        document = json.loads(reply.data)
        if document["status"] != "success":
            raise UnavailableError(f"{document['error']}: {fields.get('query', path)}")
        return document["data"]

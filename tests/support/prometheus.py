# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on 127.0.0.1, for the tests of examples/observability."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import urllib3

from s3ec.errors import UnavailableError
from s3ec.testing.server import HOST, free_port
from tests.support.waiting import eventually

# Where `make prometheus` puts it.
_BUILT = Path(__file__).parents[2] / "build" / "prometheus" / "usr" / "bin"


def find_tool(name: str) -> Path:
    """``prometheus`` or ``promtool``, on PATH or in build/; skips the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(_BUILT))
    if found is None:
        pytest.skip(f"{name} is not on this machine; `make prometheus` brings it to build/")
    return Path(found)


class Prometheus:
    """One server, as a context manager."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Describe it.

        Args:
            folder: For its data, its log and its configuration; made if missing.
            config: Of ``prometheus.yml``. JSON is YAML.
        """
        self._folder = folder
        self._config = config
        self._http = urllib3.PoolManager(retries=False, timeout=30.0)
        self._url = f"http://{HOST}:{(port := free_port())}"
        self._options = (
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={HOST}:{port}",
            "--log.level=warn",
        )

    def __enter__(self) -> Prometheus:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "prometheus.json").write_text(json.dumps(self._config))
        # The kernel ends it with this process, where util-linux is.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with open(self._folder / "prometheus.log", "wb") as log:
            self._process = subprocess.Popen(
                [*guard, str(find_tool("prometheus")), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": os.defpath, "HOME": str(self._folder)},
            )
        try:
            eventually(self._is_ready, "Prometheus is ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()  # nobody reads its data again
        self._process.wait()

    def _is_ready(self) -> bool:
        log = self._folder / "prometheus.log"
        assert self._process.poll() is None, log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            return self._http.request("GET", f"{self._url}/-/ready").status == 200
        return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of a query now: series with ``metric`` and ``value``.

        Raises:
            UnavailableError: Prometheus refuses the expression, and says why.
        """
        result: list[dict[str, Any]] = self._ask("/api/v1/query", query=expression)["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """All rules that it has loaded, as it describes them."""
        groups = self._ask("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _ask(self, path: str, **fields: str) -> Any:
        reply = self._http.request("GET", f"{self._url}{path}", fields=fields)
        document = json.loads(reply.data)
        if document["status"] != "success":
            raise UnavailableError(f"{document['error']}: {fields.get('query', path)}")
        return document["data"]

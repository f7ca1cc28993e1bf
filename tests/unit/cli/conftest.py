# SPDX-License-Identifier: Apache-2.0
"""A small corpus on moto, and the command line without this machine's configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.testing.server import MotoServer
from tests.unit.cli.corpus import Corpus


@pytest.fixture(autouse=True)
def no_torch_and_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands work where neither is installed."""
    for library in ("torch", "vllm"):
        monkeypatch.setitem(sys.modules, library, None)


class Cli:
    """Runs commands in this process."""

    def __init__(self) -> None:
        self._runner = CliRunner()

    def __call__(self, *args: str, code: int = 0) -> Any:
        """Run one command and check its exit code; the result has stdout and stderr."""
        result = self.run(*args)
        assert result.exit_code == code, result.output
        return result

    def run(self, *args: str) -> Any:
        """Run one command, however it ends."""
        result = self._runner.invoke(app, list(args))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        """Run one command with --json; stdout must be one document."""
        return json.loads(self(*args, "--json", code=code).stdout)


def all_shown_on(terminal: int) -> str:
    """What a terminal shows until its last writer has ended; closes it."""
    shown = b""
    with open(terminal, "rb", buffering=0) as screen, suppress(OSError):  # once nobody writes
        while piece := screen.read(65536):
            shown += piece
    return shown.decode()


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture
def make_corpus(
    moto_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Callable[..., Corpus]:
    """Makes an empty corpus that S3EC_* points the command line to."""
    for name, value in moto_server.env().items():
        monkeypatch.setenv(name, value)
    bucket = "cli-" + request.node.name.replace("_", "-").partition("[")[0][:50].rstrip("-")

    def make(prefix: str = "") -> Corpus:
        moto_server.create_bucket(bucket)
        request.addfinalizer(lambda: moto_server.delete_bucket(bucket))
        monkeypatch.setenv("S3EC_BUCKET", bucket)
        monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "s3ec-cache"))
        monkeypatch.setenv("S3EC_PREFIX", prefix)
        monkeypatch.setenv("S3EC_ENDPOINT_URL", moto_server.endpoint_url)
        monkeypatch.setenv("S3EC_CONNECT_TIMEOUT_S", "10")  # the machine may be busy
        monkeypatch.setenv("S3EC_READ_TIMEOUT_S", "60")
        return Corpus(moto_server.client(), bucket, prefix)

    return make


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus()

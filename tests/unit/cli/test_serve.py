# SPDX-License-Identifier: Apache-2.0
"""serve-s3 as a real process, until a signal ends it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli

pytestmark = pytest.mark.s3

Serve = Callable[..., subprocess.Popen[str]]
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the command; whatever still runs at the end is killed."""
    monkeypatch.setenv("S3EC_CONNECT_TIMEOUT_S", "10")  # the machine may be busy
    monkeypatch.setenv("S3EC_READ_TIMEOUT_S", "60")
    running: list[subprocess.Popen[str]] = []

    def start(*args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "s3ec", "serve-s3", *args],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The document that --json prints once the server answers."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    document: dict[str, Any] = json.loads(line)
    return document


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_answers_until_a_signal_ends_it(
    cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    process = serve("--port", "0", "--bucket", "one", "--bucket", "two", "--json")
    document = ready(process)
    assert document["buckets"] == ["one", "two"]
    extra = document["ec_transfer_config"]["ec_connector_extra_config"]
    assert extra == {"bucket": "one", "endpoint_url": document["endpoint_url"]}
    for name, value in document["env"].items():
        monkeypatch.setenv(name, value)
    config = json.dumps(document["ec_transfer_config"])
    assert cli.json("ns", "--config", config) == {"namespaces": [], "replicas": []}
    assert cli.json("ns", "--config", config, "--bucket", "two") == {
        "namespaces": [],
        "replicas": [],
    }
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    cli("ns", "--config", config, code=1)


def test_objects_in_a_data_folder_outlive_the_server(
    cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fixed-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fixed-secret-hush-hush")
    data = ["--port", "0", "--data", str(tmp_path / "s3"), "--json"]
    first = serve(*data)
    document = ready(first)
    assert "AWS_SECRET_ACCESS_KEY" not in document["env"]
    config = json.dumps(document["ec_transfer_config"])
    checks = {
        c["name"]: c["verdict"]
        for c in cli.json("doctor", "--timeout", "100", "--config", config)["checks"]
    }
    assert checks["write"] == "ok"
    first.send_signal(signal.SIGTERM)
    first.communicate()
    config = json.dumps(ready(serve(*data))["ec_transfer_config"])
    assert cli.json("ns", "--config", config) == {"namespaces": [], "replicas": []}


@pytest.mark.parametrize("keys", [{}, dict.fromkeys(KEYS, "hush-hush-hush")], ids=str)
def test_lines_can_be_pasted_and_no_given_secret_is_among_them(
    serve: Serve, keys: dict[str, str]
) -> None:
    process = serve("--port", "0", env=keys)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("vllm serve"):
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert "hush-hush-hush" not in "".join(lines) + rest + errors
    exported = {line.removeprefix("export ").partition("=")[0] for line in lines}
    assert {"S3EC_BUCKET", "S3EC_ENDPOINT_URL"} <= exported
    assert exported.isdisjoint(KEYS) if keys else exported.issuperset(KEYS)
    assert json.loads(shlex.split(lines[-1])[-1])["ec_connector"] == "S3ECConnector"


@pytest.mark.parametrize(
    ("args", "part"),
    [(["--bucket", "b"], "3 to 63"), ([], "both"), (["--port", "99999"], "")],
)
def test_bad_usage_of_serve_is_exit_code_2(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, args: list[str], part: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "only")
    assert part in cli("serve-s3", *args, code=2).stderr

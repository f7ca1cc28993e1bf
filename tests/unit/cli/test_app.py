# SPDX-License-Identifier: Apache-2.0
"""What all commands share: help, start-up, lazy imports, output for people and pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from s3ec.cli import bench
from s3ec.cli.output import safe
from tests.unit.cli.conftest import Cli


def test_starting_imports_no_sdk_no_torch_no_settings() -> None:
    code = (
        "import sys, s3ec.cli.app as a\n"
        "heavy = {'boto3', 'botocore', 'aioboto3', 'torch', 'vllm', 'pydantic', 'rich.table'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [[], ["--help"], ["hooks", "--json"], ["data", "--quick"]])
def test_benchmarks_are_not_in_the_package_and_it_says_where_they_are(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert " bench " in cli("--help").stdout
    assert "In a checkout" in cli("bench", *words, code=2).stderr


def test_safe_cuts_and_escapes() -> None:
    assert safe("plain ä") == "plain ä"
    assert safe("a\x1b[2J\n") == "a\\x1b[2J\\n"
    assert safe("x" * 400) == "x" * 300 + "... (400 characters)"


def printed(
    *words: str, encoding: str = "utf-8", stdout: int | IO[bytes] = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """What a process of its own does with its stdout."""
    return subprocess.run(
        [sys.executable, "-m", "s3ec", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
@pytest.mark.parametrize(
    "command", ["config show --json", "config show", "config docs", "--help", "--version"]
)
def test_full_disk_is_one_line_and_exit_status_1(command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        out = printed(*command.split(), stdout=full)
    assert out.stderr == b"error: cannot write to stdout: No space left on device\n"
    assert out.returncode == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_stdout_of_any_encoding_gets_all_text(encoding: str, flags: list[str]) -> None:
    prefix = "page-\u00e4-\u20ac-\U0001f600"
    out = printed("config", "show", "--prefix", prefix, *flags, encoding=encoding)
    assert (out.returncode, b"Traceback" in out.stderr) == (0, False)
    text = out.stdout.decode(encoding)
    if flags:
        assert json.loads(text)["settings"]["prefix"]["value"] == prefix
    else:
        assert prefix.encode(encoding, "backslashreplace").decode(encoding) in text


def test_closed_stdout_is_no_fault() -> None:
    command = f"{sys.executable} -m s3ec config show --json >&-"
    out = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (out.returncode, "Traceback" in out.stderr) == (0, False)


def test_closed_pipe_ends_without_a_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m s3ec config docs | true"
    out = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in out.stderr

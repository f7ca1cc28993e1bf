# SPDX-License-Identifier: Apache-2.0
"""What all commands share: help, start-up, lazy imports, output for people and pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from s3ec.cli import bench
from s3ec.cli.output import human_age, human_bytes, safe, styled, table
from tests.unit.cli.conftest import Cli


def test_root_help_says_the_exit_status_once(cli: Cli) -> None:
    assert cli("--help").stdout.count("Exit status") == 1


@pytest.mark.parametrize("group", ["", "bench", "config", "manifest"])
def test_group_alone_prints_its_help_and_ends_well(cli: Cli, group: str) -> None:
    alone = cli(*group.split())
    assert alone.stdout == cli(*group.split(), "--help").stdout
    assert alone.stderr == ""


def test_completion_is_installed_by_the_root_alone(cli: Cli) -> None:
    assert "--install-completion" in cli("--help").stdout
    assert "--install-completion" not in cli("bench", "--help").stdout


def test_version_is_printed(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("s3ec ")


def test_starting_imports_no_sdk_no_torch_no_settings() -> None:
    code = (
        "import sys, s3ec.cli.app as a\n"
        "heavy = {'boto3', 'botocore', 'aioboto3', 'torch', 'vllm', 'pydantic', 'rich.table'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_of_the_benchmarks_the_package_has_encode_alone_and_says_where_the_others_are(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    text = cli("bench").stdout
    assert "in a checkout" in text
    assert [line.split()[1] for line in text.splitlines() if " Measure the time" in line] == [
        "encode"
    ]
    assert "No such command" in cli("bench", "hooks", "--json", code=2).stderr
    assert cli.json("bench", "encode", "M", "--engine-args", "[]", code=2)["error"]["field"] == (
        "engine_args"
    )
    assert cli.json("bench", "encode", "M", code=2)["error"]["fix"].startswith("install it")


def test_sizes_and_ages_are_short() -> None:
    assert [human_bytes(n) for n in (0, 1023, 2_752_512, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "2.6 MiB",
        "5.0 TiB",
    ]
    ages = [human_age(s) for s in (None, -3, 59, 61, 7200, 1e6)]
    assert ages == ["?", "0 s", "59 s", "1 min", "2 h", "12 d"]


def test_safe_cuts_and_escapes() -> None:
    assert safe("plain ä") == "plain ä"
    assert safe("a\x1b[2J\n") == "a\\x1b[2J\\n"
    assert safe("x" * 400) == "x" * 300 + "... (400 characters)"


class Terminal(io.StringIO):
    """A stdout on which people read."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_tables_in_its_width_and_colours_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    table([{"namespace": "n" * 30, "dtype": "bfloat16", "entry_count": 3}])
    table([{"name": "n" * 10, "note": "a b " * 10}])
    lines = screen.getvalue().splitlines()
    assert lines == [
        *("namespace", "  dtype     entries", "n" * 30, "  bfloat16        3"),
        *("name        note", f"{'n' * 10}  {'a b ' * 6}a b", f"{' ' * 12}a b a b a b"),
    ]
    assert styled("ok", "green") == "\x1b[32mok\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("ok", "green") == "ok"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("NO_COLOR")
    assert styled("ok", "green") == "ok"


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
@pytest.mark.parametrize("command", ["config show --json", "config show", "--help", "--version"])
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

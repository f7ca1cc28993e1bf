# SPDX-License-Identifier: Apache-2.0
"""``bench hooks`` runs from end to end where vLLM is; its figures are not looked at."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from s3ec.dev.bench import registry
from s3ec.dev.bench.hooks_rows import ROWS
from s3ec.dev.bench.run import child_env


def run_bench() -> subprocess.CompletedProcess[str]:
    # A process of its own: importing vLLM changes the one it is imported into.
    return subprocess.run(
        [sys.executable, "-m", "s3ec", "bench", "hooks", "--quick", "--json", "-"],
        env=child_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_hooks_are_measured_beside_the_example() -> None:
    done = run_bench()
    # 1 would be a reach missed on a busy machine, which this test is not about.
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [spec.name for spec in ROWS]
    unmeasured = {name for name, row in rows.items() if row["value"] is None}
    assert unmeasured <= {"hooks.syscalls_per_call"}
    for hook in ("has_cache_item", "ensure_cache_available"):
        assert rows[f"hooks.{hook}_p50_us"]["value"] > 0
        assert rows[f"hooks.{hook}_ratio_to_example"]["value"] > 0
    assert "no-op" in rows["hooks.ensure_cache_available_ratio_to_example"]["detail"]["denominator"]
    syscalls = rows["hooks.syscalls_per_call"]
    # Not a time: the hooks either make system calls or they don't.
    assert syscalls["ok"] is not False, syscalls["detail"]


def test_without_vllm_every_row_says_so() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from s3ec.cli import main\n"
        "sys.argv = ['s3ec', 'bench', 'hooks', '--quick', '--json', '-']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == [spec.name for spec in registry.load("hooks").rows]
    assert all(row["ok"] is None and "vLLM" in row["detail"]["why"] for row in rows)

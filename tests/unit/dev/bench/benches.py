# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark as people do, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from s3ec.dev.bench import registry
from s3ec.dev.bench.run import child_env


def quick_rows(name: str, *args: str) -> dict[str, dict[str, Any]]:
    """Rows of ``s3ec bench NAME --quick`` by their names; its figures mean nothing."""
    command = [sys.executable, "-m", "s3ec", "bench", *(args or (name,)), "--quick", "--json"]
    done = subprocess.run(
        command, env=child_env(), capture_output=True, text=True, timeout=300, check=False
    )
    # 1 would be a reach missed on a busy machine, which no test is about.
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["bench"] == name
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [spec.name for spec in registry.load(name).rows]
    return rows

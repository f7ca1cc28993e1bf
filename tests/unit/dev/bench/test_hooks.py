# SPDX-License-Identifier: Apache-2.0
"""``bench hooks`` where there is no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

from s3ec.dev.bench import registry
from s3ec.dev.bench.run import child_env


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

# SPDX-License-Identifier: Apache-2.0
"""A picture that has other pixels among others is stored and loaded in its first form only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two-forms")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.two_forms", str(folder)],
        env=engine_env({**os.environ, **ONE_PROCESS}),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("size", ["300x600", "900x1200"])
def test_only_the_form_that_a_picture_has_alone_is_stored(size: str, ran: dict[str, Any]) -> None:
    steps = ran[size]
    counts = {
        name: (step["hits"], step["encoded"])
        for name, step in steps.items()
        if "stored" not in name
    }
    assert steps["stored"] == 1
    assert counts == {
        "two": (0, 2),
        "alone": (0, 1),
        "two again": (0, 2),
        "alone again": (1, 0),
        "third among others": (0, 2),
        "first alone": (0, 1),
    }
    for name in ("two", "alone"):
        assert steps[f"{name} again"]["sums"] == steps[name]["sums"]
        assert steps[f"{name} again"]["rows"] == steps[name]["rows"]
    assert steps["third among others"]["sums"][1] != steps["alone"]["sums"][0]
    assert steps["first alone"]["sums"][0] != steps["two"]["sums"][0]
    assert steps["first alone"]["rows"] == steps["alone"]["rows"]
    # An engine that has had both forms of a picture stores no further one of it.
    assert steps["stored later"] == 0

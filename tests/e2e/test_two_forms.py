# SPDX-License-Identifier: Apache-2.0
"""A picture that has other pixels among others is stored and loaded in one form only."""

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
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
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
    return json.loads(lines[0].removeprefix("RESULT ")), done.stdout + done.stderr


@pytest.mark.parametrize("size", ["300x600", "900x1200"])
def test_only_the_form_of_a_picture_alone_is_stored_and_loaded(
    size: str, ran: tuple[dict[str, Any], str]
) -> None:
    steps = ran[0][size]
    alone, again = steps["alone"], steps["alone again"]
    two, two_again = steps["two"], steps["two again"]
    assert steps["stored"] == 1  # of those asked for alone
    assert (two["hits"], two["encoded"]) == (0, 2)
    assert (two_again["hits"], two_again["encoded"]) == (0, 2)  # though one is stored
    assert (alone["hits"], alone["encoded"]) == (0, 1)
    assert (again["hits"], again["encoded"]) == (1, 0)
    assert again["sums"] == alone["sums"]
    assert two_again["sums"][0] not in alone["sums"]
    # What was asked for among others first is not served in that form.
    assert steps["first alone"]["hits"] == 0
    assert steps["first alone"]["rows"] == alone["rows"]


def test_it_is_said_once(ran: tuple[dict[str, Any], str]) -> None:
    said = [line for line in ran[1].splitlines() if "UnlimitedOCRMultiModalProcessor" in line]
    assert len(said) == 1
    assert "each image of a prompt that has more than 1" in said[0]

# SPDX-License-Identifier: Apache-2.0
"""The tracer that counts files and moves: both trips happen; how much they take is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_trips_happen_while_they_are_counted() -> None:
    """In a process of its own: the profile function stays in threads that go on."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trips"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["problems"] == {}
    assert document["is_announced"]
    assert document["is_equal"]
    for name, trip in document["trips"].items():
        assert f"\n{name}  " in done.stderr
        assert trip["file_count"] == len(trip["calls_by_file"])
        assert trip["move_count"] == sum(trip["moves_by_thread"].values())
        assert trip["move_count"] == sum(trip["moves"].values())
        assert not [file for file in trip["calls_by_file"] if file.startswith("testing/")]
        # More than one thread was seen, and the shell that vLLM calls.
        assert len(trip["moves_by_thread"]) > 1
        assert trip["entry_count"]
        assert "connector/connector.py" in trip["calls_by_file"]

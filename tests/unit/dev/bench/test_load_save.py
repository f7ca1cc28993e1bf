# SPDX-License-Identifier: Apache-2.0
"""``bench load`` and ``bench save`` run from end to end where vLLM is; no figure is looked at."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from s3ec.dev.bench import load, registry, save
from s3ec.dev.bench.run import child_env

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


# Both in one process: importing vLLM takes longer than either.
_BOTH = """
import json
from s3ec.dev.bench import run
results = [run.run_here(name, quick=True, say=lambda *_: None) for name in ("load", "save")]
print(json.dumps([result.to_json() for result in results]))
"""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Rows of both by their names."""
    done = subprocess.run(
        [sys.executable, "-c", _BOTH],
        env=child_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [row for document in json.loads(done.stdout) for row in document["rows"]]
    specs = (*registry.load("load").rows, *registry.load("save").rows)
    assert [row["name"] for row in found] == [spec.name for spec in specs]
    return {row["name"]: row for row in found}


def test_loads_are_measured_beside_preadv_and_the_example(
    rows: dict[str, dict[str, Any]],
) -> None:
    assert all(row["value"] > 0 for name, row in rows.items() if name.startswith("load."))
    cases = rows["load.us_per_item"]["detail"]["cases"]
    for size in (1, 8):
        for name in ("s3ec", load.PREADV, load.EXAMPLE):
            assert cases[f"{name}, {size} a step, disk"] > 0


def test_saves_are_measured_beside_a_clone_and_the_example(
    rows: dict[str, dict[str, Any]],
) -> None:
    cases = rows["save.us_per_item"]["detail"]["cases"]
    both = {f"{name}, {size} a step" for name in ("s3ec", save.CLONE) for size in (1, 8)}
    assert cases.keys() == both | {save.EXAMPLE}
    assert all(value > 0 for value in cases.values())
    assert rows["save.ratio_to_example"]["value"] > 0
    assert "50 us" in rows["save.ratio_to_clone"]["detail"]["formula"]

# SPDX-License-Identifier: Apache-2.0
"""A job on a local Ray with two real engines, one of which is killed; then the command goes on.

Nothing is missing, and only what the dead one had is done twice, by the workers' own notes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus import Corpus
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import LocalS3
from tests.e2e.ray_job import ENGINE, run_killing_one, stored
from tests.e2e.rig import settings
from tests.support.waiting import DEADLINE_S

PICTURES, NEW = 60, 3


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_killed_worker_costs_only_what_it_had_in_flight_and_the_command_goes_on(
    tmp_path: Path, gemma: Path, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = local_s3.create_bucket("on-ray")
    pictures = tmp_path / "pages"
    write_pictures(pictures, PICTURES)
    (pictures / "broken.png").write_bytes(b"no picture")
    where = settings(local_s3, bucket, tmp_path / "tier")
    env = engine_env({**os.environ, **ONE_PROCESS})
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        outcome = run_killing_one(
            Path(folder), pictures, gemma, where, env=env, timeout_s=2 * DEADLINE_S
        )
    report = outcome.report
    assert report["status"] == "partial"
    assert [each["document"] for each in report["failures"]] == ["broken.png"]
    assert (report["encoded_count"], report["unconfirmed_count"]) == (PICTURES, 0)
    assert outcome.of_killed & outcome.confirmed
    assert len(outcome.encoded) == PICTURES, outcome.account
    assert outcome.beyond_flight == set(), outcome.account
    assert set(outcome.encoded) == stored(where)
    with Corpus.open(where) as corpus:
        assert len(list(corpus.catalog().rows())) == PICTURES

    (pictures / "broken.png").unlink()
    write_pictures(pictures, PICTURES + NEW)
    with tempfile.TemporaryDirectory() as folder:
        report = by_command(pictures, gemma, where, {**env, "RAY_TMPDIR": folder, "HOME": folder})
    assert (report["status"], report["engine_started"]) == ("complete", True)
    assert (report["done_before_count"], report["encoded_count"]) == (PICTURES, NEW)
    assert len(stored(where)) == PICTURES + NEW
    local_s3.delete_bucket(bucket)


def by_command(
    pictures: Path, model: Path, where: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """What ``s3ec precompute --engine ray`` reports."""
    words = [
        *("precompute", str(pictures), "--model", str(model)),
        *("--config", json.dumps(where), "--engine-args", json.dumps(ENGINE)),
        *("--engine", "ray", "--ray-workers", "1", "--ray-gpus", "0", "--ray-cpus", "1"),
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.ray_job", json.dumps(words)],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found

# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute --engine ray`` with a real engine in a worker of a local Ray.

What a worker that is killed costs is asked in tests/unit/corpus/test_ray_encoder.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import LocalS3
from tests.e2e.rig import settings
from tests.support.waiting import DEADLINE_S

PICTURES = 6
ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 1024,
    "max_num_seqs": 4,
}


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_command_stores_and_catalogues_what_a_worker_encodes(
    tmp_path: Path, gemma: Path, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = local_s3.create_bucket("on-ray")
    pictures = tmp_path / "pages"
    write_pictures(pictures, PICTURES)
    (pictures / "broken.png").write_bytes(b"no picture")
    where = settings(local_s3, bucket, tmp_path / "tier")
    words = [
        *("precompute", str(pictures), "--model", str(gemma)),
        *("--config", json.dumps(where), "--engine-args", json.dumps(ENGINE)),
        *("--engine", "ray", "--ray-workers", "1", "--ray-gpus", "0", "--ray-cpus", "1"),
        "--json",
    ]
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.ray_job", *words],
            env=engine_env({**os.environ, **ONE_PROCESS}) | {"RAY_TMPDIR": folder, "HOME": folder},
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert (report["status"], report["engine_started"]) == ("partial", True), done.stderr[-4000:]
    assert [each["document"] for each in report["failures"]] == ["broken.png"]
    assert (report["encoded_count"], report["unconfirmed_count"]) == (PICTURES, 0)
    with Corpus.open(where) as corpus:
        assert len(list(corpus.list())) == len(list(corpus.catalog().rows())) == PICTURES
    local_s3.delete_bucket(bucket)

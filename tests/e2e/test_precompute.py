# SPDX-License-Identifier: Apache-2.0
"""examples/precompute.py fills a bucket, tells what it could not encode, and goes on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import STEADY, engine_env
from s3ec.testing.server import LocalS3
from tests.e2e.rig import keys, settings

SCRIPT = Path(__file__).parents[2] / "examples" / "precompute.py"
# What a small machine needs; the rest is the script's own.
ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}


def test_a_second_run_adds_what_the_first_one_lacked(
    tmp_path: Path, gemma: Path, local_s3: LocalS3
) -> None:
    bucket = local_s3.create_bucket("precomputed")
    client = local_s3.client()
    folder = tmp_path / "pages"
    made = write_pictures(folder, 5)
    later = tmp_path / "later"
    later.mkdir()
    for path in made[3:]:
        path.rename(later / path.name)
    broken = folder / "broken.png"
    broken.write_bytes(b"no picture")

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        config = settings(local_s3, bucket, tmp_path / "tier")
        return subprocess.run(
            [
                *(sys.executable, SCRIPT, "--model", gemma, "--images", folder, "--batch", "2"),
                *("--config", json.dumps(config), "--engine", json.dumps(ENGINE)),
            ],
            env=engine_env({**os.environ, **local_s3.env(), **STEADY, **more}),
            capture_output=True,
            text=True,
            check=False,
        )

    def objects() -> set[str]:
        return {key for key in keys(client, bucket) if "/objects/" in key}

    first = run()
    assert first.returncode == 1, first.stderr[-4000:]
    assert "4 of 4 pictures" in first.stdout
    # The others of its batch are there, and the one that is none is named.
    assert len(objects()) == 3
    assert f"not encoded: {broken}" in first.stderr
    before = objects()

    broken.unlink()
    for path in later.iterdir():
        path.rename(folder / path.name)
    second = run(VLLM_ENABLE_V1_MULTIPROCESSING="0")  # starts in half the time
    assert second.returncode == 0, second.stderr[-4000:]
    assert len(objects()) == 5
    assert before < objects()
    local_s3.delete_bucket(bucket)

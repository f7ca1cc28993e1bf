# SPDX-License-Identifier: Apache-2.0
"""``s3ec advise`` with vLLM's own processor, pictures in a folder, and a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from s3ec.dev.rigs.models import write_qwen2_vl
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import engine_env
from s3ec.testing.server import LocalS3

pytest.importorskip("vllm")


def test_pages_bucket_and_disk_are_measured(
    tmp_path: Path, local_s3: LocalS3, s3_bucket: str
) -> None:
    pictures = write_pictures(tmp_path / "pages", 4)
    config = {
        "bucket": s3_bucket,
        "endpoint_url": local_s3.endpoint_url,
        "region": "us-east-1",
        "cache_dir": str(tmp_path / "cache"),
    }
    command = [
        *(sys.executable, "-m", "s3ec", "advise", "--json", "--gpu", "l4"),
        *("--config", json.dumps(config), "--images", str(pictures[0].parent)),
        *("--", "vllm", "serve", str(write_qwen2_vl(tmp_path / "model")), "--dtype", "bfloat16"),
    ]
    env = {**engine_env(), **local_s3.env()}
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    document = json.loads(out.stdout)
    found = {figure["name"]: figure for figure in document["figures"]}
    assert document["notes"] == []
    assert found["width"]["value"] == 64
    assert found["rows"]["source"] == found["processor"]["source"] == "measured"
    assert found["rows"]["note"] == "median of 4 pictures"
    assert found["fetch"]["source"] == found["tier_read"]["source"] == "measured"
    assert "TFLOP" in found["encode"]["note"]
    assert found["gpus"]["source"] == "given"
    nbytes = found["rows"]["value"] * 64 * 2
    assert document["store_latency"]["nbytes"] == nbytes
    listed = local_s3.client().list_objects_v2(Bucket=s3_bucket)
    assert "Contents" not in listed
    assert not (tmp_path / "cache").exists()

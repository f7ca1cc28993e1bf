# SPDX-License-Identifier: Apache-2.0
"""``s3ec bench encode``: a figure for a model of one's own, from the installed package alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jsonschema import Draft202012Validator

from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from tests.docs_pages import SCHEMA
from tests.support.waiting import DEADLINE_S

ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 8,
}


def test_one_encode_of_a_model_is_measured(
    nursery: EngineForkServer, gemma: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = ["bench", "encode", str(gemma), "--pages", "2", "--json"]
    words += ["--engine-args", json.dumps(ENGINE)]
    with log.open("wb") as file:
        corpus = {"S3EC_BUCKET": "embeddings"}  # of a shell in which one works; it is not touched
        env = engine_env({**os.environ, **ONE_PROCESS, **corpus})
        nursery.fork("s3ec", words, env=env, log=file.fileno(), fds=()).wait(DEADLINE_S)
    [line] = [one for one in log.read_text().splitlines() if one.startswith('{"model"')]
    found = json.loads(line)
    Draft202012Validator(SCHEMA).validate(found)
    assert set(SCHEMA["$defs"]["bench encode"]["required"]) <= set(found)
    assert (found["page_count"], found["model"]) == (2, str(gemma))
    assert found["rows"] > 0
    assert found["encode_ms"] > 0

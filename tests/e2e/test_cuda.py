# SPDX-License-Identifier: Apache-2.0
"""Engines on a CUDA device, with an encoder as large as Gemma3-27B's; skipped where there is none.

They are asked as the engines on the CPU are. Copies between host and device run beside the model
here, so a wrong order of them would change what is answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import FROM_BUCKET, HITS, MISSES, eventually, settings, until_index_is_read

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PICTURES = 24
# Of a log-probability: requests that wait are computed in other batches.
CLOSE = 1e-5


def test_answers_from_the_bucket_are_those_without_the_connector(
    tmp_path: Path, local_s3: LocalS3
) -> None:
    bucket = local_s3.create_bucket("on-cuda")
    model = write_gemma3(tmp_path / "model", "gemma3-27b")
    write_pictures(tmp_path / "pictures", PICTURES)
    prompts = [
        [image(path), text("what is to be seen in it?")]
        for path in sorted((tmp_path / "pictures").iterdir())
    ]

    def engine(name: str, role: str | None) -> EngineProcess:
        where = settings(local_s3, bucket, tmp_path / f"tier of {name}", index_refresh_s=0.5)
        return EngineProcess(
            model,
            ec=role and ec_config(role, where, ec_connector_module_path="s3ec.connector"),
            log_path=tmp_path / f"{name}.log",
            media=tmp_path,
            env=local_s3.env() | ONE_PROCESS,
            options={**NEW_PICTURES, "gpu_memory_utilization": 0.15},
        )

    def ask(one: EngineProcess) -> list[dict[str, Any]]:
        return [one.chat([prompt], max_tokens=6, logprobs=3)[0] for prompt in prompts]

    with engine("plain", None) as plain:
        expected = ask(plain)
    with engine("producer", "ec_producer") as producer:
        ask(producer)
    # Which returns when its saves are stored.
    for role in ("ec_consumer", "ec_both"):
        with engine(role, role) as one:
            until_index_is_read(one, PICTURES)
            answers = ask(one)
            eventually(lambda: one.counters().get(HITS, 0) >= PICTURES)
            counters = one.counters()
        assert counters[MISSES] == 0
        assert counters[FROM_BUCKET] == PICTURES
        for found, wanted in zip(answers, expected, strict=True):
            assert found["token_ids"] == wanted["token_ids"]
            for mine, theirs in zip(found["logprobs"], wanted["logprobs"], strict=True):
                assert mine == pytest.approx(theirs, abs=CLOSE)
    local_s3.delete_bucket(bucket)

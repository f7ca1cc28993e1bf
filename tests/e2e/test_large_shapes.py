# SPDX-License-Identifier: Apache-2.0
"""An embedding of 67 MB: stored by one engine, answered from the bucket by a fresh one."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    FROM_BUCKET,
    HITS,
    LOADS,
    MISSES,
    Gallery,
    eventually,
    keys,
    moved,
    said,
    settings,
    until_index_is_read,
)

PRESET = "embedding-67mb"
SHAPE = codec.Shape(1024, 16384, "bfloat16")


@pytest.mark.slow
def test_a_large_embedding_is_answered_from_the_bucket_as_it_is_when_encoded(
    workdir: Path, gallery: Gallery, local_s3: LocalS3, nursery: EngineForkServer
) -> None:
    model = write_gemma3(workdir / PRESET, PRESET)
    bucket = local_s3.create_bucket(PRESET)
    client = local_s3.client()

    def engine(role: str) -> EngineProcess:
        return EngineProcess(
            model,
            ec=ec_config(role, settings(local_s3, bucket, workdir / f"{PRESET}-{role}-tier")),
            log_path=workdir / f"{PRESET}-{role}.log",
            media=workdir,
            env=local_s3.env() | ONE_PROCESS,
            nursery=nursery,
        )

    def objects() -> list[str]:
        return [key for key in keys(client, bucket) if "/objects/" in key]

    prompt = [gallery.solo("single")]
    with engine("ec_both") as both:
        encoded = both.chat(prompt, max_tokens=4, logprobs=2)
        eventually(lambda: len(objects()) == 1, "it is stored")
        eventually(lambda: bool([key for key in keys(client, bucket) if "/delta/" in key]), "told")
    [name] = objects()
    front = client.get_object(Bucket=bucket, Key=name, Range="bytes=0-16383")["Body"].read()
    assert codec.parse_header(front).shape == SHAPE
    with engine("ec_consumer") as consumer:
        until_index_is_read(consumer)
        before = consumer.counters()
        loaded = consumer.chat(prompt, max_tokens=4, logprobs=2)
        told = moved(before, consumer.counters())
    assert said(loaded[0]) == said(encoded[0])
    assert (told[HITS], told[LOADS], told[FROM_BUCKET]) == (1, 1, 1)
    assert MISSES not in told  # it has not encoded it itself
    local_s3.delete_bucket(bucket)

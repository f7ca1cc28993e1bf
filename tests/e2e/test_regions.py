# SPDX-License-Identifier: Apache-2.0
"""A producer at home, a consumer that reads near first, whose encoder gives itself away."""

from __future__ import annotations

from pathlib import Path

from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    MISSES,
    OPTIONS,
    Answer,
    Corpus,
    Gallery,
    Scenario,
    body,
    eventually,
    keys,
    other_vision_tower,
    record,
    said,
    settings,
    until_index_is_read,
)


def test_a_consumer_reads_near_copies_what_lags_and_lives_without_home(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    reference: dict[str, list[Answer]],
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> None:
    client = local_s3.client()
    near = local_s3.create_bucket("corpus-near")
    for purpose in ("left", "middle"):
        key = corpus.objects[purpose]
        client.put_object(Bucket=near, Key=key, Body=body(client, corpus.bucket, key))
    forged = body(client, corpus.bucket, corpus.objects["left"])
    client.put_object(Bucket=near, Key=corpus.objects["right"], Body=forged)
    with FaultProxy(local_s3.endpoint_url) as home:
        replica = {"bucket": near, "endpoint_url": local_s3.endpoint_url, "fill": True}
        chosen = settings(local_s3, corpus.bucket, workdir / "regions-tier")
        chosen |= {"endpoint_url": home.url, "replicas": [replica]}
        with (
            other_vision_tower(gemma),
            EngineProcess(
                gemma,
                ec=ec_config("ec_consumer", chosen),
                log_path=workdir / "regions.log",
                media=workdir,
                env=local_s3.env() | ONE_PROCESS,
                options=OPTIONS,
                nursery=nursery,
            ) as engine,
        ):
            until_index_is_read(engine)

            def answered(purpose: str) -> None:
                name = f"solo {purpose}"
                found = record(engine, Scenario(name, [gallery.solo(purpose)]))
                assert [said(answer) for answer in found.answers] == [
                    said(answer) for answer in reference[name]
                ]
                assert (found[HITS], found[MISSES]) == (1, 0), purpose

            answered("left")  # near, or both where near is late
            answered("right")  # near has another one's bytes
            answered("pair")  # near lacks it
            eventually(lambda: corpus.objects["pair"] in keys(client, near), "it is copied near")
            eventually(lambda: any("/delta/" in key for key in keys(client, near)), "and the index")
            with home.refusing():
                answered("middle")
    for key in keys(client, near) - {corpus.objects["right"]}:
        assert body(client, near, key) == body(client, corpus.bucket, key)
    local_s3.delete_bucket(near)

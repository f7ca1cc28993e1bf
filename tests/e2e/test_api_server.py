# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` hits what LLM.chat precomputed, with the connector's name as its only hint.

The server's vision encoder has other weights than the one that filled the bucket.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from s3ec.testing.engine import ec_config
from s3ec.testing.server import LocalS3
from tests.e2e.api_server import ApiServer
from tests.e2e.rig import (
    OPTIONS,
    QUESTION,
    STEADY,
    Answer,
    Corpus,
    Gallery,
    eventually,
    settings,
    tier_of,
)


@dataclass(frozen=True)
class _Exchange:
    answer: str | None
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def exchange(
    workdir: Path, gallery: Gallery, other_weights: Path, corpus: Corpus, local_s3: LocalS3
) -> _Exchange:
    """One picture, posted as a data URL, and the server's metrics after the answer."""
    picture = gallery["posted"]
    kind = {".png": "image/png", ".jpg": "image/jpeg"}[picture.suffix]
    url = f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    with ApiServer(
        other_weights,
        ec=ec_config("ec_consumer", settings(local_s3, corpus.bucket, workdir / "server-tier")),
        log_path=workdir / "server.log",
        env=local_s3.env() | STEADY,
        flags={
            "--served-model-name": "tiny",
            "--enforce-eager": None,
            "--gpu-memory-utilization": "0.3",
            "--max-model-len": 4096,
            "--max-num-seqs": 8,
            "--seed": 0,
            "--max-num-batched-tokens": OPTIONS["max_num_batched_tokens"],
            "--block-size": OPTIONS["block_size"],
            "--enable-prefix-caching": None,
        },
    ) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(
                model="tiny",
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": url}},
                            {"type": "text", "text": QUESTION},
                        ],
                    }
                ],
                max_tokens=8,
                temperature=0,
            )
        # Metrics are published beside the answer, not before it.
        eventually(lambda: "vllm:s3ec_loads_total" in server.metrics(), "the metrics are there")
        return _Exchange(reply.choices[0].message.content, server.metrics())


def test_a_picture_posted_as_data_url_hits_what_was_precomputed_from_its_file(
    exchange: _Exchange,
) -> None:
    assert exchange.metrics["vllm:s3ec_hits_total"] == 1
    assert exchange.metrics["vllm:s3ec_loads_total"] == 1
    assert exchange.metrics.get("vllm:s3ec_misses_total", 0) == 0


def test_the_servers_answer_is_that_of_an_engine_without_the_connector(
    exchange: _Exchange, reference: dict[str, list[Answer]]
) -> None:
    assert exchange.answer == reference["solo posted"][0]["text"]


def test_pins_of_the_killed_server_are_swept_by_the_next_user_of_the_nodes_disk(
    exchange: _Exchange, workdir: Path, corpus: Corpus
) -> None:
    # vLLM's server ends its engine by SIGKILL unless told otherwise (--shutdown-timeout).
    tier = tier_of(workdir / "server-tier", corpus.namespace)
    tier.open()
    try:
        assert tier.check() == []
        assert tier.usage().entries == 1
    finally:
        tier.close()

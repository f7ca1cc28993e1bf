# SPDX-License-Identifier: Apache-2.0
"""Two consumers of one corpus, and what they are asked: an engine in Python, and ``vllm serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from s3ec.dev.rigs.api_server import ApiServer
from s3ec.dev.rigs.engine import EngineProcess, ec_config, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import STEADY
from s3ec.testing.server import REGION, LocalS3
from tests.e2e.rig import (
    INDEXED,
    OPTIONS,
    QUESTION,
    Corpus,
    Gallery,
    Record,
    Scenario,
    data_url,
    eventually,
    record,
    scenarios,
    settings,
    until_index_is_read,
)
from tests.terraform.cases import transfer_json


@dataclass(frozen=True)
class Place:
    """What a consumer needs to be told.

    Attributes:
        model: Folder of the model.
        workdir: Where its log and its tier go; pictures are below.
    """

    model: Path
    workdir: Path
    gallery: Gallery
    corpus: Corpus
    server: LocalS3
    nursery: EngineForkServer


@dataclass(frozen=True)
class Exchange:
    """The server's answer to one picture, and its metrics afterwards."""

    answer: str | None
    metrics: dict[str, float]


def ask_engine(place: Place) -> dict[str, Record]:
    """Every scenario and the control, asked of one consumer with an empty tier."""
    with EngineProcess(
        place.model,
        ec=ec_config(
            "ec_consumer",
            settings(place.server, place.corpus.bucket, place.workdir / "consumer-tier"),
            ec_connector_module_path="s3ec.connector",
        ),
        log_path=place.workdir / "consumer.log",
        media=place.workdir,
        env=place.server.env() | STEADY,
        options=OPTIONS,
        nursery=place.nursery,
    ) as engine:
        until_index_is_read(engine, len(place.corpus.objects))
        asked = [*scenarios(place.gallery), Scenario("control", [place.gallery.solo("control")])]
        return {scenario.name: record(engine, scenario) for scenario in asked}


def ask_server(place: Place) -> Exchange:
    """One picture, posted as a data URL by a client that calls it like another one's hash.

    The server's flag is what `terraform output` gives for such a store; what is this node's own
    stands in the environment. The bucket is read through aioboto3.
    """
    where = {"bucket": place.corpus.bucket, "endpoint_url": place.server.endpoint_url}
    node = settings(
        place.server, place.corpus.bucket, place.workdir / "server-tier", transport="aioboto3"
    )
    own = {f"S3EC_{name.upper()}": str(node[name]) for name in node.keys() - where.keys()}
    with ApiServer(
        place.model,
        ec=transfer_json("ec_consumer", **where, region=REGION),
        log_path=place.workdir / "server.log",
        env=place.server.env() | STEADY | own,
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
            "--middleware": "s3ec.middleware.StripClientIds",
        },
        nursery=place.nursery,
    ) as server:

        def is_read() -> bool:
            _ask(server.url, text("is the index here?"))  # gauges move with steps
            return server.metrics().get(INDEXED, 0) >= len(place.corpus.objects)

        eventually(is_read, "the server has read the index")
        stolen = Path(place.corpus.objects["single"]).stem
        url = {"url": data_url(place.gallery["posted"])}
        picture = {"type": "image_url", "image_url": url, "uuid": stolen}
        answer = _ask(server.url, picture, text(QUESTION))
        # Metrics are published beside the answer, not before it.
        eventually(
            lambda: server.metrics().get("vllm:s3ec_loads_total", 0) >= 1, "the metrics are there"
        )
        return Exchange(answer, server.metrics())


def _ask(url: str, *parts: Any) -> str | None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": parts}],
            max_tokens=8,
            temperature=0,
        )
    return reply.choices[0].message.content

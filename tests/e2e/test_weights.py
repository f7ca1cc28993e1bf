# SPDX-License-Identifier: Apache-2.0
"""Engines on one folder with different weights: no embedding of one is loaded by another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    MISSES,
    OPTIONS,
    Gallery,
    Scenario,
    body,
    eventually,
    keys,
    other_projector,
    record,
    said,
    settings,
)


def test_an_engine_whose_projector_was_replaced_shares_nothing_with_the_one_before(
    workdir: Path, gallery: Gallery, local_s3: LocalS3, nursery: EngineForkServer
) -> None:
    """It is a thousandth of the encoder's values. Engines of one encoder share in other tests."""
    model = write_gemma3(workdir / "weights-gemma3")
    bucket, client = local_s3.create_bucket("weights"), local_s3.client()
    chosen = settings(local_s3, bucket, workdir / "weights-tier", weights="fingerprint")

    def asked(name: str, ec: dict[str, Any] | None, *, stored: int = 0) -> tuple[Any, ...]:
        """What a fresh engine answers; one that stores has found nothing before."""
        with EngineProcess(
            model,
            ec=ec,
            log_path=workdir / f"weights-{name}.log",
            media=workdir,
            env=local_s3.env() | ONE_PROCESS,
            options=OPTIONS,
            nursery=nursery,
        ) as engine:
            told = record(engine, Scenario(name, [gallery.solo("single")]))
            eventually(lambda: len(below("/objects/")) == stored or ec is None, "it is stored")
        assert ec is None or (told[HITS], told[MISSES]) == (0, 1)
        return said(told.answers[0])

    def below(part: str) -> list[bytes]:
        names = [key for key in keys(client, bucket) if part in key]
        return [body(client, bucket, key) for key in names]

    before = asked("before", ec_config("ec_both", chosen), stored=1)
    with other_projector(model):
        reference = asked("reference", None)
        after = asked("projector", ec_config("ec_both", chosen), stored=2)
    assert after == reference != before
    assert len({codec.parse_header(blob).checksum for blob in below("/objects/")}) == 2
    marks = [json.loads(text)["weights"] for text in below("/namespace.json")]
    assert [mark.split(":")[0] for mark in marks] == ["sha256"] * 2
    local_s3.delete_bucket(bucket)

# SPDX-License-Identifier: Apache-2.0
"""The main job by the ways to a bucket that the other modules do not take.

Those go through obstore, which is what ``transport: auto`` comes to. Here: aioboto3, and a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s3ec.testing.engine import EngineProcess, ec_config
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    FROM_BUCKET,
    HITS,
    LOADS,
    MISSES,
    ONE_PROCESS,
    OPTIONS,
    STEADY,
    Answer,
    Gallery,
    Record,
    Scenario,
    eventually,
    keys,
    other_vision_tower,
    record,
    said,
    settings,
)

PICTURES = ["single", "left", "right"]


@dataclass(frozen=True)
class _Way:
    """Where the corpus is, and how to see what is in it."""

    name: str
    settings: dict[str, Any]
    names: Callable[[], set[str]]

    def config(self, role: str, cache_dir: Path) -> dict[str, Any]:
        """The content of ``--ec-transfer-config``, with a tier of the engine's own."""
        return ec_config(role, {**self.settings, "cache_dir": str(cache_dir)})


@pytest.fixture(scope="module", params=["aioboto3", "folder"])
def way(request: pytest.FixtureRequest, workdir: Path, local_s3: LocalS3) -> _Way:
    if request.param == "folder":
        folder = workdir / "folder corpus"
        folder.mkdir()
        place = settings(local_s3, "none", workdir / "tier")
        del place["bucket"], place["endpoint_url"], place["transport"]

        def files() -> set[str]:
            return {str(path) for path in folder.rglob("*.safetensors")}

        return _Way("folder", {**place, "url": folder.as_uri()}, files)
    bucket = local_s3.create_bucket("by-the-sdk")
    place = settings(local_s3, bucket, workdir / "tier", transport="aioboto3")
    return _Way(
        "aioboto3",
        place,
        lambda: {name for name in keys(local_s3.client(), bucket) if "/objects/" in name},
    )


@pytest.fixture(scope="module")
def answered(
    way: _Way,
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    reference: dict[str, list[Answer]],
    local_s3: LocalS3,
) -> Record:
    """What a fresh consumer with another vision encoder says after a producer has saved."""
    with EngineProcess(
        gemma,
        ec=ec_config(
            "ec_producer", {**way.settings, "cache_dir": str(workdir / f"{way.name}-out")}
        ),
        log_path=workdir / f"{way.name}-producer.log",
        media=workdir,
        env=local_s3.env() | ONE_PROCESS,
    ) as engine:
        for purpose in PICTURES:
            engine.chat([gallery.solo(purpose)], max_tokens=1)
        eventually(lambda: len(way.names()) == len(PICTURES), "all embeddings are stored")
    with (
        other_vision_tower(gemma),
        EngineProcess(
            gemma,
            ec=ec_config(
                "ec_consumer", {**way.settings, "cache_dir": str(workdir / f"{way.name}-in")}
            ),
            log_path=workdir / f"{way.name}-consumer.log",
            media=workdir,
            env=local_s3.env() | STEADY,
            options=OPTIONS,
        ) as engine,
    ):
        return record(engine, Scenario("solo", [gallery.solo(purpose) for purpose in PICTURES]))


def test_a_fresh_consumer_answers_from_the_bucket_as_an_engine_without_the_connector(
    answered: Record, reference: dict[str, list[Answer]]
) -> None:
    expected = [said(reference[f"solo {purpose}"][0]) for purpose in PICTURES]
    assert [said(answer) for answer in answered.answers] == expected
    assert answered[MISSES] == 0
    assert answered[HITS] == answered[LOADS] == answered[FROM_BUCKET] == len(PICTURES)
    assert "vllm:s3ec_internal_errors" not in answered.moved

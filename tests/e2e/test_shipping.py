# SPDX-License-Identifier: Apache-2.0
"""A corpus that went to another site through a folder answers there as if nothing had happened.

The consumer has a vision encoder with other weights than the one that filled the bucket, so an
image that it encoded itself would be answered differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from s3ec.corpus import Corpus as Bucket
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY
from s3ec.testing.server import REGION, LocalS3
from tests.e2e.rig import (
    FROM_BUCKET,
    HITS,
    MISSES,
    OPTIONS,
    Answer,
    Corpus,
    Gallery,
    Record,
    Scenario,
    other_vision_tower,
    record,
    said,
    settings,
    until_index_is_read,
)

_SHIPPED = ("single", "left", "shared")
_PURPOSES = (*_SHIPPED, "control")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[LocalS3]:
    """The other site's server."""
    with LocalS3() as server:
        yield server


@pytest.fixture(scope="module")
def shipped(
    tmp_path_factory: pytest.TempPathFactory,
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    reference: dict[str, list[Answer]],
    local_s3: LocalS3,
    elsewhere: LocalS3,
    nursery: EngineForkServer,
) -> dict[str, Record]:
    """What the other site's consumer says."""
    folder = tmp_path_factory.mktemp("shipping")
    hashes = [PurePosixPath(corpus.objects[purpose]).stem for purpose in _SHIPPED]
    bucket = elsewhere.create_bucket("shipped")
    with pytest.MonkeyPatch.context() as patch:
        _move(patch, local_s3)
        with Bucket.open(_place(local_s3, corpus.bucket)) as source:
            done = source.export(folder / "disk", identifiers=hashes)
            assert done.copied == len(hashes)
        _move(patch, elsewhere)
        with Bucket.open(_place(elsewhere, bucket)) as target:
            done = target.import_from(folder / "disk")
            assert (done.status, done.copied) == ("complete", len(hashes))
            assert target.verify().agrees
    with (
        other_vision_tower(gemma),
        EngineProcess(
            gemma,
            ec=ec_config("ec_consumer", settings(elsewhere, bucket, workdir / "shipped-tier")),
            log_path=workdir / "shipped.log",
            media=workdir,
            env=elsewhere.env() | STEADY | ONE_PROCESS,
            options=OPTIONS,
            nursery=nursery,
        ) as engine,
    ):
        until_index_is_read(engine, len(hashes))
        return {
            purpose: record(engine, Scenario(purpose, [gallery.solo(purpose)]))
            for purpose in _PURPOSES
        }


def _place(server: LocalS3, bucket: str) -> dict[str, Any]:
    return {"bucket": bucket, "endpoint_url": server.endpoint_url, "region": REGION}


def _move(patch: pytest.MonkeyPatch, server: LocalS3) -> None:
    for name, value in server.env().items():
        patch.setenv(name, value)


@pytest.mark.parametrize("purpose", _SHIPPED)
def test_the_other_site_answers_from_what_was_shipped(
    purpose: str,
    shipped: dict[str, Record],
    reference: dict[str, list[Answer]],
) -> None:
    found = shipped[purpose]
    assert said(found.answers[0]) == said(reference[f"solo {purpose}"][0])
    assert (found[HITS], found[MISSES], found[FROM_BUCKET]) == (1, 0, 1)


def test_what_was_not_shipped_is_encoded_with_other_weights(
    shipped: dict[str, Record], reference: dict[str, list[Answer]]
) -> None:
    assert said(shipped["control"].answers[0]) != said(reference["solo control"][0])

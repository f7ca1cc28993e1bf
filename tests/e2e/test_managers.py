# SPDX-License-Identifier: Apache-2.0
"""Managers of the encoder cache in a real engine, whose device holds two pictures.

The engine is a consumer: what it encodes itself is stored nowhere. So one picture has to be encoded
again when the device gives it up, and another one comes back from this node's disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    LOADS,
    MISSES,
    OPTIONS,
    Answer,
    Corpus,
    Gallery,
    Record,
    Scenario,
    record,
    said,
    settings,
    until_index_is_read,
)

_ENCODE_S = 2.0
# Of the corpus, and not.
_STORED, _OTHER_STORED = "left", "middle"
_NOWHERE, _TEACHERS = "control", ("down", "resting")
_MANAGERS = ("LRUEncoderCacheManager", "TieredEncoderCacheManager")


@dataclass(frozen=True)
class _Run:
    """What one engine was asked.

    Attributes:
        first: The picture that is nowhere, one of the corpus, and another of the corpus.
        again: The picture that is nowhere, once more.
        answers: To pictures of the corpus, by their purposes.
    """

    first: Record
    again: Record
    answers: dict[str, Answer]
    log: str


@pytest.fixture(scope="module", params=_MANAGERS)
def run(
    request: pytest.FixtureRequest,
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> tuple[str, _Run]:
    manager = request.param
    options: dict[str, Any] = {
        **OPTIONS,
        # An answer from the prefix cache would need no embedding.
        "enable_prefix_caching": False,
        "ec_manager_config": {"encoder_cache_manager_cls": f"s3ec.{manager}"},
    }
    with EngineProcess(
        gemma,
        ec=ec_config("ec_consumer", settings(local_s3, corpus.bucket, workdir / f"{manager}-tier")),
        log_path=workdir / f"{manager}.log",
        media=workdir,
        env=local_s3.env() | ONE_PROCESS,
        options=options,
        nursery=nursery,
    ) as engine:
        until_index_is_read(engine, len(corpus.objects))
        # Each picture of the corpus comes to this node's disk; what they cost is learned there.
        warm = Scenario("warm", [gallery.solo(name) for name in (_STORED, _OTHER_STORED)])
        answers = record(engine, warm).answers
        engine.slow_encoder(_ENCODE_S)
        for teacher in _TEACHERS:  # what the first encode takes does not count
            record(engine, Scenario("learn", [gallery.solo(teacher)]))
        asked = [gallery.solo(_NOWHERE), gallery.solo(_STORED), gallery.solo(_OTHER_STORED)]
        first = record(engine, Scenario("first", asked))
        again = record(engine, Scenario("again", [gallery.solo(_NOWHERE)]))
        log = engine.log
    by_purpose = dict(zip((_STORED, _OTHER_STORED), answers, strict=True))
    return manager, _Run(first, again, by_purpose, log)


def test_answers_are_those_of_vllms_own_manager(
    run: tuple[str, _Run], reference: dict[str, list[Answer]]
) -> None:
    _, found = run
    for purpose, answer in found.answers.items():
        assert said(answer) == said(reference[f"solo {purpose}"][0])


def test_the_log_says_which_manager_is_active(run: tuple[str, _Run]) -> None:
    manager, found = run
    assert f"{manager} for " in found.log


def test_only_the_cost_aware_one_keeps_what_must_be_encoded_again(
    run: tuple[str, _Run],
) -> None:
    manager, found = run
    assert found.first.moved.get(MISSES, 0) == 1
    encoded_again = found.again.moved.get(MISSES, 0)
    assert encoded_again == (0 if manager.startswith("Tiered") else 1)
    assert found.again.moved.get(LOADS, 0) == 0

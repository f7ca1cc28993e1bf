# SPDX-License-Identifier: Apache-2.0
"""The cost-aware manager of the encoder cache in a real engine, whose device holds two pictures.

The engine is a consumer: what it encodes itself is stored nowhere. So one picture has to be encoded
again when the device gives it up, and another one comes back from this node's disk. What the other
manager does instead is in tests/unit/managers and, with vLLM's scheduler, in tests/fuzz.
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
_MANAGER = "TieredEncoderCacheManager"


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


@pytest.fixture(scope="module")
def run(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> _Run:
    options: dict[str, Any] = {
        **OPTIONS,
        # An answer from the prefix cache would need no embedding.
        "enable_prefix_caching": False,
        "ec_manager_config": {"encoder_cache_manager_cls": f"s3ec.{_MANAGER}"},
    }
    with EngineProcess(
        gemma,
        ec=ec_config("ec_consumer", settings(local_s3, corpus.bucket, workdir / "manager-tier")),
        log_path=workdir / "manager.log",
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
    return _Run(first, again, by_purpose, log)


def test_answers_are_those_of_vllms_own_manager(
    run: _Run, reference: dict[str, list[Answer]]
) -> None:
    for purpose, answer in run.answers.items():
        assert said(answer) == said(reference[f"solo {purpose}"][0])


def test_the_log_says_that_it_is_active(run: _Run) -> None:
    assert f"{_MANAGER} for " in run.log


def test_what_would_have_to_be_encoded_again_stays_on_the_device(run: _Run) -> None:
    assert run.first.moved.get(MISSES, 0) == 1
    assert not {MISSES, LOADS} & run.again.moved.keys()

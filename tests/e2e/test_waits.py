# SPDX-License-Identifier: Apache-2.0
"""``wait: auto`` in a real engine, whose encoder is fast and whose bucket is slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Delay
from s3ec.dev.rigs.vllm_cpu import STEADY
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    MISSES,
    OPTIONS,
    Answer,
    Corpus,
    Gallery,
    Record,
    Scenario,
    healthy,
    record,
    said,
    settings,
    until_index_is_read,
)
from tests.support.waiting import eventually

# Many times what this model's encoder takes, also on a busy machine; less than `defer_timeout_s`.
_DELAY_S = 8.0
_DECLINED = "vllm:s3ec_waits_declined"
_ENCODED_ROWS = "vllm:s3ec_encoded_rows"
_ROUNDS = 4  # a picture each


@dataclass
class _Run:
    rounds: list[Record]
    corpus: Corpus
    tier: Path


@pytest.fixture(scope="module")
def run(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> Iterator[_Run]:
    tier = workdir / "waits-tier"
    with FaultProxy(local_s3.endpoint_url) as proxy:
        more = {"wait": "auto", "defer_timeout_s": 30.0, "read_timeout_s": 60.0, "hedge": False}
        values = settings(local_s3, corpus.bucket, tier, **more) | {"endpoint_url": proxy.url}
        with EngineProcess(
            gemma,
            ec=ec_config("ec_consumer", values),
            log_path=workdir / "waits.log",
            media=workdir,
            env=local_s3.env() | STEADY,
            options=OPTIONS,
            nursery=nursery,
        ) as engine:
            until_index_is_read(engine, len(corpus.objects))
            proxy.add(Rule(Delay(_DELAY_S), method="GET", target="/objects/"))
            rounds = []
            for number in range(_ROUNDS):
                prompt, _ = healthy(gallery, number)
                rounds.append(record(engine, Scenario("", (prompt,), False)))
            objects = [
                tier
                / "v1"
                / "objects"
                / corpus.objects[f"healthy-{number}"].replace("/objects/", "/")
                for number in range(_ROUNDS)
            ]
            eventually(lambda: all(path.exists() for path in objects), "all come to the tier")
            yield _Run(rounds, corpus, tier)


def test_pictures_are_encoded_at_once_and_the_answers_are_right(
    run: _Run, reference: dict[str, list[Answer]]
) -> None:
    for number, seen in enumerate(run.rounds):
        assert [said(one) for one in seen.answers] == [
            said(one) for one in reference[f"healthy {number}"]
        ]
    assert [(seen[MISSES], seen[HITS]) for seen in run.rounds] == [(1, 0)] * _ROUNDS
    assert sum(seen[_DECLINED] for seen in run.rounds) >= _ROUNDS


def test_what_was_encoded_was_measured_in_the_worker(run: _Run) -> None:
    # Seconds are measured with the rows; vLLM's own reader of metrics shows whole ones only.
    assert sum(seen[_ENCODED_ROWS] for seen in run.rounds) > 0

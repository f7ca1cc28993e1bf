# SPDX-License-Identifier: Apache-2.0
"""What encoding costs is learned and used; what is worth storing.

The encoder of the engine (``ec_both``, `save` = worth) takes 1.5 s a picture, since vLLM's own
reader of metrics shows whole seconds only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    MISSES,
    OPTIONS,
    SAVES,
    Gallery,
    Prompt,
    Record,
    Scenario,
    eventually,
    keys,
    record,
    settings,
)

_ENCODE_S = 1.5
_ENCODE_SECONDS = "vllm:s3ec_encode_seconds"
_SAVED_SECONDS = "vllm:s3ec_saved_encoder_seconds"
_DECLINED_FIRST = "vllm:s3ec_saves_declined{reason=first}"
_WAITS_DECLINED = "vllm:s3ec_waits_declined"
# The encoder cache holds two pictures: two others in between push one out.
_PICTURE, _OTHERS = "left", ("middle", "right")


@dataclass
class _Run:
    """What was asked of the engine, in order.

    Attributes:
        once, twice: The picture is encoded for the first and for the second time.
        stored: Objects in the bucket before and after the second time.
        hit: The picture is asked for once more.
        learned: What the engine has learned of encoding, by kind.
    """

    once: Record
    twice: Record
    stored: tuple[int, int]
    hit: Record
    learned: dict[str, float]


@pytest.fixture(scope="module")
def run(
    workdir: Path, gallery: Gallery, gemma: Path, local_s3: LocalS3, nursery: EngineForkServer
) -> Iterator[_Run]:
    bucket, tier = local_s3.create_bucket("costs"), workdir / "costs-tier"
    client = local_s3.client()

    def engine(role: str, log: str) -> EngineProcess:
        more = {"save": "worth", "wait": "auto", "defer_timeout_s": 60.0, "read_timeout_s": 60.0}
        return EngineProcess(
            gemma,
            ec=ec_config(role, settings(local_s3, bucket, tier, **more)),
            log_path=workdir / log,
            media=workdir,
            env=local_s3.env() | ONE_PROCESS,
            options=OPTIONS,
            nursery=nursery,
        )

    def ask(of: EngineProcess, *prompts: Prompt) -> Record:
        return record(of, Scenario("", prompts))

    def others(word: str) -> list[Prompt]:
        return [gallery.again(name, word) for name in _OTHERS]

    def objects() -> int:
        return sum("/objects/" in key for key in keys(client, bucket))

    with engine("ec_both", "costs.log") as first:
        first.slow_encoder(_ENCODE_S)
        once = ask(first, gallery.solo(_PICTURE), *others("first"))
        before = objects()
        twice = ask(first, gallery.again(_PICTURE, "second"))
        # Not by the counts, which come with the engine's steps.
        eventually(lambda: objects() > before, "it is stored")
        after = objects()
        first.chat(others("then"), max_tokens=1)
        hit = ask(first, gallery.again(_PICTURE, "third"))
        learned = first.learned_costs()
    yield _Run(once, twice, (before, after), hit, learned)
    local_s3.delete_bucket(bucket)


def test_embedding_is_stored_at_the_second_encode_only(run: _Run) -> None:
    assert (run.once[MISSES], run.once[SAVES], run.once[_DECLINED_FIRST]) == (3, 0, 3)
    assert (run.twice[MISSES], run.twice[_DECLINED_FIRST]) == (1, 0)
    assert run.stored == (0, 1)


def test_cost_of_encoding_is_learned(run: _Run) -> None:
    assert run.once[_ENCODE_SECONDS] >= 2
    ((kind, row_s),) = run.learned.items()
    assert kind.startswith("image:")
    assert row_s >= _ENCODE_S / 64  # rows of a picture


def test_a_hit_counts_what_the_encoder_would_have_taken(run: _Run) -> None:
    assert (run.hit[HITS], run.hit[MISSES]) == (1, 0)
    assert run.hit[_SAVED_SECONDS] >= 1
